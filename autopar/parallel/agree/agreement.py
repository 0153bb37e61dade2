"""Check that all ranks mean the same before anything runs: a difference is an error and never a hang."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from operator import attrgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from autopar.capture.refusals.location import user_line
from autopar.errors import RankError, name_ranks
from autopar.parallel.agree.failures import Failures
from autopar.parallel.agree.pace import Pace
from autopar.parallel.agree.patience import Patience
from autopar.runtime.ranks.levels import NODE, Levels
from autopar.runtime.ranks.lost import OTHERS, is_loss_of_peer, loss_of_peers
from autopar.runtime.ranks.process_groups import Known, known
from autopar.torch_compat import local_of

_log = logging.getLogger(__name__)

_version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
T = TypeVar("T")
Fault = Callable[[str, list[list[str]]], Exception]
WIDTH = 64  # numbers in an exchange, whatever it compares: one of another size would not meet it
DIRECT = 64  # so many ranks meet in one group
_SAME_CALLS = (
    "every rank must make the same calls. Under `if rank == 0:` may stand what prints and writes files, and no call of "
    "the model, as of an evaluation"
)


@dataclass(frozen=True, slots=True)
class UserCall:
    """What the user called on this rank. progress: how far training is, as a message says it behind the call."""

    name: str
    progress: str = ""


@dataclass(frozen=True, slots=True)
class _Said:
    """What a rank was asked for when ranks differed: its call, the user's line, and what was compared there."""

    call: UserCall
    line: str
    what: str
    value: Any

    def __str__(self) -> str:
        return f"{self.call.name}()" + f" at {self.line}" * bool(self.line)


@dataclass(frozen=True, slots=True)
class _Told:
    """A rank's phase, as it is sent where ranks are not at one."""

    now: str
    failure: str | None
    texts: Mapping[str, list[str]]


@dataclass(slots=True)
class Phase:
    """Checks that a rank makes on its own, before all ranks agree on them once.

    now: what is checked at the moment, which a failure is then said to be of. texts: what must be alike on all ranks,
    by what it is of.
    """

    now: str
    texts: dict[str, Sequence[str]] = field(default_factory=dict)
    failure: Exception | None = None

    @property
    def told(self) -> _Told:
        failure = None if self.failure is None else f"{type(self.failure).__name__}: {self.failure}"
        return _Told(self.now, failure, {what: list(lines) for what, lines in self.texts.items()})

    @property
    def lines(self) -> list[str]:
        """All of it, to be compared: of a failure that alone, which may come before or behind some texts."""
        told = self.told
        if told.failure is not None:
            return [told.failure]
        return [f"{what}: {line}" for what, lines in told.texts.items() for line in lines]


