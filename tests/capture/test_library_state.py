"""What a loss reads of objects of Python's own library and of torch, by computed names, and in forms that C keeps."""

from __future__ import annotations

import array
import collections
import configparser
import contextvars
import copy
import ctypes
import enum
import functools
import logging
import operator
import os
import queue
import string
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

Kind = tuple[Callable[[], Any], Callable[[], Any]]  # what a loss reads, and a change of it to another value
W, X, NAME, DEBUG = 1.0, 1.0, "w", logging.getLogger("tests.library_state")


class Config:
    shared = 1.0

    def __init__(self) -> None:
        self.w = 1.0


class Meta(type):
    w = 1.0


class OfMeta(metaclass=Meta):
    pass


class Color(enum.Enum):
    RED = 1


class Listed(list[float]):
    k = 1.0


class Descriptor:
    v = 1.0

    def __get__(self, owner: Any, kind: Any = None) -> float:
        return self.v


class Described:
    d = Descriptor()


def attributed() -> float:
    return attributed.w  # type: ignore[attr-defined,no-any-return]


TABLED = [1.0]


@functools.lru_cache
def tabled() -> float:
    return TABLED[0]


def imported() -> float:
    import library_state_settings as settings

    return settings.W  # type: ignore[no-any-return]


def put(holder: Any, key: Any, value: Any) -> Callable[[], None]:
    """A change of an item or an attribute."""
    by_item = not isinstance(key, str) or isinstance(holder, (dict, type(os.environ)))
    return (lambda: holder.__setitem__(key, value)) if by_item else lambda: setattr(holder, key, value)


def of_optimizers() -> dict[str, Kind]:
    parameter = nn.Parameter(torch.zeros(1))
    adam, sgd = torch.optim.AdamW([parameter], lr=1.0), torch.optim.SGD([parameter], lr=1.0)
    decay, plateau = torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5), torch.optim.lr_scheduler.ReduceLROnPlateau(adam)
    normal = torch.distributions.Normal(1.0, 1.0)
    group = adam.param_groups[0]
    return {
        "optimizer.param_groups[0]['lr']": (lambda: adam.param_groups[0]["lr"], put(group, "lr", 3.0)),
        "optimizer.param_groups[0]['betas']": (lambda: adam.param_groups[0]["betas"][0], put(group, "betas", (0.5, 1))),
        "optimizer.defaults": (lambda: adam.defaults["eps"] * 1e8, put(adam.defaults, "eps", 3e-8)),
        "scheduler.get_last_lr()": (lambda: decay.get_last_lr()[0], lambda: (sgd.step(), decay.step())),
        "scheduler.last_epoch": (lambda: decay.last_epoch + 1, lambda: (sgd.step(), decay.step())),
        "plateau.best": (lambda: min(plateau.best, 5), lambda: plateau.step(1.0)),
        "distribution.log_prob": (lambda: normal.log_prob(torch.ones(())), put(normal, "loc", torch.tensor(3.0))),
    }


