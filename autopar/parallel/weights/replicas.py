"""Compare replicas: a digest of each parameter and buffer, over the axes that replicate it.

Every rank computes the same updates in the same order, so that replicas are equal bit by bit; what differs was written
by some ranks only. If the ranks along each single axis agree, all replicas do: one all-reduce an axis is enough, and
only a fault makes the ranks tell each other more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autopar.errors import AutoparError, RankError, name_ranks
from autopar.ir.mesh import PIPELINE
from autopar.parallel.agree.agreement import Agreement, lost_peers
from autopar.parallel.weights.store import ParameterStore
from autopar.runtime.kernels import host
from autopar.torch_compat import local_of

# Elements whose products are in memory at a time: on a CPU what fits into its cache, elsewhere what is worth a launch.
PIECE, PIECE_ON_DEVICE = 1 << 16, 1 << 22
SHOWN = 8  # parameters in a message
SMALL = 1 << 24  # elements: of larger ones a message does not say by how much they differ
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GOLDEN = 0x1E3779B97F4A7C15  # odd, and without a pattern


@dataclass(frozen=True, slots=True)
class _Part:
    """What this rank holds of a parameter or buffer. axes: those whose ranks hold the same."""

    title: str
    value: torch.Tensor
    axes: tuple[str, ...]
    owner: int | None


class Replicas:
    """Compares what ranks hold that should be the same. every: training steps from one check to the next, or None."""

    def __init__(self, store: ParameterStore, agreement: Agreement, every: int | None) -> None:
        self._store, self._agreement = store, agreement
        self._every = None if agreement.size == 1 else every

    def is_due(self, steps: int) -> bool:
        """Whether a check belongs before the step that follows `steps` steps."""
        return self._every is not None and steps % self._every == 0

    def check(self, steps: int) -> None:
        """Raise RankError on every rank if replicas differ, naming them. Every rank must call this."""
        parts = self._parts()
        digests = _digests(parts, self._agreement.device)
        differing = {axis: self._differing(axis, parts, digests) for axis in self._axes()}
        if self._agreement.any("replicas", any(differing.values())):
            raise RankError(self._fault(parts, digests, differing, steps))

    # -- what is compared ---------------------------------------------------------------------------------------

    def _axes(self) -> list[str]:
        return [name for name, size in self._store.distributor.mesh.axes if size > 1]

    def _parts(self) -> list[_Part]:
        """In an order that is the same on every rank."""
        store, where = self._store, self._store.distributor
        parts = []
        for entry, tensor in store.entries():
            owner = store.owners.get(entry.name)
            layout = store.layouts.get(entry.name)
            split = () if layout is None else layout.axes
            axes = tuple(axis for axis in self._axes() if axis not in split and (axis != PIPELINE or owner is None))
            value = local_of(tensor) if entry.kind == "parameter" else tensor
            if not where.is_owner(owner):
                value = value.new_empty(0)
            parts.append(_Part(f"{entry.kind} '{' = '.join(entry.names)}'", value.detach(), axes, owner))
        return parts

    def _differing(self, axis: str, parts: list[_Part], digests: torch.Tensor) -> list[int]:
        """Which of the parts that `axis` replicates differ along it; the same on all ranks of its group."""
        compared = [i for i, part in enumerate(parts) if axis in part.axes]
        if not compared:
            return []
        mine = digests[compared]
        both = torch.cat([mine, ~mine])  # the largest of each; unlike a negative, every complement is a number
        with lost_peers("comparing the replicas of all ranks"):
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._store.distributor.device_mesh.get_group(axis))
            highest, lowest = both.view(2, -1).tolist()
        return [i for i, high, low in zip(compared, highest, lowest, strict=True) if high != ~low]

    # -- what is said -------------------------------------------------------------------------------------------

    def _fault(self, parts: list[_Part], digests: torch.Tensor, differing: Mapping[str, list[int]], steps: int) -> str:
        """A line for each parameter that differs. Every rank calls this."""
        sizes: dict[int, float] = {}
        for axis, places in differing.items():
            for i in places[:SHOWN]:
                sizes[i] = max(sizes.get(i, 0.0), self._spread(axis, parts[i].value))
        mine = {i for places in differing.values() for i in places}
        every = sorted(set().union(*self._agreement.everyone("replicas", mine)))
        wanted = every[:SHOWN]
        told = {i: (int(digests[i]), sizes.get(i)) for i in wanted}
        everyone = self._agreement.everyone("replicas", told)
        lines = [line for i in wanted for line in self._lines(parts[i], [said[i] for said in everyone])]
        if every[SHOWN:]:
            lines.append(f"  and {len(every) - SHOWN} more")
        after = f"after {steps} training step{'s' * (steps != 1)}"
        return (
            f"{after}, ranks that should hold the same values hold others:\n" + "\n".join(lines) + "\nSomething wrote "
            "to a part on these ranks only: look for what depends on the rank, or on its random numbers, between the "
            "steps. model.check_replicas() looks at any time."
        )

    def _lines(self, part: _Part, told: list[tuple[int, float | None]]) -> list[str]:
        """What is wrong with the replicas of one parameter, each set of ranks that should be alike on its own."""
        mesh = self._store.distributor.mesh
        alike: dict[tuple[int, ...], list[int]] = {}
        for rank in range(mesh.size):
            coord = mesh.coord(rank)
            if part.owner is None or coord[PIPELINE] == part.owner:
                place = tuple(at for axis, at in coord.items() if axis not in part.axes)
                alike.setdefault(place, []).append(rank)
        lines = []
        for ranks in alike.values():
            versions: dict[int, list[int]] = {}
            for rank in ranks:
                versions.setdefault(told[rank][0], []).append(rank)
            usual, *others = sorted(versions.values(), key=len, reverse=True)
            most = max((told[rank][1] or 0.0 for rank in ranks), default=0.0)
            size = f" by up to {most:.3g}" if most and math.isfinite(most) else ""
            for group in others:
                differ = "differ" if group[1:] else "differs"
                lines.append(f"  {part.title}: {name_ranks(group)} {differ} from {name_ranks(usual)}{size}")
        return lines

    def _spread(self, axis: str, value: torch.Tensor) -> float:
        """The largest difference of an element between the ranks of an axis, which all call this."""
        if not 0 < value.numel() <= SMALL:
            return 0.0
        exact = value.to(torch.complex128 if value.is_complex() else torch.float64).contiguous()
        exact = exact.to(self._agreement.device)
        real = torch.view_as_real(exact) if exact.is_complex() else exact
        both = torch.stack([real, -real])
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._store.distributor.device_mesh.get_group(axis))
        return float((both[0] + both[1]).max())


def every_of(check_replicas: int | None) -> int | None:
    """The option `check_replicas`, checked: steps between checks, None for none."""
    if check_replicas is None:
        return None
    if isinstance(check_replicas, bool) or not isinstance(check_replicas, int) or check_replicas < 0:
        raise AutoparError(f"check_replicas={check_replicas!r}: write a number of training steps, or None for never.")
    return check_replicas or None


def digest(value: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """One number for the bits of a tensor, on its device: products with odd weights, summed with wrap-around. A
    tensor of more elements than there are weights goes in pieces.

    An odd factor loses no bit: one element that changes always changes the digest.
    """
    dense = value.contiguous()
    dense = torch.view_as_real(dense) if dense.is_complex() else dense
    bits = dense.view(_INTEGERS[dense.element_size()]).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for piece in bits.split(max(1, weights.numel())):
        total = total * _GOLDEN + (piece * weights[: piece.numel()]).sum()
    return total


def weights_of(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers without a pattern, one for each position of a piece."""
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _GOLDEN
    return (mixed ^ (mixed >> 29)) * _GOLDEN | 1


def _digests(parts: list[_Part], device: torch.device) -> torch.Tensor:
    most = max((part.value.numel() * (1 + part.value.is_complex()) for part in parts if part.axes), default=0)
    weights = weights_of(min(most, PIECE if host.on_host(device) else PIECE_ON_DEVICE), device)
    nothing = torch.zeros((), dtype=torch.int64, device=device)
    return torch.stack([digest(part.value.to(device), weights) if part.axes else nothing for part in parts])
