"""Optimizer states that wait in the host's memory: some parameters step at a time, with their states on the device.

The optimizer is the user's, and so is its `step()`. It is called for a few parameters at a time, whose states are
brought for it and taken back after it; the gradients of all others are out of its sight, as if they had none. While
some step, the states of the next ones come and those of the last ones go.

Hooks of the user see one step: ours run in the last hook before it, and what it finds then has no gradient. They get
them back in the first hook behind it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from autopar.errors import PlanError
from autopar.ir.modules import is_named
from autopar.runtime.tiers.host_tier import Copying, HostTier
from autopar.runtime.tiers.side_by_side import bytes_of
from autopar.torch_compat import bare_step, before_steps, hook_behind_step, local_of

PARTS = 32  # of all states; two are on the device at a time, or those of two of the largest parameters

IsOurs = Callable[[Any], bool]


@dataclass(slots=True)
class _Lasting:
    """Memory of the host that is one state's. end: of the last copy into it."""

    tensor: torch.Tensor
    end: Any = None


@dataclass(slots=True)
class _Known:
    """What is known of an optimizer. lasting: by parameter and name of a state. hidden: the gradients that its step
    does not see; is_open: until it is over. depth: of steps inside of it, which a subclass calls."""

    lasting: dict[tuple[Any, str], _Lasting] = field(default_factory=dict)
    hidden: list[tuple[Any, Any]] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)
    is_tried: bool = False
    is_open: bool = False
    depth: int = 0

    def restore(self) -> None:
        for parameter, gradient in self.hidden:
            parameter.grad = gradient
        self.hidden, self.is_open = [], False


def whole_bytes(parameter: torch.Tensor) -> int:
    """The bytes of a parameter on all ranks together: the same number on each, whatever its part."""
    return parameter.numel() * parameter.element_size()


class OffloadedStates:
    """Streams the states of all optimizers of one model. moving: of some parameters, those whose states wait. bytes_of:
    of a parameter, the same on all ranks. near: the ranks that share what `HostTier.needs_room` counts."""

    def __init__(
        self, is_ours: IsOurs, tier: Callable[[], HostTier], moving: Callable[[Sequence[Any]], list[Any]] = list,
        bytes_of: Callable[[Any], int] = whole_bytes, near: int = 1,
    ) -> None:  # fmt: skip
        self._is_ours, self._tier, self.moving, self.bytes_of, self.near = is_ours, tier, moving, bytes_of, near
        self._known: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()
        self._inside = False

    def watch(self, owner: object) -> None:
        """Step for each optimizer of the model, as long as `owner` lives."""
        before_steps(owner, self._begin)

    def _begin(self, optimizer: Optimizer, _args: Any = (), _kwargs: Any = None) -> None:
        """Be the last that is called before a step, and the first behind it."""
        if self._inside or not any(map(self._is_ours, parameters_of(optimizer))):
            return
        if optimizer not in self._known:
            self._known[optimizer] = _Known()
            optimizer.register_load_state_dict_post_hook(self._loaded)
        known = self._known[optimizer]
        if known.is_open:  # a step that a subclass calls in its own
            return
        for hook in known.hooks:
            hook.remove()
        known.hooks = [optimizer.register_step_pre_hook(self._step), hook_behind_step(optimizer, self._end)]

    def _step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Step, a few parameters at a time, and leave none to be seen."""
        known = self._known[optimizer]
        if self._inside or known.is_open:
            known.depth += known.is_open
            return
        check_step(optimizer, args, kwargs)
        known.hidden = [(p, p.grad) for p in parameters_of(optimizer) if p.grad is not None]
        self._inside = True
        try:
            _hide(known.hidden)
            if not known.is_tried:
                check_counts(optimizer)
                known.is_tried = True
            self._stream(optimizer, known, self._tier())
            known.is_open = True
        except BaseException:
            self._tier().queues.end()
            known.restore()
            raise
        finally:
            self._inside = False

    def _end(self, optimizer: Optimizer, _args: Any = (), _kwargs: Any = None) -> None:
        """Give all gradients back."""
        known = self._known[optimizer]
        if known.depth:
            known.depth -= 1
        elif not self._inside:
            known.restore()

    def _loaded(self, optimizer: Optimizer) -> None:
        """Take states that were loaded out of the device's memory."""
        for part in chunks_of(self.moving(parameters_of(optimizer)), self.bytes_of):
            chunk = _Chunk(optimizer, part, self._known[optimizer], self._tier())
            chunk.store()
            chunk.left()

    def _stream(self, optimizer: Optimizer, known: _Known, tier: HostTier) -> None:
        gradients = {id(p): gradient for p, gradient in known.hidden}
        moving = set(map(id, self.moving(parameters_of(optimizer))))
        parts = chunks_of([p for p, _ in known.hidden if id(p) in moving], self.bytes_of)
        rest = [p for p, _ in known.hidden if id(p) not in moving]
        chunks = [_Chunk(optimizer, part, known, tier) for part in parts]
        if chunks and not known.lasting and tier.needs_room is not None:
            tier.needs_room(type(optimizer).__name__, self.near * self._measured(optimizer, chunks, gradients))
        if chunks:
            chunks[0].fetch()
        for place, chunk in enumerate(chunks):
            if place:
                chunks[place - 1].left()  # before the next ones come: two are on the device
            if place + 1 < len(chunks):
                chunks[place + 1].fetch()
            chunk.arrived()
            _step_with(optimizer, chunk.parameters, gradients)
            chunk.store()
        if chunks:
            chunks[-1].left()
        if rest:
            _step_with(optimizer, rest, gradients)

    def _measured(self, optimizer: Optimizer, chunks: Sequence[_Chunk], gradients: Mapping[int, Any]) -> int:
        """The bytes that the states of all will take, by those of the first ones, which step and are put back."""
        first = [p for p in chunks[0].parameters if p not in optimizer.state]
        before = [_part(p).detach().clone() for p in first]
        _step_with(optimizer, first, gradients)
        made = sum(bytes_of(_part(value)) for p in first for value in optimizer.state[p].values() if _has_dims(value))
        with torch.no_grad():
            for parameter, part in zip(first, before, strict=True):
                _part(parameter).copy_(part)
                del optimizer.state[parameter]
        parts = sum(map(bytes_of, before))
        every = sum(bytes_of(_part(p)) for chunk in chunks for p in chunk.parameters)
        return made * every // max(1, parts)


