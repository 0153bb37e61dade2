"""batch="ddp": what DistributedDataParallel does, to the letter, beside it on the same ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from local_cases import GRADED, RIGHT, Local, mlp
from processes import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.errors import AutoparError, BatchError, PlanError

pytestmark = pytest.mark.gloo
SIZES = ((4, 4), (5, 3), (3, 5), (4, 4))


def _by_count(model: nn.Module, x: Tensor, y: Tensor, count: Tensor) -> Tensor:
    return (model(x) - y).square().sum() / count


CASES = {
    "mlp": GRADED,
    "classes": RIGHT["classes"],
    "batch norm": RIGHT["batch norm"],
    "contrast": RIGHT["contrast, said"],
    "a count of its own": Local(mlp, _by_count, (*GRADED.batch, torch.arange(8.0).double() + 1), (0, 0, 0)),
}


def _own_count(part: tuple[Any, ...]) -> tuple[Any, ...]:
    """The third argument of a rank is a number of its own."""
    return (*part[:2], part[2].sum()) if len(part) == 3 else part


def _beside(rank: int, mesh: str, options: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    groups = [dist.new_group([place * 2 + at for place in range(dist.get_world_size() // 2)]) for at in range(2)]
    failed = []
    for name in names:
        case = CASES[name]
        try:
            _check(case, mesh, options, rank, groups)
        except (AssertionError, AutoparError) as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
    return failed


def _check(case: Local, mesh: str, options: dict[str, Any], rank: int, groups: list[Any]) -> None:
    torch.manual_seed(1)
    plain = case.make().double()
    model = autopar.parallelize(copy.deepcopy(plain), mesh, loss_fn=case.loss, batch="ddp", **options)
    place = model._session.world.place
    group = None if dist.get_world_size() == 2 else groups[rank % 2]
    wrapped = DistributedDataParallel(plain, process_group=group)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, wrapped)]
    for sizes in SIZES:
        part = _own_count(case.part(sizes, place))
        loss = model.forward_backward(*part)
        own = case.loss(wrapped, *part)
        own, *aux = own if isinstance(own, tuple) else (own,)
        own.backward()
        mean = own.detach().clone()
        dist.all_reduce(mean, group=group)
        torch.testing.assert_close(loss.detach(), mean / 2, rtol=1e-10, atol=1e-12)
        if aux:
            given = model.last_aux if isinstance(model.last_aux, tuple) else (model.last_aux,)
            torch.testing.assert_close(given, tuple(value.detach() for value in aux), rtol=1e-10, atol=1e-12)
        for (path, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-9, atol=1e-12, msg=path)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    wrapped.eval()
    x = case.part((5, 3), place)[: case.takes]
    torch.testing.assert_close(model(*x).detach(), wrapped(*x).detach(), rtol=1e-9, atol=1e-12)
    for given, value in zip(model.buffers(), plain.buffers(), strict=True):  # DDP sends them in that forward pass
        torch.testing.assert_close(given, value, rtol=1e-9, atol=1e-12)


def test_ranks_with_batches_of_their_own_train_as_under_ddp(two: Ranks) -> None:
    assert two.run(_beside, "dp=2", {}, tuple(CASES)) == [[], []]


def test_ddp_beside_other_axes(four: Ranks) -> None:
    assert four.run(_beside, "dp=2,tp=2", {}, ("mlp", "classes")) == [[]] * 4
    assert four.run(_beside, "dp=2,pp=2", {"microbatches": 1}, ("mlp",)) == [[]] * 4


def _dropout(rank: int) -> tuple[list[float], bool]:
    torch.manual_seed(1)
    model = autopar.parallelize(
        nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 4)),
        "dp=2",
        loss_fn=lambda m, x: m(x).sum(),
        batch="ddp",
    )
    x = torch.ones(4, 6)
    model.forward_backward(x)
    out = model(x).detach()
    both = [torch.empty_like(out) for _ in range(2)]
    dist.all_gather(both, out)
    return [], bool(torch.equal(*both))


def test_ranks_draw_masks_of_their_own(two: Ranks) -> None:
    assert [found[1] for found in two.run(_dropout)] == [False, False]


def _zero(rank: int) -> list[str]:
    found = []
    for mesh, zero in (("dp=2", 1), ("fsdp=2", None)):
        try:
            autopar.parallelize(mlp(), mesh, loss_fn=F.mse_loss, batch="ddp", zero=zero)
        except PlanError as error:
            found.append(str(error))
    return found


def test_states_are_not_split(two: Ranks) -> None:
    said = (
        'every rank keeps all states, as under DDP. Leave zero out and name the axis dp, or write batch="local", whose '
        "step is that of all parts together."
    )
    for found in two.run(_zero):
        assert found == [
            f"batch=\"ddp\" with zero=1 on mesh 'dp=2': {said}",
            f"batch=\"ddp\" with zero=3 on mesh 'fsdp=2': {said}",
        ]


def _first(rank: int) -> tuple[str, float]:
    """Unlike shapes first, then after a batch without data that decides how parameters lie."""
    plain = mlp()
    model = autopar.parallelize(plain, "dp=2", loss_fn=_mse, batch="ddp")
    x, y = torch.ones(5 - 2 * rank, 6), torch.ones(5 - 2 * rank, 4)
    try:
        model.forward_backward(x, y)
    except BatchError as error:
        said = str(error)
    model.prepare(torch.empty(4, 6, device="meta"), torch.empty(4, 4, device="meta"))
    return said, model.forward_backward(x, y).item()


def _mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def test_the_first_batch_has_one_shape(two: Ranks) -> None:
    found = two.run(_first)
    assert found[0] == found[1]
    assert found[0][0] == (
        'batch="ddp": the first batch decides how parameters lie, and has other shapes on other ranks. Begin with '
        "one of the same shapes on every rank: model.prepare(*batch) takes one on the meta device."
    )
