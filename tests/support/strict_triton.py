"""Triton's interpreter made as strict as a GPU is: what it would hide, it shows.

bfloat16 arithmetic raises (the interpreter computes with its bits), casts to bfloat16 round to nearest even, masked-off
lanes of a load without `other` are NaN, sums halve what they sum until one is left. The patches are for a process of
its own, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

_Builder: Any = interpreter.InterpreterBuilder
Places = np.ndarray[Any, Any]
_ARITHMETIC = (
    "create_fadd", "create_fsub", "create_fmul", "create_fdiv", "create_fneg", "create_fma", "create_fcmpOLT",
    "create_fcmpOGT", "create_fcmpOLE", "create_fcmpOGE", "create_fcmpOEQ", "create_fcmpUNE",
)  # fmt: skip


def install() -> None:
    """Make the interpreter of this process strict."""
    interpreter._convert_float = _exact_casts(interpreter._convert_float)
    _Builder.create_masked_load = _poisoned(_Builder.create_masked_load)
    interpreter.ReduceOps.sum = _tree_sum
    for name in _ARITHMETIC:
        if hasattr(_Builder, name):
            setattr(_Builder, name, _without_bfloat16(name, getattr(_Builder, name)))


def _tree_sum(self: Any, input: Any) -> Any:
    """As the threads of a GPU do; numpy adds one after another along all axes but the last."""
    data = np.moveaxis(input.handle.data, self.axis, 0)
    while len(data) > 1:
        half = len(data) // 2
        data = data[:half] + data[half:]
    return self.to_tensor(np.moveaxis(data, 0, self.axis) if self.keep_dims else data[0], input.dtype)


def _exact_casts(old: Any) -> Any:
    def convert(x: Any, source: Any, target: Any, mode: Any) -> Any:
        if source == tl.bfloat16 and target == tl.float32:
            return x.view(np.uint16).astype(np.uint32) << 16
        if source == tl.float32 and target == tl.bfloat16:
            bits = np.ascontiguousarray(x).view(np.uint32)
            even = (bits >> np.uint32(16)) & np.uint32(1)
            rounded = ((bits + np.uint32(0x7FFF) + even) >> np.uint32(16)).astype(np.uint16)
            rounded[np.isnan(np.ascontiguousarray(x).view(np.float32))] = 0x7FC0
            return rounded
        return old(x, source, target, mode)

    return convert


def _poisoned(old: Any) -> Any:
    def masked_load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        handle = old(self, pointers, mask, other, *rest)
        if other is None and handle.data.dtype.kind == "f":
            handle.data = handle.data.copy()
            handle.data[~np.broadcast_to(mask.data, handle.data.shape)] = np.nan
        return handle

    return masked_load


def _without_bfloat16(name: str, old: Any) -> Any:
    def strict(self: Any, *args: Any) -> Any:
        if any(isinstance(a, interpreter.TensorHandle) and a.dtype.scalar == tl.bfloat16 for a in args):
            raise TypeError(f"{name} on bfloat16")
        return old(self, *args)

    return strict


class Accesses:
    """What the programs of a launch read and write of some tensors; nothing else may be touched.

    tensors: gives them once the kernel runs. `read[i]`, `written[i]`: by how many programs each element of tensor i is.
    """

    def __init__(self, tensors: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._tensors = tensors
        self._program: dict[tuple[bool, int], list[Places]] = {}
        self.read: list[Places] = []
        self.written: list[Places] = []

    @functools.cached_property
    def tensors(self) -> list[torch.Tensor]:
        found = list(self._tensors())
        sizes = [1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in found]
        self.read, self.written = ([np.zeros(size, dtype=np.int64) for size in sizes] for _ in range(2))
        return found

    def add(self, is_read: bool, pointers: Places) -> None:
        """Count the elements at some addresses, all of one tensor."""
        if not self.tensors or not pointers.size:
            return
        starts = [t.data_ptr() for t in self.tensors]
        which = max((i for i, start in enumerate(starts) if start <= pointers[0]), key=starts.__getitem__)
        places = (pointers.astype(np.int64) - starts[which]) // self.tensors[which].element_size()
        if places.min() < 0 or places.max() >= len(self.read[which]):
            raise IndexError(f"an access outside of tensor {which}, of {len(self.read[which])} elements")
        self._program.setdefault((is_read, which), []).append(places)

    def end_program(self) -> None:
        """Several accesses of one program to an element count once."""
        for (is_read, which), places in self._program.items():
            (self.read if is_read else self.written)[which][np.unique(np.concatenate(places))] += 1
        self._program = {}


@contextmanager
def watched(tensors: Callable[[], Sequence[torch.Tensor]], seed: int | None = None) -> Iterator[Accesses]:
    """Count accesses to tensors, and run the programs of each launch in a shuffled order if there is a seed."""
    accesses = Accesses(tensors)
    names = ("create_masked_load", "create_masked_store", "set_grid_idx")
    old = {name: getattr(_Builder, name) for name in names}

    def lanes(pointers: Any, mask: Any) -> Places:
        kept = np.broadcast_to(mask.data, pointers.data.shape)
        return np.ascontiguousarray(pointers.data[kept].astype(np.uint64).ravel())

    def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        accesses.add(True, lanes(pointers, mask))
        return old["create_masked_load"](self, pointers, mask, *rest)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        accesses.add(False, lanes(pointers, mask))
        return old["create_masked_store"](self, pointers, value, mask, *rest)

    def place(self: Any, *index: int) -> Any:
        accesses.end_program()
        return old["set_grid_idx"](self, *(index if seed is None else _shuffled(self.grid_dim, seed)[index]))

    for name, new in zip(names, (load, store, place), strict=True):
        setattr(_Builder, name, new)
    try:
        yield accesses
    finally:
        accesses.end_program()
        for name, function in old.items():
            setattr(_Builder, name, function)


@functools.cache
def _shuffled(grid: tuple[int, int, int], seed: int) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Another place for each place of a grid."""
    places = list(itertools.product(*map(range, grid)))
    return dict(zip(places, random.Random(seed).sample(places, len(places)), strict=True))
