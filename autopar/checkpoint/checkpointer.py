"""A training loop that goes on where it was: it saves now and then, resumes from the newest, leaves when asked to."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from autopar.checkpoint import folder
from autopar.checkpoint.load import Loaded, load_run
from autopar.checkpoint.run import Run
from autopar.checkpoint.save import Beside, begin
from autopar.checkpoint.together import AllRanks
from autopar.errors import CheckpointError

_log = logging.getLogger("autopar")
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Checkpointer:
    """Checkpoints of a run in a folder.

        checkpointer = autopar.Checkpointer("runs/gpt", every=100)
        for step in checkpointer.steps(10_000, model, optimizer):
            loss = model.forward_backward(*batch_of(step))
            optimizer.step()
            optimizer.zero_grad()

    directory: of the run, on storage that all ranks share. every: steps from one save to the next. keep: how many
    checkpoints stay; the newest always does. asynchronous: write while training goes on; a step waits for the copy to
    the host only, and a failure is raised behind the step in which it is seen. extra: values of the user's, saved with
    each checkpoint and set by a resume. done: how many steps are done, those before the resume included.
    """

    def __init__(self, directory: str | Path, *, every: int = 1000, keep: int = 3, asynchronous: bool = True) -> None:
        for name, value in (("every", every), ("keep", keep)):
            if type(value) is not int or value < 1:
                raise CheckpointError(f"Checkpointer({name}={value!r}): write a number of 1 or more.")
        self.directory, self.every, self.keep, self.asynchronous = Path(directory), every, keep, asynchronous
        self.extra: Any = None
        self.done = 0
        self._writing: Beside | None = None
        self._staging: dict[str, torch.Tensor] = {}
        self._signal: signal.Signals | None = None

    def steps(
        self, count: int, model: Any, optimizer: Any = None, *, scheduler: Any = None, loader: Any = None,
        resume: int | str = "auto",
    ) -> Iterator[int]:  # fmt: skip
        """Give the numbers of the steps that are to be done, up to `count`, and save between them. Every rank runs it.

        model, optimizer, scheduler, loader: as of `autopar.save`. resume: "auto" goes on from the newest checkpoint, if
        there is one; "never" begins anew, in a folder without any; a number takes that step.

        SIGTERM and SIGUSR1, on any rank, save behind the step that runs and end the process: SystemExit with 128 and
        the signal's number, as shells have it.
        """
        run = Run.of(model, optimizer, scheduler, loader)
        self.done = self._resumed(run, resume)
        return self._loop(count, run)

    def _loop(self, count: int, run: Run) -> Iterator[int]:
        ranks = AllRanks.of(run.models.values())
        with self._watching():
            for step in range(self.done, count):
                yield step
                self.done = done = step + 1
                is_asked = ranks.any("signals", self._signal is not None)
                self._poll(wait=is_asked)
                if done % self.every == 0 or done == count or is_asked:
                    self._save(run, done, is_last=done == count or is_asked)
                if is_asked:
                    self._leave(ranks, done)

    def close(self) -> None:
        """Wait for a save that is being written, and commit it. Every rank calls it behind a loop that was left by
        `break`; one that ends does so itself."""
        self._poll(wait=True)

    def _resumed(self, run: Run, resume: int | str) -> int:
        """How many steps are done: those of the checkpoint that is loaded."""
        steps = folder.committed(self.directory)
        if resume == "never" and steps:
            raise CheckpointError(
                f"resume='never', but '{self.directory}' has checkpoints up to step {max(steps)}: give another folder, "
                f"or resume='auto' to go on from there."
            )
        if resume not in ("auto", "never") and type(resume) is not int:
            raise CheckpointError(f"resume={resume!r}: write 'auto', 'never' or the number of a step.")
        if resume == "never" or (resume == "auto" and not steps):
            return 0
        loaded: Loaded = load_run(self.directory, run, None if resume == "auto" else int(resume))
        self.extra = loaded.extra
        return loaded.step

    def _save(self, run: Run, step: int, is_last: bool) -> None:
        """Save now, or begin to, once the save before is committed."""
        self._poll(wait=True)
        is_beside = self.asynchronous and not is_last
        saving = begin(run, self.directory, step, self.extra, self.keep, self._staging if is_beside else None)
        if is_beside:
            self._writing = Beside(saving)
        else:
            saving.now()

    def _poll(self, wait: bool = False) -> None:
        """Go on with a save that is being written, where all ranks can, or raise what one could not."""
        if self._writing is not None:
            writing, self._writing = self._writing, None  # one that fails is given up
            if not writing.go_on(wait):
                self._writing = writing

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Note the signals by which a run is asked to leave, instead of ending at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {each: signal.signal(each, self._note) for each in SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _note(self, number: int, _frame: Any) -> None:
        self._signal = signal.Signals(number)

    def _leave(self, ranks: AllRanks, step: int) -> None:
        by = self._signal or SIGNALS[0]
        if ranks.rank == 0:
            _log.warning("%s: step %d is saved in '%s'; this run leaves.", by.name, step, self.directory)
        raise SystemExit(128 + by)
