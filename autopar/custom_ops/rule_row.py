"""Make a row of the rule table from the rule of a custom op."""

from __future__ import annotations

import ast
import builtins
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.custom_ops.signature import Signature, listed
from autopar.errors import RuleError
from autopar.passes.rules.notation import BATCH, instantiate, parse
from autopar.passes.rules.rule import Arguments, Call, Dims, Pieces, Row, Rule

ABSENT = "-"  # in a pattern, an optional tensor that is None
KINDS = ("sum", "max", "min", "logsumexp")
_OPERATORS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


@dataclass(frozen=True, slots=True)
class Pattern:
    """One pattern of an op: the dims of each tensor argument (its text, "-" where it is None) and of the results."""

    text: str = field(compare=False)
    operands: tuple[str, ...]
    results: str

    def present(self, signature: Signature) -> list[str]:
        """The tensor arguments that are not None."""
        return [name for name, text in zip(signature.tensors, self.operands, strict=True) if text != ABSENT]

    def dims(self) -> tuple[Dims, ...]:
        """The parsed dims of the operands that are there, then of the results."""
        spec = parse(_spec(self))
        return (*spec.operands, *spec.results)

    def names(self) -> list[str]:
        """All names in it, in order; without `...`."""
        return list(dict.fromkeys(name for dims in self.dims() for dim in dims for name in dim if dim != BATCH))


@dataclass(frozen=True, slots=True)
class OwnRule:
    """What a user said of an op. Two that are equal say the same."""

    signature: Signature
    patterns: tuple[Pattern, ...]
    linear: tuple[frozenset[str], ...]
    replicated: frozenset[str]
    partial: str
    flops: str
    size_args: tuple[tuple[str, str], ...]  # (name, argument that is its size)

    def row(self) -> Row:
        return Row(self.rule, local=self._local if self.size_args else None)

    def rule(self, call: Call) -> Rule:
        """The rule of one call, by the first pattern that fits; raises RuleError if none does."""
        found, faults = self.fit(call)
        if found is not None:
            return found[1]
        shapes = [list(type_.shape) for type_ in call.operands]
        raise RuleError(
            f"'{self.signature.name}' is called with {listed(self.present(call))} of shapes {listed(shapes)}, "
            f"which fits no pattern of its rule:\n  " + "\n  ".join(faults) + "\n"
            "Register the patterns of all calls: register_rule(op, [pattern, pattern])."
        )

    def fit(self, call: Call) -> tuple[tuple[Pattern, Rule] | None, list[str]]:
        """The first pattern that fits a call, with the rule that it makes, and why those before it do not."""
        present = self.present(call)
        faults = []
        for pattern in self.patterns:
            there = pattern.present(self.signature)
            if sorted(there) != sorted(present):
                faults.append(f"'{pattern.text}' is for calls with {listed(there)}")
                continue
            try:
                return (pattern, self._instantiated(pattern, call)), faults
            except RuleError as error:
                faults.append(str(error).removeprefix(f"{call.op}: "))
        return None, faults

    def present(self, call: Call) -> list[str]:
        """The tensor arguments that a call has, in its order."""
        given = self.signature.bound(call.args, call.kwargs)
        return [name for name, value in given.items() if name in self.signature.tensors and value is not None]

    def _instantiated(self, pattern: Pattern, call: Call) -> Rule:
        present = self.present(call)
        given = self.signature.bound(call.args, call.kwargs)
        texts = dict(zip(self.signature.tensors, pattern.operands, strict=True))
        spec = f"{', '.join(texts[name] for name in present)} -> {pattern.results}"
        known = set(pattern.names())
        sizes = {name: self._argument(argument, given) for name, argument in self.size_args if name in known}
        linear = [frozenset(present.index(name) for name in one if name in present) for one in self.linear]
        rule = instantiate(
            spec, call, replicated=self.replicated & (known | {"..."}), partial=self.partial, sizes=sizes,
            linear=[one for one in dict.fromkeys(linear) if one],
        )  # fmt: skip
        _check_batch(spec, pattern, call)
        if not self.flops:
            return rule
        batch = math.prod(size for name, size in rule.sizes.items() if name not in known)
        return replace(rule, flops=evaluate(self.flops, {**rule.sizes, "...": batch}))

    def _argument(self, argument: str, given: Mapping[str, Any]) -> int:
        value = given.get(argument, self.signature.defaults.get(argument))
        if not isinstance(value, int):
            raise RuleError(f"argument '{argument}' is a size by size_args, but {value!r} is no integer")
        return value

    def _local(self, pieces: Pieces) -> Arguments:
        """The arguments with the local sizes in the arguments that are sizes."""
        args, kwargs = list(pieces.call.args), dict(pieces.call.kwargs)
        for name, argument in self.size_args:
            if name not in pieces.sizes:
                continue
            at = self.signature.positional.index(argument) if argument in self.signature.positional else len(args)
            if at < len(args):
                args[at] = pieces.sizes[name]
            else:
                kwargs[argument] = pieces.sizes[name]
        return tuple(args), kwargs


