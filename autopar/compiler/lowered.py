"""The programs of all ranks as data: what each rank runs, what it moves and why."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import fx, nn

from autopar.errors import ArtifactError
from autopar.ir.layout import Layout
from autopar.ir.mesh import PIPELINE, Mesh, is_in_time
from autopar.ir.ops.measure import moved_type
from autopar.ir.ops.ops import collective_of, is_collective, op
from autopar.ir.ops.ring_ops import axes_of, axis_of, is_ring, messages_of
from autopar.ir.pipeline import Pipeline
from autopar.ir.plan import Decided, Plan
from autopar.ir.program import Program, Record, TensorType, operand_nodes, record
from autopar.ir.text.text import print_program
from autopar.passes.search.earlier_layouts import decided_by

STEP = "step"
WAIT = op("wait")


@dataclass(frozen=True, slots=True)
class Collective:
    """One row of the table of collectives.

    bytes: of the whole value that takes part, on one rank (what an all-reduce reduces, what an all-gather gives).
    shape: its local shape. value: the node. module, source: whose value it is. reason: why it is moved.
    times: how often it runs in a step. Of a pipeline also graph: of whose ranks, those at `place` on the axis pp.
    """

    op: str
    axis: str
    bytes: int
    shape: tuple[int, ...]
    value: str
    module: str
    source: str
    reason: str
    phase: str
    dtype: torch.dtype
    graph: str = STEP
    place: int = 0
    times: int = 1


@dataclass(frozen=True)
class RankProgram:
    """What one rank runs: named graphs and the order in which they run."""

    rank: int
    coord: Mapping[str, int]
    programs: Mapping[str, Program]
    instructions: tuple[str, ...] = (STEP,)

    @functools.cached_property
    def graphs(self) -> Mapping[str, fx.GraphModule]:
        """The graphs by name, as fx GraphModules."""
        return _modules(tuple(self.programs.items()))


def _layouts(program: Program) -> dict[str, Layout]:
    return {entry.name: record(node).layout for node, entry in program.parameters()}


@functools.lru_cache(maxsize=8)
def _modules(programs: tuple[tuple[str, Program], ...]) -> Mapping[str, fx.GraphModule]:
    """Ranks that run the same program share its modules."""
    return {name: fx.GraphModule(nn.Module(), program.graph, class_name=name) for name, program in programs}


@dataclass(frozen=True)
class Lowered:
    """The programs of all ranks, with the program after each pass. Needs no process group and no memory.

    `history` holds (pass, program) from "capture" on; a program loaded from a directory has only the last.
    `pipeline` is what the last program was cut into, if there are stages or micro-batches. sequence: what the costs
    decided for `sequence_parallel="auto"`; None where they were not asked.
    """

    is_read: ClassVar[bool] = False  # of an earlier run, and not compiled in this process

    plan: Plan
    history: tuple[tuple[str, Program], ...]
    pipeline: Pipeline | None = None
    sequence: bool | None = None

    @property
    def mesh(self) -> Mesh:
        return self.plan.mesh

    @property
    def program(self) -> Program:
        """The final program, the same for every rank."""
        return self.history[-1][1]

    @property
    def grouped(self) -> Program | None:
        """The captured program, whose norms take the samples together that this plan says; None if no pass said so."""
        return dict(self.history).get("group")

    @functools.cached_property
    def ranks(self) -> tuple[RankProgram, ...]:
        pipeline, coords = self.pipeline, enumerate(self.mesh.coords())
        if pipeline is None:
            programs = {STEP: self.program}
            return tuple(RankProgram(rank, coord, programs) for rank, coord in coords)
        size = pipeline.flow.size  # ranks that differ on other axes share what they run
        graphs = [pipeline.graphs_of(place) for place in range(size)]
        lists = [tuple(map(str, instructions)) for instructions in pipeline.lists]
        return tuple(
            RankProgram(rank, coord, graphs[place], lists[place])
            for rank, coord in coords
            for place in (coord.get(PIPELINE, 0),)
        )

    @functools.cached_property
    def alike(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that run the same, together: all of them, or those with the same place on the axis pp."""
        found: dict[int, list[int]] = {}
        for rank, coord in enumerate(self.mesh.coords()):
            found.setdefault(coord.get(PIPELINE, 0) if self.pipeline else 0, []).append(rank)
        return tuple(map(tuple, found.values()))

    @functools.cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """All collectives of a step, in order; of a pipeline those of every graph, without its sends and receives."""
        pipeline = self.pipeline
        if pipeline is None:
            return tuple(collectives_of(self.program))
        return tuple(
            replace(row, graph=one.name, place=pipeline.place_of(one.key), times=row.times * one.times)
            for one in pipeline.every_graph()
            for row in collectives_of(one.program)
        )

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layouts of the parameters, by first name."""
        return _layouts(self.program)

    @property
    def searched(self) -> dict[str, Layout]:
        """The layouts in which the step computes with the parameters, before ZeRO."""
        return _layouts(dict(self.history)["propagate"])

    @property
    def decided(self) -> tuple[Hashable, Decided]:
        """The layouts of all values, for programs of the same structure and other sizes: see `Fixed`."""
        return decided_by(dict(self.history)["propagate"], self.plan)

    @property
    def owners(self) -> dict[str, int | None]:
        """The place on "pp" where each parameter is kept, by first name; None for every one of them."""
        if self.pipeline is None or PIPELINE not in self.mesh:
            return dict.fromkeys(self.layouts)
        return {name: self.pipeline.rank_of(name) for name in self.layouts}

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which anything moves, in the same order for every rank."""
        if self.pipeline is None:
            return axes_of(self.program.graph)
        found = [axis for graph in self.pipeline.graphs.values() for axis in axes_of(graph.graph)]
        found += [PIPELINE] if PIPELINE in self.mesh else []
        return tuple(dict.fromkeys(axis for axis in found if not is_in_time(axis)))

    def lines(self) -> list[str]:
        """All that decides what the ranks run."""
        if self.pipeline is None:
            return [self.text()]
        lists = ["\n".join(map(str, instructions)) for instructions in self.pipeline.lists]
        return [*(print_program(one.program) for one in self.pipeline.every_graph()), *lists]

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know: ops without a rule, weights that stay replicated."""
        return self.program.notes

    def with_note(self, note: str) -> Lowered:
        """Add a note to the programs."""
        *before, (name, last) = self.history
        return replace(self, history=(*before, (name, last.with_(notes=(*last.notes, note)))))

    def dump(self, directory: Path) -> None:
        """Write the program after each pass, as `00-capture.txt` and so on."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for i, (name, program) in enumerate(self.history):
                (directory / f"{i:02}-{name}.txt").write_text(print_program(program))
        except OSError as error:
            raise ArtifactError(f"AUTOPAR_DUMP={directory}: cannot write there: {error.strerror}.") from None

    def text(self, rank: int = 0, graph: str | None = None) -> str:
        """A rank's graph, one line a value; all of them, if none is named."""
        programs = self.ranks[rank].programs
        if graph is not None or list(programs) == [STEP]:
            return print_program(programs[graph or STEP])
        return "\n".join(f"graph {name}\n{print_program(program)}" for name, program in programs.items())


