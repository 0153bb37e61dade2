"""Nothing between the kernels: a warm step reads nothing from the device, and copies nothing to it but a batch."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from off_host import off_host
from processes import Ranks
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import autopar

READS = {"tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "tensor", "as_tensor"}
# What lies in the host's memory on every machine: the batch, and what ranks say to each other.
HOST = {"agreement.py", "host.py"}
ROOT = Path(autopar.__file__).parents[1]
SOURCES = {path for folder in ("autopar", "runtime") for path in (ROOT / folder).rglob("*.py")}


class Counting(TorchFunctionMode):
    """Counts what reads a tensor, or makes one on the host, by the file of ours that does."""

    only_watches = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS:
            self.seen[f"{_file()}: {name}"] += 1
        return func(*args, **(kwargs or {}))


def _file() -> str:
    frame: Any = sys._getframe(2)
    while frame is not None and Path(frame.f_code.co_filename) not in SOURCES:
        frame = frame.f_back
    return Path(frame.f_code.co_filename).name if frame is not None else "elsewhere"


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.drop = nn.Embedding(16, 8), nn.Dropout(0.5)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.norm(self.layers(self.drop(self.tokens(x)))))
        return out


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp=2": ("dp=2", {}),
    "zero=3": ("dp=2", {"zero": 3}),
    "tp": ("tp=2", {}),
    "pp": ("pp=2", {"microbatches": 2}),
    "bf16": ("dp=2", {"precision": "bf16"}),
    "fp16": ("dp=2", {"precision": "fp16"}),
}


def _warm_step(rank: int, way: str) -> Counter[str]:
    mesh, options = WAYS.get(way, ("dp=1", {}))
    torch.manual_seed(0)
    model = autopar.parallelize(Small(), mesh, loss_fn=loss_fn, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randint(16, (2, 8))
    for _ in range(2):
        model.forward_backward(x, y)
        optimizer.step()
    with Counting() as on_host:
        model.forward_backward(x, y)
    assert any("tolist" in each for each in on_host.seen), "the tester sees nothing"
    with off_host(), Counting() as counting:
        model.forward_backward(x, y)
        optimizer.step()
    if dist.is_initialized():
        dist.barrier()  # nobody waits for a send there, and Gloo loses what has not left when the model dies
    return Counter({each: count for each, count in counting.seen.items() if each.partition(":")[0] not in HOST})


def test_one_rank_alone_reads_nothing() -> None:
    assert not _warm_step(0, "dp=1")


@pytest.mark.gloo
@pytest.mark.parametrize("way", WAYS)
def test_a_step_reads_nothing_from_the_device(two: Ranks, way: str) -> None:
    """But an overflow, which says whether there are gradients: as torch.amp.GradScaler does."""
    for seen in two.run(_warm_step, way):
        assert seen == ({"loss_scale.py: item": 1} if way == "fp16" else {})
