"""Write what a parallel model and its optimizer hold as one device holds it: one file, for `torch.load` anywhere."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def save(value: Any, file: str | os.PathLike[str] | IO[bytes]) -> None:
    """`torch.save`, with whole tensors in the place of those that ranks hold parts of. Every rank must call this.

        autopar.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, "checkpoint.pt")

    Rank 0 writes, its own values of all that is no DTensor. Whole tensors lie on its CPU one after another. When the
    call returns, on any rank, the file is there.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    whole = _whole(value, is_first, {})
    fault = ""
    if is_first:
        try:
            torch.save(whole, file)
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
    if dist.is_initialized():
        said = [fault]
        dist.broadcast_object_list(said, 0)
        fault = said[0]
    if fault:
        raise OSError(f"rank 0 could not save to {file}: {fault}")


def _whole(value: Any, keeps: bool, seen: dict[int, Any]) -> Any:
    """The value with every DTensor whole, on the CPU, where this rank keeps it; what is tied stays tied."""
    if isinstance(value, DTensor):
        if id(value) not in seen:
            whole = value.detach().full_tensor()
            seen[id(value)] = whole.cpu() if keeps else None
        return seen[id(value)]
    if isinstance(value, Tensor):
        return value
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _whole(each, keeps, seen)) for key, each in value.items())
    if type(value) in (list, tuple):
        return type(value)(_whole(each, keeps, seen) for each in value)
    return value
