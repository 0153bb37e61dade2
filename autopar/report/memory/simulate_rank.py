"""A rank's step on tensors without data: the executor, the kernels and the driver are those of a real run, so what
they hold, for how long and in which order needs no second description.

Tensors lie on a CPU that has no memory for them (FakeTensorMode), or on the meta device, where our kernels do as on a
GPU. Collectives and messages move nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import autopar.runtime.executor.kernel_table  # noqa: F401  registers the kernels of our ops
from autopar.compiler.lowered import Lowered
from autopar.report.memory.before_step import StateBefore
from autopar.report.memory.fake_group import fake_groups
from autopar.report.memory.meta_kernels import ON_CPU, ON_GPU, unlaunched, value_read
from autopar.report.memory.position import BETWEEN, OPTIMIZER, Position, RankPosition
from autopar.report.memory.report import STATES
from autopar.report.memory.track import StorageBlock, Tracker
from autopar.runtime.executor.executor import Outputs, Study
from autopar.runtime.executor.inputs import StepInputs
from autopar.runtime.executor.outputs import own_memory, shared_outputs
from autopar.runtime.ranks.distributed import DistributedDriver
from autopar.runtime.ranks.runner import executor_runner
from autopar.torch_compat import FakeTensor, FakeTensorMode

_aten = torch.ops.aten
OptimizerMaker = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
CPU_DEVICE, GPU_DEVICE = "cpu", "cuda"
# The CUDA caching allocator gives blocks of a multiple of 512 bytes.
_GRAINS = {CPU_DEVICE: 1, GPU_DEVICE: 512}


@dataclass(slots=True)
class Trace:
    """What a rank held. The events from `start` on are those of a step, from `optimizer` on of the optimizer's.

    saved: what the forward pass left to the backward pass. gradients: what the step left to the optimizer.
    """

    tracker: Tracker
    start: int = 0
    optimizer: int = 0
    saved: set[StorageBlock] = field(default_factory=set)
    gradients: list[StorageBlock] = field(default_factory=list)
    optimizer_name: str = "no optimizer"
    parameters: tuple[int, ...] = ()  # the elements of each
    gradient_bytes: int = 0  # of the gradients alone; their memory may be larger
    state: StateBefore | None = None  # lives as long as the trace: its end would be events


def simulate(compiled: Lowered, rank: int, make: OptimizerMaker, device: str, grain: int | None = None) -> Trace:
    """The second step of a rank and of its optimizer, whose states are there by then. grain: to which bytes are
    rounded up, that of the device's allocator if not given."""
    fake: AbstractContextManager[Any] = FakeTensorMode() if device == CPU_DEVICE else nullcontext()
    study = _Rank(compiled, rank, "cpu" if device == CPU_DEVICE else "meta", grain or _GRAINS[device])
    with fake, study.tracker:
        return study.run(make)


class _Shapes(Tracker):
    """Watches tensors without data, and makes those ops give something that would read data or another device."""

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is _aten._local_scalar_dense.default and (args[0].device.type == "meta" or _is_fake(args[0])):
            return self._value()
        if func is _aten._to_copy.default and args[0].device.type == "meta" and str(kwargs.get("device")) == "cpu":
            return torch.full(args[0].shape, self._value(), dtype=args[0].dtype)  # `tolist` asks so
        return func(*args, **kwargs)

    def _value(self) -> int:
        """What a kernel reads at the place where the program is."""
        place = self.place
        if place is not None and place.graph == OPTIMIZER:
            return 1  # how many steps it took
        return value_read(place.node if place is not None else None)


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


class _Rank:
    """A rank that takes its second step."""

    def __init__(self, compiled: Lowered, rank: int, device: str, grain: int) -> None:
        self.compiled, self.device = compiled, torch.device(device)
        self.coord = compiled.mesh.coord(rank)
        self.tracker = _Shapes(device, grain)
        self.position = Position(compiled, self.coord, self.tracker)
        self.trace = Trace(self.tracker, saved=self.position.saved)
        groups = fake_groups(compiled.mesh, rank, compiled.axes, copies=device == "cpu")
        driver = DistributedDriver(compiled.mesh, groups, rank)
        study = Study(self.position.enter, ON_CPU if device == "cpu" else ON_GPU)
        processors = compiled.plan.fixed.machine.device.processors
        kernels = unlaunched(processors) if device == "meta" else None  # a CPU runs the calls of a group one by one
        self.runner = executor_runner(
            compiled.program, compiled.pipeline, driver, self.device, study, self.position.ended, kernels
        )

    def run(self, make: OptimizerMaker) -> Trace:
        tracker, trace = self.tracker, self.trace
        self.state = trace.state = StateBefore(self.compiled, self.coord, self.device, tracker)
        trace.parameters = tuple(parameter.numel() for parameter in self.state.parameters.values())
        wanted = {out.name for out in self.compiled.program.outputs if out.kind == "gradient"}
        trained = [parameter for name, parameter in self.state.parameters.items() if name in wanted]
        optimizer = self._optimizer(make, trained)
        shared = self._shared()
        trace.start = len(tracker.events)
        loss = self._step(shared)
        trace.gradients = tracker.blocks_of(p.grad for p in trained)
        trace.gradient_bytes = sum(p.grad.nbytes for p in trained if p.grad is not None)
        trace.optimizer = len(tracker.events)
        tracker.place = RankPosition(OPTIMIZER)
        if optimizer is not None:
            optimizer.step()
        del loss  # whoever trains looks at it afterwards
        return trace

    def _step(self, shared: frozenset[int]) -> torch.Tensor | None:
        """Run a step as `ParallelModule.forward_backward` does, beginning without gradients."""
        outputs = own_memory(self._outputs(self.state.inputs()), shared)
        self.tracker.place = RankPosition(BETWEEN)
        loss = None
        for out, value in zip(self.compiled.program.outputs, outputs, strict=True):
            if out.kind == "loss":
                loss = value
            elif out.kind == "gradient":
                parameter = self.state.parameters[out.name]
                parameter.grad = torch.zeros_like(parameter) if value is None else value
        return loss

    def _shared(self) -> frozenset[int]:
        """The outputs that are copied. A rank knows them after its first step, and so does this."""
        inputs = self.state.inputs()
        found = shared_outputs(self._outputs(inputs), inputs.values())
        self.trace.saved.clear()
        return found

    def _outputs(self, inputs: StepInputs) -> Outputs:
        self.position.start()
        return self.runner.run(inputs)

    def _optimizer(self, make: OptimizerMaker, trained: list[Any]) -> torch.optim.Optimizer | None:
        """The optimizer after its first step."""
        if not trained:
            return None
        self.tracker.place = RankPosition(OPTIMIZER)
        optimizer = make(trained)
        self.trace.optimizer_name = type(optimizer).__name__
        if self.device.type == "meta":  # what torch does by default on a GPU, and not here
            for group in optimizer.param_groups:
                if group.get("foreach", False) is None and not group.get("fused"):
                    group["foreach"] = True
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        for parameter in trained:
            parameter.grad = None
        names = {parameter: name for name, parameter in self.state.parameters.items()}
        for parameter, state in optimizer.state.items():
            for label, value in state.items():
                self.tracker.tell([value], STATES, f"{label} of {names.get(parameter, '?')}")
        return optimizer
