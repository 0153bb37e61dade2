"""A schedule that a function of the user gives: what is no list of actions for each rank is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.errors import ScheduleError
from autopar.passes.schedules.parse_schedule import check_schedule_name, parse_schedule

GIVEN: list[tuple[Any, str]] = [
    (None, "NoneType"), ("0F0,0B0", "str"), ({0: ["0F0"]}, "dict"), (["0F0", "1F0"], "list"), (("0F0",), "tuple"),
    (iter([]), "list_iterator"), ([["0F0"], None], "list"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "kind"), GIVEN, ids=lambda one: one if isinstance(one, str) else "")
def test_a_function_that_gives_no_rows(rows: Any, kind: str) -> None:
    def mine(stages: int, chunks: int, microbatches: int, costs: Any) -> Any:
        assert (stages, chunks, microbatches) == (2, 1, 1)
        return rows

    with pytest.raises(ScheduleError) as caught:
        parse_schedule(mine, 2, 1)
    assert str(caught.value) == f"schedule 'mine' gave a {kind}, not a list for each rank of its actions."


def test_rows_may_be_lists_or_tuples() -> None:
    orders = [["0F0", "0B0"], ["1F0", "1B0"]]
    found = [parse_schedule(lambda *_, rows=rows: rows, 2, 1) for rows in (orders, tuple(map(tuple, orders)))]
    assert found[0].orders == found[1].orders and list(map(len, found[0].orders)) == [2, 2]


@pytest.mark.parametrize("name", ["1f1b", "0F0,0B0", "0F0\n"])
def test_what_is_a_schedule_passes(name: str) -> None:
    check_schedule_name(name)
