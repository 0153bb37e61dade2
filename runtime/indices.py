"""`autopar::checked_index`: what makes a wrong token id or label an error, whatever the layout of the table.

The lookups themselves cannot tell: each rank holds some rows, and an index that none of them holds would read zeros.
"""

from __future__ import annotations

import torch

from autopar.errors import BatchError
from autopar.runtime.kernel import Kernel


def checked_index(index: torch.Tensor, size: int, ignored: int | None) -> torch.Tensor:
    """The index itself. Raises BatchError if a value is neither in 0..size-1 nor `ignored`.

    Off the CPU the question would wait for the device at every step: nothing is checked there.
    """
    if index.device.type != "cpu" or index.numel() == 0:
        return index
    low, high = (int(bound) for bound in torch.aminmax(index))
    if low >= 0 and high < size:
        return index
    outside = (index < 0) | (index >= size)
    if ignored is not None:
        outside &= index != ignored
    if not outside.any():
        return index
    value = int(index[outside].flatten()[0])
    also = "" if ignored is None else f", or {ignored}, which is ignored"
    raise BatchError(
        f"index {value} is out of range: the table has {size} entries, so an index is 0 to {size - 1}{also}. "
        f"Correct the token ids or labels, or enlarge the table."
    )


# Opaque to a compiler: it is an error and no value. `runtime/decompositions.py` says where it stands.
KERNELS = {"checked_index": Kernel(checked_index)}
