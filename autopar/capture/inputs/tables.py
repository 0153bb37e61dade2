"""Walk the tables that torch keeps in a module: `_modules`, `_parameters` and `_buffers`.

A user's module may have attributes and methods by the names of torch's (`self.modules = []`, `def parameters(self)`),
and a submodule by the name of a method (`self.parameters = nn.ParameterList()`), which `get_submodule` then misses. So
nothing is asked of a user's module that its tables say. Orders and names are those of torch's methods.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

_DEPTH = 3  # of lists in lists
_REGISTERED = ("_parameters", "_buffers", "_modules")


def named_modules(
    model: nn.Module, prefix: str = "", remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:  # fmt: skip
    """Walk the modules with their names, as `Module.named_modules` does."""
    seen: set[int] = set()
    waiting = [(prefix, model)]
    while waiting:
        path, module = waiting.pop()
        if remove_duplicate and id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        children = [(joined(path, name), child) for name, child in module._modules.items() if child is not None]
        waiting.extend(reversed(children))


def modules(model: nn.Module) -> Iterator[nn.Module]:
    """Walk the modules, as `Module.modules` does."""
    return (module for _, module in named_modules(model))


def named_parameters(
    model: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:  # fmt: skip
    """Walk the parameters with their names, as `Module.named_parameters` does."""
    return _members(model, "_parameters", prefix, recurse, remove_duplicate)


def named_buffers(
    model: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:  # fmt: skip
    """Walk the buffers with their names, as `Module.named_buffers` does."""
    return _members(model, "_buffers", prefix, recurse, remove_duplicate)


def parameters(model: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
    """Walk the parameters, as `Module.parameters` does."""
    return (parameter for _, parameter in named_parameters(model, recurse=recurse))


def buffers(model: nn.Module, recurse: bool = True) -> Iterator[torch.Tensor]:
    """Walk the buffers, as `Module.buffers` does."""
    return (buffer for _, buffer in named_buffers(model, recurse=recurse))


def submodule(model: nn.Module, path: str) -> nn.Module:
    """Look a module up by its path, as `Module.get_submodule` does."""
    for name in path.split(".") if path else ():
        child = model._modules[name]
        assert child is not None, path
        model = child
    return model


def parameter(model: nn.Module, name: str) -> nn.Parameter:
    """Look a parameter up by its name, as `Module.get_parameter` does."""
    path, _, attribute = name.rpartition(".")
    parameter = submodule(model, path)._parameters[attribute]
    assert parameter is not None, name
    return parameter


def buffer(model: nn.Module, name: str) -> torch.Tensor:
    """Look a buffer up by its name, as `Module.get_buffer` does."""
    path, _, attribute = name.rpartition(".")
    buffer = submodule(model, path)._buffers[attribute]
    assert buffer is not None, name
    return buffer


def tensor(model: nn.Module, name: str) -> torch.Tensor:
    """Look a buffer or parameter up by its name."""
    path, _, attribute = name.rpartition(".")
    owner = submodule(model, path)
    found: torch.Tensor = {**owner._parameters, **owner._buffers}[attribute]  # type: ignore[assignment]
    return found


def bind_buffer(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Put another tensor in a buffer's place, as an assignment to the attribute does."""
    path, _, attribute = name.rpartition(".")
    submodule(model, path)._buffers[attribute] = value


def functional_call(
    model: nn.Module, values: Mapping[str, torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:  # fmt: skip
    """What a model gives with other tensors in place of parameters and buffers, as `torch.func.functional_call`. It may
    move a tensor from one table to another, or to a plain attribute: afterwards all is as it was. What it keeps of a
    parameter under a name of its own is a plain attribute then, since no parameter stands for it."""
    saved = []
    stand_ins = {id(value) for value in values.values()}
    known = [(module, set(module._parameters)) for module in modules(model)]
    for name, value in values.items():
        path, _, attribute = name.rpartition(".")
        owner = submodule(model, path)
        tables: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
        table = next((each for each in tables if attribute in each), vars(owner))  # a buffer may be an attribute, too
        saved.append((owner, attribute, table, table[attribute]))
        table[attribute] = value
    try:
        return model.forward(*args, **kwargs)  # `register_module_forward_hook` is of users' modules, and of no step
    finally:
        for owner, attribute, table, tensor in saved:
            others: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers, vars(owner))
            for other in others:
                if other is not table:
                    other.pop(attribute, None)
            table[attribute] = tensor
        for module, names in known:
            for name in module._parameters.keys() - names:
                if id(module._parameters[name]) in stand_ins:
                    vars(module)[name] = module._parameters.pop(name)


def assign_inside(model: nn.Module, made: Mapping[int, torch.Tensor]) -> None:
    """Put tensors in the place of those that the lists and dicts of modules hold as well, by the ids of these."""
    for module in modules(model):
        for name, value in vars(module).items():
            if name not in _REGISTERED:  # where tensors have their places already, which may lie where the old ones lay
                _assign_inside(value, made, _DEPTH)


def _assign_inside(holder: Any, made: Mapping[int, torch.Tensor], depth: int) -> None:
    if type(holder) not in (list, dict) or depth == 0:
        return
    for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
        if id(value) in made:
            holder[key] = made[id(value)]
        else:
            _assign_inside(value, made, depth - 1)


def joined(path: str, name: str) -> str:
    """The name of what stands under a name in a module."""
    return f"{path}.{name}" if path else name


def _members(
    model: nn.Module, table: str, prefix: str, recurse: bool, remove_duplicate: bool
) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for path, module in named_modules(model, prefix, remove_duplicate) if recurse else [(prefix, model)]:
        for name, tensor in vars(module)[table].items():
            if tensor is None or (remove_duplicate and id(tensor) in seen):
                continue
            seen.add(id(tensor))
            yield joined(path, name), tensor
