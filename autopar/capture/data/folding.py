"""Answer what a model reads from tensors that hang on no input: the value is the same in every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.capture.data.known_values import Operands, Values

Tensor = torch.Tensor
_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)
# Functions that take values out of their tensors, and give none.
FOLDED: frozenset[Any] = frozenset(
    (Tensor.__bool__, Tensor.__int__, Tensor.__index__, Tensor.__float__, Tensor.__complex__, Tensor.item,
     Tensor.tolist, Tensor.__contains__, Tensor.numpy, Tensor.__array__, Tensor.__format__, Tensor.is_nonzero,
     torch.is_nonzero, torch.equal, Tensor.equal, torch.allclose, Tensor.allclose)
)  # fmt: skip


def folded(values: Values, function: Any, args: Any, kwargs: Any, before: Operands) -> Any:
    """The result of a call that failed for want of data; NotImplemented where data of an input would be needed."""
    result = values.answer(function, args, kwargs, before)
    if result is not NotImplemented:
        return result
    number_of = lambda tensor: values.answer(Tensor.__int__, (tensor,), {}, values.operands(tensor, None))  # noqa: E731

    def places_of(mask: Tensor) -> Any:
        """The places of a mask. Those behind each other are counted: of a constant no pass knows what it holds."""
        ends = values.answer(_ends, (mask,), {}, values.operands(mask, None))
        if isinstance(ends, tuple):
            return [torch.arange(*ends, device=mask.device)]
        return values.answer(_places, (mask,), {}, values.operands(mask, None))

    changed = with_numbers(function, args, kwargs, number_of, places_of)
    return NotImplemented if changed is None else function(*changed[0], **changed[1])


def with_numbers(
    function: Any, args: Any, kwargs: Any, number_of: Callable[[Tensor], Any], places_of: Callable[[Tensor], Any]
) -> tuple[Any, Any] | None:
    """The arguments with Python numbers for 0-d integer tensors, and in an index the places of boolean masks; None if
    there are none, or none that is known."""
    has_changed = False

    def change(value: Any) -> Any:
        nonlocal has_changed
        if isinstance(value, Tensor):
            is_number = value.ndim == 0 and not value.dtype.is_floating_point and value.dtype != torch.bool
            number = number_of(value) if is_number else NotImplemented
            has_changed |= number is not NotImplemented
            return value if number is NotImplemented else number
        if isinstance(value, slice):
            return slice(change(value.start), change(value.stop), change(value.step))
        return type(value)(map(change, value)) if type(value) in (tuple, list) else value

    def change_index(index: Any) -> Any:
        nonlocal has_changed
        items: list[Any] = []
        for item in index if type(index) is tuple else (index,):
            is_mask = isinstance(item, Tensor) and item.dtype == torch.bool and item.ndim > 0
            places = places_of(item) if is_mask else NotImplemented
            has_changed |= places is not NotImplemented
            items += [change(item)] if places is NotImplemented else places
        return tuple(items)

    if function in _INDEXING:
        args = (args[0], change_index(args[1]), *args[2:])
    else:
        args, kwargs = (args[0], *map(change, args[1:])), {key: change(item) for key, item in kwargs.items()}
    return (args, kwargs) if has_changed else None


def _places(mask: Tensor) -> list[Tensor]:
    return list(torch.nonzero(mask, as_tuple=True))


def _ends(mask: Tensor) -> tuple[int, int] | None:
    """The first place of a mask with one dim, and the one behind the last, if it is True for all between."""
    places = torch.nonzero(mask).flatten().tolist() if mask.ndim == 1 else []
    is_run = places and places[-1] + 1 - places[0] == len(places)
    return (places[0], places[-1] + 1) if is_run else None
