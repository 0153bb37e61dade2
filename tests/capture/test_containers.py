"""Batches in containers of any class: each step trains on its own data, or the container is refused by name."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutput

import autopar
from autopar.capture.inputs.containers import put_together, take_apart, take_call_apart
from autopar.capture.inputs.leaves import key_of
from autopar.errors import BatchError, CaptureError
from autopar.job import Job
from autopar.torch_compat import tree_flatten


@dataclasses.dataclass
class Data:
    x: Any
    y: Any
    count: int = dataclasses.field(init=False, default=2)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    y: Any


class Slots:
    __slots__ = ("__y", "x")

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.__y = x, y

    @property
    def y(self) -> Any:
        return self.__y


class Plain:
    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.inner = x, [{"y": y}]

    @property
    def y(self) -> Any:
        return self.inner[0]["y"]


class Attributed:
    """As the library attrs makes them."""

    __attrs_attrs__ = ("x", "y")

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            raise AttributeError("frozen")
        super().__setattr__(name, value)


class Named(collections.namedtuple("Named", "x y")):
    """A subclass, which torch's pytree does not know."""


class Mixed(dict):  # type: ignore[type-arg]
    """A dict with attributes of its own."""

    def __init__(self, x: Any, y: Any) -> None:
        super().__init__(x=x)
        self.y = y

    @property
    def x(self) -> Any:
        return self["x"]

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("read only")


def encoding(x: Any, y: Any) -> BatchEncoding:
    return BatchEncoding({"x": x, "y": y})


def in_arrays(x: Tensor, y: Tensor) -> Data:
    return Data(x.numpy(), np.asfortranarray(y.numpy()))


def in_partial(x: Tensor, y: Tensor) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        x=x, y=functools.partial(torch.add, y, alpha=0)(y), again=types.MappingProxyType({1: x})
    )


MAKERS = {
    "dataclass": Data, "frozen": Frozen, "slots": Slots, "plain": Plain, "attrs": Attributed, "namedtuple": Named,
    "dict": Mixed, "encoding": encoding, "arrays": in_arrays, "namespace": in_partial,
}  # fmt: skip
Maker = Callable[[Any, Any], Any]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def loss_of(model: nn.Module, batch: Any, beta: float = 1.0) -> Tensor:
    return (model(torch.as_tensor(batch.x)) - torch.as_tensor(batch.y)).square().mean() * beta


def data(step: int, rows: int = 6) -> tuple[Tensor, Tensor]:
    torch.manual_seed(step)
    return torch.randn(rows, 4).double(), torch.randn(rows, 2).double()


@pytest.mark.parametrize("name", MAKERS)
def test_every_step_trains_on_its_own_batch(name: str) -> None:
    make: Maker = MAKERS[name]
    plain = network()
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=loss_of)
    for step in range(3):
        batch = make(*data(step))
        want = loss_of(plain, batch)
        torch.testing.assert_close(model.forward_backward(batch), want.detach(), rtol=1e-12, atol=0)
        want.backward()
    got = model.full_gradients()
    for key, parameter in plain.named_parameters():
        torch.testing.assert_close(got[key], parameter.grad, rtol=1e-12, atol=1e-15)
    assert len(model.programs) == 1


class Answer:
    def __init__(self, y: Tensor, rest: Any) -> None:
        self.y, self.rest = y, rest


class Answers(nn.Module):
    def __init__(self, make: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self.inner, self.make = network(), make

    def forward(self, x: Any) -> Any:
        return self.make(self.inner(torch.as_tensor(x)), {"x": x, "n": 3, "none": None})


@pytest.mark.parametrize("make", [Answer, Frozen, Slots, Named, encoding, lambda y, r: CausalLMOutput(logits=y)])
def test_forward_returns_the_models_own_container(make: Callable[[Tensor, Any], Any]) -> None:
    plain = Answers(make)
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1")
    for step in range(2):
        x = data(step)[0].numpy()
        with torch.no_grad():
            want, got = take_apart(plain(x)), model(x)
        assert type(got) is type(plain(x))
        found = take_apart(got)
        assert found.form == want.form and found.paths == want.paths
        for mine, other in zip(found.leaves, want.leaves, strict=True):
            assert mine is None if other is None else np.array_equal(mine, other)


def test_what_a_result_cannot_carry_is_an_error_where_it_is_read() -> None:
    model = autopar.parallelize(Answers(lambda y, _: Answer(y, iter([y]))), "dp=1")
    got = model(data(0)[0])
    assert got.y.shape == (6, 2)
    with pytest.raises(CaptureError, match=r"the result\.rest is a list_iterator, which no compiled step"):
        got.rest.close()


def test_values_are_compared_by_type_and_value() -> None:
    nan = float("nan")
    alike = [(nan, -nan), (np.float32(nan), np.float32(nan)), ("a", "a"), (range(3), range(3)), ({1, 2}, {2, 1})]
    other = [(1, True), (1, 1.0), (0.0, -0.0), (1.0, np.float64(1.0)), (range(0), range(1, 1)), (1 + 0j, 1.0),
             (b"a", "a"), (frozenset({1}), {1}), (torch.float32, torch.float64), (len, print), (int, bool)]  # fmt: skip
    for a, b in alike:
        assert key_of(a) == key_of(b) and hash(key_of(a)) == hash(key_of(b)), (a, b)
    for a, b in other:
        assert key_of(a) != key_of(b), (a, b)
    assert take_apart({1: 0}).form != take_apart({True: 0}).form
    assert take_apart([1, [2]]).form != take_apart([1, (2,)]).form


def test_a_value_of_another_type_or_sign_is_another_program() -> None:
    plain = network()
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=lambda m, x, c: (m(x) * c).sum() / c)
    x = data(0)[0]
    losses = [model.forward_backward(x, c).item() for c in (0.5, -0.5, 0.5)]
    assert losses[0] == losses[2] and len(model.programs) == 2


