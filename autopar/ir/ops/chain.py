"""The types of a chain: of all values of its step (`chain_step.py`), and of what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.chain_step import FIXED, ROWS, STATES, ChainBody, read_body, values_of
from autopar.ir.program import Record, TensorType, record, set_record


@lru_cache(maxsize=256)
def typed_body(text: str, operands: tuple[TensorType, ...]) -> ChainBody:
    """The step with a record of types on each node. operands: those of `ChainBody.operands`; of rows one row. Raises
    ValueError if the step cannot be computed of them."""
    body = _copy(read_body(text))
    if len(operands) != len(body.operands):
        raise ValueError(f"the step takes {len(body.operands)} operands, and is given {len(operands)}")
    for node, type_ in zip(body.operands, operands, strict=True):
        set_record(node, Record((type_,)))
    values = values_of(body, [torch.empty(one.shape, dtype=one.dtype, device="meta") for one in operands])
    for node in body.calls:
        made = values[node]
        several = isinstance(made, (tuple, list))
        types = (
            None if one is None else TensorType(tuple(one.shape), one.dtype) for one in (made if several else [made])
        )
        set_record(node, Record(tuple(types), several=several))
    for state, after in zip(body.of_kind(STATES), body.next, strict=True):
        if record(state).types != record(after).types:
            raise ValueError(f"%{state.name} is {record(state).type}, and {record(after).types} after the step")
    return body


def _copy(body: ChainBody) -> ChainBody:
    graph = fx.Graph()
    value: dict[fx.Node, fx.Node] = {}
    for node in (*body.operands, *body.calls):
        value[node] = graph.node_copy(node, value.__getitem__)
    rows, after = (tuple(value[one] for one in ends) for ends in (body.rows, body.next))
    graph.output((rows, after))
    return ChainBody(graph, rows, after)


def operand_types(start: Sequence[TensorType], rows: Sequence[TensorType], fixed: Sequence[TensorType]) -> Any:
    """The types of a step's operands, for those of a chain."""
    return (*start, *(TensorType(one.shape[1:], one.dtype) for one in rows), *fixed)


def result_types(text: str, start: Any, rows: Any, fixed: Any) -> tuple[TensorType, ...]:
    """The types of the results of a chain. Raises ValueError where operands do not fit."""
    lengths = {one.shape[0] for one in rows}
    if len(lengths) != 1:
        raise ValueError(f"operands have rows for {sorted(lengths)} steps")
    given = [len(one) for one in (start, rows, fixed)]
    body = typed_body(text, operand_types(start, rows, fixed))
    wanted = [len(body.of_kind(kind)) for kind in (STATES, ROWS, FIXED)]
    if given != wanted:
        raise ValueError(f"the step has {wanted} states, rows and fixed operands, and is given {given}")
    (length,) = lengths
    return tuple(TensorType((length, *record(one).type.shape), record(one).type.dtype) for one in body.rows)
