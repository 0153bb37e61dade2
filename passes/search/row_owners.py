"""Which calls may have their rows where the owners are: those that multiply each row by the matrix of its expert, and
those between them that take rows one by one."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ir.layout import OWNED
from autopar.passes.rules.splits import Split, place
from autopar.passes.rules.through import takes_each
from autopar.passes.search.items import Classes


class RowOwners:
    """The owners that a program has, and who takes rows that are with them. padded: as of `Intent`."""

    def __init__(self, classes: Classes, padded: bool = False) -> None:
        self.classes, self.padded = classes, padded
        self._known: dict[tuple[int, str], bool] = {}
        self._before = self._before_indices()

    def seeds(self) -> Iterator[tuple[tuple[int, int], set[Split]]]:
        """The values that products by expert read and give, (class, result), with their splits by owners."""
        for i, item in enumerate(self.classes.items):
            if item.rule is None or not self.classes.is_by_owner(i) or not item.rule.flops:
                continue
            rows, owners = item.rule.owned or ("", "")
            tensors = [*zip(item.sources, item.rule.operands, strict=True)]
            tensors += [((i, result), dims) for result, dims in enumerate(item.rule.results)]
            for value, dims in tensors:
                splits = (place(dims, choice, dict(item.rule.sizes)) for choice in ((rows, OWNED), (owners, 1)))
                yield value, {one for one in splits if one is not None}

    def _before_indices(self) -> set[int]:
        """The calls that an index depends on: they run before anybody knows where rows go. Of those behind the products
        of an earlier layer only the ones that its own rows go through, too."""
        return self._upstream(by_rows=True) | (self._upstream(by_rows=False) - self._behind_products())

    def _upstream(self, by_rows: bool) -> set[int]:
        """The calls that make an index, back to products by expert. by_rows: along the rows of the index alone."""
        pending = [(value, 0) for value in self.classes.owner_indices()]
        known, upstream = set(pending), set[int]()
        for (i, result), dim in pending:
            item = self.classes.items[i]
            if item.rule is None or item.rule.owned:
                continue
            name = item.rule.results[result][dim] if by_rows else ()
            if by_rows and len(name) != 1:
                continue
            upstream.add(i)
            for source, dims in zip(item.sources, item.rule.operands, strict=True):
                found = (source, dims.index(name) if by_rows and name in dims else 0)
                if (not by_rows or name in dims) and found not in known:
                    known.add(found)
                    pending.append(found)
        return upstream

    def _behind_products(self) -> set[int]:
        """The calls that rows go through behind a product by expert."""
        pending = [
            (i, 0) for i, item in enumerate(self.classes.items) if item.rule and item.rule.owned and item.rule.flops
        ]
        behind = {i for i, _ in pending}
        for i, dim in pending:
            for user, position in self.classes.users(i):
                rule = self.classes.items[user].rule
                dims = rule.operands[position] if rule else ()
                name = dims[dim] if dim < len(dims) else ()
                if rule is None or len(name) != 1 or user in behind:
                    continue
                behind.add(user)
                pending += [(user, dims.index(name)) for dims in rule.results if name in dims]
        return behind

    def may_take(self, i: int, name: str) -> bool:
        """True for a call that takes the rows of a name one by one, whatever their number and order."""
        if (i, name) not in self._known:
            self._known[i, name] = self._may_take(i, name)
        return self._known[i, name]

    def _may_take(self, i: int, name: str) -> bool:
        item = self.classes.items[i]
        assert item.rule is not None
        if i in self._before:
            return False
        if item.rule.owned and (name != item.rule.owned[0] or not self.classes.is_by_owner(i)):
            return False
        if self.padded and not item.rule.owned and any((name,) not in dims for dims in item.rule.results):
            return False
        tensors = (*item.rule.operands, *item.rule.results)
        known = {at: (dims.index((name,)), 1) for at, dims in enumerate(tensors) if (name,) in dims}
        return takes_each(item.node, known, self.classes.table)
