"""The sections by name, and one of them in this process: `python -m benchmarks.gpu.sections NAME DEVICE`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.attention import attention
from benchmarks.gpu.experts import experts
from benchmarks.gpu.kernels import kernels
from benchmarks.gpu.offload import offload
from benchmarks.gpu.parity import meshes, parity, scaling
from benchmarks.gpu.session import nccl, reads
from benchmarks.gpu.steps import memory, peers, steps
from benchmarks.gpu.trainers import trainers


@dataclass(frozen=True, slots=True)
class Section:
    """run: prints Markdown for a device, "cuda" or "cpu", or raises. seconds: after which it is ended."""

    name: str
    title: str
    seconds: float
    run: Callable[[str], None]


def tests(device: str) -> None:
    """The tests that need a GPU; on a CPU they are only collected."""
    files = sorted(str(path) for path in Path("tests").rglob("test_*.py") if "mark.gpu" in path.read_text())
    where = [*files, "-n", "6"] if device == "cuda" else ["tests/runtime/test_random_triton.py", "--collect-only"]
    _call("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *where)


def demo(device: str) -> None:
    """The demo's job on one rank, as `autopar run` starts it."""
    steps = "200" if device == "cuda" else "2"
    _call("-m", "autopar", "run", "examples/train_gpt.py:job", "--mesh", "dp=1", "--steps", steps)


def dropout(device: str) -> None:
    """Dropout beside `F.dropout`."""
    sizes = ("--seconds", "2") if device == "cuda" else ("--seconds", "0", "--shapes", "2")
    _call("-m", "benchmarks.dropout", "--device", device, *sizes)


def _call(*arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    print(f"```text\n{done.stdout.strip()}\n```")
    if done.returncode not in (0, 5):  # 5: pytest found no test
        sys.exit(done.returncode)


SECTIONS = {
    section.name: section
    for section in (
        Section("reads", "Host reads in a warm step (`torch.cuda.set_sync_debug_mode`)", 60, reads),
        Section("tests", "Tests that need a GPU", 120, tests),
        Section("nccl", "One rank over NCCL", 60, nccl),
        Section("parity", "Beside one device: loss, gradients and weights", 120, parity),
        Section("meshes", "The programs of all ranks, on one device", 60, meshes),
        Section("scaling", "fp16 with a scaled loss", 40, scaling),
        Section("attention", "Attention beside its plain form", 60, attention),
        Section("kernels", "Generated kernels, beside Inductor's and the calls of each group", 120, kernels),
        Section("steps", "Whole steps", 180, steps),
        Section("memory", "Estimates of memory", 60, memory),
        Section("peers", "FSDP2 and DDP on one device", 60, peers),
        Section("experts", "Mixtures of experts", 120, experts),
        Section("offload", "What waits in the host's memory", 240, offload),
        Section("trainers", "Loops of other libraries on one rank over NCCL", 90, trainers),
        Section("dropout", "Dropout", 60, dropout),
        Section("demo", "The demo's job on one rank", 60, demo),
    )
}


def main(arguments: Iterable[str]) -> None:
    name, device = arguments
    SECTIONS[name].run(device)


if __name__ == "__main__":
    main(sys.argv[1:])
