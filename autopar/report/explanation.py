"""Why one value is laid out as it is: what `autopar explain` shows."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from autopar.compiler.lowered import Collective, Lowered, collectives_of, moving_nodes
from autopar.errors import ValueNameError
from autopar.ir.layout import Layout
from autopar.ir.mesh import MICROBATCH, SLICE, axes_of_group, is_in_time
from autopar.ir.ops.fused import Fused, fused_of
from autopar.ir.ops.measure import human
from autopar.ir.ops.ops import is_collective, op
from autopar.ir.ops.ring_ops import Ring, is_attention
from autopar.ir.pipeline import graph_name
from autopar.ir.program import Input, Level, is_getitem, operand_nodes, record
from autopar.ir.schedule import KINDS
from autopar.ir.text.text import print_result, print_type, quote
from autopar.passes.search.explain import CHOSEN, USER, Alternative, Decision, explain_briefly
from autopar.passes.search.explain import explain as decisions_of
from autopar.report.host_copies import host_copies, host_lines

ITSELF, OPERAND, SUM, GRADIENT = "moved itself", "its operand is moved", "a sum that it leaves", "its gradient"
BESIDE = "between its pieces"
SHOWN = 5  # names in a list


@dataclass(frozen=True, slots=True)
class Caused:
    """A collective, and what it has to do with the value. `bucket`: the bytes of the bucket that it travels in."""

    link: str
    row: Collective
    bucket: int | None = None


@dataclass(frozen=True, slots=True)
class ExplainedPart:
    """One parameter or result of a module. `by`: what decided each axis, where that is known without a price."""

    name: str
    kind: str
    type: str
    layout: Layout
    by: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Explanation:
    """What is known of one value, or of the parts of a module (which has no decisions of its own)."""

    name: str
    kind: str  # parameter, buffer, constant, batch, value, module or group
    head: str
    places: tuple[str, ...] = ()  # source lines: of the value itself, and for an input of its users
    decisions: tuple[Decision, ...] = ()
    parts: tuple[ExplainedPart, ...] = ()
    collectives: tuple[Caused, ...] = ()
    groups: tuple[str, ...] = ()  # that compute it as one kernel each, with what they save
    hosted: tuple[str, ...] = ()  # what of it waits in the host's memory, with what that costs

    def __str__(self) -> str:
        return "\n".join(_text(self))


def explain(compiled: Lowered, value: str) -> Explanation:
    """Explain a parameter, a module or a node by name. Raises ValueNameError for what the program does not have."""
    names = [name for name, _ in compiled.history]
    if names[0] != "capture":
        raise ValueNameError("a loaded program knows its layouts, not what decided them: explain the TARGET itself.")
    finder = _Finder(compiled)
    path = value.removesuffix(".")
    if not value.startswith("%"):
        if value in finder.inputs:
            return finder.explain_value(finder.inputs[value])
        if path in finder.modules:
            return finder.explain_module(path)
    group = group_head(compiled, value.removeprefix("%"))
    if group is not None:
        return Explanation(value, "group", group[0], groups=group[1])
    return finder.explain_value(finder.node(value.removeprefix("%")))


class _Finder:
    """Finds what a name means. Users see the nodes of any program; decisions are about those that were searched."""

    def __init__(self, compiled: Lowered) -> None:
        self.compiled = compiled
        history, names = dict(compiled.history), [name for name, _ in compiled.history]
        self.searched = compiled.history[names.index("propagate") - 1][1]
        self.sharded = history["propagate"]
        # Before the gradients are put into buckets: each moves alone there.
        self.moved = history.get("ring", compiled.program)
        self.nodes = {node.name: node for node in self.searched.graph.nodes if node.op != "output"}
        self.origins = {record(node).origin: node for node in reversed(self.nodes.values()) if record(node).origin}
        self.layouts = {node.name: node for node in self.sharded.graph.nodes}
        pairs = self.searched.entries
        self.entries = dict(pairs)
        self.inputs = {name: node for node, entry in pairs if entry.kind != "batch" for name in entry.names}
        paths = [name.rpartition(".")[0] for name in self.inputs]
        paths += [record(node).module for node in self.searched.calls()]
        self.modules = {prefix for path in dict.fromkeys(paths) for prefix in _prefixes(path)}

    def node(self, name: str) -> fx.Node:
        """The searched node that any program's node is, or whose value it holds. Raises ValueNameError."""
        for held in (name, *self._origins(name)):
            node = self.nodes.get(held) or self.origins.get(held)
            if node is not None:
                return node
        raise ValueNameError(self._unknown(name))

    def _origins(self, name: str) -> Iterator[str]:
        for _, program in self.compiled.history:
            for node in program.graph.nodes:
                if node.name == name and node.op != "output":
                    yield record(node).origin

    def _unknown(self, name: str) -> str:
        before = False
        for pass_, program in self.compiled.history:
            node = next((one for one in program.graph.nodes if one.name == name and one.op != "output"), None)
            if node is not None and program.level > Level.CAPTURED:
                why = record(node).reason
                return f"%{name} was made by {record(node).made_by}, with nothing to decide" + (
                    f": {why}." if why else "."
                )
            if node is None and before:
                return f"%{name} was left out by {pass_}: no program computes it, so there is nothing to decide."
            before = node is not None
        known = [*self.inputs, *sorted(self.modules), *self.nodes]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or known[:3]
        return f"the program has no parameter, module or node '{name}'. Nearest names: {', '.join(near)}."

    def explain_value(self, node: fx.Node) -> Explanation:
        known, entry = record(node), self.entries.get(node)
        if not known.is_tensor:
            parts = [f"%{user.name}" for user in node.users if is_getitem(user)]
            what = f"it has several results: ask for {', '.join(parts[:SHOWN])}" if parts else "it is no tensor"
            raise ValueNameError(f"%{node.name} has no layout; {what}.")
        placed = record(self.layouts[node.name])
        kind = entry.kind if entry else "value"
        names = ", ".join(map(quote, entry.names)) if entry else f"%{node.name} = {node.target}"
        head = f"{kind} {names}: {print_type(known.type, placed.layout, self.sharded.mesh)} {placed.layout}"
        head += self._stage(node, entry)
        places = dict.fromkeys(_place(one) for one in ((node,) if entry is None else node.users))
        decisions = decisions_of(self.searched, self.compiled.plan, node)
        decisions = tuple(self._with_pattern(one, entry.name if entry else "") for one in decisions)
        caused = tuple(self._caused(node))
        return Explanation(
            entry.name if entry else f"%{node.name}", kind, head, tuple(filter(None, places)), decisions, (), caused,
            groups_with(self.compiled, node.name), self._hosted(entry.name if entry else f"%{node.name}"),
        )  # fmt: skip

    def _hosted(self, name: str) -> tuple[str, ...]:
        return host_lines(one for one in host_copies(self.compiled) if one.of == name)

    def _with_pattern(self, decision: Decision, name: str) -> Decision:
        if decision.by != USER:
            return decision
        because = self.compiled.plan.patterns.get(name, decision.because)
        return Decision(
            decision.axis, decision.size, decision.state, USER, because, decision.alternatives, decision.alike
        )

    def explain_module(self, path: str) -> Explanation:
        inside = [node for name, node in self.inputs.items() if _within(name, path)]
        by = explain_briefly(self.searched, self.compiled.plan, inside)
        parts = [self._part(node, tuple(by[node].items())) for node in dict.fromkeys(inside)]
        for node in self.searched.calls():
            known = record(node)
            if known.phase == "forward" and known.is_tensor and _within(known.module, path):
                users = [record(user) for user in node.users]
                if any(one.phase == "forward" and not _within(one.module, path) for one in users):
                    parts.append(self._part(node, ()))
        rows = tuple(Caused("", row) for row in self.compiled.collectives if _within(row.module, path))
        count = sum(part.kind == "parameter" for part in parts)
        head = f"module {path}: {count} parameters, {len(rows)} collectives of {human(sum(r.row.bytes for r in rows))}"
        hosted = host_lines(one for one in host_copies(self.compiled) if _within(one.module, path))
        groups = groups_within(self.compiled, path)
        return Explanation(path, "module", head, (), (), tuple(parts), rows, groups, hosted)

    def _stage(self, node: fx.Node, entry: Input | None) -> str:
        """Where a pipeline keeps a parameter or computes a value."""
        pipeline = self.compiled.pipeline
        if pipeline is None:
            return ""
        if entry is not None:
            if entry.kind != "parameter":
                return ""
            owner = pipeline.owners[entry.name]
            return (
                f"\n  kept by stage {owner} of {pipeline.flow.stages} (pp={pipeline.flow.ranks[owner]}), its first user"
            )
        made = [(place, kind) for (place, kind), graph in pipeline.graphs.items()
                if any(one.name == node.name and one.op == "call_function" for one in graph.graph.nodes)]  # fmt: skip
        names = [f"{KINDS[kind]}_{place}" if kind in "FBIW" else f"{KINDS[kind]} of pp={place}" for place, kind in made]
        return f"\n  computed in {', '.join(names)}" if names else ""

    def _part(self, node: fx.Node, by: tuple[tuple[str, str], ...]) -> ExplainedPart:
        entry, known = self.entries.get(node), record(self.layouts[node.name])
        type_ = print_type(known.type, known.layout, self.sharded.mesh)
        return ExplainedPart(
            entry.name if entry else f"%{node.name}", entry.kind if entry else "result", type_, known.layout, by
        )

    def _caused(self, node: fx.Node) -> Iterator[Caused]:
        """The collectives of a value: of itself, of its operands, of the sums that it leaves and of its gradient."""
        links: dict[str, str] = {}
        here = self.layouts[node.name]
        entry = self.entries.get(node)
        for result, out in self.sharded.leaving:
            if entry is not None and out.kind == "gradient" and out.name == entry.name and result is not None:
                links[result.name] = GRADIENT
        for operand, wanted in zip(operand_nodes(here), record(here).operands, strict=False):
            if record(operand).layout != wanted:
                links.setdefault(operand.name, OPERAND)
        links.setdefault(node.name, ITSELF)
        for axis in record(here).layout.axes:
            for name in _sums(here, axis):
                links.setdefault(name, f"{SUM} over {axis}")
        for mover, row in zip(moving_nodes(self.moved), collectives_of(self.moved), strict=True):
            ring = Ring.of(mover) if is_attention(mover.target) else None
            moved = operand_nodes(mover)[:1] if ring is None else (ring.k, ring.v)
            link = next(filter(None, (links.get(record(one).origin or one.name) for one in moved)), None)
            if link is None and any(user.name == node.name for user in mover.users):
                link = OPERAND  # made where it arrives: the rows of a token
            if record(mover).made_by == "partition":
                link = BESIDE if _belongs_to(mover) == node.name else None
            if is_in_time(row.axis):
                continue  # added up where it is
            if link is None or (link.startswith(SUM) and link.split()[-1] not in axes_of_group(row.axis)):
                continue
            yield Caused(link, row, self._bucket(entry.name) if entry and link == GRADIENT else None)

    def _bucket(self, name: str) -> int | None:
        """The bytes of the bucket in which a gradient leaves, if it shares one."""
        program = self.compiled.program
        for node, out in program.leaving:
            while out.kind == "gradient" and out.name == name and node is not None and node.op == "call_function":
                if record(node).made_by != "bucket":
                    break
                if is_collective(node.target) and "wait" not in str(node.target):
                    rows = collectives_of(program)
                    first = operand_nodes(node)[0].name
                    return next(row.bytes for row in rows if row.value == first) if first.startswith("flat") else None
                node = next((arg for arg in node.args if isinstance(arg, fx.Node)), None)
        return None


