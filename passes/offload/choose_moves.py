"""Choose what the forward pass keeps in the host's memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import fx

from autopar.ir.modules import unit_of
from autopar.ir.ops.measure import human, local_bytes
from autopar.ir.ops.ops import is_collective, is_mesh_op
from autopar.ir.ops.storage import kept_values, root_of
from autopar.ir.options import StepOptions
from autopar.ir.program import Program, is_gathered_input, record
from autopar.passes.offload.place_copies import CallLine, first_uses

T = TypeVar("T")
SMALL = 16  # of the largest value that moves: what is smaller than this part of it moves last
LEAST = 512  # bytes of a value that is worth a copy: an allocator of a GPU gives no less
RECOMPUTED = "recompute"  # the pass that makes clones


@dataclass(frozen=True, slots=True)
class Kept:
    """What a forward pass keeps. movable: the bytes of each value that may wait elsewhere, by its name, in order.
    others: bytes of the rest, by why they stay. by_none: what it would keep if nothing was computed again. units: the
    layer of each value."""

    movable: Mapping[str, int]
    others: Mapping[str, int]
    by_none: int
    units: Mapping[str, str]

    @property
    def order(self) -> list[str]:
        """The values in the order in which they move: of each layer the largest, then of each the next one, such that
        any number of them is spread over the depth and layers hide their copies. Small ones come last."""
        most, by_unit = max(self.movable.values(), default=0), dict[str, list[str]]()
        for name in sorted(self.movable, key=lambda name: -self.movable[name]):
            by_unit.setdefault(self.units[name], []).append(name)
        turn = {unit: i for i, unit in enumerate(spread(dict.fromkeys(self.units.values())))}
        places = {name: (SMALL * self.movable[name] < most, number, turn[unit])
                  for unit, names in by_unit.items() for number, name in enumerate(names)}  # fmt: skip
        return sorted(places, key=places.__getitem__)

    @property
    def total(self) -> int:
        return sum(self.movable.values()) + self.stays

    @property
    def stays(self) -> int:
        return sum(self.others.values())

    def note(self, chosen: Iterable[str], options: StepOptions) -> str:
        """What a user may want to know of the choice."""
        moved = sum(self.movable[name] for name in chosen)
        stays = ", ".join(f"{human(bytes_)} {why}" for why, bytes_ in self.others.items() if bytes_)
        text = f"offload: {human(moved)} of {human(self.total)} kept wait in the host's memory"
        budget, left = device_budget(self, options), self.total - moved
        over = (
            f"; {human(left)} stay on the device, more than the {human(budget)} allowed" if left > budget >= 0 else ""
        )
        return text + (f" ({stays} stay)" if stays else "") + over


def device_budget(kept: Kept, options: StepOptions) -> int:
    """The bytes that may stay on the device: those of `recompute=`, where that is one number; else -1."""
    wanted = options.recompute
    if isinstance(wanted, (int, float)) and not isinstance(wanted, bool):
        return int(wanted * kept.by_none) if isinstance(wanted, float) else wanted
    return -1


def choose(kept: Kept, options: StepOptions) -> list[str]:
    """The names of the values that move, in `Kept.order`, until the rest keeps to the budget, and no more than the
    part, or the bytes, that `offload=` says."""
    wanted = options.offloaded["activations"]
    most = int(wanted * kept.total) if isinstance(wanted, float) else wanted
    moved, found = 0, []
    for name, size in ((name, kept.movable[name]) for name in kept.order):
        if kept.total - moved <= device_budget(kept, options):
            break
        if moved + size <= most:
            moved += size
            found.append(name)
    return found


def kept_of(line: CallLine) -> Kept:
    """What the forward pass of a graph of both passes keeps, by what may become of it."""
    program, roots = line.program, kept_values(line.program)
    leaving = {root_of(node) for node in program.results if node is not None}
    reasons = {node: why_not(line, node) or ("of what leaves the step" if node in leaving else "") for node in roots}
    free = [node for node in roots if not reasons[node]]
    ends = line.ends_out(free, line.begins_back)
    starts = line.starts_back(first_uses(line, free), line.begins_back)
    for node in free:
        if line.ways.stays and ends[node] == line.begins_back >= starts[node]:
            reasons[node] = "of what is read again at once"
    sizes = {node: local_bytes(node, program.mesh) for node in roots}
    others = Counter[str]()
    for node, why in reasons.items():
        others[why] += sizes[node] if why else 0
    movable = {node.name: sizes[node] for node in sorted(free, key=line.position.__getitem__) if not reasons[node]}
    units = {node.name: unit_of(record(node).module) for node in free}
    return Kept(movable, others, kept_by_none(program), {name: units[name] for name in movable})


def spread(places: Iterable[T]) -> list[T]:
    """Order places such that every beginning of them is spread over all (bits reversed)."""
    every = list(places)
    width = max(len(every) - 1, 1).bit_length()
    return [every[i] for i in sorted(range(len(every)), key=lambda i: int(f"{i:0{width}b}"[::-1], 2))]


def why_not(line: CallLine, node: fx.Node) -> str:
    """Why a value stays on the device; "" if it may move."""
    known = record(node)
    if not known.is_tensor or (is_mesh_op(node.target) and not is_collective(node.target)):
        return "of a rank's own numbers"
    if node.op == "call_function" and line.position[node] >= line.begins_back:
        return "of the backward pass"
    if known.layout.owned or (is_collective(node.target) and not known.type.dtype.is_floating_point):
        return "of rows that went to experts"
    return "of small values" if local_bytes(node, line.program.mesh) < LEAST else ""


def kept_by_none(program: Program) -> int:
    """The bytes that would be kept if nothing was computed again: of what is, each value counts as it would."""
    roots: dict[fx.Node, None] = {}
    for node in program.calls():
        if record(node).is_backward and record(node).made_by != RECOMPUTED:
            roots.update(dict.fromkeys(map(root_of, node.all_input_nodes)))
    kept = (node for node in roots if node.op == "call_function" and not is_gathered_input(node))
    counts = (node for node in kept if not record(node).is_backward or record(node).made_by == RECOMPUTED)
    return sum(local_bytes(node, program.mesh) for node in counts)
