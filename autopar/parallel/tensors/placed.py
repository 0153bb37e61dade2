"""What users hold: DTensors that know their place, and views of them.

`ParameterTensor` (parameter.py) is the class of parameters, gradients and optimizer states, and of what is computed of
them. Operators (operators.py) know no more of it than what stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from autopar.errors import AutoparError
from autopar.ir.layout import Layout, local_shape, padded_shape
from autopar.parallel.tensors.place import Place, World, placements
from autopar.torch_compat import StridedShard, local_of, spec_of, with_spec
from autopar.torch_identity import SlotlessDTensor


class PlacedTensor(SlotlessDTensor):
    """A DTensor whose place is known: a layout, and the ranks that hold it."""

    place: Place
    # What a class of the family has (parameter.py): a tensor of it around another part, which lies at another place,
    # and a view that reads and writes this tensor.
    around: Callable[[torch.Tensor, Place, Sequence[int]], Any]
    view_by: Callable[[Step], Any]

    @staticmethod
    def make(kind: type[PlacedTensor], part: torch.Tensor, place: Place, spec: Any, requires_grad: bool = False) -> Any:
        """A tensor of a class around this rank's part."""
        made: Any = with_spec(kind, part, spec, requires_grad)
        made.place = place
        return made

    @staticmethod
    def class_refused() -> AutoparError:
        return AutoparError(
            "the class of a tensor of a parallel model is fixed, so that torch.utils.swap_tensors cannot exchange it "
            "(nor can torch.__future__.set_swap_module_params_on_conversion, nor .cpu(), .cuda() or .to() of a plain "
            "module that shares a parameter). Leave such a call out: each rank's part lies on its device. Or call it "
            "of the parallel model, which takes what changes nothing: model.part.cpu() for part.cpu(). "
            "Write its value by copy_() or load_state_dict(). " + TO_SAVE
        )


# A view function with its arguments behind the first, and which of its results (None: there is one only).
Step = tuple[Any, tuple[Any, ...], dict[str, Any], int | None]


class ViewOf(PlacedTensor):
    """A view of a tensor that is split: nothing but the way from its base, which every read goes again."""

    base: PlacedTensor
    steps: tuple[Step, ...]

    def of(self, base: torch.Tensor) -> torch.Tensor:
        """This view of a whole value of the base."""
        return follow(base, self.steps)


def follow(value: torch.Tensor, steps: Sequence[Step]) -> Any:
    """What view functions make of a value, one after the other."""
    for func, args, options, index in steps:
        made = func(value, *args, **options)
        value = made if index is None else made[index]
    return value


def whole_value(tensor: PlacedTensor, what: str) -> torch.Tensor:
    """The whole value on every rank; the very memory where each rank has all of it. Every rank must call this."""
    if isinstance(tensor, ViewOf):
        return tensor.of(whole_value(tensor.base, what))
    return tensor.place.gather(local_of(tensor), tensor.shape, what)


def is_split(tensor: torch.Tensor) -> bool:
    """True if this rank's memory is a part of the tensor's value."""
    return isinstance(tensor, PlacedTensor) and not isinstance(tensor, ViewOf) and not tensor.place.is_replicated


# What saves a model, for functions that read the memory of its parameters.
TO_SAVE = (
    "To save a model: `weights = model.full_state_dict()` on every rank, then on rank 0 "
    "`model.original.save_pretrained(folder, state_dict=weights)` or `torch.save(weights, path)`."
)


def refusal(name: str, more: str = "") -> AutoparError:
    """The error for what a tensor of which each rank holds a part cannot do. more: a sentence behind the advice."""
    return AutoparError(
        f"'{name}' is nothing that a tensor of a parallel model can do: this rank holds a part of it, in memory that "
        f"the step's programs use. Call .full_tensor() on every rank for its value; write it by copy_() or "
        f"load_state_dict().{' ' * bool(more)}{more}"
    )


# -- DTensors that others made --------------------------------------------------------------------------------------


