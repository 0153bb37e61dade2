"""What the checks around a step cost: `python -m benchmarks.around`.

The GPT of benchmarks/compare on two Gloo ranks, dp=2, AdamW. A profiler on each rank sums the time that a step spends
in each check: taking the batch apart, guards, the digest of the batch, the announcement with which ranks compare them,
and `check_replicas`, whose time counts with 1/100, as it runs every 100 steps. An announcement waits for the slower
rank, which the next collective would do in its place: the lesser of both ranks' times is shown, that of the rank that
came last. The profiler makes Python calls slower, so that the figures are upper bounds.
"""

from __future__ import annotations

import argparse
import cProfile
import pickle
import platform
import pstats
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from autopar.parallel.weights.replicas import Replicas
from benchmarks.compare.models import batch_of, loss_fn, model_of, optimizer_of
from benchmarks.records import Figure, Records, record_option

RANKS, STEPS, WARMUP = 2, 30, 3
CHECKS = {  # file and function: what a person calls it
    ("containers.py", "take_call_apart"): "batch taken apart",
    ("variants.py", "find"): "guards",
    ("digests.py", "vector"): "digest of the batch",
    ("announce.py", "call"): "announcement, with its wait",
}


def worker(rank: int, folder: str) -> None:
    import autopar

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    model = autopar.parallelize(model_of("gpt"), f"dp={RANKS}", loss_fn=loss_fn, device="cpu", check_replicas=None)
    batch, optimizer, profile, spent = batch_of("gpt", "cpu"), optimizer_of(model), cProfile.Profile(), 0.0
    for step in range(WARMUP + STEPS):
        dist.barrier()
        start = time.perf_counter()
        if step >= WARMUP:
            profile.enable()
        model.forward_backward(*batch)
        profile.disable()
        optimizer.step()
        optimizer.zero_grad()
        spent += (time.perf_counter() - start) * (step >= WARMUP)
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    found = dict.fromkeys(CHECKS.values(), 0.0)
    for (file, _, name), (*_, cumulative, _callers) in stats.items():
        text = CHECKS.get((Path(file).name, name))
        if text is not None and "autopar" in file:
            found[text] += cumulative / STEPS
    found["check_replicas, every 100 steps"] = replicas_s(model) / 100
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps((spent / STEPS, found)))
    dist.destroy_process_group()


def replicas_s(model: object, times: int = 5) -> float:
    """The seconds of one comparison of all replicas."""
    replicas: Replicas = model._session.replicas  # type: ignore[attr-defined]
    replicas.check(0)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(times):
        replicas.check(0)
    return (time.perf_counter() - start) / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record_option(parser)
    records = Records("around", parser.parse_args().record)
    print(f"{date.today()}  torch {torch.__version__}, {platform.machine()}, {RANKS} Gloo ranks, {STEPS} steps")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (folder,), nprocs=RANKS)
        sides = [pickle.loads(Path(folder, f"{rank}.pickle").read_bytes()) for rank in range(RANKS)]
    step = max(seconds for seconds, _ in sides)
    print(f"a step takes {step * 1e3:.1f} ms\n| check | ms | share of a step |\n| --- | --- | --- |")
    for text in sides[0][1]:
        least = min(found[text] for _, found in sides)  # of the rank that did not wait
        print(f"| {text} | {least * 1e3:.3f} | {least / step:.2%} |")
        records.add(Figure(text, "of a step", "%", 100 * least / step))


if __name__ == "__main__":
    main()
