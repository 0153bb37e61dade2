"""What the executor of a pipeline costs: microseconds an instruction, without the graphs that it runs.

    timeout 100 .venv/bin/python -m benchmarks.instructions [--pp 4] [--microbatches 16] [--profile /tmp/x.prof]

All ranks live in one process, on a virtual mesh. First the graphs of a very small model are run; then, in their
place, functions that return at once what the graphs returned. What such a step takes is the overhead of runs, sends
and receives, with the sums over micro-batches and the copies that stand for transfers. Goal: at most 20 us.
"""

from __future__ import annotations

import argparse
import cProfile
import statistics
import time
from collections.abc import Callable, Generator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.ir.mesh import MICROBATCH, PIPELINE
from autopar.ir.program import Input
from autopar.runtime.executor.executor import Code, Executable
from autopar.runtime.executor.inputs import StepInputs, inputs_of, slots_of
from autopar.runtime.pipeline.microbatches import ExecutorGraph
from autopar.runtime.pipeline.run_pipeline import RankCode, compile_rank
from autopar.runtime.ranks.virtual import VirtualMesh
from benchmarks.records import Figure, Records, record_option

WIDTH, ROUNDS = 4, 50


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def instantly(code: Code, inputs: list[Any]) -> Code:
    """The same results without the work."""
    steps = code.function(list(inputs), None)
    try:
        next(steps)
        raise RuntimeError("the graphs of this benchmark ask for nothing")
    except StopIteration as done:
        outputs = done.value

    def function(items: list[Any], observe: Any) -> Generator[Any, Any, Any]:
        items.clear()
        return outputs
        yield

    return replace(code, function=function)


def recorded(executable: Executable, seen: dict[Executable, list[Any]]) -> Callable[..., Any]:
    """The graph's function, which keeps the inputs of its first call."""
    function = executable.code.function

    def record(items: list[Any], observe: Any) -> Any:
        seen.setdefault(executable, list(items))
        return function(items, observe)

    return record


def given(compiled: autopar.Compiled, model: nn.Module, x: Tensor) -> list[StepInputs]:
    """What each rank of the pipeline starts from."""
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    parts = x.chunk(compiled.plan.microbatches)

    def value_of(entry: Input, layout: Any, coord: Any) -> Tensor:
        return parts[coord[MICROBATCH]] if entry.kind == "batch" else tensors[entry.name]

    program, pipeline = compiled.program, compiled.pipeline
    return [inputs_of(slots_of(program, pipeline, coord), value_of) for coord in compiled.mesh.coords()]


def step_us(mesh: VirtualMesh, codes: list[RankCode], starts: list[StepInputs]) -> float:
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        mesh.run_pipeline(codes, starts)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--profile", help="write a cProfile of the steps without work here")
    record_option(parser)
    args = parser.parse_args()
    records = Records("instructions", args.record)
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2 * args.pp)))
    x = torch.randn(args.microbatches, WIDTH)
    compiled = autopar.compile(model, f"{PIPELINE}={args.pp}", loss_fn=loss_fn, batch=x, microbatches=args.microbatches)
    assert compiled.pipeline is not None
    codes = [compile_rank(compiled.pipeline, rank) for rank in range(args.pp)]
    starts, mesh = given(compiled, model, x), VirtualMesh(compiled.mesh)
    lists = compiled.pipeline.lists
    count = sum(map(len, lists))
    runs = sum(line.op == "RUN" for lines in lists for line in lines)
    print(f"{count} instructions of {args.pp} ranks: {runs} runs, {(count - runs) // 2} transfers")
    print(f"  the whole step          {step_us(mesh, codes, starts) / count:6.1f} us an instruction")
    seen: dict[Executable, list[Any]] = {}
    graphs = [graph for code in codes for graph in code.graphs.values()]
    executables = [graph.executable for graph in graphs if isinstance(graph, ExecutorGraph)]
    for executable in executables:
        executable.code = replace(executable.code, function=recorded(executable, seen))
    mesh.run_pipeline(codes, starts)
    for executable, inputs in seen.items():
        executable.code = instantly(executable.code, inputs)
    profile = cProfile.Profile() if args.profile else None
    with profile or nullcontext():
        bare = step_us(mesh, codes, starts) / count
        print(f"  without the graphs      {bare:6.1f} us an instruction")
    case = f"pp={args.pp}, {args.microbatches} micro-batches on the virtual mesh"
    records.add(Figure(case, "CPU time an instruction, without the graphs", "us", bare))
    if profile:
        profile.dump_stats(args.profile)


if __name__ == "__main__":
    main()
