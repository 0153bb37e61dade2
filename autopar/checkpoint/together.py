"""Who saves and loads together: the ranks of a parallel model, of a group that the user made, or one process alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from autopar.parallel.agree.agreement import Agreement, Phase, UserCall
from autopar.parallel.module import ParallelModule

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AllRanks:
    """The ranks of a call. agreement: None for one process without a group."""

    rank: int
    size: int
    agreement: Agreement | None

    @staticmethod
    def of(models: Iterable[nn.Module]) -> AllRanks:
        """The ranks that hold some models."""
        parallel = [model for model in models if isinstance(model, ParallelModule)]
        if not dist.is_initialized() or (dist.get_world_size() == 1 and not parallel):
            return AllRanks(0, 1, None)
        agreement = parallel[0]._session.agreement if parallel else Agreement(torch.device("cpu"))
        return AllRanks(dist.get_rank(), dist.get_world_size(), agreement)

    def announce(self, call: str, models: Iterable[nn.Module], lines: Sequence[str]) -> None:
        """Tell all ranks of a call. Raises RankError on every rank if another one is in another call."""
        parallel = [model for model in models if isinstance(model, ParallelModule)]
        for model in parallel:
            model._announce(call, lines)
        if self.agreement is not None and not parallel:
            self.agreement.call = UserCall(call)
            self.agreement.check("arguments", lines)

    def together(self, make: Callable[[Phase], T]) -> T:
        """What `make` returns; where it fails on any rank, an error on every one (`Agreement.together`)."""
        return make(Phase("checkpoint")) if self.agreement is None else self.agreement.together("checkpoint", make)

    def everyone(self, mine: Any) -> list[Any]:
        """What each rank says."""
        return [mine] if self.agreement is None else self.agreement.everyone("checkpoint", mine)

    def any(self, what: str, mine: bool) -> bool:
        """Whether something is true of any rank."""
        return mine if self.agreement is None else self.agreement.any(what, mine)