class _Chunk:
    """Parameters that step at a time. On their way: the states that come, and those that go."""

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Any], known: _Known, tier: HostTier) -> None:
        self.optimizer, self.parameters, self.lasting, self.tier = optimizer, parameters, known.lasting, tier
        self.coming: tuple[list[tuple[dict[str, Any], str, Any]], Copying] | None = None
        self.going: Copying | None = None

    def _states(self) -> Iterator[tuple[Any, dict[str, Any], str, Any]]:
        """(parameter, its states, the name of one, it): those that have dims. Counts of steps stay where they are."""
        for parameter in self.parameters:
            states = self.optimizer.state.get(parameter, {})
            for key, value in list(states.items()):
                if _has_dims(value):
                    yield parameter, states, key, value

    def fetch(self) -> None:
        """Start to bring the states that wait."""
        found, waiting = [], []
        for parameter, states, key, value in self._states():
            known = self.lasting.get((parameter, key))
            if known is not None and _part(value) is known.tensor:
                found.append((states, key, value))
                waiting.append(known)
        if waiting:
            device, ends = _part(self.parameters[0]).device, {id(one.end): one.end for one in waiting}
            self.coming = found, self.tier.fetch([one.tensor for one in waiting], device, ends.values())

    def arrived(self) -> None:
        """Wait for them."""
        if self.coming is not None:
            found, copying = self.coming
            for (states, key, value), part in zip(found, copying.wait(), strict=True):
                states[key] = _around(value, part)
        self.coming = None

    def store(self) -> None:
        """Start to take the states back, and leave tensors of the host's memory in their place."""
        found = list(self._states())
        new = {
            (parameter, key): _part(value) for parameter, _, key, value in found if self._is_new(parameter, key, value)
        }
        self.lasting |= dict(zip(new, map(_Lasting, self.tier.lasting(list(new.values()))), strict=True))
        lasting = [self.lasting[parameter, key] for parameter, _, key, _ in found]
        self.going = self.tier.store([_part(value) for *_, value in found], [one.tensor for one in lasting])
        for (_, states, key, value), known in zip(found, lasting, strict=True):
            states[key] = _around(value, known.tensor)
            known.end = self.going.event

    def _is_new(self, parameter: Any, key: str, value: Any) -> bool:
        """Whether no memory is there for a state as it is now."""
        known, part = self.lasting.get((parameter, key)), _part(value)
        return known is None or known.tensor.shape != part.shape or known.tensor.dtype != part.dtype

    def left(self) -> None:
        """Wait until they are gone."""
        if self.going is not None:
            self.going.wait()
        self.going = None


