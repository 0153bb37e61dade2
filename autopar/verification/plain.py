"""The plain module on one device, in one dtype or as torch.autocast runs it; or one replica of it for each place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from autopar.capture import Captured
from autopar.capture.data.casts import default_dtype
from autopar.capture.draws.host_draws import drawing_for
from autopar.capture.inputs import tables
from autopar.capture.inputs.containers import map_batch, take_apart
from autopar.capture.inputs.loss_outputs import LossFn, split_result
from autopar.capture.inputs.module_state import is_scratch, unsynced
from autopar.capture.inputs.partners import Partner
from autopar.capture.raising import Raise
from autopar.capture.refusals.explain_failure import line_of
from autopar.capture.refusals.user_lines import quoted
from autopar.capture.rows.row_draws import PlainDraws
from autopar.errors import AutoparError, CaptureError
from autopar.ir.program import BESIDE, INPUT_GRADIENT
from autopar.parallel.programs.own_batch import seed_of
from autopar.torch_compat import backward
from autopar.verification.borrowed import Borrowed
from autopar.verification.copies import copied
from autopar.verification.dtypes import dtype_of
from autopar.verification.judge.comparison import Values
from autopar.verification.places import Batches, aux_at
from autopar.verification.plain_norms import PlainNorms

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
SCALE = 256.0  # of the loss, where gradients in fp16 are compared


_DTYPE = (
    "Where it runs without autopar: verify computes in {}, so give what the model makes itself the dtype of its "
    "operands (dtype=x.dtype), or compare in {}: verify(..., dtype=torch.{})."
)


DrawsOf = Callable[[torch.Tensor], PlainDraws]  # of the step of a seed


def as_they_come(_: torch.Tensor) -> PlainDraws:
    """A step without random branches, and without draws of selected rows."""
    return PlainDraws()


def draws_of(captured: Captured, seed: torch.Tensor, rows: torch.Tensor | None) -> PlainDraws:
    """How the plain module draws in a step that was captured. rows: how many each mask selects, where it says so."""
    coins = {} if captured.coins is None else captured.coins.skips(seed)
    without = captured.row_uses.skips(rows) if captured.row_uses is not None and rows is not None else {}
    return PlainDraws({**coins, **without}, captured.row_draws)


def optimized(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module that an optimizer steps."""
    return [parameter for parameter in tables.parameters(model) if parameter.requires_grad]


def own_batch(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Arguments in memory of their own, which a model may write to, and which take gradients of their own."""
    return map_batch(lambda x: x.detach().clone().requires_grad_(x.requires_grad), (args, dict(kwargs)))


def gradients_of_batch(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Values:
    """The gradients of what a step was given, named as a program's outputs are."""
    tensors = take_apart((args, dict(kwargs))).tensors()
    return {(INPUT_GRADIENT, str(i)): x.grad for i, x in tensors if x.requires_grad and x.grad is not None}


def values_of(aux: Any) -> Values:
    """The tensors and numbers that a loss function returned beside the loss, named as a program's outputs are."""
    return numbered(take_apart(aux, lenient=True).leaves)


def numbered(leaves: Iterable[Any]) -> Values:
    """The tensors and numbers among leaves, named as a program's outputs are."""
    found = (
        (i, torch.tensor(one, dtype=torch.float64, device="cpu") if type(one) in (int, float) else one)
        for i, one in enumerate(leaves)
    )
    return {("aux", str(i)): one.detach().clone() for i, one in found if isinstance(one, torch.Tensor)}


class Plain:
    """The user's module, trained as it is; with `autocast` as under torch.autocast in that dtype. norms: of groups of
    samples, where they do not take the whole batch. draws: of the program that it is compared with. microbatches: of
    all its data ranks."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFn | None, make: OptimizerFactory, autocast: torch.dtype | None = None,
        partners: tuple[Partner, ...] = (), norms: PlainNorms | None = None, draws: DrawsOf = as_they_come,
        microbatches: int = 1,
    ) -> None:  # fmt: skip
        self.model, self.loss_fn, self.autocast, self.norms = model, loss_fn, autocast, norms
        self.draws, self.microbatches = draws, microbatches
        self.optimizer = make(optimized(model))
        self.borrowed = Borrowed(partners, dtype_of(model))
        self.buffers = dict(tables.named_buffers(model))  # a table that a step keeps is none of the state

    def step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: torch.Tensor) -> Values:
        """What a step gives."""
        return {**self.forward_backward(args, kwargs, seed), **self.update()}

    def forward_backward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: torch.Tensor) -> Values:
        """The loss, what comes beside it, and gradients."""
        of_partners: Values = {}
        with self.borrowed.used(of_partners):
            found = self._forward_backward(args, kwargs, seed)
        return {**found, **of_partners}

    def _forward_backward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: torch.Tensor) -> Values:
        self.optimizer.zero_grad()
        args, kwargs = own_batch(args, kwargs)
        parameter = next(tables.parameters(self.model))
        dtype, low = dtype_of(self.model), self.autocast
        scale = SCALE if low is torch.float16 else 1.0
        mode = Raise(None, seed, None if low else dtype)
        mode.plain, mode.microbatches = self.draws(seed), self.microbatches
        if self.norms is not None:
            self.norms.begin()
            mode.plain_norm = self.norms.call
        with drawing_for(seed), default_dtype(dtype), mode, unsynced(tables.modules(self.model)):
            with torch.autocast(parameter.device.type, low) if low else nullcontext():
                loss, aux = self._forward(args, kwargs, dtype)
            backward(loss * scale if scale != 1.0 else loss)
        if self.norms is not None:  # a checkpoint runs some of them once more in the backward pass
            self.norms.finish()
        values: Values = {("loss", "loss"): loss.detach(), **values_of(aux if self.loss_fn else None)}
        for name, parameter in tables.named_parameters(self.model):
            if parameter.grad is not None:
                parameter.grad /= scale
                values["gradient", name] = parameter.grad.clone()
        return {**values, **{key: each / scale for key, each in gradients_of_batch(args, kwargs).items()}}

    def update(self) -> Values:
        """Step the optimizer: the new weights, and the buffers."""
        self.optimizer.step()
        values: Values = {}
        for name, parameter in tables.named_parameters(self.model):
            values["weight", name] = parameter.detach().clone()
        for name, tensor in tables.named_buffers(self.model):
            path, _, attribute = name.rpartition(".")
            owner, known = tables.submodule(self.model, path), self.buffers.get(name)
            if known is not None and not is_scratch(owner, attribute, known, tensor):
                values["buffer", name] = tensor.clone()
        return values

    def begin(self, values: Values) -> None:
        """Take the weights and buffers that a step gave in place of one's own."""
        begin_with(values, dict(tables.named_parameters(self.model)), dict(tables.named_buffers(self.model)))

    def take_buffers(self, other: Plain) -> None:
        """Take the buffers of another replica, as DistributedDataParallel sends them before a forward pass."""
        known = dict(tables.named_buffers(other.model))
        with torch.no_grad():
            for name, tensor in tables.named_buffers(self.model):
                if name in known:
                    tensor.copy_(known[name])
        self.borrowed.take_buffers(other.borrowed)

    def take_gradients(self, values: Values) -> None:
        """Take gradients in place of those of the last backward pass."""
        for name, parameter in tables.named_parameters(self.model):
            if ("gradient", name) in values:
                parameter.grad = values["gradient", name].clone()

    def _forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype) -> tuple[Any, Any]:
        """The loss, and what is returned beside it. Raises CaptureError where the module does not run in this dtype."""
        function = self.loss_fn or nn.Module.__call__
        try:
            return split_result(function(self.model, *args, **kwargs), self.loss_fn)
        except AutoparError:
            raise
        except Exception as error:
            line = line_of(error)
            where = f", at {quoted(line)}" if line else ": "
            first = str(error).strip().split("\n")[0]
            name, other = str(dtype).removeprefix("torch."), "float32" if dtype is torch.float64 else "float64"
            raise CaptureError(
                f"the plain model fails in {name}{where}{type(error).__name__}: {first}. "
                f"{_DTYPE.format(name, 'its own' if dtype is torch.float64 else other, other)}"
            ) from error


