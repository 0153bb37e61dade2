"""`specialize=True` where a size is data: how many rows there are is taken from the example batch, not which."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import Ranks
from torch import Tensor, nn

import autopar
from autopar.errors import BatchError, CaptureError
from autopar.parallel.programs import programs

Body = Callable[[Tensor, Tensor, Tensor], Tensor]  # of rows [12, 8] with weights behind them, numbers [12], marks [12]


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.up, self.down, self.body = nn.Linear(6, 8), nn.Linear(8, 4), body

    def forward(self, x: Tensor, numbers: Tensor, marks: Tensor) -> Tensor:
        return self.down(self.body(self.up(x).tanh(), numbers, marks)).square().mean()


class Edges(nn.Module):
    """torch-geometric: edges from a node to itself are taken out of a buffer, and put in anew for all nodes."""

    edges: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
        ends = torch.randint(0, 12, (2, 30), generator=torch.Generator().manual_seed(1))
        self.register_buffer("edges", torch.cat([ends, torch.tensor([[0, 5], [0, 5]])], 1))

    def passed(self, x: Tensor) -> Tensor:
        edges = self.edges[:, self.edges[0] != self.edges[1]]
        edges = torch.cat([edges, torch.arange(len(x)).repeat(2, 1)], 1)
        degree = torch.zeros(len(x), dtype=x.dtype).scatter_add(0, edges[1], torch.ones(edges.shape[1], dtype=x.dtype))
        norm = degree[edges[0]].rsqrt() * degree[edges[1]].rsqrt()
        return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]] * norm[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return self.passed(self.down(self.passed(self.up(x)).relu())).square().mean()


def pairs(x: Tensor, numbers: Tensor, marks: Tensor) -> Tensor:
    """pytorch-metric-learning: all pairs with one label."""
    same = (numbers[:, None] == numbers[None]).byte().fill_diagonal_(0)
    first, second = torch.where(same)
    return (x[first] - x[second]).abs() / len(first)


def triplets(x: Tensor, numbers: Tensor, marks: Tensor) -> Tensor:
    same = numbers[:, None] == numbers[None]
    a, p, n = torch.where(same.unsqueeze(2) & ~same.unsqueeze(1))
    return F.relu((x[a] - x[p]).square() - (x[a] - x[n]).square() + 0.1)


def one_hot(x: Tensor, numbers: Tensor, marks: Tensor) -> Tensor:
    hot = F.one_hot(numbers).to(x.dtype)
    return (hot.t() @ x) / hot.sum(0).clamp(min=1)[:, None]


def unique(x: Tensor, numbers: Tensor, marks: Tensor) -> Tensor:
    """Means by segment."""
    values, inverse, counts = torch.unique(numbers * 3 - 7, return_inverse=True, return_counts=True)
    means = torch.zeros(len(values), 8, dtype=x.dtype).index_add(0, inverse, x) / counts[:, None]
    return means * values[:, None] + len(values)


def consecutive(x: Tensor, numbers: Tensor, marks: Tensor) -> Tensor:
    values, inverse, counts = torch.unique_consecutive(numbers // 2, return_inverse=True, return_counts=True)
    return x * counts[inverse][:, None] + values.sum()


def binned(x: Tensor, numbers: Tensor, marks: Tensor) -> Tensor:
    return x * numbers.bincount().sum() + torch.bincount(numbers, x[:, 0].detach(), 9).sum()


def repeated(x: Tensor, numbers: Tensor, marks: Tensor) -> Tensor:
    by_row = x.repeat_interleave(numbers, 0)
    segment = torch.repeat_interleave(numbers)
    return by_row * segment[:, None] + torch.repeat_interleave(x[0], numbers[:1]).sum()


def written(x: Tensor, numbers: Tensor, marks: Tensor) -> Tensor:
    """nflows: what is inside and what is outside are computed apart."""
    out, inside = torch.zeros_like(x), marks > 0
    out[inside] = x[inside].softmax(0) * 3
    out[~inside] = x[~inside]
    return out


BODIES: dict[str, Body] = {
    "x[mask]": lambda x, numbers, marks: x[marks > 0].softmax(0),
    "x[:, mask]": lambda x, numbers, marks: x.t()[:, marks > 0].t() * (marks > 0).sum(),
    "x[mask of two dims]": lambda x, numbers, marks: x * x[marks[:, None] * torch.arange(8) > 0].logsumexp(0),
    "masked_select": lambda x, numbers, marks: x.masked_select(marks[:, None] > 0).view(-1, 8).cumsum(0),
    "nonzero": lambda x, numbers, marks: x[marks.clamp(min=0).nonzero().squeeze(1)].softmax(0),
    "argwhere": lambda x, numbers, marks: x * torch.argwhere(marks[:, None] * torch.arange(3) > 0).sum(),
    "where": lambda x, numbers, marks: x[torch.where(marks > 0)[0]].softmax(0),
    "no row at all": lambda x, numbers, marks: torch.cat([x, x[marks > 99]]),
    "all rows": lambda x, numbers, marks: x[marks < 99].softmax(0),
    **{body.__name__: body for body in (pairs, triplets, one_hot, unique, consecutive, binned, repeated, written)},
}  # fmt: skip


def batch(more: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    numbers = torch.tensor([2, 0, 3, 1, 1, 3, 5, 2, 0, 0, 3, 1])
    marks = torch.tensor([1, -1, 2, 2, -3, 1, 1, -1, -1, -2, 4, -1])
    marks[7 : 7 + more] = 1
    return torch.randn(12, 6), numbers, marks


def model(body: Body) -> Model:
    torch.manual_seed(1)
    return Model(body)


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=3"])
@pytest.mark.parametrize("name", BODIES)
def test_the_numbers_are_those_of_one_device(name: str, mesh: str) -> None:
    report = autopar.verify(model(BODIES[name]), mesh, batch=batch(), specialize=True)
    assert report.ok and report.max_error < 1e-10, report


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=3"])
def test_edges_of_a_buffer(mesh: str) -> None:
    torch.manual_seed(0)
    report = autopar.verify(Edges(), mesh, batch=torch.randn(12, 6), specialize=True)
    assert report.ok and report.max_error < 1e-10, report


# What takes rows together that a mask selects needs no number of them (test_rows_together.py).
WITHOUT = ("x[mask of two dims]", "pairs", "triplets", "argwhere")


@pytest.mark.parametrize("name", [name for name in BODIES if name not in WITHOUT])
def test_it_is_offered(name: str) -> None:
    with pytest.raises(CaptureError, match=r"specialize=True takes the value from the example batch"):
        autopar.compile(model(BODIES[name]), "dp=2", batch=batch())


def test_the_size_is_noted() -> None:
    found = autopar.compile(model(BODIES["x[mask]"]), "dp=2", batch=batch(), specialize=True)
    (note,) = [note for note in found.notes if "is taken as" in note]
    assert note.startswith(f"the size of what this gives at {__file__}:") and "is taken as 6, as in" in note


def plain(body: Body, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    module = model(body).double()
    loss = module(given[0].double(), *given[1:])
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", BODIES)
def test_other_rows_run_the_same_program_and_other_sizes_another(name: str) -> None:
    """The first program finds another number of rows only when it has run, and does not fail before."""
    parallel = autopar.parallelize(model(BODIES[name]).double(), "dp=1", specialize=True)
    x, numbers, marks = batch()
    turned = x, numbers.flip(0), marks.flip(0)
    for given in (turned, (x, numbers, marks), batch(3), (x, (numbers * 2)[:12], marks), (x, numbers // 2, -marks)):
        parallel.zero_grad()
        loss = parallel.forward_backward(given[0].double(), *given[1:])
        want, gradients = plain(BODIES[name], given)
        torch.testing.assert_close(loss, want)
        for key, value in gradients.items():
            torch.testing.assert_close(parallel.full_gradients()[key], value)


def test_as_many_rows_need_no_other_program() -> None:
    parallel = autopar.parallelize(model(BODIES["x[mask]"]), "dp=1", specialize=True)
    x, numbers, marks = batch()
    for given in (marks, marks.flip(0), marks.roll(3)):
        parallel.forward_backward(x, numbers, given)
    assert len(parallel.programs) == 1


def _trained(rank: int, mesh: str) -> list[int]:
    """Losses of batches with as many rows, and with others; how many programs there are after each."""
    body, counts = BODIES["x[mask]"], []
    parallel = autopar.parallelize(model(body).double(), mesh, specialize=True)
    x, numbers, marks = batch()
    for given in (marks, marks.roll(5), batch(3)[2], marks):
        parallel.zero_grad()
        loss = parallel.forward_backward(x.double(), numbers, given)
        want, gradients = plain(body, (x, numbers, given))
        torch.testing.assert_close(loss, want)
        found = parallel.full_gradients()
        for key, value in gradients.items() if rank == 0 else ():
            torch.testing.assert_close(found[key], value)
        counts.append(len(parallel.programs))
    return counts


@pytest.mark.gloo
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_all_ranks_take_the_same_program(two: Ranks, mesh: str) -> None:
    first, second = two.run(_trained, mesh, timeout=120)
    assert first == second == [1, 1, 2, 2]


# --- what must be refused


def by_weights(x: Tensor, numbers: Tensor, marks: Tensor) -> Tensor:
    return x[x[:, 0] > 0].softmax(0)


def test_a_size_that_depends_on_weights_is_refused() -> None:
    with pytest.raises(CaptureError) as without:
        autopar.compile(model(by_weights), "dp=2", batch=batch())
    assert "specialize" not in str(without.value) and "an index by a boolean mask" in str(without.value)
    with pytest.raises(CaptureError, match=r"here softmax\(\) does not: it takes the rows together\.$"):
        autopar.compile(model(by_weights), "dp=2", batch=batch(), specialize=True)


def test_a_number_that_torch_refuses_is_refused_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "VALUES", 1)
    parallel = autopar.parallelize(model(binned), "dp=1", specialize=True)
    x, numbers, marks = batch()
    parallel.forward_backward(x, numbers, marks)
    with pytest.raises(BatchError, match=r"the size of what this gives at .* is -1 for this batch"):
        parallel.forward_backward(x, torch.where(numbers == 2, -2, numbers), marks)


def test_rows_of_unique_are_left_to_torch_and_refused() -> None:
    def rows(x: Tensor, numbers: Tensor, marks: Tensor) -> Any:
        return x * len(torch.unique(torch.stack([numbers, marks]), dim=1))

    with pytest.raises(CaptureError, match=r"This line has unique\(\)"):
        autopar.compile(model(rows), "dp=2", batch=batch(), specialize=True)
