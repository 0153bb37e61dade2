"""How the capture spells calls that only read a shape, squeezes, and the gradient of a table that is indexed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.ir.program import operand_nodes
from autopar.verification.verify import verify

aten = torch.ops.aten


class Around(nn.Module):
    """A linear layer with a function after it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * (torch.ones_like(x) + 1),
        lambda x: x + torch.zeros_like(x) + 2,
        lambda x: x * torch.full_like(x, 3.0),
        lambda x: x + x.new_ones(8),
        lambda x: x + x.new_zeros((8,)),
        lambda x: x * x.new_full((8,), 0.5),
    ],
    ids=["ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full"],
)
def test_constant_tensors_have_no_operand(function: Callable[[Tensor], Tensor]):
    model, batch = Around(function), (torch.randn(12, 8),)
    calls = list(capture(model, loss, batch, {}).program.calls())
    assert not [node for node in calls if "_like" in str(node.target) or "new_" in str(node.target)]
    full = [node for node in calls if node.target is aten.full.default]
    assert full and not any(operand_nodes(node) for node in full)
    assert verify(model, "dp=2,tp=2", loss_fn=loss, batch=batch).ok


def test_the_loss_is_not_reduced_for_its_own_gradient():
    from autopar.api import compile

    compiled = compile(Around(torch.relu), "dp=2", loss_fn=loss, batch=(torch.randn(12, 8),))
    first = next(node for node in compiled.program.calls() if "all_reduce" in str(node.target))
    gradients = [node for node in compiled.program.calls() if node.target is aten.full.default]
    assert gradients and first not in operand_nodes(gradients[0])


@pytest.mark.parametrize(
    "function",
    [lambda x: x[:, None].squeeze(), lambda x: x[:, None].squeeze(1), lambda x: x.squeeze(0).squeeze(-1)],
)
def test_squeezes_name_the_dims_of_size_one(function: Callable[[Tensor], Tensor]):
    model, batch = Around(function), (torch.randn(12, 8),)
    squeezes = [n for n in capture(model, loss, batch, {}).program.calls() if "squeeze." in str(n.target)]
    assert all(node.target is not aten.squeeze.default and node.target is not aten.squeeze.dim for node in squeezes)
    assert verify(model, "dp=2,tp=2", loss_fn=loss, batch=batch).ok


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table, self.linear = nn.Parameter(torch.randn(10, 8)), nn.Linear(8, 8)

    def forward(self, index: Tensor) -> Tensor:
        return self.linear(self.table[index])


def test_the_gradient_of_an_indexed_table_is_that_of_an_embedding():
    index = torch.arange(12) % 7 - 3  # some from the end, some twice
    calls = [str(node.target) for node in capture(Table(), loss, (index,), {}).program.calls()]
    assert "autopar.embedding_backward.default" in calls and "aten.index_put.default" not in calls
    for mesh in ("dp=2", "tp=2", "dp=2,tp=2"):
        assert verify(Table(), mesh, loss_fn=loss, batch=(index,)).ok, mesh


def test_other_ways_to_index_stay_as_they_are():
    class Pairs(Table):
        def forward(self, index: Tensor) -> Tensor:
            return self.linear(self.table[index][..., :8]) + self.table[index, index % 8].unsqueeze(-1)

    index = torch.arange(12) % 7
    calls = [str(node.target) for node in capture(Pairs(), loss, (index,), {}).program.calls()]
    assert any("index_put" in call for call in calls)
    assert verify(Pairs(), "dp=2", loss_fn=loss, batch=(index,)).ok


def test_rows_added_up_by_index_are_a_partial_sum():
    """Messages of a graph network: split over the edges, summed over the ranks."""

    class Messages(Around):
        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            return self.linear(torch.zeros(12, 8, dtype=x.dtype).index_add(0, index, torch.tanh(self.linear(x))))

    def both(model: nn.Module, x: Tensor, index: Tensor) -> Tensor:
        return model(x, index).square().mean()

    model, batch = Messages(torch.relu), (torch.randn(12, 8), torch.arange(12) * 5 % 7)
    calls = [str(node.target) for node in capture(model, both, batch, {}).program.calls()]
    assert "aten.index_add.default" not in calls
    assert verify(model, "dp=3,tp=2", loss_fn=both, batch=batch).ok


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_bags_of_one_size_are_split_by_dp_and_tp(mode: str, weighted: bool):
    if weighted and mode == "mean":
        pytest.skip("torch takes weights for sums only")

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.table, self.linear = nn.EmbeddingBag(10, 8, mode=mode), nn.Linear(8, 8)

        def forward(self, index: Tensor, weights: Tensor) -> Tensor:
            return self.linear(self.table(index, per_sample_weights=weights if weighted else None))

    def bag_loss(model: nn.Module, index: Tensor, weights: Tensor) -> Tensor:
        return model(index, weights).square().mean()

    from autopar.api import compile

    model, batch = Bags(), (torch.arange(60).view(12, 5) % 10, torch.rand(12, 5))
    assert verify(model, "dp=3,tp=2", loss_fn=bag_loss, batch=batch).ok
    compiled = compile(model, "dp=3,tp=2", loss_fn=bag_loss, batch=batch)
    assert str(compiled.layouts["table.weight"]) == "[tp,-]" and not compiled.notes
    assert {row.op for row in compiled.collectives} == {"all_reduce"}


class Windows(nn.Module):
    """Overlapping windows by `as_strided`, of heads that lie crosswise in memory (as in Longformer)."""

    def __init__(self, part: bool = False) -> None:
        super().__init__()
        self.up, self.part = nn.Linear(8, 12), part

    def forward(self, x: Tensor) -> Tensor:
        rows, time, _ = x.shape
        heads = self.up(x.transpose(0, 1)).view(time, rows, 3, 4).transpose(0, 1).transpose(1, 2)
        heads = heads.reshape(rows * 3, time, 4)
        if self.part:
            heads = heads[:, 1:]
        a, b, c = heads.stride()
        return (heads.as_strided((rows * 3, time - 2, 3, 4), (a, b, b, c)) * torch.arange(4)).square().mean()


@pytest.mark.parametrize("mesh", ["dp=2", "dp=3", "tp=2", "dp=2,tp=3"])
def test_as_strided_speaks_of_the_memory_of_the_traced_value(mesh: str) -> None:
    torch.manual_seed(0)
    report = verify(Windows(), mesh, batch=(torch.randn(6, 5, 8),))
    assert report.ok, report


def test_as_strided_of_a_part_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"as_strided at test_canonical.py:\d+ .* reads memory beside the tensor"):
        verify(Windows(part=True), "dp=2", batch=(torch.randn(6, 5, 8),))