def placed(tensor: DTensor, like: PlacedTensor) -> PlacedTensor:
    """A DTensor of any maker (a checkpoint, `distribute_tensor`) as one of ours, around the same memory if it lies as
    some layout says, else around its whole value."""
    place = place_of(tensor, like.place.world)
    if place is not None:
        local = local_of(tensor)
        return like.around(local if place.is_here else local.new_empty(0), place, tensor.shape)
    if spec_of(tensor).mesh.get_coordinate() is None:
        raise AutoparError("a DTensor on other ranks, of a mesh that is no stage of this model: call full_tensor().")
    mesh = spec_of(tensor).mesh
    whole = with_spec(DTensor, local_of(tensor).detach(), spec_of(tensor))
    value = local_of(whole.redistribute(mesh, [Replicate()] * mesh.ndim))
    return like.around(value, like.place.world.everywhere(value.ndim), value.shape)


def place_of(tensor: DTensor, world: World) -> Place | None:
    """Where torch's placements say that a tensor lies; None for what no layout expresses."""
    spec = spec_of(tensor)
    owner = _owner_of(spec.mesh, world)
    if isinstance(owner, str):
        return None
    _check_rank(spec, world.device_mesh if owner is None else world.stages[owner])
    mesh = world.mesh if owner is None else world.inner
    dims: list[list[tuple[int, int]]] = [[] for _ in spec.shape]  # (the axis, how often its dim was split before)
    for index, placement in enumerate(spec.placements):
        if isinstance(placement, (Shard, StridedShard)):
            dims[placement.dim].append((index, getattr(placement, "split_factor", 1)))
        elif not placement.is_replicate():
            return None
    layout = Layout(tuple(_factors(axes, mesh) for axes in dims))
    if mesh.names and tuple(placements(layout, mesh)) != tuple(spec.placements):
        return None
    place = world.place(layout, owner)
    padded = padded_shape(tuple(spec.shape), layout, mesh)
    if sum(map(bool, layout.dims)) and padded != tuple(spec.shape) and max(map(len, layout.dims)) > 1:
        return None  # torch splits such a dim otherwise
    here = place.is_here and local_shape(padded, layout, mesh)
    fits = not here or all(a <= b for a, b in zip(local_of(tensor).shape, here, strict=True))
    return place if fits else None


def _check_rank(spec: Any, here: Any) -> None:
    """Refuse another rank's part, as a file holds it that all ranks wrote with `torch.save`: it would be taken for this
    rank's. A DTensor that was pickled knows where it was."""
    mine, theirs = here.get_coordinate(), spec.mesh.get_coordinate()
    if mine is None or theirs is None or tuple(mine) == tuple(theirs):
        return
    if not all(placement.is_replicate() for placement in spec.placements):
        names = here.mesh_dim_names
        said, wanted = (
            ",".join(f"{name}={place}" for name, place in zip(names, coord, strict=True)) for coord in (theirs, mine)
        )
        raise AutoparError(
            f"this is the part of a tensor that the rank at {said} holds, and this rank is at {wanted}: `torch.save` "
            f"of `state_dict()` writes the parts of one rank, and here several ranks wrote to one file, or read one. "
            f"Save with `autopar.save_file(state, path)` on every rank, which writes whole tensors, or `autopar.save`."
        )


def _factors(axes: list[tuple[int, int]], mesh: Any) -> tuple[Any, ...]:
    """The factors of a dim that some axes split, each behind so many pieces."""
    outer = dict(axes)
    factors: list[Any] = []
    # The last of the mesh first; an earlier one goes behind as many as its split factor has room for.
    for index in sorted(outer, reverse=True):
        room, at = outer[index], 0
        while at < len(factors):
            size = factors[at] if isinstance(factors[at], int) else mesh[factors[at]]
            if room % size or room < size:
                break
            room //= size
            at += 1
        factors[at:at] = [room, mesh.names[index]] if room > 1 else [mesh.names[index]]
    return tuple(factors)


def _owner_of(mesh: Any, world: World) -> int | str | None:
    ranks = mesh.mesh
    if ranks.shape == world.device_mesh.mesh.shape and bool((ranks == world.device_mesh.mesh).all()):
        return None
    for owner, stage in enumerate(world.stages):
        if ranks.shape == stage.mesh.shape and bool((ranks == stage.mesh).all()):
            return owner
    return "elsewhere"


def tensors_in(args: Any, options: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among arguments and in lists of them."""
    for arg in (*args, *options.values()):
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from (item for item in arg if isinstance(item, torch.Tensor))
