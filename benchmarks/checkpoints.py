"""Checkpoints from any mesh to any mesh: what comes back is what went in, to the bit, and the loss curve goes on.

    python -m benchmarks.checkpoints                 # all ordered pairs of the table below, with up to 8 ranks
    python -m benchmarks.checkpoints --ranks 4       # of the meshes of at most 4 ranks
    python -m benchmarks.checkpoints --times         # the cost of checksums and of asynchronous saves

A run of each mesh is trained and saved. Each other mesh loads that and saves it again, and so does the first one with
what the other one saved: parameters, buffers, optimizer states, groups, random state, scheduler and the place in the
data must be equal to the bit. Two steps behind each load have the losses of the run that was not interrupted (1e-10).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint import async_save
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import autopar
from autopar.checkpoint import folder
from autopar.checkpoint.manifest import Manifest
from autopar.checkpoint.tensor_files import Reader, bytes_of, write_file
from autopar.ir.mesh import parse_mesh
from benchmarks.records import Figure, Records, record_option
from tests.support.mixtures import Kind, Mixture
from tests.support.processes import Ranks

STEPS, MORE = 2, 2
WIDTH, VOCABULARY, ROWS, TIME = 16, 40, 16, 8


@dataclass(frozen=True)
class Way:
    """A mesh with its options. optimizer: its name."""

    mesh: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def ranks(self) -> int:
        return parse_mesh(self.mesh).size

    def __str__(self) -> str:
        return " ".join([self.mesh, *(f"{name}={value}" for name, value in self.options)])


WAYS = (
    Way("dp=1"),
    Way("dp=2", (("zero", 1),)),
    Way("tp=2"),
    Way("pp=2", (("microbatches", 4), ("schedule", "1f1b"))),
    Way("dp=4", (("zero", 2),)),
    Way("fsdp=2,tp=2"),
    Way("dp=2,ep=2", (("zero", 3),)),
    Way("cp=2,dp=2", (("microbatches", 2),)),
    Way("tp=2,pp=2,dp=2", (("microbatches", 2), ("zero", 1))),
    Way("dp=2,fsdp=4"),
)


class Model(nn.Module):
    """A tied embedding, a fused qkv, dropout, a buffer that moves, experts."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.norm, self.qkv, self.o = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = Mixture(Kind(experts=4, chosen=2, width=WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x_BT: Tensor) -> Tensor:
        x = self.tokens(x_BT)
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + F.dropout(
            self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)), 0.1
        )
        x = x + self.experts(x)[0]
        if self.training:
            self.seen.add_(1)
        return self.head(x)


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


class Cursor:
    """The place in the data, as a StatefulDataLoader has it."""

    def __init__(self) -> None:
        self.at = 0

    def batch(self) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(self.at)
        self.at += 1
        x, y = (torch.randint(VOCABULARY, (ROWS, TIME), generator=random) for _ in range(2))
        return x, y

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@dataclass
class Run:
    """What is trained on a rank."""

    model: Any
    optimizer: torch.optim.Optimizer
    scheduler: Any
    loader: Cursor

    def save(self, path: str, step: int) -> None:
        autopar.save(
            path,
            self.model,
            self.optimizer,
            step=step,
            scheduler=self.scheduler,
            loader=self.loader,
            extra={"at": step},
        )

    def load(self, path: str) -> None:
        got = autopar.load(path, self.model, self.optimizer, scheduler=self.scheduler, loader=self.loader)
        assert got.extra == {"at": got.step}

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            losses.append(self.model.forward_backward(*self.loader.batch()).item())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return losses


def made(way: Way) -> Run:
    """A run of its own seed, which a load replaces."""
    torch.manual_seed(way.ranks)
    model = autopar.parallelize(Model().double(), way.mesh, loss_fn=loss_fn, seed=way.ranks, **dict(way.options))
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.01)
    return Run(model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), Cursor())


kept = cache(made)  # in a process that serves many pairs


def train(rank: int, way: Way, path: str) -> list[float]:
    """Train, save, and go on."""
    run = made(way)
    run.steps(STEPS)
    run.save(path, STEPS)
    return run.steps(MORE)


def again(rank: int, way: Way, source: str, target: str) -> list[float]:
    """Load, save the same again, and go on."""
    run = kept(way)
    run.load(source)
    run.save(target, STEPS)
    return run.steps(MORE)


def differences(a: str | Path, b: str | Path) -> list[str]:
    """What two checkpoints have unlike, by name."""
    readers = []
    for each in (a, b):
        path = folder.newest(Path(each))
        readers.append(Reader(path, Manifest.read(path)))
    first, second = (reader.manifest for reader in readers)
    found = sorted(first.tensors.keys() ^ second.tensors.keys())
    for name in first.tensors.keys() & second.tensors.keys():
        x, y = (reader.whole(name) for reader in readers)
        if x.dtype != y.dtype or not torch.equal(x.view(-1).view(torch.uint8), y.view(-1).view(torch.uint8)):
            found.append(name)
    for part in ("state", "own"):
        x, y = (json.dumps(getattr(each, part), sort_keys=True) for each in (first, second))
        found += [part] if x != y else []
    return found


