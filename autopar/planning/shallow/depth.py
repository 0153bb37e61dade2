"""A captured step with fewer of its equal layers: what one layer more costs is known from two depths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, NamedTuple

from torch import fx

from autopar.ir.modules import layer_of
from autopar.ir.ops.ops import key_place, op
from autopar.ir.program import AS_PARAMETER, BUFFERS, Builder, Input, Program, erase_unused, record
from autopar.planning.shallow.further_layers import FurtherLayers

MADE_BY = "depth"
WAIT = op("wait")
LEAST = 2  # equal layers that stay: the first reads what stands before them, the last gives on what comes from behind


class Stack(NamedTuple):
    """Equal layers of a list. layers: how many the whole has; border: two neighbours of those that stay, of which the
    second is like all in between."""

    layers: int
    border: tuple[str, str]

    @property
    def three(self) -> tuple[str, str, str]:
        """The paths of the first three."""
        path, _, number = self.border[1].rpartition(".")
        return *self.border, f"{path}.{int(number) + 1}" if path else str(int(number) + 1)


@dataclass(frozen=True, slots=True)
class Shallow:
    """A program with `kept` of the `layers` equal ones that the whole has. What costs the same for each of them is
    linear in their number: cost(kept) + (layers - kept) * (cost(kept + 1) - cost(kept)). others: equal layers of
    further lists, of which it has `kept` too."""

    program: Program
    kept: int
    layers: int
    border: tuple[str, str] = ("", "")  # as of a `Stack`
    others: tuple[Stack, ...] = ()

    @property
    def middle(self) -> str:
        """A layer that has one of its like on both sides; "" if the program has none, or keeps two alone."""
        return self.border[1] if self.kept > LEAST else ""

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """All equal layers; those of `layers` are the first."""
        return Stack(self.layers, self.border), *self.others

    @property
    def lists(self) -> tuple[str, ...]:
        """The paths of the lists of all equal layers."""
        return tuple(stack.border[0].rpartition(".")[0] for stack in self.stacks if stack.layers)

    def of_whole(self, whole: Shallow) -> Shallow:
        """Take the program for that of another model, whose lists have as many layers as `whole` says."""
        pairs = zip(self.others, whole.others, strict=True)
        others = tuple(stack._replace(layers=known.layers) for stack, known in pairs)
        return replace(self, layers=whole.layers, others=others)


def shallow(program: Program, kept: int, lists: Sequence[str] = ()) -> Shallow | None:
    """A CAPTURED program with only `kept` (2 or more) of its equal layers; None where no more are found. lists: the
    paths of the lists, if they are known: else that whose layers have the most calls comes first. With two kept the
    others stay whole.

    Layers are equal if their calls are, one by one, with the same operands: of the same layer, of the one before or
    behind it, or one and the same from outside or from a layer that all of them read (the first one of T5 makes the
    position bias of all); the first one may read what stands before all layers, and the last one's backward pass what
    stands behind. In place of the values of layers that are left out stand those of the equal
    layer before them, of the backward pass those of the one behind: the program is a step of a less deep model. A value
    of theirs that anything else reads (a list of all hidden states) is in the way.
    """
    assert kept >= LEAST
    stacks: list[Stack] = []
    while not stacks or (kept > LEAST and (not lists or len(stacks) < len(lists))):
        found = _cut(program, kept, lists[len(stacks) :][:1])
        if found is None:
            break
        program, stack = found
        stacks.append(stack)
    return Shallow(program, kept, *stacks[0], tuple(stacks[1:])) if stacks else None


def _cut(program: Program, kept: int, lists: Sequence[str]) -> tuple[Program, Stack] | None:
    """The program with fewer layers of one list, one of `lists` if there are such."""
    layers = _Layers(program)
    for run in sorted(_runs_of(layers), key=lambda run: -len(run) * len(run[0].calls)):
        if len(run) > kept and (not lists or run[0].list_ in lists):
            gone = run[1 : 1 + len(run) - kept]
            made = _without(program, run[0], gone, run[1 + len(gone)])
            if made is not None:
                return made, Stack(len(run), (run[0].path, run[1 + len(gone)].path))
    return None


@dataclass(frozen=True, slots=True)
class Rest:
    """What a program has beside one layer, in whatever it was made into. path: of that layer; "" leaves nothing out.
    owners: the layers of captured calls, by the names that `Record.origin` keeps. first: the first of the equal layers.
    equal: those of them that the program has. entry: the (module, source line) of the forward calls before the first.
    others: equal layers of further lists, which the program has too few of.
    """

    path: str
    owners: Mapping[str, str]
    first: str = ""
    equal: frozenset[str] = frozenset()
    entry: frozenset[tuple[str, str]] = frozenset()
    others: tuple[FurtherLayers, ...] = ()

    @classmethod
    def of(cls, shallow: Shallow) -> Rest:
        """Beside the layer that has one of its like on both sides."""
        paths, first = paths_of(shallow.program), shallow.border[0]
        before = takewhile(lambda node: not first or paths.get(node) != first, shallow.program.calls())
        entry = frozenset((record(node).module, record(node).source) for node in before if first)
        equal = frozenset(shallow.stacks[0].three if shallow.middle else shallow.border) - {""}
        others = tuple(FurtherLayers(stack.three, stack.layers - shallow.kept) for stack in shallow.others)
        return cls(shallow.middle, {node.name: path for node, path in paths.items()}, first, equal, entry, others)

    @property
    def layers(self) -> list[str]:
        """The paths of `equal`, in their order."""
        return sorted(self.equal, key=lambda path: int(path.rpartition(".")[2]))

    def has(self, name: str) -> bool:
        """True if a parameter or a buffer, by its name, belongs to the layer."""
        return not self.path or layer_of(name.rpartition(".")[0]) != self.path

    def counts(self, node: fx.Node) -> bool:
        """True if a node is none of the layer's. What is awaited belongs to what was started."""
        if not self.path:
            return True
        return self.layer(node) != self.path

    def times(self, node: fx.Node) -> int:
        """How many calls of the model a node stands for, if the program had all of its equal layers."""
        path = self.layer(node) if self.others else ""
        return max((each.times(path) for each in self.others), default=1)

    def times_beside(self, node: fx.Node) -> int:
        """How many it stands for without the layer: 0 of its nodes."""
        return self.times(node) * self.counts(node)

    def names(self, name: str) -> list[str]:
        """What the name of a parameter is in a program with all of `others`: of layers that are like one, several."""
        found = [name]
        for each in self.others:
            found = [one for name in found for one in each.names(name)]
        return found

    def other(self, node: fx.Node) -> tuple[int, int]:
        """In which of `others` a node lies, and in which of its three layers; -1 twice where in none."""
        path = self.layer(node) if self.others else ""
        found = ((i, each.paths.index(path)) for i, each in enumerate(self.others) if path in each.paths)
        return next(found, (-1, -1))

    def is_entry(self, node: fx.Node) -> bool:
        """True if a node belongs to what comes before the equal layers, in the forward or the backward pass."""
        known = record(node.all_input_nodes[0] if node.target is WAIT else node)
        return (known.module, known.source) in self.entry

    def is_equal(self, node: fx.Node) -> bool:
        """True if a node lies in one of the equal layers."""
        return self.layer(node) in self.equal

    def layer(self, node: fx.Node) -> str:
        """The layer of a node; "" if it lies in none."""
        known = record(node.all_input_nodes[0] if node.target is WAIT else node)
        return self.owners.get(known.origin.partition(".")[0]) or layer_of(known.module)

    def cut_out(self, program: Program) -> Program | None:
        """A graph in which the layers do not read each other; None of one in which they do."""
        build, named = Builder(MADE_BY), dict(program.entries)
        stay = [self._stays(node, named) for node in program.graph.nodes]
        for node, stays in zip(program.graph.nodes, stay, strict=True):
            if not stays or node.op == "output":
                continue
            if any(operand not in build.value for operand in node.all_input_nodes):
                return None
            build.copy(node)
        ends = program.results
        kept = [i for i, node in enumerate(ends) if node is None or node in build.value]
        build.output(map(build.new, (ends[i] for i in kept)), record(program.graph.output_node()))
        inputs = tuple(entry for node, entry in program.entries if node in build.value)
        return program.with_(graph=build.graph, inputs=inputs, outputs=tuple(program.outputs[i] for i in kept))

    def _stays(self, node: fx.Node, named: Mapping[fx.Node, Input]) -> bool:
        is_stored = node in named and named[node].kind in ("parameter", "buffer")
        return self.has(named[node].name) if is_stored else node.op == "output" or self.counts(node)


