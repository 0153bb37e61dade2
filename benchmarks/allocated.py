"""What a process of a rank really allocates in a training step on a CPU, by torch's own profiler.

Unlike the tracker of tensors (`benchmarks/measured.py`) it sees what C++ makes: the scratch memory of kernels, and the
copy in which Gloo reduces before it scatters, which Python sees only when its result is split.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from autopar.capture.containers import take_call_apart
from autopar.parallel.module import ParallelModule
from autopar.torch_compat import local_of


def allocated(model: ParallelModule, optimizer: torch.optim.Optimizer, *batch: Any) -> int:
    """The bytes at the peak of a step and of the optimizer's, with those of the tensors that were there before.

    Every rank must call this, after a first step and without gradients; they are there afterwards.
    """
    states = [value for state in optimizer.state.values() for value in state.values()]
    constants = [value for running in model.programs for value in running.constants.tensors()]
    leaves = take_call_apart(batch, {}).leaves
    before = _bytes([*model.parameters(), *model.buffers(), *leaves, *constants, *states])
    losses = []  # whoever trains looks at it after the step
    step, left = _rise(lambda: losses.append(model.forward_backward(*batch)))
    return before + max(step, left + _rise(optimizer.step)[0])


def _bytes(tensors: Iterable[Any]) -> int:
    """Of the memory that some tensors lie in."""
    plain = (local_of(x) if isinstance(x, DTensor) else x for x in tensors if isinstance(x, torch.Tensor))
    return sum({id(storage): storage.nbytes() for storage in map(torch.Tensor.untyped_storage, plain)}.values())


def _rise(run: Callable[[], Any]) -> tuple[int, int]:
    """The most bytes above those at the beginning, and those above them at the end."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    with tempfile.TemporaryDirectory() as folder:
        profiled.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_bytes())["traceEvents"]
    now = most = 0
    for event in sorted((each for each in events if each["name"] == "[memory]"), key=lambda each: each["ts"]):
        now += event["args"]["Bytes"]
        most = max(most, now)
    return most, now
