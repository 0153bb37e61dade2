"""Values of buffers that no checkpoint keeps, of a model on the meta device: its modules compute them once more.

A buffer with persistent=False, or a tensor that is a plain attribute, is what a constructor made of its arguments: the
frequencies of rotary positions, a causal mask. Its module, and no other, gets memory for it.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.capture.inputs import tables
from autopar.errors import CaptureError

_log = logging.getLogger("autopar")
RESET = ("reset_parameters", "_reset_parameters")
_INIT = "_init_weights"  # of transformers, timm and many others: what a model does to each of its modules
_OWN = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, type(None), torch.dtype, torch.Size)


@dataclass(frozen=True, slots=True)
class Unfiled:
    """The tensors of one module that no file holds, all on the meta device, by their attributes."""

    model: nn.Module
    path: str
    tensors: Mapping[str, torch.Tensor]

    @property
    def module(self) -> nn.Module:
        return tables.submodule(self.model, self.path)

    @property
    def around(self) -> list[nn.Module]:
        """The modules around it, the nearest first, the model last."""
        parts = self.path.split(".") if self.path else []
        return [tables.submodule(self.model, ".".join(parts[:count])) for count in reversed(range(len(parts)))]

    @property
    def title(self) -> str:
        return " and ".join(f"'{self.path}.{name}'" if self.path else f"'{name}'" for name in self.tensors)


def rebuilt(model: nn.Module, tensors: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """The values of tensors, by name, that no file holds. Raises CaptureError for those that no module computes.

    A module does so by `reset_parameters()`, else the nearest module around it by `_init_weights(module)`, as those of
    transformers have it, else its constructor, if the arguments are attributes of the same names.
    """
    of_module: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        path, _, attribute = name.rpartition(".")
        of_module.setdefault(path, {})[attribute] = tensor
    found: dict[str, torch.Tensor] = {}
    for path, of in of_module.items():
        one = Unfiled(model, path, of)
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
            torch.manual_seed(seed)
            values = _by_methods(one) or _by_constructor(one)
        found |= {f"{path}.{name}" if path else name: value.to(of[name].dtype) for name, value in values.items()}
    return found


def _by_methods(one: Unfiled) -> dict[str, torch.Tensor] | None:
    """The values that a method for initialisation gives to a twin of the module; None if there is none that does."""
    for method in _methods(one):
        twin = _twin(one)
        try:
            method(twin)
        except Exception:  # a method of the user's for other modules, or one that reads values which are not there
            continue
        values = {name: getattr(twin, name, None) for name in one.tensors}
        if all(isinstance(x, torch.Tensor) and is_filled(x) for x in values.values()):
            return values  # type: ignore[return-value]
    return None


def _methods(one: Unfiled) -> Iterator[Callable[[nn.Module], Any]]:
    """What may initialise a module, given a twin of it, which has its parameters: only while these have no values."""
    if any(tensor.device.type != "meta" for tensor in one.module.parameters()):
        return
    yield from (lambda twin, name=name: getattr(twin, name)() for name in RESET if hasattr(one.module, name))
    yield from filter(None, [initialiser(one.model, one.path)])


def initialiser(model: nn.Module, path: str) -> Callable[[nn.Module], Any] | None:
    """The `_init_weights(module)` of a module or of the nearest one around it; None if there is none, or it wants more
    than the module."""
    around = [tables.submodule(model, path), *Unfiled(model, path, {}).around]
    method = next(filter(callable, (getattr(each, _INIT, None) for each in around)), None)
    if method is None or len(inspect.signature(method).parameters) != 1:
        return None
    return method  # type: ignore[no-any-return]


def _twin(one: Unfiled) -> nn.Module:
    """A module with all that another has, but memory of its own for some tensors, full of what nothing leaves there."""
    twin = copy.copy(one.module)
    twin._buffers = dict(twin._buffers)
    for name, tensor in one.tensors.items():
        held = twin._buffers if name in twin._buffers else vars(twin)
        held[name] = torch.full(tensor.shape, mark_of(tensor.dtype), dtype=tensor.dtype, device="cpu")
    return twin


def mark_of(dtype: torch.dtype) -> float | int | bool:
    """A value that no initialisation leaves: what still holds it was not filled."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def is_filled(part: torch.Tensor) -> bool:
    """Whether values were given to what was full of the mark."""
    if part.device.type == "meta":
        return False
    mark = mark_of(part.dtype)
    found = torch.isnan(part) if mark != mark else part == mark
    return not bool(part.numel() and (found.all() if part.dtype == torch.bool else found.any()))


# -- constructors -----------------------------------------------------------------------------------------------------


def _by_constructor(one: Unfiled) -> dict[str, torch.Tensor]:
    """The values in another module that is built as this one was. Raises CaptureError if that cannot be known."""
    module, kind = one.module, type(one.module)
    arguments, unknown = _arguments(one)
    if unknown:
        raise _unknown(one, f"its argument '{unknown[0]}' is no attribute")
    with _EmptyOnMeta():
        made = kind(**arguments)
    for name, value in vars(module).items():
        if name not in _OWN and isinstance(value, _PLAIN) and not _alike(vars(made).get(name, value), value):
            raise _unknown(one, f"built with what it holds, its '{name}' is {vars(made)[name]!r} and not {value!r}")
    values = {name: getattr(made, name, None) for name in one.tensors}
    for name, tensor in one.tensors.items():
        value = values[name]
        if not isinstance(value, torch.Tensor) or value.device.type == "meta" or value.shape != tensor.shape:
            raise _unknown(one, f"built with what it holds, it has another '{name}'")
    told = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if isinstance(value, (int, float, str)))
    _log.warning("%s: no file holds this; made again by %s(%s)", one.title, kind.__name__, told)
    return values  # type: ignore[return-value]


def _arguments(one: Unfiled) -> tuple[dict[str, Any], list[str]]:
    """The arguments that a module was built with, by the attributes that keep them, and the names of those unknown. A
    configuration may be that of a module around it."""
    arguments, unknown, kind = dict[str, Any](), list[str](), type(one.module)
    if kind.__init__ is nn.Module.__init__:
        return arguments, unknown
    for name, parameter in list(inspect.signature(kind.__init__).parameters.items())[1:]:
        values = [vars(one.module)[key] for key in (name, f"_{name}") if key in vars(one.module)]
        values += [value for around in one.around if _is_configuration(value := vars(around).get(name))]
        if values and not isinstance(values[0], torch.Tensor):
            arguments[name] = values[0]
        elif name != "device" or parameter.default is not None:
            unknown.append(name)
    return arguments, unknown


def _is_configuration(value: Any) -> bool:
    return not (isinstance(value, (*_PLAIN, torch.Tensor, nn.Module)) or callable(value))


def _alike(a: Any, b: Any) -> bool:
    """Whether two values are equal, or cannot be compared."""
    try:
        return a is b or bool(a == b)
    except (RuntimeError, ValueError):  # tensors or arrays among them
        return True


def _unknown(one: Unfiled, why: str) -> CaptureError:
    kind = type(one.module).__name__
    return CaptureError(
        f"{one.title} is on the meta device, and what no checkpoint keeps; {kind} does not say how to make it: {why}. "
        f"Give {kind} a reset_parameters(), keep its arguments as attributes of the same names, or build it on a real "
        f"device."
    )


class _EmptyOnMeta(TorchFunctionMode):
    """What is made without values, as the parameters of torch's modules are, has no memory."""

    def __torch_function__(self, func: Any, types: Any, args: Iterable[Any] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)