def arguments(node: fx.Node) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments of a call, but for the number of its random draws, which equal calls do not have in common."""
    place = key_place(node.target) if node.op == "call_function" else -1
    return (*node.args[:place], *node.args[place + 1 :]) if place >= 0 else node.args, node.kwargs


def crossing(program: Program, border: tuple[str, str]) -> list[fx.Node]:
    """The values of the forward pass of one layer that the next one reads."""
    (before, behind), paths = border, paths_of(program)
    found = [
        operand
        for node, path in paths.items()
        if path == behind and not record(node).is_backward
        for operand in node.all_input_nodes
        if paths.get(operand) == before
    ]
    return list(dict.fromkeys(found))


@dataclass(eq=False)
class _Layer:
    """The calls of one member of a list of modules, forward and backward, and its parameters by their names in it."""

    path: str
    calls: list[fx.Node] = field(default_factory=list)
    parameters: dict[str, fx.Node] = field(default_factory=dict)

    @property
    def number(self) -> int:
        return int(self.path.rpartition(".")[2])

    @property
    def list_(self) -> str:
        """The path of the list that it is a member of."""
        return self.path.rpartition(".")[0]


class _Layers:
    """The layers of a program, and where each call stands in its own."""

    def __init__(self, program: Program) -> None:
        self.of: dict[str, _Layer] = {}
        self.place: dict[fx.Node, tuple[_Layer, Hashable]] = {}
        for node, entry in program.entries:
            path = layer_of(entry.name.rpartition(".")[0])
            if entry.kind in ("parameter", "buffer") and path:
                layer = self._layer(path)
                layer.parameters[entry.name.removeprefix(path)] = node
                self.place[node] = layer, entry.name.removeprefix(path)
        self.alike: dict[fx.Node, str] = {}  # of calls in no layer, the first one that computes the same
        first: dict[Hashable, str] = {}
        paths = paths_of(program)
        for node in program.calls():
            if node not in paths:
                args = fx.node.map_arg((node.args, node.kwargs), lambda x: f"<{self.alike.get(x, x.name)}>")
                self.alike[node] = first.setdefault((str(node.target), str(args)), node.name)
        for node, path in paths.items():
            layer = self._layer(path)
            self.place[node] = layer, len(layer.calls)
            layer.calls.append(node)
        self.shared = set(self._read_far())

    def _read_far(self) -> Iterator[fx.Node]:
        """The values of a layer that others of its list than its neighbours read."""
        for node, (layer, _) in self.place.items():
            for operand in node.all_input_nodes if node.op == "call_function" else ():
                other = self._in_list(operand, layer)
                if other is not None and abs(other.number - layer.number) > 1:
                    yield operand

    def _in_list(self, node: fx.Node, layer: _Layer) -> _Layer | None:
        """The layer of a node, if it lies in the list of `layer`."""
        other, _ = self.place.get(node, (None, None))
        return other if other is not None and other.list_ == layer.list_ else None

    def _layer(self, path: str) -> _Layer:
        return self.of.setdefault(path, _Layer(path))

    def stacks(self) -> Iterator[list[_Layer]]:
        """The layers of each list, in their order."""
        found: dict[str, list[_Layer]] = defaultdict(list)
        for layer in self.of.values():
            found[layer.path.rpartition(".")[0]].append(layer)
        return (sorted(stack, key=lambda layer: layer.number) for stack in found.values())

    def signature(self, layer: _Layer) -> Hashable:
        """All that makes a layer what it is; of equal layers the same."""
        return tuple(self._call(node, layer) for node in layer.calls)

    def _call(self, node: fx.Node, layer: _Layer, named: bool = True) -> Hashable:
        """named: with its operands."""
        known = record(node)

        def text(operand: fx.Node) -> str:
            return f"<{self._operand(operand, layer) if named else ''}>"

        args = fx.node.map_arg(arguments(node), text)
        return str(node.target), known.types, known.phase, str(args)

    def is_end(self, end: _Layer, layer: _Layer, side: int) -> bool:
        """True if a layer beside equal ones reads from outside all lists, or from a neighbour that is another, what
        `layer` reads of the neighbour on that side (-1 or 1), and is like it in all else."""
        pairs = [*zip(end.calls, layer.calls, strict=False)]
        return len(end.calls) == len(layer.calls) and all(self._is_like(*pair, end, layer, side) for pair in pairs)

    def _is_like(self, node: fx.Node, other: fx.Node, end: _Layer, layer: _Layer, side: int) -> bool:
        mine, its = (self._call(one, own, named=False) for one, own in ((node, end), (other, layer)))
        operands = zip(_operands(node), _operands(other), strict=False)
        return mine == its and all(self._is_there(x, y, end, layer, side) for x, y in operands)

    def _is_there(self, mine: fx.Node, its: fx.Node, end: _Layer, layer: _Layer, side: int) -> bool:
        place = self._operand(its, layer)
        if self._operand(mine, end) == place:
            return True
        beyond = self._in_list(mine, end)
        is_beyond = mine not in self.place or (beyond is not None and beyond.number == end.number + side)
        is_like = is_beyond and record(mine).types == record(its).types
        return is_like and isinstance(place, tuple) and place[0] == side

    def _operand(self, operand: fx.Node, layer: _Layer) -> Hashable:
        """(How many layers away, the place there), or the node itself where it lies in no layer of this list, or many
        read it."""
        other = self._in_list(operand, layer)
        if other is None or operand in self.shared:
            return self.alike.get(operand, operand.name)
        return other.number - layer.number, self.place[operand][1]


def _operands(node: fx.Node) -> list[fx.Node]:
    """In their order, each as often as it is read."""
    operands: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), operands.append)
    return operands


def paths_of(program: Program) -> dict[fx.Node, str]:
    """The layer of each call: its own, or that of the call before it if it stands between two layers of a list and
    reads what they made (a sum that the module around them takes)."""
    own = {node: layer_of(record(node).module) for node in program.calls()}
    last = {(path.rpartition(".")[0], record(node).phase): node for node, path in own.items() if path}
    paths: dict[fx.Node, str] = {}
    before, end = "", None
    for node, path in own.items():
        if path:
            before, end = path, last[path.rpartition(".")[0], record(node).phase]
        if path or (before and any(operand in paths for operand in node.all_input_nodes)):
            paths[node] = path or before
        if node is end:
            before, end = "", None
    return paths


def _runs_of(layers: _Layers) -> Iterator[list[_Layer]]:
    """Equal layers one behind the other, none of which reads one that is further away than its neighbours."""
    return (_with_ends(layers, stack, run) for stack in layers.stacks() for run in _runs(layers, stack))


def _runs(layers: _Layers, stack: Sequence[_Layer]) -> list[list[_Layer]]:
    """The layers of a list, those together that are equal."""
    runs: list[list[_Layer]] = []
    before: Hashable = None
    for layer in stack:
        now = layers.signature(layer)
        follows = runs and layer.number == runs[-1][-1].number + 1 and now == before and _is_near(layers, layer)
        runs = [*runs[:-1], [*runs[-1], layer]] if follows else [*runs, [layer]]
        before = now
    return runs


def _with_ends(layers: _Layers, stack: Sequence[_Layer], run: list[_Layer]) -> list[_Layer]:
    """Equal layers with the two at their ends, if these differ in nothing but where they read what the others read of a
    neighbour: the first one of what stands before all layers, the last one's backward pass of what stands behind."""
    numbered = {layer.number: layer for layer in stack}
    first, last = numbered.get(run[0].number - 1), numbered.get(run[-1].number + 1)
    before = [first] if first and layers.is_end(first, run[0], -1) else []
    return [*before, *run, *([last] if last and layers.is_end(last, run[-1], 1) else [])]


