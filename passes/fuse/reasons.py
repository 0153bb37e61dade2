"""What a group saves, and why it ends where it ends."""

from __future__ import annotations

from torch import fx

from autopar.ir.ops.measure import human
from autopar.ir.ops.op_facts import facts_of
from autopar.ir.ops.ops import is_collective, op, op_name
from autopar.ir.ops.ring_ops import is_ring
from autopar.ir.program import is_getitem, record
from autopar.passes.fuse.facts import Facts, aten
from autopar.passes.fuse.fits import KernelFit
from autopar.passes.fuse.groups import BETWEEN, CYCLE, PHASE, Groups, Unit

# How often what a call reads and writes moves where torch computes it alone: kernels of several passes.
PASSES = {
    op("rms_norm_backward"): 2, aten.native_layer_norm_backward.default: 2, op("logsumexp"): 3,
    op("cross_entropy_backward"): 4, op("pick_backward"): 2,
}  # fmt: skip
_ATTENTION = ("attention", "compared_attention", "dropped_attention")
_WORDS = {
    BETWEEN: "a call that must run between", CYCLE: "a cycle: it reads what the group makes, and makes what it reads",
    PHASE: "forward and backward stay apart", "other rows": "other rows or columns",
}  # fmt: skip


def alone_bytes(facts: Facts, unit: Unit) -> int:
    """What the calls of a unit move if each is a kernel of its own."""
    fits = ((call, KernelFit.of(facts, [call])) for call in unit.calls)
    return sum(fit.moved() * PASSES.get(call.target, 1) for call, fit in fits if isinstance(fit, KernelFit))


def is_worth(unit: Unit) -> bool:
    """True for a group that is more than one kernel of torch."""
    return len(unit.calls) > 1 or bool(unit.copies) or unit.calls[0].target in PASSES


def reason_of(groups: Groups, unit: Unit) -> str:
    """`moves 0.3 GB in place of 1.2 GB; ends at a product (%einsum), a collective (%wait)`."""
    assert unit.fit is not None
    facts = groups.facts
    text = f"{len(unit.calls)} calls move {human(unit.fit.moved())} in place of {human(alone_bytes(facts, unit))}"
    ends = ends_of(groups, unit)
    if ends:
        text += f"; ends at {', '.join(f'{why} (%{node.name})' for why, node in ends.items())}"
    if unit.copies:
        text += f"; computes again {', '.join(f'%{node.name}' for node in unit.copies)}"
    return text


def ends_of(groups: Groups, unit: Unit) -> dict[str, fx.Node]:
    """Why a group is no larger, with a node of each reason."""
    found: dict[str, fx.Node] = {}
    assert unit.fit is not None
    around = [*unit.fit.operands(), *(user for value in unit.fit.results for user in groups.facts.users[value])]
    for node in around:
        if node in unit.calls or node.op != "call_function" or groups.of.get(node) is unit:
            continue
        why = _why(groups, unit, node)
        if why:
            found.setdefault(why, node)
    return found


def _why(groups: Groups, unit: Unit, node: fx.Node) -> str:
    call = node.args[0] if is_getitem(node) else node
    assert isinstance(call, fx.Node)
    if is_collective(call.target) or is_ring(call.target):
        return "a collective"
    if op_name(call.target).removesuffix("_backward") in _ATTENTION:
        return "attention"
    if record(call).flops or facts_of(call.target).precision == "low":
        return "a product"
    other = groups.of.get(node)
    if other is None or other.fit is None:
        return f"{op_name(call.target)}, which has no kernel" if record(call).types[0] is not None else ""
    calls = sorted((*unit.calls, *other.calls), key=groups.facts.place.__getitem__)
    why = groups.why_not(unit, other, calls)
    return _WORDS.get(why, why) if isinstance(why, str) else "a group that shares too little"
