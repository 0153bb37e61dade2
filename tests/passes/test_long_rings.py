"""How much moves together follows from the ring that it goes round: over many nodes a collective starts slowly."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import autopar
from autopar.ir.ops.ops import is_collective, op_name
from autopar.machines import named
from autopar.machines.model import RankGroup
from autopar.passes.overlap.bucket import FEWEST, bucket_limit
from autopar.passes.overlap.prefetch import small_limit

H100 = named("h100-80g")
WIDTH, LAYERS = 4096, 8  # a weight has 64 MiB


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def made(ranks: int, **options: object) -> autopar.Compiled:
    with torch.device("meta"):
        model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        batch = torch.empty(ranks * 4096, WIDTH)
    return autopar.compile(
        model, f"dp={ranks}", loss_fn=lambda model, x: model(x).square().mean(), batch=(batch,), zero=3, **options
    )


def moves(compiled: autopar.Compiled) -> Counter[str]:
    found = Counter(op_name(node.target) for node in compiled.program.calls() if is_collective(node.target))
    return Counter({kind: found[f"{kind}_start"] for kind in ("all_gather", "reduce_scatter")})


def test_a_layer_moves_at_once_over_many_nodes_and_a_weight_alone_inside_of_one() -> None:
    inside, across = moves(made(8)), moves(made(512))
    passes = 2 * LAYERS - 1  # forward and backward; the last layer is still there
    assert inside["all_gather"] >= 2 * passes and inside["reduce_scatter"] >= 2 * LAYERS
    assert across["all_gather"] <= passes + 1 and across["reduce_scatter"] == FEWEST


def test_that_is_faster_there() -> None:
    """Than buckets for the links of one node, which is what `bucket_bytes` may still ask for."""
    own, small = (made(512, **options).time(H100).total for options in ({}, {"bucket_bytes": 25 * 2**20}))
    assert own < 0.95 * small


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_limits_grow_with_the_ring(kind: str) -> None:
    groups = [RankGroup(8), RankGroup(16, 8), RankGroup(64, 8), RankGroup(512, 8)]
    buckets = [bucket_limit(1e12, H100, kind, group, None) for group in groups]
    assert buckets == sorted(buckets) and buckets[0] == 25 * 2**20 < buckets[-1]
    assert bucket_limit(2e8, H100, kind, groups[-1], None) == 5e7, (
        "so that some are under way while others are computed"
    )
    alone = [small_limit(H100, group, None) for group in groups]
    assert alone == sorted(alone) and alone[0] < 64 * 2**20 < alone[-1]
    assert bucket_limit(1e12, H100, kind, groups[-1], 7) == small_limit(H100, groups[-1], 7) == 7
    for group, bytes_ in zip(groups, buckets, strict=True):
        start, all_ = H100.start_us(kind, group), H100.collective_us(kind, bytes_, group)
        assert start <= all_ / 2 * 1.2, "half of the time or less is its start"
