"""What a micro-batch costs a rank, by the equal layers that it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from autopar.planning.deal import Part, Share

Pace = tuple[tuple[float, float], ...]  # of each section of a model: us on the device, us of the host that launches


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

    @property
    def sections(self) -> tuple[float, float, float]:
        """Of what comes before the layers, of one of them, and of what comes behind them."""
        return self.entry, self.each, self.outside - self.entry

    @classmethod
    def of(cls, kept: int, whole: float, without_one: float, entry: float = 0.0) -> Linear:
        """Through what so many layers cost, and one less."""
        each = whole - without_one
        return cls(whole - kept * each, each, entry)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a rank, by its layers. forward, backward: us of a micro-batch; weights: the part of the backward pass that is
    computed apart, for gradients of weights; exposed: the part of both that waits for tp and cp.
    once: us of what is computed once a step. busy: us that a pass takes where calls are there when the device is ready
    for them; launched: that the host needs for its calls. The rest are bytes: those of `Held`, and what one layer hands
    to the next."""

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
        return replace(self, **{name: getattr(self, name).on(parts.get(name, share.stored)) for name in LINES})

    def us(self, layers: float, halves: bool) -> dict[str, float]:
        """Of each graph of a micro-batch, with so many layers. halves: gradients of weights apart from those of
        inputs."""
        forward, backward, weights = self.forward(layers), self.backward(layers), self.weights(layers)
        return {"F": forward, "I": backward - weights, "W": weights} if halves else {"F": forward, "B": backward}

    def paces(self, halves: bool) -> dict[str, Pace]:
        """Of the whole model: how fast its graphs are. halves: gradients of weights apart from those of inputs."""
        forward, backward, weights = (
            _pace(*(getattr(self, f"{name}_{word}") for word in ("busy", "launched")))
            for name in ("forward", "backward", "weights")
        )
        if not halves:
            return {"F": forward, "B": backward}
        inputs = tuple((b[0] - w[0], b[1] - w[1]) for b, w in zip(backward, weights, strict=True))
        return {"F": forward, "I": inputs, "W": weights}

    def freed(self, halves: bool) -> dict[str, Sequence[float]]:
        """Of the whole model: bytes of what was saved that each section of a graph lets go of."""
        saved, late, made = self.saved.sections, self.late.sections, self.made.sections
        if not halves:
            return {"F": (0.0, 0.0, 0.0), "B": saved}
        weights = [a + b for a, b in zip(late, made, strict=True)]
        inputs = [max(0.0, a - b) for a, b in zip(saved, weights, strict=True)]
        return {"F": (0.0, 0.0, 0.0), "I": inputs, "W": weights}

    def with_again(self, more: Cost, count: int, layers: int) -> Cost:
        """The same with the first `count` of so many layers as they are in `more`, where more is computed again.
        Without a pipeline: `inner` and `first` stay.

        The backward pass comes to these layers when it has let go of what the others saved.
        """
        pairs = {name: (getattr(self, name), getattr(more, name)) for name in LINES}
        found = {name: its.plus(count * (other.each - its.each)) for name, (its, other) in pairs.items()}
        late = more.inner(layers) - (layers - count) * self.saved.each
        return replace(self, **found, others=Linear(max(self.others(layers), late), 0.0))


def _pace(busy: Linear, launched: Linear) -> Pace:
    return tuple(zip(busy.sections, launched.sections, strict=True))


PEAKS = ("others", "inner", "first")  # the most of several: no sums over layers
LINES = tuple(
    each.name for each in fields(Cost)
    if each.name not in (*PEAKS, "message") and not each.name.endswith(("_busy", "_launched"))
)  # fmt: skip
