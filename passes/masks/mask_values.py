"""What is known of a mask that is computed element by element: a few numbers, each with the condition of its places.

`compare_masks` asks it where a mask lets a query see a key. A value of the mask's shape is followed down to vectors,
which hang on the query alone or on the key alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.comparisons import TRUE, BoolVector, Comparison, Condition, every, opposite, some
from autopar.ir.ops.op_facts import SIGNS, facts_of, fill_of
from autopar.ir.ops.ops import op_name
from autopar.ir.program import operand_nodes, record
from autopar.passes.masks.mask_views import Letters, axes_of, in_order, under
from autopar.passes.masks.rowwise import Known

MOST = 32  # combinations of the numbers of operands
FEW = 3  # numbers of a mask that are looked for in its elements
_TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class Vector:
    """Elements that hang on the query alone (`s`), or on the key alone (`t`), beside sample and head, plus `shift`.

    node: None for the positions 0, 1, ...; letters: of each dim of the node, which dim of the mask it is.
    """

    node: fx.Node | None
    letters: Letters
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Cases:
    """A value that is one of a few numbers; the conditions exclude each other, and one of them holds."""

    of: tuple[tuple[Any, Condition], ...]

    def where(self, *numbers: Any) -> Condition:
        return some(*(condition for number, condition in self.of if number in numbers))


@dataclass(frozen=True, slots=True)
class SignedSum:
    """A sum of vectors of integers, each with its sign, and a number; or its absolute value."""

    terms: tuple[tuple[int, Vector], ...]
    number: int = 0
    is_magnitude: bool = False


Value = Cases | SignedSum | None  # None: not known


class MaskValues:
    """Follows the values of masks of one size. names: of the vectors that conditions speak of."""

    def __init__(self, sizes: Mapping[str, int], known: Known) -> None:
        self.sizes, self.known = sizes, known
        self.names: dict[Vector, str] = {}
        self._values: dict[tuple[fx.Node, Letters], Value] = {}

    def of(self, node: fx.Node, letters: Letters) -> Value:
        """What is known of a value whose dims are those of the mask."""
        key = node, letters
        if key not in self._values:
            self._values[key] = self._found(node, letters)
        return self._values[key]

    def vectors(self) -> dict[str, Vector]:
        return {name: vector for vector, name in self.names.items()}

    def _found(self, node: fx.Node, letters: Letters) -> Value:
        if node.op == "call_function" and (number := _fill(node)) is not None:
            return Cases(((number, TRUE),))
        type_ = record(node).type
        if not {"s", "t"} <= axes_of(type_.shape, letters) and in_order(type_.shape, letters) is not None:
            if type_.dtype == torch.bool:
                return self._flag(Vector(node, letters))
            if type_.dtype in _INTEGERS:
                return self._line(Vector(node, letters))
        if node.op != "call_function":
            return None
        below = under(node, letters, self.sizes)
        if below is not None:
            return self.of(*below)
        if op_name(node.target) in ("tril", "triu"):
            return self._triangle(node, letters)
        found = self._pointwise(node, letters) if facts_of(node.target).pointwise else None
        return found or self._by_elements(node, letters)

    # --- vectors

    def _name(self, vector: Vector) -> str:
        side = "r" if "s" in self._axes(vector) else "c"
        return self.names.setdefault(vector, f"{side}{sum(name[0] == side for name in self.names.values())}")

    def _axes(self, vector: Vector) -> frozenset[str]:
        if vector.node is None:
            return frozenset(vector.letters)
        return axes_of(record(vector.node).type.shape, vector.letters)

    def _flag(self, vector: Vector) -> Cases:
        """A vector of bools; one that hangs on no input and is the same everywhere is a number."""
        assert vector.node is not None
        value = self.known.value(vector.node)
        if value is not None and value.numel() and bool((value == value.flatten()[0]).all()):
            return Cases(((bool(value.flatten()[0]), TRUE),))
        name = self._name(vector)
        return Cases(((True, BoolVector(name)), (False, BoolVector(name, False))))

    def _line(self, vector: Vector) -> Value:
        """A vector of integers; of one that hangs on no input, the number that it is everywhere, or the positions that
        it holds, whichever sample and head it is repeated for."""
        assert vector.node is not None
        value, letter = self.known.value(vector.node), "".join(self._axes(vector) & {"s", "t"})
        if value is None or not value.numel():
            return SignedSum(((1, vector),))
        first = int(value.flatten()[0])
        if bool((value == first).all()):
            return Cases(((first, TRUE),))
        if letter and "".join(vector.letters).count(letter) == 1:
            (dim,) = (i for i, one in enumerate(vector.letters) if letter in one)
            counted = torch.arange(first, first + value.shape[dim], dtype=value.dtype, device="cpu")
            if vector.letters[dim] == letter and bool((value.movedim(dim, -1) == counted).all()):
                return SignedSum(((1, Vector(None, (letter,), first)),))
        return SignedSum(((1, vector),))

    # --- values

    def _triangle(self, node: fx.Node, letters: Letters) -> Value:
        """tril(x, k): x where column <= row + k, and zero."""
        x, diagonal, *_ = (*node.args, 0)
        found = self.of(x, letters)  # type: ignore[arg-type]
        if not isinstance(found, Cases) or not isinstance(diagonal, int) or set(letters[-2:]) != {"s", "t"}:
            return None
        is_turned, is_lower = letters[-2] == "t", op_name(node.target) == "tril"
        shift = diagonal - (not is_lower)
        row = self._name(Vector(None, ("s",), -shift if is_turned else shift))
        keep: Condition = Comparison(self._name(Vector(None, ("t",))), ">=" if is_turned else "<=", row)
        keep = keep if is_lower else opposite(keep)
        zero = record(node).type.dtype.is_floating_point and 0.0
        kept = {number: every(condition, keep) for number, condition in found.of}
        kept[zero] = some(kept.get(zero, some()), opposite(keep))
        return Cases(tuple(kept.items()))

    def _by_elements(self, node: fx.Node, letters: Letters) -> Cases | None:
        """What hangs on no input, if where it has each of its numbers is told by how far a key is before its query."""
        shape, lengths = record(node).type.shape, (self.sizes["s"], self.sizes["t"])
        value = self.known.value(node) if axes_of(shape, letters) == {"s", "t"} else None
        if value is None or shape[-2:] != lengths or letters[-2:] != ("s", "t"):
            return None
        value = value.reshape(lengths)
        numbers = value[[0, -1]].unique().tolist()
        far = torch.arange(lengths[0], device="cpu")[:, None] - torch.arange(lengths[1], device="cpu")
        if len(numbers) > FEW or sum(int(value.eq(number).sum()) for number in numbers) < value.numel():
            return None
        bands = {number: _band(value == number, far) for number in numbers}
        last = [number for number, band in bands.items() if band is None]
        places = {number: self._between(band) for number, band in bands.items() if band is not None}
        rest = opposite(some(*places.values()))
        if len(last) > 1:
            return None
        return Cases((*places.items(), *((number, rest) for number in last)))

    def _between(self, band: tuple[int, int]) -> Condition:
        """How far a key is before its query: at least so many places, at most so many."""
        near, far = band
        ends = [(">=", -far)] if far < self.sizes["s"] - 1 else []
        ends += [("<=", -near)] if near > 1 - self.sizes["t"] else []
        column = Vector(None, ("t",))
        return every(*(Comparison(self._name(column), sign, self._name(Vector(None, ("s",), n))) for sign, n in ends))

    def _pointwise(self, node: fx.Node, letters: Letters) -> Value:
        operands = dict.fromkeys(operand_nodes(node))
        values = {one: self.of(one, letters[len(letters) - len(record(one).type.shape) :]) for one in operands}
        if not values or any(value is None for value in values.values()):
            return None
        if all(isinstance(value, Cases) for value in values.values()):
            return _by_cases(node, values)  # type: ignore[arg-type]
        return self._by_lines(node, values)

    def _by_lines(self, node: fx.Node, values: Mapping[fx.Node, Value]) -> Value:
        """Differences of integers, their absolute values, and what compares them."""
        name = op_name(node.target)
        args = [_line(values[arg] if isinstance(arg, fx.Node) else arg) for arg in node.args]
        if None in args or node.kwargs.get("alpha", 1) != 1 or (name != "_to_copy" and len(node.args) > 2):
            return None
        x, *rest = args
        assert x is not None
        if facts_of(node.target).moves == "same":
            return x if record(node).type.dtype in _INTEGERS else None
        if name == "abs":
            return SignedSum(x.terms, x.number, True)
        if not rest or rest[0] is None:
            return None
        if name in SIGNS:
            compared = self._compared(x, SIGNS[name], rest[0])
            return None if compared is None else Cases(((True, compared), (False, opposite(compared))))
        if name in ("add", "sub", "rsub") and not (x.is_magnitude or rest[0].is_magnitude):
            first, second = (rest[0], x) if name == "rsub" else (x, rest[0])
            return _sum(first, second, 1 if name == "add" else -1)
        return None

    def _compared(self, x: SignedSum, sign: str, y: SignedSum) -> Condition | None:
        if y.is_magnitude:
            return None if x.is_magnitude else self._compared(y, _TURNED[sign], x)
        if not x.is_magnitude:
            return self._with_zero(_sum(x, y, -1), sign)
        inner = SignedSum(x.terms, x.number)
        if y.terms or sign in ("==", "!="):
            return None
        ends = self._compared(inner, sign, y), self._compared(inner, _TURNED[sign], SignedSum((), -y.number))
        if ends[0] is None or ends[1] is None:
            return None
        return every(ends[0], ends[1]) if sign.startswith("<") else some(ends[0], ends[1])

    def _with_zero(self, x: SignedSum, sign: str) -> Condition | None:
        """The comparison of a line with zero, as one of a column with a row."""
        rows = [(sign_, vector) for sign_, vector in x.terms if "s" in self._axes(vector)]
        columns = [(sign_, vector) for sign_, vector in x.terms if "t" in self._axes(vector)]
        if len(x.terms) != 2 or len(rows) != 1 or len(columns) != 1 or rows[0][0] + columns[0][0]:
            return None
        (is_plus, row), (_, column) = rows[0], columns[0]
        # row - column + n > 0 is column < row + n; column - row + n > 0 is column > row - n. A column's own shift goes
        # to the row too, so that all positions of keys are one vector.
        sign, shift = (_TURNED[sign], x.number) if is_plus > 0 else (sign, -x.number)
        shift += row.shift - column.shift
        if row.node is None and column.node is None and sign in ("<", ">"):  # one spelling, so that equal ones are seen
            sign, shift = sign + "=", shift - 1 if sign == "<" else shift + 1
        name = self._name(Vector(column.node, column.letters))
        return Comparison(name, sign, self._name(Vector(row.node, row.letters, shift)))


def _band(where: torch.Tensor, far: torch.Tensor) -> tuple[int, int] | None:
    """From how far before its query a key is among those of a mask to how far, if that is all there is to it."""
    found = far[where]
    near, last = int(found.min()), int(found.max())
    return (near, last) if torch.equal(where, (far >= near) & (far <= last)) else None


def _fill(node: fx.Node) -> Any:
    """The number that a tensor has everywhere, if that is how it is made."""
    number, dtype = fill_of(node), record(node).type.dtype
    return torch.tensor(number, dtype=dtype, device="cpu").item() if isinstance(number, (bool, int, float)) else None


def _by_cases(node: fx.Node, values: Mapping[fx.Node, Cases]) -> Value:
    """The op on each combination of its operands' numbers."""
    if math.prod(len(value.of) for value in values.values()) > MOST:
        return None
    found: dict[Any, list[Condition]] = {}
    for combination in itertools.product(*(value.of for value in values.values())):
        condition = every(*(one for _, one in combination))
        if condition == some():
            continue
        number = _computed(node, dict(zip(values, (number for number, _ in combination), strict=True)))
        if number is None or number != number:
            return None
        found.setdefault(number, []).append(condition)
    # What most combinations give is what holds where no other number does: the shortest condition.
    last = max(found, key=lambda number: len(found[number]))
    cases = {number: some(*conditions) for number, conditions in found.items() if number != last}
    cases[last] = opposite(some(*cases.values())) if len(found[last]) > 1 or not cases else found[last][0]
    return Cases(tuple(cases.items()))


def _computed(node: fx.Node, numbers: Mapping[fx.Node, Any]) -> Any:
    """What an op gives for one element."""
    given = {one: torch.tensor(number, dtype=record(one).type.dtype, device="cpu") for one, number in numbers.items()}
    kwargs = {name: value for name, value in node.kwargs.items() if name not in ("device", "layout", "pin_memory")}
    args, kwargs = fx.node.map_arg((node.args, kwargs), given.__getitem__)
    made = node.target(*args, **kwargs)  # type: ignore[operator]
    return made.item() if isinstance(made, torch.Tensor) and made.ndim == 0 else None


def _line(value: Any) -> SignedSum | None:
    """A number or a line as a line."""
    if isinstance(value, Cases) and len(value.of) == 1:
        value = value.of[0][0]
    if isinstance(value, int) and not isinstance(value, bool):
        return SignedSum((), value)
    return value if isinstance(value, SignedSum) else None


def _sum(x: SignedSum, y: SignedSum, sign: int) -> SignedSum:
    return SignedSum((*x.terms, *((sign * one, vector) for one, vector in y.terms)), x.number + sign * y.number)
