"""Scale the loss under precision="fp16": a step whose gradients overflow is skipped, on all ranks alike."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import PlanError
from autopar.parallel.agree.agreement import lost_peers
from autopar.torch_compat import unscale_and_check

_log = logging.getLogger("autopar")
LEAST = 2.0**-14  # where gradients overflow below this scale, the loss itself is inf or nan


@dataclass(slots=True)
class LossScale:
    """Scales like `torch.amp.GradScaler`, with its numbers (arXiv 1710.03740, 3.2): the scale doubles after `interval`
    good steps and halves at an overflow.

    scale: of the next step. good: steps since the scale changed. skipped: steps that overflowed so far. A `Stateful` of
    torch.distributed.checkpoint, to be saved beside `state_dict()`.
    """

    scale: float = 2.0**16
    interval: int = 2000
    good: int = 0
    skipped: int = 0

    def take(self, gradients: Sequence[torch.Tensor | None], device: torch.device) -> bool:
        """Divide this rank's gradients by the scale, in place, and move the scale on. False if those of any rank are
        not finite: then no rank may use its own. None: of parameters on other stages. Every rank must call this."""
        overflow = torch.zeros((), device=device)
        by_device: dict[torch.device, list[torch.Tensor]] = {}  # some may lie in the host's memory
        for gradient in gradients:
            if gradient is not None:
                by_device.setdefault(gradient.device, []).append(gradient)
        for lies, here in by_device.items():
            found = torch.zeros((), device=lies)
            unscale_and_check(here, found, torch.full((), 1.0 / self.scale, device=lies))
            overflow += found.to(device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            with lost_peers("asking all ranks for overflows"):
                dist.all_reduce(overflow, dist.ReduceOp.MAX)
        is_good = overflow.item() == 0.0
        self.update(is_good)
        return is_good

    def update(self, is_good: bool) -> None:
        """The scale after a step."""
        if not is_good:
            before, self.scale, self.good = self.scale, self.scale * 0.5, 0
            self.skipped += 1
            if not dist.is_initialized() or dist.get_rank() == 0:
                _log.warning(
                    "gradients overflowed at loss scale %g: this step is skipped, the next has %g", before, self.scale
                )
            if self.scale < LEAST:
                raise PlanError(
                    f'precision="fp16": gradients are not finite at a loss scale of {before:g} either, after '
                    f"{self.skipped} skipped steps. The loss itself overflows, or is NaN: look at the batch and the "
                    f'learning rate, or use precision="bf16", which has the range of fp32.'
                )
            return
        self.good += 1
        if self.good == self.interval:
            self.scale, self.good = self.scale * 2.0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "interval": self.interval, "good": self.good, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale, self.interval = float(state["scale"]), int(state["interval"])
        self.good, self.skipped = int(state["good"]), int(state["skipped"])
