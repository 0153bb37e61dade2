"""Stand in for a numpy array of the batch while the model is traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch

from autopar.torch_compat import FakeTensor


class BatchArray:
    """An array of the batch without its numbers: it has a shape and a dtype, and becomes a tensor by `torch.as_tensor`.

    numpy computes other things than torch by the same names (`std`, `/` of integers), so that nothing else is done to
    it. What is tried raises a TypeError or AttributeError with this class's name, which `explain` knows.
    """

    __slots__ = ("dtype", "tensor")

    def __init__(self, tensor: torch.Tensor, dtype: np.dtype[Any]) -> None:
        self.tensor, self.dtype = tensor, dtype

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # the user's isinstance(x, np.ndarray) is true
        return np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def ndim(self) -> int:
        return self.tensor.ndim

    @property
    def size(self) -> int:
        return self.tensor.numel()

    def __len__(self) -> int:
        return len(self.tensor)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("numpy's functions were called on a BatchArray")

    __array__ = __array_ufunc__ = __array_function__ = __bool__ = __eq__ = __ne__ = _refuse  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


def as_array(tensor: torch.Tensor, dtype: np.dtype[Any]) -> Any:
    """A tensor that stands for an array, as the user's code is given it."""
    has_data = not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"
    return tensor.numpy() if has_data else BatchArray(tensor, dtype)


Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def _cast(array: BatchArray, dtype: torch.dtype | None = None, device: Any = None, copy: bool | None = None) -> Call:
    """A call of `Tensor.to`. All tensors of a step lie on one device."""
    tensor = array.tensor
    return torch.Tensor.to, (tensor, dtype or tensor.dtype), {"copy": bool(copy)}


# The functions that make a tensor of an array, as calls of the same meaning on the tensor in its place. A torch
# function mode sees these; torch.from_numpy it does not.
FROM_ARRAY: Mapping[Any, Callable[..., Call]] = {
    torch.as_tensor: _cast,
    torch.asarray: _cast,
    torch.tensor: lambda array, **options: _cast(array, **options, copy=True),
}