def _check_batch(spec: str, pattern: Pattern, call: Call) -> None:
    """Dims of `...` do not broadcast here, as they do in the rules of autopar's own: no check saw it."""
    parsed = parse(spec)
    shapes: dict[tuple[int, ...], None] = {}
    for dims, type_ in zip((*parsed.operands, *parsed.results), (*call.operands, *call.results), strict=True):
        if BATCH in dims:
            at = dims.index(BATCH)
            shapes[type_.shape[at : len(type_.shape) - (len(dims) - at - 1)]] = None
    if len(shapes) > 1:
        raise RuleError(f"'{pattern.text}': '...' is {' and '.join(str(list(shape)) for shape in shapes)}")


def evaluate(expression: str, sizes: Mapping[str, int]) -> int:
    """The value of an expression of names, `...` and integers with + - * //; raises RuleError for anything else."""
    try:
        return _value(ast.parse(expression, mode="eval").body, sizes)
    except (SyntaxError, ValueError) as error:
        what = error.args[0] if isinstance(error, ValueError) else "it does not parse"
        raise RuleError(f'flops="{expression}": {what}. Write names of sizes and numbers, e.g. "2*m*n*k".') from None
    except ZeroDivisionError:
        return 0


def _value(node: ast.expr, sizes: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.Constant(value=builtins.Ellipsis):
            return sizes["..."]
        case ast.Name(id=name):
            if name not in sizes:
                raise ValueError(f"'{name}' is no name of the pattern")
            return sizes[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, sizes), _value(right, sizes))
    raise ValueError(f"cannot read '{ast.unparse(node)}'")


def parse_pattern(text: object, signature: Signature, replicated: frozenset[str] = frozenset()) -> Pattern:
    """Read one pattern and see that it fits the op; raises RuleError with all its faults, one a line."""
    if not isinstance(text, str):
        raise RuleError(f'a pattern is a string such as "b s h, h -> b s h", not {text!r}')
    left, arrow, right = text.partition("->")
    if not arrow or "->" in right:
        raise RuleError(f"\"{text}\": it has {'no' if not arrow else 'more than one'} '->'")
    operands = tuple(part.strip() for part in left.split(",")) if left.strip() else ()
    pattern = Pattern(text, operands, right.strip())
    faults = list(_counts(pattern, signature))
    try:
        pattern.dims()
    except RuleError as error:
        faults.append(str(error).removeprefix(f"'{_spec(pattern)}'").lstrip(": "))
    else:
        faults += _names(pattern, replicated)
    if faults:
        raise RuleError("\n".join(f'"{text}": {fault}' for fault in faults))
    return pattern


def _spec(pattern: Pattern) -> str:
    return f"{', '.join(one for one in pattern.operands if one != ABSENT)} -> {pattern.results}"


def _counts(pattern: Pattern, signature: Signature) -> Iterator[str]:
    if len(pattern.operands) != len(signature.tensors):
        yield (
            f"it has {len(pattern.operands)} operands, but {signature.name} has {len(signature.tensors)} tensor "
            f"arguments: {listed(signature.tensors)}"
        )
    else:
        for name, part in zip(signature.tensors, pattern.operands, strict=True):
            if part == ABSENT and name not in signature.optional:
                yield f"'-' stands for None, but argument '{name}' is always a tensor"
    results = pattern.results.count(",") + 1
    if results != signature.results:
        yield f"it has {results} results, but {signature.name} returns {signature.results}"


def _names(pattern: Pattern, replicated: frozenset[str]) -> Iterator[str]:
    count = sum(one != ABSENT for one in pattern.operands)
    tensors = pattern.dims()
    read = {name for dims in tensors[:count] for dim in dims for name in dim}
    for dims in tensors:
        names = [name for dim in dims for name in dim]
        for name in dict.fromkeys(names):
            if names.count(name) > 1:
                yield f"'{name}' stands twice in one tensor"
            if not name.isidentifier() and name != "...":
                yield f"'{name}' is neither a name nor 1"
            if name == "..." and ("...",) not in dims:
                yield "'...' cannot stand in parentheses"
    for name in dict.fromkeys(name for dims in tensors[count:] for dim in dims for name in dim):
        if name not in read | replicated:
            yield f"'{name}' is only in a result, so that no operand is split with it: say replicated=('{name}',)"
