"""The bytes of all tensors that live at one time: counted while a program runs, and estimated from its graph."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.ir.layout import local_part
from autopar.ir.ops.measure import local_bytes
from autopar.ir.program import Program, record
from autopar.runtime.executor.executor import Executable
from autopar.runtime.executor.lifetime import lifetimes
from autopar.runtime.ranks.virtual import VirtualMesh


class Live(TorchDispatchMode):
    """Counts the memory of what is made while it is on: each storage once, until the last tensor in it is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, bytes_ = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.now += bytes_
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, bytes_)

    def _gone(self, key: int, bytes_: int) -> None:
        self.known.discard(key)
        self.now -= bytes_


def measured_peak(program: Program) -> int:
    """Of all ranks of a LOCAL program on the virtual mesh together, beside the inputs."""
    random = torch.Generator().manual_seed(0)
    values = [_draw(record(node).type.shape, record(node).type.dtype, random) for node in program.placeholders]
    layouts = [record(node).layout for node in program.placeholders]
    given = [
        [local_part(value, layout, program.mesh, coord).clone() for value, layout in zip(values, layouts, strict=True)]
        for coord in program.mesh.coords()
    ]
    executable = Executable(program.graph)
    with Live() as live:
        VirtualMesh(program.mesh).run(executable, given)
    return live.peak


def _draw(shape: tuple[int, ...], dtype: torch.dtype, random: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, generator=random, dtype=dtype)
    return torch.randint(0, 4, shape, generator=random)


def estimated_peak(program: Program) -> int:
    """Of one rank: values that may share memory are one, as large as the largest of them, from the first to the last
    use; nothing is written over."""
    lives = lifetimes(program.graph)
    sizes: dict[Any, int] = defaultdict(int)
    first: dict[Any, int] = {}
    for node in program.calls():
        share = lives.share[node]
        if share not in lives.foreign:
            sizes[share] = max(sizes[share], local_bytes(node, program.mesh))
            first.setdefault(share, lives.position[node])
    changes: dict[int, int] = defaultdict(int)
    for share, bytes_ in sizes.items():
        changes[first[share]] += bytes_
        changes[max(first[share], lives.share_last[share]) + 1] -= bytes_
    now = peak = 0
    for position in sorted(changes):
        now += changes[position]
        peak = max(peak, now)
    return peak
