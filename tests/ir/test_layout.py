"""Layouts: one spelling, and pieces that make the whole again."""

from __future__ import annotations

import math
import random

import pytest
import torch

from autopar.errors import LayoutError
from autopar.ir.layout import (
    PARTIAL_KINDS,
    Factor,
    Layout,
    combine,
    factor_sizes,
    fits,
    local_part,
    local_shape,
    outer_of,
    parse_layout,
    pieces,
    reduce_dim,
    reduce_two,
    replica_error,
    replicated,
)
from autopar.ir.mesh import Mesh, parse_mesh

MESH = parse_mesh("dp=2,tp=3")


def draw_layout(draw: random.Random, ndim: int, mesh: Mesh, partial: bool = True) -> Layout:
    dims: list[tuple[Factor, ...]] = [() for _ in range(ndim)]
    kinds = []
    for axis in draw.sample(mesh.names, len(mesh.names)):
        where = draw.choice(["whole", "partial", "split", "split"] if partial else ["whole", "split", "split"])
        if where == "partial":
            kinds.append((axis, draw.choice(PARTIAL_KINDS)))
        elif where == "split" and ndim:
            dim = draw.randrange(ndim)
            integer: tuple[Factor, ...] = (draw.choice((2, 3, -2, -4)),) if draw.random() < 0.4 else ()
            dims[dim] = (*dims[dim], *integer, axis)
    return Layout(tuple(dims), tuple(kinds))


SPELLINGS = {
    "[]": Layout(()),
    "[-]": Layout(((),)),
    "[dp,-,tp]": Layout((("dp",), (), ("tp",))),
    "[dp:tp,-]": Layout((("dp", "tp"), ())),
    "[3:tp,-]": Layout(((3, "tp"), ())),
    "[2:dp:5:tp]": Layout(((2, "dp", 5, "tp"),)),
    "[-,2~dp]": Layout(((), (-2, "dp"))),
    "[dp:4~tp,-]": Layout((("dp", -4, "tp"), ())),
    "[6~dp:tp]": Layout(((-6, "dp", "tp"),)),
    "[@ep,-]": Layout(((0, "ep"), ())),
    "[dp:@ep:2:cp,-,tp]": Layout((("dp", 0, "ep", 2, "cp"), (), ("tp",))),
    "[-,-] partial(tp)": Layout(((), ()), (("tp", "sum"),)),
    "[-] partial(max:tp)": Layout(((),), (("tp", "max"),)),
    "[] partial(dp,logsumexp:tp)": Layout((), (("dp", "sum"), ("tp", "logsumexp"))),
}


@pytest.mark.parametrize("text", SPELLINGS)
def test_canonical(text: str) -> None:
    assert str(SPELLINGS[text]) == text and parse_layout(text) == SPELLINGS[text]


def test_spelling_round_trip() -> None:
    draw, mesh = random.Random(11), parse_mesh("dp=2,tp=3,cp=5")
    print("seed 11")
    seen = set()
    for _ in range(500):
        layout = draw_layout(draw, draw.randrange(5), mesh)
        seen.add(str(layout))
        assert parse_layout(str(layout)) == layout
    assert len(seen) > 200


def test_spaces_do_not_matter() -> None:
    assert parse_layout("  [ dp , - ,2:tp ]  partial( cp , max:ep ) ") == parse_layout("[dp,-,2:tp] partial(cp,max:ep)")


