"""Tell why a micro-batch cannot go on before all have come so far: which op needs the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from torch import fx

from autopar.errors import CoupledError
from autopar.ir.mesh import SLICE, axes_of_group
from autopar.ir.ops.op_facts import facts_of
from autopar.ir.ops.ops import is_mesh_op, op
from autopar.ir.ops.storage import is_view
from autopar.ir.program import Program, is_getitem, record

_SLICED = (
    "A slice sees the slices before it in causal attention alone (scaled_dot_product_attention with is_causal=True or "
    "a causal mask; of transformers with attn_implementation='sdpa'), and not in attention that is spelled out, nor in "
    "what pools, adds up or mixes positions. Use slices=1."
)


@dataclass(frozen=True, slots=True)
class Coupling:
    """Why one part of a step (`parts`: micro-batches, or slices) needs the others, and what to write instead."""

    parts: str
    cause: str
    hint: str

    @property
    def refusal(self) -> str:
        """The error, where the parts cannot wait for one another."""
        return f"{self.parts} cannot be computed one after another: {self.cause}. {self.hint}"


def coupled(
    node: fx.Node, after: Sequence[fx.Node], reductions: AbstractSet[fx.Node], notes: Sequence[str]
) -> Coupling:
    """Find why a call of a micro-batch that reads `after`, values made of `reductions`, needs all micro-batches.

    An op without a rule is named first, wherever it stands between: it alone may be the reason. notes: of the program,
    which tell the ops that have none.
    """
    between, join = _way(after, reductions)
    if SLICE in axes_of_group(str(join.args[1])):
        cause = join.all_input_nodes[0] if join.target is not op("all_gather") else _reader(join)
        why = f"{_op(cause)} ({_place(cause)}) needs the whole sequence (%{join.name})"
        return Coupling("the slices of a sequence", why, _SLICED)
    readers = [*between, _reader(join)]
    ruleless = [one for one in readers if any(note.startswith(_lacks_rule(one)) for note in notes)]
    if ruleless:
        what = f"{_lacks_rule(ruleless[0])} ({_place(ruleless[0])}) and takes the whole batch"
        hint = _said(ruleless[0], notes) or _rule_hint(ruleless[0])
    else:
        cause = join.all_input_nodes[0] if join.target is op("all_reduce") else _reader(join)
        what, hint = f"{_op(cause)} ({_place(cause)}) needs the whole batch", _HINT
    use = f"{_place(node)} uses it before the micro-batch is done (%{node.name})"
    return Coupling("micro-batches", f"{what} (%{join.name}), and {use}", hint)


def check_middle(middle: Program | None, coupling: Coupling) -> None:
    """Raise CoupledError if layers of the model would be computed of the whole batch, between the passes. middle: what
    runs there, if anything does."""
    if middle is None:
        return
    weights = {node for node, entry in middle.entries if entry.kind == "parameter"}
    for node in middle.calls():
        if node.all_input_nodes and weights.issuperset(node.all_input_nodes):
            weights.add(node)
        elif record(node).flops and not weights.isdisjoint(node.all_input_nodes):
            raise CoupledError(coupling.refusal)


_HINT = (
    "What takes all samples together more than once does this: BatchNorm in training, and a mixture whose experts have "
    "a capacity, or choose their rows, of the whole batch. Use microbatches=1 (recompute='full' saves memory too). For "
    "BatchNorm use batch_statistics='microbatch', where it takes the samples of each micro-batch as other trainers do, "
    "or a module without it (GroupNorm, LayerNorm; BatchNorm in eval mode). For a loss of each micro-batch by itself "
    "there is autopar.per_microbatch(function, rows)."
)


def _way(after: Sequence[fx.Node], reductions: AbstractSet[fx.Node]) -> tuple[list[fx.Node], fx.Node]:
    """The nodes from the reductions that some values come from to these values; and the nearest reduction."""
    known: dict[fx.Node, None] = {}
    nearest: list[fx.Node] = []
    pending = list(after)
    while pending:
        found = pending.pop(0)
        if found in reductions:
            nearest.append(found)
        elif found not in known and found.op != "placeholder":
            known[found] = None
            pending += found.all_input_nodes
    reached, between = set(nearest), []
    for one in after[0].graph.nodes:
        if one in known and not reached.isdisjoint(one.all_input_nodes):
            reached.add(one)
            between.append(one)
    return between, nearest[0]


def _reader(join: fx.Node) -> fx.Node:
    """The first op behind a gathered value that takes samples together: no view, and not element by element."""
    reached = {join}
    for node in join.graph.nodes:
        if node.op == "call_function" and not reached.isdisjoint(node.all_input_nodes):
            passes = is_mesh_op(node.target) or is_view(node) or is_getitem(node)
            if not (passes or facts_of(node.target).pointwise):
                return node
            reached.add(node)
    return join


def _op(node: fx.Node) -> str:
    return f"op '{node.target}'"


def _lacks_rule(node: fx.Node) -> str:
    return f"{_op(node)} has no rule"


def _said(node: fx.Node, notes: Sequence[str]) -> str:
    """What a note says of the line of an op that has no rule: why it has none here."""
    place = record(node).source
    said = next((note for note in notes if place and f"{place} are not" in note), "")
    return said and f"{said[0].upper()}{said[1:]}, or use microbatches=1."


def _rule_hint(node: fx.Node) -> str:
    if str(node.target).startswith("aten."):
        return "Write it with ops that have one (docs/rules.md), or use microbatches=1."
    return "If it computes each row by itself, autopar.register_rule can say so; else use microbatches=1."


def _place(node: fx.Node) -> str:
    known = record(node)
    return " at ".join(part for part in (f"'{known.module}'" if known.module else "", known.source) if part) or "an op"
