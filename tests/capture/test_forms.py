"""What capture infers of common ops is what torch infers, or nothing."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from autopar.capture.trace.forms import Elementwise, TensorForm, elementwise_key, infer, strides_of
from autopar.capture.trace.results import Results, _memory
from autopar.torch_compat import FakeTensorMode, op_names, schema_of, storage_of

aten = torch.ops.aten
SEED = 0


def form_of(tensor: Any, operands: list[Any]) -> TensorForm:
    shown = [at for at, each in enumerate(operands) if storage_of(each) == storage_of(tensor)]
    place = tensor.storage_offset()
    return TensorForm(
        tuple(tensor.shape), tensor.stride(), place, tensor.dtype, tensor.fake_device, shown[0] if shown else None
    )


def asked(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], fake: FakeTensorMode
) -> tuple[TensorForm, ...] | None:
    """What torch gives; None where it raises."""
    operands = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
    with fake:
        try:
            result = func(*args, **kwargs)
        except Exception:
            return None
    return tuple(form_of(each, operands) for each in (result if isinstance(result, (tuple, list)) else (result,)))


def tensors(fake: FakeTensorMode) -> list[torch.Tensor]:
    """Tensors of all sorts of shapes and strides."""
    draw = random.Random(SEED)
    found = []
    with fake:
        for dims in range(5):
            for _ in range(12):
                x = torch.empty([draw.choice((1, 2, 3, 4, 6)) for _ in range(dims)], dtype=draw.choice(DTYPES))
                kind = draw.randrange(4)
                if kind == 1 and dims > 1:
                    x = x.transpose(*draw.sample(range(dims), 2))
                elif kind == 2 and dims:
                    x = x[1:]
                elif kind == 3 and dims:
                    x = x[..., ::2]
                found.append(x)
        found.append(torch.empty(0, 3))
    return found


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)


def calls(x: torch.Tensor) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    n, numel, found = x.dim(), x.numel(), []
    sizes = [
        (numel,),
        (-1,),
        (1, numel),
        (-1, 2),
        (2, -1),
        (-1, -1),
        (3, numel),
        tuple(x.shape),
        (*x.shape, 1),
        (),
        (0,),
    ]
    found += [(aten.view.default, (x, list(size)), {}) for size in sizes]
    found += [(aten.permute.default, (x, list(order)), {}) for order in itertools.permutations(range(-1, n), n)]
    found += [(aten.transpose.int, (x, one, other), {}) for one in range(-n - 1, n + 1) for other in range(-1, n + 1)]
    strided = {"device": torch.device("cpu"), "layout": torch.strided, "pin_memory": False, "dtype": torch.int64}
    for dtype in (
        {},
        {"dtype": torch.float64},
        {"device": torch.device("cpu")},
        {"device": torch.device("cuda", 0)},
        strided,
    ):
        found += [(aten.new_empty.default, (x, [2, 3]), dtype), (aten.new_empty.default, (x, []), dtype)]
        found += [(aten.empty_like.default, (x,), dtype)]
    for size in (
        tuple(x.shape),
        (5, *x.shape),
        (-1, *x.shape),
        (1, *x.shape),
        tuple(4 if s == 1 else s for s in x.shape),
    ):
        found.append((aten.expand.default, (x, list(size)), {}))
    found.append((aten.expand.default, (x, [-1] * n), {}))
    for dims in ([], [0], [-1], [0, -1], list(range(n)), [n], None):
        found += [(aten.sum.dim_IntList, (x, dims, keep), {}) for keep in (False, True)]
    return found


def test_what_a_rule_says_is_what_torch_says() -> None:
    fake = FakeTensorMode()
    told = checked = 0
    for x in tensors(fake):
        for func, args, kwargs in calls(x):
            checked += 1
            found = infer(func, args, kwargs)
            if found is not None:
                told += 1
                assert found == asked(func, args, kwargs, fake), (func, x.shape, x.stride(), args[1:], kwargs)
    assert checked > 2000
    assert told > checked / 3


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("has", [(True, True), (True, False), (False, False)])
def test_layer_norms(dims: int, dtype: torch.dtype, has: tuple[bool, bool]) -> None:
    fake = FakeTensorMode()
    with fake:
        x = torch.empty(2, 5, 3, 4, dtype=dtype)
        shape = list(x.shape[-dims:])
        weight, bias = (torch.empty(shape, dtype=dtype) if each else None for each in has)
        statistics = torch.empty(*x.shape[:-dims], *[1] * dims)
    forward = aten.native_layer_norm.default, (x, shape, weight, bias, 1e-5)
    backward = aten.native_layer_norm_backward.default, (x, x, shape, statistics, statistics, weight, bias, [True] * 3)
    told = 0
    for func, args in (forward, backward):
        found = infer(func, args, {})
        told += found is not None
        assert found is None or found == asked(func, args, {}, fake)
    assert told == (2 if dtype in (torch.float32, torch.float64) and all(has) else dtype != torch.bfloat16)


def elementwise_ops() -> list[Any]:
    """Every op of torch's that takes each element by itself and writes none."""
    found = []
    for name in op_names():
        space, _, rest = name.partition("::")
        packet = getattr(aten, rest.partition(".")[0], None) if space == "aten" else None
        func = getattr(packet, rest.partition(".")[2] or "default", None) if packet else None
        if func is not None and torch.Tag.pointwise in func.tags and not schema_of(func).is_mutable:
            found.append(func)
    return found


