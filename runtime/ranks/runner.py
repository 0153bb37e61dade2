"""A rank's program, ready to run over torch.distributed: one protocol for a graph, a pipeline and compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from autopar.ir.mesh import PIPELINE
from autopar.ir.pipeline import Pipeline, graph_name
from autopar.ir.program import Output, Program
from autopar.runtime.executor.executor import Executable, Kernels, Outputs, Study
from autopar.runtime.executor.inputs import StepInputs
from autopar.runtime.pipeline.microbatches import ExecutorGraph
from autopar.runtime.pipeline.run_pipeline import RankCode, Watch, compile_rank, outputs_of
from autopar.runtime.ranks.distributed import DistributedDriver, Routed
from autopar.runtime.ranks.recorder import PROFILER, Recorder


class Runner(Protocol):
    """A rank's program, ready to run. `source` is the Python that runs, for people to read."""

    @property
    def source(self) -> str: ...

    def run(self, inputs: StepInputs) -> Outputs:
        """The outputs of the program on this rank, None for those that other stages have."""
        ...

    @property
    def routed(self) -> Sequence[Routed]:
        """How many rows went to each expert in the last run: nothing where no code of ours counted them."""
        ...

    def record(self, recorder: Recorder | str | None) -> None:
        """Let a recorder see what the runs from now on do, or torch.profiler (PROFILER); raises CompileError where
        nothing can."""
        ...


@runtime_checkable
class Written(Protocol):
    """Kernels of groups, with the Python that they are."""

    @property
    def source(self) -> str: ...


@dataclass(frozen=True)
class ExecutorRunner:
    """A program of one graph on our executor."""

    executable: Executable
    driver: DistributedDriver

    @property
    def source(self) -> str:
        return _with_kernels(self.executable.source, self.executable.kernels)

    def run(self, inputs: StepInputs) -> Outputs:
        return self.driver.run(self.executable, inputs.values())

    @property
    def routed(self) -> Sequence[Routed]:
        return self.driver.routed

    def record(self, recorder: Recorder | str | None) -> None:
        self.driver.recorder = recorder if isinstance(recorder, Recorder) else None
        self.executable.is_named = recorder == PROFILER


@dataclass(frozen=True)
class PipelineRunner:
    """A rank's instruction list on our executor. watch: told of each instruction at its end. kernels: of its groups."""

    code: RankCode
    driver: DistributedDriver
    outputs: tuple[Output, ...]
    device: torch.device
    watch: Watch | None = None
    kernels: Kernels | None = None

    @property
    def source(self) -> str:
        named = self.code.graphs.items()
        text = "\n".join(f"# {graph_name(*place)}\n{code.source}" for place, code in named)
        return _with_kernels(text, self.kernels)

    def run(self, inputs: StepInputs) -> Outputs:
        return outputs_of(self.driver.run_pipeline(self.code, inputs, self.device, self.watch), self.outputs)

    @property
    def routed(self) -> Sequence[Routed]:
        return self.driver.routed

    def record(self, recorder: Recorder | str | None) -> None:
        self.driver.recorder = recorder if isinstance(recorder, Recorder) else None
        for graph in self.code.graphs.values():
            if isinstance(graph, ExecutorGraph):
                graph.executable.is_named = recorder == PROFILER


def _with_kernels(source: str, kernels: Kernels | None) -> str:
    """A program, and the kernels that it calls, if they are written and not only stand for them."""
    return f"{source}\n\n{kernels.source}" if isinstance(kernels, Written) and kernels.source else source


def executor_runner(
    program: Program, pipeline: Pipeline | None, driver: DistributedDriver, device: torch.device,
    study: Study | None = None, watch: Watch | None = None, kernels: Kernels | None = None,
) -> Runner:  # fmt: skip
    """A program, or the pipeline that it was cut into, on our executor. study, watch: for who asks what it holds.
    kernels: of its groups."""
    if pipeline is None:
        return ExecutorRunner(Executable(program.graph, study=study, device=device, kernels=kernels), driver)
    code = compile_rank(pipeline, driver.coord.get(PIPELINE, 0), study, device, kernels)
    return PipelineRunner(code, driver, program.outputs, device, watch, kernels)
