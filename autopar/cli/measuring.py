"""The processes that measure a machine together: their device, their groups, and the transfers between them."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from autopar.errors import MachineError
from autopar.ir.ops.ops import op
from autopar.machines.measure_calls import Alone, Meter, Ranks
from autopar.machines.measurement_plan import MeasuredMachine, measure_machine
from autopar.machines.model import MESSAGE
from autopar.machines.model import RankGroup as Members
from autopar.machines.runners import CudaRunner, HostRunner, disk_speed
from autopar.machines.samples import Item, MeasuredTransfer
from autopar.parallel.session.devices import compute_on, device_of_rank
from autopar.runtime.collectives.collectives import Member
from autopar.runtime.ranks.distributed import run_alone
from autopar.runtime.ranks.process_groups import Group
from autopar.settings import Settings

AXIS, ITEM = "dp", 4  # bytes of float32, in which gradients are summed
MOST_CORES = 8  # processes of a host if nobody says how many; they share its cores
LANE = 64  # elements that lie together where an all-to-all cuts rows


def ranks_asked(ranks: int | None, device: str, settings: Settings) -> int:
    """How many processes measure. Raises MachineError where there are fewer than were asked for."""
    world, devices = settings.world_size, torch.cuda.device_count()
    if ranks is not None and ranks < 1:
        raise MachineError(f"--ranks {ranks}: write a number of 1 or more.")
    if device not in ("cpu", "cuda"):
        raise MachineError(f"--device {device}: write cpu or cuda.")
    if device == "cuda" and not devices:
        raise MachineError(f"--device cuda: torch {torch.__version__} sees no GPU here. Write --device cpu.")
    if world is not None:
        if ranks not in (None, world):
            raise MachineError(f"--ranks {ranks}: this job has {world} ranks; leave --ranks out, or start {ranks}.")
        return world
    if device == "cuda" and (ranks or 1) > devices:
        raise MachineError(f"--ranks {ranks}: this machine has {devices} GPUs; write at most {devices}.")
    return ranks or (devices if device == "cuda" else min(MOST_CORES, max(2, os.cpu_count() or 1)))


def measure_here(
    device: str, name: str, seconds: float, told: Callable[[int, int, Item], None], disk: Path | None = None
) -> MeasuredMachine:
    """Measure as one of the ranks of this job, or alone. All ranks must call this. disk: a folder of the disk that is
    measured too, by all ranks at once."""
    settings = Settings.read()
    place = device_of_rank(device, settings)
    compute_on(place, settings)
    if settings.world_size is not None:
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    groups = _groups(settings)
    ranks: Ranks = _Together(place) if dist.is_initialized() else Alone()
    transfer = _Transfers(groups, place)
    runner: Meter = CudaRunner(place, transfer) if place.type == "cuda" else HostRunner(place, transfer)
    speed = None if disk is None else ranks.mean(disk_speed(disk))
    found = measure_machine(name, place, tuple(groups), runner, ranks, seconds, told)
    return found if speed is None or disk is None else found.with_disk(speed, disk)


@dataclass(frozen=True, slots=True)
class _Together:
    """All processes of the job."""

    device: torch.device

    def largest(self, value: float) -> float:
        return self._reduced(value, dist.ReduceOp.MAX)

    def mean(self, value: float) -> float:
        return self._reduced(value, dist.ReduceOp.SUM) / dist.get_world_size()

    def _reduced(self, value: float, how: dist.ReduceOp.RedOpType) -> float:
        found = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op=how)
        return found.item()


def _groups(settings: Settings) -> dict[Members, Group]:
    """This rank's groups: of its node, and of one rank of each node; of each those that have more than one."""
    world = settings.world_size or 1
    inside = settings.local_world_size or world
    if world % inside:
        raise MachineError(f"{world} ranks, {inside} of them on this node: start as many on each node.")
    nodes = [range(first, first + inside) for first in range(0, world, inside)]
    across = [range(first, world, inside) for first in range(inside)]
    levels = ((Members(inside), nodes), (Members(world // inside, 1), across))
    return {members: _group(rows) for members, rows in levels if members.size > 1}


def _group(rows: list[range]) -> Group:
    """Every rank takes part in the making of every group, in the same order."""
    made = {row: dist.new_group(list(row)) for row in rows}
    mine = next(row for row in rows if dist.get_rank() in row)
    return Group.of(made[mine], len(mine), None)


@dataclass(frozen=True, slots=True)
class _Transfers:
    """Makes transfers as the runtime does them in a step, on values of float32."""

    groups: dict[Members, Group]
    device: torch.device

    def __call__(self, item: MeasuredTransfer) -> Callable[[], object]:
        group = self.groups[item.group]
        place = dist.get_rank(group.handle)
        if item.kind == MESSAGE:
            return _messages(self._zeros(item.bytes_), group, place)
        member, target = Member(group.size, place), op(item.kind)
        x, *rest = self._arguments(item)
        return lambda: run_alone(target, (x, AXIS, *rest), member, group)

    def _arguments(self, item: MeasuredTransfer) -> tuple[torch.Tensor, *tuple[object, ...]]:
        """What a rank gives to a collective."""
        size = item.group.size
        match item.kind:
            case "all_reduce":
                return self._zeros(item.bytes_), "sum"
            case "all_gather":
                return self._zeros(item.bytes_ / size), 0, 1
            case "reduce_scatter":
                return self._zeros(item.bytes_, size), 0, 1, "sum"
        width = size * (LANE if item.bytes_ >= ITEM * LANE * size**2 else 1)
        return self._zeros(item.bytes_ / size, width).view(-1, width), 0, 1, 1, 1

    def _zeros(self, bytes_: float, divisor: int = 1) -> torch.Tensor:
        """So many bytes, and what they lack to a number that can be divided. Zeros, which stay small when summed."""
        return torch.zeros(math.ceil(bytes_ / ITEM / divisor) * divisor, device=self.device)


def _messages(x: torch.Tensor, group: Group, place: int) -> Callable[[], object]:
    """Messages between ranks 2 i and 2 i + 1, to and fro: each leaves when the one before has come."""
    peer = place ^ 1
    if peer >= group.size:
        return lambda: None
    turns = itertools.cycle((place < peer, place > peer))

    def message() -> None:
        if next(turns):
            dist.send(x, group=group.handle, group_dst=peer)
        else:
            dist.recv(torch.empty_like(x), group=group.handle, group_src=peer)

    return message