def test_ops_by_elements_have_the_form_that_torch_says() -> None:
    """Learned at one shape, asked at others: each op on all sorts of operands."""
    fake, draw, told = FakeTensorMode(), random.Random(SEED), set()
    known = Elementwise()
    shapes = [
        (3, 4),
        (5, 2),
        (4,),
        (2,),
        (2, 3, 4),
        (),
        (1, 4),
        (3, 1),
        (2, 5, 2),
        (2, 1, 3),
        (1, 1, 4),
        (4, 1, 1),
        (1,),
        (1, 1),
    ]
    with fake:
        given = {dtype: [torch.empty(shape, dtype=dtype) for shape in shapes] for dtype in DTYPES}
        for dtype in DTYPES:
            given[dtype] += [torch.empty(4, 3, dtype=dtype).t(), torch.empty(4, 6, dtype=dtype)[:, ::2]]
    for func in elementwise_ops():
        takes = [str(argument.type) for argument in schema_of(func).arguments if argument.default_value is None]
        for _ in range(90):
            dtypes = [draw.choice(DTYPES[:1] * 3 + DTYPES) for _ in takes]
            args = tuple(
                draw.choice(given[dtype]) if "Tensor" in kind else draw.choice((1, 2.0, True))
                for kind, dtype in zip(takes, dtypes, strict=True)
            )
            operands = [each for each in args if isinstance(each, torch.Tensor)]
            if not operands:
                continue
            key = elementwise_key(func, args, {}, operands)
            foretold, is_so = known.infer(key, operands), asked(func, args, {}, fake) if key is not None else None
            if foretold is not None:
                told.add(func)
                assert foretold == is_so, (
                    func,
                    [each.shape if isinstance(each, torch.Tensor) else each for each in args],
                )
            if is_so is not None:
                known.learn(key, operands, is_so)
    assert len(told) > 100, len(told)


def test_a_call_is_remembered_by_the_form_of_its_operands() -> None:
    """The same op on another shape, dtype, stride or number is another call; a repeated one asks nobody."""
    fake, asked_for = FakeTensorMode(), list[Any]()
    _memory.cache_clear()
    results = Results(fake)

    def call(*args: Any, **kwargs: Any) -> Any:
        asked_for.append(args)
        return aten.cumsum.default(*args, **kwargs)

    with fake:
        x, y = torch.empty(3, 4), torch.empty(3, 4, dtype=torch.int64)
        variants = [(x, 0), (x, 1), (x.t(), 0), (y, 0), (torch.empty(4, 3), 0)]
        first = [results.call(call, aten.cumsum.default, args, {}) for args in variants]
        assert len(asked_for) == len(variants)
        again = [results.call(call, aten.cumsum.default, args, {}) for args in variants]
    assert len(asked_for) == len(variants)
    for one, other in zip(first, again, strict=True):
        assert (one.shape, one.stride(), one.dtype, one.device) == (
            other.shape,
            other.stride(),
            other.dtype,
            other.device,
        )
        assert storage_of(one) != storage_of(other)


def test_a_view_that_is_remembered_shows_its_own_operand() -> None:
    fake = FakeTensorMode()
    results = Results(fake)
    with fake:
        for _ in range(2):
            x = torch.empty(6, 4)
            for func, args in ((aten.slice.Tensor, (0, 1, 5)), (aten.select.int, (1, 2)), (aten.unbind.int, ())):
                made, plain = results.call(func, func, (x, *args), {}), func(x, *args)
                made, plain = (list(each) if isinstance(each, (tuple, list)) else [each] for each in (made, plain))
                assert all(storage_of(each) == storage_of(x) for each in made)
                assert [each.storage_offset() for each in made] == [each.storage_offset() for each in plain]


def test_strides_of_dense_memory() -> None:
    for shape in ((), (3,), (2, 3), (1, 4, 1), (5, 1, 2, 3)):
        assert strides_of(shape) == torch.empty(shape).stride()
