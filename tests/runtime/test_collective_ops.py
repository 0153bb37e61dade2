"""Every collective of `autopar/ir/ops/ops.py` has an algorithm and a layout, and the two agree."""

from __future__ import annotations

import pytest
import torch

from autopar.custom_ops.brute_force import sum_of_halos, with_halo
from autopar.ir.check.check_levels import moved_layout
from autopar.ir.layout import Layout, combine, local_part
from autopar.ir.mesh import Mesh
from autopar.ir.ops.ops import COLLECTIVES, CollectiveOp, collective_of, mesh_op_name, op, whole_of
from autopar.passes.rules.rule import Halo
from autopar.runtime.collectives import mesh_ops
from autopar.runtime.collectives.collectives import _BEGIN, Member, Move, begin, together

MESH = Mesh((("x", 3),))
SPLIT, SPLIT_IN, MIRRORED = Layout((("x",), ())), Layout(((2, "x"), ())), Layout(((-2, "x"), ()))
BY_OWNER = ("route", "token_places", "dispatch", "combine")  # tests/runtime/test_rows_to_owners.py
OTHERS = [one for one in COLLECTIVES if one.name not in BY_OWNER]
MOVES = [one for one in OTHERS if not one.edges]  # of the value itself
# A layout that each can be applied to, and its arguments after the axis.
CASES: dict[str, list[tuple[Layout, tuple[object, ...]]]] = {
    "all_reduce": [(Layout(((), ()), (("x", kind),)), (kind,)) for kind in ("sum", "max", "min", "logsumexp")],
    "all_gather": [(SPLIT, (0, 1)), (SPLIT_IN, (0, 2)), (Layout(((), ("x",))), (1, 1))],
    "reduce_scatter": [
        (Layout(((), ()), (("x", "sum"),)), (1, 1, "sum")), (Layout(((), ()), (("x", "max"),)), (0, 2, "max")),
        (Layout(((), ()), (("x", "logsumexp"),)), (0, 2, "logsumexp")),
    ],
    "all_to_all": [(SPLIT, (0, 1, 1, 2)), (SPLIT_IN, (0, 2, 1, 1))],
    "shift": [(SPLIT, (1,)), (SPLIT, (-1,)), (SPLIT_IN, (2,))],
    "halo": [(SPLIT, (0, 1, 2, 1)), (SPLIT_IN, (0, 2, 0, 2)), (MIRRORED, (0, -2, 2, 1)), (SPLIT, (0, 1, 6, 9))],
    "halo_sum": [(SPLIT, (0, 1, 1, 2)), (SPLIT_IN, (0, 2, 1, 0)), (MIRRORED, (0, -2, 0, 1)), (SPLIT, (0, 1, 0, 3))],
    "earlier": [(SPLIT, (0, 1, "k")), (Layout(((), ("x",))), (1, 1, "k"))],
    "later": [(Layout(((), ()), (("x", "sum"),)), (1, 1, "k"))],
}  # fmt: skip


def parts_of(layout: Layout) -> list[torch.Tensor]:
    """What the ranks hold; of a partial value each rank has its own."""
    torch.manual_seed(0)
    if layout.partial:
        return [torch.randn(12, 6, dtype=torch.float64) for _ in MESH.coords()]
    whole = torch.randn(12, 6, dtype=torch.float64)
    return [local_part(whole, layout, MESH, coord).clone() for coord in MESH.coords()]


def ask(name: str, parts: list[torch.Tensor], rest: tuple[object, ...]) -> list[torch.Tensor]:
    return together([(op(name), (part, "x", *rest)) for part in parts])


