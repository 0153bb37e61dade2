"""Rows that a mask selected, at their places: taken of a tensor, and put back into one or added to it."""

from __future__ import annotations

import math
from typing import Any

import torch

from autopar.capture.rows.row_rules import KnownRows, Refused, Run, ValidRows, only_valid
from autopar.ir.ops.ops import op_name

Tensor = torch.Tensor


Made = tuple[Any, int]


def indexed(selected: KnownRows, run: Run, function: Any, base: Tensor, key: Any) -> Made:
    """x[.., places, ..] of another tensor."""
    items = list(key) if isinstance(key, tuple) else [key]
    taken = sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis in [item for item in items if not isinstance(item, Tensor)]:
        at = next(i for i, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = [slice(None)] * (base.ndim - taken)
    advanced = [i for i, item in enumerate(items) if isinstance(item, (Tensor, int))]
    if any(isinstance(items[i], Tensor) and selected.row_of(items[i]) is None for i in advanced):
        raise Refused("another index is beside the places")
    if any(isinstance(items[i], bool) for i in advanced) or advanced[-1] - advanced[0] + 1 != len(advanced):
        raise Refused("the places are not beside each other")
    others = [item for item in items if not isinstance(item, int)]
    if is_all(selected, _selected(base, items), others):
        return at_places(selected, _selected(base, items), others), advanced[0]
    items = [selected.in_range(item) if isinstance(item, Tensor) else item for item in items]
    return run(function, base, tuple(items)), advanced[0]


def _selected(base: Tensor, items: list[Any]) -> Tensor:
    """A tensor at those of its places that are plain numbers."""
    dim = 0
    for item in items:
        if isinstance(item, int):
            base = base.select(dim, item)
        else:
            dim += item is not None
    return base


def picked(selected: KnownRows, run: Run, function: Any, base: Tensor, dim: int, index: Tensor) -> Made:
    """index_select of another tensor."""
    dim = dim % max(base.ndim, 1)
    items = [*[slice(None)] * dim, index]
    if is_all(selected, base, items):
        return at_places(selected, base, items), dim
    return run(function, base, dim, selected.in_range(index)), dim


def as_index_add(selected: KnownRows, name: str, rows: ValidRows, *args: Any) -> tuple[Any, ...]:
    """base.scatter_add(0, index, source), where each row goes to one place, as index_add."""
    if not name.startswith("scatter_add"):
        return name, rows, *args
    base, dim, index, source = (*args, None, None, None)[:4]
    mine = selected.row_of(index)
    if mine is None or mine.repeats is None or index._version or dim not in (0, -base.ndim):
        raise Refused("its index has another place for each element")
    if index.shape != source.shape or index.shape[1:] != base.shape[1:]:
        raise Refused("its index is not as wide as its rows")
    return name.replace("scatter", "index"), rows, base, 0, mine.repeats, source


def added(selected: KnownRows, name: str, rows: ValidRows, base: Tensor, *args: Any, **kwargs: Any) -> Any:
    """base[index] += rows, in which padding is zero; or rows that are put in the place of those before."""
    if selected.row_of(base) is not None:
        raise Refused
    if name == "__setitem__":
        return _set(selected, rows, base, *args)
    if name.startswith("index_put"):
        return _index_put(selected, name, rows, base, *args, **kwargs)
    dim, index, source = (*args, *(kwargs[key] for key in ("dim", "index", "source")[len(args) :]))
    dim = dim % max(base.ndim, 1)
    if name.startswith("index_copy"):
        base = base if name.endswith("_") else base.clone()
        _set(selected, rows, base, (*[slice(None)] * dim, index), source)
        return base
    mine = selected.row_of(source)
    if selected.row_of(index) is None or (mine is not None and mine.dim != dim):
        raise Refused
    options = {key: value for key, value in kwargs.items() if key == "alpha"}
    return _put_back(selected, name, base, dim, index, only_valid(source, rows.valid, dim), options)


def _set(selected: KnownRows, rows: ValidRows, base: Tensor, key: Any, value: Any) -> None:
    """base[places] = rows. Of all places of a mask each row is chosen; else adds what they differ by: two rows of
    one place would be torch's own fault. Where something was added to rows of `base` that alone is added, too."""
    items = [item for item in (key if isinstance(key, tuple) else (key,)) if item is not Ellipsis]
    while items and isinstance(items[-1], slice) and items[-1] == slice(None):
        items.pop()
    if not items or not isinstance(value, Tensor) or any(selected.row_of(item) is None for item in items):
        raise Refused
    shape = (rows.valid.numel(), *base.shape[len(items) :])
    mine = [selected.row_of(item) for item in items]
    known = selected.taken_of(value)
    if known is not None and known.added is not None and known.base is base and _is_same_key(known.key, key):
        value, is_sum = known.added, True
    else:
        is_sum = False
    in_order = [one.place for one in mine if one is not None] == list(range(len(rows.shape)))
    if in_order and value.shape == shape and is_all(selected, base, items):
        if is_sum:
            base.add_(only_valid(value, rows.valid, 0).to(base.dtype).reshape(base.shape))
            return
        is_chosen = rows.valid.reshape(*rows.shape, *(1 for _ in shape[1:]))
        base.copy_(torch.where(is_chosen, value.reshape(base.shape).to(base.dtype), base))
        return
    if len(items) > 1 or value.shape != shape:
        raise Refused
    if not is_sum:
        value = value - (at_places(selected, base, items) if is_all(selected, base, items) else base[items[0]])
    change = only_valid(value, rows.valid, 0).to(base.dtype)
    _put_back(selected, "index_add_", base, 0, items[0], change, {})


def _index_put(selected: KnownRows, name: str, rows: ValidRows, base: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """index_put of rows by places, as index_add or as a choice."""
    indices, value, *adds = *args, *(kwargs[key] for key in ("indices", "values")[len(args) :])
    if not (adds or [kwargs.get("accumulate")])[0]:
        base = base if name.endswith("_") else base.clone()
        _set(selected, rows, base, tuple(indices), value)
        return base
    mine, index = selected.row_of(value), indices[0]
    if len(indices) > 1 or selected.row_of(index) is None or mine is None or value.shape[1:] != base.shape[1:]:
        raise Refused
    source = only_valid(value, rows.valid, 0)
    return _put_back(selected, name.replace("put", "add"), base, 0, index, source, {})


def _put_back(
    selected: KnownRows, name: str, base: Tensor, dim: int, index: Tensor, source: Tensor, options: Any
) -> Tensor:
    """Rows added to their places; where these are all places of a dim, by a sum over the other one."""
    mine = selected.known[id(index)]
    if mine.place is None or base.shape[dim] != mine.shape[mine.place]:
        made: Tensor = getattr(base, name)(dim, selected.in_range(index), source, **options)
        return made
    others = [dim + other for other in range(len(mine.shape)) if other != mine.place]
    apart = source.reshape(*source.shape[:dim], *mine.shape, *source.shape[dim + 1 :])
    total = apart.sum(others) if others else apart
    return base.add_(total, **options) if name.endswith("_") else base.add(total, **options)


def column_of(made: Tensor, mine: ValidRows) -> Any:
    """What a view of the places of a mask, a row for each, shows: those of one dim, or (all) the dim of rows. Raises
    Refused for a view that shows some rows."""
    width, at = len(mine.columns), made.storage_offset()
    is_one = made.numel() == mine.valid.numel()
    if is_one and made.ndim == 1 and made.stride() == (width,):
        return mine.columns[at]
    dims = [dim for dim, size in enumerate(made.shape) if size == mine.valid.numel() and made.stride(dim) == width]
    if not dims or (not is_one and made.numel() != mine.valid.numel() * width):
        raise Refused("it takes some of them")
    return dims[0]


def places_in_range(selected: KnownRows, base: Tensor, key: Any) -> Tensor | None:
    """The places that `arange(n)[places]` gives, which are these; None for another call."""
    index = key[0] if isinstance(key, tuple) and len(key) == 1 else key
    mine, node = selected.row_of(index), None if selected.tracer is None else selected.tracer.node_of(base)
    if mine is None or mine.place is None or node is None or op_name(node.target) != "arange":
        return None
    numbers = [one for one in node.args if isinstance(one, int)]
    is_whole = base.shape == mine.shape[mine.place : mine.place + 1] and numbers in ([*base.shape], [0, *base.shape])
    return index if is_whole and not base.dtype.is_floating_point and base.dtype == index.dtype else None


def is_all(selected: KnownRows, base: Tensor, items: list[Any]) -> bool:
    """True if an index is made of the places of one mask, each as long as the dim it looks up, and of slices."""
    at, found = 0, []
    for item in items:
        if isinstance(item, Tensor):
            mine = selected.known[id(item)]
            if mine.place is None or at >= base.ndim or base.shape[at] != mine.shape[mine.place]:
                return False
            found.append(mine.place)
        elif item is not None and item != slice(None):
            return False
        at += item is not None
    return len(found) == len(set(found)) > 0


def at_places(selected: KnownRows, base: Tensor, items: list[Any]) -> Tensor:
    """base[items] for all places of a mask: a matter of views, so that rows may be split. A copy, as an index gives
    it, for the model may write into it."""
    dims = [item for item in items if item is not None]
    dims += [slice(None)] * (base.ndim - len(dims))
    of = {selected.known[id(item)].place: at for at, item in enumerate(dims) if isinstance(item, Tensor)}
    shape = next(selected.known[id(item)].shape for item in dims if isinstance(item, Tensor))
    first = min(of.values())
    after = [at for at in range(first, base.ndim) if at not in of.values()]
    order = [*range(first), *(of[place] for place in sorted(of)), *after]  # type: ignore[type-var]
    value = base if order == sorted(order) else base.permute(order)
    for place in range(len(shape)):
        value = value if place in of else value.unsqueeze(first + place)
    value = value.expand(*base.shape[:first], *shape, *(base.shape[at] for at in after))
    value = value.reshape(*base.shape[:first], math.prod(shape), *(base.shape[at] for at in after))
    where = next(i for i, item in enumerate(items) if isinstance(item, Tensor))
    keys = [None if item is None else slice(None) for item in items if not isinstance(item, Tensor)]
    keys.insert(where, slice(None))
    made: Tensor = value[tuple(keys)].clone()
    return made


def _is_same_key(a: Any, b: Any) -> bool:
    """True if two indices are made of the same tensors."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_is_same_key, a, b))
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and bool(a == b))
