"""Parameters of a pipeline: each lies on the ranks of one `pp` coordinate, its home, and is known to all ranks.

On its home a parameter is a DTensor over the stage's own mesh, the device mesh without `pp`; on the other ranks it is
the same DTensor without elements, as torch has it for a rank that is not of a tensor's mesh. So shapes, placements,
checkpoints and pickles tell the truth, and every rank has the same parameters, gradients and optimizer states.

torch leaves such a rank out of all that is computed, collectives as well, and knows nothing that spans two
meshes. Here every op is one of four: element by element it runs on the parts, the empty ones too; a norm is summed
over all stages; a reduction reads the whole value, sent to all ranks; anything else is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from autopar.chunks import chunks, write_items
from autopar.errors import AutoparError
from autopar.parameter import ParameterTensor
from autopar.torch_compat import (
    SUBCLASSED_DTENSORS,
    StridedShard,
    local_of,
    no_torch_function,
    spec_of,
    take_in_lists,
    with_spec,
)

_MAPS = """
    _to_copy abs add addcdiv addcmul alias bfloat16 bitwise_and bitwise_not bitwise_or ceil clamp clamp_max clamp_min
    clone copy copysign cpu cuda detach div double empty_like eq erf exp expm1 fill float floor frac full_like ge gt
    half isfinite isinf isnan le lerp log log1p logical_and logical_not logical_or lt masked_fill maximum minimum mul
    nan_to_num ne neg ones_like pow reciprocal round rsqrt rsub sgn sigmoid sign sqrt square sub tanh to true_divide
    trunc type_as where xlogy zero zeros_like
"""
_OPERATORS = {f"__{op}__": op for op in ("add", "sub", "mul", "pow", "neg", "eq", "ne", "lt", "le", "gt", "ge")}
_OPERATORS |= {f"__r{op}__": op for op in ("add", "sub", "mul", "pow")} | {
    f"__i{op}__": f"{op}_" for op in ("add", "sub", "mul")
}
_OPERATORS |= {
    "__truediv__": "div",
    "__rtruediv__": "div",
    "__itruediv__": "div_",
    "__rdiv__": "div",
    "__idiv__": "div_",
}
_OPERATORS |= {"__and__": "bitwise_and", "__or__": "bitwise_or", "__invert__": "bitwise_not"}
_FUSED = frozenset({"_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"})
_NORMS = frozenset({"linalg_vector_norm", "norm", "vector_norm"})
_READS = """
    _is_all_true _is_any_true _local_scalar_dense all allclose amax amin any argmax argmin bool count_nonzero equal
    isclose item linalg_vector_norm max mean median min norm prod std sum tolist var vector_norm
"""
_MAP, _READ = frozenset(_MAPS.split()), frozenset(_READS.split())
_SCALED = "_amp_foreach_non_finite_check_and_unscale_"


@dataclass(frozen=True, slots=True, eq=False)
class Stages:
    """The mesh of all ranks, and that of each stage, by its coordinate on `pp`."""

    everyone: DeviceMesh
    meshes: tuple[DeviceMesh, ...]


class StageTensor(ParameterTensor):
    """A parameter, gradient or optimizer state that lies on one stage, or (not homed) on all ranks."""

    __slots__ = ("stages",)
    stages: Stages

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, func._schema.name.removeprefix("aten::"), args, kwargs or {})

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The whole value, on every rank; every rank must call this."""
        return _Full.apply(self)  # type: ignore[no-untyped-call, no-any-return]

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **options: Any) -> DTensor:
        """The whole value as a DTensor of all ranks; any other placement is refused."""
        whole = placements and all(placement.is_replicate() for placement in placements)
        if not whole or options or device_mesh not in (None, spec_of(self).mesh):
            raise AutoparError(_refusal("redistribute"))
        return _everywhere(self.full_tensor(), self.stages)

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise AutoparError(_refusal("data = ..."))

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return write_items(fqn, self)

    def __create_chunk_list__(self) -> list[Any]:
        return [chunk for chunk, _ in chunks(self).values()]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return chunks(self)[index.offset][1]

    def __deepcopy__(self, memo: dict[int, Any]) -> StageTensor:
        made = stage_tensor(local_of(self).detach().clone(), spec_of(self), self.stages, self.requires_grad)
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        made.grad = copy.deepcopy(self.grad, memo)
        return made

    def _like(self, part: torch.Tensor, spec: Any) -> StageTensor:
        return stage_tensor(part, spec, self.stages)

    def _takes_number(self, spec: Any) -> bool:
        return spec.mesh is self.stages.everyone and spec.is_replicated()


