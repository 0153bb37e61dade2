"""The modules and parameters of a parallel model: the very ones that were distributed."""

from __future__ import annotations

from operator import is_

from torch import nn

_ADVICE = (
    "programs and optimizers hold those that were distributed. Change the plain module before autopar.parallelize; "
    "new values go into the old parameters by load_state_dict, or under torch.no_grad() by copy_."
)


class Structure:
    """Which submodules and parameters there are, by module."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (path, table, tuple(table.items()), tuple(table.values()))
            for path, module in model.named_modules(remove_duplicate=False)
            for table in (module._modules, module._parameters)
        ]

    def fault(self) -> str:
        """What was added, removed or put in another's place; empty if nothing was."""
        for path, table, items, values in self._kept:
            if len(table) == len(values) and all(map(is_, table.values(), values)):
                continue
            before = dict(items)
            for name in {**before, **table}:
                if before.get(name) is not table.get(name):
                    what = "added" if name not in before else "removed" if name not in table else "replaced"
                    whole = f"{path}.{name}" if path else name
                    return f"'{whole}' was {what} after autopar.parallelize, but {_ADVICE}"
        return ""
