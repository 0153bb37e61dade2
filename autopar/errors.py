"""Every error a user can cause, in one family.

A message says what is wrong, where (parameter, file and line), both numbers, and what to do.
`assert` elsewhere in the source marks bugs of our own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class AutoparError(Exception):
    """Base of all errors that autopar raises on purpose."""


class MeshError(AutoparError):
    """A mesh that does not parse, or whose size is not the number of ranks."""


class LayoutError(AutoparError):
    """A layout that does not parse, does not fit its tensor, or conflicts with another one."""


class CoupledError(LayoutError):
    """Rows of a batch, or positions, that a model takes together, where some are to be computed before the others.

    whole: names of values which would have to be the whole batch's for micro-batches to be possible."""

    def __init__(self, text: str, whole: frozenset[str] = frozenset()) -> None:
        super().__init__(text)
        self.whole = whole


class CaptureError(AutoparError):
    """A model or loss that cannot be turned into one graph."""


class PlanError(AutoparError):
    """What is asked of memory or precision, and cannot be had."""


class ScheduleError(AutoparError):
    """A schedule that does not exist, cannot be read, or cannot be run."""


class MachineError(AutoparError):
    """A machine that is not known, or a file of one with a missing or impossible value."""


class CompileError(AutoparError):
    """A compiler that is unknown or not to be had here, or a graph that it does not take."""


class BatchError(AutoparError):
    """A batch whose structure, shapes or sizes do not fit the program or the mesh."""


class RankError(AutoparError):
    """Ranks that disagree, or a rank that was lost."""


class NotYetError(AutoparError, AttributeError):
    """What a model will have once a step was taken, asked for before; `hasattr` is False then."""


class NonFiniteError(AutoparError):
    """A loss or gradients that are infinite or NaN, where a step is to stop then."""


class ArtifactError(AutoparError):
    """A directory that is not a saved program, or not an intact one."""


class CheckpointError(AutoparError):
    """A checkpoint that cannot be written, that is not an intact one, or that does not fit what it is loaded into."""


class RuleError(AutoparError):
    """A rule of an op that does not read, or does not fit the op."""


class WrongRule(RuleError):
    """A rule that was tried and does not hold."""


class TargetError(AutoparError):
    """A command line TARGET that does not name a function returning an `autopar.Job`."""


class ValueNameError(AutoparError):
    """A value to explain that the program does not have, or of which it knows no decisions."""


class VerificationError(AutoparError):
    """A program that broke a promise of its level: a bug in a pass or in a rule."""


def first_sentence(text: str) -> str:
    """What an error says first, without its stop."""
    return text.split(". ")[0].partition("\n")[0]


def divisors(size: int, limit: int = 64) -> list[int]:
    """The axis sizes up to `limit` that divide `size`: what an error offers instead."""
    return [n for n in range(1, min(size, limit) + 1) if size % n == 0]


def one_of(values: Iterable[object]) -> str:
    """`1, 2, 5 or 10`: a list as a sentence says it."""
    words = [str(v) for v in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 3` or `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    plural = len(runs) > 1 or runs[0][-1] != runs[0][0]
    return f"rank{'s' * plural} {', '.join('-'.join(map(str, run)) for run in runs)}"
