"""What a trace takes apart, because the parts can be split where the whole could not."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from autopar.torch_compat import decompositions_of

aten = torch.ops.aten


@cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Means become sums over a count, so that a piece's part of them is right on its own; any and all become counts."""
    return {
        # written by torch with views, sums and elementwise ops
        **decompositions_of((
            aten.pixel_shuffle, aten.pixel_unshuffle, aten.channel_shuffle, aten.rot90, aten.trace, aten.block_diag,
            aten.diag_embed, aten.addr, aten.nansum, aten.count_nonzero, aten.dist, aten.narrow_copy,
            aten.linalg_cross, aten.norm, aten._chunk_cat,
        )),
        aten.mean.dim: _mean,
        aten.mean.default: lambda x, *, dtype=None: _mean(x, list(range(x.ndim)), dtype=dtype),
        **dict.fromkeys((aten.any.default, aten.any.dim, aten.any.dims), _any),
        **dict.fromkeys((aten.all.default, aten.all.dim, aten.all.dims), _all),
        aten.addmm.default: _addmm,
        aten.addbmm.default: _addbmm,
        aten.linalg_vector_norm.default: _vector_norm,
        aten._linalg_solve_ex.default: _solve_ex,
        aten._linalg_det.default: _det,
        aten._linalg_slogdet.default: _slogdet,
    }  # fmt: skip


def _mean(x: torch.Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    dims = list(range(x.ndim)) if dim is None or len(dim) == 0 else list(dim)
    count = 1
    for d in dims if x.ndim else ():
        count = operator.mul(count, x.shape[d])
    given = dtype or x.dtype
    if not (given.is_floating_point or given.is_complex):
        raise RuntimeError(f"mean() of {given}: give dtype=torch.float32, or another dtype of floats.")
    if given in (torch.float16, torch.bfloat16):  # as torch's kernel: the sum of many would overflow, or round twice
        return (torch.sum(x, dims, keepdim, dtype=torch.float32) / count).to(given)
    return torch.sum(x, dims, keepdim, dtype=dtype) / count


def _any(x: torch.Tensor, dim: Any = None, keepdim: bool = False) -> torch.Tensor:
    return _as_truth(_count(x if x.dtype is torch.bool else x != 0, dim, keepdim) != 0, x)


def _all(x: torch.Tensor, dim: Any = None, keepdim: bool = False) -> torch.Tensor:
    return _as_truth(_count(~x if x.dtype is torch.bool else x == 0, dim, keepdim) == 0, x)


def _count(x: torch.Tensor, dim: Any, keepdim: bool) -> torch.Tensor:
    dims = list(range(x.ndim)) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return torch.sum(x, dims, keepdim) if dims and x.ndim else x.to(torch.int64)


def _as_truth(truth: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return truth.to(torch.uint8) if x.dtype is torch.uint8 else truth


def _addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    product = torch.mm(a, b)
    product = product if alpha == 1 else product * alpha
    return product + (bias if beta == 1 else bias * beta)


def _addbmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    product = torch.bmm(a, b).sum(0)
    return (product if alpha == 1 else product * alpha) + (bias if beta == 1 else bias * beta)


def _vector_norm(
    x: torch.Tensor, order: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """The length of all of a tensor by a sum of squares, of which each rank has its part."""
    is_all = dim is None or len(set(dim)) in (0, x.ndim)
    if order != 2 or not is_all or x.ndim == 0 or x.dtype not in (torch.float32, torch.float64) or dtype is not None:
        return NotImplemented
    return (x * x).sum(list(range(x.ndim)), keepdim).sqrt()


def _solve_ex(a: torch.Tensor, b: torch.Tensor, *, left: bool = True, check_errors: bool = False) -> Any:
    """Solve as torch does: a matrix is factored once, and the columns are solved apart."""
    is_vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])
    lu, pivots, info = aten.linalg_lu_factor_ex(a, check_errors=check_errors)
    x = aten.linalg_lu_solve(lu, pivots, b.unsqueeze(-1) if is_vector else b, left=left)
    return (x.squeeze(-1) if is_vector else x), lu, pivots, info


def _factors(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors that torch keeps for the gradient of a determinant: of the transposed matrix where it lies in memory
    row by row. A rank's part may lie otherwise than the whole did when it was traced, so the program says which."""
    turned = a.is_contiguous() and not a.is_complex()
    lu, pivots, _ = aten.linalg_lu_factor_ex(a.mT if turned else a)
    return lu, pivots


def _det(a: torch.Tensor) -> Any:
    lu, pivots = _factors(a)
    return lu.diagonal(0, -2, -1).prod(-1) * _parity(pivots, a), lu, pivots


def _slogdet(a: torch.Tensor) -> Any:
    lu, pivots = _factors(a)
    diagonal = lu.diagonal(0, -2, -1)
    sign = diagonal.sgn().prod(-1) * _parity(pivots, a)
    return sign, diagonal.abs().log().sum(-1), lu, pivots


def _parity(pivots: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """1 for an even number of exchanged rows, -1 for an odd one."""
    places = torch.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype, device=pivots.device)
    return (1 - 2 * ((pivots != places).sum(-1) % 2)).to(like.dtype)
