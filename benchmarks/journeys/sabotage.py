"""Fixes taken out, and numbers made wrong, one by one, in the ranks: each must make journeys red, and soon."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from autopar.capture.inputs.containers import Leaf, _Walk
from autopar.ir.layout import Layout
from autopar.parallel.session.random_state import RandomState
from autopar.parallel.tensors.place import Place
from autopar.parallel.weights.store import ParameterStore, Structure
from autopar.runtime.collectives.moves import Move
from autopar.runtime.ranks.distributed import _PRIMITIVES
from autopar.torch_compat import local_of
from benchmarks.journeys.actions_steps import BatchEncoding, Rows
from benchmarks.journeys.ranks import Report
from benchmarks.journeys.side import Side


@dataclass(frozen=True)
class Sabotage:
    """item: of issue 11, or another issue. patches: what takes the place of a dotted name."""

    item: int
    what: str
    patches: Mapping[str, Any]


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Does nothing, whatever it is asked."""


def _true(*args: Any, **kwargs: Any) -> bool:
    return True


def _false(*args: Any, **kwargs: Any) -> bool:
    return False


_gather, _first, _numbers = Place.gather, _Walk._first, RandomState.tensor
_distribute, _forward_backward, _step = ParameterStore.distribute, Side.forward_backward, Side.step


def _gather_in_the_order_of_the_mesh(self: Place, part: Any, shape: Any, what: str) -> Any:
    """As torch reads placements: of `[tp:dp]` it makes `[dp:tp]`."""
    order = self.mesh.names
    dims = tuple(
        tuple(sorted(dim, key=order.index)) if all(isinstance(factor, str) for factor in dim) else dim
        for dim in self.layout.dims
    )
    return _gather(dataclasses.replace(self, layout=Layout(dims)), part, shape, what)


def _of_this_rank(call: Any, items: Any, part: Any, all_: Any, dtype: Any) -> list[Any]:
    """A reduction of what this rank holds."""
    return [part(local_of(item)).to(dtype) for item in items]


def _own_draws(call: Any) -> Any:
    """Random numbers of each rank's own generator, for the part that it holds."""
    if not call.op.is_random:
        return NotImplemented
    args, kwargs = call.map(lambda tensor: local_of(tensor))
    out = call.func(*args, **kwargs)
    return call.args[0] if call.op.writes else call.first.around(out, call.first.place, call.first.shape)


def _other_objects(self: ParameterStore, *args: Any) -> None:
    """Parallel parameters are new objects, which nobody holds from before."""
    _distribute(self, *args)
    memo: dict[int, Any] = {}
    for module in self.model.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = copy.deepcopy(parameter, memo)
    self.structure = Structure(self.model)


def _objects_are_leaves(self: _Walk, value: Any, path: str) -> Any:
    """What torch's pytree does not know stays as it is, a constant of the program."""
    if isinstance(value, (BatchEncoding, Rows, types.SimpleNamespace)):
        self.leaves.append(value)
        self.paths.append(path)
        return Leaf(False)
    return _first(self, value, path)


def _of_the_steps_alone(self: RandomState, device: Any, is_step: bool) -> Any:
    """The numbers of a call of the model itself, which do not move on."""
    return _numbers(dataclasses.replace(self, forwards=0), device, is_step)


def _in_front(said: Any, parts: Any, *names: Any) -> tuple[int | None, ...]:
    """Samples are counted by the first dim of every tensor, whatever is said."""
    return tuple(0 if isinstance(leaf, torch.Tensor) and leaf.ndim else None for leaf in parts.leaves)


# -- faults in numbers, which every dtype must show -----------------------------------------------------------------


def _one_left_out(move: Move, group: Any, later: bool) -> Any:
    """A sum over ranks of gradients of which a rank keeps its own part."""
    kept = move.x.clone()
    work, received = _PRIMITIVES["reduce"](dataclasses.replace(move, owned=False), group, later)
    return work, (lambda: kept) if kept.numel() > 16 else received


