"""Give outputs memory of their own: what a user is given shares nothing with what the step was given."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autopar.runtime.executor.executor import Outputs


def shared_outputs(outputs: Outputs, inputs: Iterable[torch.Tensor]) -> frozenset[int]:
    """The outputs that lie in the memory of an input or of an earlier output, or are expanded: the same at each run."""
    given = {_place(tensor)[0] for tensor in inputs}
    seen: set[tuple[int, int]] = set()
    shared_outputs = set()
    for i, value in enumerate(outputs):
        if value is None:
            continue
        memory, start = _place(value)
        alone = memory not in given and (memory, start) not in seen
        if not (alone and value.is_contiguous()):
            shared_outputs.add(i)
        seen.add((memory, start))
    return frozenset(shared_outputs)


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor begins, also one without data: torch has one Python object for a storage while that lives."""
    return id(tensor.untyped_storage()), int(tensor.storage_offset())


def own_memory(outputs: Outputs, shared: frozenset[int]) -> Outputs:
    """The outputs, those that share memory copied."""
    if not shared:
        return outputs
    dense = torch.contiguous_format
    return tuple(v.clone(memory_format=dense) if i in shared else v for i, v in enumerate(outputs))
