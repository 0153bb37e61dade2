"""A parallel model is like the user's module: its methods, properties, special methods and public names.

A method runs on a stand-in of the user's module: an object of a subclass of the user's class that has the very
attributes of the module, so that `self.blocks`, `self.cache = x` and `super().encode(x)` are what they are on one
device. Only to call it is to call the parallel model: `self(x)` and `self.forward(x)` run the compiled program.
`self.blocks[0](x)` computes with the parameters as they are, whose ops give one device's values (operators.py).
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import nn

from autopar.capture.inputs import tables
from autopar.capture.inputs.partners import Inlined, inlined, is_traced
from autopar.errors import AutoparError
from autopar.parallel.tensors.parameter import ParameterTensor
from autopar.torch_compat import ASKED_TO_COMPILE, local_of, tree_flatten, tree_unflatten

# The ways to hook something to a module that runs, and what torch keeps of those that see it saved.
_HOOKS = (
    "register_forward_pre_hook", "register_forward_hook", "register_full_backward_pre_hook",
    "register_full_backward_hook", "register_backward_hook",
)  # fmt: skip
_TABLES = (
    "_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)  # fmt: skip
# What a parallel model has for a loop, which may stand in a method of the user's class: `self.training_loss(x, y)`.
_STEPS = ("forward_backward", "training_loss", "last_aux")
# Special methods of the user's that a parallel model goes without: it is never copied.
_NOT_TAKEN = frozenset(f"__{name}__" for name in ("annotate", "class_getitem", "copy", "deepcopy", "del"))
_COPIED = (
    "a parallel model cannot be copied or pickled: it holds process groups and this rank's part of the parameters. "
    "Save state_dict() (torch.distributed.checkpoint) or full_state_dict() instead; averages of its weights are "
    "autopar.EMA(model); for another copy, copy the plain module before autopar.parallelize."
)


class Likeness(Inlined):
    """A module that is like `original` in all but what it defines itself.

    `isinstance` says that it is of the user's class, too: it has what that class promises.
    """

    _stand_in: nn.Module

    def _become_like(self, model: nn.Module) -> None:
        """Have what a module has, from now on."""
        for table in _TABLES:
            self.__dict__[table] = vars(model)[table]
        self.__dict__["_load_state_dict_pre_hooks"] = vars(model)["_load_state_dict_pre_hooks"].copy()
        for register in _HOOKS:  # hooks of modules are part of its programs
            self.__dict__[register] = functools.partial(getattr(nn.Module, register), model)
        self.__dict__["_stand_in"] = _stand_in(model, self)
        object.__setattr__(self, "__class__", _class_for(type(self), type(model)))

    @property
    def training(self) -> bool:  # type: ignore[override]
        return self.original.training if "_original" in self.__dict__ else True

    @training.setter
    def training(self, mode: bool) -> None:
        if "_original" in self.__dict__:
            self.original.training = mode

    def train(self, mode: bool = True) -> Any:
        self.original.train(mode)
        return self

    def compile(self, *_: Any, **__: Any) -> None:
        _refuse_compiling(self)

    def __getattr__(self, name: str) -> Any:
        with suppress(AttributeError):
            return super().__getattr__(name)
        if "_stand_in" not in self.__dict__ or _is_special(name):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'", name=name, obj=self)
        return _like_users(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        known = self.__dict__
        if name == "forward" and "_stand_in" in known:
            raise AutoparError(
                "cannot set 'forward' of a parallel model: its programs come from the module's own. Wrap the plain "
                "module's before autopar.parallelize, or call a function of yours around the model."
            )
        if "_stand_in" not in known or name in known or hasattr(type(self), name):
            super().__setattr__(name, value)
            return
        if value is self._parameters.get(name, self._modules.get(name, known)):  # `model.weight -= step` sets it anew
            return
        if isinstance(value, (nn.Module, nn.Parameter)) or (
            isinstance(value, torch.Tensor) and name in self._parameters
        ):
            raise AutoparError(
                f"cannot set '{name}' of a parallel model to a {type(value).__name__}: its modules and tensors are "
                f"distributed already. Change the plain module before autopar.parallelize."
            )
        setattr(self._stand_in, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._stand_in, name)

    def __dir__(self) -> list[str]:
        return _public({*dir(type(self)), *dir(self._stand_in)})

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AutoparError(_COPIED)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """What `.to()`, `.double()`, `.cuda()` call: fine if nothing changes."""
        return _unchanged(self, fn)

    def to_empty(self, *, device: Any, recurse: bool = True) -> Any:
        """Do what `.to(device)` does: the values that are there may stay."""
        return self.to(device)  # type: ignore[attr-defined]


class _Delegate:
    """An attribute of a class that is the user's: a special method, or one that replaces torch's."""

    def __init__(self, name: str, kind: type) -> None:
        self.name, self.kind = name, kind

    def __get__(self, parallel: Likeness | None, owner: Any = None) -> Any:
        return getattr(self.kind, self.name) if parallel is None else _like_users(parallel, self.name)


class _Forward:
    """`forward` with the signature of the user's: libraries read from it which columns of a batch a model takes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, parallel: Likeness | None, owner: Any = None) -> Any:
        if parallel is None:
            return self.function
        return _method_like(parallel.original.forward, self.function, parallel)


