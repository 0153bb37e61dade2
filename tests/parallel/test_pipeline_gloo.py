"""Pipelines on real processes: training, clipping, state, forward passes and lost ranks, against one device."""

from __future__ import annotations

import copy
import functools
import os
import re
import signal
from typing import Any

import gpt
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import Ranks, ranks_of
from torch import Tensor, nn

import autopar

pytestmark = pytest.mark.gloo
SECONDS = 25.0  # of a loaded machine, with the compilation
TOLERANCE = 1e-12


def tiny(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    config = gpt.GPTConfig(vocabulary=24, context=8, layers=2, heads=2, width=12, dropout=dropout)
    return gpt.GPT(config).double()


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-1)


def batch(step: int, rows: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randint(0, 24, (rows, 8), generator=generator) for _ in range(2))
    y[:5, 2:] = -1
    return x, y


def number(value: Any) -> float:
    return float(value.full_tensor() if hasattr(value, "full_tensor") else value)


def _train(rank: int, mesh: str, options: dict[str, Any], *, smaller: bool = True) -> list[float]:
    """Differences to one device: losses, gradient norms, weights, outputs, with `smaller` a smaller batch's loss."""
    model = tiny()
    plain = copy.deepcopy(model)
    parallel = autopar.parallelize(model, mesh, loss_fn=loss_fn, **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (parallel, plain)]
    found = []
    for step in range(3):
        loss, expected = parallel.forward_backward(*batch(step)), loss_fn(plain, *batch(step))
        expected.backward()
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (parallel, plain)]
        found += [number(loss) - number(expected), number(norms[0]) - number(norms[1])]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    x, y = batch(3)
    with torch.no_grad():
        found.append((parallel(x) - plain(x)).abs().max().item())
    state = parallel.full_state_dict()
    assert (rank == 0) == bool(state)
    if state:
        assert list(state) == list(plain.state_dict())
        found.append(max((state[name] - value).abs().max().item() for name, value in plain.state_dict().items()))
    if smaller:
        found.append(number(parallel.forward_backward(x[:10], y[:10])) - number(loss_fn(plain, x[:10], y[:10])))
    return found


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("pp=2", {"microbatches": 4}),
        ("pp=2", {"microbatches": 2, "schedule": "zb-v"}),
        ("pp=2", {"microbatches": 4, "schedule": "dualpipev"}),
        ("pp=2", {"microbatches": 2, "slices": 4, "schedule": "seq1f1b"}),
        ("pp=2", {"microbatches": 2, "slices": [4, 2, 1, 1], "schedule": "seq1f1b"}),
        ("dp=2", {"microbatches": 3}),
    ],
)
def test_training_on_two_ranks(two: Ranks, mesh: str, options: dict[str, Any]):
    for found in two.run(_train, mesh, options):
        assert max(map(abs, found)) < TOLERANCE, found


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("pp=2,dp=2", {"microbatches": 3, "schedule": "zb-h1"}),
        ("tp=2,pp=2", {"microbatches": 4, "schedule": "interleaved-1f1b", "sequence_parallel": True}),
        ("pp=4", {"microbatches": 6}),
    ],
)
def test_training_on_four_ranks(four: Ranks, mesh: str, options: dict[str, Any]):
    for found in four.run(functools.partial(_train, smaller=False), mesh, options):
        assert max(map(abs, found)) < TOLERANCE, found


def _memory(rank: int) -> tuple[int, int, int]:
    """The elements of parameters, gradients and Adam's state that a rank holds."""
    model = autopar.parallelize(tiny(), "pp=2", loss_fn=loss_fn, microbatches=4)
    optimizer = torch.optim.AdamW(model.parameters())
    model.forward_backward(*batch(0))
    optimizer.step()
    held = sum(p.to_local().numel() for p in model.parameters())
    gradients = sum(p.grad.to_local().numel() for p in model.parameters())
    states = sum(v.to_local().numel() for s in optimizer.state.values() for v in s.values() if v.ndim)
    return held, gradients, states


