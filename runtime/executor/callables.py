"""What the executor calls for a graph target.

Tables. They are data about ATen, each row checked by a test against the op that it stands for.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from autopar.ir.ops.ops import is_mesh_op
from autopar.runtime.executor.kernel_table import KERNELS
from autopar.runtime.kernels.direct import direct_function
from autopar.runtime.kernels.kernel import Function

_aten = torch.ops.aten

# Ops that may write their result over an operand that nothing uses again: op -> (which operand, how).
# The executor does so only if that operand has the type and layout of the result.
_INPLACE: Mapping[Any, tuple[tuple[int, Function], ...]] = MappingProxyType(
    {
        _aten.add.Tensor: ((0, torch.Tensor.add_), (1, lambda a, b: b.add_(a))),
        _aten.sub.Tensor: ((0, torch.Tensor.sub_),),
        _aten.mul.Tensor: ((0, torch.Tensor.mul_), (1, lambda a, b: b.mul_(a))),
        _aten.div.Tensor: ((0, torch.Tensor.div_),),
        _aten.neg.default: ((0, torch.Tensor.neg_),),
        _aten.exp.default: ((0, torch.Tensor.exp_),),
        _aten.sqrt.default: ((0, torch.Tensor.sqrt_),),
        _aten.rsqrt.default: ((0, torch.Tensor.rsqrt_),),
        _aten.tanh.default: ((0, torch.Tensor.tanh_),),
        _aten.sigmoid.default: ((0, torch.Tensor.sigmoid_),),
        _aten.relu.default: ((0, torch.Tensor.relu_),),
    }
)


def _add_cast(total: torch.Tensor, x: torch.Tensor, **_: Any) -> torch.Tensor:
    """`total += x`, in the dtype of `total`, which a cast made."""
    return total.add_(x if torch.can_cast(x.dtype, total.dtype) else x.to(total.dtype))


# Ops that can add their result to a tensor instead of making one: op -> function of the tensor and the op's arguments.
# The tensor is one that the op made. A gradient is summed over the micro-batches without ever being written alone.
_ADDING: Mapping[Any, Function] = MappingProxyType(
    {
        _aten._to_copy.default: _add_cast,
    }
)


def function_of(target: Any) -> Function:
    """The fastest callable that does what `target` does, for operands of any strides."""
    assert not is_mesh_op(target), target
    return KERNELS[target].run if target in KERNELS else direct_function(target)


def inplace_variants(target: Any) -> tuple[tuple[int, Function], ...]:
    """(operand that is overwritten, callable) pairs."""
    return KERNELS[target].in_place if target in KERNELS else _INPLACE.get(target, ())


def adding_variant(target: Any) -> Function | None:
    """A callable that adds what `target` makes to its first argument, and returns that."""
    return KERNELS[target].adding if target in KERNELS else _ADDING.get(target)
