"""The graphs of one rank of a pipeline as code that Inductor writes, run by the list of instructions as they stand.

A graph is compiled once for all micro-batches: which one it is (offsets of random draws, pieces of whole values) is a
number that it is given. Of the slices of a sequence each has code of its own, since attention sees more keys in each.
What micro-batches add up to goes through the graph: a total comes in, and leaves with this part added to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autopar.errors import CompileError
from autopar.ir.mesh import MICROBATCH, PIPELINE, SLICE, Mesh
from autopar.ir.ops.measure import local_type
from autopar.ir.ops.ops import op
from autopar.ir.pipeline import Graph, Pipeline
from autopar.ir.program import Output, Program, TensorType
from autopar.ir.schedule import ONCE_KINDS, Action
from autopar.runtime.compilers.functional import FunctionalCollectives
from autopar.runtime.compilers.inductor import InductorCode, InductorWriter, where
from autopar.runtime.compilers.rank_trace import Passing, RankTrace
from autopar.runtime.executor.executor import Outputs, schema_arguments
from autopar.runtime.pipeline.compiled_instructions import Place, RankCode, code_of, graphs_at, on_executor
from autopar.runtime.pipeline.microbatches import GraphTurn, StageGraph
from autopar.runtime.pipeline.slices import wide
from autopar.runtime.ranks.process_groups import Group
from autopar.torch_compat import FakeTensorMode, holds_for, symbolic_number

_EARLIER, _LATER = op("earlier"), op("later")
_INNER = ("saved", "step", "part")  # kinds of values that stay on a rank


@dataclass(frozen=True, slots=True)
class SliceCode:
    """The code of a graph for one slice of a sequence. Behind its inputs and totals it takes the `pieces` of earlier
    slices, the `rests` of later ones, and the micro-batch; behind its outputs it gives `kept` and `left`."""

    code: InductorCode
    pieces: tuple[str, ...] = ()
    rests: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    def run(self, values: list[Any], turn: GraphTurn, place: int | None) -> Outputs:
        """Run it on a micro-batch, with what its slices carry. place: of the micro-batch; None if it asks for none."""
        carried, microbatch = turn.carried, turn.microbatch
        values += [piece for key in self.pieces for piece in carried.before(key, microbatch)]
        values += [carried.rest(key, microbatch) for key in self.rests]
        values += [] if place is None else [place]
        outputs = self.code.run(values)
        own = len(outputs) - len(self.kept) - len(self.left)
        behind = dict(zip((*self.kept, *self.left), outputs[own:], strict=True))
        for key in self.kept:
            carried.keep(key, microbatch, behind[key])
        for key in self.left:
            carried.leave(key, microbatch, behind[key])
        return outputs[:own]


@dataclass(frozen=True, slots=True)
class InductorGraph:
    """A graph of a pipeline. totals: what its parts are added to, by name. variants: by slice, and by micro-batch where
    the graph is another for each."""

    totals: Mapping[str, TensorType]
    variants: Mapping[tuple[int, int | None], SliceCode]
    is_numbered: bool
    device: torch.device

    @property
    def source(self) -> str:
        return "\n".join(variant.code.source for variant in self.variants.values())

    @property
    def collectives(self) -> tuple[str, ...]:
        return tuple(name for variant in self.variants.values() for name in variant.code.collectives)

    @property
    def sums(self) -> tuple[str, ...]:
        return tuple(self.totals)

    def steps(self, items: list[Any], turn: GraphTurn) -> Generator[Any, Any, Outputs]:
        coord = turn.time.coord(max(turn.microbatch, 0))
        slice_, place = coord.get(SLICE, 0), coord.get(MICROBATCH, 0)
        variant = self.variants.get((slice_, None)) or self.variants[slice_, place]
        first = len(items) - len(self.totals)
        for i, type_ in enumerate(self.totals.values(), first):
            if items[i] is None:
                items[i] = torch.zeros(type_.shape, dtype=type_.dtype, device=self.device)
        return variant.run(items, turn, place if self.is_numbered else None)
        yield  # it asks nobody: its collectives are in the code


def compile_stages(
    pipeline: Pipeline, rank: int, groups: Mapping[str, Group], device: torch.device
) -> tuple[RankCode, Mapping[str, tuple[str, ...]]]:
    """The list of a rank over compiled graphs, and the collectives of each graph in the order of its code. Moves no
    data. Raises CompileError if Inductor fails."""
    place = pipeline.mesh.coord(rank).get(PIPELINE, 0)
    graphs: dict[Place, StageGraph] = {}
    compiler, collectives = _Compiler(pipeline, rank, groups, device), {}
    for one in sorted(graphs_at(pipeline, place), key=lambda one: _order(one.key)):
        if one.key[1] == "C":
            graphs[one.place] = on_executor(pipeline, one, device=device)
        else:
            graphs[one.place] = made = compiler.compile(one)
            collectives[one.name] = made.collectives
    return code_of(pipeline, place, graphs), collectives


def _order(key: tuple[int, str]) -> tuple[int, int]:
    """A graph after those that make what it reads."""
    stage, kind = key
    return "CPFMBIWE".index(kind), stage if kind == "F" else -stage


class _Compiler:
    """Compiles the graphs of a rank, one after the other. given: the strides of what the graphs so far give, by name
    and shape (slices differ in length): those who read it take it as it lies."""

    def __init__(self, pipeline: Pipeline, rank: int, groups: Mapping[str, Group], device: torch.device) -> None:
        self.pipeline, self.groups, self.device, self.writer = pipeline, groups, device, InductorWriter(rank)
        coord = pipeline.mesh.coord(rank)
        self.received = {
            name for line in pipeline.lists[coord.get(PIPELINE, 0)] if line.op == "RECV" for name in line.values
        }
        self.coord = {axis: place for axis, place in coord.items() if axis != PIPELINE}
        self.given: dict[tuple[str, torch.Size], tuple[int, ...]] = {}

    def compile(self, one: Graph) -> InductorGraph:
        """Write the code of a graph, for each of its slices."""
        program, (stage, kind) = one.program, one.key
        time = {} if kind in ONCE_KINDS else dict(self.pipeline.time.axes)
        lengths = self.pipeline.flow.lengths or (1,) * time.get(SLICE, 1)
        graph = _Graph(program, one.name, _totals(program, self.pipeline), time, lengths)
        mine = [s for s in range(graph.slices) if self.pipeline.length_of(Action(stage, kind, s)) == one.length]
        variants: dict[tuple[int, int | None], SliceCode] = {}
        for slice_ in mine if kind == "F" else reversed(mine):
            try:
                variant = self._variant(graph, slice_, None)
            except CompileError:  # Inductor asks for the number where it cannot: the piece of a value of all of them
                if graph.microbatches == 1:
                    raise
                variant = None
            if variant is not None and variant.code.is_general:
                variants[slice_, None] = variant
            else:
                each = range(graph.microbatches)
                variants |= {(slice_, number): self._variant(graph, slice_, number) for number in each}
        return InductorGraph(graph.totals, variants, graph.microbatches > 1, self.device)

    def _variant(self, graph: _Graph, slice_: int, number: int | None) -> SliceCode:
        """The code for a slice; of micro-batch `number`, or of any if that is None."""
        env, program = ShapeEnv(), graph.program
        with FakeTensorMode(shape_env=env), torch.no_grad():
            count = graph.microbatches
            symbols = [symbolic_number(env, MICROBATCH, count)] if count > 1 else []
            trace = _Trace(self, graph, slice_, number)
            code, traced = self.writer.write(
                trace, [*self._inputs(graph, slice_), *symbols], where(program, graph.name, self.writer.rank),
                lambda: all(holds_for(env, symbol, place) for symbol in symbols for place in range(count)),
            )  # fmt: skip
        self._learn((*map(_name_of, program.outputs), *trace.kept, *trace.left), traced)
        pieces = tuple(graph.pieces(slice_)) if slice_ else ()
        return SliceCode(code, pieces, tuple(graph.rests(slice_)), trace.kept, trace.left)

    def _inputs(self, graph: _Graph, slice_: int) -> Iterator[torch.Tensor]:
        """What a graph is given, in its strides."""
        for node, entry in graph.program.entries:
            name = entry.name if entry.kind in _INNER else ""
            yield self._like(name, local_type(node, graph.program.mesh))
        yield from (self._like("", type_) for type_ in graph.totals.values())
        for key, types in graph.pieces(slice_).items():
            yield from (self._like(key, type_) for type_ in types)
        yield from (self._like(key, type_) for key, type_ in graph.rests(slice_).items())

    def _like(self, name: str, type_: TensorType) -> torch.Tensor:
        x = torch.empty(type_.shape, dtype=type_.dtype, device=self.device)
        stride = self.given.get((name, x.shape))
        if stride is None:  # from elsewhere, or the whole of what was given in parts
            return x
        return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device)

    def _learn(self, names: Sequence[str], traced: fx.GraphModule) -> None:
        """How what a graph gives lies. What other ranks send is dense."""
        results: Any = traced.graph.output_node().args[0]
        for name, result in zip(names, results, strict=True):
            if isinstance(result, fx.Node) and name not in self.received:
                self.given[name, result.meta["val"].shape] = result.meta["val"].stride()


def _name_of(out: Output) -> str:
    """The name under which other graphs of a rank read a result; nothing for what leaves the step."""
    return out.name if out.kind in _INNER else ""


@dataclass(frozen=True)
class _Graph:
    """A graph to compile. totals: what its parts are added to. time: the sizes of the axes in time; none of a graph
    that runs once. lengths: of all slices of a sequence, or how they compare."""

    program: Program
    name: str
    totals: Mapping[str, TensorType]
    time: Mapping[str, int]
    lengths: Sequence[int]

    @property
    def microbatches(self) -> int:
        return self.time.get(MICROBATCH, 1)

    @property
    def slices(self) -> int:
        return self.time.get(SLICE, 1)

    def pieces(self, slice_: int) -> dict[str, list[TensorType]]:
        """The types of the pieces of the slices before one, of each value of which it reads those."""
        pieces = {}
        for node in self.program.calls():
            if node.target == _EARLIER:
                x, _, dim, _, key = schema_arguments(node)
                own = local_type(x, self.program.mesh)
                pieces[key] = [self._sized(own, dim, slice_, length) for length in self.lengths[:slice_]]
        return pieces

    def _sized(self, piece: TensorType, dim: int, slice_: int, length: int) -> TensorType:
        """The type of a piece of so many positions, of that of a slice."""
        size = piece.shape[dim] * length // self.lengths[slice_]
        return TensorType((*piece.shape[:dim], size, *piece.shape[dim + 1 :]), piece.dtype)

    def rests(self, slice_: int) -> dict[str, TensorType]:
        """The type of what later slices left, of each sum; nothing for the last slice."""
        if slice_ == self.slices - 1:
            return {}
        tensor_types = {}
        for node in self.program.calls():
            if node.target == _LATER:
                _, _, dim, _, key = schema_arguments(node)
                piece = self._sized(local_type(node, self.program.mesh), dim, slice_, sum(self.lengths[: slice_ + 1]))
                tensor_types[key] = TensorType(piece.shape, wide(piece.dtype))
        return tensor_types


def _totals(program: Program, pipeline: Pipeline) -> dict[str, TensorType]:
    """The sums over micro-batches to which a graph adds, by name."""
    return {
        out.name: local_type(node, program.mesh)
        for node, out in program.leaving
        if out.kind == "part" and node is not None and pipeline.reductions[out.name].is_sum(pipeline.time)
    }


class _Trace:
    """What is traced of a graph: its values for one slice, with the totals. kept, left: of the last trace, what is
    behind its outputs."""

    kept: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    def __init__(self, compiler: _Compiler, graph: _Graph, slice_: int, number: int | None) -> None:
        self._compiler, self._graph, self._slice = compiler, graph, slice_
        self._number = 0 if graph.microbatches == 1 else number

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        graph, program, given = self._graph, self._graph.program, iter(values)
        own = list(itertools.islice(given, len(program.placeholders)))
        totals = {name: next(given) for name in graph.totals}
        pieces = {key: list(itertools.islice(given, self._slice)) for key in graph.pieces(self._slice)}
        rests = {key: next(given) for key in graph.rests(self._slice)}
        number = next(given) if self._number is None else self._number
        passing = Passing(self._slice, graph.lengths, pieces, rests)
        outputs = self._rank_trace(passing, number).run(*own)
        self.kept, self.left = tuple(passing.kept), tuple(passing.left)
        parts = zip(program.outputs, outputs, strict=True)
        added = [totals[out.name] + part if out.name in totals else part for out, part in parts]
        return *added, *passing.kept.values(), *passing.left.values()

    def _rank_trace(self, passing: Passing, number: Any) -> RankTrace:
        compiler, program = self._compiler, self._graph.program
        # a graph of one length has the mesh of slices alike; where a slice begins, only the lengths of all tell
        mesh = Mesh(program.mesh.axes, compiler.pipeline.flow.lengths) if SLICE in program.mesh else program.mesh
        coord = {**compiler.coord, MICROBATCH: number, SLICE: self._slice}
        collectives = FunctionalCollectives(mesh, coord, compiler.groups)
        return RankTrace(program, collectives, compiler.device, passing)
