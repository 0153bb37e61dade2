"""Rules of thumb come out of programs: 16 bytes a parameter, and what a layer of a GPT keeps for the backward pass."""

from __future__ import annotations

import functools

import pytest
import sympy
import torch
from gpt import Block, GPTConfig
from models import mlp
from torch import nn

import autopar
from autopar.compiled import Compiled
from autopar.compiler.check_options import options_of
from autopar.compiler.meshes import mesh_of
from autopar.errors import PlanError
from autopar.ir.modules import unit_of
from autopar.planning.space.batches import sizes_of
from autopar.report.memory.formula import (
    WHOLE,
    Sizes,
    activation_formulas,
    fit,
    saved_by_module,
    states_formula,
)
from autopar.report.memory.show_memory import _builder

a, b, h, s, P, T = sympy.symbols("a b h s P T", positive=True)


class Scaled(nn.Module):
    """A layer whose input is a value of the step, and not the batch."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.block = Block(GPTConfig(8, sizes["s"], 1, sizes["a"], sizes["h"]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x * self.scale)


class Stack(nn.Module):
    """Three layers alike, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head = nn.Sequential(nn.Linear(8, 6), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def total(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sum()


@functools.cache
def layer(b: int, s: int, h: int, a: int, mesh: str = "dp=1") -> Compiled:
    with torch.device("meta"):
        model = Scaled({"s": s, "h": h, "a": a}).bfloat16()
        x = torch.empty(b, s, h, dtype=torch.bfloat16)
    return autopar.compile(model, mesh, loss_fn=total, batch=(x,))


def count(sizes: Sizes, mesh: str = "dp=1", device: str = "cpu") -> int:
    return saved_by_module(layer(**sizes, mesh=mesh), device=device)[WHOLE]


POINTS = [
    {"b": 2, "s": 8, "h": 16, "a": 2},
    {"b": 2, "s": 16, "h": 16, "a": 2},
    {"b": 2, "s": 8, "h": 32, "a": 2},
    {"b": 2, "s": 8, "h": 16, "a": 4},
    {"b": 4, "s": 8, "h": 16, "a": 2},
    {"b": 4, "s": 16, "h": 24, "a": 4},
]
TERMS = ["s*b*h", "a*s**2*b", "a*s*b", "s*b", "1"]
LOSS = 4  # the loss and its gradient


def test_a_layer_keeps_what_korthikanti_counts_but_what_we_do_not_keep():
    """arXiv 2205.05198, section 4.1, counts 34 sbh + 5 a s^2 b bytes with 2 bytes a value. Ours is that without
    - the masks of two dropouts, 2 sbh of 1 byte (masks are drawn again, and this layer has none),
    - the scores: softmax, its mask and its dropout's result, 5 a s^2 b (attention computes them again),
    and with the scores' logsumexp in fp32, 4 a s b, and mean and scale of two norms, 8 s b on the CPU."""
    assert fit(count, "bsha", TERMS, POINTS) == 32 * b * h * s + 4 * a * b * s + 8 * b * s + LOSS


def test_a_gpu_keeps_the_same_but_for_the_norms() -> None:
    """Whose mean and scale are fp32 there. (Heads of 8 and more, which need no padding.)"""
    points = [point | {"h": 4 * point["h"]} for point in POINTS]
    found = fit(functools.partial(count, device="cuda"), "bsha", TERMS, points)
    assert found == 32 * b * h * s + 4 * a * b * s + 16 * b * s + LOSS


def test_tensor_parallel_ranks_keep_less():
    """The paper's equation 2: what the norms and the residuals keep is on every rank, the rest is divided by t."""
    expected = (8 + 24 // 2) * b * h * s + 2 * a * b * s + 8 * b * s + LOSS
    for point in POINTS[:2]:
        values = dict(zip((b, s, h, a), (point["b"], point["s"], point["h"], point["a"]), strict=True))
        assert count(point, mesh="tp=2") == expected.subs(values)


def test_sixteen_bytes_a_parameter():
    """4 of the weight, 4 of the gradient, 8 of Adam, as arXiv 1910.02054 has them in mixed precision (2 + 2 + 12)."""
    model, loss_fn, batch = mlp()
    compiled = autopar.compile(model, "dp=1", loss_fn=loss_fn, batch=batch)
    found = states_formula(compiled, device="cpu")
    assert found.expression == 16 * P + 4 * T
    sizes = [parameter.numel() for parameter in model.parameters()]
    assert found.value == 16 * sum(sizes) + 4 * len(sizes)
    assert "4 parameters + 4 gradients + 8 optimizer states" in str(found)
    plain = states_formula(compiled, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), device="cpu")
    assert plain.expression == 8 * P


def test_layers_alike_are_one_line():
    model = Stack()

    def build(sizes: Sizes) -> Compiled:
        return autopar.compile(model, "dp=1", loss_fn=total, batch=(torch.zeros(sizes["b"], 8),))

    found = activation_formulas(build, "b", ["b", "1"], [{"b": 2}, {"b": 4}, {"b": 3}], device="cpu")
    blocks = [formula for formula in found if formula.name.startswith("blocks")]
    assert len(blocks) == 1 and blocks[0].count == len(model.blocks)
    whole = next(formula for formula in found if formula.name == WHOLE)
    parts = sum((f.expression * f.count for f in found if f is not whole), sympy.Integer(0))
    assert sympy.expand(parts - whole.expression) == 0, "the layers sum to the whole"
    assert whole.expression.subs({b: 3}) == whole.value == count_of(build({"b": 3}))


def count_of(compiled: Compiled) -> int:
    return saved_by_module(compiled, device="cpu")[WHOLE]


def test_a_fit_is_exact_or_refused():
    def square(point: Sizes) -> int:
        return point["b"] ** 2 + 7

    points = [{"b": size} for size in (1, 2, 3, 4)]
    assert fit(square, "b", ["b**2", "b", "1"], points) == b**2 + 7
    with pytest.raises(PlanError, match=r"no sum of b, 1 gives these bytes \(\{'b': 1\}: 8; \{'b': 2\}: 11"):
        fit(square, "b", ["b", "1"], points)


def test_names_of_layers_and_sizes():
    assert [unit_of(path) for path in ("blocks.0.attn.q", "head", "", "a.b")] == ["blocks.0", "head", "", "a"]
    ids = torch.zeros(6, 5, dtype=torch.int64)
    assert sizes_of((ids, ids)) == {"b": 6, "s": 5}
    assert sizes_of({"x": torch.zeros(4, 3)}) == {"b": 4}
    assert sizes_of(torch.tensor(1.0)) == {}


def test_formulas_are_of_the_program_that_is_trained() -> None:
    """Under a precision too: the capture keeps what the model does in another float."""
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16))
    job = autopar.Job(model, total, (torch.randn(4, 8, 16),), precision="bf16")
    mesh, choices = mesh_of("dp=2"), options_of(**job.step)
    built = _builder(job, mesh, choices)({"b": 4, "s": 8})
    trained = autopar.compile(model, mesh, loss_fn=total, batch=job.batch, precision="bf16")
    assert "bf16" in built.text()
    assert saved_by_module(built) == saved_by_module(trained)
