"""A rule checked by brute force: run the op on pieces, put the results together, compare with the whole.

For the rows of the table (tests/passes/test_rules.py), for the rules of custom ops (check_rule.py), and for rows that
are wrong on purpose, which it must refuse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import WrongRule
from autopar.ir.layout import Factor, Layout, combine, is_mirrored, local_part, local_shape, replica_error
from autopar.ir.mesh import Mesh
from autopar.ir.program import TensorType
from autopar.passes.rules import Table, local_call, rule_of
from autopar.passes.rules.rule import Arguments, Call, Dims, Halo, Reading, Row, Rule, allows, starts_of

Tensors = list[torch.Tensor]
Split = tuple[str, int, int]  # (name, pieces, outer)
Cuts = dict[str, list[tuple[str, int, int]]]  # name -> (axis, pieces, outer)


@dataclass(frozen=True, slots=True)
class OpTrial:
    """One call of an op with its rule; `compare=False` if its values mean nothing (empty)."""

    call: Call
    row: Row
    rule: Rule
    operands: Tensors
    results: Tensors
    function: Callable[..., Any]
    compare: bool = True

    def run(self, arguments: Arguments, operands: Tensors) -> Tensors:
        """The results for other operands, put where tensors stand in `arguments`."""
        args, kwargs = with_tensors([list(arguments[0]), dict(arguments[1])], list(operands))
        return tensors_in([self.function(*args, **kwargs)])


def make_call(
    op: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Call, Tensors, Tensors]:
    """The call with its operands and its results."""
    operands = tensors_in([args, kwargs])
    results = tensors_in([function(*args, **kwargs)])
    types = [[TensorType(tuple(t.shape), t.dtype) for t in tensors] for tensors in (operands, results)]
    return Call(op, tuple(args), kwargs, tuple(types[0]), tuple(types[1])), operands, results


def make_trial(
    op: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    table: Table,
    compare: bool = True,
) -> OpTrial:
    """A call of `function`, which computes `op`, with the rule of the table."""
    call, operands, results = make_call(op, function, args, kwargs)
    pair = rule_of(call, table)
    assert pair is not None, op
    check_shapes(pair[0], call)
    return OpTrial(call, pair[1], pair[0], operands, results, function, compare)


def tensors_in(value: Any) -> Tensors:
    """Tensors in the order of `operand_nodes`."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [one for item in value for one in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def with_tensors(value: Any, tensors: Tensors) -> Any:
    """`value` with its tensors replaced, in order; `tensors` is used up."""
    if isinstance(value, torch.Tensor):
        return tensors.pop(0)
    if isinstance(value, (list, tuple)):
        return type(value)(with_tensors(item, tensors) for item in value)
    if isinstance(value, dict):
        return {key: with_tensors(item, tensors) for key, item in value.items()}
    return value


def check_shapes(rule: Rule, call: Call) -> None:
    """The names of each dim multiply to its size; no dim has a name of size 1."""
    tensors = (*rule.operands, *rule.results)
    types = (*call.operands, *call.results)
    if len(tensors) != len(types) or len(rule.operands) != len(call.operands):
        raise WrongRule(f"{call.op}: the rule has {len(tensors)} tensors, the call {len(types)}")
    for dims, type_ in zip(tensors, types, strict=True):
        sizes = tuple(math.prod(rule.sizes[name] for name in dim) for dim in dims)
        if sizes != type_.shape or any(rule.sizes[name] == 1 for dim in dims for name in dim):
            raise WrongRule(f"{call.op}: {dims} with {dict(rule.sizes)} is not {type_.shape}")


def splits_of(rule: Rule, name: str, counts: Sequence[int] = (2, 3), outers: Sequence[int] = (1, 2, -2)) -> list[Split]:
    """The ways to split a name that are tried: none along which pieces are computed one after the other, each with
    what the one before it ends with (tests/runtime/test_turns.py has those)."""
    if name == rule.turns:
        return []
    return [(name, n, outer) for n in counts for outer in outers if allows(rule, name, n, outer)]


def pair_up(splits: Sequence[Split]) -> list[tuple[Split, Split]]:
    """Some of the splits, two at once: of two names, and one within the other."""
    found = []
    for i, one in enumerate(splits):
        for other in splits[i + 1 :]:
            apart = one[0] != other[0] and (one[1:], other[1:]) in (((2, 1), (2, 1)), ((3, 1), (2, 2)))
            nested = one[0] == other[0] and other[2] == one[1] == other[1] and one[2] == 1
            if apart or nested:
                found.append((one, other))
    return found


