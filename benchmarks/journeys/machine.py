"""The state machine: hypothesis draws a setup and actions, and makes a failing journey short."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, Verbosity, reject, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from benchmarks.journeys import models
from benchmarks.journeys.actions import ACTIONS
from benchmarks.journeys.draws import backend_of
from benchmarks.journeys.meshes import world
from benchmarks.journeys.pools import Pools
from benchmarks.journeys.ranks import Report, act, begin
from benchmarks.journeys.setups import setups

Journey = tuple[tuple[str, dict[str, Any]], ...]
FAILED = ("WRONG", "BROKEN", "HANG")


class JourneyFailed(Exception):
    """A journey that is wrong, broken or hangs."""


@dataclass
class Row:
    """What one row does: its journeys, the first and those to which hypothesis shrinks it."""

    pools: Pools
    shrink_s: float
    started: int = 0
    actions: int = 0
    shortest: Journey = ()
    failure: Report | None = None
    first: Journey = ()
    refusals: Counter[str] = field(default_factory=Counter)
    known: dict[str, Report] = field(default_factory=dict)  # what came of the beginnings of journeys
    taken: Journey = ()  # the one that the pools are on
    end: float | None = None
    is_open: bool = False  # rounding leaves nothing to compare of something
    is_excused: bool = False  # rounding of a short float excuses something
    without: frozenset[str] = frozenset()  # actions that are not drawn
    meshes: tuple[str, ...] = ()  # one of these; else of all, most often of one or two ranks

    def take(self, journey: Journey) -> Report:
        """The report on the last action of a journey. What is known of its beginning is not taken again."""
        key = repr(journey)
        if key not in self.known:
            if self.end is not None and time.monotonic() > self.end:
                reject()  # the time for making it shorter is over
            start = len(journey) - 1 if self.taken == journey[:-1] else 0
            for length in range(start + 1, len(journey) + 1):
                self.known[key] = self._run(journey[:length])
                if self.known[key].verdict in FAILED:
                    break
        report = self.known[key]
        if self.failure is None:
            self.first = journey
            self.is_open |= report.verdict == "open"
            self.is_excused |= report.is_excused
            if report.verdict in ("refused", "both fail"):
                self.refusals[f"{journey[-1][0]}: {report.text}"] += 1
        if report.verdict in FAILED:
            self._fail(journey, report)
        return report

    def tell(self) -> None:
        """What rounding excuses has to be right in a longer float, or from other weights, as in `verify`."""
        for journey in _longer(self.first):
            for length in range(1, len(journey) + 1):
                self.taken = ()
                report = self._run(journey[:length])
                if report.verdict in FAILED:
                    self.shortest, self.failure = journey[:length], report
                    return
                if report.verdict == "open":
                    break
                if length == 1 and not report.facts:
                    return  # it is not even begun
            else:
                return
        self.shortest, self.failure = self.first, Report("WRONG", "rounding leaves nothing to compare, anywhere")

    def _run(self, journey: Journey) -> Report:
        """Take the last action of a journey, after its others."""
        size = world(journey[0][1]["mesh"])
        name, args = journey[-1]
        self.taken = journey
        self.actions += 1
        if len(journey) > 1:
            return self.pools.run(size, act, name, args)
        self._folder = tempfile.TemporaryDirectory()
        return self.pools.run(size, begin, args, self._folder.name)

    def _fail(self, journey: Journey, report: Report) -> None:
        if self.end is None:
            self.end = time.monotonic() + self.shrink_s
        self.shortest, self.failure = journey, report
        raise JourneyFailed(report.text)


def _longer(journey: Journey) -> list[Journey]:
    """The journey in float64, if it was in less; and from other weights, for where rounding leaves nothing there."""
    (name, setup), *actions = journey
    options = {key: value for key, value in setup["options"].items() if key != "precision"}
    exact = {**setup, "options": options, "dtype": "float64"}
    kept = tuple(action for action in actions if "fp16" not in ACTIONS[action[0]].needs)
    found = [] if models.is_exact(setup) else [((name, exact), *kept)]
    return [*found, ((name, {**exact, "seed": 1}), *kept)]


class Machine(RuleBasedStateMachine):
    """One journey."""

    row: ClassVar[Row]

    def __init__(self) -> None:
        super().__init__()
        self.journey: Journey = ()
        self.facts: frozenset[str] = frozenset()

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        setup = data.draw(setups(self.row.meshes))
        self.row.started += 1
        if self.row.started == 1:
            reject()  # hypothesis begins with the simplest of all, which is the same in every row
        self._take("begin", setup)

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        """One action of those that may follow. A rule for each would be drawn too seldom: hypothesis leaves most out.

        A setup or an action that was refused ends the journey.
        """
        if "ready" in self.facts:
            drawn = {name: action for name, action in ACTIONS.items() if name not in self.row.without}
            allowed = [name for name in drawn for _ in range(drawn[name].weight) if drawn[name].allowed(self.facts)]
            name = data.draw(st.sampled_from(allowed))
            self._take(name, {key: data.draw(values) for key, values in drawn[name].draws.items()})

    def _take(self, name: str, args: dict[str, Any]) -> None:
        self.journey = (*self.journey, (name, args))
        self.facts = self.row.take(self.journey).facts


def run_row(
    pools: Pools,
    of: int,
    number: int,
    shrink_s: float = 60,
    without: Iterable[str] = (),
    meshes: Iterable[str] = (),
    most: int = 20,
) -> Row:
    """Draw and take the journey of a row, of 8 to 20 actions. A failing one is made shorter for some seconds."""
    row = Row(pools, shrink_s, without=frozenset(without), meshes=tuple(meshes))
    machine = seed(f"{of} {number}")(type("Journeys", (Machine,), {"row": row}))
    with backend_of(f"{of} {number}") as backend, contextlib.suppress(JourneyFailed):
        chosen = settings(
            max_examples=1, stateful_step_count=min(8 + number % 13, most), deadline=None,
            database=None, backend=backend, verbosity=Verbosity.quiet, print_blob=False,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink) if shrink_s else (Phase.generate,),
        )  # fmt: skip
        run_state_machine_as_test(machine, settings=chosen)
    if row.failure is None and (row.is_open or row.is_excused):
        row.tell()
    return row


def replay(pools: Pools, journey: Journey) -> tuple[int, Report]:
    """Take the actions of a journey until one fails: how many were taken, and the last report."""
    row, report = Row(pools, 0), Report("ok")
    for taken in range(1, len(journey) + 1):
        try:
            report = row.take(journey[:taken])
        except JourneyFailed:
            assert row.failure is not None
            return taken, row.failure
        print(f"  {journey[taken - 1][0]}: {report.verdict} {report.text}")
        if row.is_open:
            break
    if row.is_open or row.is_excused:
        row.tell()
    return taken, row.failure or report
