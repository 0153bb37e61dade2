"""Torch's ops on tensors of which each rank holds a part: every op gives one device's value on every rank.

Below autograd, so that each op is one of these:

- an alias, or a view: of a split tensor a view is the way from its base (`ViewOf`), read anew and written through;
- element by element: on the parts, where another operand has the shape of the result;
- a reduction to one number: on the parts, then over the ranks (reductions.py);
- on lists: item by item (lists.py);
- random: one device's numbers (draws.py);
- anything else: on the whole values, whose result every rank then holds. What it wrote is split again.

A plain tensor with dims among the operands must be the same on every rank, which is checked. One without dims is a
number, such as a step count, and is taken as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.parallel import draws, lists, reductions
from autopar.parallel.place import World
from autopar.parallel.placed import PlacedTensor, ViewOf, is_split, placed, refusal, tensors_in, whole_value
from autopar.parallel.schemas import ALIASES, FILLS, LIKES, NAMESPACES_OF_COLLECTIVES, TURNS, Op, op_of
from autopar.torch_compat import OpOverload, change_in_place, local_of, spec_of


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an op on the tensors of a parallel model, on every rank. Every rank must call it."""
    if not isinstance(func, OpOverload):
        raise refusal(str(func))
    op = op_of(func)
    if op.is_pointwise_list and (quick := lists.on_parts_alike(func, op, args, kwargs)) is not NotImplemented:
        return quick
    if op.name in ALIASES and isinstance(args[0], PlacedTensor):
        return _alias(func, op, args[0])
    call = Call.of(func, op, args, kwargs)
    if op.name in TURNS:
        return _turn(call)
    if op.moves_memory or op.namespace in NAMESPACES_OF_COLLECTIVES:
        raise refusal(op.name)
    for way in (_like, _view, draws.draw, reductions.unscale, reductions.norms, lists.on_parts, reductions.reduce):
        if (out := way(call)) is not NotImplemented:
            return out
    if op.is_pointwise and (out := _on_parts(call)) is not NotImplemented:
        return out
    return call.on_whole_values()


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an op. `args` and `kwargs` have our tensors for all DTensors; `given` the caller's own, by ours."""

    func: Any
    op: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    first: PlacedTensor
    given: dict[int, Any]
    bases: dict[int, torch.Tensor] = field(default_factory=dict)  # whole values of what views show, by base

    @staticmethod
    def of(func: Any, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        first = next(tensor for tensor in tensors_in(args, kwargs) if isinstance(tensor, PlacedTensor))
        given: dict[int, Any] = {}
        made: dict[int, Any] = {}

        def ours(value: Any) -> Any:
            if isinstance(value, DTensor):
                if id(value) not in made:
                    made[id(value)] = value if isinstance(value, PlacedTensor) else placed(value, first)
                    given[id(made[id(value)])] = value
                return made[id(value)]
            return type(value)(map(ours, value)) if type(value) in (list, tuple) else value

        return Call(func, op, ours(tuple(args)), {name: ours(value) for name, value in kwargs.items()}, first, given)

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
        found = []
        for key in self.op.writes:
            value = self.kwargs.get(key) if isinstance(key, str) else self.args[key] if key < len(self.args) else None
            found += [value] if isinstance(value, torch.Tensor) else list(value or ())
        return found

    def map(self, change: Callable[[torch.Tensor], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other tensors, each changed once."""
        memo: dict[int, Any] = {}

        def one(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if id(value) not in memo:
                    memo[id(value)] = change(value)
                return memo[id(value)]
            return type(value)(map(one, value)) if type(value) in (list, tuple) else value

        return tuple(map(one, self.args)), {name: one(value) for name, value in self.kwargs.items()}

    def agree(self) -> None:
        """Check that plain operands are the same on every rank."""
        unread = self.written() if self.name in FILLS or any(isinstance(key, str) for key in self.op.writes) else []
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
            fills = self.name in FILLS and base is tensor and base is self.args[0] and is_split(base)
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

        def result(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                known = before.get(id(value))
                if known is not None and (self.op.writes or known is value):
                    return self.given.get(id(known), known)
                return self.wrap_whole(value)
            return type(value)(map(result, value)) if type(value) in (list, tuple) else value

        return result(out)

    def _other_shape(self, shape: torch.Size) -> AutoparError:
        return AutoparError(f"'{self.name}' would change the shape of a tensor of a parallel model, {shape}.")

    def _write_back(self) -> None:
        for tensor in self.written():
            if isinstance(tensor, PlacedTensor):
                base = tensor.base if isinstance(tensor, ViewOf) else tensor
                if not base.place.is_whole and base.place.is_here:
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


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _alias(func: Any, op: Op, tensor: PlacedTensor) -> Any:
    if op.name == "detach_":
        return tensor
    if isinstance(tensor, ViewOf):
        return tensor.view_by((func, (), {}, None))
    return type(tensor).make(type(tensor), func(local_of(tensor)), tensor.place, spec_of(tensor))


def _turn(call: Call) -> Any:
    """Another shape in place, for what every rank holds whole: functions of torch do it to what they computed."""
    tensor: Any = call.args[0]
    is_whole = isinstance(tensor, PlacedTensor) and not isinstance(tensor, ViewOf) and tensor.place.is_whole
    if not is_whole or isinstance(tensor, nn.Parameter) or (tensor.requires_grad and tensor.is_leaf):
        raise refusal(call.name)
    part = local_of(tensor).detach()  # another tensor of the same memory: a detached one of ours may hold this one
    call.func(part, *call.args[1:], **call.kwargs)
    turned = call.wrap_whole(part)
    change_in_place(tensor, lambda outer: call.func(outer, *call.args[1:], **call.kwargs), part, spec_of(turned))
    tensor.place = turned.place
    return call.given.get(id(tensor), tensor)


def _like(call: Call) -> Any:
    """A tensor of the shape and place of another one."""
    like = call.args[0] if call.args else None
    if call.name not in LIKES or not isinstance(like, PlacedTensor) or isinstance(like, ViewOf):
        return NotImplemented
    if call.kwargs.get("layout") not in (None, torch.strided):
        return NotImplemented
    args = call.map(lambda tensor: local_of(tensor) if isinstance(tensor, PlacedTensor) else tensor)[0]
    made = call.func(*args, **call.kwargs)
    if made.device.type == "meta":
        return torch.empty_strided(like.shape, like.stride(), dtype=made.dtype, device="meta")
    return call.wrap_parts(made, like)


def _view(call: Call) -> Any:
    """A view of a split tensor remembers its way; of a whole one it is a view of the memory."""
    base = call.args[0] if call.args else None
    if not call.op.is_view or not isinstance(base, PlacedTensor):
        return NotImplemented
    if not isinstance(base, ViewOf) and base.place.is_whole:
        out = call.func(local_of(base), *call.args[1:], **call.kwargs)
        return [call.wrap_whole(part) for part in out] if isinstance(out, (list, tuple)) else call.wrap_whole(out)
    rest = call.args[1:]
    if any(isinstance(value, torch.Tensor) for value in tensors_in(rest, call.kwargs)):
        raise refusal(call.name)
    shown = base.view_by((call.func, rest, call.kwargs, None)) if _is_single(call.func) else None
    if shown is not None:
        return shown
    meta = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
    count = len(call.func(meta, *rest, **call.kwargs))
    return [base.view_by((call.func, rest, call.kwargs, at)) for at in range(count)]


def _is_single(func: Any) -> bool:
    returns = func._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor"


def _on_parts(call: Call) -> Any:
    """Element by element: on the parts, if one split operand has the shape of the result."""
    tensors, written = call.tensors(), call.written()
    try:
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    except RuntimeError:
        return NotImplemented  # torch says it of the whole ones
    if call.kwargs.get("layout") not in (None, torch.strided):
        return NotImplemented
    split: list[Any] = [t for t in written or tensors if is_split(t) and t.shape == shape]
    if not split or (written and (len(written) > 1 or written[0] is not split[0])):
        return NotImplemented
    like: PlacedTensor = split[0]
    if call.kwargs.get("device") is not None and torch.device(call.kwargs["device"]).type == "meta":
        return NotImplemented
    call.agree()
    place = like.place

    def part(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, PlacedTensor):
            if not isinstance(tensor, ViewOf) and tensor.place is place and tensor.shape == shape:
                return local_of(tensor)
            tensor = call.whole(tensor)
        return place.part_of_operand(tensor, shape) if tensor.ndim else tensor

    args, kwargs = call.map(part)
    if not place.is_here:
        args, kwargs = call.map(lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"))
        if "device" in kwargs:
            kwargs["device"] = None
    out = call.func(*args, **kwargs)
    if written:
        return call.given.get(id(like), like)
    if not place.is_here:
        out = _nothing(out, local_of(like))
    return call.wrap_parts(out, like)


def _nothing(out: Any, like: torch.Tensor) -> Any:
    """The parts of results on a rank that has none of the operands."""
    if isinstance(out, torch.Tensor):
        return like.new_empty(0, dtype=out.dtype)
    return type(out)(_nothing(item, like) for item in out) if isinstance(out, (list, tuple)) else out
