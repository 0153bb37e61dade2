"""A rank's step on tensors without data: the executor, the kernels and the driver are those of a real run, so what
they hold, for how long and in which order needs no second description.

Tensors lie on a CPU that has no memory for them (FakeTensorMode), or on the meta device, where our kernels do as on a
GPU. Collectives and messages move nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

import autopar.runtime.executor.kernel_table  # noqa: F401  registers the kernels of our ops
from autopar.compiler.lowered import Lowered
from autopar.ir.layout import Layout, local_part, local_shape
from autopar.ir.mesh import PIPELINE, Mesh
from autopar.ir.program import PARTNER, Input, record
from autopar.report.memory.assumed_rows import RowCounts
from autopar.report.memory.known_results import KnownResults
from autopar.report.memory.meta_kernels import ON_CPU, ON_GPU, unlaunched, value_read
from autopar.report.memory.position import BETWEEN, OPTIMIZER, Position, RankPosition
from autopar.report.memory.report import INPUTS, PARAMETERS, STATES
from autopar.report.memory.track import StorageBlock, Tracker
from autopar.runtime.collectives.mesh_ops import axis_group
from autopar.runtime.executor.executor import Outputs, Study
from autopar.runtime.executor.inputs import StepInputs, inputs_of, slots_of
from autopar.runtime.executor.outputs import own_memory, shared_outputs
from autopar.runtime.ranks.distributed import DistributedDriver
from autopar.runtime.ranks.process_groups import Group
from autopar.runtime.ranks.runner import executor_runner
from autopar.runtime.tiers.host_tier import without_data, without_memory
from autopar.runtime.tiers.offloaded_states import OffloadedStates, moving_of
from autopar.torch_compat import FakeTensor, FakeTensorMode

_KINDS = {"parameter": PARAMETERS}
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
    host_states: int = 0  # bytes of the optimizer's that wait in the host's memory
    disk_states: int = 0  # and on its disk
    state: StateBefore | None = None  # lives as long as the trace: its end would be events


def simulate(
    compiled: Lowered, rank: int, make: OptimizerMaker, device: str, grain: int | None = None,
    counts: RowCounts | None = None, known: KnownResults | None = None,
) -> Trace:  # fmt: skip
    """The second step of a rank and of its optimizer, whose states are there by then. grain: to which bytes are
    rounded up, that of the device's allocator if not given. counts: of the rows of experts, the mean if not given.
    known: results of ops, where several steps share them."""
    fake: AbstractContextManager[Any] = FakeTensorMode() if device == CPU_DEVICE else nullcontext()
    counts = counts or RowCounts(compiled.plan.layout_mesh, compiled.mesh.coord(rank))
    place = "cpu" if device == CPU_DEVICE else "meta"
    study = _Rank(compiled, rank, _Shapes(place, grain or _GRAINS[device], counts, known or KnownResults()))
    with fake, study.tracker:
        trace = study.run(make)
    if compiled.plan.offloads("parameters"):
        parameters, states = study.on_host(make)
        if compiled.plan.options.files is None:
            trace.host_states = parameters
        else:
            trace.disk_states = parameters
        study.place_states(states)
    return trace


class _Shapes(Tracker):
    """Watches tensors without data, and makes those ops give something that would read data or another device.
    counts: of the rows of experts. known: what ops give on the meta device."""

    def __init__(self, device: str, grain: int, counts: RowCounts, known: KnownResults) -> None:
        super().__init__(device, grain)
        self.counts, self.known = counts, known
        self._reads: tuple[fx.Node | None, int] = (None, 0)  # the last node that read something, and how often

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is _aten._local_scalar_dense.default and (args[0].device.type == "meta" or _is_fake(args[0])):
            return self._value()
        if func is _aten._to_copy.default and args[0].device.type == "meta" and str(kwargs.get("device")) == "cpu":
            counts = self.counts.copied(self.place.node if self.place else None, args[0].shape)
            if counts is not None:
                return counts
            return torch.full(args[0].shape, self._value(), dtype=args[0].dtype, device="cpu")  # `tolist` asks so
        return self.known.call(func, args, kwargs) if self.device == "meta" else func(*args, **kwargs)

    def _value(self) -> int:
        """What a kernel reads at the place where the program is."""
        place = self.place
        if place is not None and place.graph == OPTIMIZER:
            return 1  # how many steps it took
        node = place.node if place is not None else None
        self._reads = (node, self._reads[1] + 1 if node is self._reads[0] else 0)
        rows = None if node is None else self.counts.read(node, self._reads[1])
        return value_read(node) if rows is None else rows


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


class _Rank:
    """A rank that takes its second step."""

    def __init__(self, compiled: Lowered, rank: int, tracker: _Shapes) -> None:
        device = tracker.device
        self.compiled, self.device = compiled, torch.device(device)
        self.coord = compiled.mesh.coord(rank)
        self.tracker = tracker
        self.position = Position(compiled, self.coord, self.tracker)
        self.trace = Trace(self.tracker, saved=self.position.saved)
        groups = fake_groups(compiled.mesh, rank, compiled.axes, copies=device == "cpu")
        self.tier = without_data(self.device)
        driver = DistributedDriver(compiled.mesh, groups, rank, tier=self.tier)
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
        on_host = self.compiled.plan.offloads("parameters")
        optimizer = None if on_host else self._optimizer(make, trained)
        loss = self._step()
        trace.gradients = tracker.blocks_of(p.grad for p in trained)
        trace.gradient_bytes = sum(p.grad.nbytes for p in trained if p.grad is not None)
        trace.optimizer = len(tracker.events)
        tracker.place = RankPosition(OPTIMIZER)
        if optimizer is not None:
            optimizer.step()
        self.place_states(self.tier.pool.lasting)
        del loss  # whoever trains looks at it afterwards
        return trace

    def _step(self) -> torch.Tensor | None:
        """Run a step as `ParallelModule.forward_backward` does, beginning without gradients: the second one, where that
        begins with more than the first."""
        self.trace.start = len(self.tracker.events)
        outputs, shared = self._outputs(self.state.inputs())
        if self.compiled.plan.options.offloaded or self._is_held(outputs):
            del outputs
            self.trace.saved.clear()
            self.trace.start = len(self.tracker.events)
            outputs, shared = self._outputs(self.state.inputs())
        outputs = own_memory(outputs, shared)
        self.tracker.place = RankPosition(BETWEEN)
        loss = None
        for out, value in zip(self.compiled.program.outputs, outputs, strict=True):
            if out.kind == "loss":
                loss = value
            elif out.kind == "gradient":
                parameter = self.state.parameters[out.name]
                parameter.grad = torch.zeros_like(parameter) if value is None else value
        return loss

    def _is_held(self, outputs: Outputs) -> bool:
        """Whether anything is left of a step beside what it gives: what was sent last, counts of rows. Of buffers of
        the host, which stay too, the tracker sees nothing."""
        given = set(self.tracker.blocks_of(outputs))
        return any(block not in given for block in self.tracker.since(self.trace.start))

    def _outputs(self, inputs: StepInputs) -> tuple[Outputs, frozenset[int]]:
        """What the programs give, and which of it is copied: a rank knows that from its first step. What waits in the
        host's memory lies alone."""
        self.position.start()
        outputs = self.runner.run(inputs)
        shared = shared_outputs(outputs, inputs.values())
        here = (i for i in shared if (out := outputs[i]) is not None and out.device.type == self.device.type)
        return outputs, frozenset(here)

    def place_states(self, bytes_: int) -> None:
        """Count the bytes of states that wait: on the disk if the options name a folder."""
        if self.compiled.plan.options.offload_dir is None:
            self.trace.host_states += bytes_
        else:
            self.trace.disk_states += bytes_

    def on_host(self, make: OptimizerMaker) -> tuple[int, int]:
        """Bytes of the host that parameters and their gradients take, and those of the states of an optimizer that
        steps there."""
        every, wanted = (
            self.state.parameters,
            {out.name for out in self.compiled.program.outputs if out.kind == "gradient"},
        )
        own = [
            nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta")) for n, p in every.items() if n in wanted
        ]
        states = 0
        if own:
            optimizer = make(own)
            self.trace.optimizer_name = type(optimizer).__name__
            for parameter in own:
                parameter.grad = torch.empty_like(parameter)
            optimizer.step()
            made = (value for state in optimizer.state.values() for value in state.values())
            states = sum(x.nbytes for x in made if isinstance(x, torch.Tensor) and x.ndim)
        return sum(parameter.nbytes for parameter in (*own, *every.values())), states

    def _optimizer(self, make: OptimizerMaker, trained: list[Any]) -> torch.optim.Optimizer | None:
        """The optimizer after its first step."""
        if not trained:
            return None
        self.tracker.place = RankPosition(OPTIMIZER)
        optimizer = make(trained)
        self.trace.optimizer_name = type(optimizer).__name__
        share = self.compiled.plan.options.offloaded.get("optimizer")
        if share:
            types = {entry.name: record(node).type.bytes_ for node, entry in self.compiled.program.parameters()}
            mine = {id(p): types[name] for name, p in self.state.parameters.items() if name in types}
            name_of, tier = {id(p): name for name, p in self.state.parameters.items()}, self.tier
            moving = partial(
                moving_of, amount=share, name_of=lambda p: name_of[id(p)], bytes_of=lambda p: mine[id(p)]
            )  # fmt: skip
            OffloadedStates(lambda p: id(p) in mine, lambda: tier, moving, lambda p: mine[id(p)]).watch(self)
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


