"""Every sum of gradients is in `reduce_dtype`, with ZeRO and without, and `verify` says so if one is not."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mixtures import Kind, mixture_case
from test_precision import BF16, F32, gpt, llama
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import autopar
from autopar.capture import Captured
from autopar.compiled import Compiled
from autopar.compiler.check_options import options_of
from autopar.compiler.compile import batch_arguments, capture_step, lower
from autopar.compiler.meshes import mesh_of
from autopar.errors import VerificationError
from autopar.ir.ops.measure import local_type
from autopar.ir.ops.ops import is_collective
from autopar.ir.program import operand_nodes, record
from autopar.passes.search.items import Classes
from autopar.verification.judge.sum_dtypes import sums_of_gradients, wrong_sums

ASKED = [
    ({"precision": "bf16"}, F32),
    ({"precision": "fp16"}, F32),
    ({"precision": "bf16", "reduce_dtype": BF16}, BF16),
    ({"reduce_dtype": BF16}, BF16),
]


def compiled(mesh: str, case: Any = gpt, **options: Any) -> Compiled:
    return Compiled.of(lower(captured(case, options.get("precision")), mesh_of(mesh), options_of(**options)))


@functools.cache
def captured(case: Any, precision: str | None) -> Captured:
    model, loss_fn, batch = case()
    return capture_step(model, loss_fn, *batch_arguments(batch), options_of(precision=precision))


def dtypes(found: Compiled) -> set[torch.dtype]:
    return {record(operand_nodes(node)[0]).type.dtype for node in sums_of_gradients(found.program)}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("options", "dtype"), ASKED)
def test_gradients_are_summed_in_reduce_dtype(options: dict[str, Any], dtype: torch.dtype, stage: int) -> None:
    """All of them, by the bytes: a sum that is not found is no sum in the right dtype."""
    found = compiled("dp=2", zero=stage, **options)
    rows = [row for row in found.collectives if row.phase == "backward" and row.shape and row.op != "all_gather"]
    assert {row.dtype for row in rows} == dtypes(found) == {dtype}
    parameters = sum(p.numel() for p in gpt()[0].parameters())
    assert sum(row.bytes for row in rows) == parameters * dtype.itemsize, "each gradient once, in a bucket"
    sums = [local_type(operand_nodes(node)[0], found.mesh) for node in sums_of_gradients(found.program)]
    assert sum(one.bytes_ for one in sums) == parameters * dtype.itemsize


@pytest.mark.parametrize("case", [gpt, llama])
@pytest.mark.parametrize(("mesh", "axis"), [("dp=2,tp=2", "dp"), ("pp=2,fsdp=2", "fsdp")])
@pytest.mark.parametrize(("options", "dtype"), ASKED[::2])
def test_on_more_axes_and_over_micro_batches(
    options: dict[str, Any], dtype: torch.dtype, mesh: str, axis: str, case: Any
) -> None:
    found = compiled(mesh, case, zero=3, microbatches=2, **options)
    assert {node.args[1] for node in sums_of_gradients(found.program)} == {"mb", axis}
    assert dtypes(found) == {dtype}
    assert wrong_sums(found) == ()


def _mixture() -> Any:
    model, batch = mixture_case(Kind(bias=True, blocks=1))
    return model, None, batch


EVERYWHERE: list[tuple[Any, str, dict[str, Any]]] = [
    (gpt, "tp=2", {"sequence_parallel": True}),
    (llama, "tp=2", {"sequence_parallel": True, "recompute": "full"}),
    (llama, "dp=2,tp=2", {"sequence_parallel": True, "zero": 2}),
    (gpt, "fsdp=2,tp=2", {"sequence_parallel": True, "zero": 3, "microbatches": 2}),
    (gpt, "cp=2", {}),
    (llama, "cp=2,tp=2", {"sequence_parallel": True}),
    (gpt, "ulysses=2", {}),
    (llama, "pp=2,tp=2", {"sequence_parallel": True, "microbatches": 2}),
    (gpt, "pp=2", {"microbatches": 2, "slices": 2, "schedule": "seq1f1b"}),
    (_mixture, "ep=2", {}),
    (_mixture, "ep=2,tp=2", {"sequence_parallel": True, "recompute": "selective"}),
]


@pytest.mark.parametrize(("case", "mesh", "options"), EVERYWHERE)
def test_no_collective_sums_gradients_in_another_dtype(case: Any, mesh: str, options: dict[str, Any]) -> None:
    """Neither too short nor, where a short float is asked for, before or behind the casts to it: that moves twice as
    much."""
    for asked, dtype in (ASKED[0], ASKED[2], ({"precision": "fp16", "reduce_dtype": BF16}, BF16)):
        found = compiled(mesh, case, **options, **asked)
        assert wrong_sums(found) == ()
        assert dtypes(found) == {dtype}


@pytest.mark.parametrize("model", [torch.float64, F32, BF16, torch.float16])
@pytest.mark.parametrize("asked", [F32, BF16, torch.float16])
def test_a_model_in_any_float_is_summed_as_asked(model: torch.dtype, asked: torch.dtype) -> None:
    """But the default, float32, changes nothing where there is no precision."""
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).to(model)
    batch, loss = (torch.randn(8, 8, dtype=model),), lambda model, x: model(x).square().mean()
    found = autopar.compile(net, "dp=2", loss_fn=loss, batch=batch, reduce_dtype=asked)
    assert dtypes(found) == {model if asked is F32 else asked}
    assert wrong_sums(found) == ()


WIDTH = 16
Seen = Callable[[Any, Tensor], Tensor]  # of a weight with two or three dims, and rows


class Views(nn.Module):
    """Products with a weight that is first made of parameters: by a view, of pieces, by a norm, by products."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.first, self.seen = nn.Linear(WIDTH, WIDTH), seen
        self.parts = nn.Parameter(torch.randn(2, 8, WIDTH) * 0.3)
        self.pieces = nn.ParameterList([nn.Parameter(torch.randn(8, WIDTH) * 0.3) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.seen(self, torch.tanh(self.first(x)))

    @property
    def weight(self) -> Tensor:
        return self.parts.view(WIDTH, WIDTH)


class Over(Views):
    """A layer of torch's behind the first one."""

    def __init__(self, layer: nn.Module, seen: Seen) -> None:
        super().__init__(seen)
        self.layer = layer


def experts(model: Any, h: Tensor) -> Tensor:
    shares = F.linear(h, model.weight[:2]).softmax(-1)
    return sum(shares[:, e : e + 1] * F.linear(h, model.parts[e]) for e in range(2))  # type: ignore[return-value]


def positions(h: Tensor) -> Tensor:
    return h[:, None] * torch.arange(1, 5)[:, None]


def standardised(weight: Tensor) -> Tensor:
    return (weight - weight.mean(1, keepdim=True)) / weight.std(1, keepdim=True)


SEEN: dict[str, Seen] = {
    "view": lambda m, h: F.linear(h, m.weight),
    "transpose": lambda m, h: h @ m.parts.transpose(1, 2)[0] @ m.parts[1],
    "slices": lambda m, h: F.linear(h, m.parts[:, 2:6].reshape(8, WIDTH)),
    "unbind": lambda m, h: torch.cat([F.linear(h, part) for part in m.parts.unbind(0)], -1),
    "chunk": lambda m, h: sum(F.linear(h, part) for part in m.weight.chunk(4, 0)),
    "split": lambda m, h: torch.cat([F.linear(h, part) for part in m.weight.split([3, 5, 8])], -1),
    "stack": lambda m, h: torch.einsum("bi,eoi->beo", h, torch.stack(list(m.pieces))).flatten(1),
    "cat": lambda m, h: F.linear(h, torch.cat(list(m.pieces))),
    "expand": lambda m, h: F.linear(h, m.parts[:1].expand(2, 8, WIDTH).reshape(WIDTH, WIDTH)),
    "index": lambda m, h: F.linear(h, m.weight[torch.tensor([3, 1, 0, 2])]),
    "pad": lambda m, h: F.linear(h, F.pad(m.weight, (0, 0, 1, 2))),
    "flip": lambda m, h: F.linear(h, m.weight.flip(0)),
    "scaled": lambda m, h: F.linear(h, (m.parts * 2.0).view(WIDTH, WIDTH)),
    "mask": lambda m, h: F.linear(h, m.weight * torch.ones(WIDTH, WIDTH).tril()),
    "einsum of a view": lambda m, h: torch.einsum("bi,io->bo", h, m.parts.permute(2, 0, 1).reshape(WIDTH, WIDTH)),
    "bmm": lambda m, h: torch.bmm(h.view(-1, 2, 8).transpose(0, 1), m.parts).transpose(0, 1).flatten(1),
    "tied": lambda m, h: F.linear(F.linear(h, m.weight), m.weight.t()),
    "tied to a plain use": lambda m, h: F.linear(F.linear(h, m.first.weight.view(2, 8, WIDTH).flatten(0, 1)), m.weight),
    "normalised": lambda m, h: F.linear(h, F.normalize(m.weight, dim=1)),
    "standardised": lambda m, h: F.linear(h, standardised(m.weight)),
    "adapter": lambda m, h: F.linear(h, m.first.weight + m.weight[:, :4] @ m.weight[:4]),
    "table of positions": lambda m, h: torch.tanh(h[:, None] + F.linear(m.pieces[0], m.weight)).sum(1),
    "experts": experts,
}  # fmt: skip
LAYERS: dict[str, Callable[[], Over]] = {
    "attention": lambda: Over(
        nn.MultiheadAttention(WIDTH, 2, batch_first=True), lambda m, h: m.layer(*[positions(h)] * 3)[0].sum(1)
    ),
    "weight norm": lambda: Over(weight_norm(nn.Linear(WIDTH, WIDTH)), lambda m, h: m.layer(h)),
    "convolution": lambda: Over(
        nn.Conv1d(WIDTH, WIDTH, 3, padding=1), lambda m, h: m.layer(positions(h).transpose(1, 2)).sum(-1)
    ),
    "gru": lambda: Over(nn.GRU(WIDTH, WIDTH, batch_first=True), lambda m, h: m.layer(positions(h))[0].sum(1)),
}
MODELS: dict[str, Callable[[], Views]] = {**{n: functools.partial(Views, seen) for n, seen in SEEN.items()}, **LAYERS}
PLACES: list[tuple[str, dict[str, Any]]] = [
    ("dp=2", {"precision": "bf16"}),
    ("fsdp=2", {"precision": "bf16", "zero": 3}),
    ("dp=2,tp=2", {"precision": "fp16", "zero": 1}),
    ("dp=2", {"precision": "bf16", "microbatches": 2, "zero": 2}),
    ("dp=2,pp=2", {"precision": "fp16", "microbatches": 2}),
]


def viewed(name: str, mesh: str, **options: Any) -> Compiled:
    torch.manual_seed(0)
    batch = torch.randn(16, WIDTH), torch.randn(16)
    loss = lambda model, x, y: F.mse_loss(model(x).flatten(1).mean(1), y)  # noqa: E731
    return autopar.compile(MODELS[name](), mesh, loss_fn=loss, batch=batch, **options)


@pytest.mark.parametrize("name", MODELS)
def test_whatever_a_weight_is_made_of_its_gradient_is_summed_in_reduce_dtype(name: str) -> None:
    """Told apart from the rest by what no other sum does: these models add up nothing else over the batch's axes in the
    backward pass, so every sum there is one of gradients."""
    first = list(MODELS).index(name)
    for mesh, options in (PLACES[first % 5], PLACES[(first + 2) % 5]):
        found = viewed(name, mesh, **options)
        assert wrong_sums(found) == ()
        sums = [
            node for node in found.program.calls()
            if is_collective(node.target) and node.args[-1] == "sum" and record(node).is_backward
            and {"dp", "fsdp", "mb"}.intersection(str(node.args[1]).split(":"))
        ]  # fmt: skip
        assert sums and {record(operand_nodes(node)[0]).type.dtype for node in sums} == {F32}, (mesh, options)


@pytest.mark.parametrize("name", ["view", "experts", "attention"])
@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"precision": "bf16", "zero": 2}])
def test_gradients_behind_views_move_in_buckets(name: str, options: dict[str, Any]) -> None:
    """Summed where they leave: in a bucket, and with ZeRO scattered."""
    found = viewed(name, "dp=2", **options)
    sums = [row for row in found.collectives if row.phase == "backward" and row.shape and row.op != "all_gather"]
    assert {row.op for row in sums} <= ({"reduce_scatter"} if "zero" in options else {"all_reduce"}), sums
    trained = sum(p.numel() for p in MODELS[name]().parameters())
    assert len(sums) <= 2 and sum(math.prod(row.shape) for row in sums) <= trained


