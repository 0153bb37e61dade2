"""What transfers and checks both read from a flow."""

from __future__ import annotations

from autopar.errors import ScheduleError
from autopar.ir.schedule import Action, Flow


def check_flow(flow: Flow) -> None:
    """A value is made on one rank (parts of a sum on two ranks are two values), and is of one kind."""
    step = flow.step_values()
    both = sorted({name for work in flow.works.values() for name in (*work.reads, *work.writes) if name in step})
    if both:
        names = ", ".join(f"%{name}" for name in both[:5])
        raise ScheduleError(f"a value is of a micro-batch or of the step, but both are {names}.")
    found: dict[str, set[int]] = {}
    for (stage, kind), work in flow.works.items():
        for name in (*work.writes, *work.sums, *work.step_writes):
            found.setdefault(name, set()).add(flow.rank_of(Action(stage, kind)))
    wrong = [f"%{name} on ranks {sorted(ranks)}" for name, ranks in sorted(found.items()) if len(ranks) > 1]
    if wrong:
        raise ScheduleError(f"a value is made on one rank, but {'; '.join(wrong[:5])}.")
