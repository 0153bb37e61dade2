"""Bad input and lost ranks: a clear error within seconds on every rank, and never a hang."""

from __future__ import annotations

import atexit
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import Outcome, Ranks, ranks_of
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, RankError

pytestmark = pytest.mark.gloo
SECONDS = 10.0  # a loaded machine's seconds


def make(mesh: Any = "dp=2", width: int = 24, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 8)).to(dtype)
    if options.pop("frozen", False):
        model.requires_grad_(False)
    return autopar.parallelize(model, mesh, **{"loss_fn": models.square_loss, **options})


def batch(rows: int = 12, shift: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(12, 16), torch.randn(12, 8)
    return x[:rows] + shift, y[:rows]


def branching_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    if int(out.sum()) > 0:  # the branch
        out = out * 2
    return F.mse_loss(out, y)


def unlucky_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    if dist.get_rank() == 1:
        raise ValueError("bad luck")  # the raise
    return F.mse_loss(model(x), y)


def whole_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x)


def whole_number_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x).argmax()


def cut_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x).detach().sum()


def no_loss(model: nn.Module, x: Tensor, y: Tensor) -> None:
    return None


def _step(rank: int, options: dict[str, Any], *rows: int) -> None:
    model = make(**options)
    for count in rows or (12,):
        model.forward_backward(*batch(count))


def _mesh(rank: int, *meshes: str) -> None:
    make(meshes[rank])


def _widths(rank: int) -> None:
    make(width=(24, 32)[rank])


def _dtypes(rank: int) -> None:
    make(dtype=(torch.float32, torch.float64)[rank])


def _seeds(rank: int) -> None:
    make(seed=rank)


def _rows(rank: int, before: bool) -> None:
    """`before`: the common shape is compiled, and one rank comes with it again."""
    model = make()
    if before:
        model.forward_backward(*batch())
    model.forward_backward(*batch(12 - 2 * rank))


def _structures(rank: int) -> None:
    x, y = batch()
    make().forward_backward(*((x, y) if rank else ({"x": x}, y)))


def _calls(rank: int) -> None:
    model = make()
    model.forward_backward(*batch())
    model.forward_backward(*batch()) if rank else model(batch()[0])


def _modes(rank: int) -> None:
    make().train(bool(rank)).forward_backward(*batch())


def _data(rank: int, mesh: str, kind: str) -> None:
    make(mesh, batch=kind).forward_backward(*batch(shift=rank))


def _no_labels(rank: int) -> None:
    make().forward_backward(batch()[0])


def _own_loss(rank: int) -> None:
    make(loss_fn=None).forward_backward(batch()[0])


