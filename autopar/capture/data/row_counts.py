"""How many rows a mask selects, as a number: a size that views and new tensors may have, and nothing else.

`h.view(len(h), 2, 4)`, `torch.zeros(h.shape[0], 4)`, `w.expand(h.size(0), -1)`: where the number is a size of a result,
the result has such rows. Where it is anything else it is a plain number, of which the second run of the capture, with
one row, finds that it is not the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from autopar.ir.ops.op_facts import is_undecided, overloads_of
from autopar.torch_compat import schema_of

Tensor = torch.Tensor


class RowCount(int):
    """The number of rows like those of `rows` (a ValidRows). In the second run it is 1. asked: where it is noted that
    Python computes with it, or compares it; a size of a view is not asked for."""

    rows: Any
    asked: set[int]

    @classmethod
    def of(cls, count: int, rows: Any, asked: set[int]) -> RowCount:
        made = cls(count)
        made.rows, made.asked = rows, asked
        return made


def _noted(name: str) -> Any:
    plainly = getattr(int, name)

    def noted(self: RowCount, *others: Any) -> Any:
        self.asked.add(id(self.rows.valid))
        return plainly(self, *others)

    return noted


_SILENT = (
    "__new__",
    "__doc__",
    "__repr__",
    "__hash__",
    "__format__",
    "__getattribute__",
    "__getnewargs__",
    "__sizeof__",
)
for _name in vars(int):
    if _name.startswith("__") and _name not in (*_SILENT, "__index__"):
        setattr(RowCount, _name, _noted(_name))


def counted(function: Any, result: Any, args: Any, rows: Any, asked: set[int]) -> Any:
    """What a question for a shape gives, with the size of the rows' dim as a count of rows. asked: as of `RowCount`."""
    dim = rows.dim
    if function in (Tensor.__len__, Tensor.numel, torch.numel):  # Python makes a plain number of what these give
        asked.add(id(rows.valid))
    if isinstance(result, torch.Size):
        return torch.Size(RowCount.of(size, rows, asked) if at == dim else size for at, size in enumerate(result))
    given = args[1] if len(args) > 1 else None
    is_rows = function is Tensor.__len__ or (function is Tensor.size and isinstance(given, int))
    at = 0 if given is None else given % args[0].ndim
    return RowCount.of(result, rows, asked) if is_rows and at == dim else result


def counts_in(value: Any) -> Iterator[RowCount]:
    """The counts of rows among the arguments of a call."""
    if isinstance(value, RowCount):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from counts_in(item)
    elif isinstance(value, dict):
        yield from counts_in(list(value.values()))


def sizes_in(function: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
    """The sizes that a function is given for its result: those of a view, or of a new tensor; None for another one."""
    name = getattr(function, "__name__", "")
    found = _size_argument(name)
    if found is None or is_undecided(name):
        return None
    if found[1] in kwargs:
        return tuple(kwargs[found[1]])
    at = found[0] if args and isinstance(args[0], Tensor) else 0
    given = args[at:]
    if given and isinstance(given[0], (tuple, list)):
        return tuple(given[0])
    return tuple(given) if given and all(isinstance(each, int) for each in given) else None


@cache
def _size_argument(name: str) -> tuple[int, str] | None:
    """Where a function takes the sizes of its result, and the name of that argument."""
    for one in overloads_of(name):
        for at, argument in enumerate(schema_of(one).arguments):
            if argument.name in ("size", "shape", "repeats") and "[]" in str(argument.type).replace("[int]", "[]"):
                return at, argument.name
    return None


def with_sizes(function: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a call, with plain numbers in place of counts of rows, but where they are sizes."""
    counts = sum(1 for _ in counts_in((args, kwargs)))
    if not counts or sum(1 for _ in counts_in(sizes_in(function, args, kwargs) or ())) == counts:
        return args, kwargs
    return plain(args), plain(kwargs)


def plain(value: Any) -> Any:
    """Arguments with plain numbers in place of counts of rows."""
    if isinstance(value, RowCount):
        return int.__int__(value)
    if isinstance(value, torch.Size):
        return torch.Size(map(plain, value))
    if type(value) in (tuple, list):
        return type(value)(map(plain, value))
    if type(value) is dict:
        return {key: plain(item) for key, item in value.items()}
    return value
