"""A call that is refused leaves nothing changed: neither in the user's model nor in the process."""

from __future__ import annotations

import gc
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from refusals import line_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import AutoparError, CaptureError

WIDTH = 6


class Broken(torch.autograd.Function):
    """A user's backward pass that reads values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * numpy.abs(grad.numpy()).max()


class Eventful(nn.Module):
    """Draws, counts, writes buffers and switches modes in its forward pass, and then does what `fault` says."""

    average: Tensor

    def __init__(self, fault: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.fault = fault
        self.first, self.attention = nn.Linear(WIDTH, WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.frozen, self.last = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.calls, self.seen, self.kept = 0, [0], None
        self.attention.eval()
        self.last.weight.grad = torch.ones(WIDTH, WIDTH)
        self.frozen.register_forward_hook(lambda module, args, out: out * 2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.average.mul_(0.9).add_(x.detach().mean((0, 1)))
        was = torch.is_grad_enabled()
        torch.set_grad_enabled(was)
        h = self.dropout(self.norm(self.first(x).transpose(1, 2)).transpose(1, 2))
        h = h + self.attention(h, h, h)[0] + torch.rand_like(h) + self.frozen(h)
        return self.last(self.fault(self, h))


def flips(model: Any, h: Tensor) -> Tensor:
    """A script that forgets to switch back, as it never comes so far."""
    model.norm.eval()
    model.first.weight.requires_grad_(False)
    model.kept = h
    torch.set_default_dtype(torch.float64)
    return h * float(h.detach().numpy().max())


def raises(model: Any, h: Tensor) -> Tensor:
    raise AutoparError("of the user's own")


FAULTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "reads values": lambda m, h: h * float(h.detach().numpy().max()),
    "seeds": lambda m, h: [torch.manual_seed(1), h + torch.rand_like(h)][1],  # type: ignore[return-value]
    "reads values backward": lambda m, h: Broken.apply(h),  # type: ignore[no-any-return]
    "sizes of data": lambda m, h: h[h > 0].view(-1, 1) * h[0],
    "switches and reads values": flips,
    "raises": raises,
}


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


LOSSES: dict[str, Callable[..., Any]] = {
    "no scalar": lambda model, x, y: model(x) - y,
    "no gradient": lambda model, x, y: loss_fn(model, x, y).detach(),
    "no tensor": lambda model, x, y: [model(x), 1.0][1],
}


def fine(model: Any, h: Tensor) -> Tensor:
    return h


@dataclass(frozen=True)
class Refused:
    """A call that is refused. mesh: of a compilation; None for a call of the parallel model itself."""

    call: Callable[[Any], Any]
    fault: Callable[[Any, Tensor], Tensor] = fine
    mesh: str | None = None


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    return torch.ones(rows, 4, WIDTH), torch.zeros(rows, 4, WIDTH)


def compiling(mesh: str, loss: Any = loss_fn, rows: int = 8, **options: Any) -> Callable[[Any], Any]:
    return lambda model: autopar.compile(model, mesh, loss_fn=loss, batch=batch(rows), **options)


def verifying(mesh: str, loss: Any = loss_fn, rows: int = 8, **options: Any) -> Callable[[Any], Any]:
    return lambda model: autopar.verify(model, mesh, loss_fn=loss, batch=batch(rows), **options)


def without_gradients(model: Any) -> None:
    with torch.no_grad():
        model.forward_backward(*batch())


PLAIN: dict[str, Refused] = {
    **{f"compile: {name}": Refused(compiling("dp=2"), fault) for name, fault in FAULTS.items()},
    **{f"verify: {name}": Refused(verifying("dp=2"), fault) for name, fault in FAULTS.items()},
    **{f"compile: {name}": Refused(compiling("dp=2", loss)) for name, loss in LOSSES.items()},
    "compile: rows": Refused(compiling("dp=3")),
    "compile: no weight": Refused(compiling("tp=5")),
    "compile: mesh": Refused(compiling("dq=2")),
    "compile: option": Refused(compiling("dp=2", zero=7)),
    "verify: no weight": Refused(verifying("tp=5")),
    "compile: stages": Refused(compiling("pp=64", microbatches=2)),
    "parallelize: ranks": Refused(lambda model: autopar.parallelize(model, "dp=2", loss_fn=loss_fn)),
    "parallelize: option": Refused(lambda model: autopar.parallelize(model, "dp=1", loss_fn=loss_fn, zero=7)),
}
PARALLEL: dict[str, Refused] = {
    **{f"step: {name}": Refused(lambda model: model.forward_backward(*batch()), f) for name, f in FAULTS.items()},
    **{f"loss: {name}": Refused(lambda model: model.training_loss(*batch()), f) for name, f in FAULTS.items()},
    **{
        f"output: {name}": Refused(lambda model: model(batch()[0]), f)
        for name, f in FAULTS.items()
        if "back" not in name
    },
    "step: no_grad": Refused(without_gradients),
    "step: no batch": Refused(lambda model: model.forward_backward()),
    "step: other width": Refused(lambda model: model.forward_backward(torch.ones(8, 4, 5), torch.ones(8, 4, 5))),
    "step: rows that differ": Refused(lambda model: model.forward_backward(batch(8)[0], batch(6)[1])),
}


def held(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """All that a user's model holds, by name: what is in a tensor, and that it is the same one."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_") and not isinstance(value, dict):
                continue
            items = value.items() if isinstance(value, dict) else [("", value)]
            for key, item in items:
                yield f"{path}.{name}.{key}", told(item)


