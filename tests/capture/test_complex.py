"""Complex parameters (FNO, FEDformer, S4), and modules that are moved, or move themselves, in their own way."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import Ranks
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError
from autopar.verification.dtypes import module_in
from autopar.verification.judge.comparison import error_of


class Spectral(nn.Module):
    """FNO's: the lowest modes times a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, 3, dtype=torch.cfloat) / 8)
        self.register_buffer("turn", torch.exp(1j * torch.arange(3)))
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfft(self.linear(x).transpose(1, 2))
        out = torch.zeros(len(x), 8, modes.shape[-1], dtype=torch.cfloat, device=x.device)
        out[..., :3] = torch.einsum("bim,iom->bom", modes[..., :3], self.weight) * self.turn
        return torch.fft.irfft(out, n=x.shape[1]).transpose(1, 2)


class StateSpace(nn.Module):
    """S4's: a kernel of complex poles, by a convolution in frequency."""

    def __init__(self) -> None:
        super().__init__()
        self.poles = nn.Parameter(torch.view_as_real(torch.randn(8, 4, dtype=torch.cfloat)))
        self.out = nn.Parameter(torch.randn(8, 4, dtype=torch.cfloat))
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        poles = -torch.view_as_complex(self.poles).abs() + 0j
        kernel = (torch.exp(poles[..., None] * torch.arange(x.shape[1])) * self.out[..., None]).sum(1).real
        h, n = self.linear(x).transpose(1, 2), 2 * x.shape[1]
        return torch.fft.irfft(torch.fft.rfft(h, n=n) * torch.fft.rfft(kernel, n=n))[..., : n // 2].transpose(1, 2)


class Mixing(nn.Module):
    """A complex layer, and casts to complex."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.linear = nn.Linear(8, 8, dtype=torch.cfloat), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(self.linear(x).to(torch.cfloat))
        return h.abs() + h.real * h.imag + torch.view_as_real(h.conj().resolve_conj()).sum(-1)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def made(make: Any) -> nn.Module:
    torch.manual_seed(1)
    model: nn.Module = make()
    return model


def rows() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(12, 5, 8)


# A complex Python number with a tensor that needs a gradient: of torch's own formulas some conjugate the number.
SPELLED: dict[str, Any] = {
    "x * 1j": lambda x: (x * 1j).imag,
    "1j * x": lambda x: torch.exp(1j * x).real,
    "x + 1j": lambda x: (x + 1j).abs(),
    "1j - x": lambda x: (1j - x).abs(),
    "x * (2 - 3j)": lambda x: (x * (2 - 3j)).abs(),
    "z / 1j": lambda x: (torch.complex(x, x) / 1j).real,
    "1j / z": lambda x: (1j / (torch.complex(x, x) + 3)).real,
    "z ** 2j": lambda x: (torch.complex(x, x + 2) ** 2j).real,
    "2j ** z": lambda x: (2j ** torch.complex(x, x)).real,
    "z.mul_(1j)": lambda x: torch.complex(x, x).mul_(1j).real,
    "alpha": lambda x: torch.add(torch.complex(x, x), x + 0j, alpha=2j).real,
    "value": lambda x: torch.addcmul(torch.complex(x, x), x + 0j, x * 1j, value=2j).real,
    "cos + 1j sin": lambda x: torch.fft.irfft(x.exp() * (torch.cos(x) + 1j * torch.sin(x)), n=8)[..., :8],
    "rotary": lambda x: torch.view_as_real(
        torch.view_as_complex(x.reshape(12, 4, 2)) * torch.exp(1j * torch.arange(4))
    ).flatten(1),
}


class Spelled(nn.Module):
    def __init__(self, use: Any) -> None:
        super().__init__()
        self.linear, self.use = nn.Linear(8, 8), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.linear(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", SPELLED)
def test_complex_python_numbers(name: str) -> None:
    model, x = made(lambda: Spelled(SPELLED[name])), rows()[:, 0]
    for mesh, options in (("dp=3,tp=2", {}), ("dp=2", {"microbatches": 2})):
        result = autopar.verify(model, mesh, loss_fn=loss_fn, batch=x, **options)
        assert result.ok, (mesh, result)


MODELS = [Spectral, StateSpace, Mixing]


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"zero": 3, "recompute": "full"}], ids=str)
def test_the_numbers_are_those_of_one_device(make: Any, options: dict[str, Any]) -> None:
    for mesh in ("dp=2,tp=2", "dp=3"):
        report = autopar.verify(made(make), mesh, loss_fn=loss_fn, batch=(rows(),), **options)
        assert report.ok and report.max_error < 1e-10, report


def test_verify_compares_the_very_model() -> None:
    """`Module.to(dtype)` would make its weights real."""
    model = made(Spectral)
    exact = module_in(copy.deepcopy(model), torch.float64)
    for (name, a), b in zip(model.state_dict().items(), exact.state_dict().values(), strict=True):
        assert b.dtype == (torch.complex128 if a.is_complex() else torch.float64), name
        assert torch.equal(a, b.to(a.dtype)), name
    torch.testing.assert_close(exact(rows().double()).float(), model(rows()))


def test_a_wrong_imaginary_part_is_an_error() -> None:
    value = torch.randn(4, dtype=torch.complex128)
    assert error_of(value, value, 0.0) == 0.0
    assert error_of(value + 1e-3j, value, 0.0) > 1e-5
    assert error_of(value + 1e-14j, value, 0.0) < 1e-12
    assert error_of(value.real, value, 0.0) == float("inf")


def train(rank: int, mesh: str, name: str) -> None:
    make = {each.__name__: each for each in MODELS}[name]
    plain = made(make)
    parallel = autopar.parallelize(
        copy.deepcopy(plain), mesh, loss_fn=loss_fn, device="cpu", zero=3 if "dp" in mesh else 0
    )
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (plain, parallel)]
    x = rows()
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_fn(plain, x)
        loss.backward()
        torch.testing.assert_close(parallel.forward_backward(x), loss.detach())
        for optimizer in optimizers:
            optimizer.step()
    state = parallel.full_state_dict()
    if rank == 0:
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", MODELS)
def test_a_parallel_model_trains(make: Any) -> None:
    train(0, "dp=1", make.__name__)


@pytest.mark.gloo
@pytest.mark.parametrize(("mesh", "make"), [("dp=2", Spectral), ("tp=2", Mixing)])
def test_on_ranks(two: Ranks, mesh: str, make: Any) -> None:
    """Gloo knows no complex numbers."""
    two.run(train, mesh, make.__name__)


# -- moves ----------------------------------------------------------------------------------------------------------


class OwnTo(nn.Module):
    """With a `to` of its own, as samplers and towers of libraries have it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.device = nn.Linear(8, 8), "cpu"

    def to(self, device: Any) -> OwnTo:  # type: ignore[override]
        self.device = device
        return super().to(device)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Moving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expert, self.norm, self.rnn = nn.Linear(8, 8), nn.BatchNorm1d(5), nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        self.expert.to(x.device)
        self.rnn.cpu()
        return self.norm.to(x.device)(self.expert.to(x.dtype)(x)) + self.rnn.to(x)(x)[0]


class Narrowing(Moving):
    def forward(self, x: Tensor) -> Tensor:
        return self.expert.to(torch.bfloat16)(x.bfloat16()).float()


def test_a_model_with_its_own_to() -> None:
    report = autopar.verify(made(OwnTo), "dp=2,tp=2", loss_fn=loss_fn, batch=(rows(),))
    assert report.ok and report.max_error < 1e-10, report


def test_modules_that_are_moved_while_they_run() -> None:
    model = made(Moving)
    before = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
    assert autopar.verify(model, "dp=2", loss_fn=loss_fn, batch=(rows(),)).max_error < 1e-10
    autopar.compile(model, "dp=2", loss_fn=loss_fn, batch=(rows(),))
    assert before == {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
    assert not [module for module in model.modules() if "_apply" in vars(module)]


def test_a_module_that_changes_its_dtype_while_it_runs_is_refused() -> None:
    with pytest.raises(CaptureError) as caught:
        autopar.compile(made(Narrowing), "dp=2", loss_fn=loss_fn, batch=(rows(),))
    line = Narrowing.forward.__code__.co_firstlineno + 1
    assert f"{__file__}:{line}\n" in str(caught.value)
    assert "a move of 'weight' of a Linear from float32 to bfloat16 while the model runs" in str(caught.value)


# -- sizes and indices of tensors -----------------------------------------------------------------------------------


class Padded(nn.Module):
    """Sizes that are integers in buffers: OverLap-add, patching, causal convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("pad", torch.tensor([1, 2]))
        self.register_buffer("width", torch.tensor(4))
        self.register_buffer("orders", torch.stack([torch.randperm(8) for _ in range(3)]))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        for m in torch.arange(3):
            h = h[..., self.orders[m]]
        return F.pad(h, (self.pad[0], self.pad[1]))[..., : self.width + 3]


def test_sizes_of_integer_buffers_are_taken_with_specialize() -> None:
    with pytest.raises(CaptureError, match="Or specialize=True takes the value"):
        autopar.compile(made(Padded), "dp=2", loss_fn=loss_fn, batch=(rows(),))
    report = autopar.verify(made(Padded), "dp=2,tp=2", loss_fn=loss_fn, batch=(rows(),), specialize=True)
    assert report.ok and report.max_error < 1e-10, report
    found = autopar.compile(made(Padded), "dp=2", loss_fn=loss_fn, batch=(rows(),), specialize=True)
    assert [out.kind for out in found.program.outputs].count("guard") == 3


def test_a_size_of_the_weights_is_not_offered_to_be_specialised() -> None:
    class Sized(Padded):
        def forward(self, x: Tensor) -> Tensor:
            return F.pad(self.linear(x), (self.linear.weight.argmax(), 0))

    with pytest.raises(CaptureError) as caught:
        autopar.compile(made(Sized), "dp=2", loss_fn=loss_fn, batch=(rows(),))
    assert "specialize" not in str(caught.value)
