"""Ways to write a mixture on an axis `ep`: each is divided, and its step that of one device; or refused by name."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from verified import Once

import autopar
from autopar.errors import BatchError, CaptureError, LayoutError
from autopar.ir.ops.ops import op, op_name
from autopar.ir.program import Program, record
from autopar.passes.sorts import loop_masks
from autopar.runtime.executor import executor
from autopar.runtime.kernels.dropout import dropout_of_rows
from autopar.verification.verify import verify
from benchmarks.mixtures import AT_ONCE
from benchmarks.spellings import expert_spellings as ways
from benchmarks.spellings.expert_spellings import batch, spelled

# (spelling, is_stacked, experts of a row, meshes with options)
Way = tuple[Any, bool, int, list[tuple[str, dict[str, Any]]]]
DIVIDED: list[Way] = [
    (ways.where_, False, 2, [("ep=2", {}), ("dp=2,ep=2", {"zero": 3}), ("pp=2,ep=2", {"microbatches": 4})]),
    (ways.stacked_where, True, 2, [("ep=4", {})]),
    (ways.transposed_where, True, 2, [("ep=2,tp=2", {})]),
    (ways.mixtral, False, 2, [("ep=4", {"recompute": "full"})]),
    (ways.nonzero, False, 1, [("ep=4", {})]),
    (ways.any_place, False, 2, [("ep=4", {})]),
    (ways.many_hot, False, 3, [("dp=2,ep=2", {"zero": 2})]),
    (ways.capacity, False, 1, [("dp=2,ep=2", {})]),
    (ways.masked, False, 2, [("fsdp=2,ep=2", {})]),
    (ways.switch, False, 1, [("dp=2,ep=2", {"zero": 1})]),
    (ways.counted, False, 2, [("dp=2,ep=2", {"zero": 3}), ("pp=2,ep=2", {"microbatches": 4})]),
    (ways.counted_hot, False, 2, [("ep=4", {}), ("ep=2", {"recompute": "full"})]),
    (ways.counted_items, True, 2, [("ep=4", {})]),
    (ways.counted_table, False, 2, [("ep=4", {"recompute": "full"})]),
    (ways.counted_masks, False, 2, [("dp=2,ep=2", {})]),
    (ways.flat, False, 2, [("ep=4", {}), ("ep=2", {"microbatches": 2})]),
    (ways.sorted_, True, 2, [("ep=4", {})]),
    (ways.gshard, True, 2, [("ep=4", {}), ("dp=2,ep=2,tp=2", {"zero": 3})]),
    (ways.titan, True, 2, [("ep=4", {}), ("dp=2,ep=2,tp=2", {})]),
    (ways.megatron, False, 2, [("ep=2", {"microbatches": 2}), ("dp=2,ep=2,tp=2", {"zero": 1})]),
    (ways.moe_infer, False, 2, [("ep=4", {}), ("dp=2,ep=2,tp=2", {})]),
    (ways.slices, False, 2, [("ep=4", {"recompute": "full"}), ("dp=2,ep=2,tp=2", {"zero": 3})]),
    (ways.written, False, 2, [("ep=4", {"expert_rows": 4.0}), ("pp=2,ep=2", {"microbatches": 4})]),
    (ways.columns, True, 2, [("ep=4", {}), ("dp=2,ep=2,tp=2", {})]),
    (ways.dropped, False, 2, [("ep=2,tp=2", {}), ("ep=2", {"microbatches": 2}), ("dp=2,ep=2", {"expert_rows": 2.0})]),
    (ways.dropped_hit, False, 2, [("dp=2,ep=2", {"zero": 1}), ("ep=4", {"recompute": "full"})]),
    (ways.dropped_mask, False, 2, [("pp=2,ep=2", {"microbatches": 4, "compile": "triton"})]),
]


def routed(way: Any, is_stacked: bool, chosen: int) -> nn.Module:
    """The module of a spelling: one expert has few rows, none of the first three, and one has none."""
    module = spelled(way, is_stacked, chosen)
    with torch.no_grad():
        module.router.bias.copy_(torch.tensor([0.0, -50.0, 0.3, -0.2]))
    return module


@functools.cache
def once(way: Any, is_stacked: bool, chosen: int) -> Once:
    """It, captured once for all meshes."""
    return Once.of(routed(way, is_stacked, chosen), None, batch())


CASES = [(*way[:3], mesh, options) for way in DIVIDED for mesh, options in way[3]]


@pytest.mark.parametrize(
    ("way", "is_stacked", "chosen", "mesh", "options"), CASES, ids=lambda one: getattr(one, "__name__", str(one))
)
def test_it_is_divided_and_its_step_is_that_of_one_device(
    way: Any, is_stacked: bool, chosen: int, mesh: str, options: dict[str, Any]
) -> None:
    """Some experts have few rows, and one has none."""
    program = once(way, is_stacked, chosen).right(mesh, **options)[1].program
    layouts = {entry.name: str(record(node).layout) for node, entry in program.parameters()}
    experts = [layout for name, layout in layouts.items() if name.startswith(("experts.", "up", "down"))]
    assert experts and all("ep" in layout for layout in experts), layouts
    assert not any("leaves experts whole" in note for note in program.notes), program.notes


@pytest.mark.parametrize("way", [ways.mixtral, ways.capacity])
def test_rows_that_are_bounded(way: Any) -> None:
    """With `expert_rows` no row of no expert takes the place of another one."""
    once(way, False, 1 if way is ways.capacity else 2).right("dp=2,ep=2", expert_rows=2.0)


def _count(program: Program) -> Counter[str]:
    names = ("route", "dispatch", "combine", "all_gather", "all_to_all", "expert_mm")
    found = (op_name(node.target).removesuffix("_start") for node in program.calls())
    return Counter(name for name in found if name in names)


def test_what_moves_is_what_moves_of_grouped_products() -> None:
    """No row and no matrix is gathered; the matrices of modules, and their gradients, change places."""
    grouped = _count(autopar.compile(spelled(ways.sorted_, True), "ep=2", batch=batch(), machine=AT_ONCE).program)
    loop = _count(autopar.compile(spelled(ways.stacked_where, True), "ep=2", batch=batch(), machine=AT_ONCE).program)
    assert loop == grouped == {"route": 1, "dispatch": 3, "combine": 3, "expert_mm": 4}
    dropped = _count(autopar.compile(spelled(ways.dropped), "ep=2", batch=batch(), machine=AT_ONCE).program)
    assert (dropped["dispatch"], dropped["combine"]) == (4, 3), "the places by which rows draw go with them, once"
    apart = _count(autopar.compile(spelled(ways.mixtral), "ep=2", batch=batch()).program)
    assert apart["all_gather"] == 0 and apart["all_to_all"] == 10 and apart["expert_mm"] == 6


@pytest.mark.parametrize("change", ["place", "which", "key"])
def test_dropout_of_other_rows_is_found(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red on purpose: rows that draw as others do, or by the number of another expert."""

    def wrong(
        x: Tensor, seed: Tensor, key: int, step: int, p: float, place: Tensor, which: Tensor, *cut: Any
    ) -> Tensor:
        place, which = place.flip(0) if change == "place" else place, which + (change == "which")
        return dropout_of_rows(x, seed, key + (change == "key"), step, p, place, which, *cut)

    function_of, made = executor.function_of, op("dropout_of_rows")
    monkeypatch.setattr(executor, "function_of", lambda target: wrong if target is made else function_of(target))
    assert not verify(spelled(ways.dropped), "ep=2", batch=batch(), steps=1).ok


