"""A linear recurrence in pieces: each run of rows is told the state before it, and goes on from there."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.ir.layout import Layout, local_shape
from autopar.ir.mesh import Mesh
from autopar.ir.ops.ops import op
from autopar.ir.program import Builder, TensorType, record, set_record
from autopar.passes.collectives.halos import Runs

aten = torch.ops.aten


def with_states_before(build: Builder, own: fx.Node, runs: Runs, reverse: bool, mesh: Mesh) -> fx.Node:
    """`own`, the recurrence of each run of a dim from zeros, as those of the whole.

    Two rows of each run are gathered: its last state, and what its factors come to as a product. They are a recurrence
    over runs, of which each rank takes the states before its own. Nothing is divided: a factor may be zero.
    """
    known, dim = record(own), runs.dim
    type_, layout = known.type, known.layout
    shape, (mine, place) = runs.apart(type_.shape), (local_shape(type_.shape, layout, mesh), -1 if reverse else 1)
    apart = Layout((*layout.dims[: dim + 1], (), *layout.dims[dim + 1 :]))
    whole = Layout((*layout.dims[:dim], (), *layout.dims[dim + 1 :]))
    ends = (*shape[: dim + 1], *shape[dim + 2 :])

    def call(target: Any, *args: Any, shape: tuple[int, ...], layout: Layout, name: str) -> fx.Node:
        given = [arg for listed in args for arg in (listed if isinstance(listed, list) else [listed])]
        operands = tuple(record(arg).layout for arg in given if isinstance(arg, fx.Node))
        like = known.with_(
            types=(TensorType(shape, type_.dtype),), layouts=(layout,), operands=operands, origin="", flops=0,
            reason="each piece goes on from the state that the pieces before it end with",
        )  # fmt: skip
        return build.call(target, *args, like=like, name=name)

    def rows(x: fx.Node, name: str) -> fx.Node:
        return call(aten.reshape.default, x, of_runs, shape=shape, layout=apart, name=name)

    of_runs = list(runs.apart(mine, of_rank=True))
    set_record(own, known.with_(origin=""))  # from zeros
    a, b, *_ = own.args
    assert isinstance(a, fx.Node)
    end = 0 if reverse else of_runs[dim + 1] - 1
    last = call(aten.select.int, rows(own, "runs"), dim + 1, end, shape=ends, layout=layout, name="last")
    product = call(aten.prod.dim_int, rows(a, "factors"), dim + 1, shape=ends, layout=layout, name="product")
    both, whole_both = Layout(((), *layout.dims)), Layout(((), *whole.dims))
    pair = call(aten.stack.default, [product, last], 0, shape=(2, *ends), layout=both, name="pair")
    pair = call(
        op("all_gather"), pair, runs.axis, dim + 1, runs.outer, shape=(2, *ends), layout=whole_both, name="all_gather"
    )
    product, last = (call(aten.select.int, pair, 0, i, shape=ends, layout=whole, name="of_runs") for i in (0, 1))
    states = call(op("linear_scan"), product, last, None, dim, reverse, shape=ends, layout=whole, name="states")
    states = call(op("pad_rows"), states, dim, place, -place, shape=ends, layout=whole, name="states_before")
    states = call(op("shard"), states, runs.axis, dim, runs.outer, shape=ends, layout=layout, name="shard")
    like = known.with_(operands=(*known.operands, layout))
    return build.call(op("linear_scan"), a, b, states, dim, reverse, like=like, name="linear_scan", **own.kwargs)
