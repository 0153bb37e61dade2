"""What `autopar/ir/ops/op_facts.py` says of ops, beside torch's tags and what ops do with the samples of their rules.

Whose memory results lie in is in test_aliasing.py.
"""

from __future__ import annotations

import itertools
import random
from typing import Any, get_args

import pytest
import torch
from rule_brute_force import RUN_AS, Sample, op_of, sample, tensors_in, with_tensors
from rule_samples import r
from rule_samples_all import every_sample
from torch import Tensor, fx

from autopar.ir.ops import op_facts
from autopar.ir.ops.op_facts import facts_of, fill_of, is_view, made_of, numbers_of, overloads_of
from autopar.ir.ops.ops import semantic_of
from autopar.ir.ops.semantic import Moves, Precision
from autopar.passes.rules import TABLE
from autopar.runtime.executor.kernel_table import function_of
from autopar.torch_compat import op_names

aten = torch.ops.aten


@pytest.fixture(scope="module")
def samples() -> dict[str, list[Sample]]:
    return every_sample()


def run(target: Any, one: Sample) -> list[Tensor]:
    with torch.no_grad():
        return tensors_in([RUN_AS.get(target, function_of(target))(*one.args, **one.kwargs)])


# -- rows -----------------------------------------------------------------------------------------------------------


def test_every_row_is_of_an_op_and_says_what_no_tag_says() -> None:
    names = {name.removeprefix("aten::").partition(".")[0] for name in op_names() if name.startswith("aten::")}
    assert {name.partition(":")[0] for name in op_facts._KNOWN} <= names
    needless = []
    for name, told in op_facts._KNOWN.items():
        base, _, overload = name.partition(":")
        ops = [getattr(getattr(aten, base), overload)] if overload else overloads_of(base) + overloads_of(f"{base}_")
        assert told.get("moves", "") in get_args(Moves) and told.get("precision", "low") in get_args(Precision)
        if "pointwise" in told and all((torch.Tag.pointwise in one.tags) is told["pointwise"] for one in ops):
            needless.append(name)
    assert set(needless) <= {"where:self", "bucketize", "searchsorted"}  # which have a tag in some torch, or had none
    assert all(facts_of(op_of(name)).precision == "widest" for name in TABLE if "logical" in name)


# -- element by element ---------------------------------------------------------------------------------------------


def shuffled(x: Tensor, kept: Tensor) -> Tensor:
    """The same numbers at other places, but where `kept`."""
    rest = x[~kept]
    made = x.clone()
    made[~kept] = rest[torch.randperm(len(rest))]
    return made


def depends_elsewhere(target: Any, one: Sample) -> bool:
    """True if an element of a result changes with operands of which only what lies at its place stays."""
    results = run(target, one)
    if not one.compare or not results or not results[0].numel():
        return False
    shape = results[0].shape
    place = tuple(random.randrange(size) for size in shape)
    mark = torch.zeros(shape, dtype=torch.bool)
    mark[place] = True
    given = []
    for operand in tensors_in([one.args, one.kwargs]):
        own = operand.shape
        kept = torch.zeros(own, dtype=torch.bool)
        if own.numel() and len(own) <= len(shape):
            last = place[len(shape) - len(own) :]
            kept[tuple(0 if size == 1 else at for size, at in zip(own, last, strict=True))] = True
        given.append(shuffled(operand, kept))
    args, kwargs = with_tensors([one.args, dict(one.kwargs)], given)
    again = run(target, Sample(tuple(args), kwargs))
    pairs = [(a[place], b[place]) for a, b in zip(results, again, strict=True) if a.shape == shape]
    return any(not torch.equal(a, b) and not (a.isnan() and b.isnan()) for a, b in pairs)


def test_pointwise_ops_compute_each_element_of_those_at_its_place(samples: dict[str, list[Sample]]) -> None:
    random.seed(0)
    torch.manual_seed(0)
    wrong, count = set(), 0
    for name in TABLE:
        target = op_of(name)
        facts = facts_of(target)
        if facts.pointwise and not facts.random:
            count += 1
            wrong |= {name for one in samples[name] for _ in range(3) if depends_elsewhere(target, one)}
    assert wrong == set() and count > 170, (wrong, count)


def test_what_is_not_pointwise_is_found_to_be_so() -> None:
    torch.manual_seed(0)
    for target, one in (
        (aten.cumsum.default, sample(r(40), 0)), (aten._softmax.default, sample(r(3, 40), 1, False)),
        (aten.flip.default, sample(r(40), [0])), (aten.roll.default, sample(r(40), [3], [0])),
    ):  # fmt: skip
        assert not facts_of(target).pointwise
        assert any(depends_elsewhere(target, one) for _ in range(10)), target


def test_a_tag_that_reads_more_than_the_element_is_overruled() -> None:
    for target in (aten.equal.default, aten.bucketize.Tensor, aten.searchsorted.Tensor):
        assert torch.Tag.pointwise in target.tags or target is not aten.equal.default
        assert not facts_of(target).pointwise


# -- where elements go ----------------------------------------------------------------------------------------------


def is_turned(x: Tensor, y: Tensor) -> bool:
    return any(torch.equal(x.permute(order), y) for order in itertools.permutations(range(x.ndim)) if x.ndim == y.ndim)


def is_repeated(x: Tensor, y: Tensor) -> bool:
    shapes = itertools.zip_longest(reversed(x.shape), reversed(y.shape), fillvalue=1)
    return x.ndim <= y.ndim and all(a in (1, b) for a, b in shapes) and torch.equal(x.expand(y.shape), y)


