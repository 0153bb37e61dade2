"""Where a model stands in its random numbers: what a checkpoint needs beside weights and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class RandomState:
    """Everything that a mask or another draw of the next step depends on, on any mesh.

    steps: the `forward_backward` calls so far. A `Stateful` of torch.distributed.checkpoint, which saves and loads it
    as it stands in the dictionary of what is saved.
    """

    seed: int
    steps: int = 0

    def tensor(self, device: torch.device) -> torch.Tensor:
        """Both numbers, as programs take them: filled in on the device, for which a copy would wait."""
        made = torch.full((2,), self.steps, dtype=torch.int64, device=device)
        made[:1].fill_(self.seed)
        return made

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seed, self.steps = int(state["seed"]), int(state["steps"])
