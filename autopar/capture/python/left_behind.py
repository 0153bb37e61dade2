"""What stands for a tensor of a capture that user code kept: it has no data, and says so."""

from __future__ import annotations

from typing import Any

import torch

from autopar.errors import AutoparError


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
