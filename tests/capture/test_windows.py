"""`as_strided` raised to views and windows: the same elements of the same memory, and gradients that add up."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from models import square_loss
from torch import Tensor, nn

from autopar import verify
from autopar.api import compile
from autopar.capture.ops.raised_windows import as_strided, istft, stft


def dense(draw: random.Random, memory: Tensor) -> Tensor:
    """A part of `memory` with its dims in any order."""
    shape = [draw.choice((1, 2, 3, 4, 6)) for _ in range(draw.randint(1, 4))]
    count = math.prod(shape)
    start = draw.choice((0, memory.numel() - count))
    order = draw.sample(range(len(shape)), len(shape))
    return memory[start : start + count].view(shape).permute(order)


def asked(draw: random.Random, x: Tensor) -> tuple[list[int], list[int], int | None]:
    """Sizes and strides, most of them from the strides of `x`, and an offset."""
    steps = [s * k // 2 for s in x.stride() for k in (1, 2, 2, 4)] + [draw.randint(0, x.numel())]
    count = draw.randint(0, 5)
    size = [draw.choice((1, 2, 3, 4, 8)) for _ in range(count)]
    offset = draw.choice((None, None, x.storage_offset(), x.storage_offset() + draw.randint(0, 6)))
    return size, [draw.choice(steps) for _ in range(count)], offset


@pytest.mark.parametrize("seed", range(4))
def test_random_strides_give_what_torch_gives(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    memory = torch.randn(6**4 + 5, dtype=torch.float64, requires_grad=True)
    raised = overlapping = 0
    for _ in range(1500):
        x = dense(draw, memory)
        size, stride, offset = asked(draw, x)
        try:
            expected = torch.as_strided(x, size, stride, offset)
        except RuntimeError:  # beyond the memory
            continue
        found = as_strided(x, size, stride, offset)
        if found is NotImplemented:
            continue
        case = (tuple(x.shape), x.stride(), size, stride, offset)
        assert torch.equal(found, expected), case
        assert found.data_ptr() == expected.data_ptr(), case
        grad = torch.randn(size, dtype=torch.float64)
        (wanted,) = torch.autograd.grad(expected, memory, grad)
        (got,) = torch.autograd.grad(found, memory, grad)
        torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-13, msg=lambda m, c=case: f"{c}: {m}")
        raised += 1
        overlapping += grad.numel() > wanted.count_nonzero()
    assert raised > 500 and overlapping > 100, (raised, overlapping)


def rows(*shape: int) -> Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float64).view(shape)


@pytest.mark.parametrize(
    ("x", "size", "stride", "offset"),
    [
        (rows(6, 8, 4), (6, 3, 4, 4), (32, 8, 4, 1), None),  # windows of 4, every 2
        (rows(8, 6, 4).transpose(0, 1), (6, 5, 4, 4), (4, 24, 24, 1), None),  # of dims that lie crosswise
        (rows(2, 3, 4), (4, 2, 3), (1, 12, 4), None),  # a permutation
        (rows(6, 8), (6, 4), (8, 2), 1),  # every second column
        (rows(6, 8), (6,), (9,), 0),  # a diagonal
        (rows(6, 8), (3, 6, 2), (0, 8, 1), 3),  # an expanded slice
        (rows(4), (), (), 2),
    ],
)
def test_what_is_raised(x: Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int | None) -> None:
    found = as_strided(x, size, stride, offset)
    assert torch.equal(found, torch.as_strided(x, size, stride, offset)) and found.shape == torch.Size(size)


@pytest.mark.parametrize(
    ("x", "size", "stride", "offset"),
    [
        (rows(6, 8)[:, 1:], (6, 7), (8, 1), None),  # with gaps
        (rows(6, 8)[2:], (2, 8), (8, 1), 0),  # before its memory
        (rows(6, 8)[:2], (4, 8), (8, 1), None),  # behind it
        (rows(6, 8)[:1, :1], (1,), (1,), 9),
        (rows(6, 1).expand(6, 8), (6, 8), (1, 0), None),
        (rows(12), (3, 2), (3, 2), None),  # no digits: 2 and 3 have no common step
        (rows(6, 8), (6, 0), (8, 1), None),
    ],
)
def test_what_is_left_to_torch(x: Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int | None) -> None:
    assert as_strided(x, size, stride, offset) is NotImplemented


class Chunks(nn.Module):
    """Chunks of 4 positions, every 2, of heads that lie time first, as in Longformer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        heads = self.up(x.transpose(0, 1)).view(time, batch, 6, 4).permute(1, 2, 0, 3)
        heads = heads.reshape(batch * 6, time, 4)
        a, b, c = heads.stride()
        chunks = heads.as_strided((batch * 6, time // 2 - 1, 4, 4), (a, 2 * b, b, c))
        scores = (chunks @ heads[:, None, :4].transpose(2, 3)).softmax(-1)
        mixed = (scores @ chunks).sum(1).view(batch, 6, 4, 4).transpose(1, 2).reshape(batch, 4, 24)
        return self.down(mixed).square().mean()


@pytest.mark.parametrize("mesh", ["dp=3", "tp=2", "dp=2,tp=3"])
def test_overlapping_chunks_are_divided_by_heads(mesh: str) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(6, 8, 8),)
    report = verify(Chunks(), mesh, batch=batch)
    assert report.ok, report
    compiled = compile(Chunks(), mesh, batch=batch)
    assert not compiled.notes
    if "tp" in mesh:
        assert str(compiled.layouts["up.weight"]) == "[tp,-]"
        assert str(compiled.layouts["down.weight"]) == "[-,tp]"


class Carrying(nn.Module):
    """Strides that have no digits: torch's op stays, told of the memory order."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        lying = self.up(x).t()
        return (lying.as_strided((x.shape[0], 3, 2), (12, 3, 2)) * torch.arange(6).view(3, 2)).square().mean()


@pytest.mark.parametrize("mesh", ["dp=3", "dp=2,tp=3"])
def test_what_is_left_to_torch_is_right(mesh: str) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(6, 8),)
    report = verify(Carrying(), mesh, batch=batch)
    assert report.ok, report
    assert any("as_strided" in note for note in compile(Carrying(), mesh, batch=batch).notes)


class Pooled(nn.Module):
    """Averages over all positions, as most image models do before their head."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.body = nn.Sequential(convolution(3, 8, 3, padding=1), nn.Tanh(), convolution(8, 8, 3, padding=1))
        self.pool = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[dims - 1](1)
        self.head = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.body(x)).flatten(1))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_an_average_over_all_positions_is_a_mean(dims: int) -> None:
    model, batch = Pooled(dims), (torch.randn(12, 3, *(4, 6, 2)[:dims]), torch.randn(12, 6))
    program = compile(model, "dp=3,tp=2", loss_fn=square_loss, batch=batch)
    assert not program.notes, program.notes
    for mesh, options in (("dp=2,tp=3", {}), ("pp=2", {"microbatches": 3})):
        report = verify(model, mesh, loss_fn=square_loss, batch=batch, **options)
        assert report.ok, str(report)


