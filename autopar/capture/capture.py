"""One differentiating trace of a training step: forward, loss and backward, on fake tensors."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.capture import functions
from autopar.capture.location import Locator, is_user_file
from autopar.capture.normalise import decompositions, functional, normalise
from autopar.capture.raised_random import no_foreign_draws
from autopar.capture.raising import Raise, default_dtype
from autopar.errors import AutoparError, CaptureError
from autopar.ir.program import Input, Output, Program
from autopar.torch_compat import (
    FakeTensor,
    FakeTensorMode,
    TreeSpec,
    backward,
    custom_function,
    gradients,
    tree_flatten,
    tree_unflatten,
)

LossFn = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured step.

    `constants` are the tensors that the model made or keeps outside of parameters and buffers. `result_spec` and
    `result_leaves` rebuild the model's output of a forward-only program (None stands for a tensor result).
    """

    program: Program
    constants: Mapping[str, torch.Tensor]
    result_spec: TreeSpec | None = None
    result_leaves: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class State:
    """The tensors of a module: tied ones once, with all their names."""

    entries: tuple[tuple[Input, torch.Tensor], ...]


def state_of(model: nn.Module) -> State:
    """Parameters, buffers and plain tensor attributes of `model`, by identity."""
    found: dict[int, tuple[str, list[str], torch.Tensor]] = {}
    for kind, named in (
        ("parameter", model.named_parameters(remove_duplicate=False)),
        ("buffer", model.named_buffers(remove_duplicate=False)),
        ("constant", _tensor_attributes(model)),
    ):
        for name, tensor in named:
            found.setdefault(id(tensor), (kind, [], tensor))[1].append(name)
    return State(tuple((Input(kind, tuple(names)), tensor) for kind, names, tensor in found.values()))


