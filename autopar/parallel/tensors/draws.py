"""Random ops on tensors of which each rank holds a part: the numbers that one device draws.

Every rank draws the whole tensor from the state of rank 0's generator and keeps its part. A rank whose generator stood
where rank 0's did goes on from there, as one device would; another one gets its own state back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from autopar.parallel.tensors.place import World
from autopar.parallel.tensors.placed import PlacedTensor, is_split
from autopar.parallel.tensors.split_call import SplitCall
from autopar.torch_compat import local_of

_FUNCTIONS_OF_ONE_SHAPE = frozenset({"rand_like", "randn_like", "randint_like"})


def draw(call: SplitCall) -> Any:
    """The result of a random op; it lies as its first operand does if it has its shape."""
    if not call.op.is_random:
        return NotImplemented
    generators = [arg for arg in (*call.args, *call.kwargs.values()) if isinstance(arg, torch.Generator)]
    like = call.first
    if call.name in _FUNCTIONS_OF_ONE_SHAPE and is_split(like):
        bare = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        with one_device(call.world, generators, like.device, call.name):
            out = call.func(*call.map(lambda _: bare)[0], **call.kwargs)
        return like.around(like.place.part(out), like.place, like.shape)
    with one_device(call.world, generators, like.device, call.name):
        out = call.on_whole_values()
    return out if call.op.writes else _split(out, like)


def _split(out: Any, like: PlacedTensor) -> Any:
    """Results of the shape of a split operand, split as it is."""
    if isinstance(out, (list, tuple)):
        return type(out)(_split(item, like) for item in out)
    if is_split(like) and isinstance(out, PlacedTensor) and out.place.is_replicated and out.shape == like.shape:
        return like.around(like.place.part(local_of(out)), like.place, like.shape)
    return out


@contextmanager
def one_device(
    world: World, generators: list[torch.Generator], device: torch.device, what: str
) -> Iterator[None]:  # fmt: skip
    """Rank 0's state in the generator that draws on a device, meanwhile. Every rank must enter."""
    if world.mesh.size == 1 or world.seeded:
        yield
        return
    get, put = _access(generators, device)
    own = get()
    state = own.to(world.device, copy=True)
    world.talk(what)
    dist.broadcast(state, src=0)
    state = state.to(own.device)
    alike = torch.equal(own, state)
    put(state)
    try:
        yield
    finally:
        if not alike:
            put(own)


def _access(generators: list[torch.Generator], device: torch.device) -> tuple[Any, Any]:
    if generators:
        return generators[0].get_state, generators[0].set_state
    if device.type == "cuda":
        return lambda: torch.cuda.get_rng_state(device), lambda state: torch.cuda.set_rng_state(state, device)
    return torch.get_rng_state, torch.set_rng_state