def _belongs_to(node: fx.Node) -> str:
    """The call of which `partition` moves rows between the pieces: of its operand, or of its result."""
    if node.target is op("halo"):
        return next(iter(node.users)).name
    while record(node).made_by == "partition":
        node = operand_nodes(node)[0]
    return node.name


def _sums(node: fx.Node, axis: str) -> Iterator[str]:
    """The values that are partial over `axis` because `node` is split over it, up to where they are summed."""
    seen: set[fx.Node] = set()
    pending = [node]
    while pending:
        for user in pending.pop().users:
            known = record(user)
            partial = bool(known.layouts) and known.is_tensor and axis in dict(known.layout.partial)
            if user.op == "call_function" and partial and user not in seen:
                seen.add(user)
                pending.append(user)
                yield user.name


def _prefixes(path: str) -> list[str]:
    parts = path.split(".") if path else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _within(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def _place(node: fx.Node) -> str:
    known = record(node) if node.op != "output" else None
    if known is None or not known.source or known.phase != "forward":
        return ""
    return f"{known.source} in {known.module}" if known.module else known.source


def _text(one: Explanation) -> Iterator[str]:
    yield one.head
    if one.places:
        word = "computed at" if one.kind == "value" else "used at"
        yield f"  {word} {_list(one.places)}"
    for part in one.parts:
        by = "; ".join(f"{axis}: {reason}" for axis, reason in part.by)
        yield f"  {part.kind} {part.name}: {part.type} {part.layout}" + (f"   {by}" if by else "")
    for decision in one.decisions:
        yield ""
        yield from _decision(decision)
    if one.groups:
        yield from ("", "what it saves" if one.kind == "group" else "groups that run as one kernel")
        yield from (f"  {line}" for line in one.groups)
    if one.hosted:
        yield from ("", "what of it waits in the host's memory")
        yield from (f"  {line}" for line in one.hosted)
    if one.kind == "group":
        return
    yield ""
    if one.collectives:
        yield "collectives that it causes" if one.kind != "module" else "collectives of its values"
        yield from _table([_caused_cells(caused) for caused in one.collectives])
    else:
        yield "it causes no collective"


def _decision(one: Decision) -> Iterator[str]:
    parts = {MICROBATCH: "micro-batches", SLICE: "slices"}.get(one.axis, "ranks")
    yield f"{one.axis} ({one.size} {parts}): {one.state}, decided by {one.by}: {one.because}"
    if len(one.alike) > 1:
        yield f"  one decision and one price for {len(one.alike)} values: {_list(one.alike)}"
    if len(one.alternatives) > 1:
        yield from _table([_alternative_cells(alternative) for alternative in one.alternatives])


def _alternative_cells(one: Alternative) -> tuple[str, ...]:
    if one.verdict == CHOSEN:
        return str(one.layout), CHOSEN, "", "", ""
    return str(one.layout), one.verdict, _signed("cost", one.cost), _signed("moves", one.moved), one.why


def _caused_cells(one: Caused) -> tuple[str, ...]:
    row = one.row
    place = " ".join(filter(None, (row.source, row.module, row.phase if row.phase != "forward" else "")))
    bucket = f" (in a bucket of {human(one.bucket)})" if one.bucket else ""
    return row.op, row.axis, human(row.bytes), place, (f"{one.link}: " if one.link else "") + row.reason + bucket


def _signed(what: str, bytes_: float | None) -> str:
    if bytes_ is None:
        return ""
    return f"{what} {'-' if bytes_ < 0 else '+'}{human(abs(bytes_))}"


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _list(names: tuple[str, ...]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


# -- groups of parameters ---------------------------------------------------------------------------------------------


def _groups(compiled: Lowered) -> Iterator[tuple[str, fx.Node, Fused]]:
    """The groups of all graphs, each with the name of its graph ("" if there is one graph)."""
    pipeline = compiled.pipeline
    graphs = (
        {"": compiled.program}
        if pipeline is None
        else {graph_name(*key): graph for key, graph in pipeline.graphs.items()}
    )
    for name, program in graphs.items():
        for node in program.calls():
            fused = fused_of(node)
            if fused is not None:
                yield name, node, fused


def group_head(compiled: Lowered, name: str) -> tuple[str, tuple[str, ...]] | None:
    """What a group of this name is, and what it saves; None if there is none."""
    for graph, node, fused in _groups(compiled):
        if node.name == name:
            known = record(node)
            result = print_result(known, compiled.program.level, fused.mesh)
            calls = ", ".join(f"%{call.name}" for call in fused.calls)
            head = f"group %{name}: one kernel of kind {fused.kind} for {calls}\n  {result}"
            return head, (_said(graph, node),)
    return None


def groups_with(compiled: Lowered, value: str) -> tuple[str, ...]:
    """The groups that compute a value: one, or several that compute it again."""
    return tuple(
        f"%{node.name}, {_said(graph, node)}"
        for graph, node, fused in _groups(compiled)
        if any(call.name == value for call in fused.calls)
    )


def groups_within(compiled: Lowered, path: str) -> tuple[str, ...]:
    """The groups that begin in a module."""
    return tuple(
        f"%{node.name}, {_said(graph, node)}"
        for graph, node, _ in _groups(compiled)
        if record(node).module == path or record(node).module.startswith(f"{path}.")
    )


def _said(graph: str, node: fx.Node) -> str:
    return f"in {graph}: {record(node).reason}" if graph else record(node).reason
