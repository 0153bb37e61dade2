"""The bytes that a rank holds of a step, read off its programs: parameters, gradients, states, activations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from autopar.ir.ops.measure import local_bytes
from autopar.ir.program import CAST, Program, record
from autopar.planning.shallow.depth import Rest
from autopar.planning.shallow.sheet import Peaks, Sheet

MIDDLE = "M"  # the action between the passes, of a model whose backward passes wait for all forward passes
MOMENTS = 2  # of AdamW, in the dtype of the parameter


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes. copies: of what is made of parameters once a step (casts). plain: of parameters that are read as they are.
    saved: of one micro-batch, from its forward to its backward pass. behind, inner, first, joined, tied: as of `Peaks`,
    of what is alive beside all of that. terms: of gradients of tied parameters, that a stage behind the layers adds up,
    which keeps none of these; lent: of what both ends read of them as they are. late: what of `saved` the gradients of
    weights wait for, made: what those of inputs leave to them, where they are computed apart. between: what is alive
    at most between the forward and the backward passes, of what is computed there once; read: what backward passes read
    of that. frozen, frozen_copies, frozen_plain: the part of `parameters`, `copies` and `plain` that belongs to
    parameters which are not trained."""

    parameters: float
    gradients: float
    states: float
    copies: float
    plain: float
    saved: float
    behind: float
    inner: float
    first: float
    joined: float
    tied: float
    terms: float
    lent: float
    late: float
    made: float
    between: float
    read: float
    frozen: float
    frozen_copies: float
    frozen_plain: float


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes of a program's parameters and of their gradients, by name. first: the names of those that the forward pass
    reads before the equal layers, where the compiler keeps them (`_owners` of pipeline/stages.py); entry: of those that
    it reads nowhere else as they are (a head reads a cast of the table of embeddings). tied: of those of `first` that
    it reads behind the layers too. casts: bytes of what is made of those that are not trained."""

    parameters: Mapping[str, int]
    gradients: Mapping[str, int]
    first: frozenset[str]
    entry: frozenset[str]
    tied: frozenset[str]
    casts: Mapping[str, int]

    @classmethod
    def of(cls, program: Program, rest: Rest) -> tuple[Stored, Stored]:
        """Count what a LOCAL program stores, as it would with all of its equal layers, and without the one left out."""
        mesh, readers, (first, last) = program.mesh, _readers(program), _ends(program, rest)
        stored = {entry.name: local_bytes(node, mesh) for node, entry in program.parameters()}
        leaving = ((node, out) for node, out in program.leaving if out.kind == "gradient" and node is not None)
        gradients = {out.name: local_bytes(node, mesh) for node, out in leaving}
        casts = {
            source.name: sum(local_bytes(user, mesh) for user in node.users if user.target is CAST)
            for node, source in program.parameters()
            if source.name not in gradients
        }
        own = [name for name, read in readers.items() if min(read.all) < first]
        entry = [name for name, read in readers.items() if read.direct and max(read.direct) < first]
        tied = [name for name in own if max(readers[name].all) > last]
        read = {
            kind: frozenset(one for name in each for one in rest.names(name))
            for kind, each in (("first", own), ("entry", entry), ("tied", tied))
        }

        def counted(bytes_: Mapping[str, int], counts: Callable[[str], bool]) -> dict[str, int]:
            return {one: size for name, size in bytes_.items() if counts(name) for one in rest.names(name)}

        whole, less = (
            cls(counted(stored, counts), counted(gradients, counts), casts=counted(casts, counts), **read)
            for counts in (bool, rest.has)
        )
        return whole, less

    @property
    def frozen(self) -> frozenset[str]:
        """Parameters that are not trained."""
        return frozenset(self.parameters.keys() - self.gradients.keys())

    def states(self, names: Collection[str]) -> float:
        """Bytes of an optimizer's states of some parameters."""
        return MOMENTS * sum(self.parameters[name] for name in self.gradients if name in names)