def is_along_a_dim(parts: list[Tensor], y: Tensor) -> bool:
    made = [lambda dim=dim, make=make: make(parts, dim) for make in (torch.cat, torch.stack) for dim in range(y.ndim)]
    for make in made:
        try:
            if torch.equal(make(), y):
                return True
        except (RuntimeError, IndexError):
            pass
    return False


def holds(moves: Moves, operands: list[Tensor], results: list[Tensor]) -> bool:
    """Whether elements go where a fact says."""
    x, y = operands[0], results[0]
    values = [one for one in operands[1:] if one.dtype == x.dtype]
    match moves:
        case "same":
            return torch.equal(x.to(y.dtype), y)
        case "flat":
            return torch.equal(x.reshape(-1), y.reshape(-1))
        case "turned":
            return is_turned(x, y)
        case "repeated":
            return is_repeated(x, y)
        case "joined":
            return is_along_a_dim(operands, y)
        case "taken":
            return bool(torch.isin(y, x).all())
        case "put":
            return bool(torch.isin(y, torch.cat([one.reshape(-1) for one in (x, *values)])).all())
        case "sorted":
            return any(is_sorted(results, x, dim) for dim in range(max(x.ndim, 1)))
    return False


def is_added(target: Any, one: Sample) -> bool:
    """Whether the first operand is a term of the result."""
    x, *rest = one.args
    (y,), (more,) = run(target, one), run(target, Sample((torch.zeros_like(x), *rest), one.kwargs))
    return torch.allclose(y, x + more)


def is_sorted(results: list[Tensor], x: Tensor, dim: int) -> bool:
    if not x.ndim:
        return True
    y = results[0] if results[0].dtype == x.dtype else x.take_along_dim(results[0], dim)
    both = y.diff(dim=dim)
    return bool((both >= 0).all() or (both <= 0).all())


def test_elements_go_where_the_facts_say(samples: dict[str, list[Sample]]) -> None:
    wrong, count = set(), 0
    for name in TABLE:
        target = op_of(name)
        moves = facts_of(target).moves
        for one in samples[name] if moves else ():
            operands = tensors_in([one.args, one.kwargs])
            if not operands[0].numel():
                continue
            count += 1
            if moves == "added" or (moves == "put" and (any(arg is True for arg in one.args) or one.kwargs)):
                holds_ = semantic_of(target) is not None or is_added(target, one)
            else:
                numbers = [arg for arg in one.args[3:] if type(arg) in (int, float)]  # of scatter.value
                operands += [torch.tensor(number, dtype=operands[0].dtype) for number in numbers]
                holds_ = holds(moves, operands, run(target, one))
            wrong |= set() if holds_ else {name}
    assert wrong == set() and count > 60, (wrong, count)


def test_a_view_of_all_elements_says_where_they_go(samples: dict[str, list[Sample]]) -> None:
    """No view is left out that shows each element of its operand, in order, in turned dims or repeated."""
    left = set()
    for name in TABLE:
        target = op_of(name)
        if is_view(target) and not facts_of(target).moves:
            seen = [(tensors_in([one.args])[:1], run(target, one)) for one in samples[name]]
            moves: list[Moves] = ["flat", "turned", "repeated"]
            if any(
                all(len(y) == 1 and y[0].dtype == x[0].dtype and holds(one, x, y) for x, y in seen) for one in moves
            ):
                left.add(name)
    # what torch takes apart before it is in a graph
    assert left <= {"aten.resolve_conj.default", "aten.resolve_neg.default", "aten.positive.default"}


# -- tensors of one number --------------------------------------------------------------------------------------------


def test_fills_are_what_is_in_the_tensor() -> None:
    x = torch.rand(3)
    given: dict[Any, tuple[Any, ...]] = {
        aten.zeros.default: ([2],), aten.zeros_like.default: (x,), aten.new_zeros.default: (x, [2]),
        aten.ones.default: ([2],), aten.ones_like.default: (x,), aten.new_ones.default: (x, [2]),
        aten.full.default: ([2], 7), aten.full_like.default: (x, 7), aten.new_full.default: (x, [2], 7),
        aten.scalar_tensor.default: (7,), aten.empty_like.default: (x,), aten.new_empty.default: (x, [2]),
        aten.relu.default: (x,), aten.rand_like.default: (x,),
    }  # fmt: skip
    for target, args in given.items():
        node = fx.Graph().create_node("call_function", target, args)
        fill, made = fill_of(node), target(*args)
        assert (fill is None) == (made_of(target) in ("", "empty")), target
        assert fill is None or bool((made == fill).all()), target


# -- numbers in place of tensors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", [torch, Tensor], ids=["torch", "Tensor"])
def test_a_number_may_stand_where_the_facts_say(owner: Any) -> None:
    """Each function with two such arguments takes a number as the last, and gives what a tensor of it gives."""
    x, count = torch.rand(4, dtype=torch.float64) + 1, 0
    for name in dir(owner):
        if numbers_of(name) == 2 and not name.startswith("__") and not name.endswith("_"):
            given = (x * 4).long() if "bitwise" in name else x
            number = 2 if "bitwise" in name or name == "fill" else 2.0
            function = getattr(owner, name)
            result = function(given, number)
            assert torch.equal(result, function(given, torch.tensor(number, dtype=given.dtype))), name
            count += 1
    assert count > 20, count
    refused = ("dropout", "full_like", "hardshrink", "softplus", "addcmul", "matmul", "sum", "item", "no_such_function")
    assert not any(map(numbers_of, refused))
