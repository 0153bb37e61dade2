"""What is measured on a device, and the machine that comes of it."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from autopar.machines.files import named
from autopar.machines.fit import fit_device, fit_link, short
from autopar.machines.measure_calls import Meter, Ranks, measure
from autopar.machines.model import PRODUCTS, Machine, RankGroup
from autopar.machines.samples import Item, Sample
from autopar.machines.workload import attentions, convolutions, least, norms, products, streams, transfers, updates

KIB = 2**10


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured on a kind of device. products: n of n x n x n. others: the same for dtypes but the main one."""

    main: str
    products: tuple[int, ...]
    others: tuple[int, ...]
    attentions: tuple[int, ...]
    heads: int
    streams: tuple[int, ...]
    transfers: tuple[int, ...]
    updates: tuple[int, ...] = ()
    channels: tuple[int, ...] = (64, 128)
    norms: tuple[int, ...] = tuple(KIB * 4**k for k in range(6, 10))


SIZES = {
    "cpu": Sizes(
        "float32", (32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024), (64, 256, 512), (64, 128, 256, 512), 8,
        tuple(KIB * 4**k for k in range(2, 9)), (64, 1024, *(KIB * 2**k for k in range(2, 16))),
        tuple(KIB * 4**k for k in range(4, 7)), (32, 64, 96, 128), tuple(KIB * 4**k for k in range(4, 8)),
    ),
    "cuda": Sizes(
        "bfloat16", (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288), (512, 2048, 4096),
        (512, 1024, 2048, 4096, 8192), 32,
        tuple(KIB * 4**k for k in range(3, 11)), (64, 1024, *(KIB * 2**k for k in range(2, 21))),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MeasuredMachine:
    """A measured machine, what was measured, and what of it is not its own."""

    machine: Machine
    samples: tuple[Sample, ...]
    remarks: tuple[str, ...]

    def with_disk(self, speed: float, folder: Path) -> MeasuredMachine:
        """With the disk of a node whose ranks each read and wrote so many bytes a second in a folder, all at once, and
        what is free there."""
        disk, free = short(speed * self.machine.ranks), short(shutil.disk_usage(folder).free)
        machine = replace(self.machine, disk=disk, disk_folder=str(folder.resolve()), disk_memory=free)
        return replace(self, machine=machine)


def items_of(device: torch.device, groups: Sequence[RankGroup]) -> list[Item]:
    """What is measured on a device that its processes share like this."""
    sizes = SIZES[device.type]
    calls: list[Item] = [least(sizes.main), *products(sizes.main, sizes.products)]
    calls += [call for dtype in _dtypes(device) if dtype != sizes.main for call in products(dtype, sizes.others)]
    calls += [*attentions(sizes.main, sizes.attentions, sizes.heads), *streams(sizes.main, sizes.streams)]
    calls += [*convolutions(sizes.main, sizes.channels), *norms(sizes.main, sizes.norms)]
    calls += updates(sizes.main, sizes.updates)
    return _mixed([*calls, *transfers(groups, sizes.transfers)])


def _mixed(items: Sequence[Item]) -> list[Item]:
    """All families side by side, each from small to large: other work of the machine, or time that runs out, then takes
    a bit of all of them instead of all of one."""
    sizes = Counter(item.family for item in items)
    seen: Counter[tuple[object, ...]] = Counter()
    places = []
    for item in items:
        seen[item.family] += 1
        places.append(seen[item.family] / sizes[item.family])
    return [items[i] for i in sorted(range(len(items)), key=places.__getitem__)]


def _dtypes(device: torch.device) -> tuple[str, ...]:
    """The dtypes whose products the device has."""
    if device.type == "cpu":
        return tuple(dtype for dtype in PRODUCTS if dtype != "tfloat32")
    new = torch.cuda.get_device_capability(device) >= (8, 0)
    return tuple(dtype for dtype in PRODUCTS if new or dtype not in ("tfloat32", "bfloat16"))


def measure_machine(
    name: str,
    device: torch.device,
    groups: Sequence[RankGroup],
    runner: Meter,
    ranks: Ranks,
    seconds: float,
    told: Callable[[int, int, Item], None],
) -> MeasuredMachine:
    """The machine that these ranks run on. groups: of the ranks of a node, and of ranks of different nodes, if any."""
    ranks.mean(0.0)  # all begin at once
    launch_us, host = ranks.mean(runner.launch_us()), runner.host()
    samples = measure(items_of(device, groups), runner, ranks, seconds, told)
    count = groups[0].inside if groups else 1
    main, remarks = SIZES[device.type].main, []
    levels = [fit_link(samples, group) for group in groups]
    if not levels:
        like = "cpu" if device.type == "cpu" else "h100-80g"
        levels = [named(like).inside, named(like).between]
        remarks.append(f"One process has no network: [inside] and [between] are those of {like}.")
    elif len(levels) == 1:
        levels.append(levels[0])
        remarks.append(_SAME[groups[0].nodes == 1])
    fitted = fit_device(samples, memory_of(device, count), main, device.type == "cpu")
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        fitted = replace(fitted, processors=processors, communicating=named("h100-80g").device.communicating)
        remarks.append(f"communicating is not measured: {fitted.communicating}, as on h100-80g.")
    inside, between = levels
    machine = Machine(name, fitted, inside, between, count, launch_us, device.type == "cpu")
    if host is not None:
        to_host, update = (short(ranks.mean(speed)) for speed in host)
        memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        machine = replace(machine, to_host=to_host, host_memory=short(memory), host_update=short(update * count))
    return MeasuredMachine(machine, tuple(samples), tuple(remarks))


_SAME = {
    True: "One node has no network to others: [between] is as [inside]. Write what yours has.",
    False: "A node of one process has no network inside: [inside] is as [between].",
}


def memory_of(device: torch.device, ranks: int) -> float:
    """Bytes of a GPU, or of a process's part of the host's memory."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