def test_shared_and_circular_references_stay() -> None:
    x, y = data(0)
    one = Plain(x, y)
    one.me, one.twice = one, [one.inner, one.inner, x]  # type: ignore[attr-defined]
    parts = take_apart(one)
    made = put_together(parts.form, [leaf + 1 for leaf in parts.leaves])
    assert len(parts.leaves) == 2 and made is not one and made.me is made
    assert made.twice[0] is made.twice[1] is made.inner and made.twice[2] is made.x
    assert torch.equal(made.y, y + 1)
    circle: list[Any] = [x]
    circle.append(circle)
    with pytest.raises(BatchError, match=r"argument 0\[1\] holds itself"):
        take_call_apart((circle,), {})


def test_a_tensor_passed_twice_sees_what_is_written_into_it() -> None:
    def loss_fn(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        x.mul_(2.0)
        return (model(x).sum(1, keepdim=True) - target).square().mean()

    plain = network()
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=loss_fn)
    for step in range(2):
        x = data(step)[0]
        for args in ((x, x), (x, x.clone())):
            got = model.forward_backward(*args)
            mine = x.clone()
            want = loss_fn(plain, mine, mine if args[1] is x else args[1])
            torch.testing.assert_close(got, want.detach(), rtol=1e-12, atol=0)


def test_what_is_shared_stays_shared_wherever_it_stands() -> None:
    x, y, inner = torch.ones(2), torch.zeros(3), {"z": torch.ones(1)}
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, y, x), {}),
        ((), {"a": x, "b": y, "c": y}),
        ((x, inner), {"a": y, "b": inner, "c": [x, y]}),
        ((types.SimpleNamespace(x=x, y=inner),), {"a": inner, "b": x}),
    ]
    for args, kwargs in calls:
        parts = take_call_apart(args, kwargs)
        made = put_together(parts.form, [leaf.clone() for leaf in parts.leaves])
        flat = [tree_flatten(call)[0] for call in ((args, kwargs), made)]
        for got, want in zip(*flat, strict=True):
            if isinstance(want, Tensor):
                torch.testing.assert_close(got, want)
        same = [[a is b for a in leaves for b in leaves] for leaves in flat]
        assert same[0] == same[1]


def generator() -> Any:
    yield 1


