"""Check a custom op's rule at its registration: brute force on small random operands, forward and backward."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.custom_ops.brute_force import (
    OpTrial,
    Split,
    Tensors,
    check_gradients,
    check_linear,
    check_split,
    cut,
    gradients_of,
    make_call,
    make_trial,
    pair_up,
    splits_of,
    tensors_in,
)
from autopar.custom_ops.rule_row import ABSENT, OwnRule, Pattern
from autopar.custom_ops.signature import listed
from autopar.errors import RuleError, WrongRule
from autopar.passes.rules.notation import BATCH
from autopar.passes.rules.rule import Dims
from autopar.torch_compat import FakeTensorMode

SIZES = (4, 6, 8, 12)  # of names: all can be cut in two, some in three, some within halves
BATCH_DIMS = (1, 2, 3)  # how many dims `...` is, in one round after the other
Op = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Examples:
    """What the check runs the op on: sizes of names, values of arguments, dtypes or makers of operands."""

    sizes: Mapping[str, int]
    args: Mapping[str, Any]
    device: str

    def faults(self, own: OwnRule) -> Iterator[str]:
        """What does not fit the op, and what is missing."""
        signature = own.signature
        known = {*signature.tensors, *signature.others}
        names = {name for pattern in own.patterns for name in pattern.names()}
        given = {argument for _, argument in own.size_args}
        for name, size in self.sizes.items():
            if name not in names:
                yield f"sizes names '{name}', which the pattern has not; it has {listed(sorted(names))}."
            elif not isinstance(size, int) or size < 1:
                yield f"sizes has {size!r} for '{name}', which is no size."
        for name, value in self.args.items():
            if name not in known:
                yield f"args names '{name}', which {signature.name} has not; it has {listed(sorted(known))}."
            elif name in given:
                yield f"args has a value for '{name}', which size_args says is a size: give it in sizes."
            elif name in signature.tensors and not (isinstance(value, torch.dtype) or callable(value)):
                yield f"args has {value!r:.60} for tensor '{name}': give a dtype, or a function of the shape."
        for name in signature.others:
            if name not in self.args and name not in given and name not in signature.defaults:
                yield f"argument '{name}' of {signature.name} has no default: give an example, args={{'{name}': ...}}."


def check_rule(own: OwnRule, op: Op, examples: Examples) -> bool:
    """Check every pattern; True if the gradients were checked too.

    Raises WrongRule with all that does not hold, RuleError if the op cannot be run on the examples.
    """
    try:
        torch.empty(0, device=examples.device)
    except Exception as error:
        raise RuleError(f"device='{examples.device}' is not here: {_short(error)}") from None
    faults: dict[str, str] = {}
    gradients = []
    with torch.random.fork_rng(devices=[]):
        for pattern in own.patterns:
            rounds = BATCH_DIMS if BATCH in {dim for dims in pattern.dims() for dim in dims} else (0, 0, 0)
            for number, batch_dims in enumerate(rounds):
                torch.manual_seed(number)
                trial = _trial(own, op, pattern, examples, number, batch_dims)
                found, with_gradients = _check(own, trial, pattern)
                faults = {**found, **faults}
                gradients.append(with_gradients)
            if faults:
                raise WrongRule(_message(own, pattern, faults))
    return all(gradients)


def _message(own: OwnRule, pattern: Pattern, faults: Mapping[str, str]) -> str:
    lines = [
        f'the rule of {own.signature.name}, "{pattern.text}", does not hold:',
        *(f"  {t}" for t in faults.values()),
    ]
    bad = [name for name in faults if name in (*pattern.names(), "...")]
    if bad:
        names = tuple(sorted({*own.replicated, *bad}))
        lines.append(f"If the pattern is right, these must stay replicated: replicated={names}.")
    return "\n".join(lines)


def _trial(own: OwnRule, op: Op, pattern: Pattern, examples: Examples, number: int, batch_dims: int) -> OpTrial:
    """The op on random operands."""
    signature = own.signature
    sizes = _sizes(pattern, examples, number, batch_dims)
    dims = iter(pattern.dims())
    values: dict[str, Any] = {**signature.defaults, **examples.args}
    values |= {argument: sizes[name] for name, argument in own.size_args if name in sizes}
    for name, text in zip(signature.tensors, pattern.operands, strict=True):
        values[name] = None if text == ABSENT else _operand(name, next(dims), sizes, batch_dims, examples)
    args = [values[name] for name in signature.positional]
    kwargs = {
        name: values[name] for name in (*signature.tensors, *signature.others) if name not in signature.positional
    }
    what = f"{signature.name} on operands of shapes {listed([list(t.shape) for t in tensors_in([args, kwargs])])}"
    try:
        first, second = (tensors_in([op(*args, **kwargs)]) for _ in range(2))
    except Exception as error:
        raise RuleError(
            f"{what} raised {_short(error)}\nGive examples that it takes: sizes=, args=, device=."
        ) from error
    if any(bool(t.isnan().any()) for t in first):
        raise RuleError(f"{what} gives NaN, which checks nothing: give examples that it takes, e.g. "
                        f"args={{'{signature.tensors[0]}': torch.rand}}.")  # fmt: skip
    if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
        raise RuleError(f"{what} gives other results when it runs again: its pieces cannot be compared.")
    _check_fake(own, op, args, kwargs, first)
    own = replace(own, patterns=(pattern,))
    call, _, results = make_call(signature.op, op, args, kwargs)
    found, misfits = own.fit(call)
    if found is None:
        shapes = listed([list(t.shape) for t in results])
        raise RuleError(
            f"{what} gives results of shapes {shapes}, which are not those of its pattern:\n  {misfits[-1]}"
        )
    return make_trial(signature.op, op, args, kwargs, {signature.op: own.row()})


def _sizes(pattern: Pattern, examples: Examples, number: int, batch_dims: int) -> dict[str, int]:
    names = [*pattern.names(), *(f"b{i}" for i in range(batch_dims))]
    pool = SIZES if len(names) <= 5 else SIZES[:2]
    order = random.Random(number).sample(pool, len(pool))
    return {name: examples.sizes.get(name, order[i % len(order)]) for i, name in enumerate(names)}


def _operand(name: str, dims: Dims, sizes: Mapping[str, int], batch_dims: int, examples: Examples) -> torch.Tensor:
    shape: list[int] = []
    for dim in dims:
        shape += [sizes[f"b{i}"] for i in range(batch_dims)] if dim == BATCH else [math.prod(sizes[one] for one in dim)]
    given = examples.args.get(name, torch.float64)
    if not isinstance(given, torch.dtype):
        made = given(tuple(shape))
        if not isinstance(made, torch.Tensor) or list(made.shape) != shape:
            what = list(made.shape) if isinstance(made, torch.Tensor) else type(made).__name__
            raise RuleError(f"args: the function for '{name}' gave {what} for a tensor of shape {shape}.")
        return made.to(examples.device)
    if given.is_floating_point:
        return (torch.rand(shape, dtype=torch.float64, device="cpu") * 2 - 1).to(examples.device, given)
    if given.is_complex:
        return torch.randn(shape, dtype=torch.complex128, device="cpu").to(examples.device, given)
    return torch.randint(0, 2, shape, device="cpu").to(examples.device, given)


def _check_fake(own: OwnRule, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], results: Tensors) -> None:
    """The fake kernel gives the shapes and dtypes of the real one: the capture sees no other."""
    with FakeTensorMode() as mode:
        faked = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in (*args, *kwargs.values())]
        try:
            made = tensors_in([op(*faked[: len(args)], **dict(zip(kwargs, faked[len(args) :], strict=True)))])
        except Exception as error:
            raise RuleError(
                f"{own.signature.name} has no fake kernel that runs: {_short(error)}\n"
                f"A model is captured without data: give one with torch.library.register_fake."
            ) from error
    said, real = ([(list(t.shape), t.dtype) for t in tensors] for tensors in (made, results))
    if said != real:
        raise RuleError(f"the fake kernel of {own.signature.name} says {said}, but its results are {real}.")


def _check(own: OwnRule, trial: OpTrial, pattern: Pattern) -> tuple[dict[str, str], bool]:
    """What does not hold, by the name or the linear set; True if the gradients were checked."""
    rule, faults = trial.rule, dict[str, str]()
    seeds = [torch.rand_like(r) + 0.5 if r.is_floating_point() else torch.zeros_like(r) for r in trial.results]
    whole = _whole_gradients(own, trial, seeds)

    def fault(splits: Sequence[Split]) -> str:
        try:
            check_split(trial, splits)
            if whole is not None and _has_sums(trial, splits):
                check_gradients(trial, splits, seeds, whole)
        except WrongRule as error:
            return str(error)
        except Exception as error:
            return f"{cut(trial, splits)}: it raised {_short(error)}"
        return ""

    # Names of size 1 are cut as well: the samples may hide that a larger one cannot be.
    unseen = [name for name in pattern.names() if rule.sizes[name] == 1 and name not in own.replicated]
    found = {name: splits_of(rule, name) for name in (*rule.names(), *unseen)}
    for name, splits in found.items():
        key, size = (name if name in pattern.names() else "..."), rule.sizes[name]
        if not splits:
            faults[key] = (
                f"'{key}' is not checked: its size {size} can be cut in neither 2 nor 3; give another in sizes."
            )
        text = next(filter(None, (fault([split]) for split in splits)), "")
        if text:
            faults[key] = f"'{key}' is not splittable: {text}"
    # Two splits at once only where each holds by itself: else the same fault would be told twice.
    if not faults:
        for pair in pair_up([split for splits in found.values() for split in splits]):
            text = fault(pair)
            if text:
                faults[f"{pair[0][0]} {pair[1][0]}"] = (
                    f"'{pair[0][0]}' and '{pair[1][0]}' are not splittable at once: {text}"
                )
    for which in rule.linear:
        text = _linear_fault(trial, which)
        if text:
            of = listed([own.present(trial.call)[i] for i in sorted(which)])
            faults[of] = f"it is not linear in {of}: {text}"
    return faults, whole is not None


def _linear_fault(trial: OpTrial, which: frozenset[int]) -> str:
    try:
        return "" if check_linear(trial, which) else "an operand that is no float has no partial sums"
    except WrongRule as error:
        return str(error).replace("from the pieces", "is f(a) + f(b)").replace("from the whole", "is f(a + b)")
    except Exception as error:
        return f"it raised {_short(error)}"


def _has_sums(trial: OpTrial, splits: Sequence[Split]) -> bool:
    """True if the results of the pieces are put together by sums, if by anything: then gradients are sums too."""
    return all(kind == "sum" for layout in cut(trial, splits).layouts for _, kind in layout.partial)


def _whole_gradients(own: OwnRule, trial: OpTrial, seeds: Tensors) -> list[Any] | None:
    """The gradients of the whole; None for an op that has no autograd formula."""
    if not any(operand.is_floating_point() for operand in trial.operands):
        return None
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            gradients = gradients_of(trial, (trial.call.args, dict(trial.call.kwargs)), trial.operands, seeds)
        # What an op of torch.library.define without an autograd kernel gives is chance.
        return None if any("autograd kernel was not registered" in str(one.message) for one in said) else gradients
    except Exception as error:
        if "no autograd formula" in str(error) or isinstance(error, NotImplementedError):
            return None
        raise RuleError(f"the backward of {own.signature.name} raised {_short(error)}") from error


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300] if str(error).strip() else ''}"
