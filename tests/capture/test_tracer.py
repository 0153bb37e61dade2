"""The tracer writes down what ran: its graph gives what the function gives, on real data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autopar.capture.ops.decompositions import decompositions
from autopar.capture.trace.normalise import functional
from autopar.capture.trace.tracer import trace
from autopar.torch_compat import FakeTensorMode


def gradient(x: Tensor, y: Tensor) -> Sequence[Tensor | None]:
    x = x.detach().requires_grad_()
    loss = (torch.tanh(x @ y) * torch.tensor([1.0, 2.0, 3.0])).mean()
    return loss.detach(), None, torch.autograd.grad(loss, x)[0]


def kept(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    """The backward pass of silu is one op, though torch has a spelling in others too."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(torch.nn.functional.silu(x @ y).sum(), x)


def several(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    values, places = torch.cat([x, y.T]).sort(0)
    low, high = values.split([2, values.shape[0] - 2])
    return low, high, places


def in_place(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    total = torch.zeros(4, 3)
    view = total[1:3]
    view.add_(x[:3, :2].t_()).mul_(2)
    wide = y.clone().unsqueeze_(0).squeeze_(0)
    wide[0] = 5
    table = torch.tensor([[1.0, 2.0, 3.0]])
    table.add_(1)
    return total, wide, table + total


def mapped(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    return (torch.vmap(lambda row: (row @ y).exp())(x), torch.func.grad(lambda t: (t @ y).square().sum())(x))


class _Shapes(fx.Interpreter):
    """Compares what each node makes with what was recorded of it, before a later op changes its shape in place."""

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        if isinstance(result, Tensor):
            assert result.shape == node.meta["val"].shape, node
            assert result.stride() == node.meta["val"].stride(), node
        return result


@pytest.mark.parametrize("function", [gradient, kept, several, in_place, mapped])
def test_a_graph_gives_what_ran(function: Callable[..., Sequence[Tensor | None]]) -> None:
    given = torch.randn(5, 4), torch.randn(4, 3)
    if function in (several, in_place):
        given = torch.randn(5, 3), torch.randn(3, 4)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    shapes = [fake.from_tensor(tensor) for tensor in given]
    traced = trace(function, shapes, fake, decompositions())
    whole = functional(traced, shapes, fake)
    want = function(*(tensor.clone() for tensor in given))
    for found in (traced.run(*(t.clone() for t in given)), whole.run(*given)):
        torch.testing.assert_close(list(found), list(want))
    _Shapes(traced.root, graph=traced.graph).run(*(t.clone() for t in given))
    nodes = [node for node in traced.graph.nodes if node.op == "call_function"]
    assert all(node.meta["val"] is not None for node in nodes)
    assert not any(node.target is torch.ops.aten.mean.default for node in nodes)  # it is taken apart
    if function is kept:
        assert torch.ops.aten.silu_backward.default in {node.target for node in nodes}
    writes = [node.target for node in whole.graph.nodes if getattr(node.target, "_schema", None)]
    assert not any(target._schema.is_mutable for target in writes)
