"""Everything that both sides of a journey hold, compared on each rank: with no collective where that can be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.ir.layout import Layout
from autopar.parallel.padding import padded_part, without_padding
from autopar.torch_compat import local_of
from benchmarks.journeys.side import Side

# In float64 (30 rows were right to 1e-11 too); with norms in float32, whose steps are 1.2e-7; in float32; in fp16 and
# bf16, beside a plain module in float32, where sums that cancel lose digits. A sum left out is off by more in each.
EXACT, ROUNDED, SINGLE, HALF, SHORT = 1e-10, 1e-5, 3e-4, 0.04, 0.05
# A gradient that is zero on paper is rounding of the size of the others, and so are states made of it. A tensor of a
# smaller norm, or part of the largest, is measured by this: what is off by 1e-13 is still seen. That is the rounding of
# sums of about 1 that cancelled, which a clip or a state of theirs no longer shows.
ZERO, SMALL = 1e-3, 1e-3


def differences(ours: Side, theirs: Side, tolerance: float) -> Iterator[str]:
    """A line for each thing that differs: weights, gradients, buffers, flags, optimizer states."""
    yield from _modules(ours.model, theirs.model, tolerance)
    if theirs.critic is not None:
        yield from (f"critic: {line}" for line in _modules(ours.critic, theirs.critic, tolerance))
    yield from unequal("averages", ours, ours.average, theirs.average, tolerance)
    yield from unequal("seen by hooks", ours, ours.seen, theirs.seen, tolerance, ZERO)
    if tolerance < HALF:
        yield from _optimizers(ours, ours.optimizer, theirs.optimizer, tolerance)
        yield from _optimizers(ours, ours.critic_optimizer, theirs.critic_optimizer, tolerance)


def _modules(ours: Any, theirs: nn.Module, tolerance: float) -> Iterator[str]:
    """What differs of a parallel model and a plain one."""
    store, known = ours._store, dict(ours.named_parameters())
    gradients = [_size(p.grad) for p in theirs.parameters() if p.grad is not None]
    share = SMALL if tolerance < SINGLE else 0.1 if tolerance < HALF else 1  # zero on paper: rounding of the others
    largest = max(max(gradients, default=0.0) * share, ZERO)
    heaviest = (SMALL if tolerance < HALF else 0.1) * max(_size(p.detach()) for p in theirs.parameters())
    for name, parameter in theirs.named_parameters():
        mine = known[name]
        if mine.requires_grad != parameter.requires_grad:
            yield f"requires_grad of '{name}': {mine.requires_grad}, plain {parameter.requires_grad}"
        if (mine.grad is None) != (parameter.grad is None):
            yield f"gradient '{name}': {'None' if mine.grad is None else 'there'}, plain the other way round"
        if not store.distributor.is_owner(store.owners[name]):
            continue

        wanted = _part(parameter.detach(), store, store.layouts[name])
        yield from _off(f"weight '{name}'", local_of(mine), wanted, tolerance, heaviest)
        if mine.grad is not None and parameter.grad is not None:
            # One from before the layout was decided lies as it lay, until a step adds to it.
            wanted = _part(parameter.grad, store, mine.grad.place.layout)
            yield from _off(f"gradient '{name}'", local_of(mine.grad), wanted, tolerance, largest)
    buffers = dict(ours.named_buffers())
    for name, buffer in theirs.named_buffers():
        yield from _off(f"buffer '{name}'", buffers[name], buffer, tolerance, 0)
    modes = {name: module.training for name, module in theirs.named_modules()}
    yield from (
        f"'{name}'.training: {module.training}"
        for name, module in ours.named_modules()
        if module.training != modes[name]
    )


def _part(value: Tensor, store: Any, layout: Layout) -> Tensor:
    """What this rank should hold of a whole value in a layout."""
    where, shape = store.distributor, tuple(value.shape)
    return without_padding(padded_part(value, layout, where.mesh, where.coord), shape, layout, where.mesh, where.coord)


def _optimizers(side: Side, ours: Optimizer | None, theirs: Optimizer | None, tolerance: float) -> Iterator[str]:
    if ours is None or theirs is None:
        return
    counts = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in (ours, theirs)]
    if counts[0] != counts[1]:
        yield f"optimizer: groups of {counts[0]} parameters, plain {counts[1]}"
        return
    floors = _floors(theirs)
    pairs = zip(ours.param_groups, theirs.param_groups, strict=True)
    for i, (mine, plain) in enumerate(pairs):
        numbers = {key: value for key, value in plain.items() if key != "params"}
        yield from unequal(f"group {i}", side, {key: mine.get(key) for key in numbers}, numbers, tolerance)
        for j, (p, q) in enumerate(zip(mine["params"], plain["params"], strict=True)):
            held, wanted = ours.state.get(p, {}), theirs.state.get(q, {})
            what = f"state of parameter {j} of group {i}"
            if set(held) != set(wanted):
                yield f"{what}: has {sorted(held)}, plain {sorted(wanted)}"
            for key in (key for key in wanted if key in held and not _is_elsewhere(p, held[key])):
                yield from unequal(f"{what}, {key!r}", side, held[key], wanted[key], tolerance, floors.get(key, ZERO))


def _is_elsewhere(parameter: Any, state: Any) -> bool:
    """True for a state of another stage that is a DTensor of torch's own: whole on the ranks of that stage alone."""
    return not parameter.place.is_here and type(state) is DTensor


