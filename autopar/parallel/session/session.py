"""Join the ranks of a mesh, and what the parts of a parallel module then share: settings, tensors, ways to talk.

Each rank checks what it was given, all agree on it once, and then there are groups.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass, replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture.capture import LossFn
from autopar.capture.inputs import tables
from autopar.compiler.check_options import (
    CHECK_EVERY,
    Graphs,
    OnNonFinite,
    check_graphs,
    check_nonfinite,
    check_offload,
    options_of,
)
from autopar.compiler.constraints import check_host
from autopar.compiler.meshes import MeshLike, mesh_of
from autopar.compiler.models import check_model
from autopar.compiler.precision_check import check_device
from autopar.ir.mesh import Mesh
from autopar.ir.options import TIMEOUT, StepKeywords, StepOptions
from autopar.ir.plan import Fixed, Plan
from autopar.machines import DEVICES, Machine, MachineLike, machine_like
from autopar.parallel.agree.agreement import Agreement, Announcer, Phase, Watched
from autopar.parallel.agree.failures import Failures
from autopar.parallel.agree.pace import Pace
from autopar.parallel.agree.patience import Patience
from autopar.parallel.batches.local_batch import BatchWorld
from autopar.parallel.session.auto_options import AUTO, check_open, check_own, machine_for
from autopar.parallel.session.compilers import check_compiler, compiler_on
from autopar.parallel.session.devices import (
    backend_for,
    check_backend,
    check_places,
    compute_on,
    device_of_rank,
    place_of,
)
from autopar.parallel.session.loss_scale import LossScale
from autopar.parallel.session.nonfinite import NonFinite
from autopar.parallel.session.random_state import RandomState
from autopar.parallel.weights.distribute import Distributor
from autopar.parallel.weights.gradients import Sums
from autopar.parallel.weights.identity import check_identity
from autopar.parallel.weights.replicas import Replicas, every_of
from autopar.parallel.weights.store import ParameterStore, describe_state
from autopar.runtime.ranks.meet import attempt_name
from autopar.runtime.ranks.process_groups import default_group, forget_at_exit, known, leave_at_exit, mesh_over
from autopar.runtime.tiers.disk_tier import check_folder, check_room_of_parameters, parameter_tier
from autopar.runtime.tiers.host_tier import HostTier, host_tier
from autopar.runtime.tiers.side_by_side import bytes_of
from autopar.settings import Settings
from autopar.torch_compat import end_waits_after

_COMPILING = timedelta(seconds=300)  # that one rank may take

MAPPED = "mapped"  # beside the error of a rank: the folder of the files that its memory is mapped from


@dataclass(frozen=True, slots=True)
class Requested:
    """What `parallelize` was asked for on this rank; see there. step: the options of a step, not checked yet. lift: as
    of `capture`."""

    model: nn.Module
    mesh: MeshLike
    step: StepKeywords
    _: KW_ONLY
    loss_fn: LossFn | None = None
    batch: str = "global"
    seed: int = 0
    device: str | torch.device | None = None
    cuda_graphs: Graphs = False
    check_replicas: int | None = CHECK_EVERY
    on_nonfinite: OnNonFinite | None = None
    lift: torch.dtype | None = None
    weights: str | Path | None = None
    machine: MachineLike | None = None
    timeout: float | None = None
    cache: Path | None = None

    @property
    def is_auto(self) -> bool:
        """Whether the mesh is planned once there is a batch."""
        return isinstance(self.mesh, str) and self.mesh == AUTO

    @property
    def longest_wait(self) -> timedelta | None:
        """How long a rank waits for another one; None for as long as the backend does."""
        return None if self.timeout is None else timedelta(seconds=self.timeout)

    @property
    def on_host(self) -> bool:
        """Whether parameters may wait in the host's memory, before ranks check it together."""
        wanted = self.step.get("offload")
        return self.is_auto or "parameters" in (
            (wanted,) if isinstance(wanted, str) else wanted if isinstance(wanted, Collection) else ()
        )

    def machine_on(self, device: torch.device) -> Machine:
        """What programs are made for. Raises MeshError or MachineError for one that is not known."""
        if self.is_auto:
            return machine_for(self.machine, device)
        return machine_like(self.machine if self.machine is not None else ("cpu" if device.type == "cpu" else DEVICES))

    def mesh_on(self, world: int) -> Mesh:
        """The mesh, until a plan says another one: all ranks split the batch."""
        return Mesh((("dp", world),)) if self.is_auto else mesh_of(self.mesh, world)

    def check(self, phase: Phase, world: int, device: torch.device) -> tuple[Mesh, StepOptions]:
        """Check all of it as far as this rank can; the phase gets what must be alike on all ranks."""
        phase.now = "mesh"
        mesh = self.mesh_on(world)
        phase.texts["mesh"] = [AUTO if self.is_auto else str(mesh)]
        phase.now = "options"
        options = compiler_on(options_of(**self.step), device)
        check_open(self.is_auto, self.step, self.batch)
        check_own(self.batch, mesh, options)
        check_host(plan := Plan(mesh, options=options))
        if plan.offloads("parameters"):
            check_backend(device)
        check_files(options, self.model, world)  # each rank its own node's, before any state is made
        phase.texts["machine"] = [str(self.machine_on(device))] * (self.is_auto or self.machine is not None)
        every_of(self.check_replicas)
        check_nonfinite(self.on_nonfinite)
        TIMEOUT.check("timeout", self.timeout)
        alike = ("seed", "batch", "cuda_graphs", "check_replicas", "on_nonfinite", "timeout")
        others = {name: getattr(self, name) for name in alike}
        others |= {"cache": "a folder"} if self.cache is not None else {}
        phase.texts["options"] = [*(f"{name}={value}" for name, value in others.items()), *options.lines]
        phase.now = "model"
        check_model(self.model, self.loss_fn, runs_hooks=True)
        phase.texts["gradients"] = check_identity(self.model)
        phase.texts["model"] = describe_state(self.model)
        phase.now = "compiler"
        check_compiler(options.compile, device)
        check_graphs(self.cuda_graphs, device)
        check_offload(options, self.cuda_graphs)
        phase.now = "precision"
        check_device(options, device)
        return mesh, options


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What does not change from step to step. batch: as of `parallelize`. lift: as of `capture`. is_handed: rank 0
    compiles for all ranks, where no folder is named."""

    loss_fn: LossFn | None
    options: StepOptions
    fixed: Fixed
    batch: str
    device: torch.device
    graphs: Graphs
    lift: torch.dtype | None
    timeout: timedelta | None
    cache: Path | None = None
    is_handed: bool = False

    @property
    def is_patient(self) -> bool:
        """Whether ranks may wait for one that compiles."""
        return self.timeout is None or self.timeout >= _COMPILING

    @property
    def is_local(self) -> bool:
        """Whether ranks are given other parts of the data."""
        return self.batch != "global"

    @property
    def is_own(self) -> bool:
        """Whether the ranks of the data axes compute batches of their own, and means of what these give."""
        return self.batch == "ddp"


@dataclass(frozen=True, slots=True)
class Session:
    """What the parts of one parallel module share, from `parallelize` on. scale: of the loss, under
    precision="fp16". tier: gives the host's memory to what waits there."""

    settings: StepSettings
    store: ParameterStore
    agreement: Agreement
    announcer: Announcer
    watched: Watched
    replicas: Replicas
    nonfinite: NonFinite
    random: RandomState
    scale: LossScale | None
    tier: Callable[[], HostTier]
    sums: Sums

    @property
    def world(self) -> BatchWorld:
        """Where the parts of a batch lie."""
        where = self.store.distributor
        return BatchWorld.of(where.mesh, where.device_mesh, where.coord)


