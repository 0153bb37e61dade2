"""What a model keeps outside of itself while it is captured: tables have their data, and the plain module runs on."""

from __future__ import annotations

import collections
import functools
import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.compiler.check_options import options_of
from autopar.compiler.compile import batch_arguments, capture_step
from autopar.errors import AutoparError, CaptureError
from autopar.torch_compat import FakeTensor

TABLE: Any = None
SEEN: Any = None
TABLES: dict[Any, Any] = {}
ORDERED: collections.OrderedDict[Any, Any] = collections.OrderedDict()
LOG: list[Any] = []
LAST: collections.deque[Any] = collections.deque(maxlen=2)


def made(n: int = 8, dtype: torch.dtype | None = None) -> Tensor:
    table = torch.eye(n, dtype=dtype) * 2
    table[0] += torch.sin(torch.arange(n, dtype=torch.float32)).to(table.dtype)
    return table


@functools.lru_cache
def of_dtype(n: int, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    return made(n, dtype), {"ones": torch.ones(n, dtype=dtype)}


@functools.cache
def of_size(n: int) -> list[Tensor]:
    return [made(n)]


class Class:
    table: Any = None


class Lazy:
    @functools.cached_property
    def table(self) -> Tensor:
        return made()

    @functools.lru_cache  # noqa: B019
    def method(self, n: int) -> Tensor:
        return made(n)


class Missing(dict[Any, Any]):
    def __missing__(self, n: int) -> Tensor:
        self[n] = made(n)
        return self[n]


def closure() -> Callable[[Tensor], Tensor]:
    table: Any = None

    def use(x: Tensor) -> Tensor:
        nonlocal table
        if table is None:
            table = made()
        return x @ table

    return use


LAZY, MISSING = Lazy(), Missing()


def in_global(x: Tensor) -> Tensor:
    global TABLE
    if TABLE is None:
        TABLE = made(dtype=x.dtype)
    return x @ TABLE


def in_class(x: Tensor) -> Tensor:
    if Class.table is None:
        Class.table = made()
    return x @ Class.table


def in_default(x: Tensor, tables: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006
    if 8 not in tables:
        tables[8] = made()
    return x @ tables[8]


def in_dict(x: Tensor, tables: dict[Any, Any] = TABLES) -> Tensor:
    if (8, x.dtype) not in tables:
        base = made(8, x.dtype)
        tables[8, x.dtype] = base, base.cos()
    return x @ tables[8, x.dtype][0] + tables[8, x.dtype][1][0]


def written_after_a_read(x: Tensor) -> Tensor:
    """A number is read between the making of a table and a write into it."""
    is_first = "read" not in TABLES
    if is_first:
        TABLES["read"] = made()
    count = int(torch.ones(2).sum())
    if is_first:
        TABLES["read"].mul_(count)
    return x @ TABLES["read"]


def in_function(x: Tensor) -> Tensor:
    if not hasattr(in_function, "table"):
        in_function.table = made()  # type: ignore[attr-defined]
    return x @ in_function.table  # type: ignore[attr-defined,no-any-return]


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "lru_cache": lambda x: x @ of_dtype(8, x.dtype)[0] * of_dtype(8, x.dtype)[1]["ones"],
    "cache": lambda x: x @ of_size(8)[0],
    "written after a read": written_after_a_read,
    "cached_property": lambda x: x @ LAZY.table,
    "lru_cache of a method": lambda x: x @ LAZY.method(8),
    "global": in_global,
    "dict": in_dict,
    "OrderedDict": functools.partial(in_dict, tables=ORDERED),
    "class": in_class,
    "closure": closure(),
    "default argument": in_default,
    "attribute of a function": in_function,
    "__missing__": lambda x: x @ MISSING[8],
}


def forget() -> None:
    """Empty all tables."""
    global TABLE, SEEN, LAZY
    TABLE = SEEN = Class.table = None
    of_dtype.cache_clear(), of_size.cache_clear(), LAZY.method.cache_clear()
    for kept in (TABLES, ORDERED, MISSING, LOG, LAST, in_default.__defaults__[0]):  # type: ignore[index]
        kept.clear()
    LAZY, USES["closure"] = Lazy(), closure()
    vars(in_function).clear()


class Net(nn.Module):
    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.use = nn.Linear(8, 8), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.linear(x))


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def net(use: Callable[[Tensor], Tensor]) -> Net:
    torch.manual_seed(1)
    return Net(use)


def fakes() -> int:
    gc.collect()
    return sum(type(item) is FakeTensor for item in gc.get_objects())


