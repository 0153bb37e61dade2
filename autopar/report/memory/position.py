"""Where a simulated rank is in its step, and what its forward pass has left to the backward pass by then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from autopar.compiler.lowered import STEP, Lowered
from autopar.ir.mesh import PIPELINE
from autopar.ir.pipeline import graph_name
from autopar.ir.program import record
from autopar.ir.schedule import Span
from autopar.report.memory.track import StorageBlock, Tracker

OPTIMIZER, BETWEEN = "optimizer", "between graphs"


@dataclass(frozen=True, slots=True)
class RankPosition:
    """Where a rank is. graph: of its graphs; action: of a pipeline's; node: that it computes, None between them."""

    graph: str
    action: str = ""
    node: fx.Node | None = None


class Position:
    """Follows a rank and tells its tracker. saved: what a forward graph made and left alive."""

    def __init__(self, compiled: Lowered, coord: Mapping[str, int], tracker: Tracker) -> None:
        pipeline, self.tracker = compiled.pipeline, tracker
        self.saved: set[StorageBlock] = set()
        self.names: dict[fx.Graph, str] = {compiled.program.graph: STEP}
        self.actions: tuple[str, ...] = ()  # of a pipeline, in order
        if pipeline is not None:
            self.names = {one.program.graph: one.name for one in pipeline.every_graph()}
            self.actions = tuple(map(str, pipeline.lists[coord.get(PIPELINE, 0)]))
        self.action, self.line, self.begun, self.crossed = "", 0, 0, False

    def start(self) -> None:
        """A step begins."""
        self.crossed, self.line = bool(self.actions), 0
        self._begin()

    def enter(self, node: fx.Node) -> None:
        """A node is computed next."""
        if not self.crossed and record(node).is_backward:
            self.crossed = True
            self._save()
        self.tracker.place = RankPosition(self.names[node.graph], self.action, node)

    def ended(self, span: Span) -> None:
        """An instruction of a pipeline has ended: what a forward graph leaves is there for a backward one."""
        done = span.instruction
        turn = [done.action] if done.op == "RECV" else [run.action for run in done.runs]
        forward = [action for action in turn if action.kind == "F"]
        if forward:
            self._save("" if len(forward) == len(turn) else graph_name(forward[0].stage, "F"))
        self.line += 1
        self._begin()

    def _begin(self) -> None:
        self.begun = len(self.tracker.events)
        self.action = self.actions[self.line] if self.line < len(self.actions) else ""
        self.tracker.place = RankPosition(BETWEEN, self.action)

    def _save(self, graph: str = "") -> None:
        """Keep what was made here and is alive. graph: that made it; "" where all that ran is a forward pass."""
        born = (event.block for event in self.tracker.events[self.begun :])
        alive = (block for block in born if block.end is None and block.born >= self.begun)
        self.saved.update(block for block in alive if not graph or block.place.graph.startswith(graph))
