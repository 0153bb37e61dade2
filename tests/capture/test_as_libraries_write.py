"""What libraries of PyPI write, each as a small model of its own."""

from __future__ import annotations

import copy
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar import parallelize, verify
from autopar.capture.raising import Raise
from autopar.errors import CaptureError
from autopar.verification.copies import copied


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


class Gathered(nn.Module):
    """g-mlp-pytorch: the layers that a draw has left are called as a Sequential made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Any:
        return nn.Sequential(*self.layers)(x)


class Made(Gathered):
    """Beside its own layers one that no optimizer knows."""

    def forward(self, x: Tensor) -> Any:
        return nn.Sequential(*self.layers, nn.Linear(8, 8, dtype=x.dtype))(x)


class Bytes(nn.Module):
    """pytorch-crf: a mask of bytes chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        mask = (x > 0).to(torch.uint8)
        return torch.where(mask, y, -y) + y.where(mask, x)


class Marked(nn.Module):
    """vector-quantize-pytorch: a sum of losses begins with a buffer that is marked as one with a gradient."""

    zero: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("zero", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        total = self.zero
        total.requires_grad_()
        return self.inner(x) + total


class Locked(Gathered):
    """What Python cannot copy, and copies may share. rotary-embedding-torch: a function as a static method."""

    def __init__(self) -> None:
        super().__init__()
        self.turned, self.held = staticmethod(torch.flip), {"more": [SimpleNamespace(lock=threading.Lock()), sys]}

    def forward(self, x: Tensor) -> Any:
        with self.held["more"][0].lock:
            return self.turned(super().forward(x), (1,))


class Running(Gathered):
    """Something that Python cannot copy, and that knows where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = (i for i in range(3))


class Nothing(Gathered):
    """snntorch: a tensor is compared with what is none."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        y = y if y == None else y * 2  # noqa: E711
        return y * 3 if y == "" or y == None or y in ((), None) else y * 2 if y != "" else y  # noqa: E711


class Keeping(Gathered):
    """snntorch, gpytorch: what a call computed stays in a list."""

    def forward(self, x: Tensor) -> Any:
        self.kept = [super().forward(x)]
        return self.kept[0]


@pytest.mark.parametrize("options", [{}, {"microbatches": 2}], ids=["whole", "microbatches"])
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=3"])
@pytest.mark.parametrize("make", [Gathered, Bytes, Marked, Locked, Nothing])
@pytest.mark.filterwarnings("ignore:where received a uint8:UserWarning")
def test_taken(make: Any, mesh: str, options: Any) -> None:
    torch.manual_seed(0)
    report = verify(make(), mesh, loss_fn=squares, batch=torch.randn(12, 8), **options)
    assert report.ok, str(report)


def test_what_copies_share_is_not_changed() -> None:
    """A module of Python: its table of modules is no copy of itself afterwards."""
    before = dict(vars(sys))
    copied(Locked())
    assert {name: id(value) for name, value in vars(sys).items()} == {name: id(was) for name, was in before.items()}


def test_a_layer_that_is_made_in_forward_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"\(Sequential\) with parameters that is made or copied in forward"):
        verify(Made(), "dp=2", loss_fn=squares, batch=torch.randn(12, 8))


def test_what_cannot_be_copied_is_named() -> None:
    with pytest.raises(CaptureError, match=r"copy\.deepcopy of Running fails: TypeError: cannot pickle"):
        verify(Running(), "dp=2", loss_fn=squares, batch=torch.randn(12, 8))


def test_a_model_that_keeps_what_it_computed_is_named() -> None:
    model, x = Keeping(), torch.randn(12, 8)
    model(x)
    with pytest.raises(
        CaptureError, match=r"copy\.deepcopy of Keeping fails: .*give verify a model that has not run yet"
    ):
        verify(model, "dp=2", loss_fn=squares, batch=x)


# --- and what of that needs to know where a value comes from


