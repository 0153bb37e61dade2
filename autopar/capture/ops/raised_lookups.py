"""Lookups of several rows at a time, and by places in a flat tensor, raised to the lookup of each; and deep copies."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from autopar.capture.ops.raised_losses import embedding
from autopar.capture.refusals.constructs import ALIASES
from autopar.capture.refusals.explain_failure import refusal
from autopar.capture.refusals.location import user_frame
from autopar.ir.ops.ops import op, op_name
from autopar.ir.program import is_getitem
from autopar.torch_compat import storage_of

Tensor = torch.Tensor
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


_SPARSE: Mapping[Any, int] = {F.embedding: 6, F.embedding_bag: 7, torch.embedding: 4}  # where sparse= stands


def dense(function: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """The arguments of a lookup with sparse=True, for one whose gradient is dense; None for any other call."""
    at = _SPARSE.get(function)
    if at is None or not (args[at] if len(args) > at else kwargs.get("sparse")):
        return None
    return (*args[:at], False, *args[at + 1 :])[: len(args)], {k: v for k, v in kwargs.items() if k != "sparse"}


def renormed(called: Callable[..., Any], function: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a lookup without `max_norm`: the rows that it looks up are scaled down in the table before, by a
    function that makes calls."""
    names = ("input", "weight", "", "max_norm", "norm_type")
    if function not in (F.embedding, F.embedding_bag) or (*args[3:4], kwargs.get("max_norm"))[0] is None:
        return args, kwargs
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    with torch.no_grad():
        table, index = called(Tensor.detach, (), (given["weight"],)), given["input"]
        called(_renorm_, (), (table, index, float(given["max_norm"]), float(given.get("norm_type", 2.0))))
    rest = {name: value for name, value in kwargs.items() if name not in names[3:]}
    return (*args[:3], *(None, 2.0)[: max(len(args) - 3, 0)], *args[5:]), rest


