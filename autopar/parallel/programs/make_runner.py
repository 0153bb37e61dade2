"""Make a program ready to run on this rank: on our executor, as code that Inductor writes, or as a recording."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx, nn

from autopar.compiler.check_options import Graphs
from autopar.compiler.lowered import STEP, Lowered
from autopar.errors import CompileError
from autopar.ir.layout import padded_shape
from autopar.ir.mesh import PIPELINE
from autopar.ir.ops.ops import op, whole_of
from autopar.ir.pipeline import Pipeline
from autopar.ir.program import Program
from autopar.parallel.agree.agreement import Agreement, Phase
from autopar.parallel.session.compilers import kernels_of
from autopar.runtime.collectives.rows_to_owners import bound_of
from autopar.runtime.compilers.cuda_graphs import CudaGraph, DryGraph, GraphRunner, RecordedGraph
from autopar.runtime.executor.executor import describe
from autopar.runtime.executor.inputs import Slot
from autopar.runtime.pipeline.run_pipeline import RankCode
from autopar.runtime.ranks.distributed import DistributedDriver
from autopar.runtime.ranks.process_groups import Group, default_group
from autopar.runtime.ranks.runner import PipelineRunner, Runner, executor_runner
from autopar.runtime.tiers.host_buffers import host_buffers, moves_to_host
from autopar.runtime.tiers.host_tier import HostTier

# A compiler may reorder. It never did: but ranks that wait for different things would hang.
_ORDER = "order of collectives that Inductor wrote"
# torch's kernels take the lengths from the host, and rows go to their experts in numbers that the host has read
_READING = frozenset(map(op, ("ctc_loss", "ctc_loss_backward", "route", "route_start")))


def make_runner(
    compiled: Lowered, groups: Mapping[str, Group], agreement: Agreement, device: torch.device,
    tier: Callable[[], HostTier],
) -> Runner:  # fmt: skip
    """Make a program ready to run. Every rank must call this; where one fails, all raise. tier: gives the host's memory
    to programs that leave values there, which have their buffers before the first step."""
    program, pipeline = compiled.program, compiled.pipeline
    filled = _filled(compiled, agreement, tier) if moves_to_host(program, pipeline) else None
    driver = DistributedDriver(compiled.mesh, groups, waits=agreement.pace.waits, tier=filled)
    compiler = compiled.plan.options.compile
    if compiler != "inductor":
        return executor_runner(program, pipeline, driver, device, kernels=kernels_of(compiler, device))
    if pipeline is None:
        return _compiled_program(program, groups, agreement, device)
    return _compiled_pipeline(program, pipeline, driver, groups, agreement, device)


def _filled(compiled: Lowered, agreement: Agreement, tier: Callable[[], HostTier]) -> HostTier:
    def fill(_: Phase) -> HostTier:
        place = compiled.mesh.coord(default_group().rank()).get(PIPELINE, 0)
        made = tier()
        made.fill(host_buffers(compiled.program, compiled.pipeline, place))
        return made

    return agreement.together("host memory", fill)


def _compiled_program(
    program: Program, groups: Mapping[str, Group], agreement: Agreement, device: torch.device
) -> Runner:
    def compile_here(phase: Phase) -> Runner:
        from autopar.runtime.compilers.inductor import compile_program  # and with it Inductor

        made = compile_program(program, default_group().rank(), groups, device, STEP)
        phase.texts[_ORDER] = made.code.collectives
        return made

    return agreement.together("compilation", compile_here)


def _compiled_pipeline(
    program: Program, pipeline: Pipeline, driver: DistributedDriver, groups: Mapping[str, Group],
    agreement: Agreement, device: torch.device,
) -> Runner:  # fmt: skip
    """Only ranks at the same place of the pipeline compile the same graphs."""

    def compile_here(phase: Phase) -> tuple[RankCode, Mapping[str, Sequence[str]]]:
        from autopar.runtime.compilers.inductor_stages import compile_stages

        return compile_stages(pipeline, driver.rank, groups, device)

    code, collectives = agreement.together("compilation", compile_here)
    lines = [f"{graph}: {name}" for graph, names in collectives.items() for name in names]
    agreement.check_within(_ORDER, driver.coord.get(PIPELINE, 0), lines)
    return PipelineRunner(code, driver, program.outputs, device)


# -- recordings -----------------------------------------------------------------------------------------------------


def recordings(wanted: Graphs, device: torch.device) -> Callable[[], RecordedGraph] | None:
    """Make empty recordings, in one pool of memory; None if the user wants none. wanted: see `parallelize`."""

    @cache
    def pool() -> Any:
        return torch.cuda.graph_pool_handle()

    if not wanted:
        return None
    return DryGraph if wanted == "dry-run" else lambda: CudaGraph(pool(), device)


def recorded(
    runner: Runner, compiled: Lowered, slots: Sequence[Slot], parameters: Mapping[str, nn.Parameter],
    empty: Callable[[], RecordedGraph],
) -> Runner:  # fmt: skip
    """A program as a recording. Raises CompileError if it cannot be recorded."""
    _check(compiled)
    copied = {slot.key for slot in slots if _is_made_anew(slot, compiled.program, parameters)}
    name = f"the program on mesh {compiled.mesh} ({len(compiled.program.graph.nodes)} nodes)"
    return GraphRunner(runner, empty, {slot.key: slot.entry for slot in slots}, copied, name)


def _is_made_anew(slot: Slot, program: Program, parameters: Mapping[str, nn.Parameter]) -> bool:
    """Whether an input is made at each step of what the user has: with zeros behind it, or of a Python number. The same
    on all ranks."""
    if slot.entry.kind == "parameter":
        shape = tuple(parameters[slot.entry.name].shape)
        return padded_shape(shape, slot.layout, program.mesh) != shape
    return slot.entry.kind == "constant" and not slot.layout.dims


def _check(compiled: Lowered) -> None:
    """Raise CompileError for a step that waits for its device, or moves messages, while it runs."""
    if compiled.pipeline is not None:
        raise CompileError(
            f"cuda_graphs records steps of one graph; this one is a pipeline (mesh {compiled.mesh}, "
            f"{compiled.pipeline.parts_text}), whose messages are events of the host. Leave "
            f"cuda_graphs out, or pp and microbatches."
        )
    program = compiled.program
    if any(out.kind == "guard" for out in program.outputs):
        raise CompileError(
            "cuda_graphs keeps the host from waiting for the GPU, and specialize=True lets it read values of the batch "
            "at every step: leave out one of the two."
        )
    checking = next((node for node in program.calls() if node.kwargs.get("check_errors")), None)
    if checking is not None:
        raise CompileError(
            f"cuda_graphs cannot record {describe(checking)}\n"
            f"  The host looks at each step whether it came out. Leave cuda_graphs out, or take what does not look, as "
            f"torch.linalg.cholesky_ex and inv_ex."
        )
    reading = next((node for node in program.calls() if node.target in _READING and not _is_bounded(node)), None)
    if reading is not None:
        raise CompileError(
            f"cuda_graphs cannot record {describe(reading)}\n"
            f"  It takes its lengths from the host, which a recording would freeze. Leave cuda_graphs out"
            + (", or bound the rows of experts: expert_rows=1.25." if whole_of(reading.target) is op("route") else ".")
        )


def _is_bounded(node: fx.Node) -> bool:
    """True for a route that tells the host nothing."""
    return whole_of(node.target) is op("route") and bound_of(node) > 0
