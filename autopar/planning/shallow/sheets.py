"""The programs of a micro-batch as numbers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from autopar.ir.mesh import Mesh, is_in_time
from autopar.machines import Machine
from autopar.planning.shallow.all_layers import with_all_layers
from autopar.planning.shallow.depth import Rest
from autopar.planning.shallow.events import Named
from autopar.planning.shallow.held_bytes import MIDDLE, Held, Stored, held, held_of_entry
from autopar.planning.shallow.sheet import Sheet, described
from autopar.planning.shallow.stage_graphs import LayerMessage, Micro
from autopar.runtime.executor.owned import own_results

ONCE = "CPE"  # actions that run once a step, before the passes or after them; MIDDLE runs between them
OF_KINDS = {"forward": "F", "backward": "BIW", "weights": "W"}  # fields of `Cost`, and the kinds of their graphs
SHARED = f"{ONCE}F"  # actions whose graphs are the same for several micro-batches
Costs = dict[str, float]  # by the names of `Cost`
Known = dict[Hashable, tuple[Sheet, Sheet]]  # by what is said of a graph


@dataclass(frozen=True, slots=True)
class Sheets:
    """The programs of a micro-batch as numbers. sheets: by kind of each graph when it is finished, and of what it is
    without one of the layers. stored: parameters, with that layer and without. message: that one equal layer hands
    on."""

    sheets: Mapping[str, tuple[Sheet, Sheet]]
    stored: tuple[Stored, Stored]
    message: LayerMessage

    @classmethod
    def of(cls, micro: Micro, rest: Rest, known: Known) -> Sheets:
        """rest: all but one of the equal layers. known: the sheets of graphs that several micro-batches have: of those
        that run once a step, mostly for all rows and however much is computed again; of forward passes, whether
        gradients of weights are computed apart or not."""
        sheets: dict[str, tuple[Sheet, Sheet]] = {}
        given, named = _given(micro), Named.of(micro, rest)
        for kind, graph in micro.graphs.items():
            key = (kind, micro.plan.mesh, *described(graph)) if kind in SHARED else None
            sheets[kind] = known.get(key) or _both(micro, kind, rest, named, given)
            if key is not None:
                known[key] = sheets[kind]
        return cls(sheets, Stored.of(micro.program, rest), micro.message)

    def on(self, mesh: Mesh) -> Sheets:
        """With the collectives over the groups of another mesh."""

        def moved(sheet: Sheet) -> Sheet:
            in_time = tuple(pair for pair in sheet.mesh.axes if is_in_time(pair[0]))
            return replace(sheet, mesh=Mesh((*in_time, *mesh.axes)))

        return replace(self, sheets={kind: (moved(all_), moved(less)) for kind, (all_, less) in self.sheets.items()})

    def with_once(self, other: Sheets) -> Sheets:
        """With what other programs do once a step, and between the passes."""
        own = {kind: pair for kind, pair in self.sheets.items() if kind not in (*ONCE, MIDDLE)}
        once = {kind: pair for kind, pair in other.sheets.items() if kind in (*ONCE, MIDDLE)}
        return replace(self, sheets={**own, **once})

    def between(self, other: Sheets, share: float) -> Sheets | None:
        """The sheets at a share of the way to others, 0 to 1; None where the graphs are not alike."""
        if self.sheets.keys() != other.sheets.keys():
            return None
        sheets: dict[str, tuple[Sheet, Sheet]] = {}
        for kind, low in self.sheets.items():
            high = other.sheets[kind]
            whole = low[0].between(high[0], share)
            is_one = low[0] is low[1] and high[0] is high[1]
            less = whole if is_one else low[1].between(high[1], share)
            if whole is None or less is None:
                return None
            sheets[kind] = whole, less
        return Sheets(sheets, self.stored, self.message.between(other.message, share))

    def costs(self, machine: Machine, has_less: bool, is_still: bool = False) -> tuple[Costs, Costs, Costs]:
        """What the programs cost: the whole, the same without one of the layers, and the part of some of these that
        belongs to what comes before the equal layers. has_less: False where no layer is left out. is_still: as of
        `Sheet.times`."""
        times = {kind: pair[0].times(machine, is_still) for kind, pair in self.sheets.items()}
        whole = self._cost(machine, times, is_less=False)
        if not has_less:
            return whole, whole, {}
        others = {kind: less.times(machine, is_still) for kind, (all_, less) in self.sheets.items() if less is not all_}
        return whole, self._cost(machine, {**times, **others}, is_less=True), self._entry(machine, times)

    def _cost(self, machine: Machine, times: Mapping[str, list[float]], is_less: bool) -> Costs:
        graphs = {kind: pair[is_less] for kind, pair in self.sheets.items()}
        spent = {kind: sheet.ran(times[kind], machine, is_less) for kind, sheet in graphs.items()}
        once = sum(ran.total for kind, ran in spent.items() if kind in ONCE)
        exposed = sum(sum(ran.exposed.values()) for kind, ran in spent.items() if kind not in (*ONCE, MIDDLE))
        kept = held(self.stored[is_less], graphs, is_less)
        found = {name: float(getattr(kept, name)) for name in Held.__slots__}
        for name, kinds in OF_KINDS.items():
            rans = [ran for kind, ran in spent.items() if kind in kinds]
            found[name] = sum(ran.total for ran in rans)
            found[f"{name}_busy"] = sum(ran.total - ran.hosted for ran in rans)
            found[f"{name}_launched"] = machine.launch_us * sum(ran.calls for ran in rans)
        sums = sum(graphs[kind].sums_us(times[kind]) for kind in graphs if kind in "BW")
        adding = "W" if "W" in graphs else "B"
        adds = graphs[adding].adds_us(times[adding], machine, is_less)
        middle = spent[MIDDLE].total if MIDDLE in spent else 0.0
        return {**found, "once": once, "middle": middle, "sums": sums, "exposed": exposed, "adds": adds}

    def _entry(self, machine: Machine, times: Mapping[str, list[float]]) -> Costs:
        whole = {kind: pair[False] for kind, pair in self.sheets.items()}
        held = held_of_entry(self.stored[False], whole)
        for name, kinds in OF_KINDS.items():
            own = {kind: sheet for kind, sheet in whole.items() if kind in kinds}
            busy = sum(sheet.entry_us(times[kind]) for kind, sheet in own.items())
            launched = machine.launch_us * sum(sheet.entry_calls for sheet in own.values())
            held[name] = busy + launched * machine.is_host
            held |= {f"{name}_busy": busy, f"{name}_launched": launched}
        adding = "W" if "W" in whole else "B"
        held["adds"] = whole[adding].adds_us(times[adding], machine, is_less=False, is_entry=True)
        return held


def _both(micro: Micro, kind: str, rest: Rest, named: Named, given: set[str]) -> tuple[Sheet, Sheet]:
    """The sheet of a graph, and of what it is without a layer: of what is done once a step, another graph."""
    graph = micro.graphs[kind]
    waited = {entry.name for entry in micro.graphs["W"].inputs} if kind == "I" else set()
    whole = with_all_layers(Sheet.of(kind, micro.finished(graph), rest, named, waited, given - waited), rest.others)
    shorter = rest.cut_out(graph) if kind in (*ONCE, MIDDLE) and rest.path else None
    if shorter is None:
        return whole, whole
    return whole, with_all_layers(Sheet.of(kind, micro.finished(shorter), rest, named), rest.others)


def _given(micro: Micro) -> set[str]:
    """What the last graph of a micro-batch that reads it may write over (`runtime/executor/owned.py`)."""
    made = (micro.graphs[each] for each in "FI" if each in micro.graphs)
    pairs = ((graph, own_results(graph.graph)) for graph in made)
    return {out.name for graph, own in pairs for node, out in graph.leaving if out.kind == "saved" and node in own}
