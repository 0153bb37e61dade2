"""What of batches of which every rank has a part is refused, and with what words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import local_cases
import torch
from local_cases import (
    BATCH,
    EDGES,
    GRADED,
    LSTM,
    RIGHT,
    Centred,
    Graph,
    Local,
    Numbered,
    Pair,
    Pooled,
    X,
    Y,
    contrast,
    double,
    graph,
    mlp,
    of_dict,
    pooled,
)


def line_of(text: str) -> str:
    """`file:line` of the line of the models that ends in a text."""
    lines = Path(local_cases.__file__).read_text().splitlines()
    return f"local_cases.py:{1 + next(i for i, line in enumerate(lines) if line.endswith(text))}"


GRAPH = Local(Graph, graph, (double(BATCH, 6), EDGES, double(BATCH, 3)), (0, None, 0))
POOLED = Local(Pooled, pooled, (X, torch.arange(4).repeat(2), double(BATCH, 3)), (0, 0, 0))
_EDGES = line_of("h[edges[0]]))")
_NUMBERS = (
    "a number that means a row of one rank's part means another one in the whole. Pass the whole batch on every rank, "
    'with numbers for all of it (batch="global"), or look rows up within each sample.'
)
_TOGETHER = 'batch="local" puts the parts of all ranks together'
_MEANT = (
    "another dim may be meant, such as the one behind a sequence. Write batch_dims={dims} if it is this one, and the "
    "step is to be that of the whole batch; else the other dim, and None for what all ranks share."
)


def met(how: str, why: str, dims: str) -> str:
    """The refusal of what shapes tell, as the program does something else with it."""
    return f"{_TOGETHER} on the dim that counts samples: by their shapes {how}. But {why}: {_MEANT.format(dims=dims)}"


def unfit(said: str, faults: str, write: str = "(0, ?)") -> str:
    """The refusal of dims that do not fit."""
    rest = ", with a dim, or None for what all ranks share, in place of ?."
    return (
        f"batch_dims={said} does not fit the arguments:\n  {faults}\nBy the shapes it may be batch_dims={write}{rest}"
    )


# What is refused, on every rank, with what words.
REFUSED = {
    "edges": (
        GRAPH,
        f"{_TOGETHER} (argument 0 [4, 6] dim 0, argument 1 [2, 5] shared by all ranks, argument 2 [4, 3] dim 0), and "
        f"rows are looked up by their number at {_EDGES}: {_NUMBERS}",
    ),
    "edges, said": (
        replace(GRAPH, said=(0, 1, 0)),
        f"{_TOGETHER} (argument 0 [4, 6] dim 0, argument 1 [2, 5] dim 1, argument 2 [4, 3] dim 0), and rows are looked "
        f"up by their number at {_EDGES}: {_NUMBERS}",
    ),
    "groups": (
        replace(POOLED, said=0),
        f"{_TOGETHER} (argument 0 [4, 6] dim 0, argument 1 [4] dim 0, argument 2 [4, 3] dim 0), and rows are told "
        f"apart by their number at {line_of('F.mse_loss(model(x, groups, y), y)')}: {_NUMBERS}",
    ),
    "lstm": (
        replace(LSTM, said=None),
        met(
            "argument 0 [5, 4, 6] dim 0, argument 1 [5, 4, 6] dim 0",
            f"rows meet at {line_of('self.lstm(x)[0]')}",
            "(0, 0)",
        ),
    ),
    "contrast": (
        replace(GRADED, make=Pair, loss=contrast),
        met(
            "argument 0 [4, 6] dim 0, argument 1 [4, 4] dim 0",
            f"each row meets every other one at {line_of('F.normalize(self.b(y), dim=-1).T')}",
            "(0, 0)",
        ),
    ),
    "a mean": (
        replace(GRADED, make=Centred),
        met(
            "argument 0 [4, 6] dim 0, argument 1 [4, 4] dim 0",
            f"each row meets a sum or mean of all of them at {line_of('self.net(x - x.mean(0))')}",
            "(0, 0)",
        ),
    ),
    "positions": (
        replace(GRADED, make=Numbered),
        met(
            "argument 0 [4, 6] dim 0, argument 1 [4, 4] dim 0",
            f"rows are told apart by their number at {line_of('self.net(x + self.places(torch.arange(len(x))))')}",
            "(0, 0)",
        ),
    ),
    "two sums": (
        replace(GRADED, loss=lambda model, x, y: model(x).mean() + y.mean()),
        met(
            "argument 0 [4, 6] dim 0, argument 1 [4, 4] dim 0",
            "no row of argument 1 [4, 4] stands beside one of argument 0",
            "(0, 0)",
        ),
    ),
    "as many of each": (
        replace(GRADED, batch=(X, X.T), dims=(0, 1)),
        f"{_TOGETHER} on the dim that counts samples, and the shapes do not tell which it is: of argument 0 [4, 6], "
        f"argument 1 [6, 4] it may be that of 4 or 6. By the shapes it may be batch_dims=(0, 1).",
    ),
    "a dim too many": (
        replace(GRADED, said=(0, 2)),
        unfit("(0, 2)", "batch_dims[1] is dim 2, and argument 1 [4, 4] has 2 dims."),
    ),
    "a name that is not there": (
        replace(GRADED, said={"x": 0, "target": 0}),
        unfit(
            "{'x': 0, 'target': 0}",
            "nothing is said of argument 1 [4, 4].\n  the call has no argument 'target'. Its arguments are x, y.",
        ),
    ),
    "an entry too many": (
        replace(GRADED, said=(0, 0, None)),
        unfit("(0, 0, None)", "it has 3 entries, and the call 2 arguments."),
    ),
    "an entry too few": (replace(GRADED, said=(0,)), unfit("(0,)", "nothing is said of argument 1 [4, 4].")),
    "keys of a dict": (
        Local(mlp, of_dict, ({"x": X, "y": Y},), (0,), said={"batch": {"x": 0, "z": 0}}),
        unfit(
            "{'batch': {'x': 0, 'z': 0}}",
            "batch_dims['batch'] says a dim of 'z', and argument 0 has 'x', 'y'.\n  "
            "nothing is said of argument 0['y'] [4, 4].",
            "({'x': 0, 'y': ?},)",
        ),
    ),
    "a container for a tensor": (
        replace(GRADED, said=(0, {"y": 0})),
        unfit("(0, {'y': 0})", "batch_dims[1] is {'y': 0}, and argument 1 [4, 4] is one tensor."),
    ),
}


def _another_count(part: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    return (*part[:2], part[2] * (5 - 2 * rank))


def _another_length(part: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    return tuple(value[:, : 5 - rank] for value in part)


def _another_number(part: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    return (*part[:2], 5 - 2 * rank)


COUNT = RIGHT["a count"]
_PADDED = (
    'With batch="local" each rank passes rows of its own: as many as it has, and all else alike. Pad what differs in '
    "another dim to one length on all ranks (such as the longest: dist.all_reduce of it with ReduceOp.MAX), with what "
    "the loss ignores; give numbers and flags the same value on every rank, and a count the sum over ranks. If another "
    "dim counts samples, say so: batch_dims=."
)
# What ranks have otherwise and may not: the case, what a rank makes of its part, and what is said.
UNLIKE = {
    "a count": (
        COUNT, _another_count,
        "ranks were given different data at step 0:\n"
        "  rank 1 has 96.0 in argument 2, and rank 0 has 160.0\n"
        "No dim of argument 2 counts samples: all ranks share it, and the loss is that of the whole batch. Pass the "
        "same value on every rank (of a count the sum over ranks, by dist.all_reduce), or compute it in loss_fn of "
        "what each rank passes its own part of. If a dim of it does count samples, say so: batch_dims=.",
    ),
    "a number": (
        COUNT, _another_number,
        "ranks disagree on the batch and modes:\n"
        "  rank 1 has 'argument 2 3' where the others have 'argument 2 5'\n" + _PADDED,
    ),
    "a length": (
        RIGHT["tokens"], _another_length,
        "ranks disagree on the batch and modes:\n"
        "  rank 1 has 'argument 0 [*, 4] torch.int64' where the others have 'argument 0 [*, 5] torch.int64'; 'argument "
        "1 [*, 4] torch.int64' where the others have 'argument 1 [*, 5] torch.int64'\n" + _PADDED,
    ),
}  # fmt: skip
