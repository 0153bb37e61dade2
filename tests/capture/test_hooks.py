"""Hooks on parameters and modules of a parallel model: run as on one device, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Ranks
from side_by_side import assert_close
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError


class Tied(nn.Module):
    """Two uses of one weight, so that its gradient is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).mean()


def doubled(g: Tensor) -> Tensor:
    return g * 2


def test_compile_refuses_a_gradient_hook_which_steps_run() -> None:
    plain = nn.Linear(8, 8)
    plain.weight.register_hook(doubled)
    with pytest.raises(CaptureError) as caught:
        autopar.compile(plain, "dp=1", loss_fn=square, batch=(torch.randn(4, 8),))
    assert str(caught.value) == (
        "the parameter 'weight' has a gradient hook, which a compiled step would not run. The steps of "
        "autopar.parallelize run it; here register it later, or change .grad between forward_backward and "
        "optimizer.step(), or scale the parameter's use in the model."
    )
    autopar.parallelize(plain, "dp=1", loss_fn=square).forward_backward(torch.ones(4, 8))
    twin = copy.deepcopy(plain.weight.full_tensor().detach()).requires_grad_()
    nn.functional.linear(torch.ones(4, 8), twin, plain.bias.full_tensor().detach()).pow(2).mean().backward()
    torch.testing.assert_close(plain.weight.grad.full_tensor(), twin.grad * 2)


def test_parallelize_refuses_a_wrapped_module() -> None:
    with pytest.raises(CaptureError, match="DataParallel"):
        autopar.parallelize(nn.Sequential(nn.DataParallel(nn.Linear(8, 8))), "dp=1", loss_fn=square)


def both(make: Callable[[], nn.Module], mesh: str, after: int, hook: Callable[[nn.Module, list[Any]], Any],
         **options: Any) -> list[Any]:  # fmt: skip
    """Four steps, two of them accumulated, beside the plain model; `hook` is called on both before step `after`.

    Gives what the hooks of the parallel model wrote down.
    """
    torch.manual_seed(0)
    plain = make().double()
    model = autopar.parallelize(copy.deepcopy(plain), mesh, loss_fn=square, device="cpu", **options)
    told: dict[str, list[Any]] = {"plain": [], "parallel": []}
    handles = []
    batches = torch.randn(4, 4, 8, dtype=torch.float64)
    for step, x in enumerate(batches):
        if step == after:
            handles = [hook(plain, told["plain"]), hook(model, told["parallel"])]
        if step == 3:
            for handle in handles:
                handle.remove()
        loss = square(plain, x)
        loss.backward()
        torch.testing.assert_close(model.forward_backward(x), loss.detach())
        found = model.full_gradients()
        if dist.get_rank() == 0:
            assert_close(found, {n: p.grad for n, p in plain.named_parameters()}, f"gradient of step {step}")
        if step != 1:
            for parameter in (*plain.parameters(), *model.parameters()):
                parameter.grad = None
    assert len(told["parallel"]) == len(told["plain"])
    for got, want in zip(told["parallel"], told["plain"], strict=True):
        assert got == pytest.approx(want, rel=1e-10)
    return told["parallel"]


def on_gradient(model: nn.Module, told: list[Any]) -> Any:
    def hook(g: Tensor) -> Tensor:
        told.append(float(g.norm()))
        return g * 2

    return dict(model.named_parameters())["up.weight"].register_hook(hook)


def on_accumulated(model: nn.Module, told: list[Any]) -> Any:
    def hook(p: Tensor) -> None:
        assert p.grad is not None
        told.append(float(p.grad.norm()))
        p.grad.mul_(3)

    return dict(model.named_parameters())["up.weight"].register_post_accumulate_grad_hook(hook)


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("hook", [on_gradient, on_accumulated])
def test_hooks_of_a_parameter_run_once_in_each_backward_pass(hook: Any, after: int) -> None:
    """Also those registered before the first step, when parameters are swapped for others in place."""
    assert len(both(Tied, "dp=1", after, hook)) == 3 - after


def hooks_on_ranks(rank: int, mesh: str, options: dict[str, Any]) -> None:
    for hook in (on_gradient, on_accumulated):
        for after in (0, 1):
            both(Tied, mesh, after, hook, **options)


@pytest.mark.gloo
@pytest.mark.parametrize(("mesh", "options"), [("dp=2", {"zero": 3}), ("tp=2", {}), ("pp=2", {"microbatches": 2})])
def test_hooks_of_a_parameter_see_the_whole_gradient_on_ranks(two: Ranks, mesh: str, options: dict[str, Any]) -> None:
    two.run(hooks_on_ranks, mesh, options)


# -- hooks of modules -----------------------------------------------------------------------------------------------


def on_forward(model: nn.Module) -> Any:
    return model.get_submodule("up").register_forward_hook(lambda m, args, out: out * 2)


def on_input(model: nn.Module) -> Any:
    return model.get_submodule("up").register_forward_pre_hook(lambda m, args: (args[0] + 1,))


def on_root(model: nn.Module) -> Any:
    return model.register_forward_hook(lambda m, args, out: out * 2)


def on_backward(model: nn.Module) -> Any:
    return model.get_submodule("down").register_full_backward_hook(lambda m, gi, go: (gi[0] * 3,))


def on_all(model: nn.Module) -> Any:
    return torch.nn.modules.module.register_module_forward_hook(
        lambda m, args, out: out * 2 if isinstance(m, nn.Linear) else None
    )


def on_each(_: nn.Module) -> Any:
    return torch.nn.modules.module.register_module_forward_hook(lambda m, args, out: out * 2)


def on_each_input(_: nn.Module) -> Any:
    return torch.nn.modules.module.register_module_forward_pre_hook(lambda m, args: (args[0] + 1,))


def on_each_backward(_: nn.Module) -> Any:
    return torch.nn.modules.module.register_module_full_backward_hook(
        lambda m, gi, go: tuple(None if g is None else g * 3 for g in gi)
    )


ALL = on_all, on_each, on_each_input, on_each_backward  # of every module there is, but none of ours


@pytest.mark.parametrize("register", [on_forward, on_input, on_root, on_backward, *ALL])
def test_hooks_of_modules_that_come_and_go(register: Callable[[nn.Module], Any]) -> None:
    torch.manual_seed(0)
    plain = Tied().double()
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=square)
    x, handles, seen = torch.randn(4, 8).double(), [], set()
    for step in range(4):
        if step == 1:
            targets = (plain,) if register in ALL else (plain, model)
            handles = [register(target) for target in targets]
        if step == 3:
            for handle in handles:
                handle.remove()
        plain.zero_grad()
        model.zero_grad()
        loss = square(plain, x)
        loss.backward()
        torch.testing.assert_close(model.forward_backward(x), loss.detach())
        want = {n: p.grad for n, p in plain.named_parameters()}
        assert_close(model.full_gradients(), want, f"gradient of step {step}")
        torch.testing.assert_close(model(x), plain(x).detach())
        seen.add(tuple(float(g.norm()) for g in want.values() if g is not None))
    assert len(seen) == 2
