"""Follow the samples of a batch through a program: which values have one row for each, and where rows meet.

If no row needs another one, nor its own number, it is all the same whether ranks pass rows of one batch or batches of
their own: a sum over rows is what both add up to. Where rows meet (attention along them, a recurrence, a lookup by the
number of a row) the batch is what the user means by it, and shapes do not tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from autopar.capture.inputs import tables
from autopar.ir.program import INPUT_GRADIENT, Program, is_getitem, operand_nodes, record, source_of
from autopar.passes.rules import Rule, Rules, call_of, replicated_rule
from autopar.passes.rules.rule import Table
from autopar.passes.rules.splits import Choice, Split, choice_at, place

Value = tuple[fx.Node, int]  # a node, and which of its tensor results


@dataclass(frozen=True, slots=True)
class BatchRow:
    """Where a value has its rows: at (dim, outer), as many as the batch tensor of a leaf has."""

    split: Split
    leaf: int


@dataclass(frozen=True, slots=True)
class Meeting:
    """A call in which rows meet. by_number: one is looked up by a number that a batch or a buffer says."""

    where: str
    what: str
    by_number: bool = False

    def __str__(self) -> str:
        return f"{self.what} at {self.where}" if self.where else self.what


@dataclass(slots=True)
class BatchRows:
    """What is known of the rows of a program. outputs: of what leaves it, by place; None for what has no rows. used:
    the batch tensors that the forward pass reads, by leaf. joined: those of which rows stand side by side."""

    outputs: list[BatchRow | None] = field(default_factory=list)
    meetings: list[Meeting] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    joined: dict[int, set[int]] = field(default_factory=dict)

    def join(self, leaves: set[int]) -> None:
        """Note tensors of which rows stand side by side in a call."""
        self.used |= leaves
        together = leaves.union(*(self.joined.get(leaf, ()) for leaf in leaves))
        for leaf in together:
            self.joined[leaf] = together

    def are_joined(self, a: int, b: int) -> bool:
        """Whether each row of one tensor stands beside one of the other, here or there."""
        return a == b or b in self.joined.get(a, ())

    @property
    def numbered(self) -> Meeting | None:
        """The first call that looks a row up by a number that it was given."""
        return next((meeting for meeting in self.meetings if meeting.by_number), None)


def follow_rows(program: Program, dims: Mapping[str, int | None], table: Table, model: nn.Module) -> BatchRows:
    """Follow the rows of a CAPTURED program. dims: of its batch tensors, by name."""
    return _Walk(program, dims, Rules(table), _norms(model)).run()


def _norms(model: nn.Module) -> frozenset[str]:
    """The modules that take statistics of the samples, and say so: of dim 0."""
    kind = nn.modules.batchnorm._BatchNorm
    return frozenset(path for path, module in tables.named_modules(model) if isinstance(module, kind))


class _Walk:
    def __init__(self, program: Program, dims: Mapping[str, int | None], rules: Rules, norms: frozenset[str]) -> None:
        self.program, self.rules, self.norms = program, rules, norms
        self.rows: dict[Value, BatchRow] = {}
        self.summed: set[fx.Node] = set()  # computed of what rows add up to
        self.told: set[fx.Node] = set()  # whole numbers that were given: by the batch, in a buffer or a constant
        self.found = BatchRows()
        self._apart: dict[tuple[Value, Split], fx.Node | None] = {}
        for node, entry in program.entries:
            if entry.kind == "batch" and dims.get(entry.name) is not None:
                self.rows[node, 0] = BatchRow((dims[entry.name], 1), int(entry.name))  # type: ignore[arg-type]
            if entry.kind in ("batch", "buffer", "constant") and _is_number(node):
                self.told.add(node)

    def run(self) -> BatchRows:
        checked = self.program.guarding()  # what holds for all rows holds for those of each rank
        for node in self.program.calls():
            if not is_getitem(node) and not record(node).is_backward and node not in checked:
                self._call(node)
        batch = {entry.name: node for node, entry in self.program.entries if entry.kind == "batch"}
        for left, out in self.program.leaving:
            source = None
            if left is not None and out.kind in ("value", "aux"):
                source = source_of(left)
            elif left is not None and out.kind == INPUT_GRADIENT:  # it lies as what it is the gradient of
                source = batch[out.name], 0
            self.found.outputs.append(None if source is None else self.rows.get(source))
        return self.found

    def _call(self, node: fx.Node) -> None:
        call, sources = call_of(node), [source_of(operand) for operand in operand_nodes(node)]
        is_number = _is_number(node) and all(_is_number(source) for source, _ in sources)
        if is_number and any(source in self.told for source, _ in sources):
            self.told.add(node)
        given = [self.rows.get(source) for source in sources]
        if not any(given):
            if any(source in self.summed for source, _ in sources):
                self.summed.add(node)
            return
        pair = self.rules.of(call)
        rule = pair[0] if pair else replicated_rule(call)
        sizes = dict(rule.sizes)
        choices = [
            choice_at(dims, row.split, sizes) if row else None for dims, row in zip(rule.operands, given, strict=True)
        ]
        first = next((choice for choice in choices if choice), None)
        self._meet(node, rule, sources, given, choices)
        row = next(row for row, choice in zip(given, choices, strict=True) if row and choice == first)
        self.found.join({row.leaf for row, choice in zip(given, choices, strict=True) if row and choice == first})
        placed = [place(dims, first, sizes) if first else None for dims in rule.results]
        if first is None or first[0] in rule.replicated:  # of which a rule tells nothing, where dims stay as they were
            before = call.operands[given.index(row)].shape
            placed = [
                split or _as_before(row.split, before, each.shape)
                for split, each in zip(placed, call.results, strict=True)
            ]
        for result, split in enumerate(placed):
            if split is not None:
                self.rows[node, result] = BatchRow(split, row.leaf)
        if None in placed:
            self.summed.add(node)

    def _meet(
        self,
        node: fx.Node,
        rule: Rule,
        sources: list[Value],
        given: list[BatchRow | None],
        choices: list[Choice | None],
    ) -> None:
        """Note where rows meet in a call."""
        names = {choice[0] for choice in choices if choice}
        fixed = rule.replicated | rule.ordered
        if any(row and not choice for row, choice in zip(given, choices, strict=True)) or names & fixed:
            numbered = [s for (s, _), row in zip(sources, given, strict=True) if s in self.told and _is_number(s)]
            by_number = bool(numbered) and _looks_up(rule, given, sources, numbered)
            return self._note(node, "rows are looked up by their number" if by_number else "rows meet", by_number)
        if len(names) > 1:
            return self._note(node, "each row meets every other one")
        (name,) = names
        choice = next(choice for choice in choices if choice)
        for source, dims, own in zip(sources, rule.operands, choices, strict=True):
            split = None if own else place(dims, choice, dict(rule.sizes))
            apart = None if split is None else self._told_apart(source, split)
            if apart is not None:
                return self._note(node, "rows are told apart by their number", apart in self.told)
        is_joined = any(source in self.summed for (source, _), own in zip(sources, choices, strict=True) if not own)
        if is_joined and any(name in dim for dims in rule.results for dim in dims) and not self._is_norm(node):
            self._note(node, "each row meets a sum or mean of all of them")
        return None

    def _note(self, node: fx.Node, what: str, by_number: bool = False) -> None:
        self.found.meetings.append(Meeting(record(node).source, what, by_number))

    def _is_norm(self, node: fx.Node) -> bool:
        return record(node).module in self.norms

    def _told_apart(self, value: Value, split: Split) -> fx.Node | None:
        """What makes a value, which is not computed of rows, another one for each of them: a node, of whole numbers
        that were given if those do; None if it is the same for all."""
        key = value, split
        if key not in self._apart:
            self._apart[key] = self._tells_apart(value, split)
        return self._apart[key]

    def _tells_apart(self, value: Value, split: Split) -> fx.Node | None:
        node, result = value
        if node.op != "call_function":
            return node
        call, sources = call_of(node), [source_of(operand) for operand in operand_nodes(node)]
        pair = self.rules.of(call)
        rule = pair[0] if pair else replicated_rule(call)
        choice = choice_at(rule.results[result], split, dict(rule.sizes))
        if (
            choice is None or choice[0] in rule.replicated | rule.ordered
        ):  # as an arange, of which no rank makes a piece
            return next((source for source, _ in sources if source in self.told), node)
        for source, dims in zip(sources, rule.operands, strict=True):
            inner = place(dims, choice, dict(rule.sizes))
            apart = None if inner is None else self._told_apart(source, inner)
            if apart is not None:
                return apart
        return None


def _as_before(split: Split, before: tuple[int, ...], after: tuple[int, ...]) -> Split | None:
    """Rows where an operand has them, of a result with as many dims and as much in that one."""
    dim, _ = split
    return split if len(before) == len(after) and before[dim] == after[dim] else None


def _looks_up(rule: Rule, given: list[BatchRow | None], sources: list[Value], numbered: list[fx.Node]) -> bool:
    """Whether rows are picked, or written, by whole numbers that stand beside them."""
    return any(row is not None and source not in numbered for row, (source, _) in zip(given, sources, strict=True))


def _is_number(node: fx.Node) -> bool:
    types = record(node).types
    whole = [type_ for type_ in types if type_ is not None]
    return bool(whole) and all(not _is_float(type_.dtype) and type_.dtype != torch.bool for type_ in whole)


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
