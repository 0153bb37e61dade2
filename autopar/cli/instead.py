"""`autopar explain --instead`: the step that is asked about, and the same with something decided otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autopar.cli.arguments.command_options import STEP, CommandOptions
from autopar.compiler.check_options import options_of
from autopar.compiler.compile import batch_arguments, capture_step
from autopar.compiler.meshes import AXES, mesh_of
from autopar.errors import TargetError, divisors, one_of
from autopar.ir.mesh import GRADIENT_AXES, PIPELINE, SHARDED, Mesh
from autopar.ir.options import PLANNED
from autopar.machines import named
from autopar.planning.space.batches import resized_call
from autopar.planning.space.candidates import RESHARD
from autopar.report.compare_plans import instead_text
from autopar.report.memory.within_memory import lower_within

REST = "dp"  # takes the ranks that the other axes leave


def compared(
    target: str, mesh: str, options: CommandOptions, instead: Sequence[str], machine: str, batch: int | None
) -> str:  # fmt: skip
    """What would change of a TARGET's step. batch: rows, by default those of the job's batch."""
    chosen, first = named(machine), mesh_of(mesh)
    sizes, changes = _read(instead)
    other = _resized(first, sizes, instead) if sizes else first
    changes = {**_without_ranks(other), **changes}
    job = options.job(target)
    args, kwargs = batch_arguments(job.batch)
    if batch is not None:
        args, kwargs = resized_call(args, kwargs, {"b": batch})
    steps = [options_of(**each.step) for each in (job, replace(job, **changes))]
    if changes.get(RESHARD) is False:
        _check_gathers(steps[1].zero, other)
    captured = capture_step(job.model, job.loss_fn, args, kwargs, steps[0])
    before, after = (lower_within(captured, *pair) for pair in zip((first, other), steps, strict=True))
    words = " ".join(f"{name}={value}" for name, value in changes.items() if value is not None)
    return instead_text(before, after, chosen, words)


def _without_ranks(mesh: Mesh) -> dict[str, Any]:
    """The options that split over axes which a mesh does not have, as they are without."""
    axes = {name for name, size in mesh.axes if size > 1}
    return {
        **({} if axes.intersection(GRADIENT_AXES) else {"zero": None}),
        **({} if "tp" in axes else {"sequence_parallel": False}),
    }


def _check_gathers(zero: int | None, mesh: Mesh) -> None:
    """Raise TargetError where `reshard_after_forward=false` changes nothing."""
    gathers = zero == 3 or (zero is None and dict(mesh.axes).get(SHARDED, 1) > 1)
    if not gathers:
        raise TargetError(
            f"--instead {RESHARD}=false: it keeps what zero=3 gathers, and the step has zero={zero or 0} on mesh "
            f"'{mesh}'. Write --instead zero=3 beside it."
        )


def _read(instead: Sequence[str]) -> tuple[dict[str, int], dict[str, Any]]:
    """Sizes of axes, and options of a step. Raises TargetError for what is neither."""
    sizes, changes = dict[str, int](), dict[str, Any]()
    for text in instead:
        name, _, value = text.partition("=")
        if name in AXES and value.isdecimal() and int(value):
            sizes[name] = int(value)
        elif name in PLANNED and name in STEP and value:
            changes[name] = _value(text, name, value)
        else:
            known = [*(f"{axis}=N" for axis in AXES), *(f"{each}=..." for each in PLANNED)]
            raise TargetError(f"--instead {text}: write {one_of(known)}.")
    return sizes, changes


def _value(text: str, name: str, value: str) -> Any:
    flag = STEP[name].metadata["flag"]
    if flag.kind is bool:
        return value.lower() == "true" if value.lower() in ("true", "false") else value
    try:
        return flag.read(flag.kind(value))
    except ValueError:
        raise TargetError(f"--instead {text}: write {name}={flag.metavar}.") from None


def _resized(mesh: Mesh, sizes: dict[str, int], instead: Sequence[str]) -> Mesh:
    """The same ranks with other sizes of some axes; dp takes what they leave."""
    wanted = {name: size for name, size in mesh.axes if name != REST} | sizes
    others = Mesh(tuple((name, size) for name, size in wanted.items() if name != REST))
    if mesh.size % others.size or sizes.get(REST, mesh.size // others.size) != mesh.size // others.size:
        raise TargetError(
            f"--instead {' '.join(instead)}: the {mesh.size} ranks of mesh '{mesh}' stay, and "
            f"'{Mesh(tuple(wanted.items()))}' does not divide them. "
            f"Sizes that do are {one_of(divisors(mesh.size, mesh.size))}."
        )
    found = {PIPELINE: 1, REST: mesh.size // others.size, **wanted}
    found[REST] = mesh.size // others.size
    return mesh_of({name: size for name, size in found.items() if size > 1} or {REST: 1})
