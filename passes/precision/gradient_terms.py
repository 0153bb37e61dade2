"""The calls through which the terms of a gradient go: from the product that makes one to where the gradient leaves.

For a weight that a product sees through a view, a cat, a mask, a norm, the backward pass has as many calls between the
two. Each value there may be a partial sum, so what is asked of sums of gradients is asked of all of them.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.errors import RuleError, VerificationError
from autopar.ir.ops.names import dtype_name
from autopar.ir.ops.ops import is_collective, is_mesh_op
from autopar.ir.ops.storage import is_view
from autopar.ir.plan import Plan
from autopar.ir.program import Program, is_getitem, operand_nodes, record
from autopar.passes.rules import Rules, call_of, table_of
from autopar.passes.rules.rule import Rule, Table


def gradient_terms(program: Program, table: Table) -> dict[fx.Node, list[fx.Node]]:
    """The calls, of any level, that gradients go through behind the products that make them, with the terms they read.

    Such a call reads one value that the batch feeds, or adds up several (beside what it reads of parameters: a mask, a
    norm), and contracts nothing: what it reads is as much a gradient of the weight as what it gives. It is looked for
    from the gradients on.
    """
    fed = _fed_by_batch(program)
    rules, gradient_terms = Rules(table), dict[fx.Node, list[fx.Node]]()
    pending = [node for node, out in program.leaving if node is not None and out.kind == "gradient"]
    while pending:
        node = pending.pop()
        if node in gradient_terms or node.op != "call_function":
            continue
        terms = [i for i, operand in enumerate(operand_nodes(node)) if operand in fed]
        if _passes_on(node, frozenset(terms), rules):
            gradient_terms[node] = [operand_nodes(node)[i] for i in terms]
            pending += gradient_terms[node]
    return gradient_terms


def check_sums(program: Program, plan: Plan) -> None:
    """Check the sums of gradients of an EXPLICIT program. Raises VerificationError that names those in a dtype that is
    too short."""
    if plan.options.sums_dtype is None:
        return
    asked, found = plan.options.reduce_dtype, []
    terms = gradient_terms(program, table_of(plan))
    for node in program.nodes:
        if node not in terms or not is_collective(node.target) or node.args[-1] != "sum":
            continue
        dtype, where = record(operand_nodes(node)[0]).type.dtype, record(node).module or "no module"
        if is_short(dtype, asked):
            found.append(f"%{node.name} ({where}, {record(node).source}) over '{node.args[1]}' in {dtype_name(dtype)}")
    if found:
        raise VerificationError(
            f"reduce_dtype is {dtype_name(asked)}, but gradients are summed otherwise: {', '.join(found)}."
        )


def sum_dtype(dtype: torch.dtype, sums: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of `dtype` are summed where `sums` is asked for: that, but float32, as which
    it is there for short ones if nobody says otherwise, shortens no float64."""
    is_cast = dtype.itemsize <= sums.itemsize or sums.itemsize < torch.float32.itemsize
    return sums if dtype.is_floating_point and is_cast else dtype


def is_short(dtype: torch.dtype, sums: torch.dtype) -> bool:
    """True for a float in which nothing may be summed that should be in `sums`: a shorter one, or another short one."""
    return dtype.is_floating_point and dtype != sums and dtype.itemsize <= sums.itemsize


def _fed_by_batch(program: Program) -> set[fx.Node]:
    fed = {node for node, entry in program.entries if entry.kind == "batch"}
    for node in program.calls():
        if any(operand in fed for operand in node.all_input_nodes):
            fed.add(node)
    return fed


def _passes_on(node: fx.Node, terms: frozenset[int], rules: Rules) -> bool:
    if is_getitem(node) or is_view(node) or is_mesh_op(node.target):
        return True
    try:
        pair = rules.of(call_of(node))
    except RuleError:  # of a user's op: the search tells of it
        return False
    if pair is None or pair[0].flops:
        return False
    rule = pair[0]
    return (len(terms) == 1 or terms in rule.linear) and not any(_is_contracted(rule, i) for i in terms)


def _is_contracted(rule: Rule, operand: int) -> bool:
    """True if a call adds up an operand along a name that may be split: rows of the batch are, for a bias."""
    kept = {name for dims in rule.results for dim in dims for name in dim}
    names = {name for dim in rule.operands[operand] for name in dim}
    return any(rule.sizes[name] > 1 for name in names - kept - rule.replicated)