def _renorm_(table: Tensor, index: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """Scale down the rows [row, ..] of a table that are looked up and too long, as `torch.embedding_renorm_` does."""
    counts = table.new_zeros(table.shape[0]).index_add(0, index.reshape(-1), table.new_ones(index.numel()))
    norms = torch.linalg.vector_norm(table, norm_type, dim=1, keepdim=True)
    is_long = (counts > 0).unsqueeze(1) & (norms > max_norm)
    return table.copy_(torch.where(is_long, table * (max_norm / (norms + 1e-7)), table))


def embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None, norm_type: float = 2,
    scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> Any:  # fmt: skip
    """Bags of one size, [bags, size], summed or averaged. Bags given by offsets are left to torch."""
    if input.ndim != 2 or mode not in ("sum", "mean") or padding_idx is not None:
        return NotImplemented
    rows = embedding(input, weight, None, max_norm, norm_type, scale_grad_by_freq, sparse)
    if rows is NotImplemented:
        return rows
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    total = rows.sum(1)
    return total if mode == "sum" else total / input.shape[1]


def take(input: Tensor, index: Tensor) -> Any:
    """Elements by their places in the flat tensor."""
    return input.reshape(-1)[index]


def combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Any:
    """A lookup of rows: torch selects them by a mask, whose rows it counts."""
    if input.ndim != 1 or r < 1:
        return NotImplemented
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    rows = list(choose(range(len(input)), r))
    return input[torch.tensor(rows, dtype=torch.int64, device=input.device).reshape(-1, r)]


def tensor_split(
    run: Callable[..., Any], input: Tensor, tensor_indices_or_sections: Any = None, dim: int = 0, **named: Any
) -> Any:  # fmt: skip
    """Where it is split is read from a tensor, by `run` (a function and its arguments): torch reads its memory."""
    if not isinstance(tensor_indices_or_sections, Tensor) or named:
        return NotImplemented
    return torch.tensor_split(input, run(Tensor.tolist, tensor_indices_or_sections), dim)


def put(input: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Any:
    """Raise torch.put, whose places count through the whole tensor."""
    flat = input.reshape(-1).index_put((index.reshape(-1),), source.reshape(-1), accumulate)
    return flat.reshape(input.shape)


def fill_diagonal_(input: Tensor, fill_value: float, wrap: bool = False) -> Any:
    """Fill the diagonal of a matrix. torch's own writes by strides, of which nothing is known when rows are split."""
    if input.ndim != 2 or wrap:
        return NotImplemented
    input.diagonal().fill_(fill_value)
    return input


def setitem(input: Tensor, index: Any, value: Any) -> Any:
    """Raise `x[mask] = value` with one value for all rows, whose gradient torch takes from rows that it counts."""
    is_mask = isinstance(index, Tensor) and index.dtype == torch.bool and index.ndim > 0
    if not is_mask or not isinstance(value, Tensor) or input.shape[: index.ndim] != index.shape:
        return NotImplemented
    row = input.shape[index.ndim :]
    if any(size != 1 for size in value.shape[: value.ndim - len(row)]):
        return NotImplemented
    value = value.reshape(value.shape[max(value.ndim - len(row), 0) :]).to(input.dtype)
    input.copy_(torch.where(index.reshape((*index.shape, *(1 for _ in row))), value, input))
    return None


def clamp(input: Tensor, min: Any = None, max: Any = None) -> Any:
    """Raise torch.clamp with a tensor (a number that is an input) and a number, which torch does not mix."""
    if min is None or max is None or isinstance(min, Tensor) == isinstance(max, Tensor):
        return NotImplemented
    return input.clamp(min=min).clamp(max=max)


_FIRST_DIM = ((), (0,), (("dim", 0),))  # what torch.cat is given beside the tensors


def rejoined(function: Any, args: Any, kwargs: Any, node_of: Callable[[Tensor], fx.Node | None]) -> Any:
    """Raise torch.cat or torch.stack of all parts of one tensor in their order (`torch.cat(list(x))`), which is a copy
    of it: a row at a time, each would be of another sample. node_of: of a trace. NotImplemented for other tensors."""
    if function not in (torch.cat, torch.stack):
        return NotImplemented
    parts = args[0] if args and isinstance(args[0], (tuple, list)) else ()
    if len(parts) < 2 or (*args[1:], *kwargs.items()) not in _FIRST_DIM:
        return NotImplemented
    nodes = [node_of(part) if isinstance(part, Tensor) else None for part in parts]
    cut = nodes[0].args[0] if nodes[0] is not None and is_getitem(nodes[0]) else None
    if not isinstance(cut, fx.Node) or any(node is None or node.args != (cut, i) for i, node in enumerate(nodes)):
        return NotImplemented
    name, whole = op_name(cut.target), cut.all_input_nodes[0].meta["val"]
    is_cut = name == "unbind" or (function is torch.cat and name in ("split", "split_with_sizes"))
    dims = cut.args[1:] if name == "unbind" else cut.args[2:]
    if not is_cut or dims not in ((), (0,)) or len(cut.meta["val"]) != len(parts) or whole.dtype != parts[0].dtype:
        return NotImplemented
    if any(part.requires_grad != whole.requires_grad or part.ndim == 0 for part in parts):
        return NotImplemented
    is_flat = name == "unbind" and function is torch.cat
    return (whole.flatten(0, 1) if is_flat else whole).clone(memory_format=torch.contiguous_format)


def counts_rows(function: Any, args: Any) -> bool:
    """True for `x[mask] = rows` with a gradient: torch wants to know how many they are, though only backward."""
    if function is not Tensor.__setitem__ or not torch.is_grad_enabled():
        return False
    _, index, value = args
    items = index if isinstance(index, tuple) else (index,)
    has_mask = any(isinstance(item, Tensor) and item.dtype == torch.bool and item.ndim for item in items)
    return has_mask and isinstance(value, Tensor) and value.requires_grad


def where(condition: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Raise torch.where with a condition of bytes, which torch takes on a device and not in a trace."""
    if not isinstance(condition, torch.Tensor) or condition.dtype != torch.uint8 or not (args or kwargs):
        return NotImplemented
    return torch.where(condition.bool(), *args, **kwargs)


def where_self(self: Tensor, condition: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Raise Tensor.where, the choice of `self` where a condition of bytes holds."""
    return where(condition, self, *args, **kwargs)


def deep_copy(called: Callable[..., Any], x: Tensor, memo: dict[Any, Any]) -> Any:
    """A copy that no gradient goes through, as copy.deepcopy makes one, by a function that makes calls. NotImplemented
    for a tensor that an op computed, which torch refuses. Raises CaptureError for a second one of the same memory,
    whose copy would have to share it."""
    if not x.is_leaf:
        return NotImplemented
    if id(x) in memo:
        return memo[id(x)]
    memory, copied = storage_of(x), memo.setdefault("autopar's memory", [])
    if memory is not None and memory in copied:
        raise refusal(ALIASES, user_frame(sys._getframe(1)))
    copied.append(memory)
    result = called(Tensor.clone, (), (called(Tensor.detach, (), (x,)),))
    memo[id(x)] = result.requires_grad_() if x.requires_grad else result
    return memo[id(x)]


def one_hot(input: Tensor, num_classes: Any = -1) -> Any:
    """Raise F.one_hot to a lookup of the classes; NotImplemented for the call that counts them itself."""
    if not isinstance(num_classes, int) or num_classes <= 0 or input.dtype != torch.int64:
        return NotImplemented
    classes = torch.arange(num_classes, device=input.device)
    return (op("checked_index")(input, num_classes, None).unsqueeze(-1) == classes).to(torch.int64)
