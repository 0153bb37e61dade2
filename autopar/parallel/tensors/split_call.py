"""One call of a torch op on tensors of which each rank holds a part: its operands, and the run on whole values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.parallel.tensors.place import World
from autopar.parallel.tensors.placed import PlacedTensor, ViewOf, is_split, placed, refusal, tensors_in, whole_value
from autopar.parallel.tensors.schemas import Op
from autopar.torch_compat import local_of


@dataclass(frozen=True, slots=True)
class SplitCall:
    """One call of an op. `args` and `kwargs` have our tensors for all DTensors; `given` the caller's own, by ours."""

    func: Any
    op: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    first: PlacedTensor
    given: dict[int, Any]
    bases: dict[int, torch.Tensor] = field(default_factory=dict)  # whole values of what views show, by base

    @staticmethod
    def of(func: Any, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SplitCall:
        first = next(tensor for tensor in tensors_in(args, kwargs) if isinstance(tensor, PlacedTensor))
        given: dict[int, Any] = {}
        made: dict[int, Any] = {}

        def ours(value: torch.Tensor) -> Any:
            if not isinstance(value, DTensor):
                return value
            if id(value) not in made:
                made[id(value)] = value if isinstance(value, PlacedTensor) else placed(value, first)
                given[id(made[id(value)])] = value
            return made[id(value)]

        options = {name: _each(value, ours) for name, value in kwargs.items()}
        return SplitCall(func, op, _each(tuple(args), ours), options, first, given)

    @property
    def world(self) -> World:
        return self.first.place.world

    @property
    def name(self) -> str:
        return self.op.name

    def tensors(self) -> list[torch.Tensor]:
        return list(tensors_in(self.args, self.kwargs))

    def written(self) -> list[torch.Tensor]:
        """What the op writes."""
        written = []
        for key in self.op.writes:
            value = self.kwargs.get(key) if isinstance(key, str) else self.args[key] if key < len(self.args) else None
            written += [value] if isinstance(value, torch.Tensor) else list(value or ())
        return written

    def map(self, change: Callable[[torch.Tensor], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other tensors, each changed once."""
        memo: dict[int, Any] = {}

        def once(value: torch.Tensor) -> Any:
            if id(value) not in memo:
                memo[id(value)] = change(value)
            return memo[id(value)]

        return _each(self.args, once), {name: _each(value, once) for name, value in self.kwargs.items()}

    def agree(self) -> None:
        """Check that plain operands are the same on every rank."""
        unread = self.written() if self.op.is_fill or any(isinstance(key, str) for key in self.op.writes) else []
        plain = [
            tensor
            for tensor in self.tensors()
            if tensor.ndim and not isinstance(tensor, DTensor) and not any(tensor is other for other in unread)
        ]
        self.world.agree(self.name, plain)

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole value of an operand; a view shows the same memory as others of its base."""
        if not isinstance(tensor, PlacedTensor):
            return tensor
        base = tensor.base if isinstance(tensor, ViewOf) else tensor
        key = id(local_of(base))
        if key not in self.bases:
            fills = self.op.is_fill and base is tensor and base is self.args[0] and is_split(base)
            value = whole_value(base, self.name) if not fills else _empty(base)
            self.bases[key] = value
        return tensor.of(self.bases[key]) if isinstance(tensor, ViewOf) else self.bases[key]

    def on_whole_values(self) -> Any:
        """Run the op on whole values, and split again what it wrote."""
        self.agree()
        before = {}

        def change(tensor: torch.Tensor) -> torch.Tensor:
            value = self.whole(tensor)
            before[id(value)] = tensor
            return value

        args, kwargs = self.map(change)
        shapes = [(tensor, tensor.shape) for tensor in self.written()]
        try:
            out = self.func(*args, **kwargs)
        except RuntimeError as error:
            if "resize storage" not in str(error):
                raise
            raise self._other_shape(shapes[0][1]) from error
        self._write_back()
        for tensor, shape in shapes:
            if isinstance(tensor, PlacedTensor) and self.whole(tensor).shape != shape:
                raise self._other_shape(shape)

        def result(value: torch.Tensor) -> Any:
            known = before.get(id(value))
            if known is not None and (self.op.writes or known is value):
                return self.given.get(id(known), known)
            return self.wrap_whole(value)

        return _each(out, result)

    def _other_shape(self, shape: torch.Size) -> AutoparError:
        return AutoparError(f"'{self.name}' would change the shape of a tensor of a parallel model, {shape}.")

    def _write_back(self) -> None:
        for tensor in self.written():
            if isinstance(tensor, PlacedTensor):
                base = tensor.base if isinstance(tensor, ViewOf) else tensor
                if not base.place.is_replicated and base.place.is_here:
                    local = local_of(base)
                    local.copy_(base.place.part(self.bases[id(local)]))

    def wrap_whole(self, value: torch.Tensor) -> Any:
        """What every rank holds whole, as one of ours."""
        if value.device.type == "meta":
            return value
        if value.layout is not torch.strided:
            raise refusal(f"{self.name} with a result of {value.layout}")
        return self.first.around(value, self.world.everywhere(value.ndim), value.shape)

    def wrap_parts(self, out: Any, like: PlacedTensor) -> Any:
        """What was computed on the parts of `like`, as tensors that lie there."""
        if isinstance(out, torch.Tensor):
            assert out.shape == local_of(like).shape, (self.name, out.shape, like.shape)
            return like.around(out, like.place, like.shape)
        return type(out)(self.wrap_parts(item, like) for item in out) if isinstance(out, (list, tuple)) else out


def _each(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A value with other tensors, in its lists and tuples too. (No closure that calls itself: it would be a circle, and
    keep whole values until Python looks for those.)"""
    if isinstance(value, torch.Tensor):
        return change(value)
    return type(value)(_each(item, change) for item in value) if type(value) in (list, tuple) else value


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
