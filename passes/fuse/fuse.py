"""fuse: calls between products and collectives become groups that run as one kernel each."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autopar.ir.ops.measure import human
from autopar.ir.ops.op_facts import facts_of
from autopar.ir.ops.ops import is_collective, op, op_name
from autopar.ir.ops.ring_ops import is_ring
from autopar.ir.plan import Plan
from autopar.ir.program import Builder, Program, is_getitem, record
from autopar.passes.fuse.again import recompute
from autopar.passes.fuse.facts import Facts, aten
from autopar.passes.fuse.fits import KernelFit, read_bytes
from autopar.passes.fuse.groups import BETWEEN, CYCLE, PHASE, Groups, Unit
from autopar.passes.fuse.write_groups import GroupWriter

# The order in which groups grow: first along values that one makes and another reads, then beside shared operands.

LEAST_SHARED = 256  # the part of what a group moves that it must share with another: one in so many bytes


def merged(facts: Facts) -> Groups:
    """The groups of a program: no two of them could be one that moves fewer bytes."""
    groups = Groups.single(facts)
    while True:
        while _along(groups):
            pass
        if not _beside(groups):
            return groups


def _along(groups: Groups) -> bool:
    """Merge along values, those of the calls in order, the largest first; True if anything changed."""
    facts, changed = groups.facts, False
    for node in facts.reads:
        if node not in facts.joins:
            continue
        for read in sorted(facts.reads[node], key=lambda read: -facts.bytes_(read.value)):
            a, b = groups.of.get(read.value), groups.of[node]
            if a is not None and a is not b and not groups.merge(a, b):
                changed = True
    return changed


def _beside(groups: Groups) -> bool:
    """Merge groups that read the same, the largest first, where that moves fewer bytes; True if anything changed."""
    changed = False
    for value, users in _shared(groups):
        for a, b in _pairs(groups, value, users):
            if max(a.after, b.after) < min(a.before, b.before) and _saves(a, b) and not groups.merge(a, b):
                changed = True
                break
    return changed


def _shared(groups: Groups) -> list[tuple[fx.Node, list[Unit]]]:
    """The values that several groups read, the largest first."""
    readers: dict[fx.Node, dict[Unit, None]] = {}
    for unit in groups.groups():
        assert unit.fit is not None
        for value in unit.fit.operands():
            readers.setdefault(value, {})[unit] = None
    several = [(value, list(units)) for value, units in readers.items() if len(units) > 1]
    return sorted(several, key=lambda entry: -groups.facts.bytes_(entry[0]))


def _pairs(groups: Groups, value: fx.Node, users: list[Unit]) -> Iterator[tuple[Unit, Unit]]:
    live = set(groups.of.values())
    units = [unit for unit in users if unit in live]
    return ((a, b) for i, a in enumerate(units) for b in units[i + 1 :])


def _saves(a: Unit, b: Unit) -> bool:
    """True if what both read is as large as a value of their domain: less is in the caches. What goes element by
    element (a rotation of queries, and one of keys) may share less: that it is one launch is worth the rest."""
    assert a.fit is not None and b.fit is not None
    mine, its = a.fit.operands(), b.fit.operands()
    facts = a.fit.facts
    both = [value for value in mine if value in its and value in facts.types]
    if not a.fit.has_rows and not b.fit.has_rows:
        shared = sum(read_bytes(facts, value, mine[value]) for value in both)
        return shared * LEAST_SHARED > min(a.fit.moved(), b.fit.moved())
    return any(facts.types[value].numel >= min(_numel(a.fit), _numel(b.fit)) for value in both)


def _numel(fit: KernelFit) -> int:
    return fit.rows * fit.width


# What a group saves, and why it ends where it ends.

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
    ends: dict[str, fx.Node] = {}
    assert unit.fit is not None
    around = [*unit.fit.operands(), *(user for value in unit.fit.results for user in groups.facts.users[value])]
    for node in around:
        if node in unit.calls or node.op != "call_function" or groups.of.get(node) is unit:
            continue
        why = _why(groups, unit, node)
        if why:
            ends.setdefault(why, node)
    return ends


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


# Calls that give what they are given: a product with 1, a first power. Each would be a result of its own.

_OF_ONE = frozenset(
    (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.pow.Tensor_Scalar)
)  # fmt: skip


def without_identities(program: Program) -> Program:
    """The program in which the operands of such calls stand for them."""
    found = {node for node in program.calls() if _is_identity(node)}
    if not found:
        return program
    build = Builder("fuse")

    def put(node: fx.Node) -> fx.Node | None:
        return build.value[node.args[0]] if node in found else None  # type: ignore[index]

    return build.rewrite(program, put)


def _is_identity(node: fx.Node) -> bool:
    """True for a call whose result is its operand to the bit, and that a kernel or the executor made."""
    if node.target not in _OF_ONE or node.kwargs or len(node.args) != 2:
        return False
    operand, number = node.args
    if not isinstance(operand, fx.Node) or type(number) not in (int, float) or number != 1:
        return False
    leaves = any(user.op == "output" for user in node.users)  # it would leave in the memory of its operand
    mine, its = record(node), record(operand)
    return not leaves and its.is_tensor and (mine.types, mine.layouts) == (its.types, its.layouts)


def fuse(program: Program, plan: Plan) -> Program:
    """LOCAL -> LOCAL, and of each graph of a pipeline. Only with `compile="triton"`. A group is one node that holds its
    calls, and says what it saves and why it ends where it does:

        mesh: dp=2
        compile: triton
        LOCAL program on dp=2
        %w: f32[8,8] [-,-] = parameter "w"
        %x: f32[3,8] of [6,8] [dp,-] = batch "0"
        %einsum: f32[3,8] of [6,8] [dp,-] = autopar.einsum.default(%x, %w, "ca,ba->cb")
        %gelu: f32[3,8] of [6,8] [dp,-] = aten.gelu.default(%einsum)
        %add: f32[3,8] of [6,8] [dp,-] = aten.add.Tensor(%gelu, %x)
        %all_gather: f32[6,8] [-,-] = autopar.all_gather.default(%add, "dp", 0, 1)
        return value "y" = %all_gather
    becomes
        LOCAL program on dp=2
        %w: f32[8,8] [-,-] = parameter "w"
        %x: f32[3,8] of [6,8] [dp,-] = batch "0"
        %einsum: f32[3,8] of [6,8] [dp,-] = autopar.einsum.default(%x, %w, "ca,ba->cb")
        %fused_gelu_add: (f32[3,8] of [6,8] [dp,-]) = fused.points "gelu_add"(%einsum, %x)
            %einsum: f32[3,8] of [6,8] [dp,-] = operand
            %x: f32[3,8] of [6,8] [dp,-] = operand
            %gelu: f32[3,8] of [6,8] [dp,-] = aten.gelu.default(%einsum)
            %add: f32[3,8] of [6,8] [dp,-] = aten.add.Tensor(%gelu, %x)
            return %add
        %add: f32[3,8] of [6,8] [dp,-] = operator.getitem(%fused_gelu_add, 0)
        %all_gather: f32[6,8] [-,-] = autopar.all_gather.default(%add, "dp", 0, 1)
        return value "y" = %all_gather

    Calls that no kernel computes (products, attention, collectives) keep their order, and a group runs between two of
    them, behind all that it reads and before all that reads it: no collective starts later or is awaited earlier.
    Groups grow along values that one call makes and another reads, then beside operands that they share, as long as
    they have the same rows, none of them reads what only a whole group has made, and registers hold a row (see
    `fits.py`). A group computes again what it can make of operands that it reads anyway: the backward pass its part of
    the forward pass, everybody a cast to a longer float. Forward and backward pass stay apart.
    """
    return fused(program) if plan.options.compile == "triton" else program


def fused(program: Program) -> Program:
    """The program with its groups as fused nodes."""
    groups = merged(Facts.of(without_identities(program)))
    recompute(groups)
    chosen = {unit: reason_of(groups, unit) for unit in groups.groups() if is_worth(unit)}
    return GroupWriter(groups, chosen).run() if chosen else program
