"""Count the buffers of the host's memory that a step of a rank needs at once, from its program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import fx

from autopar.ir.ops.measure import local_bytes
from autopar.ir.ops.ops import AWAITED, COPIES, TO_DEVICE, TO_HOST
from autopar.ir.pipeline import Pipeline
from autopar.ir.program import Program
from autopar.ir.schedule import IN, OUT


def stays(node: fx.Node) -> bool:
    """True for a copy into memory that the user has from the end of the step on, and no buffer."""
    return node.target is TO_HOST and len(node.args) > 1 and bool(node.args[1])


def moves_to_host(program: Program, pipeline: Pipeline | None = None) -> bool:
    """True for a step in which values wait in the host's memory."""
    if pipeline is not None and any(line.is_copy for lines in pipeline.lists for line in lines):
        return True
    graphs = [program] if pipeline is None else [one.program for one in pipeline.every_graph()]
    return any(node.target in COPIES for graph in graphs for node in graph.calls())


def host_buffers(program: Program, pipeline: Pipeline | None, place: int) -> dict[int, int]:
    """How many buffers of each size are in use at most, on the rank at a place of the pipeline."""
    held, most = Counter[int](), Counter[int]()
    for size, more in _changes(program, pipeline, place):
        held[size] += more
        most[size] = max(most[size], held[size])
    return {size: count for size, count in most.items() if count}


def host_bytes(program: Program, pipeline: Pipeline | None, place: int) -> int:
    """The bytes of these buffers: what a rank takes of the host's memory."""
    return sum(size * count for size, count in host_buffers(program, pipeline, place).items())


def _changes(program: Program, pipeline: Pipeline | None, place: int) -> Iterator[tuple[int, int]]:
    if pipeline is None:
        yield from _of_graph(program, ())
        return
    coming: dict[tuple[str, int], int] = {}  # what comes back, with the bytes of a buffer that is free then
    for line in pipeline.lists[place]:
        reads = [key for run in line.runs for key in pipeline.flow.reads_of(run.action)]
        yield from ((coming.pop(key), -1) for key in reads if key in coming)
        if line.is_copy:
            copies, sizes = pipeline.flow.copies(line), [type_.bytes_ for type_ in line.types]
            yield from ((size, 1) for size in sizes if line.op == OUT)
            dying = (name for name in line.values if copies[name] in line.frees and line.op == IN)
            size_of = dict(zip(line.values, sizes, strict=True))
            coming |= {(name, line.action.microbatch): size_of[name] for name in dying}
        changes = [one for run in line.runs for one in _of_graph(pipeline.graph(run.action), run.frees)]
        # of a pair, at worst, all is taken before any of it is free again
        yield from changes if line.beside is None else sorted(changes, key=lambda change: -change[1])


def _of_graph(program: Program, frees: Iterable[str]) -> Iterator[tuple[int, int]]:
    """(bytes, 1) where a buffer is taken, (bytes, -1) where it is free again: at the wait of its last load, of a value
    of another graph if it dies with this one."""
    last: dict[fx.Node, fx.Node] = {}
    dying = {node for node, entry in program.entries if entry.kind == "saved" and entry.name in set(frees)}
    leaving, given = set(program.results), {node for node, _ in program.parameters()}
    for node in program.calls():
        if node.target is TO_DEVICE:
            (source,) = node.all_input_nodes
            if source not in leaving and source not in given and (source.op != "placeholder" or source in dying):
                last[source] = node
    ends = set(last.values())
    for node in program.calls():
        if node.target is TO_HOST and not stays(node):
            yield local_bytes(node, program.mesh), 1
        elif node.target is AWAITED and node.all_input_nodes[0] in ends:
            yield local_bytes(node, program.mesh), -1
