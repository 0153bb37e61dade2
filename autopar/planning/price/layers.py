"""What a micro-batch costs on a stage, as a number outside of the equal layers and one for each of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

from autopar.compiler.garbage import uncollected
from autopar.ir.mesh import PIPELINE, Mesh
from autopar.ir.ops.measure import group_of
from autopar.ir.options import StepOptions
from autopar.ir.program import Program, record
from autopar.machines import Machine
from autopar.planning.price.cost import Cost, Linear
from autopar.planning.price.step_time import products
from autopar.planning.shallow.captures import KEPT, LEAST_ROWS, Captures
from autopar.planning.shallow.depth import Rest
from autopar.planning.shallow.floor import Floor, rank_flops
from autopar.planning.shallow.sheets import Known, Sheets
from autopar.planning.space.candidates import Candidate
from autopar.planning.space.deal import Sections
from autopar.planning.space.micro import HIGH, Micros
from autopar.planning.space.split import Split

T = TypeVar("T")
Place = tuple[Split, tuple[int, ...]]  # of ranks with nothing between them, and how many of each axis share a node


class Layers:
    """The costs of micro-batches, read off programs of few layers: what a layer costs is what they cost less without
    it."""

    def __init__(self, captures: Captures, options: StepOptions, machine: Machine) -> None:
        self.micros = Micros(captures, options, machine)
        self._least: dict[tuple[Place, Split, int, float, bool], tuple[float, float, float]] = {}
        self._flops_again: dict[str, float] = {}
        self._places: dict[Split, Place] = {}
        self._known: dict[tuple[Place, int, str, bool], Cost] = {}
        self._sections: dict[tuple[Split, int, str, bool], Sections] = {}
        self._sheets: dict[tuple[Place, str, bool], dict[int, Sheets]] = {}  # by rows
        self._apart: set[Split] = set()  # whose sheets of the fewest and the most rows have none between them
        self._once: Known = {}
        self._made: dict[Hashable, Any] = {}

    @cached_property
    def equal(self) -> int:
        """The equal layers of the model; 0 if it has none."""
        return self.micros.captures.shallow().layers

    @property
    def first(self) -> str:
        """The path of the first of the equal layers; "" if there are none."""
        return self.micros.captures.shallow().border[0]

    @property
    def whole(self) -> Program:
        """The captured step of LEAST_ROWS rows."""
        return self.micros.captures.whole.program

    @cached_property
    def row_bytes(self) -> float:
        """Bytes of a row of the batch."""
        given = (node for node, entry in self.whole.entries if entry.kind == "batch")
        return sum(record(node).type.bytes_ for node in given) / LEAST_ROWS

    @cached_property
    def buffer_bytes(self) -> float:
        """Bytes of buffers and constants: each rank has all of them, whole."""
        given = (node for node, entry in self.whole.entries if entry.kind in ("buffer", "constant"))
        return float(sum(record(node).type.bytes_ for node in given))

    def products(self) -> tuple[float, float, str]:
        """The products of one row, known once there are layouts: their FLOPs, as the model asks for them; those that
        kernels compute at least; the dtype of most of them."""
        program = dict(self.micros.local(Split(), self.micros.low).history)["propagate"]
        counts, less = products(program, self._rest.times), products(program, self._rest.times_beside)
        asked = self._of_model(float(counts.total()), float(less.total())) / LEAST_ROWS
        least = self._of_model(*self._rank_flops(program)) / LEAST_ROWS
        return asked, least, max(counts, key=lambda name: counts[name], default="float32")

    def cost(self, split: Split, rows: int, recompute: str, halves: bool = False, more: str = "") -> Cost:
        """Price a micro-batch of `rows` on the ranks of tp, cp and ulysses (`Micros.micro`). Where they lie changes
        times alone, and what is done to hide collectives, not the layouts. more: the policy of the layers that compute
        more again, if there are such. Raises AutoparError as `Micros.local`."""
        if more:
            return replace(self.cost(split, rows, recompute, halves), again=self.cost(split, rows, more, halves))
        key = self.place(split), rows, recompute, halves
        if key not in self._known:
            sheets = self.sheets(split, rows, recompute, halves)
            sheets = sheets.with_once(self._of_all_rows(split, recompute)) if split.batch else sheets
            self._known[key] = self._cost(sheets, self.micros.machine)
        return self._known[key]

    def _of_all_rows(self, split: Split, recompute: str) -> Sheets:
        """The programs of a step in which all pairs of rows meet, for what runs once in it."""

        def make() -> Sheets:
            micro = self.micros.between_passes(split.near, recompute)
            return Sheets.of(micro, self._rest, self._once).on(split.placed)

        return self.kept(("all rows", self.place(split), recompute), make)

    def ranks_of(self, candidate: Candidate) -> Split:
        """The ranks that divide the rows, the sequences and the weights of a candidate."""
        return candidate.ranks_of(self.micros.is_summed, self.micros.has_pairs)

    def still(self, split: Split, rows: int, recompute: str, halves: bool = False) -> float:
        """The part of its time that is left of each pass of such a micro-batch, at least, if what cp and ulysses move
        took none. Raises AutoparError as `Micros.local`."""
        key = "still", self.place(split), rows, recompute, halves
        return self.kept(key, lambda: self._still(split, rows, recompute, halves))

    def _still(self, split: Split, rows: int, recompute: str, halves: bool) -> float:
        own = self.cost(split, rows, recompute, halves)
        less = self._cost(self.sheets(split, rows, recompute, halves), self.micros.machine, is_still=True)
        lines = zip(less.inputs, own.inputs, strict=True)
        pairs = [pair for few, all_ in lines for pair in ((few(self.equal), all_(self.equal)), (few.each, all_.each))]
        return min(few / all_ for few, all_ in pairs if all_ > 0)

    @uncollected()
    def sheets(self, split: Split, rows: int, recompute: str, halves: bool = False) -> Sheets:
        """The programs of a micro-batch as numbers: those of other rows lie on a line between the nearest ones that
        were read off programs, where these are alike. Raises AutoparError as `Micros.local`."""
        split = split._replace(batch=0)
        made = self._sheets.setdefault((self.place(split), recompute, halves), {})
        if rows not in made:
            if self.micros.low < rows < HIGH and self.micros.is_alike(split.program):
                for end in (self.micros.low, HIGH) if split.program not in self._apart else ():
                    self.sheets(split, end, recompute, halves)
                between = _between(made, rows)
                if between is not None:
                    return between
                self._apart.add(split.program)
            micro = self.micros.micro(split.program, rows, recompute, halves)
            is_placed = split.around and split.data == 1  # ranks that divide rows are others than the program has
            between = Sheets.of(micro.placed(split.placed) if is_placed else micro, self._rest, self._once)
            made[rows] = between.on(split.placed) if split.data > 1 else between
        return made[rows]

    def notes(self, split: Split, rows: int) -> tuple[str, ...]:
        """What a person should know of the program of such a micro-batch, which recomputes nothing."""
        split = split.near
        is_alike = rows < HIGH and self.micros.is_alike(split)
        return self.micros.micro(split, self.micros.low if is_alike else rows, "none").program.notes

    def least_us(
        self, split: Split, of: Split, rows: int, share: float, is_still: bool = False
    ) -> tuple[float, float, float]:  # fmt: skip
        """us of the forward and of the backward pass of a micro-batch at least, and of the device in both. It is a
        share of one of so many rows, on the ranks `of` a split with fewer of cp (`Low.us`). Raises AutoparError as
        `Micros.local`."""
        key = self.place(split), of, rows, share, is_still
        if key not in self._least:
            floor = self.kept(("floor", of, rows), lambda: Floor.of(self.micros.micro(of, rows, "none"), self._rest))
            low = self.kept(("low", *key[1:]), lambda: floor.at(share, self._rising, is_still))
            self._least[key] = low.us(split.placed, self._of_model)
        return self._least[key]

    def flops_again(self, recompute: str) -> float:
        """The FLOPs of the products that are computed again of a row."""
        if recompute not in self._flops_again:
            self._flops_again[recompute] = self._flops(recompute) - self._flops("none")
        return self._flops_again[recompute]

    def _flops(self, recompute: str) -> float:
        """The FLOPs of the products of a row on one rank."""
        graphs = self.micros.micro(Split(), self.micros.low, recompute).graphs.values()
        whole, less = map(sum, zip(*map(self._rank_flops, graphs), strict=True))
        return self._of_model(whole, less) / self.micros.low

    def _rank_flops(self, program: Program) -> tuple[float, float]:
        """The FLOPs that a rank's products compute at least, and those without one of the equal layers."""
        return rank_flops(program, self._rest.times), rank_flops(program, self._rest.times_beside)

    @cached_property
    def _rising(self) -> Machine:
        return self.micros.machine.rising()

    def _of_model(self, whole: float, less: float) -> float:
        return self._line(whole, less)(self.equal)

    def part(self, cp: int) -> float:
        """The part of the products of a micro-batch that each of so many ranks of cp computes."""
        low = self.micros.low
        local = (self.micros.local(each, low).program for each in (Split(), Split(cp=cp)))
        whole, part = (rank_flops(program, self._rest.times) for program in local)
        return part / whole if whole else 1.0

    @cached_property
    def _rest(self) -> Rest:
        return Rest.of(self.micros.captures.shallow())

    def _cost(self, sheets: Sheets, machine: Machine, is_still: bool = False) -> Cost:
        whole, less, entry = sheets.costs(machine, self.equal > 0, is_still)
        lines = {name: self._line(whole[name], less[name], entry.get(name, 0.0)) for name in whole}
        return Cost(**lines, message=sheets.message, again=None)

    def _line(self, whole: float, less: float, entry: float = 0.0) -> Linear:
        return Linear.of(KEPT, whole, less, entry) if self.equal else Linear(whole, 0.0)

    def sections(self, split: Split, rows: int, recompute: str, mesh: Mesh, more: str = "") -> Sections:
        """The sections of so many rows: of few, what each call takes by itself weighs more. mesh: that says over which
        links stages send. more: the policy of the layers that compute more again, if there are such."""
        if more:
            own, again = (self.sections(split, rows, policy, mesh) for policy in (recompute, more))
            return replace(own, again=again.layer)
        key = split.near, rows, recompute, self._near(mesh)
        if key not in self._sections:
            micro = self.micros.micro(split.near, rows, recompute)
            self._sections[key] = Sections.of(micro, self._rest, self.micros.machine, mesh)
        return self._sections[key]

    def _near(self, mesh: Mesh) -> bool:
        return group_of(mesh, PIPELINE, self.micros.machine.ranks).nodes == 1

    def place(self, split: Split) -> Place:
        """What of a split decides times."""
        if split not in self._places:
            self._places[split] = split.near, split.inside(self.micros.machine.ranks)
        return self._places[split]

    def kept(self, key: Hashable, make: Callable[[], T]) -> T:
        """What was made of these costs before, by a key that says all that it follows from."""
        if key not in self._made:
            self._made[key] = make()
        kept: T = self._made[key]
        return kept


def _between(made: Mapping[int, Sheets], rows: int) -> Sheets | None:
    """The sheets of so many rows from the nearest ones of fewer and of more; None where that cannot be."""
    below, above = max((at for at in made if at < rows), default=0), min((at for at in made if at > rows), default=0)
    return made[below].between(made[above], (rows - below) / (above - below)) if below and above else None
