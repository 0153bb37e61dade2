"""Check what each level promises, after every pass."""

from __future__ import annotations

import math

from torch import fx

from autopar.errors import VerificationError
from autopar.ir.check.verify_chains import check_chains
from autopar.ir.check.verify_fused import check_groups
from autopar.ir.layout import OWNED, Layout, fits, outer_of
from autopar.ir.mesh import SLICE, Mesh, axes_of_group
from autopar.ir.ops.collective_ops import COLLECTIVES, SPLIT, Spread
from autopar.ir.ops.ops import AWAITED, COPIES, TO_DEVICE, TO_HOST, is_mesh_op, mesh_op_name
from autopar.ir.ops.ring_ops import Ring, is_attention, is_ring_backward
from autopar.ir.pipeline import Pipeline
from autopar.ir.program import AS_PARAMETER, HOST, Level, Program, has_record, operand_nodes, record


def verify(program: Program, level: Level) -> None:
    """Raise VerificationError if `program` breaks a promise of `level`: a bug in a pass, never the user's."""
    _check_graph(program, level)
    if level >= Level.SHARDED:
        _check_gradients(program)
    if level >= Level.EXPLICIT:
        _check_calls(program)


def verify_pipeline(pipeline: Pipeline, program: Program) -> None:
    """Raise VerificationError if a graph of a pipeline breaks a promise of its level, or if together they are not the
    LOCAL program: every output leaves (a gradient or new weight once, all else on every rank), and no product of stages
    is computed twice. (What needs no stage, since it is of the batch alone or of no batch, each rank may compute for
    itself.)"""
    seen: dict[str, tuple[int, str]] = {}
    staged = _of_stages(program)
    for key, graph in pipeline.graphs.items():
        _check_graph(graph, Level.STAGED)
        _check_calls(graph)
        for node in graph.graph.nodes:
            if node.op != "call_function" or not record(node).flops:
                continue
            if seen.setdefault(node.name, key) != key and node.name in staged:
                _fail(node, f"is computed in graphs {seen[node.name]} and {key}")
    ends = [(rank, out) for (rank, kind), graph in pipeline.graphs.items() if kind == "E" for out in graph.outputs]
    for out in program.outputs:
        ranks = [rank for rank, known in ends if known == out]
        wanted = [pipeline.rank_of(out.name)] if out.kind in AS_PARAMETER else list(range(pipeline.flow.size))
        if sorted(ranks) != wanted:
            raise VerificationError(f"{out.kind} '{out.name}' leaves on ranks {ranks} of the pipeline, not on {wanted}")
    # what would be computed again on another stage than its original was sent there by the forward pass
    products = {node.name for node in program.calls() if record(node).flops and record(node).made_by != "recompute"}
    lost = sorted(products - seen.keys())
    if lost:
        raise VerificationError(f"products that no graph of the pipeline computes: {', '.join(lost[:5])}")


def _of_stages(program: Program) -> set[str]:
    """The names of the calls that depend on parameters and on the batch."""
    entries = dict(program.entries)
    kinds: dict[fx.Node, set[str]] = {}
    for node in program.nodes:
        kinds[node] = {entries[node].kind} if node in entries else set()
        kinds[node].update(*(kinds[operand] for operand in node.all_input_nodes))
    return {node.name for node, found in kinds.items() if {"parameter", "batch"} <= found}


def _fail(node: fx.Node, text: str) -> None:
    known = record(node)
    raise VerificationError(f"%{node.name} ({node.target}, made by {known.made_by}, {known.source}): {text}")