SPARSE = torch.eye(4).to_sparse()
REFUSED: dict[str, tuple[Any, str]] = {
    "generator": ({"x": [1, generator()]}, r"argument 0\['x'\]\[1\] is a generator, which can be run through once"),
    "set": (Data(0, {torch.ones(1)}), r"argument 0\.y is a set, with more in it than plain values, in no order: make"),
    "view": (encoding(1, {}.items()), r"argument 0\['y'\] is a dict_items, of which autopar cannot tell what it holds"),
    "sparse": (types.SimpleNamespace(x=SPARSE), r"argument 0\.x is a sparse tensor \(torch.sparse_coo\): pass"),
    "nested": ([torch.nested.nested_tensor([torch.ones(1)])], r"argument 0\[0\] is a nested tensor: pad"),
    "objects": (np.array([None]), r"argument 0 is a numpy array of object, which is no tensor"),
    "masked": (np.ma.array([1.0]), r"argument 0 is a numpy array of class MaskedArray of float64, which is no tensor"),
    "key": ({Plain(1, 2): 3}, r"argument 0 has a key of class Plain: use text"),
    "bound": (torch.ones(2).add, r"argument 0 is a builtin_function_or_method, of which"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_apart_is_refused_by_name(name: str) -> None:
    batch, text = REFUSED[name]
    model = autopar.parallelize(network(), "dp=1", loss_fn=lambda m, x: m(x).sum())
    for call in (
        lambda: model.forward_backward(batch),
        lambda: autopar.compile(network(), "dp=2", loss_fn=lambda m, x: m(x).sum(), batch=(batch,)),
    ):
        with pytest.raises(BatchError, match=text):
            call()


def test_arrays_must_become_tensors() -> None:
    losses: list[Callable[[nn.Module, Any], Tensor]] = [
        lambda m, x: m(torch.from_numpy(x)).sum(),
        lambda m, x: m(torch.as_tensor(x)).sum() * x.std(),  # torch's is another
        lambda m, x: m(torch.as_tensor(x)).sum() * np.std(x),
        lambda m, x: m(torch.as_tensor(x / 2)).sum(),
        lambda m, x: m(x).sum(),
    ]
    for loss_fn in losses:
        with pytest.raises(CaptureError, match="a numpy array of the batch that is not made a tensor first"):
            autopar.compile(network(), "dp=1", loss_fn=loss_fn, batch=(data(0)[0].numpy(),))
    for loss_fn in (lambda m, x: m(torch.tensor(x, dtype=torch.float64)).sum() * x.shape[0] * len(x) * x.ndim,):
        report = autopar.verify(network(), "dp=2", loss_fn=loss_fn, batch=(data(0)[0].float().numpy(),))
        assert report.ok, str(report)


def test_names_in_any_order_are_one_program() -> None:
    plain = network()
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=lambda m, x, y: (m(x) - y).square().mean())
    (x, y), losses = data(0), []
    for kwargs in ({"x": x, "y": y}, {"y": y, "x": x}):
        losses.append(model.forward_backward(**kwargs))
    assert losses[0] == losses[1] and len(model.programs) == 1


@pytest.mark.parametrize("form", ["strided", "expanded", "transposed", "negative", "empty dim"])
def test_batches_of_any_strides(form: str) -> None:
    def loss_fn(model: nn.Module, x: Tensor, c: Tensor) -> Tensor:
        return (model(x.reshape(-1, 2, 4)).view(-1).sum() + x[:, :0].sum()) * c

    forms: dict[str, Callable[[Tensor], Tensor]] = {
        "strided": lambda x: torch.stack([x, x], -1)[..., 0],
        "expanded": lambda x: x[:1].expand(6, 4),
        "transposed": lambda x: x.T.contiguous().T,
        "negative": lambda x: torch.complex(x, x).conj().imag,
        "empty dim": lambda x: torch.cat([x, x], 1)[:, :4],
    }
    plain = network()
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=loss_fn)
    for turn in (lambda x: x, forms[form]):
        x, c = turn(data(0)[0]), torch.tensor(2.0).double()
        torch.testing.assert_close(model.forward_backward(x, c), loss_fn(plain, x, c).detach(), rtol=1e-12, atol=0)


def test_a_batch_without_data_is_refused_at_the_step() -> None:
    model = autopar.parallelize(network(), "dp=1", loss_fn=lambda m, x: m(x).sum())
    model.prepare(torch.empty(6, 4, dtype=torch.float64, device="meta"))
    with pytest.raises(BatchError, match=r"argument 0 is on the meta device, where nothing has data: only"):
        model.forward_backward(torch.empty(6, 4, dtype=torch.float64, device="meta"))


def test_verify_and_jobs_take_the_same_containers() -> None:
    x, y = data(0, 8)
    for make in (Frozen, encoding, in_arrays):
        batch = (make(x.float(), y.float()),)
        assert autopar.verify(network().float(), "dp=2", loss_fn=loss_of, batch=batch, steps=1).ok
        job = Job(network(), loss_of, batch)
        assert take_call_apart(job.batch_of(0), {}).form == take_call_apart(batch, {}).form


class _Aliases(nn.Module):
    """A buffer that is an attribute of another module too, and places that numpy names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.inner.register_buffer("degrees", torch.arange(3.0))
        self.degrees = self.inner.degrees
        self.entries = nn.Parameter(torch.randn(3))
        self.places = np.tril_indices(3, -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lower = torch.eye(3, dtype=x.dtype)
        lower[self.places[0], self.places[1]] = self.entries
        return (self.inner(x) @ lower * self.degrees).square().mean()


def test_a_buffer_under_a_plain_name_and_places_of_numpy() -> None:
    assert autopar.verify(_Aliases(), "dp=2", batch=torch.randn(6, 3)).ok