# -- what a rank holds before a step ----------------------------------------------------------------------------------


class StateBefore:
    """Tensors of the right sizes, made and named for a tracker that watches. Of a parameter of other stages there is
    nothing."""

    def __init__(self, compiled: Lowered, coord: Mapping[str, int], device: torch.device, tracker: Tracker) -> None:
        self.program, self.device = compiled.program, device
        self.slots = slots_of(compiled.program, compiled.pipeline, coord)
        self.parameters: dict[str, torch.Tensor] = {}
        on_host = compiled.plan.offloads("parameters")
        self.held: dict[str, torch.Tensor] = {}
        owners, here = compiled.owners, (None, coord.get(PIPELINE, 0))
        for node, entry in self.program.entries:
            known = record(node)
            shape, dtype = known.type.shape, known.type.dtype
            if entry.kind == "parameter":
                is_here = owners[entry.name] in here
                shape = local_shape(shape, known.layout, self.program.mesh) if is_here else (0,) * len(shape)
                is_there = on_host and not entry.name.startswith(PARTNER)
                part = (
                    without_memory(shape, dtype, device) if is_there else torch.empty(shape, dtype=dtype, device=device)
                )
                made: torch.Tensor = nn.Parameter(part, requires_grad=dtype.is_floating_point)
                self.parameters[entry.name] = made
            elif entry.kind == "seed":
                continue  # made anew for each step
            else:
                made = self.held[_key(entry)] = torch.empty(shape, dtype=dtype, device=device)
            name = entry.name if entry.kind != "batch" else f"argument {entry.name}"
            tracker.tell([made], _KINDS.get(entry.kind, INPUTS), name)

    def inputs(self) -> StepInputs:
        """What a step begins with, as of a parallel module (`parallel/stepping.py`)."""

        def value_of(entry: Input, layout: Layout, coord: Mapping[str, int]) -> torch.Tensor:
            if entry.kind == "parameter":
                return self.parameters[entry.name].detach()
            if entry.kind == "seed":
                return torch.zeros(2, dtype=torch.int64, device=self.device)
            value = self.held[_key(entry)]
            return local_part(value, layout, self.program.mesh, coord) if entry.kind == "batch" else value

        return inputs_of(self.slots, value_of)