LOSS = "CaptureError: loss_fn '{}' returned "
CASES: dict[str, tuple[Callable[..., None], tuple[Any, ...], str]] = {
    "mesh of another size": (_step, ({"mesh": "dp=3"},), (
        "MeshError: mesh 'dp=3' has 3 ranks, but 2 are running. Start 3 (autopar run, or torchrun --nproc-per-node=3), "
        "or write -1 for the axis that takes the rest."
    )),
    "mesh that does not parse": (_step, ({"mesh": "dp2"},), (
        "MeshError: mesh 'dp2': cannot read 'dp2'. Write axis=size pairs with commas, e.g. 'dp=2,tp=2'."
    )),
    "other meshes": (_mesh, ("dp=2", "tp=2"), (
        "RankError: ranks disagree on the mesh:\n  rank 1 has 'tp=2' where the others have 'dp=2'\n"
        "Give every rank the same mesh."
    )),
    "other shapes": (_widths, (), (
        "RankError: ranks disagree on the model:\n  rank 1 has "
        "'parameter 0.weight [32, 16] torch.float32' where the others have 'parameter 0.weight [24, 16] torch.float32'"
        "; "
        "'parameter 0.bias [32] torch.float32' where the others have 'parameter 0.bias [24] torch.float32'; "
        "'parameter 2.weight [8, 32] torch.float32' where the others have 'parameter 2.weight [8, 24] torch.float32'\n"
        "Give every rank the same model."
    )),
    "other dtypes": (_dtypes, (), (
        "RankError: ranks disagree on the model:\n  rank 1 has "
        "'parameter 0.weight [24, 16] torch.float64' where the others have 'parameter 0.weight [24, 16] torch.float32'"
        "; "
        "'parameter 0.bias [24] torch.float64' where the others have 'parameter 0.bias [24] torch.float32'; "
        "'parameter 2.weight [8, 24] torch.float64' where the others have 'parameter 2.weight [8, 24] torch.float32'\n"
        "Give every rank the same model."
    )),
    "other options": (_seeds, (), (
        "RankError: ranks disagree on the options:\n  rank 1 has 'seed=1' where the others have 'seed=0'\n"
        "Give every rank the same options."
    )),
    **{f"other batches, {when}": (_rows, (before,), (
        "RankError: ranks disagree on the batch and modes:\n"
        "  rank 1 has 'argument 0 [10, 16] torch.float32' where the others have 'argument 0 [12, 16] torch.float32'; "
        "'argument 1 [10, 8] torch.float32' where the others have 'argument 1 [12, 8] torch.float32'\n"
        "Give every rank the same batch and modes."
    )) for when, before in (("first call", False), ("later call", True))},
    "other structures": (_structures, (), (
        "RankError: ranks disagree on the batch and modes:\n"
        "  rank 1 has 'arguments (*, *)' where the others have 'arguments ({'x': *}, *)'; "
        "'argument 0 [12, 16] torch.float32' where the others have 'argument 0['x'] [12, 16] torch.float32'\n"
        "Give every rank the same batch and modes."
    )),
    "other calls": (_calls, (), (
        "RankError: rank 0 calls forward() at LINE, rank 1 calls forward_backward() at LINE: every rank must make the "
        "same calls. Under `if rank == 0:` may stand what prints and writes files, and no call of the model, as of an "
        "evaluation."
    )),
    "other modes": (_modes, (), (
        "RankError: ranks disagree on the batch and modes:\n"
        "  rank 1 has 'in eval mode: nothing' where the others have 'in eval mode: the root, 0, 1, 2'\n"
        "Give every rank the same batch and modes."
    )),
    "other data": (_data, ("dp=2", "global"), (
        "RankError: ranks were given different data at step 0:\n  rank 1 has other values than rank 0 in argument 0\n"
        'Pass the same whole batch on every rank, or batch="local" if each rank loads a part of its own.'
    )),
    "other data over tp": (_data, ("dp=1,tp=2", "local"), (
        "RankError: ranks were given different data at step 0:\n  rank 1 has other values than rank 0 in argument 0\n"
        'With batch="local", ranks of one dp coordinate pass the same part.'
    )),
    "a batch without labels": (_no_labels, (), (
        "CaptureError: the model failed on the example batch, at the call itself:\n"
        "TypeError: square_loss() missing 1 required positional argument: 'y'\n"
        "loss_fn is called with the model itself, loss_fn(model, *batch), and gives the loss: "
        "loss_fn=lambda model, x, y: F.cross_entropy(model(x), y)."
    )),
    "an indivisible batch": (_step, ({}, 7), (
        "BatchError: the batch has 7 samples (dim 0 of [7, 16], [7, 8]), which axis 'dp' (size 2) cannot divide. Use a "
        "batch size that is a multiple of 2, or a dp of 1 or 7."
    )),
    "an unknown batch=": (_step, ({"batch": "mine"},), (
        "BatchError: batch='mine': write \"global\" (each rank takes its part), \"local\" or \"ddp\"."
    )),
    "a loss of many numbers": (_step, ({"loss_fn": whole_loss},), LOSS.format("whole_loss") + (
        "a tensor of shape [12, 8], but the loss must be a scalar. Reduce it, e.g. with .mean() or .sum(). If the "
        "module returns outputs, pass loss_fn=."
    )),
    "a module that returns no loss": (_own_loss, (), (
        "CaptureError: the module (loss_fn=None) returned a tensor of shape [12, 8], but the loss must be a scalar. "
        "Reduce it, e.g. with .mean() or .sum(). If the module returns outputs, pass loss_fn=."
    )),
    "a loss that is None": (_step, ({"loss_fn": no_loss},), LOSS.format("no_loss") + (
        "NoneType, but a training step needs a scalar loss tensor. Return the loss, a tuple that begins with it, or an "
        "object with .loss; did the batch lack labels?"
    )),
    "a loss of whole numbers": (_step, ({"loss_fn": whole_number_loss},), LOSS.format("whole_number_loss") + (
        "a loss of dtype torch.int64, which has no gradient: return a float."
    )),
    "a loss cut off": (_step, ({"loss_fn": cut_loss},), (
        "CaptureError: the loss of loss_fn 'cut_loss' does not depend on any parameter that requires a gradient. Look "
        "for .detach(), torch.no_grad() or .item() on its way."
    )),
    "nothing to train": (_step, ({"frozen": True},), (
        "CaptureError: the model has no parameter with requires_grad=True: there is nothing to train."
    )),
    "a branch on data": (_step, ({"loss_fn": branching_loss},), (
        "CaptureError: the program depends on the values in a tensor at FILE:the branch\n"
        "    if int(out.sum()) > 0:  # the branch\n"
        "This line has a tensor as a Python integer (int(), range, an index or a size). Pass the number in as a Python "
        "int (each value compiles a program of its own), or use a fixed size and a mask; as a factor or a term leave "
        "it a tensor, x.sum().long(); to look a value up, keep the list as a tensor: table[index]; where it says only "
        "at which place rows begin, queue[:, i : i + 8], read it by .item()."
    )),
    "bad shard patterns": (
        _step,
        ({"mesh": "tp=2", "shard": {"1.weight": "[tp,-]", "0.weight": "[tp]", "2.weight": "[ep,-]", "2.bias": "[tp"}},),
        "LayoutError: shard pattern '1.weight' matches no parameter. Nearest names: 2.weight, 0.weight.\n"
        "'0.weight' has 2 dims [24, 16], but layout [tp] has 1. From shard={\"0.weight\": \"[tp]\"}, used at LINE.\n"
        "'2.weight': layout [ep,-] names axis 'ep', but mesh 'tp=2' has tp. From shard={\"2.weight\": \"[ep,-]\"}, "
        "used at LINE.\n"
        "shard pattern '2.bias': cannot read layout '[tp': write it like '[dp,-,tp]' or '[-,-] partial(tp)'."
    ),
    "an indivisible parameter": (_step, ({"mesh": "tp=2", "width": 25, "shard": {"0.weight": "[tp,-]"}},), (
        "LayoutError: '0.weight' dim 0 (size 25) cannot be split over axis 'tp' (size 2). "
        'From shard={"0.weight": "[tp,-]"}, used at LINE. tp may be 1, 5 or 25 here.'
    )),
}  # fmt: skip


