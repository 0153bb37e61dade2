"""Everything that both sides of a journey hold, and what of it differs: judged on each rank as `verify` judges.

A float may differ by `verify`'s tolerance for its dtype; beyond that by some times what rounding does to the plain
module, which takes the whole journey again with every result of an op off by one unit in the last place
(autopar/verification/judge/noise.py). Under a precision it may differ by twice what torch.autocast does to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.ir.layout import Layout
from autopar.parallel.tensors.padding import padded_part, without_padding
from autopar.torch_compat import local_of
from autopar.verification.judge.comparison import ComparedRow, Key, Table, Values
from autopar.verification.judge.noise import Limits, Run, Trained, judged
from benchmarks.journeys.side import Side

Leaves = dict[Key, Any]  # numbers, texts and tensors by (kind, name)
NOTHING_LEFT = "of it noise leaves nothing to compare"


# -- what a side holds ------------------------------------------------------------------------------------------------


def leaves_of(side: Side, result: Any, plain: Side) -> Leaves:
    """What a side holds after an action, by its result and by name, tensors whole: DTensors are made so by all ranks.
    plain: what other ranks hold of parameters is taken from there, so that no collective is needed for it."""
    found = {**_of_module("", side.model, plain.model), **_flat("result", "", result, side)}
    if plain.critic is not None:
        found |= _of_module("critic: ", side.critic, plain.critic)
    found |= {**_flat("average", "", side.average, side), **_flat("gradient", "seen by hooks", side.seen, side)}
    for name in ("optimizer", "critic_optimizer"):
        mine, theirs = getattr(side, name), getattr(plain, name)
        if mine is not None and theirs is not None:
            found |= _of_optimizer(f"{name}: ", side, mine, theirs)
    return found


def _of_module(label: str, model: Any, plain: nn.Module) -> Leaves:
    """Parameters, gradients, buffers and flags of a model."""
    found: Leaves = {}
    wanted = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        key, other = label + name, wanted.get(name)
        found["requires_grad", key], found["there", f"gradient of {key}"] = p.requires_grad, p.grad is not None
        if other is None:
            found["weight", key] = p.detach()
            continue
        found["weight", key] = _whole(model, name, p, other)
        if p.grad is not None and other.grad is not None:
            found["gradient", key] = _whole(model, name, p.grad, other.grad)
    found |= {("buffer", label + name): _of_all_ranks(value) for name, value in model.named_buffers()}
    modes = {name: module.training for name, module in model.named_modules()}
    return found | {("training", label + name): modes.get(name) for name, _ in plain.named_modules()}


def _whole(model: Any, name: str, mine: Any, plain: Tensor) -> Tensor:
    """The whole value of a parameter or its gradient, of which other ranks' parts are the plain one's."""
    if not hasattr(model, "_store"):
        return mine.detach()
    store, plain = model._store, plain.detach()
    if not store.distributor.is_owner(store.owners[name]):
        return plain
    part = local_of(mine.detach())
    # A gradient from before the layout was decided lies as it lay, until a step adds to it.
    layout = mine.place.layout if hasattr(mine, "place") else store.layouts[name]
    places = _part(torch.arange(plain.numel()).view(plain.shape), store, layout)
    if places.shape != part.shape:
        return part
    found = plain.clone(memory_format=torch.contiguous_format).to(part.dtype)
    found.view(-1)[places.flatten()] = part.flatten()
    return found


def _part(value: Tensor, store: Any, layout: Layout) -> Tensor:
    """What this rank should hold of a whole value in a layout."""
    where, shape = store.distributor, tuple(value.shape)
    return without_padding(padded_part(value, layout, where.mesh, where.coord), shape, layout, where.mesh, where.coord)


def _of_optimizer(label: str, side: Side, mine: Optimizer, plain: Optimizer) -> Leaves:
    """Numbers of groups, and states."""
    found: Leaves = {("there", f"{label}parameters of groups"): [len(g["params"]) for g in mine.param_groups]}
    for i, (group, other) in enumerate(zip(mine.param_groups, plain.param_groups, strict=False)):
        numbers = {key: group.get(key) for key in other if key != "params"}
        found |= _flat("group", f"{label}{i}", numbers, side)
        for j, (p, q) in enumerate(zip(group["params"], other["params"], strict=False)):
            held, wanted = mine.state.get(p, {}), plain.state.get(q, {})
            for key, value in held.items():
                known = wanted.get(key) if _is_elsewhere(p, value) else value
                found |= _flat(f"state {key!r}", f"{label}parameter {j} of group {i}", known, side)
    return found


def _is_elsewhere(parameter: Any, state: Any) -> bool:
    """True for a state of another stage that is a DTensor of torch's own: whole on the ranks of that stage alone."""
    return type(state) is DTensor and not parameter.place.is_here