class Kept(nn.Module):
    """ncps: a cell reads its parameters from a dict of its own, or a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.kept = {"first": self.first, "more": [self.second, self.frozen]}

    def forward(self, x: Tensor) -> Tensor:
        second, frozen = self.kept["more"]
        return torch.addcmul(x @ self.kept["first"] + self.second, second, frozen)


class Moved(nn.Module):
    """pytorch-metric-learning: a weight is moved to the device where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data.to(x.device, x.dtype)
        return x @ self.weight


class Compared(nn.Module):
    """gpytorch: a kernel between a tensor and itself is another one than between two."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def kernel(self, a: Tensor, b: Tensor) -> Tensor:
        if torch.equal(a, b):
            return a * 3
        return a * 2 if a.equal(b[:, :4]) else a + b

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return self.kernel(y, y) + self.kernel(y.view(-1, 8), y.detach()).square()


class Marks(nn.Module):
    """pytorch-metric-learning: marks in the form of what weights made, and a check of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        ones, twos, none = torch.ones_like(y), y.new_full((8,), 2.0), torch.full_like(y, 0.0)
        assert not torch.any((ones != 0) & (none != 0)), "each is one or the other"
        return y * twos if (twos > 1).all() else y


class Recurrent(nn.Module):
    """asteroid: dropout between the layers of an RNN."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(8, 6, num_layers=3, dropout=0.4, **options)

    def forward(self, x: Tensor) -> Tensor:
        y, state = self.rnn(x.view(12, 2, 4).repeat(1, 1, 2))
        hidden, cell = state if isinstance(state, tuple) else (state, state)
        return y.sum((0, 1)) * hidden.square().sum() + cell.sum()


RECURRENT = [
    pytest.param(lambda kind=kind, options=options: Recurrent(kind, **options), id=f"{kind} {options}")
    for kind in ("LSTM", "GRU", "RNN")
    for options in ({}, {"batch_first": True, "bidirectional": True})
] + [pytest.param(lambda: Recurrent("LSTM", proj_size=4, bias=False), id="LSTM with a projection")]


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=3"])
@pytest.mark.parametrize("make", [Kept, Moved, Compared, Marks, lambda: Recurrent("RNN")])
def test_taken_too(make: Any, mesh: str) -> None:
    _taken(make, mesh)


@pytest.mark.parametrize("mesh", [pytest.param("dp=2,tp=2", marks=pytest.mark.slow), "dp=3"])
@pytest.mark.parametrize("make", RECURRENT)
def test_recurrences_are_taken_too(make: Any, mesh: str) -> None:
    """Over tp the search of layouts of unrolled loops takes seconds."""
    _taken(make, mesh)


def _taken(make: Any, mesh: str) -> None:
    torch.manual_seed(0)
    report = verify(make(), mesh, loss_fn=squares, batch=torch.randn(12, 8))
    assert report.ok and report.max_error < 1e-10, str(report)


@pytest.mark.parametrize("make", RECURRENT)
def test_a_layer_at_a_time_is_what_torch_computes(make: Any) -> None:
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(12, 8, dtype=torch.float64)
    with torch.no_grad(), Raise(seed=torch.tensor([1, 1])):
        dropped = [model(x), model(x)]
    assert not torch.allclose(*dropped)
    model.rnn.dropout = 1e-12
    with torch.no_grad(), Raise(seed=torch.tensor([1, 1])):
        found = model(x)
    torch.testing.assert_close(found, model.eval()(x))


def test_a_parameter_in_a_dict_is_trained_on_ranks() -> None:
    torch.manual_seed(0)
    plain, x = Kept(), torch.randn(12, 8)
    parallel = parallelize(copy.deepcopy(plain), "dp=1", loss_fn=squares)
    for model in (parallel, plain):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss = parallel.forward_backward(x) if model is parallel else squares(plain, x)
            if model is plain:
                loss.backward()
            optimizer.step()
    for name, value in parallel.full_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])


class Reading(nn.Module):
    """Two tensors with the same values, or forms, are not the same tensor."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self.inner, self.read = nn.Linear(8, 8), read

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y * 2 if self.read(y) else y