def _floors(optimizer: Optimizer) -> dict[str, float]:
    """By the name of a state, the norm below which it may be rounding alone."""
    floors: dict[str, float] = {}
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor):
                floors[key] = max(floors.get(key, ZERO), SMALL * _size(value))
    return floors


def unequal(what: str, side: Side, mine: Any, plain: Any, tolerance: float, floor: float = 0.0) -> Iterator[str]:
    """What differs in two nestings of numbers, texts and tensors. DTensors are made whole by all ranks."""
    if isinstance(mine, Tensor) or isinstance(plain, Tensor):
        if not (isinstance(mine, Tensor) and isinstance(plain, Tensor)):
            mine, plain = torch.as_tensor(mine), torch.as_tensor(plain)
        yield from _off(what, side.whole(mine.detach()), plain.detach(), tolerance, floor)
    elif isinstance(plain, dict) and isinstance(mine, dict):
        if set(mine) != set(plain):
            yield f"{what}: has {sorted(map(str, mine))}, plain {sorted(map(str, plain))}"
        for key in plain:
            if key in mine:
                yield from unequal(f"{what}, {key!r}", side, mine[key], plain[key], tolerance, floor)
    elif isinstance(plain, (list, tuple)) and isinstance(mine, (list, tuple)):
        if len(mine) != len(plain):
            yield f"{what}: {len(mine)} items, plain {len(plain)}"
        for i, (a, b) in enumerate(zip(mine, plain, strict=False)):
            yield from unequal(f"{what}, item {i}", side, a, b, tolerance, floor)
    elif isinstance(plain, float) and isinstance(mine, (int, float)):
        if abs(mine - plain) > tolerance * max(abs(plain), floor, 1e-12) and not (mine != mine and plain != plain):
            yield f"{what}: {mine!r}, plain {plain!r}"
    elif type(mine) is not type(plain) or mine != plain:
        yield f"{what}: {mine!r}, plain {plain!r}"


def _size(value: Tensor) -> float:
    """The norm of what is finite."""
    return float(_finite(value.double(), value.double(), torch.zeros_like(value.double())).norm())


def _finite(value: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """One of two tensors, by whether the elements of a third are finite."""
    return torch.where(value.isfinite(), yes, no)


def _off(what: str, mine: Tensor, plain: Tensor, tolerance: float, floor: float) -> Iterator[str]:
    """One line if a tensor is another, norm-wise."""
    if isinstance(mine, DTensor):
        mine = mine.full_tensor()
    if mine.shape != plain.shape or mine.dtype != plain.dtype:
        yield f"{what}: {list(mine.shape)} {mine.dtype}, plain {list(plain.shape)} {plain.dtype}"
        return
    if not mine.numel() or torch.equal(mine, plain):
        return
    a, b = mine.double(), plain.double()
    if not torch.equal(*(_finite(x, torch.zeros_like(x), x).nan_to_num(7.0) for x in (a, b))):
        yield f"{what}: {int((~a.isfinite()).sum())} elements are not finite, plain {int((~b.isfinite()).sum())}"
        return
    a, b = (_finite(x, x, torch.zeros_like(x)) for x in (a, b))
    error, norm = float((a - b).norm()), max(float(b.norm()), floor, 1e-12)
    if error > tolerance * norm:
        yield f"{what}: off by {error:.2e}, norm {norm:.2e}"
