"""Torch's ops on tensors of which each rank holds a part: every op gives one device's value on every rank.

Below autograd, so that each op is one of these:

- an alias, or a view: of a split tensor a view is the way from its base (`ViewOf`), read anew and written through;
- element by element: on the parts, where another operand has the shape of the result;
- a reduction to one number: on the parts, then over the ranks (split_reductions.py);
- on lists: item by item (lists.py);
- random: one device's numbers (draws.py);
- anything else: on the whole values, whose result every rank then holds. What it wrote is split again.

A plain tensor with dims among the operands must be the same on every rank, which is checked. One without dims is a
number, such as a step count, and is taken as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.parallel.tensors import draws, list_norms, lists, split_reductions
from autopar.parallel.tensors.placed import PlacedTensor, ViewOf, is_split, refusal, tensors_in
from autopar.parallel.tensors.schemas import ALIASES, LIKES, NAMESPACES_OF_COLLECTIVES, TURNS, Op, op_of
from autopar.parallel.tensors.split_call import SplitCall
from autopar.torch_compat import OpOverload, change_in_place, local_of, spec_of

_COLLECTIVE = (
    "'{}' of torch.distributed is called with a tensor of a parallel model, of which ranks hold parts: what it gives "
    "would be another value on each mesh. Parameters are alike on all ranks, and gradients those of the whole batch, "
    "already: leave the call out. What is .full_tensor() or .item() of it is a plain value that ranks may exchange."
)


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an op on the tensors of a parallel model, on every rank. Every rank must call it."""
    if not isinstance(func, OpOverload):
        raise refusal(str(func))
    if torch.is_inference_mode_enabled():  # where a view of a parameter could not be made
        with torch.inference_mode(False), torch.no_grad():
            return run(func, args, kwargs)
    op = op_of(func)
    if op.is_pointwise_list and (quick := lists.on_parts_alike(func, op, args, kwargs)) is not NotImplemented:
        return quick
    if op.name in ALIASES and isinstance(args[0], PlacedTensor):
        return _alias(func, op, args[0])
    call = SplitCall.of(func, op, args, kwargs)
    if op.name in TURNS:
        return _turn(call)
    if op.moves_memory:
        raise refusal(op.name)
    if op.namespace in NAMESPACES_OF_COLLECTIVES:
        raise AutoparError(_COLLECTIVE.format(op.name.strip("_")))
    for way in (
        _like,
        _view,
        draws.draw,
        split_reductions.unscale,
        list_norms.norms,
        lists.on_parts,
        split_reductions.reduce,
    ):
        if (out := way(call)) is not NotImplemented:
            return out
    if op.is_pointwise and (out := _on_parts(call)) is not NotImplemented:
        return out
    return call.on_whole_values()


def _alias(func: Any, op: Op, tensor: PlacedTensor) -> Any:
    if op.name == "detach_":
        return tensor
    if isinstance(tensor, ViewOf):
        return tensor.view_by((func, (), {}, None))
    return type(tensor).make(type(tensor), func(local_of(tensor)), tensor.place, spec_of(tensor))


def _turn(call: SplitCall) -> Any:
    """Another shape in place, for what every rank holds whole: functions of torch do it to what they computed."""
    tensor: Any = call.args[0]
    is_replicated = isinstance(tensor, PlacedTensor) and not isinstance(tensor, ViewOf) and tensor.place.is_replicated
    if not is_replicated or isinstance(tensor, nn.Parameter) or (tensor.requires_grad and tensor.is_leaf):
        raise refusal(call.name)
    part = local_of(tensor).detach()  # another tensor of the same memory: a detached one of ours may hold this one
    call.func(part, *call.args[1:], **call.kwargs)
    turned = call.wrap_whole(part)
    change_in_place(tensor, lambda outer: call.func(outer, *call.args[1:], **call.kwargs), part, spec_of(turned))
    tensor.place = turned.place
    return call.given.get(id(tensor), tensor)


def _like(call: SplitCall) -> Any:
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


def _view(call: SplitCall) -> Any:
    """A view of a split tensor remembers its way; of a whole one it is a view of the memory."""
    base = call.args[0] if call.args else None
    if not call.op.is_view or not isinstance(base, PlacedTensor):
        return NotImplemented
    if not isinstance(base, ViewOf) and base.place.is_replicated:
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


def _on_parts(call: SplitCall) -> Any:
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
    if not place.is_here:  # what a kernel refuses, as an order of complex numbers, it refuses on all ranks
        args, kwargs = call.map(lambda t: local_of(like).new_ones((1,) * t.ndim, dtype=t.dtype))
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