def line_of(mark: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(i for i, line in enumerate(lines, 1) if line.endswith(f'  # {mark}'))}"


def errors_of(outcomes: list[Outcome]) -> list[str]:
    assert all(outcome.error and outcome.seconds < SECONDS for outcome in outcomes), outcomes
    return [re.sub(r" at (models|test_bad_ranks)\.py:\d+", " at LINE", str(outcome.error)) for outcome in outcomes]


@pytest.mark.parametrize("name", CASES)
def test_every_rank_says_what_is_wrong(two: Ranks, name: str) -> None:
    work, args, text = CASES[name]
    text = text.replace("FILE:the branch", line_of("the branch"))
    assert errors_of(two.attempt(work, *args, timeout=30)) == [text, text]


def test_after_an_error_the_ranks_go_on(two: Ranks) -> None:
    """An error that is found before anything runs leaves the ranks in step."""
    two.attempt(_rows, True, timeout=30)
    two.run(_step, {}, timeout=30)


def test_one_rank_fails_alone(two: Ranks) -> None:
    other, own = errors_of(two.attempt(_step, {"loss_fn": unlucky_loss}, timeout=30))
    said = (
        f"CaptureError: the model failed on the example batch, at {line_of('the raise')}\n"
        '    raise ValueError("bad luck")  # the raise\nValueError: bad luck'
    )
    assert own == said
    assert other == f"RankError: the program failed on some ranks, not on this one:\n  rank 1: {said}"


# -- wrong token ids and labels -------------------------------------------------------------------------------------


def _wrong_index(rank: int, mesh: str, which: int, value: int) -> None:
    model, loss_fn, data = models.gpt()
    parallel = autopar.parallelize(model, mesh, loss_fn=loss_fn)
    parallel.forward_backward(*data)
    data[which][3, 4] = value
    parallel.forward_backward(*data)


def index_error(value: int, which: int) -> str:
    also = ", or -100, which is ignored" if which else ""
    place = "" if which else "tokens  "
    return (
        f"index {value} is out of range: the table has 40 entries, so an index is 0 to 39{also}. Correct the token "
        f"ids, labels or places, or enlarge the table.\n  In %NODE = autopar.checked_index  (made by capture)  "
        f"# {place}FILE, of %NODE"
    )


def without_names(text: str) -> str:
    return re.sub(r"\w+\.py:\d+", "FILE", re.sub(r"%\w+", "%NODE", text))


@pytest.mark.parametrize(("which", "value"), [(0, 40), (0, -1), (1, 40), (1, -1)])
def test_an_index_outside_of_a_split_table(two: Ranks, which: int, value: int) -> None:
    """Each rank of tp has half of the table: to each, half of the indices are another's."""
    errors = errors_of(two.attempt(_wrong_index, "tp=2", which, value, timeout=30))
    assert [without_names(error) for error in errors] == [f"BatchError: {index_error(value, which)}"] * 2
    assert ("gpt.py:" if which == 0 else "models.py:") in errors[0]


def test_an_index_that_one_rank_sees() -> None:
    """Row 3 belongs to rank 0, which ends with the error; the other ends because of it."""
    with ranks_of(2) as ranks:
        first, second = errors_of(ranks.attempt(_wrong_index, "dp=2", 0, 40, timeout=30, fatal=True))
    assert without_names(first) == f"BatchError: {index_error(40, 0)}"
    assert second.startswith("RankError: rank 1 (dp=1) lost its peers at %")


