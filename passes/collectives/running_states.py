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


def with_states_before(
    build: Builder, own: fx.Node, runs: Runs, reverse: bool, mesh: Mesh, has_factors: bool
) -> fx.Node:
    """`own`, the recurrence of each run of a dim from zeros, as those of the whole.

    Two rows of each run are gathered: its last state, and what its factors come to as a product. They are a recurrence
    over runs, of which each rank takes the states before its own. Nothing is divided: a factor may be zero. A running
    sum is one whose factors are one (has_factors=False): its last row is enough, and what is before it is added.
    """
    known, dim = record(own), runs.dim
    type_, layout = known.type, known.layout
    shape, (mine, place) = runs.apart(type_.shape), (local_shape(type_.shape, layout, mesh), -1 if reverse else 1)
    apart = Layout((*layout.dims[: dim + 1], (), *layout.dims[dim + 1 :]), layout.partial)
    whole = Layout((*layout.dims[:dim], (), *layout.dims[dim + 1 :]), layout.partial)
    ends, one = (*shape[: dim + 1], *shape[dim + 2 :]), (*shape[: dim + 1], 1, *shape[dim + 2 :])

    reason = "each piece goes on from the state that the pieces before it end with"
    like = known.with_(origin="", flops=0, reason=reason)

    def call(target: Any, *args: Any, shape: tuple[int, ...], layout: Layout, name: str) -> fx.Node:
        return build.lay(target, *args, like=like, type_=TensorType(shape, type_.dtype), layout=layout, name=name)

    def rows_of(x: fx.Node, name: str) -> fx.Node:
        return call(aten.reshape.default, x, of_runs, shape=shape, layout=apart, name=name)

    def gathered(x: fx.Node, shape: tuple[int, ...], layout: Layout) -> fx.Node:
        at = len(shape) - len(ends) + dim
        return call(op("all_gather"), x, runs.axis, at, runs.outer, shape=shape, layout=layout, name="all_gather")

    of_runs = list(runs.apart(mine, of_rank=True))
    set_record(own, known.with_(origin=""))  # from zeros
    end, rows = 0 if reverse else of_runs[dim + 1] - 1, rows_of(own, "runs")
    last = call(aten.select.int, rows, dim + 1, end, shape=ends, layout=layout, name="last")
    if has_factors:
        a, b, *_ = own.args
        assert isinstance(a, fx.Node)
        product = call(aten.prod.dim_int, rows_of(a, "factors"), dim + 1, shape=ends, layout=layout, name="product")
        both = Layout(((), *layout.dims))
        pair = call(aten.stack.default, [product, last], 0, shape=(2, *ends), layout=both, name="pair")
        pair = gathered(pair, (2, *ends), Layout(((), *whole.dims)))
        product, last = (call(aten.select.int, pair, 0, i, shape=ends, layout=whole, name="of_runs") for i in (0, 1))
        states = call(op("linear_scan"), product, last, None, dim, reverse, shape=ends, layout=whole, name="states")
    else:
        last = gathered(last, ends, whole)
        states = call(op("running_sum"), last, dim, reverse, shape=ends, layout=whole, name="states")
    states = call(op("pad_rows"), states, dim, place, -place, shape=ends, layout=whole, name="states_before")
    states = call(op("shard"), states, runs.axis, dim, runs.outer, shape=ends, layout=layout, name="shard")
    if has_factors:
        args = a, b, states, dim, reverse
        return build.lay(op("linear_scan"), *args, like=known, name="linear_scan", **own.kwargs)  # type: ignore[arg-type]
    states = call(aten.unsqueeze.default, states, dim + 1, shape=one, layout=apart, name="states_before")
    rows = call(aten.add.Tensor, rows, states, shape=shape, layout=apart, name="runs")
    return build.lay(aten.reshape.default, rows, list(mine), like=known.with_(flops=0), name="running_sum")
