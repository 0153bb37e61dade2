"""What a micro-batch costs a rank, by the equal layers that it has."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

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
    computed apart, for gradients of weights; exposed: the part of both that waits for tp and cp.
    once: us of what is computed once a step. The rest are bytes: those of `Held`, and what one layer hands to the
    next."""

    forward: Linear
    backward: Linear
    weights: Linear
    exposed: Linear
    once: Linear
    parameters: Linear
    gradients: Linear
    states: Linear
    copies: Linear
    plain: Linear
    saved: Linear
    others: Linear
    inner: Linear
    first: Linear
    late: Linear
    made: Linear
    message: float = 0.0

    @property
    def inputs(self) -> tuple[Linear, Linear]:
        """us of a micro-batch's passes: forward, and backward without what is computed apart."""
        late = self.weights
        apart = Linear(self.backward.outside - late.outside, self.backward.each - late.each)
        return self.forward, apart

    def on(self, share: Share) -> Cost:
        """Of a rank, or a stage, that has a share of the model; its layers are the share's."""
        parts = dict.fromkeys(("forward", "backward", "weights", "exposed", "once"), share.time)
        parts |= dict.fromkeys(("saved", "late", "made"), share.saved)
        return replace(self, **{name: getattr(self, name).on(parts.get(name, share.stored)) for name in LINES})

    def with_again(self, more: Cost, count: int, layers: int) -> Cost:
        """The same with the first `count` of so many layers as they are in `more`, where more is computed again.
        Without a pipeline: `inner` and `first` stay.

        The backward pass comes to these layers when it has let go of what the others saved.
        """
        pairs = {name: (getattr(self, name), getattr(more, name)) for name in LINES}
        found = {name: its.plus(count * (other.each - its.each)) for name, (its, other) in pairs.items()}
        late = more.inner(layers) - (layers - count) * self.saved.each
        return replace(self, **found, others=Linear(max(self.others(layers), late), 0.0))


PEAKS = ("others", "inner", "first")  # the most of several: no sums over layers
LINES = tuple(each.name for each in fields(Cost) if each.name not in (*PEAKS, "message"))
