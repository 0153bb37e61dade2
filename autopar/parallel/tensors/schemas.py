"""Read from an op's schema what it writes, shows and draws; what schemas do not say is data here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from autopar.ir.ops.op_facts import is_view

# Element by element, though torch does not tag them so.
_ALSO_POINTWISE = frozenset(
    {"_to_copy", "clone", "copy", "copy_", "fill", "fill_", "lerp", "lerp_", "masked_fill", "masked_fill_", "where"}
    | {"zero", "zero_"}
)
# Tagged so, though they read more than the element.
_NOT_POINTWISE = frozenset(["bucketize", "equal", "searchsorted"])
ALIASES = frozenset({"alias", "detach", "lift_fresh", "detach_"})
LIKES = frozenset({"empty_like", "full_like", "ones_like", "zeros_like"})
FUSED = frozenset({"_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"})
# They write the first argument without reading it.
FILLS = frozenset(
    {"bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_", "random_"}
    | {"uniform_", "zero_"}
)
TURNS = frozenset({"squeeze_", "t_", "transpose_", "unsqueeze_"})
_STORAGE = frozenset({"set_", "resize_", "resize_as_", "_resize_output_", "rename_", "share_memory_", "resize"})
_REDUCING_LISTS = frozenset({"_foreach_max", "_foreach_norm", "_foreach_powsum"})
NAMESPACES_OF_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional"})


@dataclass(frozen=True, slots=True)
class Op:
    """An op as its schema has it. `writes`: positions and keywords of what it writes."""

    name: str
    namespace: str
    writes: tuple[int | str, ...]
    is_view: bool
    is_random: bool
    is_pointwise: bool
    is_pointwise_list: bool
    moves_memory: bool


@cache
def op_of(func: Any) -> Op:
    schema = func._schema
    namespace, _, name = schema.name.partition("::")
    writes = tuple(
        argument.name if argument.kwarg_only else at
        for at, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    tags = set(func.tags)
    return Op(
        name, namespace, writes,
        is_view=is_view(func),
        is_random=torch.Tag.nondeterministic_seeded in tags or any(a.name == "generator" for a in schema.arguments),
        is_pointwise=_is_pointwise(name, tags),
        is_pointwise_list=name in FUSED or _is_pointwise_list(name),
        moves_memory=name in _STORAGE or (torch.Tag.inplace_view in tags and name != "detach_"),
    )  # fmt: skip


def _is_pointwise(name: str, tags: set[Any]) -> bool:
    return (torch.Tag.pointwise in tags or name in _ALSO_POINTWISE) and name not in _NOT_POINTWISE


def _is_pointwise_list(name: str) -> bool:
    """Whether what `_foreach_*` does with each item is element by element."""
    if not name.startswith("_foreach_") or name in _REDUCING_LISTS:
        return False
    base = name.removeprefix("_foreach_").rstrip("_")
    packet = getattr(torch.ops.aten, base, None)
    return packet is not None and all(
        _is_pointwise(base, set(getattr(packet, overload).tags)) for overload in packet.overloads()[:1]
    )
