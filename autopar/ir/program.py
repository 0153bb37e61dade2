"""A training step as one torch.fx graph, with one typed record on each node."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.torch_shortcuts import add_call, copy_node

HOST = "host"  # the tier of memory beside the device's
PARTNER = "@"  # begins the names of other models' tensors: `@teacher.up.weight`
IN_PARTS = "~"  # begins those of tensors in parts on ranks that are none of the model's own: `~0`
INPUT_GRADIENT = "input_gradient"
OLD_BUFFER = "old_buffer"
BUFFERS = ("buffer", OLD_BUFFER)  # outputs that are written into buffers
AS_PARAMETER = ("gradient", "weight")  # outputs that leave as the parameter lies that they are named after
BESIDE = ("aux", INPUT_GRADIENT)  # outputs that leave beside the loss, whole: they decide nothing
_KEY = "autopar"


class Level(enum.IntEnum):
    """What a program promises; each pass goes from one level to the same or the next."""

    CAPTURED = 0  # global shapes, every value typed, no layout
    SHARDED = 1  # every value has a layout, every operand a wanted layout
    EXPLICIT = 2  # every operand has the layout its consumer wants: the collectives stand in the graph
    LOCAL = 3  # shapes and arguments are one rank's
    STAGED = 4  # a part of a pipeline: what one action of a schedule computes


@dataclass(frozen=True, slots=True)
class TensorType:
    """The global shape and the dtype of a value."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes_(self) -> int:
        return self.numel * self.dtype.itemsize


Types = tuple["TensorType | None", ...]
Layouts = tuple["Layout | None", ...]


@dataclass(frozen=True, slots=True)
class Record:
    """All that the passes know of one node.

    `types` and `layouts` have one entry a result (one, unless `several` results come as a list or tuple);
    an entry is None where the result is no tensor. `operands` are the layouts in which the node wants its
    tensor operands (see `operand_nodes`).
    """

    types: Types
    several: bool = False
    layouts: Layouts = ()
    operands: tuple[Layout, ...] = ()
    module: str = ""  # module path, e.g. "blocks.0.attn"
    source: str = ""  # the user's file and line, e.g. "gpt.py:41"
    phase: str = "forward"  # or "backward"
    made_by: str = "capture"  # the pass that made the node
    origin: str = ""  # the captured node whose logical value this holds, e.g. "mul_3" or "split.1"
    reason: str = ""  # why the node exists, if a pass made it
    tier: str = ""  # the memory in which its value lies: HOST, or "" for that of the device
    flops: int = field(default=0, compare=False)  # of the whole call, if it is a product; not part of the text form
    exact: bool = field(default=False, compare=False)  # no precision shortens it; not part of the text form

    @property
    def type(self) -> TensorType:
        """The type of the only result."""
        assert len(self.types) == 1 and self.types[0] is not None
        return self.types[0]

    @property
    def layout(self) -> Layout:
        """The layout of the only result."""
        assert len(self.layouts) == 1 and self.layouts[0] is not None
        return self.layouts[0]

    @property
    def is_backward(self) -> bool:
        """True for what the backward pass computes."""
        return self.phase == "backward"

    @property
    def is_tensor(self) -> bool:
        return not self.several and self.types[0] is not None

    def with_(self, **changes: Any) -> Record:
        """Copy it with changes, as `dataclasses.replace` does, in half the time: passes make 100,000 copies."""
        made = object.__new__(Record)
        for put, value in zip(_PUT.values(), _values(self), strict=True):
            put(made, value)
        for name, value in changes.items():
            _PUT[name](made, value)
        return made


_PUT = {each.name: Record.__dict__[each.name].__set__ for each in fields(Record)}  # past what keeps it frozen
_values = attrgetter(*_PUT)


def record(node: fx.Node) -> Record:
    """The record of a node."""
    known: Record = node.meta[_KEY]
    return known


def set_record(node: fx.Node, value: Record) -> None:
    node.meta[_KEY] = value


def has_record(node: fx.Node) -> bool:
    return _KEY in node.meta


def captured_name(node: fx.Node) -> str:
    """The name of the call of the captured program whose value a node has, or of which a pass made it."""
    return (record(node).origin or node.name).partition(".")[0]


def operand_nodes(node: fx.Node) -> tuple[fx.Node, ...]:
    """The tensor-valued arguments in the order of args, then kwargs, lists flattened, duplicates kept."""
    operand_nodes: list[fx.Node] = []
    _find_tensors(node.args, operand_nodes)
    if node.kwargs:
        _find_tensors(node.kwargs.values(), operand_nodes)
    return tuple(operand_nodes)