take_in_lists(StageTensor)


def stage_tensor(part: torch.Tensor, spec: Any, stages: Stages, requires_grad: bool = False) -> StageTensor:
    """This rank's part, placed as `spec` says."""
    made: Any = with_spec(StageTensor, part, spec, requires_grad)
    made.stages = stages
    return made


def whole_value(tensor: DTensor) -> torch.Tensor:
    """The whole value of a DTensor on any of the meshes, on every rank. Every rank must call this."""
    spec = spec_of(tensor)
    if not SUBCLASSED_DTENSORS and any(isinstance(placement, StridedShard) for placement in spec.placements):
        return _summed_value(tensor)
    if spec.mesh.get_coordinate() is not None:
        value = with_spec(DTensor, local_of(tensor).detach(), spec).full_tensor()
    else:
        value = torch.empty(spec.shape, dtype=tensor.dtype, device=spec.mesh.device_type)
    if spec.mesh.size() < dist.get_world_size():
        if value.numel() == local_of(tensor).numel():  # the part itself: a whole value is memory of its own everywhere
            value = value.clone()
        value = value.contiguous()
        dist.broadcast(value, src=int(spec.mesh.mesh.flatten()[0]))
    return value


def _summed_value(tensor: DTensor) -> torch.Tensor:
    """As `whole_value`, for a split that DTensor before torch 2.13 cannot undo."""
    value = torch.zeros(tensor.shape, dtype=tensor.dtype, device=spec_of(tensor).mesh.device_type)
    if _counts(spec_of(tensor)):
        for chunk, piece in chunks(tensor).values():
            at = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            value[at] = piece
    dist.all_reduce(value)
    return value


def part_of(value: torch.Tensor, spec: Any) -> torch.Tensor:
    """This rank's part of a whole value, in memory of its own; empty on a rank that is not of the mesh."""
    if spec.mesh.get_coordinate() is None:
        return value.new_empty(0)
    part = local_of(distribute_tensor(value.detach(), spec.mesh, spec.placements, src_data_rank=None))
    return part.clone(memory_format=torch.contiguous_format)