def before_the_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    reshard = importlib.import_module(
        "autopar.passes.collectives.reshard"
    )  # the package has the function under this name
    monkeypatch.setattr(Classes, "is_unlike_sums", lambda *_: False)
    monkeypatch.setattr(reshard._Reshard, "_is_rounded", lambda *_: False)


def test_a_program_that_sums_gradients_too_short_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before_the_cast(monkeypatch)
    with pytest.raises(VerificationError) as said:
        viewed("view", "dp=2", precision="bf16")
    assert str(said.value).startswith("reduce_dtype is f32, but gradients are summed otherwise: %all_reduce")
    assert "over 'dp' in bf16" in str(said.value)


def test_verify_sees_a_sum_in_the_wrong_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are within a rounding of bf16: only the programs tell."""
    before_the_cast(monkeypatch)
    monkeypatch.setattr("autopar.passes.check_sums", lambda *_: None)
    model, loss_fn, batch = gpt()
    found = autopar.verify(model, "dp=2", loss_fn=loss_fn, batch=batch, precision="bf16", zero=3, steps=1)
    assert all(row.ok for row in found.rows)
    assert not found.ok
    assert "sums gradients over 'dp' in bf16, but reduce_dtype is f32" in found.sums[0]
    assert f"WRONG: {found.sums[0]}" in str(found)


def test_verify_has_nothing_to_say_of_right_sums() -> None:
    model, loss_fn, batch = gpt()
    found = autopar.verify(model, "dp=2", loss_fn=loss_fn, batch=batch, precision="bf16", zero=3, steps=1)
    assert found.ok
    assert found.sums == ()
