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

    def on(self, share: Share) -> Cost:
        """Of a rank, or a stage, that has a share of the model; its layers are the share's."""
        parts = dict.fromkeys(("forward", "backward", "weights", "exposed", "once"), share.time)
        parts |= dict.fromkeys(("saved", "late", "made"), share.saved)
        peaks = ("others", "inner", "first")
        lines = (each.name for each in fields(self) if each.name not in (*peaks, "message"))
        return replace(self, **{name: getattr(self, name).on(parts.get(name, share.stored)) for name in lines})
