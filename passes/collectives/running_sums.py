"""A running sum in pieces: each run of rows adds up its own, and then what the runs before it come to."""

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


def with_sums_before(build: Builder, own: fx.Node, runs: Runs, reverse: bool, mesh: Mesh) -> fx.Node:
    """`own`, the running sum of each run of a dim, with the sums of the runs before it. A row of each is gathered."""
    known, dim = record(own), runs.dim
    type_, layout = known.type, known.layout
    shape, (mine, place) = runs.apart(type_.shape), (local_shape(type_.shape, layout, mesh), -1 if reverse else 1)
    apart = Layout((*layout.dims[: dim + 1], (), *layout.dims[dim + 1 :]), layout.partial)
    whole = Layout((*layout.dims[:dim], (), *layout.dims[dim + 1 :]), layout.partial)
    ends, one = (*shape[: dim + 1], *shape[dim + 2 :]), (*shape[: dim + 1], 1, *shape[dim + 2 :])

    def call(target: Any, *args: Any, shape: tuple[int, ...], layout: Layout, name: str) -> fx.Node:
        operands = tuple(record(arg).layout for arg in args if isinstance(arg, fx.Node))
        like = known.with_(
            types=(TensorType(shape, type_.dtype),), layouts=(layout,), operands=operands, origin="", flops=0,
            reason="each piece adds up its own rows: the sums of the pieces before it are added",
        )  # fmt: skip
        return build.call(target, *args, like=like, name=name)

    of_runs = list(runs.apart(mine, of_rank=True))
    set_record(own, known.with_(origin=""))  # a part of the sum
    rows = call(aten.reshape.default, own, of_runs, shape=shape, layout=apart, name="runs")
    end = 0 if reverse else of_runs[dim + 1] - 1
    sums = call(aten.select.int, rows, dim + 1, end, shape=ends, layout=layout, name="sums")
    sums = call(op("all_gather"), sums, runs.axis, dim, runs.outer, shape=ends, layout=whole, name="all_gather")
    sums = call(op("running_sum"), sums, dim, reverse, shape=ends, layout=whole, name="sums")
    sums = call(op("pad_rows"), sums, dim, place, -place, shape=ends, layout=whole, name="sums_before")
    sums = call(op("shard"), sums, runs.axis, dim, runs.outer, shape=ends, layout=layout, name="shard")
    sums = call(aten.unsqueeze.default, sums, dim + 1, shape=one, layout=apart, name="sums_before")
    rows = call(aten.add.Tensor, rows, sums, shape=shape, layout=apart, name="runs")
    return build.call(
        aten.reshape.default, rows, list(mine), like=known.with_(operands=(apart,), flops=0), name="running_sum"
    )
