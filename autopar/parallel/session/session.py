"""What the parts of a parallel module share: its settings, its tensors, and the ways in which ranks talk."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autopar.capture.capture import LossFn
from autopar.capture.inputs import tables
from autopar.compiler.check_options import Graphs
from autopar.ir.options import StepOptions
from autopar.ir.plan import DEVICES, Fixed
from autopar.machines import named
from autopar.parallel.agree.agreement import Agreement
from autopar.parallel.agree.announce import Announcer
from autopar.parallel.batches.local_batch import BatchWorld
from autopar.parallel.session.joining import Requested, join
from autopar.parallel.session.loss_scale import LossScale
from autopar.parallel.session.random_state import RandomState
from autopar.parallel.weights.distribute import Distributor
from autopar.parallel.weights.replicas import Replicas, every_of
from autopar.parallel.weights.store import ParameterStore


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What does not change from step to step. batch: as of `parallelize`. lift: as of `capture`."""

    loss_fn: LossFn | None
    options: StepOptions
    fixed: Fixed
    batch: str
    device: torch.device
    graphs: Graphs
    lift: torch.dtype | None

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
    """Of one parallel module, from `parallelize` on. scale: of the loss, under precision="fp16"."""

    settings: StepSettings
    store: ParameterStore
    agreement: Agreement
    announcer: Announcer
    replicas: Replicas
    random: RandomState
    scale: LossScale | None

    @property
    def world(self) -> BatchWorld:
        """Where the parts of a batch lie."""
        where = self.store.distributor
        return BatchWorld.of(where.mesh, where.device_mesh, where.coord)


def open_session(asked: Requested) -> Session:
    """Join the ranks, agree with them, and make the parameters DTensors with rank 0's values. Every rank must call
    this."""
    agreed = join(asked)
    agreement, options, place = agreed.agreement, agreed.options, agreed.agreement.device
    fixed = Fixed(machine=named("cpu" if place.type == "cpu" else DEVICES))
    settings = StepSettings(asked.loss_fn, options, fixed, asked.batch, place, asked.cuda_graphs, asked.lift)
    announcer = Announcer(agreement)
    store = ParameterStore(asked.model, Distributor(agreed.mesh, agreed.device_mesh, announcer.operation), place)
    replicas = Replicas(store, agreement, every_of(asked.check_replicas))
    scale = LossScale() if options.precision == "fp16" else None
    store.distribute(agreement, asked.seed, asked.weights)
    announcer.watch(tables.parameters(asked.model))
    return Session(settings, store, agreement, announcer, replicas, RandomState(asked.seed), scale)
