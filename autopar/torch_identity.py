"""Private torch names by which a tensor becomes another one in place, each with its reason.

Whoever holds a parameter (an optimizer, a list, a hook, a weak reference) then holds the parallel one.

- `torch._C._swap_tensor_impl`: exchanges what two Python objects stand for. The public `torch.utils.swap_tensors` is
  this and checks: it refuses Python's weak references, which stay right, and leaves hooks named on the one and called
  on the other. `tensor.data = other` keeps the kind of tensor, and changes the shape.
- `DTensor.__new__` with another class, and all that a DTensor defines: objects of as many bytes as a parameter has.
  Those of DTensor itself are larger, for its `__slots__`, and CPython lets no object become larger.
- `DTensorSpec`, `TensorMeta`: what torch's own DTensors read of the other operands of an op. Ours refuses to be read
  there.
- `Tensor._use_count`: whether a view or a graph holds the tensor behind a Python object.
- `torch._C._storage_Use_Count`, `UntypedStorage._cdata`: how many tensors lie in some memory.
- `Tensor._make_subclass`: an object of a user's class of parameters, without a call of its constructor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import methodcaller
from typing import Any, Self, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from autopar.torch_compat import hooks_of

_CLASS: Any = object.__dict__["__class__"]
_use_count: Callable[[torch.Tensor], int] = methodcaller("_use_count")
# What the class has for itself, or what stands in the `__dict__` of its tensors.
_OWN = frozenset(
    [
        "__new__",
        "__init__",
        "__slots__",
        "__dict__",
        "__weakref__",
        "__module__",
        "__doc__",
        "__class__",
        "__annotations__",
        "__torch_function__",
        "_local_tensor",
        "_spec",
        "__static_attributes__",
        "__firstlineno__",
        "__annotate_func__",
        "__annotations_cache__",
    ]
)


class SlotlessDTensor(torch.Tensor):
    """All that a DTensor has, in an object as large as any parameter's, so that a plain one can become it (`become`).

    `isinstance(_, DTensor)` is true of it, for what `__class__` says; `issubclass(type(_), DTensor)` is not.
    """

    __torch_function__: Any = torch._C._disabled_torch_function_impl
    __new__ = DTensor.__new__  # type: ignore[assignment]

    @property
    def __class__(self) -> type[Any]:  # type: ignore[override]
        return DTensor

    @__class__.setter
    def __class__(self, _: type[Any]) -> None:
        raise self.class_refused()

    @staticmethod
    def class_refused() -> Exception:
        """What is raised where something, such as `torch.utils.swap_tensors`, sets the class."""
        raise NotImplementedError


for _name, _value in vars(DTensor).items():
    if _name not in _OWN:
        setattr(SlotlessDTensor, _name, _value)


class GuardedSpec(DTensorSpec):
    """What torch knows of where a tensor lies, for everyone but torch's own ops on DTensors.

    They would take a tensor of a `SlotlessDTensor` that stands behind a DTensor, and compute with it by placements,
    which cannot say every layout. Each looks up first what it knows of its operands' specs, by their hashes.
    """

    @classmethod
    def of(
        cls, device_mesh: DeviceMesh, placed: tuple[Placement, ...], shape: torch.Size, stride: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Self:  # fmt: skip
        """Make the spec of a tensor. `DTensor.from_local` would load torch's compiler: 0.7 CPU seconds a start."""
        made: Any = DTensorSpec(device_mesh, placed, tensor_meta=TensorMeta(shape, stride, dtype))
        made.__class__ = cls
        return cast(Self, made)

    def plain(self) -> DTensorSpec:
        """Make the spec of a DTensor of torch's."""
        made: Any = copy.copy(self)
        made.__class__ = DTensorSpec
        return cast(DTensorSpec, made)

    def __hash__(self) -> int:
        raise self.refused()

    @staticmethod
    def refused() -> Exception:
        """What torch's own ops on DTensors are told."""
        raise NotImplementedError


def become(tensor: torch.Tensor, other: torch.Tensor, stale: Callable[[], Exception]) -> None:
    """Let a leaf be what `other` is, in place, its gradient too. Hooks and the attributes that users gave it stay,
    except where `other` has its own. `other` is not used again.

    stale: the error of a backward pass that comes to the old value. Raises TypeError or RuntimeError, and changes
    nothing, for what `fixed_by` names.
    """
    hooks, kind = hooks_of(tensor), type(tensor)
    if tensor.requires_grad and _use_count(tensor) > 1:  # a graph or a view of it may be alive
        torch.autograd.graph.get_gradient_edge(tensor).node.register_prehook(_Stale(stale))
    if kind is not type(other):
        _CLASS.__set__(tensor, type(other))
    try:
        torch._C._swap_tensor_impl(tensor, other)
    except RuntimeError:
        _CLASS.__set__(tensor, kind)
        raise
    _CLASS.__set__(other, kind)  # a graph may hold the old value, and look at its object
    mine, its = vars(tensor), vars(other)
    before = {name: mine[name] for name in its if name in mine}
    mine.update(its)
    its.clear()
    its.update(before)
    if hooks[0]:
        tensor._backward_hooks = hooks[0]
    if hooks[1]:
        tensor._post_accumulate_grad_hooks = hooks[1]


class _Stale:
    """A hook of the node where gradients of an old value arrive."""

    def __init__(self, error: Callable[[], Exception]) -> None:
        self.error = error

    def __call__(self, _gradients: Any) -> None:
        raise self.error()


def fixed_by(tensor: torch.Tensor) -> str | None:
    """Why a leaf cannot become a `SlotlessDTensor`: "class", "weak reference", "node hook", or None if it can."""
    try:
        _CLASS.__set__(torch.Tensor._make_subclass(type(tensor), torch.empty(0, device="cpu")), SlotlessDTensor)
    except TypeError:
        return "class"
    other = torch.empty(0, device="cpu")
    try:
        torch._C._swap_tensor_impl(tensor, other)
    except RuntimeError:
        return "weak reference"
    torch._C._swap_tensor_impl(tensor, other)
    return "node hook" if _has_node_hooks(tensor) else None


def _has_node_hooks(tensor: torch.Tensor) -> bool:
    """Whether the node where the gradient of a leaf arrives has hooks of its own, as old ways to overlap have them."""
    if not tensor.requires_grad or _use_count(tensor) == 1:  # nobody keeps a node
        return False
    node, found = torch.autograd.graph.get_gradient_edge(tensor).node, 0
    for register in (node.register_hook, node.register_prehook):
        handle = register(_nothing)
        found += len(handle.hooks_dict_ref() or ()) - 1  # torch names the table of all hooks of a kind there alone
        handle.remove()
    return found > 0


def hooked_together(tensor: torch.Tensor) -> bool:
    """Whether a hook of the gradients of several tensors is on one. (It asks the engine which nodes a backward pass
    will run, of those that were the tensors' when it was registered.)"""
    hooks = (hooks_of(tensor)[0] or {}).values()
    return any(getattr(hook, "__qualname__", "").startswith("register_multi_grad_hook.") for hook in hooks)


def _nothing(*_: Any) -> None:
    """A hook that does nothing."""


def tensors_in_memory_of(tensor: torch.Tensor) -> int:
    """How many tensors lie in the memory of one, itself among them."""
    storage = tensor.untyped_storage()  # which holds it once itself
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1
