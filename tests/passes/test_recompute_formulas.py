"""The bytes that a layer of arXiv 2205.05198 keeps are those of the paper, under every policy, to the byte."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from test_sequence_parallel import Layer
from torch import Tensor, nn

from autopar.capture import Captured, capture
from autopar.compiled import Compiled
from autopar.compiler.check_options import options_of
from autopar.compiler.compile import lower
from autopar.ir.mesh import parse_mesh
from autopar.ir.options import StepOptions
from autopar.ir.program import Program, record
from autopar.passes.recompute import recompute
from autopar.report.inspection import memory_of
from autopar.report.memory.saved import recomputed_values

Sizes = tuple[int, int, int, int]  # batch, sequence, width, heads
SIZES: list[Sizes] = [(2, 16, 64, 4), (4, 32, 128, 8)]
# Whole on every rank, split by tensor parallelism, and with sequence parallelism too.
SPLITS = [(0, 1, False), (1, 2, False), (0, 4, False), (1, 2, True), (0, 4, True)]


@functools.cache
def captured(layers: int, sizes: Sizes) -> Captured:
    """The paper's layers in 16 bit, on the meta device: its figure 2, with softmax and dropouts written out."""
    b, s, h, a = sizes

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().sum()

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(h, h), *(Layer(h, a) for _ in range(layers))).bfloat16()
        return capture(model, loss, (torch.empty(b, s, h, dtype=torch.bfloat16),), {})


@functools.cache
def lowered(layers: int, sizes: Sizes, t: int, sequence_parallel: bool) -> Compiled:
    choices = options_of(sequence_parallel=sequence_parallel)
    return Compiled.of(lower(captured(layers, sizes), parse_mesh(f"tp={t}"), choices))


def with_policy(layers: int, sizes: Sizes, t: int, sequence_parallel: bool, policy: str | float) -> Program:
    """The passes up to the one that is tested are the same under every policy."""
    found = lowered(layers, sizes, t, sequence_parallel)
    return recompute(dict(found.history)["partition"], replace(found.plan, options=StepOptions(recompute=policy)))


def of_a_layer(sizes: Sizes, t: int, sequence_parallel: bool, policy: str | float) -> int:
    one, two = (memory_of(with_policy(n, sizes, t, sequence_parallel, policy)).activations for n in (2, 3))
    return two - one


@pytest.mark.parametrize(("which", "t", "sequence_parallel"), SPLITS)
def test_kept_bytes_are_those_of_the_paper(which: int, t: int, sequence_parallel: bool) -> None:
    """Equations 1, 2, 4 and 6 and Table 2: s b h (34 + 5 a s/h) with "none", 34 s b h with "selective", 2 s b h with
    "full"; with tensor parallelism s b h (10 + 24/t + 5 a s/(h t)) and s b h (10 + 24/t), with sequence parallelism all
    of it over t.

    Ours differ in two terms. We keep no dropout mask, since it is drawn again from its key: two of s b h in a layer and
    the softmax's of a s^2 b are missing. And we count what the paper calls small: the mean and the inverse deviation of
    the two norms, 2 bytes for each token, 8 s b in all. Under "full" there is neither.
    """
    sizes = b, s, h, a = SIZES[which]
    token, score, statistics = s * b * h, a * s * s * b, 8 * s * b
    if sequence_parallel:
        none, selective, full = (34 * token + 5 * score) // t, 34 * token // t, 2 * token // t
        masks, statistics = 2 * token // t, statistics // t
    else:
        selective, full = 10 * token + 24 * token // t, 2 * token
        none, masks = selective + 5 * score // t, 2 * token
    assert of_a_layer(sizes, t, sequence_parallel, "none") == none - masks - score // t + statistics
    assert of_a_layer(sizes, t, sequence_parallel, "selective") == selective - masks + statistics
    assert of_a_layer(sizes, t, sequence_parallel, "full") == full


@pytest.mark.parametrize("t", [1, 4])
def test_selective_computes_again_what_the_paper_does(t: int) -> None:
    """The product of queries and keys, softmax and its dropout, and no other product: 2 b s^2 h operations a layer,
    half of the paper's, which computes the attention over values too, though its result is kept."""
    sizes = b, s, h, _ = SIZES[0]
    program = with_policy(2, sizes, t, False, "selective")
    rows = [row for row in recomputed_values(program) if row.module in ("1", "2")]
    assert sorted(row.op for row in rows) == sorted(2 * ["einsum", "mul", "_softmax", "dropout"])
    assert sum(row.flops for row in rows) == 2 * 2 * b * s * s * h
    assert {row.why for row in rows} == {f"recomputed: selective, attention core ('{i}')" for i in (1, 2)}


def test_full_computes_a_layer_again_but_for_what_nobody_needs() -> None:
    """All products of a layer but the last one, whose result only the next layer reads."""
    program = with_policy(2, SIZES[0], 4, False, "full")
    for layer in ("1", "2"):
        again = [row for row in recomputed_values(program) if row.module.split(".")[0] == layer]
        assert sum(bool(row.flops) for row in again) == 8 - 1
        assert {row.why for row in again} == {f"recomputed: full ('{layer}')"}


def test_what_full_gathers_again_is_gathered_once() -> None:
    """With sequence parallelism the backward pass gathers anyway what the forward pass gathered: full adds nothing."""
    counts = []
    for policy in ("none", "full"):
        program = with_policy(2, SIZES[0], 4, True, policy)
        gathers = [n for n in program.calls() if "all_gather" in str(n.target) and record(n).is_backward]
        counts.append(len(gathers))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_budget_may_keep_less_than_selective(sequence_parallel: bool) -> None:
    """What selective keeps of cheap calls (norms, GELU, dropout) can go too."""
    selective = of_a_layer(SIZES[1], 2, sequence_parallel, "selective")
    assert of_a_layer(SIZES[1], 2, sequence_parallel, 0.65) < selective
