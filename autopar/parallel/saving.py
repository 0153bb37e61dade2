"""Write what a parallel model and its optimizer hold as one device holds it: one file, for `torch.load` anywhere."""

from __future__ import annotations

import os
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.torch_compat import tree_map


def save_file(value: Any, file: str | os.PathLike[str] | IO[bytes]) -> None:
    """`torch.save`, with whole tensors in the place of those that ranks hold parts of. Every rank must call this.

        autopar.save_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")

    Rank 0 writes, and of all that is no DTensor its own values; whole tensors come to its CPU one after another. The
    file is there when the call returns, on every rank. Raises AutoparError on every rank if it cannot be written.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    made, fault = whole_values(value), [""]
    if is_first:
        try:
            torch.save(made, file)
        except Exception as error:
            fault = [f"{type(error).__name__}: {error}"]
    if dist.is_initialized():
        dist.broadcast_object_list(fault, 0)
    if fault[0]:
        raise AutoparError(f"autopar.save_file: rank 0 could not write {file}: {fault[0]}")


def whole_values(value: Any) -> Any:
    """What `save_file` writes: whole CPU tensors in the place of those that ranks hold parts of; None for them on all
    ranks but the first. Every rank must call this."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    known: dict[int, Any] = {}  # what is tied is gathered once, and stays tied

    def whole(leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        if id(leaf) not in known:
            gathered = leaf.full_tensor().detach()
            known[id(leaf)] = gathered.cpu() if is_first else None
        return known[id(leaf)]

    return tree_map(whole, value)
