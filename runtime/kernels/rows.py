"""`autopar::index_of_rows` and `index_put_of_rows`: lookups in which every row has an index of its own."""

from __future__ import annotations

import torch

from autopar.ir.ops.ops import Indices, row_indices
from autopar.runtime.kernels.kernel import Kernel

aten = torch.ops.aten


def index_of_rows(x: torch.Tensor, indices: Indices, rows: list[int]) -> torch.Tensor:
    """x[0..n-1, indices], with as many rows as this rank holds."""
    index: torch.Tensor = aten.index.Tensor(x, row_indices(x, indices, rows))
    return index


def index_put_of_rows(
    x: torch.Tensor, indices: Indices, rows: list[int], values: torch.Tensor, accumulate: bool
) -> torch.Tensor:
    """x with values at [0..n-1, indices], or added there."""
    made: torch.Tensor = aten.index_put.default(x, row_indices(x, indices, rows), values, accumulate)
    return made


KERNELS = {
    "index_of_rows": Kernel(index_of_rows, traced=index_of_rows),
    # Opaque to a compiler: Inductor would add values up by atomics, in any order.
    "index_put_of_rows": Kernel(index_put_of_rows),
}
