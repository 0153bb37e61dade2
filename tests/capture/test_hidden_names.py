"""Modules, attributes and methods by the names of torch's own methods: what is trained is what the tables say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture.inputs import tables

# Those that a walk over a model would call, and some that users like.
NAMES = (
    "parameters", "named_parameters", "modules", "named_modules", "children", "buffers", "named_buffers", "state_dict",
    "get_submodule", "get_parameter", "get_buffer", "register_forward_hook", "register_forward_pre_hook", "train",
    "eval", "apply", "to", "double", "zero_grad", "data", "original", "model", "compiled", "prepare", "random_state",
)  # fmt: skip


class Net(nn.Module):
    """Two layers, and between them one for each name, in the model or in a module of its own."""

    def __init__(self, names: tuple[str, ...] = (), is_inside: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.inside, self.last = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Module(), nn.Linear(6, 4)
        self.between = [nn.Linear(6, 6) for _ in names]  # a list, which is no place of a module
        (self.inside if is_inside else self)._modules.update(zip(names, self.between, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x)).relu()
        for layer in self.between:
            h = h + layer(h)
        return self.last(h)  # type: ignore[no-any-return]


def _modules(names: tuple[str, ...], is_inside: bool) -> nn.Module:
    return Net(names, is_inside)


def _attributes(names: tuple[str, ...], is_inside: bool) -> nn.Module:
    net = Net()
    vars(net.inside if is_inside else net).update({name: [3] for name in names})
    return net


def _methods(names: tuple[str, ...], is_inside: bool) -> nn.Module:
    class Own(nn.Module if is_inside else Net):  # type: ignore[misc]
        pass

    for name in names:
        setattr(Own, name, lambda self, *args, **kwargs: [])
    net = Net() if is_inside else Own()
    if is_inside:
        net.inside = Own()
    return net  # type: ignore[no-any-return]


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 8, generator=generator), torch.randint(0, 4, (12,), generator=generator)


@pytest.mark.parametrize("make", [_modules, _attributes, _methods])
@pytest.mark.parametrize("is_inside", [False, True])
def test_a_name_of_torchs_own_hides_nothing(
    make: Callable[[tuple[str, ...], bool], nn.Module], is_inside: bool
) -> None:  # fmt: skip
    torch.manual_seed(0)
    plain = make(NAMES, is_inside)
    torch.manual_seed(0)
    model: Any = autopar.parallelize(make(NAMES, is_inside), "dp=1", loss_fn=_loss)
    want = _loss(plain, *_batch())
    want.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(model.forward_backward(*_batch()).detach(), want.detach())
    found = model.full_gradients()
    gradients = {path: p.grad for path, p in tables.named_parameters(plain)}
    assert found.keys() == gradients.keys()
    torch.testing.assert_close(found, gradients)
    assert autopar.verify(make(NAMES, is_inside), "dp=2,tp=2", loss_fn=_loss, batch=_batch()).ok


def test_tied_parameters_under_the_name_of_a_method() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
            self.parameters = nn.ParameterList([*self.first.parameters(), *self.last.parameters()])  # type: ignore[assignment]

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).relu())  # type: ignore[no-any-return]

    assert autopar.verify(Net(), "dp=2,tp=2", loss_fn=_loss, batch=_batch()).ok


def test_walks_are_those_of_torch() -> None:
    """On modules with ties, shared modules, empty places and several names for one tensor."""
    torch.manual_seed(0)
    shared = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), shared, nn.LSTM(4, 4), nn.Sequential(shared, nn.Linear(4, 4)))
    model[3][1].weight = model[0].weight
    model.register_module("nothing", None)
    model.register_buffer("none", None)
    model.register_buffer("mean", shared.running_mean)
    for once in (True, False):
        for walk, own in (
            (tables.named_modules, model.named_modules), (tables.named_parameters, model.named_parameters),
            (tables.named_buffers, model.named_buffers),
        ):  # fmt: skip
            assert [(n, id(t)) for n, t in walk(model, prefix="a", remove_duplicate=once)] == [
                (n, id(t)) for n, t in own(prefix="a", remove_duplicate=once)
            ]
    for path, module in model.named_modules(remove_duplicate=False):
        assert tables.submodule(model, path) is module
    for path, parameter in model.named_parameters():
        assert tables.parameter(model, path) is parameter
    assert [id(p) for p in tables.parameters(model[1], recurse=False)] == [id(p) for p in shared.parameters(False)]
    assert tables.buffer(model, "1.running_var") is shared.running_var


def test_a_functional_call_puts_everything_back() -> None:
    """Also what the model moved between its tables meanwhile."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight
            del self.weight
            vars(self)["weight"] = weight * 2
            self.count = self.count + 1
            return x * self.weight + self.bias

    net = Net()
    before = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    given = {"weight": torch.full((2,), 3.0), "count": torch.ones(())}
    assert torch.equal(tables.functional_call(net, given, (torch.ones(2),), {}), torch.full((2,), 7.0))
    after = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    assert {n: id(t) for n, t in before.items()} == {n: id(t) for n, t in after.items()}
    assert "weight" not in vars(net)
