"""Have Inductor compile what a rank runs, on all ranks together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from autopar.compiler.lowered import STEP
from autopar.ir.mesh import PIPELINE
from autopar.ir.pipeline import Pipeline
from autopar.ir.program import Program
from autopar.parallel.agree.agreement import Agreement, Phase
from autopar.runtime.pipeline.run_pipeline import RankCode
from autopar.runtime.ranks.distributed import DistributedDriver
from autopar.runtime.ranks.process_groups import Group
from autopar.runtime.ranks.runner import PipelineRunner, Runner

# A compiler may reorder. It never did: but ranks that wait for different things would hang.
_ORDER = "order of collectives that Inductor wrote"


def compiled_program(
    program: Program, groups: Mapping[str, Group], agreement: Agreement, device: torch.device
) -> Runner:
    def compile_here(phase: Phase) -> Runner:
        from autopar.runtime.compilers.inductor import compile_program  # and with it Inductor

        made = compile_program(program, dist.get_rank(), groups, device, STEP)
        phase.texts[_ORDER] = made.code.collectives
        return made

    return agreement.together("compilation", compile_here)


def compiled_pipeline(
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
