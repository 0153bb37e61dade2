"""Tensors that a training loop changes between steps: read anew by the program, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from processes import Ranks
from test_guards import (
    ATTRIBUTES,
    MASK,
    Change,
    Model,
    by_tensor,
    plain_loss,
    put,
    set_globals,
    train_beside,
)
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError


def mask_of(model: nn.Module) -> Tensor:
    found: Tensor = model.get_submodule("scale").mask
    return found


NOTHING = put("scale.sign", 1.0)
VALUE = torch.tensor(0.5)
LONG = torch.zeros(1_200)
LONG[0] = 1
TENSORS: dict[str, tuple[Any, Change, Change, int]] = {
    "an attribute, bound to another": (plain_loss, put("scale.mask", torch.ones(8).double()), NOTHING, 1),
    "an attribute of another shape": (plain_loss, put("scale.mask", torch.ones(1).double() / 2), NOTHING, 2),
    "an attribute, written in place": (plain_loss, lambda m: mask_of(m).mul_(2), lambda m: mask_of(m).div_(2), 1),
    "an attribute that is no tensor any more": (plain_loss, put("scale.mask", 0.5), NOTHING, 2),
    "a global, bound to another": (by_tensor, set_globals(MASK=MASK * 2), set_globals(MASK=MASK), 1),
    "a global, written in place": (by_tensor, lambda _: MASK[0].fill_(9), lambda _: MASK[0].fill_(0.1), 1),
    "a global whose value is read": (lambda m, x, y: plain_loss(m, x, y) * float(VALUE), lambda _: VALUE.fill_(9),
                                     lambda _: VALUE.fill_(0.5), 2),
    "a global that a value is computed of": (lambda m, x, y: plain_loss(m, x, y) * (VALUE * 2).exp().item(),
                                             lambda _: VALUE.fill_(1), lambda _: VALUE.fill_(0.5), 2),
    "a global whose value decides": (lambda m, x, y: plain_loss(m, x, y) * (2 if (VALUE > 1).all() else 1),
                                     lambda _: VALUE.fill_(9), lambda _: VALUE.fill_(0.5), 2),
    "a global as an array": (lambda m, x, y: plain_loss(m, x, y) * MASK.numpy()[0], lambda _: MASK[0].fill_(9),
                             lambda _: MASK[0].fill_(0.1), 2),
    "a long global whose value is read": (lambda m, x, y: plain_loss(m, x, y) * LONG.sum().item(),
                                          lambda _: LONG[700].fill_(9), lambda _: LONG[700].fill_(0), 2),
    "an attribute whose value is read": (lambda m, x, y: plain_loss(m, x, y) * mask_of(m).sum().item(),
                                         lambda m: mask_of(m).mul_(2), lambda m: mask_of(m).div_(2), 2),
    "an attribute whose value is read, bound to another": (
        lambda m, x, y: plain_loss(m, x, y) * mask_of(m).tolist()[0],
        put("scale.mask", torch.full((8,), 3.0).double()), NOTHING, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(name: str) -> None:
    loss_fn, change, undo, again = TENSORS[name]
    train_beside(loss_fn, change, undo, again=again)


def test_a_tensor_in_a_dict_that_is_replaced_is_read_in_the_new_one() -> None:
    table = {"mask": MASK}

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x) * table["mask"], y)

    def change(_: nn.Module) -> None:
        nonlocal table
        table = {"mask": MASK * 3}

    train_beside(loss_fn, change, again=1)


class Pair(NamedTuple):
    mask: Tensor
    others: tuple[Tensor, ...]


TUPLES: dict[str, Callable[[float], Any]] = {
    "a tuple": lambda factor: (MASK * factor, (MASK.cos() * factor,)),
    "a named tuple": lambda factor: Pair(MASK * factor, (MASK.cos(), MASK)),
    "one tensor twice, then two": lambda factor: (MASK, (MASK if factor == 1 else MASK.cos(),)),
    "two that change places": lambda factor: (MASK, (MASK.cos(),)) if factor == 1 else (MASK.cos(), (MASK,)),
}


@pytest.mark.parametrize("name", TUPLES)
def test_tensors_in_a_tuple_that_is_replaced_are_read_in_the_new_one(name: str) -> None:
    """As the state of a recurrent layer, or pairs of a dict, that a loop binds anew after each step."""
    held = {"pair": TUPLES[name](1)}

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        mask, others = held["pair"]
        return F.mse_loss(model(x) * mask, y) * others[0].sum()

    train_beside(loss_fn, lambda _: held.update(pair=TUPLES[name](3)), lambda _: held.update(pair=TUPLES[name](1)))


def test_a_tensor_in_a_tuple_beside_a_number_that_changes_too() -> None:
    held = {"pair": (MASK, 1.0)}

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        mask, factor = held["pair"]
        return F.mse_loss(model(x) * mask, y) * factor

    plain = nn.Linear(8, 8).double()
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=loss_fn, device="cpu")
    x, y = torch.randn(4, 8).double(), torch.randn(4, 8).double()
    for factor in (1.0, 2.0, 3.0, 4.0, 5.0):
        held["pair"] = (MASK * factor, factor)
        torch.testing.assert_close(model.forward_backward(x, y), loss_fn(plain, x, y).detach())
    assert len(model.programs) == 3, "the number is an input of the third"


def test_a_tensor_of_the_enclosing_function_that_requires_a_gradient_is_refused() -> None:
    temperature = torch.ones((), requires_grad=True)

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return plain_loss(model, x, y) * temperature.exp()

    model = autopar.parallelize(nn.Linear(8, 8), "dp=1", loss_fn=loss_fn)
    text = (
        r"test_guards_tensors.py:\d+\n.*\n.*tensor 'temperature' of shape \[\] that requires a gradient and is no "
        r"parameter"
    )
    with pytest.raises(CaptureError, match=text):
        model.forward_backward(torch.randn(4, 8), torch.randn(4, 8))


class Tempered(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.temperature = torch.ones((), requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.temperature


def test_an_attribute_that_requires_a_gradient_is_refused() -> None:
    model = autopar.parallelize(Tempered(), "dp=1", loss_fn=plain_loss)
    with pytest.raises(CaptureError, match=r"a tensor 'temperature' of shape .* is no parameter of the model"):
        model.forward_backward(torch.randn(4, 8), torch.randn(4, 8))


def test_a_tensor_that_gets_no_gradient_is_not_refused() -> None:
    """A teacher's weights require one, but no gradient flows to them."""
    teacher = nn.Linear(8, 8).double()

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(x)
        return F.mse_loss(model(x), wanted)

    train_beside(loss_fn, lambda _: teacher.weight.data.mul_(2), None, again=1)