@pytest.mark.parametrize("name", USES)
def test_tables_have_their_data(name: str) -> None:
    """After any capture the plain module runs, in its own dtype; steps of other sizes and a forward pass are right."""
    forget()
    x, before = torch.randn(12, 8), fakes()
    want = [loss_fn(net(USES[name]), x[:n]).detach() for n in (12, 6)]
    for run in (
        lambda model: autopar.compile(model, "dp=2", loss_fn=loss_fn, batch=x),
        lambda model: autopar.verify(model, "dp=2", loss_fn=loss_fn, batch=x).ok or pytest.fail("verify"),
    ):
        forget()
        model = net(USES[name])
        run(model)
        assert fakes() == before
        torch.testing.assert_close(loss_fn(model, x).detach(), want[0], rtol=0, atol=0)
    forget()
    model = net(USES[name])
    parallel = autopar.parallelize(model, "dp=1", loss_fn=loss_fn, device="cpu")
    for n, loss in zip((12, 6, 12), (*want, want[0]), strict=True):
        torch.testing.assert_close(parallel.forward_backward(x[:n]), loss)
    torch.testing.assert_close(parallel(x[:6]), net(USES[name])(x[:6]).detach())
    assert fakes() == before and len(parallel.programs) == 3


def in_log(x: Tensor) -> Tensor:
    LOG.append(x.mean())
    return x


def in_deque(x: Tensor) -> Tensor:
    LAST.append(x.detach())
    return x


def seen(x: Tensor) -> Tensor:
    global SEEN
    SEEN = {"x": x * 2}
    return x


LOGS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Any]]] = {
    "list": (in_log, lambda: torch.stack(LOG)),
    "deque": (in_deque, lambda: LAST[-1] + 1),
    "global": (seen, lambda: SEEN["x"].mean().item()),
}


@pytest.mark.parametrize("name", LOGS)
def test_a_log_of_the_step_says_that_it_has_no_data(name: str, caplog: pytest.LogCaptureFixture) -> None:
    forget()
    use, read = LOGS[name]
    x, before = torch.randn(12, 8), fakes()
    want = [loss_fn(net(use), x[:n]).detach() for n in (12, 6)]
    forget()
    parallel = autopar.parallelize(net(use), "dp=1", loss_fn=loss_fn, device="cpu")
    with caplog.at_level(logging.WARNING, "autopar"):
        for n, loss in zip((12, 6, 12, 6), want * 2, strict=True):
            torch.testing.assert_close(parallel.forward_backward(x[:n]), loss)
    assert fakes() == before and len(parallel.programs) == 2
    compiled = parallel.compiled
    assert compiled is not None
    assert any(
        "kept by the model outside of itself (in a list, a global, an object) without data" in n for n in compiled.notes
    )
    with pytest.raises(AutoparError, match="was made while autopar captured the step, and has no data"):
        read()
    forget()
    loss_fn(net(use), x)
    read()


def refused(x: Tensor) -> Tensor:
    return in_global(x) * float(x.mean())


@functools.lru_cache
def _of_its_sum(size: int) -> Tensor:
    made = torch.arange(float(size)) + 1
    return made * int(made.sum())


def test_a_table_that_reads_a_number_as_it_is_made_is_taken() -> None:
    x, model = torch.randn(12, 8), net(lambda x: x @ _of_its_sum(8))
    want = loss_fn(model, x).detach()
    _of_its_sum.cache_clear()
    parallel = autopar.parallelize(model, "dp=1", loss_fn=loss_fn, device="cpu")
    torch.testing.assert_close(parallel.forward_backward(x).detach(), want)
    torch.testing.assert_close(_of_its_sum(8), (torch.arange(8.0) + 1) * 36)


def test_a_capture_that_is_refused_leaves_data() -> None:
    forget()
    x, model = torch.randn(12, 8), net(refused)
    with pytest.raises(CaptureError):
        autopar.compile(model, "dp=2", loss_fn=loss_fn, batch=x)
    assert type(TABLE) is Tensor
    loss_fn(model, x).backward()


def test_nothing_is_held_after_a_capture() -> None:
    """The nodes of autograd, and all tensors behind them, are let go."""
    before = fakes()
    compiled = autopar.compile(net(torch.tanh), "dp=2", loss_fn=loss_fn, batch=torch.randn(12, 8))
    assert fakes() == before and compiled is not None


def _of_two_experts(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for i in range(2):
        (row,) = torch.where(x.argmax(-1) % 2 == i)
        if row.numel():
            out.index_add_(0, row, x[row] * (i + 1))
    return out


UNHELD: dict[str, Callable[[Tensor], Tensor]] = {
    "a call": torch.tanh,
    "a number": lambda x: x * x.abs().max().item(),
    "rows of a mask": _of_two_experts,
}


@pytest.mark.parametrize("name", UNHELD)
@pytest.mark.parametrize("lift", (None, torch.float64))
def test_it_takes_no_look_for_garbage(lift: torch.dtype | None, name: str) -> None:
    """Nothing that a capture makes holds itself with tensors of the trace: a look for circles walks all that lives."""
    model, x, looks = net(UNHELD[name]).to(lift), torch.randn(12, 8, dtype=lift), list[str]()
    batch, options = batch_arguments(x), options_of()
    capture_step(model, loss_fn, *batch, options, lift=lift)  # torch keeps circles of its own at the first
    gc.callbacks.append(look := lambda phase, _: looks.append(phase))
    try:
        capture_step(model, loss_fn, *batch, options, lift=lift)
    finally:
        gc.callbacks.remove(look)
    assert not looks
