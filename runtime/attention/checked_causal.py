"""`autopar::checked_causal`: a mask of the batch that shows a query what lies behind it is an error.

Slices of a sequence are computed in order, so that keys behind a slice are not there. What a mask hides, whose vectors
or elements come with the batch, only the batch tells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from autopar.errors import BatchError
from autopar.ir.comparisons import HIDING
from autopar.runtime.attention.blocks import RowRuns, Tensor
from autopar.runtime.attention.compared_blocks import ComparedCall, Mask, decided, undecided
from autopar.runtime.kernels import host
from autopar.runtime.kernels.kernel import Kernel
from autopar.torch_compat import assert_async

_ROWS = 256  # of a mask that are looked at together
_WHY = "but slices compute a sequence in order, so that what lies behind is not there. Give a causal mask, or slices=1"


def checked_causal(
    x: Tensor, rows: Sequence[Tensor], columns: Sequence[Tensor], compare: str, *, starts: Sequence[int] = ()
) -> Tensor:
    """x in memory of its own. Raises BatchError if a query sees a key after its own position; off the CPU the device
    asserts it (see `checked_index`)."""
    of_vectors = _by_vectors(x, ComparedCall(rows, columns, compare, False, 0.0, starts)) if rows else None
    for start, first, seen in _by_elements(x, starts) if of_vectors is None else of_vectors:
        if not host.on_host(x):
            assert_async(~seen.any(), f"a mask lets a query see a later key, {_WHY}")
        elif seen.any():
            sample, _, row, key = seen.nonzero()[0].tolist()
            raise BatchError(
                f"in sample {start + sample} of those here the mask lets the query at position {first + row} see the "
                f"key at position {key}, {_WHY}."
            )
    return x.clone(memory_format=torch.contiguous_format)


def _by_vectors(x: Tensor, call: ComparedCall) -> Iterator[tuple[int, int, Tensor]]:
    """Find which later keys queries see, some at a time: first sample, position of the first query, keys."""
    count = max(column.shape[-1] for column in call.columns)
    mask = Mask.within(x.shape[2], count, call, ">", x.device)
    for block in mask.blocks(x, decided if host.on_host(x) else undecided):
        keys = torch.zeros(count, dtype=torch.bool, device=x.device)
        for one in block.keys:
            keys[one] = True
        seen = mask.part(block.sample, block.rows, [slice(0, count)]) & keys
        yield block.sample or 0, _first(mask.runs, block.rows), seen


def _first(runs: RowRuns, rows: slice) -> int:
    return next(first + rows.start - run.start for run, first in runs.places() if run.start <= rows.start < run.stop)


def _by_elements(mask: Tensor, starts: Sequence[int]) -> Iterator[tuple[int, int, Tensor]]:
    """Find them in a mask that is a tensor; a row of numbers that hides all keys alike sees the later ones."""
    keys = torch.arange(mask.shape[3], device=mask.device)
    for run, first in RowRuns.of(starts, mask.shape[2]).places():
        for at in range(run.start, run.stop, _ROWS):
            part = mask[:, :, at : min(at + _ROWS, run.stop)]
            place = first + at - run.start
            seen = part
            if mask.dtype != torch.bool:
                sees_none = (part <= HIDING).all(-1, keepdim=True)
                seen = torch.where(sees_none, part > -torch.inf, part > HIDING)
            yield 0, place, seen & (keys > torch.arange(place, place + part.shape[2], device=mask.device)[:, None])


# Opaque to a compiler: it is an error and no value.
KERNELS = {"checked_causal": Kernel(checked_causal)}
