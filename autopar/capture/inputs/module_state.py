"""List the parameters, buffers and plain tensors of a module."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.capture.inputs import tables
from autopar.capture.inputs.partners import Partner
from autopar.capture.refusals.constructs import FIRST_CALL, Construct
from autopar.capture.refusals.explain_failure import refusal
from autopar.capture.refusals.location import user_frame
from autopar.capture.refusals.user_lines import line_that_changes
from autopar.ir.program import Input
from autopar.torch_compat import FakeTensorMode


@dataclass(frozen=True, slots=True)
class State:
    """The tensors of a module: tied ones once, with all their names."""

    entries: tuple[tuple[Input, torch.Tensor], ...]

    @property
    def frozen(self) -> frozenset[str]:
        """The names of parameters that are not trained."""
        given = ((entry, tensor) for entry, tensor in self.entries if entry.kind == "parameter")
        return frozenset(entry.name for entry, tensor in given if not tensor.requires_grad)


class Step(nn.Module):
    """A training step as one call of a module: its whole state is swapped for a trace, of forward and backward."""

    def __init__(
        self, model: nn.Module, partners: Iterable[Partner], body: Callable[..., Any], replaced: dict[str, Any]
    ) -> None:
        super().__init__()
        self.model = model
        for partner in partners:
            self.add_module(partner.name, partner.traced)
        self.body = body
        self.replaced = replaced

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(tables.named_parameters(self, remove_duplicate=False))
        result = self.body(*args, **kwargs)
        for name, tensor in tables.named_parameters(self, remove_duplicate=False):
            if given.get(name, tensor) is not tensor:
                self.replaced[name] = tensor
        return result


def state_of(
    model: nn.Module, partners: Mapping[str, nn.Module] | None = None, scratch: Collection[str] = (),
    more: Iterable[tuple[Input, torch.Tensor]] = (),
) -> State:  # fmt: skip
    """Parameters, buffers and plain tensor attributes of `model`, then those of its partners, by identity. scratch:
    names of buffers that are taken for such attributes. more: what the step takes beside them."""
    tensors: dict[int, tuple[str, list[str], torch.Tensor]] = {}
    for prefix, module in {"": model, **(partners or {})}.items():
        for kind, named in (
            ("parameter", tables.named_parameters(module, prefix, remove_duplicate=False)),
            ("buffer", tables.named_buffers(module, prefix, remove_duplicate=False)),
            ("constant", _tensor_attributes(module, prefix)),
        ):
            for name, tensor in named:
                is_scratch = kind == "buffer" and name in scratch
                tensors.setdefault(id(tensor), ("constant" if is_scratch else kind, [], tensor))[1].append(name)
    return State((*((Input(kind, tuple(names)), tensor) for kind, names, tensor in tensors.values()), *more))


def _tensor_attributes(model: nn.Module, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in tables.named_modules(model, prefix=prefix):
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.layout == torch.strided:
                yield (f"{path}.{name}" if path else name), value


def once_each(step: nn.Module, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One name for each attribute: those of a module that is registered under two names have two, and to swap them
    twice would leave the first stand-in there when they are put back."""
    tensors: dict[tuple[int, str], tuple[str, torch.Tensor]] = {}
    for name, value in values.items():
        path, _, attribute = name.rpartition(".")
        tensors.setdefault((id(tables.submodule(step, path)), attribute), (name, value))
    return dict(tensors.values())


@contextmanager
def attributes(step: nn.Module, values: Mapping[str, torch.Tensor], replaced: dict[str, Any]) -> Iterator[None]:
    """Put other tensors in place of plain tensor attributes, for as long as the context lasts; `replaced` is given
    those that were replaced meanwhile."""
    saved = []
    for name, value in values.items():
        path, _, attribute = name.rpartition(".")
        owner = tables.submodule(step, path)
        saved.append((name, owner, attribute, getattr(owner, attribute)))
        setattr(owner, attribute, value)
    try:
        yield
    finally:
        for name, owner, attribute, value in saved:
            now = getattr(owner, attribute, None)
            if now is not values[name]:
                replaced[name] = now
            setattr(owner, attribute, value)


