"""A rank's step on tensors without data: the executor, the kernels and the driver are those of a real run, so what
they hold, for how long and in which order needs no second description.

Tensors lie on a CPU that has no memory for them (FakeTensorMode), or on the meta device, where our kernels do as on a
GPU. Collectives and messages move nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

import autopar.runtime.kernels  # noqa: F401  registers the kernels of our ops
from autopar.compiler.lowered import STEP, Lowered
from autopar.ir.layout import Layout, local_part, local_shape
from autopar.ir.mesh import PIPELINE
from autopar.ir.pipeline import graph_name
from autopar.ir.program import Input, record
from autopar.ir.schedule import Span
from autopar.report.memory.fake_group import fake_groups
from autopar.report.memory.meta_kernels import ON_CPU, value_read
from autopar.report.memory.report import INPUTS, PARAMETERS, STATES
from autopar.report.memory.track import Block, Tracker
from autopar.runtime.distributed import DistributedDriver
from autopar.runtime.executor import Outputs, Study
from autopar.runtime.inputs import StepInputs, inputs_of, slots_of
from autopar.runtime.outputs import own_memory, shared_outputs
from autopar.runtime.runner import executor_runner
from autopar.torch_compat import FakeTensor, FakeTensorMode

_aten = torch.ops.aten
OptimizerMaker = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
CPU_DEVICE, GPU_DEVICE = "cpu", "cuda"
# The CUDA caching allocator gives blocks of a multiple of 512 bytes.
_GRAINS = {CPU_DEVICE: 1, GPU_DEVICE: 512}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is. graph: of its graphs; action: of a pipeline's; node: that it computes, None between them."""

    graph: str
    action: str = ""
    node: fx.Node | None = None


OPTIMIZER, BETWEEN = "optimizer", "between graphs"
_KINDS = {"parameter": PARAMETERS}


@dataclass(slots=True)
class Trace:
    """What a rank held. The events from `start` on are those of a step, from `optimizer` on of the optimizer's.

    saved: what the forward pass left to the backward pass. gradients: what the step left to the optimizer.
    """

    tracker: Tracker
    start: int = 0
    optimizer: int = 0
    saved: set[Block] = field(default_factory=set)
    gradients: list[Block] = field(default_factory=list)
    optimizer_name: str = "no optimizer"
    parameters: tuple[int, ...] = ()  # the elements of each
    gradient_bytes: int = 0  # of the gradients alone; their memory may be larger


def simulate(compiled: Lowered, rank: int, make: OptimizerMaker, device: str, grain: int | None = None) -> Trace:
    """The second step of a rank and of its optimizer, whose states are there by then. grain: to which bytes are
    rounded up, that of the device's allocator if not given."""
    fake: AbstractContextManager[Any] = FakeTensorMode() if device == CPU_DEVICE else nullcontext()
    study = _Rank(compiled, rank, "cpu" if device == CPU_DEVICE else "meta", grain or _GRAINS[device])
    with fake, study.tracker:
        return study.run(make)


class _Shapes(Tracker):
    """Watches tensors without data, and makes those ops give something that would read data or another device.

    value: what a kernel reads, at the place where the program is.
    """

    def __init__(self, device: str, grain: int, value: Callable[[], int]) -> None:
        super().__init__(device, grain)
        self.value = value

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is _aten._local_scalar_dense.default and (args[0].device.type == "meta" or _is_fake(args[0])):
            return self.value()
        if func is _aten._to_copy.default and args[0].device.type == "meta" and str(kwargs.get("device")) == "cpu":
            return torch.full(args[0].shape, self.value(), dtype=args[0].dtype)  # `tolist` asks so
        return func(*args, **kwargs)


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


