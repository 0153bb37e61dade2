"""Which ops a generated kernel can compute, and how: what `fuse` may group and `runtime/triton` can emit.

A group has one domain: rows and columns, where a row is a run of `width` consecutive elements of the values that its
row and column ops read (all the same number of rows and columns, at the same places), or the last dim of its results if
it has none. Then

- a result of the group has one element for each of the domain (in the order of its own dims), one for each row, or, if
  a column op made it, one for each column; or it is a view of such a result;
- between a row or column op and the others of a group, views keep rows: they may move columns within a row, add or drop
  dims of size 1, broadcast, split or merge dims, but not permute rows. Groups without row and column ops may permute;
- what a column op made is read in the group by views and casts only;
- an operand that is a number (an offset that depends on the rank) is read by the draws, and by `pick` and its kin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import fx

from autopar.ir.mesh import Mesh
from autopar.ir.ops.measure import local_type, local_types
from autopar.ir.ops.op_facts import argument_of
from autopar.ir.ops.ops import op
from autopar.ir.program import TensorType, is_getitem, operand_nodes, record

Kind = Literal["point", "row", "column", "view", "draw"]
_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Fusible:
    """How a call may be fused.

    kind: "point" reads of each operand the element that broadcasting says; "row" reads whole rows of `width` elements;
    "column" sums over all rows of `width` elements; "view" moves elements; "draw" makes random numbers from the place
    of an element in the whole. columns: the results that are sums over all rows (of "row" ops too). width: 0 for the
    kinds that read no rows.
    """

    kind: Kind
    columns: tuple[int, ...] = ()
    width: int = 0


_How = Callable[[fx.Node, TensorType], "Fusible | None"]
DTYPES = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.int64, torch.int32, torch.int16,
     torch.int8, torch.uint8)
)  # fmt: skip
# Not in the table: sines and cosines. Those of rotary positions are few, and a group would compute them for every head;
# a GPU needs memory for large arguments.
POWERS = (-2, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4)  # exponents that need no logarithm


def fusible(node: fx.Node, mesh: Mesh) -> Fusible | None:
    """How a call of a LOCAL graph may be fused; None if no kernel is generated for it. Projections are views."""
    if is_getitem(node):
        source = node.args[0]
        return Fusible("view") if isinstance(source, fx.Node) and fusible(source, mesh) else None
    how = _TABLE.get(node.target)
    if how is None or not _has_known_dtypes(node, mesh) or not _has_plain_numbers(node):
        return None
    return how if isinstance(how, Fusible) else how(node, _first(node, mesh))


def _first(node: fx.Node, mesh: Mesh) -> TensorType:
    """The local type of what a call reads: for most ops the first operand."""
    return local_type(operand_nodes(node)[0], mesh)


def _has_known_dtypes(node: fx.Node, mesh: Mesh) -> bool:
    types = [local_type(operand, mesh) for operand in operand_nodes(node)]
    return all(type_.dtype in DTYPES for type_ in (*types, *local_types(node, mesh)))


def _has_plain_numbers(node: fx.Node) -> bool:
    """Numbers that depend on the rank are read as offsets only."""
    operands = set(operand_nodes(node))
    numbers = [operand for operand in node.all_input_nodes if operand not in operands]
    return not numbers or node.target in _OFFSETS


def _dims(dims: Any, rank: int) -> list[int]:
    """Dims counted from 0, in order; all for None and an empty list."""
    given = [dims] if isinstance(dims, int) else list(dims or range(rank))
    return sorted(dim % max(rank, 1) for dim in given)


def _last_dim(node: fx.Node, type_: TensorType) -> Fusible | None:
    """Reads rows of the last dim: the one that is named, or that of an op which names none."""
    rank, dim = len(type_.shape), argument_of(node, "dim")
    if not rank or dim not in (None, -1, rank - 1):
        return None
    return Fusible("row", width=type_.shape[-1])


def _reduction(sums: bool) -> _How:
    """Over the last dims a row op; over all but these a column op, for a sum. So is that of all elements, whose columns
    are added up at the end."""

    def how(node: fx.Node, type_: TensorType) -> Fusible | None:
        rank = len(type_.shape)
        dims = _dims(argument_of(node, "dim"), rank)
        if not rank:
            return None
        if sums and len(dims) == rank:
            return Fusible("column", columns=(0,), width=type_.shape[-1])
        if dims == list(range(rank - len(dims), rank)) and len(dims) < rank:
            return Fusible("row", width=math.prod(type_.shape[rank - len(dims) :]))
        if sums and dims == list(range(len(dims))) and len(dims) < rank:
            return Fusible("column", columns=(0,), width=math.prod(type_.shape[len(dims) :]))
        return None

    return how


def _norm(columns: Sequence[int], shape_of: Callable[[fx.Node], Sequence[int]]) -> _How:
    """A norm over the dims of its weight; `columns` are the gradients of the weight and the bias."""

    def how(node: fx.Node, type_: TensorType) -> Fusible | None:
        shape = tuple(shape_of(node))
        width = math.prod(shape)
        if not shape or len(shape) >= len(type_.shape) or type_.shape[-len(shape) :] != shape:
            return None
        return Fusible("row", tuple(columns), width)

    return how


def _weight_shape(place: int) -> Callable[[fx.Node], Sequence[int]]:
    def shape(node: fx.Node) -> Sequence[int]:
        weight = node.args[place]
        assert isinstance(weight, fx.Node)
        return record(weight).type.shape  # a norm's dims are whole on every rank

    return shape


def _layer_norm_backward(node: fx.Node, type_: TensorType) -> Fusible | None:
    mask: Any = node.args[7]
    columns = [place for place in (1, 2) if mask[place]]
    return _norm(columns, lambda node: node.args[2])(node, type_) if mask[0] else None  # type: ignore[arg-type,return-value]


def _plain_cast(node: fx.Node, type_: TensorType) -> Fusible | None:
    return Fusible("point") if set(node.kwargs) <= {"dtype", "memory_format"} else None


def _power(node: fx.Node, type_: TensorType) -> Fusible | None:
    return Fusible("point") if node.args[1] in POWERS and type_.dtype.is_floating_point else None


def _of_floats(node: fx.Node, type_: TensorType) -> Fusible | None:
    return Fusible("point") if type_.dtype.is_floating_point else None


def _sum_of_all(node: fx.Node, type_: TensorType) -> Fusible | None:
    if node.kwargs or not type_.shape:
        return None
    return Fusible("column", columns=(0,), width=type_.shape[-1])


def _each_loss(node: fx.Node, type_: TensorType) -> Fusible | None:
    """A loss of each element, of which nothing is summed."""
    return Fusible("point") if argument_of(node, "reduction") == 0 else None


def _of_bools(node: fx.Node, type_: TensorType) -> Fusible | None:
    return Fusible("point") if type_.dtype == torch.bool else None


def _step_of_one(node: fx.Node, type_: TensorType) -> Fusible | None:
    return Fusible("view") if argument_of(node, "step") == 1 else None


def _uniform(node: fx.Node, type_: TensorType) -> Fusible | None:
    # a normal or an exponential draw takes a logarithm, whose last bits Triton has otherwise than torch: these stay
    # calls, so that a number is the same wherever it is drawn
    return Fusible("draw") if node.args[2] == "uniform" else None


def _dropped(node: fx.Node, type_: TensorType) -> Fusible | None:
    return Fusible("draw") if type_.dtype.is_floating_point else None


_POINT, _VIEW = Fusible("point"), Fusible("view")
_OFFSETS = frozenset(op(name) for name in ("pick", "pick_backward", "cross_entropy_backward", "dropout", "random"))

_POINTS = (
    _aten.add.Tensor, _aten.add.Scalar, _aten.sub.Tensor, _aten.sub.Scalar, _aten.rsub.Scalar, _aten.mul.Tensor,
    _aten.mul.Scalar, _aten.neg.default, _aten.abs.default, _aten.relu.default, _aten.threshold_backward.default,
    _aten.minimum.default, _aten.maximum.default, _aten.clamp.default, _aten.clamp_min.default,
    _aten.clamp_max.default, _aten.where.self, _aten.where.ScalarOther, _aten.where.ScalarSelf,
    _aten.masked_fill.Scalar, _aten.masked_fill.Tensor, _aten.logical_not.default, _aten.logical_and.default,
    _aten.logical_or.default, _aten.full.default, _aten.zeros.default, _aten.ones.default, _aten.clone.default,
    _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default,
    _aten.scalar_tensor.default, _aten.div.Tensor, _aten.div.Scalar,
    *(
        getattr(getattr(_aten, name), of)
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
        for of in ("Scalar", "Tensor")
    ),
    op("cross_entropy_backward"), op("pick_backward"),
)  # fmt: skip
_OF_FLOATS = (
    _aten.exp.default, _aten.log.default, _aten.sqrt.default, _aten.rsqrt.default, _aten.reciprocal.default,
    _aten.sigmoid.default, _aten.tanh.default, _aten.gelu.default, _aten.silu.default, _aten.erf.default,
    _aten.gelu_backward.default, _aten.silu_backward.default, _aten.tanh_backward.default,
    _aten.sigmoid_backward.default, _aten.leaky_relu.default,
    _aten.leaky_relu_backward.default, _aten.softplus.default, _aten.softplus_backward.default, _aten.elu.default,
    _aten.hardtanh.default, _aten.hardtanh_backward.default, _aten.hardsigmoid.default,
    _aten.hardsigmoid_backward.default, _aten.hardswish.default, _aten.hardswish_backward.default, _aten.log1p.default,
    _aten.expm1.default, _aten.exp2.default,
)  # fmt: skip
_VIEWS = (
    _aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten.permute.default, _aten.transpose.int,
    _aten.t.default, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.expand.default,
    _aten.select.int, _aten.cat.default, _aten.stack.default, _aten.split.Tensor, _aten.split_with_sizes.default,
    _aten.select_backward.default, _aten.constant_pad_nd.default, _aten.flip.default, _aten.alias.default,
    _aten.detach.default,
)  # fmt: skip

_TABLE: Mapping[Any, Fusible | _How] = MappingProxyType(
    {
        **dict.fromkeys(_POINTS, _POINT),
        **dict.fromkeys(_OF_FLOATS, _of_floats),
        **dict.fromkeys(_VIEWS, _VIEW),
        **dict.fromkeys(
            (_aten.bitwise_not.default, _aten.bitwise_and.Tensor, _aten.bitwise_or.Tensor, _aten.bitwise_xor.Tensor),
            _of_bools,
        ),
        _aten._to_copy.default: _plain_cast,
        _aten.mse_loss.default: _each_loss,
        _aten.mse_loss_backward.default: _each_loss,
        _aten.pow.Tensor_Scalar: _power,
        _aten.slice.Tensor: _step_of_one,
        _aten.slice_backward.default: _step_of_one,
        _aten.sum.dim_IntList: _reduction(sums=True),
        _aten.sum.default: _sum_of_all,
        _aten.mean.dim: _reduction(sums=False),
        _aten.amax.default: _reduction(sums=False),
        _aten.amin.default: _reduction(sums=False),
        _aten._softmax.default: _last_dim,
        _aten._log_softmax.default: _last_dim,
        _aten._softmax_backward_data.default: _last_dim,
        _aten._log_softmax_backward_data.default: _last_dim,
        op("logsumexp"): _last_dim,
        op("pick"): _last_dim,
        op("rms_norm"): _norm((), _weight_shape(1)),
        op("rms_norm_backward"): _norm((1,), _weight_shape(2)),
        _aten.native_layer_norm.default: _norm((), lambda node: node.args[1]),  # type: ignore[arg-type,return-value]
        _aten.native_layer_norm_backward.default: _layer_norm_backward,
        op("dropout"): _dropped,
        op("random"): _uniform,
    }
)