def _of_all_ranks(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value.detach()


def _flat(kind: str, name: str, value: Any, side: Side) -> Leaves:
    """The leaves of a nesting, with how many each container holds."""
    if isinstance(value, Tensor):
        return {(kind, name): side.whole(value.detach())}
    if not isinstance(value, (Mapping, list, tuple)):
        return {(kind, name): value}
    items = list(value.items()) if isinstance(value, Mapping) else list(enumerate(value))
    found: Leaves = {("there", f"{kind} {name}"): len(items)}
    for key, item in items:
        found |= _flat(kind, f"{name}, {key!r}" if name else f"{key}", item, side)
    return found


# -- what differs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judge:
    """What sides may differ by. again: gives what the plain module holds when it has taken the journey again.

    dtype: of the model; short: of a precision, if any.
    """

    dtype: torch.dtype
    short: torch.dtype | None
    again: Run

    def rows(self, given: Values, expected: Values) -> tuple[ComparedRow, ...]:
        """What is compared, right or wrong."""
        dtype = self.short or self.dtype
        table = Table.of(dtype)
        table.compare(expected, given, {})
        if all(row.ok for row in table.rows()):
            return table.rows()
        if self.short is not None:
            table = Table.of(dtype)
            table.compare(expected, given, {}, self._by_autocast())
        return judged(table.rows(), Trained(table, [expected], self.again, Limits.of(dtype), self.short), _nowhere)

    def _by_autocast(self) -> Values | None:
        """What torch.autocast gives; None where it has no kernel (nn.LSTM in fp16 on a CPU): it allows nothing then."""
        try:
            return self.again(_nothing, True)[0]
        except Exception:
            return None

    def differences(self, given: Leaves, expected: Leaves) -> tuple[list[str], list[ComparedRow]]:
        """A line for each thing that is another one, and the rows of floats that are off by more than a tolerance:
        wrong, or as exact as rounding allows."""
        ours, theirs = dict(given), dict(expected)
        found = list(_unequal(ours, theirs))
        rows = self.rows(floats_of(ours), floats_of(theirs))
        found += [_line(row) for row in rows if not row.ok and not row.is_open]
        return found, [row for row in rows if row.noise is not None or not row.ok]


def _nothing(_: nn.Module) -> None:
    """Change nothing of a model."""


def _nowhere() -> None:
    """There is no other place: a journey that is open is taken again from there."""


def _line(row: ComparedRow) -> str:
    told = "".join(
        f", {what} {value:.2e}"
        for what, value in (("autocast", row.allowed), ("rounding alone", row.noise))
        if value is not None
    )
    return f"{row.kind} '{row.name}': off by {row.error:.2e} of it{told}"


def floats_of(leaves: Leaves) -> Values:
    """The floats among leaves, as tensors."""
    tensors = {
        key: torch.tensor(value, dtype=torch.complex128 if isinstance(value, complex) else torch.float64)
        if isinstance(value, (float, complex))
        else value
        for key, value in leaves.items()
    }
    return {key: value for key, value in tensors.items() if _is_float(value)}


def _is_float(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.is_complex()
    return False


def _unequal(ours: Leaves, theirs: Leaves) -> Iterator[str]:
    """What differs that is no float. Floats that cannot be compared are taken out of both."""
    for key in list(dict.fromkeys([*theirs, *ours])):
        what = f"{key[0]} '{key[1]}'"
        if key not in ours or key not in theirs:
            yield f"{what}: {'there' if key in ours else 'missing'}, plain the other way round"
            ours.pop(key, None), theirs.pop(key, None)
            continue
        mine, plain = ours[key], theirs[key]
        if isinstance(mine, Tensor) and isinstance(plain, (int, float, complex)):
            mine = mine.item()
        elif isinstance(plain, Tensor) and isinstance(mine, (int, float, complex)):
            plain = plain.item()
        if isinstance(plain, float) and isinstance(mine, (int, float)):
            mine = float(mine)
        ours[key], theirs[key] = mine, plain
        if isinstance(mine, Tensor) and isinstance(plain, Tensor):
            is_same = mine.shape == plain.shape and mine.dtype == plain.dtype
            if not is_same:
                yield f"{what}: {list(mine.shape)} {mine.dtype}, plain {list(plain.shape)} {plain.dtype}"
            elif not _is_float(plain) and not torch.equal(mine, plain):
                is_same = False
                yield f"{what}: {int((mine != plain).sum())} of {plain.numel()} elements are others"
        elif type(mine) is type(plain) and isinstance(plain, (float, complex)):
            continue
        else:
            is_same = type(mine) is type(plain) and mine == plain
            if not is_same:
                yield f"{what}: {mine!r}, plain {plain!r}"
        if not is_same:
            del ours[key], theirs[key]
