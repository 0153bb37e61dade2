"""What a script sets for all of torch: it holds for the model, and for nothing of autopar's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import Ranks
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

import autopar
from autopar.errors import AutoparError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 4)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(F.gelu(self.up(x))))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    out = model(x)
    return F.cross_entropy(out, y), {"right": (out.argmax(1) == y).sum().item()}


def _trained(mesh: str, options: dict[str, Any], folder: Path) -> list[float]:
    """The losses of a loop, and what is taken out of it."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, 6, generator=generator, device="cpu")
    y = torch.randint(4, (6,), generator=generator, device="cpu")
    with torch.device("cpu"):
        module, other = Net(), Net()
    model = autopar.parallelize(module, mesh, loss_fn=loss_fn, on_nonfinite="stop", seed=5, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found: list[Tensor] = []
    for step in range(3):
        optimizer.zero_grad()
        found.append(model.forward_backward(x, y))
        found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        autopar.save(folder, model, optimizer, step=step)
    autopar.load(folder, model, optimizer)
    found += [model.forward_backward(x, y), model.eval()(x)]
    with model.gathered() as plain:
        found.append(plain(x))
    found += [*model.full_state_dict().values(), *map(torch.Tensor.detach, other.parameters())]
    sgd = partial(torch.optim.SGD, lr=0.1)  # torch 2.11's AdamW cannot step where the default device is meta
    report = autopar.verify(other, "dp=2,tp=3", loss_fn=loss_fn, batch=(x, y), steps=1, optimizer=sgd)
    return [report.ok, *(float(value.square().sum()) for value in found)]


def _with_and_without(rank: int, mesh: str, options: dict[str, Any], folder: Path) -> bool:
    expected = _trained(mesh, options, folder / "usual")
    with torch.device("meta"):
        return _trained(mesh, options, folder / "meta") == expected and bool(expected[0])


@pytest.mark.parametrize(
    ("mesh", "options"),
    [("fsdp=2", {"batch": "local"}), ("tp=2", {}), ("pp=2", {"microbatches": 2, "precision": "bf16"})],
)
def test_a_default_device_is_for_what_the_model_makes(
    two: Ranks, tmp_path: Path, mesh: str, options: dict[str, Any]
) -> None:
    """Here one on which nothing has data, so that all that autopar made there itself would be found."""
    assert two.run(_with_and_without, mesh, options, tmp_path) == [True, True]


def test_detection_of_anomalies_does_no_harm_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    x, y = torch.randn(6, 6), torch.arange(6) % 4
    sides = [autopar.parallelize(Net().eval(), "dp=1", loss_fn=loss_fn) for _ in range(2)]
    expected = sides[0].forward_backward(x, y)
    caplog.clear()
    with torch.autograd.set_detect_anomaly(True):
        assert torch.equal(sides[1].forward_backward(x, y), expected) and torch.is_anomaly_enabled()
    assert [line for line in caplog.messages if 'on_nonfinite="stop"' in line]


def test_a_transform_of_a_parallel_model_is_refused() -> None:
    model = autopar.parallelize(Net().eval(), "dp=1", loss_fn=loss_fn)
    x = torch.randn(6, 6)
    for use in (
        lambda: torch.vmap(model)(x),
        lambda: torch.func.jacfwd(lambda x: model(x))(x),
        lambda: torch.jit.trace(model, x),
    ):
        with pytest.raises(AutoparError, match=r"a parallel model inside of torch\.vmap, .* compiled program"):
            use()


class Larger(TorchFunctionMode):
    """What a user writes to change an op wherever it is called."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is F.linear else result


class Watching(TorchFunctionMode):
    """What a user writes to count calls."""

    only_watches = True

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def packed() -> Any:
    return saved_tensors_hooks(lambda tensor: tensor * 2, lambda tensor: tensor)


@pytest.mark.parametrize(
    "around, name", [(Larger, "Larger, a TorchFunctionMode"), (packed, "saved_tensors_hooks, with")]
)
def test_what_looks_into_each_op_of_a_step_is_refused_around_it_and_taken_in_its_loss(
    around: Callable[[], Any], name: str
) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with around():
            return F.mse_loss(model(x), y)

    plain, x, y = Net().eval(), torch.randn(6, 6), torch.randn(6, 4)
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=lambda model, x, y: F.mse_loss(model(x), y))
    for _ in range(2):  # before there is a program, and with one
        with around(), pytest.raises(AutoparError, match=f"a parallel model inside of .*{name}"):
            model.forward_backward(x, y)
        model.forward_backward(x, y)
    with save_on_cpu(), torch.device("cpu"), Watching() as watching:  # which change no number
        model.forward_backward(x, y)
    assert watching.calls
    inside = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=loss)
    value = loss(plain, x, y)
    value.backward()
    torch.testing.assert_close(inside.forward_backward(x, y), value.detach())
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    torch.testing.assert_close(inside.full_gradients(), gradients)


class Mixed(nn.Module):
    """A layer outside of autocast, as those do that need all digits there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 12, bias=False), nn.Linear(12, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        with torch.autocast("cpu", enabled=False):
            return self.down(h.float())


LABELS = {
    "classes": lambda model, x: F.cross_entropy(model(x), torch.arange(6) % 4, label_smoothing=0.1),
    "probabilities": lambda model, x: F.cross_entropy(model(x), x[:, :4].softmax(-1)),
}


@pytest.mark.parametrize("labels", list(LABELS))
def test_a_step_under_the_callers_autocast_casts_once(labels: str) -> None:
    """Red where kernels of the program cast once more as they ran: gradients in bf16, which a parameter refuses."""
    plain, x, loss_fn = Mixed(), torch.randn(6, 6), LABELS[labels]
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=loss_fn)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            expected, found = loss_fn(plain, x), model.forward_backward(x)
            torch.testing.assert_close(model(x), plain(x), rtol=1e-6, atol=1e-6)
        expected.backward()
        torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=1e-6)
    want = {name: p.grad for name, p in plain.named_parameters()}
    for name, grad in model.full_gradients().items():
        torch.testing.assert_close(grad, want[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("labels", list(LABELS))
def test_autocast_leaves_float64_alone(labels: str) -> None:
    """Red where a cross entropy of float64 was computed in float32 there."""
    plain, x, loss_fn = nn.Linear(6, 4).double(), torch.randn(6, 6, dtype=torch.float64), LABELS[labels]
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=loss_fn)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model.forward_backward(x), loss_fn(plain, x).detach(), rtol=1e-12, atol=0)
