"""The kernel of dropout: masks that do not depend on the piece, the dtype or the way their bits are computed."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from autopar.runtime.kernels.counter import Counters, PieceRuns, keys_of
from autopar.runtime.kernels.dropout import dropout, dropout_inplace, dropout_of_rows

pytestmark = pytest.mark.usefixtures("each_side")


def _whole_dropout(x: torch.Tensor, key: int = 5, p: float = 0.3, seed: tuple[int, int] = (1, 2)) -> torch.Tensor:
    return dropout(x, torch.tensor(seed), key, p, list(x.shape), list(x.shape), [0] * x.ndim)


def test_dropout_mask_does_not_depend_on_the_piece() -> None:
    x = torch.randn(4, 6, 10)
    want = _whole_dropout(x)
    # every dim read as (outer, pieces, rest), as a layout with an integer factor does
    whole = [2, 2, 3, 2, 5, 2]
    x_split, want_split = x.view(whole), want.view(whole)
    for dim, size in enumerate(whole):
        for place in range(size):
            local = [*whole[:dim], 1, *whole[dim + 1 :]]
            offsets = [place if d == dim else 0 for d in range(6)]
            piece = x_split.narrow(dim, place, 1)
            got = dropout(piece.flatten(), torch.tensor([1, 2]), 5, 0.3, whole, local, offsets)
            assert torch.equal(got.view(local), want_split.narrow(dim, place, 1)), (dim, place)
    for cut in itertools.product((0, 1), repeat=3):
        piece = x[2 * cut[0] :][:2, 3 * cut[1] :][:, :3, 5 * cut[2] :][..., :5]
        offsets = [2 * cut[0], 3 * cut[1], 5 * cut[2]]
        got = dropout(piece, torch.tensor([1, 2]), 5, 0.3, [4, 6, 10], [2, 3, 5], offsets)
        assert torch.equal(got, want[2 * cut[0] :][:2, 3 * cut[1] :][:, :3, 5 * cut[2] :][..., :5])


def test_rows_draw_as_they_would_in_their_places() -> None:
    """Wherever they lie, in pieces of their columns, of a tensor of many elements; each with the key of its expert."""
    seed, x = torch.tensor([1, 2]), torch.randn(7, 4, 10)
    place, which = torch.tensor([5, 0, 11, 3, 3, 8, 1]), torch.tensor([0, 2, 1, 2, 0, 0, 1])
    for rows in (12, 2**30):
        every = [[rows, 4, 10], [1, 4, 10]]
        want = torch.cat(
            [
                dropout(x[i : i + 1], seed, 5 + 3 * int(which[i]), 0.3, *every, [int(place[i]), 0, 0])
                for i in range(len(x))
            ]
        )
        got = dropout_of_rows(x, seed, 5, 3, 0.3, place, which, [rows, 4, 10], [4, 10], [0, 0])
        assert torch.equal(got, want)
        piece = dropout_of_rows(
            x[2:, :, 5:], seed, 5, 3, 0.3, place[2:], which[2:], [rows, 4, 2, 5], [4, 1, 5], [0, 1, 0]
        )
        assert torch.equal(piece, want[2:, :, 5:])
    assert dropout_of_rows(x[:0], seed, 5, 3, 0.3, place[:0], which[:0], [9, 4, 10], [4, 10], [0, 0]).shape == (
        0,
        4,
        10,
    )


def test_dropout_pieces_longer_than_a_chunk() -> None:
    x = torch.ones(3, 150_000)
    want = _whole_dropout(x)
    got = dropout(x[1:, 70_000:], torch.tensor([1, 2]), 5, 0.3, [3, 150_000], [2, 80_000], [1, 70_000])
    assert torch.equal(got, want[1:, 70_000:])


def test_dropout_beyond_32_bits_of_index() -> None:
    """The two ways to compute the index agree below 2^31, and rows 2^32 elements apart differ."""
    seed, n = torch.tensor([1, 2]), 4096
    x = torch.ones(1, n)
    first = dropout(x, seed, 5, 0.5, [1, n], [1, n], [0, 0])
    rows = [dropout(x, seed, 5, 0.5, [2, 2**32], [1, n], [row, 0]) for row in (0, 1)]
    assert torch.equal(first, rows[0])
    assert 0.4 < (rows[0] == rows[1]).double().mean() < 0.6


def test_bits_are_the_same_however_they_are_computed() -> None:
    """numpy's, PyTorch's, and those of 64-bit indices."""
    keys = keys_of(torch.tensor([1, -2]), 5)
    rows, columns = slice(1, 4), slice(3, 3000)
    runs = PieceRuns.of([4, 5000], [4, 4000], [0, 1000])
    counters, wide = (Counters.of(each, torch.device("cpu")) for each in (runs, dataclasses.replace(runs, wide=True)))
    found = [each._bits_of_torch(keys, rows, columns) for each in (counters, wide)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], counters._bits_of_numpy(keys, rows, columns))
    assert torch.equal(found[0], counters.bits(keys, rows, columns)) and found[0].unique().numel() > 8900


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_dropout_values(dtype: torch.dtype) -> None:
    x = torch.randn(200, 500).to(dtype)
    out = _whole_dropout(x, p=0.25)
    kept = out != 0
    torch.testing.assert_close(out, torch.where(kept, x / 0.75, 0).to(dtype))
    assert abs(kept.double().mean().item() - 0.75) < 4 * math.sqrt(0.25 * 0.75 / x.numel())
    assert torch.equal(kept, _whole_dropout(torch.ones(200, 500), p=0.25) != 0)  # whatever the dtype
    again = x.clone()
    assert dropout_inplace(again, torch.tensor([1, 2]), 5, 0.25, [200, 500], [200, 500], [0, 0]) is again
    assert torch.equal(again, out)


def test_dropout_of_all_and_nothing() -> None:
    x = torch.randn(3, 4)
    same = _whole_dropout(x, p=0.0)
    assert torch.equal(same, x) and same.data_ptr() != x.data_ptr()
    assert _whole_dropout(x, p=1.0).abs().sum() == 0
    assert (_whole_dropout(torch.full((100,), torch.inf), p=0.5) == 0).any()  # dropped is 0, not inf * 0


def test_dropout_masks_are_independent() -> None:
    """Any two of seed, step, key: masks agree as often as coins do; so do neighbours within one mask."""
    n = 200_000
    x, bound = torch.ones(n), 5 / math.sqrt(n) / 2
    settings = [((1, 2), 5), ((1, 2), 6), ((1, 3), 5), ((2, 2), 5), ((2, 1), 5), ((1, 2 + 2**32), 5), ((-1, 2), 5)]
    masks = [_whole_dropout(x, key=key, p=0.5, seed=seed) != 0 for seed, key in settings]
    for a, b in itertools.combinations(masks, 2):
        assert abs((a == b).double().mean().item() - 0.5) < bound
    for mask in masks:
        assert abs(mask.double().mean().item() - 0.5) < bound
        for lag in (1, 2, 3, 64, 1024, 4096, 65536):
            assert abs((mask[lag:] == mask[:-lag]).double().mean().item() - 0.5) < 1.3 * bound, lag
        # chi-square of the 256 patterns of eight neighbours: mean 255, deviation 22.6
        patterns = (mask[: n // 8 * 8].view(-1, 8) * 2 ** torch.arange(8)).sum(1)
        expected = n // 8 / 256
        chi = ((torch.bincount(patterns, minlength=256) - expected) ** 2 / expected).sum().item()
        assert abs(chi - 255) < 5 * 22.6


def test_dropout_masks_of_two_keys_are_not_shifts_of_each_other() -> None:
    """The first key only shifts the index; without the second, one mask would be a piece of the other."""
    n, seed = 4096, torch.tensor([1, 2])
    first = [int(keys_of(seed, key)[0]) for key in range(20)]
    shift, a, b = next(
        (d, a, b) for a, b in itertools.permutations(range(20), 2) if 0 < (d := (first[b] - first[a]) % 2**32) < 2**30
    )
    x = torch.ones(n)
    at_shift = dropout(x, seed, a, 0.5, [2**31], [n], [shift])
    assert 0.45 < (at_shift == dropout(x, seed, b, 0.5, [2**31], [n], [0])).double().mean() < 0.55