def _key(entry: Input) -> str:
    return f"{entry.kind} {entry.name}"


# -- a group that moves nothing ---------------------------------------------------------------------------------------


class _Done(dist.Work):
    """scratch: what the backend holds for as long as this lives. is_known: whether it says that it is done before
    somebody waits. Gloo does not, and NCCL not of a send while the host is ahead of the GPU: so what a send reads is
    kept for longest."""

    def __init__(self, scratch: torch.Tensor | None = None, is_known: bool = False) -> None:
        super().__init__()
        self.scratch, self.is_known = scratch, is_known

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return self.is_known


class FakeGroup(dist.ProcessGroup):
    """Says yes to everything. Its methods are those that the functions of `torch.distributed` call, in 2.11 to 2.13.

    copies: whether it is as Gloo, which reduces in a copy before it scatters (of its collectives, that one alone).
    """

    def __init__(self, rank: int, size: int, copies: bool) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.copies = copies

    def _scatter(self, _: Any, x: torch.Tensor, *__: Any, **___: Any) -> dist.Work:
        return _Done(x.clone() if self.copies else None, not self.copies)

    def _done(self, *_: Any, **__: Any) -> dist.Work:
        return _Done(is_known=not self.copies)

    def _sent(self, *_: Any, **__: Any) -> dist.Work:
        return _Done()

    allreduce = broadcast = allgather = reduce_scatter = alltoall = recv = _done
    send = _sent
    _allgather_base = alltoall_base = all_gather_single = all_to_all_single = _done
    all_gather_single_coalesced = allgather_into_tensor_coalesced = _done
    _reduce_scatter_base = reduce_scatter_single = _scatter  # type: ignore[assignment]


def _itself(group: FakeGroup) -> FakeGroup:
    return group


def fake_groups(mesh: Mesh, rank: int, axes: Iterable[str], copies: bool) -> dict[str, Group]:
    """The groups of a rank, as `make_groups` makes them where there are processes."""
    fake_groups = {}
    for axis in axes:
        members = axis_group(mesh, rank, axis)
        order = tuple(sorted(members).index(member) for member in members)
        handle = FakeGroup(members.index(rank), len(members), copies)
        in_order = order == tuple(range(len(members)))
        fake_groups[axis] = Group(partial(_itself, handle), len(members), None if in_order else order)
    return fake_groups