def of_containers() -> dict[str, Kind]:
    last, rows, users, items = collections.deque([1.0]), collections.deque([1.0, 2.0]), collections.UserDict(w=1.0), {}
    chain, counts = collections.ChainMap({"a": 1.0}, {"b": 2.0}), collections.Counter(a=1)
    ordered, by_order = collections.OrderedDict(a=1.0, b=2.0), {"a": 1.0, "b": 2.0}
    waiting, parser, large = queue.Queue[float](), configparser.ConfigParser(), [1.0] * 2000
    parser["a"] = {"w": "1"}
    items.update((number, 1.0) for number in range(2000))
    many, nested, missing = set(range(2000)), {"a": {"b": {"c": {"d": {"e": 1.0}}}}}, collections.defaultdict(float)
    return {
        "deque.append": (lambda: sum(last), lambda: last.append(5.0)),
        "deque.rotate": (lambda: rows[0], lambda: rows.rotate(1)),
        "UserDict": (lambda: users["w"], lambda: users.__setitem__("w", 3.0)),
        "ChainMap": (lambda: chain["b"], put(chain.maps[1], "b", 5.0)),
        "Counter": (lambda: counts["a"], lambda: counts.update(a=4)),
        "defaultdict without a key": (lambda: missing["w"] + 1, put(missing, "w", 4.0)),
        "OrderedDict.move_to_end": (lambda: next(iter(ordered.values())), lambda: ordered.move_to_end("a")),
        "order of a dict": (lambda: next(iter(by_order.values())), lambda: by_order.update(a=by_order.pop("a"))),
        "Queue": (lambda: waiting.qsize() + 1.0, lambda: waiting.put(3.0)),
        "ConfigParser": (lambda: float(parser["a"]["w"]), lambda: parser["a"].__setitem__("w", "3")),
        "item of a long list": (lambda: large[1500], put(large, 1500, 3.0)),
        "item of a long dict": (lambda: items[1500], put(items, 1500, 3.0)),
        "long set": (lambda: 1.0 + (5000 in many), lambda: many.add(5000)),
        "deep": (lambda: nested["a"]["b"]["c"]["d"]["e"], put(nested["a"]["b"]["c"]["d"], "e", 3.0)),
        "attribute of a list": (lambda: LISTED.k, put(LISTED, "k", 3.0)),
    }


LISTED = Listed([1.0])
SLOTS: dict[str, Any] = {}


def of_c() -> dict[str, Kind]:
    typed, data, number, shown = (
        array.array("d", [1.0]),
        bytearray(b"1"),
        ctypes.c_double(1.0),
        memoryview(bytearray(1)),
    )
    context, local, long, square = (
        contextvars.ContextVar("w", default=1.0),
        threading.local(),
        np.ones(3000),
        np.ones((9, 9)),
    )
    config, template = Config(), string.Template("1")
    local.w = 1.0
    seen, by_key = weakref.ref(config), weakref.WeakKeyDictionary({config: 1.0})
    SLOTS["kept"] = config
    os.environ["LIBRARY_STATE"] = "1"
    return {
        "array": (lambda: typed[0], put(typed, 0, 3.0)),
        "bytearray": (lambda: data[0] / 10, put(data, 0, 90)),
        "memoryview": (lambda: shown[0] + 1.0, put(shown, 0, 90)),
        "ctypes": (lambda: number.value, put(number, "value", 3.0)),
        "ContextVar": (lambda: context.get(), lambda: context.set(3.0)),
        "threading.local": (lambda: local.w, put(local, "w", 3.0)),
        "long array": (lambda: float(long[2000]), put(long, 2000, 3.0)),
        "array of two dims": (lambda: float(square[1, 1]), put(square, (1, 1), 3.0)),
        "weak reference": (lambda: seen().w, put(config, "w", 3.0)),  # type: ignore[union-attr]
        "WeakKeyDictionary": (lambda: by_key[config], lambda: by_key.__setitem__(config, 3.0)),
        "string.Template": (lambda: float(template.template), put(template, "template", "3")),
        "os.environ": (lambda: float(os.environ["LIBRARY_STATE"]), put(os.environ, "LIBRARY_STATE", "3")),
        "os.getenv": (lambda: float(os.getenv("LIBRARY_STATE_", "1")), put(os.environ, "LIBRARY_STATE_", "3")),
        "sys.path": (lambda: float(len(sys.path)), lambda: sys.path.append("/nowhere")),
        "level of a logger": (lambda: DEBUG.level + 1.0, lambda: DEBUG.setLevel(30)),
    }


