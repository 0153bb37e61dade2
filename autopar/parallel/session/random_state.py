"""Where a model stands in its random numbers: what a checkpoint needs beside weights and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import AutoparError


@dataclass(slots=True)
class RandomState:
    """Everything that a mask or another draw of the next call depends on, on any mesh.

    steps: the `forward_backward` calls so far. forwards: the calls of the model itself so far. They are counted apart,
    so that an evaluation more or less leaves the masks of training as they were. A `Stateful` of
    torch.distributed.checkpoint, which saves and loads it as it stands in the dictionary of what is saved.
    """

    seed: int
    steps: int = 0
    forwards: int = 0

    def tensor(self, device: torch.device, is_step: bool) -> torch.Tensor:
        """The seed and the number of the call, as programs take them: filled in on the device, for which a copy would
        wait. Numbers of forward calls are those below 0, which no step has."""
        seed, number = self.numbers(is_step)
        made = torch.full((2,), number, dtype=torch.int64, device=device)
        made[:1].fill_(seed)
        return made

    def numbers(self, is_step: bool) -> tuple[int, int]:
        """The seed and the number of the call."""
        return self.seed, self.steps if is_step else -1 - self.forwards

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "steps": self.steps, "forwards": self.forwards}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        missing = [name for name in ("seed", "steps", "forwards") if name not in state]
        if missing:
            raise AutoparError(
                f"random_state.load_state_dict was given {sorted(state)}, without {', '.join(missing)}: load what "
                f"random_state.state_dict() gave, {self.state_dict()} for example."
            )
        self.seed, self.steps, self.forwards = (int(state[name]) for name in ("seed", "steps", "forwards"))
