"""Numbers that the model draws on the host while it runs: Python's `random`, numpy's generator, `float(torch.rand(1))`.

A step runs the model's Python once more, on shapes, from where the generators stand: so they move on as for the plain
module. The tensors that are made of such numbers are inputs of the step, and so are
floats (see `host_inputs.py`); another way through the model, or another integer, is another program.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autopar.capture.draws.step_coins import StepCoins
from autopar.torch_compat import no_function_modes, on_data

Tensor = torch.Tensor
States = tuple[Any, Any]  # of Python's generator and numpy's


@dataclass(frozen=True, slots=True)
class Drawn:
    """What the host draws in one step. way: a key for the calls that the model then makes. tensors: those that are made
    of the numbers, in order. start: the generators before."""

    way: int
    tensors: tuple[Tensor, ...]
    start: States


@dataclass(frozen=True, slots=True)
class HostDraws:
    """What the host draws in a captured step. names: of constants, which tensor each is. replay: draws anew."""

    way: int
    names: Mapping[str, int]
    replay: Callable[[Tensor], tuple[int, tuple[Tensor, ...]]]

    def draw(self, seed: Tensor) -> Drawn:
        """The numbers of the step with this seed; the generators move on."""
        start = generators()
        return Drawn(*self.replay(seed), start)

    def values(self, drawn: Drawn) -> dict[str, Tensor]:
        """The constants that they make of a step which goes this program's way."""
        return {name: drawn.tensors[at] for name, at in self.names.items()}

    def note(self, start: States, coins: StepCoins | None) -> str:
        """What is said of it. start: the generators before the step. coins: of the step."""
        moved = [one != other for one, other in zip(map(repr, generators()), map(repr, start), strict=True)]
        names = [
            name for name, has_moved in zip(("Python's random module", "numpy.random"), moved, strict=True) if has_moved
        ]
        names += ["random tensors, as floats,"] if coins is not None and coins.has_floats else []
        return (
            f"the model draws numbers from {' and '.join(names)} while it runs: each step runs its Python once more, "
            f"on shapes, and takes rank 0's numbers; {len(self.names)} tensors made of them are inputs of the program"
        )


def generators() -> States:
    """The states of the global generators of Python and numpy."""
    return random.getstate(), np.random.get_state()


def set_generators(states: States) -> None:
    """Put the generators where they were."""
    random.setstate(states[0])
    np.random.set_state(states[1])


@contextmanager
def drawing_for(seed: Tensor) -> Iterator[None]:
    """Draw on the host what a step with this seed draws; then the generators are as before."""
    before, (first, second) = generators(), seed.tolist()
    random.seed(f"{first} {second}")
    np.random.seed(random.getrandbits(32))
    try:
        yield
    finally:
        set_generators(before)


def drawn_anew(tensors: Sequence[Tensor], others: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The tensors of a run which hold something else if other numbers are drawn. others: of such runs, of
    which those tell it that go the same way."""
    forms = [(tensor.shape, tensor.dtype) for tensor in tensors]
    alike = [other for other in others if [(tensor.shape, tensor.dtype) for tensor in other] == forms]
    with no_function_modes(), on_data():
        return [
            tensor for at, tensor in enumerate(tensors) if not all(torch.equal(tensor, other[at]) for other in alike)
        ]


def names_made_anew(
    constants: Mapping[str, Tensor], first: Sequence[Tensor], second: Sequence[Tensor]
) -> dict[str, int]:
    """Which constants are made anew in each run: by name, which of the tensors they are."""
    anew = [at for at, (one, other) in enumerate(zip(first, second, strict=True)) if one is not other]
    return {name: at for name, value in constants.items() for at in anew if first[at] is value}
