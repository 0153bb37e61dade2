"""The captured step at several sizes of the batch, whole and with few of the model's equal layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from autopar.capture import Captured
from autopar.errors import PlanError
from autopar.ir.program import Program
from autopar.passes.search.heads import heads_of
from autopar.planning.shallow.depth import Shallow, shallow
from autopar.planning.shallow.fewer import Capture, same_step

KEPT = 3  # equal layers that programs are made of: one of them has one of its like on both sides
LEAST_ROWS = 2  # of a batch that is captured: of one row alone some models refuse to take a mean


class Captures:
    """capture: the step. fewer: the same of the model with fewer of its equal layers; None if there is no such one."""

    def __init__(self, capture: Capture, fewer: Callable[[Shallow], Capture | None] = lambda found: None) -> None:
        self.capture, self.fewer = capture, fewer
        self._captured: dict[int, Captured] = {}
        self._shallow: dict[int, Shallow] = {}

    @cached_property
    def whole(self) -> Captured:
        """The step of LEAST_ROWS rows, with all layers."""
        return self.capture(LEAST_ROWS)

    @cached_property
    def heads(self) -> frozenset[tuple[int, int]]:
        """(heads of keys, queries that share one) of all attentions."""
        return heads_of(self.whole.program)

    @cached_property
    def _source(self) -> Capture:
        """What programs are made of: the model with fewer layers where, at the fewest rows, that is the same step. It
        is then the same at others: of layers that are equal none knows how many there are."""
        found = shallow(self.whole.program, KEPT)
        capture = None if found is None else self.fewer(found)
        made = None if capture is None or found is None else same_step(capture, LEAST_ROWS, found)
        if capture is None or made is None:
            return self.capture
        self._captured[LEAST_ROWS], self._shallow[LEAST_ROWS] = made
        return capture

    def captured(self, rows: int) -> Captured:
        """The step of a batch of so many rows, with all layers or with fewer."""
        source = self._source
        if rows not in self._captured:
            is_whole = source is self.capture and rows == LEAST_ROWS
            self._captured[rows] = self.whole if is_whole else source(rows)
        return self._captured[rows]

    def shallow(self, rows: int = LEAST_ROWS) -> Shallow:
        """Capture the step with few of its equal layers; whole if it has none. Raises PlanError where the layers that
        are equal at the fewest rows are not at so many."""
        captured = self.captured(rows).program
        if rows not in self._shallow:
            self._shallow[rows] = self._as_known(captured, rows) if rows != LEAST_ROWS else _few(captured)
        return self._shallow[rows]

    def _as_known(self, captured: Program, rows: int) -> Shallow:
        """The step of `rows` rows with few of the layers that it has at the fewest rows."""
        known = self.shallow()
        if not known.layers:
            return _few(captured, is_whole=True)
        found = shallow(captured, KEPT, known.lists)
        if found is None or found.lists != known.lists or (found.kept, found.border) != (known.kept, known.border):
            raise PlanError(
                f"the layers of {' and '.join(map(repr, known.lists))} are equal in a step of {LEAST_ROWS} rows and "
                f"not in one of {rows}, so that few of them do not say what all cost: forward asks how many rows "
                f"there are. Let it do the same for each number of rows, or choose a mesh with `autopar estimate`."
            )
        return found.of_whole(known)


def _few(program: Program, is_whole: bool = False) -> Shallow:
    """A program with few of its equal layers, or all of it where there are none."""
    return (None if is_whole else shallow(program, KEPT)) or Shallow(program, 0, 0)
