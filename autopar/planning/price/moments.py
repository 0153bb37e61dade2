"""What a rank of a pipeline holds at once, counted from the order of its actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.ir.schedule import Action

COLUMNS = 5  # of a stage
SAVED, LATE, GRADIENTS, OTHERS, AHEAD = range(COLUMNS)


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """stages: of the rank. counts: a row for each moment that differs from the others, and for each stage how many of
    its micro-batches are saved, how many wait for their gradients of weights, whether its gradients are there,
    whether it is at work in its backward pass, and whether it has a forward pass ahead."""

    stages: tuple[int, ...]
    counts: np.ndarray

    @classmethod
    def of(cls, order: Sequence[Action], has_more: bool) -> Moments:
        """Of a rank's actions: F, and B or its halves I and W. has_more: those of further micro-batches follow."""
        stages = tuple(sorted({action.stage for action in order}))
        column = {stage: COLUMNS * i for i, stage in enumerate(stages)}
        held, rows = [0] * (COLUMNS * len(stages)), dict[tuple[int, ...], None]()
        left = Counter(action.stage for action in order if action.kind == "F")
        for stage in stages:
            held[column[stage] + AHEAD] = 1
        for action in order:
            at = column[action.stage]
            if action.kind == "F":
                held[at + SAVED] += 1
                left[action.stage] -= 1
                held[at + AHEAD] = int(has_more or left[action.stage] > 0)
                continue
            held[at + OTHERS] = 1
            rows[tuple(held)] = None
            held[at + OTHERS] = 0
            if action.kind != "I":
                held[at + GRADIENTS] = 1
            held[at + (LATE if action.kind == "W" else SAVED)] -= 1
            held[at + LATE] += action.kind == "I"
            rows[tuple(held)] = None
        return cls(stages, np.array(list(rows), dtype=float))

    def most(self, each: Sequence[tuple[float, float, float, float, float]]) -> float:
        """The most bytes at once. each: of what a moment counts, by stage."""
        return float((self.counts @ np.array(each).ravel()).max())

    def fullest(self, each: Sequence[tuple[float, float, float, float, float]]) -> np.ndarray:
        """The counts of that moment, a row for each stage."""
        row: np.ndarray = self.counts[(self.counts @ np.array(each).ravel()).argmax()]
        return row.reshape(-1, COLUMNS)
