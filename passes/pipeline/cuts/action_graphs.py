"""Cuts a LOCAL graph into the graphs of a pipeline's actions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar.ir.ops.storage import is_view
from autopar.ir.program import Builder, Input, Level, Output, Program, Record, record, set_record
from autopar.passes.pipeline.cuts.when import NodeTimes, When

MADE_BY = "stages"
Key = tuple[int, str]  # (stage or rank, kind of action)


@dataclass(frozen=True, slots=True)
class Places:
    """What the schedule says of stages. ranks: the rank of each. split: gradients of weights apart from those of
    inputs. in_flight: of each stage, how many micro-batches it holds at once."""

    ranks: tuple[int, ...]
    split: bool
    in_flight: Sequence[int]


@dataclass(slots=True)
class Piece:
    """What one graph is to hold: its own nodes, in order, and what leaves it."""

    own: dict[fx.Node, None] = field(default_factory=dict)  # sets of nodes have another order in each process
    leaving: list[tuple[Output, fx.Node]] = field(default_factory=list)

    def leave(self, kind: str, name: str, node: fx.Node) -> None:
        out = Output(kind, name)
        if all(known != out for known, _ in self.leaving):
            self.leaving.append((out, node))


@dataclass(frozen=True, slots=True)
class FromOutside:
    """A value that a piece takes from elsewhere: as what kind of input, and under which name."""

    kind: str
    name: str
    record: Record


def is_copied(node: fx.Node) -> bool:
    """True for what every piece makes for itself, since it costs nothing: views, and numbers of this rank."""
    known = record(node)
    return is_view(node) or not (known.is_tensor or known.several)


def build(program: Program, piece: Piece, outside: dict[fx.Node, FromOutside]) -> Program:
    """The graph of a piece: what leaves it, back to the program's inputs and to what comes from `outside`.

    The nodes keep their order and their names.
    """
    needed = reach((node for _, node in piece.leaving), outside)
    maker = Builder(MADE_BY)
    inputs: list[Input] = []
    entries = dict(program.entries)
    for node in program.nodes:
        if node not in needed:
            continue
        if node in outside:
            given = outside[node]
            maker.value[node] = _placeholder(maker, given.name, given.record)
            inputs.append(Input(given.kind, (given.name,)))
        elif node in entries:
            maker.copy(node)
            inputs.append(entries[node])
    for node in program.nodes:
        if node in needed and node not in maker.value:
            maker.copy(node)
    results = [maker.value[node] for _, node in piece.leaving]
    layouts = tuple(layout for node in results for layout in record(node).layouts if layout is not None)
    maker.output(results, Record((None,), operands=layouts))
    outputs = tuple(out for out, _ in piece.leaving)
    return Program(maker.graph, tuple(inputs), outputs, Level.STAGED, program.mesh)


def _placeholder(maker: Builder, name: str, known: Record) -> fx.Node:
    made = maker.graph.placeholder(name)
    assert made.name == name, (made.name, name)
    set_record(made, known.with_(operands=(), made_by=MADE_BY, reason="", flops=0))
    return made


def reach(nodes: Iterable[fx.Node], outside: Iterable[fx.Node]) -> set[fx.Node]:
    """All that some nodes need, up to what comes from outside (with that)."""
    border = set(outside)
    reach: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in reach:
            reach.add(node)
            if node not in border:
                pending += node.all_input_nodes
    return reach


def is_before(times: NodeTimes, node: fx.Node) -> bool:
    return node.op != "placeholder" and times.of[node] is When.INVARIANT
