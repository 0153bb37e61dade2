"""A graph simulated on a machine: what hides what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.ir.text.text import parse_program
from autopar.machines import Machine
from autopar.passes.costs.node_costs import node_times
from autopar.passes.costs.streams import StreamTimes, run

# Every call takes half a microsecond, a collective one, and one for ten bytes. (A text tells no FLOPs.)
MACHINE = Machine.flat(10, 1e9, 10, 1.0, 0.5)
TEXT = """LOCAL program on tp=2
%w: f32[4,8] of [8,8] [tp,-] = parameter "w"
%x: f32[8,8] [-,-] = batch "0"
%relu: f32[8,8] [-,-] = aten.relu.default(%x)
%einsum: f32[8,8] [-,-] partial(tp) = autopar.einsum.default(%relu, %w, "ab,cb->ac")
%start: f32[8,8] [-,-] = autopar.all_reduce_start.default(%einsum, "tp", "sum")
%tanh: f32[8,8] [-,-] = aten.tanh.default(%relu)
%wait: f32[8,8] [-,-] = autopar.wait.default(%start)
%add: f32[8,8] [-,-] = aten.add.Tensor(%wait, %tanh)
return value "y" = %add
"""
MOVED = 1 + 2 * 8 * 8 * 4 / 2 / 10  # an all-reduce of 256 bytes on two ranks


def ran(machine: Machine, text: str = TEXT) -> StreamTimes:
    return run(parse_program(text), machine)


def test_what_is_computed_meanwhile_hides_a_collective() -> None:
    times = node_times(parse_program(TEXT), MACHINE)
    assert {node.name: time for node, time in times.items()}["start"] == pytest.approx(MOVED)
    found = ran(MACHINE)
    assert found.calls == 5 and found.hosted == 0.0
    assert found.exposed == {"tp": pytest.approx(MOVED - 0.5)}, "the product under it takes half a microsecond"
    assert found.total == pytest.approx(found.computed + MOVED - 0.5)


def test_one_that_nothing_hides_is_seen_whole() -> None:
    text = TEXT.replace("all_reduce_start", "all_reduce").replace(
        "%wait: f32[8,8] [-,-] = autopar.wait.default(%start)\n", ""
    )
    found = ran(MACHINE, text.replace("%wait", "%start"))
    assert found.exposed == {"tp": pytest.approx(MOVED)}


def test_one_that_nobody_waits_for_ends_with_the_graph() -> None:
    lines = [line for line in TEXT.splitlines() if "wait" not in line and "%add" not in line]
    found = ran(MACHINE, "\n".join([*lines, 'return value "y" = %tanh']))
    assert found.exposed == {"tp": pytest.approx(MOVED - 0.5)}


def test_cores_move_data_themselves() -> None:
    found = ran(replace(MACHINE, is_host=True))
    assert found.exposed == {"tp": pytest.approx(MOVED)} and found.total == pytest.approx(found.computed + MOVED)


@pytest.mark.parametrize(("moves", "takes"), [(10.0, 1.0), (0.25, 0.25 + 0.375), (0.0, 0.5)])
def test_a_call_beside_a_collective_has_what_it_leaves(moves: float, takes: float) -> None:
    """Half of the device, until the collective ends: half a microsecond's call takes one, or less if it ends before."""
    machine = Machine.flat(10, 1e9, 1e9, moves, 0.5)
    free = ran(machine)
    slow = ran(replace(machine, device=replace(machine.device, communicating=0.5)))
    assert slow.computed == pytest.approx(free.computed + takes - 0.5, abs=1e-6)
    assert slow.exposed["tp"] == pytest.approx(max(0.0, moves - takes), abs=1e-6)
    assert slow.total == pytest.approx(slow.computed + slow.exposed["tp"])


def test_the_host_is_waited_for_where_calls_are_small() -> None:
    free, slow = ran(MACHINE), ran(replace(MACHINE, launch_us=1000.0))
    assert slow.total == pytest.approx(5 * 1000.0 + 0.5), "the last launch, and its call"
    assert slow.hosted == pytest.approx(slow.total - slow.computed - slow.exposed.get("tp", 0.0))
    assert slow.computed == free.computed


def test_cores_launch_calls_themselves() -> None:
    found, before = (ran(replace(MACHINE, is_host=True, launch_us=us)) for us in (3.0, 0.0))
    assert found.calls == 5 and found.hosted == 5 * 3.0
    assert found.total == pytest.approx(before.total + 5 * 3.0)
    assert (found.computed, found.exposed) == (before.computed, before.exposed)