READ = "write it like '[dp,-,tp]' or '[-,-] partial(tp)'."
ERRORS = {
    "dp,-": f"cannot read layout 'dp,-': {READ}",
    "[dp,-": f"cannot read layout '[dp,-': {READ}",
    "[dp] partial": f"cannot read layout '[dp] partial': {READ}",
    "[dp] max(tp)": f"cannot read layout '[dp] max(tp)': {READ}",
    "[[dp]]": f"cannot read layout '[[dp]]': {READ}",
    "": f"cannot read layout '': {READ}",
    "[dp,]": "layout '[dp,]': '' is neither an axis name, an integer above 1 nor '-'.",
    "[d-p]": "layout '[d-p]': 'd-p' is neither an axis name, an integer above 1 nor '-'.",
    "[0:dp]": "layout '[0:dp]': '0' is neither an axis name, an integer above 1 nor '-'.",
    "[1:dp]": "layout '[1:dp]': '1' is neither an axis name, an integer above 1 nor '-'.",
    "[-:dp]": "layout '[-:dp]': '-' is neither an axis name, an integer above 1 nor '-'.",
    "[@2]": "layout '[@2]': '@2' is neither an axis name, an integer above 1 nor '-'.",
    "[@]": "layout '[@]': '@' is neither an axis name, an integer above 1 nor '-'.",
    "[3]": "layout '[3]': '3' ends in an integer; what follows the last axis is not written.",
    "[dp:3]": "layout '[dp:3]': 'dp:3' ends in an integer; what follows the last axis is not written.",
    "[dp,dp]": "layout '[dp,dp]' uses axis 'dp' twice: an axis splits one dim only.",
    "[dp:tp:dp]": "layout '[dp:tp:dp]' uses axis 'dp' twice: an axis splits one dim only.",
    "[dp] partial(dp)": "layout '[dp] partial(dp)' uses axis 'dp' twice: an axis splits one dim only.",
    "[-] partial(a:dp)": "layout '[-] partial(a:dp)': 'a:dp' is not an axis, or a kind and an axis like 'max:tp'.",
    "[-] partial(dp,)": "layout '[-] partial(dp,)': '' is not an axis, or a kind and an axis like 'max:tp'.",
}


@pytest.mark.parametrize("text", ERRORS)
def test_what_cannot_be_read(text: str) -> None:
    with pytest.raises(LayoutError) as found:
        parse_layout(text)
    assert str(found.value) == ERRORS[text]


def test_properties() -> None:
    layout = parse_layout("[dp,2:tp,-] partial(max:cp)")
    assert layout.axes == ("dp", "tp") and not layout.is_replicated
    assert replicated(3) == parse_layout("[-,-,-]") and replicated(3).is_replicated and replicated(0).is_replicated
    assert not parse_layout("[-] partial(dp)").is_replicated and not parse_layout("[dp]").is_replicated


@pytest.mark.parametrize(
    ("shape", "text", "local"),
    [
        ((4, 6), "[dp,tp]", (2, 2)),
        ((12, 6), "[dp:tp,-]", (2, 6)),
        ((12, 6), "[2:tp,-]", (4, 6)),
        ((4, 6), "[dp,3:dp]", None),  # an axis twice is not parsed; here only the size counts
        ((5, 6), "[dp,-]", None),
        ((4, 6), "[dp,4:tp]", None),
        ((2, 6), "[dp:tp,-]", None),  # smaller than the axes
        ((1, 6), "[dp,-]", None),
        ((0, 6), "[dp,-]", (0, 6)),
        ((4, 6), "[dp]", None),
        ((), "[]", ()),
    ],
)
def test_what_fits(shape: tuple[int, ...], text: str, local: tuple[int, ...] | None) -> None:
    layout = parse_layout(text) if text != "[dp,3:dp]" else Layout((("dp",), (3, "dp", 7)))
    assert fits(shape, layout, MESH) == (local is not None)
    if local is not None:
        assert local_shape(shape, layout, MESH) == local
    else:
        with pytest.raises(AssertionError):
            local_shape(shape, layout, MESH)


def test_factors_and_pieces() -> None:
    assert factor_sizes((2, "dp", 5, "tp"), MESH) == (2, 2, 5, 3) and pieces((2, "dp", 5, "tp"), MESH) == 6


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("[dp]", [[0, 1, 2, 3, 4, 5]] * 3 + [[6, 7, 8, 9, 10, 11]] * 3),
        ("[tp]", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]] * 2),
        ("[dp:tp]", [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]),
        ("[tp:dp]", [[0, 1], [4, 5], [8, 9], [2, 3], [6, 7], [10, 11]]),
        ("[2:tp]", [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]] * 2),
        ("[2:dp:3]", None),
        ("[3:dp]", [[0, 1, 4, 5, 8, 9]] * 3 + [[2, 3, 6, 7, 10, 11]] * 3),
        ("[dp:2:tp]", [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8, 11]]),
    ],
)
def test_local_parts_by_hand(text: str, held: list[list[int]] | None) -> None:
    if held is None:
        with pytest.raises(LayoutError):
            parse_layout(text)
        return
    parts = [local_part(torch.arange(12), parse_layout(text), MESH, coord).tolist() for coord in MESH.coords()]
    assert parts == held


