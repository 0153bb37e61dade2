"""Calls that every rank must make: another call meanwhile is an error on all ranks within seconds, with both lines."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from processes import Ranks
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import autopar
from autopar.errors import RankError, name_ranks

pytestmark = pytest.mark.gloo
SECONDS = 10.0  # a loaded machine's seconds


def make(mesh: str = "dp=2", **options: Any) -> autopar.ParallelModule:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8))
    return autopar.parallelize(model, mesh, loss_fn=models.square_loss, **options)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(12, 16), torch.randn(12, 8)


def line_of(mark: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"{Path(__file__).name}:{next(i for i, line in enumerate(lines, 1) if line.endswith(f'  # {mark}'))}"


def test_ranks_in_few_words() -> None:
    assert [name_ranks(r) for r in ([3], [2, 0, 1, 5], range(4096))] == ["rank 3", "ranks 0-2, 5", "ranks 0-4095"]


# -- other calls ----------------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[autopar.ParallelModule], Any]] = {
    "full_state_dict": lambda model: model.full_state_dict(),  # call 0
    "full_gradients": lambda model: model.full_gradients(),  # call 1
    "check_replicas": lambda model: model.check_replicas(),  # call 2
    "forward": lambda model: model(batch()[0]),  # call 3
    "prepare": lambda model: model.prepare(*batch()),  # call 4
    "parallelize": lambda model: make(),
}


OPERATIONS: dict[str, Callable[[autopar.ParallelModule], Any]] = {
    "full_tensor": lambda model: model.original[0].weight.full_tensor(),
    "_foreach_norm": lambda model: clip_grad_norm_(model.parameters(), 1.0),
    "max": lambda model: float(model.original[0].weight.max()),
}


def _operations(rank: int, mesh: str, options: dict[str, Any]) -> list[str]:
    """As `_branches`, with what tensors do that lie in parts on the ranks."""
    model = make(mesh, **options)
    model.forward_backward(*batch())
    errors = []
    for operation in OPERATIONS.values():
        with pytest.raises(RankError) as caught:
            if rank == 0:
                operation(model)
            else:
                model.forward_backward(*batch())
        errors.append(str(caught.value))
    for operation in OPERATIONS.values():
        operation(model)
    model.forward_backward(*batch())
    return errors


@pytest.mark.parametrize(("mesh", "options"), [("tp=2", {}), ("dp=2", {"zero": 3}), ("pp=2", {"microbatches": 2})])
def test_an_operation_in_a_branch_is_named(two: Ranks, mesh: str, options: dict[str, Any]) -> None:
    first, second = two.run(_operations, mesh, options)
    assert first == second
    for name, said in zip(OPERATIONS, first, strict=True):
        assert re.match(rf"rank 0 calls \S*{name}\S*\(\) at \S+, rank 1 calls forward_backward\(\) at ", said), said


def _branches(rank: int) -> list[str]:
    model = make()
    model.forward_backward(*batch())
    errors = []
    for call in CALLS.values():
        with pytest.raises(RankError) as caught:
            if rank == 0:
                call(model)
            else:
                model.forward_backward(*batch())  # the step
        errors.append(str(caught.value))
    model.forward_backward(*batch())  # the ranks are still in step
    return errors


def test_a_call_in_a_branch_names_both_lines(two: Ranks) -> None:
    """Red before: rank 0 waited for the others until the backend's timeout, or they ran into each other's data."""
    outcomes = two.attempt(_branches, timeout=40)
    assert [o.error for o in outcomes] == [None, None] and outcomes[0].value == outcomes[1].value
    for i, (name, said) in enumerate(zip(CALLS, outcomes[0].value, strict=True)):
        line = r"test_announce\.py:\d+" if name == "parallelize" else re.escape(line_of(f"call {i}"))
        other = rf"rank 1 calls forward_backward\(\) at {re.escape(line_of('the step'))}"
        told = r"every rank must make the same calls\. Under `if rank == 0:` .+"
        pattern = rf"rank 0 calls {name}\(\) at {line}, {other}: {told}"
        assert re.fullmatch(pattern, said), said


# -- one call more --------------------------------------------------------------------------------------------------


def _loop(rank: int, model: autopar.ParallelModule, more: int, accumulate: int = 1) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        for _ in range(accumulate + (more if rank == 1 and step == 1 else 0)):
            model.forward_backward(*batch())  # in the loop
        optimizer.step()
        optimizer.zero_grad()


def _one_more(rank: int, mesh: str, accumulate: int, options: dict[str, Any]) -> None:
    _loop(rank, make(mesh, **options), 1, accumulate)


@pytest.mark.parametrize(
    ("mesh", "accumulate", "options"),
    [("dp=2", 1, {}), ("dp=2", 3, {"zero": 3}), ("tp=2", 2, {}), ("pp=2", 1, {"microbatches": 2})],
)
def test_a_step_more_on_one_rank_is_found(two: Ranks, mesh: str, accumulate: int, options: dict[str, Any]) -> None:
    """Red before: its second step paired with the others' next one, and both trained on."""
    outcomes = two.attempt(_one_more, mesh, accumulate, options, timeout=40)
    step = f"forward_backward() at {line_of('in the loop')} after"
    text = (
        f"RankError: rank 0 calls {step} 0 forward_backward() since its weights changed, "
        f"rank 1 calls {step} {accumulate} forward_backward() since its weights changed: "
        "a rank made a call, or a step of an optimizer, that the others did not make."
    )
    assert [outcome.error for outcome in outcomes] == [text, text]
    assert max(outcome.seconds for outcome in outcomes) < SECONDS


