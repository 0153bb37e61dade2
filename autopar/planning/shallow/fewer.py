"""A model with fewer of its equal layers: further sizes of a batch are captured of it in a part of the time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

from torch import fx, nn

from autopar.capture import Captured
from autopar.errors import AutoparError
from autopar.ir.program import Program, record
from autopar.planning.shallow.depth import Shallow, Stack, arguments, shallow
from autopar.torch_shortcuts import children_of, with_children

Capture = Callable[[int], Captured]  # of a step, by the rows of its batch


def with_fewer(model: nn.Module, shallow: Shallow) -> nn.Module | None:
    """The model without most of the equal layers that `found` leaves out: one more than it keeps, so that they are
    found again. It shares all modules that stay, and `model` is as it was. None where the layers lie in no ModuleList
    or Sequential, and where two captures of it would cost as much as one of the model."""
    first, *others = shallow.stacks
    made = _without(model, *_gone(first))
    if made is None:
        return None
    for stack in others:  # short ones stay whole
        made = _without(made, *_gone(stack)) or made
    return made


def _gone(stack: Stack) -> tuple[list[str], range]:
    """The path of a list, and the members that it lacks."""
    (path, _, first), (_, _, behind) = (layer.rpartition(".") for layer in stack.border)
    return path.split(".") if path else [], range(int(first) + 1, int(behind) - 1)


def _without(module: nn.Module, path: list[str], gone: range) -> nn.Module | None:
    """A copy of a module, of which a list somewhere inside lacks the members `gone`."""
    inner = children_of(module)
    if not path:
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            return None
        stay = [member for i, member in enumerate(inner.values()) if i not in gone]
        if 2 * len(stay) > len(inner):
            return None
        inner = {str(i): member for i, member in enumerate(stay)}
    else:
        child = inner.get(path[0])
        made = None if child is None else _without(child, path[1:], gone)
        if made is None:
            return None
        inner[path[0]] = made
    return with_children(module, inner)


def same_step(capture: Capture, rows: int, found: Shallow) -> tuple[Captured, Shallow] | None:
    """What `capture` gives of a model with fewer layers for a batch of so many rows, as it is and shallow; None unless
    that is the step that was found of the whole model."""
    try:
        captured = capture(rows)
    except AutoparError:  # it counts its layers
        return None
    again = shallow(captured.program, found.kept, found.lists)
    if again is None or again.lists != found.lists or not is_same(again.program, found.program):
        return None
    return captured, again.of_whole(found)


def is_same(one: Program, other: Program) -> bool:
    """True if two CAPTURED programs are call by call the same, whatever the names."""
    if [out.kind for out in one.outputs] != [out.kind for out in other.outputs]:
        return False
    if [entry.kind for entry in one.inputs] != [entry.kind for entry in other.inputs]:
        return False
    place: dict[fx.Node, int] = {}

    def call(node: fx.Node) -> tuple[Any, ...]:
        known = record(node)
        args = fx.node.map_arg(arguments(node), lambda operand: f"<{place[operand]}>")
        return node.op, "" if node.op == "placeholder" else node.target, str(args), known.types, known.phase

    for i, (left, right) in enumerate(zip_longest(one.graph.nodes, other.graph.nodes)):
        if left is None or right is None or call(left) != call(right):
            return False
        place[left] = place[right] = i
    return True
