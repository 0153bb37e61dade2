"""What `autopar inspect --memory` and `--formula` print."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from autopar.compiler.lowered import Lowered
from autopar.errors import AutoparError
from autopar.ir.mesh import PIPELINE, Mesh
from autopar.ir.options import StepOptions
from autopar.job import Job
from autopar.planning.space.batches import resized, sizes_of
from autopar.report.memory.estimate import memory_report
from autopar.report.memory.formula import Sizes, activation_formulas, states_formula
from autopar.report.memory.report import ranks_text
from autopar.report.memory.saved import saved_text
from autopar.report.memory.simulate_rank import GPU_DEVICE, OptimizerMaker
from autopar.report.memory.within_memory import compile_step


def memory_texts(compiled: Lowered, rank: int, optimizer: OptimizerMaker | None, device: str | None) -> Iterator[str]:
    """The report of a rank, and what is saved for the backward pass and computed again; of a pipeline before it a line
    for each of its ranks that differ from it on pp alone."""
    chosen = memory_report(compiled, rank, optimizer, device)
    if PIPELINE in compiled.mesh:
        coord = compiled.mesh.coord(rank)
        others = [compiled.mesh.rank({**coord, PIPELINE: place}) for place in range(compiled.mesh[PIPELINE])]
        reports = [chosen if other == rank else memory_report(compiled, other, optimizer, device) for other in others]
        yield ranks_text(reports) + "\n"
    yield str(chosen)
    if any(out.kind == "gradient" for out in compiled.program.outputs):
        yield "\n" + saved_text(compiled.program)


def formula_texts(
    job: Job, mesh: Mesh, options: StepOptions, compiled: Lowered, rank: int, device: str | None
) -> Iterator[str]:
    """Bytes of states a parameter, and what a layer keeps for the backward pass as a polynomial in the batch's sizes.

    b: the rows of the whole batch; s: the second dim of its token ids. The step is compiled at a few other sizes.
    """
    place = device or GPU_DEVICE
    optimizer = job.optimizer or torch.optim.AdamW
    yield f"on rank {rank} of mesh {mesh}, on {place}:"
    yield f"  {states_formula(compiled, rank, optimizer, place)}"
    example = sizes_of(job.batch)
    if "b" not in example:
        yield "  activations: the batch has no tensor with a dim, so there is nothing to vary."
        return
    build = _builder(job, mesh, options)
    attempts = [_rows_and_sequence(example), _rows(example)] if "s" in example else [_rows(example)]
    for symbols, monomials, points in attempts:
        try:
            found = activation_formulas(build, symbols, monomials, points, rank, place)
        except AutoparError as error:
            yield f"  activations in {' and '.join(symbols)}: {str(error).splitlines()[0]}"
            continue
        shown = ", ".join(f"{symbol} = {example[symbol]}" for symbol in symbols)
        yield f"  activations kept for the backward pass, at {shown}:"
        yield from (f"    {formula}" for formula in found)
        return


def _rows(example: Sizes) -> tuple[str, list[str], list[Sizes]]:
    b = example["b"]
    return "b", ["b", "1"], [{"b": 2 * b}, {"b": 3 * b}, {"b": b}]


def _rows_and_sequence(example: Sizes) -> tuple[str, list[str], list[Sizes]]:
    """Shorter sequences, since a table of positions may end with the example's."""
    b, s = example["b"], example["s"]
    lengths = [length for length in (s // 4, s // 2) if length]
    points: list[Sizes] = [{"b": rows, "s": length} for rows in (b, 2 * b) for length in lengths]
    points += [{"b": 3 * b, "s": s // 2}, {"b": 2 * b, "s": s}, {"b": b, "s": s}]
    return "bs", ["b*s**2", "b*s", "b", "s**2", "s", "1"], points


def _builder(job: Job, mesh: Mesh, options: StepOptions) -> Callable[[Sizes], Lowered]:
    def build(sizes: Mapping[str, int]) -> Lowered:
        args, kwargs = resized(job.batch, sizes)
        return compile_step(job.model, job.loss_fn, args, kwargs, mesh, options)[1]

    return build