def _check_graph(program: Program, level: Level) -> None:
    program.graph.lint()
    if program.level != level:
        raise VerificationError(f"the program is at level {program.level.name}, not {level.name}")
    missing = [node.name for node in program.graph.nodes if not has_record(node)]
    if missing:
        raise VerificationError(f"nodes without a record: {', '.join(missing[:5])}")
    for node in program.graph.nodes:
        _check_tier(node)
    if len(program.placeholders) != len(program.inputs):
        raise VerificationError(f"{len(program.placeholders)} placeholders for {len(program.inputs)} inputs")
    if len(program.results) != len(program.outputs):
        raise VerificationError(f"{len(program.results)} results for {len(program.outputs)} outputs")
    check_chains(program)
    if level >= Level.LOCAL:
        check_groups(program)
    for node in program.graph.nodes if level >= Level.SHARDED else ():
        _check_layouts(node, program)


def _check_calls(program: Program) -> None:
    """Check that every call of an EXPLICIT program has operands that lie as it wants, and that what moves moves so."""
    for node in program.graph.nodes:
        _check_operands(node)
        if node.op == "call_function" and is_mesh_op(node.target) and record(node).is_tensor:
            _check_move(node, program)
        elif is_attention(node.target):
            _check_ring(node, program)


def _check_tier(node: fx.Node) -> None:
    """What lies in the host's memory is read by its loads alone, or leaves for another graph of the stage; a copy under
    way is awaited, in its own graph."""
    if node.op == "output":
        return
    known = record(node)
    source = node.args[0] if node.target is AWAITED else None
    ends_copy = isinstance(source, fx.Node) and source.target is TO_HOST
    if bool(known.tier) != (node.target is TO_HOST or ends_copy or (node.op == "placeholder" and known.tier == HOST)):
        _fail(node, f"lies in the tier '{known.tier or 'device'}', which is not what it makes")
    if node.target in COPIES:
        if len(node.users) != 1 or next(iter(node.users)).target is not AWAITED:
            _fail(node, "is under way and is not awaited, once, in its own graph")
    elif known.tier:
        wrong = [user for user in node.users if user.target is not TO_DEVICE and user.op != "output"]
        if wrong:
            _fail(node, f"lies in the host's memory, and %{wrong[0].name} reads it, which is no load")
    operand = node.args[0] if node.target is TO_DEVICE else None
    if isinstance(operand, fx.Node) and not record(operand).tier:
        _fail(node, f"loads %{operand.name}, which is on the device")


def _check_layouts(node: fx.Node, program: Program) -> None:
    known = record(node)
    if node.op == "output":
        return
    if len(known.layouts) != len(known.types) and any(type_ is not None for type_ in known.types):
        _fail(node, f"{len(known.types)} results, but {len(known.layouts)} layouts")
    for type_, layout in zip(known.types, known.layouts, strict=False):
        if (type_ is None) != (layout is None):
            _fail(node, f"type {type_} with layout {layout}")
        if type_ is not None and layout is not None and not fits(type_.shape, layout, program.mesh):
            _fail(node, f"layout {layout} does not fit shape {list(type_.shape)} on mesh {program.mesh}")


def _check_gradients(program: Program) -> None:
    layouts = {entry.name: record(node).layout for node, entry in program.parameters()}
    wanted = record(program.graph.output_node()).operands
    for layout, out in zip(wanted, program.outputs, strict=True):
        expected = layouts.get(out.name) if out.kind in AS_PARAMETER else Layout(((),) * len(layout.dims))
        if layout != expected or layout.partial:
            raise VerificationError(f"{out.kind} '{out.name}' leaves in {layout}, not in {expected}")


def _check_operands(node: fx.Node) -> None:
    """Every operand has the layout that its user wants."""
    operands = operand_nodes(node)
    wanted = record(node).operands
    if len(operands) != len(wanted):
        _fail(node, f"{len(operands)} operands, but {len(wanted)} wanted layouts")
    for operand, layout in zip(operands, wanted, strict=True):
        if record(operand).layout != layout:
            _fail(node, f"wants %{operand.name} in {layout}, which is in {record(operand).layout}")


