"""Plan files: a mesh and options of a step as TOML, what `autopar plan --out` writes and `--plan` reads."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from autopar.compiler.check_options import options_of
from autopar.compiler.meshes import mesh_of
from autopar.errors import AutoparError, PlanError, one_of
from autopar.ir.mesh import DATA_AXES, GRADIENT_AXES, PIPELINE, Mesh
from autopar.ir.options import PLANNED, PRECISIONS, StepOptions, read_dtype
from autopar.text_files import read_toml

_OF_PIPELINES = ("schedule", "chunks", "stage_memory")


@dataclass(frozen=True, slots=True)
class Decisions:
    """A plan. said: the options that it names. file: where it was read; empty of one that was not."""

    mesh: Mesh
    said: Mapping[str, Any]
    file: str = ""

    @property
    def step(self) -> dict[str, Any]:
        """Options of a step, as keyword arguments: what a plan decides and this one does not name is by default."""
        return {**PLANNED, **self.said}


def read_plan(path: str | Path) -> Decisions:
    """The plan of a TOML file. Raises PlanError for what is no plan, unknown keys, and values that exclude others."""
    table = read_toml(Path(path), "plan", PlanError)
    known = ("mesh", *(each.name for each in fields(StepOptions)))
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise PlanError(f"plan '{path}': nobody knows '{key}'. The nearest key is '{near}'.")
    if not isinstance(table.get("mesh"), str):
        raise PlanError(f"plan '{path}': it needs a mesh, e.g. mesh = \"dp=4,tp=2\".")
    said = {key: value for key, value in table.items() if key != "mesh"}
    if "reduce_dtype" in said:
        said["reduce_dtype"] = read_dtype(said["reduce_dtype"])
    try:
        mesh = mesh_of(table["mesh"])
        options = options_of(**said)
    except AutoparError as error:
        raise type(error)(f"plan '{path}': {error}") from None
    _check(str(path), mesh, said, options)
    return Decisions(mesh, said, str(path))


def _check(path: str, mesh: Mesh, said: Mapping[str, Any], options: StepOptions) -> None:
    """Refuse options that the mesh has no ranks for."""
    axes = {name: size for name, size in mesh.axes if size > 1}
    if options.zero and not any(axis in axes for axis in GRADIENT_AXES):
        raise PlanError(
            f"plan '{path}': zero = {options.zero} splits states over the ranks of {one_of(GRADIENT_AXES)}, and mesh "
            f"'{mesh}' has 1. Leave zero out, or give the mesh a data axis."
        )
    if options.zero == 0 and "fsdp" in axes:
        raise PlanError(
            f"plan '{path}': zero = 0 splits no states, and axis 'fsdp' of mesh '{mesh}' is there to split them over "
            f"{axes['fsdp']} ranks. Write zero = 1, 2 or 3, or {DATA_AXES[0]} in place of fsdp."
        )
    if not options.reshard_after_forward and options.zero != 3 and (options.zero is not None or "fsdp" not in axes):
        raise PlanError(
            f"plan '{path}': reshard_after_forward = false keeps what zero = 3 gathered, and the plan has zero = "
            f"{options.zero or 0}, which gathers for no use alone. Leave it out, or write zero = 3."
        )
    if options.sequence_parallel is True and "tp" not in axes:
        raise PlanError(
            f"plan '{path}': sequence_parallel = true splits over tp, and mesh '{mesh}' has 1 rank there. Leave it out."
        )
    if PIPELINE in axes or (options.microbatches or 1) > 1:
        return
    for name in _OF_PIPELINES:
        if said.get(name) is not None:
            raise PlanError(
                f"plan '{path}': {name} = {_value(said[name])} is of a pipeline, and mesh '{mesh}' has 1 rank on axis "
                f"'{PIPELINE}' and 1 micro-batch. Leave it out, or give the mesh an axis '{PIPELINE}'."
            )


def write_plan(path: Path, mesh: str, said: Mapping[str, Any], notes: Iterable[str] = ()) -> None:
    """Write a plan that `read_plan` reads. notes: of its first lines. Raises PlanError where it cannot be written."""
    lines = [f"# {note}" for note in notes]
    lines += [f"{key} = {_value(value)}" for key, value in {"mesh": mesh, **said}.items()]
    try:
        path.write_text("\n".join(lines) + "\n")
    except OSError as error:
        raise PlanError(f"plan '{path}': cannot write it: {error.strerror or error}.") from error


def _value(value: Any) -> str:
    """A value in TOML: its numbers, strings, truths and lists are JSON's."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{json.dumps(key)} = {_value(each)}' for key, each in value.items())} }}"
    if isinstance(value, torch.dtype):
        return json.dumps(next(short for short in PRECISIONS if read_dtype(short) == value))
    return json.dumps(list(value) if isinstance(value, tuple) else value)