def _class_for(base: type[Likeness], kind: type[nn.Module]) -> type[Likeness]:
    """A subclass of ours with the special methods of a user's class, and with what it has in place of torch's."""
    ours = {name for cls in base.__mro__ if issubclass(cls, Inlined) for name in vars(cls)} - {"train"}
    theirs = {name for cls in kind.__mro__ if cls not in nn.Module.__mro__ for name in vars(cls)}
    special = {name for name in theirs if _is_special(name) and callable(getattr(kind, name))}
    replaced = {name for name in theirs - ours if hasattr(nn.Module, name) and not _is_special(name)}
    delegated = replaced | special - {*dir(nn.Module)} - _NOT_TAKEN
    found: dict[str, Any] = {name: _Delegate(name, kind) for name in delegated}
    found |= {"__class__": property(lambda _: kind), "forward": _Forward(base.forward), "__doc__": base.__doc__}
    return types.new_class(base.__name__, (base,), exec_body=lambda names: names.update(found))


class _StandIn:
    """What every stand-in has before the user's class. (`__init_subclass__` of the user's would register it.)"""

    def __init_subclass__(cls, **_: Any) -> None: ...

    def __dir__(self) -> list[str]:
        return _public(super().__dir__())

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AutoparError(_COPIED)

    def compile(self, *_: Any, **__: Any) -> None:
        _refuse_compiling(self)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        assert isinstance(self, nn.Module)
        return _unchanged(self, fn)

    def to_empty(self, *, device: Any, recurse: bool = True) -> Any:
        return self.to(device)  # type: ignore[attr-defined]


