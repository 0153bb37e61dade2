"""The notation of rules: `"... m k, k n -> ... m n"`.

Operands and results are separated by commas, dims by spaces. `(k g)` is a dim made of k (major) and g, `1` a dim
of size 1, `...` any number of dims, the same wherever it stands (sizes of 1 in it broadcast). A rule never names a
dim of size 1, so names that turn out to have size 1 are left out.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import RuleError
from autopar.passes.rules.rule import Call, Dim, Dims, Halo, Rule

BATCH: Dim = ("...",)
_DIM = re.compile(r"\(([^()]*)\)|(\.\.\.|\w+)")


@dataclass(frozen=True, slots=True)
class Spec:
    """A parsed spec; `BATCH` stands for the dims of `...`."""

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]


@functools.cache
def parse(spec: str) -> Spec:
    """Read a spec. Nothing before the arrow means no operands; nothing between commas means a 0-dim tensor.

    Raises RuleError for what cannot be read.
    """
    left, arrow, right = spec.partition("->")
    _require(bool(arrow), f"'{spec}' has no '->'")
    operands = tuple(_parse_dims(part, spec) for part in left.split(",")) if left.strip() else ()
    return Spec(operands, tuple(_parse_dims(part, spec) for part in right.split(",")))


def _parse_dims(text: str, spec: str) -> Dims:
    _require(not _DIM.sub("", text).strip(), f"'{spec}': cannot read '{text.strip()}'")
    dims = []
    for compound, single in _DIM.findall(text):
        names = tuple(compound.split()) if compound else (single,)
        dims.append(() if names == ("1",) else names)
    _require(dims.count(BATCH) <= 1, f"'{spec}' has two '...' in one tensor")
    return tuple(dims)


def _require(good: bool, what: str) -> None:
    if not good:
        raise RuleError(what)


def instantiate(
    spec: str,
    call: Call,
    *,
    replicated: Iterable[str] = (),
    linear: Sequence[Iterable[int]] = (),
    partial: str = "sum",
    indexed: Iterable[str] = (),
    positional: Iterable[str] = (),
    growing: Iterable[str] = (),
    sizes: Mapping[str, int] | None = None,
    flops: int = 0,
    halos: Sequence[Halo] = (),
) -> Rule:
    """The rule that a spec gives for one call. `replicated` may hold `...`; `sizes` those no dim tells (of `(g i)`).

    Raises RuleError if the call does not fit.
    """
    parsed = parse(spec)
    types = (*call.operands, *call.results)
    fits = len(parsed.operands) == len(call.operands) and len(parsed.results) == len(call.results)
    if not fits:
        has = f"{len(call.operands)} operands and {len(call.results)} results"
        raise RuleError(f"{call.op}: '{spec}' does not have its {has}")
    shapes = [type_.shape for type_ in types]
    # `...` stands for as many names as the shape has dims more than the spec.
    expanded = []
    batch: dict[str, None] = {}
    for dims, shape in zip((*parsed.operands, *parsed.results), shapes, strict=True):
        names = _batch_names(dims, len(shape)) if BATCH in dims else ()
        at = dims.index(BATCH) if BATCH in dims else 0
        tensor = (*dims[:at], *((name,) for name in names), *dims[at + 1 :]) if BATCH in dims else dims
        if len(tensor) != len(shape):
            raise RuleError(f"{call.op}: '{spec}' does not fit a shape of {tuple(shape)}")
        if batch and names and len(batch) != len(names):
            raise RuleError(f"{call.op}: '{spec}': '...' of two lengths")
        batch.update(dict.fromkeys(names))
        expanded.append(tensor)
    # Sizes of the names, of which compound dims (c n) tell only the product.
    known = _solve(expanded, shapes, dict(sizes or {}), batch, f"{call.op}: '{spec}'")
    # A dim of size 1 is never split: it has no name.
    named = [
        tuple(
            () if size == 1 else dim if len(dim) == 1 else tuple(name for name in dim if known[name] != 1)
            for dim, size in zip(dims, shape, strict=True)
        )
        for dims, shape in zip(expanded, shapes, strict=True)
    ]
    marks = frozenset(replicated)
    if "..." in marks:
        marks = marks - {"..."} | frozenset(batch)
    count = len(call.operands)
    return Rule(
        operands=tuple(named[:count]),
        results=tuple(named[count:]),
        sizes=known,
        replicated=marks,
        partial=partial,
        linear=tuple(frozenset(one) for one in linear),
        indexed=frozenset(indexed),
        positional=frozenset(positional),
        growing=frozenset(growing),
        flops=flops,
        halos=tuple(halos),
    )


@functools.cache
def _batch_names(dims: Dims, ndim: int) -> tuple[str, ...]:
    return tuple(f"b{i}" for i in range(ndim - len(dims) + 1))


def _solve(
    tensors: list[Dims],
    shapes: list[tuple[int, ...]],
    known: dict[str, int],
    batch: Mapping[str, None],
    where: str,
) -> dict[str, int]:
    """The size of each name: from dims of one name first, then from compound dims with one unknown."""
    compounds = []
    for dims, shape in zip(tensors, shapes, strict=True):
        for dim, size in zip(dims, shape, strict=True):
            if len(dim) != 1:
                compounds.append((dim, size))
                continue
            name = dim[0]
            if name in batch:
                if 1 not in (size, known.get(name, 1)) and size != known[name]:
                    raise RuleError(f"{where}: a dim of '...' is {known[name]} and {size}")
                known[name] = max(size, known.get(name, 1)) if size else 0
            elif known.setdefault(name, size) != size:
                raise RuleError(f"{where}: '{name}' is {known[name]} and {size}")
    for dim, size in compounds:
        unknown = [name for name in dim if name not in known]
        if len(unknown) > 1:
            raise RuleError(f"{where}: no dim tells the sizes of {unknown}")
        rest = math.prod(known[name] for name in dim if name in known)
        if unknown:
            if not rest or size % rest:
                raise RuleError(f"{where}: {dim} does not divide {size}")
            known[unknown[0]] = size // rest
        elif rest != size:
            raise RuleError(f"{where}: {dim} is {rest}, not {size}")
    return known
