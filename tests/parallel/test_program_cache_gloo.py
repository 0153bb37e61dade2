"""A program that is read from a cache is the one that would be compiled: its numbers, and all that is said of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from processes import Ranks, ranks_of
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from autopar.ir.program import record
from autopar.ir.text.text import print_program

pytestmark = pytest.mark.gloo
STEPS = 2
Case = tuple[str, str, dict[str, Any]]
CASES: tuple[Case, ...] = (
    ("short_gpt", "dp=2", {"zero": 3, "recompute": "selective"}),
    ("short_gpt", "pp=2", {"microbatches": 2, "chunks": 2, "schedule": "interleaved-1f1b"}),
    ("mlp", "dp=2", {"batch": "local"}),
    ("mlp", "dp=2", {"batch": "ddp"}),
)
SLOW: tuple[Case, ...] = (
    ("short_gpt", "dp=2", {"zero": 1}),
    ("short_gpt", "tp=2", {"sequence_parallel": True}),
    ("short_gpt", "cp=2", {"precision": "bf16"}),
    ("short_gpt", "pp=2", {"microbatches": 3}),
    ("mlp", "pp=2", {"microbatches": 2, "schedule": "zb-h1"}),
)


def _run(case: Case, cache: str | None) -> tuple[list[Any], list[str], bool]:
    """Two training steps and an evaluation: every number, all that is said of the programs, and whether all of them
    were read."""
    name, mesh, options = case
    model, loss_fn, batch = getattr(models, name)()
    parallel = autopar.parallelize(model, mesh, loss_fn=loss_fn, cache=cache, **options)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    numbers: list[Any] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        numbers.append(parallel.forward_backward(*batch).item())
        numbers.append({n: g.tolist() for n, g in parallel.full_gradients().items()})
        optimizer.step()
    parallel.eval()
    numbers.append(parallel(batch[0]).tolist())
    numbers.append({n: p.tolist() for n, p in parallel.full_state_dict().items()})
    said = _said(parallel) if torch.distributed.get_rank() == 0 else []  # the same on all ranks
    return numbers, said, all(one.compiled.is_read for one in parallel.programs)


def _said(parallel: autopar.ParallelModule) -> list[str]:
    """What users are told of the programs."""
    said: list[str] = []
    for running in parallel.programs:
        compiled = autopar.compiled.Compiled.of(running.compiled)
        said += [f"{name}\n{print_program(program)}" for name, program in compiled.history]
        flops = {node.name: record(node).flops for node in dict(compiled.history)["propagate"].calls()}
        said += compiled.lines()
        said += [str(compiled.collectives), str(compiled.plan), str(compiled.ranks[0].instructions), str(flops)]
        said += [str(compiled.owners), str(compiled.layouts), str(compiled.decided), running.runner.source or ""]
        said += [str(compiled.time())] if running.kind.trains else []
    parameter = next(name for name, _ in parallel.original.named_parameters())
    assert parallel.compiled is not None
    return [*said, str(parallel.compiled.explain(parameter))] if "tp" in parallel.compiled.mesh else said


def _compared(rank: int, case: Case, cache: str) -> list[str]:
    plain, said, _ = _run(case, None)
    kept, _, was_read = _run(case, cache)
    again, said_again, is_read = _run(case, cache)
    wrong = [] if plain == kept == again else ["numbers"]
    wrong += ["what is said"] * (said != said_again)
    # the first rank compiles, and the others read what it kept
    return wrong + ["a program was compiled"] * (not is_read) + ["read at first"] * (was_read != (rank == 1))


@pytest.fixture(scope="module")
def ranks() -> Any:
    with ranks_of(2) as found:
        yield found


@pytest.mark.parametrize("case", (*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)), ids=str)
def test_a_program_that_is_read_is_the_one_that_would_be_compiled(ranks: Ranks, case: Case, tmp_path: Path) -> None:
    assert ranks.run(_compared, case, str(tmp_path), timeout=200) == [[], []]


# -- without a folder -------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Code that reads a number of the module's."""

    def __init__(self, scale: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.scale = nn.Linear(6, 4), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh() * self.scale


class Timed(Scaled):
    """Code that reads a clock, which says something else at each time."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(time.time() > 0)


class Ranked(Scaled):
    """Code that asks which rank it is: what rank 0 compiled is no other one's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + dist.get_rank())


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _handed(rank: int) -> dict[str, Any]:
    """What comes of programs where ranks are more than cores: on each rank whether it read them, or what was said."""
    found: dict[str, Any] = {}
    for name, model, options in (
        ("alike", Scaled(), {}), ("patient", Scaled(), {"timeout": 299}), ("clock", Timed(), {}),
    ):  # fmt: skip
        parallel = autopar.parallelize(model, "dp=2", loss_fn=_loss, **options)
        parallel.prepare(torch.ones(4, 6))
        found[name] = parallel.programs[0].compiled.is_read
    for name, model in (("unlike", Scaled(0.5 + rank)), ("ranked", Ranked()), ("unable", Unable())):
        parallel = autopar.parallelize(model, "dp=2", loss_fn=_loss)
        with pytest.raises(AutoparError) as refused:
            parallel.prepare(torch.ones(4, 6))
        found[name] = f"{type(refused.value).__name__}: {refused.value}".partition("\n")[0]
    return found


class Unable(nn.Module):
    """What no compiler takes: its shape hangs on data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sort(0)[0][: int(torch.unique(x).numel())]


def _handed_numbers(rank: int, case: Case) -> tuple[bool, bool, bool]:
    """Whether each rank compiles where cores are enough, whether the last one reads where they are not, and whether
    the numbers are the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        compiled, _, was_read = _run(case, None)
        patch.setenv("LOCAL_WORLD_SIZE", "4096")
        handed, _, is_read = _run(case, None)
    return not was_read, is_read == (rank == 1), compiled == handed


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_ranks_without_cores_of_their_own_read_what_rank_0_compiles(ranks: Ranks, case: Case) -> None:
    assert ranks.run(_handed_numbers, case) == [(True, True, True)] * 2


def _crowded(rank: int) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "4096")
        return _handed(rank)


def test_what_a_rank_does_not_read_it_compiles(ranks: Ranks) -> None:
    first, second = ranks.run(_crowded)
    assert not any(first[name] for name in ("alike", "patient", "clock"))
    assert [second[name] for name in ("alike", "patient", "clock")] == [True, False, False]
    for name in ("unlike", "ranked"):
        assert first[name] == second[name] == "RankError: ranks disagree on the program:", name
    assert first["unable"] == second["unable"] and first["unable"].startswith("CaptureError")
