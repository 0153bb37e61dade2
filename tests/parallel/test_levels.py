"""Ranks that are many meet in groups of few: each is connected to few others, and hears what all say."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Ranks
from torch import nn

import autopar
from autopar.errors import RankError
from autopar.ir.mesh import parse_mesh
from autopar.parallel.agree import agreement
from autopar.runtime.collectives.mesh_ops import axis_group, axis_groups
from autopar.runtime.ranks.levels import NODE, Levels, levels_of
from autopar.runtime.ranks.process_groups import known

MANY = 16_384
SIZES = [65, 100, 127, 512, 4000, 4099, MANY]


@pytest.mark.parametrize("size", SIZES)
def test_no_rank_is_connected_to_more_than_64_beyond_its_node(size: int) -> None:
    others, places = [0] * size, [0] * size
    for level, groups in enumerate(found := levels_of(size)):
        for group in groups:
            for rank in group:
                others[rank] += (len(group) - 1) * (level > 0)
                places[rank] += 1
    assert max(others) <= 64 and max(places) <= len(found) <= 4
    assert [rank for group in found[0] for rank in group] == list(range(size)) and len(found[-1]) == 1
    assert max(map(len, found[0])) == NODE


def test_a_rank_of_a_mesh_of_many_has_few_groups() -> None:
    """One an axis, a second one for what must not queue, and those where ranks meet."""
    mesh = parse_mesh("pp=16,dp=128,tp=8")
    assert mesh.size == MANY
    of_levels = max(sum(0 in group for group in groups) for groups in levels_of(MANY))
    own = [sum(5000 in ranks for ranks in axis_groups(mesh, axis)) for axis in (*mesh.names, "dp:tp")]
    assert own == [1, 1, 1, 1] and 2 * sum(own) + of_levels * len(levels_of(MANY)) <= 64


@pytest.mark.parametrize("text", ["dp=4", "pp=2,dp=3,tp=2", "dp=2,cp=3,tp=2"])
def test_the_groups_of_all_ranks_are_those_of_each(text: str) -> None:
    mesh = parse_mesh(text)
    for axis in (*mesh.names, ":".join(mesh.names), ":".join(reversed(mesh.names))):
        assert axis_groups(mesh, axis) == sorted({axis_group(mesh, rank, axis) for rank in range(mesh.size)})


def _meet(rank: int, size: int, node: int, nodes: int) -> tuple[list[int], list[Any], Any, int]:
    """What the first `size` ranks hear of each other, and over how many groups."""

    def make(ranks: list[int]) -> Any:
        made = dist.new_group(ranks)
        return known(made) if rank in ranks else None

    levels = Levels.of(size, make, node, nodes)
    if rank >= size:
        return [], [], None, 0
    numbers = torch.tensor([rank, -rank, 7 if rank == size - 1 else 0])
    levels.highest(numbers)
    return numbers.tolist(), levels.everyone(("rank", rank)), levels.of_first(f"from {rank}"), len(levels.groups)


@pytest.mark.gloo
@pytest.mark.parametrize("size, node, nodes", [(4, 2, 2), (3, 2, 2), (4, 1, 2), (4, 4, 2), (4, 3, 2)])
def test_each_hears_what_all_say(four: Ranks, size: int, node: int, nodes: int) -> None:
    every = [("rank", rank) for rank in range(size)]
    found = four.run(_meet, size, node, nodes)[:size]
    assert [one[:3] for one in found] == [([size - 1, 0, 7], every, "from 0")] * size
    assert found[0][3] == len(levels_of(size, node, nodes))


def _train(rank: int, is_in_levels: bool) -> list[str]:
    """Losses of two steps, and what ranks say that make other calls."""
    of_torch = dist.get_backend_config
    if is_in_levels:
        dist.get_backend_config = lambda *_: "cuda:nccl"  # type: ignore[assignment]
        agreement.DIRECT, agreement.NODE = 1, 2
    try:
        torch.manual_seed(0)
        model = autopar.parallelize(nn.Linear(8, 8), "dp=2,tp=2", loss_fn=lambda m, x: m(x).square().mean())
    finally:
        dist.get_backend_config = of_torch
        agreement.DIRECT, agreement.NODE = 64, 8
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = []
    for _ in range(2):
        said.append(model.forward_backward(torch.ones(8, 8)).item().hex())
        optimizer.step()
        optimizer.zero_grad()
    groups = model._session.agreement.levels.groups
    assert len(groups) == ((2 if rank % 2 == 0 else 1) if is_in_levels else 1)
    try:
        model.check_replicas() if rank == 3 else model.full_state_dict()
    except RankError as error:
        said.append(re.sub(r" at \S+:\d+", "", str(error)))
    return said


@pytest.mark.gloo
def test_a_model_trains_and_ranks_that_differ_are_told_apart(four: Ranks) -> None:
    """As with one group of all ranks."""
    found, direct = four.run(_train, True), four.run(_train, False)
    assert found == direct and len(found[0]) == 3
    assert "ranks 0-2 call full_state_dict(), rank 3 calls check_replicas()" in found[0][2]
