"""The programs of a parallel module: found or compiled for each call, kept, and forgotten."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autopar.capture.data.reads import OtherValues
from autopar.parallel.batches.batch_checks import describe
from autopar.parallel.programs.execution import Running
from autopar.parallel.programs.making import Maker
from autopar.parallel.programs.portions import Given
from autopar.parallel.programs.signatures import Signatures
from autopar.parallel.session.session import Session
from autopar.parallel.weights.gradients import check_enabled

_log = logging.getLogger("autopar")
VALUES = 8  # of one signature, for other values that the model reads from its tensors (specialize=True)
T = TypeVar("T")
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

    def prepare(self, call: str, args: Any, kwargs: Any, train: bool) -> tuple[Running, Given]:
        """The program for a call of that name, compiled if there is none yet, and its arguments, taken apart."""
        given = self.signatures.take(call, args, kwargs, train)
        given, key, number = self.signatures.settle(call, given, self.running, train)
        if train:
            check_enabled(call)
            if self._replicas.is_due(self._random.steps):
                self._replicas.check(self._random.steps)
        if (*key, number) in self.running:
            self.running[*key, number] = self.running.pop((*key, number))  # the last used stands last
            return self.running[*key, number], given
        return self._make(key, number, given, train), given

    def run(
        self, call: str, args: Any, kwargs: Any, train: bool, step: Callable[[Running, Given], T]
    ) -> tuple[Running, T]:
        """What a step gives with the program of a call. If it was specialised to other values than those of the batch
        (OtherValues), another one of this signature is taken, or compiled."""
        known = {id(running) for running in self.running.values()}
        running, given = self.prepare(call, args, kwargs, train)
        while True:
            try:
                return running, step(running, given)
            except OtherValues as found:
                other = found
            if id(running) not in known:
                why = " It was compiled for this very batch: a number that is summed in another order is another one."
                raise other.read.refused(other.values[-1], why)
            running = self._for_values(call, given, train, other)

    def _for_values(self, call: str, given: Given, train: bool, other: OtherValues) -> Running:
        """The program for a batch with these values among its reads, which every rank has found."""
        key = self.signatures.key(given, train)

        def fits(number: int) -> bool:
            reads = self.running[*key, number].captured.reads
            return all(read.is_(value) for read, value in zip(reads, other.values, strict=False))

        number = self.signatures.agree(call, key, given, self.running, fits)
        if (*key, number) in self.running:
            self.running[*key, number] = self.running.pop((*key, number))
            return self.running[*key, number]
        count = sum(bool(each.captured.reads) and at[:-1] == key for at, each in self.running.items())
        if count >= VALUES:
            raise other.read.refused(other.values[-1], f" {count} programs were compiled for other values already.")
        if dist.get_rank() == 0:
            _log.warning("%s is %s for this batch and was another value: compiling again", other.read, other.values[-1])
        return self._make(key, number, given, train)

    def _make(self, key: tuple[Any, ...], number: int, given: Given, train: bool) -> Running:
        """Compile a program and keep it; forget the one unused longest."""
        is_new = not self.signatures.variants.knows(key) and any(train == known[0] for known in self.running)
        if is_new and dist.get_rank() == 0:
            _log.warning("new input signature (%s): compiling again", ", ".join(describe(given.whole)))
        with torch.inference_mode(False):  # what is made here is trained later
            running, guards = self._maker.make(given, self.signatures.numbers, train, is_first=not self.running)
        self.signatures.portions.learn(given, train)
        self.running[*self.signatures.add(key, number, running, guards), number] = running
        if len(self.running) > PROGRAMS:
            *oldest, last = next(iter(self.running))
            del self.running[*oldest, last]
            self.signatures.forget(tuple(oldest), last)
        return running
