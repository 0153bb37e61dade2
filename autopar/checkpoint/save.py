"""Save a run: every rank writes its own pieces aside, and rank 0 commits what is complete.

`begin` copies or names what is saved; the rounds of a `Saving` write it and commit it, at once or beside training. A
failure of any rank is an error on all, and leaves the checkpoints before it as they are.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from autopar.checkpoint import folder
from autopar.checkpoint.generators import generators
from autopar.checkpoint.manifest import NAME, FileSum, Manifest, SavedTensor
from autopar.checkpoint.outgoing import Outgoing
from autopar.checkpoint.run import Run, state_of_module
from autopar.checkpoint.tensor_files import write_file, write_text
from autopar.checkpoint.together import AllRanks
from autopar.checkpoint.tree import encode, inline
from autopar.errors import CheckpointError
from autopar.parallel.agree.agreement import Phase
from autopar.parallel.module import ParallelModule


def save(
    directory: str | Path, model: Any, optimizer: Any = None, *, step: int = 0, scheduler: Any = None,
    loader: Any = None, extra: Any = None,
) -> Path:  # fmt: skip
    """Save a run as one checkpoint of a folder, from which `autopar.load` goes on on any mesh. Call it on every rank.

    directory: of the run, on storage that all ranks share; each step is a folder in it.
    model, optimizer: one, or a dict of several by name. Modules may be parallel or plain.
    step: how many steps of training are done. scheduler, loader: objects with state_dict(), or dicts of them.
    extra: anything of tensors, numbers and text, the same on every rank.

    Gives the folder of the step. Raises CheckpointError on every rank if any cannot write; what was there before stays.
    """
    run = Run.of(model, optimizer, scheduler, loader)
    saving = begin(run, Path(directory), step, extra)
    saving.now()
    return saving.final


@dataclass(slots=True)
class Saving:
    """A checkpoint that is being written, in two rounds. In each a rank first works alone, which a thread may do while
    training goes on, and then all ranks meet. keep: how many checkpoints stay, the newest of them; None: all."""

    ranks: AllRanks
    partial: Path
    out: Outgoing
    manifest: Manifest  # without files and other ranks' pieces
    own: Any
    keep: int | None = None
    failure: Exception | None = None
    sum: FileSum | None = None
    _everyone: list[Any] = field(default_factory=list)

    @property
    def final(self) -> Path:
        """The folder that the checkpoint will be."""
        return self.partial.with_name(self.partial.name.removeprefix(folder.PARTIAL))

    @property
    def rounds(self) -> list[tuple[Callable[[], None], Callable[[], None]]]:
        """What a rank does alone, and how all ranks then meet, which every rank must call."""
        return [(self._write, self._gather), (self._commit, self._agree)]

    def now(self) -> None:
        """Write and commit at once. Every rank must call it."""
        for work, meet in self.rounds:
            work()
            meet()

    def _write(self) -> None:
        """Write this rank's file."""
        with self._alone():
            if self.out.mine:
                with _told(self.partial / self.out.file):
                    self.sum, sums = write_file(self.partial / self.out.file, self.out.mine)
                    self.out.keep(sums)
                    folder.flush(self.partial)
        self.out.mine.clear()

    def _gather(self) -> None:
        """Let rank 0 know what all ranks have written."""
        self._agree()
        self._everyone = self.ranks.everyone((self.out.file, self.sum, self.out.tensors, self.own))

    def _commit(self) -> None:
        """Commit what all ranks have written, on rank 0, and remove all but the newest checkpoints."""
        if self.ranks.rank != 0:
            return
        with self._alone(), _told(self.partial):
            write_text(self.partial / NAME, self._whole_manifest().text)
            folder.commit(self.partial)
            if self.keep is not None:
                folder.retain(self.partial.parent, self.keep)

    def _agree(self) -> None:
        """Raise what any rank failed in, on all; nothing is left then of this checkpoint."""

        def tell(_phase: Phase) -> None:
            if self.failure is not None:
                raise self.failure

        try:
            self.ranks.together(tell)
        except Exception:
            if self.ranks.rank == 0:
                shutil.rmtree(self.partial, ignore_errors=True)
            raise

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep an error of any kind until ranks meet: also of threads, memory, a device, since a rank that raised alone
        would leave the others waiting."""
        try:
            yield
        except Exception as error:
            self.failure = error

    def _whole_manifest(self) -> Manifest:
        tensors: dict[str, SavedTensor] = {}
        for _, _, its, _ in self._everyone:
            for name, saved in its.items():
                before = tensors.get(name)
                tensors[name] = saved if before is None else replace(before, pieces=before.pieces + saved.pieces)
        own = [each for *_, each in self._everyone]
        return replace(
            self.manifest,
            files={file: total for file, total, *_ in self._everyone if total is not None},
            tensors=tensors,
            own=tuple(own if any(each != own[0] for each in own) else own[:1]),
        )


class Beside:
    """A save whose rounds are worked in a thread while training goes on."""

    def __init__(self, saving: Saving) -> None:
        self.saving = saving
        self._left = saving.rounds
        self._start()

    def go_on(self, wait: bool) -> bool:
        """Meet where all ranks have worked a round, and begin the next one. Every rank must call it. Gives whether the
        checkpoint is committed, as it is in any case with `wait`."""
        while self._left:
            if wait:
                self._thread.join()
            elif self.saving.ranks.any("saves", self._thread.is_alive()):
                return False
            (_, meet), *self._left = self._left
            meet()
            if self._left:
                self._start()
        return True

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._left[0][0], name="autopar-checkpoint")
        self._thread.start()


def begin(
    run: Run, directory: Path, step: int, extra: Any = None, keep: int | None = None,
    staging: dict[str, torch.Tensor] | None = None,
) -> Saving:  # fmt: skip
    """Decide what every rank writes, and make the folder that it is written to, aside. Every rank must call it.

    keep: how many checkpoints stay. staging: where to copy what is saved, if it may change before it is written
    (`Outgoing`).
    """
    if type(step) is not int or step < 0:
        raise CheckpointError(f"step={step!r}: write how many steps of training are done, a number of 0 or more.")
    ranks = AllRanks.of(run.models.values())
    ranks.announce("autopar.save", run.models.values(), [f"directory={directory}", f"step={step}"])
    run.settle()
    out = Outgoing(ranks.rank, staging)

    def collect(phase: Phase) -> tuple[dict[str, Any], dict[str, Any]]:
        state = _shared(run, extra, out)
        phase.texts["state"] = json.dumps(state, indent=0).splitlines()
        return state, _own(run)

    state, own = ranks.together(collect)

    def make(_phase: Phase) -> Path:
        with _told(directory):
            return folder.begin(directory, step) if ranks.rank == 0 else directory

    ranks.together(make)
    aside = directory / f"{folder.PARTIAL}{folder.folder_of(step)}"

    def look(_phase: Phase) -> None:
        if not aside.is_dir():
            raise CheckpointError(
                f"rank {ranks.rank} does not see the folder '{aside}' that rank 0 made: all ranks write to one "
                f"storage. Give a folder that every machine mounts."
            )

    ranks.together(look)
    return Saving(ranks, aside, out, Manifest(step, ranks.size, {}, {}, state, ()), own, keep)


def _shared(run: Run, extra: Any, out: Outgoing) -> dict[str, Any]:
    """What all ranks have alike, as trees; the tensors go out."""
    state: dict[str, Any] = {"models": {}, "optimizers": {}, "schedulers": {}, "extra": {}}
    for label, model in run.models.items():
        entry = {"state": {n: encode(v, out.take, f"{label}/{n}") for n, v in state_of_module(model).items()}}
        if isinstance(model, ParallelModule):
            entry["random"] = model.random_state.state_dict()
            if model.loss_scale is not None:
                entry["scale"] = encode(model.loss_scale.state_dict(), out.take, f"{label}/loss_scale")
        state["models"][label] = entry
    for label in run.optimizers:
        state["optimizers"][label] = _of_optimizer(run, label, out)
    for label, scheduler in run.schedulers.items():
        state["schedulers"][label] = encode(scheduler.state_dict(), out.take, label)
    state["extra"]["extra"] = encode(extra, out.take, "extra")
    return state


def _of_optimizer(run: Run, label: str, out: Outgoing) -> dict[str, Any]:
    """What an optimizer holds: by the names of its parameters, and not by their numbers as torch has it."""
    optimizer = run.optimizers[label]
    names = run.names_of_parameters(label)
    whole = optimizer.state_dict()
    numbered = {
        number: name
        for group, its in zip(whole["param_groups"], names, strict=True)
        for number, name in zip(group["params"], its, strict=True)
    }
    return {
        "state": {
            numbered[number]: encode(state, out.take, f"{label}/{numbered[number]}")
            for number, state in whole["state"].items()
            if number in numbered
        },
        "others": encode({k: v for k, v in whole["state"].items() if k not in numbered}, out.take, f"{label}/others"),
        "groups": [
            encode({**group, "params": its}, out.take, f"{label}/groups/{at}")
            for at, (group, its) in enumerate(zip(whole["param_groups"], names, strict=True))
        ],
        "more": encode(
            {key: each for key, each in whole.items() if key not in ("state", "param_groups")},
            out.take,
            f"{label}/more",
        ),
    }


def _own(run: Run) -> dict[str, Any]:
    """What this rank has for itself: where its generators stand, and its loaders."""
    return {
        "generators": encode(generators(), inline, "generators"),
        "loaders": {label: encode(loader.state_dict(), inline, label) for label, loader in run.loaders.items()},
    }


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Say of an error of the system what was being written."""
    try:
        yield
    except OSError as error:
        named = error.filename or path
        raise CheckpointError(
            f"'{named}' cannot be written: {error.strerror or error}. The checkpoints before it are as they were. Make "
            f"room, or give a folder that this user may write to."
        ) from error
