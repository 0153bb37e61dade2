"""What `.item()` gives while a step is captured: a number that stays a tensor, as long as arithmetic alone uses it.

`torch.clamp(x, min=x.max().item() - 80)` needs no value. Where the model asks for one all the same (an `if`, a size, a
text), or where the number outlives the run (a log), `.item()` is refused as ever. One that is returned leaves the
program as a tensor, and is a number again where the step ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import torch

from autopar.capture.python.left_behind import outlives
from autopar.capture.python.spans import CountSum
from autopar.capture.python.stand_in import Misuse, Scalar
from autopar.capture.refusals.constructs import READS, TOLIST, Construct
from autopar.capture.refusals.explain_failure import read_refusal
from autopar.capture.refusals.location import Line, is_user_code
from autopar.errors import CaptureError
from autopar.torch_compat import FakeTensor

Tensor = torch.Tensor
_TOLIST = frozenset((FakeTensor.tolist.__code__, *FakeTensor.tolist.__code__.co_consts))  # and what it nests
Take = Callable[[Tensor, Line | None, Callable[[Any], Any]], Any]


@dataclass(slots=True)
class _Item(Misuse):
    """The numbers that come of one `.item()`, at a line. made: the list of those of the run."""

    line: Line | None = None
    may_specialize: bool = False
    construct: Construct = READS[Tensor.item]
    made: list[weakref.ref[Scalar]] = field(default_factory=list)
    take: Take | None = None

    def error(self, how: str) -> CaptureError:
        return read_refusal(self.construct, self.line, self.may_specialize, f"The number {how}.")

    def read(self, tensor: Tensor, function: Callable[[Any], Any]) -> Any:
        return NotImplemented if self.take is None else self.take(tensor, self.line, function)

    def drawn(self, tensor: Tensor) -> Any:
        if not self.is_drawn or self.take is None:
            return NotImplemented
        return self.take(tensor, self.line, float if tensor.is_floating_point() else int)

    def watch(self, number: Scalar) -> None:
        self.made.append(weakref.ref(number))


MOST_LISTED = 4096  # numbers of one `.tolist()`: each is an op of the program, and takes milliseconds


def asker(frame: FrameType, line: Line | None) -> tuple[bool, bool]:
    """Whether the user's code asks for a number, and whether by `.tolist()`: that of tensors without data is Python's,
    and asks for each. Raises CaptureError for one of a whole activation, say, which would be captured for hours."""
    own, listed = frame, 0
    while own.f_code in _TOLIST and own.f_back is not None:
        listed = own.f_locals["self"].numel() if "self" in own.f_locals else listed
        own = own.f_back
    if listed > MOST_LISTED:
        raise read_refusal(TOLIST, line, False, f"It is of {listed:,} numbers, of which {MOST_LISTED:,} are taken.")
    return is_user_code(own), own is not frame


@dataclass(slots=True)
class Items:
    """The numbers of a run, none of which is held here: they hold the run, by what gives Python its values."""

    made: list[weakref.ref[Scalar]] = field(default_factory=list)

    def number(
        self, tensor: Tensor, line: Line | None, may_specialize: bool, take: Take | None = None,
        is_listed: bool = False, is_drawn: bool = False,
    ) -> Any:  # fmt: skip
        """What `.item()` of a tensor gives; NotImplemented where Python would have neither a float nor an integer.
        take: gives Python what it wants of a number that random numbers alone decide, or the truth of data. is_listed:
        it is one of a `.tolist()`. is_drawn: random numbers alone decide it."""
        if tensor.numel() != 1 or tensor.is_complex() or tensor.dtype == torch.bool:
            return NotImplemented
        construct = TOLIST if is_listed else READS[Tensor.item]
        item = _Item(
            True, line=line, may_specialize=may_specialize, made=self.made, take=take, construct=construct,
            is_drawn=is_drawn,
        )  # fmt: skip
        wide = torch.float64 if tensor.is_floating_point() else torch.int64
        read = tensor.detach().clone().reshape(()).to(wide)  # the model may write into it later
        return Scalar.of_tensor(read, item)

    def array(self, given: Sequence[tuple[Tensor, CountSum | None]], line: Line | None, take: Take) -> np.ndarray:
        """The numbers of several tensors as numpy has them. given: each with what it is an element of."""
        made = np.empty(len(given), dtype=object)
        for at, (tensor, span) in enumerate(given):
            made[at] = self.number(tensor, line, False, take, True)
            made[at].span = span
        return made

    def close(self) -> None:
        """The run is over. Raises CaptureError for a number that somebody kept."""
        if outlives(lambda: any(number() is not None for number in self.made)):
            first, *_ = [number.close() for number in (each() for each in self.made) if number is not None]
            raise first


def check_returned(loss: Any) -> None:
    """Raise CaptureError for a loss that is a number."""
    if type(loss) is Scalar:
        loss.refuse("is returned as the loss")


def returned(leaves: Iterable[Any]) -> list[Any]:
    """What was returned, with tensors for the numbers among it, which leave the program. Those of Python's own
    arithmetic stay as they are."""
    return [leaf.held() if type(leaf) is Scalar else leaf for leaf in leaves]
