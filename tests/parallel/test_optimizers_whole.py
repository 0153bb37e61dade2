"""Optimizers that look at whole matrices, or at all parameters at once, on split parameters: Muon, LBFGS, Adafactor.

Muon orthogonalises a matrix by products in bfloat16, so its weights differ from one device's by far more than rounding
of their own dtype. That nothing but bfloat16 makes that difference is shown by the same algorithm in float64.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import Ranks
from torch import Tensor, nn

import autopar

pytestmark = pytest.mark.gloo


class Net(nn.Module):
    """Wide and tall matrices. `odd`: one of them has no dim that 2, 3 or 6 ranks divide."""

    def __init__(self, odd: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = 13 if odd else 12
        self.up, self.norm, self.down = nn.Linear(12, 24), nn.LayerNorm(width), nn.Linear(24, width)
        self.mid, self.out = nn.Linear(width, width), nn.Linear(width, 6)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mid(self.norm(self.down(F.gelu(self.up(x))))))


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def _batch() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    x, y = (torch.randn(12, n, generator=random, dtype=torch.float64) for n in (12, 6))
    return x, y


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Newton-Schulz as in `torch.optim.Muon`, which computes it in bfloat16."""
    x = matrix.to(dtype)
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    x.div_(x.norm().clamp(min=1e-7))
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` with its products in a dtype of choice."""

    def __init__(self, params: Any, dtype: torch.dtype) -> None:
        super().__init__(params, {"dtype": dtype})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                kept = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
                kept.lerp_(p.grad, 0.05)
                update = orthogonal(p.grad.lerp(kept, 0.95), group["dtype"])
                p.mul_(1 - 0.02 * 0.1)
                p.add_(update, alpha=-0.02 * math.sqrt(max(1, p.shape[0] / p.shape[1])))


OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "Muon": lambda params: torch.optim.Muon(params, lr=0.02),
    "Muon in bfloat16": lambda params: Muon(params, torch.bfloat16),
    "Muon in float64": lambda params: Muon(params, torch.float64),
    "LBFGS": lambda params: torch.optim.LBFGS(params, max_iter=2, line_search_fn="strong_wolfe"),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
}


def _train(module: nn.Module, name: str, forward_backward: Callable[[], Tensor]) -> None:
    """Two steps; Muon takes matrices alone."""
    params = [p for p in module.parameters() if p.ndim == 2 or not name.startswith("Muon")]
    optimizer = OPTIMIZERS[name](params)

    def closure() -> Tensor:
        optimizer.zero_grad()
        return forward_backward()

    for _ in range(2):
        if name != "LBFGS":
            closure()
        optimizer.step(closure if name == "LBFGS" else None)


def on_one_device(name: str, odd: bool) -> dict[str, Tensor]:
    plain, batch = Net(odd), _batch()

    def forward_backward() -> Tensor:
        loss = _loss(plain, *batch)
        loss.backward()
        return loss

    _train(plain, name, forward_backward)
    return {name: p.detach() for name, p in plain.named_parameters()}


def _on_ranks(
    rank: int, names: list[str], mesh: str, odd: bool, options: dict[str, Any]
) -> tuple[int, dict[str, dict[str, Tensor]]]:
    """How many matrices are split, and the weights by optimizer (on rank 0)."""
    model, batch = autopar.parallelize(Net(odd), mesh, loss_fn=_loss, **options), _batch()
    model.prepare(*batch)
    split = sum(p.to_local().numel() < p.numel() for p in model.parameters() if p.ndim == 2)
    found = {}
    for name in names:
        model.load_state_dict(Net(odd).state_dict())
        _train(model, name, lambda: model.forward_backward(*batch))
        found[name] = model.full_state_dict()
    return split, found


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def assert_close(found: dict[str, Tensor], name: str, odd: bool) -> None:
    for key, value in on_one_device(name, odd).items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-11, msg=lambda m, k=key: f"{name} {k}: {m}")


def test_our_muon_in_bfloat16_is_that_of_torch() -> None:
    ours, theirs = on_one_device("Muon in bfloat16", True), on_one_device("Muon", True)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


ALL = [name for name in OPTIMIZERS if name != "Muon in bfloat16"]


@pytest.mark.parametrize(
    ("mesh", "zero", "odd"),
    [("dp=2,tp=3", 3, False), ("dp=6", 3, True)],  # LBFGS flattens unequal parts in the second
)
def test_split_parameters_take_the_steps_of_one_device(six: Ranks, mesh: str, zero: int, odd: bool) -> None:
    """All but Muon in bfloat16: that is as far from its float64 as on one device. Products of pieces are rounded at
    other places, and once more where they are added up."""
    split, found = six.run(_on_ranks, ALL, mesh, odd, {"zero": zero}, timeout=180)[0]
    assert split == 4
    for name in ALL:
        if name != "Muon":
            assert_close(found[name], name, odd)
    exact, theirs = on_one_device("Muon in float64", odd), on_one_device("Muon", odd)
    for key, value in exact.items():
        far, allowed = distance(found["Muon"][key], value), 2 * distance(theirs[key], value)
        assert far <= allowed or value.ndim < 2, (key, far, allowed)


def test_parameters_of_stages_take_the_steps_of_one_device(six: Ranks) -> None:
    names = ["Muon in float64", "LBFGS", "Adafactor"]
    _, found = six.run(_on_ranks, names, "pp=2,dp=3", False, {"microbatches": 2}, timeout=180)[0]
    for name in names:
        assert_close(found[name], name, False)


def _from_one_device_and_back(rank: int, mesh: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """AdamW: two steps on one device, two on the mesh, one on one device again, states handed on as they are."""
    plain, batch = Net(False), _batch()
    adamw = [torch.optim.AdamW(plain.parameters(), lr=0.1)]

    def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if module is plain:
            _loss(plain, *batch).backward()
        else:
            module.forward_backward(*batch)  # type: ignore[operator]
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step(plain, adamw[0])
    model = autopar.parallelize(copy.deepcopy(plain), mesh, loss_fn=_loss, **options)
    adamw += [torch.optim.AdamW(model.parameters(), lr=0.1), torch.optim.AdamW(plain.parameters(), lr=0.1)]
    adamw[1].load_state_dict(copy.deepcopy(adamw[0].state_dict()))
    for _ in range(2):
        step(model, adamw[1])
    for p in model.parameters():  # what was loaded whole takes no more memory than the parameter
        sizes = {state.to_local().numel() for state in adamw[1].state[p].values() if state.shape == p.shape}
        assert sizes == {p.to_local().numel()}
    state = model.full_state_dict()
    everywhere = [state]
    torch.distributed.broadcast_object_list(everywhere, src=0)
    plain.load_state_dict(everywhere[0])
    adamw[2].load_state_dict(adamw[1].state_dict())
    step(plain, adamw[2])
    return {name: p.detach() for name, p in plain.named_parameters()}


@pytest.mark.parametrize(("mesh", "options"), [("dp=2,tp=3", {"zero": 1}), ("pp=2,dp=3", {"microbatches": 2})])
def test_states_of_one_device_go_in_and_out(six: Ranks, mesh: str, options: dict[str, Any]) -> None:
    found = six.run(_from_one_device_and_back, mesh, options, timeout=120)
    plain, batch = Net(False), _batch()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for _ in range(5):
        _loss(plain, *batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    for rank in found:
        for name, value in plain.named_parameters():
            torch.testing.assert_close(rank[name], value.detach(), rtol=1e-9, atol=1e-11, msg=name)