class _Rank:
    """A rank, its state and where it is."""

    def __init__(self, compiled: Lowered, rank: int, device: str, grain: int) -> None:
        self.compiled, self.device = compiled, torch.device(device)
        self.coord = compiled.mesh.coord(rank)
        self.tracker = _Shapes(device, grain, self._value)
        self.trace = Trace(self.tracker)
        groups = fake_groups(compiled.mesh, rank, compiled.axes, copies=device == "cpu")
        driver = DistributedDriver(compiled.mesh, groups, rank)
        study = Study(self._enter, ON_CPU if device == "cpu" else {})
        program, pipeline = compiled.program, compiled.pipeline
        self.runner = executor_runner(program, pipeline, driver, self.device, study, self._ended)
        self.slots = slots_of(program, pipeline, self.coord)
        self.parameters: dict[str, torch.Tensor] = {}
        self.held: dict[str, torch.Tensor] = {}
        self.names: dict[fx.Graph, str] = {program.graph: STEP}
        self.actions: tuple[str, ...] = ()  # of a pipeline, in order
        if pipeline is not None:
            self.names = {graph.graph: graph_name(*key) for key, graph in pipeline.graphs.items()}
            self.actions = tuple(map(str, pipeline.lists[self.coord.get(PIPELINE, 0)]))
        self.action, self.line, self.begun, self.crossed = "", 0, 0, False

    # -- where it is --------------------------------------------------------------------------------------------

    def _enter(self, node: fx.Node) -> None:
        if not self.crossed and record(node).is_backward:
            self.crossed = True
            self._save(self.begun)
        self.tracker.place = Place(self.names[node.graph], self.action, node)

    def _ended(self, span: Span) -> None:
        """An instruction of a pipeline: what a forward graph leaves is there for a backward one."""
        done = span.instruction
        if done.op != "SEND" and done.action.kind == "F":
            self._save(self.begun)
        self.line += 1
        self._begin()

    def _begin(self) -> None:
        self.begun = len(self.tracker.events)
        self.action = self.actions[self.line] if self.line < len(self.actions) else ""
        self.tracker.place = Place(BETWEEN, self.action)

    def _save(self, since: int) -> None:
        born = (event.block for event in self.tracker.events[since:])
        self.trace.saved.update(block for block in born if block.end is None and block.born >= since)

    def _value(self) -> int:
        place = self.tracker.place
        if place is not None and place.graph == OPTIMIZER:
            return 1  # how many steps it took
        return value_read(place.node if place is not None else None)

    # -- what it does -------------------------------------------------------------------------------------------

    def run(self, make: OptimizerMaker) -> Trace:
        tracker, trace = self.tracker, self.trace
        self._make_state()
        trace.parameters = tuple(parameter.numel() for parameter in self.parameters.values())
        wanted = {out.name for out in self.compiled.program.outputs if out.kind == "gradient"}
        trained = [parameter for name, parameter in self.parameters.items() if name in wanted]
        optimizer = self._optimizer(make, trained)
        shared = self._shared()
        trace.start = len(tracker.events)
        loss = self._step(shared)
        trace.gradients = tracker.blocks_of(p.grad for p in trained)
        trace.gradient_bytes = sum(p.grad.nbytes for p in trained if p.grad is not None)
        trace.optimizer = len(tracker.events)
        tracker.place = Place(OPTIMIZER)
        if optimizer is not None:
            optimizer.step()
        del loss  # whoever trains looks at it afterwards
        return trace

    def _step(self, shared: frozenset[int]) -> torch.Tensor | None:
        """As `ParallelModule.forward_backward`, beginning without gradients."""
        outputs = own_memory(self._outputs(self._inputs()), shared)
        self.tracker.place = Place(BETWEEN)
        loss = None
        for out, value in zip(self.compiled.program.outputs, outputs, strict=True):
            if out.kind == "loss":
                loss = value
            elif out.kind == "gradient":
                parameter = self.parameters[out.name]
                parameter.grad = torch.zeros_like(parameter) if value is None else value
        return loss

    def _shared(self) -> frozenset[int]:
        """The outputs that are copied. A rank knows them after its first step, and so does this."""
        inputs = self._inputs()
        found = shared_outputs(self._outputs(inputs), inputs.values())
        self.trace.saved.clear()
        return found

    def _outputs(self, inputs: StepInputs) -> Outputs:
        self.crossed, self.line = bool(self.actions), 0
        self._begin()
        return self.runner.run(inputs)

    # -- what it has --------------------------------------------------------------------------------------------

    def _make_state(self) -> None:
        """Parameters, buffers, constants and the batch. Of a parameter of other stages there is nothing."""
        compiled, program = self.compiled, self.compiled.program
        place, owners = self.coord.get(PIPELINE, 0), compiled.owners
        for node, entry in program.entries:
            known = record(node)
            shape, dtype = known.type.shape, known.type.dtype
            if entry.kind == "parameter":
                here = owners[entry.name] in (None, place)
                shape = local_shape(shape, known.layout, program.mesh) if here else (0,) * len(shape)
                part = torch.empty(shape, dtype=dtype, device=self.device)
                made: torch.Tensor = nn.Parameter(part, requires_grad=dtype.is_floating_point)
                self.parameters[entry.name] = made
            elif entry.kind == "seed":
                continue  # made anew for each step
            else:
                made = self.held[_key(entry)] = torch.empty(shape, dtype=dtype, device=self.device)
            name = entry.name if entry.kind != "batch" else f"argument {entry.name}"
            self._tell([made], _KINDS.get(entry.kind, INPUTS), name)

    def _optimizer(self, make: OptimizerMaker, trained: list[Any]) -> torch.optim.Optimizer | None:
        """The optimizer after its first step."""
        if not trained:
            return None
        self.tracker.place = Place(OPTIMIZER)
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
        names = {parameter: name for name, parameter in self.parameters.items()}
        for parameter, state in optimizer.state.items():
            for label, value in state.items():
                self._tell([value], STATES, f"{label} of {names.get(parameter, '?')}")
        return optimizer

    def _tell(self, tensors: Iterable[Any], kind: str, name: str) -> None:
        for block in self.tracker.blocks_of(tensors):
            block.kind, block.name = kind, name

    def _inputs(self) -> StepInputs:
        """As `Programs._inputs`."""
        program = self.compiled.program

        def value_of(entry: Input, layout: Layout, coord: Mapping[str, int]) -> torch.Tensor:
            if entry.kind == "parameter":
                return self.parameters[entry.name].detach()
            if entry.kind == "seed":
                return torch.zeros(2, dtype=torch.int64, device=self.device)
            value = self.held[_key(entry)]
            return local_part(value, layout, program.mesh, coord) if entry.kind == "batch" else value

        return inputs_of(self.slots, value_of)


def _key(entry: Input) -> str:
    return f"{entry.kind} {entry.name}"
