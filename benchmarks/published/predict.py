"""What the compiler and its cost model say of a case: the time of a step or of a layer, the bytes of a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from autopar.compiled import Compiled
from autopar.compiler.check_options import options_of
from autopar.compiler.meshes import mesh_of
from autopar.ir.plan import Fixed
from autopar.planning import StepTime
from autopar.planning.price.pipeline_time import emitted_costs
from autopar.report.memory.within_memory import compile_step
from benchmarks.published.case import BACKWARD, FORWARD, MEMORY, STEP, Case

PASSES = {FORWARD: "F", BACKWARD: "BIW"}  # kinds of actions


@dataclass(frozen=True, slots=True)
class Predicted:
    """values: by what was measured, in its units. step: what a simulated step is made of."""

    case: Case
    values: Mapping[str, float]
    step: StepTime | None = None

    @property
    def step_s(self) -> float:
        return self.values[STEP]

    def error(self, what: str) -> float:
        return self.values[what] / self.case.measured[what] - 1


def predict(case: Case) -> Predicted:
    """Raises AutoparError where the programs of a case cannot be emitted."""
    kind = next(iter(case.measured))
    return PREDICTORS[kind](case)


def _step(case: Case) -> Predicted:
    made = compiled(case).time(case.machine)
    return Predicted(case, {STEP: made.total / 1e6}, made)


def _memory(case: Case) -> Predicted:
    """Of the fullest rank."""
    made = compiled(case)
    return Predicted(case, {MEMORY: max(made.memory(ranks[0], device="cuda").peak for ranks in made.alike)})


def _layer(case: Case) -> Predicted:
    """What a micro-batch of a model takes longer than one of the model with a layer less, forward and backward."""
    assert case.shorter is not None
    deep, less = _passes(case), _passes(replace(case, model=case.shorter))
    return Predicted(case, {what: (deep[what] - less[what]) / 1e6 for what in case.measured})


def _passes(case: Case) -> dict[str, float]:
    """us of the graphs of a micro-batch on a rank."""
    pipeline = compiled(case).pipeline
    assert pipeline is not None, "with micro-batches the passes are graphs of their own"
    ran = emitted_costs(pipeline, case.machine).graphs
    return {what: sum(one.total for (_, kind, _), one in ran.items() if kind in PASSES[what]) for what in PASSES}


def compiled(case: Case) -> Compiled:
    """The programs of a case."""
    with torch.device("meta"):
        model = case.model()
    made = compile_step(
        model, case.loss, case.batch(), {}, mesh_of(case.mesh), options_of(**case.options),
        fixed=Fixed(machine=case.made_for or case.machine),
    )  # fmt: skip
    return Compiled.of(made[1])


PREDICTORS: Mapping[str, Callable[[Case], Predicted]] = {STEP: _step, MEMORY: _memory, FORWARD: _layer}
