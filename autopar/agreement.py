"""Do all ranks mean the same? Asked before anything runs, so that a difference is an error and never a hang."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from autopar.errors import RankError


class Agreement:
    """Compares short descriptions between all ranks. Collectives run on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.size = dist.get_world_size()

    def check(self, what: str, lines: Sequence[str]) -> None:
        """Raise RankError on every rank if the ranks' lines differ, saying which rank differs in what.

        One tiny all-reduce where they agree.
        """
        if self.size == 1:
            return
        digest = hashlib.sha256("\n".join(lines).encode()).digest()
        number = int.from_bytes(digest[:7], "big")
        both = torch.tensor([number, -number], dtype=torch.int64, device=self.device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        highest, lowest = both.tolist()
        if highest != -lowest:
            raise RankError(self._difference(what, list(lines)))

    def _difference(self, what: str, lines: list[str]) -> str:
        everyone: list[list[str]] = [[] for _ in range(self.size)]
        dist.all_gather_object(everyone, lines)
        versions: dict[tuple[str, ...], list[int]] = {}
        for rank, found in enumerate(everyone):
            versions.setdefault(tuple(found), []).append(rank)
        common = max(versions, key=lambda version: len(versions[version]))
        faults = []
        for version, ranks in versions.items():
            if version == common:
                continue
            pairs = [(a, b) for a, b in _aligned(version, common) if a != b][:3]
            shown = "; ".join(f"'{a}' where the others have '{b}'" for a, b in pairs)
            faults.append(f"  rank {', '.join(map(str, ranks))} has {shown}")
        return f"ranks disagree on {what}:\n" + "\n".join(faults) + f"\nGive every rank the same {what}."


def _aligned(a: tuple[str, ...], b: tuple[str, ...]) -> list[tuple[str, str]]:
    length = max(len(a), len(b))
    pad = ("nothing",)
    return list(zip(a + pad * (length - len(a)), b + pad * (length - len(b)), strict=True))
