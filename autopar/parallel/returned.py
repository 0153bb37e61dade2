"""Make views again of what a step returns and what showed memory that is there without it: of buffers, of the batch."""

from __future__ import annotations

from collections.abc import Collection

import torch

from autopar.capture.trace.shown_memory import RESULT, Shown
from autopar.parallel.programs.portions import Given
from autopar.parallel.programs.running import Running

Outputs = tuple[torch.Tensor, ...]


def shown(outputs: Outputs, running: Running, given: Given) -> tuple[Outputs, Collection[int]]:
    """The outputs, with views in the place of copies; and the places of those that require no gradient, as what they
    show requires none. Of rows of which ranks have parts, what is returned itself alone is one."""
    if not running.shown or (given.portion is not None and given.portion.is_own):
        return outputs, ()
    found, free = list(outputs), set[int]()
    for at, one in running.shown:
        held = None if found[at] is None else _held(one, running, given, found)
        if isinstance(held, torch.Tensor) and (one.form is None or given.portion is None or one.kind == "buffer"):
            value, found[at] = found[at], one.of(held.detach() if held.requires_grad else held, found[at])
            if found[at] is not value and one.kind != RESULT and not held.requires_grad:
                free.add(at)
    return tuple(found), free


def _held(one: Shown, running: Running, given: Given, found: list[torch.Tensor]) -> object:
    match one.kind:
        case "buffer":
            return running.owners.buffer(one.name)
        case "batch":
            return given.parts.leaves[int(one.name)]
        case "constant":
            return running.constants[one.name] if one.name not in running.constants.numbers else None
    return found[running.places[one.name]]