def held(stored: Stored, sheets: Mapping[str, Sheet], is_less: bool) -> Held:
    """With one micro-batch under way. sheets: of a rank's actions, by kind. is_less: without the layer that may be left
    out, as `stored` is then too."""
    bodies = [sheet for kind, sheet in sheets.items() if kind in "FBIW"]
    peaks = [each.peaks(is_less) for each in bodies]
    peak = {name: max(getattr(each, name) for each in peaks) for name in Peaks.__slots__}
    late, made = _apart(sheets, int(is_less))
    middle = sheets.get(MIDDLE)
    read = middle.left[is_less] if middle else 0.0
    return Held(
        parameters=sum(stored.parameters.values()), gradients=sum(stored.gradients.values()),
        states=stored.states(stored.parameters),
        copies=sheets["P"].left[is_less] if "P" in sheets else 0.0, plain=_read(stored, bodies, stored.parameters),
        saved=sheets["F"].left[is_less], terms=sum(stored.gradients.get(name, 0) for name in stored.tied),
        lent=_read(stored, bodies, stored.tied - stored.entry), late=late, made=made,
        between=middle.most(is_less) + read if middle else 0.0, read=read,
        **_frozen(stored, bodies, stored.parameters, stored.parameters), **peak,
    )  # fmt: skip


def held_of_entry(stored: Stored, sheets: Mapping[str, Sheet]) -> dict[str, float]:
    """The part of some fields of `Held` that belongs to what comes before the equal layers."""
    own = sum(size for name, size in stored.parameters.items() if name in stored.first)
    gradients = sum(size for name, size in stored.gradients.items() if name in stored.first)
    bodies = [sheet for kind, sheet in sheets.items() if kind in "FBIW"]
    plain = _read(stored, bodies, stored.entry)
    copies = sheets["P"].left[2] if "P" in sheets else 0.0
    late, made = _apart(sheets, 2)
    return {
        "parameters": own, "gradients": gradients, "states": stored.states(stored.first), "copies": copies,
        "plain": plain, "saved": sheets["F"].left[2], "late": late, "made": made,
        **_frozen(stored, bodies, stored.first, stored.entry),
    }  # fmt: skip


def _frozen(
    stored: Stored, bodies: Iterable[Sheet], owned: Collection[str], direct: Collection[str]
) -> dict[str, float]:
    """The fields of `Held` for parameters that are not trained. owned, direct: the names of those that count, and of
    those that are read as they are."""
    names = stored.frozen.intersection(owned)
    return {
        "frozen": float(sum(stored.parameters[name] for name in names)),
        "frozen_copies": float(sum(stored.casts[name] for name in names)),
        "frozen_plain": float(_read(stored, bodies, stored.frozen.intersection(direct))),
    }


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


@dataclass(frozen=True, slots=True)
class _Readers:
    """The places of the forward calls that read a parameter: as it is, and a cast of it."""

    direct: list[int]
    casts: list[int]

    @property
    def all(self) -> list[int]:
        return self.direct + self.casts


def _readers(program: Program) -> dict[str, _Readers]:
    """Find the readers of each parameter that the forward pass reads, by name."""
    place = {node: i for i, node in enumerate(program.calls()) if not record(node).is_backward}
    readers: dict[str, _Readers] = {}
    for node, entry in program.parameters():
        casts = [reader for user in node.users if user.target is CAST for reader in user.users]
        direct = [user for user in node.users if user.target is not CAST]
        read = _Readers(*([place[user] for user in users if user in place] for users in (direct, casts)))
        if read.all:
            readers[entry.name] = read
    return readers


def _ends(program: Program, rest: Rest) -> tuple[int, int]:
    """The places of the first and of the last call of the equal layers, in the forward pass."""
    calls = enumerate(program.calls())
    inside = [i for i, node in calls if rest.first and rest.is_equal(node) and not record(node).is_backward]
    return (inside[0], inside[-1]) if inside else (0, 0)
