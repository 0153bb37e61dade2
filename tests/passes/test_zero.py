"""ZeRO on the virtual mesh: numbers, bytes on the wire, bytes in memory, and when what is gathered."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from refusals import refused
from torch import Tensor, fx, nn
from torch.nn import functional

import autopar
from autopar.capture import Captured, capture
from autopar.compiled import Compiled
from autopar.compiler.check_options import options_of
from autopar.compiler.compile import lower
from autopar.errors import PlanError
from autopar.ir.layout import parse_layout
from autopar.ir.mesh import parse_mesh
from autopar.ir.ops.measure import local_bytes, local_type
from autopar.ir.ops.ops import op
from autopar.ir.program import operand_nodes, record
from autopar.ir.text.text import print_program
from autopar.passes.collectives.zero import stored_layout
from autopar.runtime.collectives import mesh_ops
from autopar.runtime.ranks import virtual
from autopar.verification.verify import verify_compiled

VOCABULARY, WIDTH = 11, 10


class Tied(nn.Module):
    """Tied, frozen and unused parameters, sizes that nothing divides, dropout, a weight that a loop uses twice."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 14), nn.GELU(), nn.Dropout(0.2), nn.Linear(14, WIDTH))
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.scale, self.unused = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.ones(5, 3))
        self.blocks[1][1].weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + self.scale * block(h)
        return self.head(h)


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=0)


def batch(rows: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    x, y = (torch.randint(0, VOCABULARY, (rows, 4), generator=random) for _ in range(2))
    y[: rows // 2, 1:] = 0  # the ranks have unequal numbers of labels
    return x, y


def tied() -> nn.Module:
    torch.manual_seed(0)
    return Tied()


@functools.cache
def captured(rows: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Captured]:
    model = tied().to(dtype)
    return model, capture(model, loss_fn, batch(rows), {}, lift=dtype)


def compiled(mesh: str, rows: int = 12, **options: Any) -> Compiled:
    return Compiled.of(lower(captured(rows)[1], parse_mesh(mesh), options_of(**options)))


def check(mesh: str, rows: int, steps: int, **options: Any) -> None:
    model, found = captured(rows, torch.float64)
    made = lower(found, parse_mesh(mesh), options_of(**options))
    report = verify_compiled(model, found, made, loss_fn=loss_fn, batch=batch(rows), steps=steps)
    assert report.ok and report.max_error < 1e-10, str(report)


# -- numbers --------------------------------------------------------------------------------------------------------


MESHES, MICROBATCHES, RECOMPUTE = (
    ("dp=2", "dp=3", "dp=2,tp=2", "dp=2,pp=2"),
    (1, 3, 4),
    ("none", "full", "selective", 0.9),
)


def every_combination() -> Iterator[object]:
    """All of them; a fourth, in which every pair of two values occurs, is not slow."""
    for (i, mesh), (j, microbatches), zero, (k, recompute) in itertools.product(
        enumerate(MESHES), enumerate(MICROBATCHES), range(4), enumerate(RECOMPUTE)
    ):
        marks = () if (i + j + zero) % 4 == k else (pytest.mark.slow,)
        yield pytest.param(mesh, microbatches, zero, recompute, marks=marks)


@pytest.mark.parametrize(("mesh", "microbatches", "zero", "recompute"), list(every_combination()))
def test_equal_to_one_device(mesh: str, microbatches: int, zero: int, recompute: str | float):
    rows = 36 if mesh == "dp=3" else 24
    check(mesh, rows, steps=2, zero=zero, microbatches=microbatches, recompute=recompute)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("dp=2,fsdp=3", {}),
        ("fsdp=3,dp=2", {"zero": 2, "microbatches": 2}),
        ("dp=2,fsdp=2,tp=2", {"zero": 1}),
        ("dp=3", {"zero": 3, "reshard_after_forward": False, "microbatches": 2}),
        ("dp=2,tp=2", {"zero": 3, "sequence_parallel": True}),
        ("dp=2,pp=3", {"zero": 2, "microbatches": 4, "schedule": "zb-h1"}),
        ("dp=3", {"zero": 3, "bucket_bytes": 1}),
        ("dp=3", {"zero": 3, "bucket_bytes": 10**9}),
    ],
    ids=str,
)
def test_combinations(mesh: str, options: dict[str, Any]):
    check(mesh, 24, steps=1, **options)


