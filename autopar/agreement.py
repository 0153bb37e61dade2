"""Do all ranks mean the same? Asked before anything runs, so that a difference is an error and never a hang."""

from __future__ import annotations

import difflib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autopar.errors import RankError

T = TypeVar("T")


class Agreement:
    """Compares short descriptions between all ranks. Collectives run on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.size = dist.get_world_size()

    def check(self, what: str, lines: Sequence[str]) -> None:
        """Raise RankError on every rank if the ranks' lines differ, saying which rank differs in what.

        One tiny all-reduce where they agree.
        """
        if self._equal(what, lines):
            return
        everyone: list[list[str]] = self._everyone(what, list(lines))
        versions: dict[tuple[str, ...], list[int]] = {}
        for rank, found in enumerate(everyone):
            versions.setdefault(tuple(found), []).append(rank)
        common = max(versions, key=lambda version: len(versions[version]))
        faults = []
        for version, ranks in versions.items():
            if version == common:
                continue
            pairs = _aligned(version, common)[:3]
            shown = "; ".join(f"'{a}' where the others have '{b}'" for a, b in pairs)
            faults.append(f"  rank {', '.join(map(str, ranks))} has {shown}")
        raise RankError(f"ranks disagree on the {what}:\n" + "\n".join(faults) + f"\nGive every rank the same {what}.")

    def together(self, what: str, make: Callable[[], T]) -> T:
        """What `make` returns; if it fails on any rank, every rank raises: its own error, or RankError with theirs.

        `make` moves no data between ranks.
        """
        failure: Exception | None = None
        try:
            made = make()
        except Exception as error:
            failure = error
        said = [] if failure is None else [f"{type(failure).__name__}: {failure}"]
        if not self._equal(what, said):
            everyone = self._everyone(what, said)
            failed = [f"  rank {rank}: {found[0]}" for rank, found in enumerate(everyone) if found]
            if failure is None:
                raise RankError(f"the {what} failed on some ranks, not on this one:\n" + "\n".join(failed))
        if failure is not None:
            raise failure
        return made

    def check_data(self, digests: Sequence[str], part: str, advice: str) -> None:
        """Raise RankError on every rank if ranks that should hold the same `part` of the data have other digests."""
        if self.size == 1:
            return
        everyone = self._everyone("batch", (part, list(digests)))
        first: dict[str, int] = {}
        faults = []
        for rank, (own, found) in enumerate(everyone):
            other = first.setdefault(own, rank)
            places = [str(i) for i, (a, b) in enumerate(zip(found, everyone[other][1], strict=True)) if a != b]
            if places:
                faults.append(f"  rank {rank} has other values than rank {other} in argument {', '.join(places)}")
        if faults:
            raise RankError("ranks were given different data:\n" + "\n".join(faults) + f"\n{advice}")

    def _equal(self, what: str, lines: Sequence[str]) -> bool:
        if self.size == 1:
            return True
        digest = hashlib.sha256("\n".join(lines).encode()).digest()
        number = int.from_bytes(digest[:7], "big")
        both = torch.tensor([number, -number], dtype=torch.int64, device=self.device)
        with lost_peers(f"comparing the {what} of all ranks"):
            dist.all_reduce(both, op=dist.ReduceOp.MAX)
            highest, lowest = both.tolist()
        return bool(highest == -lowest)

    def _everyone(self, what: str, mine: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.size
        with lost_peers(f"comparing the {what} of all ranks"):
            dist.all_gather_object(everyone, mine)
        return everyone


@contextmanager
def lost_peers(doing: str) -> Iterator[None]:
    """What the backend says of a peer that is gone, as a RankError. `doing`: what this rank was at."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(
            f"rank {dist.get_rank()} lost its peers while {doing}.\n"
            f"  Look for the first error of another rank. The backend says: {str(error).strip()}"
        ) from error


def _aligned(a: tuple[str, ...], b: tuple[str, ...]) -> list[tuple[str, str]]:
    """The lines that differ, side by side; 'nothing' beside what only one has."""
    found: list[tuple[str, str]] = []
    for kind, i, i_end, j, j_end in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if kind != "equal":
            found += itertools.zip_longest(a[i:i_end], b[j:j_end], fillvalue="nothing")
    return found
