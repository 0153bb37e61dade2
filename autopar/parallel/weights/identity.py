"""Parameters keep their identity: the user's own objects become the parallel ones, and are laid out anew in place.

So optimizers and their groups, schedulers, lists, hooks and weak references hold what is trained, whenever they were
made. What cannot become another object is found before anything changes; what shares a parameter's memory is told.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.capture.capture import state_of
from autopar.capture.inputs import tables
from autopar.capture.inputs.partners import Inlined
from autopar.errors import AutoparError
from autopar.ir.program import Input
from autopar.parallel.tensors.parameter import ParameterTensor
from autopar.parallel.tensors.place import digest
from autopar.torch_compat import local_of, storage_of
from autopar.torch_identity import become, fixed_by, hooked_together, tensors_in_memory_of

_log = logging.getLogger("autopar")
Entries = Sequence[tuple[Input, torch.Tensor]]
SHOWN = 3  # names in a message
# Names that parallel tensors use for themselves.
_TAKEN = frozenset({"place", "_local_tensor", "_spec", *dir(ParameterTensor)}) - {*dir(nn.Parameter)}


def check_identity(model: nn.Module) -> list[str]:
    """What ranks compare of the parameters that become parallel: gradients that are there already.

    Raises AutoparError for a parameter that is parallel already, or that cannot become another object.
    """
    _check_plain(model)
    entries = state_of(model).entries
    parameters = [(entry, tensor) for entry, tensor in entries if entry.kind == "parameter"]
    for entry, tensor in parameters:
        _check_one(entry.name, tensor)
    return [
        f"gradient of '{entry.name}' with digest {digest(tensor.grad):x}"
        for entry, tensor in parameters
        if tensor.grad is not None and tensor.grad.device.type != "meta"
    ]


def _check_plain(model: nn.Module) -> None:
    """Raise AutoparError for a module that is distributed already."""
    if torch.is_inference_mode_enabled():
        raise AutoparError("parallelize makes parameters to train: call it outside of torch.inference_mode().")
    if isinstance(model, Inlined):
        raise AutoparError(
            "this is a parallel model already: autopar.parallelize was called on what it returned. Leave out one of "
            "the two calls. A second loss of one model is a branch of its loss_fn, by an argument of yours: "
            "`def loss_fn(model, x, y, second=False)`, and `model.training_loss(x, y, second=True)`."
        )
    for path, module in tables.named_modules(model):
        if isinstance(module, Inlined):
            raise AutoparError(
                f"'{path}' is a parallel model already, and the module around it cannot be one as well. Put the plain "
                f"module there, and parallelize the whole."
            )
    for name, tensor in (*tables.named_parameters(model), *tables.named_buffers(model)):
        if isinstance(tensor, DTensor):
            raise AutoparError(
                f"'{name}' is a DTensor already: this module, or one that shares it, was given to autopar.parallelize "
                f"before, or to another library that distributes it (parallelize_module). A module is made parallel "
                f"once: build it anew for another mesh or other options."
            )


def _check_one(name: str, parameter: torch.Tensor) -> None:
    if parameter.layout is not torch.strided:
        raise AutoparError(f"the parameter '{name}' is {parameter.layout}, but only strided tensors can be split.")
    if parameter.is_inference():
        raise AutoparError(
            f"the parameter '{name}' was made under torch.inference_mode(), and cannot be trained: build the model "
            f"outside of it."
        )
    keeps = "parallelize makes each parameter parallel in place, so that optimizers and lists that hold it stay right"
    # Each of these would fail in the middle of the exchange, or leave something behind that acts on a dead object.
    why = fixed_by(parameter)
    if why == "class":
        raise AutoparError(
            f"the parameter '{name}' is a {type(parameter).__name__}, whose class has __slots__: {keeps}, which Python "
            f"cannot do with such an object. Leave out __slots__ of the class, or use an nn.Parameter with attributes."
        )
    if why == "weak reference":
        raise AutoparError(
            f"torch holds a weak reference to the parameter '{name}' (torch._C._WeakTensorRef): {keeps}, which torch "
            f"refuses then. Delete it before autopar.parallelize, or use weakref.ref of Python, which stays right."
        )
    if why == "node hook":
        raise AutoparError(
            f"the AccumulateGrad node of the parameter '{name}' has a hook, which a compiled step would not run. Use "
            f"parameter.register_hook(...) or parameter.register_post_accumulate_grad_hook(...), which it runs."
        )
    if hooked_together(parameter):
        raise AutoparError(
            f"register_multi_grad_hook was called on the parameter '{name}' before autopar.parallelize: it keeps "
            f"autograd nodes that the parallel parameter has no more. Register it after the first step, or after "
            f"prepare()."
        )
    for attribute in sorted(_TAKEN.intersection(vars(parameter))):
        raise AutoparError(
            f"the parameter '{name}' has an attribute '{attribute}', a name that parallel parameters use for "
            f"themselves. Give it another name."
        )


# -- becoming -------------------------------------------------------------------------------------------------------


def make_parallel(name: str, tensor: torch.Tensor, made: torch.Tensor) -> None:
    """Let a parameter or buffer become what was made of it, with the gradient that it has."""
    grad = tensor.grad
    if isinstance(made, ParameterTensor) and grad is not None and grad.device.type != "meta":
        whole = grad.detach().to(made.device)
        whole = whole if whole.layout is torch.strided else whole.to_dense()
        part = made.around(made.place.part(whole), made.place, made.shape)  # the same on every rank
        if fixed_by(grad) is None:
            become(grad, part, _stale(f"from the gradient of '{name}'"))
        made.grad = grad if isinstance(grad, ParameterTensor) else part
    become(tensor, made, _stale(f"from '{name}' before autopar.parallelize made it parallel"))


def lay_out(name: str, parameter: torch.Tensor, made: torch.Tensor) -> None:
    """Let a parallel parameter become the same in another layout, and with it a gradient that every rank holds whole:
    each keeps its part. One that lies split already stays where it lies, since no rank may have to wait for others that
    have none: the next one is added to it there."""
    if hooked_together(parameter):
        raise AutoparError(
            f"register_multi_grad_hook was called on the parameter '{name}' before its layout was decided: it keeps "
            f"autograd nodes that the parameter has no more. Register it after the first step, or after prepare()."
        )
    made.requires_grad_(parameter.requires_grad)
    made.grad = _laid_out(parameter.grad, made)
    try:
        become(parameter, made, _stale(f"from '{name}' before its layout was decided"))
    except RuntimeError as error:
        raise AutoparError(
            f"the parameter '{name}' cannot take its layout in place: torch holds a weak reference to it "
            f"(torch._C._WeakTensorRef). Delete it, or use weakref.ref of Python."
        ) from error


def _laid_out(grad: torch.Tensor | None, made: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a parameter as that becomes `made`: the same object, as far as torch lets it become another."""
    if not isinstance(grad, ParameterTensor) or not isinstance(made, ParameterTensor) or grad.place is made.place:
        return grad
    if not grad.place.is_replicated:
        return grad
    part = made.around(made.place.part(local_of(grad)), made.place, made.shape)
    if fixed_by(grad) is not None:
        return part
    become(grad, part, RuntimeError)
    return grad


