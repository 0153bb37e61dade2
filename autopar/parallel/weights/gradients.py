"""Refuse, in words of ours, what autograd is asked for around a step and cannot give.

A step gives the gradients of parameters and of its batch, and no others: it is one program, of which autograd sees
nothing. So what a forward pass returns requires a gradient wherever one device's would, and says what to write instead
when it is asked for one; without that a sum with another model's loss would train the other one only. The loss of
`forward_backward` requires one too, as after one device's `backward()`, and says that its backward pass has run; that
of `training_loss` holds the gradients until then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.torch_compat import at_end_of_pass, current_pass, hooks_of, is_in_pass

Reach = Callable[[torch.Tensor, bool], list[torch.Tensor | None]]


class AsGradient(Protocol):
    """Makes the gradient of a parameter of this rank's part. is_added: autograd is to add it to `.grad`."""

    def __call__(self, parameter: nn.Parameter, value: torch.Tensor | None, is_added: bool = False) -> torch.Tensor: ...


def check_enabled(call: str) -> None:
    """Raise AutoparError where the user turned gradients off."""
    if not torch.is_grad_enabled():
        raise AutoparError(
            f"{call}() computes gradients, but was called under torch.no_grad() or torch.inference_mode(). Call it "
            f"outside; for the loss alone call training_loss(*batch), for the output the model itself: model(*batch)."
        )


def guarded(
    outputs: Iterable[Any], leaves: Iterable[Any], parameters: Iterable[nn.Parameter], free: Collection[int] = ()
) -> list[Any]:
    """The outputs of a forward pass, which refuse a backward pass where one device's would have one. free: the places
    of those that would have none."""
    sources = [tensor for tensor in (*leaves, *parameters) if _requires(tensor)]
    if not torch.is_grad_enabled() or not sources:
        return list(outputs)
    is_float = lambda x: isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())  # noqa: E731
    return [
        _NoBackward.apply(_OUTPUT, x, *sources) if is_float(x) and at not in free else x  # type: ignore[no-untyped-call]
        for at, x in enumerate(outputs)
    ]


def finished(loss: torch.Tensor) -> torch.Tensor:
    """The loss of a step, which refuses another backward pass."""
    return _NoBackward.apply(_LOSS, loss, torch.empty(0, device=loss.device, requires_grad=True))  # type: ignore[no-untyped-call, no-any-return]


def held(
    loss: torch.Tensor, add: Callable[[Added], None], batch: OfBatch, step: Added, as_gradient: AsGradient
) -> torch.Tensor:
    """The loss of a step whose gradients wait: its backward pass has them added, by the gradient of the loss, and goes
    on to what the batch was computed from. One that is asked for some gradients (`torch.autograd.grad(loss, weights)`,
    `backward(inputs=...)`) has these, and adds nothing. as_gradient: of a parameter, of this rank's part."""
    waiting = [step]
    each = step.parameters if step.gradients is not None else ()

    def reach(gradient: torch.Tensor, is_all: bool) -> list[torch.Tensor | None]:
        """What autograd goes on with, to the parameters: in a pass for all of them, which is the last, to those that
        have hooks of the user's."""
        if not waiting:
            raise AutoparError(_AGAIN)
        if not is_all:
            return _once([as_gradient(p, _times(value, gradient)) for p, value in step.pairs()], *each)
        multiply(waiting.pop().gradients or (), gradient)
        trained = [parameter.requires_grad for parameter in each]  # one that was frozen since gets none, as in torch
        hooked = [is_trained and any(hooks_of(parameter)) for is_trained, parameter in zip(trained, each, strict=True)]
        if all(trained) and not any(hooked):
            add(step)
            return [None] * len(each)
        add(step.where([is_trained and not is_hooked for is_trained, is_hooked in zip(trained, hooked, strict=True)]))
        pairs = zip(step.pairs(), hooked, strict=True)
        return [as_gradient(*pair, is_added=True) if is_hooked else None for pair, is_hooked in pairs]

    every = torch.zeros_like(loss, requires_grad=True).clone()  # a pass that is asked for some leaves it out
    parameters = _OfParameters.apply(reach, every, *each)  # type: ignore[no-untyped-call]
    return _Held.apply(batch.gradients, loss, parameters, *batch.tensors)  # type: ignore[no-untyped-call, no-any-return]


@dataclass(frozen=True, slots=True)
class OfBatch:
    """The tensors of a batch that require a gradient, and what a step gives each; None if those overflowed, or if the
    loss does not depend on it."""

    tensors: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor | None]

    def add(self) -> None:
        """Go on with the backward pass, to what the batch was computed from."""
        found = [(x, like(gradient, x)) for x, gradient in zip(self.tensors, self.gradients, strict=True)]
        known = [(x, gradient) for x, gradient in found if gradient is not None]
        if known:
            torch.autograd.backward([x for x, _ in known], [gradient for _, gradient in known])


