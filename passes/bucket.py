"""bucket: gradients are reduced in buckets, each started as soon as it is full and awaited at the end."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.ir.layout import Layout, local_shape
from autopar.ir.ops import op
from autopar.ir.plan import BUCKET_BYTES, Plan
from autopar.ir.program import Builder, Program, Record, TensorType, record, set_record

MADE_BY = "bucket"
# A small model too has gradients on their way while it computes others: so many buckets, if that makes none tiny.
FEWEST, LEAST_BYTES = 4, 2**20
aten = torch.ops.aten


def bucket(program: Program, plan: Plan) -> Program:
    """LOCAL -> LOCAL. Gradient all-reduces over one axis are merged and overlapped with the backward pass.

        %all_reduce: f32[64,8] = autopar.all_reduce.default(%a, 'dp', 'sum')
        %all_reduce_1: f32[8] = autopar.all_reduce.default(%b, 'dp', 'sum')
    becomes
        %flat = aten.cat.default([%reshape, %reshape_1]); %start = autopar.all_reduce_start.default(%flat, 'dp', 'sum')
        ... the rest of the backward pass ...
        %wait = autopar.wait.default(%start); %gradient, %gradient_1 = the pieces of %wait

    PyTorch Distributed, arXiv 2006.15704, section 3.2.
    """
    return _Bucket(program, plan).run()


@dataclass(slots=True)
class _Open:
    """A bucket that is being filled, with the old all-reduce nodes."""

    nodes: list[fx.Node] = field(default_factory=list)
    bytes_: int = 0


class _Bucket:
    def __init__(self, program: Program, plan: Plan) -> None:
        self.program, self.plan, self.mesh = program, plan, program.mesh
        self.build = Builder(MADE_BY)
        self.open: dict[tuple[str, torch.dtype], _Open] = {}
        self.started: list[tuple[list[fx.Node], fx.Node]] = []
        self.limit = plan.memory.bucket_bytes or BUCKET_BYTES
        self.casts: set[fx.Node] = set()  # of what was summed in a short float

    def run(self) -> Program:
        gradients = self._gradients()
        total = sum(self._shape(node, record(node).layout).bytes_ for node in gradients)
        if self.plan.memory.bucket_bytes is None:
            self.limit = min(self.limit, max(total // FEWEST, LEAST_BYTES))
        for node in self.program.graph.nodes:
            if node.op == "output":
                for bucket_ in self.open.values():
                    self._start(bucket_)
                for nodes, start in self.started:
                    self._finish(nodes, start)
                for cast in self.program.graph.nodes:
                    if cast in self.casts:
                        self.build.copy(cast)
                self.build.copy(node)
            elif node in gradients:
                self._add(node)
            elif node not in self.casts:
                self.build.copy(node)
        return self.program.with_(graph=self.build.graph)

    def _gradients(self) -> set[fx.Node]:
        """The sums that leave as gradients, as they are or cast, and are read by nothing else."""
        output = self.program.graph.output_node()
        outputs = zip(self.program.results, self.program.outputs, strict=True)
        leaving = {node for node, out in outputs if node is not None and out.kind == "gradient"}
        found = set()
        for node in leaving:
            is_cast = node.target is aten._to_copy.default
            summed = node.args[0] if is_cast else node
            assert isinstance(summed, fx.Node)
            alone = set(node.users) == {output} and (not is_cast or set(summed.users) == {node})
            if alone and summed.target is op("all_reduce") and summed.args[2] == "sum":
                found.add(summed)
                if is_cast:
                    self.casts.add(node)
        return found

    def _add(self, node: fx.Node) -> None:
        axis, dtype = str(node.args[1]), record(node).type.dtype
        bytes_ = self._shape(node, record(node).layout).bytes_
        if bytes_ >= self.limit:  # alone it needs no copy
            self._start(_Open([node]))
            return
        found = self.open.setdefault((axis, dtype), _Open())
        found.nodes.append(node)
        found.bytes_ += bytes_
        if found.bytes_ >= self.limit:
            self._start(found)
            del self.open[axis, dtype]

    def _shape(self, node: fx.Node, layout: Layout) -> TensorType:
        type_ = record(node).type
        return TensorType(local_shape(type_.shape, layout, self.mesh), type_.dtype)

    def _start(self, found: _Open) -> None:
        nodes = found.nodes
        parts = [self.build.new(node.args[0]) for node in nodes]
        first = record(nodes[0])
        names = self._names(nodes)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        reason = f"gradients of {', '.join(names[:3])}{more} are partial over '{nodes[0].args[1]}'"
        if len(nodes) == 1:
            like = first.with_(reason=reason)
        else:
            sizes = [self._shape(node, record(node).layout).numel for node in nodes]
            partial = record(parts[0]).layout.partial
            flat = TensorType((sum(sizes),), first.type.dtype)
            # Made of local pieces: as a value of its own a bucket has no global shape, so its layout is whole.
            like = first.with_(types=(flat,), layouts=(Layout(((),), partial),), origin="", reason=reason)
            parts = [self._flatten(part, size, like) for part, size in zip(parts, sizes, strict=True)]
            parts = [self.build.call(aten.cat.default, parts, like=like.with_(
                operands=tuple(record(part).layout for part in parts)), name="flat")]  # fmt: skip
        axis, kind = nodes[0].args[1:]
        reduced = Layout(like.layout.dims, tuple(p for p in record(parts[0]).layout.partial if p != (axis, kind)))
        like = like.with_(layouts=(reduced,), operands=(record(parts[0]).layout,))
        start = self.build.call(op("all_reduce_start"), parts[0], axis, kind, like=like, name="all_reduce_start")
        self.started.append((nodes, start))

    def _flatten(self, part: fx.Node, size: int, like: Record) -> fx.Node:
        layout = Layout(((),), record(part).layout.partial)
        flat = like.with_(
            types=(TensorType((size,), like.type.dtype),), layouts=(layout,), operands=(record(part).layout,), reason=""
        )
        return self.build.call(aten.reshape.default, part, [-1], like=flat, name="flat_part")

    def _finish(self, nodes: list[fx.Node], start: fx.Node) -> None:
        like = record(start)
        wait = self.build.call(op("wait"), start, like=like.with_(operands=(like.layout,), reason=""), name="wait")
        if len(nodes) == 1:
            self.build.value[nodes[0]] = wait
            return
        sizes = [self._shape(node, record(node).layout).numel for node in nodes]
        split = self.build.call(
            aten.split_with_sizes.default, wait, sizes, name="gradients",
            like=like.with_(types=tuple(TensorType((size,), like.type.dtype) for size in sizes), several=True,
                            layouts=(like.layout,) * len(sizes), operands=(like.layout,), reason=""),
        )  # fmt: skip
        for i, (node, size) in enumerate(zip(nodes, sizes, strict=True)):
            self.build.value[node] = self._piece(split, i, size, node)

    def _piece(self, split: fx.Node, i: int, size: int, node: fx.Node) -> fx.Node:
        like, old = record(split), record(node)
        flat = like.with_(
            types=(TensorType((size,), old.type.dtype),), several=False, layouts=(like.layouts[i],), operands=()
        )
        item = self.build.graph.create_node("call_function", operator.getitem, (split, i))
        set_record(item, flat)
        shape = list(self._shape(node, old.layout).shape)
        return self.build.call(
            aten.reshape.default, item, shape, like=old.with_(operands=(like.layouts[i],), reason=""), name="gradient"
        )

    def _names(self, nodes: list[fx.Node]) -> list[str]:
        by_node: dict[fx.Node, str] = {}
        for result, out in zip(self.program.results, self.program.outputs, strict=True):
            if result is not None:
                by_node.setdefault(result, out.name)
                if result in self.casts:
                    by_node.setdefault(result.args[0], out.name)  # type: ignore[arg-type]
        return [f"'{by_node[node]}'" for node in nodes]
