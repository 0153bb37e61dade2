"""Decide comparisons of a uniform draw that no draw could decide otherwise: `if torch.rand(1) > p` with p = 0.

Models ask so whether a layer or an adapter is dropped, and most are trained with p = 0. A draw is at least 0 and below
1; that one element is 0 itself, once in 2^32 draws, is left out of account.

`float(draw)` has to be a number of Python's, which tells nobody what is done with it. So the model is run with many, as
with those of Python's own generators (see `foreign.py`), and whatever they are it must compute the same.
"""

from __future__ import annotations

import itertools
import operator
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from autopar.capture.data.known_values import Values
from autopar.capture.refusals.constructs import DRAWN_NUMBER
from autopar.capture.refusals.explain_failure import refusal
from autopar.capture.refusals.location import user_frame
from autopar.ir.ops.op_facts import spellings_of

Tensor = torch.Tensor
Compare = Callable[[Any, Any], Any]
# Each comparison with the one that says the same with its operands exchanged.
_MIRROR: dict[Compare, Compare] = {
    operator.lt: operator.gt, operator.gt: operator.lt, operator.le: operator.ge, operator.ge: operator.le,
}  # fmt: skip
COMPARISONS: dict[Any, Compare] = {
    getattr(owner, form): compare
    for compare in _MIRROR
    for name in spellings_of(compare.__name__)
    for owner, form in ((torch, name), (Tensor, name), (Tensor, f"__{name}__"))
    if hasattr(owner, form)
}

MIDDLE = 0.5  # what `float(draw)` gives in the first run
_LEAST, _MOST = 2.0**-24, 1 - 2.0**-24
_CYCLES = ((_LEAST,), (_MOST,), (_LEAST, _MOST), (_MOST, _LEAST), (0.25,), (0.75,))
_SEEDS = 8


def numbers_drawn() -> Iterator[Callable[[], float]]:
    """Ways to draw: the least number and the largest, both by turns, some in between, and some at random."""
    for cycle in _CYCLES:
        yield itertools.cycle(cycle).__next__
    for seed in range(_SEEDS):
        yield random.Random(seed).random


def decided(values: Values, function: Any, args: Any, number_of: Callable[[Tensor], Any]) -> tuple[Any, bool] | None:
    """The shape of the result of a comparison, and what each of its elements is; None where a draw decides.

    `number_of` gives the value of a tensor that hangs on no input, or NotImplemented.
    """
    if len(args) != 2:
        return None
    compare, (draw, p) = COMPARISONS[function], args
    if not _is_draw(values, draw):
        compare, draw, p = _MIRROR[compare], p, draw
    if not _is_draw(values, draw):
        return None
    shape = draw.shape
    if isinstance(p, Tensor):
        shape, p = torch.broadcast_shapes(shape, p.shape), number_of(p) if p.numel() == 1 else None
    value = _of_every_draw(compare, p, draw.numel()) if type(p) in (int, float) else None
    return None if value is None else (shape, value)


def _is_draw(values: Values, operand: Any) -> bool:
    return isinstance(operand, Tensor) and values.is_draw(operand)


def _of_every_draw(compare: Compare, p: float, count: int) -> bool | None:
    """What `compare(draw, p)` gives whatever is drawn; None if that depends on it."""
    is_above = p < 0 or (p == 0 and (compare is operator.ge or count == 1))
    if is_above:
        return compare in (operator.gt, operator.ge)
    if p == 0 and compare is operator.lt:
        return False
    return compare in (operator.lt, operator.le) if p >= 1 else None


class DrawnNumber:
    """Stands for a draw as a Python number, which may only be compared. decide: the side that a comparison comes up as
    which not every draw decides alike."""

    __slots__ = ("_decide",)

    def __init__(self, decide: Callable[[Compare, float], bool]) -> None:
        self._decide = decide

    def _refuse(self, *_: Any) -> NoReturn:
        raise refusal(DRAWN_NUMBER, user_frame(sys._getframe(1)))

    def _compared(self, compare: Compare, p: Any) -> bool:
        if type(p) not in (int, float):
            return self._refuse()
        value = _of_every_draw(compare, p, 1)
        return self._decide(compare, p) if value is None else value

    def __lt__(self, p: Any) -> bool:
        return self._compared(operator.lt, p)

    def __le__(self, p: Any) -> bool:
        return self._compared(operator.le, p)

    def __gt__(self, p: Any) -> bool:
        return self._compared(operator.gt, p)

    def __ge__(self, p: Any) -> bool:
        return self._compared(operator.ge, p)

    __bool__ = __int__ = __float__ = __index__ = __round__ = __abs__ = __neg__ = __eq__ = __ne__ = _refuse  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = _refuse
    __rpow__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __format__ = __repr__ = __str__ = _refuse  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]
