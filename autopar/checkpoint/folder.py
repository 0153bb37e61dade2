"""The folder of a run: one folder a step, written aside and committed by one rename.

    runs/gpt/
      step-00000100/   manifest.json, rank-00000.safetensors, ...
      step-00000200/
      .partial-step-00000300/   of a save that was killed: swept by the next one

Which step is the newest is read from the names: there is no file that points to it, and could be torn.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from autopar.checkpoint.manifest import NAME
from autopar.errors import CheckpointError

PARTIAL, REPLACED, REMOVED = ".partial-", ".replaced-", ".removed-"
_STEP = re.compile(r"step-(\d{8,18})")


def folder_of(step: int) -> str:
    """The name of a step's folder."""
    return f"step-{step:08d}"


def is_step(name: str) -> bool:
    """Whether a folder of this name would be a step's."""
    return _STEP.fullmatch(name.removeprefix(REPLACED)) is not None


def committed(directory: Path) -> dict[int, Path]:
    """The committed checkpoints of a folder by their steps, in order."""
    found: dict[int, Path] = {}
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        name = path.name.removeprefix(REPLACED)  # a save that replaces a step was killed between two renames
        match = _STEP.fullmatch(name)
        if match and (name == path.name or not (directory / name).exists()) and (path / NAME).is_file():
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def newest(directory: Path, step: int | None = None) -> Path:
    """The folder of a step, or of the newest. Raises CheckpointError where there is none."""
    if step is None and (directory / NAME).is_file():
        return directory
    steps = committed(directory)
    if not steps:
        what = "there is no checkpoint in it" if directory.is_dir() else "there is no such folder"
        raise CheckpointError(f"'{directory}': {what}. Write the folder that autopar.save was given.")
    if step is None:
        return steps[max(steps)]
    if step not in steps:
        raise CheckpointError(f"'{directory}' has no checkpoint of step {step}; it has {_listed(list(steps))}.")
    return steps[step]


def begin(directory: Path, step: int) -> Path:
    """Make the folder that a step is written to, aside, and sweep away what saves left that were killed."""
    directory.mkdir(parents=True, exist_ok=True)
    sweep(directory)
    steps = committed(directory)
    if steps and max(steps) > step:
        raise CheckpointError(
            f"step {step} cannot be saved to '{directory}', which has {_listed(list(steps))}: the newest there would "
            f"be of another run. Save to another folder, or move newer steps away."
        )
    partial = directory / f"{PARTIAL}{folder_of(step)}"
    partial.mkdir()
    return partial


def commit(partial: Path) -> Path:
    """Give a folder that is complete, and on disk, its name."""
    final = partial.with_name(partial.name.removeprefix(PARTIAL))
    flush(partial)
    old = final.with_name(f"{REPLACED}{final.name}")
    if final.exists():
        final.rename(old)
    partial.rename(final)
    flush(final.parent)
    shutil.rmtree(old, ignore_errors=True)
    return final


def sweep(directory: Path) -> None:
    """Remove what is no committed checkpoint; bring back a step whose replacement was not committed."""
    for path in directory.iterdir():
        if path.name.startswith(REPLACED):
            final = directory / path.name.removeprefix(REPLACED)
            if not final.exists():
                path.rename(final)
                continue
        if path.name.startswith((PARTIAL, REMOVED, REPLACED)) and not path.is_symlink():
            shutil.rmtree(path)


def retain(directory: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, which loses their names first."""
    steps = committed(directory)
    for step in sorted(steps)[: -max(1, keep)]:
        removed = directory / f"{REMOVED}{folder_of(step)}"
        steps[step].rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


def flush(path: Path) -> None:
    """Let a folder's entries reach the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _listed(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[-5:]))
    return f"step{'s' * (len(steps) > 1)} {'..., ' * (len(steps) > 5)}{shown}"
