"""Each collective once: what a rank gives, and what it makes of what it gets.

A collective is a `Move`, one of six primitives among the ranks of an axis, and what follows of its result: the value,
or the next move. What moves data supplies the primitives: tensor maths between all ranks (`together`, for the virtual
mesh and for micro-batches), torch.distributed (distributed.py), functional collectives for a compiler (functional.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopar.errors import RankError
from autopar.ir.layout import reduce_dim
from autopar.ir.ops.ops import collective_of, op, whole_of
from autopar.runtime.collectives.halo_rows import halo, halo_sum
from autopar.runtime.collectives.mesh_ops import join, pieces
from autopar.runtime.collectives.moves import Member, Move, Step
from autopar.runtime.collectives.rows_to_owners import combine, dispatch, route, token_places

__all__ = ["Member", "Move", "Step", "begin", "reduce_parts", "together"]

Tensor = torch.Tensor


def begin(target: Any, args: Sequence[Any], member: Member, owned: bool = False) -> Step:
    """The first move of a collective, or of the half that starts one. `args` in the order of its schema.

    owned: x may be written over. The result is memory of its own, or that of x if owned.
    """
    x, _axis, *rest = args
    if member.size == 1 and not collective_of(target).edges:
        return x if owned else x.clone()
    return _BEGIN[whole_of(target)](x, member, owned, *rest)


def together(requests: Sequence[tuple[Any, Sequence[Any]]]) -> list[Tensor]:
    """The results of all ranks of an axis, in its order, each in memory of its own. requests: (op, args) of each."""
    size = len(requests)
    steps = [begin(target, args, Member(size, place)) for place, (target, args) in enumerate(requests)]
    while isinstance(steps[0], Move):
        moves = [step for step in steps if isinstance(step, Move)]
        received = _meet(moves)
        steps = [move.then(tensor) for move, tensor in zip(moves, received, strict=True)]
    return _apart([step for step in steps if isinstance(step, Tensor)])


def reduce_parts(parts: list[Tensor], kind: str) -> Tensor:
    """The `kind` of what the ranks hold, in memory of its own and in their dtype."""
    return reduce_dim(torch.stack(parts), 0, kind).to(parts[0].dtype)


def _meet(moves: list[Move]) -> list[Tensor]:
    """What each rank gets, where all are in one process; several may get the same tensor."""
    parts, first = [move.x for move in moves], moves[0]
    match first.primitive:
        case "reduce":
            return [reduce_parts(parts, first.kind)] * len(parts)
        case "gather":
            return [torch.stack(parts)] * len(parts)
        case "reduce_scatter":
            return list(reduce_parts(parts, first.kind))
        case "exchange":
            return [torch.stack([part[place] for part in parts]) for place in range(len(parts))]
        case "shift":
            return [parts[move.source].clone() for move in moves]
        case "rows":
            return _rows_sent(moves)


def _rows_sent(moves: list[Move]) -> list[Tensor]:
    for place, move in enumerate(moves):
        sent = tuple(other.sent[place] for other in moves)
        if sent != move.received or sum(move.sent) != len(move.x):
            raise RankError(
                f"rank {place} of the axis awaits {move.received} rows and {sent} are sent to it; it sends "
                f"{move.sent} of {len(move.x)}"
            )
    split = [move.x.split(move.sent) for move in moves]
    return [torch.cat([part[place] for part in split]) for place in range(len(moves))]


def _apart(results: list[Tensor]) -> list[Tensor]:
    """The results, of which no two lie in the same memory."""
    if len(results) == 1:  # also one without memory, whose place nobody may ask for
        return results
    seen: set[int] = set()
    apart = []
    for result in results:
        place = id(result.untyped_storage())  # torch keeps this object for as long as the memory
        apart.append(result.clone() if place in seen else result)
        seen.add(place)
    return apart


def _all_reduce(x: Tensor, member: Member, owned: bool, kind: str) -> Step:
    if kind == "logsumexp":
        return _logsumexp(x, _as_it_is)
    return Move("reduce", x, _as_it_is, kind, owned)


def _all_gather(x: Tensor, member: Member, owned: bool, dim: int, outer: int) -> Step:
    return Move("gather", x, lambda parts: join(parts, dim, outer))


def _reduce_scatter(x: Tensor, member: Member, owned: bool, dim: int, outer: int, kind: str) -> Step:
    if kind == "logsumexp":
        return _logsumexp(x, lambda whole: pieces(whole, member.size, dim, outer)[member.place])
    return Move("reduce_scatter", pieces(x, member.size, dim, outer), _as_it_is, kind)


def _earlier(x: Tensor, member: Member, owned: bool, dim: int, outer: int, key: str) -> Step:
    """Gather: what lies behind a slice is there too where all are computed at once, and nobody reads it."""
    return _all_gather(x, member, owned, dim, outer)


def _later(x: Tensor, member: Member, owned: bool, dim: int, outer: int, key: str) -> Step:
    return _reduce_scatter(x, member, owned, dim, outer, "sum")


def _all_to_all(
    x: Tensor, member: Member, owned: bool, gather: int, gather_outer: int, scatter: int, scatter_outer: int
) -> Step:
    parts = pieces(x, member.size, scatter, scatter_outer)
    return Move("exchange", parts, lambda received: join(received, gather, gather_outer))


def _shift(x: Tensor, member: Member, owned: bool, by: int) -> Step:
    to, source = ((member.place + step) % member.size for step in (by, -by))
    if to == member.place:
        return x if owned else x.clone()
    return Move("shift", x, _as_it_is, to=to, source=source)


def _logsumexp(x: Tensor, then: Callable[[Tensor], Tensor]) -> Move:
    """log(sum over ranks of exp(x)), shifted by the maximum; -inf where all are. Short floats are added in float32."""
    dtype = x.dtype
    wide = x.float() if dtype in (torch.bfloat16, torch.float16) else x

    def add(top: Tensor) -> Move:
        shift = torch.where(top.abs() == torch.inf, 0, top)
        return Move("reduce", (wide - shift).exp(), lambda total: then((total.log() + shift).to(dtype)), owned=True)

    return Move("reduce", wide, add, "max")


def _as_it_is(result: Tensor) -> Tensor:
    return result


# Each function has the name of its collective.
_BEGIN: Mapping[Any, Callable[..., Step]] = {
    op(one.__name__.strip("_")): one
    for one in (
        _all_reduce, _all_gather, _reduce_scatter, _all_to_all, _shift, halo, halo_sum, _earlier, _later, route,
        token_places, dispatch, combine,
    )
}  # fmt: skip