def told(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return list(value) if isinstance(value, list) else value if isinstance(value, (int, float, str)) else id(value)
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    grad = None if value.grad is None else told(value.grad)
    return id(value), value.dtype, value.requires_grad, whole.detach().tolist(), grad


def process() -> Iterator[tuple[str, Any]]:
    """What a process has one of."""
    yield "torch's generator", torch.get_rng_state().tolist()
    yield "Python's generator", random.getstate()
    yield "numpy's generator", str(numpy.random.get_state())
    yield "default dtype", torch.get_default_dtype()
    yield "default device", torch.get_default_device()
    yield "gradients", (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    yield "autocast", (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
    yield "deterministic", torch.are_deterministic_algorithms_enabled()
    yield "precision", torch.get_float32_matmul_precision()
    yield "threads", torch.get_num_threads()
    yield "modes", (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack())
    hooks = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
    yield "hooks of all modules", [len(getattr(torch.nn.modules.module, name)) for name in hooks]
    yield "garbage", (gc.isenabled(), gc.callbacks[:])
    yield "warnings", warnings.filters[:]
    yield "tracing", (sys.gettrace(), sys.getprofile(), sys.stdout, sys.stderr)
    yield "environment", dict(os.environ)
    yield "path", list(sys.path)


def changed(model: nn.Module, call: Callable[[], Any]) -> list[str]:
    """What a call changes that is refused."""

    def all_of() -> dict[str, Any]:
        return {**dict(held(model)), **dict(process())}

    before = all_of()
    with pytest.raises(AutoparError):
        call()
    after = all_of()
    return [
        f"{k}: {str(before.get(k))[:60]} -> {str(after.get(k))[:60]}"
        for k in before | after
        if before.get(k) != after.get(k)
    ]


def model_of(row: Refused) -> Eventful:
    torch.manual_seed(0)
    return Eventful(row.fault)


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    """Import what torch imports when first it traces: that adds to the environment and to the filters of warnings."""
    autopar.compile(nn.Linear(2, 2), "dp=2", loss_fn=loss_fn, batch=(torch.ones(4, 2), torch.ones(4, 2)))


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", PLAIN)
def test_a_refused_call_changes_nothing_of_a_plain_model(name: str) -> None:
    model = model_of(PLAIN[name])
    assert changed(model, lambda: PLAIN[name].call(model)) == []


@pytest.mark.parametrize("name", PARALLEL)
def test_a_refused_call_changes_nothing_of_a_parallel_model(name: str) -> None:
    model = autopar.parallelize(model_of(PARALLEL[name]), "dp=1", loss_fn=loss_fn)
    list(model.parameters())
    assert changed(model.original, lambda: PARALLEL[name].call(model)) == []


# -- a forward pass that switches the modes of modules ----------------------------------------------------------------


class Switching(nn.Module):
    """A norm that a forward pass freezes, before it uses it or behind it."""

    def __init__(self, is_late: bool) -> None:
        super().__init__()
        self.first, self.norm, self.is_late = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), is_late

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_late:
            self.norm.eval()
        out = self.norm(self.first(x).flatten(0, 1)).view_as(x)
        self.norm.eval()
        return out


def test_a_mode_that_a_forward_pass_sets_before_use_is_noted_and_stays() -> None:
    model = Switching(is_late=False)
    found = autopar.compile(model, "dp=2", loss_fn=loss_fn, batch=batch())
    assert model.norm.training
    assert any("'norm.training' is changed at" in note for note in found.notes)
    assert autopar.verify(model, "dp=2", loss_fn=loss_fn, batch=batch()).ok


def test_a_mode_that_makes_the_next_step_another_is_refused() -> None:
    model = Switching(is_late=True)
    line = line_of(Switching.forward, "return out") - 1
    with pytest.raises(CaptureError, match="a second step would not be the same") as said:
        autopar.compile(model, "dp=2", loss_fn=loss_fn, batch=batch())
    assert f"what the model itself changed in the step before: 'norm.training' (test_refused_calls.py:{line})" in str(
        said.value
    )
    assert model.norm.training
