"""Runs a LOCAL graph: once turned into Python source with one line a node, then executed as a generator.

The generator yields a `Request` for every op that names a mesh axis (a ring yields several) and is sent `[answer]`; it
knows nothing of ranks or processes, so that the virtual mesh and torch.distributed drive the same code. Values are
locals of the generator and are dropped at their last use. (The list is for that: `send` holds on to what it is given
until the next yield, so the generator takes the answer out of it.)

A driver runs it under `torch.no_grad()`: a generator must not change the mode of whoever drives it.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autopar.errors import AutoparError, BatchError
from autopar.ir.ops.fused import Fused, fused_of
from autopar.ir.ops.op_facts import creates
from autopar.ir.ops.ops import is_mesh_op, op
from autopar.ir.ops.ring_ops import is_ring
from autopar.ir.ops.unfused import in_place, unfused
from autopar.ir.program import has_record, is_getitem, record
from autopar.runtime.attention.ring_kernels import RINGS
from autopar.runtime.executor.kernel_table import adding_variant, function_of, inplace_variants
from autopar.runtime.executor.lifetime import Lifetimes, is_dense, lifetimes
from autopar.runtime.executor.ranges import Ranges, range_names
from autopar.runtime.kernels.generated import written_function

_GATHER = op("all_gather_start")
Observe = Callable[[fx.Node, Any], None]
Outputs = tuple[Any, ...]
# Of a group, and for each of its results the operand over which it may be written (None for memory of its own), the
# function of its operands that gives its results.
Kernels = Callable[[Fused, "tuple[int | None, ...]"], Callable[..., Sequence[torch.Tensor]]]
CPU = torch.device("cpu")
Steps = Generator["Request", list[Any] | None, Outputs]


@dataclass(frozen=True, slots=True)
class Study:
    """For those who ask what a graph holds, and not what it computes. enter: told of every node before it runs.
    instead: functions in place of others, for tensors without data. home: the node to tell of, if it is not itself."""

    enter: Callable[[fx.Node], None]
    instead: Mapping[Any, Callable[..., Any]]
    home: Mapping[fx.Node, fx.Node] = field(default_factory=dict)


@dataclass(slots=True)
class Request:
    """What a rank waits for: `op(*args)` among the ranks of an axis.

    `last_use`: the tensor in args[0] is memory of this graph's own that nothing looks at afterwards, so that the
    driver may write into it. The answer of a collective is memory of its own, or that of args[0] if `last_use`
    (`wait` gives what its start made): the executor may write over it. joined: the next request starts a gather as
    well, and the two may be launched at once.
    """

    node: fx.Node
    op: Any
    last_use: bool
    args: tuple[Any, ...]
    joined: bool = False


@dataclass(frozen=True)
class Code:
    """The generated function, and the node of each of its lines. ranges: that it opens for torch.profiler."""

    source: str
    function: Callable[..., Steps]
    node_of_line: dict[int, fx.Node]
    ranges: Ranges | None = None


class Executable:
    """A graph ready to run. `source` is the Python that runs, for people to read. device: where its tensors lie.

    sums: the nodes whose values are added to others. Those are given after the placeholders' values, None where there
    is nothing yet; they are written over. given: the placeholders whose values may be written over as well. kernels:
    for the groups; without, the calls of a group run one by one, as if there were none. is_named: runs open ranges of
    torch.profiler.
    """

    def __init__(
        self, graph: fx.Graph, sums: Collection[fx.Node] = (), given: Collection[fx.Node] = (),
        device: torch.device = CPU, study: Study | None = None, kernels: Kernels | None = None,
    ) -> None:  # fmt: skip
        self.device, self.kernels, self.graph, self.sums = device, kernels, graph, tuple(sums)
        if kernels is None:
            plain = unfused(graph)
            self.graph, self.sums = plain.graph, tuple(plain.became[node] for node in self.sums)
            given = {plain.became[node] for node in given}
            study = study and replace(study, home=plain.home)
        self.is_named, self._given, self._study = False, frozenset(given), study
        self.code = _generate(self.graph, lifetimes(self.graph, given), self.sums, device, study, kernels)

    @property
    def source(self) -> str:
        return self.code.source

    @functools.cached_property
    def named_code(self) -> Code:
        lives = lifetimes(self.graph, self._given)
        return _generate(self.graph, lives, self.sums, self.device, self._study, self.kernels, ranges=Ranges())

    @functools.cached_property
    def observed_code(self) -> Code:
        return _generate(self.graph, lifetimes(self.graph), self.sums, self.device, None, self.kernels, observed=True)


def run(executable: Executable, inputs: Iterable[Any], observe: Observe | None = None) -> Steps:
    """Execute; yields requests, returns the outputs. `inputs` are dropped at their last use here: to free them
    then, the caller keeps no list of them (an iterator will do).

    `observe(node, value)` sees every value; nothing is then computed in place, so it may keep them.
    """
    if observe is not None:
        return _steps(executable.observed_code, list(inputs), observe)
    return _steps(executable.named_code if executable.is_named else executable.code, list(inputs), None)


def _steps(code: Code, items: list[Any], observe: Observe | None) -> Steps:
    try:
        return (yield from code.function(items, observe))
    except BatchError as error:  # a kernel found a value that does not fit; it cannot know where it stands
        node = _failed_node(error, code)
        raise BatchError(f"{error}\n  In {describe_read(node)}" if node is not None else str(error)) from None
    except AutoparError:
        raise
    except Exception as error:
        node = _failed_node(error, code)
        if node is not None:
            error.add_note(f"in {describe(node)}")
        raise
    finally:
        if code.ranges is not None:
            code.ranges.leave()


def describe(node: fx.Node) -> str:
    """`%mul_3 = aten.mul.Tensor  (made by reshard)  # blocks.0.mlp  gpt.py:41`: where a value comes from."""
    text = f"%{node.name} = {target_name(node)}"
    if not has_record(node):
        return text
    known = record(node)
    place = "  ".join(part for part in (known.module, known.source) if part)
    return f"{text}  (made by {known.made_by})" + (f"  # {place}" if place else "")


def at_call(error: BatchError, node: fx.Node) -> BatchError:
    """The error of a batch with the user's line that it is about."""
    known = record(node)
    module = f" in {known.module}" if known.module else ""
    return BatchError(f"{error} It is at {known.source}{module}.")


