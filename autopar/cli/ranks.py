"""Run a command's work on every rank: in this process if it is one, else on local processes."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from autopar.cli.launch import launch, report
from autopar.cli.preflight import check_room
from autopar.compiler.meshes import mesh_of
from autopar.errors import AutoparError, MeshError
from autopar.ir.mesh import AUTO, Mesh
from autopar.settings import Settings


def on_ranks(mesh: str, arguments: list[str], work: Callable[[], None], restarts: int = 0) -> None:
    """Do the work here if this is a rank already or if one is enough; else on a process for each rank. These are
    started again at most `restarts` times."""
    settings = Settings.read()
    if settings.world_size is not None:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // (settings.local_world_size or 1)))
        try:
            work()
        except AutoparError as error:
            report(error)
            raise SystemExit(1) from None
        except Exception as error:
            report(error)
            raise
        if dist.is_initialized():  # one that failed leaves at once: NCCL would wait for peers that may hang
            dist.destroy_process_group()
        return
    parsed = running_mesh(mesh)
    if parsed.size == 1 and not restarts:
        work()
        return
    check_room(parsed.size)
    failure = launch(arguments, parsed, restarts)
    if failure is not None:
        raise _Failed(failure)


class _Failed(AutoparError):
    """A rank failed; the text says which and why."""


def fitting_mesh(meshes: str) -> str:
    """The first of some meshes, `dp=2,tp=2|tp=2`, that has as many ranks as the running job; outside of one the first.

    Raises MeshError where none fits, and for one that does not parse: each may be the one that is needed.
    """
    wanted, world = meshes.split("|"), Settings.read().world_size
    sizes = {mesh: world if mesh == AUTO or "-1" in mesh else mesh_of(mesh).size for mesh in wanted}
    if world is None or len(wanted) == 1:
        return wanted[0]
    chosen = next((mesh for mesh, size in sizes.items() if size == world), None)
    if chosen is None:
        raise MeshError(
            f"--mesh '{meshes}': the running job has {world} ranks, and these meshes have "
            f"{', '.join(map(str, sizes.values()))}. Add one for {world}: dp={world}, or auto."
        )
    return chosen


def running_mesh(mesh: str) -> Mesh:
    """The mesh; -1 takes the ranks of the running job, else this machine's GPUs. So does "auto", of which there is one
    axis until there is a plan."""
    world = Settings.read().world_size
    if world is None and ("-1" in mesh or mesh == AUTO) and torch.cuda.is_available():
        world = torch.cuda.device_count() or None
    if mesh == AUTO and world is None:
        raise MeshError(
            f"mesh '{AUTO}' needs the number of ranks, which is not known here: this machine has no GPU. Start them "
            f"(torchrun --nproc-per-node=N -m autopar run ...), or plan first: autopar plan TARGET --gpus N --machine "
            f"cpu --out plan.toml, and then --plan plan.toml."
        )
    if mesh == AUTO:
        return Mesh((("dp", world or 1),))
    return mesh_of(mesh, world)
