"""`register_rule`: how the custom ops may be split. The one registry of autopar.

Everything else here is passed along. But what an op is, torch keeps for the whole process, and so its rule is kept for
the whole process too: in `CUSTOM_OPS`, which only `compiler.lower` (for the plan of the passes) and `compiled.load`
(for the ops that a saved program may name) read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from torch import fx

from autopar.custom_ops.check_rule import Examples, Op, check_rule
from autopar.custom_ops.rule_row import KINDS, OwnRule, Pattern, evaluate, parse_pattern
from autopar.custom_ops.signature import Signature, find_op, listed
from autopar.errors import RuleError, WrongRule
from autopar.ir.program import Program, record
from autopar.passes.rules import Table, call_of


@dataclass(frozen=True, slots=True)
class Registered:
    """A rule that was checked and is in use. gradients: False for an op without an autograd formula."""

    rule: OwnRule
    op: Op
    examples: Examples
    gradients: bool

    def __str__(self) -> str:
        patterns = ", ".join(f'"{pattern.text}"' for pattern in self.rule.patterns)
        what = "results and gradients" if self.gradients else "results (it has no autograd formula)"
        return f"{self.rule.signature.name} {patterns}: {what} checked"


@dataclass(slots=True)
class CustomOps:
    """Rules by the name that graphs have for the op, e.g. "mylib.norm.default"."""

    rules: dict[str, Registered] = field(default_factory=dict)
    checked: set[tuple[str, str]] = field(default_factory=set)  # (op, values of arguments) besides the examples

    def rows(self) -> Table:
        """The rules as rows of the table, by op."""
        return MappingProxyType({op: one.rule.row() for op, one in self.rules.items()})

    def names(self) -> frozenset[str]:
        """The ops that a saved program may name."""
        return frozenset(self.rules)


CUSTOM_OPS = CustomOps()


def register_rule(
    op: str,
    pattern: str | Sequence[str],
    *,
    linear: str | Iterable[str | Iterable[str]] = (),
    replicated: str | Iterable[str] = (),
    partial: str = "sum",
    flops: str = "",
    size_args: Mapping[str, str] | None = None,
    sizes: Mapping[str, int] | None = None,
    args: Mapping[str, Any] | None = None,
    device: str = "cpu",
    registry: CustomOps = CUSTOM_OPS,
) -> Registered:
    """Say how an op of torch.library may be split: `register_rule("mylib::norm", "b s h, h -> b s h", replicated="h")`.

    pattern: the names of the dims of each tensor argument and result (docs/custom_ops.md); several if it is called in
      several ways. A name that a result lacks leaves it partial: to be summed, or as `partial` says.
    linear: sets of tensor arguments (a name alone is a set of one) through which partial sums pass:
      f(a1 + a2, b) = f(a1, b) + f(a2, b).
    replicated: names that must not be split. flops: of the whole call, e.g. "2*m*n*k": makes it a matrix product, whose
      weights tp splits. size_args: names whose size is an integer argument, e.g. {"n": "heads"}; a piece gets its own.
    sizes, args, device: what the check runs on: sizes of names; values of other arguments, and for tensors a dtype
      (else float64) or a function of the shape.

    The op is run on small random operands, whole and in pieces. WrongRule says which name is not splittable, with both
    values; RuleError, what is wrong with the pattern. The same rule may be registered again, another one not.
    """
    found, signature = find_op(op)
    if not isinstance(pattern, (str, list, tuple)):
        raise RuleError(f'a pattern is a string such as "b s h, h -> b s h", or several of them, not {pattern!r}.')
    own = _own_rule(signature, pattern, linear, replicated, partial, flops, size_args or {})
    examples = Examples(dict(sizes or {}), dict(args or {}), device)
    _raise(own.signature, list(examples.faults(own)))
    known = registry.rules.get(signature.op)
    if known is not None:
        if known.rule != own:
            old, new = _said(known.rule), _said(own)
            raise RuleError(f"{op} has another rule already: {old}; now {new}. An op has one rule in a process.")
        return known
    registry.rules[signature.op] = Registered(own, found, examples, check_rule(own, found, examples))
    return registry.rules[signature.op]


def check_calls(program: Program, registry: CustomOps = CUSTOM_OPS) -> Program:
    """Check the rules of a program's custom ops for the values that its calls have in integers, flags and words.

    A rule that holds for one `dim` need not hold for another. Raises RuleError with the line of the call. Values with
    which the op cannot be run on small operands become a note. (Numbers such as an eps are not looked at.)
    """
    notes = []
    for node in program.calls():
        known = registry.rules.get(str(node.target))
        values = {} if known is None else _values(known, node)
        key = (str(node.target), repr(values))
        if known is None or not values or key in registry.checked:
            continue
        found, _ = known.rule.fit(call_of(node))
        if found is None:
            continue  # the search says so
        said = ", ".join(f"{name}={value!r}" for name, value in values.items())
        examples = replace(known.examples, args={**known.examples.args, **values})
        try:
            check_rule(replace(known.rule, patterns=(found[0],)), known.op, examples)
        except WrongRule as error:
            raise WrongRule(f"With {said}, as at {record(node).source}: {error}") from None
        except RuleError as error:
            notes.append(f"the rule of {known.rule.signature.name} is not checked for {said}: {error}".split("\n")[0])
        registry.checked.add(key)
    return program.with_(notes=(*program.notes, *notes))


def _values(known: Registered, node: fx.Node) -> dict[str, Any]:
    """The arguments of a call that may change what the op does, where they are not those of the examples."""
    signature, values = known.rule.signature, {}
    sizes = {argument for _, argument in known.rule.size_args}
    for name, value in signature.bound(node.args, node.kwargs).items():
        example = known.examples.args.get(name, signature.defaults.get(name))
        plain = isinstance(value, (bool, int, str, list, tuple)) and not isinstance(example, float)
        if plain and name in signature.others and name not in sizes and value != example:
            values[name] = value
    return values


def _said(own: OwnRule) -> str:
    options = {
        "linear": [sorted(one) for one in own.linear], "replicated": sorted(own.replicated), "flops": own.flops,
        "size_args": dict(own.size_args), "partial": "" if own.partial == "sum" else own.partial,
    }  # fmt: skip
    patterns = " and ".join(f'"{pattern.text}"' for pattern in own.patterns)
    return ", ".join([patterns, *(f"{key}={value!r}" for key, value in options.items() if value)])


def _own_rule(
    signature: Signature, pattern: str | Sequence[str], linear: str | Iterable[str | Iterable[str]],
    replicated: str | Iterable[str], partial: str, flops: str, size_args: Mapping[str, str],
) -> OwnRule:  # fmt: skip
    """What was said, read; raises RuleError with all faults."""
    marks = frozenset(_several(replicated))
    sets = tuple(frozenset(_several(one)) for one in _several(linear))
    patterns: list[Pattern] = []
    faults: list[str] = []
    texts = (pattern,) if isinstance(pattern, str) else tuple(pattern)
    for text in texts:
        try:
            patterns.append(parse_pattern(text, signature, marks))
        except RuleError as error:
            faults += str(error).splitlines()
    if not texts:
        faults.append('give at least one pattern, e.g. "b s h, h -> b s h".')
    own = OwnRule(
        signature, tuple(patterns), tuple(dict.fromkeys(sets)), marks, partial, flops, tuple(size_args.items())
    )
    if not faults:
        faults += _option_faults(own)
    _raise(signature, faults)
    return own


def _option_faults(own: OwnRule) -> Iterator[str]:
    signature, names = own.signature, list(dict.fromkeys(name for one in own.patterns for name in one.names()))
    for name in sorted(own.replicated - {*names, "..."}):
        yield f"replicated names '{name}', which the pattern has not; it has {listed(names)}."
    for name in sorted(frozenset().union(*own.linear) - {*signature.tensors}):
        yield f"linear names '{name}', which is no tensor argument; these are {listed(signature.tensors)}."
    if own.partial not in KINDS:
        yield f"partial='{own.partial}' is no kind of partial result; these are {listed(KINDS)}."
    for name, argument in own.size_args:
        if name not in names:
            yield f"size_args names '{name}', which the pattern has not; it has {listed(names)}."
        if argument not in signature.others:
            yield f"size_args: '{argument}' is no argument that could be a size; these are {listed(signature.others)}."
    for pattern in own.patterns if own.flops else ():
        try:
            evaluate(own.flops, dict.fromkeys([*pattern.names(), "..."], 2))
        except RuleError as error:
            yield str(error)


def _several(items: Any) -> tuple[Any, ...]:
    return (items,) if isinstance(items, str) else tuple(items)


def _raise(signature: Signature, faults: Sequence[str]) -> None:
    if faults:
        raise RuleError(f"the rule of {signature.name} cannot be read:\n" + "\n".join(f"  {fault}" for fault in faults))
