"""The built-in machine that ranks run on, by what their devices say of themselves."""

from __future__ import annotations

import re

import torch

from autopar.errors import MachineError, one_of
from autopar.machines.files import built_in, named
from autopar.machines.model import Machine

NEAR = 0.1  # of a data sheet's memory: a driver keeps some of it, and gigabytes are counted in two ways


def machine_here(device: torch.device) -> Machine:
    """The built-in machine of a device. Raises MachineError where there is none of its name and memory."""
    if device.type == "cpu":
        return named("cpu")
    device_properties = torch.cuda.get_device_properties(device)
    return machine_of(device_properties.name, device_properties.total_memory)


def machine_of(name: str, memory: int) -> Machine:
    """The built-in machine of devices with a name ("NVIDIA H100 80GB HBM3") and so many bytes of memory. A card in a
    PCIe slot is slower than the module of that name."""
    known = [each for each in built_in() if not named(each).is_host]
    for each in known:
        is_kind = re.search(rf"\b{each.partition('-')[0]}\b", name, re.IGNORECASE) and "pcie" not in name.lower()
        if is_kind and abs(memory / named(each).device.memory - 1) < NEAR:
            return named(each)
    raise MachineError(
        f"nobody knows how fast '{name}' with {memory / 1e9:.1f} GB is: built in are {one_of(known)}. Write machine= "
        f"with the name of the nearest one, or a file that `autopar machine measure --out mine.toml` wrote here."
    )