# -- ranks ----------------------------------------------------------------------------------------------------------


def on_ranks(rank: int, mesh: str, options: dict[str, Any]) -> None:
    change, undo = ATTRIBUTES["of a submodule"]
    train_beside(plain_loss, change, undo, mesh=mesh, again=2, **options)
    loss_fn, change, undo, again = TENSORS["a global, bound to another"]
    train_beside(loss_fn, change, undo, mesh=mesh, again=again, **options)


def differs_on_one_rank(rank: int, name: str) -> None:
    model = autopar.parallelize(Model(), "dp=2", loss_fn=plain_loss, device="cpu")
    x, y = torch.ones(4, 8), torch.ones(4, 8)
    model.forward_backward(x, y)
    if rank == 1:
        setattr(model.scale, name, {"sign": 0.5, "mask": torch.ones(8), "more": nn.Linear(8, 8)}[name])
    model.forward_backward(x, y)


@pytest.mark.gloo
@pytest.mark.parametrize(("mesh", "options"), [("dp=2", {"zero": 3}), ("pp=2", {"microbatches": 2})])
def test_changes_on_ranks(two: Ranks, mesh: str, options: dict[str, Any]) -> None:
    two.run(on_ranks, mesh, options)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "text"),
    [("sign", "'scale.sign' = 0.5"), ("mask", "tensors beside the batch"), ("more", "'scale.more' was added")],
)
def test_a_change_on_one_rank_is_a_rank_error(two: Ranks, name: str, text: str) -> None:
    for outcome in two.attempt(differs_on_one_rank, name):
        assert outcome.error is not None
        assert outcome.error.startswith("RankError: ranks disagree on the batch and modes")
        assert text in outcome.error
