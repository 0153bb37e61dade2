"""Say which experts an axis of experts leaves whole, and why; an error if it divides none."""

from __future__ import annotations

import math

from autopar.errors import LayoutError, divisors, one_of
from autopar.ir.layout import OWNED
from autopar.ir.ops.op_facts import facts_of, is_view
from autopar.ir.ops.ops import op
from autopar.ir.program import record
from autopar.passes.search.axes import AxisSearch, Solution
from autopar.passes.search.items import Classes, Item, operations

_BY_EXPERT = (op("expert_mm"), op("expert_mm_backward"))
SHOWN = 4  # lines of an error
ONE_BY_ONE = "takes one at a time"  # in the note of a loop over experts that stays as it is


def whole_experts(search: AxisSearch, solution: Solution) -> list[str]:
    """List the products by expert that each rank has all matrices of, and what is taken for experts where no index
    tells them. Raises LayoutError if the axis divides none."""
    classes, axis, size = search.classes, search.axis, search.size
    products = [i for i, item in enumerate(classes.items) if item.rule and item.rule.flops and _picks(item)]
    left = [i for i in products if (solution.strategy(i).choice or ("", 1))[1] != OWNED]
    why = [line for i in left if (line := _reason(classes, classes.items[i], axis, size))]
    looked_up = [(item, found) for i, item in enumerate(classes.items) if (found := _lookup(classes, i)) is not None]
    why += [_batched(item, classes.items[found]) for item, found in looked_up]
    # Where no index tells experts, they are what a product has a matrix of for each part of the batch.
    batched = [] if products else [i for i, item in enumerate(classes.items) if item.role and item.role.experts]
    kept = [i for i in batched if not solution.strategy(i).results[0]]
    why += [_undivided(search, i) for i in kept]
    if len(left) + len(kept) == len(products) + len(batched) and search.may_refuse:
        nothing = f"the model has no product that takes the matrix of each row by an index{_loop(classes)}"
        lines = "\n".join(f"  {line}" for line in list(dict.fromkeys(why))[:SHOWN] or [nothing])
        raise LayoutError(f"axis '{axis}' (size {size}) splits experts, and can split none of the model:\n{lines}")
    are_loops = any(ONE_BY_ONE in note for note in classes.notes)
    alone = [i for i, item in enumerate(classes.items) if are_loops and _is_by_one(item)]
    why += ["loops that take one expert at a time (see their notes)"] * bool(alone)
    notes = [_taken_for_experts(search, [i for i in batched if i not in kept])] if len(batched) > len(kept) else []
    if not why:
        return notes
    whole = {
        *left,
        *alone,
        *(user for i in kept for user in _products(classes, i)),
        *(i for _, found in looked_up for i in _products(classes, found)),
    }
    return [*notes, _left_whole(search, whole, why)]


def _left_whole(search: AxisSearch, whole: set[int], why: list[str]) -> str:
    """Say what share of the work whole experts are, and why they are whole."""
    items = search.classes.items
    share = operations([items[i] for i in sorted(whole)]) / max(1, operations(items))
    return (
        f"axis '{search.axis}' (size {search.size}) leaves experts whole, {100 * share:.3g} % of the work: "
        + "; ".join(list(dict.fromkeys(why))[:SHOWN])
    )


def _taken_for_experts(search: AxisSearch, split: list[int]) -> str:
    """Name the matrices [E, ..] of products with as many parts of the batch: they may be of something else."""
    items = [search.classes.items[i] for i in split]
    found = [f"'{item.role.entry.name}' {list(item.types[0].shape)}" for item in items if item.role is not None]
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return (
        f"axis '{search.axis}' (size {search.size}) takes for experts what as many parts of the batch are multiplied "
        f"by: {', '.join(found[:SHOWN])}{more}. If they are of heads, say, give its ranks to tp or dp"
    )


def _is_by_one(item: Item) -> bool:
    return item.node.target in _BY_EXPERT and not _picks(item)


