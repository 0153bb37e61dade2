"""What the experts of a loop compute alike, and where that is added up."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.ops import key_place
from autopar.ir.program import has_record, operand_nodes, record
from autopar.passes.sorts.loop_masks import Loop, constant

aten = torch.ops.aten
Places = Mapping[fx.Node, int]  # of the nodes of a program, in its order
MASK = 0  # the family of the masks


class Apart(Exception):
    """The experts of a loop cannot be taken together: the reason."""


@dataclass(frozen=True, slots=True)
class ExpertTerm:
    """A term of a sum over experts: what one of them computes. shape, dim: where it is put into zeros at the place of
    its expert."""

    family: int
    expert: int
    shape: tuple[int, ...] = ()
    dim: int | None = None


@dataclass(frozen=True, slots=True)
class RowsPut:
    """Rows that each expert puts in the place of those before. mask: the family of the masks. value: that of the rows,
    or (a node) what all put there. base: what is there before."""

    mask: int
    value: int | fx.Node
    base: fx.Node


@dataclass(slots=True)
class Bodies:
    """The bodies of a loop. families: what each expert computes alike, a node each, in order. member: of each node its
    family and expert. sums: of the root of a sum its terms, and what else is added. choices: of the last call of such.
    inner: calls that go with them. alone: families of which the program gives each member."""

    loop: Loop
    families: list[tuple[fx.Node, ...]] = field(default_factory=list)
    member: dict[fx.Node, tuple[int, int]] = field(default_factory=dict)
    sums: dict[fx.Node, tuple[list[ExpertTerm], list[fx.Node]]] = field(default_factory=dict)
    choices: dict[fx.Node, RowsPut] = field(default_factory=dict)
    inner: set[fx.Node] = field(default_factory=set)
    alone: set[int] = field(default_factory=set)

    def same(self, value: object) -> object:
        """What is alike for values that are the same: numbers that tensors are filled with."""
        known = constant(value)
        return value if known is None else ("filled", known)

    def last(self, place: Places) -> Iterator[tuple[fx.Node, int]]:
        """Each family at its last node in the order of the program."""
        for number, nodes in enumerate(self.families):
            yield max(nodes, key=place.__getitem__), number


class Waiting:
    """The calls that use some nodes, in the order of the program."""

    def __init__(self, place: Places, nodes: Iterable[fx.Node]) -> None:
        self.place, self.known = place, set[fx.Node]()
        self.heap: list[tuple[int, fx.Node]] = []
        for node in nodes:
            self.add(node)

    def add(self, node: fx.Node) -> None:
        """Let the users of a node wait, too."""
        for user in node.users:
            if user not in self.known and user.op == "call_function":
                self.known.add(user)
                heapq.heappush(self.heap, (self.place[user], user))

    def __iter__(self) -> Iterator[fx.Node]:
        while self.heap:
            yield heapq.heappop(self.heap)[1]


def bodies_of(loop: Loop, place: Places) -> Bodies:
    """Find what hangs on the masks of a loop. Raises Apart where experts meet otherwise than in a sum."""
    found = Bodies(loop)
    _find_families(loop, place, found)
    users = {user for node in found.member for user in node.users if user not in found.member}
    for user in sorted(users, key=lambda one: place.get(one, len(place))):
        if user.op == "output":
            found.alone.update(found.member[one][0] for one in user.all_input_nodes if one in found.member)
        elif user.target is aten.where.self:
            _find_choice(user, found)
        else:
            _find_sum(user, found)
    _check_leaves(found)
    return found


def _find_families(loop: Loop, place: Places, found: Bodies) -> None:
    """The nodes of all experts, matched by what they compute of what; of several alike, by their order. What several
    experts are behind is none of them, and ends the search: a sum over experts, and what goes on with it."""
    count = len(loop.masks)
    owner = {mask: expert for expert, masks in enumerate(loop.masks) for mask in masks}
    slot, slots = dict.fromkeys(owner, MASK), dict[Any, int]()
    nodes: list[list[fx.Node | None]] = [[masks[0] for masks in loop.masks]]
    seen: Counter[Any] = Counter()
    joined: set[fx.Node] = set()
    waiting = Waiting(place, owner)

    def shown(one: fx.Node) -> str:
        return f"%{slot[one]}" if one in slot else f"% {constant(one)}"

    for node in waiting:
        experts = {owner[one] for one in node.all_input_nodes if one in owner}
        if len(experts) > 1 or any(one in joined and one.target is node.target for one in node.all_input_nodes):
            joined.add(node)
            continue
        (owner[node],) = experts
        waiting.add(node)
        drawn = key_place(node.target)  # what a random op draws of its own is no difference
        given = [one for i, one in enumerate(node.args) if i != drawn]
        args = fx.node.map_arg((given, dict(node.kwargs)), shown)
        key = (node.target, repr(args), record(node).types, record(node).phase)
        seen[key, owner[node]] += 1
        at = slot[node] = slots.setdefault((key, seen[key, owner[node]]), len(slots) + 1)
        if at == len(nodes):
            nodes.append([None] * count)
        nodes[at][owner[node]] = node
    whole = [at for at, one in enumerate(nodes) if all(node is not None for node in one)]
    number = {at: i for i, at in enumerate(whole)}
    found.families = [tuple(node for node in nodes[at] if node is not None) for at in whole]
    found.member = {node: (number[at], owner[node]) for node, at in slot.items() if at in number}


def _find_sum(user: fx.Node, found: Bodies) -> None:
    """Enter the sum that a node outside of the families is part of."""
    root = user
    if root.target is aten.select_backward.default:
        (root,) = root.users if len(root.users) == 1 else (root,)
    if not _adds(root):
        raise Apart(f"{user.target} at {record(user).source} takes what several of them give")
    while len(root.users) == 1:  # a sum is a chain of calls, of which the last has all terms
        (above,) = root.users
        if above.op == "output" or above in found.member or not _adds(above):
            break
        root = above
    if root in found.sums:
        return
    leaves: list[ExpertTerm] = []
    rest: list[fx.Node] = []
    pending = [root]
    for node in pending:
        placed = node.all_input_nodes[0] if node.target is aten.select_backward.default else node
        if node in found.member:
            leaves.append(ExpertTerm(*found.member[node]))
        elif placed in found.member and len(node.users) == 1:
            leaves.append(_placed(node, *found.member[placed]))
            found.inner.add(node)
        elif node is root or (len(node.users) == 1 and _adds(node)):
            pending += operand_nodes(node)
            found.inner.add(node)
        else:
            rest.append(node)
    counts = Counter((leaf.family, leaf.shape, leaf.dim) for leaf in leaves)
    if len({(leaf.family, leaf.dim, leaf.expert) for leaf in leaves}) != len(leaves) or any(
        count != len(found.loop.masks) for count in counts.values()
    ):
        raise Apart(f"the sum at {record(root).source} is not over all of them")
    found.inner.discard(root)
    found.sums[root] = leaves, rest


def _find_choice(user: fx.Node, found: Bodies) -> None:
    """Enter the choices that a node outside of the families is part of: `where(mask, rows, before)` of all experts."""
    chain = [user]
    while len(chain[-1].users) == 1:
        (above,) = chain[-1].users
        if above.target is not aten.where.self or above.args[2] is not chain[-1] or above.args[0] not in found.member:
            break
        chain.append(above)
    root = chain[-1]
    if root in found.choices:
        return
    chain, base = [], root
    while base.target is aten.where.self and base.args[0] in found.member and (base is root or len(base.users) == 1):
        chain.append(base)
        base = base.args[2]  # type: ignore[assignment]
    masks = [found.member[node.args[0]] for node in chain]  # type: ignore[index]
    rows = [node.args[1] for node in chain]
    values = [found.member[one][0] if one in found.member else one for one in rows]  # type: ignore[index]
    own = all(found.member[one][1] == mask[1] for one, mask in zip(rows, masks, strict=True) if one in found.member)  # type: ignore[index]
    is_one = len({mask for mask, _ in masks}) == 1 and len({found.same(value) for value in values}) == 1
    experts = sorted(expert for _, expert in masks)
    if found.loop.chosen > 1 or not (own and is_one) or experts != list(range(len(found.loop.masks))):
        raise Apart(f"{user.target} at {record(user).source} takes what several of them give")
    found.inner.update(chain[1:])
    found.choices[root] = RowsPut(masks[0][0], values[0], base)  # type: ignore[arg-type]


def _placed(node: fx.Node, family: int, expert: int) -> ExpertTerm:
    _, shape, dim, place = node.args
    if place != expert or shape[dim] == 0:  # type: ignore[index]
        raise Apart(f"at {record(node).source} their places are in another order")
    return ExpertTerm(family, expert, tuple(shape), dim % len(shape))  # type: ignore[arg-type, operator]


def _adds(node: fx.Node) -> bool:
    if node.target is not aten.add.Tensor or node.kwargs or len(operand_nodes(node)) != 2:
        return False
    return all(record(one).type == record(node).type for one in operand_nodes(node))


def _check_leaves(found: Bodies) -> None:
    """No node but those of the families and sums may hang on one expert."""
    gone = {*found.member, *found.inner}
    for node in found.inner:
        for user in node.users:
            if user not in gone and user not in found.sums and user not in found.choices:
                raise Apart(
                    f"{user.target} at {record(user).source if has_record(user) else 'the end'} sees a part of it"
                )