def _check_move(node: fx.Node, program: Program) -> None:
    """A collective gives the layout that it says, inferred from what it does."""
    has = record(operand_nodes(node)[0]).layout
    inferred = moved_layout(mesh_op_name(node.target), node.args[1:], has, program.mesh)
    if inferred is None:
        _fail(node, f"cannot be applied to {has}: {node.args[1:]}")
    elif mesh_op_name(node.target) in _TO_OWNERS and _axes_of_rows(inferred) == _axes_of_rows(record(node).layout):
        pass  # how rows lie at home their index says
    elif not _is_same(_canonical(inferred), record(node).layout):
        _fail(node, f"turns {has} into {_canonical(inferred)}, not into {record(node).layout}")


def _check_ring(node: fx.Node, program: Program) -> None:
    """Keys and values, and their gradients, lie in the pieces that go round: gathered, no axis would split them."""
    ring, found = Ring.of(node), record(node)
    known = all(axis in program.mesh for axis in axes_of_group(ring.axis))
    if not known or ring.size != program.mesh[ring.axis]:
        _fail(node, f"goes round {ring.size} ranks of '{ring.axis}', which mesh '{program.mesh}' has not")
    pieces = [record(ring.k).layout, record(ring.v).layout]
    pieces += [one for one in found.layouts[1:] if one is not None] if is_ring_backward(node.target) else []
    for layout in pieces:
        whole = moved_layout("all_gather", (ring.axis, 2, ring.outer), layout, program.mesh)
        if whole is None or _canonical(whole).dims[2] or layout.partial:
            _fail(node, f"sends round pieces over '{ring.axis}' at outer {ring.outer}, and has {layout}")


def _is_same(a: Layout, b: Layout) -> bool:
    """True if two layouts are equal but for the order of partial axes, which the mesh decides."""
    return a.dims == b.dims and sorted(a.partial) == sorted(b.partial)


_COLLECTIVES = {one.name: one for one in COLLECTIVES}
# What a rank makes of a value by itself: see `CollectiveOp`.
_LOCAL: dict[str, tuple[Spread, Spread]] = {"shard": (None, SPLIT), "keep_first": (None, "sum")}
_TO_OWNERS = {"owned_index": True, **{one.name: one.owned for one in COLLECTIVES if one.owned is not None}}


def moved_layout(name: str, args: tuple[object, ...], has: Layout, mesh: Mesh) -> Layout | None:
    """The layout that a mesh op gives to a value in `has`; None if it cannot be applied."""
    row, dims, partial = _COLLECTIVES.get(name), [list(dim) for dim in has.dims], list(has.partial)
    axes = axes_of_group(str(args[0])) if args else ()
    if name == "route":
        return Layout((tuple(f for f in has.dims[0] if isinstance(f, str)), ()))
    if name == "order_by_owner" or (row is not None and row.to_one):
        return has
    if name == "tokens_by_owner":
        return Layout((*has.dims, ()), has.partial)
    if name in _TO_OWNERS:
        return _with_owners(has, axes, _TO_OWNERS[name])
    before, after = (row.has, row.gives) if row is not None else _LOCAL.get(name, (None, None))
    if row is not None and row.edges:  # each run of rows longer, or shorter: they must be split as it says
        at = args[1]
        assert isinstance(at, int)
        for axis in reversed(axes):
            _remove(dims, axis, at, args[2], mesh)
        is_so = dims[at] == list(has.dims[at][: len(dims[at])])  # nothing splits the runs further
        return Layout(
            has.dims if is_so else tuple(("wrong",) if i == at else d for i, d in enumerate(has.dims)), has.partial
        )
    at = args[1:]  # (dim, outer) of where the value was split, and of where it will be
    if before == SPLIT:
        for axis in reversed(axes):
            _remove(dims, axis, at[0], at[1], mesh)
        at = at[2:]
    elif row is not None and before is not None:
        summed = {(axis, str(args[-1]) if "str kind" in row.schema else before) for axis in axes}
        if not summed.issubset(partial):
            return None
        partial = [pair for pair in partial if pair not in summed]
    if after == SPLIT:
        for axis in axes:
            _insert(dims, axis, at[0], at[1], mesh)
    elif after is not None:
        partial += [(axis, after) for axis in axes]
    return Layout(tuple(tuple(dim) for dim in dims), tuple(partial))