def begin_with(values: Values, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Write the weights and buffers that a step gave into parameters and buffers."""
    with torch.no_grad():
        for kind, tensors in (("weight", parameters), ("buffer", buffers)):
            for name, tensor in tensors.items():
                if (kind, name) in values and not _is_expanded(tensor):  # into which torch writes nothing
                    tensor.copy_(values[kind, name])


def _is_expanded(tensor: Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class Side(Protocol):
    """What trains: the plain module, or programs."""

    def step(self, batches: Batches, seed: Tensor) -> Values: ...
    def begin(self, values: Values) -> None: ...


def steps_of(side: Side, batches: Batches, seeds: Sequence[Tensor], given: Sequence[Values]) -> list[Values]:
    """What each step gives. given: for each step what the next one begins with; empty where it goes on."""
    steps = []
    for seed, values in zip_longest(seeds, given):
        steps.append(side.step(batches, seed))
        if values:
            side.begin(values)
    return steps


class PlainReplicas:
    """A module that is trained on a batch for each place, as DistributedDataParallel trains its replicas: of their
    losses and gradients all take the mean, and they begin with the buffers of the first. A global batch has one place.
    """

    def __init__(self, make: Callable[[nn.Module], Plain], model: nn.Module, places: int) -> None:
        self.all = [make(model if place == 0 else copied(model)) for place in range(places)]

    def step(self, batches: Batches, seed: torch.Tensor) -> Values:
        """What a step gives; what comes beside the loss is of each place."""
        first, *others = self.all
        if not others:
            return first.step(*batches[0], seed)
        for other in others:
            other.take_buffers(first)
        every = [
            replica.forward_backward(*batch, seed_of(seed, place))
            for place, (replica, batch) in enumerate(zip(self.all, batches, strict=True))
        ]
        found = {key: value for key, value in every[0].items() if key[0] == "buffer"}  # of other models in the loss
        for key in dict.fromkeys(key for values in every for key in values if key[0] in ("loss", "gradient")):
            found[key] = torch.stack([values[key] for values in every if key in values]).sum(0) / len(every)
        for place, values in enumerate(every):
            found.update({aux_at(key, place): value for key, value in values.items() if key[0] in BESIDE})
        for replica in self.all:
            replica.take_gradients(found)
        updated = [replica.update() for replica in self.all]
        return {**found, **updated[0]}

    def begin(self, values: Values) -> None:
        """Take the weights and buffers that a step gave, in all places."""
        for replica in self.all:
            replica.begin(values)
