"""What a process of a rank really allocates in a training step on a CPU, by torch's own profiler.

Unlike the tracker of tensors (`benchmarks/measured.py`) it sees what C++ makes: the scratch memory of kernels, and the
copy in which Gloo reduces before it scatters, which Python sees only when its result is split.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from autopar.capture.inputs.containers import take_call_apart
from autopar.parallel.module import ParallelModule
from autopar.torch_compat import local_of


@dataclass(frozen=True, slots=True)
class Allocated:
    """Bytes at the peak of a step and of the optimizer's, with those of the tensors that were there before. tensors:
    without the scratch memory of torch's kernels and of Gloo, as of `scratch_of`."""

    tensors: int
    all: int


def allocated(model: ParallelModule, optimizer: torch.optim.Optimizer, *batch: Any) -> Allocated:
    """What a step of this rank allocates. Every rank must call this, after a first step and without gradients; they are
    there afterwards."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    constants = [value for running in model.programs for value in running.constants.tensors()]
    leaves = take_call_apart(batch, {}).leaves
    before = _bytes([*model.parameters(), *model.buffers(), *leaves, *constants, *states])
    losses = []  # whoever trains looks at it after the step
    events = [_events(lambda: losses.append(model.forward_backward(*batch))), _events(optimizer.step)]
    return Allocated(*(before + _most(events, has_scratch) for has_scratch in (False, True)))


def _bytes(tensors: Iterable[Any]) -> int:
    """Of the memory that some tensors lie in."""
    plain = (local_of(x) if isinstance(x, DTensor) else x for x in tensors if isinstance(x, torch.Tensor))
    return sum({id(storage): storage.nbytes() for storage in map(torch.Tensor.untyped_storage, plain)}.values())


def _events(run: Callable[[], Any]) -> list[dict[str, Any]]:
    """What torch's profiler says of a run: calls, and what was allocated and freed, in order of time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    with tempfile.TemporaryDirectory() as folder:
        profiled.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_bytes())["traceEvents"]
    known = (each for each in events if each["name"] == "[memory]" or each.get("cat") == "cpu_op")
    return sorted(known, key=lambda each: float(each["ts"]))


def _most(runs: Iterable[list[dict[str, Any]]], has_scratch: bool) -> int:
    """The most bytes above those at the beginning of the first of some runs."""
    now = most = 0
    for events in runs:
        left = set[int]() if has_scratch else scratch_of(events)
        for place, event in enumerate(events):
            if event["name"] == "[memory]" and place not in left:
                now += event["args"]["Bytes"]
                most = max(most, now)
    return most


def scratch_of(events: list[dict[str, Any]]) -> set[int]:
    """The places of what a call of torch allocates and frees before it returns, and of what a thread of Gloo allocates
    and frees by itself (the flat copy of an all-gather): threads that call torch for no step, which begins with a call.
    """
    call: dict[int, tuple[float, int]] = {}  # by thread: when the call that is under way ends, and its place
    made: dict[int, tuple[int, int, int]] = {}  # by address: the place of the event, of the call, and the thread
    own_thread = next((event["tid"] for event in events if event["name"] != "[memory]"), -1)
    found = set[int]()
    for place, event in enumerate(events):
        thread, now = event["tid"], float(event["ts"])
        if event["name"] != "[memory]":
            if event["name"].startswith("aten::") and now >= call.get(thread, (-1.0, 0))[0]:
                call[thread] = now + float(event["dur"]), place
            continue
        end, own = call.get(thread, (-1.0, 0))
        address, inside = event["args"]["Addr"], own if now <= end else -1
        if event["args"]["Bytes"] > 0:
            made[address] = place, inside, thread
        elif address in made:
            first, maker, its_thread = made.pop(address)
            if maker == inside != -1 or its_thread == thread != own_thread:
                found |= {first, place}
    return found
