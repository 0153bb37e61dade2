"""What `autopar inspect` shows of a rank of a pipeline: its instructions, its transfers, the bytes that it holds.

`place` is the rank's coordinate on the axis pp; ranks that differ on other axes show the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.compiler.lowered import STEP, Lowered
from autopar.ir.mesh import PIPELINE
from autopar.ir.ops.measure import human, local_bytes
from autopar.ir.ops.storage import root_of
from autopar.ir.pipeline import Pipeline, graph_name
from autopar.ir.program import record
from autopar.ir.schedule import IN, OUT, Action
from autopar.ir.text.text_tables import table_text
from autopar.passes.schedules import in_flight
from autopar.report.inspection import Memory, bytes_text, collectives_text, memory_of

_HEAD, _TAIL = 24, 8  # the instructions shown of a long list
_HOST_WAYS = {OUT: "into the host's memory", IN: "back from the host's memory, for it"}


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a rank sends to or receives from a peer, `times` in a step. bytes: of one time."""

    op: str
    graph: str
    peer: int
    bytes: int
    values: tuple[str, ...]
    times: int


def rank_texts(compiled: Lowered, rank: int, graph: str | None, full: bool) -> Iterator[tuple[str, str]]:
    """All that `inspect` says of a rank, as titles and texts."""
    pipeline, coord = compiled.pipeline, compiled.mesh.coord(rank)
    where = ",".join(f"{axis}={place}" for axis, place in coord.items())
    title = f"rank {rank} ({where}) of mesh {compiled.mesh}, "
    if pipeline is None:
        yield f"{title}graph '{STEP}'", compiled.text(rank)
    else:
        place = coord.get(PIPELINE, 0)
        stages = pipeline.stages_of(place)
        mine = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))} of {pipeline.flow.stages}"
        title += f"{mine}, schedule '{pipeline.schedule}', {pipeline.parts_text}"
        yield title, f"graph {graph}\n{compiled.text(rank, graph)}" if graph else compiled.text(rank)
        yield "\ninstructions (ranks as on the axis pp)", instructions_text(pipeline, place, full)
    yield "\ncollectives of a step", collectives_text(compiled, rank, graph)
    if pipeline is not None:
        yield "\ntransfers of a step", transfers_text(compiled, rank)
    yield f"\nbytes on {'each' if pipeline is None else 'this'} rank", memory_text(compiled, rank)


def instructions_text(pipeline: Pipeline, place: int, full: bool = False) -> str:
    """The instruction list of a rank, a line each; the middle of a long one is left out unless it is asked for."""
    lines = [f"{i:5}  {instruction}" for i, instruction in enumerate(pipeline.lists[place])]
    left_out = len(lines) - _HEAD - _TAIL
    if full or left_out <= 1:
        return "\n".join(lines)
    return "\n".join([*lines[:_HEAD], f"  ...  {left_out} more: --full shows them", *lines[-_TAIL:]])


def transfers_of(pipeline: Pipeline, place: int) -> tuple[Transfer, ...]:
    """What a rank sends and receives in a step, in the order of the first time."""
    found: Counter[tuple[str, str, int, int, tuple[str, ...]]] = Counter()
    for line in pipeline.lists[place]:
        if line.op != "RUN":
            bytes_ = sum(type_.bytes_ for type_ in line.types)
            name = graph_name(line.action.stage, line.action.kind, pipeline.length_of(line.action))
            found[line.op, name, line.peer, bytes_, line.values] += 1
    return tuple(Transfer(*key, times) for key, times in found.items())


def transfers_text(compiled: Lowered, rank: int) -> str:
    """The transfers of a rank, a line for those that are alike."""
    assert compiled.pipeline is not None
    coord = compiled.mesh.coord(rank)
    rows = []
    for row in transfers_of(compiled.pipeline, coord.get(PIPELINE, 0)):
        if row.op in _HOST_WAYS:
            way = _HOST_WAYS[row.op]
        else:
            peer = compiled.mesh.rank({**coord, PIPELINE: row.peer})
            way = f"{'send to' if row.op == 'SEND' else 'receive from'} pp={row.peer} (rank {peer})"
        values = ", ".join(f"%{name}" for name in row.values)
        rows.append((row.graph, f"{row.times}x", way, human(row.bytes), values))
    return table_text(("after", "times", "transfer", "bytes", "values"), rows) if rows else "none"