def _torn(rank: int) -> list[str]:
    """Rank 0 saves before the optimizer's step, rank 1 after it; then only rank 1 empties its gradients."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    errors = []
    model.forward_backward(*batch())
    with pytest.raises(RankError) as caught:
        if rank == 1:
            optimizer.step()
        model.full_state_dict()
    errors.append(str(caught.value))
    if rank == 0:
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(RankError) as caught:
        model.forward_backward(*batch())
    errors.append(str(caught.value))
    return errors


def test_a_state_of_two_steps_is_not_saved(two: Ranks) -> None:
    first, second = two.run(_torn)
    assert first == second
    assert (
        "0 calls full_state_dict()" in first[0] and "after 1 forward_backward() since its weights changed" in first[0]
    )
    assert "after 0 forward_backward() since its weights changed and 1 since its gradients were None" in first[1]


# -- no false alarm -------------------------------------------------------------------------------------------------


def _healthy(rank: int, mesh: str, options: dict[str, Any]) -> None:
    model = make(mesh, **options)
    some = list(model.parameters())[:1]  # of the first stage, if there are stages
    average = [p.detach().clone() for p in model.parameters()]
    optimizers: list[Any] = [
        torch.optim.AdamW(some),
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        torch.optim.Adagrad(model.parameters(), foreach=True),
        torch.optim.Adam(model.parameters(), fused=True),
    ]
    for step in range(6):
        optimizer = optimizers[step % len(optimizers)]
        for _ in range(1 + step % 2):
            model.forward_backward(*batch())
        if step == 2:
            optimizer.zero_grad()  # an update left out, as after an overflow
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        model.full_state_dict()
        with torch.no_grad():
            for p, a in zip(model.parameters(), average, strict=True):
                a.lerp_(p, 0.1)
            if step == 3:  # written by hand, in one parameter
                some[0].mul_(0.99)
            if step == 4:
                for p, a in zip(model.parameters(), average, strict=True):
                    p.copy_(a)
        if rank == 0:
            float(torch.ones(3).sum())
        model(batch()[0])
        model.full_gradients()
    model.load_state_dict(model.state_dict())
    model.forward_backward(*batch())


@pytest.mark.parametrize(
    ("mesh", "options"),
    [("dp=2", {"zero": 3}), ("tp=2", {}), ("pp=2", {"microbatches": 2}), ("dp=2", {"precision": "fp16"})],
)
def test_healthy_loops_raise_nothing(two: Ranks, mesh: str, options: dict[str, Any]) -> None:
    two.run(_healthy, mesh, options)


def _overflow(rank: int) -> int:
    model = make(precision="fp16")
    optimizer = torch.optim.AdamW(model.parameters())
    assert model.loss_scale is not None
    for step in range(4):
        model.loss_scale.scale = 2.0**60 if step == 1 else 8.0
        model.forward_backward(*batch())
        optimizer.step()
        optimizer.zero_grad()
    return model.loss_scale.skipped


def test_an_overflow_is_no_missing_step(two: Ranks) -> None:
    assert two.run(_overflow) == [1, 1]


def _exchanges(rank: int) -> list[int]:
    """How often ranks compare their calls, in calls that gather each of many parameters."""
    model = make(zero=3)
    model.forward_backward(*batch())
    agreement, counts = model._session.agreement, []
    compare = agreement.check

    def counted(*args: Any, **kwargs: Any) -> bool:
        counts.append(1)
        return compare(*args, **kwargs)

    agreement.check = counted
    model.full_state_dict()
    found = [len(counts)]
    model.full_gradients()
    return [*found, len(counts) - found[0]]


def test_a_call_announces_itself_once(two: Ranks) -> None:
    assert two.run(_exchanges) == [[1, 1], [1, 1]]


def _gradients_of_some(rank: int) -> None:
    model = make(zero=3)
    model.forward_backward(*batch())
    if rank == 1:
        next(iter(model.parameters())).grad = None
    with pytest.raises(RankError, match=r"ranks disagree on the parameters that have gradients:\n  rank \d has '"):
        model.full_gradients()


def test_full_gradients_of_ranks_that_have_others(two: Ranks) -> None:
    two.run(_gradients_of_some)
