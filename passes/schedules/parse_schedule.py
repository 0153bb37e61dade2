"""parse_schedule: what a user calls a schedule (a name, a function, a table) -> the actions of each rank."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import ScheduleError, one_of
from autopar.ir.options import ScheduleLike
from autopar.ir.schedule import Action, Costs, Orders, Pair, Turn, actions_of
from autopar.passes.schedules.orders import SCHEDULES, Entry
from autopar.text_files import read_text

_SHOWN = 5  # faults named in one message
_ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)
_BOTH = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")  # two actions that may run side by side
_DERIVED = re.compile(r"\d+(?:(?:SEND|RECV)_[FB]\d+|(?:UNSHARD|RESHARD|REDUCE_GRAD)\d*)")  # follows from the data flow


@dataclass(frozen=True, slots=True)
class Schedule:
    """name: for messages. orders: the actions of each rank. ranks: the rank of each stage."""

    name: str
    orders: Orders
    ranks: tuple[int, ...]

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of its actions: which graphs a stage has to be cut into."""
        return frozenset(action.kind for order in self.orders for action in actions_of(order))


def parse_schedule(
    wanted: ScheduleLike,
    ranks: int,
    microbatches: int,
    stages: int | None = None,
    costs: Costs | None = None,
    slices: int = 1,
) -> Schedule:
    """Read a schedule and check that it runs each action once, on one rank per stage.

    wanted: a name of `SCHEDULES`; a function (see `ir/options.py`); or the path or text of a table in the notation of
    torch.distributed.pipelining, with a row for each rank: `0F0,0F1,,0B0,0B1`. Its transfers are skipped: they follow
    from the flow of data. stages: of the model; each schedule has its own usual number. slices: so many micro-batches
    in a row are slices of one sequence.
    """
    costs = costs or Costs()
    if isinstance(wanted, str) and (entry := SCHEDULES.get(wanted)):
        stages = stages or ranks * entry.chunks
        orders = _named(wanted, entry, stages, ranks, microbatches, slices, costs)
        return Schedule(wanted, orders, entry.place(stages, ranks))
    if callable(wanted):
        stages = stages or ranks
        own = getattr(wanted, "__name__", type(wanted).__name__)
        name = f"schedule '{own}'"
        rows: Any = wanted(stages, max(stages // ranks, 1), microbatches, costs)
        if not isinstance(rows, (list, tuple)) or not all(isinstance(row, (list, tuple)) for row in rows):
            raise ScheduleError(f"{name} gave a {type(rows).__name__}, not a list for each rank of its actions.")
        spots = [[(f"rank {r}, entry {i}", cell) for i, cell in enumerate(row)] for r, row in enumerate(rows)]
    else:
        own, text = _table(wanted)
        name = f"schedule '{own}'" if own else "the schedule"
        lines = _lines(name, text)
        spots = [[(f"row {r}, column {i}", cell) for i, cell in enumerate(row, 1)] for r, row in enumerate(lines, 1)]
    orders = _read(name, spots)
    if len(orders) != ranks:
        raise ScheduleError(f"{name} has rows for {len(orders)} ranks; the axis 'pp' has {ranks}.")
    return Schedule(own or "table", orders, _placed(name, orders, microbatches, stages))


def _named(name: str, entry: Entry, stages: int, ranks: int, microbatches: int, slices: int, costs: Costs) -> Orders:
    """The order of a schedule of `SCHEDULES`."""
    if slices == 1:
        return entry.order(stages, ranks, microbatches, costs)
    if entry.of_slices is None:
        known = one_of(name for name, entry in SCHEDULES.items() if entry.of_slices)
        raise ScheduleError(
            f"slices={slices}: schedule '{name}' does not run the slices of a sequence in its order, and back in "
            f"reverse. Use schedule {known}, slices=1, or an order of your own."
        )
    return entry.of_slices(stages, ranks, microbatches, slices, costs)


def check_schedule_name(wanted: object) -> None:
    """Raise ScheduleError for a name that is neither a schedule's nor a file's."""
    if isinstance(wanted, (str, Path)) and wanted not in SCHEDULES:
        _table(wanted)


def _table(wanted: str | Path) -> tuple[str, str]:
    """The name of a file, if it is one, and the text."""
    if isinstance(wanted, str) and ("\n" in wanted or "," in wanted):
        return "", wanted
    path = Path(wanted)
    with suppress(ValueError, OSError):  # a NUL, or a name that is too long for a file's
        if path.is_file():
            return str(wanted), read_text(path, "schedule", ScheduleError)
    if path.suffix == ".csv":
        raise ScheduleError(f"schedule '{wanted}': there is no such file.")
    known = ", ".join(SCHEDULES)
    raise ScheduleError(f"schedule '{wanted}' is unknown. Known are {known}; or give a function or a CSV file.")


def _lines(name: str, text: str) -> list[list[str]]:
    try:
        return list(csv.reader(io.StringIO(text.strip("\r\n")), skipinitialspace=True)) if text.strip() else []
    except csv.Error as error:
        raise ScheduleError(f"{name} is no table: {error}.") from None


def _read(name: str, spots: Iterable[Iterable[tuple[str, object]]]) -> Orders:
    faults: list[str] = []
    orders = []
    for row in spots:
        order: list[Turn] = []
        for where, cell in row:
            turns = list(_turns(cell))
            order += [turn for turn in turns if turn is not None]
            if None in turns:
                faults.append(
                    f"{where}: {_short(cell)} is not an action such as '0F1' (stage, F, B, I or W, micro-batch)"
                )
        orders.append(tuple(order))
    _raise(name, faults)
    return tuple(orders)


def _short(cell: object) -> str:
    text = repr(cell)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)"


def _turns(cell: object) -> Iterator[Turn | None]:
    """The turn of a cell, if it has one; None for what does not read."""
    if isinstance(cell, (Action, Pair)):
        yield cell
    elif not isinstance(cell, str):
        yield None
    elif found := _ACTION.fullmatch(cell.strip()):
        yield Action(int(found[1]), found[2], int(found[3]))
    elif found := _BOTH.fullmatch(cell.strip()):
        both = [one for half in found.groups() for one in _turns(half) if isinstance(one, Action)]
        yield Pair(*both) if len(both) == 2 else None
    elif cell.strip() and not _DERIVED.fullmatch(cell.strip()):
        yield None


def _placed(name: str, orders: Orders, microbatches: int, stages: int | None) -> tuple[int, ...]:
    """The rank of each stage: the one that runs its forwards. All actions must be there, once."""
    found = Counter(action for order in orders for action in actions_of(order))
    stages = stages or 1 + max((action.stage for action in found), default=0)
    faults = []
    if stages > len(found):  # each has an action at least: the last one is a slip of the pen
        last = max((action for action in found), default=None)
        _raise(name, [f"{stages} stages have at least as many actions, and there are {len(found)}" + (
            f", of which the last is {last}" if last else "")])  # fmt: skip
    for action in sorted(found):
        if action.kind not in "FBIW" or action.stage >= stages or not 0 <= action.microbatch < microbatches:
            faults.append(f"{action} is not of {stages} stages and {microbatches} micro-batches")
        elif found[action] > 1:
            faults.append(f"{action} is run {found[action]} times")
    for stage in range(stages):
        for k in range(microbatches):
            forward, *backward = (Action(stage, kind, k) in found for kind in "FBIW")
            if not forward:
                faults.append(f"{stage}F{k} is missing")
            if backward == [False, False, False]:
                faults.append(f"{stage}B{k} is missing")
            elif backward[0] and any(backward[1:]):
                faults.append(f"{stage}B{k} is I and W in one, and there are {stage}I{k} or {stage}W{k} too")
            elif backward[1] != backward[2]:
                faults.append(f"{stage}{'W' if backward[1] else 'I'}{k} is missing")
    owners: dict[int, list[int]] = {}
    for rank, order in enumerate(orders):
        for stage in {action.stage for action in actions_of(order)}:
            owners.setdefault(stage, []).append(rank)
    faults += [f"stage {s} is on ranks {_and(at)}" for s, at in sorted(owners.items()) if len(at) > 1]
    _raise(name, faults)
    return tuple(owners[stage][0] for stage in range(stages))


def _and(ranks: list[int]) -> str:
    return " and ".join((", ".join(map(str, ranks[:-1])), str(ranks[-1])))


def _raise(name: str, faults: list[str]) -> None:
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise ScheduleError(f"{name}: {'; '.join(faults[:_SHOWN])}{more}.")
