"""The measured bubble of a pipeline beside the simulated one, over Gloo.

    timeout 300 .venv/bin/python -m benchmarks.bubble [--mesh pp=2] [--model gpt] [--schedule 1f1b] [--steps 5]
    timeout 300 .venv/bin/python -m benchmarks.bubble --model "llama 2k" --microbatches 1 --slices 4 --schedule seq1f1b

The models of benchmarks.compare. Each rank says of each instruction when it began and ended; what it waits for is not
part of it. The mean time of each graph goes into the simulation of the same lists, whose transfers take no time; of
slices of a sequence also how it grows with their place (attention to what lies before). A
bubble is the share of the longest time from a rank's first graph to its last in which a rank computes nothing.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import autopar
from autopar.ir.mesh import PIPELINE, parse_mesh
from autopar.ir.options import read_slices
from autopar.ir.schedule import KINDS, Action, Costs, Flow, Instruction, Span, Timeline
from autopar.passes.schedules import simulate
from autopar.runtime.ranks.recorder import RUN, Event, Recorder
from benchmarks.compare.models import MICROBATCHES, SIZES, batch_of, loss_fn, model_of
from benchmarks.records import Figure, Records, record_option


@dataclass(frozen=True)
class Options:
    mesh: str
    model: str
    schedule: str
    steps: int
    microbatches: int
    slices: int | tuple[int, ...]

    @property
    def step(self) -> dict[str, Any]:
        """How the step is computed."""
        return {"microbatches": self.microbatches, "schedule": self.schedule, "slices": self.slices}


def worker(rank: int, options: Options, ranks: int, folder: str) -> None:
    """The spans of each step on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    model = autopar.parallelize(model_of(options.model), options.mesh, loss_fn=loss_fn, **options.step)
    batch = batch_of(options.model, "cpu")
    recorder, steps = Recorder(), list[list[Span]]()
    model.prepare(*batch)
    model.record(recorder)
    for step in range(-1, options.steps):  # the first is not counted
        dist.barrier()
        recorder.events.clear()
        model.forward_backward(*batch)
        if step >= 0:
            steps.append([span_of(event) for event in recorder.events if event.kind == RUN])
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(steps))
    if rank == 0:
        pipeline = model.compiled.pipeline if model.compiled is not None else None
        assert pipeline is not None
        kept = pipeline.lists, pipeline.flow
        Path(folder, "pipeline.pickle").write_bytes(pickle.dumps(kept))
    dist.barrier()
    dist.destroy_process_group()


def span_of(event: Event) -> Span:
    assert event.action is not None
    return Span(Instruction("RUN", event.action), event.start_us, event.end_us)


def measured_costs(ranks: list[list[list[Span]]], flow: Flow) -> Costs:
    """The mean time of each graph over micro-batches and steps; of slices by least squares the time of a mean one, and
    the part of it that grows with their place, as `Costs.time_us` has them."""
    found: dict[tuple[int, str], list[tuple[Action, float]]] = {}
    for span in (span for steps in ranks for spans in steps for span in spans):
        action = span.instruction.action
        found.setdefault((action.stage, action.kind), []).append((action, span.end_us - span.start_us))
    means = {key: statistics.mean(time for _, time in pairs) for key, pairs in found.items()}
    if flow.slices == 1:
        return Costs(means)
    growing = dict[tuple[int, str], float]()
    units = [Costs(dict.fromkeys(means, 1.0), growing_us=dict.fromkeys(means, part), slices=flow.slices,
                   lengths=flow.lengths) for part in (0.0, 1.0)]  # fmt: skip
    for key, pairs in found.items():
        if key[1] in "FBIW":  # a time is linear in that of a mean slice and in what grows of it
            fixed, grown = ([unit.time_us(action) for action, _ in pairs] for unit in units)
            rows = torch.tensor([[a, b - a] for a, b in zip(fixed, grown, strict=True)], dtype=torch.float64)
            times = torch.tensor([[time] for _, time in pairs], dtype=torch.float64)
            means[key], growing[key] = torch.linalg.lstsq(rows, times).solution.flatten().tolist()
    return Costs(means, growing_us=growing, slices=flow.slices, lengths=flow.lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="pp=2")
    parser.add_argument("--model", default="gpt", choices=tuple(SIZES))
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--microbatches", type=int, default=MICROBATCHES)
    parser.add_argument("--slices", type=read_slices, default=1, help="a number, or the positions of each: 512,256,256")
    record_option(parser)
    args = vars(parser.parse_args())
    records = Records("bubble", args.pop("record"))
    options = Options(**args)
    mesh = parse_mesh(options.mesh)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(worker, args=(options, mesh.size, folder), nprocs=mesh.size, start_method="spawn")
        everyone = [pickle.loads(Path(folder, f"{rank}.pickle").read_bytes()) for rank in range(mesh.size)]
        lists, flow = pickle.loads(Path(folder, "pipeline.pickle").read_bytes())
    # one rank of each place on the pipeline
    ranks = [everyone[mesh.rank({**dict.fromkeys(dict(mesh.axes), 0), PIPELINE: place})] for place in range(len(lists))]
    costs = measured_costs(ranks, flow)
    if flow.slices > 1:
        print(f"slices: {', '.join(map(str, flow.lengths)) or f'{flow.slices} of equal length'}")
    for (place, kind), time_us in sorted(costs.times_us.items()):
        print(f"{KINDS[kind]} {place}: {time_us / 1e3:.2f} ms")
    timelines = [Timeline(tuple(tuple(steps[i]) for steps in ranks)) for i in range(options.steps)]
    timelines.sort(key=lambda timeline: timeline.span_us)
    measured = timelines[len(timelines) // 2]
    simulated = simulate(lists, flow, costs)
    print(f"step: measured {measured.span_us / 1e3:.1f} ms (the median), simulated {simulated.span_us / 1e3:.1f} ms")
    for rank in range(len(lists)):
        print(f"bubble of rank {rank}: measured {measured.bubble(rank):.3f}, simulated {simulated.bubble(rank):.3f}")
        case = f"{options.model} {options.mesh} {options.schedule}, {options.microbatches} micro-batches, rank {rank}"
        bubbles = measured.bubble(rank), simulated.bubble(rank)
        records.add(Figure(case, "bubble beside the simulated", "of a step", *bubbles, goal=""))


if __name__ == "__main__":
    main()
