"""Find tensors outside of the model that require a gradient, which a compiled step would not give them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType

import torch

from autopar.capture.refusals.constructs import Construct
from autopar.capture.refusals.explain_failure import refusal
from autopar.capture.refusals.location import Line, is_user_file, user_frame
from autopar.errors import CaptureError
from autopar.torch_compat import FakeTensor


@dataclass(frozen=True, slots=True)
class Outside:
    """A tensor that no input of the step stands for, and where it is used. `name`: the user's, where it is known."""

    tensor: torch.Tensor  # held, so that its id stays its own
    name: str
    line: Line | None

    @staticmethod
    def of(tensor: torch.Tensor, frame: FrameType | None) -> Outside:
        """A tensor that the innermost frame of the user's uses."""
        line = user_frame(frame)
        while frame is not None and not is_user_file(frame.f_code.co_filename):
            frame = frame.f_back
        known = {**frame.f_globals, **frame.f_locals} if frame is not None else {}
        return Outside(tensor, next((name for name, value in known.items() if value is tensor), ""), line)


def outside_fault(
    loss: torch.Tensor, trained: Collection[int], names: Mapping[int, str], outside: Mapping[int, Outside]
) -> CaptureError | None:
    """An error if the gradient of `loss` flows to a leaf that is not among the ids of those `trained`."""
    for leaf in _leaves(loss):
        made_here = isinstance(leaf, FakeTensor) and id(leaf) not in names  # of the batch, for a gradient in the loss
        if id(leaf) in trained or made_here:
            continue
        found = outside.get(id(leaf))
        name = names.get(id(leaf)) or (found.name if found else "")
        shown = f"a tensor '{name}'" if name else "a tensor"
        construct = Construct(
            f"{shown} of shape {list(leaf.shape)} that requires a gradient and is no parameter of the model",
            "Its gradient would be lost. Make it a parameter of the model (self.t = nn.Parameter(t) in __init__, or "
            "self.criterion = criterion), or use t.detach() if it is not trained.",
        )
        return refusal(construct, found.line if found else None)
    return None


def _leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    known, pending = set(), [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in known:
            continue
        known.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        pending += [parent for parent, _ in node.next_functions]
