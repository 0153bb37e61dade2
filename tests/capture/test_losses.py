"""Cross entropy with all its options over a vocabulary that tp splits: its values, and that no logits are moved."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from verified import verified

from autopar.capture import capture
from autopar.compiled import Compiled
from autopar.compiler.check_options import options_of
from autopar.compiler.compile import lower
from autopar.compiler.meshes import mesh_of
from autopar.errors import CaptureError
from autopar.verification.verify import verify
from autopar.verification.virtual_side import Virtual

MESHES = ["tp=2", "tp=4", "dp=3,tp=2"]
ROWS, TIME, WIDTH, HIDDEN, CLASSES = 6, 4, 16, 32, 480
OPTIONS = [
    {"weighted": w, "label_smoothing": eps, "reduction": how, "ignore_index": ignored}
    for w, eps, how, ignored in itertools.product((False, True), (0.0, 0.2), ("mean", "sum", "none"), (-100, 3))
]
SURE = ["labels", "each", "weights", "smoothed", "smoothed with weights", "probabilities", "log_softmax"]


class Classifier(nn.Module):
    """Hidden states, then logits whose last dim tp splits."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, CLASSES, bias=False)
        self.register_buffer("weight", torch.rand(CLASSES) + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.up(x)))


def data(*shape: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    target = torch.randint(CLASSES, shape)
    target.view(-1)[::5] = -100  # on every rank another share
    target.view(-1)[1] = 3
    return torch.randn(*shape, WIDTH), target


def loss_of(
    reduction: str, weighted: bool = False, function: Callable[..., Tensor] = F.cross_entropy, **options: Any
) -> Callable[..., Tensor]:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        ignored = options.get("ignore_index", -100)
        y = y.masked_fill(y == -100, ignored) if ignored != -100 else y
        logits = model(x).movedim(-1, 1) if x.ndim > 2 else model(x)
        weight = model.weight if weighted else None
        losses = function(logits, y, weight=weight, reduction=reduction, **options)
        return (losses * torch.arange(losses.numel()).view(losses.shape)).sum() if reduction == "none" else losses

    return loss_fn


def check(loss_fn: Callable[..., Tensor], batch: tuple[Tensor, ...], *meshes: str) -> None:
    torch.manual_seed(2)
    for _, compiled in verified(Classifier(), meshes, loss_fn, batch, steps=1, optimizer=descent):
        assert_logits_stay(compiled, batch[0].numel() // WIDTH)


def descent(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)  # type: ignore[arg-type]


def assert_logits_stay(compiled: Compiled, rows: int) -> None:
    """The head is split over its classes; nothing is gathered over tp, and the loss reduces one value a row at most."""
    assert str(compiled.layouts["head.weight"]) == "[tp,-]"
    over_tp = [c for c in compiled.collectives if c.axis == "tp"]
    assert over_tp and all(c.op == "all_reduce" for c in over_tp)
    rows //= dict(compiled.mesh.axes).get("dp", 1)
    for c in over_tp:
        assert c.shape[-1:] == (HIDDEN,) or math.prod(c.shape) <= rows, c  # activations apart from the logits, or less


def on_meshes(options: dict[str, Any]) -> list[str]:
    """All options on one mesh, and a few on the others."""
    return MESHES if options["reduction"] == "mean" and options["ignore_index"] == 3 else MESHES[-1:]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(str(v) for v in o.values()))
def test_cross_entropy_with_all_options(options: dict[str, Any]) -> None:
    check(loss_of(**options), data(ROWS * TIME), *on_meshes(options))


@pytest.mark.parametrize("shape", [(ROWS * TIME,), (ROWS, 2, TIME)], ids=["[N,C]", "[N,C,H,W]"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_targets_that_are_probabilities(smoothing: float, weighted: bool, shape: tuple[int, ...]) -> None:
    x, _ = data(*shape)
    target = torch.rand(*shape, CLASSES).square().movedim(-1, 1)
    for reduction, meshes in (("mean", MESHES[1:]), ("sum", MESHES[-1:]), ("none", MESHES[-1:])):
        check(loss_of(reduction, weighted, label_smoothing=smoothing), (x, target), *meshes)


@pytest.mark.parametrize("shape", [(ROWS, TIME), (ROWS, 2, TIME)], ids=["[N,C,T]", "[N,C,H,W]"])
@pytest.mark.parametrize("options", [{}, {"weighted": True, "label_smoothing": 0.1}], ids=["plain", "smoothed"])
def test_classes_in_the_second_dim(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    for reduction in ("mean", "none"):
        check(loss_of(reduction, **options), data(*shape), *MESHES[1:])


@pytest.mark.parametrize("weighted", [False, True])
def test_nll_of_log_softmax(weighted: bool) -> None:
    def nll(logits: Tensor, *args: Any, **options: Any) -> Tensor:
        return F.nll_loss(logits.log_softmax(1), *args, **options)

    for reduction, ignored in itertools.product(("mean", "sum", "none"), (-100, 3)):
        check(loss_of(reduction, weighted, nll, ignore_index=ignored), data(ROWS * TIME), *MESHES[1:])
    check(loss_of("mean", weighted, nll), data(ROWS, 2, TIME), *MESHES[1:])


def test_a_single_row() -> None:
    """[C] and a label without dims."""

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        smoothed = F.cross_entropy(logits, y, model.weight, label_smoothing=0.2)
        return smoothed + F.nll_loss(logits.log_softmax(0), y) + F.cross_entropy(logits, logits.detach().softmax(0))

    x, _ = data(2)
    report = verify(Classifier(), "tp=4", loss_fn=loss_fn, batch=(x[0], torch.tensor(7)), steps=1)
    assert report.ok, str(report)


@pytest.mark.filterwarnings("ignore:size_average")
@pytest.mark.parametrize("legacy", [{"size_average": False}, {"reduce": False}, {"size_average": True, "reduce": True}])
def test_arguments_of_old(legacy: dict[str, bool]) -> None:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, model.weight, **legacy).sum()  # type: ignore[arg-type]

    check(loss_fn, data(ROWS * TIME), "tp=2")


def test_the_module_of_it() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Classifier()
            self.loss = nn.CrossEntropyLoss(torch.rand(CLASSES), label_smoothing=0.1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.loss(self.model(x), y)

    torch.manual_seed(2)
    verified(Loss(), MESHES, None, data(ROWS * TIME), steps=1)


def test_all_labels_ignored_is_nan_or_zero_as_in_torch() -> None:
    x, y = data(ROWS * TIME)
    for reduction, weighted in itertools.product(("mean", "sum"), (False, True)):
        loss_fn = loss_of(reduction, weighted, label_smoothing=0.1)
        report = verify(Classifier(), "tp=2", loss_fn=loss_fn, batch=(x, torch.full_like(y, -100)), steps=1)
        assert report.ok, str(report)


def _sure(how: str) -> Callable[..., Tensor]:
    """A loss of labels whose logits are the largest of large ones."""

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        here = torch.arange(CLASSES, device=x.device) == y.unsqueeze(-1)
        logits = model(x) * 3 + here * 12 + 100
        match how:
            case "labels":
                return F.cross_entropy(logits, y)
            case "each":
                return (F.cross_entropy(logits, y, reduction="none") * torch.arange(1.0, len(y) + 1)).mean()
            case "weights":
                return F.cross_entropy(logits, y, weight=model.weight)
            case "smoothed":
                return F.cross_entropy(logits, y, label_smoothing=1e-5)
            case "smoothed with weights":
                return F.cross_entropy(logits, y, label_smoothing=1e-5, weight=model.weight)
            case "probabilities":
                return F.cross_entropy(logits, here.to(logits.dtype))
            case _:
                return F.nll_loss(F.log_softmax(logits, -1), y)

    return loss_fn


@pytest.mark.parametrize("mesh", ["dp=1", "tp=2", "dp=2,tp=3"])
@pytest.mark.parametrize("how", SURE)
def test_confident_samples_in_float32(how: str, mesh: str) -> None:
    """As exact as torch: the rounding is that of the loss, not of the logits, which are 1e5 times as large."""
    torch.manual_seed(1)
    model, x, y = Classifier(), torch.randn(ROWS * 4, WIDTH), torch.randint(CLASSES, (ROWS * 4,))
    loss_fn = _sure(how)
    captured = capture(model, loss_fn, (x, y), {})
    run = Virtual(
        copy.deepcopy(model), captured, lower(captured, mesh_of(mesh), options_of()), lambda p: torch.optim.SGD(p, 0.0)
    )
    got = run.step((x, y), {}, torch.zeros(2, dtype=torch.int64))
    exact, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
    want, torchs = loss_fn(exact, x.double(), y), loss_fn(plain, x, y)
    want.backward()
    torchs.backward()
    error, of_torch = (abs(float(one) - float(want)) for one in (got["loss", "loss"], torchs))
    assert error <= 4 * of_torch + 1e-7, (error, of_torch)
    for (name, p), q in zip(exact.named_parameters(), plain.parameters(), strict=True):
        error, of_torch = ((g.double() - p.grad).norm() / p.grad.norm() for g in (got["gradient", name], q.grad))
        assert error <= 4 * of_torch + 1e-7, (name, error, of_torch)


@pytest.mark.parametrize("loss_fn", [
    lambda model, x: torch.zeros(1, dtype=x.dtype) + model(x).square().sum(),
    lambda model, x: (model(x).square().mean(0, keepdim=True)[:, :1], model(x).sum()),
    lambda model, x: {"loss": model(x).square().mean().reshape(1)},
])  # fmt: skip
def test_a_loss_of_one_element_is_a_scalar(loss_fn: Callable[..., Any]) -> None:
    """`backward()` takes it for one: sums that begin with `torch.zeros(1)`. Red where it had to be reduced."""
    torch.manual_seed(0)
    model, x = nn.Linear(6, 4), torch.randn(6, 6)
    report = verify(model, "dp=3,tp=2", loss_fn=loss_fn, batch=(x,))
    assert report.ok, report
    with pytest.raises(CaptureError, match=r"a tensor of shape \[6\], but the loss must be a scalar"):
        verify(model, "dp=3", loss_fn=lambda model, x: model(x).sum(1), batch=(x,))