def like(gradient: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor | None:
    """The gradient where its tensor is, and in its dtype."""
    return None if gradient is None else gradient.to(tensor.device, tensor.dtype)


@dataclass(frozen=True, slots=True)
class Added:
    """What one step adds to the gradients of parameters; None if those overflowed, and all are dropped."""

    parameters: Sequence[nn.Parameter]
    gradients: list[torch.Tensor | None] | None

    def pairs(self) -> list[tuple[nn.Parameter, torch.Tensor | None]]:
        """Each parameter with its gradient."""
        return list(zip(self.parameters, self.gradients or (), strict=self.gradients is not None))

    def where(self, chosen: Sequence[bool]) -> Added:
        """A part of it."""
        return Added(list(compress(self.parameters, chosen)), list(compress(self.gradients or (), chosen)))


class Sums:
    """The steps whose losses one backward pass goes through, as of `training_loss(x) + training_loss(y)`. As on one
    device their gradients are added up before hooks of a parameter see them, once."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Added]] = {}  # by the number of a backward pass

    def add(self, one: Added, take: Callable[[list[Added]], None]) -> None:
        """Have `take` called with all steps, at the end of the backward pass that runs."""
        number = current_pass()
        assert number is not None
        if number not in self._waiting:
            self._waiting[number] = []
            at_end_of_pass(lambda: take(self._waiting.pop(number)))
        self._waiting[number].append(one)

    def forget(self) -> None:
        """Drop what passes left that failed."""
        if current_pass() is None:
            self._waiting.clear()


def added_up(steps: Sequence[Added]) -> Added:
    """What several steps add, together: each parameter once."""
    if len(steps) == 1:
        return steps[0]
    found: dict[nn.Parameter, torch.Tensor | None] = {}
    for step in steps:
        if step.gradients is None:
            return Added([parameter for each in steps for parameter in each.parameters], None)
        for parameter, gradient in zip(step.parameters, step.gradients, strict=True):
            known = found.get(parameter)
            found[parameter] = gradient if known is None or gradient is None else known.add_(gradient)
    return Added(list(found), list(found.values()))


def multiply(gradients: Sequence[torch.Tensor | None], scale: torch.Tensor | None) -> None:
    """Multiply this rank's gradients by a number on their device, in place; None is 1. A gradient that is None is of a
    parameter on another stage."""
    if scale is None:
        return
    for gradient in gradients:
        if gradient is not None:
            gradient.mul_(scale.to(gradient.device))


def _times(value: torch.Tensor | None, scale: torch.Tensor) -> torch.Tensor | None:
    return None if value is None else value * scale.to(value.device, value.dtype)


def _once(gradients: list[torch.Tensor | None], *sources: torch.Tensor) -> list[torch.Tensor | None]:
    """Gradients which refuse a backward pass, to what they hang on too, where one may be asked for (create_graph)."""
    if not torch.is_grad_enabled():
        return gradients
    sources = sources or (torch.empty(0, requires_grad=True, device="cpu"),)
    return [None if each is None else _NoBackward.apply(_DOUBLE, each, *sources) for each in gradients]  # type: ignore[no-untyped-call]


_OUTPUT = (
    "backward() through the output of a parallel model: model(*batch) computes no gradients. Give the loss to "
    "autopar.parallelize(..., loss_fn=...) and call model.forward_backward(*batch), which adds to .grad and "
    "returns the loss, or model.training_loss(*batch), whose backward() a loop calls itself; if no gradient is "
    "wanted here, use model(*batch) under torch.no_grad(), or .detach()."
)
_LOSS = (
    "backward() of what forward_backward() returned: it has run the backward pass already, and .grad has the "
    "gradients. Leave backward() out; what scales or adds to the loss belongs in loss_fn. To log the loss use .item(). "
    'A GradScaler goes too: precision="fp16" scales the loss, and skips steps that overflow. For a loop that calls '
    "backward() itself there is model.training_loss(*batch)."
)
_DOUBLE = (
    "a backward pass through a gradient of training_loss(): a step has the gradients of its batch and parameters, and "
    "not those of these. Compute what needs them in loss_fn: `g, = torch.autograd.grad(loss, x, create_graph=True)`."
)
_AGAIN = (
    "backward() of what training_loss() returned, for the second time: its gradients were added to .grad by the first."
)


class _NoBackward(torch.autograd.Function):
    """The same memory, with a history. (A `detach` is no view to autograd, so that it may be written to.)"""

    @staticmethod
    def forward(ctx: Any, message: str, output: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.message = message
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AutoparError(ctx.message)


class _OfParameters(torch.autograd.Function):
    """A number with a history that leads to parameters, and to what stands for all of them."""

    @staticmethod
    def forward(ctx: Any, reach: Reach, every: torch.Tensor, *parameters: nn.Parameter) -> torch.Tensor:  # type: ignore[override]
        ctx.reach, ctx.every = reach, every.grad_fn
        return torch.zeros_like(every)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return None, None, *ctx.reach(gradient, is_in_pass(ctx.every))


class _Held(torch.autograd.Function):
    """The same memory, with a history that leads to the parameters, as one, and to the batch."""

    @staticmethod
    def forward(
        ctx: Any, found: Sequence[torch.Tensor | None], loss: torch.Tensor, _: torch.Tensor, *batch: torch.Tensor
    ) -> torch.Tensor:  # type: ignore[override]
        ctx.has_batch = bool(batch)
        ctx.save_for_backward(*(like(each, x) for each, x in zip(found, batch, strict=True)))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        saved = ctx.saved_tensors if ctx.has_batch else ()  # which torch refuses a second time, in its own words
        if isinstance(gradient, DTensor):  # of a sum with what was computed of parameters
            gradient = gradient.full_tensor()
        return None, None, gradient, *_once([_times(each, gradient) for each in saved])


def _requires(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad
