"""Read from an op's schema what it writes, shows and draws; what schemas do not say is data here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from autopar.ir.ops.op_facts import facts_of, is_fill, is_view, overloads_of

ALIASES = frozenset({"alias", "detach", "lift_fresh", "detach_"})
LIKES = frozenset({"empty_like", "full_like", "ones_like", "zeros_like"})
FUSED = frozenset({"_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"})
TURNS = frozenset({"squeeze_", "t_", "transpose_", "unsqueeze_"})
_STORAGE = frozenset({"_resize_output_", "share_memory_", "resize"})  # beside what torch's tags say
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
    is_fill: bool
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
    facts = facts_of(func)
    return Op(
        name, namespace, writes,
        is_view=is_view(func),
        is_random=facts.random,
        is_pointwise=facts.pointwise and not is_view(func),
        is_fill=is_fill(func),
        is_pointwise_list=name in FUSED or _is_pointwise_list(name),
        moves_memory=name in _STORAGE or (torch.Tag.inplace_view in func.tags and name != "detach_"),
    )  # fmt: skip


def _is_pointwise_list(name: str) -> bool:
    """Whether what `_foreach_*` does with each item is element by element."""
    if not name.startswith("_foreach_") or name in _REDUCING_LISTS:
        return False
    base = name.removeprefix("_foreach_").rstrip("_")
    return any(facts_of(one).pointwise for one in overloads_of(base)[:1])