class Rows(nn.Module):
    """Layers whose every parameter has a dim that 4 ranks divide: nothing is padded, nothing is whole."""

    def __init__(self, layers: int = 4, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x.square().mean()


def rows(zero: int, mesh: str = "dp=4", **options: object) -> Compiled:
    return autopar.compile(Rows(), mesh, batch=(torch.randn(8, 8),), zero=zero, **options)  # type: ignore[arg-type]


def moved(found: Compiled, name: str, phase: str | None = None) -> int:
    """Elements that an op moves over dp in a step."""
    rows = [row for row in found.collectives if row.op.startswith(name) and (phase in (None, row.phase))]
    return sum(row.bytes // row.dtype.itemsize * row.times for row in rows)


PARAMETERS = 4 * (8 * 8 + 8)


def test_bytes_are_those_of_the_paper():
    """ZeRO, arXiv 1910.02054, section 7: 2, 2 and 3 times the parameters; a gather or a scatter is one time, a sum two.
    The first layer's weight has no gradient of an input, and a bias needs no gathering in the backward pass."""
    sums = moved(rows(0), "all_reduce") - 1  # of the loss
    assert sums == PARAMETERS
    for zero in (1, 2):
        found = rows(zero)
        assert moved(found, "all_gather") == PARAMETERS and moved(found, "reduce_scatter") == PARAMETERS
    found = rows(3)
    assert moved(found, "all_gather", "forward") == PARAMETERS
    assert moved(found, "all_gather", "backward") == 3 * 8 * 8
    assert moved(found, "reduce_scatter") == PARAMETERS
    kept = rows(3, reshard_after_forward=False)
    assert moved(kept, "all_gather") == PARAMETERS


@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"mesh": "pp=2,dp=2", "microbatches": 2}], ids=str)
def test_without_resharding_zero_3_is_the_programs_of_zero_2(options: dict[str, Any]):
    """`plan` has but one of the two."""

    def texts(found: Compiled) -> list[str]:
        graphs = {} if found.pipeline is None else found.pipeline.graphs
        return [print_program(each) for each in (found.program, *graphs.values())]

    assert texts(rows(3, reshard_after_forward=False, **options)) == texts(rows(2, **options))
    assert texts(rows(3, **options)) != texts(rows(2, **options))


def test_a_step_of_micro_batches_reduces_once_or_each_time():
    assert moved(rows(1, microbatches=2), "reduce_scatter") == PARAMETERS
    for zero in (2, 3):
        assert moved(rows(zero, microbatches=2), "reduce_scatter") == 2 * PARAMETERS
    assert moved(rows(3, microbatches=2), "all_gather", "forward") == 2 * PARAMETERS
    assert moved(rows(2, microbatches=2), "all_gather") == PARAMETERS


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_states_are_divided(zero: int):
    found = rows(zero)
    held = sum(
        local_type(node, found.program.mesh).numel for node, entry in found.program.entries if entry.kind == "parameter"
    )
    assert held == PARAMETERS // (4 if zero else 1)


def paper(zero: int, ranks: int) -> int:
    """Bytes of model states, arXiv 1910.02054, table 1, in fp32: parameters, gradients, and Adam's two states."""
    parameters, gradients, adam = 4 * PARAMETERS, 4 * PARAMETERS, 8 * PARAMETERS
    divided = ((), (adam,), (adam, gradients), (adam, gradients, parameters))[zero]
    return parameters + gradients + adam - sum(divided) + sum(divided) // ranks


def test_bytes_of_states_are_those_of_the_paper():
    """Between steps parameters lie split with stages 1 and 2 too; within one they are gathered."""
    steps = 4 * 8  # Adam counts the steps of each of 8 tensors
    for zero in range(4):
        states = rows(zero).memory(0, device="cpu").states
        held = sum(states[kind] for kind in ("parameters", "gradients", "optimizer states")) - steps
        assert held == paper(3 if zero else 0, 4) <= paper(zero, 4)
    report = rows(2).memory(0, device="cpu")
    assert report.step - report.states["inputs"] - steps >= paper(3, 4) + 4 * PARAMETERS


# -- layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "layout", "stored"),
    [
        ((8, 6), "[-,-]", "[dp,-]"),
        ((7, 8), "[-,-]", "[-,dp]"),  # an eighth of padding is more than a copy
        ((1001, 8), "[-,-]", "[dp,-]"),  # three rows of a thousand are not
        ((7, 5), "[-,-]", "[dp,-]"),
        ((8, 6), "[tp,-]", "[tp:dp,-]"),  # 6 is not divisible by 4, but half of 8 is
        ((16,), "[tp]", "[tp:dp]"),
        ((6,), "[tp]", None),  # inside of another axis' pieces nothing is padded
        ((12, 8), "[3:tp,-]", "[3:tp,dp]"),
        ((3,), "[-]", None),  # fewer elements than ranks
        ((), "[]", None),
        ((8, 8), "[dp,-]", None),
    ],
)
def test_where_a_parameter_is_split(shape: tuple[int, ...], layout: str, stored: str | None):
    mesh = parse_mesh("dp=4,tp=2")
    found = stored_layout(shape, parse_layout(layout), mesh, "dp")
    assert found == (None if stored is None else parse_layout(stored))


