"""Which dim of a mask a dim of what it is computed from is, through views and broadcasts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from autopar.ir.ops import op_name
from autopar.ir.program import record

# Of each dim of a tensor, the dim of the mask that it is: b, h, s or t; "" for one of size 1 that is none of them, "bh"
# for two that are joined.
Letters = tuple[str, ...]


def axes_of(shape: tuple[int, ...], letters: Letters) -> frozenset[str]:
    """The dims of the mask along which a tensor may differ."""
    return frozenset("".join(letter for size, letter in zip(shape, letters, strict=True) if size != 1))


def in_order(shape: tuple[int, ...], letters: Letters) -> list[int] | None:
    """The dims along which a tensor may differ, in the order of the mask's; None if joined dims have another one."""
    found = sorted((i for i, size in enumerate(shape) if size != 1), key=letters.__getitem__)
    told = "".join(letters[i] for i in found)
    return found if list(told) == sorted(told) else None


def under(node: fx.Node, letters: Letters, sizes: Mapping[str, int]) -> tuple[fx.Node, Letters] | None:
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
            found = _matched(given, made, letters, sizes)
            return None if found is None else (x, found)
    return None


def _permuted(letters: Letters, order: list[int]) -> Letters:
    """Of the operand of a permutation: its dim order[i] is dim i of the result."""
    found = dict(zip(order, letters, strict=True))
    return tuple(found[dim] for dim in range(len(letters)))


def _matched(
    given: tuple[int, ...], made: tuple[int, ...], letters: Letters, sizes: Mapping[str, int]
) -> Letters | None:
    """The letters of a shape that is read as another one, of which the letters are known: dims of size 1 come and go,
    and dims may be joined (samples and heads), or taken apart again."""
    found: list[str] = []
    rest = [(size, letter) for size, letter in zip(made, letters, strict=True) if size != 1]
    pending: list[str] = []  # letters of a joined dim, of which this shape has each as a dim
    for size in given:
        letter = ""
        if size != 1:
            if not pending:
                joined, pending = _next(size, rest)
                letter = joined
            if pending:
                letter = pending.pop(0)
                if sizes[letter] != size:
                    return None
            if not letter:
                return None
        found.append(letter)
    return None if rest or pending else tuple(found)


def _next(size: int, rest: list[tuple[int, str]]) -> tuple[str, list[str]]:
    """(the letters of the dims of `rest` that make up one of this size, or those that one of them is made of)."""
    product, letters = 1, ""
    while rest and product < size:
        of, letter = rest.pop(0)
        product, letters = product * of, letters + letter
    if product == size:
        return letters, []
    return "", list(letters)


def _list(arg: Any) -> list[int]:
    return list(arg)
