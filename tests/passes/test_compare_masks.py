"""Masks that compare vectors over queries and keys: which are known, and that a step is that of one device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from verified import verified

import autopar
from autopar.compiled import Compiled
from autopar.ir.program import record

ROWS, TIME, WIDTH = 4, 24, 32
sdpa = F.scaled_dot_product_attention


class Attending(nn.Module):
    """One attention with the mask that `mask` makes of the inputs, between projections."""

    def __init__(self, mask: Any) -> None:
        super().__init__()
        self.mask, self.project, self.out = mask, nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, seen: Tensor, document: Tensor) -> Tensor:
        q, k, v = self.project(x).split((WIDTH, WIDTH // 2, WIDTH // 2), -1)
        q, k, v = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in (q, k, v))
        found = sdpa(q, k, v, attn_mask=self.mask(seen, document, x.dtype), enable_gqa=True)
        return self.out(found.transpose(1, 2).flatten(2)).square().mean()


def places() -> Tensor:
    return torch.arange(TIME)


def causal() -> Tensor:
    return places()[:, None] >= places()[None]


def additive(seen: Tensor, dtype: torch.dtype, hidden: float = -math.inf) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, hidden)


# Each with the condition that it is known by, and whether the op is causal.
MASKS: dict[str, tuple[Any, str, bool]] = {
    "window": (lambda s, d, t: causal() & (places()[:, None] - places() < 5), "c0<=r0 & c0>=r1", False),
    "window both ways": (lambda s, d, t: (places() - places()[:, None]).abs() <= 3, "c0<=r0 & c0>=r1", False),
    "chunks": (lambda s, d, t: causal() & ((places() // 8)[:, None] == places() // 8), "c0<=r0 & c1==r1", False),
    "prefix": (lambda s, d, t: causal() | (places() < 7), "c0<=r0 | c1", False),
    "prefix of each": (lambda s, d, t: causal() | (d == 0)[:, None, None], "c0<=r0 | c1", False),
    "padding": (lambda s, d, t: causal() & s[:, None, None], "c0", True),
    "padding of both": (lambda s, d, t: causal() & s[:, None, None] & s[:, None, :, None], "c0 & r0", True),
    "documents": (lambda s, d, t: causal() & (d[:, None, :, None] == d[:, None, None]), "c0==r0", True),
    "documents by cumsum": (
        lambda s, d, t: (d.diff(prepend=d[:, :1]).cumsum(1)[:, None, :, None] == d.diff(prepend=d[:, :1]).cumsum(1)[
            :, None, None
        ]),
        "c0==r0", False,
    ),
    "documents, window and padding": (
        lambda s, d, t: causal() & ~(places()[:, None] - places() >= 6) & (d[:, None, :, None] == d[:, None, None])
        & s[:, None, None],
        "c0<=r0 & c0>r1 & c1==r2 & c2", False,
    ),
    "triangle": (lambda s, d, t: torch.ones(TIME, TIME, dtype=torch.bool).tril(-2), "c0<=r0", False),
    "triangle above": (lambda s, d, t: ~torch.ones(TIME, TIME).triu(3).bool() & s[:, None, None], "c0<=r0 & c1", False),
    "added": (lambda s, d, t: additive(causal(), t) + additive(s, t)[:, None, None], "c0", True),
    "added triangle": (
        lambda s, d, t: torch.full((TIME, TIME), -math.inf, dtype=t).triu(1) + additive(s, t)[:, None, None], "c0", True
    ),
    "added finite": (
        lambda s, d, t: additive(causal() & (d[:, None, :, None] == d[:, None, None]), t, torch.finfo(t).min),
        "c0==r0", True,
    ),
    "chosen": (lambda s, d, t: torch.where(causal() & s[:, None, None], 0.0, -math.inf).to(t), "c0", True),
    "turned": (lambda s, d, t: (places()[:, None] <= places()).mT & s[:, None, None], "c0", True),
    "hidden": (lambda s, d, t: ~((places()[:, None] < places()) | ~s[:, None, None]), "c0", True),
    "of numbers": (
        lambda s, d, t: (torch.ones(TIME, TIME).tril() * s[:, None, None].float()) == 1, "c0", True
    ),
}  # fmt: skip


def batch() -> tuple[Tensor, ...]:
    """Padding on either side, so that rows see nothing; documents that end elsewhere in each row."""
    torch.manual_seed(0)
    seen = torch.ones(ROWS, TIME, dtype=torch.bool)
    seen[0, 17:], seen[1, :5], seen[2, ::3] = False, False, False
    document = torch.randint(4, (ROWS, TIME)).sort().values
    return torch.randn(ROWS, TIME, WIDTH), seen, document


def attentions(found: Compiled) -> list[Any]:
    return [node for node in found.program.calls() if "attention.default" in str(node.target)]


MESHES = ("cp=2", "cp=4", "cp=2,tp=2", "dp=2,cp=2")


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_known_and_a_step_that_of_one_device(name: str) -> None:
    mask, condition, is_causal = MASKS[name]
    for _, found in verified(Attending(mask), MESHES, None, batch(), attention="gather"):
        (node,) = attentions(found)
        assert str(node.target) == "autopar.compared_attention.default"
        assert node.args[5:7] == (condition, is_causal)
        assert str(record(node).layouts[0].dims[2]) == ("(-2, 'cp')" if is_causal else "('cp',)")
        assert not _is_square(found)


def _is_square(found: Compiled) -> bool:
    """Whether the program holds a value of [.., queries, keys]."""
    types = (type_ for node in found.program.calls() for type_ in record(node).types if type_)
    return any(type_.shape[-2:] == (TIME, TIME) for type_ in types)