def halved(y: Tensor) -> bool:
    marks = torch.zeros_like(y)
    marks[0] = y[0]
    return bool((marks == 0).all())


@pytest.mark.parametrize(
    "read",
    [lambda y: torch.equal(y, y.clone()), lambda y: torch.equal(y[:4], y[4:8]), lambda y: torch.equal(y, y.flip(0)),
     halved, lambda y: (y.new_tensor([1.0, 2.0]) + y[0, :2] > 1).all()],
)  # fmt: skip
def test_what_weights_decide_is_guarded(read: Any) -> None:
    assert verify(Reading(read), "dp=2", loss_fn=squares, batch=torch.randn(12, 8)).ok


def test_data_of_another_tensor_is_refused() -> None:
    class Halved(Moved):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data = self.weight.data.t()
            return x @ self.weight

    with pytest.raises(CaptureError, match=r"an assignment to \.data"):
        verify(Halved(), "dp=2", loss_fn=squares, batch=torch.randn(12, 8))


class Plainly(nn.Module):
    """pytorch-tabnet: a table is a plain attribute, in float32 whatever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table, self.more = (
            nn.Linear(8, 8),
            torch.rand(8, 8),
            [torch.rand(8), {"mask": torch.arange(8)}],
        )
        self.again = self.table

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(self.inner(x), self.table).addmm(x, self.again) * self.more[0] + self.more[1]["mask"]


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=3"])
def test_plain_tensors_are_compared_in_the_dtype_of_the_rest(mesh: str) -> None:
    torch.manual_seed(0)
    model = Plainly()
    report = verify(model, mesh, loss_fn=squares, batch=torch.randn(12, 8))
    assert report.ok and report.max_error < 1e-10, str(report)
    assert model.table.dtype == torch.float32 and model.more[1]["mask"].dtype == torch.int64


def test_a_plain_model_that_fails_in_another_dtype_is_told_in_a_sentence() -> None:
    class Fixed(Gathered):
        def forward(self, x: Tensor) -> Any:
            assert hasattr(x, "fake_mode") or x.dtype == torch.float32, "rows must be float32"  # as in a trace
            return super().forward(x)

    with pytest.raises(CaptureError) as found:
        verify(Fixed(), "dp=2", loss_fn=squares, batch=torch.randn(12, 8))
    text = str(found.value)
    assert text.startswith(f"the plain model fails in float64, at {__file__}:") and "rows must be float32" in text
    assert "verify(..., dtype=torch.float32)" in text
    assert verify(Fixed(), "dp=2", loss_fn=squares, batch=torch.randn(12, 8), dtype=torch.float32).ok


def norms(p: list[Tensor]) -> list[Tensor]:
    return torch._foreach_norm(p)


def products(p: list[Tensor]) -> list[Tensor]:
    return torch._foreach_mul(torch._foreach_pow(p, 2), [x.abs() for x in p])


def averages(p: list[Tensor]) -> list[Tensor]:
    """Weights that move, in place."""
    moved = [x.detach().clone() for x in p]
    torch._foreach_lerp_(moved, [torch.zeros_like(x) for x in p], 0.3)
    torch._foreach_add_(moved, [x.detach() for x in p], alpha=0.1)
    return torch._foreach_sub(p, moved)


@pytest.mark.parametrize("lists", [norms, products, averages])
@pytest.mark.parametrize(("mesh", "microbatches"), [("dp=2,tp=2", 1), ("pp=2,dp=2", 2)])
def test_ops_on_lists_of_weights(lists: Any, mesh: str, microbatches: int) -> None:
    """A penalty by `torch._foreach_*`, as optimizers and clipping are written: each weight is split as ever."""
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return squares(model, x) + 0.1 * torch.stack([x.square().sum() for x in lists(list(model.parameters()))]).sum()

    report = verify(model, mesh, loss_fn=loss, batch=(torch.randn(12, 8),), microbatches=microbatches)
    assert report.ok and report.max_error < 1e-10, report