def name_factors(size: int, cuts: Sequence[tuple[str, int, int]]) -> tuple[Factor, ...]:
    """A name of `size`, cut on axes with (axis, pieces, outer), written out to its last factor."""
    factors: list[Factor] = []
    position = 1
    for axis, pieces, outer in sorted(cuts, key=lambda cut: abs(cut[2])):
        blocks, left = divmod(abs(outer), position)
        assert not left
        if blocks > 1:
            factors.append(-blocks if outer < 0 else blocks)
        factors.append(axis)
        position = abs(outer) * pieces
    return (*factors, size // position)


def layout_of(dims: Dims, rule: Rule, cuts: Cuts, partial: str | None) -> Layout:
    """The layout of a tensor when these names are cut; axes of names that it lacks are partial, if given a kind."""
    layout = []
    for dim in dims:
        factors: list[Factor] = []
        for name in dim:
            for factor in name_factors(rule.sizes[name], cuts.get(name, ())):
                if isinstance(factor, int) and factors and isinstance(factors[-1], int):
                    factors[-1] *= factor
                elif factor != 1:
                    factors.append(factor)
        while factors and isinstance(factors[-1], int):
            factors.pop()
        layout.append(tuple(factors))
    own = {name for dim in dims for name in dim}
    lost = {axis for name, cut in cuts.items() if name not in own for axis, _, _ in cut}
    return Layout(tuple(layout), tuple((axis, partial) for axis in sorted(lost)) if partial else ())


def _reading(size: int, cuts: Sequence[tuple[str, int, int]], mesh: Mesh, coord: Mapping[str, int]) -> Reading:
    factors = name_factors(size, cuts)
    return tuple(
        (abs(f), abs(f), 0)
        if isinstance(f, int)
        else (-mesh[f] if is_mirrored(factors, place) else mesh[f], 1, coord[f])
        for place, f in enumerate(factors)
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """A trial whose names are cut, each on axes of its own; several cuts of one name nest as their `outer` say."""

    trial: OpTrial
    splits: Sequence[Split]
    mesh: Mesh
    cuts: Cuts
    wanted: list[Layout]  # of the operands
    layouts: list[Layout]  # of the results

    def shapes(self) -> list[tuple[int, ...]]:
        """The local shapes of the results."""
        results = zip(self.trial.results, self.layouts, strict=True)
        return [local_shape(tuple(r.shape), lay, self.mesh) for r, lay in results]

    def halos(self) -> list[tuple[Halo, int]]:
        """The halos of the names that are cut, with the number of runs of consecutive rows in the whole."""
        rule, halos = self.trial.rule, []
        for halo in rule.halos:
            if halo.name in self.cuts:
                *outer, _ = name_factors(rule.sizes[halo.name], self.cuts[halo.name])
                halos.append((halo, math.prod(self.mesh[f] if isinstance(f, str) else abs(f) for f in outer)))
        return halos

    def arguments(self, coord: Mapping[str, int]) -> Arguments:
        """The arguments of a piece, but for the tensors."""
        rule = self.trial.rule
        sizes = {name: size // math.prod(n for _, n, _ in self.cuts.get(name, ())) for name, size in rule.sizes.items()}
        offset = None
        for name in rule.indexed & self.cuts.keys():
            ((axis, _, outer),) = self.cuts[name]
            assert outer == 1
            offset = coord[axis] * sizes[name]
        readings = {name: _reading(rule.sizes[name], cut, self.mesh, coord) for name, cut in self.cuts.items()}
        starts = [
            first + sum(factor * place for factor, place in terms)
            for name in rule.positional & readings.keys()
            for first, terms in starts_of(readings[name])
        ]
        return local_call(self.trial.call, self.trial.row, rule, self.shapes(), sizes, offset, readings, starts)

    def operands(self, coord: Mapping[str, int]) -> Tensors:
        """One rank's pieces of the operands."""
        whole = list(self.trial.operands)
        for halo, runs in self.halos():
            for i in halo.operands:
                whole[i] = with_halo(whole[i], halo.dim(self.trial.rule.operands[i]), runs, halo)
        pairs = zip(whole, self.wanted, strict=True)
        return [local_part(tensor, lay, self.mesh, coord).clone() for tensor, lay in pairs]

    def combine(self, i: int, parts: Tensors) -> torch.Tensor:
        """Result `i` of the whole, of which the ranks hold `parts`."""
        found = combine(parts, self.layouts[i], self.mesh)
        for halo, runs in self.halos():
            if i in halo.results:
                found = sum_of_halos(found, halo.dim(self.trial.rule.results[i]), runs, halo)
        scan = self.trial.rule.scan
        if scan and scan[0] in self.cuts:
            *outer, _ = name_factors(self.trial.rule.sizes[scan[0]], self.cuts[scan[0]])
            runs = math.prod(self.mesh[f] if isinstance(f, str) else abs(f) for f in outer)
            at, factor = self.trial.rule.results[i].index(scan[:1]), self.trial.rule.factor
            by = None if factor is None else self.trial.operands[factor]
            found = with_sums_before(found, at, runs, scan[1], by)
        return found

    def __str__(self) -> str:
        return " and ".join(
            f"'{name}' (size {self.trial.rule.sizes[name]}) in {n} pieces"
            + (f" of each {abs(outer)}th" * (outer != 1) + " mirrored" * (outer < 0))
            for name, n, outer in self.splits
        )


def with_halo(x: torch.Tensor, dim: int, runs: int, halo: Halo) -> torch.Tensor:
    """A dim as so many runs of consecutive rows, one behind the other, each with the rows before and after it."""
    long = x.shape[dim] // runs
    if halo.wrap:
        rows = torch.arange(-halo.before, x.shape[dim] + halo.after, device=x.device) % x.shape[dim]
        padded = x.index_select(dim, rows)
    else:
        padded = torch.constant_pad_nd(x, [*[0] * 2 * (x.ndim - 1 - dim), halo.before, halo.after])
    return torch.cat([padded.narrow(dim, i * long, halo.before + long + halo.after) for i in range(runs)], dim)


def sum_of_halos(x: torch.Tensor, dim: int, runs: int, halo: Halo) -> torch.Tensor:
    """The transpose of `with_halo`."""
    shape = list(x.shape)
    shape[dim] -= runs * (halo.before + halo.after)
    leaf = x.new_zeros(shape, requires_grad=True)
    with torch.enable_grad():
        (found,) = torch.autograd.grad(with_halo(leaf, dim, runs, halo), leaf, x)
    return found


def with_sums_before(
    x: torch.Tensor, dim: int, runs: int, reverse: bool, factor: torch.Tensor | None = None
) -> torch.Tensor:
    """The running sum of the whole, of which each run of consecutive rows holds its own. factor: what each row
    multiplies the sum before it by."""
    if reverse:
        return with_sums_before(x.flip(dim), dim, runs, False, None if factor is None else factor.flip(dim)).flip(dim)
    parts = list(x.unflatten(dim, (runs, -1)).unbind(dim))
    for i in range(1, runs):
        before = parts[i - 1].select(dim, -1).unsqueeze(dim)
        if factor is not None:
            before = before * factor.unflatten(dim, (runs, -1)).select(dim, i).cumprod(dim)
        parts[i] = parts[i] + before
    return torch.cat(parts, dim)


def cut(trial: OpTrial, splits: Sequence[Split]) -> Cut:
    """Cut names of a trial."""
    rule = trial.rule
    axes = [f"x{i}" for i in range(len(splits))]
    mesh = Mesh(tuple((axis, n) for axis, (_, n, _) in zip(axes, splits, strict=True)))
    cuts: Cuts = {}
    for axis, (name, n, outer) in zip(axes, splits, strict=True):
        cuts.setdefault(name, []).append((axis, n, outer))
    read = {name for dims in rule.operands for dim in dims for name in dim}
    # A name that no operand has leaves nothing partial: a result without it is the same on all ranks.
    summed = {name: cut for name, cut in cuts.items() if name in read}
    wanted = [layout_of(dims, rule, cuts, None) for dims in rule.operands]
    layouts = [
        Layout(layout_of(dims, rule, cuts, None).dims, layout_of(dims, rule, summed, rule.partial).partial)
        for dims in rule.results
    ]
    return Cut(trial, splits, mesh, cuts, wanted, layouts)


def check_split(trial: OpTrial, splits: Sequence[Split]) -> None:
    """The results of the pieces are those of the whole; raises WrongRule."""
    whole = cut(trial, splits)
    shapes = whole.shapes()
    for halo, runs in whole.halos():
        for i in halo.results:
            dim, ranks = halo.dim(trial.rule.results[i]), math.prod(n for _, n, _ in whole.cuts[halo.name])
            more = runs // ranks * (halo.before + halo.after)
            shapes[i] = (*shapes[i][:dim], shapes[i][dim] + more, *shapes[i][dim + 1 :])
    parts: list[Tensors] = [[] for _ in trial.results]
    for coord in whole.mesh.coords():
        made = trial.run(whole.arguments(coord), whole.operands(coord))
        if [tuple(t.shape) for t in made] != shapes:
            raise WrongRule(f"{whole}: results of shapes {[tuple(t.shape) for t in made]}, not {shapes}")
        for into, tensor in zip(parts, made, strict=True):
            into.append(tensor)
    for i, (expected, lay) in enumerate(zip(trial.results, whole.layouts, strict=True)):
        if trial.compare:
            error = replica_error(parts[i], lay, whole.mesh)
            if error > 1e-10:
                raise WrongRule(f"{whole}: result {i} {lay} differs between pieces by {error}")
            compare(whole.combine(i, parts[i]), expected, f"{whole}: result {i}")


def check_gradients(trial: OpTrial, splits: Sequence[Split], seeds: Tensors, gradients: Sequence[Any]) -> None:
    """The gradients of the operands, from pieces, are those of the whole, which `seeds` of the results give.

    An operand that lacks a name has the sum of its pieces' gradients. Only for results that are sums.
    """
    whole = cut(trial, splits)
    parts: list[Tensors] = [[] for _ in trial.operands]
    for coord in whole.mesh.coords():
        pieces = zip(seeds, whole.layouts, strict=True)
        local = [local_part(seed, Layout(lay.dims), whole.mesh, coord) for seed, lay in pieces]
        found = gradients_of(trial, whole.arguments(coord), whole.operands(coord), local)
        assert found is not None
        for into, gradient, operand in zip(parts, found, whole.operands(coord), strict=True):
            into.append(torch.zeros_like(operand) if gradient is None else gradient)
    for i, (expected, dims) in enumerate(zip(gradients, trial.rule.operands, strict=True)):
        if expected is not None:
            lay = layout_of(dims, trial.rule, whole.cuts, "sum")
            compare(combine(parts[i], lay, whole.mesh), expected, f"{whole}: the gradient of operand {i}")


def gradients_of(trial: OpTrial, arguments: Arguments, operands: Tensors, seeds: Tensors) -> list[Any] | None:
    """The gradients that `seeds` of the results give the operands; None if nothing leads from one to the other."""
    leaves = [operand.detach().requires_grad_(operand.is_floating_point()) for operand in operands]
    results = trial.run(arguments, leaves)
    pairs = [(result, seed) for result, seed in zip(results, seeds, strict=True) if result.requires_grad]
    if not pairs:
        return None
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    made = iter(torch.autograd.grad([r for r, _ in pairs], wanted, [s for _, s in pairs], allow_unused=True))
    return [next(made) if leaf.requires_grad else None for leaf in leaves]


def check_linear(trial: OpTrial, which: frozenset[int]) -> bool:
    """Random partial sums of the operands in `which` give partial sums of the results. False if not applicable."""
    if any(not (trial.operands[i].is_floating_point() or trial.operands[i].is_complex()) for i in which):
        return False
    parts: list[Tensors] = [[], []]
    for i, operand in enumerate(trial.operands):
        share = torch.rand_like(operand) * 2 - 0.5 if i in which else None
        parts[0].append(operand if share is None else share)
        parts[1].append(operand if share is None else operand - share)
    arguments = trial.call.args, dict(trial.call.kwargs)
    made = [trial.run(arguments, part) for part in parts]
    for i, expected in enumerate(trial.results):
        compare(made[0][i] + made[1][i], expected, f"result {i}")
    return True


def compare(found: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    """Raise WrongRule, with the first two values that differ."""
    if found.shape != expected.shape:
        raise WrongRule(f"{where}: shape {list(found.shape)} from the pieces, {list(expected.shape)} from the whole")
    found = found.to(expected.dtype)
    if expected.dtype.is_floating_point or expected.dtype.is_complex:
        tolerance = max(1e-10, 10 * torch.finfo(expected.dtype).eps)
        good = torch.isclose(found, expected, tolerance, tolerance, equal_nan=True)
    else:
        good = found == expected
    if not bool(good.all()):
        first = tuple(int(i) for i in (~good).nonzero()[0])
        values = f"{_number(found[first])} from the pieces, {_number(expected[first])} from the whole"
        raise WrongRule(f"{where} at {list(first)}: {values}")


def _number(value: torch.Tensor) -> str:
    number = value.item()
    return f"{number:.6g}" if isinstance(number, float) else str(number)
