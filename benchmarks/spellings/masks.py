"""Ways to write the masks of attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.compiled import Compiled
from autopar.ir.program import record
from benchmarks.spellings.data import HEADS, ROWS, TIME, WIDTH, draw, places


class Attending(nn.Module):
    """Attention under the mask of a way."""

    def __init__(self, way: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.project, self.out = way, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, seen: Tensor, document: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
        mask = self.way(seen, document)
        mask = mask.to(x.dtype) if mask.is_floating_point() else mask
        return (
            self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)).square().mean()
        )


def holes() -> tuple[Tensor, Tensor, Tensor]:
    seen, document = torch.ones(ROWS, TIME, dtype=torch.bool), torch.zeros(ROWS, TIME, dtype=torch.long)
    seen[0, 11:], document[:, 9:] = False, 1
    return draw(ROWS, TIME, WIDTH), seen, document


def triangle() -> Tensor:
    return torch.ones(TIME, TIME, dtype=torch.bool).tril()


def hidden_by(hidden: Tensor, number: float = -math.inf) -> Tensor:
    return torch.zeros(hidden.shape).masked_fill(hidden, number)


CAUSAL: Mapping[str, Any] = {
    "ones.tril()": lambda s, d: triangle(),
    "~ones.triu(1)": lambda s, d: ~torch.ones(TIME, TIME, dtype=torch.bool).triu(1),
    "torch.tril(torch.ones(n, n)) == 1": lambda s, d: torch.tril(torch.ones(TIME, TIME)) == 1,
    "full(-inf).triu(1)": lambda s, d: torch.full((TIME, TIME), -math.inf).triu(1),
    "zeros.masked_fill(triu, -inf)": lambda s, d: hidden_by(torch.ones(TIME, TIME).triu(1).bool()),
    "finfo.min": lambda s, d: hidden_by(~triangle(), torch.finfo(torch.float32).min),
    "(1 - tril) * -inf, by where": lambda s, d: torch.where(triangle(), 0.0, -math.inf),
    "(1 - tril) * finfo.min": lambda s, d: (1.0 - triangle().float()) * torch.finfo(torch.float32).min,
    "i[:, None] >= j": lambda s, d: places()[:, None] >= places(),
    "i.view(n, 1) >= j.view(1, n)": lambda s, d: places().view(TIME, 1) >= places().view(1, TIME),
    "i[:, None] - j >= 0": lambda s, d: places()[:, None] - places() >= 0,
    "j - i < 1": lambda s, d: places()[None] - places()[:, None] < 1,
    "~(j > i)": lambda s, d: ~(places()[None] > places()[:, None]),
    "torch.meshgrid": lambda s, d: (lambda i, j: i >= j)(*torch.meshgrid(places(), places(), indexing="ij")),
    "places.expand(n, n) <= its transpose": lambda s, d: places().expand(TIME, TIME) <= places().expand(TIME, TIME).T,
    "ones.cumsum(0) >= ones.cumsum(1)": lambda s, d: (
        torch.ones(TIME, TIME).cumsum(0) >= torch.ones(TIME, TIME).cumsum(1)
    ),
    "nn.Transformer's": lambda s, d: nn.Transformer.generate_square_subsequent_mask(TIME),
    "torch.le(j, i[..., None])": lambda s, d: torch.le(places(), places()[..., None]),
    "tril_indices": lambda s, d: torch.zeros(TIME, TIME, dtype=torch.bool).index_put(
        tuple(torch.tril_indices(TIME, TIME)), torch.tensor(True)
    ),
    "row by row": lambda s, d: torch.stack([places() <= i for i in range(TIME)]),
}
PADDED: Mapping[str, Any] = {
    "causal & seen[:, None, None]": lambda s, d: triangle() & s[:, None, None],
    "torch.logical_and": lambda s, d: torch.logical_and(triangle()[None, None], s[:, None, None, :]),
    "causal * seen": lambda s, d: (triangle() * s[:, None, None]).bool(),
    "~(triu | ~seen)": lambda s, d: ~(torch.ones(TIME, TIME, dtype=torch.bool).triu(1) | ~s[:, None, None]),
    "masked_fill twice": lambda s, d: hidden_by(~triangle()).masked_fill(~s[:, None, None], -math.inf),
    "-inf + -inf": lambda s, d: hidden_by(~triangle()) + hidden_by(~s[:, None, None]),
    "(1 - seen) * finfo.min, and causal": lambda s, d: (
        (1.0 - s[:, None, None].float()) * torch.finfo(torch.float32).min
    ).masked_fill(~triangle(), torch.finfo(torch.float32).min),
    "torch.where(seen, causal, False)": lambda s, d: torch.where(s[:, None, None], triangle(), False),
    "masked_fill(causal, ~seen, False)": lambda s, d: (
        triangle().expand(ROWS, 1, TIME, TIME).masked_fill(~s[:, None, None], False)
    ),
    "seen.expand(b, 1, n, n) & causal": lambda s, d: s[:, None, None].expand(ROWS, 1, TIME, TIME) & triangle(),
    "torch.minimum": lambda s, d: torch.minimum(hidden_by(~triangle()), hidden_by(~s[:, None, None])),
    "a product of numbers > 0": lambda s, d: torch.ones(TIME, TIME).tril() * s[:, None, None].float() > 0,
    "lengths, j < length": lambda s, d: triangle() & (places() < s.sum(1)[:, None])[:, None, None],
    "repeat": lambda s, d: triangle().repeat(ROWS, 1, 1, 1) & s.view(ROWS, 1, 1, TIME),
    "einsum of seen": lambda s, d: torch.einsum("bi,bj->bij", s.float(), s.float())[:, None].bool() & triangle(),
}
WINDOWED: Mapping[str, Any] = {
    "i - j < w": lambda s, d: triangle() & (places()[:, None] - places() < 4),
    "j > i - w": lambda s, d: triangle() & (places()[None] > places()[:, None] - 4),
    "tril & triu(-w + 1)": lambda s, d: triangle() & torch.ones(TIME, TIME, dtype=torch.bool).triu(-3),
    "tril ^ tril(-w)": lambda s, d: triangle() ^ torch.ones(TIME, TIME, dtype=torch.bool).tril(-4),
    "tril - tril(-w)": lambda s, d: (torch.ones(TIME, TIME).tril() - torch.ones(TIME, TIME).tril(-4)).bool(),
    "ones.tril().triu(-w + 1)": lambda s, d: torch.ones(TIME, TIME, dtype=torch.bool).tril().triu(-3),
    "|i - j| < w, causal": lambda s, d: ((places()[:, None] - places()).abs() < 4) & triangle(),
    "0 <= i - j < w": lambda s, d: (lambda far: (far >= 0) & (far < 4))(places()[:, None] - places()),
    "-inf where far": lambda s, d: hidden_by(~triangle()).masked_fill(places()[:, None] - places() >= 4, -math.inf),
    "torch.where(far, -inf, causal)": lambda s, d: torch.where(
        places()[:, None] - places() > 3, -math.inf, hidden_by(~triangle())
    ),
    "(i - j).clamp(0, w - 1) == i - j": lambda s, d: (lambda far: far.clamp(0, 3) == far)(places()[:, None] - places()),
    "i // w == j // w (chunks)": lambda s, d: triangle() & (places()[:, None] // 4 == places() // 4),
}
DOCUMENTS: Mapping[str, Any] = {
    "d[:, :, None] == d[:, None]": lambda s, d: (triangle() & (d[:, :, None] == d[:, None]))[:, None],
    "d[:, None, :, None] == d[:, None, None]": lambda s, d: triangle() & (d[:, None, :, None] == d[:, None, None]),
    "torch.eq": lambda s, d: torch.eq(d.unsqueeze(2), d.unsqueeze(1)).unsqueeze(1) & triangle(),
    "d_i - d_j == 0": lambda s, d: triangle() & ((d[:, :, None] - d[:, None]) == 0)[:, None],
    "~(d_i != d_j)": lambda s, d: triangle() & ~(d[:, :, None] != d[:, None])[:, None],
    "-inf where they differ": lambda s, d: hidden_by(~triangle()) + hidden_by(d[:, :, None] != d[:, None])[:, None],
    "masked_fill": lambda s, d: hidden_by(~triangle())[None].masked_fill(d[:, :, None] != d[:, None], -math.inf)[
        :, None
    ],
    "where": lambda s, d: torch.where(d[:, :, None] == d[:, None], hidden_by(~triangle()), -math.inf)[:, None],
    "ends counted": lambda s, d: (
        triangle() & (lambda n: n[:, :, None] == n[:, None])((d.diff(dim=1, prepend=d[:, :1]) != 0).cumsum(1))[:, None]
    ),
    "d.float()": lambda s, d: triangle() & (d.float()[:, :, None] == d.float()[:, None])[:, None],
    "looked up by position": lambda s, d: (
        triangle()
        & (d[torch.arange(ROWS)[:, None, None], places()[:, None]] == d[torch.arange(ROWS)[:, None, None], places()])[
            :, None
        ]
    ),
    "(d_i - d_j).abs() < 1": lambda s, d: triangle() & ((d[:, :, None] - d[:, None]).abs() < 1)[:, None],
    "one-hot, a product": lambda s, d: triangle() & (F.one_hot(d, 2).float() @ F.one_hot(d, 2).float().mT > 0)[:, None],
}
SHOWN: Mapping[str, Any] = {
    name: (lambda s, d, show=show: show(triangle() & (d[:, None, :, None] == d[:, None, None])))
    for name, show in {
        "as it is": lambda m: m,
        "m[None][0]": lambda m: m[None][0],
        "m[:, :, :n, :n]": lambda m: m[:, :, :TIME, :TIME],
        "m.unsqueeze(0).squeeze(0)": lambda m: m.unsqueeze(0).squeeze(0),
        "m.reshape(b, n, n).view(b, 1, n, n)": lambda m: m.reshape(ROWS, TIME, TIME).view(ROWS, 1, TIME, TIME),
        "m.expand(b, h, n, n)": lambda m: m.expand(ROWS, HEADS, TIME, TIME),
        "m.repeat(1, h, 1, 1)": lambda m: m.repeat(1, HEADS, 1, 1),
        "m.repeat_interleave(h, 1)": lambda m: m.repeat_interleave(HEADS, 1),
        "m.mT.mT": lambda m: m.mT.mT,
        "m.flatten(2).unflatten(2, (n, n))": lambda m: m.flatten(2).unflatten(2, (TIME, TIME)),
        "torch.stack([m, ~m])[0]": lambda m: torch.stack([m, ~m])[0],
        "m.clone().contiguous()": lambda m: m.clone().contiguous(),
        "m.split(1, 0), cat": lambda m: torch.cat(m.split(1, 0)),
        "m.index_select(1, zeros)": lambda m: m.index_select(1, torch.zeros(HEADS, dtype=torch.long)),
        "m.int().bool()": lambda m: m.int().bool(),
        "a larger mask, cut": lambda m: F.pad(m, (0, 3, 0, 3))[..., :TIME, :TIME],
    }.items()
}


def by_condition(compiled: Compiled) -> bool:
    """Whether no value of [queries, keys] is there."""
    shapes = [type_.shape for node in compiled.program.calls() for type_ in record(node).types if type_]
    return not any(
        (shape[-1:] == (TIME,) and TIME // 2 in shape[-2:]) or shape[-2:] == (TIME, TIME) for shape in shapes
    )