def _has_dims(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _part(value: Any) -> torch.Tensor:
    """What a rank has of a tensor."""
    return local_of(value) if isinstance(value, DTensor) else value


def _around(value: Any, part: torch.Tensor) -> Any:
    """A state of the same kind around another part of it."""
    return value.around(part, value.place, value.shape) if hasattr(value, "place") else part


def parameters_of(optimizer: Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _step_with(optimizer: Optimizer, shown: Sequence[Any], gradients: Mapping[int, Any]) -> None:
    """Step while these alone have a gradient."""
    for parameter in shown:
        parameter.grad = gradients[id(parameter)]
    bare_step(optimizer)
    _hide((parameter, None) for parameter in shown)


def _hide(gradients: Iterable[tuple[Any, Any]]) -> None:
    for parameter, _ in gradients:
        parameter.grad = None


def moving_of(
    parameters: Sequence[Any], amount: float | Sequence[str], name_of: Callable[[Any], str],
    bytes_of: Callable[[Any], int] = whole_bytes,
) -> list[Any]:  # fmt: skip
    """The parameters whose states wait: all that patterns name, or the first ones by which a share of the bytes of all
    is reached."""
    if not isinstance(amount, (int, float)):
        return [p for p in parameters if any(is_named(name_of(p), pattern) for pattern in amount)]
    share = float(amount)
    most, found = share * sum(map(bytes_of, parameters)), []
    for parameter in parameters:
        most -= bytes_of(parameter)
        if most < 0:
            break
        found.append(parameter)
    return found


def chunks_of(parameters: Sequence[Any], bytes_of: Callable[[Any], int] = whole_bytes) -> list[list[Any]]:
    """The parameters that step at a time. The same on all ranks: some optimizers talk in their step."""
    sizes = [bytes_of(parameter) for parameter in parameters]
    most, room, chunks = -(-sum(sizes) // PARTS), 0, list[list[Any]]()
    for parameter, size in zip(parameters, sizes, strict=True):
        if not chunks or size > room:
            chunks.append([])
            room = most
        chunks[-1].append(parameter)
        room -= size
    return chunks


# -- what cannot be streamed ------------------------------------------------------------------------------------------


def check_step(optimizer: Optimizer, args: Sequence[Any], kwargs: Any) -> None:
    """Raise PlanError for a step that computes the loss itself, which needs all parameters at once."""
    if any(callable(one) for one in (*args[1:], *(kwargs or {}).values())):
        raise PlanError(
            f'offload="optimizer": {type(optimizer).__name__}.step(closure) needs all parameters at once, and a few '
            f"step at a time here. Call step() without a closure, by an optimizer that needs none (all of torch.optim "
            f"but LBFGS), or leave offload out."
        )


def check_counts(optimizer: Optimizer) -> None:
    """Raise PlanError for an optimizer that counts its steps beside the states of parameters, and leave its counts as
    they were. It is called when no parameter has a gradient."""
    name, before = type(optimizer).__name__, _numbers(optimizer)
    try:
        bare_step(optimizer)  # it may begin to count
        first = _numbers(optimizer)
        bare_step(optimizer)
    except Exception as error:
        raise PlanError(
            f'offload="optimizer": {name}.step() fails where parameters have no gradient, and a few step at a time '
            f"here, while the others seem to have none ({type(error).__name__}). Let it pass over parameters without a "
            f"gradient, or leave offload out."
        ) from error
    second = _numbers(optimizer)
    changed = sorted(key for key, count in second.items() if key not in first or first[key].number != count.number)
    if changed:
        for key, count in second.items():
            count.become(before.get(key))
        raise PlanError(
            f'offload="optimizer": {name}.step() changes {", ".join(changed)} once a call, and a few parameters step '
            f"at a time here, each by a call. Keep that in the states of parameters, or leave offload out."
        )


@dataclass(frozen=True, slots=True)
class _Count:
    """A number that an optimizer keeps under a key of its own or of a group; it may be a tensor."""

    kept: dict[str, Any]
    key: str
    number: Any

    def become(self, before: _Count | None) -> None:
        """Be what it was, if it was there."""
        if before is None:
            del self.kept[self.key]
        elif isinstance(self.kept[self.key], torch.Tensor):
            self.kept[self.key].fill_(before.number)
        else:
            self.kept[self.key] = before.number


def _numbers(optimizer: Optimizer) -> dict[str, _Count]:
    """What an optimizer counts, or may count, that is no state of a parameter."""
    kept = [(f"param_groups[{i}][{{!r}}]", group) for i, group in enumerate(optimizer.param_groups)]
    found = {}
    for text, values in (*kept, ("{}", vars(optimizer))):
        for key, value in values.items():
            is_number = isinstance(value, (bool, int, float)) or (isinstance(value, torch.Tensor) and not value.ndim)
            if is_number and not key.startswith("_"):
                number = value.item() if isinstance(value, torch.Tensor) else value
                found[text.format(key)] = _Count(values, key, number)
    return found