def _is_near(layers: _Layers, layer: _Layer) -> bool:
    operands = (operand for node in layer.calls for operand in node.all_input_nodes)
    away = (layers._operand(operand, layer) for operand in operands)
    return all(abs(place[0]) <= 1 for place in away if isinstance(place, tuple))


def _without(program: Program, before: _Layer, gone: Sequence[_Layer], behind: _Layer) -> Program | None:
    """The program without some layers, which stand between two that are their equals."""
    places = {node: i for layer in gone for i, node in enumerate(layer.calls)}
    dropped = {*places, *(node for layer in gone for node in layer.parameters.values())}
    border = {*before.calls, *behind.calls}
    build = Builder(MADE_BY)

    def instead(node: fx.Node) -> fx.Node:
        if node not in dropped:
            return build.value[node]
        assert node in places, f"a parameter of a layer that is left out, {node.name}, is read by another one"
        return build.value[(behind if record(node).is_backward else before).calls[places[node]]]

    stays = [gone[0].number <= _number(out.name, before) <= gone[-1].number for out in program.outputs]
    for node in program.graph.nodes:
        if node in dropped or node.op == "output":
            continue
        if any(operand in dropped for operand in node.all_input_nodes) and node not in border:
            return None
        build.copy(node, instead)
    kept = [i for i, out in enumerate(program.outputs) if not (out.kind in (*BUFFERS, *AS_PARAMETER) and stays[i])]
    results = program.results
    if any(results[i] in dropped for i in kept):
        return None
    chosen: list[Any] = [None if results[i] is None else build.value[results[i]] for i in kept]  # type: ignore[index]
    build.output(chosen, record(program.graph.output_node()))
    erase_unused(build.graph)  # what was made for the layers that are gone
    inputs = tuple(entry for node, entry in program.entries if node not in dropped)
    return program.with_(graph=build.graph, inputs=inputs, outputs=tuple(program.outputs[i] for i in kept))


def _number(name: str, layer: _Layer) -> int:
    """The number of the layer, of the same list, that a parameter belongs to; -1 if it belongs to none."""
    path = layer_of(name.rpartition(".")[0])
    return int(path.rpartition(".")[2]) if path and path.rpartition(".")[0] == layer.path.rpartition(".")[0] else -1