def moving_nodes(program: Program) -> Iterator[fx.Node]:
    """The nodes of `collectives_of`, each as often as it has rows there."""
    return (node for node, _ in _moves(program))


def collectives_of(program: Program) -> Iterator[Collective]:
    """The table of a program's collectives, in order; of a ring a row for all messages alike. What micro-batches add up
    to stays where it is and is none."""
    return (row for _, row in _moves(program))


def _moves(program: Program) -> Iterator[tuple[fx.Node, Collective]]:
    for node in program.calls():
        if is_ring(node.target):
            for sent in messages_of(node, program.mesh):
                row = _row("shift", axis_of(node), sent.value, sent.type, record(node))
                yield node, replace(row, times=sent.times)
        elif is_collective(node.target) and node.target is not WAIT and not is_in_time(str(node.args[1])):
            name, operand = collective_of(node.target).name, operand_nodes(node)[0]
            yield node, _row(name, str(node.args[1]), operand, moved_type(node, program.mesh), record(node))


def _row(name: str, axis: str, operand: fx.Node, moved: TensorType, known: Record) -> Collective:
    return Collective(
        op=name,
        axis=axis,
        bytes=moved.bytes_,
        shape=moved.shape,
        value=operand.name,
        module=known.module,
        source=known.source,
        reason=known.reason,
        phase=known.phase,
        dtype=moved.dtype,
    )
