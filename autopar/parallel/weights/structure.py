"""The modules and parameters of a parallel model: the very ones that were distributed."""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import Any

from torch import nn

from autopar.capture.inputs import tables

_ADVICE = (
    "programs and optimizers hold those that were distributed. Change the plain module before autopar.parallelize; "
    "new values go into the old parameters by load_state_dict, or under torch.no_grad() by copy_."
)


class Structure:
    """Which submodules and parameters there are, by module.

    modules, parameters: each once, the latter by first name. They stay the same as long as there is no `fault`.
    meanwhile: why others stand in their places for a while; see `gathered.py`.
    """

    meanwhile: str = ""

    def __init__(self, model: nn.Module) -> None:
        self.modules = tuple(tables.modules(model))
        self.parameters = dict(tables.named_parameters(model))
        self._kept: list[tuple[str, dict[str, Any], tuple[tuple[str, Any], ...]]] = [
            (path, table, tuple(table.items()))
            for path, module in tables.named_modules(model, remove_duplicate=False)
            for table in (module._modules, module._parameters)
        ]
        self._tables = [table for _, table, _ in self._kept]
        self._sizes = list(map(len, self._tables))
        self._values = tuple(self._all())

    def _all(self) -> chain[object]:
        return chain.from_iterable(map(dict.values, self._tables))

    def fault(self) -> str:
        """What was added, removed or put in another's place; empty if nothing was."""
        if self.meanwhile:
            return self.meanwhile
        if list(map(len, self._tables)) == self._sizes and all(map(is_, self._all(), self._values)):
            return ""
        for path, table, items in self._kept:
            before = dict(items)
            for name in {**before, **table}:
                if before.get(name) is not table.get(name):
                    what = "added" if name not in before else "removed" if name not in table else "replaced"
                    whole = f"{path}.{name}" if path else name
                    return f"'{whole}' was {what} after autopar.parallelize, but {_ADVICE}"
        return ""
