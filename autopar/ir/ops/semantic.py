"""What a semantic op declares of itself; the ops are in `ops.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

NAMESPACE = "autopar"


@dataclass(frozen=True, slots=True)
class SemanticOp:
    """An op that keeps what aten would take apart: all that is true of it wherever it runs.

    meta: makes the results without data. precision: in which dtype it computes under mixed precision (a `Kind` of
    passes/precision/kinds.py); statistic: the place of an argument that stays float32 all the same. random: it draws
    from a seed. returns_operand: it may give back its first operand as it is. gradient: its autograd function in
    capture/ops/functions.py; "" for what is a gradient itself, or has none.

    Beside this an op has a row in passes/rules/ and a `Kernel` in runtime/;
    tests/ir/test_semantic_ops.py asks for both.
    """

    schema: str
    meta: Callable[..., Any]
    precision: Literal["low", "high", "inside", "widest"] = "widest"
    statistic: int | None = None
    random: bool = False
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
