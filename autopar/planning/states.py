"""The bytes that a rank holds of a step, read off its programs: parameters, gradients, states, activations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from autopar.ir.measure import local_bytes
from autopar.ir.program import CAST, Program, record
from autopar.planning.depth import Rest
from autopar.planning.sheet import Sheet

MOMENTS = 2  # of AdamW, in the dtype of the parameter


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes. copies: of what is made of parameters once a step (casts). plain: of parameters that are read as they are.
    saved: of one micro-batch, from its forward to its backward pass. others: what is alive beside all of that at the
    worst moment; inner: the same in the equal layers, first: in these and before them. late: what of `saved` the
    gradients of weights wait for, made: what those of inputs leave to them, where they are computed apart."""

    parameters: float
    gradients: float
    states: float
    copies: float
    plain: float
    saved: float
    others: float
    inner: float
    first: float
    late: float
    made: float


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes of a program's parameters and of their gradients, by name. first: the names of those that the forward pass
    reads before the equal layers, where the compiler keeps them (`_owners` of pipeline/stages.py); entry: of those that
    it reads nowhere else."""

    parameters: Mapping[str, int]
    gradients: Mapping[str, int]
    first: frozenset[str]
    entry: frozenset[str]

    @classmethod
    def of(cls, program: Program, rest: Rest) -> Stored:
        """Of what counts in a LOCAL program."""
        mesh = program.mesh
        stored = {entry.name: local_bytes(node, mesh) for node, entry in program.parameters() if rest.has(entry.name)}
        gradients = {
            out.name: local_bytes(node, mesh)
            for node, out in program.leaving
            if out.kind == "gradient" and node is not None and rest.has(out.name)
        }
        return cls(stored, gradients, *map(frozenset, _entry(program, rest)))


def held(stored: Stored, sheets: Mapping[str, Sheet], is_less: bool) -> Held:
    """With one micro-batch under way. sheets: of a rank's actions, by kind. is_less: without the layer that may be left
    out, as `stored` is then too."""
    bodies = [sheet for kind, sheet in sheets.items() if kind in "FBIW"]
    parameters = sum(stored.parameters.values())
    others, inner, first = (max(each.peak(is_less, sides) for each in bodies) for sides in ((-1, 0, 1), (0,), (-1, 0)))
    return Held(
        parameters, sum(stored.gradients.values()), MOMENTS * parameters,
        sheets["P"].left[is_less] if "P" in sheets else 0.0, _read(stored, bodies, stored.parameters),
        sheets["F"].left[is_less], others, inner, first,
        *_apart(sheets, int(is_less)),
    )  # fmt: skip


def held_of_entry(stored: Stored, sheets: Mapping[str, Sheet]) -> dict[str, float]:
    """The part of some fields of `Held` that belongs to what comes before the equal layers."""
    own = sum(size for name, size in stored.parameters.items() if name in stored.first)
    gradients = sum(size for name, size in stored.gradients.items() if name in stored.first)
    plain = _read(stored, [sheet for kind, sheet in sheets.items() if kind in "FBIW"], stored.entry)
    copies = sheets["P"].left[2] if "P" in sheets else 0.0
    return {
        "parameters": own, "gradients": gradients, "states": MOMENTS * own, "copies": copies, "plain": plain,
        "saved": sheets["F"].left[2], **dict(zip(("late", "made"), _apart(sheets, 2), strict=True)),
    }  # fmt: skip


def _apart(sheets: Mapping[str, Sheet], place: int) -> tuple[float, float]:
    """`Held.late` and `Held.made`. place: in `Sheet.left`."""
    if "W" not in sheets:
        return 0.0, 0.0
    made = sheets["I"].left[place]
    return sheets["W"].left[place] - made, made


def _read(stored: Stored, sheets: Iterable[Sheet], names: Collection[str]) -> float:
    """Bytes of those of some parameters that graphs read."""
    read = frozenset[str]().union(*(sheet.reads for sheet in sheets))
    return sum(size for name, size in stored.parameters.items() if name in read and name in names)


def _entry(program: Program, rest: Rest) -> tuple[list[str], list[str]]:
    """The parameters that the forward pass reads before the first of the equal layers, and those of them that nothing
    else in it reads."""
    place = {node: i for i, node in enumerate(program.calls())}
    first = min((i for node, i in place.items() if rest.first and rest.layer(node) == rest.first), default=0)
    found: tuple[list[str], list[str]] = [], []
    for node, entry in program.parameters():
        readers = [reader for user in node.users for reader in ([user] if user.target is not CAST else user.users)]
        places = [place[reader] for reader in readers if reader in place and not record(reader).is_backward]
        for names, reader_at in zip(found, (min, max), strict=True):
            if places and reader_at(places) < first:
                names.append(entry.name)
    return found
