"""`autopar::checked_index`: what makes a wrong token id or label an error, whatever the layout of the table; and
`autopar::checked_values`, which does so for probabilities.

The lookups themselves cannot tell: each rank holds some rows, and an index that none of them holds would read zeros.
Nor can a comparison of a draw with what is no probability.
"""

from __future__ import annotations

import torch

from autopar.errors import BatchError
from autopar.runtime.kernels import host
from autopar.runtime.kernels.kernel import Kernel
from autopar.torch_compat import assert_async


def checked_index(index: torch.Tensor, size: int, ignored: int | None, least: int = 0) -> torch.Tensor:
    """The index itself. Raises BatchError if a value is neither in least..size-1 nor `ignored`.

    Off the CPU an answer would wait for the device at every step: the device itself asserts it, as torch's own lookups
    do, and whatever is read next raises its error.
    """
    if index.numel() == 0:
        return index
    if not host.on_host(index):
        inside = _inside(index, size, ignored, least)
        assert_async(inside.all(), f"an index is out of range: the table has {size} entries")
        return index
    low, high = (int(bound) for bound in torch.aminmax(index))
    if low >= least and high < size:
        return index
    outside = ~_inside(index, size, ignored, least)
    if not outside.any():
        return index
    value = int(index[outside].flatten()[0])
    also = "" if ignored is None else f", or {ignored}, which is ignored"
    raise BatchError(
        f"index {value} is out of range: the table has {size} entries, so an index is {least} to {size - 1}{also}. "
        f"Correct the token ids, labels or places, or enlarge the table."
    )


def _inside(index: torch.Tensor, size: int, ignored: int | None, least: int) -> torch.Tensor:
    inside = (index >= least) & (index < size)
    return inside if ignored is None else inside | (index == ignored)


def checked_values(x: torch.Tensor, least: float, most: float, reader: str) -> torch.Tensor:
    """The tensor itself. Raises BatchError if a value is not in least..most, or is no number; reader: who wants it."""
    if x.numel() == 0:
        return x
    if not host.on_host(x):
        assert_async(((x >= least) & (x <= most)).all(), f"{reader}: a value is out of range")
        return x
    low, high = (float(bound) for bound in torch.aminmax(x))
    if low >= least and high <= most:  # False of nan, which aminmax gives where there is one
        return x
    value = float(x[~((x >= least) & (x <= most))].flatten()[0])
    raise BatchError(f"{reader}: {value:g} is not. It is computed by the step, from the batch or the weights.")


# Opaque to a compiler: they are errors and no values. `runtime/compilers/rank_trace.py` says where they stand.
KERNELS = {"checked_index": Kernel(checked_index), "checked_values": Kernel(checked_values)}
