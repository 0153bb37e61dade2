"""precision="fp16": the scale of the loss follows overflows, and all ranks skip a step together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import Ranks
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import autopar
from autopar.errors import PlanError
from autopar.parallel.session.loss_scale import LossScale

CPU = torch.device("cpu")


# -- the scale ------------------------------------------------------------------------------------------------------


def test_the_scale_moves_as_that_of_grad_scaler() -> None:
    """Its numbers, but for the interval."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    theirs = torch.amp.GradScaler("cpu", growth_interval=3)
    ours = LossScale(interval=3)
    assert ours.scale == theirs.get_scale() == theirs.scale(torch.ones(())).item() == 65536.0
    assert LossScale().interval == torch.amp.GradScaler("cpu").get_growth_interval() == 2000
    assert (theirs.get_growth_factor(), theirs.get_backoff_factor()) == (2.0, 0.5)
    good = torch.rand(60, generator=torch.Generator().manual_seed(1)) < 0.8
    seen = set()
    for is_good in good.tolist():
        raw = torch.tensor([1.0, 2.0, 4.0 if is_good else float("nan")])
        parameter.grad = raw * ours.scale
        mine = parameter.grad.clone()
        theirs.unscale_(optimizer)
        assert ours.take([mine], CPU) is is_good
        torch.testing.assert_close(mine, parameter.grad, equal_nan=True, rtol=0, atol=0)
        theirs.step(optimizer)
        theirs.update()
        assert ours.scale == theirs.get_scale()
        seen.add(ours.scale)
    assert ours.skipped == int((~good).sum())
    assert len(seen) > 3


def test_the_scale_is_saved_and_loaded() -> None:
    scale = LossScale(scale=8.0, interval=7, good=3, skipped=2)
    again = LossScale()
    again.load_state_dict(scale.state_dict())
    assert again == scale


def test_a_loss_that_is_never_finite_is_an_error() -> None:
    scale = LossScale(scale=2.0**-14)
    with pytest.raises(PlanError) as error:
        scale.take([torch.tensor([float("nan")])], CPU)
    assert str(error.value) == (
        'precision="fp16": gradients are not finite at a loss scale of 6.10352e-05 either, after 1 skipped steps. The '
        'loss itself overflows, or is NaN: look at the batch and the learning rate, or use precision="bf16", which '
        "has the range of fp32."
    )


# -- a step on two ranks --------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Its last weight meets large numbers in half of its columns: those gradients overflow at a scale of 65536, all
    others do not. So one rank of tp or pp alone has an overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        nn.init.constant_(self.first.bias, 1.0)
        nn.init.constant_(self.first.bias[4:], 60.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) * y).sum()


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    return torch.rand(4, 8), 0.1 * torch.rand(4, 4)


def _train(rank: int, mesh: str, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(6)
    plain = Net()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    model = autopar.parallelize(plain, mesh, loss_fn=loss_fn, precision="fp16", **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    assert model.loss_scale is not None
    trace = []
    for _ in range(12):
        optimizer.zero_grad()
        model.forward_backward(*batch())
        is_skipped = all(parameter.grad is None for parameter in model.parameters())
        trace.append((model.loss_scale.scale, is_skipped))
        if not is_skipped:
            break
        optimizer.step()  # of nothing, weight decay neither
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    weights = model.full_state_dict()
    moved = [name for name, value in weights.items() if not torch.equal(value, before[name])]
    norm = clip_grad_norm_(model.parameters(), 1e6)
    state = model.loss_scale.state_dict()
    return {
        "trace": trace, "moved": moved, "norm": float(norm.full_tensor()),  # type: ignore[attr-defined]
        "gradients": model.full_gradients(), "state": state, "steps": len(optimizer.state),
    }  # fmt: skip


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("mesh", "options"), [("dp=2", {}), ("tp=2", {}), ("pp=2", {"microbatches": 2, "stages": ["first", "last"]})]
)
def test_all_ranks_skip_together(two: Ranks, mesh: str, options: dict[str, Any]) -> None:
    """The scale halves until nothing overflows; then the gradients are those of float32, without the scale."""
    ranks = two.run(_train, mesh, options)
    assert ranks[0]["trace"] == ranks[1]["trace"]
    trace = ranks[0]["trace"]
    skips = len(trace) - 1
    assert skips >= 1, "nothing overflowed: nothing was tested"
    assert trace == [(65536.0 / 2 ** (i + 1), True) for i in range(skips)] + [(65536.0 / 2**skips, False)]
    assert ranks[0]["state"] == {"scale": 65536.0 / 2**skips, "interval": 2000, "good": 1, "skipped": skips}
    assert ranks[0]["moved"] == []
    assert ranks[0]["steps"] == 0
    torch.manual_seed(6)
    plain = Net()
    loss_fn(plain, *batch()).backward()
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        error = (ranks[0]["gradients"][name] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 4e-3, (name, float(error))
    total = torch.stack([p.grad.norm() for p in plain.parameters() if p.grad is not None]).norm()
    assert abs(ranks[0]["norm"] - float(total)) < 4e-3 * float(total), "clipping sees gradients without the scale"


def _differ(rank: int) -> None:
    model = autopar.parallelize(Net(), "dp=2", loss_fn=loss_fn, precision="fp16")
    assert model.loss_scale is not None
    model.loss_scale.load_state_dict({"scale": 4.0 * (1 + rank), "interval": 2000, "good": 0, "skipped": 0})
    model.forward_backward(*batch())


@pytest.mark.gloo
def test_ranks_with_other_scales_are_told(two: Ranks) -> None:
    outcomes = two.attempt(_differ)
    assert all("scale=8.0" in (outcome.error or "") for outcome in outcomes), outcomes


def test_there_is_no_scale_without_fp16(tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = autopar.parallelize(Net(), "dp=1", loss_fn=loss_fn, precision="bf16")
        model.forward_backward(*batch())
        assert model.loss_scale is None
        assert model(batch()[0]).dtype is torch.float32
        scaled = autopar.parallelize(Net(), "dp=1", loss_fn=loss_fn, precision="fp16")
        assert scaled(batch()[0]).dtype is torch.float32
    finally:
        torch.distributed.destroy_process_group()


def test_gradients_of_complex_parameters_are_unscaled_and_checked() -> None:
    gradients = [torch.tensor([3 + 4j, 1j], dtype=torch.complex64), torch.ones(2)]
    scale = LossScale(scale=8.0)
    assert scale.take(gradients, torch.device("cpu"))
    assert gradients[0].tolist() == [0.375 + 0.5j, 0.125j]
    assert gradients[1].tolist() == [0.125, 0.125]
    assert not scale.take([torch.tensor([complex(1, float("inf"))])], torch.device("cpu"))
