"""Facts of the data that raised functions ask for: where they hold, more can be split.

Reading a fact needs no permission: where it does not hold, the program is right for any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from autopar.capture.batch_forms import BatchForms
from autopar.capture.data.known_values import ABSENT, STEADY, Values
from autopar.capture.data.reads import FULL_LENGTH, OWN_ROWS, Reads
from autopar.capture.inputs.containers import Parts
from autopar.capture.python.ran import Ran
from autopar.capture.refusals.constructs import LENGTH, SIZES, STRIDES_OF_BATCH
from autopar.capture.refusals.explain_failure import refusal, size_refusal
from autopar.capture.refusals.location import Line, Locator
from autopar.capture.rows.row_sides import Turns
from autopar.capture.rows.selected import Selected
from autopar.capture.trace.computed_views import STRIDED
from autopar.torch_compat import PACK_PADDED

Tensor = torch.Tensor


class DataFacts:
    """Answers what raised functions ask in one run. line: the one that asks. is_users: code of the user's does.
    sample_counts: that a batch may have. forms: what the tensors of the batch are beside their values."""

    def __init__(self, known: Values, selected: Selected, reads: Reads | None, locator: Locator | None) -> None:
        self._known, self._selected, self._reads, self._locator = known, selected, reads, locator
        self._permitted = reads if reads is not None and reads.is_permitted else None
        self._held = dict[Line | None, bool]()  # what held, by line
        self.line: Line | None = None
        self.is_users = False  # the frame itself would keep what the user has there
        self.sample_counts: tuple[int, ...] = ()
        self.forms: BatchForms | None = None

    def begin(self, parts: Parts, stand_ins: Sequence[Any], ran: Ran) -> None:
        """Know the batch of a run, and what stands for its leaves. ran: as of `BatchForms`."""
        self.sample_counts = tuple({tensor.shape[0]: None for _, tensor in parts.tensors() if tensor.ndim})
        self.forms = BatchForms(stand_ins, parts.leaves, ran)

    def holds(self, fact: Callable[[], Tensor], source: Tensor, name: str = OWN_ROWS) -> bool:
        """True if a fact holds for the example batch, and each step is to check it: where nothing that a step changes
        is behind `source`. What is computed again in the backward pass is what it was."""
        if self._locator is None or self._locator.phase != "forward":
            return self._held.get(self.line, False)
        kinds = self._known.operands(source, None).kinds
        if self._reads is None or not self._reads.asks or kinds & ~(STEADY | ABSENT):
            return False
        self._held[self.line] = is_so = self._reads.holds(name, fact(), self.line, not kinds & ABSENT)
        return is_so

    def turned(self, function: Any, args: Any, kwargs: Any, line: Line | None) -> Any:
        """What a call gives in a loop through the places of a mask; None for another call."""
        if function in STRIDED and self.forms is not None and not self.forms.reads_memory(*args, **kwargs):
            raise refusal(STRIDES_OF_BATCH, line)
        found = self._selected.order.taken(function, args)
        return self._turns(function, args, line) if found is None else found

    def _turns(self, function: Any, args: Any, line: Line | None) -> Iterable[Any] | None:
        """The places of a mask that Python goes through: all, one after the other; or those that each step is checked
        to have, where the model counts them."""
        mask = self._selected.order.mask_of(function, args)
        if mask is None or self._reads is None or (self._reads.counts and not self._selected.order.is_forward):
            return None
        shape, device = args[0].shape[1:], args[0].device

        def of(place: int) -> Any:
            if function is Tensor.tolist:
                return [place] if shape else place
            return self._known.constant(partial(torch.full, shape, place, device=device))

        if self._reads.counts:
            return [of(place) for place in self._reads.guard_places(mask, line)]
        return Turns(self._selected.order.turns(mask, of))

    def are_rows(self, data: Tensor, valid: Tensor) -> Tensor:
        """Note rows, of which those count where `valid` is True."""
        return self._selected.enter(data, valid, PACK_PADDED, self.line)

    def rows_of(self, data: Tensor, valid: Tensor) -> Tensor:
        """All those rows."""
        rows = self._selected.all_rows(data, valid)
        if rows is None:
            raise refusal(SIZES[PACK_PADDED], self.line)
        return rows

    def longest(self, lengths: Tensor, most: int) -> int:
        """The length of the longest sequence of a batch, padded to `most`."""
        before = self._known.operands(lengths, None)
        found = self._known.answer(_longest, (lengths,), {}, before)
        if found is not NotImplemented:
            return int(found)
        if self.holds(lambda: lengths.max() == most, lengths, FULL_LENGTH):
            return most
        if self._permitted is None or before.kinds & ~STEADY:
            raise size_refusal(LENGTH, self.line, not before.kinds & ~STEADY)
        length = self._permitted.take(Tensor.__int__, lengths.max(), self.line)
        assert isinstance(length, int)
        return length

    def constant(self, make: Callable[[], Tensor]) -> Tensor:
        """A tensor that is made of no input."""
        return self._known.constant(make)


def _longest(lengths: Tensor) -> int:
    return int(lengths.max())