# -- ranks that die -------------------------------------------------------------------------------------------------


def _die(rank: int, mesh: str, how: str, moment: int) -> None:
    """The last rank dies at its `moment`-th all-reduce of the second step (0: before the step)."""
    model = make(mesh)
    model.forward_backward(*batch())
    if rank == dist.get_world_size() - 1:
        reduce, calls = dist.all_reduce, 0

        def last(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > moment:
                os._exit(3) if how == "exit" else os.kill(os.getpid(), signal.SIGKILL)
            return reduce(*args, **kwargs)

        dist.all_reduce = last
    for _ in range(3):  # a rank may be done with its step before it can know
        model.forward_backward(*batch())


@pytest.mark.parametrize(("how", "moment"), [("kill", 1), ("exit", 2), ("kill", 0)])
def test_a_rank_that_dies_ends_the_others(how: str, moment: int) -> None:
    with ranks_of(4) as ranks:
        *others, dead = ranks.attempt(_die, "dp=2,tp=2", how, moment, timeout=30, fatal=True)
    assert dead.died
    at_nodes = 0
    for rank, outcome in enumerate(others):
        assert outcome.seconds < SECONDS and outcome.error is not None, outcome
        lines = outcome.error.splitlines()
        inside = rf"rank {rank} \(dp={rank // 2},tp={rank % 2}\) lost its peers at %\w+ = autopar\.all_reduce"
        at = r"while comparing the batch and modes of all ranks in forward_backward\(\) at test_bad_ranks\.py:\d+\.$"
        at_node = re.match(f"RankError: {inside}", lines[0]) is not None
        at_nodes += at_node
        assert at_node or re.match(f"RankError: rank {rank} lost its peers {at}", lines[0]), outcome.error
        met = rf"rank {(rank + 2) % 4}|rank {rank ^ 1}" if at_node else "the other ranks"
        assert re.match(rf"  Look for the first error of ({met})\. The backend says:", lines[1]), lines[1]
    assert (at_nodes > 0) == (moment > 0), others


def _fewer_batches(rank: int) -> None:
    """The script of rank 1 is at its end two steps before that of rank 0."""
    model = make("dp=2")
    for _ in range(2 if rank else 4):
        model.forward_backward(*batch())
    if rank:
        atexit._run_exitfuncs()  # as Python does
        os._exit(0)


def test_a_rank_whose_loop_is_shorter_is_named() -> None:
    """Red before: the other was told to look for an error, of which there is none."""
    with ranks_of(2) as ranks:
        first, second = ranks.attempt(_fewer_batches, timeout=30)
    assert first.error is not None and second.died
    at, words = first.error.splitlines()
    assert re.match(r"RankError: rank 0 lost its peers while comparing .* in forward_backward\(\) at test_bad_r", at), (
        at
    )
    assert words.startswith("  Rank 1 has left after 2 training steps. Every rank must make as many steps: "), words


# -- errors that a loop catches -------------------------------------------------------------------------------------


def _catches(rank: int, mesh: str, row: int) -> list[str]:
    """A loop that leaves out what fails: a label that is wrong in one row, and three good batches behind it."""
    model, loss_fn, data = models.gpt()
    parallel = autopar.parallelize(model, mesh, loss_fn=loss_fn)
    parallel.forward_backward(*data)
    wrong = [each.clone() for each in data]
    wrong[1][row, 4] = 40
    found = []
    for batch in (wrong, data, data):
        try:
            parallel.forward_backward(*batch)
        except AutoparError as error:
            found.append(f"{type(error).__name__}: {error}")
            if isinstance(error, RankError):
                break
    return found


def test_a_loop_goes_on_behind_an_error_that_all_ranks_have(two: Ranks) -> None:
    for found in two.run(_catches, "tp=2", 3, timeout=30):
        assert len(found) == 1 and "index 40 is out of range" in found[0]


def test_a_rank_that_catches_an_error_of_its_own_does_not_meet_the_others() -> None:
    """Its next exchange would meet the collective in which they wait for it: it ends, and so do they."""
    with ranks_of(2) as ranks:
        outcomes = ranks.attempt(_caught_then_ends, timeout=30, fatal=True)
    first, second = (str(outcome.error) for outcome in outcomes)
    assert first.startswith("RankError: rank 0 failed in the middle of its last step, and not all ranks did")
    assert "index 40 is out of range" in first
    assert second.startswith("RankError: rank 1 (dp=1) lost its peers at %")


def _caught_then_ends(rank: int) -> None:
    found = _catches(rank, "dp=2", 3)
    raise RankError(found[-1].removeprefix("RankError: "))
