"""Notice that a rank failed in the middle of a step which others did not fail in: they wait for it there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch.distributed as dist

from autopar.errors import RankError
from autopar.torch_compat import default_store

_GRACE_S = 5.0  # that ranks which fail in one step fail after one another
_POLL_S = 0.05


@dataclass(slots=True)
class Failures:
    """The steps that failed in the middle on this rank, by their number, which is the same on all ranks.

    What fails on every rank alike (a label that all have) leaves them in step, and a loop that catches it goes on. What
    fails on one rank alone leaves the others in a collective of that step: an exchange of this rank would meet it. So
    the next exchange asks torch's store, which needs no other rank, how many failed.
    """

    name: str
    size: int
    clock: Callable[[], float] = time.monotonic
    _steps: int = 0
    _error: Exception | None = None
    _is_alone: bool = False

    @classmethod
    def of_model(cls) -> Failures:
        """Begin to count for the model that this rank makes now. Every rank makes the same ones, in the same order."""
        size = dist.get_world_size()
        number = _counted(f"autopar/models/{dist.get_rank()}", 1) if size > 1 else 0
        return cls(f"autopar/failures/{number}", size)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what fails inside, unless it says itself that other ranks are lost."""
        self._steps += 1
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            if self.size > 1 and self._told(1):
                self._error = error
            raise

    def check(self) -> None:
        """Raise RankError if this rank failed in a step in the middle of which others are; else go on as they do."""
        if self._error is None:
            return
        end = self.clock() + _GRACE_S
        while not self._is_alone and self._told(0) < self.size:
            self._is_alone = self.clock() > end
            time.sleep(_POLL_S)
        if not self._is_alone:
            self._error = None
            return
        raise RankError(
            f"rank {dist.get_rank()} failed in the middle of its last step, and not all ranks did: the others wait for "
            f"it there, and nothing that all do together can go on. It was\n  {type(self._error).__name__}: "
            f"{self._error}\nLet such an error end the process, which ends the others; or look before the step, on "
            f"every rank, for what one rank alone may refuse (labels, token ids)."
        )

    def _told(self, more: int) -> int:
        """How many ranks failed in the last step, with so many more."""
        return _counted(f"{self.name}/{self._steps}", more)


def _counted(key: str, more: int) -> int:
    """Add to a number in the store; none where the store is gone, or cannot count (torch's of its fake ranks)."""
    with suppress(RuntimeError, ValueError):
        return default_store().add(key, more)
    return 0
