"""`autopar::chain`: a recurrence, step by step; and over an axis whose ranks take turns.

In turns each rank has some of the rows, in runs of consecutive steps. The rank that has the first run computes it, and
sends the states on to that which has the next one: no step is computed twice, and no rank holds rows of another. The
functions for that are generators as those of a ring (`ring_attention.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.chain_step import ROWS, print_body, read_body
from autopar.ir.ops.op_facts import creates
from autopar.ir.ops.ops import op
from autopar.ir.ops.ring_ops import Turn, turns_of
from autopar.runtime.kernels.direct import direct_function
from autopar.runtime.kernels.generated import written_function
from autopar.runtime.kernels.kernel import Kernel

Tensors = Sequence[torch.Tensor]
SHIFT, COORD, WAIT = op("shift_start"), op("coord"), op("wait")
Step = Callable[..., tuple[list[torch.Tensor], list[torch.Tensor]]]
Run = Callable[..., tuple[list[torch.Tensor], Tensors]]


def chain(start: Tensors, rows: Tensors, fixed: Tensors, step: str, reverse: bool) -> list[torch.Tensor]:
    return run_steps(start, rows, fixed, step, reverse)[0]


def run_steps(
    start: Tensors, rows: Tensors, fixed: Tensors, step: str, reverse: bool
) -> tuple[list[torch.Tensor], Tensors]:
    """What the steps give, and the states after them."""
    function, states = compiled_step(step), list(start)
    given = list(zip(*(one.unbind(0) for one in rows), strict=True))
    tensors: list[torch.Tensor] = []
    for t in reversed(range(len(given))) if reverse else range(len(given)):
        made, states = function(states, given[t], fixed, start[0].device)
        tensors = tensors or [torch.empty((len(given), *one.shape), dtype=one.dtype, device=one.device) for one in made]
        for all_, one in zip(tensors, made, strict=True):
            all_[t] = one
    return tensors, states


@functools.lru_cache(maxsize=256)
def compiled_step(text: str) -> Step:
    """A step as a Python function of states, rows, what is fixed, and the device of what it makes."""
    body = read_body(text)
    names: dict[str, Any] = {}
    operands = ", ".join(f"[{', '.join(node.name for node in body.of_kind(kind))}]" for kind in ("h", ROWS, "w"))
    lines = ["def step(states, rows, fixed, device):", f"    {operands} = states, rows, fixed"]
    for node in body.calls:
        given = [_argument(arg, names) for arg in node.args]
        given += [f"{key}={_argument(arg, names)}" for key, arg in node.kwargs.items()]
        given += ["device=device"] if creates(node.target) else []
        lines.append(f"    {node.name} = {_bound(direct_function(node.target), names)}({', '.join(given)})")
    ends = (f"[{', '.join(one.name for one in nodes)}]" for nodes in (body.rows, body.next))
    lines.append(f"    return {', '.join(ends)}")
    made: Step = written_function("\n".join(lines), "step", names, "chain")
    return made


def _argument(arg: Any, names: dict[str, Any]) -> str:
    if isinstance(arg, fx.Node):
        return arg.name
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(_argument(one, names) for one in arg)}]"
    return repr(arg) if arg is None or type(arg) in (bool, int, str) else _bound(arg, names)


def _bound(thing: Any, names: dict[str, Any]) -> str:
    name = f"k{len(names)}"
    names[name] = thing
    return name


def called_steps(
    start: Tensors, rows: Tensors, fixed: Tensors, step: str, reverse: bool
) -> tuple[list[torch.Tensor], Tensors]:
    """Run the steps by the op, which a compiler calls as it stands: the states are kept of all steps."""
    body = read_body(step)
    text = print_body(replace(body, rows=(*body.rows, *body.next)))
    found = op("chain")(*([one.contiguous() for one in ones] for ones in (start, rows, fixed)), text, reverse)
    states = [one[0 if reverse else -1] for one in found[len(body.rows) :]]
    return found[: len(body.rows)], states


# --- in turns


def in_turns(
    run: Run, ask: Callable[..., Any], start: Tensors, rows: Tensors, fixed: Tensors, step: str, reverse: bool,
    axis: str, size: int, outer: int,
) -> Generator[Any, list[Any], list[torch.Tensor]]:  # fmt: skip
    """What the steps of a rank's rows give. run: computes consecutive steps, as `run_steps`."""
    place = (yield ask(COORD, axis)).pop()
    states, found = start, dict[int, list[torch.Tensor]]()
    turns = turns_of(size, outer, reverse)
    for turn, after in zip(turns, (*turns[1:], None), strict=True):
        if turn.place == place:
            mine = [one.unflatten(0, (abs(outer), -1))[turn.run] for one in rows]
            found[turn.run], states = run(states, mine, fixed, step, reverse)
        if after is not None and after.place != turn.place:
            states = yield from _handed_on(ask, states, axis, turn, after, size, place)
    parts = [found[i] for i in range(abs(outer))]
    return [torch.cat(ones) if len(ones) > 1 else ones[0] for ones in map(list, zip(*parts, strict=True))]


def _handed_on(
    ask: Callable[..., Any], states: Tensors, axis: str, turn: Turn, after: Turn, size: int, place: int
) -> Generator[Any, list[Any], Tensors]:
    """The states as the rank whose turn comes gets them; of the others each keeps its own. Every rank sends, as in all
    that ranks do together, and what the others send is not looked at."""
    handed = list(states)
    for dtype in dict.fromkeys(one.dtype for one in states):
        some = [i for i, one in enumerate(states) if one.dtype == dtype]
        message = torch.cat([states[i].reshape(-1) for i in some])
        moving = (yield ask(SHIFT, message, axis, (after.place - turn.place) % size)).pop()
        message = (yield ask(WAIT, moving)).pop()
        if place == after.place:
            pieces = message.split([states[i].numel() for i in some])
            for i, piece in zip(some, pieces, strict=True):
                handed[i] = piece.view(states[i].shape)
    return handed


# Opaque: traced, it would be as long as the sequence.
KERNELS = {"chain": Kernel(chain)}
