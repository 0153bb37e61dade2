"""How many places along a dim of a mask are not zero at most: told by the graph, beside what tensors have."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar.ir.text.text import parse_program
from autopar.passes.sorts.loop_masks import _most

# Of eight rows two of six experts each, one of six, and the same shown otherwise.
TEXT = """\
CAPTURED program
%i: i64[8,2] = batch "i"
%e: i64[8,1] = batch "e"
%z: f32[8,6] = aten.full.default([8,6], 0, dtype=f32)
%o: f32[8,6] = aten.ones.default([8,6], dtype=f32)
%two: f32[8,6] = aten.scatter.value(%z, 1, %i, 1.0)
%last: f32[8,6] = aten.scatter.value(%z, -1, %i, 1.0)
%among_ones: f32[8,6] = aten.scatter.value(%o, 1, %i, 0.0)
%places: i64[6] = aten.arange.default(6)
%one: b8[8,6] = aten.eq.Tensor(%e, %places)
%wide_e: i64[8,6] = aten.expand.default(%e, [8,6])
%same: b8[8,6] = aten.eq.Tensor(%wide_e, %e)
%cast: f32[8,6] = aten._to_copy.default(%one, dtype=f32)
%both: f32[8,6] = aten.mul.Tensor(%two, %cast)
%row: f32[8,6] = aten.mul.Tensor(%two, %places)
%shown: b8[8,6] = aten.gt.Scalar(%two, 0)
%summed: f32[8,6] = aten.add.Tensor(%two, %two)
%turned: f32[6,8] = aten.transpose.int(%two, 0, 1)
%back: f32[6,8] = aten.transpose.int(%two, -2, -1)
%t: f32[6,8] = aten.t.default(%two)
%blocks: f32[2,4,6] = aten.view.default(%two, [2,4,6])
%swapped: f32[2,6,4] = aten.transpose.int(%blocks, 1, 2)
%front: f32[6,2,4] = aten.permute.default(%blocks, [-1,0,1])
%column: f32[8,1,6] = aten.unsqueeze.default(%two, 1)
%torn: f32[8,2,3] = aten.view.default(%two, [8,2,3])
%flat: f32[48] = aten.view.default(%two, [48])
%wide: f32[3,8,6] = aten.expand.default(%two, [3,8,6])
return value "y" = %flat
"""
MOST = {
    "two": (8, 2), "last": (8, 2), "among_ones": (8, 6), "one": (8, 1), "same": (8, 6), "cast": (8, 1), "both": (8, 1),
    "row": (8, 2), "shown": (8, 2), "summed": (8, 6), "turned": (2, 8), "back": (2, 8), "t": (2, 8),
    "blocks": (2, 4, 2), "swapped": (2, 2, 4), "front": (2, 2, 4), "column": (8, 1, 2), "torn": (8, 2, 3),
    "flat": (48,), "wide": (3, 8, 6),
}  # fmt: skip


@pytest.fixture(scope="module")
def nodes() -> dict[str, fx.Node]:
    return {node.name: node for node in parse_program(TEXT).graph.nodes}


def test_most_places_that_are_not_zero(nodes: dict[str, fx.Node]) -> None:
    assert {name: tuple(_most(nodes[name], dim) for dim in range(len(most))) for name, most in MOST.items()} == MOST
    assert _most(nodes["two"], -1) == 2


def test_no_tensor_has_more(nodes: dict[str, fx.Node]) -> None:
    torch.manual_seed(0)
    for _ in range(5):
        value = {nodes["i"]: torch.rand(8, 6).argsort(1)[:, :2], nodes["e"]: torch.randint(6, (8, 1))}
        for node in (node for node in nodes.values() if node.op == "call_function"):
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), value.__getitem__)
            value[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        for name, most in MOST.items():
            for dim, limit in enumerate(most):
                assert int((value[nodes[name]] != 0).sum(dim).max()) <= limit, (name, dim)
