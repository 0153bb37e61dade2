"""The draws are what they say: moments, distributions, and independence. Seeds are fixed, so a pass stays a pass."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy import stats

from autopar.runtime.kernels.dropout import dropout
from autopar.runtime.kernels.random_kernels import random

N = 200_000
SIGMA = 1 / math.sqrt(N)  # of a correlation of N independent pairs
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
CDF = {"uniform": stats.uniform, "normal": stats.norm, "exponential": stats.expon}
MOMENTS = {"uniform": (0.5, 1 / 12), "normal": (0.0, 1.0), "exponential": (1.0, 1.0)}  # mean, variance
# (seed, step), key: each beside the first differs in one of them, the last in the order of two
PLACES = [((1, 2), 5), ((1, 2), 6), ((1, 3), 5), ((2, 2), 5), ((1, 2 + 2**32), 5), ((-1, 2), 5), ((2, 1), 5)]


def draw(
    kind: str, dtype: torch.dtype = torch.float64, seed: tuple[int, int] = (1, 2), key: int = 5, n: int = N
) -> torch.Tensor:
    return random(torch.tensor(seed), key, kind, [n], dtype, [n], [n], [0])


def mask(p: float, seed: tuple[int, int] = (1, 2), key: int = 5) -> torch.Tensor:
    kept = dropout(torch.ones(N), torch.tensor(seed), key, p, [N], [N], [0])
    return (kept != 0).double()


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.stack((a, b)).double().corrcoef()[0, 1])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", CDF)
def test_moments(kind: str, dtype: torch.dtype) -> None:
    """The mean within 5 of its deviations, and the variance; a short float's steps add a known shift at most."""
    x = draw(kind, dtype).double()
    mean, variance = MOMENTS[kind]
    step = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11 if dtype == torch.float16 else 0.0
    fourth = CDF[kind].stats(moments="k") + 3  # E (x - mean)^4 / variance^2
    assert abs(x.mean().item() - mean) < 5 * math.sqrt(variance / N) + step
    assert abs(x.var().item() - variance) < 5 * variance * math.sqrt((fourth - 1) / N) + step


@pytest.mark.parametrize(("seed", "key"), PLACES)
@pytest.mark.parametrize("kind", CDF)
def test_distributions(kind: str, seed: tuple[int, int], key: int) -> None:
    """Kolmogorov and Smirnov: a right sampler fails one such test in a thousand; 21 are fixed here."""
    for dtype in (torch.float64, torch.float32):
        assert stats.kstest(draw(kind, dtype, seed, key).double().numpy(), CDF[kind].cdf).pvalue > 1e-3


@pytest.mark.parametrize("kind", CDF)
def test_tails(kind: str) -> None:
    """The share of what lies far out, where a sampler with few bits would have gaps."""
    x = draw(kind, torch.float32, n=1 << 23).double()
    for share in (1e-4, 1e-5):
        for beyond in ((x < CDF[kind].ppf(share)), (x > CDF[kind].isf(share))):
            expected = share * len(x)
            assert abs(beyond.sum().item() - expected) < 5 * math.sqrt(expected)
    assert x.isfinite().all() and (x >= 0).all() != (kind == "normal")


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1e-3])
def test_the_mean_of_masks(p: float) -> None:
    for seed, key in PLACES:
        assert abs(mask(p, seed, key).mean().item() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / N)


def test_ops_steps_and_seeds_are_independent() -> None:
    """Draws, their squares (two normals of one radius correlate in these alone) and masks."""
    for kind in CDF:
        found = [draw(kind, seed=seed, key=key) for seed, key in PLACES]
        for a, b in itertools.combinations(found, 2):
            assert abs(correlation(a, b)) < 5 * SIGMA
            assert abs(correlation((a - a.mean()) ** 2, (b - b.mean()) ** 2)) < 5 * SIGMA
    masks = [mask(0.1, seed, key) for seed, key in PLACES]
    for one, other in itertools.combinations(masks, 2):
        assert abs(correlation(one, other)) < 5 * SIGMA


@pytest.mark.parametrize("kind", [*CDF, "mask"])
def test_neighbours_are_independent(kind: str) -> None:
    x = mask(0.1) if kind == "mask" else draw(kind)
    for lag in (1, 2, 3, 4, 7, 8, 16, 64, 1000, 1024, 4096, 65536):
        a, b = x[lag:], x[:-lag]
        bound = 5 / math.sqrt(len(a))
        assert abs(correlation(a, b)) < bound, lag
        assert abs(correlation((a - a.mean()) ** 2, (b - b.mean()) ** 2)) < bound, lag


def test_streams_of_one_op_and_kinds_of_one_key_are_what_they_should_be() -> None:
    """A normal's radius and angle are independent: so is its sign of its size. Float32 is float64, rounded."""
    x = draw("normal")
    assert abs(correlation(x.sign(), x.abs())) < 5 * SIGMA
    for kind in CDF:
        torch.testing.assert_close(draw(kind, torch.float32).double(), draw(kind), rtol=1e-6, atol=1e-4)
    u = draw("uniform")
    assert torch.equal(draw("uniform", torch.float32).double(), (u * 2**24).floor() / 2**24)
    for dtype in FLOATS:
        assert draw("uniform", dtype).max() < 1 and draw("exponential", dtype).min() > 0