def saved_bytes(pipeline: Pipeline, stage: int, slice_: int = 0) -> int:
    """What a micro-batch (or one slice of it) leaves on a stage between its forward and its backward pass; memory that
    several values lie in counts once, parameters, the batch and what waits in the host's memory not at all."""
    forward = Action(stage, "F", slice_)
    works, types = (
        pipeline.flow.works,
        {**pipeline.flow.types, **pipeline.flow.sized.get(pipeline.flow.length_of(forward), {})},
    )
    graph = pipeline.graph(forward)
    made = {out.name: node for out, node in zip(graph.outputs, graph.results, strict=True) if out.kind == "saved"}
    entries = dict(graph.entries)
    elsewhere = {name for (_, kind), work in works.items() if kind == "F" for name in work.writes}
    sizes: dict[str, int] = {}
    for name in (name for kind in "BIW" if (stage, kind) in works for name in works[stage, kind].reads):
        node = made.get(name)
        if node is None:
            if name in elsewhere:  # came from another stage's forward pass
                sizes[name] = types[name].bytes_
            continue
        root = root_of(node)
        if record(node).tier:
            continue
        if root.op == "call_function":
            sizes[root.name] = local_bytes(root, graph.mesh)
        elif entries[root].kind == "saved":
            sizes[entries[root].name] = types[entries[root].name].bytes_
    return sum(sizes.values())


def memory_of_rank(compiled: Lowered, place: int) -> Memory:
    """The bytes on a rank: parameters and gradients of its stages, and activations where there are most of them."""
    pipeline, program = compiled.pipeline, compiled.program
    assert pipeline is not None
    sizes = {"parameter": 0, "buffer": 0, "gradient": 0}
    trained = {out.name for out in program.outputs if out.kind == "gradient"}
    for node, entry in program.entries:
        if entry.kind == "buffer":
            sizes["buffer"] += local_bytes(node, program.mesh)
        elif entry.kind == "parameter" and pipeline.rank_of(entry.name) == place:
            sizes["parameter"] += local_bytes(node, program.mesh)
            sizes["gradient"] += local_bytes(node, program.mesh) if entry.name in trained else 0
    return Memory(sizes["parameter"], sizes["gradient"], sizes["buffer"], max(_held(pipeline, place), default=0))


def _held(pipeline: Pipeline, place: int) -> Iterator[int]:
    """The bytes of activations after each action of a rank."""
    slices = pipeline.flow.slices
    saved = {(stage, i): saved_bytes(pipeline, stage, i) for stage in pipeline.stages_of(place) for i in range(slices)}
    held = 0
    for line in pipeline.lists[place]:
        for run in sorted(line.runs, key=lambda run: run.action.kind != "F"):  # of a pair both are there at once
            action = run.action
            if action.kind in "FBW":
                held += saved[action.stage, action.microbatch % slices] * (1 if action.kind == "F" else -1)
                yield held


def memory_text(compiled: Lowered, rank: int = 0) -> str:
    """The bytes that a rank holds."""
    if compiled.pipeline is None:
        return bytes_text(memory_of(compiled.program))
    place = compiled.mesh.coord(rank).get(PIPELINE, 0)
    return f"{bytes_text(memory_of_rank(compiled, place))}\n{stages_text(compiled.pipeline, place)}"


def stages_text(pipeline: Pipeline, place: int) -> str:
    """How the activations of a rank come about, a line a stage."""
    lines = []
    for stage in pipeline.stages_of(place):
        most = in_flight(pipeline.lists[place], stage)
        micro = f"{most} micro-batch{'es' * (most != 1)} at once"
        if pipeline.flow.slices > 1:
            micro = f"{most} slice{'s' * (most != 1)} ({most / pipeline.flow.slices:.3g} micro-batches) at once"
        sizes = [saved_bytes(pipeline, stage, i) for i in range(pipeline.flow.slices)]
        lines.append(
            f"  stage {stage}: {micro}, {' to '.join(dict.fromkeys(map(human, (min(sizes), max(sizes)))))} each"
        )
    return "\n".join(lines)
