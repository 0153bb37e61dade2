"""Reads the text form of a program (see `autopar/ir/text/text.py`); evaluates nothing of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

from torch import fx

from autopar.errors import ArtifactError, AutoparError
from autopar.ir.layout import Layout, fits, local_shape
from autopar.ir.layout import parse_layout as parse_layout_uncached
from autopar.ir.mesh import Mesh, parse_mesh
from autopar.ir.ops import ring_ops  # noqa: F401  registers them, so that text may name them
from autopar.ir.ops.fused import KINDS, Fused
from autopar.ir.ops.names import DTYPES, WORDS, find_target
from autopar.ir.program import (
    HOST,
    Input,
    Level,
    Output,
    Program,
    Record,
    TensorType,
    operand_nodes,
    record,
    set_record,
)
from autopar.torch_shortcuts import add_call

_STRING = r'"(?:[^"\\]|\\.)*"'
_HEADER = re.compile(r"([A-Z]+) program(?: on (\S+))?\Z")
_RETURN = re.compile(rf"return (\w+) ({_STRING}) = ")
_TYPE = re.compile(r"(\w+)\[([\d,]*)\](?: of \[([\d,]*)\])?")
_LAYOUT = re.compile(r" (\[[^\[\]]*\](?: partial\([^()]*\))?)")
_TIER = re.compile(rf" in ({HOST})(?= =)")
_AS = re.compile(r" as(?= \[)")
_NAME = re.compile(r"%(\w+)")
_KEY = re.compile(r"(\w+)=(?!=)")
_ITEM = re.compile(rf"(?P<string>{_STRING})|(?P<number>-?\d[\w.]*(?:(?<=e)[+-]\d+)?|-inf)|(?P<word>[A-Za-z_][\w.]*)")
_TARGET = re.compile(r"([\w.]+)\(")
_OPERAND = re.compile(r"operand\Z")
_FUSED = re.compile(rf"fused\.(\w+) ({_STRING})\(")
_COMMENTED = "   #"  # before a comment
BODY = "    "  # before each line of what a group holds
_INPUT = re.compile(rf"(\w+) ({_STRING}(?:, {_STRING})*)")
_STRINGS = re.compile(_STRING)
_COMMENT = re.compile(
    rf"   #(?:  ?(?P<module>in {_STRING}|(?!backward(?:  |\Z))[\w.]+)(?=  |\Z))?"
    rf"(?:  ?(?P<source>at {_STRING}|[^\s\"]*:\d+)(?=  |\Z))?"
    rf"(?:  ?(?P<phase>backward|phase {_STRING})(?=  |\Z))?"
    rf"(?:  ?by (?P<made_by>{_STRING}|[\w.]+)(?=  |\Z))?"
    rf"(?:  ?from (?P<origin>{_STRING}|[\w.]+)(?=  |\Z))?"
    r"(?:  ?wants (?P<wants>nothing|\[[^\[\]]*\][^\[\]]*?(?:; \[[^\[\]]*\][^\[\]]*?)*)(?=  |\Z))?"
    r"(?:  ?why: (?P<reason>.+))?\Z"
)

# what the output node knows, if nothing else is written; a parsed program always has it
OUTPUT_RECORD = Record((None,))

parse_layout = lru_cache(maxsize=4096)(parse_layout_uncached)


def parse_program(text: str, custom_ops: frozenset[str] = frozenset()) -> Program:
    """The program of a text; raises `ArtifactError` naming the line that cannot be read.

    custom_ops: names of ops that it may hold, besides those of aten and autopar.
    """
    reader = _Reader(custom_ops)
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            reader.read(line.rstrip("\r "))
        except (AutoparError, ValueError, KeyError, RecursionError) as error:
            what = f"unknown name {error}" if isinstance(error, KeyError) else str(error)
            raise ArtifactError(f"program text, line {number}: {what}\n    {line.strip()[:200]}") from None
    if reader.level is None:
        raise ArtifactError("program text: it is empty.")
    try:
        return reader.finish()
    except ValueError as error:
        raise ArtifactError(f"program text, last line: {error}") from None


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of an operand among those of a line."""

    at: int