def _stand_in(model: nn.Module, parallel: Likeness) -> nn.Module:
    """The module that methods run on; see above."""
    kind, held = type(model), weakref.ref(parallel)
    owner = weakref.ref(model)

    def call(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given, named = _handed_in((args, kwargs))
        return held()(*given, **named)  # type: ignore[misc]

    def missing(self: nn.Module, name: str) -> Any:
        try:
            return kind.__getattr__(self, name)
        except AttributeError:
            if name not in _STEPS:
                raise
        return getattr(held(), name)

    names: dict[str, Any] = {
        "__getattr__": missing,
        "__new__": lambda _, *args, **kwargs: kind(*args, **kwargs),  # of `type(self)(config)`: another module
        "__class__": property(lambda _: kind), "__call__": call, "forward": property(lambda _: held().forward),  # type: ignore[union-attr]
        ASKED_TO_COMPILE: property(_refuse_compiling),
        "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__,
        **{name: _slot(owner, name) for name in _slots_of(kind)},
    }  # fmt: skip
    try:
        class_ = types.new_class(kind.__name__, (_StandIn, kind), exec_body=lambda found: found.update(names))
    except TypeError:  # of a class that none may extend methods run on the module itself, op by op
        return model
    made: nn.Module = object.__new__(class_)
    object.__setattr__(made, "__dict__", vars(model))
    return made


def _slot(owner: weakref.ref[nn.Module], name: str) -> property:
    """An attribute of the user's module that stands in no dict."""
    return property(lambda _: getattr(owner(), name), lambda _, value: setattr(owner(), name, value))


def _slots_of(kind: type) -> Iterator[str]:
    """The attributes of a class that stand in no dict."""
    for cls in kind.__mro__:
        slots = vars(cls).get("__slots__", ())
        yield from ({slots} if isinstance(slots, str) else {*slots}) - {"__dict__", "__weakref__"}


def _like_users(parallel: Likeness, name: str) -> Any:
    """An attribute as the user's module has it; a method runs on the stand-in, and in the step of another model on the
    module that is traced there."""
    stand_in, is_computed = parallel._stand_in, _is_computed(type(parallel.original), name)
    if is_traced(parallel) and is_computed:
        return getattr(inlined(parallel), name)
    value = getattr(stand_in, name)
    owner = getattr(value, "__self__", None) if inspect.ismethod(value) else None
    if owner is type(stand_in):
        return getattr(type(parallel.original), name)  # a class method
    if owner is not stand_in:
        # what is kept there is handed out itself: a user may write into it
        return _handed_out(value, parallel) if is_computed and isinstance(value, ParameterTensor) else value

    def method(parallel: Likeness, *args: Any, **kwargs: Any) -> Any:
        traced = inlined(parallel)
        if traced is not None:
            return getattr(traced, name)(*args, **kwargs)
        result = value(*args, **kwargs)
        for path, buffer in tables.named_buffers(parallel.original):
            if isinstance(buffer, ParameterTensor):  # the method bound it to what it computed
                tables.bind_buffer(parallel.original, path, buffer.full_tensor())
        return _handed_out(result, parallel)

    return _method_like(value, method, parallel)


def _method_like(user: Callable[..., Any], function: Callable[..., Any], parallel: Likeness) -> Any:
    """A function as a method of the parallel model, with the name, text and signature of one of the user's."""
    inner = getattr(user, "__func__", None) if inspect.ismethod(user) else None

    @functools.wraps(inner or user)
    def method(parallel: Likeness, *args: Any, **kwargs: Any) -> Any:
        return function(parallel, *args, **kwargs)

    with suppress(TypeError, ValueError):  # some have none
        signature = inspect.signature(inner or user)
        if inner is None:  # no method of the module's, but what stands there
            first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
            signature = signature.replace(parameters=[first, *signature.parameters.values()])
        method.__signature__ = signature  # type: ignore[attr-defined]
    return types.MethodType(method, parallel)


def _is_computed(kind: type, name: str) -> bool:
    """Whether an attribute is computed when it is read: a property, or the like."""
    found = inspect.getattr_static(kind, name, None)
    is_function = isinstance(found, (types.FunctionType, staticmethod, classmethod))
    return hasattr(type(found), "__get__") and not is_function


def _handed_out(value: Any, parallel: Likeness) -> Any:
    """What a method gives: the parallel model for the stand-in, and a plain tensor, in its very memory, for what it
    computed or keeps that every rank holds whole. Parameters, gradients, views and what lies in parts stay as they
    are."""
    if value is parallel._stand_in:
        return parallel
    leaves, spec = tree_flatten(value)
    computed = [isinstance(leaf, ParameterTensor) and leaf.place.is_replicated for leaf in leaves]
    if not any(computed):
        return value
    held = [
        tensor for p in tables.parameters(parallel) for tensor in (p, p.grad) if isinstance(tensor, ParameterTensor)
    ]
    memory = {local_of(tensor).untyped_storage().data_ptr() for tensor in held}
    changed = [
        leaf.to_local() if is_computed and local_of(leaf).untyped_storage().data_ptr() not in memory else leaf
        for leaf, is_computed in zip(leaves, computed, strict=True)
    ]
    return tree_unflatten(changed, spec) if any(a is not b for a, b in zip(leaves, changed, strict=True)) else value


def _handed_in(value: Any) -> Any:
    """What a method of the user's module gives to the model: whole plain tensors for what it computed before, as
    `generate` does the states of an encoder."""
    leaves, spec = tree_flatten(value)
    if not any(isinstance(leaf, ParameterTensor) for leaf in leaves):
        return value
    return tree_unflatten([leaf.full_tensor() if isinstance(leaf, ParameterTensor) else leaf for leaf in leaves], spec)


def _unchanged(module: nn.Module, fn: Any) -> nn.Module:
    for tensor in (*tables.parameters(module), *tables.buffers(module)):
        probe = torch.tensor([-3, 0, 5], device=tensor.device).to(tensor.dtype)
        made = fn(probe.clone())
        if (made.dtype, made.device) != (probe.dtype, probe.device):
            raise AutoparError(
                f"cannot turn the tensors of a parallel model from {probe.dtype} on {probe.device} into "
                f"{made.dtype} on {made.device}. Convert the plain module before autopar.parallelize; "
                f"device= says where it goes."
            )
        if not probe.is_meta and not torch.equal(made, probe):
            raise AutoparError(
                "module._apply with a function that changes values: the tensors of a parallel model lie where its "
                "programs read them. Change them in place: `with torch.no_grad(): p.copy_(...)` for p in parameters()."
            )
    return module


def _refuse_compiling(_: object) -> NoReturn:
    raise AutoparError(
        "torch.compile of a parallel model: its steps are compiled already, with what moves between ranks in them. "
        'Leave torch.compile out; autopar.parallelize(..., compile="inductor") compiles what each rank computes with '
        "Inductor."
    )


setattr(
    Likeness, ASKED_TO_COMPILE, property(_refuse_compiling)
)  # a property: from torch 2.14 on no `__getattr__` is asked


def _public(names: Any) -> list[str]:
    """Without private names: Python offers what is here for a name that is mistyped."""
    return sorted(name for name in names if not name.startswith("_") or _is_special(name))


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")
