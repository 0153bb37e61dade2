"""Take tensors that lie in parts on ranks, and are none of the model's own, as inputs that a step reads whole."""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.capture.inputs.module_state import fakes_of
from autopar.capture.inputs.outside import Outside
from autopar.capture.refusals.constructs import Construct
from autopar.capture.refusals.explain_failure import refusal
from autopar.capture.refusals.location import user_frame
from autopar.ir.program import IN_PARTS, Input
from autopar.torch_compat import FakeTensor, FakeTensorMode, on_data

_PART = Construct(
    "a rank's part of a tensor ({}())",
    "A step computes with whole values on every mesh, and what a rank's part is differs from mesh to mesh: leave "
    "{}() out, or call it outside of the model and the loss.",
)
_WHOLE = DTensor.full_tensor.__name__
_PARTS = ("to_local", "redistribute")  # methods of a DTensor that speak of its parts


class InParts:
    """Copies of a parallel model's parameters, gradients, and whatever was computed of them, which a model or a loss
    reads from a closure, a global or a list: anchors of elastic weight consolidation, norms of the step before.

    They are known when they are met: the trace goes on with tensors that stand for them, to find all, and is begun
    again with these as inputs. entries: of the step, and what each stands for.
    """

    def __init__(self, fake: FakeTensorMode, device: torch.device) -> None:
        self.entries: list[tuple[Input, torch.Tensor]] = []
        self._fake, self._device = fake, device
        self._met: dict[int, tuple[Outside, torch.Tensor]] = {}  # by id
        self._taken = 0

    def stand_in(self, tensor: torch.Tensor, frame: FrameType | None) -> torch.Tensor:
        """What a trace goes on with that meets such a tensor for the first time."""
        if id(tensor) not in self._met:
            entry = Input("constant", (f"{IN_PARTS}{len(self.entries)}",))
            with on_data():
                (fake,) = fakes_of([(entry, tensor)], self._fake, self._device)
            self.entries.append((entry, tensor))
            self._met[id(tensor)] = Outside.of(tensor, frame), fake
        return self._met[id(tensor)][1]

    def outside(self, tensor: torch.Tensor) -> Outside:
        """Where a tensor was met."""
        return self._met[id(tensor)][0]

    def are_new(self) -> bool:
        """True if some were met since this was asked before."""
        before, self._taken = self._taken, len(self.entries)
        return self._taken > before


def with_inputs(value: Any, inputs: dict[int, torch.Tensor], in_parts: InParts | None, frame: FrameType | None) -> Any:
    """Arguments with what stands for a parameter in its place, where the model found the parameter itself in a list or
    dict of its own, and with what stands for tensors in parts. inputs: by the id of what each stands for, or has taken
    the place of: a layer's result that a coin joined (`Coins`)."""
    if type(value) in (tuple, list):
        return type(value)(with_inputs(item, inputs, in_parts, frame) for item in value)
    if type(value) is dict:
        return {key: with_inputs(item, inputs, in_parts, frame) for key, item in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    known = inputs.get(id(value))
    if known is None and in_parts is not None and type(value) is not FakeTensor and isinstance(value, DTensor):
        return in_parts.stand_in(value, frame)
    return value if known is None else known


def whole_value(function: Any, args: Any, frame: FrameType | None) -> Any:
    """The result of `full_tensor()` on what stands for a tensor in parts: itself. NotImplemented for other functions.
    Raises CaptureError for those that give a part."""
    name = getattr(function, "__name__", "")
    if (name not in _PARTS and name != _WHOLE) or isinstance(args[0], DTensor):  # the plain module is run on itself
        return NotImplemented
    if name in _PARTS:
        raise refusal(Construct(_PART.name.format(name), _PART.instead.format(name)), user_frame(frame))
    return args[0]
