"""Which ops return memory of their own, and which show that of their operand: read from the schemas of torch.

A schema marks results that lie in the memory of an operand (`Tensor(a)`). What a schema cannot be taken at its word for
is listed here, with the reason; tests/ir/test_aliasing.py compares every answer with what the op does.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from autopar.ir.ops.fused import Fused
from autopar.ir.ops.ops import is_collective, is_mesh_op, op, op_name, semantic_of
from autopar.torch_compat import OpOverload, is_composite, schema_of

# Views by what they do, though their schemas say "Tensor": base names of aten ops.
_UNMARKED_VIEWS: Mapping[str, str] = MappingProxyType(
    {
        "_unsafe_view": "a view that autograd may take for a copy, since nobody writes to its operand",
        "unsafe_split": "as _unsafe_view",
        "unsafe_split_with_sizes": "as _unsafe_view",
    }
)

# Ops that may return an operand as it is, though their schemas say "Tensor".
_UNCHECKED = (
    "torch leaves it out when it compares ops with their schemas, as one that may return an operand "
    "(DONT_ENFORCE_STORAGE_IMPL_USE_COUNT in its tools/autograd/gen_variable_type.py)"
)
_MAY_RETURN_OPERAND: Mapping[str, str] = MappingProxyType(
    {
        "lift": "returns its operand outside of functorch",
        **dict.fromkeys(
            ("channel_shuffle", "lu_unpack", "_embedding_bag", "_embedding_bag_forward_only", "_slow_conv2d_forward",
             "slow_conv3d_forward", "_cudnn_rnn", "_cudnn_rnn_backward"),
            _UNCHECKED,
        ),
    }
)  # fmt: skip

# Views that show every element of their operand exactly once. What they show may be written over as the operand may:
# `expand` and `unfold` show an element several times, and a slice written over would keep all of its operand alive.
_WHOLE_VIEWS = frozenset(
    ("view", "_unsafe_view", "reshape", "transpose", "permute", "t", "squeeze", "unsqueeze", "alias", "detach")
)

_WAIT = op("wait")


@cache
def is_view(target: Any) -> bool:
    """True if what an op makes lies in the memory of its first operand (a reshape copies where strides ask for it)."""
    if target is _WAIT:  # gives what its start made
        return True
    if not isinstance(target, OpOverload):
        return False
    return _shows_operand(target) or (target.namespace == "aten" and op_name(target) in _UNMARKED_VIEWS)


@cache
def is_whole_view(target: Any) -> bool:
    """True for a view that shows every element of its operand exactly once."""
    return target is _WAIT or (is_view(target) and op_name(target) in _WHOLE_VIEWS)


@cache
def may_return_operand(target: Any) -> bool:
    """True for an op that is no view and may all the same give back its operand as it is."""
    semantic = semantic_of(target)
    if semantic is not None:
        return semantic.returns_operand
    return _is_of_torch(target) and op_name(target) in _MAY_RETURN_OPERAND


@cache
def is_fresh(target: Any) -> bool:
    """True if the results of an op are known to share no memory with its operands."""
    if isinstance(target, Fused):
        return True  # see there; over which operands it may be written, the executor says
    if not isinstance(target, OpOverload) or is_view(target) or may_return_operand(target):
        return False
    if target.namespace == "autopar":
        # A driver answers a collective in new memory, or in that of an operand which nothing else sees (`Request`).
        # This rank's part of a value (shard, keep_first) is a view of it.
        return is_collective(target) or not is_mesh_op(target)
    # Nobody checks the schema of a user's op, nor that of one which torch puts together from others: `type_as` and
    # `einsum` say "Tensor" and may return a view. Captured graphs hold what the latter are put together from.
    return _is_of_torch(target) and not schema_of(target).is_mutable and not is_composite(target)


def _is_of_torch(target: Any) -> bool:
    return isinstance(target, OpOverload) and target.namespace in ("aten", "prims")


def _shows_operand(target: OpOverload) -> bool:
    schema = schema_of(target)
    return not schema.is_mutable and any(result.alias_info is not None for result in schema.returns)
