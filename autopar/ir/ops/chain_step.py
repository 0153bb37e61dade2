"""One step of a recurrence as text: the body of `autopar::chain`.

    v0 = autopar.einsum.default(h0, w0, "ab,bc->ac"); v1 = aten.add.Tensor(v0, x0); v2 = aten.tanh.default(v1); rows = [v2]; states = [v2]

`h0, h1, ..`: the carried states, as the step before left them. `x0, ..`: one row of each operand that has one for every
step. `w0, ..`: operands that are the same in all steps. `rows`: what the step gives. `states`: h0, h1, .. of the next
step. It is data, as the equation of an einsum is: read here, never evaluated, and of ops of aten and autopar alone.
"""  # noqa: E501

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from autopar.errors import ArtifactError
from autopar.ir.ops.names import DTYPES, WORDS, dtype_name, find_target, target_name
from autopar.ir.ops.semantic import semantic

_OPERAND = re.compile(r"([hxw])(\d+)\Z")
STATES, ROWS, FIXED = "hxw"
Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, eq=False, slots=True)
class ChainBody:
    """A step as a graph. rows: what it gives; next: the states after it."""

    graph: fx.Graph
    rows: tuple[fx.Node, ...]
    next: tuple[fx.Node, ...]

    @property
    def calls(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "call_function"]

    @property
    def operands(self) -> list[fx.Node]:
        """Its placeholders: states, rows and what is fixed, each in order."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    def of_kind(self, kind: str) -> list[fx.Node]:
        """The placeholders whose names begin with a letter."""
        return [node for node in self.operands if node.name[0] == kind]


@lru_cache(maxsize=256)
def read_body(text: str) -> ChainBody:
    """The step that a text says. Raises ArtifactError."""
    try:
        return _Reader(ast.parse(text).body).read()
    except (SyntaxError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"the step of a chain cannot be read: {error}\n    {text[:200]}") from None


def print_body(body: ChainBody) -> str:
    """The text of a step; its values are numbered in order."""
    names: dict[fx.Node, str] = {node: node.name for node in body.operands}
    lines = []
    for i, node in enumerate(body.calls):
        given = [_text(arg, names) for arg in node.args]
        given += [f"{key}={_text(arg, names)}" for key, arg in node.kwargs.items()]
        names[node] = f"v{i}"
        lines.append(f"v{i} = {target_name(node.target)}({', '.join(given)})")
    ends = {"rows": body.rows, "states": body.next}
    lines += [f"{what} = [{', '.join(map(names.__getitem__, nodes))}]" for what, nodes in ends.items()]
    return "; ".join(lines)


def _text(arg: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(arg, fx.Node):
        return names[arg]
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(_text(one, names) for one in arg)}]"
    if isinstance(arg, str):
        return json.dumps(arg)
    return dtype_name(arg) if arg in DTYPES.values() else str(arg)


class _Reader:
    def __init__(self, lines: Sequence[ast.stmt]) -> None:
        self.lines, self.graph = lines, fx.Graph()
        self.values: dict[str, fx.Node] = {}

    def read(self) -> ChainBody:
        self._make_operands()
        ends: dict[str, tuple[fx.Node, ...]] = {}
        for line in self.lines:
            assert isinstance(line, ast.Assign)
            name, value = self._name(line.targets[0]), line.value
            if isinstance(value, ast.Call):
                args = tuple(map(self._argument, value.args))
                kwargs = {str(one.arg): self._argument(one.value) for one in value.keywords}
                target = find_target(self._name(value.func))
                self.values[name] = self.graph.create_node("call_function", target, args, kwargs, name=name)
            else:
                ends[name] = tuple(self._argument(value))
        self.graph.output((ends["rows"], ends["states"]))
        return ChainBody(self.graph, ends["rows"], ends["states"])

    def _make_operands(self) -> None:
        """Placeholders for all that the lines name, in order, without gaps."""
        names = [node.id for line in self.lines for node in ast.walk(line) if isinstance(node, ast.Name)]
        found = [match for name in names if (match := _OPERAND.match(name))]
        for kind in (STATES, ROWS, FIXED):
            for i in range(1 + max((int(one[2]) for one in found if one[1] == kind), default=-1)):
                self.values[f"{kind}{i}"] = self.graph.placeholder(f"{kind}{i}")

    def _name(self, node: ast.expr) -> str:
        if isinstance(node, ast.Attribute):
            return f"{self._name(node.value)}.{node.attr}"
        if not isinstance(node, ast.Name):
            raise ValueError(f"'{ast.unparse(node)}' is no name")
        return node.id

    def _argument(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List):
            return [self._argument(one) for one in node.elts]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._argument(node.operand)
        name = self._name(node)
        return self.values[name] if name in self.values else WORDS[name]


def values_of(body: ChainBody, operands: Sequence[torch.Tensor]) -> dict[fx.Node, Any]:
    """What a step makes of tensors without data. Raises ValueError if it cannot be computed of them."""
    values: dict[fx.Node, Any] = dict(zip(body.operands, operands, strict=True))
    for node in body.calls:
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
        if not node.all_input_nodes:
            kwargs = {**kwargs, "device": "meta"}
        try:
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, IndexError, TypeError) as error:
            raise ValueError(f"%{node.name} = {node.target} cannot be computed: {error}") from None
    return values


def empty_results(start: Tensors, rows: Tensors, fixed: Tensors, text: str) -> list[torch.Tensor]:
    """The results of a chain without data."""
    body, length = read_body(text), len(rows[0])
    shapes = [(tuple(one.shape), one.dtype) for one in (*start, *(row[0] for row in rows), *fixed)]
    values = values_of(body, [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes])
    made = [values[one] for one in body.rows]
    return [torch.empty((length, *one.shape), dtype=one.dtype, device=rows[0].device) for one in made]


@semantic("chain(Tensor[] start, Tensor[] rows, Tensor[] fixed, str step, bool reverse) -> Tensor[]", precision="high")
def chain(start: Tensors, rows: Tensors, fixed: Tensors, step: str, reverse: bool) -> list[torch.Tensor]:
    """What `step` (see chain_step.py) gives for each of the rows in turn, with dim 0 for the steps. start: the states
    that the first step reads. fixed: what all steps read. reverse: the last row comes first."""
    return empty_results(start, rows, fixed, step)


SEMANTIC = (chain,)
