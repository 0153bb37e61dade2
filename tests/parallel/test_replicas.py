"""Ranks that should hold the same and do not are named at the next check; healthy runs raise nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import Ranks
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, RankError
from autopar.parallel.weights.replicas import PIECE, _digests, _Part, digest, every_of, weights_of
from autopar.report.memory.track import Tracker

pytestmark = pytest.mark.gloo


class Model(nn.Module):
    """Parameters that tp splits and such that it does not, buffers that a step writes and one that it does not."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 18), nn.Linear(18, 6)
        self.norm = nn.BatchNorm1d(6) if norm else nn.LayerNorm(6)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("offset", torch.linspace(0, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.dropout(self.down(torch.relu(self.up(x))))) + self.offset


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def make(mesh: str, every: int | None, **options: Any) -> Any:
    torch.manual_seed(0)
    pipeline = "pp" in mesh
    options |= {"microbatches": 2, "stages": ["up", "down, norm"]} if pipeline else {}
    return autopar.parallelize(Model(not pipeline), mesh, loss_fn=loss_fn, check_replicas=every, **options)


def _train(model: Any, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        model.forward_backward(torch.randn(12, 8, generator=torch.Generator().manual_seed(step)))
        optimizer.step()
        optimizer.zero_grad()


def _drift(rank: int, mesh: str, name: str, who: int, options: dict[str, Any]) -> tuple[str, str]:
    """One rank changes one element of its part in the middle; found by the next check, whose step does not run."""
    model = make(mesh, 4, **options)
    _train(model, 5)
    if rank == who:
        held = dict(model.named_parameters()) | dict(model.named_buffers())
        with torch.no_grad():
            local = held[name].to_local() if isinstance(held[name], nn.Parameter) else held[name]
            local.view(-1)[1] += 0.25
    with pytest.raises(RankError) as asked:
        model.check_replicas()
    with pytest.raises(RankError) as caught:
        _train(model, 5)
    assert model.random_state.steps == 8
    return str(asked.value), str(caught.value)


DRIFTS = {
    "dp and tp": ("dp=2,tp=2", "up.weight", 3, {}, "parameter 'up.weight': rank 3 differs from rank 1"),
    "a replicated bias": ("tp=4", "down.bias", 2, {}, "parameter 'down.bias': rank 2 differs from ranks 0-1, 3"),
    "a scalar of all": ("dp=2,tp=2", "norm.weight", 0, {}, "parameter 'norm.weight': rank 0 differs from ranks 1-3"),
    "a buffer": ("dp=2,tp=2", "offset", 1, {}, "buffer 'offset': rank 1 differs from ranks 0, 2-3"),
    "a running mean": ("dp=4", "norm.running_mean", 1, {}, "buffer 'norm.running_mean': rank 1 differs from ranks 0"),
    "zero 1": ("dp=2,tp=2", "norm.weight", 1, {"zero": 1}, "parameter 'norm.weight': rank 1 differs from rank 0"),
    "zero 3": ("dp=2,fsdp=2", "up.weight", 3, {"zero": 3}, "parameter 'up.weight': rank 3 differs from rank 1"),
    "a stage": ("pp=2,dp=2", "down.weight", 3, {}, "parameter 'down.weight': rank 3 differs from rank 2"),
    "a buffer of stages": ("pp=2,dp=2", "offset", 3, {}, "buffer 'offset': rank 3 differs from ranks 0-2"),
}


@pytest.mark.parametrize("name", DRIFTS)
def test_a_part_that_drifts_is_named(four: Ranks, name: str) -> None:
    """Red before: each rank trained on with its own weights."""
    *case, text = DRIFTS[name]
    found = four.run(_drift, *case)
    assert all(pair == found[0] for pair in found)
    asked, caught = found[0]
    assert asked.startswith("after 5 training steps, ranks that should hold the same values hold others:\n")
    assert caught.startswith("after 8 training steps, ranks that should hold the same values hold others:\n")
    assert f"  {text}" in asked and "by up to 0.25" in asked, asked
    assert f"  {text}" in caught, caught


def _start(rank: int) -> str:
    """Weights that differ before the first step: compared whole, before each rank takes its part."""
    model = make("tp=4", 100)
    with torch.no_grad():
        nn.init.normal_(model.up.weight.to_local(), std=1.0 + rank)
    with pytest.raises(RankError) as caught:
        _train(model, 1)
    return str(caught.value)


def test_weights_that_differ_from_the_start(four: Ranks) -> None:
    for text in four.run(_start):
        assert "after 0 training steps" in text and "'up.weight': rank 1 differs from rank 0" in text


def _healthy(rank: int, mesh: str, options: dict[str, Any]) -> None:
    _train(make(mesh, 1, **options), 5)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("dp=2,tp=2", {}),
        ("dp=2,tp=2", {"zero": 1}),
        ("dp=2,tp=2", {"zero": 3}),
        ("dp=2,fsdp=2", {"zero": 2}),
        ("tp=4", {"precision": "bf16"}),
        ("pp=2,dp=2", {}),
        ("pp=2,tp=2", {}),
    ],
)
def test_replicas_of_a_healthy_run_are_equal_bit_by_bit(four: Ranks, mesh: str, options: dict[str, Any]) -> None:
    four.run(_healthy, mesh, options)


def _never(rank: int) -> None:
    model = make("dp=4", None)
    with torch.no_grad():
        model.up.bias.to_local()[0] += rank
    _train(model, 2)


def test_no_check_if_none_is_wanted(four: Ranks) -> None:
    four.run(_never)


# -- the digest -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.complex64])
def test_every_bit_counts(dtype: torch.dtype) -> None:
    """One element, its sign bit alone, or two that change places."""
    weights = weights_of(64, torch.device("cpu"))
    value = (torch.arange(24) % 7 != 0).to(dtype)
    seen = {int(digest(value, weights))}
    for i in range(24):
        other = value.clone()
        other[i] = ~other[i] if dtype == torch.bool else other[i] + 1
        seen.add(int(digest(other, weights)))
    expected = 25
    if dtype.is_floating_point:
        other = value.clone()
        other[0] = -0.0
        nan = value.clone()
        nan[0] = float("nan")
        seen |= {int(digest(other, weights)), int(digest(nan, weights))}
        expected += 2
    swapped = value.clone()
    swapped[0], swapped[1] = value[1], value[0]
    seen.add(int(digest(swapped, weights)))
    assert len(seen) == expected + 1
    assert digest(value[::2], weights) == digest(value[::2].contiguous(), weights)


def test_pieces_of_a_large_tensor_have_their_places() -> None:
    weights = weights_of(PIECE, torch.device("cpu"))
    value = torch.zeros(PIECE + 3, dtype=torch.int8)
    found = set()
    for i in (0, 1, PIECE - 1, PIECE, PIECE + 2):
        value[i] = 1
        found.add(int(digest(value, weights)))
        value[i] = 0
    assert len(found) == 5


def test_large_tensors_are_compared_with_little_memory() -> None:
    """Red before: seven times a table of 2M elements, at the first step, on top of all else."""
    parts = [_Part("table", torch.zeros(1 << 21), ("dp",), None)]
    with Tracker() as tracker:
        _digests(parts, torch.device("cpu"))
    assert tracker.peak_bytes() < (8 << 20) + (4 << 20)
    tracker.close()


def test_the_option() -> None:
    assert [every_of(given) for given in (None, 0, 7)] == [None, None, 7]
    for wrong in (-1, 2.5, True, "10"):
        with pytest.raises(AutoparError, match="write a number of training steps, or None for never"):
            every_of(wrong)  # type: ignore[arg-type]
