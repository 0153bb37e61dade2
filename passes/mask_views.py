"""Which dim of a mask a dim of what it is computed from is, through views and broadcasts."""

from __future__ import annotations

from typing import Any

from torch import fx

from autopar.ir.ops import op_name
from autopar.ir.program import record

# Of each dim of a tensor, the dim of the mask that it is: b, h, s or t; "" for one of size 1 that is none of them.
Letters = tuple[str, ...]


def axes_of(shape: tuple[int, ...], letters: Letters) -> frozenset[str]:
    """The dims of the mask along which a tensor may differ."""
    return frozenset(letter for size, letter in zip(shape, letters, strict=True) if size != 1)


def under(node: fx.Node, letters: Letters) -> tuple[fx.Node, Letters] | None:
    """What a view or a broadcast shows, with the letters of its dims; None for other ops."""
    x = node.args[0] if node.args else None
    if not isinstance(x, fx.Node) or not record(x).is_tensor or not record(node).is_tensor:
        return None
    given, made = record(x).type.shape, record(node).type.shape
    match op_name(node.target):
        case "expand":
            return x, letters[len(made) - len(given) :]
        case "slice":
            return (x, letters) if given == made else None
        case "permute":
            return x, _permuted(letters, [int(dim) % len(made) for dim in _list(node.args[1])])
        case "transpose":
            first, second = (int(dim) % len(made) for dim in node.args[1:])  # type: ignore[arg-type, call-overload]
            order = list(range(len(made)))
            order[first], order[second] = second, first
            return x, _permuted(letters, order)
        case "t":
            return x, letters[::-1]
        case "unsqueeze" | "squeeze" | "view" | "reshape" | "_unsafe_view":
            found = _matched(given, made, letters)
            return None if found is None else (x, found)
    return None


def _permuted(letters: Letters, order: list[int]) -> Letters:
    """Of the operand of a permutation: its dim order[i] is dim i of the result."""
    found = dict(zip(order, letters, strict=True))
    return tuple(found[dim] for dim in range(len(letters)))


def _matched(given: tuple[int, ...], made: tuple[int, ...], letters: Letters) -> Letters | None:
    """If two shapes differ in dims of size 1 alone, the letters of the first one."""
    if [size for size in given if size != 1] != [size for size in made if size != 1]:
        return None
    rest = iter(letter for size, letter in zip(made, letters, strict=True) if size != 1)
    return tuple("" if size == 1 else next(rest) for size in given)


def _list(arg: Any) -> list[int]:
    return list(arg)