@pytest.mark.parametrize("one", MOVES, ids=lambda one: one.name)
def test_a_collective_changes_the_layout_and_not_the_value(one: CollectiveOp) -> None:
    for layout, rest in CASES[one.name]:
        parts = parts_of(layout)
        after = moved_layout(one.name, ("x", *rest), layout, MESH)
        assert after is not None and (after == layout) == one.to_one
        got = combine(ask(one.name, parts, rest), after, MESH)
        if one.to_one:  # the pieces stand elsewhere
            parts = [parts[(place - rest[0]) % 3] for place in range(3)]  # type: ignore[operator]
        torch.testing.assert_close(got, combine(parts, layout, MESH), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("one", OTHERS, ids=lambda one: one.name)
def test_each_result_is_memory_of_its_own(one: CollectiveOp) -> None:
    """The executor may write over what a collective gave it."""
    for layout, rest in CASES[one.name]:
        parts = parts_of(layout)
        before, results = [part.clone() for part in parts], ask(one.name, parts, rest)
        for i, result in enumerate(results):
            others = [other.clone() for other in results[i + 1 :]]
            result.fill_(7.0)
            assert all(map(torch.equal, others, results[i + 1 :]))
        assert all(map(torch.equal, before, parts)), "the operands"


@pytest.mark.parametrize("one", MOVES, ids=lambda one: one.name)
def test_a_collective_among_one_rank_copies(one: CollectiveOp) -> None:
    x = torch.randn(12, 6)
    rest = CASES[one.name][0][1]
    alone = Member(1, 0)
    copied, kept = (begin(op(one.name), (x, "x", *rest), alone, owned) for owned in (False, True))
    assert isinstance(copied, torch.Tensor) and torch.equal(copied, x) and copied is not x and kept is x


@pytest.mark.parametrize("one", OTHERS, ids=lambda one: one.name)
def test_a_half_begins_as_the_whole(one: CollectiveOp) -> None:
    assert op(one.name) in _BEGIN and collective_of(op(one.name)) is one and whole_of(op(one.name)) is op(one.name)
    if not one.halves:
        assert not hasattr(torch.ops.autopar, f"{one.name}_start")
        return
    start = op(f"{one.name}_start")
    assert whole_of(start) is op(one.name) and collective_of(start) is one and mesh_op_name(start) == one.name
    layout, rest = CASES[one.name][0]
    first = begin(start, (parts_of(layout)[0], "x", *rest), Member(3, 0))
    assert isinstance(first, Move)


HALOS = [(layout, outer, *rows) for layout, outer in ((SPLIT, 1), (SPLIT_IN, 2), (MIRRORED, -2))
         for rows in ((1, 0), (0, 2), (2, 1), (5, 7), (0, 11))]  # fmt: skip


@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("outer", [1, 2, -2, -4])
@pytest.mark.parametrize(("before", "after"), [(1, 0), (0, 1), (2, 1), (5, 7), (0, 30)])
def test_a_halo_may_wrap_around(size: int, outer: int, before: int, after: int) -> None:
    whole = torch.arange(48.0).view(48, 1)
    parts = mesh_ops.pieces(whole, size, 0, outer)
    got = together([(op("halo"), (part, "x", 0, outer, before, after, True)) for part in parts])
    long = with_halo(whole, 0, size * abs(outer), Halo("x", before, after, wrap=True))
    assert torch.equal(torch.stack(got), mesh_ops.pieces(long, size, 0, outer))


@pytest.mark.parametrize("case", HALOS, ids=str)
def test_a_halo_is_the_rows_beside_each_run(case: tuple[Layout, int, int, int]) -> None:
    """And its transpose adds what they give where they came from. Some halos are longer than a run, and than all."""
    layout, outer, before, after = case
    rest, runs, known = (0, outer, before, after), 3 * abs(outer), Halo("x", before, after)
    whole = torch.randn(12, 6, dtype=torch.float64)
    long = with_halo(whole, 0, runs, known)
    parts = [local_part(whole, layout, MESH, coord).clone() for coord in MESH.coords()]
    for got, coord in zip(ask("halo", parts, rest), MESH.coords(), strict=True):
        assert torch.equal(got, local_part(long, layout, MESH, coord))
    given = torch.randn_like(long)
    parts = [local_part(given, layout, MESH, coord).clone() for coord in MESH.coords()]
    summed = combine(ask("halo_sum", parts, rest), layout, MESH)
    torch.testing.assert_close(summed, sum_of_halos(given, 0, runs, known), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close((given * long).sum(), (summed * whole).sum(), rtol=1e-12, atol=1e-12)
    for name in ("halo", "halo_sum"):
        assert moved_layout(name, ("x", *rest), layout, MESH) == layout
        assert moved_layout(name, ("x", 1, outer, before, after), layout, MESH) != layout, "another dim"
        assert moved_layout(name, ("x", 0, 4 * outer, before, after), layout, MESH) != layout, "other runs"


def test_the_halo_of_one_rank_is_that_of_its_own_runs() -> None:
    x = torch.arange(1.0, 7)
    alone = [(op("halo"), (x, "x", 0, 2, 1, 1))]
    assert together(alone)[0].tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 6, 0]


def test_there_is_a_case_of_every_collective() -> None:
    assert CASES.keys() | {*BY_OWNER} == {one.name for one in COLLECTIVES}
    assert len(_BEGIN) == len(COLLECTIVES)


def test_a_shift_around_the_axis_moves_nothing() -> None:
    x = torch.randn(3)
    copied, kept = (begin(op("shift"), (x, "x", 6), Member(3, 1), owned) for owned in (False, True))
    assert isinstance(copied, torch.Tensor) and torch.equal(copied, x) and copied is not x and kept is x


def test_logsumexp_of_nothing_and_of_infinities() -> None:
    parts = [torch.tensor([-torch.inf, 1.0, torch.inf]), torch.tensor([-torch.inf, -torch.inf, 2.0])]
    for result in ask("all_reduce", parts, ("logsumexp",)):
        assert result.tolist() == [-torch.inf, 1.0, torch.inf]


def test_short_floats_are_added_in_float32() -> None:
    """256 parts of 1: log(256), where a sum in bf16 would stay at 1 from 256 on."""
    parts = [torch.zeros(1, dtype=torch.bfloat16) for _ in range(512)]
    (first, *_) = ask("all_reduce", parts, ("logsumexp",))
    assert first.dtype == torch.bfloat16 and first.item() == torch.tensor(512.0).log().bfloat16().item()
