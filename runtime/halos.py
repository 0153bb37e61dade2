"""The rows beside a piece: `halo`, and `halo_sum`, its transpose.

A dim is `outer` runs of consecutive rows on each rank, which are every n-th of the runs of the whole (in every second
round in reverse, if `outer` is negative). Ranks give each other the rows at the ends of their runs; where a halo is
longer than a run, all rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.runtime.mesh_ops import join, pieces
from autopar.runtime.moves import Member, Move, Step

Tensor = torch.Tensor


def halo(x: Tensor, member: Member, owned: bool, dim: int, outer: int, before: int, after: int) -> Step:
    """Each run with the `before` rows of the whole before it and the `after` rows behind it; zeros where it ends."""
    runs = x.unflatten(dim, (abs(outer), -1)).unbind(dim)
    long = runs[0].shape[dim]
    if max(before, after) > long:
        return Move("gather", x, lambda parts: _windows(join(parts, dim, outer), member, dim, outer, before, after))
    firsts = [run.narrow(dim, 0, after) for run in runs]
    lasts = [run.narrow(dim, long - before, before) for run in runs]

    def then(parts: Tensor) -> Tensor:
        beside = _beside(parts, member, dim, outer, after)
        found = [part for run, (last, first) in zip(runs, beside, strict=True) for part in (last, run, first)]
        return torch.cat(found, dim)

    return Move("gather", _ends(firsts, lasts, dim), then)


def halo_sum(x: Tensor, member: Member, owned: bool, dim: int, outer: int, before: int, after: int) -> Step:
    """Of runs with a halo, the runs alone: what the others have in their halos is added where it belongs."""
    runs = x.unflatten(dim, (abs(outer), -1)).unbind(dim)
    long = runs[0].shape[dim] - before - after
    if max(before, after) > long:
        return Move("reduce_scatter", _spread(runs, member, dim, outer, before, after), lambda found: found)
    own = torch.cat([run.narrow(dim, before, long) for run in runs], dim)
    firsts = [run.narrow(dim, 0, before) for run in runs]
    lasts = [run.narrow(dim, before + long, after) for run in runs]

    def then(parts: Tensor) -> Tensor:
        found = own.clone() if len(runs) == 1 else own
        for i, (last, first) in enumerate(_beside(parts, member, dim, outer, before)):
            found.narrow(dim, i * long, after).add_(last)
            found.narrow(dim, (i + 1) * long - before, before).add_(first)
        return found

    return Move("gather", _ends(firsts, lasts, dim), then)


def _ends(firsts: Sequence[Tensor], lasts: Sequence[Tensor], dim: int) -> Tensor:
    """What a rank gives: the first rows of each run, and its last ones."""
    return torch.stack([torch.cat(pair, dim) for pair in zip(firsts, lasts, strict=True)])


def _beside(parts: Tensor, member: Member, dim: int, outer: int, first: int) -> list[tuple[Tensor, Tensor]]:
    """For each run of a rank: the last rows of the run before it, and the `first` ones of the run behind it."""
    count = member.size * abs(outer)
    nothing = torch.zeros_like(parts[0, 0])

    def ends(run: int) -> tuple[Tensor, Tensor]:
        given = parts[_holder(run, member.size, outer)] if 0 <= run < count else nothing
        return given.narrow(dim, 0, first), given.narrow(dim, first, given.shape[dim] - first)

    return [(ends(run - 1)[1], ends(run + 1)[0]) for run in _runs(member, outer)]


def _windows(whole: Tensor, member: Member, dim: int, outer: int, before: int, after: int) -> Tensor:
    """The runs of a rank, with their halos, out of the whole."""
    long = whole.shape[dim] // (member.size * abs(outer))
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
    return [
        i * size + (size - 1 - place if outer < 0 and i % 2 else place) for i in range(abs(outer))
    ]  # fmt: skip


def _holder(run: int, size: int, outer: int) -> tuple[int, int]:
    """The rank that has a run of the whole, and which of its runs it is."""
    i, place = divmod(run, size)
    return size - 1 - place if outer < 0 and i % 2 else place, i
