"""What a semantic op declares of itself; the ops are in `ops.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

NAMESPACE = "autopar"

# In which dtype an op computes under mixed precision. low: the short one. high: float32. inside: it takes what it is
# given and computes in float32, element by element: nothing is copied. sum: it takes what it is given, adds in float32
# and gives that. widest: that of its operands; promoting: so too, and torch takes operands of two dtypes as they are.
Precision = Literal["low", "high", "inside", "sum", "promoting", "widest"]
# Where the elements of an operand are in a result. same: each at its place, cast perhaps. flat: in their order, in
# other dims. turned: in dims of another order. repeated: along new dims, and those of size 1. joined: behind those of
# another operand. taken: looked up by an index. put, added: at an index, in or to what is there. sorted: by their size.
Moves = Literal["", "same", "flat", "turned", "repeated", "joined", "taken", "put", "added", "sorted"]


@dataclass(frozen=True, slots=True)
class SemanticOp:
    """An op that keeps what aten would take apart: all that is true of it wherever it runs.

    meta: makes the results without data. precision, moves: see above. statistic: the place of an argument that stays
    float32 under any precision. random: it draws from a seed; placed: as its rows are told to, wherever they are.
    pointwise: it computes each element of those at its place. returns_operand: it may give back its first operand as it
    is. gradient: its autograd function in capture/ops/functions.py; "" for what is a gradient itself, or has none.

    Beside this an op has a row in passes/rules/ and a `Kernel` in runtime/;
    tests/ir/test_semantic_ops.py asks for both.
    """

    schema: str
    meta: Callable[..., Any]
    precision: Precision = "widest"
    statistic: int | None = None
    random: bool = False
    placed: bool = False
    pointwise: bool = False
    moves: Moves = ""
    returns_operand: bool = False
    gradient: str = ""

    @property
    def name(self) -> str:
        return name_of(self.schema)


def semantic(schema: str, **facts: Any) -> Callable[[Callable[..., Any]], SemanticOp]:
    """Declare an op by its schema and facts; the function below it makes its results without data."""
    return lambda meta: SemanticOp(schema, meta, **facts)


def name_of(schema: str) -> str:
    """The name of the op that a schema declares."""
    return schema.split("(", 1)[0]
