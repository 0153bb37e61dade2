"""Find whose memory returned tensors show: who writes into what a model gives may write into a buffer, or the batch.

A program gives values, in memory of their own. On one device `return self.queue` is the buffer itself, `return x[:2]` a
view of the batch, and `return h, h[0]` two views of one memory: what is written there, or what the next step leaves
there, is seen in all of them. So what a returned tensor shows is noted, and it is made a view of that again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from autopar.ir.program import IN_PARTS
from autopar.torch_compat import storage_of

Tensor = torch.Tensor
Form = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides, and where it begins
RESULT = "result"
_COPIED = (
    "the model returns memory of parameter '{}': each call gives a copy, which no later step changes, and what is "
    "written into it does not reach the parameter: read it, and write it, as model.{}"
)


@dataclass(frozen=True, slots=True)
class Shown:
    """What a returned tensor shows: a buffer, a tensor of the batch or an attribute ("constant"), by its name in the
    program, or another returned tensor ("result"), by the number of its leaf. lies: the form of that one. form: of the
    view, from the beginning of that one; None for the tensor itself."""

    kind: str
    name: str
    lies: Form
    form: Form | None

    def of(self, held: Tensor, value: Tensor) -> Tensor:
        """The view of the tensor that it shows, which is there by now. value: what is returned where that lies in
        another way."""
        if (held.dtype, held.device) != (value.dtype, value.device):
            return value
        if self.form is None:
            return held if held.shape == value.shape else value
        shape, strides, start = self.form
        if (tuple(held.shape), held.stride()) != self.lies[:2] or shape != tuple(value.shape):
            return value
        return held.as_strided(shape, strides, int(held.storage_offset()) + start)


def shown_memory(
    values: Mapping[int, Tensor], given: Iterable[tuple[str, str, Tensor]]
) -> tuple[dict[int, Shown], list[str]]:
    """What returned tensors show, by the numbers of their leaves, and notes on what is a copy. given: the tensors that
    a run had, each with its kind and name."""
    of_memory: dict[int, tuple[str, str, Tensor]] = {}
    for kind, name, tensor in given:
        memory = storage_of(tensor)
        if memory is not None and not name.startswith(IN_PARTS):
            of_memory.setdefault(memory, (kind, name, tensor))
    alike = defaultdict[int, dict[int, Tensor]](dict)
    for leaf, value in values.items():
        memory = storage_of(value)
        if memory is not None and value.layout == torch.strided and not value.is_conj() and not value.is_neg():
            alike[memory][leaf] = value
    found, notes = dict[int, Shown](), list[str]()
    for memory, group in alike.items():
        dense = {leaf: value for leaf, value in group.items() if _is_dense(value)}
        if memory not in of_memory and dense:
            largest, value = max(dense.items(), key=lambda each: each[1].numel())
            of_memory[memory] = RESULT, str(largest), value
        if memory not in of_memory:
            continue
        kind, name, held = of_memory[memory]
        if kind == "parameter":
            notes.append(_COPIED.format(name, name))
            continue
        for leaf, value in group.items():
            if (kind, name) != (RESULT, str(leaf)) and value.dtype == held.dtype and _lies_in(value, held):
                found[leaf] = Shown(kind, name, _form(held), None if value is held else _form(value, held))
    return found, notes


def _form(tensor: Tensor, held: Tensor | None = None) -> Form:
    start = 0 if held is None else int(held.storage_offset())
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()) - start


def _end(tensor: Tensor) -> int:
    """The element of its memory behind its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + last + 1


def _lies_in(tensor: Tensor, held: Tensor) -> bool:
    starts = int(held.storage_offset()) <= int(tensor.storage_offset())
    return starts and bool(tensor.numel()) and _end(tensor) <= _end(held)


def _is_dense(tensor: Tensor) -> bool:
    return _end(tensor) - int(tensor.storage_offset()) == tensor.numel()
