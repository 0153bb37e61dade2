"""The numbers that a tensor has, `for e in chosen.unique()`: the places of a mask that says which are there.

So a loop over them is one over the places of a mask (see `turns.py`), which goes through all numbers that the tensor
could have: places along a dim are below its size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.capture.data.reads import Branches
from autopar.capture.refusals.location import Line
from autopar.capture.trace.tracer import Tracer
from autopar.ir.ops.op_facts import dim_of_places, facts_of, is_view
from autopar.ir.ops.ops import op_name
from autopar.ir.program import is_getitem

Tensor = torch.Tensor
_UNIQUE = (torch.unique, Tensor.unique)


def unique(
    mode: Callable[..., Any], branches: Branches, tracer: Tracer | None, function: Any, args: Any, kwargs: Any,
    line: Line | None,
) -> Any:  # fmt: skip
    """The numbers that a tensor has, in their order; NotImplemented for another call, and where nobody knows how many
    they may be. mode: makes a call of the model's. tracer: of the run that is captured, by which others go."""
    others = [kwargs.get(name) for name in ("return_inverse", "return_counts", "dim")]
    if function not in _UNIQUE or len(args) != 1 or others not in ([None] * 3, [False, False, None]):
        return NotImplemented
    if args[0].dtype != torch.int64:  # as places have it, and the numbers that it has
        return NotImplemented
    if tracer is not None:
        node = tracer.node_of(args[0])
        count = None if node is None else _count(node)
        if count is not None:
            branches.numbers[line] = count
    count = branches.numbers.get(line)
    if count is None:
        return NotImplemented
    counts = mode(torch.bincount, (), (mode(Tensor.flatten, (), args),), {"minlength": count})
    return mode(Tensor.nonzero, (), (mode(Tensor.gt, (), (counts, 0)),), {"as_tuple": True})[0]


def _count(node: fx.Node) -> int | None:
    """How many numbers there are of which a tensor has some: 0, 1, ..; None where nobody knows."""
    while node.op == "call_function" and (is_view(node.target) or facts_of(node.target).moves == "same"):
        node = node.all_input_nodes[0]
    source: Any = node.args[0] if is_getitem(node) and node.args[1] == 1 else node
    if source.op == "call_function" and op_name(source.target) == "remainder" and isinstance(source.args[1], int):
        return source.args[1] if source.args[1] > 0 else None
    dim = dim_of_places(source)
    shape = () if dim is None else source.args[0].meta["val"].shape
    return int(shape[dim]) if shape else None
