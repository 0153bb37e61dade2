"""The search for one axis: candidates, then the exact choice over classes of identical calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

from autopar.ir.layout import OWNED
from autopar.ir.mesh import MICROBATCH
from autopar.ir.ops.ops import op, op_name
from autopar.ir.program import TensorType
from autopar.passes.rules.rule import Dims, Halo, Rule
from autopar.passes.rules.splits import Choice, Split, choice_at, place
from autopar.passes.rules.states import State, Strategy, strategies
from autopar.passes.search.intents import BYTES_PER_REPLICA, Intent, Role, homes
from autopar.passes.search.items import Classes, Item, operand_types, used_role
from autopar.passes.search.row_owners import RowOwners
from autopar.passes.search.solver.problem import Edge, Problem

# What moving a value between two states of an axis costs, in bytes per rank (ring algorithms).

# A collective's fixed cost.
BYTES_PER_COLLECTIVE = 16.0

# For each byte of a result that an op makes of partial sums: nothing moves, but the parts are kept beside the sum. So a
# sum is taken where its parts are made (a residual stream is kept whole).
BYTES_PER_SUM = 1e-4


def move_cost(source: State, target: State, bytes_: float, size: int) -> float:
    """The bytes per rank that turn `source` into `target`, for a value of `bytes_` when replicated on this axis, with
    terms below a byte that break ties."""
    if source == target:
        return 0.0
    share = (size - 1) / size
    home = homes(source, target)
    if home != (source, target):  # by way of home; where owners have as many rows each
        ways = (source != home[0]) + (target != home[1])
        return move_cost(*home, bytes_, size) + ways * (share * bytes_ / size + BYTES_PER_COLLECTIVE)
    if source is None:
        # A slice, or zeros but on the first rank: nothing moves. The tiny cost prefers not to.
        return BYTES_PER_COLLECTIVE / 16
    if isinstance(source, str):
        reduced = 2 * share * bytes_ * (2 if source == "logsumexp" else 1) + BYTES_PER_COLLECTIVE
        if isinstance(target, tuple) and source == "sum":
            return share * bytes_ + BYTES_PER_COLLECTIVE
        return reduced + (move_cost(None, target, bytes_, size) if target is not None else 0.0)
    if target is None:
        return share * bytes_ + BYTES_PER_COLLECTIVE
    if isinstance(target, tuple):
        return share * bytes_ / size + BYTES_PER_COLLECTIVE
    return share * bytes_ + BYTES_PER_COLLECTIVE + move_cost(None, target, bytes_, size)


# What a program cuts out of its batch before any weight sees it: sequences, `x[:, :-1]` of tokens `x`, and samples, the
# halves of `a, b = x.chunk(2)`, as siamese and meta-learning losses take them.


def cut_from_batch(classes: Classes) -> Iterator[tuple[int, int]]:
    """The results that are computed of the batch and of no parameter, as (class, result)."""
    trained = [i for i, item in enumerate(classes.items) if item.role and item.role.entry.kind == "parameter"]
    fed = set(trained)
    while trained:
        users = {user for user, _ in classes.users(trained.pop())} - fed
        fed |= users
        trained += users
    for i in sorted(classes.of_batch - fed):
        if classes.items[i].rule is not None:
            yield from ((i, result) for result in range(len(classes.items[i].types)))


def cut_dims(rule: Rule, number: int, reached: Collection[Split], outers: tuple[int, ...]) -> list[Split]:
    """Splits of the dims of a result, but the first, which its call cannot split and no split reached."""
    known = {dim for dim, _ in reached}
    dims = enumerate(rule.results[number])
    cut = [dim for dim, names in dims if dim and dim not in known and rule.replicated & {*names}]
    return [(dim, outer) for dim in cut for outer in outers]


def cut_rows(
    rule: Rule, number: int, operands: Collection[tuple[Collection[Split], Dims]], samples: Collection[int]
) -> list[Split]:
    """The splits of the samples of a result, whose call cannot split those of an operand: of the same dim, or, where
    that is gone, of one with which it was all samples, as of `x.view(2, -1, n)[0]`. operands: of each its splits that
    were reached, and its dims. samples: how many there are, of each tensor of the batch."""
    sizes, result, found = dict(rule.sizes), rule.results[number], dict[int, None]()
    lengths = [math.prod(sizes[name] for name in names) for names in result]
    left = {name for names in result for name in names}
    for splits, dims in operands:
        for dim in (dim for dim, outer in splits if outer == 1):
            if len(dims) == len(result) and rule.replicated & {*dims[dim]} and result[dim]:
                found[dim] = None
            if len(dims) > len(result) and left.isdisjoint(dims[dim]):
                gone = math.prod(sizes[name] for name in dims[dim])
                found.update(dict.fromkeys([at for at, length in enumerate(lengths) if gone * length in samples][:1]))
    return [(dim, 1) for dim in found]


WHOLE_WEIGHT = 1000.0  # for each byte of a weight that stays replicated because nothing else is possible
# By how much the work of a product that every rank does counts more: the axis was asked for to divide it, and what it
# divides should not hang on a short sequence.
WHOLE_PRODUCT = 200.0
SHARED = 6  # a weight that as many products multiply has its layout guessed first, see `solve.py`
MIRRORED = 1e-3  # bytes: where mirrored pieces balance no work, pieces in order are the simpler ones
MAX_OUTERS = 4  # candidate sub-splits of one name: more make the search slow, and never were of use
ATTENTION = frozenset(
    op(f"{kind}attention{half}") for kind in ("", "dropped_", "compared_") for half in ("", "_backward")
)  # what looks along a whole sequence
GRADIENTS_OF_ATTENTION = frozenset(target for target in ATTENTION if op_name(target).endswith("_backward"))
HEADS = ("k", "g")  # the names of its heads: of keys, and of the queries that share one

Options = list[list[tuple[Strategy, float]]]


def with_whole_weights(classes: Classes, options: Options, pins: Mapping[str, Mapping[str, State]]) -> Options:
    """The same options, and for every parameter that the user did not place the one to be replicated, at a price."""
    found = list(options)
    for i, item in enumerate(classes.items):
        role = item.role
        if role is None or role.entry.kind != "parameter" or role.entry.name in pins:
            continue
        if all(strategy.results != (None,) for strategy, _ in options[i]):
            price = WHOLE_WEIGHT * role.type.bytes_ * item.count
            found[i] = [*options[i], (Strategy((), (None,)), price)]
    return found


def options_of(
    classes: Classes,
    axis: str,
    size: int,
    intent: Intent,
    pins: Mapping[str, Mapping[str, State]],
    sizes: dict[str, int],
    per_flop: float,
    whole: Collection[int] = (),
) -> Options:
    """List the strategies of each item on one axis, with their costs in bytes per rank (see costs.py).

    A call may run as its rule allows: replicated, split along a candidate name, or linear in partial sums. A parameter
    or batch tensor may have the states that the intent of the axis gives it and all its users accept, or its pin alone.
    pins: by parameter, the state on each axis that the user fixed. sizes: of the axes that were searched before.
    per_flop: bytes that an operation of a product counts as. whole: the numbers of items that run whole.
    """
    found_names = candidates(classes, intent)
    options: Options = []
    for number, (item, names) in enumerate(zip(classes.items, found_names, strict=True)):
        if item.rule is None:
            options.append([])
            continue
        flops = item.rule.flops * per_flop * item.count
        found = strategies(item.rule, names, size, tuple(item.taken))
        if number in whole:
            found = [one for one in found if not any(one.results)]
        if intent.only_positions:  # a slice sees those before its own in attention alone
            found = [one for one in found if not one.choice or one.choice[0] not in item.rule.neighbours]
        if intent.divides_products and item.is_product:
            found = [one for one in found if one.work < 1] or found
        if intent.owns_rows and classes.is_by_owner(number):
            found = [one for one in found if one.choice and one.choice[1] == OWNED] or found
        if intent.joined:  # rows go along both axes at once
            goes = any(choice[1] == OWNED for choice, _ in item.taken)
            found = [one for one in found if (one.choice is not None and one.choice[1] == OWNED) == goes] or found
        if intent.only_heads and item.node.target in ATTENTION:
            found = [one for one in found if one.choice and one.choice[0] in HEADS] or found
        if intent.no_heads and item.node.target in ATTENTION:
            found = [one for one in found if not one.choice or one.choice[0] not in HEADS] or found
        sizes_ = [_bytes(*result, sizes) * item.count for result in zip(item.types, item.states, strict=True)]
        replica = BYTES_PER_REPLICA * intent.sequence_split
        options.append(
            [
                (
                    one,
                    flops * one.work * (WHOLE_PRODUCT if one.work == 1 else 1)
                    + BYTES_PER_SUM * sum(sizes_) * one.is_linear
                    + replica * _held(one, sizes_, size)
                    + MIRRORED * item.count * (one.choice is not None and one.choice[1] < 0)
                    + item.count * edge_bytes(item, one.choice, size, sizes),
                )
                for one in found
            ]
        )
    for i, item in enumerate(classes.items):
        if item.rule is None:
            options[i] = _placeholder_options(classes, i, options, axis, intent, pins)
    return options


def edge_bytes(item: Item, choice: Choice | None, size: int, sizes: Mapping[str, int]) -> float:
    """The bytes that a rank gets of the rows beside its pieces, when a call is split: those at the ends of its runs, or
    the pieces of all ranks where that is more than a run."""
    edge_bytes = 0.0
    for halo in item.rule.halos if item.rule and choice else ():
        assert choice is not None and item.rule is not None
        if halo.name != choice[0]:
            continue
        for i in halo.operands:
            source = operand_types(item.node)[i]
            rows = source.shape[halo.dim(item.rule.operands[i])]
            edge_bytes += halo_share(halo, rows, choice[1], size) * _bytes(source, item.wanted[i], sizes)
        for i in halo.results:
            rows = item.types[i].shape[halo.dim(item.rule.results[i])]
            edge_bytes += halo_share(halo, rows, choice[1], size) * _bytes(item.types[i], item.states[i], sizes)
    if choice and item.rule and item.rule.scan and item.rule.scan[0] == choice[0]:  # a row of each run is gathered
        rows = abs(choice[1]) * (size - 1) * (1 if item.rule.factor is None else 2)
        edge_bytes += rows / item.rule.sizes[choice[0]] * _bytes(item.types[0], item.states[0], sizes)
    if choice and item.rule and item.rule.turns == choice[0]:  # each run sends the states on
        states = zip(operand_types(item.node), item.wanted, range(len(item.node.args[0])), strict=False)  # type: ignore[arg-type]
        edge_bytes += abs(choice[1]) * size * sum(_bytes(type_, wanted, sizes) for type_, wanted, _ in states)
    return edge_bytes


def halo_share(halo: Halo, rows: int, outer: int, size: int) -> float:
    """The share of a dim of so many rows that a rank sends in an exchange of its edges."""
    if max(halo.before, halo.after) * size * abs(outer) > rows:
        return (size - 1) / size
    return (halo.before + halo.after) * abs(outer) / rows


def _held(strategy: Strategy, bytes_: list[float], size: int) -> float:
    """The bytes of its results that a rank holds."""
    shares = (1 / size if isinstance(state, tuple) else 1.0 for state in strategy.results)
    return sum(full * share for full, share in zip(bytes_, shares, strict=True))


def _placeholder_options(
    classes: Classes, i: int, options: Options, axis: str, intent: Intent,
    pins: Mapping[str, Mapping[str, State]],
) -> list[tuple[Strategy, float]]:  # fmt: skip
    item = classes.items[i]
    if item.role is None:
        return [(Strategy((), (None,) * len(item.types)), 0.0)]
    pin = pins.get(item.role.entry.name)
    if pin is not None:
        return [(Strategy((), (pin.get(axis),)), 0.0)]
    common: set[State] | None = None
    for source, _, user, position in classes.edges:
        if source == i:
            accepted = {strategy.operands[position] for strategy, _ in options[user]}
            common = accepted if common is None else common & accepted
    splits = sorted(state for state in common or () if isinstance(state, tuple))
    item.role = replace(used_role(classes, i, item.role), splits=tuple(splits))
    return [(Strategy((), (state,)), cost * item.count) for state, cost in intent.states(item.role)]


Names = list[dict[str, set[int]]]  # of each item: the outers of the names that may be split
Values = dict[tuple[int, int], set[Split]]  # the splits of each (item, result)


def candidates(classes: Classes, intent: Intent) -> Names:
    """The splits of each name that are worth a thought: those that spread from what the intent splits."""
    owners = RowOwners(classes, intent.padded) if intent.owns_rows else None
    found = _spread(
        classes, lambda i, role: intent.seeds(used_role(classes, i, role)), intent.sequence_outers, owners,
        intent.batch_split and intent.cuts_samples,
    )[0]  # fmt: skip
    for item, names in zip(classes.items, found, strict=True):
        if intent.heads and item.node.target in ATTENTION:
            for name in HEADS:
                names.setdefault(name, set()).add(intent.heads if name == HEADS[0] else 1)
    return found


def sequences_of(classes: Classes, intent: Intent) -> Values:
    """The splits of each value that are splits of a sequence."""
    outers = intent.sequence_outers
    return _spread(classes, lambda _, role: intent.sequence_seeds(role), outers)[1] if outers else {}


def _spread(
    classes: Classes, seeds: Callable[[int, Role], list[Split]], of_sequences: tuple[int, ...],
    owners: RowOwners | None = None, of_samples: bool = False,
) -> tuple[Names, Values]:  # fmt: skip
    """Splits of placeholders, spread over the graph: the names that they are splits of, and the values'.

    of_sequences: the outers of their splits. What is cut out of the batch is a sequence, too, though no split of the
    batch gets there; of_samples: or samples. owners: which calls may have their rows where the owners are; what they
    give is a split, too, for gradients of rows are reached from no placeholder.

    They spread along names through calls and along edges between them, both ways, until nothing new is found. A
    compound dim `(c n)` that is split on n is seen by its neighbours at outer = size(c): so the fused weight of a
    chunked projection learns of its sub-split from the attention behind it.
    """
    names: Names = [{} for _ in classes.items]
    values: Values = {}
    users: dict[tuple[int, int], list[int]] = {}
    inputs: dict[int, list[tuple[int, tuple[int, int]]]] = {}
    for source, result, user, position in classes.edges:
        users.setdefault((source, result), []).append(user)
        inputs.setdefault(user, []).append((position, (source, result)))
    pending: dict[int, None] = {}
    for i, item in enumerate(classes.items):
        if item.role is not None:
            values[i, 0] = set(seeds(i, item.role))
            pending.update(dict.fromkeys(users.get((i, 0), ())))
    for value, splits in owners.seeds() if owners else ():
        values.setdefault(value, set()).update(splits)
        pending.update(dict.fromkeys(t for t in (value[0], *users.get(value, ())) if classes.items[t].rule is not None))
    cut = list(cut_from_batch(classes)) if of_sequences or of_samples else []
    roles = (item.role for item in classes.items if of_samples and item.role is not None)
    samples = {role.type.shape[role.batch_dim] for role in roles if role.batch_dim is not None}
    attending = [i for i, item in enumerate(classes.items) if of_sequences and item.node.target in ATTENTION]
    while pending or cut or attending:
        if not pending and not cut:
            # Nothing spreads any more: what attends to a sequence that no split reached is a sequence all the same.
            i = attending.pop(0)
            rule = classes.items[i].rule
            assert rule is not None
            if not names[i].get("s"):
                values.setdefault((i, 0), set()).update(
                    filter(None, (place(rule.results[0], ("s", outer), dict(rule.sizes)) for outer in of_sequences))
                )
                pending[i] = None
            continue
        if not pending:
            first = cut.pop(0)
            rule = classes.items[first[0]].rule
            assert rule is not None
            if of_samples:
                given = [(values.get(value, ()), rule.operands[at]) for at, value in inputs.get(first[0], ())]
                found = cut_rows(rule, first[1], given, samples)
            else:
                found = cut_dims(rule, first[1], values.get(first, ()), of_sequences)
            values.setdefault(first, set()).update(found)
            pending.update(dict.fromkeys(users.get(first, ())))
            continue
        i = next(iter(pending))
        del pending[i]
        rule = classes.items[i].rule
        assert rule is not None
        sizes = dict(rule.sizes)
        tensors = [(value, rule.operands[position]) for position, value in inputs.get(i, ())]
        tensors += [((i, r), dims) for r, dims in enumerate(rule.results)]
        # First the names of this call that its operands and results are split along,
        new = False
        for value, dims in tensors:
            for split in values.get(value, ()):
                choice = choice_at(dims, split, sizes)
                if choice is None or choice[0] in rule.replicated:
                    continue
                if choice[1] == OWNED and not (owners and owners.may_take(i, choice[0])):
                    continue
                outers = names[i].setdefault(choice[0], set())
                if choice[1] not in outers and len(outers) < MAX_OUTERS:
                    outers.add(choice[1])
                    new = True
        if not new:
            continue
        # then all dims of operands and results that have these names: their users are looked at again.
        for value, dims in tensors:
            known = values.setdefault(value, set())
            for name, outers in names[i].items():
                for outer in outers:
                    placed = place(dims, (name, outer), sizes)
                    if placed is not None and placed not in known:
                        known.add(placed)
                        touched = [value[0], *users.get(value, ())]
                        pending.update(dict.fromkeys(t for t in touched if classes.items[t].rule is not None))
    return names, values


def problem_of(
    classes: Classes, options: Options, size: int, intent: Intent, sizes: dict[str, int], strict: bool
) -> Problem:
    """State the choice of one axis as a 0-1 programme: an item a choice among its options, an edge a value and a user.

    The cost of an edge is that of moving the value from the state it has to the state its user wants, in bytes per
    rank. strict: what the intent forbids is left out or scaled; False drops this, for a model that has no other plan.
    """
    products = frozenset(i for i, item in enumerate(classes.items) if item.is_product)
    problem = Problem([[cost for _, cost in option] for option in options], [], products, _shared(classes, options))
    results = [tuple(strategy.results for strategy, _ in option) for option in options]
    operands = [tuple(strategy.operands for strategy, _ in option) for option in options]

    reductions = sum(
        move_cost("sum", None, _bytes(item.types[result], item.states[result], sizes) * item.count, size)
        for item, result in ((classes.items[source], result) for source, result, _ in classes.gradients)
    )
    sequences = sequences_of(classes, intent)

    def add(
        source: int, result: int, user: int, wanted: tuple[State, ...], to_gradient: bool = False, position: int = -1,
        leaves: bool = False,
    ) -> None:  # fmt: skip
        given, item = tuple(states[result] for states in results[source]), classes.items[source]
        bytes_ = _bytes(item.types[result], item.states[result], sizes) * item.count
        attends = _is_at_attention(classes, intent, (source, result), (user, position))
        joins = _moves_in_time(classes, (source, result), (user, position))
        move = {}
        for s in dict.fromkeys(given):
            for t in dict.fromkeys(wanted):
                if strict and intent.only_positions and not attends and s == "sum" and joins not in (None, s != t):
                    continue  # over all axes in time at once: what one of them alone adds up is nothing to go on with
                if s == t:  # nobody forbids that, and it costs nothing
                    move[s, t] = 0.0
                    continue
                splits = {state for state in (s, t) if isinstance(state, tuple)}
                heads = {state for state in splits if attends and intent.heads and state[0] == 1}
                along = bool(splits) and splits <= sequences.get((source, result), set()) | heads
                is_unlike = s == "sum" and classes.is_unlike_sums(source, result, user, to_gradient)
                if is_unlike or _are_rows_unmoved(classes, (source, result), (user, position), splits, strict):
                    continue  # the terms of a gradient are summed between their casts
                is_free = not strict or (leaves and intent.divides_products and isinstance(s, tuple))
                factor = 1.0 if is_free else _factor(classes, intent, source, s, t, to_gradient, along, attends)
                if factor is not None:
                    more = 0.0 if is_free or not intent.is_last_resort(s, t) else reductions
                    move[s, t] = move_cost(s, t, bytes_, size) * factor + more
        # Calls do not share what leaves whole: each rank would do the work of all, each micro-batch wait for the last.
        value = (source, result, leaves and intent.divides_products)
        problem.edges.append(Edge(value, source, given, user, wanted, move))

    for source, result, user, position in classes.edges:
        wanted = tuple(states[position] for states in operands[user])
        add(source, result, user, wanted, user in classes.casts, position)
    for source, result, parameter, is_gradient in classes.as_parameters():
        add(source, result, parameter, tuple(states[0] for states in results[parameter]), to_gradient=is_gradient)
    if classes.results:
        problem.costs.append([0.0])
        for source, result in dict.fromkeys(classes.results):
            add(source, result, len(problem.costs) - 1, (None,), leaves=True)
    return problem


def _shared(classes: Classes, options: Options) -> tuple[int, ...]:
    """What is computed from parameters alone and multiplied at many places that need not touch, most often first. Of a
    weight that is computed step by step, the last step alone."""
    products = {i: _products(classes, i) for i in sorted(classes.of_parameters)}
    last = {
        i: found for i, found in products.items() if all(products.get(user) != found for user, _ in classes.users(i))
    }
    found = [i for i in last if len(options[i]) > 1 and len(last[i]) >= SHARED]
    return tuple(sorted(found, key=lambda i: -len(last[i])))


def _products(classes: Classes, i: int) -> frozenset[int]:
    """The products that multiply a value, as it is or after what is computed of parameters alone."""
    known, pending, products = {i}, [i], set[int]()
    while pending:
        for user, _ in classes.users(pending.pop()):
            if classes.items[user].is_product:
                products.add(user)
            elif user in classes.of_parameters and user not in known:
                known.add(user)
                pending.append(user)
    return frozenset(products)


def _factor(
    classes: Classes, intent: Intent, source: int, state: State, target: State, to_gradient: bool, along: bool,
    attends: bool,
) -> float | None:  # fmt: skip
    if source in classes.of_gradients:
        return intent.gradient_factor(state, target, to_gradient, source in classes.beside_once)
    return intent.factor(
        state, target, of_parameters=source in classes.of_parameters, to_gradient=to_gradient, along_sequence=along,
        at_attention=attends,
    )  # fmt: skip


def _moves_in_time(classes: Classes, source: tuple[int, int], user: tuple[int, int]) -> bool | None:
    """Whether micro-batches are put together between (class, result) and (class, operand), or behind the result. None
    if the value is the same in all of them."""
    given = classes.items[source[0]].states[source[1]].get(MICROBATCH)
    wanted = classes.items[user[0]].wanted[user[1]].get(MICROBATCH) if user[1] >= 0 else None
    return None if given is None else given != wanted


def _are_rows_unmoved(
    classes: Classes, source: tuple[int, int], user: tuple[int, int], splits: set[Split], strict: bool
) -> bool:
    """True for splits between which rows at their owners cannot be moved, from (class, result) to (class, operand):
    they go there along the first dim, and where an earlier axis put them no rank knows how many another one has."""
    if any(outer == OWNED and dim for dim, outer in splits):
        return True
    if not strict or user[1] < 0 or all(dim for dim, _ in splits):
        return False
    given, wanted = classes.items[source[0]].states[source[1]], classes.items[user[0]].wanted[user[1]]
    return any(state == wanted.get(axis) == (0, OWNED) for axis, state in given.items())


def _is_at_attention(classes: Classes, intent: Intent, source: tuple[int, int], user: tuple[int, int]) -> bool:
    """True for what attention gives or reads, (class, result) and (class, operand); where slices are computed one after
    another, for keys, values and their gradients alone: no slice waits for what those behind it give."""
    gives, reads = (classes.items[i].node.target if i < len(classes.items) else None for i, _ in (source, user))
    if not intent.only_positions:
        return gives in ATTENTION or reads in ATTENTION
    place = user[1] - (reads in GRADIENTS_OF_ATTENTION)
    return (gives in GRADIENTS_OF_ATTENTION and source[1] in (1, 2)) or (reads in ATTENTION and place in (1, 2))


def _bytes(type_: TensorType, states: Mapping[str, State], sizes: Mapping[str, int]) -> float:
    bytes_ = float(type_.bytes_)
    for axis, state in states.items():
        if isinstance(state, tuple):
            bytes_ /= sizes[axis]
    return bytes_
