"""What a backend says where another rank has gone, and where this one has a fault of its own."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from autopar.runtime.ranks.lost import is_loss_of_peer, loss_of_peers

OWN = (
    "unhandled cuda error (run with NCCL_DEBUG=INFO for details)\nncclUnhandledCudaError: Call to CUDA function failed."
    "\nLast error:\nCuda failure 710 'device-side assert triggered'",
    "unhandled cuda error\nncclUnhandledCudaError\nCuda failure 700 'an illegal memory access was encountered'",
    "internal error - please report this issue\nncclInternalError\nLast error:\nnet.cc:423 no network interface",
    "internal error - please report this issue to the NCCL developers",
    "unhandled system error\nLast error:\nError while creating shared memory segment /dev/shm/nccl-abc (size 9637888), "
    "No space left on device",
    "out of memory", "invalid usage",
)  # fmt: skip
GONE = (
    "unhandled system error\nncclSystemError\nLast error:\nsocketProgress: Connection closed by remote peer",
    "remote process exited or there was a network error, NCCL version 2.27.5\nncclRemoteError",
    "Watchdog caught collective operation timeout",
    "NCCL communicator was aborted on rank 1.",
)


@pytest.mark.parametrize("text", OWN)
def test_a_fault_of_its_own(text: str) -> None:
    assert not is_loss_of_peer(dist.DistBackendError(f"NCCL error in: ProcessGroupNCCL.cpp:3699, {text}"))


@pytest.mark.parametrize("text", GONE)
def test_a_peer_that_is_gone(text: str) -> None:
    assert is_loss_of_peer(dist.DistBackendError(f"NCCL error in: ProcessGroupNCCL.cpp:3699, {text}"))


def test_gloo_says_it_by_a_plain_error() -> None:
    assert is_loss_of_peer(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:41234"))
    assert not is_loss_of_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_who_waited_in_vain_is_told_apart() -> None:
    said = [
        str(loss_of_peers("rank 0 (dp=0)", "at X", "rank 1", RuntimeError(text))) for text in ("Timed out", "reset ")
    ]
    assert said[0].startswith(
        "rank 0 (dp=0) lost its peers at X\n  It waited in vain for rank 1: stopped, hanging, or "
    )
    assert said[1] == (
        "rank 0 (dp=0) lost its peers at X\n  Look for the first error of rank 1. The backend says: reset"
    )
