"""Calls that every rank must make announce themselves: another call meanwhile is an error on every rank, not a hang.

Ranks that make the same calls may still be at different points: a rank with one step more than the others pairs its
second step with their next one. So each announcement carries how many steps there were since weights changed, and
how many gradients `.grad` adds up; neither depends on the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import torch
from torch import nn

from autopar.parallel.agree.agreement import Agreement, Fault, UserCall
from autopar.torch_compat import local_of

_version_of: Callable[[torch.Tensor], int] = attrgetter("_version")


class Announcer:
    """Tells all ranks which call of the user's this rank is in. One tiny exchange a call."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._progress = _Progress(())

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Follow these parameters from now on."""
        self._progress = _Progress(tuple(parameters))

    def call(
        self, name: str, lines: Sequence[str] = (), what: str = "arguments", data: Sequence[int] | None = None,
        fault: Fault | None = None,
    ) -> bool:  # fmt: skip
        """Raise RankError on every rank if another one made another call, or the same with other `lines`. False, on
        every rank, if digests of `data` differ (see `Digests`).

        `name`: the method, as the user writes it, without brackets. `what`: what the lines are. fault: as of
        `Agreement.check`.
        """
        if self._agreement.size == 1:  # nobody to differ from
            return True
        self._progress.read()
        self._agreement.call = UserCall(name, str(self._progress))
        return self._agreement.check(what, lines, data, fault)

    def operation(self, name: str) -> None:
        """As `call`, for an operation on a parameter or gradient, which may stand in the middle of an update."""
        with self._agreement.called(UserCall(name)):  # a step moves parameters, too
            self._agreement.check("arguments", ())

    def stepped(self) -> None:
        """Count a step that added to the gradients."""
        if self._agreement.size > 1:
            self._progress.stepped()


class _Progress:
    """Steps since the weights changed, and since `.grad` was empty."""

    def __init__(self, parameters: tuple[nn.Parameter, ...]) -> None:
        self._parameters, self._version = parameters, -1
        self._steps = self._added = 0

    def read(self) -> None:
        """Notice what the user changed since the last step."""
        if self._version != self._versions():
            self._steps = 0
        if all(parameter.grad is None for parameter in self._parameters):
            self._added = 0

    def stepped(self) -> None:
        # The first step moves parameters to their layouts, which is no change of the weights.
        self._version = self._versions()
        self._steps, self._added = self._steps + 1, self._added + 1

    def __str__(self) -> str:
        steps = f"after {self._steps} forward_backward() since its weights changed"
        return f"{steps} and {self._added} since its gradients were None" if self._added != self._steps else steps

    def _versions(self) -> int:
        """A number that grows with each write in place, by whichever way to a parameter."""
        return sum(map(_version_of, self._parameters)) + sum(map(_version_of, map(local_of, self._parameters)))
