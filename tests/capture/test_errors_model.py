"""Models and losses that cannot be compiled: the user's line, and what to do. An op without a rule is no error."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from refusals import line_of, refused
from torch import Tensor, nn

from autopar.api import compile, parallelize
from autopar.capture.refusals.constructs import CALLED, UNCALLED
from autopar.errors import AutoparError, CaptureError
from autopar.verification.verify import verify

FILE = Path(__file__)


class Model(nn.Module):
    def __init__(self, body: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.body = nn.Linear(4, 4), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.linear, x)


def loops(linear: nn.Module, x: Tensor) -> Tensor:
    for _ in range(int(x.max())):
        x = linear(x)
    return x


DATA_DEPENDENT: list[tuple[Callable[[nn.Module, Tensor], Tensor], str]] = [
    (loops, "for _ in range(int(x.max())):"),
    (lambda linear, x: linear(x) * float(x.mean()), ""),
]


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


@pytest.mark.parametrize(("body", "text"), DATA_DEPENDENT)
def test_data_dependent_programs_name_the_users_line(body: Callable[..., Tensor], text: str) -> None:
    with pytest.raises(CaptureError) as found:
        compile(Model(body), "dp=2", loss_fn=squares, batch=torch.ones(4, 4))
    line = line_of(body, text)
    source = FILE.read_text().splitlines()[line - 1].strip()
    said = str(found.value)
    assert said.startswith("the program depends on the values in a tensor")
    assert f"{FILE.name}:{line}\n    {source}\n" in said
    assert "This line has " in said  # what stands there, and what to write instead: tests/capture/test_capture.py


def no_loss(model: nn.Module, x: Tensor) -> None:
    model(x)


def vector_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def number_loss(model: nn.Module, x: Tensor) -> float:
    return 3.0


def detached_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sum().detach()


def integer_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).argmax()


NEEDS = (
    "but a training step needs a scalar loss tensor. Return the loss, a tuple that begins with it, or an object with "
)
REDUCE = (
    "but the loss must be a scalar. Reduce it, e.g. with .mean() or .sum(). "
    "If the module returns outputs, pass loss_fn=."
)
LOSSES: list[tuple[Callable[..., Any] | None, str]] = [
    (no_loss, f"loss_fn 'no_loss' returned NoneType, {NEEDS}.loss; did the batch lack labels?"),
    (number_loss, f"loss_fn 'number_loss' returned float, {NEEDS}.loss; did the batch lack labels?"),
    (vector_loss, f"loss_fn 'vector_loss' returned a tensor of shape [4, 4], {REDUCE}"),
    (None, f"the module (loss_fn=None) returned a tensor of shape [4, 4], {REDUCE}"),
    (integer_loss, "loss_fn 'integer_loss' returned a loss of dtype torch.int64, which has no gradient: "
     "return a float."),
    (detached_loss, "the loss of loss_fn 'detached_loss' does not depend on any parameter that requires a gradient. "
     "Look for .detach(), torch.no_grad() or .item() on its way."),
]  # fmt: skip


@pytest.mark.parametrize(("loss_fn", "message"), LOSSES)
def test_losses(loss_fn: Callable[..., Any] | None, message: str) -> None:
    refused(CaptureError, message, lambda: compile(nn.Linear(4, 4), "dp=2", loss_fn=loss_fn, batch=torch.ones(4, 4)))


def test_nothing_to_train() -> None:
    message = "the model has no parameter with requires_grad=True: there is nothing to train."
    model = nn.Linear(4, 4).requires_grad_(False)
    refused(CaptureError, message, lambda: compile(model, "dp=2", loss_fn=squares, batch=torch.ones(4, 4)))


@pytest.mark.parametrize(
    ("model", "what"), [(nn.Linear, "the class Linear"), (squares, "a function"), (None, "a NoneType")]
)
def test_what_is_no_module(model: Any, what: str) -> None:
    message = f"the model is {what}, but it must be an nn.Module that is built already."
    for check in (compile, verify):
        refused(
            CaptureError, message, lambda check=check: check(model, "dp=2", loss_fn=squares, batch=torch.ones(4, 4))
        )


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (lambda linear, x: linear(x) @ torch.zeros(5, 5), "shapes [4, 4] and [5, 5] cannot be multiplied: 4 is not 5"),
        (lambda linear, x: linear(x[:, :3]), "3"),
        (lambda linear, x: linear(x).nothing, "no attribute 'nothing'"),
    ],
)
def test_a_model_that_fails_names_the_users_line(body: Callable[..., Any], said: str) -> None:
    with pytest.raises(CaptureError) as found:
        compile(Model(body), "dp=2", loss_fn=squares, batch=torch.ones(4, 4))
    text = str(found.value)
    line = line_of(test_a_model_that_fails_names_the_users_line, said.split(" cannot")[0])
    assert text.startswith("the model failed on the example batch") and said in text
    assert f"{FILE.name}:{line}" in text


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.functional.mse_loss,
        nn.MSELoss(),
        nn.MSELoss,
        "mse",
        lambda output, y: (output - y).square().mean(),
        lambda output, y, more: (output - y).square().mean() + more,
    ],
    ids=["torch's function", "its module", "its class", "its name", "of the output", "of the output and more"],
)
def test_a_loss_of_an_output_is_told_how_a_loss_is_called(loss_fn: Any) -> None:
    """A criterion, as a loop of PyTorch calls it, in place of what calls the model and the criterion."""
    batch = torch.ones(4, 4), torch.ones(4, 4)
    for check in (compile, verify):
        with pytest.raises(CaptureError) as found:
            check(nn.Linear(4, 4), "dp=2", loss_fn=loss_fn, batch=batch)
        assert CALLED in str(found.value)


def test_a_parallel_model_is_no_plain_one() -> None:
    parallel = parallelize(nn.Linear(4, 4), "dp=1", loss_fn=squares)
    for check in (compile, verify):
        with pytest.raises(CaptureError, match=r"the model is what autopar\.parallelize returned"):
            check(parallel, "dp=2", loss_fn=squares, batch=torch.ones(4, 4))


@pytest.mark.parametrize("batch", [(torch.ones(4, 4), torch.ones(4, 4)), {"x": torch.ones(4, 4)}], ids=type)
def test_a_batch_that_comes_as_one_value_is_told(batch: Any) -> None:
    """As a loader gives it: the model, or its loss, takes what is in it."""
    stars = "**batch" if isinstance(batch, dict) else "*batch"
    said = f"The batch came as one {type(batch).__name__}: {stars} gives what is in it one by one."
    for loss_fn, advice in ((lambda model, x, y: (model(x) - y).square().mean(), CALLED), (None, "")):
        model = parallelize(nn.Linear(4, 4), "dp=1", loss_fn=loss_fn)
        with pytest.raises(CaptureError) as found:
            model.forward_backward(batch)
        assert said in str(found.value) and advice in str(found.value)


def test_a_module_without_a_loss_is_told_where_labels_go() -> None:
    with pytest.raises(CaptureError) as found:
        compile(nn.Linear(4, 4), "dp=2", batch=(torch.ones(4, 4), torch.ones(4, 4)))
    assert UNCALLED in str(found.value)


def test_a_loss_that_fails_for_another_reason_is_not_told_how_it_is_called() -> None:
    with pytest.raises(CaptureError) as found:
        compile(nn.Linear(4, 4), "dp=2", loss_fn=lambda model, x: model(x).nothing, batch=torch.ones(4, 4))
    assert "nothing" in str(found.value) and CALLED not in str(found.value)


def test_a_loss_with_other_arguments_than_the_batch() -> None:
    with pytest.raises(CaptureError, match=r"squares\(\) takes 2 positional arguments but 3 were given"):
        compile(nn.Linear(4, 4), "dp=2", loss_fn=squares, batch=(torch.ones(4, 4), torch.ones(4)))


# An op that has no rule


@torch.library.custom_op("autopar_tests::swirl", mutates_args=())
def swirl(x: Tensor) -> Tensor:
    """Mixes all rows and columns: no dim may be split."""
    return torch.sin(x + x.sum() * torch.arange(1, x.numel() + 1, dtype=x.dtype).view(x.shape) / x.numel())


@swirl.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("autopar_tests::swirl_backward", mutates_args=())
def swirl_backward(grad: Tensor, x: Tensor) -> Tensor:
    ramp = torch.arange(1, x.numel() + 1, dtype=x.dtype).view(x.shape) / x.numel()
    through = grad * torch.cos(x + x.sum() * ramp)
    return through + (through * ramp).sum()


@swirl_backward.register_fake
def _(grad: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


swirl.register_autograd(
    lambda ctx, grad: swirl_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


class Swirling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swirl(self.up(x)))


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "dp=3,tp=2"])
def test_an_op_without_a_rule_is_whole_right_and_reported(mesh: str) -> None:
    batch = (torch.randn(6, 8), torch.randn(6, 4))
    notes = compile(Swirling(), mesh, loss_fn=models.square_loss, batch=batch).notes
    line = line_of(Swirling.forward, "swirl(")
    for name in ("swirl", "swirl_backward"):
        expected = (
            f"op 'autopar_tests.{name}.default' has no rule: replicated, computed on every rank "
            f"(1 times, 0.000384 MB of results; first at {FILE.name}:{line})"
            "; autopar.register_rule can give it one"
        )
        assert expected in notes, notes
    assert verify(Swirling(), mesh, loss_fn=models.square_loss, batch=batch).ok


def test_every_class_of_errors_is_one_family() -> None:
    import autopar.errors as errors

    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass)]
    assert len(classes) > 6 and all(issubclass(c, AutoparError) and c.__doc__ for c in classes)
