"""verify(ddp=True): `batch="ddp"` beside what DistributedDataParallel does, in one process and on ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from local_cases import GRADED, RIGHT, Local, mlp
from processes import Ranks
from torch import Tensor, nn

import autopar
from autopar.capture.inputs.containers import map_tensors
from autopar.errors import BatchError, PlanError
from autopar.job import Job
from autopar.parallel import stepping
from autopar.parallel.programs import own_batch
from autopar.parallel.programs.own_batch import AveragedOutputs
from autopar.verification import virtual_side
from autopar.verification.dtypes import cast
from autopar.verification.judge.comparison import Report
from autopar.verification.verify import descent
from autopar.verification.verify_ranks import verify_on_ranks
from benchmarks.spellings.expert_spellings import batch as expert_batch
from benchmarks.spellings.expert_spellings import dropped_hit, spelled


def _dropout(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(F.dropout(model(x), 0.5), y)


def _by_count(model: nn.Module, x: Tensor, y: Tensor, count: Tensor) -> Tensor:
    return (model(x) - y).square().sum() / count.sum()


CASES = {
    "mlp": GRADED,
    "batch norm": RIGHT["batch norm"],
    "contrast": RIGHT["contrast, said"],
    "own masks": Local(mlp, _dropout, GRADED.batch, (0, 0)),
    "a count of its own": Local(mlp, _by_count, (*GRADED.batch, torch.arange(8.0) + 1), (0, 0, 0)),
    "experts that draw": Local(lambda: spelled(dropped_hit), lambda m, x: m(x), expert_batch(), (0,)),
}


def batches(name: str, *sizes: int) -> list[Any]:
    return [CASES[name].part(sizes, place) for place in range(len(sizes))]


def verified(name: str, mesh: str, sizes: tuple[int, ...], **options: Any) -> Report:
    torch.manual_seed(0)
    case, batch = CASES[name], batches(name, *sizes)
    if "precision" in options:
        batch = map_tensors(lambda x: cast(x, torch.float32), batch)
    return autopar.verify(case.make(), mesh, loss_fn=case.loss, batch=batch, ddp=True, **options)


ROWS = [
    *((name, "dp=2", (5, 3), {}) for name in CASES if name != "experts that draw"),
    ("experts that draw", "dp=2", (6, 10), {}),
    ("batch norm", "dp=3", (3, 2, 3), {"dtype": torch.float32}),
    ("batch norm", "dp=2", (4, 4), {"dtype": torch.float32, "steps": 3}),
    ("mlp", "dp=2", (5, 3), {"dtype": torch.bfloat16}),
    ("mlp", "dp=2,tp=2", (4, 4), {"precision": "bf16"}),
    ("mlp", "dp=2,tp=2", (5, 3), {}),
    ("mlp", "dp=2,pp=2", (4, 4), {"microbatches": 2}),
    ("contrast", "tp=2", (8,), {}),  # one place: as a global batch
]


@pytest.mark.parametrize("name, mesh, sizes, options", ROWS)
def test_what_is_right_is_right(name: str, mesh: str, sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    report = verified(name, mesh, sizes, **options)
    assert report.ok, str(report)
    assert ("as DistributedDataParallel" in str(report)) == (len(sizes) > 1)


def test_it_is_another_step_than_that_of_the_whole_batch() -> None:
    """The mean of unlike batches: what `verify` compares with is not the global step."""
    case = CASES["batch norm"]
    torch.manual_seed(0)
    model = case.make().double()
    x, y = case.batch
    own = autopar.verify(model, "dp=2", loss_fn=case.loss, batch=(x, y), ddp=True)  # cut into 4 and 4
    listed = autopar.verify(model, "dp=2", loss_fn=case.loss, batch=batches("batch norm", 4, 4), ddp=True)
    assert own.ok and [row.error for row in own.rows] == [row.error for row in listed.rows]
    assert {row.name for row in own.rows if row.kind == "aux"} == {"0", "0 of place 1"}


def _no_sum(self: AveragedOutputs, outputs: Any, places: int) -> Any:
    return [value * places for value in SHARES(self, outputs, places)]  # a sum where a mean belongs


def _of_more(self: AveragedOutputs, outputs: Any, places: int) -> Any:
    return SHARES(self, outputs, places * 2)


def _without_gradients(self: AveragedOutputs, outputs: Any, sums: Any) -> None:
    WRITE(AveragedOutputs(self.averaged[:1], self.written), outputs, [sums[0][:1]])


SHARES, WRITE = AveragedOutputs.shares, AveragedOutputs.write
SABOTAGES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "a sum, not the mean": (AveragedOutputs, "shares", _no_sum),
    "the mean of too many": (AveragedOutputs, "shares", _of_more),
    "gradients of one place": (AveragedOutputs, "write", _without_gradients),
    "buffers of each place": (
        AveragedOutputs,
        "of",
        lambda outputs: OF(tuple(x for x in outputs if x.kind != "buffer")),
    ),
}
OF = AveragedOutputs.of


@pytest.mark.parametrize("name", SABOTAGES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_wrong_is_found(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, change = SABOTAGES[name]
    case, sizes = ("batch norm", (4, 4)) if "buffers" in name else ("mlp", (5, 3))
    monkeypatch.setattr(owner, attribute, staticmethod(change) if attribute == "of" else change)
    report = verified(case, "dp=2", sizes, dtype=dtype, steps=1)
    assert not report.ok, str(report)


def test_the_mean_is_named_where_every_program_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AveragedOutputs, "shares", _no_sum)
    report = verified("mlp", "dp=2", (5, 3), steps=1)
    assert report.mismatch is not None and "or the means over all places are wrong" in str(report.mismatch)


def test_one_seed_for_all_places_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_side, "seeds_of", lambda seed, count: [seed] * count)
    assert not verified("own masks", "dp=2", (4, 4), steps=1).ok


# On ranks

ON_RANKS = (
    ("batch norm", (4, 4), torch.float64), ("batch norm", (5, 3), torch.float32), ("mlp", (5, 3), torch.bfloat16),
    ("own masks", (4, 4), torch.float64), ("a count of its own", (3, 5), torch.float64),
    ("experts that draw", (8, 8), torch.float64),
)  # fmt: skip


def _report(name: str, sizes: tuple[int, ...], dtype: torch.dtype, mesh: str = "dp=2") -> Report | None:
    torch.manual_seed(0)
    case = CASES[name]
    job = Job(model=case.make(), loss_fn=case.loss, batch=batches(name, *sizes), optimizer=descent)
    return verify_on_ranks(job, mesh, 2, 0, dtype, ddp=True)


def _table(rank: int, mesh: str, rows: tuple[Any, ...]) -> list[str]:
    found = [_report(*row, mesh) for row in rows]
    return [str(report) for report in found if report is not None and not report.ok]


def _unsummed(outputs: Any, together: AveragedOutputs, world: Any) -> Any:
    return outputs


def _halved(outputs: Any, together: AveragedOutputs, world: Any) -> Any:
    found = own_batch.means(outputs, together, world)
    return tuple(value * 0.99 if at in together.averaged[1:] else value for at, value in enumerate(found))


def _sabotaged(rank: int) -> list[bool]:
    found = []
    for change in (_unsummed, _halved):
        for name, dtype in (("mlp", torch.float64), ("batch norm", torch.float32), ("mlp", torch.bfloat16)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(stepping, "means", change)
                report = _report(name, (4, 4), dtype)
                found.append(report is None or not report.ok)
    return found


@pytest.mark.gloo
def test_on_ranks_too(two: Ranks) -> None:
    assert two.run(_table, "dp=2", ON_RANKS, timeout=120) == [[], []]


@pytest.mark.gloo
def test_on_ranks_beside_tensor_parallelism(four: Ranks) -> None:
    assert four.run(_table, "dp=2,tp=2", ON_RANKS[2:3], timeout=120) == [[]] * 4


@pytest.mark.gloo
def test_what_is_wrong_on_ranks_is_found(two: Ranks) -> None:
    assert two.run(_sabotaged, timeout=120) == [[True] * 6] * 2


# What cannot be


def _said(batch: Any, error: type[Exception] = BatchError, mesh: str = "dp=2", **options: Any) -> str:
    with pytest.raises(error) as caught:
        autopar.verify(mlp(), mesh, loss_fn=F.mse_loss, batch=batch, ddp=True, **options)
    return str(caught.value)


def test_batches_that_ranks_refuse_are_refused() -> None:
    x, y = torch.ones(4, 6), torch.ones(4, 4)
    assert _said([(x, y)] * 3) == (
        "verify(ddp=True): the list has 3 batches, but mesh 'dp=2' has 2 places on its data axes. Write a batch for "
        "each, or a tuple or dict with a batch of all, which is cut."
    )
    assert _said((x[:1], y[:1])) == (
        "verify(ddp=True): argument 0 has 1 samples in dim 0, fewer than the 2 places of the data axes. Write "
        "batch_dims= if another dim counts them (None: no dim does), or a list with a batch for each place."
    )
    assert _said([(x, y), (x, y[0])]) == (
        "verify(ddp=True): the batch of place 1 differs from that of place 0 in more than sizes (structure, number of "
        "dims, dtype or a Python value). On ranks these are alike, and sizes may differ."
    )
    assert "batch=\"ddp\" with zero=2 on mesh 'dp=2'" in _said((x, y), PlanError, zero=2)
