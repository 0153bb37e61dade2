"""Saved programs: a directory that a person can read and a machine can trust.

    index.json            format, version, mesh, who runs what, sha256 of every file and of itself
    program_0_step.py     the graph as Python, for reading
    program_0_step.json   the graph as program text, from which it is rebuilt

and of a pipeline, whose graphs are program_0_forward_0, program_0_epilogue, program_1_forward_1, ...

    pipeline.json         the instruction lists, and how the graphs belong together (see artifact_pipeline.py)
    step.py, step.json    the whole step, before it was cut

Loading unpickles, imports and evaluates nothing: text is parsed, and ops are looked up in an allow-list.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import ArtifactError, AutoparError, BatchError, MeshError
from autopar.ir.mesh import PIPELINE, Mesh, parse_mesh
from autopar.ir.options import StepOptions
from autopar.ir.pipeline import Pipeline
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.text.text import parse_program, print_program
from autopar.report.artifact.pipeline_json import parse_pipeline, pipeline_json
from autopar.report.artifact.readable import parse_ranges, python_text, rank_ranges

FORMAT = "autopar artifact"
VERSION = 4
INDEX, PIPELINE_FILE, WHOLE = "index.json", "pipeline.json", "step"
_FILE = re.compile(r"(program_\d+_\w+\.(py|json)|pipeline\.json|step\.(py|json))\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Artifact:
    """What is saved: each distinct program with the ranks that run it, its graphs by name. Of a pipeline, in the order
    of the axis pp, also the program that was cut."""

    mesh: Mesh
    programs: tuple[tuple[tuple[int, ...], Mapping[str, Program]], ...]
    meta: Mapping[str, str]
    pipeline: Pipeline | None = None
    whole: Program | None = None

    @property
    def layout_mesh(self) -> Mesh:
        """The mesh that the layouts of the programs name."""
        if self.pipeline is None:
            return self.mesh
        flow = self.pipeline.flow
        return _plan(self.mesh, flow.microbatches, flow.slices, flow.lengths).layout_mesh


def _plan(mesh: Mesh, microbatches: int, slices: int, lengths: tuple[int, ...] = ()) -> Plan:
    """What is known of the plan of a pipeline, whose micro-batches count each slice."""
    options = StepOptions(microbatches=microbatches // slices, slices=slices)
    return Plan(mesh, options=options, slice_lengths=lengths)


def save_programs(directory: str | os.PathLike[str], artifact: Artifact) -> None:
    """Write an artifact; one that is there already is replaced, anything else in the directory refused."""
    folder = Path(directory)
    try:
        old = _old_files(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # the index goes first and comes last: what is interrupted in between is not an artifact
        for name in old:
            (folder / name).unlink(missing_ok=True)
        _write(folder, artifact)
    except OSError as error:
        raise ArtifactError(f"cannot save to '{folder}': {error.strerror} ('{error.filename}').") from error


def _old_files(folder: Path) -> list[str]:
    """The files of the artifact that is to be replaced."""
    if not folder.exists():
        return []
    if not folder.is_dir():
        raise ArtifactError(f"cannot save to '{folder}': it is not a directory.")
    foreign = sorted(entry.name for entry in folder.iterdir() if entry.name != INDEX and not _FILE.match(entry.name))
    if foreign:
        raise ArtifactError(
            f"cannot save to '{folder}': it holds other files ('{foreign[0]}'"
            f"{f' and {len(foreign) - 1} more' if len(foreign) > 1 else ''}). Give an empty or a new directory."
        )
    if (folder / INDEX).exists():
        _read_index(folder, replace=True)
    return [INDEX, *sorted(entry.name for entry in folder.iterdir() if entry.name != INDEX)]


def _write(folder: Path, artifact: Artifact) -> None:
    digests: dict[str, str] = {}

    def write(name: str, text: str) -> None:
        data = text.encode()
        (folder / name).write_bytes(data)
        digests[name] = hashlib.sha256(data).hexdigest()

    def write_graph(stem: str, graph: str, program: Program, ranks: tuple[int, ...]) -> None:
        assert graph.isidentifier() and graph.isascii(), graph
        assert program.mesh.axes == artifact.layout_mesh.axes, (str(program.mesh), str(artifact.layout_mesh))
        write(f"{stem}.py", python_text(program, graph, rank_ranges(ranks)))
        write(f"{stem}.json", _json({"graph": graph, "program": print_program(program).splitlines()}))

    programs = []
    for number, (ranks, graphs) in enumerate(artifact.programs):
        for graph, program in graphs.items():
            write_graph(f"program_{number}_{graph}", graph, program, ranks)
        programs.append({"ranks": rank_ranges(ranks), "graphs": list(graphs)})
    if artifact.pipeline is not None:
        assert artifact.whole is not None
        write_graph(WHOLE, WHOLE, artifact.whole, tuple(range(artifact.mesh.size)))
        write(PIPELINE_FILE, _json(pipeline_json(artifact.pipeline)))
    # The index comes last and signs all other files, so that a directory cut short is never taken for a whole one.
    index: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "mesh": str(artifact.mesh),
        "meta": dict(artifact.meta),
        "programs": programs,
        "files": digests,
    }
    index["sha256"] = _digest(index)
    (folder / INDEX).write_bytes(_json(index).encode())


def load_programs(directory: str | os.PathLike[str], custom_ops: frozenset[str] = frozenset()) -> Artifact:
    """Read an artifact; raises `ArtifactError` naming every file that is missing, changed or not ours.

    custom_ops: the custom ops that the programs may hold, besides those of aten and autopar.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise ArtifactError(f"'{folder}' is not a directory of saved programs: there is no such directory.")
    index = _read_index(folder)
    _check_files(folder, index["files"])
    files = index["files"]

    def load_graph(stem: str, graph: str, mesh: Mesh) -> Program:
        if f"{stem}.json" not in files:
            raise ArtifactError(f"'{folder / INDEX}' names graph '{graph}', but has no file '{stem}.json' of it.")
        return _load_graph(folder / f"{stem}.json", files[f"{stem}.json"], mesh, custom_ops)

    try:
        mesh = parse_mesh(index["mesh"]) if index["mesh"] else Mesh(())
        meta = {str(key): str(value) for key, value in index["meta"].items()}
        content = _read_json(folder / PIPELINE_FILE, files[PIPELINE_FILE]) if PIPELINE_FILE in files else None
        counts = (1, 1) if content is None else (int(content["microbatches"]), int(content["slices"]))
        plan = _plan(mesh, *counts, () if content is None else tuple(map(int, content["lengths"])))
        inner = mesh if content is None else plan.layout_mesh
        programs = []
        for number, entry in enumerate(index["programs"]):
            graphs = {graph: load_graph(f"program_{number}_{graph}", graph, inner) for graph in entry["graphs"]}
            programs.append((parse_ranges(entry["ranks"], mesh), graphs))
    except (KeyError, TypeError, ValueError, AttributeError, BatchError, MeshError) as error:
        raise ArtifactError(f"'{folder / INDEX}' has a wrong entry: {type(error).__name__} {error}.") from None
    everyone = [rank for ranks, _ in programs for rank in ranks]
    if not programs:
        raise ArtifactError(f"'{folder / INDEX}' holds no program.")
    if len(set(everyone)) != len(everyone):
        raise ArtifactError(f"'{folder / INDEX}' gives a rank two programs.")
    if content is None:
        return Artifact(mesh, tuple(programs), meta)
    places = [tuple(r for r, at in enumerate(mesh.coords()) if at.get(PIPELINE, 0) == place)
              for place in range(plan.ranks_of_pipeline)]  # fmt: skip
    if [ranks for ranks, _ in programs] != places:
        raise ArtifactError(f"'{folder / INDEX}' does not give each place on the axis '{PIPELINE}' its program.")
    whole = load_graph(WHOLE, WHOLE, inner)
    try:
        pipeline = parse_pipeline(content, mesh, [graphs for _, graphs in programs], whole)
    except ArtifactError as error:
        raise ArtifactError(f"'{folder / PIPELINE_FILE}': {error}") from None
    return Artifact(mesh, tuple(programs), meta, pipeline, whole)