class Agreement:
    """Compares short descriptions between all ranks, over a group that moves the host's memory: on a GPU's queue each
    comparison would wait for the step before it. device: where the model lies.

    Every comparison is one exchange of the same size, and covers the call that the user made: ranks in two different
    calls find that out, whatever each of them wanted to compare.
    """

    def __init__(self, device: torch.device, pace: Pace | None = None) -> None:
        self.device = device
        self.size = dist.get_world_size()
        self.call = UserCall("parallelize")
        self.pace = pace if pace is not None else Pace()
        self.patience: Patience | None = None  # where nobody said how long ranks wait
        self.failures: Failures | None = None  # of the steps of a model
        self.levels = _levels()

    def end_waits_after(self, timeout: timedelta) -> None:
        """From now on no comparison waits longer than that for a rank. Every rank must call this."""
        if self.size > 1:
            self.levels = _new_levels(self.size, timeout)

    def _waits(self, what: str) -> AbstractContextManager[None]:
        """Say of a loss of peers what was compared, and in which call of the user's."""
        if self.failures is not None:
            self.failures.check()
        return lost_peers(
            f"comparing the {what} of all ranks",
            lambda: f" in {_Said(self.call, user_line(sys._getframe()), what, None)}",
        )

    @contextmanager
    def called(self, call: UserCall) -> Iterator[None]:
        """What is compared inside belongs to a call of its own, and not to the last one, which ranks may have made
        unlike and been told so."""
        around, self.call = self.call, call
        try:
            yield
        finally:
            self.call = around

    def check(
        self, what: str, lines: Sequence[str], data: Sequence[int] | None = None, fault: Fault | None = None
    ) -> bool:
        """Raise RankError on every rank if the ranks' lines differ, saying which rank differs in what; or what `fault`
        makes of `what` and the lines of all ranks. False if digests of `data` do (see `Digests`), on every rank.

        One tiny all-reduce where they agree.
        """
        is_equal, is_same_data = self._compare(what, lines, data)
        if not is_equal:
            everyone: list[list[str]] = self.everyone(what, list(lines))
            raise (fault or difference)(what, everyone)
        return is_same_data

    def check_within(self, what: str, part: Hashable, lines: Sequence[str]) -> None:
        """Compare like `check`, between ranks of the same `part` alone."""
        if self.size == 1:
            return
        parts: dict[Hashable, dict[int, list[str]]] = {}
        for rank, (its, found) in enumerate(self.everyone(what, (part, list(lines)))):
            parts.setdefault(its, {})[rank] = found
        for alike in parts.values():
            if len(set(map(tuple, alike.values()))) > 1:
                raise difference(what, alike)

    def together(self, what: str, make: Callable[[Phase], T]) -> T:
        """What `make` returns; if it fails on any rank, every rank raises: its own error, or RankError with theirs.
        RankError on every rank, as of `check`, if the texts that it leaves in its phase differ between ranks.

        One tiny all-reduce where all is well. `make` moves no data between ranks.
        """
        phase = Phase(what)
        try:
            made = make(phase)
        except Exception as error:
            phase.failure = error
        if not self.equal(what, phase.lines):
            self._raise_for(phase, self.everyone(what, phase.told))
        if phase.failure is not None:
            raise phase.failure
        return made

    def _raise_for(self, phase: Phase, everyone: list[_Told]) -> None:
        """Raise what ranks have to say that are not at one: failures go before texts that differ."""
        failed = [(rank, told.failure, told.now) for rank, told in enumerate(everyone) if told.failure]
        if phase.failure is not None:
            raise phase.failure
        if failed:
            said = "\n".join(f"  rank {rank}: {failure}" for rank, failure, _ in failed)
            raise RankError(f"the {failed[0][2]} failed on some ranks, not on this one:\n{said}")
        for what in dict.fromkeys(what for told in everyone for what in told.texts):
            texts = [told.texts.get(what, []) for told in everyone]
            if any(text != texts[0] for text in texts):
                raise difference(what, texts)

    def tell_apart(self, digests: Mapping[str, str], part: str, when: str, advice: str) -> None:
        """Raise RankError on every rank with the names of what differs between ranks that should hold the same `part`
        of the data, if something does. digests: by name."""
        everyone: list[tuple[str, dict[str, str]]] = self.everyone("batch", (part, dict(digests)))
        first: dict[str, int] = {}
        faults = []
        for rank, (own, found) in enumerate(everyone):
            other = first.setdefault(own, rank)
            names = [name for name, digest in found.items() if digest != everyone[other][1].get(name)]
            if names:
                faults.append(f"  rank {rank} has other values than rank {other} in {', '.join(names)}")
        if not faults:
            return
        raise RankError(f"ranks were given different data {when}:\n" + "\n".join(faults) + f"\n{advice}")

    def any(self, what: str, mine: bool) -> bool:
        """Whether something is true of any rank. One tiny all-reduce."""
        if self.size == 1:
            return mine
        with self._waits(what):
            return bool(self._highest([int(mine)])[0])

    def everyone(self, what: str, mine: Any) -> list[Any]:
        """What each rank says. Raises RankError on every rank if they are in different calls."""
        with self._waits(what):
            said = self.levels.everyone(_Said(self.call, user_line(sys._getframe()), what, mine))
        _check_calls(said)
        return [each.value for each in said]

    def of_first(self, what: str, mine: T | None) -> T | None:
        """What rank 0 says, which is all that is sent. Every rank must call this."""
        with self._waits(what):
            return self.levels.of_first(mine)

    def equal(self, what: str, lines: Sequence[str]) -> bool:
        """Whether all ranks have the same lines. One tiny all-reduce."""
        return self._compare(what, lines, None)[0]

    def _compare(self, what: str, lines: Sequence[str], data: Sequence[int] | None) -> tuple[bool, bool]:
        """Whether all ranks have the same lines, and whether they have the same digests by place."""
        if self.size == 1:
            return True, True
        text = "\n".join((self.call.name, self.call.progress, what, *lines))
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        head, data = [number, -number], data or ()
        fits = len(head) + len(data) <= WIDTH
        sent = [*head, *data] if fits else head
        with self._waits(what):
            highest, lowest, *rest = self._highest(sent + self.pace.told(WIDTH - len(sent)))
            self.pace.heard(rest[len(sent) - len(head) :])
            if self.pace.is_due:
                self.pace.heard_windows(self.levels.everyone(self.pace.window))
            if not fits and highest == -lowest:
                rest = self._highest(data)
        half = len(data) // 2
        rest = rest[: len(data)]
        return highest == -lowest, all(a == -b for a, b in zip(rest[:half], rest[half:], strict=True))

    def _highest(self, numbers: Sequence[int]) -> list[int]:
        """The highest of each number over all ranks."""
        sent, since = torch.tensor(numbers, dtype=torch.int64, device="cpu"), self.pace.waits.clock()
        self.levels.highest(sent)
        self.pace.waits.seconds += self.pace.waits.clock() - since
        highest: list[int] = sent.tolist()
        return highest


