"""What a training step really holds on this rank: the other side of every estimate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autopar.capture.inputs.containers import take_call_apart
from autopar.parallel.module import ParallelModule
from autopar.report.memory.track import Tracker
from autopar.runtime.tiers.host_tier import HostPool
from autopar.runtime.tiers.offloaded_states import moving_of, parameters_of
from autopar.torch_compat import local_of


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes of this rank's tensors: before the step, at its peak, and at that of the optimizer's step."""

    before: int
    step: int
    optimizer: int

    @property
    def peak(self) -> int:
        return max(self.step, self.optimizer)


def measure(model: ParallelModule, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any) -> Measured:
    """Train one step and watch it. Every rank must call this, after a first step and without gradients.

    On the CPU a tracker sees every tensor of this process that the step makes, and the model's, the optimizer's and
    the batch's that are there already. On a GPU it is `torch.cuda.max_memory_allocated`.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        return _measure_cuda(model, optimizer, args, kwargs)
    tracker = Tracker()
    tracker.leave_out(host_memory(model, optimizer))
    told = [(pool, pool.told) for pool in pools(model)]
    for pool, _ in told:  # gradients that go there are in no buffer
        pool.told = lambda lent: tracker.leave_out([lent])
    for kind, tensors in (
        ("parameters", list(model.parameters())),
        ("inputs", [*model.buffers(), *take_call_apart(args, kwargs).leaves]),
        ("constants", [t for running in model.programs for t in running.constants.tensors()]),
        ("optimizer states", [t for state in (optimizer.state.values() if optimizer else ()) for t in state.values()]),
    ):
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                tracker.add(tensor, kind)
    before, start = tracker.total, len(tracker.events)
    with tracker:
        loss = model.forward_backward(*args, **kwargs)
        middle = len(tracker.events)
        if optimizer is not None and not steps_on_host(model):
            optimizer.step()
    if optimizer is not None and steps_on_host(model):
        optimizer.step()
    del loss
    step, end = tracker.peak_bytes(start, middle), tracker.peak_bytes(middle)
    tracker.close()
    for pool, own in told:
        pool.told = own
    return Measured(before, step, end)


def host_memory(model: ParallelModule, optimizer: torch.optim.Optimizer | None = None) -> list[torch.Tensor]:
    """The buffers in which a model's values wait between its passes, and what an optimizer has there."""
    found = [one for pool in pools(model) for one in pool.buffers]
    states = optimizer.state if optimizer is not None else {}
    if steps_on_host(model):
        found += [local_of(x) for p in model.parameters() for x in (p, p.grad) if x is not None]
        return found + [local_of(x) if x.ndim else x for state in states.values() for x in state.values()]
    amount = next((a for one in model.programs if (a := one.compiled.plan.options.offloaded.get("optimizer"))), 0.0)
    if not amount or optimizer is None:
        return found
    names = {id(p): name for name, p in model.named_parameters()}
    there = moving_of(parameters_of(optimizer), amount, lambda p: names[id(p)])
    return found + [local_of(x) for p in there for x in states.get(p, {}).values() if x.ndim]


def steps_on_host(model: ParallelModule) -> bool:
    """Whether parameters, gradients and states, and all that an optimizer makes, lie in the host's memory."""
    return any(running.compiled.plan.offloads("parameters") for running in model.programs)


def pools(model: ParallelModule) -> list[HostPool]:
    """The pools of the host's memory that a model's programs use, each once."""
    runners = [running.runner for running in model.programs]
    return list({id(one): one for r in runners if hasattr(r, "driver") for one in [r.driver.tier.pool]}.values())


def _measure_cuda(model: ParallelModule, optimizer: torch.optim.Optimizer | None, args: Any, kwargs: Any) -> Measured:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = model.forward_backward(*args, **kwargs)
    torch.cuda.synchronize()
    step = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    if optimizer is not None:
        optimizer.step()
    torch.cuda.synchronize()
    del loss
    return Measured(before, step, torch.cuda.max_memory_allocated())
