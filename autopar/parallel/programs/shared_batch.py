"""Find the tensors of a batch that lie in memory which a step writes: it may read there what it wrote."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, getitem, is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.capture import Captured
from autopar.capture.capture import state_of
from autopar.capture.inputs.shared_memory import overlapping
from autopar.capture.python.guards import Guards
from autopar.capture.python.scalars import GONE
from autopar.capture.python.spots import BY_ITEM, Spot, SpotKey
from autopar.ir.program import BUFFERS
from autopar.parallel.weights.owners import Owners
from autopar.torch_compat import storage_of
from autopar.torch_identity import tensors_in_memory_of

_holder, _key = attrgetter("holder"), attrgetter("key")


def lying_in_model(model: nn.Module, leaves: Sequence[tuple[int, torch.Tensor]]) -> tuple[str, ...]:
    """Which tensors of a batch lie in memory of the model: what is not known of a program that is not there yet."""
    batch = [(f"tensor {i} of the batch", leaf) for i, leaf in leaves]
    found = overlapping([*((entry.name, tensor) for entry, tensor in state_of(model).entries), *batch])
    own = {told for told, _ in batch}
    return tuple(f"{one} {other}" for (one, _), (other, _) in found if one not in own and other in own)


@dataclass(slots=True)
class WrittenMemory:
    """What the programs of a call write. spots: where the model's tensors stand, with whether they are written; those
    that are only read count where leaves of the batch are written."""

    spots: dict[SpotKey, tuple[Spot, bool]] = field(default_factory=dict)
    leaves: frozenset[int] = frozenset()

    def add(self, captured: Captured, owners: Owners, guards: Guards) -> None:
        """Know what another program writes."""
        written = {
            id(owners.tensor(out.name))
            for out in captured.program.outputs
            if out.kind in (*BUFFERS, "weight") and (out.kind != "buffer" or out.name not in captured.rebound)
        }
        for key, spot in guards.index.items():
            is_written = id(spot.value) in written
            is_held = isinstance(spot.holder, BY_ITEM) and isinstance(spot.value, torch.Tensor)
            if is_held and (is_written or captured.written):
                self.spots[key] = spot, is_written or (key in self.spots and self.spots[key][1])
        self.leaves |= captured.written

    def met(self, leaves: Sequence[tuple[int, torch.Tensor]]) -> tuple[str, ...]:
        """What lies in each other's memory, of a batch and of what these programs read and write, as ranks compare
        it."""
        if not self.spots and not self.leaves:
            return ()
        now = self._now()
        shared = [(i, leaf) for i, leaf in leaves if _is_shared(leaf, [*now, *(x for j, x in leaves if j != i)])]
        if not shared:
            return ()
        storages = {storage_of(leaf) for _, leaf in shared}
        batch = [((f"tensor {i} of the batch", i in self.leaves), leaf) for i, leaf in shared]
        spots = zip(self.spots.values(), now, strict=True)
        held = [((spot.name, is_written), x) for (spot, is_written), x in spots if _lies_in(x, storages)]
        return tuple(
            f"{one} lies in the memory of {other}"
            for (((one, is_written), _), ((other, its), _)) in overlapping([*batch, *held])
            if is_written or its
        )

    def _now(self) -> list[Any]:
        """What stands at the spots; None where nothing does any more."""
        spots = [spot for spot, _ in self.spots.values()]
        try:
            return list(map(getitem, map(_holder, spots), map(_key, spots)))
        except GONE:
            return [None] * len(spots)  # the program is made anew


def _lies_in(value: Any, storages: Container[int | None]) -> bool:
    return isinstance(value, torch.Tensor) and storage_of(value) in storages


def _is_shared(leaf: torch.Tensor, others: list[Any]) -> bool:
    """Whether a leaf is another tensor, or others lie in its memory."""
    if isinstance(leaf, DTensor) or leaf.device.type == "meta" or storage_of(leaf) is None:
        return False
    return tensors_in_memory_of(leaf) > 1 or any(map(partial(is_, leaf), others))
