"""Keep entries in a folder, one file each, written aside and renamed; the oldest go.

    KEY-READ.entry      sha256 of the rest, what the step read in Python (a line of JSON), the program (JSON)

A file that is cut short, damaged or of another version is none. Two writers of one entry write the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from autopar.errors import ArtifactError

VERSION = 1
MOST_BYTES = 256 << 20  # of a file
_FOLDER_BYTES, _FOLDER_ENTRIES = 2 << 30, 256  # of all of them
_SUFFIX, _ASIDE = ".entry", ".aside-"
_ABANDONED_S = 3600  # what a writer that was killed left aside


def prepared(folder: Path) -> Path:
    """The folder, made where it is not there. Raises ArtifactError for one that everyone may write: who can write an
    entry decides which numbers a training gives."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = folder.stat().st_mode
    except OSError as error:
        raise ArtifactError(f"cache='{folder}': {error.strerror or error}. Name a folder that can be made.") from None
    if mode & stat.S_IWOTH:
        raise ArtifactError(
            f"cache='{folder}' may be written by everyone (mode {stat.S_IMODE(mode):o}), and who writes there decides "
            f"which program trains. Take that right away (chmod o-w), or name another folder."
        )
    return folder


def write_entry(folder: Path, key: str, read: str, says: Any, content: bytes) -> None:
    """Write an entry, so that it is there whole or not at all. says: by which `entries` are told apart before they are
    read as a whole. Raises OSError."""
    body = json.dumps(says).encode() + b"\n" + content
    data = f"{VERSION} {hashlib.sha256(body).hexdigest()}\n".encode() + body
    if len(data) > MOST_BYTES:
        return
    aside = folder / f"{_ASIDE}{os.getpid()}-{secrets.token_hex(8)}"
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(folder / f"{key}-{read}{_SUFFIX}")
    finally:
        with suppress(OSError):
            aside.unlink()
    _tidy(folder)


def entries(folder: Path, key: str) -> Iterator[tuple[Path, str, Any, bytes]]:
    """The intact entries of a key, the newest first: where each is, the digest of what was read, what it says of that,
    and its content."""
    for path in sorted(folder.glob(f"{key}-*{_SUFFIX}"), key=_age):
        try:
            if not path.is_file() or path.stat().st_size > MOST_BYTES:
                continue
            head, _, body = path.read_bytes().partition(b"\n")
        except OSError:  # it went meanwhile
            continue
        if head != f"{VERSION} {hashlib.sha256(body).hexdigest()}".encode():
            continue
        says, _, content = body.partition(b"\n")
        with suppress(ValueError, RecursionError):
            yield path, path.name.removeprefix(f"{key}-").removesuffix(_SUFFIX), json.loads(says), content


def used(path: Path) -> None:
    """Note that an entry was taken: the one unused longest goes first."""
    with suppress(OSError):
        os.utime(path)


def _age(path: Path) -> float:
    with suppress(OSError):
        return -path.stat().st_mtime
    return 0.0


def _tidy(folder: Path) -> None:
    """Remove what is too much, and what killed writers left."""
    total, now = 0, time.time()
    for count, path in enumerate(sorted(folder.glob(f"*{_SUFFIX}"), key=_age)):
        with suppress(OSError):
            total += path.stat().st_size
            if count and (count >= _FOLDER_ENTRIES or total > _FOLDER_BYTES):
                path.unlink()
    for path in folder.glob(f"{_ASIDE}*"):
        with suppress(OSError):
            if now - path.stat().st_mtime > _ABANDONED_S:
                path.unlink()
