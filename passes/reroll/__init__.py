"""reroll: a loop over positions, of which the trace has every step, is one op for each of its lines."""

from __future__ import annotations

import math

from autopar.ir.plan import Plan
from autopar.ir.program import Program, record
from autopar.passes.reroll.choose import choose
from autopar.passes.reroll.families import Families
from autopar.passes.reroll.reading import Reading, piece_of
from autopar.passes.reroll.write import Writer
from autopar.passes.rules import table_of
from autopar.passes.search.intents import context_axes

__all__ = ["reroll"]

SHORTEST = 4  # steps of a loop


def reroll(program: Program, plan: Plan) -> Program:
    """CAPTURED -> CAPTURED. Where cp splits a sequence, what a loop over its positions does is done for all at once."""
    size = math.prod(size for _, size in context_axes(plan.mesh))
    lengths = _lengths(program, size)
    if size == 1 or not lengths or not _has_rows(program, lengths):
        return program
    families = Families(Reading(program, lengths))
    chosen = choose(families, table_of(plan))
    return Writer(chosen).run() if chosen.is_worth_it else program


def _lengths(program: Program, size: int) -> set[int]:
    """The lengths of the batch's dims but the first, which the axis divides."""
    shapes = [record(node).type.shape for node, entry in program.entries if entry.kind == "batch"]
    return {length for shape in shapes for length in shape[1:] if length >= SHORTEST and length % size == 0}


def _has_rows(program: Program, lengths: set[int]) -> bool:
    """Whether as many rows are taken one by one as a sequence is long."""
    count = sum((piece := piece_of(node)) is not None and piece.length in lengths for node in program.calls())
    return count >= min(lengths) - 2