def _stale(what: str) -> Callable[[], AutoparError]:
    return lambda: AutoparError(
        f"backward() of what was computed {what}: its gradient would go nowhere. Compute it again, with the parameter "
        f"as it is now."
    )


# -- what others hold -----------------------------------------------------------------------------------------------


def tell_held(model: nn.Module) -> set[str]:
    """Say which parameters share their memory with other tensors, which it gives, and which are of a class of the
    user's: neither follows what they become."""
    known = [pair for pair in state_of(model).entries if storage_of(pair[1]) is not None]
    entries = [(entry, tensor) for entry, tensor in known if tensor.device.type != "meta"]
    own = Counter(storage_of(tensor) for _, tensor in entries)
    parameters = [(entry, tensor) for entry, tensor in entries if entry.kind == "parameter"]
    held = [entry.name for entry, tensor in parameters if tensors_in_memory_of(tensor) > own[storage_of(tensor)]]
    grads = [(f"{entry.name}.grad", tensor.grad) for entry, tensor in parameters if tensor.grad is not None]
    held += [name for name, grad in grads if grad.layout is torch.strided and tensors_in_memory_of(grad) > 1]
    if held:
        _log.warning(
            "other tensors share the memory of %s (.data, .detach(), a view, a flat buffer, a state_dict()): they were "
            "made before autopar.parallelize, and keep the values of then. Hold parameters themselves, or take them "
            "after it.", _shown(held),
        )  # fmt: skip
    for kind in dict.fromkeys(type(tensor) for _, tensor in parameters):
        if kind is not nn.Parameter:
            _log.warning(
                "%s: what is parallel is no %s any more. It keeps its attributes, but not the methods of that class.",
                _shown([entry.name for entry, tensor in parameters if type(tensor) is kind]), kind.__name__,
            )  # fmt: skip
    return set(held)


def tell_moved(parameters: Mapping[str, nn.Parameter], known: Set[str]) -> None:
    """Say which parallel parameters, that take another layout, share their memory with other tensors. known: of which
    it was said before."""
    moved = {name: tensor for name, tensor in parameters.items() if name not in known}
    held = [name for name, tensor in moved.items() if tensors_in_memory_of(local_of(tensor)) > 1]
    if held:
        _log.warning(
            "other tensors share the memory of %s (.data, .detach(), a view): they were made before the layout of "
            "parameters was decided, and keep the values of then. Hold parameters themselves, or take them after the "
            "first step, or after prepare().", _shown(held),
        )  # fmt: skip


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if names[SHOWN:] else ""
    return ", ".join(f"'{name}'" for name in names[:SHOWN]) + more
