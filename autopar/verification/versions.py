"""The programs of a step whose branches draws or data decide: one for each way that the steps go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from autopar.capture import Captured
from autopar.capture.captured import drawing_host
from autopar.capture.data.reads import Answers, OtherValues, Value
from autopar.capture.draws.host_draws import Drawn, drawing_for, set_generators
from autopar.verification.places import Made


def _with(captured: Captured, drawn: Drawn) -> Captured:
    """A captured step with the numbers of one step."""
    values = {} if captured.host is None else captured.host.values(drawn)
    return replace(captured, constants={**captured.constants, **values})


_MOST = 16  # programs that one step tries


@dataclass(slots=True)
class Versions:
    """Programs of all places. known: those that there are. make: makes those of another way; None if nothing can."""

    known: list[list[Made]]
    make: Callable[[Answers], list[Made]] | None = None

    def of(self, seed: torch.Tensor, values: tuple[Value, ...] = ()) -> list[Made]:
        """Find or make the programs of a step with this seed, whose first reads give these values."""
        with drawing_for(seed):
            return self._of(seed, values)

    def _of(self, seed: torch.Tensor, values: tuple[Value, ...]) -> list[Made]:
        host = drawing_host((captured for ((captured, _), *_) in self.known), lambda: seed)
        drawn = None if host is None else host.draw(seed)
        for programs in self.known:
            captured = programs[0][0]
            fits = all(read.is_(value) for read, value in zip(captured.reads, values, strict=False))
            if not fits or (captured.coins is not None and not captured.coins.fit(seed)):
                continue
            if drawn is None or captured.host is None:
                return programs
            if captured.host.way == drawn.way:
                return [(_with(captured, drawn), compiled) for captured, compiled in programs]
        if self.make is None:
            return self.known[0]
        if drawn is not None:
            set_generators(drawn.start)
        first, second = seed.tolist()
        self.known.append(self.make(Answers((first, second), values)))
        return self.known[-1]

    def mapped(self, change: Callable[[list[Made]], list[Made]]) -> Versions:
        """Versions with all programs changed."""
        known = [change(programs) for programs in self.known]
        if self.make is None:
            return Versions(known)
        return Versions(
            known, lambda answers: change(self.of(torch.tensor(answers.seed, device="cpu"), answers.values))
        )

    def run(self, seed: torch.Tensor, step: Callable[[list[Made]], None]) -> None:
        """Make a step with the programs that it asks for: again with others, where it finds other values."""
        values: tuple[Value, ...] = ()
        for _ in range(_MOST):
            try:
                return step(self.of(seed, values))
            except OtherValues as found:
                if self.make is None or found.values == values:
                    raise found.read.refused(found.values[-1]) from None
                values = found.values
        raise AssertionError("each program of a step knows one value more")