def check_files(options: StepOptions, model: nn.Module, world: int) -> None:
    """Raise PlanError for a folder, of this rank's own node, that takes no files, before any state is made; or for one
    with too little room for the parameters. A launcher is left its name: it says why a rank died of it."""
    if options.offload_dir is not None:
        check_folder(Path(options.offload_dir))
        if (file := Settings.read().error_file) is not None:
            file.with_name(MAPPED).write_text(str(options.offload_dir))
    if options.files is not None:
        near = min(world, Settings.read().local_world_size or 1)
        check_room_of_parameters(options.files, sum(map(bytes_of, tables.parameters(model))) * near // world)


def tier_of(options: StepOptions, place: torch.device) -> Callable[[], HostTier]:
    """Where values of a step wait, one for all that ask: the host's memory, or files where parameters lie in these."""
    folder = options.files
    return cache(partial(host_tier, place) if folder is None else partial(parameter_tier, place, folder))


def open_session(asked: Requested) -> Session:
    """Join the ranks, agree with them, and make the parameters DTensors with rank 0's values. Every rank must call
    this."""
    agreement, mesh, device_mesh, options = join(asked)
    place = agreement.device
    fixed = Fixed(machine=asked.machine_on(place))
    settings = StepSettings(
        asked.loss_fn, options, fixed, asked.batch, place, asked.cuda_graphs, asked.lift, asked.longest_wait,
        None if Settings.read().dump is not None else asked.cache,
    )  # fmt: skip
    settings = replace(settings, is_handed=agreement.any("cores", settings.is_patient and _is_crowded()))
    announcer = Announcer(agreement)
    agreement.pace.lie_over(mesh)
    on_host = Plan(mesh, options=options).offloads("parameters")
    where = Distributor(mesh, device_mesh, announcer.operation, on_host, options.files)
    store = ParameterStore(asked.model, where, place)
    replicas = Replicas(store, agreement, every_of(asked.check_replicas))
    nonfinite = NonFinite(agreement, asked.on_nonfinite)
    scale = LossScale() if options.precision == "fp16" else None
    store.distribute(agreement, asked.seed, asked.weights)
    watched = announcer.watch(tables.parameters(asked.model))
    tier = tier_of(options, place)
    random = RandomState(asked.seed)
    return Session(settings, store, agreement, announcer, watched, replicas, nonfinite, random, scale, tier, Sums())


def _is_crowded() -> bool:
    """Whether this machine has more ranks than cores for them, which would compile one after the other."""
    asked = Settings.read()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return asked.dump is None and (asked.local_world_size or 1) > cores


def join(asked: Requested) -> tuple[Agreement, Mesh, DeviceMesh, StepOptions]:
    """Join the process group that the launcher prepared, if none is there, and agree on what ranks were asked for.

    A mesh of size 1 needs no launcher: it gets a group of its own. Raises what `Requested.check` does, on every rank.
    """
    settings = Settings.read()
    world = dist.get_world_size() if dist.is_initialized() else settings.world_size or 1
    place = device_of_rank(asked.device, settings)
    if world == 1:  # before a group is made for it
        asked.mesh_on(world)
        options_of(**asked.step)
        check_open(asked.is_auto, asked.step, asked.batch)
        asked.machine_on(place)
    compute_on(place, settings)
    is_ours = not dist.is_initialized()
    if is_ours:
        backend = backend_for(place, asked.on_host)
        if settings.world_size is None:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        else:
            _meet(backend)
    agreement = Agreement(place, Pace())
    agreement.failures = Failures.of_model()
    leave_at_exit(lambda: agreement.levels.groups, partial(_done, agreement.pace))  # also where ranks are refused below
    mesh, options = agreement.together("arguments", lambda phase: asked.check(phase, world, place))
    if place.type == "cuda" and world > 1:
        check_places(agreement.everyone("devices", place_of(place)))
    timeout = asked.longest_wait
    if timeout is not None:  # from here on: ranks may start minutes apart, and meet all the same
        agreement.end_waits_after(timeout)
        if is_ours:
            end_waits_after(timeout)
    device_mesh = asked.mesh if isinstance(asked.mesh, DeviceMesh) else mesh_over(mesh, place.type, timeout)
    forget_at_exit(device_mesh)
    if timeout is None and is_ours and world > 1:
        of_axes = [known(device_mesh.get_group(axis)) for axis in device_mesh.mesh_dim_names or ()]
        agreement.patience = Patience([default_group, *agreement.levels.groups, *of_axes])
    return agreement, mesh, device_mesh, options


def _done(pace: Pace) -> str:
    return f"after {pace.begun} training steps"


def _meet(backend: str) -> None:
    """Join the ranks that a launcher started, under a name that no group before had: torchrun gives restarted ranks the
    store of those before them, and the store of a group that was destroyed lives on while anything holds the group."""
    (store, rank, size), (own, *_) = next(dist.rendezvous("env://")), next(dist.rendezvous("env://"))
    with attempt_name(store, own, rank, size) as name:
        dist.init_process_group(backend, store=dist.PrefixStore(name, store), rank=rank, world_size=size)