@pytest.mark.parametrize("mesh", ["dp=2,tp=3", "tp=3,dp=2", "dp=2,tp=2,cp=2", "dp=1,tp=4", ""])
def test_parts_combine_to_the_whole(mesh: str) -> None:
    """`combine` is the inverse of `local_part`; each element lies on as many ranks as the layout has copies."""
    seed = sum(map(ord, mesh))
    print(f"seed {seed}")
    draw, parsed = random.Random(seed), parse_mesh(mesh or {})
    for _ in range(60):
        ndim = draw.randrange(4)
        layout = draw_layout(draw, ndim, parsed)
        layout = Layout(layout.dims, tuple((axis, "sum") for axis, _ in layout.partial))
        shape = tuple(math.prod(factor_sizes(dim, parsed)) * draw.choice([1, 2, 3]) for dim in layout.dims)
        value = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape) + 1
        parts = [local_part(value, layout, parsed, coord) for coord in parsed.coords()]
        assert {tuple(part.shape) for part in parts} == {local_shape(shape, layout, parsed)}, str(layout)
        assert torch.equal(combine(parts, layout, parsed), value), str(layout)
        assert replica_error(parts, layout, parsed) == 0.0
        copies = parsed.size // math.prod([parsed[axis] for axis in layout.axes])
        for axis, _ in layout.partial:
            copies //= parsed[axis]  # the sum lies on the first of them
        assert sum(part.sum() for part in parts) == copies * value.sum(), str(layout)


@pytest.mark.parametrize("kind", PARTIAL_KINDS)
def test_combine_takes_the_kind(kind: str) -> None:
    parts = [torch.tensor([float(i), -float(i)], dtype=torch.float64) for i in range(6)]
    found = combine(parts, Layout(((),), (("tp", kind),)), MESH)
    assert torch.equal(found, reduce_dim(torch.stack(parts[:3]), 0, kind))
    expected = {"sum": [3, -3], "max": [2, 0], "min": [0, -2]}
    if kind in expected:
        assert found.tolist() == expected[kind]
    else:
        torch.testing.assert_close(found.exp(), torch.stack(parts[:3]).exp().sum(0))


def test_combine_over_both_axes() -> None:
    parts = [torch.tensor([float(2**i)]) for i in range(6)]
    assert combine(parts, Layout(((),), (("dp", "sum"), ("tp", "sum"))), MESH).tolist() == [63.0]
    assert combine(parts, Layout(((),), (("dp", "max"), ("tp", "sum"))), MESH).tolist() == [8.0 + 16 + 32]
    assert combine(parts, parse_layout("[dp] partial(tp)"), MESH).tolist() == [7.0, 56.0]


@pytest.mark.parametrize("kind", PARTIAL_KINDS)
def test_two_parts_reduce_as_their_grid_does(kind: str) -> None:
    a, b = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.5, 4.0, 3.0])
    assert torch.allclose(reduce_two(a, b, kind), reduce_dim(torch.stack([a, b]), 0, kind))


def test_an_unknown_kind_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        reduce_dim(torch.zeros(2), 0, "mean")
    with pytest.raises(AssertionError):
        reduce_two(torch.zeros(2), torch.zeros(2), "mean")


