"""zero: parameters lie split over the data axes, and their gradients leave so."""

from __future__ import annotations

import math

import torch
from torch import fx

from autopar.ir.layout import Layout, factor_sizes, padded_shape
from autopar.ir.mesh import Mesh, group_name
from autopar.ir.plan import Plan
from autopar.ir.program import (
    AS_PARAMETER,
    CAST,
    Builder,
    Input,
    Program,
    TensorType,
    is_given,
    record,
)

MADE_BY = "zero"
aten = torch.ops.aten


def zero(program: Program, plan: Plan) -> Program:
    """SHARDED -> SHARDED. With ZeRO a rank keeps a part of each parameter over `plan.zero_axes`; `reshard` then
    gathers it for who wants it whole, and scatters its gradient.

        SHARDED program on fsdp=4
        %scale: f32[10] [-] = parameter "scale"
        %x: f32[8,10] [fsdp,-] = batch "0"
        %mul: f32[8,10] [fsdp,-] = aten.mul.Tensor(%x, %scale)
        %sum_1: f32[] [] partial(fsdp) = aten.sum.default(%mul)
        %sum_2: f32[10] [-] partial(fsdp) = aten.sum.dim_IntList(%x, [0])
        return loss "loss" = %sum_1 as []
        return gradient "scale" = %sum_2 as [-]
    becomes
        SHARDED program on fsdp=4
        %scale: f32[12] [fsdp] = parameter "scale"
        %x: f32[8,10] [fsdp,-] = batch "0"
        %scale_rows: f32[10] [-] = aten.slice.Tensor(%scale as [-], 0, 0, 10)
        %mul: f32[8,10] [fsdp,-] = aten.mul.Tensor(%x, %scale_rows)
        %sum_1: f32[] [] partial(fsdp) = aten.sum.default(%mul)
        %sum_2: f32[10] [-] partial(fsdp) = aten.sum.dim_IntList(%x, [0])
        %sum_2_padded: f32[12] [-] partial(fsdp) = aten.constant_pad_nd.default(%sum_2, [0, 2])
        return loss "loss" = %sum_1 as []
        return gradient "scale" = %sum_2_padded as [fsdp]

    Where the axes divide a dim nothing is padded, and only layouts change: over dp=2,cp=2 `[-,-]` becomes `[dp:cp,-]`,
    of which one gather over "dp:cp" makes the whole.

    With zero 1 and 2 frozen parameters, which have no states, stay as they are. ZeRO, arXiv 1910.02054; one parameter
    at a time as in FSDP2, so that optimizers see parameters and not a flat piece of memory.
    """
    return _Zero(program, plan).run() if plan.zero_axes else program


def split_over(shape: tuple[int, ...], layout: Layout, mesh: Mesh, axes: tuple[str, ...]) -> Layout | None:
    """A layout split over those of `axes` that it lacks: all of them on one dim that they divide, so that it moves at
    once. Where there is none, over one axis, the largest first, as `stored_layout` does it, and over each other that
    divides what is left: of a dim that two axes split, torch pads each axis' pieces, and we only the end.

    None for a value that no axis splits further.
    """
    missing = tuple(axis for axis in axes if axis not in layout.axes)
    if len(missing) < 2:
        return stored_layout(shape, layout, mesh, *missing) if missing else None
    ranks = math.prod(mesh[axis] for axis in missing)
    choices = [
        (bool(factors), dim)
        for dim, (length, factors) in enumerate(zip(shape, layout.dims, strict=True))
        if length and length % (math.prod(factor_sizes(factors, mesh)) * ranks) == 0
    ]
    if choices:
        dim = min(choices)[1]
        return Layout((*layout.dims[:dim], (*layout.dims[dim], *missing), *layout.dims[dim + 1 :]))
    found = None
    for axis in sorted(missing, key=lambda axis: -mesh[axis]):
        made = stored_layout(shape, found or layout, mesh, axis)
        if made is not None and (found is None or padded_shape(shape, made, mesh) == padded_shape(shape, found, mesh)):
            found = made
    return found


