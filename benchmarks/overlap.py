"""How much of what moves is hidden under what computes: `python -m benchmarks.overlap`.

The GPT of benchmarks/compare on two Gloo ranks, with and without ZeRO. A recorder sees on each rank when a collective
is started and when it is waited for. In flight: the time between the start of a collective and the end of its wait,
overlaps of several counted once. Exposed: the time that a rank spends in starts, waits and collectives that are not in
two halves.
"""

from __future__ import annotations

import argparse
import pickle
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from autopar.runtime.ranks.recorder import Event, Recorder
from benchmarks.compare.models import batch_of, loss_fn, model_of, optimizer_of
from benchmarks.records import Figure, Records, record_option

RANKS, STEPS, WARMUP = 2, 8, 2
Row = tuple[float, float, float]  # milliseconds of a step: all of it, in flight, exposed


def worker(rank: int, zero: int, folder: str) -> None:
    import autopar

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    model = autopar.parallelize(model_of("gpt"), f"dp={RANKS}", loss_fn=loss_fn, device="cpu", zero=zero)
    batch, optimizer = batch_of("gpt", "cpu"), optimizer_of(model)
    compiled = model.prepare(*batch)
    waits = (node for node in compiled.program.calls() if "wait" in str(node.target))
    start_of = {node.name: node.all_input_nodes[0].name for node in waits}
    rows = []
    for step in range(WARMUP + STEPS):
        recorder = Recorder()
        model.record(recorder)
        dist.barrier()
        with recorder.timed("step"):
            model.forward_backward(*batch)
        optimizer.step()
        optimizer.zero_grad()
        if step >= WARMUP:
            rows.append(row_of(recorder.events, start_of))
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(rows))
    dist.destroy_process_group()


def row_of(events: list[Event], start_of: dict[str, str]) -> Row:
    whole = next(event for event in events if event.name == "step")
    collectives = {event.name.rpartition("%")[2]: event for event in events if event.kind == "collective"}
    pairs = [(collectives[start].start_us, collectives[wait].end_us) for wait, start in start_of.items()]
    alone = [event for name, event in collectives.items() if name not in {*start_of, *start_of.values()}]
    pairs += [(event.start_us, event.end_us) for event in alone]
    exposed = sum(event.end_us - event.start_us for event in collectives.values())
    return (whole.end_us - whole.start_us) / 1e3, sum(end - start for start, end in union(pairs)) / 1e3, exposed / 1e3


def union(spans: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The spans with those that touch as one."""
    begin, end = 0.0, 0.0
    for start, stop in sorted(spans):
        if start > end:
            yield begin, end
            begin, end = start, stop
        end = max(end, stop)
    yield begin, end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record_option(parser)
    records = Records("overlap", parser.parse_args().record)
    print(f"{date.today()}  torch {torch.__version__}, {platform.machine()}, {RANKS} Gloo ranks")
    print(f"python -m benchmarks.overlap {' '.join(sys.argv[1:])}".strip())
    print("| zero | step ms | in flight ms | exposed ms | hidden |\n| --- | --- | --- | --- | --- |")
    for zero in (0, 1, 2, 3):
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(worker, args=(zero, folder), nprocs=RANKS, start_method="spawn")
            rows: list[Row] = pickle.loads(Path(folder, "0.pickle").read_bytes())
        step, flight, exposed = (statistics.median(row[i] for row in rows) for i in range(3))
        print(f"| {zero} | {step:.0f} | {flight:.0f} | {exposed:.0f} | {1 - exposed / flight:.0%} |", flush=True)
        case = f"GPT on {RANKS} Gloo ranks, zero={zero}"
        records.add(Figure(case, "hidden of what is in flight", "%", 100 * (1 - exposed / flight), goal=">="))


if __name__ == "__main__":
    main()
