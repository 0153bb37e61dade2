"""Know what a model leaves out where a mask has no rows: `if rows.numel() == 0: continue`, `for e in hit.nonzero()`.

A captured step computes for every mask, and what comes of rows that are none is nowhere seen. But the plain module
makes no call for them, and a parameter of which no call is made has no gradient: AdamW leaves it alone, while zeros for
a gradient let weights decay. Runs on shapes, in which some masks have rows and others none, show which calls are left
out. They have to be that alone, up to the one that puts the rows back, which then stands for what it adds to. The step
puts out how many rows each mask has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopar.capture.draws.joins import CoinJoin, in_whole
from autopar.capture.draws.trail import Place, Trail, TrailStep, numbered
from autopar.capture.draws.uses import Uses
from autopar.capture.rows.row_rules import puts_back
from autopar.torch_compat import storage_of

Tensor = torch.Tensor
Has = Callable[[int], bool]  # whether a mask has rows, by its number
_RESULTS = 3  # of a call that puts rows back: what it gives, and what it wrote into


class UnfitRows(BaseException):
    """A model does something else without rows than to leave calls out. No error: a user's `except Exception` must not
    stop it."""


@dataclass(frozen=True, slots=True)
class Turns:
    """What a loop goes through, in place of the places that a mask has. Raises UnfitRows where they are counted."""

    turns: Iterator[Any]

    def __iter__(self) -> Iterator[Any]:
        return self.turns

    def __len__(self) -> int:
        raise UnfitRows

    def __getitem__(self, at: Any) -> Any:
        raise UnfitRows


@dataclass(slots=True)
class RowSides:
    """A run on shapes in which some masks have rows. Each mask begins a segment of its trail.

    bases: by the segment and number of a call that puts rows back, the mask and the place of what it adds them to.
    kept: of masks whose rows are put together, one that has rows: together they have all."""

    has: Has
    trail: Trail
    bases: dict[tuple[int, int], tuple[int, Place]] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    _mask_of: dict[Any, tuple[Tensor, int]] = field(default_factory=dict)  # of places, by where they lie

    @staticmethod
    def of(has: Has) -> RowSides:
        return RowSides(has, Trail(lambda number, _, read: has(number), is_shapeless=True))

    def begin(self) -> tuple[int, bool]:
        """The number of the next mask, and whether it has rows."""
        number = len(self.trail.segments) - 1
        self.trail.segments.append([])
        return number, self.has(number)

    def selected(self, number: int, places: Sequence[Tensor]) -> None:
        """The places that a mask selects."""
        self._mask_of.update((lies_at(place), (place, number)) for place in places)

    def cut(self) -> tuple[int, int]:
        """Rows are cut, which may be put together with others: keep a place for that among the calls of their mask."""
        at = self.trail.at
        self.trail.segments[-1].append(TrailStep(hash("joined"), (), (), numbered()))
        return at

    def joined(self, places: Sequence[tuple[int, int]], pieces: Sequence[Tensor], whole: Tensor) -> None:
        """Rows put together that were cut: as if each mask put its own among those of the masks before it."""
        self.kept.update(segment - 1 for segment, _ in places[:1])
        base: Place = ("joined",)
        for at, piece in zip(places, pieces, strict=True):
            segment, number = at
            steps = self.trail.segments[segment]
            steps[number] = replace(steps[number], operands=(self.trail.place_of(piece), base))
            self.bases[at] = segment - 1, base
            base = ("call", *at, 0)
        self.trail.joined(whole, base)

    def saw(self, function: Any, args: Any, kwargs: Any, result: Any, written: Sequence[Tensor]) -> None:
        """A call with what it returned, and what it wrote into."""
        name = getattr(function, "__name__", "")
        mask = self._mask_in((args[1:], kwargs)) if puts_back(name) else None
        base = None if mask is None else self.trail.place_of(args[0])
        at = self.trail.at
        self.trail.saw(function, args, kwargs, result, written)
        if mask is not None and base is not None and self.trail.at != at:
            self.bases[at] = mask, base
        if args:  # other views of the places
            of = args[0] if isinstance(args[0], Tensor) and self._mask_in(args[0]) is not None else None
            is_taken = of is None and mask is None and function is Tensor.__getitem__
            self.shown(args[1:] if is_taken else of, result)

    def shown(self, of: Any, made: Any) -> None:
        """What is made of the places of a mask alone."""
        mask = self._mask_in(of)
        for one in made if isinstance(made, (tuple, list)) else (made,):
            if mask is not None and isinstance(one, Tensor):
                self._mask_of[lies_at(one)] = one, mask

    def _mask_in(self, value: Any) -> int | None:
        if isinstance(value, Tensor):
            known = self._mask_of.get(lies_at(value))
            return None if known is None else known[1]
        if isinstance(value, dict):
            return self._mask_in(list(value.values()))
        found = [self._mask_in(item) for item in value] if isinstance(value, (tuple, list)) else []
        return next((mask for mask in found if mask is not None), None)


def lies_at(tensor: Tensor) -> Any:
    """Tell where the elements of a tensor lie: alike for tensors that show the same ones in one shape."""
    storage = storage_of(tensor)
    return id(tensor) if storage is None else (storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


@dataclass(frozen=True, slots=True)
class RowUses:
    """Which parameters a step uses, by which masks have rows. parts: what is left out where a mask has none."""

    uses: Uses
    parts: Mapping[int, CoinJoin]

    def unused(self, counts: Tensor) -> frozenset[str]:
        """The parameters of which the plain module makes no call. counts: of the rows of each mask."""
        return self.uses.unused([count > 0 for count in counts.tolist()])

    def skips(self, counts: Tensor) -> dict[int, int]:
        """The random ops that the plain module leaves out, by how many there were before."""
        has = [count > 0 for count in counts.tolist()]
        return {part.before: part.draws for part in self.parts.values() if part.draws and not has[part.coin]}


def row_uses(run: Callable[[Has], RowSides], names: Sequence[str | None]) -> RowUses | None:
    """What a step uses; None where it hangs on no number of rows. run: makes a run on shapes. names: as of `Uses`.

    Raises UnfitRows where the model does something else than to leave out calls."""
    whole, parts = run(_all), dict[int, CoinJoin]()
    for has in (whole.kept.__contains__, _odd, _even):
        for mask, part in _parts(whole, run(has)).items():
            if parts.setdefault(mask, part) != part:
                raise UnfitRows
        if all(part.start == part.end for part in parts.values()):
            return None
    parts = {mask: part for mask, part in parts.items() if part.start != part.end}
    return RowUses(Uses.of(whole.trail, parts, names), parts) if parts else None


def _all(mask: int) -> bool:
    return True


def _odd(mask: int) -> bool:
    return mask % 2 == 1


def _even(mask: int) -> bool:
    return mask % 2 == 0


def _parts(whole: RowSides, other: RowSides) -> dict[int, CoinJoin]:
    """What a run leaves out of the whole one, by the mask that has no rows. Raises UnfitRows unless that is all in
    which they differ: a call takes the same, and what rows would be added to where they are left out."""
    if len(whole.trail.segments) != len(other.trail.segments):
        raise UnfitRows
    parts, instead = dict[int, CoinJoin](), dict[Place, Place]()
    for number, (steps, rest) in enumerate(zip(whole.trail.segments, other.trail.segments, strict=True)):
        mask, count = number - 1, len(steps) - len(rest)
        if mask < 0 or other.has(mask):
            part = CoinJoin(mask, True, 0, 0)
        else:
            alike = (_is_same(*pair, instead, parts) for pair in zip(steps, rest, strict=False))
            start = next((at for at, is_same in enumerate(alike) if not is_same), min(len(steps), len(rest)))
            part = parts[mask] = _part(whole, mask, start, start + count)
            instead.update(part.pairs)
        kept = [*steps[: part.start], *steps[part.end :]]
        if len(kept) != len(rest) or not all(_is_same(*pair, instead, parts) for pair in zip(kept, rest, strict=True)):
            raise UnfitRows
    return parts


def _part(whole: RowSides, mask: int, start: int, end: int) -> CoinJoin:
    """Calls that are left out where a mask has no rows. pairs: of what puts rows back, what that adds them to."""
    steps, part = whole.trail.segments[mask + 1], CoinJoin(mask, True, start, end)
    pairs: list[tuple[Place, Place]] = []
    for number in range(start, end):
        by, base = whole.bases.get((mask + 1, number), (-1, ()))
        if by == mask:
            pairs += [(("call", mask + 1, number, i), base) for i in range(_RESULTS)]
        elif not all(part.has(place) for place in steps[number].written):
            raise UnfitRows
    earlier = [step.draws for segment in whole.trail.segments[: mask + 1] for step in segment[-1:]]
    before = steps[start - 1].draws if start else max(earlier, default=0)
    draws = steps[end - 1].draws - before if end > start else 0
    return replace(part, pairs=tuple(pairs), before=before, draws=draws)


def _is_same(step: TrailStep, found: TrailStep, instead: Mapping[Place, Place], parts: Mapping[int, CoinJoin]) -> bool:
    """True if two calls are the same. instead: of places in the first run, those that stand for them in the other."""
    if step.key != found.key or len(step.operands) != len(found.operands):
        return False
    pairs = zip(step.operands, found.operands, strict=True)
    return all(_base(place, instead) == in_whole(other, parts) for place, other in pairs)


def _base(place: Place, instead: Mapping[Place, Place]) -> Place:
    while place in instead:
        place = instead[place]
    is_made = place[:1] == ("by",)
    return tuple(_base(part, instead) if isinstance(part, tuple) else part for part in place) if is_made else place