def _products(classes: Classes, lookup: int) -> list[int]:
    """The products of what gives each row a copy of its matrix, and those of their gradients."""
    known, pending, products = {lookup}, [lookup], list[int]()
    for value in pending:
        for user, _ in classes.users(value):
            if user in known:
                continue
            known.add(user)
            if classes.items[user].is_product:
                products.append(user)
            elif is_view(classes.items[user].node.target):
                pending.append(user)
    return products


def _picks(item: Item) -> bool:
    """True for a product by expert; the rule of one for a single expert has nothing to divide."""
    return item.rule is not None and item.rule.owned is not None


def _reason(classes: Classes, item: Item, axis: str, size: int) -> str | None:
    """Why the matrices of a product stay whole; None for one that makes their gradient."""
    assert item.rule is not None and item.rule.owned is not None
    count = item.rule.sizes[item.rule.owned[1]]
    position = next((i for i, dims in enumerate(item.rule.operands) if (item.rule.owned[1],) in dims), None)
    if position is None:
        return None
    name = _parameter(classes, item.sources[position][0])
    whose = f"of {name}" if name else f"of %{item.node.name} at {record(item.node).source}"
    left = count // math.prod(pieces for choice, pieces in item.taken if choice[1] == OWNED)
    if left % size:
        return _undividable(axis, size, count, left, whose)
    return f"the {count} experts {whose} are used by calls that cannot have rows at their experts"


def _undividable(axis: str, size: int, count: int, left: int, whose: str) -> str:
    those = f"the {count} experts {whose}" + f", {left} in each piece" * (left < count)
    return f"{axis}={size} does not divide {those}: {axis} may be {one_of(divisors(left))}"


def _undivided(search: AxisSearch, i: int) -> str:
    """Why the matrices [E, ..] of a product with as many parts of the batch stay whole."""
    item, whose = search.classes.items[i], f"of {_parameter(search.classes, i)}"
    earlier = [search.mesh[axis] for axis, state in item.states[0].items() if isinstance(state, tuple) and not state[0]]
    count = item.types[0].shape[0]
    left = count // math.prod(earlier)
    if left % search.size:
        return _undividable(search.axis, search.size, count, left, whose)
    return f"the {count} experts {whose} are used by calls that need all of them"


def _parameter(classes: Classes, i: int) -> str | None:
    """The name of the parameter that a value is, or is a view of."""
    while classes.items[i].role is None and classes.items[i].sources:
        i = classes.items[i].sources[0][0]
    role = classes.items[i].role
    return role.entry.name if role is not None and role.entry.kind == "parameter" else None


def _lookup(classes: Classes, i: int) -> int | None:
    """What gives each row a copy of its matrix, `w[index]`, for a batched product; None if a value is no such w."""
    item = classes.items[i]
    if item.role is None or item.role.entry.kind != "parameter" or len(item.types[0].shape) < 3:
        return None
    pending = [i]
    for value in pending:
        for user, position in classes.users(value):
            if position == 0 and facts_of(classes.items[user].node.target).moves == "taken":
                return user
            if user in classes.of_parameters and user not in pending:
                pending.append(user)
    return None


def _batched(item: Item, lookup: Item) -> str:
    assert item.role is not None
    return (
        f"'{item.role.entry.name}' {list(item.types[0].shape)} is looked up for each row at "
        f'{record(lookup.node).source}, a batched product: with transformers set experts_implementation="grouped_mm", '
        f"else sort rows by expert and use F.grouped_mm"
    )


def _loop(classes: Classes) -> str:
    """Say of a loop over experts why it takes one at a time, and what to write in place of what is there."""
    why, instead = "", ""
    for item in classes.items:
        if item.node.target is op("expert_mm"):
            known = record(item.node)
            default = f"the loop over experts at {known.source} in {known.module or 'the model'} {ONE_BY_ONE}"
            why = f" ({next((note for note in classes.notes if ONE_BY_ONE in note), default)})"
            instead = "let index_add_ alone put back what an expert computes, or "
            break
    return (
        f"{why}: {instead}sort rows by expert and use F.grouped_mm, with transformers "
        f'experts_implementation="grouped_mm"; or stack the matrices, [experts, ..], and multiply rows that are put '
        f"together by expert, [experts, rows, ..], by torch.bmm; or give the ranks to dp or tp"
    )
