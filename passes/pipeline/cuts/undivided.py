"""Refuse products of rows that micro-batches do not divide, where a pipeline could compute them only whole, on each
stage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from torch import fx

from autopar.errors import LayoutError
from autopar.ir.mesh import DATA_AXES
from autopar.ir.plan import Plan
from autopar.ir.program import Program, record
from autopar.passes.pipeline.cuts.when import NodeTimes, When


def check_divided(program: Program, times: NodeTimes, plan: Plan) -> None:
    """Raise LayoutError if no product of the forward pass is one of a micro-batch."""
    whole = next(_whole(program, times), None)
    if whole is not None and not any(record(node).flops and times.is_forward(node) for node in program.calls()):
        raise _refusal(whole, plan)


def check_once(graphs: Iterable[Program], plan: Plan, timed: Callable[[], tuple[Program, NodeTimes]]) -> None:
    """Raise LayoutError if several graphs compute such a product. timed: gives the program with its times."""
    calls = (node for graph in graphs for node in graph.calls() if record(node).flops)
    found = Counter(node.name for node in calls)
    if any(count > 1 for count in found.values()):
        for node in _whole(*timed()):
            if found[node.name] > 1:
                raise _refusal(node, plan)


def _whole(program: Program, times: NodeTimes) -> Iterator[fx.Node]:
    """The products of weights with rows of the batch, not of a micro-batch."""
    entries, kinds = dict(program.entries), dict[fx.Node, frozenset[str]]()
    for node in program.nodes:
        own = frozenset({entries[node].kind}) if node in entries else frozenset()
        kinds[node] = own.union(*(kinds[operand] for operand in node.all_input_nodes))
        is_whole = times.of.get(node) is When.INVARIANT and node.op == "call_function"
        if is_whole and record(node).flops and {"parameter", "batch"} <= kinds[node]:
            yield node


def _refusal(node: fx.Node, plan: Plan) -> LayoutError:
    known = record(node)
    rows = known.type.shape[0] if known.is_tensor and len(known.type.shape) > 1 else 1
    parts = plan.microbatches * math.prod(plan.mesh[axis] for axis in DATA_AXES if axis in plan.mesh)
    why = f", which do not fall into {parts} parts (one of each micro-batch and rank that splits the batch)"
    ways = f"a multiple of {parts} rows at a time, or " if rows % parts else ""
    return LayoutError(
        f"op '{node.target}' ({known.source}) computes {rows} rows of the batch at once{why if rows % parts else ''}. "
        f"Only what is of one micro-batch goes through a pipeline. Give the model {ways}the whole batch, and take its "
        f"results apart (a, b = model(x).chunk(2)); or leave pp out."
    )
