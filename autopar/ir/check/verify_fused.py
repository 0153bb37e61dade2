"""Check a group: its body is what its node says, and calls in it get what they take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autopar.errors import VerificationError
from autopar.ir.mesh import Mesh
from autopar.ir.ops.fused import COLUMNS, POINTS, ROWS, Fused, fused_of
from autopar.ir.ops.fusible import fusible
from autopar.ir.ops.measure import local_type, local_types
from autopar.ir.ops.storage import is_view
from autopar.ir.program import Program, TensorType, has_record, is_getitem, operand_nodes, record

Made = tuple[tuple[tuple[int, ...], torch.dtype], ...]


def check_groups(program: Program) -> None:
    """Raise VerificationError if a group of a program is not what its node says."""
    made: dict[Any, Made] = {}  # what calls give, by all they take: layers are alike
    for node in program.calls():
        fused = fused_of(node)
        if fused is not None:
            _check_body(node, fused, program.mesh)
            _check_interface(node, fused)
            for call in fused.calls:
                _check_call(node, call, fused.mesh, made)


def _fail(node: fx.Node, text: str) -> None:
    raise VerificationError(f"group %{node.name} ({record(node).source}): {text}")


def _check_body(node: fx.Node, fused: Fused, mesh: Mesh) -> None:
    fused.graph.lint()
    bare = [inner.name for inner in fused.graph.nodes if not has_record(inner)]
    if bare:
        _fail(node, f"nodes without a record: {', '.join(bare[:5])}")
    if fused.mesh != mesh:
        _fail(node, f"is of mesh '{fused.mesh}', and stands in a program on '{mesh}'")
    kinds = [how for call in fused.calls if (how := fusible(call, mesh)) is not None]
    columns, rows = any(how.columns for how in kinds), any(how.width for how in kinds)
    expected = COLUMNS if columns else ROWS if rows else POINTS
    if fused.kind != expected and not (fused.kind == ROWS and columns):  # gradients that nobody asks for are none
        _fail(node, f"is of kind {fused.kind}, and its calls are {expected}")
    roots = [root_of(result) for result in fused.results]
    if len(set(roots)) < len(roots) or any(root.op == "placeholder" for root in roots):
        _fail(node, "gives two views of one value, or an operand")


def root_of(node: fx.Node) -> fx.Node:
    """The value that a view in a body shows."""
    while node.op == "call_function" and is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _check_interface(node: fx.Node, fused: Fused) -> None:
    if node.kwargs or len(node.args) != len(fused.placeholders):
        _fail(node, f"{len(node.args)} operands for {len(fused.placeholders)} of its body")
    for operand, inner in zip(node.args, fused.placeholders, strict=True):
        if not isinstance(operand, fx.Node):
            _fail(node, f"operand {operand!r} is no value")
        assert isinstance(operand, fx.Node)
        has, takes = record(operand), record(inner)
        if (has.types, has.layouts) != (takes.types, takes.layouts):
            _fail(
                node,
                f"%{inner.name} is {takes.types[0]} {takes.layouts}, and %{operand.name} {has.types[0]} {has.layouts}",
            )
    given = [(record(result).type, record(result).layout) for result in fused.results]
    said = list(zip(record(node).types, record(node).layouts, strict=True))
    if given != said or not record(node).several:
        _fail(node, f"gives {given}, and says {said}")


def _check_call(node: fx.Node, call: fx.Node, mesh: Mesh, made: dict[Any, Made]) -> None:
    """A kernel computes it, in the phase of the group, from operands in the layouts that it wants; types follow."""
    if fusible(call, mesh) is None:
        _fail(node, f"%{call.name} = {call.target} has no kernel")
    if record(call).is_backward and not record(node).is_backward:
        _fail(node, f"%{call.name} is of the backward pass")
    wanted, operands = record(call).operands, operand_nodes(call)
    if [record(operand).layout for operand in operands] != list(wanted):
        _fail(node, f"%{call.name} wants {list(map(str, wanted))} of {[operand.name for operand in operands]}")
    if is_getitem(call):
        return
    types = tuple((type_.shape, type_.dtype) for type_ in local_types(call, mesh))
    key = _key(call, mesh)
    if key not in made:
        made[key] = _computed(call, mesh)
    given = made[key]
    several = record(call).several
    expected = tuple(one for one, type_ in zip(given, record(call).types, strict=False) if type_) if several else given
    if not _agree(call, types, expected):
        _fail(node, f"%{call.name} = {call.target} gives {_text(expected)}, and is recorded as {_text(types)}")


def _agree(call: fx.Node, types: Made, expected: Made) -> bool:
    """True for the same types. What a norm keeps of its rows is in the dtype of the device that was captured on, and
    what comes of a bool and a number in torch's default dtype of the capture."""
    shapes = [shape for shape, _ in types] == [shape for shape, _ in expected]
    floats = [dtype.is_floating_point for _, dtype in types] == [dtype.is_floating_point for _, dtype in expected]
    operands = call.all_input_nodes
    is_default = bool(operands) and "dtype" not in call.kwargs and not any(map(_is_float, operands))
    return shapes and floats and (is_default or types[:1] == expected[:1])


def _is_float(operand: fx.Node) -> bool:
    known = record(operand)
    return known.is_tensor and known.type.dtype.is_floating_point


def _key(call: fx.Node, mesh: Mesh) -> Any:
    def plain(arg: Any) -> Any:
        return local_type(arg, mesh) if isinstance(arg, fx.Node) and record(arg).is_tensor else str(arg)

    args = fx.node.map_arg((call.args, call.kwargs), plain)
    return call.target, repr(args)


def _computed(call: fx.Node, mesh: Mesh) -> Made:
    """The types of the results of a call, as torch says."""
    values: Mapping[fx.Node, Any] = {
        operand: _meta(local_type(operand, mesh)) if record(operand).is_tensor else 0
        for operand in call.all_input_nodes
    }
    args, kwargs = fx.node.map_arg((call.args, dict(call.kwargs)), values.__getitem__)
    if "device" in kwargs or not values:
        kwargs = {**kwargs, "device": "meta"}
    given: Any = call.target(*args, **kwargs)  # type: ignore[operator]
    tensors = given if isinstance(given, (tuple, list)) else (given,)
    return tuple((tuple(one.shape), one.dtype) if one is not None else ((), torch.float32) for one in tensors)


def _meta(type_: TensorType) -> torch.Tensor:
    return torch.empty(type_.shape, dtype=type_.dtype, device="meta")


def _text(types: Made) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in types)
