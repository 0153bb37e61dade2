"""The rows beside a piece: `halo`, and `halo_sum`, its transpose.

A dim is `outer` runs of consecutive rows on each rank, which are every n-th of the runs of the whole (in every second
round in reverse, if `outer` is negative). So the run before one and the run behind it lie on a rank and its two
neighbours on the axis: each rank sends what the next one needs of its ends, and what the one before it needs. Where a
halo is longer than a run, all rows are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from autopar.runtime.collectives.mesh_ops import join, pieces
from autopar.runtime.collectives.moves import Member, Move, Step

Tensor = torch.Tensor


def halo(
    x: Tensor, member: Member, owned: bool, dim: int, outer: int, before: int, after: int, wrap: bool = False
) -> Step:
    """Each run with the `before` rows of the whole before it and the `after` rows behind it; zeros where it ends, or
    the rows of its other end if `wrap`."""
    runs = x.unflatten(dim, (abs(outer), -1)).unbind(dim)
    long = runs[0].shape[dim]
    if max(before, after) > long:
        return Move(
            "gather", x, lambda parts: _windows(join(parts, dim, outer), member, dim, outer, before, after, wrap)
        )
    firsts = [run.narrow(dim, 0, after) for run in runs]
    lasts = [run.narrow(dim, long - before, before) for run in runs]

    def then(ends: _Ends) -> Tensor:
        parts = zip(runs, _runs(member, outer), strict=True)
        return torch.cat(
            [part for own, run in parts for part in (ends.before(run, wrap), own, ends.behind(run, wrap))], dim
        )

    return _exchanged(firsts, lasts, member, outer, then)


def halo_sum(x: Tensor, member: Member, owned: bool, dim: int, outer: int, before: int, after: int) -> Step:
    """Take the halos off runs: what the others have in their halos is added where it belongs."""
    runs = x.unflatten(dim, (abs(outer), -1)).unbind(dim)
    long = runs[0].shape[dim] - before - after
    if max(before, after) > long:
        return Move("reduce_scatter", _spread(runs, member, dim, outer, before, after), lambda found: found)
    own = torch.cat([run.narrow(dim, before, long) for run in runs], dim)
    firsts = [run.narrow(dim, 0, before) for run in runs]
    lasts = [run.narrow(dim, before + long, after) for run in runs]

    def then(ends: _Ends) -> Tensor:
        then = own.clone() if len(runs) == 1 else own
        for i, run in enumerate(_runs(member, outer)):
            then.narrow(dim, i * long, after).add_(ends.before(run))
            then.narrow(dim, (i + 1) * long - before, before).add_(ends.behind(run))
        return then

    return _exchanged(firsts, lasts, member, outer, then)


@dataclass(frozen=True, slots=True)
class _Ends:
    """The ends of a rank's runs and of those beside them, by round.

    firsts, lasts: its own. up, down: what the rank before it and the one behind it have sent.
    """

    member: Member
    outer: int
    firsts: Sequence[Tensor]
    lasts: Sequence[Tensor]
    up: Sequence[Tensor]
    down: Sequence[Tensor]

    def before(self, run: int, wrap: bool = False) -> Tensor:
        """The last rows of the run before one of the rank's."""
        return self._of(run - 1, wrap, self.lasts, goes_up=True)

    def behind(self, run: int, wrap: bool = False) -> Tensor:
        """The first rows of the run behind one of the rank's."""
        return self._of(run + 1, wrap, self.firsts, goes_up=False)

    def _of(self, run: int, wrap: bool, own: Sequence[Tensor], goes_up: bool) -> Tensor:
        size, count = self.member.size, self.member.size * abs(self.outer)
        if not wrap and not 0 <= run < count:
            return torch.zeros_like(own[0])
        place, i = _holder(run % count, size, self.outer)
        if place == self.member.place:
            return own[i]
        return (self.up if goes_up != _is_mirrored(i, self.outer) else self.down)[i]


def _exchanged(
    firsts: Sequence[Tensor], lasts: Sequence[Tensor], member: Member, outer: int, then: Callable[[_Ends], Tensor]
) -> Step:
    """What follows of the ends of the runs beside a rank's: two shifts, in which a rank sends the last rows of its runs
    to the next one and the first rows to the one before it; of mirrored runs the other way round."""
    rounds = range(abs(outer))
    to_next = [firsts[i] if _is_mirrored(i, outer) else lasts[i] for i in rounds]
    to_last = [lasts[i] if _is_mirrored(i, outer) else firsts[i] for i in rounds]

    def go_down(up: Sequence[Tensor]) -> Step:
        return _shifted(to_last, member, -1, lambda down: then(_Ends(member, outer, firsts, lasts, up, down)))

    return _shifted(to_next, member, 1, go_down)


def _shifted(ends: Sequence[Tensor], member: Member, by: int, then: Callable[[Sequence[Tensor]], Step]) -> Step:
    """What follows of the ends of the rank `by` places before, as one message; of nothing none is sent."""
    sizes = [end.numel() for end in ends]
    if member.size == 1 or not sum(sizes):
        return then(ends)

    def taken(message: Tensor) -> Step:
        return then([part.view(end.shape) for part, end in zip(message.split(sizes), ends, strict=True)])

    to, source = ((member.place + step) % member.size for step in (by, -by))
    return Move("shift", torch.cat([end.reshape(-1) for end in ends]), taken, to=to, source=source)


def _windows(whole: Tensor, member: Member, dim: int, outer: int, before: int, after: int, wrap: bool) -> Tensor:
    """The runs of a rank, with their halos, out of the whole."""
    rows = whole.shape[dim]
    long = rows // (member.size * abs(outer))
    if wrap:
        padded = torch.cat([whole.narrow(dim, rows - before, before), whole, whole.narrow(dim, 0, after)], dim)
    else:
        padded = torch.constant_pad_nd(whole, [*[0] * 2 * (whole.ndim - 1 - dim), before, after])
    return torch.cat([padded.narrow(dim, run * long, before + long + after) for run in _runs(member, outer)], dim)


def _spread(runs: Sequence[Tensor], member: Member, dim: int, outer: int, before: int, after: int) -> Tensor:
    """The transpose of `_windows`, as the piece of each rank."""
    long = runs[0].shape[dim] - before - after
    shape = list(runs[0].shape)
    shape[dim] = member.size * len(runs) * long + before + after
    whole = runs[0].new_zeros(shape)
    for run, rows in zip(_runs(member, outer), runs, strict=True):
        whole.narrow(dim, run * long, rows.shape[dim]).add_(rows)
    return pieces(whole.narrow(dim, before, shape[dim] - before - after), member.size, dim, outer)


def _runs(member: Member, outer: int) -> list[int]:
    """The runs of the whole that a rank has, in its order."""
    size, place = member.size, member.place
    return [i * size + (size - 1 - place if _is_mirrored(i, outer) else place) for i in range(abs(outer))]


def _holder(run: int, size: int, outer: int) -> tuple[int, int]:
    """The rank that has a run of the whole, and which of its runs it is."""
    i, place = divmod(run, size)
    return size - 1 - place if _is_mirrored(i, outer) else place, i


def _is_mirrored(i: int, outer: int) -> bool:
    """True if the ranks have the runs of a round in reverse."""
    return outer < 0 and i % 2 == 1