def _levels() -> Levels:
    """Where ranks meet with tensors of the host: in the default group, unless that is NCCL's alone. Every rank must
    call this."""
    backends, size = dist.get_backend_config(), dist.get_world_size()
    if size == 1 or "nccl" not in backends or "gloo" in backends:
        return Levels.all_direct()
    return _new_levels(size)


def _new_levels(size: int, timeout: timedelta | None = None) -> Levels:
    """Groups of Gloo in which no rank waits longer than that for another one: one, if ranks are few."""

    def make(ranks: list[int]) -> Known | None:
        made = dist.new_group(ranks, backend="gloo", timeout=timeout)
        return known(made) if dist.get_rank() in ranks else None

    return Levels.of(size, make, size if size <= DIRECT else NODE)


@contextmanager
def lost_peers(doing: str, at: Callable[[], str] = str) -> Iterator[None]:
    """Raise RankError for what the backend says of a peer that is gone. `doing`: what this rank was at. at: where, as
    far as it is known."""
    try:
        yield
    except RuntimeError as error:
        if not is_loss_of_peer(error):
            raise
        raise loss_of_peers(f"rank {dist.get_rank()}", f"while {doing}{at()}.", OTHERS, error) from error


def difference(
    what: str, everyone: Sequence[Sequence[str]] | Mapping[int, Sequence[str]], advice: str = ""
) -> RankError:
    """The error that says which ranks have other lines than most, and which ones. everyone: the lines, by rank. advice:
    what to do."""
    everyone = everyone if isinstance(everyone, Mapping) else dict(enumerate(everyone))
    versions: dict[tuple[str, ...], list[int]] = {}
    for rank, found in everyone.items():
        versions.setdefault(tuple(found), []).append(rank)
    common = max(versions, key=lambda version: len(versions[version]))
    faults = []
    for version, ranks in versions.items():
        if version == common:
            continue
        pairs = _aligned(version, common)[:3]
        shown = "; ".join(f"'{a}' where the others have '{b}'" for a, b in pairs)
        faults.append(f"  {name_ranks(ranks)} {'have' if ranks[1:] else 'has'} {shown}")
    advice = advice or f"Give every rank the same {what}."
    return RankError(f"ranks disagree on the {what}:\n" + "\n".join(faults) + f"\n{advice}")


def _check_calls(said: Sequence[_Said]) -> None:
    """Raise RankError if ranks made different calls, or the same one at different points of the training."""
    if len({(each.call.name, each.what) for each in said}) > 1:
        alike, advice = _alike(said, lambda each: str(each)), _SAME_CALLS
    elif len({each.call for each in said}) > 1:
        alike = _alike(said, lambda each: f"{each} {each.call.progress}")
        advice = "a rank made a call, or a step of an optimizer, that the others did not make"
    else:
        return
    shown = [f"{name_ranks(ranks)} call{'s' * (len(ranks) == 1)} {text}" for text, ranks in alike.items()]
    raise RankError(f"{', '.join(shown)}: {advice}.")


def _alike(said: Sequence[_Said], text: Callable[[_Said], str]) -> dict[str, list[int]]:
    alike: dict[str, list[int]] = {}
    for rank, each in enumerate(said):
        alike.setdefault(text(each), []).append(rank)
    return alike


