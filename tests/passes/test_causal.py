"""How much of causal attention is computed, by the positions that ranks have and the calls that the runtime makes."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.ir.layout import local_part, parse_layout
from autopar.ir.mesh import parse_mesh
from autopar.ir.program import record
from autopar.ir.text.text import parse_program
from autopar.machines import Machine
from autopar.machines.model import TILE
from autopar.passes.costs.node_costs import causal_pairs, node_times
from autopar.runtime.attention.blocks import blocks_of, runs_at

B, H, S, D = 2, 4, 1024, 32
FLAT = Machine.flat(1e3, 1e15, 1e15, 0.0, 0.0)  # nothing costs but products
FORWARD, BACKWARD = 4 * B * H * S * S * D, 10 * B * H * S * S * D  # FLOPs of all pairs


class Attending(nn.Module):
    def __init__(self, is_causal: bool, mask: Tensor | None = None) -> None:
        super().__init__()
        self.qkv, self.is_causal, self.mask = nn.Linear(D, 3 * H * D), is_causal, mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (H, D)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, self.mask, is_causal=self.is_causal)


def times(mesh: str, model: nn.Module, **options: Any) -> tuple[float, float]:
    """Of attention on a rank, forward and backward, in FLOPs."""
    with torch.device("meta"):
        x = torch.empty(B, S, D)
    made = autopar.compile(model, mesh, loss_fn=lambda run, x: run(x).square().mean(), batch=x, **options)
    found = {node: us * 1e3 for node, us in node_times(made.program, FLAT).items() if "attention" in str(node.target)}
    (back,), (front,) = ([us for node, us in found.items() if record(node).is_backward is way] for way in (True, False))
    return front, back


def attending(is_causal: bool, mask: Tensor | None = None) -> nn.Module:
    with torch.device("meta"):
        return Attending(is_causal, mask)


def test_a_mask_hides_the_tiles_behind_its_diagonal() -> None:
    n = S // TILE
    assert times("dp=1", attending(False)) == pytest.approx((FORWARD, BACKWARD))
    share = (n + 1) / (2 * n)
    assert times("dp=1", attending(True)) == pytest.approx((share * FORWARD, share * BACKWARD))
    shown = torch.ones(S, S, dtype=torch.bool, device="meta")
    assert times("dp=1", attending(False, shown)) == pytest.approx((FORWARD, BACKWARD)), "nobody knows what it hides"


def test_mfu_counts_what_the_model_asks_for() -> None:
    with torch.device("meta"):
        x = torch.empty(B, S, D)
    masked, whole = (
        autopar.compile(attending(kind), "dp=1", loss_fn=lambda run, x: run(x).square().mean(), batch=x).time(FLAT)
        for kind in (True, False)
    )
    assert masked.flops == whole.flops and masked.total < whole.total


@pytest.mark.parametrize(
    ("mesh", "attention"), [("dp=2", "auto"), ("ulysses=2", "auto"), ("cp=2", "gather"), ("cp=4", "ring")], ids=str
)
def test_ranks_have_their_part_of_it(mesh: str, attention: str) -> None:
    """Of cp mirrored pieces: no rank has more than another."""
    share = (1 + TILE / S) / 2 / parse_mesh(mesh).size
    assert times(mesh, attending(True), attention=attention) == pytest.approx((share * FORWARD, share * BACKWARD))


LAYOUTS = ["cp", "2~cp", "2:cp", "4~cp", "cp:tp", "2~cp:tp", "cp:2~tp", "sl:cp"]


@pytest.mark.parametrize("text", LAYOUTS)
def test_the_rank_whose_queries_lie_last(text: str) -> None:
    """Of all positions that a rank has the keys before it; of slices the mean."""
    mesh, length, sums = parse_mesh("cp=2,tp=4,sl=2"), 64, defaultdict[tuple[int, int], list[float]](list)
    for coord in mesh.coords():
        here = local_part(torch.arange(length) + 0.5, parse_layout(f"[{text}]"), mesh, coord)
        sums[coord["cp"], coord["tp"]].append(float(here.sum()))
    found = causal_pairs(attention_of(text, length), mesh)
    assert found is not None
    most = max(sum(each) / len(each) for each in sums.values())
    assert length**2 * (found.before + found.squares / 2) == pytest.approx(most)


def attention_of(queries: str, length: int) -> Any:
    """A causal attention whose queries lie so."""
    program = parse_program(f"""SHARDED program on cp=2,tp=4,sl=2
%q: f32[1,1,{length},2] [-,-,{queries},-] = batch "0"
%k: f32[1,1,{length},2] [-,-,-,-] = batch "1"
%a: (f32[1,1,{length},2] [-,-,{queries},-], f32[1,1,{length}] [-,-,{queries}]) = autopar.attention.default(%q, %k, %k, None, True, 1.0)
""")  # noqa: E501
    return next(program.calls())


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("outer", [1, -2])
def test_a_ring_computes_as_much(size: int, outer: int) -> None:
    """At each step all wait for the rank with the most pairs."""
    count = S // size
    rows = [runs_at(place, size, outer, count) for place in range(size)]
    steps = [
        max(
            sum(_pairs(block) for block in blocks_of(rows[place], rows[(place - step) % size], True))
            for place in range(size)
        )
        for step in range(size)
    ]
    share = (1 + (1 - 1 / size)) / size / 2 if outer == 1 else 1 / size / 2
    assert sum(steps) == pytest.approx(S * S * share)


def _pairs(block: Any) -> float:
    rows, keys = (one.stop - one.start for one in (block.rows, *block.keys))
    return rows * keys / (2 if block.causal else 1)
