"""Writes a choice into the graph: the backward pass reads clones of forward nodes, made just before they are
needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import fx

from autopar.ir.ops.ops import is_collective
from autopar.ir.ops.storage import root_of
from autopar.ir.program import Builder, Program, is_getitem, record, set_record
from autopar.passes.recompute.graph import is_backward

MADE_BY = "recompute"
GroupOf = Callable[[fx.Node], str | None]  # whose clones a node reads; None for what reads the forward pass


@dataclass(frozen=True, slots=True)
class RecomputedCall:
    """A call is computed again, for the nodes of the backward pass in one group."""

    group: str
    reason: str


def rematerialize(
    program: Program, recomputed: Mapping[fx.Node, RecomputedCall], group_of: GroupOf, *, shares: bool = True
) -> Program:
    """The program with clones of the calls in `recomputed`, each shared by the nodes of its group. shares: what the
    backward pass gathers again anyway is not gathered for the clones as well; it lives from the one use to the other.
    """
    return _Rematerialize(program, recomputed, group_of, shares).run()


class _Rematerialize:
    def __init__(
        self, program: Program, recomputed: Mapping[fx.Node, RecomputedCall], group_of: GroupOf, shares: bool
    ) -> None:
        self.program, self.group_of, self.shares = program, group_of, shares
        self.build = Builder(MADE_BY)
        self.recomputed = dict(recomputed)
        self.made: dict[fx.Node, fx.Node] = {}  # the clone of an old node
        self.moved: dict[tuple[object, ...], fx.Node] = {}  # collectives of the backward pass, by what they move
        self.position = {node: i for i, node in enumerate(program.graph.nodes)}
        for node in program.calls():  # with a call go its results, and with a value its views
            source = node.args[0] if is_getitem(node) else root_of(node)
            if isinstance(source, fx.Node) and source in self.recomputed and not is_backward(node):
                self.recomputed.setdefault(node, self.recomputed[source])

    def run(self) -> Program:
        rewritten = self.build.rewrite(self.program, self._put)
        for node in sorted(self.recomputed, key=self.position.__getitem__, reverse=True):
            self._drop(self.build.value[node])
        return rewritten

    def _put(self, node: fx.Node) -> fx.Node | None:
        group = self.group_of(node)
        if group is None:
            return None
        for old in self._missing(node, group):
            self.made[old] = self._copy(old, group, recomputed=True)
        return self._copy(node, group, recomputed=False)

    def _drop(self, forward: fx.Node) -> None:
        """Erase a call that only the backward pass read. Items of a tuple go with it and not before."""
        if not is_getitem(forward) and all(is_getitem(user) and not user.users for user in forward.users):
            for node in (*forward.users, forward):
                self.build.graph.erase_node(node)

    def _is_recomputed(self, node: fx.Node, group: str) -> bool:
        found = self.recomputed.get(node)
        return found is not None and found.group == group

    def _missing(self, node: fx.Node, group: str) -> list[fx.Node]:
        """What has to be computed again before a node, in the order of the program."""
        missing: set[fx.Node] = set()
        pending = [node]
        while pending:
            for old in pending.pop().all_input_nodes:
                if old not in missing and old not in self.made and self._is_recomputed(old, group):
                    missing.add(old)
                    pending.append(old)
        return sorted(missing, key=self.position.__getitem__)

    def _copy(self, node: fx.Node, group: str, recomputed: bool) -> fx.Node:
        """A node that reads the clones of its group. What was gathered again is not gathered twice."""
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda old: self._value(old, group))
        is_shared = self.shares and is_collective(node.target)
        key = (group, node.target, args, tuple(kwargs.items())) if is_shared else None
        if key is not None and key in self.moved:
            return self.moved[key]
        name = f"{node.name}_recomputed" if recomputed else node.name
        made = self.build.graph.create_node(node.op, node.target, args, kwargs, name=name)
        made.meta.update(node.meta)
        if recomputed:
            like = record(node).with_(phase="backward", made_by=MADE_BY, reason=self.recomputed[node].reason)
            set_record(made, like)
        if key is not None:
            self.moved[key] = made
        return made

    def _value(self, node: fx.Node, group: str) -> fx.Node:
        return self.made[node] if self._is_recomputed(node, group) else self.build.value[node]
