"""Tensors of numbers that the model draws on the host, and floats of them: `x * random.random()`, mixup's `1 - lam`.

Python computes with them anew in each step (see `host_draws.py`), and what a call is given in the end is an input of
the step. Which arguments of which calls are such floats is told by runs from other states of the generators: they are
other numbers there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.capture.data.recorded_calls import HostFloat
from autopar.capture.draws.step_coins import Coins
from autopar.capture.python.stand_in import Misuse, Scalar
from autopar.capture.refusals.location import Line
from autopar.capture.refusals.user_lines import quoted
from autopar.errors import CaptureError
from autopar.torch_compat import OpOverload, in_transform, no_function_modes, on_data

Tensor = torch.Tensor
Floats = frozenset[tuple[int, int | str]]  # by the number of the call among those that are given floats: the argument
_ENTERED = frozenset((torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor))  # tensors of data: as such
_FLOAT = (
    "Such a float may be computed with in Python, and meet tensors in sums, products, powers, comparisons, clamp, "
    "where, lerp and masked_fill. Elsewhere each step would be another program: make a tensor of it "
    "(torch.tensor(random.random())), which is an input of each step, or draw it by torch.rand (see docs/random.md)."
)


def refused(how: str, line: Line | None) -> CaptureError:
    """What is said of a float that is drawn and used where no input can stand."""
    where = f", at {quoted(line)}" if line else ". "
    return CaptureError(f"the model computes with a float that it draws while it runs, which {how}{where}{_FLOAT}")


@dataclass(slots=True)
class _Drawn(Misuse):
    """A float of this step, at a line."""

    line: Line | None = None

    def error(self, how: str) -> CaptureError:
        return refused(how, self.line)


@dataclass(slots=True)
class HostInputs:
    """The inputs that one run makes of what the host draws. floats: the drawn ones among those that calls are given.
    met: is given the others, in order. tensors: all that have data, as they come."""

    floats: Floats
    met: list[HostFloat]
    coins: Coins
    tensors: list[Tensor] = field(default_factory=list)
    _values: set[float] = field(default_factory=set)
    _count: int = 0

    def enter(self, tensor: Tensor) -> Tensor:
        """Enter a tensor that has data, the first time that it is met. Those that `torch.vmap` makes seem to."""
        is_real = type(tensor) in (Tensor, torch.nn.Parameter) and not in_transform()
        if is_real and not any(tensor is each for each in self.tensors):
            self.tensors.append(tensor)
            if self.coins.trail is not None:
                self.coins.trail.joined(tensor, ("host", len(self.tensors)))
        return tensor

    def put(
        self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], line: Line | None, is_forward: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call with inputs in place of the drawn floats. Raises CaptureError where none can be."""
        given = [(at, value) for at, value in _named(args, kwargs) if issubclass(type(value), float)]  # no stand-in
        if not given or isinstance(function, OpOverload) or function in _ENTERED:
            return args, dict(kwargs)
        if not is_forward:
            self._check_again(given, line)
            return args, dict(kwargs)
        self._count += 1
        made: dict[int | str, Scalar] = {}
        for at, value in given:
            place = self._count, at
            if place in self.floats:
                made[at] = self._input(value, line)
            else:
                self.met.append(HostFloat(place, getattr(function, "__name__", ""), float(value), line))
        if made and (in_transform() or not any(isinstance(value, Tensor) for _, value in _named(args, kwargs))):
            next(iter(made.values())).refuse(f"is an argument of {getattr(function, '__name__', 'a function')}()")
        args = tuple(made.get(at, value) for at, value in enumerate(args))
        return args, {name: made.get(name, value) for name, value in kwargs.items()}

    def _input(self, value: float, line: Line | None) -> Scalar:
        with on_data(), no_function_modes():
            tensor = torch.tensor(float(value), dtype=torch.float64, device="cpu")
        self.enter(tensor)
        self._values.add(float(value))
        return Scalar.of_tensor(tensor, _Drawn(True, line=line))

    def _check_again(self, given: list[tuple[int | str, float]], line: Line | None) -> None:
        """Raise CaptureError for what looks like a drawn float in a backward pass, where torch.utils.checkpoint runs
        the model's code once more."""
        if any(value in self._values for _, value in given):
            raise refused("is used again by torch.utils.checkpoint", line)


def _named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[int | str, Any]]:
    yield from enumerate(args)
    yield from kwargs.items()
