"""What a micro-batch costs a rank, by the equal layers that it has."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from autopar.planning.deal import Part, Share


@dataclass(frozen=True, slots=True)
class Linear:
    """outside + layers * each. entry: the part of what is outside that comes before the layers."""

    outside: float
    each: float
    entry: float = 0.0

    def __call__(self, layers: float) -> float:
        return self.outside + layers * self.each

    def plus(self, more: float) -> Linear:
        """With more outside of the layers."""
        return replace(self, outside=self.outside + more)

    def minus(self, other: Linear) -> Linear:
        """Without a part."""
        return Linear(self.outside - other.outside, self.each - other.each, self.entry - other.entry)

    def on(self, part: Part) -> Linear:
        """Of what has only a part of what is outside."""
        entry = part.entry * self.entry
        return Linear(entry + part.behind * (self.outside - self.entry), self.each, entry)

    @classmethod
    def of(cls, kept: int, whole: float, without_one: float, entry: float = 0.0) -> Linear:
        """Through what so many layers cost, and one less."""
        each = whole - without_one
        return cls(whole - kept * each, each, entry)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a rank, by its layers. forward, backward: us of a micro-batch; weights: the part of the backward pass that is
    computed apart, for gradients of weights; sums: that which adds up gradients of tied parameters; exposed: the part
    of both that waits for tp and cp. once: us of what is computed once a step. The rest are bytes: those of `Held`, and
    what one layer hands to the next."""

    forward: Linear
    backward: Linear
    weights: Linear
    exposed: Linear
    once: Linear
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
    frozen: Linear
    frozen_copies: Linear
    frozen_plain: Linear
    message: float = 0.0

    @property
    def kept(self) -> Cost:
        """Without the bytes that are alive while a graph runs, and those that gradients of weights wait for."""
        nothing, never = Linear(0.0, 0.0), Linear(-math.inf, 0.0)
        changes: dict[str, Any] = dict.fromkeys(("tied", "terms", "late", "made"), nothing) | dict.fromkeys(
            PEAKS, never
        )
        return replace(self, **changes)

    @property
    def inputs(self) -> tuple[Linear, Linear]:
        """us of a micro-batch's passes: forward, and backward without what is computed apart."""
        late = self.weights
        apart = Linear(self.backward.outside - late.outside, self.backward.each - late.each)
        return self.forward, apart

    def on(self, share: Share) -> Cost:
        """Of a rank, or a stage, that has a share of the model; its layers are the share's."""
        parts = dict.fromkeys(("forward", "backward", "weights", "exposed", "once"), share.time)
        parts |= dict.fromkeys(("saved", "late", "made"), share.saved) | dict.fromkeys(("terms", "lent"), share.time)
        return replace(self, **{name: getattr(self, name).on(parts.get(name, share.stored)) for name in LINES})

    def with_again(self, more: Cost, count: int, layers: int) -> Cost:
        """The same with the first `count` of so many layers as they are in `more`, where more is computed again.
        Without a pipeline.

        The backward pass comes to these layers when it has let go of what the others saved.
        """
        pairs = {name: (getattr(self, name), getattr(more, name)) for name in LINES}
        found = {name: its.plus(count * (other.each - its.each)) for name, (its, other) in pairs.items()}
        inner = self.inner(layers) + self.tied(layers) - self._saved_behind
        late = more.inner(layers) + more.tied(layers) - more._saved_behind - (layers - count) * self.saved.each
        joined = self.joined(layers) - self._saved_behind - count * (more.saved.each - self.saved.each)
        most = max(self.behind(layers), inner, late, joined)
        none = Linear(-math.inf, 0.0)
        return replace(self, **found, behind=Linear(most, 0.0), inner=none, first=none, joined=none)

    def beside(self, part: Part) -> float:
        """Bytes that are alive beside what is kept, at the worst moment of a stage that has a part of the model."""
        layers = part.layers
        front = [self.inner(layers) + self.tied(layers), *[self.joined(layers)] * bool(part.entry)]
        return max(0.0, max(front) - self._saved_behind, *[self.behind(layers)] * bool(part.behind))

    def in_stages(self) -> Cost:
        """The same of a pipeline: each stage adds up its own gradients of tied parameters, and the first one sums them
        once a step."""
        sums = self.sums.outside
        weights = self.weights.plus(-sums) if self.weights.outside else self.weights
        once = replace(self.once, outside=self.once.outside + sums, entry=self.once.entry + sums)
        return replace(
            self, backward=self.backward.plus(-sums), weights=weights, once=once, joined=self.first,
            tied=Linear(0.0, 0.0), sums=Linear(0.0, 0.0),
        )  # fmt: skip

    def trained(self, layers: float) -> float:
        """Bytes of the parameters that an optimizer changes."""
        return self.parameters(layers) - self.frozen(layers)

    def gathered(self, is_all: bool) -> Cost:
        """With `copies` and `plain` of the parameters alone that ZeRO splits: of all, or of those that are trained."""
        if is_all:
            return self
        copies, plain = self.copies.minus(self.frozen_copies), self.plain.minus(self.frozen_plain)
        return replace(self, copies=copies, plain=plain)

    @property
    def _saved_behind(self) -> float:
        """Bytes of what is saved behind the layers."""
        return self.saved.outside - self.saved.entry


PEAKS = ("behind", "inner", "first", "joined")  # the most of several: no sums over layers
LINES = tuple(each.name for each in fields(Cost) if each.name not in (*PEAKS, "message"))