@dataclass(frozen=True, slots=True)
class _Call:
    """What a call's line says but for the names in it and its comment: equal layers repeat it, and it is read once.

    known: its types and layouts. args, kwargs: with places for nodes. are_tensors: of the operands, each. wanted: the
    `as` of each tensor.
    """

    known: Record
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    are_tensors: tuple[bool, ...]
    wanted: list[Layout | None]


@dataclass(slots=True)
class _Reader:
    """The part of a program read so far, and a cursor in the current line. calls: lines that were read before, by their
    text around the names."""

    custom_ops: frozenset[str]
    level: Level | None = None
    mesh: Mesh = field(default_factory=lambda: Mesh(()))
    graph: fx.Graph = field(default_factory=fx.Graph)
    nodes: dict[str, fx.Node] = field(default_factory=dict)
    inputs: list[Input] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    results: list[fx.Node | None] = field(default_factory=list)
    result_layouts: list[Layout | None] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    output: tuple[Record, str | None] = (OUTPUT_RECORD, None)
    line: str = ""
    at: int = 0
    wanted: list[Layout | None] = field(default_factory=list)  # the `as` of each operand of this line
    is_body: bool = False
    group: tuple[fx.Node, Fused, _Reader] | None = None  # whose body is read, and how far
    calls: dict[tuple[str, ...], _Call] = field(default_factory=dict)

    def read(self, line: str) -> None:
        if line.startswith(BODY) and self.group is not None:
            self.group[2].read_body(line[len(BODY) :])
            return
        self.end_group()
        self.line, self.at, self.wanted = line, 0, []
        if self.level is None:
            self._header()
        elif line.startswith("note: "):
            note = line[6:]
            self.notes.append(json.loads(note) if note[0] == '"' else note)
        elif match := self._match(_RETURN):
            self.results.append(self._argument())
            self.outputs.append(Output(match[1], json.loads(match[2])))
            if self.results[-1] is not None:
                self.result_layouts += self.wanted
            self._end()
        else:
            self._value()

    def read_body(self, line: str) -> None:
        """A line of what a group holds; its output is the last."""
        self.line, self.at, self.wanted = line, 0, []
        if self.results:
            raise ValueError("a line of a group stands after what it returns.")
        if not line.startswith("return "):
            self._value()
            return
        self._take("return ")
        self.results.append(self._argument())
        while self.at < len(self.line):
            self._take(", ")
            self.results.append(self._argument())
        if not all(isinstance(result, fx.Node) and record(result).is_tensor for result in self.results):
            raise ValueError("a group returns tensors.")
        layouts = tuple(record(result).layout for result in self.results if result is not None)
        set_record(self.graph.output(tuple(self.results)), Record((None,), operands=layouts))

    def end_group(self) -> None:
        """Check that the body of the last group is there and is what its node says."""
        if self.group is None:
            return
        (node, fused, body), self.group = self.group, None
        if not body.results:
            raise ValueError(f"%{node.name} is a group, and no line below it says what it returns.")
        types = tuple(record(result).type for result in fused.results)
        if types != record(node).types or len(fused.placeholders) != len(node.args):
            raise ValueError(f"%{node.name} has other operands or results than its body.")

    def _header(self) -> None:
        match = _HEADER.match(self.line)
        if match is None or match[1] not in Level.__members__:
            raise ValueError("expected a first line such as 'SHARDED program on dp=2,tp=2'.")
        self.level = Level[match[1]]
        self.mesh = parse_mesh(match[2]) if match[2] else Mesh(())

    def _value(self) -> None:
        pieces = _NAME.split(self.line.partition(_COMMENTED)[0])
        around, names = tuple(pieces[::2]), pieces[1::2]
        call = self.calls.get(around)
        operands = [self.nodes.get(name) for name in names[1:]] if call is not None else []
        if call is None or names[0] in self.nodes or self.outputs or not _fits(call, operands):
            self._read_value(around, names)
            return
        name, nodes = names[0], cast(list[fx.Node], operands)
        args = tuple(_put(arg, nodes) for arg in call.args)
        node = add_call(
            self.graph, name, call.target, args, {key: _put(arg, nodes) for key, arg in call.kwargs.items()}
        )
        self.at = sum(map(len, around)) + sum(map(len, names)) + len(names)  # each has its % before it
        tensors = [one for one, is_tensor in zip(nodes, call.are_tensors, strict=True) if is_tensor]
        self._keep(name, node, call.known, call.wanted, tensors)

    def _read_value(self, around: tuple[str, ...], names: list[str]) -> None:
        """Read a line of a value piece by piece. around, names: what stands before its comment, by names and the text
        around them."""
        name = self._expect(_NAME, "a value such as %mul_3")[1]
        self._take(": ")
        known = self._result(name == "output")
        if tier := self._match(_TIER):
            known = known.with_(tier=tier[1])
        self._take(" = ")
        if name == "output":
            self._take("return")
            said, wants = self._comment("")
            self.output = known.with_(**said), wants
            return
        if self.outputs:
            raise ValueError("a value stands after the returned ones.")
        if name in self.nodes:
            raise ValueError(f"%{name} is defined twice.")
        # What stands behind `=` says what the value is: a group, a call, an operand of a group's body, or an input.
        if match := self._match(_FUSED):
            node = self._group(name, match[1], json.loads(match[2]))
        elif match := self._match(_TARGET):
            node = self._call(name, find_target(match[1], self.custom_ops))
            if self.at == sum(map(len, around)) + sum(map(len, names)) + len(names):
                self._remember(around, names[1:], node, known)
        elif self.is_body and self._match(_OPERAND):
            node = self.graph.create_node("placeholder", name, name=name)
            set_record(node, known)
            self.nodes[name] = node
            return
        elif self.is_body:
            raise ValueError("expected a call or `operand`.")
        else:
            match = self._expect(_INPUT, 'a call, or an input such as parameter "up.weight"')
            node = self.graph.create_node("placeholder", name, name=name)
            self.inputs.append(Input(match[1], tuple(json.loads(s) for s in _STRINGS.findall(match[2]))))
        self._keep(name, node, known, self.wanted, None)

    def _keep(
        self, name: str, node: fx.Node, known: Record, wanted: list[Layout | None], tensors: list[fx.Node] | None
    ) -> None:
        """Set what is known of a node. tensors: its operands that are, if they are at hand."""
        if node.name != name:
            raise ValueError(f"torch.fx does not take the name %{name}.")
        # Operands that this call wants in another layout than they have stand in the comment at the line's end.
        said, wants = self._comment(name)
        operands = _operands(node, known, wanted, wants, tensors)
        set_record(node, known.with_(operands=operands, **said))
        self.nodes[name] = node

    def _remember(self, around: tuple[str, ...], names: list[str], node: fx.Node, known: Record) -> None:
        """Keep what a call's line says around its names, unless one of these stands in a text."""
        nodes: list[fx.Node] = []
        args = tuple(_with_places(arg, nodes) for arg in node.args)
        kwargs = {key: _with_places(arg, nodes) for key, arg in node.kwargs.items()}
        if [one.name for one in nodes] == names:
            are_tensors = tuple(record(one).is_tensor for one in nodes)
            self.calls[around] = _Call(known, node.target, args, kwargs, are_tensors, self.wanted)

    def _group(self, name: str, kind: str, label: str) -> fx.Node:
        if kind not in KINDS or self.is_body:
            raise ValueError(f"'fused.{kind}' is no kind of a group, which are {', '.join(KINDS)}; none holds another.")
        fused = Fused(fx.Graph(), label, kind, self.mesh)
        node = self._call(name, fused)
        body = _Reader(self.custom_ops, self.level, self.mesh, fused.graph, is_body=True, calls=self.calls)
        self.group = node, fused, body
        return node

    def _call(self, name: str, found: Any) -> fx.Node:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for _ in self._items(")"):
            if key := self._match(_KEY):
                kwargs[key[1]] = self._argument()
            elif kwargs:
                raise ValueError("an argument without a name follows one with a name.")
            else:
                args.append(self._argument())
        return add_call(self.graph, name, found, tuple(args), kwargs)

    def _argument(self) -> Any:
        if match := self._match(_NAME):
            node = self.nodes[match[1]]
            wanted = self._layout() if self._match(_AS) else None
            if record(node).is_tensor:
                self.wanted.append(wanted)
            return node
        if self.line.startswith("[", self.at):
            self.at += 1
            return [self._argument() for _ in self._items("]")]
        if self.line.startswith("(", self.at):
            self.at += 1
            return tuple(self._argument() for _ in self._items(")"))
        if self.line.startswith("complex(", self.at):
            self.at += len("complex(")
            return complex(*(self._argument() for _ in self._items(")")))
        match = self._expect(_ITEM, "an argument")
        if match["string"]:
            return json.loads(match["string"])
        if match["number"]:
            number = match["number"]
            return int(number) if number.lstrip("-").isdigit() else float(number)
        return WORDS[match["word"]]

    def _items(self, end: str) -> Iterator[None]:
        """Stops before each item of a list with commas, and passes over its end."""
        while not self.line.startswith(end, self.at):
            yield
            if self.line.startswith(",", self.at):
                self.at += 2 if self.line.startswith(", ", self.at) else 1
            elif not self.line.startswith(end, self.at):
                raise ValueError(f"expected ',' or '{end}' at column {self.at + 1}.")
        self.at += 1

    def _result(self, output: bool) -> Record:
        """Types and layouts as far as the part before ` = ` says them."""
        several = self.line.startswith("(", self.at)
        if several:
            self.at += 1
            items = [self._one_result() for _ in self._items(")")]
        elif self.line.startswith("nothing", self.at):
            self.at += len("nothing")
            items = []
        else:
            items = [self._one_result()]
        types = tuple(type_ for type_, _, _ in items)
        layouts = tuple(layout for _, layout, _ in items)
        marked = any(mark for _, _, mark in items)
        if any(types):
            present = marked or any(layout is not None for layout in layouts)
        else:
            present = marked != (not output and self.level is not None and self.level >= Level.SHARDED)
        return Record(types, several=several, layouts=layouts if present else ())

    def _one_result(self) -> tuple[TensorType | None, Layout | None, bool]:
        type_: TensorType | None = None
        local: tuple[int, ...] | None = None
        if self.line.startswith("-", self.at):
            self.at += 1
        else:
            match = self._expect(_TYPE, "a type such as f32[2,3], or -")
            shape = _shape(match[2])
            if match[3] is not None:
                local, shape = shape, _shape(match[3])
            type_ = TensorType(shape, DTYPES[match[1]])
        if self.line.startswith(" ?", self.at):
            self.at += 2
            return type_, None, True
        layout = self._layout() if self.line.startswith(" [", self.at) else None
        if type_ and layout and local is not None:
            fit = local_shape(type_.shape, layout, self.mesh) if fits(type_.shape, layout, self.mesh) else None
            if local != fit:
                raise ValueError(f"the local shape is {fit} by its layout, not {local}.")
        return type_, layout, False

    def _layout(self) -> Layout:
        layout = parse_layout(self._expect(_LAYOUT, "a layout such as [dp,-]")[1])
        strange = sorted({*layout.axes, *(axis for axis, _ in layout.partial)} - set(self.mesh.names))
        if strange:
            raise ValueError(f"layout '{layout}' names axis '{strange[0]}', which mesh '{self.mesh}' has not.")
        return layout

    def _comment(self, name: str) -> tuple[dict[str, str], str | None]:
        """What the rest of the line says of a value's record, and the layouts written after `wants`."""
        fields = _fields_of(self.line[self.at :])
        if fields is None:
            raise ValueError(f"expected a comment of known fields at column {self.at + 1}.")
        said, origin, wants = fields
        return {**said, "origin": usual_origin(name, said["made_by"]) if origin is None else origin}, wants

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self.line, self.at)
        if match:
            self.at = match.end()
        return match

    def _expect(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        match = self._match(pattern)
        if match is None:
            raise ValueError(f"expected {what} at column {self.at + 1}.")
        return match

    def _take(self, text: str) -> None:
        if not self.line.startswith(text, self.at):
            raise ValueError(f"expected '{text}' at column {self.at + 1}.")
        self.at += len(text)

    def _end(self) -> None:
        if self.at != len(self.line):
            raise ValueError(f"cannot read what follows column {self.at}.")

    def finish(self) -> Program:
        assert self.level is not None
        self.end_group()
        node = self.graph.output(tuple(self.results))
        known, wants = self.output
        set_record(node, known.with_(operands=_operands(node, known, self.result_layouts, wants)))
        return Program(self.graph, tuple(self.inputs), tuple(self.outputs), self.level, self.mesh, tuple(self.notes))


@lru_cache(maxsize=4096)
def _fields_of(comment: str) -> tuple[dict[str, str], str | None, str | None] | None:
    """What a comment says of a record, of the value's origin and after `wants`; None if it cannot be read."""
    match = _COMMENT.match(comment or "   #")
    if match is None:
        return None
    said = {
        "module": _unquote(match["module"], "in "),
        "source": _unquote(match["source"], "at "),
        "phase": _unquote(match["phase"], "phase ") if match["phase"] else "forward",
        "made_by": _unquote(match["made_by"]) if match["made_by"] else "capture",
        "reason": _unquote(match["reason"]),
    }
    return said, None if match["origin"] is None else _unquote(match["origin"]), match["wants"]


def _fits(call: _Call, operands: list[fx.Node | None]) -> bool:
    """Whether these operands are there, and tensors where those of a line that was read were."""
    return len(operands) == len(call.are_tensors) and all(
        node is not None and record(node).is_tensor == is_tensor
        for node, is_tensor in zip(operands, call.are_tensors, strict=True)
    )


def _put(arg: Any, nodes: list[fx.Node]) -> Any:
    """An argument with nodes in its places."""
    if isinstance(arg, _Place):
        return nodes[arg.at]
    if isinstance(arg, (list, tuple)):
        return type(arg)(_put(one, nodes) for one in arg)
    return arg


def _with_places(arg: Any, nodes: list[fx.Node]) -> Any:
    """An argument with places for its nodes, which are added to the list."""
    if isinstance(arg, fx.Node):
        nodes.append(arg)
        return _Place(len(nodes) - 1)
    if isinstance(arg, (list, tuple)):
        return (list if isinstance(arg, list) else tuple)(_with_places(one, nodes) for one in arg)
    return arg


def usual_origin(name: str, made_by: str) -> str:
    """The origin that is not written: a captured node holds its own value, what a pass made holds none."""
    return name if made_by == "capture" else ""


def _operands(
    node: fx.Node, known: Record, wanted: list[Layout | None], wants: str | None, tensors: list[fx.Node] | None = None
) -> tuple[Layout, ...]:
    """The wanted layouts: after `wants`, else `as` or what the operand has (see `text._operand_tails`). tensors: the
    operands that are, if they are at hand."""
    if wants is not None:
        return () if wants == "nothing" else tuple(parse_layout(text) for text in wants.split("; "))
    records = map(record, operand_nodes(node) if tensors is None else tensors)
    has = [one.layouts[0] if one.layouts else None for one in records]
    if any(wanted):
        has = [want or got for want, got in zip(wanted, has, strict=True)]
    elif not known.layouts and node.op != "output":
        return ()
    found = tuple(layout for layout in has if layout is not None)
    return found if len(found) == len(has) else ()


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(",")) if text else ()


def _unquote(text: str | None, prefix: str = "") -> str:
    if not text:
        return ""
    if text.startswith(prefix + '"'):
        return str(json.loads(text[len(prefix) :]))
    return text
