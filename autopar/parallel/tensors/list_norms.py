"""The norms of a list of tensors, some of them split: a few kernels and one collective, however many there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.parallel.tensors.placed import PlacedTensor, is_split, whole_value
from autopar.parallel.tensors.split_call import SplitCall
from autopar.torch_compat import foreach_norm, local_of

WIDE = torch.float64  # in which norms of parts are combined


def norms(call: SplitCall) -> Any:
    """What `_foreach_norm` gives, each norm that of the whole tensor."""
    if call.name != "_foreach_norm":
        return NotImplemented
    items, order = call.args[0], float(call.args[1] if len(call.args) > 1 else 2)
    asked = (call.args[2] if len(call.args) > 2 else None) or call.kwargs.get("dtype")
    if any(not item.numel() or not item.is_floating_point() for item in items):
        return NotImplemented
    call.agree()
    split = [item for item in items if is_split(item)]
    others = [item for item in items if not is_split(item)]
    wholes = [whole_value(item, call.name) if isinstance(item, PlacedTensor) else item for item in others]
    found = iter(_as([asked or item.dtype for item in others], [_norms(wholes, order)] * len(others)))
    combined = iter(_as([asked or item.dtype for item in split], _over_ranks(call, split, order) if split else []))
    return [call.wrap_whole(next(combined if is_split(item) else found)) for item in items]


def _norms(tensors: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    """The norm of each tensor. Short floats are added up in float32."""
    found: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        made = torch.stack(foreach_norm([tensors[i] for i in places], order, wide)).to(WIDE)
        found.update(zip(places, made.unbind(), strict=True))
    return torch.stack([found[i] for i in range(len(tensors))]) if found else torch.zeros(0, dtype=WIDE, device="cpu")


def _over_ranks(call: SplitCall, items: Sequence[Any], order: float) -> list[torch.Tensor]:
    """For each item a vector that has its norm at the item's place: the same vector for those of which the same ranks
    hold parts. Every rank computes it of the same numbers in the same order."""
    counting = [item.place.ranks_that_count(item.shape) for item in items]
    rank = call.world.mesh.rank(call.world.coord)
    mine = [i for i, ranks in enumerate(counting) if rank in ranks]
    device = items[0].device
    numbers = [torch.zeros((), dtype=WIDE, device=device)] * len(items)
    for i, number in zip(mine, _norms([local_of(items[i]) for i in mine], order).unbind(), strict=True):
        numbers[i] = number
    call.world.talk(call.name)
    everyone = call.world.gather_bytes(torch.stack(numbers))
    made = {}
    for ranks in dict.fromkeys(counting):
        parts = torch.stack([everyone[other] for other in ranks])
        made[ranks] = (parts.sum(0) if order == 0 else torch.linalg.vector_norm(parts, order, dim=0)).to(device)
    return [made[ranks] for ranks in counting]


def _as(dtypes: Sequence[torch.dtype], vectors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Element i of vector i in dtype i; each vector is cast once."""
    cast: dict[tuple[int, torch.dtype], tuple[torch.Tensor, ...]] = {}
    tensors = []
    for i, (dtype, vector) in enumerate(zip(dtypes, vectors, strict=True)):
        key = id(vector), dtype
        if key not in cast:
            cast[key] = vector.to(dtype).unbind()
        tensors.append(cast[key][i])
    return tensors
