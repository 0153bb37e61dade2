"""on_nonfinite: a step that is not finite on any rank stops or is skipped on all, and changes nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from processes import Ranks
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, NonFiniteError

pytestmark = pytest.mark.gloo


class Model(nn.Module):
    """A logarithm that a batch makes NaN or infinite, buffers that a step writes, and a mask filled with -inf."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 18), nn.Linear(18, 6)
        self.norm = nn.BatchNorm1d(6) if norm else nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(6, 6).tril() == 0
        scores = torch.zeros(6, 6).masked_fill(mask, float("-inf")).softmax(-1).to(x.dtype)
        return self.norm(self.down(torch.relu(self.up(x.abs().log())))) @ scores  # the log of 0 is -inf


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def batch(value: float = 1.0, row: int = 9) -> Tensor:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(3)) + 3
    x[row, 2] *= value
    return x


def held(model: Any) -> list[Tensor]:
    found = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    found += [
        p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters() if p.grad is not None
    ]
    return [one.detach().clone() for one in (*found, *model.buffers())]


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dp and tp": ("dp=2,tp=2", {}),
    "zero 3": ("fsdp=4", {"zero": 3}),
    "stages": ("pp=2,dp=2", {"microbatches": 2, "stages": ["up", "down, norm"]}),
    "fp16": ("dp=4", {"precision": "fp16"}),
    "micro-batches": ("dp=2,tp=2", {"microbatches": 3, "batch_statistics": "microbatch"}),
}


def _stops(rank: int, mesh: str, options: dict[str, Any]) -> str:
    torch.manual_seed(0)
    model = autopar.parallelize(Model("pp" not in mesh), mesh, loss_fn=loss_fn, on_nonfinite="stop", **options)
    model.forward_backward(batch())
    before, steps = held(model), model.random_state.steps
    with pytest.raises(NonFiniteError) as caught:
        model.forward_backward(batch(0.0))
    assert all(torch.equal(a, b) for a, b in zip(before, held(model), strict=True))
    assert model.random_state.steps == steps
    again = model.forward_backward(batch())  # it goes on
    assert torch.isfinite(again)
    return str(caught.value)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_stop_and_nothing_is_changed(four: Ranks, name: str) -> None:
    mesh, options = CASES[name]
    said = four.run(_stops, mesh, options)
    assert len(set(said)) == 1
    assert said[0].startswith("step 1: the loss is nan, and ")
    assert said[0].endswith('No parameter, buffer or gradient was changed. on_nonfinite="skip" leaves such steps out.')
    if name in ("dp and tp", "zero 3"):
        at = "ranks 2-3" if name == "dp and tp" else "rank 3"  # whose rows they are
        assert (
            "The first value that is not finite is %log (infinite), which op 'aten.log.default' of the forward"
            in said[0]
        )
        assert re.search(rf"test_nonfinite\.py:\d+ made of finite values, on {at}\.", said[0])
        assert "gradient of 'up.weight' on" in said[0]


def _skips(rank: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = autopar.parallelize(Model(True), "dp=4", loss_fn=loss_fn, on_nonfinite="skip")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for value in (1.0, 0.0, 2.0):
        loss = model.forward_backward(batch(value))
        assert bool(torch.isfinite(loss)) is (value != 0.0)
        optimizer.step()
        optimizer.zero_grad()
    return held(model)


def test_skipped_steps_are_as_if_they_had_not_been(four: Ranks) -> None:
    torch.manual_seed(0)
    plain = Model(True)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-2)
    for value in (1.0, 2.0):
        loss_fn(plain, batch(value)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in four.run(_skips):
        for ours, theirs in zip(found, held(plain), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_a_word_that_it_does_not_know() -> None:
    with pytest.raises(AutoparError, match=r"^on_nonfinite='halt': write \"stop\", \"skip\", or None"):
        autopar.parallelize(Model(True), "dp=1", loss_fn=loss_fn, on_nonfinite="halt")  # type: ignore[call-overload]
