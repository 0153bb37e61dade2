"""What user code keeps of a capture: whether it does, and what stands for a tensor that has no data."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from autopar.errors import AutoparError


def outlives(is_alive: Callable[[], bool]) -> bool:
    """Whether something lives on that was made in a capture, where nothing of the capture holds it. Circles of objects
    that do are looked for among the young ones first: beside large libraries all take a tenth of a second and more."""
    for generation in (1, 2):
        if not is_alive():
            return False
        gc.collect(generation)
    return is_alive()


class LeftBehind(torch.Tensor):
    """A tensor of a capture that hangs on its inputs: it has no data, and says so."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AutoparError(
            "a tensor that the model keeps outside of itself (in a list, a global, an object) was made while autopar "
            "captured the step, and has no data: compiled steps run no Python, so nothing is kept of them there. "
            "Return it beside the loss (loss_fn gives (loss, value); then read model.last_aux), or write it into a "
            "buffer."
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "<a tensor of a captured step, without data>"