def test_without_ep_a_loop_stays_a_loop() -> None:
    program = autopar.compile(spelled(ways.where_), "dp=2", batch=batch()).program
    assert _count(program)["expert_mm"] == 6 * ways.EXPERTS


NOTHING = (
    "axis 'ep' (size 2) splits experts, and can split none of the model:\n"
    "  the model has no product that takes the matrix of each row by an index"
)
INSTEAD = (
    'sort rows by expert and use F.grouped_mm, with transformers experts_implementation="grouped_mm"; or stack the '
    "matrices, [experts, ..], and multiply rows that are put together by expert, [experts, rows, ..], by torch.bmm; "
    "or give the ranks to dp or tp"
)
REFUSED: list[tuple[Any, bool, str]] = [
    (
        ways.overwritten, False,
        f"{NOTHING} (the loop over 4 experts at expert_spellings.py:N takes one at a time: aten.where.self "
        f"at expert_spellings.py:N takes what several of them give): let index_add_ alone put back what an expert "
        f"computes, or {INSTEAD}",
    ),
    (ways.dense, False, f"{NOTHING}: {INSTEAD}"),
    (
        ways.gathered, True,
        "axis 'ep' (size 2) splits experts, and can split none of the model:\n"
        "  'up' [4, 8, 12] is looked up for each row at expert_spellings.py:N, a batched product: with transformers "
        'set experts_implementation="grouped_mm", else sort rows by expert and use F.grouped_mm\n'
        "  'down' [4, 12, 8] is looked up for each row at expert_spellings.py:N, a batched product: with transformers "
        'set experts_implementation="grouped_mm", else sort rows by expert and use F.grouped_mm',
    ),
]  # fmt: skip


