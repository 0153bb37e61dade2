"""Where states of optimizers wait while their parameters do not step: the host's memory, or files of a folder."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import torch

from autopar.capture.inputs import tables
from autopar.parallel.session.session import Session
from autopar.runtime.tiers.disk_tier import disk_tier
from autopar.runtime.tiers.offloaded_states import OffloadedStates, moving_of
from autopar.settings import Settings


def let_states_wait(session: Session, owner: object) -> None:
    """Let the states that the options name wait, as long as `owner` lives. Where parameters wait in the host's memory
    their optimizer makes its states there: only a disk is another place."""
    options, tier = session.settings.options, session.tier
    amount, folder = options.offloaded.get("optimizer"), options.offload_dir
    if folder is not None:
        device = torch.device("cpu") if options.offloaded.get("parameters") else session.settings.device
        amount, tier = amount or 1.0, cache(partial(disk_tier, device, Path(folder)))
    if amount:
        names = {id(parameter): name for name, parameter in tables.named_parameters(session.store.model)}
        moving = partial(moving_of, amount=amount, name_of=lambda p: names[id(p)])
        near = Settings.read().local_world_size or 1
        OffloadedStates(session.store.is_ours, tier, moving, near=near).watch(owner)