def sweep(pools: dict[int, Ranks], ways: Sequence[Way], path: Path) -> Iterator[tuple[str, list[str]]]:
    """Each ordered pair, with what is wrong in it."""

    def run(way: Way, work: Any, *args: Any) -> list[float]:
        if way.ranks not in pools:
            pools[way.ranks] = Ranks(way.ranks)
        losses: list[list[float]] = pools[way.ranks].run(work, way, *args, timeout=240)
        return losses[0]

    for a, source in enumerate(ways):
        start = str(path / f"{a}")
        straight = run(source, train, start)
        for b, target in enumerate(ways):
            if a == b:
                continue
            there, back = str(path / f"{a}-{b}"), str(path / f"{a}-{b}-{a}")
            wrong = []
            for way, here, to in ((target, start, there), (source, there, back)):
                losses = run(way, again, here, to)
                wrong += [f"{name} ({way})" for name in differences(start, to)]
                if any(abs(x - y) > 1e-10 * abs(y) for x, y in zip(losses, straight, strict=True)):
                    wrong.append(f"losses ({way}): {losses}, uninterrupted {straight}")
            yield f"{source} -> {target} -> {source}", wrong


def _without_checksums(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write what a file of a checkpoint holds as such a file is written, and no checksums."""
    with path.open("xb", buffering=0) as file:
        for each in tensors.values():
            data = bytes_of(each)
            for at in range(0, len(data), 1 << 24):
                file.write(data[at : at + (1 << 24)])
        os.fsync(file.fileno())


def times(megabytes: int = 256) -> dict[str, float]:
    """Seconds of a file of so many bytes with checksums beside, of the same bytes without, and of all that the steps of
    a loop wait for each save: one that is written at once, one that is written beside training, and torch's own."""
    torch.set_num_threads(1)  # as torchrun does: copies by several would wait for busy cores
    model = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(megabytes // 4))
    found: dict[str, list[float]] = {name: [] for name in ("file", "bare", "at once", "beside", "torch")}
    with tempfile.TemporaryDirectory() as path:
        for _ in range(12):
            for name, write in (("file", write_file), ("bare", _without_checksums)):
                start, file = time.perf_counter(), Path(path) / name
                write(file, {key: each.detach() for key, each in model.named_parameters()})
                found[name].append(time.perf_counter() - start)
                file.unlink()
    for _ in range(3):  # in turns, so that what else the machine does meets all
        found["at once"] += _waits(model, asynchronous=False)
        found["beside"] += _waits(model, asynchronous=True)
        found["torch"] += _waits_of_torch(model)
    return {name: sorted(values)[len(values) // 2] for name, values in found.items()}


SAVES, EVERY, STEP_SECONDS = 6, 4, 0.25


def _waits(model: nn.Module, asynchronous: bool) -> list[float]:
    """Seconds that the steps of a loop wait from one save to the next: for the copy or the file, the commit, and the
    removal of the oldest checkpoint. Left out are the first, which makes the memory that it copies to, and the last."""
    waited = [0.0] * (SAVES + 1)  # before the first save, and behind each
    with tempfile.TemporaryDirectory() as path:
        checkpointer = autopar.Checkpointer(path, every=EVERY, keep=2, asynchronous=asynchronous)
        start = None
        for step in checkpointer.steps(EVERY * SAVES + 1, model):  # the last save is always at once
            if start is not None:
                waited[step // EVERY] += time.perf_counter() - start
            time.sleep(STEP_SECONDS)
            start = time.perf_counter()
    return waited[2:-1]


def _waits_of_torch(model: nn.Module) -> list[float]:
    """Seconds that a call of torch's asynchronous save takes, with memory that it keeps from save to save. It removes
    no older checkpoint."""
    staging = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )
    waited, stager = [], DefaultStager(staging)
    with tempfile.TemporaryDirectory() as path, warnings.catch_warnings(action="ignore"):
        for step in range(SAVES):
            start = time.perf_counter()
            saving = async_save(model.state_dict(), checkpoint_id=f"{path}/{step}", async_stager=stager)
            waited.append(time.perf_counter() - start)
            saving.result()
            shutil.rmtree(f"{path}/{step}")
    return waited[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="leave out meshes of more")
    parser.add_argument("--times", action="store_true", help="measure instead")
    record_option(parser)
    asked = parser.parse_args()
    records = Records("checkpoints", asked.record)
    if asked.times:
        found = times()
        share = found["file"] / found["bare"] - 1
        waits = found["beside"] / found["at once"]
        print(json.dumps({name: round(value, 3) for name, value in found.items()}))
        print(f"checksums make a file {share:.1%} longer; steps wait {waits:.1%} of a save for an asynchronous one")
        records.add(Figure("256 MB", "checksums", "more time than without", share, goal="<=0.05"))
        records.add(
            Figure("256 MB", "waits for an asynchronous save", "share of one at once", waits, goal="<=0.10"),
            Figure("256 MB", "waits beside torch's async_save", "s", found["beside"], found["torch"]),
        )
        return
    pools: dict[int, Ranks] = {}
    ways = [way for way in WAYS if way.ranks <= asked.ranks]
    bad = count = 0
    with tempfile.TemporaryDirectory() as path:
        for pair, wrong in sweep(pools, ways, Path(path)):
            count += 1
            bad += bool(wrong)
            print(f"{'WRONG' if wrong else 'ok':6}{pair}" + "".join(f"\n      {each}" for each in wrong), flush=True)
    for pool in pools.values():
        pool.close()
    print(f"{count - bad} of {count} pairs are equal to the bit")
    records.add(Figure(f"pairs of {len(ways)} meshes", "unlike", "pairs", bad, goal="<=0"))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
