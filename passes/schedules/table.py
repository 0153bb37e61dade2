"""The schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autopar.ir.schedule import Action, Costs
from autopar.passes.schedules.gpipe import gpipe
from autopar.passes.schedules.interleaved import interleaved
from autopar.passes.schedules.one_f_one_b import one_f_one_b
from autopar.passes.schedules.placement import in_a_v, in_rounds
from autopar.passes.schedules.zb_h1 import zb_h1
from autopar.passes.schedules.zb_h2 import zb_h2
from autopar.passes.schedules.zb_v import zb_v

Orders = tuple[tuple[Action, ...], ...]  # the actions of each rank


@dataclass(frozen=True, slots=True)
class Entry:
    """order: of (stages, ranks, microbatches, costs). chunks: stages on a rank if nobody says otherwise.
    place: the rank of each stage, of (stages, ranks)."""

    order: Callable[[int, int, int, Costs], Orders]
    chunks: int = 1
    place: Callable[[int, int], tuple[int, ...]] = in_rounds


SCHEDULES: Mapping[str, Entry] = {
    "gpipe": Entry(gpipe),
    "1f1b": Entry(one_f_one_b),
    "interleaved-1f1b": Entry(interleaved, chunks=2),
    "zb-h1": Entry(zb_h1),
    "zb-h2": Entry(zb_h2),
    "zb-v": Entry(zb_v, chunks=2, place=in_a_v),
}
