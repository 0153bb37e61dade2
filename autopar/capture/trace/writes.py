"""Find the writes of a traced step: right to a buffer or parameter, noted to the batch, refused to a kept tensor."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from autopar.capture.inputs.shared_memory import overlapping
from autopar.capture.refusals.constructs import COLLECTIVE, Construct
from autopar.capture.refusals.explain_failure import refusal
from autopar.capture.refusals.location import Locator, place_of
from autopar.capture.trace.tracer import Traced
from autopar.ir.program import Input
from autopar.torch_compat import FakeTensor, OpOverload

_KEPT = (
    "a write to {}, a tensor that is neither a buffer nor a parameter",
    "It would be lost after the step: make it a buffer, self.register_buffer(name, tensor).",
)
_SHARED = (
    "a write to {}, which lies in the memory of {} too",
    "One device would see it there; in a program each is a value of its own. Give one of them memory of its own: "
    ".clone().",
)
_OUTSIDE = "a tensor that the step reads from outside of the model"
_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd")


def check_collectives(traced: Traced, locator: Locator) -> None:
    """Raise CaptureError for a collective of the user's own."""
    for node in traced.graph.nodes:
        if getattr(node.target, "namespace", "") in _COLLECTIVES:
            raise refusal(COLLECTIVE, locator.line(place_of(node)[2]))


def check_writes(
    traced: Traced, inputs: Sequence[Input], given: Sequence[tuple[Input, Tensor | None]], locator: Locator
) -> list[str]:
    """Notes on writes to the batch. Raises CaptureError for those that a compiled step would lose. given: what the
    inputs stand for."""
    entries, notes = _entries(traced.graph, inputs), dict[str, str]()
    outside = _outside(traced)
    nodes = {**entries, **{node: entry for node, entry, _ in outside}}
    others = _sharing([*given, *((entry, tensor) for _, entry, tensor in outside)])
    for node, root in _writes(traced.graph):
        entry = entries.get(root)
        source = place_of(node)[2]
        if entry is None or entry.kind == "constant":
            name, instead = _KEPT
            what = f"'{entry.name}'" if entry else "a tensor from outside of the model"
            raise refusal(Construct(name.format(what), instead), locator.line(source))
        for other in others.get(entry.name, ()):
            is_kept = other.kind != "batch" and other.name != _OUTSIDE
            if (is_kept or entry.kind != other.kind == "batch") or _is_read(node, nodes, other):
                name, instead = _SHARED
                raise refusal(Construct(name.format(_told(entry), _told(other)), instead), locator.line(source))
        if entry.kind == "batch":
            notes[entry.name] = (
                f"the model writes into tensor {entry.name} of the batch, at {source or 'an unknown line'}: "
                f"the caller's tensor stays as it is"
            )
    return list(notes.values())


def _sharing(given: Sequence[tuple[Input, Tensor | None]]) -> Mapping[str, list[Input]]:
    """The inputs that have elements of each one, by its name."""
    found = defaultdict[str, list[Input]](list)
    for (one, _), (other, _) in overlapping((entry, tensor) for entry, tensor in given if tensor is not None):
        found[one.name].append(other)
        found[other.name].append(one)
    return found


def _is_read(write: fx.Node, entries: Mapping[fx.Node, Input], other: Input) -> bool:
    """Whether a step reads an input, or a view of it, behind a write."""
    after, node = set[fx.Node](), write.next
    while node.op != "root":
        after.add(node)
        node = node.next
    roots = {node for node, entry in entries.items() if entry == other}
    return any(_root(operand) in roots for node in after for operand in node.all_input_nodes)


def _outside(traced: Traced) -> list[tuple[fx.Node, Input, Tensor]]:
    """The tensors that a step reads from lists, globals and the like, each with its node and what stands for it."""
    nodes = (node for node in traced.graph.nodes if node.op == "get_attr")
    found = ((node, getattr(traced.root, node.target, None)) for node in nodes)
    return [
        (node, Input("constant", (_OUTSIDE,)), value)
        for node, value in found
        if isinstance(value, Tensor) and not isinstance(value, FakeTensor)
    ]


def _told(entry: Input) -> str:
    if entry.name == _OUTSIDE:
        return _OUTSIDE
    return f"tensor {entry.name} of the batch" if entry.kind == "batch" else f"'{entry.name}'"


def written_inputs(graph: fx.Graph, inputs: Sequence[Input]) -> list[Input]:
    """The inputs whose memory a trace writes."""
    entries = _entries(graph, inputs)
    return [entries[root] for root in dict.fromkeys(root for _, root in _writes(graph)) if root in entries]


def _entries(graph: fx.Graph, inputs: Sequence[Input]) -> dict[fx.Node, Input]:
    return dict(zip((node for node in graph.nodes if node.op == "placeholder"), inputs, strict=True))


def _writes(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each in-place op, with the input or constant whose memory it writes."""
    for node in graph.nodes:
        for written in _operands(node, write=True):
            root = _root(written)
            if root is not None:
                yield node, root


def _root(node: Any) -> fx.Node | None:
    """The input or constant that a value is a view of; None for memory of the step's own."""
    while isinstance(node, fx.Node) and node.op == "call_function":
        viewed = [node.args[0]] if node.target is operator.getitem else list(_operands(node, write=False))
        node = viewed[0] if viewed else None
    return node if isinstance(node, fx.Node) else None


def _operands(node: fx.Node, write: bool) -> Iterator[Any]:
    """The operands that a call writes into, or else those that its results share memory with."""
    if not isinstance(node.target, OpOverload):
        return
    for position, argument in enumerate(node.target._schema.arguments):
        alias = argument.alias_info
        if alias is None or (write and not alias.is_write):
            continue
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        yield from given if isinstance(given, (tuple, list)) else (given,)
