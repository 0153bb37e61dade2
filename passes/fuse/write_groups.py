"""The program with its groups as fused nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import getitem

from torch import fx

from autopar.ir.ops.fused import COLUMNS, POINTS, ROWS, Fused
from autopar.ir.ops.op_facts import facts_of, made_of
from autopar.ir.ops.ops import op_name
from autopar.ir.program import Builder, Program, Record, is_getitem, operand_nodes, record, set_record
from autopar.passes.fuse.facts import Facts
from autopar.passes.fuse.fits import KernelFit
from autopar.passes.fuse.groups import Groups, Unit

MADE_BY = "fuse"
MOST_WORDS = 4  # of a group's name
_SILENT = ("same", "joined")  # in a name: calls that move elements so


@dataclass(slots=True)
class GroupWriter:
    """Writes a program anew: calls with a slot in their order, the rest where it is first needed or where it stood."""

    groups: Groups
    fused: dict[Unit, str]  # the groups that become one node, each with its reason
    build: Builder = field(default_factory=lambda: Builder(MADE_BY))
    done: set[Unit] = field(default_factory=set)
    turned: set[fx.Node] = field(default_factory=set)  # values that leave their group as a permutation
    seen: set[fx.Node] = field(default_factory=set)  # what groups read of one another, as they see it

    def run(self) -> Program:
        program, facts = self.groups.facts.program, self.groups.facts
        last = {unit: unit.calls[-1] for unit in self.fused}
        for group in self.fused:
            reads = group.fit.operands().values() if group.fit is not None else ()
            self.seen.update(read.seen for several in reads for read in several)
        for node in program.graph.nodes:
            if facts.is_view(node) or node in self.build.value:
                continue  # a view is written where something reads it
            unit = self.groups.of.get(node)
            if unit not in self.fused:
                if node in facts.slot or node.op == "placeholder" or facts.users[node]:
                    self._need(node)
            elif node is last[unit] and unit.fit is not None and unit.fit.results:
                self._need_group(unit)
        return program.with_(graph=self.build.graph)

    def _need(self, node: fx.Node) -> None:
        """Write a node that is there no later than now, and all it reads."""
        todo = [node]
        while todo:
            one = todo[-1]
            unit = self.groups.of.get(one)
            if one in self.build.value or one in self.turned:
                todo.pop()
            elif unit in self.fused:
                assert unit not in self.done, one  # it would read what it makes
                self._need_group(unit)
            elif missing := [read for read in one.all_input_nodes if read not in self.build.value]:
                todo += reversed(missing)
            else:
                self.build.copy(one)

    def _need_group(self, unit: Unit) -> None:
        if unit in self.done:
            return
        self.done.add(unit)
        assert unit.fit is not None
        body = GroupBody(self.groups.facts, unit.fit, self._results(unit.fit))
        for operand in body.operands:
            self._need(operand)
        made = self._call(unit, body)
        for place, value in enumerate(body.results):
            like = record(value).with_(operands=(), reason="", flops=0)
            part = self.build.graph.create_node("call_function", getitem, (made, place), {}, name=value.name)
            set_record(part, like)
            self.build.value[value] = part

    def _call(self, unit: Unit, body: GroupBody) -> fx.Node:
        assert unit.fit is not None
        facts = self.groups.facts
        name = name_of(unit.fit)
        fused = Fused(body.graph, name, kind_of(unit.fit), facts.program.mesh)
        first = record(unit.calls[0])
        like = Record(
            types=tuple(record(value).type for value in body.results),
            several=True,
            layouts=tuple(record(value).layout for value in body.results),
            module=first.module,
            source=first.source,
            phase=first.phase,
            reason=self.fused[unit],
        )
        args = [self.build.value[operand] for operand in body.operands]
        made = self.build.call(fused, *args, like=like, name=f"fused_{name}")
        set_record(made, record(made).with_(operands=tuple(record(each).layout for each in operand_nodes(made))))
        return made

    def _results(self, fit: KernelFit) -> list[fx.Node]:
        """The results of a group. What is only read turned leaves turned, so that no one turns it by a copy."""
        results = []
        for value in fit.results:
            users = [user for user in value.users if user not in fit.calls]
            while len(users) == 1 and value not in self.seen and _turns(users[0], value):
                self.turned.add(value)
                value = users[0]
                users = list(value.users)
            results.append(value)
        return results


def _turns(view: fx.Node, value: fx.Node) -> bool:
    """True for a permutation of a value, in the same pass of the two."""
    return facts_of(view.target).moves == "turned" and record(view).phase == record(value).phase


@dataclass(slots=True)
class GroupBody:
    """The graph of a group. operands: the values outside that it reads, as it sees them, in order."""

    facts: Facts
    fit: KernelFit
    results: list[fx.Node]
    graph: fx.Graph = field(default_factory=fx.Graph)
    operands: list[fx.Node] = field(default_factory=list)
    value: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        needed = self._needed()
        calls = [node for node in self.fit.calls if node in needed]
        for node in dict.fromkeys(operand for call in calls for operand in call.all_input_nodes):
            self._operand(node)
        for node in calls:
            self._copy(node)
        made = self.graph.output(tuple(self._inner(value) for value in self.results))
        set_record(made, Record((None,), operands=tuple(record(value).layout for value in self.results)))

    def _needed(self) -> set[fx.Node]:
        """The calls that a result depends on."""
        needed: set[fx.Node] = set()
        todo = [self.facts.value_of(value) for value in self.results]
        while todo:
            node = todo.pop()
            call = node.args[0] if is_getitem(node) else node
            if call in needed or node not in self.fit.inside:
                continue
            needed.add(call)  # type: ignore[arg-type]
            todo += [read.value for read in self.facts.reads[call]]  # type: ignore[index]
        return needed

    def _operand(self, node: fx.Node) -> None:
        """A placeholder for what a call reads from outside."""
        if self.facts.value_of(node) in self.fit.inside or node in self.value:
            return
        made = self.graph.create_node("placeholder", node.name, name=node.name)
        known = record(node)
        set_record(made, Record(known.types, layouts=known.layouts))
        self.value[node] = made
        self.operands.append(node)

    def _inner(self, node: fx.Node) -> fx.Node:
        """What stands in the body for an operand of a call: a view of an inner value is copied here."""
        if node not in self.value:
            self._copy(node)
        return self.value[node]

    def _copy(self, node: fx.Node) -> None:
        if node in self.value:
            return
        for operand in node.all_input_nodes:
            self._inner(operand)
        self.value[node] = self.graph.node_copy(node, self.value.__getitem__)


def name_of(fit: KernelFit) -> str:
    """What a group does: its first calls, those that read rows before others."""
    facts = fit.facts
    rows = [node for node in fit.calls if facts.how[node].width]  # type: ignore[union-attr]
    calls = dict.fromkeys((*rows, *fit.calls))
    telling = [node for node in calls if not made_of(node.target) and facts_of(node.target).moves not in _SILENT]
    words = dict.fromkeys(op_name(node.target).strip("_") for node in telling or calls)
    return "_".join(list(words)[:MOST_WORDS])


def kind_of(fit: KernelFit) -> str:
    """Which of the three kinds of `Fused` a group is."""
    if fit.columns:
        return COLUMNS
    return ROWS if fit.has_rows else POINTS
