"""Data axes together: what moves alike over dp (or fsdp) and cp moves once, and ZeRO splits states over both."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from models import token_loss
from shares import share
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.capture import Captured, capture
from autopar.compiled import Compiled
from autopar.compiler.check_options import options_of
from autopar.compiler.compile import lower
from autopar.ir.layout import parse_layout
from autopar.ir.mesh import Mesh, parse_mesh
from autopar.ir.ops.measure import local_type
from autopar.ir.options import StepOptions
from autopar.ir.plan import Plan
from autopar.ir.program import operand_nodes, record
from autopar.passes.collectives.zero import split_over
from autopar.runtime.collectives import mesh_ops
from autopar.runtime.ranks import virtual
from autopar.verification.judge.sum_dtypes import sums_of_gradients, wrong_sums
from autopar.verification.verify import verify_compiled

ROWS, TIME, WIDTH, HEADS, VOCABULARY = 8, 24, 16, 2, 24
F32, BF16 = torch.float32, torch.bfloat16


class Block(nn.Module):
    """Causal attention and a layer, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.o = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (part.reshape(heads).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + functional.dropout(self.o(out.transpose(1, 2).reshape(x.shape)), 0.1, self.training)


class Net(nn.Module):
    """Also a parameter of three elements, which four ranks cannot split."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TIME, WIDTH)
        self.blocks, self.scale = nn.Sequential(Block(), Block()), nn.Parameter(torch.tensor([0.4, 0.9, 1.1]))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x) + self.places(torch.arange(x.shape[1])))) * self.scale.prod()


def batch() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    x, y = (torch.randint(0, VOCABULARY, (ROWS, TIME), generator=random) for _ in range(2))
    y[0, 2:7], y[3, :9] = -100, -100  # the ranks count unequal numbers of labels
    return x, y


@functools.cache
def captured(dtype: torch.dtype = F32) -> tuple[nn.Module, Captured]:
    torch.manual_seed(0)
    model = Net().to(dtype)
    return model, capture(model, token_loss, batch(), {}, lift=dtype)


def compiled(mesh: str, **options: Any) -> Compiled:
    return Compiled.of(lower(captured()[1], parse_mesh(mesh), options_of(**options)))


def check(mesh: str, **options: Any) -> None:
    model, found = captured(torch.float64)
    made = lower(found, parse_mesh(mesh), options_of(**options))
    report = verify_compiled(model, found, made, loss_fn=token_loss, batch=batch(), steps=2)
    assert report.ok and report.max_error < 1e-10, str(report)


# -- numbers --------------------------------------------------------------------------------------------------------


WAYS: list[tuple[str, dict[str, Any]]] = [
    ("dp=2,cp=2", {}),
    ("dp=2,cp=3", {}),  # six ranks divide no width: parts over two dims, padded
    ("cp=2", {}),
    ("fsdp=2,cp=2", {"microbatches": 2}),
    ("cp=2,dp=2", {}),
    ("dp=2,fsdp=2", {}),
    ("dp=2,fsdp=2,cp=2", {}),
    ("dp=2,cp=2,tp=2", {"sequence_parallel": True}),
    ("cp=2,tp=2,dp=2", {}),  # not side by side in the mesh
    ("dp=2,cp=2,ulysses=2", {}),
    ("cp=2,pp=2", {"microbatches": 2}),
    ("dp=2,cp=2,pp=2", {"microbatches": 2, "schedule": "zb-h1"}),
]


@pytest.mark.parametrize(("way", "zero"), list(share(3, WAYS, range(4))), ids=str)
def test_equal_to_one_device(way: tuple[str, dict[str, Any]], zero: int) -> None:
    """Losses, gradients and weights in float64."""
    mesh, options = way
    check(mesh, zero=zero, **options)


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"precision": "bf16", "reduce_dtype": BF16}], ids=str)
def test_sums_are_in_reduce_dtype(options: dict[str, Any], zero: int) -> None:
    """One collective, in one dtype; the loss and every gradient within a rounding of bf16."""
    torch.manual_seed(0)
    report = autopar.verify(Net(), "dp=2,cp=2", loss_fn=token_loss, batch=batch(), steps=1, zero=zero, **options)
    assert report.ok, str(report)
    found = compiled("dp=2,cp=2", zero=zero, **options)
    assert wrong_sums(found) == ()
    sums = [node for node in sums_of_gradients(found.program) if node.args[1] == "dp:cp"]
    assert {record(operand_nodes(node)[0]).type.dtype for node in sums} == {options.get("reduce_dtype", F32)}


# -- counts ---------------------------------------------------------------------------------------------------------

Moved = Counter[tuple[str, str, bool]]


def moved(found: Compiled) -> Moved:
    """How often what moves over data axes moves; scalars apart. (Keys and values move over cp alone.)"""
    rows = [row for row in found.collectives if row.axis not in ("tp", "cp")]
    return Counter((row.op, row.axis, row.shape != ()) for row in rows for _ in range(row.times))


@pytest.mark.parametrize(
    ("mesh", "axis"),
    [("dp=2,cp=2", "dp:cp"), ("dp=2,cp=3", "dp:cp"), ("cp=2,dp=2", "cp:dp"), ("dp=2,fsdp=2", "dp:fsdp")],
)
def test_gradients_and_the_loss_are_one_sum(mesh: str, axis: str) -> None:
    """One all-reduce for all gradients, in one bucket, and one for the loss. Red before: two of each in a row. (What
    counts the labels is whole on cp, and summed over dp alone.)"""
    found = compiled(mesh, zero=0)
    over = moved(found)
    assert over["all_reduce", axis, True] == 1
    assert {key[1] for key in over if key[2]} == {axis}
    assert over["all_reduce", axis, False] == (2 if axis == "dp:fsdp" else 1)
    ranks, parameters = 6 if "cp=3" in mesh else 4, sum(p.numel() for p in Net().parameters())
    (row,) = [row for row in found.collectives if row.axis == axis and row.shape]
    assert row.bytes == 4 * parameters and found.mesh[axis] == ranks


def test_with_tp_too() -> None:
    """tp moves alone; what dp and cp sum is one collective."""
    over = moved(compiled("dp=2,cp=2,tp=2", zero=0))
    assert over["all_reduce", "dp:cp", True] == over["all_reduce", "dp:cp", False] == 1
    assert {axis for _, axis, is_large in over if is_large} == {"dp:cp"}


@pytest.mark.parametrize(("mesh", "axis"), [("dp=2,cp=2", "dp:cp"), ("fsdp=2,cp=2", "fsdp:cp")])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_gathers_and_scatters_over_both(mesh: str, axis: str, zero: int) -> None:
    """As over one axis of as many ranks: as many gathers and scatters, over the joined axes. `scale` lies over one."""
    found, one = compiled(mesh, zero=zero), compiled("dp=4", zero=zero)
    for name in ("all_gather", "reduce_scatter"):
        assert moved(found)[name, axis, True] == moved(one)[name, "dp", True]
    assert moved(found)["all_reduce", axis, True] == 0
    first = axis.split(":")[0]
    small = [row for row in found.collectives if row.axis == first and row.shape]
    assert {row.module for row in small if row.op == "all_gather"} == {""}  # of `scale`
    assert max(row.bytes for row in small) <= 16


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_cp_alone_splits_states(zero: int) -> None:
    """Red before: refused."""
    found = compiled("cp=4", zero=zero)
    whole = sum(p.numel() for p in Net().parameters())
    held = sum(local_type(node, found.mesh).numel for node, entry in found.program.entries if entry.kind == "parameter")
    assert held == (whole - 3) // 4 + 3  # `scale` has fewer elements than ranks
    scatters = [row for row in found.collectives if row.op == "reduce_scatter" and row.phase == "backward"]
    assert sum(row.bytes for row in scatters if not row.module.startswith("blocks")) > 0


def test_hybrid_sharding_replicates_over_dp() -> None:
    """States over fsdp and cp; their gradients are summed over dp as parts."""
    found = compiled("dp=2,fsdp=2,cp=2", zero=3)
    over = moved(found)
    assert over["reduce_scatter", "fsdp:cp", True] == 1 and over["all_gather", "fsdp:cp", True] > 0
    parts = [row for row in found.collectives if (row.op, row.axis) == ("all_reduce", "dp")]
    assert sum(row.bytes for row in parts) == 4 * (sum(p.numel() for p in Net().parameters()) - 3) // 4
    assert over["all_reduce", "dp:cp", True] == 1  # of `scale`, which lies over fsdp alone
    assert over["all_reduce", "dp:fsdp:cp", False] == 1


def test_sums_that_stay_whole_wait_for_the_micro_batches() -> None:
    """Of a parameter that no axis splits: once a step, not once for each micro-batch."""
    found = compiled("cp=4", zero=3, microbatches=2)
    times = {row.times for row in found.collectives if row.op == "all_reduce" and row.shape == (3,)}
    assert times == {1}


def test_explain_names_the_sum_of_a_value() -> None:
    text = str(compiled("dp=2,cp=2").explain("places.weight"))
    assert "dp:cp" in text and "its gradient" in text


def test_a_saved_program_has_its_groups(tmp_path: Path) -> None:
    found = compiled("dp=2,cp=2", zero=3)
    found.save(tmp_path / "saved")
    loaded = autopar.load(tmp_path / "saved")
    assert loaded.axes == found.axes == ("dp:cp", "cp", "dp")
    assert loaded.text() == found.text()


# -- layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "layout", "stored"),
    [
        ((8, 6), "[-,-]", "[dp:cp,-]"),
        ((6, 8), "[-,-]", "[-,dp:cp]"),
        ((8, 8), "[tp,-]", "[tp,dp:cp]"),
        ((16, 6), "[tp,-]", "[tp:dp:cp,-]"),
        ((6, 6), "[-,-]", "[dp,cp]"),  # neither dim by four: two gathers
        ((5, 6), "[-,-]", "[-,dp]"),  # what the second axis would have to pad stays whole on it
        ((7, 6), "[-,-]", "[-,dp]"),
        ((7, 5), "[-,-]", "[dp,-]"),  # padded over one axis only: torch would pad each piece
        ((10,), "[-]", "[dp]"),
        ((3,), "[-]", "[dp]"),
        ((1,), "[-]", None),
        ((), "[]", None),
        ((8, 8), "[dp,-]", "[dp,cp]"),  # the axis that the user's layout lacks
        ((8, 8), "[dp,cp]", None),
    ],
)
def test_where_a_parameter_is_split(shape: tuple[int, ...], layout: str, stored: str | None) -> None:
    found = split_over(shape, parse_layout(layout), parse_mesh("dp=2,cp=2,tp=2"), ("dp", "cp"))
    assert found == (None if stored is None else parse_layout(stored)), str(found)


@pytest.mark.parametrize(
    ("mesh", "axes"),
    [
        ("dp=2,tp=2", ("dp",)),
        ("dp=2,cp=2", ("dp", "cp")),
        ("cp=2,dp=2", ("cp", "dp")),
        ("cp=2,tp=2", ("cp",)),
        ("dp=2,fsdp=2,cp=2", ("fsdp", "cp")),
        ("dp=2,cp=1", ("dp",)),
        ("dp=2,cp=2,ulysses=2", ("dp", "cp", "ulysses")),
        ("tp=2", ()),
    ],
)
def test_axes_of_zero(mesh: str, axes: tuple[str, ...]) -> None:
    assert Plan(parse_mesh(mesh), options=StepOptions(zero=3)).zero_axes == axes
    assert Plan(parse_mesh(mesh), options=StepOptions(zero=0)).zero_axes == ()


# -- the tester -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("kept", ["dp", "cp"])
def test_a_group_without_one_of_its_axes_is_seen(kept: str, zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(mesh: Mesh, rank: int, axis: str) -> tuple[int, ...]:
        return mesh_ops.axis_group(mesh, rank, kept if axis == "dp:cp" else axis)

    monkeypatch.setattr(virtual, "axis_group", wrong)
    try:
        check("dp=2,cp=2", zero=zero)
    except (AssertionError, RuntimeError, ValueError):
        return
    raise AssertionError("what is summed over one axis only was not seen")
