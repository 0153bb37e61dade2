"""What a stage of a pipeline keeps in the host's memory of each micro-batch: its copies, their time, and its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.planning.price.activation_copies import Copies
from autopar.planning.price.layers import Layers
from autopar.planning.price.moving import Moving, Net
from autopar.planning.price.whole_step import roads_of
from autopar.planning.shallow.graph_track import BACKWARD, FORWARD, Road
from autopar.planning.space.candidates import Candidate
from autopar.planning.space.deal import Part, Share

KINDS = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD}  # of a stage's graphs, by the pass that says what they copy


@dataclass(frozen=True, slots=True)
class StageCopies:
    """Bytes of a micro-batch. waiting: between its passes. out, back: of these, beside the turns of other micro-batches
    (OUT and IN). inside: what its graphs copy themselves, out and back. beside: on the device at most while a graph of
    the stage runs, more than without copies, and than what stays there. us: by which copies make each graph longer."""

    waiting: float
    out: float
    back: float
    inside: tuple[float, float]
    beside: float
    us: Mapping[str, float]

    @classmethod
    def of(
        cls, candidate: Candidate, layers: Layers, share: Share, between: int, has_piece: bool, net: Net
    ) -> StageCopies:
        """between: turns of its rank between the passes. Of a stage that begins or ends within a layer: by as many
        whole layers as come nearest. has_piece: True if it has a piece of one more. Raises AutoparError as
        `Micros.local`."""
        part, saved = share.time, share.saved
        count = max(1, round(saved.layers))
        whole = Part(part.entry, count, part.behind, min(count, round(saved.again)))
        roads = roads_of(candidate, layers, layers.ranks_of(candidate), whole)
        roads = {kind: road.with_piece(count) if has_piece else road for kind, road in roads.items()}
        copies = Copies.of_stage(roads, candidate.moved, net.machine, between)
        plain, moved = _Run.of(roads, net, None), _Run.of(roads, net, copies)
        stays = moved.kept - copies.out
        most = max(moved.back + copies.out, moved.forward + copies.back)  # beside the turn of another micro-batch
        scale = saved.layers / count
        return cls(
            scale * copies.bytes_, scale * copies.out, scale * copies.back,
            (scale * (copies.bytes_ - copies.out), scale * (copies.bytes_ - copies.back)),
            scale * (most - stays - (plain.back - plain.kept)),
            {kind: scale * (moved.us[of] - plain.us[of]) for kind, of in KINDS.items()},
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Run:
    """The graphs of a stage. us: by kind. kept: bytes behind the forward graph. forward, back: at most in each."""

    us: Mapping[str, float]
    kept: float
    forward: float
    back: float

    @classmethod
    def of(cls, roads: Mapping[str, Road], net: Net, copies: Copies | None) -> _Run:
        forward = Moving(net, copies=copies)
        forward.run(roads[FORWARD])
        kept = forward.level
        came = copies.back - copies.out if copies is not None else 0.0
        back = Moving(net, level=kept + came, copies=copies)
        back.run(roads[BACKWARD])
        us = {FORWARD: forward.streams.device, BACKWARD: back.streams.device}
        return cls(us, kept, forward.most(), back.most())