def _find_tensors(args: Iterable[Any], nodes: list[fx.Node]) -> None:
    for arg in args:
        if isinstance(arg, fx.Node):
            known: Record = arg.meta[_KEY]
            if not known.several and known.types[0] is not None:
                nodes.append(arg)
        elif arg is None or isinstance(arg, (int, float, str)):
            continue  # most of what is no node
        elif isinstance(arg, (tuple, list)):
            _find_tensors(arg, nodes)
        elif isinstance(arg, dict):
            _find_tensors(arg.values(), nodes)


@dataclass(frozen=True, slots=True)
class Input:
    """A placeholder of the graph: `kind` is parameter, buffer, constant, batch, seed or scale (of the loss whose
    gradients leave); in a pipeline also saved (a value of the micro-batch, from another action), step (one for all
    micro-batches) or part (what those before add up to, in the host's memory; the first one finds nothing).

    `names` are the module's names of it (several if tied), or its place in the batch.
    """

    kind: str
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True, slots=True)
class Output:
    """A result of the graph: `kind` is loss, gradient, buffer, old_buffer (what a step writes into a buffer that it
    binds to another tensor), weight (the new value of a parameter that the step itself writes), value, aux (what a loss
    function returned beside the loss), input_gradient or guard; `name` is the parameter's or buffer's, or a place in
    the batch or in what was returned. In a pipeline also saved and step (see `Input`), or part: what the micro-batch
    adds to a value of the step."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Program:
    """The graph of one step. Its placeholders are `inputs`, in order; its output is a flat tuple of `outputs`."""

    graph: fx.Graph
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    level: Level = Level.CAPTURED
    mesh: Mesh = Mesh(())
    notes: tuple[str, ...] = ()  # what a person should know, e.g. ops that stay replicated

    @property
    def nodes(self) -> list[fx.Node]:
        return list(self.graph.nodes)

    @property
    def placeholders(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def results(self) -> tuple[fx.Node | None, ...]:
        """The nodes that the graph returns, one for each of `outputs`."""
        output = self.graph.output_node()
        return tuple(output.args[0])  # type: ignore[arg-type]

    @property
    def entries(self) -> list[tuple[fx.Node, Input]]:
        """The placeholders, each with the input that it stands for."""
        return list(zip(self.placeholders, self.inputs, strict=True))

    @property
    def leaving(self) -> list[tuple[fx.Node | None, Output]]:
        """The outputs, each with the node that is returned for it."""
        return list(zip(self.results, self.outputs, strict=True))

    def guarding(self) -> set[fx.Node]:
        """The calls whose results leave as guards alone: the host reads them, and nothing else hangs on them."""
        guards = {left for left, out in self.leaving if out.kind == "guard"}
        kept = {left for left, out in self.leaving if out.kind != "guard"}
        found: set[fx.Node] = set()
        for node in reversed(list(self.calls())) if guards else ():
            readers = [user for user in node.users if user.op != "output"]
            if node not in kept and found.issuperset(readers) and (readers or node in guards):
                found.add(node)
        return found

    def parameters(self) -> Iterator[tuple[fx.Node, Input]]:
        """The placeholders that are parameters."""
        return ((node, entry) for node, entry in self.entries if entry.kind == "parameter")

    def with_(self, **changes: Any) -> Program:
        return replace(self, **changes)

    def calls(self) -> Iterator[fx.Node]:
        """The nodes that compute something."""
        return (node for node in self.graph.nodes if node.op == "call_function")


CAST = torch.ops.aten._to_copy.default


def is_given(node: fx.Node) -> bool:
    """True for what is there before the step begins: an input, or one in another dtype."""
    return node.op == "placeholder" or (node.target is CAST and node.all_input_nodes[0].op == "placeholder")


def is_gathered_input(node: fx.Node) -> bool:
    """True for an input that ZeRO gathered."""
    return getattr(node.target, "_opname", "") == "all_gather" and is_given(node.all_input_nodes[0])


def given_of(gather: fx.Node) -> fx.Node:
    """The input that a gather takes the parts of, itself or in another dtype."""
    source = gather.all_input_nodes[0]
    return source if source.op == "placeholder" else source.all_input_nodes[0]


def is_getitem(node: fx.Node) -> bool:
    """True for the projection of one result out of several."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def source_of(node: fx.Node) -> tuple[fx.Node, int]:
    """The node that computes a tensor, and which of its tensor results it is."""
    if not is_getitem(node):
        return node, 0
    producer, index = node.args
    assert isinstance(producer, fx.Node) and isinstance(index, int)
    return producer, sum(type_ is not None for type_ in record(producer).types[:index])


