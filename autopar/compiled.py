"""The programs of all ranks as `autopar.compile` and `autopar.load` return them, with what can be asked of them."""

from __future__ import annotations

from pathlib import Path

from autopar.compiler.lowered import STEP, Lowered
from autopar.custom_ops.registry import CUSTOM_OPS
from autopar.errors import ArtifactError
from autopar.ir.options import StepOptions
from autopar.ir.plan import Plan
from autopar.machines import DEVICES, MachineLike, machine_like
from autopar.planning import StepTime, step_time
from autopar.report.artifact.artifact import Artifact, load_programs, save_programs
from autopar.report.explanation import Explanation, explain
from autopar.report.memory.estimate import memory_report
from autopar.report.memory.report import MemoryReport
from autopar.report.memory.simulate_rank import OptimizerMaker
from autopar.report.timeline.show_timeline import picture_of
from autopar.report.timeline.terminal import timeline_text


class Compiled(Lowered):
    """The programs of all ranks, with the program after each pass. Needs no process group and no memory.

    `history` holds (pass, program) from "capture" on; a program loaded from a directory has only the last.
    `pipeline` is what the last program was cut into, if there are stages or micro-batches.
    """

    @classmethod
    def of(cls, lowered: Lowered) -> Compiled:
        """The same programs, to be asked."""
        return cls(lowered.plan, lowered.history, lowered.pipeline)

    def explain(self, value: str) -> Explanation:
        """Why a parameter, a computed value or all of a module has its layout, and what it moves.

        value: `"blocks.0.mlp.up.weight"`, a module path, or the name of a node such as `"%einsum_4"`. Solves the
        search again for each other layout of the value. Raises ValueNameError, with the nearest names.
        """
        return explain(self, value)

    def memory(self, rank: int = 0, optimizer: OptimizerMaker | None = None, device: str | None = None) -> MemoryReport:
        """The bytes that a rank holds in a step and in its optimizer's, by category, with the peak and its place.

        Found by running the rank's program on tensors without data. optimizer: makes one from parameters, AdamW if not
        given. device: "cpu" or "cuda", by default what the program was compiled for. Raises RankError or PlanError.
        """
        return memory_report(self, rank, optimizer, device)

    def time(self, machine: MachineLike = DEVICES, imbalance: float = 1.0) -> StepTime:
        """How long a step takes on a machine that need not be here, and what the time is made of: a simulation of
        these programs. machine: a name that `autopar machine show` knows, the path of a file, or a `Machine`.
        imbalance: of experts over ranks, the rows of the busiest one over the mean (`model.last`). Raises MachineError.
        """
        return step_time(self, machine_like(machine), imbalance)

    def timeline(self, width: int = 100) -> str:
        """When each rank of a pipeline does what, simulated, as lines of text: `autopar inspect --timeline`. Raises
        TargetError if the step is one graph."""
        return timeline_text(picture_of(self), width, colour=False).plain

    def save(self, directory: str | Path) -> None:
        """Write the programs of the distinct ranks as readable Python and JSON."""
        programs = tuple((ranks, self.ranks[ranks[0]].programs) for ranks in self.alike)
        whole = None if self.pipeline is None else self.program
        save_programs(Path(directory), Artifact(self.mesh, programs, {}, self.pipeline, whole))


def load(directory: str | Path) -> Compiled:
    """A program saved by `Compiled.save`. Executes no code from the directory; raises ArtifactError if it is not
    one, or not intact, or if it holds a custom op that has no rule in this process (`register_rule`)."""
    artifact = load_programs(Path(directory), CUSTOM_OPS.names())
    pipeline = artifact.pipeline
    if pipeline is not None:
        assert artifact.whole is not None
        count, slices = pipeline.microbatches // pipeline.flow.slices, pipeline.flow.slices
        options = StepOptions(microbatches=count, slices=slices, schedule=pipeline.schedule)
        plan = Plan(artifact.mesh, options=options, slice_lengths=pipeline.flow.lengths)
        return Compiled(plan, (("load", artifact.whole),), pipeline)
    (_, programs), *_ = artifact.programs
    if STEP not in programs:
        raise ArtifactError(f"'{directory}' holds no graph '{STEP}', only {', '.join(sorted(programs))}.")
    return Compiled(Plan(artifact.mesh), (("load", programs[STEP]),))
