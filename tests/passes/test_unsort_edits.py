"""Edits of a program that sorts rows and puts them back: the sort goes where nobody sees it; numbers never change."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.program import Program, record
from autopar.ir.text.text import parse_program
from autopar.passes.sorts.unsort import unsort
from autopar.runtime.executor.kernel_table import function_of

ORDER = "%order: i64[6] = operator.getitem(%sort, 1)"
SORT = "%sort: (i64[6], i64[6]) = aten.sort.stable(%key, stable=True)"
TAKEN, MADE = "%rows: f64[6,2] = aten.index.Tensor(%x, [%order])", "%exp: f64[6,2] = aten.exp.default(%rows)"
BASE = "%base: f64[6,2] = aten.zeros.default([6,2], dtype=f64)"
BACK = "%back: f64[6,2] = aten.index_put.default(%base, [%order], %exp)"
X, KEY, END = '%x: f64[6,2] = batch "x"', '%key: i64[6] = batch "key"', 'return value "y" = %back'
TEXT = "\n".join(["CAPTURED program", X, KEY, SORT, ORDER, TAKEN, MADE, BASE, BACK, END, ""])
TOKENS, BY_TOKEN = '%x: f64[3,2] = batch "x"', "%rows: f64[6,2] = aten.index.Tensor(%x, [%token])"
HALF = f"{ORDER}\n%token: i64[6] = aten.floor_divide.default(%order, 2)"
SUMMED = "%back: f64[3,2] = autopar.embedding_backward.default(%exp, %token, 3, -1)"
HALVES = {X: TOKENS, ORDER: HALF, TAKEN: BY_TOKEN, BACK: SUMMED}
COLUMN = f"{ORDER}\n%column: i64[6,1] = aten.unsqueeze.default(%order, 1)"
WIDE = f"{COLUMN}\n%wide: i64[6,2] = aten.expand.default(%column, [6,2])"
OTHER_WAY = HALF.replace("floor_divide.default(%order, 2", 'div.Tensor_mode(%order, 2, rounding_mode="trunc"')
QUARTER, TO_TWO = HALF.replace("2)", "4)"), SUMMED.replace("[3,", "[2,").replace("3, -1", "2, -1")
PLACES = "%place: f64[6,1] = aten._to_copy.default(%column, dtype=f64)\n"
GATHERED = "%rows: f64[6,2] = aten.gather.default(%x, 0, %wide)"
SCATTERED = "%back: f64[6,2] = aten.scatter.src(%base, 0, %wide, %exp)"
INVERSE = "%inverse: i64[6] = aten.argsort.default(%order)\n%back: f64[6,2] = aten.index.Tensor(%exp, [%inverse])"


ENDS = """%keys: i64[6] = operator.getitem(%sort, 0)
%numbers: i64[4] = aten.arange.default(4)
%ends: i64[4] = aten.searchsorted.Tensor(%keys, %numbers, right=True)
return value "y" = %ends"""
NARROW = {TAKEN: "%rows: f64[6,1] = aten.gather.default(%x, 0, %column)", MADE: MADE.replace(",2]", ",1]")}


def sort(call: str) -> dict[str, str]:
    return {SORT: f"%sort: (i64[6], i64[6]) = {call}"}


def order(call: str) -> dict[str, str]:
    return {ORDER: f"{ORDER}\n%other: i64[6] = {call}", TAKEN: TAKEN.replace("%order", "%other")}


def cast(dtype: str) -> dict[str, str]:
    short = f"{ORDER}\n%short: {dtype}[6] = aten._to_copy.default(%order, dtype={dtype})"
    again = f"{short}\n%other: i64[6] = aten._to_copy.default(%short, dtype=i64)"
    return {ORDER: again, TAKEN: TAKEN.replace("%order", "%other")}


UNSEEN = {
    "none": {},
    "a sort that need not be stable": sort("aten.sort.default(%key)"),
    "an order alone": {f"{SORT}\n{ORDER}": "%order: i64[6] = aten.argsort.default(%key, 0)"},
    "a stable order": {f"{SORT}\n{ORDER}": "%order: i64[6] = aten.argsort.stable(%key, stable=True)"},
    "ends of groups": {END: ENDS},
    "of the smallest": sort("aten.topk.default(%key, 6, 0, False)"),
    "a long cast": cast("i32"),
    "wrapped": order("aten.remainder.Scalar(%order, 6)"),
    "halves": HALVES,
    "rounded to zero": HALVES | {ORDER: OTHER_WAY},
    "as wide as rows": {ORDER: WIDE, TAKEN: GATHERED, BACK: SCATTERED},
    "by the inverse": {BACK: INVERSE},
    "the inverse put": {BACK: (
        "%place: i64[6] = aten.arange.default(6)\n%none: i64[6] = aten.empty_like.default(%order)\n"
        "%inverse: i64[6] = aten.index_put.default(%none, [%order], %place)\n"
        "%back: f64[6,2] = aten.index.Tensor(%exp, [%inverse])"
    )},
    "added to zeros": {BACK: BACK.replace("%exp)", "%exp, True)")},
    "over ones": {BASE: BASE.replace("zeros", "ones")},
    "a sum": {BACK: "%back: f64[2] = aten.sum.dim_IntList(%exp, [0])"},
}  # fmt: skip
SEEN = {
    "the largest before": sort("aten.sort.default(%key, 0, True)"),
    "the largest before, by name": sort("aten.sort.default(%key, descending=True)"),
    "an order of the largest": {f"{SORT}\n{ORDER}": "%order: i64[6] = aten.argsort.default(%key, 0, True)"},
    "keys are given": {END: '%keys: i64[6] = operator.getitem(%sort, 0)\nreturn value "y" = %keys'},
    "starts of groups": {END: ENDS.replace(", right=True", "")},
    "ends from one on": {END: ENDS.replace("default(4)", "start(1, 5)")},
    "halves of the inverse": {
        X: TOKENS, TAKEN: BY_TOKEN,
        ORDER: f"{ORDER}\n%back_to: i64[6] = aten.argsort.default(%order)\n"
               "%token: i64[6] = aten.floor_divide.default(%back_to, 2)",
    },
    "halves below zero": HALVES | {ORDER: HALF.replace("2)", "-2)")},
    "of a column": {
        ORDER: COLUMN, **NARROW, BASE: BASE.replace(",2]", ",1]"),
        BACK: SCATTERED.replace(",2]", ",1]").replace("wide", "column"),
    },
    "the largest first": sort("aten.sort.stable(%key, stable=True, descending=True)"),
    "of the largest": sort("aten.topk.default(%key, 6)"),
    "in no order": sort("aten.topk.default(%key, 6, 0, False, False)"),
    "of floats": {KEY: KEY.replace("i64", "f64"), SORT: SORT.replace("(i64[6], ", "(f64[6], ")},
    "the order is given": {END: 'return value "y" = %order'},
    "rows are given": {END: 'return value "y" = %exp'},
    "a short cast": cast("i16"),
    "a cast to floats": cast("f32"),
    "turned": order("aten.flip.default(%order, [0])"),
    "wrapped too early": {X: TOKENS} | order("aten.remainder.Scalar(%order, 3)"),
    "quarters of six": HALVES | {X: '%x: f64[2,2] = batch "x"', ORDER: QUARTER, BACK: TO_TWO},
    "more rows than keys": {X: X.replace("[6", "[7")},
    "fewer tokens than halves": HALVES | {X: '%x: f64[4,2] = batch "x"'},
    "summed to more tokens": HALVES | {BACK: SUMMED.replace("[3,", "[4,").replace("3, -1", "4, -1")},
    "added to ones": {BASE: BASE.replace("zeros", "ones"), BACK: BACK.replace("%exp)", "%exp, True)")},
    "put into more": {BASE: BASE.replace("6,", "7,"), BACK: BACK.replace("6,", "7,")},
    "the same for all": {MADE: "%exp: f64[6,2] = aten.exp.default(%x)"},
    "counted from one": {BACK: (
        "%place: i64[6] = aten.arange.start(-1, 5)\n%none: i64[6] = aten.empty_like.default(%order)\n"
        "%inverse: i64[6] = aten.index_put.default(%none, [%order], %place)\n"
        "%back: f64[6,2] = aten.index.Tensor(%exp, [%inverse])"
    )},
    "by the inverse twice": {TAKEN: INVERSE.replace("%back", "%rows").replace("%exp", "%x")},
    "back to front": {BACK: INVERSE.replace("(%order)", "(%order, 0, True)")},
    "running sums": {MADE: "%exp: f64[6,2] = aten.cumsum.default(%rows, 0)"},
    "rows turned": {MADE: "%exp: f64[6,2] = aten.flip.default(%rows, [0])"},
    "shares of all rows": {MADE: "%exp: f64[6,2] = aten._softmax.default(%rows, 0, False)"},
    "rows by places": {ORDER: COLUMN, MADE: f"{PLACES}%exp: f64[6,2] = aten.mul.Tensor(%rows, %place)"},
    "of other columns": {
        ORDER: f"{WIDE}\n%flat: i64[6,2] = aten.remainder.Scalar(%wide, 2)",
        TAKEN: GATHERED.replace("0, %wide", "1, %flat"), BACK: SCATTERED,
    },
}  # fmt: skip


def edited(edits: dict[str, str]) -> Program:
    text = TEXT
    for old, new in edits.items():
        assert old in text, old
        text = text.replace(old, new)
    return parse_program(text)


def run(program: Program) -> torch.Tensor:
    generator, value = torch.Generator().manual_seed(0), dict[fx.Node, torch.Tensor]()
    for node in program.graph.nodes:
        if node.op == "placeholder":
            type_ = record(node).type
            value[node] = torch.randint(4, type_.shape, generator=generator).to(type_.dtype)
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), value.__getitem__)
            value[node] = function_of(node.target)(*args, **kwargs)
    (end,) = program.graph.output_node().args[0]  # type: ignore[misc]
    return value[end]  # type: ignore[index]


@pytest.mark.parametrize("name", [*UNSEEN, *SEEN])
def test_a_sort_goes_where_nobody_sees_it(name: str) -> None:
    given = edited({**UNSEEN, **SEEN}[name])
    found = unsort(given, Plan(Mesh((("dp", 2),))))
    assert any("sort" in str(node.target) or "topk" in str(node.target) for node in found.calls()) is (name in SEEN)
    torch.testing.assert_close(run(found), run(given))