@pytest.mark.parametrize("text", ["[sl]", "[dp:sl]", "[sl:dp]", "[dp,sl]", "[2:sl]", "[2:sl,dp]", "[dp,sl:tp]"])
def test_slices_of_different_lengths_are_cut_where_they_lie(text: str) -> None:
    """Side by side the parts of all slices are what a mesh without slices holds; each slice is as long as it says."""
    mesh, layout = parse_mesh("dp=2,tp=2,sl=4+8"), parse_layout(text)
    value = torch.arange(2 * 24 * 24.0).reshape(2 * 24, 24)[:, : 24 if len(layout.dims) > 1 else 1].squeeze(-1)
    without = Layout(tuple(tuple(factor for factor in dim if factor != "sl") for dim in layout.dims))
    dim = next(dim for dim, factors in enumerate(layout.dims) if "sl" in factors)
    factors = layout.dims[dim]
    outer = math.prod(factor_sizes(factors[: factors.index("sl")], mesh))
    for place, (start, size) in enumerate(((0, 4), (4, 8))):
        rows = torch.arange(value.shape[dim]).unflatten(0, (outer, 12, -1))[:, start : start + size].flatten()
        own = value.index_select(dim, rows)
        for coord in mesh.coords():
            if coord["sl"] == place:
                assert torch.equal(local_part(value, layout, mesh, coord), local_part(own, without, mesh, coord))


def test_replica_error() -> None:
    """Ranks that should hold the same are compared, others not; NaN equals NaN and nothing else."""
    parts = [torch.tensor([1.0, 2.0]) for _ in range(6)]
    layout = parse_layout("[-]")
    assert replica_error(parts, layout, MESH) == 0.0
    parts[4] = torch.tensor([1.0, 2.5])
    assert replica_error(parts, layout, MESH) == 0.5
    assert replica_error(parts, parse_layout("[dp]"), MESH) == 0.5  # ranks 3, 4 and 5 hold one half
    assert replica_error(parts, parse_layout("[tp]"), MESH) == 0.5  # ranks 1 and 4 one third
    assert replica_error(parts, parse_layout("[dp:tp]"), MESH) == 0.0  # each rank has its own
    assert replica_error(parts, parse_layout("[-] partial(dp,tp)"), MESH) == 0.0
    assert replica_error(parts, parse_layout("[dp] partial(tp)"), MESH) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_replica_error_of_what_is_not_finite(bad: float) -> None:
    layout = parse_layout("[-]")
    parts = [torch.tensor([1.0, bad]) for _ in range(6)]
    assert replica_error(parts, layout, MESH) == 0.0
    for value in (0.0, math.nan if bad != bad or bad > 0 else math.inf):
        if value == bad or (value != value and bad != bad):
            continue
        assert replica_error([*parts[:5], torch.tensor([1.0, value])], layout, MESH) == math.inf
        assert replica_error([torch.tensor([1.0, value]), *parts[1:]], layout, MESH) == math.inf


def test_replica_error_of_integers_and_nothing() -> None:
    parts = [torch.tensor([2**62])] * 5 + [torch.tensor([2**62 - 2**20])]
    assert replica_error(parts, parse_layout("[-]"), MESH) == 2.0**20
    assert replica_error([torch.zeros(0)] * 6, parse_layout("[-]"), MESH) == 0.0
    assert replica_error([torch.tensor([True])] * 5 + [torch.tensor([False])], parse_layout("[-]"), MESH) == 1.0


def test_rows_at_their_owners() -> None:
    """Who holds which the layout does not say: only how many on average, and where they are at home."""
    mesh, layout = parse_mesh("dp=2,ep=2"), parse_layout("[dp:@ep,-]")
    assert layout.owned == ((0, "ep"),) and layout.at_home == parse_layout("[dp:ep,-]") and not layout.at_home.owned
    assert [outer_of(parse_layout(text).dims[0], "ep") for text in ("[@ep]", "[3:@ep]", "[2~ep]", "[3:ep]")] == [
        1,
        3,
        -2,
        3,
    ]
    assert layout.axes == ("dp", "ep") and fits((8, 3), layout, mesh) and local_shape((8, 3), layout, mesh) == (2, 3)
    with pytest.raises(AssertionError, match="the owners say"):
        local_part(torch.zeros(8, 3), layout, mesh, mesh.coord(0))
    with pytest.raises(AssertionError, match="the owners say"):
        combine([torch.zeros(2, 3)] * 4, layout, mesh)