def _with_gradients(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Steps of the parallel model that leave other gradients."""

    def step(self: Side, *batch: Any) -> Any:
        loss = _forward_backward(self, *batch)
        if self.is_parallel:
            gradient = max((p.grad for _, p in self.trained()), key=lambda value: value.numel())
            change(local_of(gradient))
        return loss

    return step


def _with_rows_swapped(gradient: Any) -> None:
    gradient[:2] = gradient[:2].flip(0)


def _with_a_step_left_out(self: Side) -> None:
    """Of the steps of the parallel model's optimizer, all but the first."""
    if not self.is_parallel or not vars(self).get("has_stepped"):
        _step(self)
    vars(self)["has_stepped"] = True


FAULTS: Mapping[str, Sabotage] = {
    "a sum": Sabotage(
        32,
        "a sum over ranks is left out",
        {"autopar.runtime.ranks.distributed._PRIMITIVES": {**_PRIMITIVES, "reduce": _one_left_out}},
    ),
    "a gradient": Sabotage(
        32,
        "a gradient is off by 1%",
        {"benchmarks.journeys.side.Side.forward_backward": _with_gradients(lambda gradient: gradient.mul_(1.01))},
    ),
    "rows": Sabotage(
        32,
        "two rows of a gradient are swapped",
        {"benchmarks.journeys.side.Side.forward_backward": _with_gradients(_with_rows_swapped)},
    ),
    "a step": Sabotage(
        32, "a step of the optimizer is left out", {"benchmarks.journeys.side.Side.step": _with_a_step_left_out}
    ),
}
SABOTAGES: Mapping[str, Sabotage] = {
    "placements": Sabotage(
        1,
        "axes in the order of the mesh",
        {"autopar.parallel.tensors.place.Place.gather": _gather_in_the_order_of_the_mesh},
    ),
    "sums": Sabotage(
        2, "reductions of this rank's part", {"autopar.parallel.tensors.split_reductions._over_ranks": _of_this_rank}
    ),
    "generators": Sabotage(3, "each rank draws for its part", {"autopar.parallel.tensors.draws.draw": _own_draws}),
    "containers": Sabotage(
        4,
        "objects are no containers, and their tensors may be constants",
        {
            "autopar.capture.inputs.containers._Walk._first": _objects_are_leaves,
            "autopar.capture.data.determinism.first_difference": _nothing,
        },
    ),
    "holders": Sabotage(
        32, "parameters are new objects", {"autopar.parallel.weights.store.ParameterStore.distribute": _other_objects}
    ),
    "digests": Sabotage(
        5, "batches of ranks are not compared", {"autopar.parallel.batches.digests.Digests.vector": _nothing}
    ),
    "guards": Sabotage(6, "changes between steps are not seen", {"autopar.capture.python.guards.Guards.holds": _true}),
    "hooks": Sabotage(
        6, "gradient hooks are dropped", {"autopar.parallel.tensors.parameter.hooks_of": lambda tensor: (None, None)}
    ),
    "draws": Sabotage(
        32,
        "model(x) repeats its draws",
        {"autopar.parallel.session.random_state.RandomState.tensor": _of_the_steps_alone},
    ),
    "gathered": Sabotage(
        32, "what is changed in gathered() is not written", {"autopar.parallel.gathered._Plain.write": _nothing}
    ),
    "dims": Sabotage(
        32, "samples are in front, whatever is said", {"autopar.parallel.programs.portions.dims_of": _in_front}
    ),
    "uneven": Sabotage(
        32, "all ranks have as many samples as this one", {"autopar.parallel.batches.local_batch.Portion.is_even": True}
    ),
    "dtype of sums": Sabotage(
        32,
        "gradients are summed before the cast to the dtype of sums",
        {
            "autopar.passes.search.items.Classes.is_unlike_sums": _false,
            "autopar.passes.collectives.reshard._Reshard._is_rounded": _false,
            "autopar.passes.check_sums": _nothing,
        },
    ),
    "replicas": Sabotage(
        7, "replicas are not compared", {"autopar.parallel.weights.replicas.Replicas.check": _nothing}
    ),
    "calls": Sabotage(
        8,
        "calls do not announce themselves",
        {
            "autopar.parallel.agree.agreement.Announcer.call": _true,
            "autopar.parallel.agree.agreement.Announcer.operation": _nothing,
        },
    ),
}


def sabotage(rank: int, name: str) -> Report:
    """Take a fix out of this process, for good."""
    with contextlib.ExitStack() as stack:
        for target, replacement in {**SABOTAGES, **FAULTS}[name].patches.items():
            stack.enter_context(mock.patch(target, replacement))
        stack.pop_all()
    return Report("ok")
