"""Simulate a step of the emitted programs on a machine: its time, and what the time is made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import fx

from autopar.compiler.lowered import Lowered
from autopar.errors import ArtifactError
from autopar.ir.layout import local_shape
from autopar.ir.mesh import PIPELINE
from autopar.ir.modules import is_named
from autopar.ir.program import Program, TensorType, operand_nodes, record
from autopar.machines import Machine
from autopar.machines.model import ADAMW
from autopar.passes.costs.streams import run
from autopar.planning.price.pipeline_time import PipelineTime, pipeline_time
from autopar.planning.price.step_report import StepTime


def step_time(compiled: Lowered, machine: Machine | None = None, imbalance: float = 1.0) -> StepTime:
    """The time of a step on a machine; by default on the one that the programs were made for.

    Ranks that differ by dp, tp or cp alone run the same program, so each place on pp is simulated once. imbalance: of
    experts, how many times the mean rows the busiest rank has; with `expert_rows` every rank has that. Raises
    ArtifactError for programs that were loaded.
    """
    _check_has_flops(compiled)
    machine = machine or compiled.plan.fixed.machine
    mesh = compiled.mesh
    offloaded = compiled.plan.options.offloaded
    where = next((name for name in ("parameters", "optimizer") if offloaded.get(name)), "")
    amount, is_on_disk = offloaded.get("optimizer", 0.0), compiled.plan.options.offload_dir is not None
    in_files = compiled.plan.options.files is not None
    moving = (lambda name: any(is_named(name, one) for one in amount)) if not isinstance(amount, float) else None
    states = _states(compiled)
    moved = _states(compiled, moving) if moving else {place: float(amount) * held for place, held in states.items()}
    moved = states if where == "parameters" else moved
    optimizer = {
        place: optimizer_us(machine, held, where, mesh.size, moved[place] / max(1.0, held), is_on_disk, in_files)
        for place, held in states.items()
    }
    if in_files:  # what all ranks of a node load comes from one disk
        machine = machine.from_disk(mesh.size)
    rows = compiled.plan.options.expert_rows or imbalance
    if compiled.pipeline is None:
        spent = run(compiled.program, machine, rows)
        found = PipelineTime(spent.total, spent, 0.0, optimizer[0])
    else:
        found = pipeline_time(compiled.pipeline, machine, optimizer, rows)
    spent = found.spent
    return StepTime(
        machine, str(mesh), mesh.size, found.end + found.optimizer, spent.computed, spent.exposed, spent.hosted,
        found.bubble, found.optimizer, spent.calls, *_flops(compiled), tokens_of(compiled.program), found.timeline,
    )  # fmt: skip


def _check_has_flops(compiled: Lowered) -> None:
    if "propagate" not in dict(compiled.history):
        raise ArtifactError(
            f"the time of these programs on '{compiled.mesh}' cannot be simulated: they were loaded, and saved "
            f"programs tell no FLOPs of their products, nor which of them are computed again. Ask what "
            f"autopar.compile(model, '{compiled.mesh}', ...) returns, before it is saved."
        )


def optimizer_us(
    machine: Machine, bytes_: float, offload: str, ranks: int, share: float = 1.0, is_on_disk: bool = False,
    in_files: bool = False,
) -> float:  # fmt: skip
    """The time in which AdamW reads and writes so many bytes; or in which a share of its two moments come from the
    host's memory while others go there ("optimizer"); or on the host ("parameters"), whose cores all ranks share. On a
    disk the moments of all ranks of a node are read and written one after the other. in_files: parameters and gradients
    lie there too."""
    moments = 2 * bytes_ / ADAMW * share if offload in ("optimizer", "parameters") else 0.0
    disk = machine.disk_us(bytes_ if in_files else 2 * moments, ranks) if is_on_disk else 0.0
    if offload == "parameters":
        return max(machine.host_update_us(bytes_, ranks), disk)
    return max(machine.update_us(bytes_), machine.copy_us(moments), disk)


def _states(compiled: Lowered, is_meant: Callable[[str], bool] | None = None) -> dict[int, float]:
    """The bytes that AdamW reads and writes on a rank, by its place on pp. is_meant: only those of these parameters."""
    states = dict.fromkeys(range(dict(compiled.mesh.axes).get(PIPELINE, 1)), 0.0)
    owners, frozen = compiled.owners, compiled.plan.frozen
    for node, entry in compiled.program.parameters():
        if entry.name in frozen or not (is_meant is None or is_meant(entry.name)):
            continue
        known = record(node)
        part = TensorType(local_shape(known.type.shape, known.layout, compiled.program.mesh), known.type.dtype)
        states[owners[entry.name] or 0] += ADAMW * part.bytes_
    return states


def _flops(compiled: Lowered) -> tuple[float, float, str]:
    """(FLOPs of the model's own products, those that are computed again, the dtype of most of them)."""
    whole = products(dict(compiled.history).get("propagate", compiled.program))
    final = products(compiled.program)
    dtype = max(whole, key=lambda name: whole[name], default="float32")
    asked = float(sum(whole.values()))
    return asked, max(0.0, float(sum(final.values())) - asked), dtype


def products(program: Program, times: Callable[[fx.Node], int] = lambda node: 1) -> Counter[str]:
    """The FLOPs of the products of a program, by the dtype of their operands. times: how often each call counts."""
    products: Counter[str] = Counter()
    for node in program.calls():
        if flops := record(node).flops:
            dtype = str(record(operand_nodes(node)[0]).type.dtype).removeprefix("torch.")
            products[dtype] += times(node) * flops
    return products


def tokens_of(program: Program) -> int:
    """The elements of the first integers of the batch; its rows if it has none."""
    batch = [record(node).type for node, entry in program.entries if entry.kind == "batch"]
    ids = next((type_ for type_ in batch if not type_.dtype.is_floating_point and len(type_.shape) > 1), None)
    if ids is not None:
        return ids.numel
    return next((type_.shape[0] for type_ in batch if type_.shape), 1)