# --- the inverse of a short-time Fourier transform

WAVES: list[dict[str, Any]] = [
    {}, {"length": 50}, {"length": 70}, {"center": False}, {"win_length": 12}, {"normalized": True},
    {"window": torch.ones(16)}, {"onesided": False}, {"hop_length": 8},
]  # fmt: skip


def spectrum(x: Tensor, options: dict[str, Any]) -> Tensor:
    known = {key: value for key, value in options.items() if key in ("win_length", "normalized", "onesided")}
    hop = options.get("hop_length", 4)
    return torch.stft(x, 16, hop, window=window_of(options), return_complex=True, **known)


def window_of(options: dict[str, Any]) -> Tensor:
    return options.get("window", torch.hann_window(options.get("win_length", 16), periodic=True) + 0.1).double()


@pytest.mark.parametrize("options", WAVES, ids=str)
def test_the_sum_of_windows_is_torchs(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    options = {"hop_length": 4, **options, "window": window_of(options)}
    for x in (torch.randn(3, 64), torch.randn(64)):
        given = spectrum(x.double(), options)
        torch.testing.assert_close(istft(given, 16, **options), torch.istft(given, 16, **options))


SPECTRA: list[dict[str, Any]] = [
    {}, {"hop_length": 5}, {"win_length": 11}, {"center": False}, {"pad_mode": "constant"}, {"normalized": True},
    {"onesided": False}, {"return_complex": False}, {"window": None}, {"window": None, "win_length": 12},
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:A window was not provided", "ignore:stft with return_complex")
@pytest.mark.parametrize("options", SPECTRA, ids=str)
def test_the_spectra_of_windows_are_torchs(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    window = torch.hann_window(options.get("win_length", 16)).double()
    options = {"return_complex": True, "window": window, **options}
    for x in (torch.randn(3, 64).double(), torch.randn(64).double()):
        torch.testing.assert_close(stft(x, 16, **options), torch.stft(x, 16, **options))


def test_what_torch_refuses_or_reads_otherwise_is_left_to_it() -> None:
    x = torch.randn(3, 64)
    for options in (
        {"return_complex": None}, {"return_complex": True, "window": torch.ones(3)},
        {"return_complex": True, "center": False, "align_to_window": True},
    ):  # fmt: skip
        assert stft(x, 16, **options) is NotImplemented
    assert stft(x[:, :8], 16, center=False, return_complex=True) is NotImplemented
    assert stft(x.to(torch.complex64), 16, return_complex=True) is NotImplemented


def test_a_spectrogram_is_of_each_row_alone() -> None:
    """torchaudio's: `as_strided` inside of torch.stft needed the whole batch, so that micro-batches were refused."""

    class Heard(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Linear(64, 64), nn.Linear(17, 8)

        def forward(self, x: Tensor) -> Tensor:
            window = torch.hann_window(16, dtype=x.dtype)
            found = self.before(x).stft(16, 4, window=window, return_complex=True).abs()
            return self.after(found)

    torch.manual_seed(0)
    options: Any = {"microbatches": 2, "loss_fn": lambda m, x: m(x).square().mean(), "batch": torch.randn(4, 64)}
    for mesh in ("dp=2,tp=2", "pp=2,dp=2"):
        report = verify(Heard(), mesh, **options)
        assert report.ok and report.max_error < 1e-10, report


@pytest.mark.parametrize("options", WAVES[:3], ids=str)
def test_a_wave_of_a_spectrum(options: dict[str, Any]) -> None:
    class Filtered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.rand(9, 2))

        def forward(self, x: Tensor) -> Tensor:
            window = window_of({}).to(x.dtype)
            given = torch.stft(x, 16, 4, window=window, return_complex=True)
            return torch.istft(given * self.gain[:, :1] + self.gain[:, 1:], 16, 4, window=window, **options)

    torch.manual_seed(0)
    report = verify(Filtered(), "dp=2,tp=2", loss_fn=lambda m, x: m(x).square().mean(), batch=torch.randn(4, 64))
    assert report.ok and report.max_error < 1e-10, report
