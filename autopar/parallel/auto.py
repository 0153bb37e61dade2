"""`mesh="auto"`: the plan of the first training batch, and a parallel module's move to its mesh.

Until then the parameters wait over all ranks as one axis `dp`. Rank 0 plans, the others are told what it decided.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from autopar.compiler.meshes import mesh_of
from autopar.errors import AutoparError, MeshError
from autopar.ir.mesh import AUTO
from autopar.ir.options import PLANNED
from autopar.ir.plan import Fixed, Plan
from autopar.machines import MachineLike
from autopar.parallel.agree.agreement import Phase
from autopar.parallel.session.auto_options import machine_for
from autopar.parallel.session.devices import check_backend
from autopar.parallel.session.session import Session, check_files, tier_of
from autopar.parallel.weights.distribute import Distributor
from autopar.planning.jobs import layers_of_call
from autopar.planning.planner import Asked, Planned, planned
from autopar.planning.space.batches import rows_of
from autopar.report.emitted import checked
from autopar.report.plans import reason_line
from autopar.runtime.ranks.process_groups import mesh_over

_log = logging.getLogger("autopar")
SHOWN = 2  # plans that rank 0 wants to know: the best one, and the next


class Auto:
    """Plans the mesh of a parallel module, once."""

    def __init__(self, session: Session, machine: MachineLike | None) -> None:
        self._session, self._machine = session, machine_for(machine, session.settings.device)

    def decided(self, call: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Session:
        """The session of a module that lies over the planned mesh. Every rank must call this with batches of the same
        shapes. Raises MeshError where nothing can be planned."""
        session = self._session
        session.announcer.call(call)
        made = session.agreement.together("plan", lambda phase: self._made(phase, tuple(args), dict(kwargs)))
        everyone: list[tuple[str, dict[str, Any]]] = session.agreement.everyone("plan", _told(made))
        mesh, said = mesh_of(everyone[0][0]), everyone[0][1]
        options = replace(session.settings.options, **{**PLANNED, "memory": None, **said})
        on_host, device = Plan(mesh, options=options).offloads("parameters"), session.settings.device
        if on_host:
            check_backend(device)
        world, model = dist.get_world_size(), session.store.model
        session.agreement.together("folder of offload_dir", lambda phase: check_files(options, model, world))
        if mesh != session.store.distributor.mesh or on_host:
            device_mesh = mesh_over(mesh, device.type, session.settings.timeout)
            session.agreement.pace.lie_over(mesh)
            session.store.move(Distributor(mesh, device_mesh, session.announcer.operation, on_host, options.files))
        settings = replace(session.settings, options=options, fixed=Fixed(machine=self._machine))
        if made is not None:
            _log.warning("mesh '%s': %s", AUTO, reason_line(made))
        return replace(session, settings=settings, tier=tier_of(options, device))

    def _made(self, phase: Phase, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Planned | None:
        """The plan, on rank 0."""
        try:
            rows = rows_of(args, kwargs)
            phase.texts["rows of the batch"] = [str(rows)]
            if dist.get_rank() != 0:
                return None
            settings, model = self._session.settings, self._session.store.model
            limit = settings.options.memory
            assert limit is None or isinstance(limit, int), "check_open refuses a part of what a step holds"
            asked = Asked(dist.get_world_size(), rows, self._machine, limit, top=SHOWN)
            layers = layers_of_call(model, settings.loss_fn, args, kwargs, settings.options, self._machine)
            return checked(planned(layers, asked), of_time=False)
        except AutoparError as error:
            raise MeshError(f"mesh '{AUTO}': {error}") from error


def _told(made: Planned | None) -> tuple[str, dict[str, Any]]:
    """What the ranks are told of a plan."""
    if made is None:
        return "", {}
    best = made.found.best[0].candidate
    return best.mesh, best.options()
