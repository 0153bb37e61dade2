"""Which calls may have their rows where the owners are: those that multiply each row by the matrix of its expert, and
those between them that take rows one by one."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ir.layout import OWNED
from autopar.passes.rules.rule import Table
from autopar.passes.rules.splits import Split, place
from autopar.passes.rules.through import takes_each
from autopar.passes.search.items import Classes


class Owners:
    """The owners that a program has, and who takes rows that are with them."""

    def __init__(self, classes: Classes) -> None:
        self.classes = classes
        self._known: dict[tuple[int, str], bool] = {}
        # What says of rows to which expert they go: of a lookup by any other index rows stay where they are.
        self.indices = {
            item.sources[item.rule.owners_index]
            for item in classes.items
            if item.rule and item.rule.owned and item.rule.flops
        }
        self._before = self._before_indices()

    def seeds(self) -> Iterator[tuple[tuple[int, int], set[Split]]]:
        """The values that products by expert read and give, (class, result), with their splits by owners."""
        for i, item in enumerate(self.classes.items):
            if item.rule is None or not self._is_owned(i) or not item.rule.flops:
                continue
            rows, owners = item.rule.owned or ("", "")
            tensors = [*zip(item.sources, item.rule.operands, strict=True)]
            tensors += [((i, result), dims) for result, dims in enumerate(item.rule.results)]
            for value, dims in tensors:
                splits = (place(dims, choice, dict(item.rule.sizes)) for choice in ((rows, OWNED), (owners, 1)))
                yield value, {one for one in splits if one is not None}

    def _before_indices(self) -> set[int]:
        """The calls that rows go through on their way to an index: they run before anybody knows where to send them."""
        pending = [(value, 0) for value in self.indices]
        known = set(pending)
        before = set[int]()
        for (i, result), dim in pending:
            item = self.classes.items[i]
            if item.rule is None or item.rule.owned or len(item.rule.results[result][dim]) != 1:
                continue
            before.add(i)
            name = item.rule.results[result][dim]
            for source, dims in zip(item.sources, item.rule.operands, strict=True):
                if name in dims and (source, dims.index(name)) not in known:
                    known.add((source, dims.index(name)))
                    pending.append((source, dims.index(name)))
        return before

    def may_take(self, i: int, name: str) -> bool:
        """True for a call that takes the rows of a name one by one, whatever their number and order."""
        if (i, name) not in self._known:
            self._known[i, name] = self._may_take(i, name)
        return self._known[i, name]

    def _is_owned(self, i: int) -> bool:
        item = self.classes.items[i]
        return bool(item.rule and item.rule.owned) and item.sources[item.rule.owners_index] in self.indices  # type: ignore[union-attr]

    def _may_take(self, i: int, name: str) -> bool:
        item = self.classes.items[i]
        assert item.rule is not None
        if i in self._before:
            return False
        if item.rule.owned and (name != item.rule.owned[0] or not self._is_owned(i)):
            return False
        tensors = (*item.rule.operands, *item.rule.results)
        known = {at: (dims.index((name,)), 1) for at, dims in enumerate(tensors) if (name,) in dims}
        return takes_each(item.node, known, self.classes.table)