def describe_read(node: fx.Node) -> str:
    """Describe a node and the input whose values it reads: itself, cast, cut or seen otherwise."""
    source = node
    while source.op != "placeholder" and len(source.all_input_nodes) == 1:
        (source,) = source.all_input_nodes
    return describe(node) + (f", of %{source.name}" if source is not node and source.op == "placeholder" else "")


def target_name(node: fx.Node) -> str:
    """`autopar.all_reduce` for an op, the function's name else."""
    name = str(node.target) if hasattr(node.target, "_schema") else getattr(node.target, "__name__", str(node.target))
    return name.removesuffix(".default")


def _failed_node(error: BaseException, code: Code) -> fx.Node | None:
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is code.function.__code__:
            return code.node_of_line.get(trace.tb_lineno)
        trace = trace.tb_next
    return None


class _Writer:
    """The text of the function, the objects that it refers to, and the node of each line."""

    def __init__(
        self, graph: fx.Graph, device: torch.device, instead: Mapping[Any, Callable[..., Any]], kernels: Kernels | None
    ) -> None:
        self.device, self.instead, self.kernels = device, instead, kernels
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self.node_of_line: dict[int, fx.Node] = {}
        self.value = {node: f"v{i}" for i, node in enumerate(graph.nodes)}
        self.joined = joined(graph)
        self._bound: dict[int, str] = {}

    def line(self, text: str, node: fx.Node | None = None) -> None:
        self.lines.append(text)
        if node is not None:
            self.node_of_line[len(self.lines)] = node

    def bind(self, thing: Any) -> str:
        """A name for an object in the function's globals."""
        thing = self.instead.get(thing, thing)
        name = self._bound.get(id(thing))
        if name is None:
            name = self._bound[id(thing)] = f"k{len(self.names)}"
            self.names[name] = thing  # keeps it alive, so that its id stays its own
        return name

    def argument(self, arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return self.value[arg]
        if arg is None or type(arg) in (bool, int, str) or (type(arg) is float and math.isfinite(arg)):
            return repr(arg)
        if isinstance(arg, slice):
            return f"slice({self.argument(arg.start)}, {self.argument(arg.stop)}, {self.argument(arg.step)})"
        if isinstance(arg, dict):
            return "{" + ", ".join(f"{k!r}: {self.argument(v)}" for k, v in arg.items()) + "}"
        if isinstance(arg, (tuple, list)):
            items = ", ".join(self.argument(item) for item in arg)
            return f"[{items}]" if isinstance(arg, list) else f"({items}{',' if len(arg) == 1 else ''})"
        return self.bind(arg)

    def arguments(self, node: fx.Node) -> str:
        """The arguments of a call, and where it makes a tensor of numbers."""
        kwargs = {**node.kwargs, "device": self.device} if creates(node.target) else node.kwargs
        return ", ".join([*map(self.argument, node.args), *(f"{k}={self.argument(v)}" for k, v in kwargs.items())])


def _generate(
    graph: fx.Graph, lives: Lifetimes, sums: Sequence[fx.Node], device: torch.device, study: Study | None = None,
    kernels: Kernels | None = None, observed: bool = False, ranges: Ranges | None = None,
) -> Code:  # fmt: skip
    writer = _Writer(graph, device, study.instead if study is not None else {}, kernels)
    inputs = [writer.value[node] for node in graph.nodes if node.op == "placeholder"]
    totals = {node: f"t{i}" for i, node in enumerate(sums)}
    terms = {} if observed else _terms(graph, lives, totals)
    summed = {term.next for term in terms}
    names: tuple[str, ...] = ()
    writer.line("def program(items, observe):")
    if inputs or totals:
        writer.line(f"    [{', '.join((*inputs, *totals.values()))}] = items")
    writer.line("    items.clear()")
    writer.line("    if False: yield")
    for node in graph.nodes:
        if node.op == "output":
            writer.line(f"    return {writer.argument(tuple(node.args[0]))}", node)
            continue
        value = writer.value[node]
        if ranges is not None and node.op == "call_function" and range_names(node) != names:
            names = range_names(node)
            writer.line(f"    {writer.bind(ranges.enter)}(*{writer.argument(names)})")
        if study is not None:
            writer.line(f"    {writer.bind(study.enter)}({writer.bind(study.home.get(node, node))})")
        if node in totals:
            writer.line(f"    {value} = {_addition(writer, node, totals[node])}  # {node.name}", node)
        elif node in terms:
            writer.line(f"    {value} = {_term(writer, node, terms[node])}  # {node.name}, added", node)
        elif node in summed:
            writer.line(f"    {value} = {writer.argument(node.args[1])}  # {node.name}", node)
        elif node.op != "placeholder":
            writer.line(f"    {value} = {_expression(writer, node, lives, observed)}  # {node.name}", node)
        if observed:
            writer.line(f"    observe({writer.bind(node)}, {value})", node)
        dead = lives.dying.get(node, ())
        if dead:
            writer.line(f"    {' = '.join(writer.value[d] for d in dead)} = None")
    source = "\n".join(writer.lines) + "\n"
    return Code(source, written_function(source, "program", writer.names, "graph"), writer.node_of_line, ranges)


def _expression(writer: _Writer, node: fx.Node, lives: Lifetimes, observed: bool) -> str:
    if node.op == "get_attr":
        return writer.bind(_attribute(node))
    assert node.op == "call_function", (node.op, node.name)
    if is_getitem(node):
        source, index = node.args
        return f"{writer.argument(source)}[{writer.argument(index)}]"
    if is_mesh_op(node.target):
        args = schema_arguments(node)
        last_use = not observed and isinstance(args[0], fx.Node) and lives.may_overwrite(args[0], node)
        request = writer.bind(functools.partial(Request, node, node.target, last_use, joined=node in writer.joined))
        return f"(yield {request}({writer.argument(args)})).pop()"
    if is_ring(node.target):
        steps, ask = writer.bind(RINGS[node.target].run), writer.bind(_asking(node))
        return f"(yield from {steps}({ask}, {writer.arguments(node)}))"
    fused = fused_of(node)
    if fused is not None:
        assert writer.kernels is not None, node
        function = writer.kernels(fused, _over(node, fused, None if observed else lives))
    else:
        function = (None if observed else _inplace(node, lives)) or function_of(node.target)
    return f"{writer.bind(function)}({writer.arguments(node)})"


def _over(node: fx.Node, fused: Fused, lives: Lifetimes | None) -> tuple[int | None, ...]:
    """For each result of a group the dying operand over which it may be written, each operand once."""
    taken: list[int | None] = []
    for places in in_place(fused) if lives is not None else ((),) * len(fused.results):
        free = (place for place in places if place not in taken and _dies(node.args[place], node, lives))
        taken.append(next(free, None))
    return tuple(taken)


def _dies(operand: Any, node: fx.Node, lives: Lifetimes | None) -> bool:
    return lives is not None and is_dense(operand) and lives.may_overwrite(operand, node)


def _asking(node: fx.Node) -> Callable[..., Request]:
    """Makes the requests of a node that computes between them."""
    return lambda op, *args: Request(node, op, False, args)


def _addition(writer: _Writer, node: fx.Node, total: str) -> str:
    """A call whose result is added to what is there already."""
    arguments = writer.arguments(node)
    add, make = writer.bind(adding_variant(node.target)), writer.bind(function_of(node.target))
    return f"{make}({arguments}) if {total} is None else {add}({total}, {arguments})"


def _terms(graph: fx.Graph, lives: Lifetimes, totals: Collection[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Calls whose result the next node adds to what calls of the same op made, with that sum: the call can do so itself
    (`Kernel.adding`), and a sum of many large terms needs no memory but its own. Two terms stay as they are: where they
    cancel, they do so to the last bit."""
    nodes: dict[fx.Node, fx.Node] = {}
    firsts: dict[fx.Node, fx.Node] = {}  # of a sum, the call that made its first term
    for node in graph.nodes:
        total, term = (*node.args, None, None)[:2]
        is_sum = node.target is torch.ops.aten.add.Tensor and not node.kwargs and node not in totals
        if not is_sum or not isinstance(total, fx.Node) or not isinstance(term, fx.Node):
            continue
        if term.next is not node or len(term.users) > 1 or term.op != "call_function" or term in totals:
            continue
        first = firsts.get(total, total)
        is_same = first.target is term.target and first.args[2:] == term.args[2:] and first.kwargs == term.kwargs
        alike = has_record(node) and record(first).types == record(term).types and record(first).is_tensor
        reads = any(lives.share[operand] is lives.share[total] for operand in term.all_input_nodes)
        if is_same and alike and not reads and adding_variant(term.target) and lives.may_overwrite(total, node):
            nodes[term], firsts[node] = total, first
    many = Counter(firsts.values())
    return {term: total for term, total in nodes.items() if many[firsts[term.next]] > 1}


def _term(writer: _Writer, node: fx.Node, total: fx.Node) -> str:
    return f"{writer.bind(adding_variant(node.target))}({writer.argument(total)}, {writer.arguments(node)})"


def _inplace(node: fx.Node, lives: Lifetimes) -> Callable[..., Any] | None:
    """A variant that writes the result over a dying operand of the same type: fresh memory costs page faults."""
    variant = _variant(node, lives)
    return variant and variant[1]


def _variant(node: fx.Node, lives: Lifetimes) -> tuple[fx.Node, Callable[..., Any]] | None:
    for which, function in inplace_variants(node.target):
        if which >= len(node.args) or (which == 1 and node.kwargs.get("alpha") is not None):
            continue
        operand = node.args[which]
        if not isinstance(operand, fx.Node) or not has_record(node) or not has_record(operand):
            continue
        mine, its = record(node), record(operand)
        alike = its.is_tensor and (mine.types, mine.layouts) == (its.types, its.layouts)
        if is_dense(operand) and alike and lives.may_overwrite(operand, node):
            return operand, function
    return None


def written_over(graph: fx.Graph, given: Collection[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The calls that an `Executable` has write over one of their operands, each with that one; of groups none.
    given: the placeholders that may be written over."""
    lives = lifetimes(graph, given)
    calls = (node for node in graph.nodes if node.op == "call_function" and fused_of(node) is None)
    return {node: variant[0] for node in calls if (variant := _variant(node, lives)) is not None}


def schema_arguments(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of one of our ops in the order of its schema."""
    schema = node.target._schema  # type: ignore[union-attr]
    rest = schema.arguments[len(node.args) :]
    return (*node.args, *(node.kwargs.get(argument.name, argument.default_value) for argument in rest))


def _attribute(node: fx.Node) -> Any:
    attribute: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        attribute = getattr(attribute, part)
    return attribute


# -- gathers that start together --------------------------------------------------------------------------------------


def joined(graph: fx.Graph) -> frozenset[fx.Node]:
    """The starts of gathers that may wait for the next start, which is over the same axis: what stands between makes
    only the operand of that one (a cast of a parameter). NCCL moves what is launched together side by side, without the
    copies that a flat buffer takes: one launch for the parameters of a layer."""
    joined: set[fx.Node] = set()
    last: fx.Node | None = None
    between: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is _GATHER:
            if last is not None and _axis(node) == _axis(last) and _feeds(between, node):
                joined.add(last)
            last, between = node, set()
        elif is_mesh_op(node.target) or is_ring(node.target):
            last = None
        elif node.op == "call_function":
            between.add(node)
    return frozenset(joined)


def _axis(node: fx.Node) -> object:
    return node.args[1] if len(node.args) > 1 else node.kwargs["axis"]


def _feeds(nodes: set[fx.Node], target: fx.Node) -> bool:
    return all(user in nodes or user is target for node in nodes for user in node.users)