def stored_layout(shape: tuple[int, ...], layout: Layout, mesh: Mesh, axis: str) -> Layout | None:
    """A layout split over one more axis, with the least padding (to a hundredth), on the first dim that may be.

    None for a value that is too small, or that the axis splits already.
    """
    size = mesh[axis]
    if axis in layout.axes or math.prod(shape) < size:
        return None
    choices = []
    for dim, (length, factors) in enumerate(zip(shape, layout.dims, strict=True)):
        if factors and length % (math.prod(factor_sizes(factors, mesh)) * size):
            continue  # inside of another axis' pieces nothing is padded
        padded = length if factors else -(-length // size) * size
        dims = (*layout.dims[:dim], (*factors, axis), *layout.dims[dim + 1 :])
        choices.append((round(padded / max(length, 1) - 1, 2), bool(factors), dim, dims))
    return Layout(min(choices)[3]) if choices else None


class _Zero:
    def __init__(self, program: Program, plan: Plan) -> None:
        self.program, self.plan, self.axes, self.mesh = program, plan, plan.zero_axes, program.mesh
        self.build = Builder(MADE_BY)
        self.kept: dict[fx.Node, Layout] = {}  # parameters that are split
        self.stored: dict[str, Layout] = {}  # the same by name
        self.replicated: list[str] = []
        for node, entry in program.entries:
            self._decide(node, entry)
        self.short: dict[fx.Node, dict[str, fx.Node]] = {}  # padded parameters, with what users of a phase take
        self.padded: dict[tuple[fx.Node, Layout], fx.Node] = {}  # gradients, by the layout in which they leave
        self.leaving = self._gradients()

    def run(self) -> Program:
        rewritten = self.build.rewrite(self.program, self._put)
        return rewritten.with_(notes=(*self.program.notes, *self._notes()))

    def _put(self, node: fx.Node) -> fx.Node:
        made = self._made(node)
        for layout in self.leaving.get(node, ()):
            shape = padded_shape(record(node).type.shape, layout, self.mesh)
            if shape != record(node).type.shape and (node, layout) not in self.padded:
                self.padded[node, layout] = self._padded(node, shape)
        return made

    def _made(self, node: fx.Node) -> fx.Node:
        if node.op == "output":
            return self._output(node)
        if is_given(node) and (node if node.op == "placeholder" else node.all_input_nodes[0]) in self.kept:
            return self._as_stored(node)
        if self._is_late(node):
            return self._scatter_first(node)
        return self.build.copy(node, lambda old: self._operand(old, node))

    def _decide(self, node: fx.Node, entry: Input) -> None:
        known = self.plan.fixed.stored.get(entry.name)
        is_frozen = self.plan.zero < 3 and entry.name in self.plan.frozen
        shape, layout = record(node).type.shape, record(node).layout
        if entry.kind != "parameter" or known == layout or (known is None and is_frozen):
            return
        found = known or split_over(shape, layout, self.mesh, self.axes)
        if found is not None:
            self.stored[entry.name] = self.kept[node] = found
        elif shape and not set(self.axes) & set(layout.axes):
            self.replicated.append(entry.name)

    def _as_stored(self, node: fx.Node) -> fx.Node:
        """A parameter as it lies; its cast too, so that what moves is as short as what computes."""
        known, layout = record(node), self.kept[node if node.op == "placeholder" else node.all_input_nodes[0]]
        type_ = TensorType(padded_shape(known.type.shape, layout, self.mesh), known.type.dtype)
        if type_ != known.type:
            self.short[node] = {}
        operands = (layout,) * len(node.all_input_nodes)
        return self.build.copy(node, like=known.with_(types=(type_,), layouts=(layout,), operands=operands))

    def _is_late(self, node: fx.Node) -> bool:
        """True for the cast of a sum in a short float, by which a gradient of a split parameter leaves. A cast that is
        itself partial stands before its sum, which is then taken in the dtype that it casts to."""
        if node.target is not CAST or len(node.users) != 1 or len(self.leaving.get(node, ())) != 1:
            return False
        return self._is_partial(node.all_input_nodes[0]) and not self._is_partial(node)

    def _is_partial(self, node: fx.Node) -> bool:
        return any(axis in self.axes for axis, _ in record(node).layout.partial)

    def _scatter_first(self, node: fx.Node) -> fx.Node:
        """So that the sum is scattered, and this rank's part is cast."""
        (layout,) = self.leaving[node]
        known, source = record(node), node.all_input_nodes[0]
        type_ = TensorType(padded_shape(known.type.shape, layout, self.mesh), known.type.dtype)
        part = self.build.value[source] if type_ == known.type else self._padded(source, type_.shape)
        like = known.with_(types=(type_,), layouts=(layout,), operands=(layout,))
        made = self.padded[node, layout] = self.build.copy(node, lambda _: part, like)
        return made

    def _operand(self, node: fx.Node, user: fx.Node) -> fx.Node:
        """A value as its user takes it: a padded parameter without the padding, one value a phase, for each is gathered
        anew."""
        return self._rows(node, user) if node in self.short else self.build.value[node]

    def _rows(self, parameter: fx.Node, user: fx.Node) -> fx.Node:
        phase, known = record(user).phase, self.short[parameter]
        if phase not in known:
            found, made = record(parameter), self.build.value[parameter]
            pairs = zip(found.type.shape, record(made).type.shape, strict=True)
            dim, rows, more = next((i, has, stored - has) for i, (has, stored) in enumerate(pairs) if has != stored)
            like = found.with_(
                operands=found.layouts, module=record(user).module, source=record(user).source, phase=phase,
                origin=found.origin or parameter.name, reason=f"'{parameter.name}' is stored with {more} of padding",
            )  # fmt: skip
            known[phase] = self.build.call(
                aten.slice.Tensor, made, dim, 0, rows, like=like, name=f"{parameter.name}_rows"
            )
        return known[phase]

    def _gradients(self) -> dict[fx.Node, dict[Layout, None]]:
        """The nodes that leave as gradients or new values of split parameters, with the layouts in which they leave."""
        gradients: dict[fx.Node, dict[Layout, None]] = {}
        for result, out in self.program.leaving:
            if result is not None and out.kind in AS_PARAMETER and out.name in self.stored:
                gradients.setdefault(result, {})[self.stored[out.name]] = None
        return gradients

    def _padded(self, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        known = record(node)
        missing = [wanted - has for wanted, has in zip(shape, known.type.shape, strict=True)]
        dims = tuple(() if more else dim for dim, more in zip(known.layout.dims, missing, strict=True))
        layout = Layout(dims, known.layout.partial)
        like = known.with_(
            types=(TensorType(shape, known.type.dtype),), several=False, layouts=(layout,), operands=(layout,), flops=0,
            origin="", reason=f"it is stored with {max(missing)} of padding",
        )  # fmt: skip
        pads = [edge for more in reversed(missing) for edge in (0, more)]
        return self.build.call(
            aten.constant_pad_nd.default, self.build.value[node], pads, like=like, name=f"{node.name}_padded"
        )

    def _output(self, node: fx.Node) -> fx.Node:
        operands = list(record(node).operands)
        results = []
        for i, (result, out) in enumerate(self.program.leaving):
            assert result is not None
            leaves = self._operand(result, node)
            if out.kind in AS_PARAMETER and out.name in self.stored:
                operands[i] = self.stored[out.name]
                leaves = self.padded.get((result, operands[i]), leaves)
            results.append(leaves)
        return self.build.output(results, record(node).with_(operands=tuple(operands)))

    def _notes(self) -> list[str]:
        names = ", ".join(f"'{name}'" for name in self.replicated[:3])
        more = f" and {len(self.replicated) - 3} more" if self.replicated[3:] else ""
        axes = group_name(self.axes)
        return [f"ZeRO cannot split {names}{more} over '{axes}': every rank keeps them"] if names else []