@pytest.mark.parametrize(("way", "is_stacked", "text"), REFUSED, ids=lambda one: getattr(one, "__name__", ""))
def test_what_cannot_be_divided_says_what_would_do(way: Any, is_stacked: bool, text: str) -> None:
    with pytest.raises(LayoutError) as found:
        autopar.compile(spelled(way, is_stacked), "ep=2", batch=batch())
    assert re.sub(r"py:\d+", "py:N", str(found.value)) == text


def test_the_places_of_experts_are_not_taken_for_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red on purpose: a table of which a row may have two experts, taken to have one."""
    monkeypatch.setattr(loop_masks, "_most", lambda tensor, dim: 1)
    assert not verify(spelled(ways.many_hot, False, 2), "ep=2", batch=batch()).ok


class _Both(nn.Module):
    def __init__(self, *mixtures: nn.Module) -> None:
        super().__init__()
        self.mixtures = nn.ModuleList(mixtures)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([mixture(x) for mixture in self.mixtures]).sum()


def test_what_stays_whole_beside_experts_that_are_divided_is_noted_with_its_share() -> None:
    for other, is_stacked, share, why in (
        (ways.overwritten, False, 62.1, "loops that take one expert at a time (see their notes)"),
        (ways.gathered, True, 22.7, "'mixtures.1.up' [4, 8, 12] is looked up for each row at"),
    ):
        both = _Both(spelled(ways.where_), spelled(other, is_stacked))
        (note,) = (
            one for one in autopar.compile(both, "ep=2", batch=batch()).program.notes if "leaves experts whole" in one
        )
        assert note.startswith(f"axis 'ep' (size 2) leaves experts whole, {share} % of the work: {why}")


COUNTED = [ways.counted, ways.counted_hot, ways.counted_items, ways.counted_table, ways.counted_masks]


@pytest.mark.parametrize("way", COUNTED)
@pytest.mark.parametrize(("mesh", "options"), [("dp=2,tp=2", {"zero": 3}), ("dp=1", {"microbatches": 2})])
def test_experts_that_are_passed_over_by_their_counts(way: Any, mesh: str, options: dict[str, Any]) -> None:
    """One program for all answers, of which none is guarded: what an expert without rows leaves out is its rows."""
    _, compiled = once(way, way is ways.counted_items, 2).right(mesh, **options)
    guards = [out for out in compiled.program.outputs if out.kind == "guard"]
    assert len(guards) == 1, "how many rows there are, for parameters of which no call is made"


def test_counts_that_leave_rows_out_are_an_error() -> None:
    """As `split` has it: its pieces are all rows."""

    def compute(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        given, start = [], 0
        for e, count in enumerate(torch.bincount(chosen.view(-1), minlength=ways.EXPERTS).tolist()):
            given.append(m.experts[e](x.repeat(4, 1)[start : start + count]))
            start += count
        return torch.zeros_like(x) + torch.cat(given).sum(0)

    with pytest.raises(BatchError, match=r"^index 4 is out of range: the table has 4 entries"):
        verify(spelled(compute, False, 2), "dp=1", batch=batch())


@pytest.mark.parametrize("change", ["order", "neighbour", "gap"])
def test_slices_that_are_no_groups_are_refused_or_right(change: str) -> None:
    """Pieces in another order, of other places, or with a group left out, are not taken for all rows."""

    def compute(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.view(-1).argsort(stable=True)
        rows, ends = x[order // ways.CHOSEN], torch.bincount(chosen.view(-1), minlength=4).cumsum(0).tolist()
        starts = [0, *ends]
        at = {"order": [1, 0, 2, 3], "neighbour": [0, 1, 2, 3], "gap": [0, 2, 3]}[change]
        far = int(change == "neighbour")
        y = torch.cat([m.experts[e](rows[starts[e] : ends[min(e + far, 3)]]) for e in at])
        return torch.zeros_like(x) + y.sum(0)

    with pytest.raises(CaptureError):
        autopar.compile(spelled(compute, False, 2), "dp=2", batch=batch())


def test_what_hangs_on_counts_otherwise_is_another_program() -> None:
    """A program for each answer, as before."""
    module = spelled(ways.counted_otherwise, False, 2)
    report = verify(module, "dp=2", batch=batch())
    assert report.ok and report.max_error < 1e-10, report
    guards = [out for out in autopar.compile(module, "dp=2", batch=batch()).program.outputs if out.kind == "guard"]
    assert len(guards) == ways.EXPERTS


@pytest.mark.parametrize("change", ["place", "count"])
def test_counts_of_other_rows_are_not_taken_for_those_of_a_mask(change: str) -> None:
    """The branch asks for a neighbour, or for the rows of another choice: no mask is known to be empty by that."""

    def compute(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        counts = torch.bincount((chosen if change == "place" else chosen[:3]).flatten(), minlength=ways.EXPERTS)
        numbers = counts.tolist()
        out = torch.zeros_like(x)
        for e, expert in enumerate(m.experts):
            if e > 1 and numbers[e if change == "count" else e - 1] == 0:
                continue
            rows, place = torch.where(chosen == e)
            out[rows] += expert(x[rows]) * weights[rows, place, None]
        return out

    report = verify(routed(compute, False, 2), "dp=2", batch=batch())
    assert report.ok and report.max_error < 1e-10, report


OF_EACH: dict[str, tuple[Callable[..., Tensor], str]] = {
    "a matrix through tanh": (lambda e, x, r, w: F.linear(e.up(x[r]), e.down.weight.tanh()) * w, ""),
    "a matrix in arithmetic": (lambda e, x, r, w: F.linear(e.up(x[r]), e.down.weight * 2 + 1) * w, ""),
    "a matrix in another shape": (
        lambda e, x, r, w: F.linear(x[r], e.up.weight.view(8, 12).t().contiguous())[:, :8] * w, "",
    ),
    "a matrix by a vector": (
        lambda e, x, r, w: F.linear(e.up(x[r]), e.down.weight * e.down.bias.exp()[:, None]) * w,
        "aten.mul.Tensor at test_expert_loops.py:N takes what each has",
    ),
    "a sum of its rows": (lambda e, x, r, w: (e(x[r]) * w).sum(0), "takes what several of them give"),
    "relu of a sum": (lambda e, x, r, w: (e(x[r]) * w).sum(0).relu(), "takes what several of them give"),
    "the square of a sum": (lambda e, x, r, w: (e(x[r]) * w).sum().square(), "takes what several of them give"),
}  # fmt: skip


@pytest.mark.parametrize("what", OF_EACH)
def test_what_each_expert_makes_of_its_own(what: str) -> None:
    """Divided with the numbers of one device, or refused by name."""
    of_each, refused = OF_EACH[what]

    def compute(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(m.experts):
            rows, place = torch.where(chosen == e)
            made = of_each(expert, x, rows, weights[rows, place, None])
            out = out.index_add(0, rows, made) if made.ndim == 2 else out + made
        return out

    module = spelled(compute)
    if not refused:
        report = verify(module, "ep=2", batch=batch(), steps=1)
        assert report.ok and report.max_error < 1e-10, report
    else:
        with pytest.raises(LayoutError) as found:
            autopar.compile(module, "ep=2", batch=batch())
        assert refused in re.sub(r"py:\d+", "py:N", str(found.value))
