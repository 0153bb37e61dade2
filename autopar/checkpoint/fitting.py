"""Does a checkpoint fit what it is loaded into? In the words of torch's load_state_dict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from autopar.checkpoint.manifest import Manifest
from autopar.checkpoint.run import Run, plain, state_of_module
from autopar.checkpoint.tree import tensors_of
from autopar.errors import CheckpointError


def pick(what: str, state: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The saved entries of some objects by their names; one alone may have any name. Raises CheckpointError."""
    has = state[what]
    if len(wanted) == len(has) == 1:
        return dict(zip(wanted, has.values(), strict=True))
    missing = [name for name in wanted if name not in has]
    if missing:
        raise CheckpointError(
            f"'{path}' has no {what[:-1]} '{missing[0]}'; "
            + (f"its {what} are {', '.join(sorted(has))}." if has else f"it was saved without {what}.")
            + f" Give them by these names, as a dict, or leave {'it' if len(missing) == 1 else 'them'} out."
        )
    return {name: has[name] for name in wanted}


def fit_model(label: str, model: Any, entry: Mapping[str, Any], manifest: Manifest) -> Iterator[str]:
    """Say which names and shapes of a model are not those of its checkpoint."""
    now, saved = state_of_module(model), entry["state"]
    missing = [name for name in now if name not in saved]
    unexpected = [name for name in saved if name not in now]
    lines = []
    if unexpected:
        lines.append(f"Unexpected key(s) in state_dict: {_quoted(unexpected)}.")
    if missing:
        lines.append(f"Missing key(s) in state_dict: {_quoted(missing)}.")
    for name, value in now.items():
        if name not in saved or not isinstance(value, torch.Tensor):
            continue
        if value.device.type == "meta":
            lines.append(f"{name} is on the meta device: give it memory first, model.to_empty(device=...).")
        found = tensors_of(saved[name])
        if not found:
            lines.append(f"{name} is no tensor in the checkpoint.")
            continue
        shape = manifest.tensors[found[0]].shape
        if shape != tuple(value.shape):
            lines.append(
                f"size mismatch for {name}: copying a param with shape {torch.Size(shape)} from checkpoint, the shape "
                f"in current model is {torch.Size(value.shape)}."
            )
    if lines:
        of = type(plain(model)).__name__ + ("" if label == "model" else f" ('{label}')")
        yield f"Error(s) in loading state_dict for {of}:\n\t" + "\n\t".join(lines)


def fit_optimizer(label: str, run: Run, entry: Mapping[str, Any]) -> Iterator[str]:
    """Say which groups of an optimizer are not those of its checkpoint, and which parameters they differ in."""
    now = [frozenset(names) for names in run.names_of_parameters(label)]
    saved = [frozenset(group["params"]) for group in entry["groups"]]
    if len(now) != len(saved):
        yield f"{label}: loaded state dict has a different number of parameter groups: {len(saved)}, here {len(now)}."
    elif set(now) != set(saved):
        at = next(at for at, names in enumerate(now) if names not in saved)
        mine, theirs = now[at], saved[at]
        different = sorted(mine ^ theirs)
        yield (
            f"{label}: loaded state dict contains a parameter group that doesn't match the optimizer's group {at}: "
            f"{_quoted(different[:3])}{' and others' if different[3:] else ''} "
            f"{'is' if len(different) == 1 else 'are'} in one of them alone. Make the optimizer with the groups that "
            f"it was saved with."
        )


def _quoted(names: list[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
