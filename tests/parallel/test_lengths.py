"""Sequences whose length changes from step to step: traced anew, with the layouts of the first, and right."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import Ranks
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.compiler.compile import lower
from autopar.ir.mesh import parse_mesh
from autopar.ir.options import StepOptions
from autopar.ir.plan import Fixed

LENGTHS = (8, 12, 7, 16, 5, 20, 12)
FEW = (8, 12, 7, 8)
TOKENS, WIDTH, MOST = 24, 16, 24


class Layer(nn.Module):
    """Attention whose every number follows the length in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        rows, length, _ = h.shape
        q, k, v = self.qkv(self.norm(h)).view(rows, length, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(length)
        scores = scores.masked_fill(mask, -1e4).softmax(-1)
        h = h + self.out((scores @ v).transpose(1, 2).reshape(rows, length, WIDTH))
        return h + self.down(F.gelu(self.up(h)))


class Lengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(MOST, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, TOKENS)
        self.mask: Tensor
        self.register_buffer("mask", torch.ones(MOST, MOST, dtype=torch.bool).triu(1))
        self.far, self.near = 0.5, 0.25

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        h = self.tokens(x) + self.places(torch.arange(length)) * (1 / length)
        if length > 10:  # another program
            h = torch.tanh(h)
        for layer in self.layers:
            h = layer(h, self.mask[:length, :length])
        # The same program with another number, that follows no size linearly.
        h = h * (self.far if length % 3 == 0 else self.near) * length**2 * (1 + length // 4)
        half = h[:, : length // 2].mean(1, keepdim=True)
        return self.head(h + half)


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)


def plain() -> nn.Module:
    torch.manual_seed(3)
    return Lengths().double()


def batch(length: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    x, y = (torch.randint(TOKENS, (rows, length), generator=generator) for _ in range(2))
    return x, y.masked_fill(y < 3, -100)


def _train(rank: int, mesh: str, options: dict[str, Any], lengths: tuple[int, ...]) -> None:
    model = autopar.parallelize(plain(), mesh, loss_fn=loss_of, **options)
    for length in lengths:
        one = plain()
        want = loss_of(one, *batch(length))
        want.backward()
        model.zero_grad()
        found = model.forward_backward(*batch(length))
        torch.testing.assert_close(found, want.detach(), rtol=1e-10, atol=0, msg=f"{mesh} {options} {length}")
        gradients = model.full_gradients()
        for name, parameter in one.named_parameters() if rank == 0 else ():
            grad = parameter.grad
            torch.testing.assert_close(gradients[name], grad, rtol=1e-8, atol=1e-10, msg=f"{name} {length}")


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("dp=2,tp=2", {}),
        pytest.param("dp=2,tp=2", {"sequence_parallel": True}, marks=pytest.mark.slow),
        ("dp=2,tp=2", {"microbatches": 2, "zero": 3}),
        ("pp=2,dp=2", {"microbatches": 2}),
        ("dp=2,cp=2", {}),
    ],
)
def test_each_length_is_right(four: Ranks, mesh: str, options: dict[str, Any]) -> None:
    four.run(_train, mesh, options, FEW if options else LENGTHS, timeout=170)


def _compile(model: nn.Module, length: int, decided: Any) -> Any:
    captured = capture(model, loss_of, batch(length), {})
    return lower(captured, parse_mesh("dp=2,tp=2"), StepOptions(), Fixed(uneven=True, decided=decided))


def test_a_length_has_the_layouts_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """No search runs for a second length, and the program is the one that a search gives."""
    model = plain()
    first = _compile(model, 8, {})
    alone = _compile(model, 9, {})
    structure, layouts = first.decided
    assert alone.decided == (structure, layouts)
    monkeypatch.setattr(importlib.import_module("autopar.passes.search.propagate"), "axis_searches", _never)
    second = _compile(model, 9, {structure: layouts})
    assert second.text() == alone.text()
    with pytest.raises(AssertionError, match="searched"):  # another branch
        _compile(model, 12, {structure: layouts})


def test_layouts_that_do_not_fit_are_searched_for() -> None:
    """A layout that splits what this size cannot divide is not taken over."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def loss(module: Any, x: Tensor) -> Tensor:
        result: Tensor = (module(x) ** 2).mean()
        return result

    programs = []
    decided: dict[Any, Any] = {}
    for rows in (8, 7, 6):
        fixed = Fixed(uneven=True, decided=decided)
        made = lower(capture(model, loss, (torch.randn(rows, 8),), {}), parse_mesh("dp=2"), StepOptions(), fixed)
        decided.setdefault(*made.decided)
        programs.append(made.text())
    assert "[dp,-]" in programs[0] and "[dp,-]" in programs[2]
    assert "[dp" not in programs[1].replace("[dp]", "")


def _never(*_: Any) -> Any:
    raise AssertionError("searched")


def _passes_of_auto(rank: int) -> None:
    compiler = importlib.import_module("autopar.compiler.sequence")
    passes, runs = compiler.run_passes, []

    def counted(program: Any, plan: Any, **how: Any) -> Any:
        runs.append(plan.sequence_parallel)
        return passes(program, plan, **how)

    compiler.run_passes = counted
    # A rank that waits for another one less than five minutes compiles on its own.
    model = autopar.parallelize(plain(), "dp=2,tp=2", loss_fn=loss_of, sequence_parallel="auto", timeout=60)
    model.prepare(*batch(8))
    assert runs == [True, False], "both are compared"
    chosen = model.programs[-1].compiled.plan.sequence_parallel
    for length in (12, 16):
        runs.clear()
        model.prepare(*batch(length))
        assert runs == [chosen], f"length {length}: {runs}, decided {chosen}"
    runs.clear()
    model.prepare(*batch(9))  # which tp=2 cannot divide
    assert runs == ([True, False] if chosen else [False])
    assert not model.programs[-1].compiled.plan.sequence_parallel


@pytest.mark.gloo
def test_what_auto_means_is_decided_once(four: Ranks) -> None:
    """A further length goes through the passes once, with or without sequence parallelism as the first one."""
    four.run(_passes_of_auto, timeout=120)


@pytest.mark.parametrize(("length", "decided", "found"), [(8, True, True), (9, True, False), (8, False, False)])
def test_a_decision_holds_where_it_divides(length: int, decided: bool, found: bool) -> None:
    captured = capture(plain(), loss_of, batch(length), {})
    fixed = Fixed(uneven=True, sequence=decided)
    compiled = lower(captured, parse_mesh("dp=2,tp=2"), StepOptions(sequence_parallel="auto"), fixed)
    assert compiled.plan.sequence_parallel is found
    assert compiled.sequence is None, "no costs were asked"


class Weighted(nn.Module):
    """A mean with a weight that is another number in each step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.tokens, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.weight, self.table = 0.5, torch.linspace(0, 1, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) * self.table
        logits: Tensor = self.head(h + h.mean(1, keepdim=True) * self.weight / math.sqrt(x.shape[1]))
        return logits


def test_programs_of_further_lengths_are_made_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a number that became an input after two changes, whose values are those of each step."""
    foreseen = importlib.import_module("autopar.capture.resizing.earlier").Foreseen
    program, made = foreseen.program, list[int]()
    monkeypatch.setattr(foreseen, "program", lambda self: made.append(1) or program(self))
    one, other = Weighted().double(), Weighted().double()
    model = autopar.parallelize(other, "dp=1", loss_fn=loss_of)
    counts = []
    for weight, length in zip((0.5, 0.7, 0.9, 0.4, 0.3, 0.6, 0.8, 0.2), (8, 12, 7, 16, 5, 20, 22, 12), strict=True):
        one.weight = other.weight = weight
        one.zero_grad()
        model.zero_grad()
        want = loss_of(one, *batch(length))
        want.backward()
        torch.testing.assert_close(model.forward_backward(*batch(length)), want.detach(), rtol=1e-12, atol=0)
        gradients = model.full_gradients()
        for name, parameter in one.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-14)
        counts.append(len(made))
    assert counts[-3:] == [counts[-4] + i for i in (1, 2, 3)] and counts[2] == 0, counts
