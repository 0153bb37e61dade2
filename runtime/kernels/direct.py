"""How ops of torch are called: past the dispatcher where that is the same, with operands as their kernels read them.

Tables. They are data about ATen, each row checked by a test against the op that it stands for.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from autopar.runtime.kernels.kernel import Function
from autopar.torch_compat import OpOverload

_aten = torch.ops.aten

# torch's own bindings parse arguments about 1 us faster than an OpOverload, and do the same.
# `view` becomes `reshape`: where a kernel's strides differ from those of its Meta kernel it copies instead of failing.
_DIRECT: Mapping[Any, Function] = MappingProxyType(
    {
        _aten.view.default: torch.reshape,
        _aten._unsafe_view.default: torch.reshape,
        _aten.reshape.default: torch.reshape,
        _aten.permute.default: torch.permute,
        _aten.transpose.int: torch.transpose,
        _aten.t.default: torch.t,
        _aten.unsqueeze.default: torch.unsqueeze,
        _aten.squeeze.dim: torch.squeeze,
        _aten.select.int: torch.select,
        _aten.expand.default: torch.Tensor.expand,
        _aten.cat.default: torch.cat,
        _aten.add.Tensor: torch.add,
        _aten.sub.Tensor: torch.sub,
        _aten.mul.Tensor: torch.mul,
        _aten.div.Tensor: torch.div,
        _aten.neg.default: torch.neg,
        _aten.exp.default: torch.exp,
        _aten.log.default: torch.log,
        _aten.sqrt.default: torch.sqrt,
        _aten.rsqrt.default: torch.rsqrt,
        _aten.tanh.default: torch.tanh,
        _aten.sigmoid.default: torch.sigmoid,
        _aten.relu.default: torch.relu,
        _aten.mm.default: torch.mm,
        _aten.bmm.default: torch.bmm,
        _aten.where.self: torch.where,
    }
)

# Ops that may write their result over an operand that nothing uses again: op -> (which operand, how).
# The executor does so only if that operand has the type and layout of the result.
IN_PLACE: Mapping[Any, tuple[tuple[int, Function], ...]] = MappingProxyType(
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
ADDING: Mapping[Any, Function] = MappingProxyType(
    {
        _aten._to_copy.default: _add_cast,
    }
)

# Kernels that read their operands as if they were contiguous, or refuse others. Eager autograd makes them so before
# the call; a graph of values has no such call, and a piece of a value is seldom contiguous.
_CONTIGUOUS: frozenset[Any] = frozenset(
    {
        _aten.native_layer_norm_backward.default,
        _aten.native_group_norm.default,
        _aten.native_group_norm_backward.default,
        _aten._weight_norm_interface.default,
        _aten._weight_norm_interface_backward.default,
        _aten.nll_loss2d_backward.default,
        _aten._grouped_mm.default,
        _aten.view_as_complex.default,
        _aten.adaptive_max_pool3d_backward.default,
        _aten.fractional_max_pool2d_backward.default,
        _aten.fractional_max_pool3d_backward.default,
        _aten.linalg_matrix_exp.default,
        _aten.as_strided.default,
        _aten.as_strided_copy.default,
        _aten.as_strided_scatter.default,
        _aten._embedding_bag.default,
        _aten._embedding_bag_forward_only.default,
        _aten._embedding_bag_backward.default,
        _aten._embedding_bag_dense_backward.default,
        _aten._embedding_bag_sparse_backward.default,
        _aten._embedding_bag_per_sample_weights_backward.default,
    }
)


def direct_function(target: Any) -> Function:
    """The fastest callable that does what an op does, for operands of any strides, of torch's or by its dispatcher."""
    if is_on_contiguous(target):
        return on_contiguous(target)
    return _DIRECT.get(target, target)


def is_on_contiguous(target: Any) -> bool:
    """True for an op of which the operands are made contiguous before."""
    return target in _CONTIGUOUS or _is_foreign(target)


def _is_foreign(target: Any) -> bool:
    """True for a custom op: many kernels are written for contiguous operands, and few say so."""
    return isinstance(target, OpOverload) and target.namespace not in ("aten", "autopar", "prims")


def on_contiguous(function: Function) -> Function:
    """A function that is given contiguous operands."""

    def contiguous(value: Any) -> Any:
        return value.contiguous() if isinstance(value, torch.Tensor) else value

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(contiguous, args), **{key: contiguous(value) for key, value in kwargs.items()})

    return call
