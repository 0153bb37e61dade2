"""Parity: loss, gradients, buffers and trained weights of every model equal those of one device, in float64."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Case, token_loss
from models_special import ZOO
from torch import Tensor, nn

from autopar.capture import Captured, capture
from autopar.compiler.compile import batch_arguments, lower
from autopar.compiler.meshes import mesh_of
from autopar.errors import BatchError, LayoutError
from autopar.torch_compat import tree_map
from autopar.verification.verify import Report, cast, verify, verify_compiled

MESHES = ("dp=2", "tp=2", "dp=2,tp=2", "dp=3,tp=2", "tp=4")
# What cannot be split is refused, and says so; all other pairs of model and mesh are right.
REFUSED: dict[tuple[str, str], type[Exception]] = {
    **{("odd_mlp", mesh): LayoutError for mesh in MESHES if "tp" in mesh},
    **{("odd_batch", mesh): BatchError for mesh in MESHES if "dp" in mesh},
}
KINDS = {"loss", "gradient", "weight"}


def assert_equal(report: Report, model: nn.Module) -> None:
    """The report is right, and it compared everything: one gradient and one weight a parameter."""
    assert report.ok and report.max_error <= 1e-10, f"\n{report}"
    assert report.tolerance == 1e-10 and report.dtype == torch.float64
    rows: dict[str, set[str]] = {}
    for row in report.rows:
        rows.setdefault(row.kind, set()).add(row.name)
    names = {name for name, _ in model.named_parameters()}
    assert rows["loss"] == {"loss"} and rows["weight"] == names
    assert rows["gradient"] == {n for n, p in model.named_parameters() if p.requires_grad and "unused" not in n}
    assert rows.get("buffer", set()) == {name for name, _ in model.named_buffers()}


@functools.cache
def captured(name: str) -> tuple[Case, Captured, dict[str, Tensor]]:
    """A model in float64, captured once for all meshes, and its state from before."""
    model, loss_fn, batch = ZOO[name]()
    batch = tree_map(lambda leaf: cast(leaf, torch.float64), batch)
    before = {key: value.clone() for key, value in model.double().state_dict().items()}
    found = capture(model, loss_fn, *batch_arguments(batch), lift=torch.float64)
    return (model, loss_fn, batch), found, before


def every_mesh() -> Iterator[Any]:
    """Each model on each mesh; of dp and tp alone one by turns, and the other one is slow: each of them comes with
    the other axis, and of another size, to every model."""
    for (i, name), mesh in itertools.product(enumerate(ZOO), MESHES):
        is_quick = mesh not in MESHES[:2] or mesh == MESHES[i % 2] or (name, mesh) in REFUSED
        yield pytest.param(name, mesh, marks=() if is_quick else (pytest.mark.slow,))


@pytest.mark.parametrize(("name", "mesh"), list(every_mesh()))
def test_every_model_equals_one_device(name: str, mesh: str) -> None:
    (model, loss_fn, batch), found, before = captured(name)
    if (name, mesh) in REFUSED:
        with pytest.raises(REFUSED[name, mesh]):
            lower(found, mesh_of(mesh))
        return
    compiled = lower(found, mesh_of(mesh))
    assert_equal(verify_compiled(model, found, compiled, loss_fn=loss_fn, batch=batch), model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), "the model was changed"


def descent(parameters: object) -> torch.optim.Optimizer:
    """AdamW forgives a gradient that is wrong by a factor; plain descent does not."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["mlp", "gpt", "few_kv_heads", "frozen", "unused", "hf_gpt2"])
def test_plain_descent_equals_one_device(name: str) -> None:
    model, loss_fn, batch = ZOO[name]()
    report = verify(model, "dp=3,tp=2", loss_fn=loss_fn, batch=batch, optimizer=descent, steps=3)
    assert report.steps == 3
    assert_equal(report, model)


@pytest.mark.parametrize("mesh", ["", "dp=1", "tp=1", "dp=1,tp=2", "tp=2,dp=2", "dp=6", "dp=12", "dp=4,tp=4"])
def test_other_meshes(mesh: str) -> None:
    """Sizes of 1, the axes the other way round, one row a rank, 16 ranks; no axis at all is a mesh of one."""
    (model, loss_fn, batch), found, _ = captured("gpt")
    compiled = lower(found, mesh_of(mesh or {}))
    assert_equal(verify_compiled(model, found, compiled, loss_fn=loss_fn, batch=batch), model)


class IntegerMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(8, 16), nn.Linear(16, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.down(F.relu(self.up(x)))))


class LinearBlock(nn.Module):
    """Attention without its softmax: causally masked products of integers are integers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
        a = ((q @ k.transpose(-1, -2)) * mask) @ v
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(x)))


class LinearGPT(nn.Module):
    """A GPT of additions and multiplications only, with tied embeddings."""

    def __init__(self, vocabulary: int = 8, context: int = 4, width: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.block = LinearBlock(width, heads)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.tokens(x) + self.positions(torch.arange(x.shape[1]))))


def integers(model: nn.Module, seed: int) -> nn.Module:
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=random))
    return model


def integer_mlp() -> tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, ...]]:
    x = torch.randint(-3, 4, (12, 8)).float()
    y = torch.randint(-3, 4, (12, 4)).float()
    return integers(IntegerMLP(), 1), lambda model, x, y: (model(x) - y).square().sum() / 4, (x, y)


def integer_gpt() -> tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, ...]]:
    x, y = torch.randint(8, (12, 4)), torch.randint(-3, 4, (12, 4, 8)).float()
    return integers(LinearGPT(), 2), lambda model, x, y: (model(x) - y).square().sum() / 4, (x, y)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("make", [integer_mlp, integer_gpt])
def test_integers_are_equal_to_the_bit(make: Callable[[], tuple], mesh: str) -> None:
    """Sums of small integers are exact in any order, so that nothing but a wrong program can make a difference."""
    model, loss_fn, batch = make()
    report = verify(model, mesh, loss_fn=loss_fn, batch=batch, steps=1, optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    assert report.ok and report.max_error == 0.0, f"\n{report}"
    assert max(row.replicas for row in report.rows) == 0.0
    double = model.double()
    loss = loss_fn(double, *(t.double() if t.is_floating_point() else t for t in batch))
    loss.backward()
    assert 0 < loss.item() < 2**50 and float(4 * loss).is_integer()
    assert all(p.grad is not None and (4 * p.grad).frac().eq(0).all() for p in double.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_are_compared_within_their_rounding(dtype: torch.dtype) -> None:
    model, _, batch = ZOO["gpt"]()
    report = verify(model, "dp=2,tp=2", loss_fn=token_loss, batch=batch, dtype=dtype, steps=1)
    assert report.dtype == dtype and report.tolerance > 1e-10
    assert report.max_error > 0.0  # the ranks do add in another order
    assert {row.kind for row in report.rows} == KINDS
