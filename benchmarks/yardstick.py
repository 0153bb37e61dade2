"""How fast this machine is today: the CPU seconds of a fixed piece of work, over those of a reference day.

    .venv/bin/python -m benchmarks.yardstick

Machines of one kind differ by 40 % from day to day. A figure in CPU seconds is printed with the yardstick of its run,
and as seconds of a day whose yardstick is 1.00: goals are said in these. The work is what compiling consists of, half
of it plain Python (dicts, tuples, small objects, sorting), half of it torch's dispatch (ops on small tensors, ops on
fake tensors, nodes of graphs). 1.00 is the day on which `benchmarks/compile_speed.py` takes 6.7 s for 80 layers.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from autopar.torch_compat import FakeTensorMode

REFERENCE = 0.437  # CPU seconds of the work on the reference day
TRIES = 3


@dataclass(frozen=True, slots=True)
class _Thing:
    name: str
    places: tuple[int, ...]


def yardstick() -> float:
    """How many times longer than on the reference day the work takes now: the least of three tries, in a process of its
    own, for beside a large model Python's search for garbage takes longer."""
    told = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=True, timeout=120)
    return float(told.stdout)


def told(seconds: float, stick: float) -> str:
    """CPU seconds as they are recorded: those of the run, its yardstick, and those of the reference day."""
    return f"{seconds:.1f} s CPU (yardstick {stick:.2f}: {seconds / stick:.1f} s of the reference day)"


def _seconds(work: Callable[[], None]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _work() -> None:
    _python()
    _dispatch()


def _python() -> None:
    """Small objects by name, sorted, grouped and looked up, as passes do."""
    for turn in range(24):
        things = [_Thing(f"value_{i % 997}_{turn}", (i % 7, i % 11, i % 13)) for i in range(6_000)]
        groups: dict[tuple[int, ...], list[_Thing]] = {}
        for thing in things:
            groups.setdefault(thing.places, []).append(thing)
        order = sorted(groups, key=lambda places: (len(groups[places]), places))
        sizes = {places: sum(len(thing.name) for thing in groups[places]) for places in order}
        assert sum(sizes.values()) == sum(len(thing.name) for thing in things)


def _dispatch() -> None:
    """Ops on tensors of a few elements, on tensors without data, and their graph."""
    x = torch.ones(4, 4)
    for _ in range(16_000):
        x = (x + 1.0).mul(0.5).t()
    with FakeTensorMode():
        y = torch.empty(8, 8)
        for _ in range(1_000):
            y = (y @ y + y).relu()
    graph = fx.Graph()
    node = graph.placeholder("x")
    for _ in range(10_000):
        node = graph.call_function(torch.ops.aten.relu.default, (node,))
    graph.output(node)
    assert len(list(graph.nodes)) == 10_002


def main() -> None:
    gc.disable()  # as where a program is compiled
    print(f"{min(_seconds(_work) for _ in range(TRIES)) / REFERENCE:.2f}")


if __name__ == "__main__":
    main()
