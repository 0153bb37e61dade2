"""What a micro-batch costs a rank, by the equal layers that it has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from autopar.planning.shallow.stage_graphs import NO_MESSAGE, LayerMessage
from autopar.planning.space.deal import Part, Share

Pace = tuple[tuple[float, float], ...]  # by section (`Slot.section`): us on the device, us of the host that launches


class Linear(NamedTuple):  # of which each stage of each plan has thirty
    """outside + layers * each. entry: the part of what is outside that comes before the layers."""

    outside: float
    each: float
    entry: float = 0.0

    def __call__(self, layers: float) -> float:
        return self.outside + layers * self.each

    def plus(self, more: float) -> Linear:
        """With more outside of the layers."""
        return self._replace(outside=self.outside + more)

    def with_(self, other: Linear) -> Linear:
        """Both together."""
        return Linear(self.outside + other.outside, self.each + other.each, self.entry + other.entry)

    def toward(self, other: Linear, some: float, layers: float) -> Linear:
        """With some of so many layers as they are in another one."""
        return self._replace(each=self.each + (other.each - self.each) * some / layers) if some else self

    def minus(self, other: Linear) -> Linear:
        """Without a part."""
        return Linear(self.outside - other.outside, self.each - other.each, self.entry - other.entry)

    def on(self, part: Part) -> Linear:
        """The line of what has only a part of what is outside."""
        if not self.outside and not self.entry:
            return self
        entry = part.entry * self.entry
        return Linear(entry + part.behind * (self.outside - self.entry), self.each, entry)

    @property
    def sections(self) -> tuple[float, float, float]:
        """The values before the layers, of one of them, and behind them."""
        return self.entry, self.each, self.outside - self.entry

    @classmethod
    def of(cls, kept: int, whole: float, without_one: float, entry: float = 0.0) -> Linear:
        """Through what so many layers cost, and one less."""
        each = whole - without_one
        return cls(whole - kept * each, each, entry)


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a rank, by its layers. forward, backward: us of a micro-batch; weights: the part of backward that is
    computed apart, for gradients of weights; sums: that which adds up gradients of tied parameters; exposed: the part
    of both that waits for tp and cp. adds: the part by which it is longer since gradients are added to those of earlier
    micro-batches. once, middle: us of what is computed once a step, before or behind the passes, and between them.
    busy: us that a pass takes where calls are there when the device is ready for them; launched: that the host needs
    for its calls. The rest are bytes: those of `Held`, and what one layer hands to the next. again: of the same model
    if all layers compute more again, as some do (`Part.again`)."""

    forward: Linear
    backward: Linear
    weights: Linear
    forward_busy: Linear
    backward_busy: Linear
    weights_busy: Linear
    forward_launched: Linear
    backward_launched: Linear
    weights_launched: Linear
    exposed: Linear
    adds: Linear
    once: Linear
    middle: Linear
    sums: Linear
    parameters: Linear
    gradients: Linear
    states: Linear
    copies: Linear
    plain: Linear
    saved: Linear
    behind: Linear
    inner: Linear
    first: Linear
    joined: Linear
    tied: Linear
    terms: Linear
    lent: Linear
    late: Linear
    made: Linear
    between: Linear
    read: Linear
    frozen: Linear
    frozen_copies: Linear
    frozen_plain: Linear
    message: LayerMessage = NO_MESSAGE
    again: Cost | None = None

    @property
    def kept(self) -> Cost:
        """Without the bytes that are alive while a graph runs, and those that gradients of weights wait for."""
        nothing, never = Linear(0.0, 0.0), Linear(-math.inf, 0.0)
        changes: dict[str, Any] = dict.fromkeys(("tied", "terms", "late", "made"), nothing) | dict.fromkeys(
            PEAKS, never
        )
        return replace(self, **changes, again=self.again and self.again.kept)

    @property
    def alone(self) -> Cost:
        """The cost of a micro-batch whose gradients are added to nothing."""
        spent = ("backward", "backward_busy", *(("weights", "weights_busy") if self.weights(1.0) else ()))
        less: dict[str, Any] = {name: getattr(self, name).minus(self.adds) for name in spent}
        return replace(self, **less, adds=Linear(0.0, 0.0), again=self.again and self.again.alone)

    @property
    def inputs(self) -> tuple[Linear, Linear]:
        """us of a micro-batch's passes: forward, and backward without what is computed apart."""
        late = self.weights
        apart = Linear(self.backward.outside - late.outside, self.backward.each - late.each)
        return self.forward, apart

    def on(self, share: Share) -> Cost:
        """The cost of a rank, or a stage, that has a share of the model; its layers are the share's."""
        parts = {"time": share.time, "saved": share.saved, "stored": share.stored}
        lines = {name: getattr(self, name).on(parts[kind]) for name, kind in LINES.items()}
        if self.again is not None and share.time.again:
            lines |= self._mixed(lines, self.again, share, parts)
        return replace(self, **lines, again=None)

    def _mixed(
        self, lines: Mapping[str, Linear], more: Cost, share: Share, parts: Mapping[str, Part]
    ) -> dict[str, Linear]:
        """`lines` where some layers compute more again, and what is alive. The backward pass comes to the last one of
        these when it has let go of what the layers behind it saved."""
        found = {
            name: line.toward(getattr(more, name), parts[LINES[name]].again, parts[LINES[name]].layers)
            for name, line in lines.items()
        }
        part, freed = share.time, self._let_go(halves=self.weights.each > 0)
        gone = share.rest * min(bytes_ for kind, bytes_ in freed.items() if kind != "F")
        saved = more.saved.each - self.saved.each
        inner = [more.inner(part.layers) - gone, *[self.inner(part.layers)] * (part.again < part.layers)]
        ends = {name: getattr(self, name).plus(-share.saved.again * saved) for name in ("first", "joined")}
        return {**found, **ends, "inner": Linear(max(inner), 0.0)}

    def us(self, layers: float, halves: bool) -> dict[str, float]:
        """The us of each graph of a micro-batch, with so many layers. halves: gradients of weights apart from those of
        inputs."""
        forward, backward, weights = self.forward(layers), self.backward(layers), self.weights(layers)
        return {"F": forward, "I": backward - weights, "W": weights} if halves else {"F": forward, "B": backward}

    def paces(self, halves: bool) -> dict[str, Pace]:
        """How fast the graphs of the whole model are. halves: gradients of weights apart from those of inputs."""
        forward, backward, weights = map(self._pace, ("forward", "backward", "weights"))
        if not halves:
            return {"F": forward, "B": backward}
        inputs = tuple((b[0] - w[0], b[1] - w[1]) for b, w in zip(backward, weights, strict=True))
        return {"F": forward, "I": inputs, "W": weights}

    def _pace(self, name: str) -> Pace:
        busy, launched = self._of_pace(name)
        pace = tuple(zip(busy.sections, launched.sections, strict=True))
        if self.again is None:
            return pace
        busy, launched = self.again._of_pace(name)
        return (*pace, (busy.each, launched.each))

    def _of_pace(self, name: str) -> tuple[Linear, Linear]:
        return getattr(self, f"{name}_busy"), getattr(self, f"{name}_launched")

    def freed(self, halves: bool) -> dict[str, tuple[float, ...]]:
        """Bytes of what was saved that each layer of a graph lets go of, by section as `Pace`."""
        own, more = self._let_go(halves), self.again._let_go(halves) if self.again else {}
        return {kind: (0.0, own[kind], 0.0, *([more[kind]] if more else ())) for kind in own}

    def _let_go(self, halves: bool) -> dict[str, float]:
        saved, weights = self.saved.each, self.late.each + self.made.each
        return {"F": 0.0, "I": max(0.0, saved - weights), "W": weights} if halves else {"F": 0.0, "B": saved}

    def beside(self, part: Part, moved: Sequence[float] = (0.0, 0.0, 0.0)) -> float:
        """Bytes that are alive beside what is kept, at the worst moment of a stage that has a part of the model. moved:
        those that it moves over the data axes, before the layers, in them and behind."""
        layers, (first, inner, behind) = part.layers, moved
        front = [self.inner(layers) + self.tied(layers) + inner, *[self.joined(layers) + first] * bool(part.entry)]
        return max(0.0, max(front) - self._saved_behind, *[self.behind(layers) + behind] * bool(part.behind))

    def in_stages(self) -> Cost:
        """The cost in a pipeline: each stage adds up its own gradients of tied parameters, and the first one sums them
        once a step."""
        sums = self.sums.outside
        spent = ("backward", "backward_busy", *(("weights", "weights_busy") if self.weights.outside else ()))
        less: dict[str, Any] = {name: getattr(self, name).plus(-sums) for name in spent}
        once = self.once._replace(outside=self.once.outside + sums, entry=self.once.entry + sums)
        none, again = Linear(0.0, 0.0), self.again and self.again.in_stages()
        return replace(self, **less, once=once, joined=self.first, tied=none, sums=none, again=again)

    def trained(self, layers: float) -> float:
        """Bytes of the parameters that an optimizer changes."""
        return self.parameters(layers) - self.frozen(layers)

    def gathered(self, is_all: bool) -> tuple[Linear, Linear]:
        """`copies` and `plain` of the parameters that ZeRO splits: of all, or of those that are trained."""
        if is_all:
            return self.copies, self.plain
        return self.copies.minus(self.frozen_copies), self.plain.minus(self.frozen_plain)

    @property
    def _saved_behind(self) -> float:
        """Bytes of what is saved behind the layers."""
        return self.saved.outside - self.saved.entry


PEAKS = ("behind", "inner", "first", "joined")  # the most of several: no sums over layers
OF_TIME = ("forward", "backward", "weights", "exposed", "adds", "once", "middle", "terms", "lent", "between", "read")
OF_SAVED = ("saved", "late", "made")
LINES = {  # sums over layers, by what of a stage's share counts for them
    each.name: "time" if each.name in OF_TIME else "saved" if each.name in OF_SAVED else "stored"
    for each in fields(Cost)
    if each.name not in (*PEAKS, "message", "again") and not each.name.endswith(("_busy", "_launched"))
}
