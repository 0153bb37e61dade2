"""Which GPU a rank takes, and that its process computes there: with torch.cuda stubbed, since there is none here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autopar.errors import AutoparError, RankError
from autopar.parallel.session import session
from autopar.parallel.session.devices import check_backend, check_places, device_of_rank
from autopar.parallel.session.session import Requested, join
from autopar.settings import Settings


class Gpus:
    """Stands in for torch.cuda of a machine with some GPUs."""

    def __init__(self, patch: pytest.MonkeyPatch, count: int) -> None:
        self.count, self.current, self.calls = count, 0, []
        patch.setattr(torch.cuda, "is_available", lambda: count > 0)
        patch.setattr(torch.cuda, "device_count", lambda: count)
        patch.setattr(torch.cuda, "current_device", lambda: self.current)
        patch.setattr(torch.cuda, "set_device", self._set)

    calls: list[Any]

    def _set(self, device: Any) -> None:
        index = torch.cuda._utils._get_device_index(device)  # raises for a "cuda" without an index, as torch does
        self.calls.append(f"set_device {index}")
        self.current = index


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    """Four GPUs; what `join` would do with groups is written down and not done."""
    made = Gpus(monkeypatch, 4)
    monkeypatch.setattr(session, "_meet", lambda backend: made.calls.append(f"group {backend}"))

    def agreement(place: torch.device, pace: Any) -> Any:
        made.calls.append(f"agree on {place}")
        raise StopIteration

    monkeypatch.setattr(session, "Agreement", agreement)
    yield made


def joined(device: str | None, **step: Any) -> None:
    with pytest.raises(StopIteration):
        join(Requested(nn.Linear(2, 2), "dp=2", step, device=device))


def as_rank(patch: pytest.MonkeyPatch, local: int) -> None:
    for name, value in (("RANK", local), ("WORLD_SIZE", 2), ("LOCAL_RANK", local)):
        patch.setenv(name, str(value))


@pytest.mark.parametrize(("device", "index"), [("cuda", 3), ("cuda:2", 2), (None, 3)])
@pytest.mark.parametrize("has_group", [False, True])
def test_the_process_computes_on_its_gpu(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch, device: str | None, index: int, has_group: bool
) -> None:
    """Before a group is made, and also if the user made it."""
    as_rank(monkeypatch, 3)
    if has_group:
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    joined(device)
    group = [] if has_group else ["group nccl"]
    assert gpus.calls == [f"set_device {index}", *group, f"agree on cuda:{index}"]


@pytest.mark.parametrize("offload", ["parameters", ["activations", "parameters"], {"parameters": 1.0}])
def test_what_lies_in_the_hosts_memory_is_summed_there(gpus: Gpus, monkeypatch: pytest.MonkeyPatch, offload: Any):
    """By a backend of its own, or the user's group is refused."""
    as_rank(monkeypatch, 1)
    joined("cuda", offload=offload)
    assert "group cpu:gloo,cuda:nccl" in gpus.calls
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    for backends in ("cpu:gloo,cuda:nccl", "cuda:nccl"):
        monkeypatch.setattr(dist, "get_backend_config", lambda said=backends: said)
        if "gloo" in backends:
            check_backend(torch.device("cuda", 1))
    with pytest.raises(RankError) as refused:
        check_backend(torch.device("cuda", 1))
    assert str(refused.value) == (
        'offload="parameters" keeps parameters and gradients in the host\'s memory, where clip_grad_norm_ and '
        "optimizers sum them over ranks, and the process group has no backend there: it is 'cuda:nccl'. Make it with "
        'dist.init_process_group("cpu:gloo,cuda:nccl"), or leave that to autopar.'
    )


def test_a_rank_on_the_cpu_touches_no_gpu(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(monkeypatch, 1)
    joined("cpu")
    assert gpus.calls == ["group gloo", "agree on cpu"]


@pytest.mark.parametrize("local", [0, 1])
def test_all_ranks_of_a_machine_with_too_few_gpus_take_the_cpu(monkeypatch: pytest.MonkeyPatch, local: int) -> None:
    """Not the first of them a GPU: they could not talk."""
    Gpus(monkeypatch, 1)
    assert device_of_rank(None, Settings(local_rank=local, local_world_size=2)) == torch.device("cpu")


def test_without_a_launcher_the_current_gpu_is_the_users(gpus: Gpus) -> None:
    gpus.current = 2
    assert device_of_rank("cuda", Settings()) == torch.device("cuda", 2)
    assert device_of_rank(None, Settings()) == torch.device("cuda", 2)


def test_a_process_that_sees_one_gpu_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a launcher that sets CUDA_VISIBLE_DEVICES for each."""
    Gpus(monkeypatch, 1)
    assert device_of_rank("cuda", Settings(local_rank=5)) == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("asked", "count", "message"),
    [
        (
            "cuda", 0,
            f'device="cuda", but torch {torch.__version__} sees no GPU (torch.cuda.is_available() is False). Install a '
            'CUDA build of torch and a driver, or pass device="cpu".',
        ),
        (
            "cuda", 4,
            'device="cuda" and LOCAL_RANK=5, but this process sees 4 GPUs, 0 to 3. Start at most 4 processes a '
            "machine, or show each its own by CUDA_VISIBLE_DEVICES.",
        ),
        (
            "cuda:7", 4,
            'device="cuda:7", but this process sees 4 GPUs, 0 to 3. Start at most 4 processes a machine, or show each '
            "its own by CUDA_VISIBLE_DEVICES.",
        ),
    ],
)  # fmt: skip
def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, asked: str, count: int, message: str) -> None:
    Gpus(monkeypatch, count)
    with pytest.raises(AutoparError) as error:
        device_of_rank(asked, Settings(local_rank=5))
    assert str(error.value) == message


def test_two_ranks_on_one_gpu_are_named() -> None:
    check_places(["", "", ""])
    check_places(["a GPU-1", "a GPU-2", "b GPU-1"])
    with pytest.raises(
        RankError, match=r"^each rank needs a GPU of its own: ranks 0, 2 have GPU-1 on a\. Start as many"
    ):
        check_places(["a GPU-1", "a GPU-2", "a GPU-1", "b GPU-1"])


@pytest.mark.parametrize(("names", "local"), [
    ({"LOCAL_RANK": "3", "SLURM_LOCALID": "1"}, 3), ({"SLURM_LOCALID": "1"}, 1),
    ({"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, 2), ({}, None),
])  # fmt: skip
def test_launchers_have_names_of_their_own(
    names: dict[str, str], local: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    assert Settings.read().local_rank == (local if "LOCAL_RANK" in names else None)  # in a shell of a job: no rank
    monkeypatch.setenv("RANK", "5")
    assert Settings.read().local_rank == local
