"""The planner's own best plan for a case: the same model, devices and batch, in 80 GB."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from autopar.compiler.check_options import options_of
from autopar.compiler.meshes import mesh_of
from autopar.ir.options import PLANNED
from autopar.planning.jobs import layers_of_call
from autopar.planning.planner import Asked, planned
from autopar.planning.price.layers import Layers
from autopar.planning.price.predict import Prediction
from benchmarks.published.case import Case
from benchmarks.published.models import token_loss
from benchmarks.published.predict import Predicted, predict

MEMORY = 80e9  # bytes of a device


@dataclass(frozen=True, slots=True)
class Own:
    """planned: the best plan. emitted: the step of the programs that the compiler emits for it, by the same
    simulation as that of the published plan."""

    planned: Prediction
    emitted: Predicted


class Planner:
    """Plans for cases, of which those of one model have their programs in common."""

    def __init__(self) -> None:
        self._known: dict[str, Layers] = {}

    def best(self, case: Case) -> Own:
        """Raises PlanError where nothing fits."""
        ranks = mesh_of(case.mesh).size
        found = planned(self._layers(case), Asked(ranks, case.rows, case.machine, MEMORY, top=1)).found.best[0]
        other = replace(case, mesh=found.candidate.mesh, options=_free(case) | found.candidate.options())
        return Own(found, predict(other))

    def _layers(self, case: Case) -> Layers:
        model = case.name.partition(" ")[0]
        if model not in self._known:
            with torch.device("meta"):
                module = case.model()
            options = options_of(**_free(case))
            self._known[model] = layers_of_call(module, token_loss, case.batch(), {}, options, case.machine)
        return self._known[model]


def _free(case: Case) -> dict[str, object]:
    """The options of a case that no plan decides."""
    return {name: value for name, value in case.options.items() if name not in {*PLANNED, "stages"}}