def _read_index(folder: Path, replace: bool = False) -> dict[str, Any]:
    """The index, checked against its own digest; to `replace` an artifact it need not be intact."""
    path = folder / INDEX
    if not path.is_file():
        raise ArtifactError(f"'{folder}' is not a directory of saved programs: it has no {INDEX}.")
    index = _read_json(path, "")
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise ArtifactError(f"'{path}' is not the index of saved programs: its format is not '{FORMAT}'.")
    if replace:
        return index
    if index.get("version") != VERSION:
        raise ArtifactError(
            f"'{path}' was written in version {index.get('version')} of the format; "
            f"this autopar reads version {VERSION}. Compile again with this autopar, or load with the other."
        )
    digest = index.pop("sha256", None)
    missing = [key for key in ("mesh", "meta", "programs", "files") if key not in index]
    if digest != _digest(index) or missing or not isinstance(index["files"], dict):
        raise ArtifactError(f"'{path}' was changed after it was saved: its sha256 is not the one written in it.")
    return index


def _check_files(folder: Path, files: Mapping[str, str]) -> None:
    """Every file must be there and unchanged; all that are not are named at once."""
    faults = []
    for name, digest in files.items():
        if not _FILE.match(name):
            faults.append(f"'{name}' is not a name of a file of saved programs")
        elif not (folder / name).is_file():
            faults.append(f"'{name}' is missing")
        elif hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
            faults.append(f"'{name}' was changed or damaged after it was saved (its sha256 differs)")
    if faults:
        raise ArtifactError(f"'{folder}' is not intact: {'; '.join(faults)}. Compile again, or restore the files.")


def _load_graph(path: Path, digest: str, mesh: Mesh, custom_ops: frozenset[str]) -> Program:
    content = _read_json(path, digest)
    try:
        program = parse_program("\n".join(content["program"]), custom_ops)
    except (KeyError, TypeError):
        raise ArtifactError(f"'{path}' does not hold a program.") from None
    except AutoparError as error:
        raise ArtifactError(f"'{path}': {error}") from None
    if program.mesh.axes != mesh.axes:  # a graph of one slice knows nothing of the lengths of the others
        raise ArtifactError(f"'{path}' is a program for mesh '{program.mesh}', but the index says '{mesh}'.")
    return program


def _read_json(path: Path, digest: str) -> Any:
    """What the file holds; the bytes read are those that were checked."""
    try:
        data = path.read_bytes()
        if digest and hashlib.sha256(data).hexdigest() != digest:
            raise ArtifactError(f"'{path}' was changed while it was read.")
        return json.loads(data)
    except OSError as error:
        raise ArtifactError(f"'{path}' cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"'{path}' is damaged or not a file of autopar: it is not JSON ({error}).") from None


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def _digest(index: Mapping[str, Any]) -> str:
    """The digest of an index without its digest."""
    text = json.dumps({key: value for key, value in index.items() if key != "sha256"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
