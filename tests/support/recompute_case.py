"""Models and helpers for the tests of recomputation: each is captured once."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from gpt import GPT, GPTConfig
from models import Llama, NanoGPT, labels, mlp, token_loss, tokens, uneven
from test_sequence_parallel import Layer
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from autopar.capture import Captured, capture
from autopar.compiled import Compiled
from autopar.compiler.check_options import options_of
from autopar.compiler.compile import lower
from autopar.compiler.meshes import mesh_of
from autopar.ir.options import StepOptions
from autopar.ir.program import Program, record
from autopar.passes.recompute import recompute
from autopar.verification.verify import verify_compiled

Made = tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, ...]]
TIME, VOCABULARY = 8, 40


def gpt() -> Made:
    torch.manual_seed(0)
    model = uneven(GPT(GPTConfig(VOCABULARY, TIME, layers=2, heads=4, width=16, dropout=0.2))).train()
    return model, token_loss, (tokens(), labels())


def written_out() -> Made:
    """Attention as products and a softmax, with dropout inside."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 16), Layer(16, 4), Layer(16, 4))
    return uneven(model).train(), lambda m, x: m(x).square().mean(), (torch.randn(12, TIME, 16),)


def tied() -> Made:
    torch.manual_seed(2)
    return uneven(NanoGPT(16)), lambda model, x, y: model(x, y)[1], (tokens(), labels())


class Checkpointed(nn.Module):
    """The user computes the inner layers again already."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(16, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def checkpointed() -> Made:
    torch.manual_seed(3)
    return uneven(Checkpointed()).train(), lambda m, x: m(x).square().mean(), (torch.randn(12, TIME, 16),)


def llama(layers: int = 4) -> Made:
    torch.manual_seed(4)
    model = Llama(layers, 32, 4, 4, 96, VOCABULARY, 32)
    for block in model.blocks:
        block.rotate = lambda x, cos, sin: x  # type: ignore[assignment]  # fewer nodes
    return model, token_loss, (tokens(12, 32), labels(12, 32))


class Wave(nn.Module):
    """In place, if nothing but the forward pass looked at x."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(torch.exp(self.act(x * 0.5)))


def waves() -> Made:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 8), Wave(), Wave(), nn.Linear(8, 8))
    return model, lambda m, x: m(x).square().mean(), (torch.randn(12, 8),)


def deep() -> Made:
    return llama(6)


MODELS = {make.__name__: make for make in (gpt, written_out, tied, checkpointed, llama, waves, mlp, deep)}


@functools.cache
def captured(name: str, double: bool = True) -> tuple[Made, Captured]:
    model, loss_fn, batch = MODELS[name]()
    if double:
        model = model.double()
        batch = tuple(x.double() if x.is_floating_point() else x for x in batch)
    lift = torch.float64 if double else None
    return (model, loss_fn, batch), capture(model, loss_fn, batch, {}, lift=lift)


def compiled(name: str, mesh: str, double: bool = True, **options: Any) -> Compiled:
    return Compiled.of(lower(captured(name, double)[1], mesh_of(mesh), options_of(**options)))


@functools.cache
def localized(name: str, mesh: str) -> Compiled:
    return compiled(name, mesh, double=False)


def with_policy(name: str, mesh: str, policy: Any) -> Program:
    found = localized(name, mesh)
    return recompute(dict(found.history)["partition"], replace(found.plan, options=StepOptions(recompute=policy)))


def duplicates(program: Program) -> list[fx.Node]:
    return [node for node in program.calls() if record(node).made_by == "recompute"]


def check(name: str, found: Compiled, steps: int = 1) -> Any:
    (model, loss_fn, batch), known = captured(name)
    return verify_compiled(copy.deepcopy(model), known, found, loss_fn=loss_fn, batch=batch, steps=steps)
