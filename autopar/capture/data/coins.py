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
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autopar.capture.data.known_values import Values
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
