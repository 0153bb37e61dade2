"""Find the program of a call among those that earlier runs compiled, or keep the one that is compiled now; without a
folder take it from rank 0, where the ranks of a machine are more than its cores.

A program is taken only if everything that it was made of is the same: what the call and the model say
(`cache_key.py`), the files in which its code and its helpers stand, the code that ran, and each value that this code
read. In doubt it is compiled. One rank of a machine compiles; the others wait, and read what it kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.capture.inputs import tables
from autopar.capture.inputs.module_state import state_of
from autopar.capture.python.guards import Guards
from autopar.capture.python.ran import Ran
from autopar.capture.python.read_digests import (
    Unclear,
    digest,
    is_installed,
    live_codes,
    place_of,
    read_digest,
    reads_outside,
    with_codes,
)
from autopar.capture.python.read_digests import code_digest as digest_of_code
from autopar.capture.python.spots import Numbers
from autopar.capture.refusals.location import is_user_file, user_line
from autopar.capture.step_kind import StepKind
from autopar.compiler.lowered import Lowered
from autopar.errors import AutoparError
from autopar.parallel.programs.cache_entry import Bound, Passes, built_of, entry_of
from autopar.parallel.programs.cache_files import entries, prepared, used, write_entry
from autopar.parallel.programs.cache_key import key_of_step
from autopar.parallel.programs.portions import Given
from autopar.parallel.programs.running import Built
from autopar.parallel.session.session import Session

_log = logging.getLogger("autopar")
# What is raised by an entry that is none: of another shape than one of ours, or naming what is not there.
_NO_ENTRY = (AutoparError, ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, AssertionError)
_NOT_KEPT = (Unclear, OSError, *_NO_ENTRY)


@dataclass(frozen=True, slots=True)
class WantedProgram:
    """A program that is asked for. options: what decides it beside the batch, the model and `bound`. passes: what takes
    its captured program through the passes."""

    given: Given
    numbers: Numbers
    kind: StepKind
    options: Mapping[str, Any]
    bound: Bound
    passes: Passes


@dataclass(frozen=True, slots=True)
class KeptProgram:
    """A program that was found, with the name by which it is known."""

    name: str
    built: Built

    def give(self) -> Built:
        """The program."""
        return self.built


@dataclass(frozen=True, slots=True)
class ProgramEntry:
    """A program that was compiled, as others read it. read: the digest of what the step read. says: of its files and
    its code."""

    read: str
    says: Mapping[str, Any]
    content: bytes

    def name(self, key: str) -> str:
        """By which the programs behind it know it."""
        return f"{key}-{hashlib.sha256(self.content).hexdigest()}"


class HandedPrograms:
    """Programs that rank 0 compiles, and the other ranks read: without cores of their own they would wait longer for
    what they compile."""

    def __init__(self, session: Session) -> None:
        self._agreement, self._entries = session.agreement, ProgramEntries(session)

    def built(self, wanted: WantedProgram, compile_: Callable[[], Built]) -> Callable[[], Built]:
        """What gives the program of a call, as of `ProgramCache.built`."""
        key: str | None = None
        with suppress(Unclear):  # which is told where somebody asked for a cache
            key = self._entries.key(wanted, ())
        keys, is_first = self._agreement.everyone("compiled programs", key), dist.get_rank() == 0
        if keys[0] is None or keys.count(keys[0]) == 1:
            return compile_
        made = _called(compile_) if is_first else compile_
        entry: ProgramEntry | None = None
        if is_first:
            with suppress(Exception):  # of the compiler, told by all ranks together; or it is not kept
                entry = self._entries.entry(wanted, made())
        entry = self._agreement.of_first("compiled programs", entry)
        if is_first or entry is None or key != keys[0]:
            return made
        kept = self._entries.read(wanted, entry)
        return made if kept is None else lambda: kept


class ProgramCache:
    """The programs in one folder, for one parallel module."""

    def __init__(self, session: Session, folder: Path) -> None:
        self._agreement, self._folder, self._is_patient = session.agreement, folder, session.settings.is_patient
        self._agreement.together("cache", lambda _: prepared(folder))
        self._entries = ProgramEntries(session)
        self._earlier: list[str] | None = []  # the programs before, which decided layouts; None once one is not known

    def built(self, wanted: WantedProgram, compile_: Callable[[], Built]) -> Callable[[], Built]:
        """What gives the program of a call: found here, or compiled and kept. Every rank must call this, and then the
        function that it gives, which raises what compiling raises."""
        key, node, rank, made = self._key(wanted), socket.gethostname(), dist.get_rank(), compile_
        kept = None if key is None else self._find(key, wanted)
        name = None if kept is None else kept.name
        everyone = self._agreement.everyone("compiled programs", (node, key, name))
        first = next(at for at, (its, of, _) in enumerate(everyone) if (its, of) == (node, key))
        if not all(found for *_, found in everyone):
            if kept is None and key is not None and (rank == first or not self._is_patient):
                made = _called(compile_)
                name = self._keep(key, wanted, made) if rank == first else None
            # behind this, what the first rank of each machine kept is there
            name = self._agreement.everyone("compiled programs", name)[first]
            if kept is None and key is not None and name is not None and made is compile_:
                kept = self._find(key, wanted)
        self._earlier = None if name is None or self._earlier is None else [*self._earlier, name]
        return made if kept is None else kept.give

    def _key(self, wanted: WantedProgram) -> str | None:
        """What is known of a program before the code that ran is; None for one that is compiled at each start."""
        try:
            return None if self._earlier is None else self._entries.key(wanted, self._earlier)
        except Unclear as why:
            _say_not_kept(why)
            return None

    def _find(self, key: str, wanted: WantedProgram) -> KeptProgram | None:
        """The program of an earlier run, if it would be compiled the same now."""
        for path, read, says, content in entries(self._folder, key):
            entry = ProgramEntry(read, says, content)
            built = self._entries.read(wanted, entry, path)
            if built is not None:
                used(path)
                return KeptProgram(entry.name(key), built)
        return None

    def _keep(self, key: str, wanted: WantedProgram, made: Callable[[], Built]) -> str | None:
        """Keep a program that was compiled; its name, or None where it is compiled at each start."""
        try:
            built = made()
        except Exception:  # told by all ranks together
            return None
        try:
            entry = self._entries.entry(wanted, built)
            self._entries.check(wanted, entry, built)
            for name in self._entries.names(entry):
                write_entry(self._folder, key, name, entry.says, entry.content)
            return entry.name(key)
        except _NOT_KEPT as why:
            _say_not_kept(why)
            return None


class ProgramEntries:
    """Names the programs of one parallel module, writes and reads them."""

    def __init__(self, session: Session) -> None:
        self._device, self._loss_fn = session.settings.device, session.settings.loss_fn
        self._model = session.store.model
        self._before: dict[str, str] = {}  # what code would read that ran before: names, before the capture at hand

    # -- what decides a program -------------------------------------------------------------------------------------

    def key(self, wanted: WantedProgram, earlier: Sequence[str]) -> str:
        """What is known of a program before the code that ran is. Raises Unclear. earlier: the programs before it."""
        self._before.clear()
        bound, loss_fn = wanted.bound, self._loss_fn if wanted.kind.gives_loss else None
        options = {
            **wanted.options,
            "mesh": bound.mesh, "options": bound.options.step, "fixed": bound.fixed, "earlier": list(earlier),
            "kind": wanted.kind.value, "device": self._device.type,
            "line": user_line(sys._getframe()),  # of the call, which stands in the program and is compared by ranks
        }  # fmt: skip
        modules = iter(tables.named_modules(self._model))
        return key_of_step(options, wanted.given.whole, state_of(self._model).entries, modules, loss_fn)

    def _guards(self, wanted: WantedProgram, ran: Ran) -> Guards:
        return Guards(self._model, self._loss_fn if wanted.kind.gives_loss else None, ran, None, wanted.numbers)

    def _own(self) -> dict[str, torch.Tensor]:
        """The plain tensors among the model's attributes."""
        return {entry.name: tensor for entry, tensor in state_of(self._model).entries if entry.kind == "constant"}

    # -- read and write ---------------------------------------------------------------------------------------------

    def read(self, wanted: WantedProgram, entry: ProgramEntry, path: Path | None = None) -> Built | None:
        """The program of an entry, if it would be compiled the same now. path: of the entry, where it is a file."""
        try:
            guards = self._guards_if_same(entry.read, entry.says, wanted)
            return None if guards is None else self._built(wanted, entry, guards)
        except _NO_ENTRY as error:
            at = "the program of rank 0" if path is None else f"'{path}'"
            _log.warning("%s cannot be read, and is compiled again: %s", at, error)
            return None

    def _built(self, wanted: WantedProgram, entry: ProgramEntry, guards: Guards) -> Built:
        return built_of(
            entry.content, wanted.bound, guards, self._own(), wanted.kind, self._device, wanted.passes
        )  # fmt: skip

    def _guards_if_same(self, read: str, says: Any, wanted: WantedProgram) -> Guards | None:
        """What the step would read now; None if that is not what an entry says."""
        if any(_file_digest(path) != was for path, was in says["files"].items()):
            return None
        codes = live_codes({one: (file, name, int(line)) for one, (file, name, line) in says["codes"].items()})
        if codes is None:
            return None
        guards = self._guards(wanted, with_codes(list(codes.values())))
        try:
            found = _read_name(says, guards)
        except Unclear:
            return None
        self._before[_code_name(says)] = found
        return guards if found == read else None

    def entry(self, wanted: WantedProgram, built: Built) -> ProgramEntry:
        """A program that was compiled, as others read it. Raises Unclear for one that is compiled at each start."""
        outside = reads_outside(built.captured.ran)
        if outside is not None:
            raise Unclear(
                f"the code of the step reads '{outside}', which may give something else on another rank or at the next "
                "start"
            )
        guards = self._guards(wanted, with_codes(built.captured.ran.codes))
        codes = {digest_of_code(code): place_of(code) for code, _ in guards.ran.codes}
        says = {"files": dict(self._files(guards.ran)), "codes": codes}
        content = json.dumps(entry_of(built, wanted.bound, self._own())).encode()
        return ProgramEntry(_read_name(says, guards), says, content)

    def check(self, wanted: WantedProgram, entry: ProgramEntry, built: Built) -> None:
        """Raise Unclear, or what reading raises, for a program that is not read as it was written."""
        again = self._built(wanted, entry, self._guards(wanted, with_codes(built.captured.ran.codes)))
        if Lowered.lines(again.compiled) != built.compiled.lines():
            raise Unclear("its text")

    def names(self, entry: ProgramEntry) -> set[str]:
        """The names of what the step read, by which an entry is found: a library may fill tables of its own while it
        is captured, and the next start finds them as they were before."""
        return {entry.read, self._before.get(_code_name(entry.says), entry.read)}

    def _files(self, ran: Ran) -> Iterator[tuple[str, str]]:
        """The files that the step may hang on, with their digests: those of the user's that are loaded, and those of
        installed packages of which something ran."""
        kinds = {type(module).__module__ for _, module in tables.named_modules(self._model)}
        code_files = {code.co_filename for code, _ in ran.codes}
        packages: dict[str, set[str]] = {}  # by file, of the modules that it is
        for name, file in _loaded_files():
            packages.setdefault(os.path.abspath(file), set()).add(name.partition(".")[0])
        used_packages = {name.partition(".")[0] for name in kinds}
        used_packages = used_packages.union(*(packages.get(file, ()) for file in code_files))
        for file in sorted({*packages, *code_files}):
            is_used = file in code_files or not used_packages.isdisjoint(packages[file])
            found = _file_digest(file) if is_used or not is_installed(file) else None
            if found is not None:
                yield file, found


def _loaded_files() -> Iterator[tuple[str, str]]:
    """The modules of the user's and of packages, with their files."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and is_user_file(file):
            yield name, file


def _file_digest(file: str) -> str | None:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except (OSError, ValueError):
        return None


def _read_name(says: Any, guards: Guards) -> str:
    """The name of what a step read. Raises Unclear."""
    return digest(_code_name(says), read_digest(guards))


def _code_name(says: Any) -> str:
    """The name of the code that ran, and of the files that it may hang on."""
    return digest(json.dumps([sorted(says["files"].items()), list(says["codes"])]))


def _called(make: Callable[[], Built]) -> Callable[[], Built]:
    """What gives, or raises, what a call did."""
    try:
        built = make()
    except Exception as error:
        failure = error

        def fail() -> Built:
            raise failure

        return fail
    return lambda: built


def _say_not_kept(why: Exception) -> None:
    if dist.get_rank() == 0:
        _log.warning("cache: this program is not kept, and each start compiles it: %s", why)