def of_parameters(program: Program) -> set[fx.Node]:
    """The nodes that hang on a parameter."""
    nodes = {node for node, _ in program.parameters()}
    for node in program.calls():
        if any(operand in nodes for operand in node.all_input_nodes):
            nodes.add(node)
    return nodes


@dataclass(slots=True)
class Builder:
    """Rewrites a program node by node: a pass puts other nodes in place of some, and the rest is copied.

    `value` maps an old node to the new node that stands for it.
    """

    made_by: str
    graph: fx.Graph = field(default_factory=fx.Graph)
    value: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def rewrite(
        self, program: Program, put: Callable[[fx.Node], fx.Node | None], later: Container[fx.Node] = (), **changes: Any
    ) -> Program:
        """The program with what `put` gives in place of each node, in the order of the program.

        Where it gives None the node is copied, but for those of `later`: they get their value when the pass is ready.
        A node that has its value already is passed over.
        """
        for node in program.graph.nodes:
            made = self.value.get(node) or put(node)
            if made is not None:
                self.value[node] = made
            elif node not in later:
                self.copy(node)
        return program.with_(graph=self.graph, **changes)

    def copy(
        self, node: fx.Node, operand: Callable[[fx.Node], fx.Node] | None = None, like: Record | None = None
    ) -> fx.Node:
        """Copy a node under its own name. operand: gives the new node of an old one, if that is not its value. like:
        the record, if not that of the node."""
        made = self.value[node] = copy_node(self.graph, node, operand or self.value.__getitem__)
        if like is not None:
            set_record(made, like)
        return made

    def output(self, results: Iterable[fx.Node], like: Record) -> fx.Node:
        """Let the new graph return `results`."""
        made = self.graph.output(tuple(results))
        set_record(made, like)
        return made

    def call(self, target: Callable[..., Any], *args: Any, like: Record, name: str = "", **kwargs: Any) -> fx.Node:
        """Add a call made by this pass. `like` is its record, but for `made_by`."""
        made = add_call(self.graph, name, target, args, kwargs)
        set_record(made, like.with_(made_by=self.made_by))
        return made

    def lay(
        self, target: Callable[..., Any], *args: Any, like: Record, name: str = "", type_: TensorType | None = None,
        layout: Layout | None = None, **kwargs: Any,
    ) -> fx.Node:  # fmt: skip
        """Add a call to an EXPLICIT program, which takes its operands as they lie. type_, layout: of its result, where
        they are not those of `like`."""
        made = add_call(self.graph, name, target, args, kwargs)
        types = {} if type_ is None else {"types": (type_,), "several": False}
        layouts = {} if layout is None else {"layouts": (layout,)}
        operands = tuple(record(operand).layout for operand in operand_nodes(made))
        set_record(made, like.with_(made_by=self.made_by, operands=operands, **types, **layouts))
        return made

    def infer(self, target: Callable[..., Any], *args: Any, like: Record, name: str = "", **kwargs: Any) -> fx.Node:
        """Add a call to a CAPTURED program, whose types torch infers. `like`: the record of what it is made for."""
        given = fx.node.map_arg((args, kwargs), _on_meta)
        is_factory = not any(isinstance(arg, fx.Node) for listed in args for arg in _listed(listed))
        made = target(*given[0], **given[1], **({"device": "meta"} if is_factory else {}))
        several = isinstance(made, (tuple, list))
        types = tuple(TensorType(tuple(one.shape), one.dtype) for one in (made if several else [made]))
        like = like.with_(types=types, several=several, origin="", flops=0)
        return self.call(target, *args, like=like, name=name, **kwargs)

    def new(self, arg: Any) -> Any:
        """An argument with its old nodes replaced by the new ones."""
        return fx.node.map_arg(arg, lambda old: self.value[old])


def _on_meta(node: fx.Node) -> Any:
    """What torch is given for a node where it infers types."""
    found = [type_ and torch.empty(type_.shape, dtype=type_.dtype, device="meta") for type_ in record(node).types]
    return found if record(node).several else found[0]


def _listed(arg: Any) -> Any:
    return arg if isinstance(arg, (tuple, list)) else (arg,)


def erase_unused(graph: fx.Graph) -> None:
    """Erase the calls whose results nothing reads."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
