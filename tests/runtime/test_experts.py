"""Products by expert against one product a row, on each way that a device may take, none of which asks the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from experts import experts_case
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar.runtime.kernels import experts, host
from autopar.runtime.kernels.experts import expert_mm, expert_mm_backward
from autopar.verification.verify import verify

READS = {"tolist", "item", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu", "nonzero", "bincount"}


class NoReads(TorchFunctionMode):
    """Notes what a device would stop for."""

    only_watches = True

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS:
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


def _case(rows: int, dtype: torch.dtype, k: int = 16, n: int = 8) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, w, grad and index; nobody goes to the last of the four experts, nor to the second."""
    made = torch.Generator().manual_seed(rows)
    x, w = torch.randn(rows, k, generator=made), torch.randn(4, k, n, generator=made)
    index = torch.tensor([0, 2])[torch.randint(0, 2, (rows,), generator=made)]
    return x.to(dtype), w.to(dtype), torch.randn(rows, n, generator=made).to(dtype), index


def _wanted(x: Tensor, w: Tensor, grad: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    x, w, grad = x.double(), w.double().requires_grad_(), grad.double()
    out = torch.bmm(x.unsqueeze(1), w[index]).squeeze(1)
    return out.detach(), torch.autograd.grad(out, w, grad)[0]


# torch's grouped product; a batched one over blocks of rows, where it takes the dtype or the sizes not
WAYS = [(torch.bfloat16, 16, 8), (torch.bfloat16, 6, 5), (torch.float32, 16, 8), (torch.float64, 6, 5)]


@pytest.mark.parametrize("rows", [0, 1, 3, 40])
@pytest.mark.parametrize(("dtype", "k", "n"), WAYS)
def test_off_the_cpu_the_host_reads_nothing(
    dtype: torch.dtype, k: int, n: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red before: a read and a loop in every product."""
    monkeypatch.setattr(host, "on_host", lambda x: False)
    x, w, grad, index = _case(rows, dtype, k, n)
    want, want_grad = _wanted(x, w, grad, index)
    with NoReads() as seen:
        out, made = expert_mm(x, w, index), expert_mm_backward(x, grad, index, 4)
        parts = [expert_mm(x, w[start : start + 2], index, offset=start) for start in (0, 2)]
        grads = [expert_mm_backward(x, grad, index, 2, offset=start) for start in (0, 2)]
    assert not seen.found
    close = {"atol": 0.15, "rtol": 0.02} if dtype == torch.bfloat16 else {"atol": 1e-4, "rtol": 1e-4}
    for got, expected in ((out, want), (sum(parts), want), (made, want_grad), (torch.cat(grads), want_grad)):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, **close)


def test_rows_of_other_ranks_give_zeros_whatever_lies_behind_the_last_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grouped kernel writes nothing there: what was in the memory must not come out."""
    x, w, _grad, index = _case(40, torch.bfloat16)

    def grouped(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        out = torch._grouped_mm(a, b, offs=offs)
        if a.ndim == 2 and b.ndim == 3:
            out[int(offs[-1]) :] = torch.nan
        return out

    monkeypatch.setattr(experts, "GROUPED_MM", grouped)
    out = expert_mm(x, w[2:], index, offset=2)
    assert out.isfinite().all() and not out[index != 2].any() and out[index == 2].any()


def test_every_group_starts_where_grouped_kernels_want_it() -> None:
    """At multiples of 16 bytes, and none is empty: of those what the kernel gives is what was there."""
    for rows in (0, 1, 7, 40):
        own = torch.randint(0, 5, (rows,), generator=torch.Generator().manual_seed(rows))
        found = experts._Grouped.of(own, 4, 8)
        ends = found.ends.tolist()
        assert ends == sorted(ends) and ends[-1] <= found.size and all(end % 8 == 0 for end in ends)
        assert all(end - start >= 8 for start, end in zip([0, *ends], ends, strict=False))
        assert len(set(found.places.tolist())) == rows, "no two rows at one place"
        for expert in range(5):
            start, end = ([0, *ends, found.size][expert + at] for at in (0, 1))
            assert all(start <= place < end for place in found.places[own == expert].tolist())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_without_data_the_shapes_are_known(dtype: torch.dtype) -> None:
    """As the estimate of memory runs it: on the meta device, where nothing can be read."""
    x, w, grad, index = (value.to("meta") for value in _case(40, dtype))
    assert expert_mm(x, w, index).shape == (40, 8)
    assert expert_mm_backward(x, grad, index, 4).shape == (4, 16, 8)


def test_rows_that_lie_by_expert_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host: also where the last of them, or the first, have no expert here."""
    for index in ([0, 0, 1, 3], [2, 3, 3, 3], [0, 0, 0, 0], []):
        own, count = torch.tensor(index, dtype=torch.int64), len(index)
        x, w, grad, _ = _case(count, torch.float64)
        want, want_grad = _wanted(x, w.clone(), grad, own)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "sort", None)
            out = expert_mm(x, w[:2], own)
            torch.testing.assert_close(expert_mm_backward(x, grad, own, 4), want_grad)
        torch.testing.assert_close(out, want * (own < 2)[:, None])
        torch.testing.assert_close(expert_mm(x, w[2:], own, offset=2), want * (own >= 2)[:, None])


def test_powers_on_a_host_are_those_of_exp() -> None:
    x = torch.tensor([0.0, -1e-8, -1.0, -20.0, -87.0, 5.0, -torch.inf, torch.nan])
    torch.testing.assert_close(host.exp_(x.clone()), x.exp(), rtol=6e-6, atol=0, equal_nan=True)
    torch.testing.assert_close(host.exp_(x.double()), x.double().exp(), rtol=1e-14, atol=0, equal_nan=True)


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "tp=4"])
def test_a_step_without_reads_is_that_of_one_device(mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With experts split over ranks, whose rows fall behind the last offset elsewhere."""
    monkeypatch.setattr(host, "on_host", lambda x: False)
    model, batch = experts_case("sort")

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (model(x) - y).square().mean()

    report = verify(model, mesh, loss_fn=loss_fn, batch=batch)
    assert report.ok and report.max_error < 1e-10, report
