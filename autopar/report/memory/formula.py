"""Rules of thumb that come out of programs: bytes of states a parameter, bytes of activations as a polynomial.

Nothing here knows a model. A program is compiled at a few sizes, what it holds is counted, and the polynomial through
the counts is solved for exactly, in fractions; one more size than it takes checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch

from autopar.compiler.lowered import Lowered
from autopar.errors import PlanError
from autopar.ir.modules import unit_of
from autopar.ir.program import record
from autopar.report.memory.report import GRADIENTS, PARAMETERS, STATES
from autopar.report.memory.simulate_rank import GPU_DEVICE, OptimizerMaker, Trace, simulate

Sizes = Mapping[str, int]
WHOLE = "all of the model"


@dataclass(frozen=True, slots=True)
class Formula:
    """What is counted, its polynomial, and its value at the sizes of the example. count: how many are like it."""

    name: str
    expression: sympy.Expr
    value: int
    count: int = 1

    def __str__(self) -> str:
        times = f" ({self.count} alike)" if self.count > 1 else ""
        return f"{self.name}{times}: {sympy.sstr(self.expression, order='grlex')} = {self.value:,} bytes"


def fit(
    counts: Callable[[Sizes], int], symbols: Sequence[str], monomials: Sequence[str], points: Sequence[Sizes]
) -> sympy.Expr:
    """The combination of monomials that gives the counts at all points: one for each monomial, and some to check.

    Raises PlanError where there is none: the count is another function of the sizes.
    """
    names = {symbol: sympy.Symbol(symbol, positive=True) for symbol in symbols}
    terms = [sympy.sympify(monomial, locals=names) for monomial in monomials]
    rows = [[term.subs({names[key]: size for key, size in point.items()}) for term in terms] for point in points]
    values = [counts(point) for point in points]
    unknown = sympy.symbols(f"c0:{len(terms)}")
    found = sympy.linsolve((sympy.Matrix(rows), sympy.Matrix(values)), *unknown)
    if not found or any(value.free_symbols for value in next(iter(found))):
        shown = "; ".join(f"{dict(point)}: {value:,}" for point, value in zip(points, values, strict=True))
        raise PlanError(f"no sum of {', '.join(monomials)} gives these bytes ({shown}). Other sizes may: vary fewer.")
    return sympy.expand(sum(factor * term for factor, term in zip(next(iter(found)), terms, strict=True)))


def states_formula(
    compiled: Lowered, rank: int = 0, optimizer: OptimizerMaker | None = None, device: str = GPU_DEVICE
) -> Formula:
    """Bytes of parameters, gradients and optimizer states, in P parameters that lie in T tensors of a rank."""
    trace = _count(compiled, rank, optimizer, device)
    sizes = [size for size in trace.parameters if size]
    bytes_ = {PARAMETERS: 0, GRADIENTS: trace.gradient_bytes, STATES: 0}
    steps = 0  # the optimizer's states that are no part of a parameter's size
    for block in trace.tracker.alive(trace.start - 1):
        if block.kind == STATES and block.name.startswith("step of "):
            steps += block.bytes
        elif block.kind in bytes_:
            bytes_[block.kind] += block.bytes
    per = {kind: sympy.Rational(total, max(sum(sizes), 1)) for kind, total in bytes_.items()}
    tensors, elements = sympy.symbols("T P", positive=True)
    expression = sum(per.values()) * elements + sympy.Rational(steps, max(len(trace.parameters), 1)) * tensors
    parts = " + ".join(f"{per[kind]} {kind}" for kind in bytes_)
    name = f"states ({parts}), P = {sum(sizes):,} parameters in T = {len(trace.parameters)} tensors"
    return Formula(name, sympy.expand(expression), sum(bytes_.values()) + steps)


def saved_by_module(compiled: Lowered, rank: int = 0, device: str = GPU_DEVICE) -> dict[str, int]:
    """Bytes that the forward pass leaves to the backward pass, by layer: a module's path up to its first number."""
    trace, saved = _count(compiled, rank, None, device), {WHOLE: 0}
    for block in sorted(trace.saved, key=lambda block: block.born):
        node = getattr(block.place, "node", None)
        layer = unit_of(record(node).module) if node is not None else "received from other stages"
        saved[layer] = saved.get(layer, 0) + block.bytes
        saved[WHOLE] += block.bytes
    return saved


def activation_formulas(
    build: Callable[[Sizes], Lowered],
    symbols: Sequence[str],
    monomials: Sequence[str],
    points: Sequence[Sizes],
    rank: int = 0,
    device: str = GPU_DEVICE,
) -> list[Formula]:
    """A polynomial for each layer and for all; the last of the points is the example. Layers alike are one."""
    samples = [saved_by_module(build(point), rank, device) for point in points]
    index = {tuple(sorted(point.items())): i for i, point in enumerate(points)}
    formulas: list[Formula] = []
    for layer in samples[-1]:

        def counts(point: Sizes, layer: str = layer) -> int:
            return samples[index[tuple(sorted(point.items()))]].get(layer, 0)

        expression = fit(counts, symbols, monomials, points)
        formulas.append(Formula(layer or "outside of modules", expression, counts(points[-1])))
    return _alike(formulas)


def _alike(formulas: list[Formula]) -> list[Formula]:
    by: dict[tuple[str, sympy.Expr], list[Formula]] = {}
    for each in formulas:
        kind = ".".join("*" if part.isdigit() else part for part in each.name.split("."))
        by.setdefault((kind, each.expression), []).append(each)
    return [Formula(group[0].name, expression, group[0].value, len(group)) for (_, expression), group in by.items()]


def _count(compiled: Lowered, rank: int, optimizer: OptimizerMaker | None, device: str) -> Trace:
    """Without an allocator's rounding."""
    return simulate(compiled, rank, optimizer or torch.optim.AdamW, device, grain=1)