@contextmanager
def unmoved(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Leave modules where they are that are moved while they run (`self.expert.to(x.device)`), as long as the context
    lasts: a program names no device, and their tensors are stand-ins. Another dtype is refused."""
    found = [module for module in modules if "_apply" not in vars(module)]
    for module in found:
        vars(module)["_apply"] = functools.partial(_moved, module)
    try:
        yield
    finally:
        for module in found:
            del vars(module)["_apply"]


@contextmanager
def unsynced(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let each SyncBatchNorm run as a BatchNorm as long as the context lasts: whose statistics it takes is told by the
    program, and its own collectives would wait for ranks that run another part of the step."""
    plain, synced = nn.modules.batchnorm._BatchNorm.forward, nn.SyncBatchNorm
    found = [
        one for one in modules if isinstance(one, synced) and getattr(one.forward, "__func__", 0) is synced.forward
    ]
    for module in found:
        vars(module)["forward"] = functools.partial(plain, module)
    try:
        yield
    finally:
        for module in found:
            del vars(module)["forward"]


def _moved(module: nn.Module, move: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """In place of `Module._apply`, which `to`, `cuda`, `float` and the like call."""
    for name, tensor in (*tables.named_parameters(module, "", recurse), *tables.named_buffers(module, "", recurse)):
        dtype = move(tensor.detach()).dtype
        if dtype != tensor.dtype:
            was, now = (str(kind).removeprefix("torch.") for kind in (tensor.dtype, dtype))
            construct = Construct(
                f"a move of '{name}' of a {type(module).__name__} from {was} to {now} while the model runs",
                "A compiled step changes no weights: convert the module before autopar takes it, or the input to the "
                "dtype of the weights (x.to(weight.dtype)).",
            )
            raise refusal(construct, user_frame(sys._getframe(1)))
    return module


def device_of(model: nn.Module) -> torch.device:
    """Where a model computes."""
    for parameter in tables.parameters(model):
        if parameter.device.type != "meta":
            return parameter.device
    return torch.device("cpu")


def fakes_of(
    given: Iterable[tuple[Input, torch.Tensor | None]], fake: FakeTensorMode, device: torch.device
) -> list[torch.Tensor]:
    """Tensors without data for the inputs of a step; given: what each stands for, None of the scale and the seed."""
    forms: dict[str, tuple[tuple[int, ...], torch.dtype | None]] = {"scale": ((), None), "seed": ((2,), torch.int64)}
    fakes = []
    with fake:
        for entry, tensor in given:
            if tensor is None:
                shape, dtype = forms[entry.kind]
                fakes.append(torch.empty(shape, dtype=dtype, device=device))
            else:
                fakes.append(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device))
    return fakes


def name_if_trained(entry: Input, tensor: torch.Tensor | None) -> str | None:
    """The name of an input that gets a gradient; None of another one."""
    return entry.name if entry.kind == "parameter" and tensor is not None and tensor.requires_grad else None


# Check what a step leaves in the buffers of a module.


def as_given(state: State, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What stands for the tensors of a state in a run, by their names, in the form that they had before it."""
    pairs = zip(state.entries, inputs, strict=False)
    given = ((entry, one if one.shape == held.shape else one.new_empty(held.shape)) for (entry, held), one in pairs)
    return {name: one for entry, one in given for name in entry.names}


def check_buffers(
    old: Mapping[str, torch.Tensor], new: Iterable[tuple[str, torch.Tensor]], run: Callable[[], object],
    find: Callable[[str], torch.Tensor],
) -> None:  # fmt: skip
    """Raise CaptureError for a buffer that a program cannot leave behind. run: makes another run, so that the line is
    found that does it. find: a buffer as it is by then."""
    for name, tensor in new:
        fault = buffer_fault(name, old[name], tensor)
        if fault is not None:
            raise refusal(fault, line_that_changes(run, lambda name=name: form_of(find(name))))  # type: ignore[misc]


def is_scratch(owner: nn.Module, attribute: str, old: torch.Tensor, new: torch.Tensor) -> bool:
    """True for a buffer that no program can leave behind, and no checkpoint holds: it may be one that each step makes
    anew before it reads it (the membranes of snnTorch)."""
    return attribute in owner._non_persistent_buffers_set and buffer_fault(attribute, old, new) is not None


def scratch_among(
    old: Mapping[str, torch.Tensor], new: Iterable[tuple[str, torch.Tensor]], find: Callable[[str], nn.Module]
) -> frozenset[str]:
    """The names of such buffers. find: gives modules by path."""
    parts = ((name, name.rpartition("."), tensor) for name, tensor in new)
    return frozenset(
        name for name, (path, _, attribute), tensor in parts if is_scratch(find(path), attribute, old[name], tensor)
    )


SCRATCH = "buffer '{}' is made anew in each step before it is read: a compiled step leaves it as it was"


def form_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a buffer must keep."""
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def buffer_fault(name: str, old: torch.Tensor, new: torch.Tensor) -> Construct | None:
    """What is wrong with the new value of a buffer."""
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        was, now = (f"{list(t.shape)} of {str(t.dtype).removeprefix('torch.')}" for t in (old, new))
        return Construct(
            f"a buffer '{name}' of another form ({was} before the step, {now} after it)",
            "A program is compiled for one form: make the buffer of its full size in __init__ and write into a part of "
            f"it, or pass it in with the batch. {FIRST_CALL}",
        )
    if new.grad_fn is not None and not old.requires_grad:  # a leaf is but marked, and holds what it held
        return Construct(
            f"a buffer '{name}' whose new value has a gradient",
            "Its graph is gone in the next step: write x.detach() into it, under torch.no_grad().",
        )
    return None
