"""A group of calls that run as one kernel, as the target of one node.

    %mul_add: (f32[4,16] [-,-]) = fused.points "mul_add"(%x, %y)   # by fuse
        %x: f32[4,16] [-,-] = operand
        %y: f32[4,16] [-,-] = operand
        %mul: f32[4,16] [-,-] = aten.mul.Tensor(%x, %y)
        %add: f32[4,16] [-,-] = aten.add.Tensor(%mul, %x)
        return %add
    %add: f32[4,16] [-,-] = operator.getitem(%mul_add, 0)

The node's arguments are its operands, tensors and integers (an offset of the rank), no keywords; its results are read
by `getitem`. Its record has the types and layouts of the results, and `several`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from torch import fx

from autopar.ir.mesh import Mesh

POINTS, ROWS, COLUMNS = "points", "rows", "columns"
KINDS = (POINTS, ROWS, COLUMNS)


@dataclass(frozen=True, eq=False, slots=True)
class Fused:
    """What a fused node computes.

    graph: its placeholders stand for the node's operands, in order, each with the record of its operand (type None for
    an integer); its calls are calls of the program with their LOCAL records; it returns a tuple of results. A result
    may be a permutation of an inner value that is no result; none shares memory with another, nor with an operand.
    name: of what it does, e.g. `rms_norm_add`. kind: points (element by element), rows (with reductions along the last
    dim or dims) or columns (with sums along all leading dims, too). mesh: of the program, which gives the local shape
    of a value (`measure.local_type`).
    """

    graph: fx.Graph
    name: str
    kind: str
    mesh: Mesh

    @property
    def __name__(self) -> str:
        return f"fused.{self.kind} {self.name}"

    @property
    def placeholders(self) -> list[fx.Node]:
        """The placeholders of the body, one for each operand of the node."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def calls(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "call_function"]

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """The calls whose values the node gives, in order."""
        (results,) = self.graph.output_node().args
        return tuple(results)  # type: ignore[arg-type]

    def __call__(self, *_: Any) -> NoReturn:
        """Refuse: torch.fx wants a target that can be called, and only the executor knows how to run this one."""
        raise TypeError(f"{self.__name__} is run by the executor")


def fused_of(node: fx.Node) -> Fused | None:
    """The group that a node runs; None for any other node."""
    return node.target if isinstance(node.target, Fused) else None
