"""Note what the plan of an axis leaves whole: weights and products, and ops without a rule."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.errors import LayoutError, divisors, one_of
from autopar.ir.mesh import MICROBATCH, SLICE
from autopar.ir.program import PARTNER, record
from autopar.passes.search.axes import AxisSearch, Solution
from autopar.passes.search.heads import head_splits
from autopar.passes.search.items import Classes, Item, operations
from autopar.passes.search.search import ATTENTION, HEADS, sequences_of
from autopar.passes.search.whole_experts import whole_experts

SHOWN = 3  # products in a note
FEW = 0.05  # the share of the work that may stay whole without a word on why
HALF = 0.5  # of the work of a batch at once, above which its micro-batches say so


def axis_notes(search: AxisSearch, solution: Solution) -> list[str]:
    """List what an axis leaves undivided. Raises LayoutError if it should split the weights and splits none."""
    if search.is_idle:
        what = "the positions of this batch: every rank computes all of them"
        what = what if search.intent.context else "this batch: every rank computes all of it"
        return [f"axis '{search.axis}' (size {search.size}) cannot divide {what}"]
    notes = []
    if not solution.strict:
        notes.append(
            f"axis '{search.axis}': no plan keeps all weights in place; some are gathered (see the collectives)"
        )
    if solution.above:
        notes.append(
            f"axis '{search.axis}' (size {search.size}): the search for layouts was cut short; "
            f"as it weighs them, the cheapest may cost up to {100 * solution.above:.2g} % less"
        )
    if search.intent.only_heads:
        _check_heads(search, solution)
    if search.intent.experts:
        notes += whole_experts(search, solution)
    notes += _unbalanced(search, solution)
    if search.intent.weights_split:
        notes += _whole_weights(search.classes, search.axis, search.size)
    if search.axis != MICROBATCH:  # what micro-batches share is computed once
        return notes + _whole_products(search, solution)
    return notes + _at_once(search, solution)


def _whole_weights(classes: Classes, axis: str, size: int) -> list[str]:
    """The weights that an axis could not split; an error if it split none."""
    weights = [item for item in classes.items if item.role and item.role.multiplied]
    entries = [(item, item.role.entry) for item in weights if item.role]
    parameters = [item for item, entry in entries if entry.kind == "parameter" and not entry.name.startswith(PARTNER)]
    left = [item for item in parameters if item.states[0].get(axis) is None]
    if parameters and len(left) == len(parameters):
        lines = [_sizes_line(item, size) for item in parameters[:8]]
        advice = f"Leave '{axis}' out of the mesh (dp takes its ranks), or give a weight a size that {size} divides."
        lines = [f"axis '{axis}' (size {size}) can split no weight of the model:", *lines, advice]
        raise LayoutError("\n".join(lines))
    return [
        f"'{item.role.entry.name}' {list(item.types[0].shape)} stays replicated on '{axis}'"
        for item in left
        if item.role
    ]


def _check_heads(search: AxisSearch, solution: Solution) -> None:
    """Raise LayoutError if an axis that splits heads in place of the sequence cannot divide those of an attention."""
    for number, item in enumerate(search.classes.items):
        choice = solution.strategy(number).choice
        if item.node.target not in ATTENTION or item.rule is None or (choice is not None and choice[0] in HEADS):
            continue
        keys, group = (item.rule.sizes[name] for name in HEADS)
        known, inner = record(item.node), search.intent.heads
        after = " that 'tp' leaves of them" if inner > 1 else ""
        raise LayoutError(
            f"axis '{search.axis}' (size {search.size}) splits the heads of every attention, and cannot divide the "
            f"{keys * group // inner} heads{after} ({keys} of keys) of %{item.node.name} at {known.source} in "
            f"{known.module}: {search.axis} may be {one_of(head_splits(keys, group, inner))} here. "
            f'Or leave the choice to cp with attention="auto", which gathers keys and values where heads do not divide.'
        )


def _unbalanced(search: AxisSearch, solution: Solution) -> list[str]:
    """A note if calls whose work grows along a sequence have pieces of it in order."""
    for number, item in enumerate(search.classes.items):
        strategy, n = solution.strategy(number), search.size
        if item.rule is None or strategy.choice is None or strategy.choice[0] not in item.rule.growing:
            continue
        if search.axis == SLICE:
            break  # each rank computes them all
        if strategy.work * n > 1:
            count, known = item.rule.sizes[strategy.choice[0]], record(item.node)
            pieces = search.intent.pieces
            way = f"a multiple of {pieces} balances it" if search.intent.context else f"'cp={n}' would balance it"
            if search.intent.context and count % pieces == 0:
                way = "balanced, other ops would move more than that costs"
            return [
                f"axis '{search.axis}' (size {n}): the last rank does {strategy.work * n:.3g} times its share of "
                f"%{item.node.name} at {known.source}, since {count} positions lie in order; {way}"
            ]
    return []


def _sizes_line(item: Item, size: int) -> str:
    assert item.role is not None
    dims = [
        f"dim {dim} (size {n}) is not divisible by {size}: {one_of(divisors(n))} would do"
        if n % size
        else f"dim {dim} (size {n}) cannot be split by the ops that use it"
        for dim, n in enumerate(item.types[0].shape)
    ]
    return f"  '{item.role.entry.name}' {list(item.types[0].shape)}: " + "; ".join(dims)


def _work_whole(search: AxisSearch, solution: Solution) -> dict[int, float]:
    """The products that the axis does not divide, each with its share of the work."""
    total = operations(search.classes.items)
    return {
        number: item.rule.flops * item.count / total
        for number, item in enumerate(search.classes.items)
        if item.rule and item.rule.flops and solution.strategy(number).choice is None
    }


def _at_once(search: AxisSearch, solution: Solution) -> list[str]:
    """The products of the whole batch, where most of the work is theirs: micro-batches save no memory then."""
    work = _work_whole(search, solution)
    if sum(work.values()) <= HALF:
        return []
    largest = sorted(work, key=lambda number: (-work[number], number))
    named = [_product(search.classes.items[number], work[number]) for number in largest[:SHOWN]]
    more = f" and {len(work) - SHOWN} more" if len(work) > SHOWN else ""
    return [
        f"microbatches={search.size} divide little: {_share(sum(work.values()))} of the work is done at once, for the "
        f"whole batch, and what it keeps is kept whole: {', '.join(named)}{more}. What stands before it "
        f"mixes samples, or has none"
    ]


def _whole_products(search: AxisSearch, solution: Solution) -> list[str]:
    """The products that every rank of the axis computes, with their share of the work: the largest first."""
    classes, total = search.classes, operations(search.classes.items)
    work = _work_whole(search, solution)
    is_slice = search.axis == SLICE
    axis = f"slices={search.size}" if is_slice else f"axis '{search.axis}' (size {search.size})"
    each = f"is done {'again for' if is_slice else 'by'} each of its {search.size} {'slices' if is_slice else 'ranks'}"
    if not total:
        states = [state.get(search.axis) for item in classes.items for state in item.states]
        return [] if any(isinstance(state, tuple) for state in states) else [f"{axis} divides nothing: all work {each}"]
    if not work:
        return []
    end = _end_of_sequence(search, work) if search.intent.context and sum(work.values()) > FEW else ""
    largest = sorted(work, key=lambda number: (-work[number], number))
    named = [_product(classes.items[number], work[number]) for number in largest[:SHOWN]]
    more = f" and {len(work) - SHOWN} more" if len(work) > SHOWN else ""
    count = sum(classes.items[number].count for number in work)
    products = sum(item.count for item in classes.items if item.rule and item.rule.flops)
    what = "divides no product" if count == products else f"leaves {count} of {products} products replicated"
    note = f"{axis} {what}: {_share(sum(work.values()))} of the work {each}: {', '.join(named)}{more}{end}"
    if count == products and search.intent.context and search.may_refuse:
        raise LayoutError(f"{note}. {_no_context(search)}")
    return [note]


def _no_context(search: AxisSearch) -> str:
    """What to do where no product has positions that could be split."""
    items = [item for item in search.classes.items if item.role and item.role.entry.kind == "batch"]
    batch = "; ".join(f"batch tensor {item.role.entry.name} {list(item.types[0].shape)}" for item in items if item.role)
    what = f"a dim after the first of {batch}, which the products keep"
    if search.axis == SLICE:
        return f"slices cut a sequence: {what}. Use slices=1, and more micro-batches."
    return (
        f"'{search.axis}' splits a sequence: {what}. "
        f"Leave it out of the mesh, and give its ranks to another axis, e.g. dp."
    )


def _end_of_sequence(search: AxisSearch, work: Mapping[int, float]) -> str:
    """The nearest op before the largest whole product that takes split positions and gives none."""
    classes = search.classes
    sequences = sequences_of(classes, search.intent)

    def is_split(i: int, result: int) -> bool:
        shape = classes.items[i].types[result].shape
        return any(shape[dim] % (outer * search.size) == 0 for dim, outer in sequences.get((i, result), ()))

    pending = sorted(work, key=lambda number: (-work[number], number))[:1]
    known = set(pending)
    for i in pending:
        item = classes.items[i]
        given = [source for source in item.sources if source[0] not in classes.of_parameters]
        if item.rule and any(is_split(*source) for source in given):
            if not any(is_split(i, result) for result in range(len(item.types))):
                return f"; no split of the positions gets through {_where(item)}"
            continue
        pending += [source for source in dict.fromkeys(source for source, _ in given) if source not in known]
        known |= {*pending}
    return ""


def _product(item: Item, share: float) -> str:
    """`%einsum_3 at model.py:12 in head (17 %)`."""
    times = f", {item.count} times" if item.count > 1 else ""
    return f"{_where(item)} ({_share(share)}{times})"


def _where(item: Item) -> str:
    known = record(item.node)
    place = f" at {known.source}" if known.source else ""
    module = f" in {known.module}" if known.module else ""
    return f"%{item.node.name}{place}{module}{' backward' if known.is_backward else ''}"


def _share(share: float) -> str:
    return f"{100 * share:.3g} %"


def rule_notes(classes: Classes) -> list[str]:
    """List the ops that have no rule."""
    notes = []
    for item in classes.items:
        if not item.has_row:
            where = record(item.node).source
            bytes_ = sum(type_.bytes_ for type_ in item.types) * item.count
            hint = "" if str(item.node.target).startswith("aten.") else "; autopar.register_rule can give it one"
            notes.append(
                f"op '{item.node.target}' has no rule: replicated, computed on every rank "
                f"({item.count} times, {bytes_ / 1e6:.3g} MB of results; first at {where}){hint}"
            )
    return notes
