"""The processes of all journeys: a pool for each number of ranks, started when first needed, anew after a hang."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from benchmarks.journeys.ranks import Report
from benchmarks.journeys.sabotage import sabotage
from tests.support.processes import Ranks

LIMIT_S = 120


class Pools:
    """Runs a function of `ranks.py` on all ranks of a world, and makes one report of theirs."""

    def __init__(self, without: str | None = None) -> None:
        """`without`: the name of a fix that is taken out of the processes."""
        self._without = without
        self._pools: dict[int, Ranks] = {}

    def run(self, size: int, work: Callable[..., Report], *args: Any) -> Report:
        if size not in self._pools:
            self._pools[size] = Ranks(size)
            if self._without is not None:
                self._pools[size].run(sabotage, self._without)
        try:
            outcomes = self._pools[size].attempt(work, *args, timeout=LIMIT_S)
        except AssertionError as hang:  # which ended the pool
            del self._pools[size]
            return Report("HANG", str(hang)[:300])
        if any(outcome.died or outcome.error for outcome in outcomes):
            self._pools.pop(size).close()
            return Report("BROKEN", "; ".join(str(o.error or "died") for o in outcomes if o.error or o.died)[:400])
        report = _joined([outcome.value for outcome in outcomes])
        if report.verdict == "BROKEN":  # what its ranks exchange may be out of step
            self._pools.pop(size).close()
        return report

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


def _joined(reports: list[Report]) -> Report:
    """The worst of them; ranks of which some refuse and some do not are broken. What one rank decides for all, as a
    plan, is refused there with its reason, and elsewhere by a RankError that repeats it."""
    for verdict in ("BROKEN", "WRONG", "open"):
        for rank, report in enumerate(reports):
            if report.verdict == verdict:
                return Report(verdict, f"rank {rank}: {report.text}")
    first = reports[0]
    own = [each for each in reports if not (each.text.startswith("RankError") and first.text in each.text)]
    if len({(report.verdict, report.text.partition(":")[0]) for report in own}) > 1:
        return Report("BROKEN", "ranks differ: " + " | ".join(f"{r.verdict} {r.text[:100]}" for r in reports))
    return dataclasses.replace(reports[0], is_excused=any(report.is_excused for report in reports))
