"""What of a value waits in the host's memory: the bytes that go there and come back in a step, and their time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from autopar.compiler.lowered import Lowered
from autopar.ir.ops.measure import human, local_bytes
from autopar.ir.ops.ops import COPIES, TO_HOST
from autopar.ir.pipeline import Pipeline
from autopar.ir.program import record
from autopar.ir.schedule import OUT, Action, Instruction
from autopar.machines import Machine
from autopar.passes.offload.place_copies import KEPT, WAITED
from autopar.planning.price.step_report import time_text

_HOST_NAME = re.compile(r"_host\d*$")  # of what waits for another graph of its stage


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A copy of a step. of: the value, or the parameter whose value or gradient it is. module: of whom it is. times: in
    a step. us: of one."""

    of: str
    module: str
    is_out: bool
    bytes_: int
    us: float
    reason: str
    times: int


def host_copies(compiled: Lowered) -> Iterator[HostCopy]:
    """All copies between the device and the host of a rank's step, in order."""
    pipeline = compiled.pipeline
    graphs = (
        [(compiled.program, 1)] if pipeline is None else [(one.program, one.times) for one in pipeline.every_graph()]
    )
    for program, times in graphs:
        names = {node: entry.name for node, entry in program.parameters()}
        gradients = {node: out.name for node, out in program.leaving if out.kind == "gradient" and node is not None}
        for node in program.calls():
            if node.target in COPIES:
                bytes_ = local_bytes(node, program.mesh)
                us, known = compiled.plan.fixed.machine.copy_us(bytes_), record(node)
                of = _of(node, names, gradients)
                yield HostCopy(of, known.module, node.target is TO_HOST, bytes_, us, known.reason, times)
    yield from () if pipeline is None else _instructed(pipeline, compiled.plan.fixed.machine)


def _instructed(pipeline: Pipeline, machine: Machine) -> Iterator[HostCopy]:
    """The copies that are instructions of the lists."""
    found = Counter(
        (line.op, line.action.stage, line.action.kind, name, type_.bytes_)
        for lines in pipeline.lists for line in lines if line.is_copy
        for name, type_ in zip(line.values, line.types, strict=True)
    )  # fmt: skip
    for (op, stage, kind, name, bytes_), times in found.items():
        source = pipeline.flow.copies(Instruction(op, Action(stage, kind)))[name]
        reason = KEPT if op == OUT else WAITED
        of = f"%{_HOST_NAME.sub('', source)}"
        yield HostCopy(of, f"stage {stage}", op == OUT, bytes_, machine.copy_us(bytes_), reason, times)


def _of(node: fx.Node, names: Mapping[fx.Node, str], gradients: Mapping[fx.Node, str]) -> str:
    """Whose copy it is: of a parameter by its name, of a value by that of its node."""
    source = node.all_input_nodes[0]
    if node.target is TO_HOST:
        return next((gradients[user] for user in node.users if user in gradients), f"%{source.name}")
    if source in names:
        return names[source]
    return f"%{_HOST_NAME.sub('', source.name)}"


def host_lines(copies: Iterable[HostCopy]) -> tuple[str, ...]:
    """Lines that say what some copies move, and how long that takes on their link."""
    found, every = dict[tuple[bool, str], Counter[str]](), list(copies)
    for one in every:
        sums = found.setdefault((one.is_out, one.reason), Counter())
        sums["bytes"] += one.bytes_ * one.times
        sums["times"] += one.times
    us = {key: sum(c.us * c.times for c in every if (c.is_out, c.reason) == key) for key in found}
    return tuple(
        f"{human(sums['bytes'])} {'go there' if key[0] else 'come back'} in {sums['times']} "
        f"{'copies' if sums['times'] > 1 else 'copy'} a step, {time_text(us[key])} of the link: {key[1]}"
        for key, sums in found.items()
    )