def of_names() -> dict[str, Kind]:
    one, two, three, tensor, other = Config(), Config(), Config(), torch.ones(()), torch.ones(())
    tensor.scale = 1.0  # type: ignore[attr-defined]
    attributed.w, Color.RED.scale = 1.0, 1.0  # type: ignore[attr-defined]
    times = functools.partial(lambda a, b: a * b, 1.0, b=1.0)
    return {
        "getattr(config, NAME)": (lambda: getattr(one, NAME), put(one, "w", 3.0)),
        "getattr(config, f'...')": (lambda: getattr(two, f"{NAME[:1]}"), put(two, "w", 3.0)),
        "attrgetter": (lambda: operator.attrgetter(NAME)(three), put(three, "w", 3.0)),
        "globals()": (lambda: globals()["W"], lambda: globals().__setitem__("W", 3.0)),
        "eval": (lambda: eval("X"), lambda: globals().__setitem__("X", 3.0)),
        "attribute of a function": (attributed, put(attributed, "w", 3.0)),
        "attribute of a tensor": (lambda: tensor.scale, put(tensor, "scale", 3.0)),  # type: ignore[attr-defined]
        "attribute of an enum": (lambda: Color.RED.scale, put(Color.RED, "scale", 3.0)),  # type: ignore[attr-defined]
        "metaclass": (lambda: OfMeta.w, put(Meta, "w", 3.0)),
        "descriptor": (lambda: Described().d, put(vars(Described)["d"], "v", 3.0)),
        "keywords of a partial": (lambda: times(), put(times.keywords, "b", 3.0)),
        "table of lru_cache": (tabled, lambda: (put(TABLED, 0, 3.0)(), tabled.cache_clear())),
        "import in the function": (imported, lambda: setattr(sys.modules["library_state_settings"], "W", 3.0)),
        "tensor.data = other": (lambda: other * 1, put(other, "data", torch.tensor(3.0))),
    }


def kinds() -> dict[str, Kind]:
    globals().update(W=1.0, X=1.0)
    DEBUG.setLevel(10)
    TABLED[0], LISTED.k, Meta.w, vars(Described)["d"].v = 1.0, 1.0, 1.0, 1.0
    tabled.cache_clear()
    sys.modules["library_state_settings"] = types.ModuleType("library_state_settings")
    sys.modules["library_state_settings"].W = 1.0  # type: ignore[attr-defined]
    os.environ.pop("LIBRARY_STATE_", None)
    return {**of_optimizers(), **of_containers(), **of_c(), **of_names()}


def trained(read: Callable[[], Any]) -> tuple[nn.Module, autopar.ParallelModule, Callable[..., Tensor], Tensor]:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return F.mse_loss(model(x), x) * read()  # type: ignore[no-any-return]

    torch.manual_seed(0)
    plain, x = nn.Linear(5, 5), torch.randn(4, 5)
    return plain, autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=loss_fn, device="cpu"), loss_fn, x


@pytest.fixture(autouse=True)
def _path_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize("name", kinds())
def test_a_change_is_seen_at_the_next_step(name: str) -> None:
    read, change = kinds()[name]
    plain, model, loss_fn, x = trained(read)
    for _ in range(2):
        model.forward_backward(x)
    before = len(model.programs)
    first = loss_fn(plain, x).item()
    change()
    want = loss_fn(plain, x).item()
    assert want != first
    torch.testing.assert_close(model.forward_backward(x).item(), want)
    # Where nothing changed nothing was compiled; all names of a module may be what a computed name reads.
    assert before == 1 or name in ("globals()", "eval")


HUGE, LISTS = [1.0] * 200_000, [[1.0] for _ in range(2000)]
MANY = {name: [1.0] * 200_000 for name in "abc"}


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda: HUGE[7], "'HUGE' (a list of 200,000 items), test_library_state.py:"),
        (lambda: LISTS[7][0], "'LISTS' (a list of 2,000 items), test_library_state.py:"),
        (lambda: MANY["b"][7], "'MANY['a']' (a list of 200,000 items) and 2 others like it, test_library_state.py:"),
    ],
)
def test_what_is_not_looked_at_is_noted_once(
    read: Callable[[], Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, model, _, x = trained(read)
    with caplog.at_level(logging.WARNING, "autopar"):
        for size in (4, 2, 4):
            model.forward_backward(x[:size])
    notes = [record.getMessage() for record in caplog.records if "are not seen" in record.getMessage()]
    assert len(notes) == 1 and notes[0].startswith(said), notes
    one = "is read at the capture alone: changes inside of it are not seen. Keep what changes in an attribute of the "
    several = one.replace("is read", "are read").replace("inside of it", "inside of them")
    assert notes[0].endswith(
        (
            one + "model, a list or dict of its own, or a tensor",
            several + "model, a list or dict of its own, or a tensor",
        )
    )