def test_what_stays_whole_is_said():
    notes = " ".join(compiled("dp=2", zero=1).notes)
    assert "scale" not in notes  # one number

    class Bias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x).relu()).square().mean()

    found = autopar.compile(Bias(), "dp=2,tp=2", batch=(torch.randn(4, 6),), zero=3)
    assert "ZeRO cannot split 'up.bias' over 'dp': every rank keeps them" in found.notes


# -- when -----------------------------------------------------------------------------------------------------------


def test_two_layers_are_whole_at_once():
    """A layer is gathered while the one before it computes, and is gone after its use."""
    graph = rows(3, bucket_bytes=10**6).program.graph
    begun: list[fx.Node] = []
    whole: list[set[fx.Node]] = []
    nodes = list(graph.nodes)
    last = {node: max((nodes.index(user) for user in _readers(node)), default=0) for node in nodes}
    for i, node in enumerate(nodes):
        if node.target is op("all_gather_start"):
            begun.append(node)
        if record(node).flops:
            whole.append({start for start in begun if last[start] >= i})
    assert len(begun) == 4 + 3  # a layer moves at once
    assert max(map(len, whole)) == 2 and whole[0] == set(begun[:2]) and whole[1] == set(begun[1:3])


def _readers(node: fx.Node) -> list[fx.Node]:
    """Who reads a value or a view of it."""
    found: list[fx.Node] = []
    for user in node.users:
        views = ("wait", "getitem", "reshape", "split_with_sizes", "slice", "permute")
        is_view = any(view in str(user.target) for view in views)
        found += [user, *(_readers(user) if is_view else [])]
    return found


def test_gradients_on_their_way_are_few_bytes():
    """Each holds whole gradients until it has moved. Red before: a wait for a small one behind two, whatever their
    sizes."""
    program = rows(3, bucket_bytes=1).program
    sizes = {
        node: local_bytes(operand_nodes(node)[0], program.mesh)
        for node in program.calls()
        if node.target is op("reduce_scatter_start")
    }
    on_their_way, most = list[fx.Node](), 0
    for node in program.calls():
        if node in sizes:
            on_their_way.append(node)
            bytes_ = sum(sizes[each] for each in on_their_way)
            assert len(on_their_way) <= 2 or bytes_ <= 2 * max(sizes.values())
        elif node.target is op("wait") and node.args[0] in on_their_way:
            on_their_way.remove(node.args[0])
        most = max(most, len(on_their_way))
    assert most > 2


# -- the tester -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["unreduced", "piece", "rows"])
def test_what_is_broken_is_seen(broken: str, monkeypatch: pytest.MonkeyPatch):
    """A gradient that is cut and not summed, a bucket whose pieces are swapped, padding that is read."""
    original = virtual.together

    def wrong(requests: list) -> list[Tensor]:
        out = original(requests)
        name = str(requests[0][0])
        if broken == "unreduced" and "reduce_scatter" in name:
            parts = [args[0] for _, args in requests]
            return [mesh_ops.pieces(part, len(parts), *requests[0][1][2:4])[i] for i, part in enumerate(parts)]
        if broken == "piece" and "reduce_scatter" in name:
            return [part.roll(1, -1) for part in out]
        if broken == "rows" and "all_gather" in name:
            return [part.roll(1, 0) for part in out]
        return out

    monkeypatch.setattr(virtual, "together", wrong)
    assert not autopar.verify(tied(), "dp=3", loss_fn=loss_fn, batch=batch(12), zero=3, steps=1).ok


# -- errors ---------------------------------------------------------------------------------------------------------


def test_errors():
    refused(
        PlanError,
        "zero=2 splits states over a data axis, but mesh 'tp=2' has none. Add dp, fsdp or cp to it, e.g. 'dp=2,tp=2', "
        "or leave zero out.",
        lambda: compiled("tp=2", zero=2),
    )
    refused(
        PlanError,
        "zero=4: write 0, 1 (optimizer states are split), 2 (and gradients) or 3 (and parameters).",
        lambda: compiled("dp=2", zero=4),
    )
