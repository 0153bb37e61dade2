"""What does the forward pass keep in the host's memory, and when is it copied there and back?"""

from __future__ import annotations

from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes.offload.choose_moves import choose, kept_of
from autopar.passes.offload.moves import Line, Moves, Ways, first_uses

__all__ = ["offload", "ways_of"]


def offload(program: Program, plan: Plan) -> Program:
    """LOCAL -> LOCAL. What the forward pass keeps is copied into the host's memory, and back before it is read again.

        TODO
    """
    if not plan.offloads("activations"):
        return program
    line = Line(program, ways_of(plan))
    kept = kept_of(line)
    chosen = set(choose(kept, plan.options))
    values = [node for node in line.nodes if node.name in chosen]
    notes = (*program.notes, kept.note(chosen, plan.options)) if kept.total else program.notes
    if not values:
        return program.with_(notes=notes)
    begin = line.begins_back
    starts = line.starts_back(first_uses(line, values), begin)
    return Moves(line, line.ends_out(values, begin), starts).run().with_(notes=notes)


def ways_of(plan: Plan) -> Ways:
    """How a plan places copies."""
    return Ways(plan.options.horizon, plan.fixed.machine)