class _Full(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: StageTensor) -> torch.Tensor:  # type: ignore[override]
        return whole_value(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        raise AutoparError(_refusal("a gradient through full_tensor()"))


def _run(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    base = name.rstrip("_") if not name.startswith("__") else name
    tensors = [t for arg in (*args, *kwargs.values()) for t in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    ours = [t for t in tensors if isinstance(t, StageTensor)]
    stages = ours[0].stages
    records = torch.is_grad_enabled() and base not in ("detach", "alias") and not base.endswith("_like")
    if records and any(t.requires_grad for t in ours):
        raise AutoparError(
            f"'{name}' on a parameter of a pipeline would record a gradient, and no step runs it. Compute it in "
            f"loss_fn, or under torch.no_grad()."
        )
    if name == "_foreach_norm" and (options := _norm_options(*args[1:], **kwargs)) is not None:
        return _norms(args[0], *options, stages)
    if name == _SCALED:
        func(list(map(_local, args[0])), *map(_local, args[1:]))
        dist.all_reduce(_local(args[1]), op=dist.ReduceOp.MAX)  # what one stage found, all have
        return None
    if name in _FUSED or (name.startswith("_foreach_") and base.removeprefix("_foreach_") in _MAP):
        return _map_lists(func, args, kwargs, stages)
    if base in _MAP:
        return _map(func, name, args, kwargs, ours[0])
    if name in _NORMS and (options := _norm_options(*args[1:], **kwargs)) is not None:
        return _norms(args[:1], *options, stages)[0]
    if name in _READ:
        return func(*(_read(arg, stages) for arg in args), **{key: _read(arg, stages) for key, arg in kwargs.items()})
    raise AutoparError(_refusal(name))


def _refusal(name: str) -> str:
    return (
        f"'{name}' is nothing that a parameter of a pipeline can do, of which most ranks hold no element. Call "
        f".full_tensor() on every rank for its value; write it by load_state_dict() or copy_()."
    )


# -- element by element ---------------------------------------------------------------------------------------------


def _map(func: Any, name: str, args: Any, kwargs: Any, like: StageTensor) -> Any:
    """An element-wise op on the parts, placed as what it writes to, else as the first of ours."""
    in_place = name.endswith("_")
    target = kwargs.get("out", args[0] if in_place else like)
    if not isinstance(target, DTensor):
        raise AutoparError(f"'{name}' writes a part of a parameter to a whole tensor. Call .full_tensor() first.")
    spec = spec_of(target)
    part = partial(_part, spec=spec, name=name)
    out = func(*map(part, args), **{key: part(value) for key, value in kwargs.items()})
    if in_place or "out" in kwargs:
        return target
    return stage_tensor(out, _retyped(spec, out), like.stages)


def _map_lists(func: Any, args: Any, kwargs: Any, stages: Stages) -> Any:
    """The same for lists: items are placed as those of the first list."""
    specs = [spec_of(item) if isinstance(item, DTensor) else None for item in args[0]]
    name = func.__name__

    def parts(arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return [_part(item, spec, name) for item, spec in zip(arg, specs, strict=False)] if len(arg) else arg
        return whole_value(arg) if isinstance(arg, DTensor) and arg.ndim == 0 else _part(arg, specs[0], name)

    out = func(*map(parts, args), **{key: parts(value) for key, value in kwargs.items()})
    if name.split(".")[0].endswith("_"):
        return None if out is None else args[0]
    return out and [stage_tensor(p, _retyped(spec, p), stages) for p, spec in zip(out, specs, strict=True)]


def _part(value: Any, spec: Any, name: str) -> Any:
    """An operand as the part that goes with the parts of `spec`."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, DTensor):
        own = spec_of(value)
        if own is spec:
            return local_of(value)
        if spec is not None and own.shape == spec.shape:
            return local_of(value) if _same_place(own, spec) else part_of(whole_value(value), spec)
        if value.ndim == 0:
            return whole_value(value)
    elif value.ndim == 0 or spec is None:
        return value
    raise AutoparError(
        f"'{name}' of a parameter of a pipeline{'' if spec is None else f' of shape {list(spec.shape)}'} and a "
        f"{'DTensor' if isinstance(value, DTensor) else 'tensor'} of shape {list(value.shape)}: both must be "
        f"DTensors of one shape, or one a number."
    )


def _same_place(a: Any, b: Any) -> bool:
    same = a.mesh is b.mesh or (a.mesh.mesh.shape == b.mesh.mesh.shape and bool((a.mesh.mesh == b.mesh.mesh).all()))
    return same and a.placements == b.placements


def _retyped(spec: Any, part: torch.Tensor) -> Any:
    if part.dtype == spec.tensor_meta.dtype:
        return spec
    stride, part = spec.tensor_meta.stride, part if spec.shape else part.new_empty(())
    made = DTensor.from_local(part, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=stride)
    return spec_of(made)


def _local(value: Any) -> Any:
    return local_of(value) if isinstance(value, DTensor) else value


# -- what all ranks take part in ------------------------------------------------------------------------------------


def _norm_options(
    ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None, **others: Any
) -> tuple[float, Any] | None:
    """The order and dtype of a norm of all elements; None for any other norm."""
    if isinstance(dim, torch.dtype):  # as _foreach_norm has it
        dim, dtype = None, dim
    p = others.pop("p", ord)
    p = 2 if p is None or p == "fro" else p
    plain = dim is None and not keepdim and not others and isinstance(p, (int, float)) and p > 0
    return (float(p), dtype) if plain else None


def _norms(tensors: Iterable[Any], order: float, dtype: Any, stages: Stages) -> list[torch.Tensor]:
    """The norms of whole tensors, the same on every rank, by one collective for all."""
    tensors = list(tensors)
    if not all(isinstance(tensor, DTensor) for tensor in tensors):
        raise AutoparError("a norm over parameters of a pipeline and plain tensors: take the two norms one by one.")
    parts = [
        torch.linalg.vector_norm(local_of(tensor), order, dtype=dtype).double()
        if _counts(spec_of(tensor)) and local_of(tensor).numel()
        else torch.zeros((), dtype=torch.float64, device=local_of(tensor).device)
        for tensor in tensors
    ]
    total = torch.stack(parts)
    if order == float("inf"):
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
    else:
        total = total.pow(order)
        dist.all_reduce(total)
        total = total.pow(1 / order)
    norms = [norm.to(dtype or tensor.dtype) for norm, tensor in zip(total.unbind(), tensors, strict=True)]
    alike = {norm.dtype: norm for norm in norms}
    specs = {dtype: spec_of(_everywhere(norm, stages)) for dtype, norm in alike.items()}
    return [with_spec(DTensor, norm, specs[norm.dtype]) for norm in norms]


def _everywhere(value: torch.Tensor, stages: Stages) -> DTensor:
    """What every rank holds, as a DTensor that says so."""
    everyone = stages.everyone
    return DTensor.from_local(value, everyone, [Replicate()] * everyone.ndim, run_check=False)


def _counts(spec: Any) -> bool:
    """Whether this rank's part is in a sum over all ranks: once, though several may hold it."""
    coord = spec.mesh.get_coordinate()
    return coord is not None and not any(
        at and placement.is_replicate() for at, placement in zip(coord, spec.placements, strict=True)
    )


def _read(value: Any, stages: Stages) -> Any:
    """A whole value for an op that reads all of it, on every rank."""
    if not isinstance(value, DTensor):
        return value
    return _everywhere(whole_value(value), stages)


# -- torch before 2.13 ----------------------------------------------------------------------------------------------


_METADATA = """
    __dir__ __format__ __get__ __hash__ __len__ __repr__ __set__ _is_view _use_count can_cast data_ptr dim element_size
    get_device has_names is_complex is_contiguous is_floating_point is_inference is_same_size is_shared is_signed
    ndimension nelement numel register_hook register_post_accumulate_grad_hook requires_grad_ result_type retain_grad
    size storage_offset stride untyped_storage
"""
_ABOUT, _VIEWS = frozenset(_METADATA.split()), frozenset({"T", "mT", "H", "mH", "real", "imag"})


def _torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """DTensor takes the ops of its subclasses itself there: what Python calls is as far down as one gets."""
    with no_torch_function():
        name = _OPERATORS.get(func.__name__, func.__name__)
        if name == "__get__" and func.__self__.__name__ in _VIEWS:
            raise AutoparError(_refusal(func.__self__.__name__))
        if name in _ABOUT:
            return func(*args, **(kwargs or {}))
        out = _run(func, name, args, kwargs or {})
        if name.endswith("_") and not name.startswith("_") and isinstance(out, DTensor):
            increment_version(out)
        return out


if not SUBCLASSED_DTENSORS:
    StageTensor.__torch_function__ = classmethod(_torch_function)  # type: ignore[assignment]
