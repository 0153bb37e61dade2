"""The device of this rank: which one, and that the process computes there."""

from __future__ import annotations

import ctypes
import socket
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from autopar.errors import AutoparError, RankError, name_ranks
from autopar.machines.model import FRESH
from autopar.settings import Settings

# Of malloc.h. Saying the one ends that glibc finds the other by itself, which would have become FRESH at most.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
NEVER = -1


def device_of_rank(asked: str | torch.device | None, settings: Settings) -> torch.device:
    """The device that was asked for, with its index; this rank's GPU if none was and each rank here has one.

    Raises AutoparError for a GPU that is not there.
    """
    if asked is None:
        backend = dist.get_backend() if dist.is_initialized() else None
        ranks = settings.local_world_size or (settings.local_rank or 0) + 1
        enough = backend == "nccl" or ranks <= torch.cuda.device_count()
        here = backend != "gloo" and torch.cuda.is_available() and enough
        return torch.device("cuda", _own_index(settings)) if here else torch.device("cpu")
    device = torch.device(asked)
    if device.type != "cuda":
        return device
    _check(device, settings)
    return torch.device("cuda", _own_index(settings)) if device.index is None else device


def compute_on(device: torch.device, settings: Settings) -> None:
    """Make a GPU the current one of this process, also where a group was made before: what names no device (kernels of
    Triton, objects that ranks exchange) would all go to the first. On a CPU keep the memory of steps."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif device.type == "cpu" and not settings.trims:
        keep_pages()


def backend_for(device: torch.device, on_host: bool) -> str:
    """The backend of a group that nobody made. on_host: what optimizers and clipping sum lies in the host's memory."""
    if device.type != "cuda":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if on_host else "nccl"


def check_backend(device: torch.device) -> None:
    """Raise RankError where the ranks of GPUs cannot sum what lies in the host's memory."""
    backends = dist.get_backend_config()
    if device.type == "cuda" and dist.get_world_size() > 1 and "gloo" not in backends:
        raise RankError(
            f'offload="parameters" keeps parameters and gradients in the host\'s memory, where clip_grad_norm_ and '
            f"optimizers sum them over ranks, and the process group has no backend there: it is '{backends}'. Make it "
            f'with dist.init_process_group("cpu:gloo,cuda:nccl"), or leave that to autopar.'
        )


def _own_index(settings: Settings) -> int:
    """By the launcher, unless it shows each process a GPU of its own; without one the current device is the user's."""
    if settings.local_rank is None:
        return torch.cuda.current_device()
    return settings.local_rank if torch.cuda.device_count() > 1 else 0


def _check(device: torch.device, settings: Settings) -> None:
    if not torch.cuda.is_available():
        raise AutoparError(
            f'device="{device}", but torch {torch.__version__} sees no GPU (torch.cuda.is_available() is False). '
            f'Install a CUDA build of torch and a driver, or pass device="cpu".'
        )
    count = torch.cuda.device_count()
    index = device.index if device.index is not None else _own_index(settings)
    if index >= count:
        source = "" if device.index is not None else f" and LOCAL_RANK={index}"
        raise AutoparError(
            f'device="{device}"{source}, but this process sees {count} GPUs, 0 to {count - 1}. Start at most {count} '
            f"processes a machine, or show each its own by CUDA_VISIBLE_DEVICES."
        )


def place_of(device: torch.device) -> str:
    """The machine and the GPU of a rank; empty of one on a CPU."""
    if device.type != "cuda":
        return ""
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"


def check_places(places: Sequence[str]) -> None:
    """Raise RankError where two ranks have one GPU, which NCCL would refuse later. places: of all ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        ranks.setdefault(place, []).append(rank)
    shared = {place: at for place, at in ranks.items() if place and at[1:]}
    if shared:
        said = "; ".join(f"{name_ranks(at)} have {place.partition(' ')[2]} on {place.partition(' ')[0]}"
                         for place, at in shared.items())  # fmt: skip
        raise RankError(
            f"each rank needs a GPU of its own: {said}. Start as many ranks on a machine as it has GPUs, with "
            f"LOCAL_RANK (or SLURM_LOCALID) from 0 on, or show each its own by CUDA_VISIBLE_DEVICES."
        )


def keep_pages() -> None:
    """Have this process keep the memory that it frees. Does nothing where the C library is not glibc, or has been
    replaced (jemalloc, tcmalloc).

    glibc gives the free end of its heap back to the system (mallopt(3), M_TRIM_THRESHOLD), and the next calls ask for
    the same pages again: up to 16 % of a step (benchmarks/RESULTS.md). A step needs as much as the one before it, so
    what is free stays with the process. Results of 32 MiB or more are mapped anew each time, as before.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(TRIM_THRESHOLD, NEVER)
        mallopt(MMAP_THRESHOLD, FRESH)
