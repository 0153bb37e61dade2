"""The short way of methods that optimizers call: what torch gives of plain tensors, in place or anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.parallel.tensors import operators
from autopar.parallel.tensors.parameter import ParameterTensor
from autopar.torch_compat import spec_of

OF_ONE = ("add", "add_", "div", "div_", "mul", "mul_", "sub", "sub_")
OPERATORS = ("__add__", "__iadd__", "__imul__", "__isub__", "__itruediv__", "__mul__", "__radd__", "__sub__")
OF_TWO = ("addcdiv", "addcdiv_", "addcmul", "addcmul_", "lerp", "lerp_")
OF_NONE = ("neg", "neg_", "sqrt", "sqrt_", "square", "square_", "zero_", "__neg__")


@pytest.fixture(scope="module")
def held() -> Iterator[nn.Linear]:
    """A model on one rank, whose parameters are of our class."""
    yield autopar.parallelize(nn.Linear(3, 4), "dp=1", loss_fn=lambda model, x: model(x).sum())  # type: ignore[misc]


@pytest.fixture
def pair(held: nn.Linear) -> tuple[Any, Tensor]:
    """A tensor of ours, and a plain one of the same value."""
    value = torch.arange(1.0, 13.0).view(4, 3)
    ours = torch.zeros_like(held.weight, requires_grad=False)
    ours.copy_(value)
    assert type(ours) is ParameterTensor
    return ours, value


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the ops that come to operators.py."""
    names: list[str] = []
    run = operators.run
    monkeypatch.setattr(operators, "run", lambda func, *rest: (names.append(str(func)), run(func, *rest))[1])
    return names


def check(name: str, pair: tuple[Any, Tensor], ours: tuple[Any, ...], plain: tuple[Any, ...], **options: Any) -> None:
    tensor, value = pair
    place, version = tensor.place, tensor._version
    with torch.no_grad():
        given = getattr(tensor, name)(*ours, **options)
        expected = getattr(value, name)(*plain, **options)
    in_place = expected is value
    assert (given is tensor) is in_place
    assert type(given) is ParameterTensor
    assert given.place is place
    assert given.dtype == expected.dtype
    assert torch.equal(given.full_tensor(), expected)
    assert (tensor._version > version) is in_place  # what autograd saved of it is known to be old


@pytest.mark.parametrize("name", OF_ONE + OPERATORS)
@pytest.mark.parametrize("operand", [0.5, 3])
def test_of_a_number(name: str, operand: float, pair: Any, dispatched: list[str]) -> None:
    check(name, pair, (operand,), (operand,))
    assert not [op for op in dispatched if "detach" not in op]  # full_tensor alone


@pytest.mark.parametrize("name", OF_ONE + OPERATORS)
def test_of_another(name: str, pair: Any, dispatched: list[str]) -> None:
    check(name, pair, (pair[0].detach().clone(),), (pair[1].clone(),))
    assert [op for op in dispatched if "detach" not in op] == ["aten.clone.default"]


@pytest.mark.parametrize("name", OF_TWO)
@pytest.mark.parametrize("is_number", [False, True])
def test_of_two(name: str, is_number: bool, pair: Any, dispatched: list[str]) -> None:
    ours, value = pair
    options = {} if "lerp" in name else {"value": 0.25}
    second = 0.5 if is_number and "lerp" in name else None
    check(name, pair, (ours.detach().clone(), second or ours), (value.clone(), second or value), **options)
    assert [op for op in dispatched if "detach" not in op] == ["aten.clone.default"]


@pytest.mark.parametrize("name", OF_NONE)
def test_of_itself(name: str, pair: Any, dispatched: list[str]) -> None:
    check(name, pair, (), ())
    assert not [op for op in dispatched if "detach" not in op]


@pytest.mark.parametrize(
    ("name", "operand"),
    [
        ("mul", True),
        ("mul", 1j),
        ("add", torch.ones(3)),
        ("add_", torch.ones(4, 3)),
        ("lerp_", (torch.ones(4, 3), 0.5)),
        ("lerp", (torch.ones(4, 3), torch.ones(4, 3))),
    ],
)
def test_the_rest_goes_the_way_of_torch(name: str, operand: Any, pair: Any, dispatched: list[str]) -> None:
    operands = operand if isinstance(operand, tuple) else (operand,)
    check(name, pair, operands, operands)
    assert any(name.rstrip("_") in op for op in dispatched)


def test_keywords_go_the_way_of_torch(pair: Any) -> None:
    ours, value = pair
    with torch.no_grad():
        assert torch.equal(ours.mul(other=ours).full_tensor(), value * value)
        assert torch.equal(ours.addcmul(ours, tensor2=ours).full_tensor(), value + value * value)
        assert torch.equal(ours.add(ours, alpha=2).full_tensor(), 3 * value)
        assert torch.equal(ours.div(2, rounding_mode="floor").full_tensor(), value // 2)


def test_a_tensor_without_dims_is_a_number(pair: Any) -> None:
    ours, value = pair
    with torch.no_grad():
        mean = ours.mean()
        assert torch.equal((ours * mean).full_tensor(), value * value.mean())
        assert torch.equal(ours.lerp(ours, mean).full_tensor(), value.lerp(value, value.mean()))
        assert torch.equal((mean * ours).full_tensor(), value.mean() * value)  # of the shape of the operand


def test_an_integer_becomes_a_float(pair: Any) -> None:
    with torch.no_grad():
        ours, value = pair[0].to(torch.int64), pair[1].to(torch.int64)
        for found, expected in ((ours / 2, value / 2), (ours.sqrt(), value.sqrt()), (ours * 0.5, value * 0.5)):
            assert found.dtype == spec_of(found).tensor_meta.dtype == expected.dtype == torch.float32
            assert torch.equal(found.full_tensor(), expected)


def test_autograd_sees_the_ops_of_a_loss(held: nn.Linear) -> None:
    loss = (held.weight * held.weight).sqrt().sum()
    assert loss.requires_grad
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        held.weight.mul_(2)


def test_a_saved_value_that_was_written_is_an_error(held: nn.Linear, pair: Any) -> None:
    loss = (held.weight * pair[0]).sum()
    with torch.no_grad():
        pair[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- lists of them ---------------------------------------------------------------------------------------------------


def test_what_lists_give_has_the_dtype_and_strides_of_one_device(pair: Any) -> None:
    ours, value = pair
    whole = ours.to(torch.int64), value.to(torch.int64)
    turned = torch.empty_like(ours).t(), torch.empty_like(value).t()  # of a replicated tensor: of its memory
    for given, plain in (whole, turned):
        (found,), (expected,) = torch._foreach_sqrt([given]), torch._foreach_sqrt([plain])
        assert type(found) is ParameterTensor
        assert found.dtype == spec_of(found).tensor_meta.dtype == expected.dtype
        assert found.stride() == spec_of(found).tensor_meta.stride == expected.stride()


def test_a_list_of_several_dtypes(pair: Any) -> None:
    ours, value = pair
    found = torch._foreach_sqrt([ours, ours.to(torch.int64)])
    for one, expected in zip(found, torch._foreach_sqrt([value, value.to(torch.int64)]), strict=True):
        assert torch.equal(one.full_tensor(), expected)
