"""Note which sequences are gathered whole, where no other note says so, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autopar.ir.mesh import CONTEXT_AXES, DATA_AXES, axes_of_group
from autopar.ir.ops.op_facts import facts_of, is_view
from autopar.ir.ops.ops import op, op_name
from autopar.ir.ops.semantic import NAMESPACE
from autopar.ir.program import Program, is_getitem, is_given, record
from autopar.passes.collectives.carried import places_in

_GATHER, _PRODUCT = op("all_gather"), op("einsum")
_SPLIT = {
    True: "Slices, shifts, attention and loops over positions are split",
    False: "What is written for all samples at once is split",
}


def with_gather_notes(program: Program) -> Program:
    """An EXPLICIT program with a note for each line of the user's code for which pieces of several ranks are joined."""
    notes = dict.fromkeys(_notes(program))
    return program.with_(notes=(*program.notes, *notes)) if notes else program


def _notes(program: Program) -> Iterator[str]:
    given = {node for node, entry in program.entries if entry.kind == "batch"}
    for node in program.calls():
        if node.target is not _GATHER or record(node).is_backward or not record(node).type.dtype.is_floating_point:
            continue
        (value,), axes = node.all_input_nodes, set(axes_of_group(str(node.args[1])))
        of_sequence = axes <= set(CONTEXT_AXES)
        if is_given(value) or _is_small(node) or not (of_sequence or axes <= set(DATA_AXES)):
            continue
        reader = _reader(node)
        if reader is None or not (of_sequence or _takes_apart(reader)) or not _hangs_on(value, given):
            continue
        known, what = record(reader), "the sequence" if of_sequence else "the samples"
        if any(known.source in note for note in program.notes):
            continue
        place = known.source + (f" in {known.module}" if known.module else "")
        yield (
            f"axis '{node.args[1]}': op '{reader.target}' at {place} takes {what} together, so that %{value.name} "
            f"{list(record(node).type.shape)} is gathered on every rank. {_SPLIT[of_sequence]} (docs/spellings.md)"
        )


def _reader(gathered: fx.Node) -> fx.Node | None:
    """The op of the user's for which a value was gathered: the first that does more than show it or compute its
    elements. None for attention, whose keys are, also where it is spelled out in products, and for ops of ours, which
    know of pieces."""
    reached, nearest = {gathered}, None
    node = gathered
    while (node := node.next).op != "root":
        if node.op != "call_function" or reached.isdisjoint(node.all_input_nodes):
            continue
        if node.target is _PRODUCT or places_in(node) is not None:
            return None
        if getattr(node.target, "namespace", "") == NAMESPACE:
            return nearest
        if _takes_apart(node) or not (facts_of(node.target).pointwise or is_view(node.target) or is_getitem(node)):
            return node
        nearest = nearest or node
        reached.add(node)
    return nearest


def _is_small(gathered: fx.Node) -> bool:
    """Whether a value has one number for each row."""
    shape = record(gathered).type.shape
    return shape[-1] == 1 or bool(gathered.args[2] == len(shape) - 1)


def _hangs_on(value: fx.Node, given: set[fx.Node]) -> bool:
    """Whether a value is made of one of these inputs."""
    known, pending = {value}, [value]
    while pending:
        node = pending.pop()
        if node in given:
            return True
        pending += [one for one in node.all_input_nodes if one not in known]
        known.update(node.all_input_nodes)
    return False


def _takes_apart(node: fx.Node) -> bool:
    """Whether a call takes the rows of a batch one by one."""
    return op_name(node.target) in ("select", "unbind") and [*node.args[1:2]] in ([], [0])