def test_a_rank_holds_its_own_stages_only(two: Ranks):
    total = sum(p.numel() for p in tiny().parameters())
    found = two.run(_memory)
    assert sum(held for held, _, _ in found) == total
    for held, gradients, states in found:
        assert 0.25 * total < held < 0.75 * total
        assert gradients == held and states == 2 * held


def _local(rank: int) -> float:
    """Each dp rank passes its own rows; ranks of one dp coordinate pass the same."""
    model = tiny(dropout=0.1)
    whole = autopar.parallelize(copy.deepcopy(model), "dp=2,pp=2", loss_fn=loss_fn, microbatches=3)
    parallel = autopar.parallelize(model, "dp=2,pp=2", loss_fn=loss_fn, microbatches=3, batch="local")
    x, y = batch(0)
    mine = slice(0, 12) if rank < 2 else slice(12, 24)
    return number(parallel.forward_backward(x[mine], y[mine])) - number(whole.forward_backward(x, y))


def test_a_batch_of_each_ranks_own(four: Ranks):
    assert four.run(_local) == [0.0] * 4


def _masks(rank: int) -> list[float]:
    """Losses with dropout under several numbers of micro-batches and schedules."""
    found = []
    for options in ({"microbatches": 1}, {"microbatches": 6}, {"microbatches": 4, "schedule": "zb-h2"}):
        parallel = autopar.parallelize(tiny(dropout=0.3), "pp=2", loss_fn=loss_fn, **options)
        found += [number(parallel.forward_backward(*batch(step))) for step in range(2)]
    return found


def test_masks_do_not_depend_on_microbatches(two: Ranks):
    for found in two.run(_masks):
        assert torch.tensor(found).reshape(3, 2).std(0).max() < TOLERANCE and found[0] != found[1], found


class Counting(nn.Module):
    """Buffers that forward writes: once a step, whatever the micro-batches; on every rank alike."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        self.calls += 1
        self.seen += h.detach().sum(0)
        return self.down(h)


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _buffers(rank: int) -> tuple[int, float]:
    torch.manual_seed(0)
    model = Counting().double()
    plain = copy.deepcopy(model)
    parallel = autopar.parallelize(model, "pp=2", loss_fn=square, microbatches=4)
    for step in range(2):
        x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        parallel.forward_backward(x)
        square(plain, x)
    return int(parallel.calls), (parallel.seen - plain.seen).abs().max().item()


def test_buffers_are_written_once_a_step(two: Ranks):
    for calls, error in two.run(_buffers):
        assert calls == 2 and error < TOLERANCE


def _refused(rank: int) -> str:
    parallel = autopar.parallelize(tiny(), "pp=2", loss_fn=loss_fn, microbatches=5)
    try:
        parallel.forward_backward(*batch(0))
    except autopar.errors.BatchError as error:
        return str(error)
    return "nothing"


def test_errors_are_the_same_on_all_ranks(two: Ranks):
    first, second = two.run(_refused)
    assert first == second and first.startswith("microbatches=5 does not divide the 24 samples")


def _die(rank: int, moment: int) -> None:
    """Rank 2 is killed in the middle of its list: at its `moment`-th send."""
    parallel = autopar.parallelize(tiny(), "pp=4", loss_fn=loss_fn, microbatches=6)
    parallel.prepare(*batch(0))
    sends, calls = dist.isend, 0

    def last(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return sends(*args, **kwargs)

    if rank == 2:
        dist.isend = last
    for step in range(3):
        parallel.forward_backward(*batch(step))


def test_a_rank_killed_in_mid_schedule_ends_the_others():
    with ranks_of(4) as ranks:
        outcomes = ranks.attempt(_die, 3, timeout=40, fatal=True)
    assert outcomes[2].died
    for rank in (0, 1, 3):
        outcome = outcomes[rank]
        assert outcome.seconds < SECONDS and outcome.error is not None, outcome
        assert re.match(rf"RankError: rank {rank} (\(pp={rank}\) )?lost its peers (at|while) ", outcome.error), outcome
