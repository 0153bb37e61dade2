"""The programs of a parallel module: found or compiled for each call, kept, and forgotten."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from autopar.capture.containers import Parts
from autopar.parallel.batches import describe
from autopar.parallel.execution import Running
from autopar.parallel.gradients import check_enabled
from autopar.parallel.making import Maker
from autopar.parallel.session import Session
from autopar.parallel.signatures import Signatures

_log = logging.getLogger("autopar")
PROGRAMS = 32  # compiled for as many signatures at a time; the one unused longest goes first


class Programs:
    """Finds or compiles the program of a call. Every rank must make the same calls."""

    def __init__(self, session: Session) -> None:
        self.settings, self.store = session.settings, session.store
        self._replicas, self._random = session.replicas, session.random
        self.running: dict[Any, Running] = {}  # by signature, the last used last
        self.signatures = Signatures(session)
        self._maker = Maker(session, self.signatures.variants.numbers)

    @property
    def last_trained(self) -> Running | None:
        """The training program used last."""
        steps = [running for (train, *_), running in self.running.items() if train]
        return steps[-1] if steps else None

    def prepare(self, call: str, args: Any, kwargs: Any, train: bool) -> tuple[Running, Parts]:
        """The program for a call of that name, compiled if there is none yet, and its arguments, taken apart."""
        parts = self.signatures.take(call, args, kwargs, train)
        key = self.signatures.key(parts, train)
        number = self.signatures.agree(call, key, parts, self.running)
        if train:
            check_enabled(call)
            if self._replicas.is_due(self._random.steps):
                self._replicas.check(self._random.steps)
        if (*key, number) in self.running:
            self.running[*key, number] = self.running.pop((*key, number))  # the last used stands last
            return self.running[*key, number], parts
        return self._make(key, number, parts, train), parts

    def _make(self, key: tuple[Any, ...], number: int, parts: Parts, train: bool) -> Running:
        """Compile a program and keep it; forget the one unused longest."""
        is_new = not self.signatures.variants.knows(key) and any(train == known[0] for known in self.running)
        if is_new and dist.get_rank() == 0:
            _log.warning("new input signature (%s): compiling again", ", ".join(describe(parts)))
        with torch.inference_mode(False):  # what is made here is trained later
            running, guards = self._maker.make(parts, self.signatures.numbers, train, is_first=not self.running)
        self.running[*self.signatures.add(key, number, running, guards), number] = running
        if len(self.running) > PROGRAMS:
            *oldest, last = next(iter(self.running))
            del self.running[*oldest, last]
            self.signatures.forget(tuple(oldest), last)
        return running