def _tensor_attributes(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield (f"{path}.{name}" if path else name), value


def capture(
    model: nn.Module,
    loss_fn: LossFn | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    train: bool = True,
    lift: torch.dtype | None = None,
) -> Captured:
    """Trace one step of `model` on a batch (any nesting of tensors; their values are not read).

    With `train`, the program returns the loss, the gradient of every parameter that has one, and the new buffers;
    otherwise the model's output, without gradients. `loss_fn(model, *args, **kwargs)` gives the loss; None if the
    module itself does. `lift`: the dtype that the model's own floating-point casts go to, if not their own. Raises
    CaptureError with the user's line where the model cannot be captured.
    """
    return _Capture(model, loss_fn, args, dict(kwargs), train, lift).run()


class _Step(nn.Module):
    """Spans forward and backward in one call, so that a functional call swaps the state for both."""

    def __init__(self, model: nn.Module, body: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.body = body

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(*args, **kwargs)


class _Capture:
    def __init__(
        self, model: nn.Module, loss_fn: LossFn | None, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool,
        lift: torch.dtype | None,
    ) -> None:  # fmt: skip
        self.model, self.loss_fn, self.train, self.lift = model, loss_fn, train, lift
        self.leaves, self.spec = tree_flatten((args, kwargs))
        self.state = state_of(model)
        self.locator = Locator()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.device = _device(model)
        self.outputs: list[Output] = []
        self.has_random_ops = False
        self.result: tuple[TreeSpec | None, tuple[Any, ...]] = (None, ())

    def run(self) -> Captured:
        entries = self.state.entries
        batch = [(i, leaf) for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        inputs = [entry for entry, _ in entries]
        inputs += [Input("batch", (str(i),)) for i, _ in batch]
        inputs.append(Input("seed", ("seed",)))
        fakes = [self._fake(tensor) for _, tensor in entries] + [self._fake(leaf) for _, leaf in batch]
        with self.fake:
            fakes.append(torch.empty(2, dtype=torch.int64, device=self.device))
        try:
            with ExitStack() as stack:
                stack.enter_context(no_foreign_draws())
                stack.enter_context(default_dtype(self.lift))
                stack.enter_context(self.locator.follow(self.model))
                traced = make_fx(
                    self._traced, decomposition_table=dict(decompositions()), tracing_mode="fake",
                )(*fakes)  # fmt: skip
                traced = functional(traced, fakes)
        except AutoparError:
            raise
        except Exception as error:
            raise _explain(error) from error
        program, constants = normalise(traced, tuple(inputs), tuple(self.outputs))
        if not self.has_random_ops:
            program = _without_seed(program)
        kept = {entry.name: tensor for entry, tensor in entries if entry.kind == "constant"}
        return Captured(program, {**kept, **constants}, *self.result)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.fake:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)

    def _traced(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        swapped: dict[str, torch.Tensor] = {}
        constants: dict[str, torch.Tensor] = {}
        trainable: list[tuple[str, torch.Tensor]] = []
        position = 0
        for (entry, tensor), given in zip(self.state.entries, inputs, strict=False):
            value = given
            if entry.kind == "parameter" and tensor.requires_grad and self.train:
                value = given.detach().requires_grad_()
                trainable.append((entry.name, value))
            for name in entry.names:
                (constants if entry.kind == "constant" else swapped)[f"model.{name}"] = value
            position += 1
        leaves = list(self.leaves)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[i] = inputs[position]
                if leaf.requires_grad and self.train:
                    leaves[i] = inputs[position].detach()
                position += 1
        args, kwargs = tree_unflatten(leaves, self.spec)
        mode = Raise(self.locator, inputs[position], self.lift)
        body = self._train_body(trainable) if self.train else self._forward_body()
        step = _Step(self.model, body)
        with mode, _attributes(step, constants), nullcontext() if self.train else torch.no_grad():
            result = functional_call(step, swapped, args, kwargs, tie_weights=False)
        self.has_random_ops = bool(mode.random_ops)
        return tuple(result)

    def _train_body(self, trainable: list[tuple[str, torch.Tensor]]) -> Callable[..., Any]:
        def body(*args: Any, **kwargs: Any) -> list[Any]:
            if self.loss_fn is None:
                loss = loss_of(self.model(*args, **kwargs))
            else:
                loss = self.loss_fn(self.model, *args, **kwargs)
            _check_loss(loss, self.loss_fn, bool(trainable))
            buffers = self._buffers()
            self.locator.phase = "backward"
            tensors = [tensor for _, tensor in trainable]
            if _has_own_backward(loss):
                backward(loss)
                grads = tuple(tensor.grad for tensor in tensors)
            else:
                grads = gradients(loss, tensors)
            self.outputs = [Output("loss", "loss")]
            self.outputs += [Output("gradient", name) for name, _ in trainable]
            self.outputs += [Output("buffer", name) for name, _ in buffers]
            return [loss.detach(), *grads, *(tensor for _, tensor in buffers)]

        return body

    def _forward_body(self) -> Callable[..., Any]:
        def body(*args: Any, **kwargs: Any) -> list[Any]:
            leaves, spec = tree_flatten(self.model(*args, **kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            # What is neither a tensor nor plain data (a cache object, say) holds fake tensors: it cannot go out.
            plain = (int, float, str, bool, type(None))
            self.result = (spec, tuple(leaf if isinstance(leaf, plain) else None for leaf in leaves))
            self._positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
            buffers = self._buffers()
            self.outputs = [Output("value", str(i)) for i in self._positions]
            self.outputs += [Output("buffer", name) for name, _ in buffers]
            return [*tensors, *(tensor for _, tensor in buffers)]

        return body

    def _buffers(self) -> list[tuple[str, torch.Tensor]]:
        known = {entry.name for entry, _ in self.state.entries if entry.kind == "buffer"}
        return [(name, tensor) for name, tensor in self.model.named_buffers() if name in known]


def loss_of(result: Any) -> Any:
    """The loss in what a module returned: a scalar, the first item of a tuple, `.loss` or `["loss"]`."""
    if isinstance(result, torch.Tensor):
        return result
    if isinstance(result, Mapping) and "loss" in result:
        return result["loss"]
    if hasattr(result, "loss"):
        return result.loss
    if isinstance(result, (tuple, list)) and result:
        found = [item for item in result if isinstance(item, torch.Tensor) and item.ndim == 0]
        return found[0] if found else result[0]
    return result


def _check_loss(loss: Any, loss_fn: LossFn | None, has_trainable: bool) -> None:
    origin = "the module (loss_fn=None)" if loss_fn is None else f"loss_fn '{getattr(loss_fn, '__name__', loss_fn)}'"
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(
            f"{origin} returned {type(loss).__name__}, but a training step needs a scalar loss tensor. "
            f"Return the loss, a tuple that begins with it, or an object with .loss; did the batch lack labels?"
        )
    if loss.numel() != 1 or loss.ndim != 0:
        raise CaptureError(
            f"{origin} returned a tensor of shape {list(loss.shape)}, but the loss must be a scalar. "
            f"Reduce it, e.g. with .mean() or .sum(). If the module returns outputs, pass loss_fn=."
        )
    if not loss.is_floating_point():
        raise CaptureError(f"{origin} returned a loss of dtype {loss.dtype}, which has no gradient: return a float.")
    if not has_trainable:
        raise CaptureError("the model has no parameter with requires_grad=True: there is nothing to train.")
    if not loss.requires_grad:
        raise CaptureError(
            f"the loss of {origin} does not depend on any parameter that requires a gradient. "
            f"Look for .detach(), torch.no_grad() or .item() on its way."
        )


def _has_own_backward(loss: torch.Tensor) -> bool:
    """True if a custom autograd function that is not ours stands behind `loss`.

    It may run a backward pass of its own, as reentrant checkpoints do, and leave gradients that no path leads to.
    """
    known, pending = set(), [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in known:
            continue
        custom = custom_function(node)
        if custom is not None and custom.__module__ != functions.__name__:
            return True
        known.add(node)
        pending += [parent for parent, _ in node.next_functions]
    return False


def _device(model: nn.Module) -> torch.device:
    for parameter in model.parameters():
        if parameter.device.type != "meta":
            return parameter.device
    return torch.device("cpu")


@contextmanager
def _attributes(step: nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Put other tensors in place of plain tensor attributes, for as long as the context lasts."""
    saved = []
    for name, value in values.items():
        path, _, attribute = name.rpartition(".")
        owner = step.get_submodule(path)
        saved.append((owner, attribute, getattr(owner, attribute)))
        setattr(owner, attribute, value)
    try:
        yield
    finally:
        for owner, attribute, value in saved:
            setattr(owner, attribute, value)


def _without_seed(program: Program) -> Program:
    for node, entry in zip(program.placeholders, program.inputs, strict=True):
        if entry.kind == "seed":
            program.graph.erase_node(node)
    return program.with_(inputs=tuple(entry for entry in program.inputs if entry.kind != "seed"))


_DATA_DEPENDENT = (
    "DataDependent", "GuardOnDataDependent", "trying to get value out of a tracing tensor", "DynamicOutputShape",
    ".numpy() is not supported",
)  # fmt: skip


def _explain(error: Exception) -> CaptureError:
    """The user's line and what to do, instead of torch's internals."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_user_file(f.filename)]
    where = "the call itself:\n"
    if frames:
        line = linecache.getline(frames[-1].filename, frames[-1].lineno or 0).strip()
        where = f"{frames[-1].filename}:{frames[-1].lineno}\n    {line}\n"
    text = f"{type(error).__name__}: {error}"
    if any(mark in text for mark in _DATA_DEPENDENT):
        return CaptureError(
            f"the program depends on the values in a tensor at {where}"
            f"A branch, loop, .item() or index that reads data cannot be compiled once for all batches. "
            f"Use torch.where or a mask instead, or pass the value in as a Python number."
        )
    first = str(error).strip().split("\n")[0][:500]
    return CaptureError(f"the model failed on the example batch, at {where}{type(error).__name__}: {first}")


def fake_like(value: Any) -> bool:
    """True for a tensor that has no data."""
    return isinstance(value, FakeTensor) or (isinstance(value, torch.Tensor) and value.device.type == "meta")
