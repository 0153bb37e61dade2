"""Triton's interpreter made as strict as a GPU is: what it would hide, it shows.

bfloat16 arithmetic raises (the interpreter computes with its bits), casts to bfloat16 round to nearest even, masked-off
lanes of a load without `other` are NaN, stores and loads outside of the tensors raise. The patches are for a process of
its own, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

_Builder: Any = interpreter.InterpreterBuilder
_ARITHMETIC = (
    "create_fadd", "create_fsub", "create_fmul", "create_fdiv", "create_fneg", "create_fma", "create_fcmpOLT",
    "create_fcmpOGT", "create_fcmpOLE", "create_fcmpOGE", "create_fcmpOEQ", "create_fcmpUNE",
)  # fmt: skip


def install() -> None:
    """Make the interpreter of this process strict."""
    interpreter._convert_float = _exact_casts(interpreter._convert_float)
    _Builder.create_masked_load = _poisoned(_Builder.create_masked_load)
    for name in _ARITHMETIC:
        if hasattr(_Builder, name):
            setattr(_Builder, name, _without_bfloat16(name, getattr(_Builder, name)))


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
    """What the programs of a launch read and write of given tensors, counted by element; nothing else may be touched.

    `read[i]`, `written[i]`: how often each element of tensor i is, where a program that reads it several times counts
    once.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = [t for t in tensors if t.numel()]
        self.starts = np.array([t.data_ptr() for t in self.tensors], dtype=np.uint64)
        self.sizes = [1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in self.tensors]
        self.read = [np.zeros(size, dtype=np.int64) for size in self.sizes]
        self.written = [np.zeros(size, dtype=np.int64) for size in self.sizes]
        self._program: list[tuple[list[np.ndarray[Any, Any]], int, np.ndarray[Any, Any]]] = []

    def add(self, counts: list[np.ndarray[Any, Any]], pointers: np.ndarray[Any, Any]) -> None:
        """Count the elements at some addresses."""
        for address in (pointers[:1] if pointers.size else ()):
            which = max((i for i, start in enumerate(self.starts) if start <= address), key=lambda i: self.starts[i])
            places = (pointers - self.starts[which]) // np.uint64(self.tensors[which].element_size())
            if pointers.min() < self.starts[which] or places.max() >= self.sizes[which]:
                raise IndexError(f"an access outside of tensor {which}, of {self.sizes[which]} elements")
            self._program.append((counts, which, places.astype(np.int64)))

    def end_program(self) -> None:
        """Several accesses of one program to an element count once."""
        merged: dict[tuple[int, int], list[np.ndarray[Any, Any]]] = {}
        for counts, which, places in self._program:
            merged.setdefault((id(counts), which), []).append(places)
        for (kind, which), places in merged.items():
            counts = self.read if kind == id(self.read) else self.written
            counts[which][np.unique(np.concatenate(places))] += 1
        self._program = []


@contextmanager
def watched(tensors: Sequence[torch.Tensor], seed: int | None = None) -> Iterator[Accesses]:
    """Count accesses to tensors, and run the programs of each launch in a shuffled order if there is a seed."""
    accesses, old_load, old_store = Accesses(tensors), _Builder.create_masked_load, _Builder.create_masked_store
    old_grid = _Builder.set_grid_idx
    order: dict[Any, tuple[int, int, int]] = {}

    def lanes(pointers: Any, mask: Any) -> np.ndarray[Any, Any]:
        data = np.broadcast_to(mask.data, pointers.data.shape)
        return np.ascontiguousarray(pointers.data[data].astype(np.uint64).ravel())

    def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        accesses.add(accesses.read, lanes(pointers, mask))
        return old_load(self, pointers, mask, *rest)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        accesses.add(accesses.written, lanes(pointers, mask))
        return old_store(self, pointers, value, mask, *rest)

    def place(self: Any, x: int, y: int, z: int) -> Any:
        accesses.end_program()
        size = self.grid_dim
        if seed is not None and len(order) != size[0] * size[1] * size[2]:
            all_ = [(i, j, k) for i in range(size[0]) for j in range(size[1]) for k in range(size[2])]
            shuffled = random.Random(seed).sample(all_, len(all_))
            order.clear()
            order.update(zip(all_, shuffled, strict=True))
        return old_grid(self, *order.get((x, y, z), (x, y, z)))

    _Builder.create_masked_load, _Builder.create_masked_store, _Builder.set_grid_idx = load, store, place
    try:
        yield accesses
    finally:
        accesses.end_program()
        _Builder.create_masked_load, _Builder.create_masked_store = old_load, old_store
        _Builder.set_grid_idx = old_grid