def _aligned(a: tuple[str, ...], b: tuple[str, ...]) -> list[tuple[str, str]]:
    """The lines that differ, side by side; 'nothing' beside what only one has."""
    aligned: list[tuple[str, str]] = []
    for kind, i, i_end, j, j_end in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if kind != "equal":
            aligned += itertools.zip_longest(a[i:i_end], b[j:j_end], fillvalue="nothing")
    return aligned


_TRAINING = ("forward_backward", "training_loss")

# -- calls announce themselves ----------------------------------------------------------------------------------------


class Announcer:
    """Tells all ranks which call of the user's this rank is in, in one tiny exchange: another call meanwhile is an
    error on every rank, not a hang.

    Ranks that make the same calls may still be at different points: a rank with one step more than the others pairs its
    second step with their next one. So each announcement carries how many steps there were since weights changed, and
    how many gradients `.grad` adds up; neither depends on the rank.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._progress = _Progress(lambda: None)

    def watch(self, parameters: Iterable[nn.Parameter]) -> Watched:
        """Follow these parameters from now on, as long as the caller keeps what this gives."""
        watched = Watched(tuple(parameters))
        self._progress = _Progress(weakref.ref(watched))
        return watched

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
        if name in _TRAINING:
            self._agreement.pace.begin()
            if self._agreement.patience is not None:
                self._agreement.patience.step()
        return self._agreement.check(what, lines, data, fault)

    def operation(self, name: str) -> None:
        """Announce an operation on a parameter or gradient, which may stand in the middle of an update."""
        with self._agreement.called(UserCall(name)):  # a step moves parameters, too
            self._agreement.check("arguments", ())

    def stepped(self, is_to_use: bool) -> None:
        """Count a step; is_to_use: of `forward_backward`, with gradients that an optimizer is to use next."""
        if self._agreement.size > 1:
            self._progress.stepped(is_to_use)

    def wrote(self) -> None:
        """Notice that a step itself wrote weights, on some stages of a pipeline perhaps: no change of the user's."""
        if self._agreement.size > 1:
            self._progress.wrote()

    def updating(self) -> None:
        """Notice that an optimizer is about to change the weights."""
        self._progress.updating()


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Watched:
    """Parameters that an announcer follows."""

    parameters: tuple[nn.Parameter, ...]


_DROPPED = (
    "all gradients of the last step were set to None before anything changed the weights. If zero_grad() stands "
    "between forward_backward() and optimizer.step(), no weight is ever trained: forward_backward() is the backward "
    "pass as well. Call zero_grad() before it, or write `loss = model.training_loss(*batch)`, whose backward() you "
    "call."
)


class _Progress:
    """Steps since the weights changed, and since `.grad` was empty.

    Parameters know the announcer, which therefore does not own them: no `del` would free them.
    """

    def __init__(self, watched: Callable[[], Watched | None]) -> None:
        self._watched, self._version = watched, -1
        self._steps = self._added = 0
        self._awaits = False  # whether there are gradients that nobody used
        self._is_told = False  # whether it was said that some went

    @property
    def _parameters(self) -> tuple[nn.Parameter, ...]:
        watched = self._watched()
        return watched.parameters if watched else ()

    def read(self) -> None:
        """Notice what the user changed since the last step."""
        if self._version != self._versions():
            self._steps, self._awaits = 0, False
        if all(parameter.grad is None for parameter in self._parameters):
            self._added = 0
            if self._awaits and not self._is_told:
                self._is_told = True
                _log.warning("%s", _DROPPED)

    def wrote(self) -> None:
        self._version = self._versions()

    def updating(self) -> None:
        self._steps, self._awaits = 0, False

    def stepped(self, is_to_use: bool) -> None:
        # The first step moves parameters to their layouts, which is no change of the weights.
        self._version = self._versions()
        is_left = any(parameter.grad is not None for parameter in self._parameters)  # by hooks that update and drop
        self._awaits = is_to_use and is_left
        self._steps, self._added = self._steps + 1, self._added + 1

    def __str__(self) -> str:
        steps = f"after {self._steps} forward_backward() since its weights changed"
        return f"{steps} and {self._added} since its gradients were None" if self._added != self._steps else steps

    def _versions(self) -> int:
        """A number that grows with each write in place, by whichever way to a parameter."""
        parameters = self._parameters
        return sum(map(_version_of, parameters)) + sum(map(_version_of, map(local_of, parameters)))
