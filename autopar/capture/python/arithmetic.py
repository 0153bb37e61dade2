"""What Python computes of numbers that are inputs of a step: each step computes it anew, in Python itself.

So integers have the range that they have there, a quotient by zero is the user's own error, and the program takes
nothing but the results that a tensor meets.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.torch_compat import no_function_modes, on_data

Tensor = torch.Tensor
DTYPES = {float: torch.float64, int: torch.int64}


@dataclass(frozen=True, slots=True)
class _At:
    """The number at a place."""

    place: Any


@dataclass(frozen=True, slots=True)
class _Of:
    """The result of an earlier step."""

    position: int


@dataclass(frozen=True, slots=True)
class _Literal:
    """A number that is the same in every step; 1, 1.0 and True are three."""

    kind: type
    number: Any


Operand = _At | _Of | _Literal
Step = tuple[Callable[..., Any], tuple[Operand, ...]]


@dataclass(frozen=True, slots=True)
class Number:
    """A number that a program takes: the result of the last of these steps, of a type that stays."""

    steps: tuple[Step, ...]
    kind: type

    @property
    def places(self) -> list[Any]:
        """Where the numbers stand of which it is computed."""
        return list(dict.fromkeys(o.place for _, operands in self.steps for o in operands if type(o) is _At))

    def value(self, read: Callable[[Any], Any]) -> Any:
        """What it is now; read: gives the number at a place. Raises what Python raises, such as ZeroDivisionError."""
        values: list[Any] = []
        for function, operands in self.steps:
            values.append(plain(function(*(_value(operand, values, read) for operand in operands))))
        return values[-1]

    def fits(self, read: Callable[[Any], Any]) -> bool:
        """True if a program that takes it can take what it is now."""
        try:
            value = self.value(read)
        except (ArithmeticError, ValueError, TypeError):
            return False  # the user is told by Python, where the step is captured anew
        return type(value) is self.kind and is_input(value)


def _value(operand: Operand, values: list[Any], read: Callable[[Any], Any]) -> Any:
    if isinstance(operand, _Of):
        return values[operand.position]
    return read(operand.place) if isinstance(operand, _At) else operand.number


def is_input(value: Any) -> bool:
    """True for a number that an input holds to the bit: a float, or an integer of 64 bits."""
    return type(value) is float or (type(value) is int and -(1 << 63) <= value < 1 << 63)


def plain(value: Any) -> Any:
    """A float of numpy's as Python's, of which it is a subclass."""
    return float(value) if isinstance(value, float) else value


@dataclass(slots=True)
class Arithmetic:
    """The steps of one capture, each once, and the tensors that stand for results in its graph."""

    steps: dict[Step, int] = field(default_factory=dict)
    tensors: dict[int, Tensor] = field(default_factory=dict)

    def at(self, place: Hashable) -> int:
        """The step that reads the number at a place."""
        return self._step((plain, (_At(place),)))

    def call(self, function: Callable[..., Any], operands: tuple[Any, ...], steps: tuple[int | None, ...]) -> int:
        """The step that calls a function. steps: of those operands that are results; None of the others."""
        given = (_Literal(type(o), o) if at is None else _Of(at) for o, at in zip(operands, steps, strict=True))
        return self._step((function, tuple(given)))

    def _step(self, step: Step) -> int:
        return self.steps.setdefault(step, len(self.steps))

    def tensor(self, at: int, value: Any) -> Tensor:
        """What stands for the result of a step, which is `value` now: nothing of it is rounded."""
        if at not in self.tensors:
            with on_data(), no_function_modes():  # no call of the user's makes it
                self.tensors[at] = torch.tensor(value, dtype=DTYPES[type(value)], device="cpu")
        return self.tensors[at]

    def numbers(self) -> dict[int, Number]:
        """What a program takes, by the id of the tensor that stands for it."""
        kinds = {dtype: kind for kind, dtype in DTYPES.items()}
        return {id(tensor): Number(self._needed(at), kinds[tensor.dtype]) for at, tensor in self.tensors.items()}

    def _needed(self, last: int) -> tuple[Step, ...]:
        """The steps that one of them needs, and itself."""
        steps, needed = list(self.steps), {last}
        for at in range(last, -1, -1):
            if at in needed:
                needed.update(operand.position for operand in steps[at][1] if isinstance(operand, _Of))
        moved = {old: _Of(new) for new, old in enumerate(sorted(needed))}
        return tuple(
            (steps[at][0], tuple(moved[o.position] if isinstance(o, _Of) else o for o in steps[at][1])) for at in moved
        )