def _axes_of_rows(layout: Layout) -> tuple[object, ...]:
    return layout.owned, [axis for axis in layout.dims[0] if isinstance(axis, str)], layout.dims[1:], layout.partial


def _with_owners(has: Layout, axes: tuple[str, ...], owned: bool) -> Layout | None:
    """The layout with the rows of dim 0 at their owners on some axes, or at home; None if they were there before."""
    factors = list(has.dims[0])
    for axis in axes:
        if axis not in factors or ((0, axis) in has.owned) == owned:
            return None
        place = factors.index(axis)
        factors[place - 1 + owned : place] = [OWNED] if owned else []
    return Layout((tuple(factors), *has.dims[1:]), has.partial)


def _remove(dims: list[list[str | int]], axis: str, dim: object, outer: object, mesh: Mesh) -> None:
    """Put the pieces of a dim over an axis side by side, in each of `outer` blocks of the local value. What splits
    these pieces further then splits as many more of them."""
    assert isinstance(dim, int)
    factors = dims[dim]
    if axis not in factors or OWNED in factors:  # nobody knows how many rows of others are at their owners
        dims[dim] = ["wrong"]
        return
    position = factors.index(axis)
    behind = factors[position + 1 :]
    is_inside = any(isinstance(factor, str) for factor in behind)
    is_even = not (mesh.lengths and axis == SLICE) and not _has_mirrored(factors)
    if outer_of(factors, axis) != outer or (is_inside and not is_even):
        dims[dim] = ["wrong"]
        return
    factors[position:] = [mesh[axis], *behind] if is_inside else []


def _insert(dims: list[list[str | int]], axis: str, dim: object, outer: object, mesh: Mesh) -> None:
    """Split each of `outer` blocks of the local value of a dim: what follows its last axis, or a number of places that
    lies before. Mirrored in every second of them if `outer` is negative."""
    assert isinstance(dim, int) and isinstance(outer, int)
    factors, blocks = dims[dim], abs(outer)
    known = math.prod(abs(factor) or 1 for factor in factors if isinstance(factor, int))
    more = blocks // known
    if OWNED in factors or (more and blocks % known) or (outer < 0 and (not more or more % 2)):
        dims[dim] = ["wrong"]
    elif more:
        factors += [*([-more if outer < 0 else more] if more > 1 else []), axis]
    else:
        dims[dim] = _with_inside(factors, axis, blocks, mesh)


def _with_inside(factors: list[str | int], axis: str, blocks: int, mesh: Mesh) -> list[str | int]:
    """Split the places of a dim that an integer stands for, after so many blocks."""
    found, known = list[str | int](), 1
    for place, factor in enumerate(factors):
        if isinstance(factor, str) or known * abs(factor) <= blocks:
            found.append(factor)
            known *= factor if isinstance(factor, int) else 1
            continue
        before, rest = divmod(blocks, known)
        if rest or _has_mirrored(factors) or factor % (before * mesh[axis]) or (mesh.lengths and axis == SLICE):
            break
        parts: list[str | int] = [before, axis, factor // before // mesh[axis]]
        return [*found, *(part for part in parts if part != 1), *factors[place + 1 :]]
    return ["wrong"]


def _has_mirrored(factors: list[str | int]) -> bool:
    return any(isinstance(factor, int) and factor < 0 for factor in factors)


def _canonical(layout: Layout) -> Layout:
    """Adjacent integers multiplied, integers at the end dropped, partial axes in no particular order kept."""
    dims = []
    for factors in layout.dims:
        made: list[str | int] = []
        for factor in factors:
            if isinstance(factor, int) and factor != OWNED and made and isinstance(made[-1], int):
                made[-1] *= factor
            else:
                made.append(factor)
        while made and isinstance(made[-1], int):
            made.pop()
        dims.append(tuple(made))
    return Layout(tuple(dims), layout.partial)
