"""Which steps of a loop over positions, all in the trace, become one op for each line of the loop?"""

from __future__ import annotations

import math

from autopar.ir.plan import Plan
from autopar.ir.program import Program, record
from autopar.passes.reroll.choose_loops import choose
from autopar.passes.reroll.families import Families
from autopar.passes.reroll.lstm import with_chains
from autopar.passes.reroll.reading import Reading, piece_of
from autopar.passes.reroll.write_loops import FamilyWriter
from autopar.passes.rules import table_of
from autopar.passes.search.intents import context_axes

__all__ = ["reroll"]

SHORTEST = 4  # steps of a loop


def reroll(program: Program, plan: Plan) -> Program:
    """CAPTURED -> CAPTURED. Where cp splits a sequence, what a loop over its positions does is done for all at once.

        mesh: cp=2
        CAPTURED program
        %x: f32[2,4,3] = batch "0"
        %w: f32[3] = parameter "w"
        %row_0: f32[2,3] = aten.select.int(%x, 1, 0)
        %row_1: f32[2,3] = aten.select.int(%x, 1, 1)
        %row_2: f32[2,3] = aten.select.int(%x, 1, 2)
        %row_3: f32[2,3] = aten.select.int(%x, 1, 3)
        %mul_1: f32[2,3] = aten.mul.Tensor(%row_0, %w)
        %add_1: f32[2,3] = aten.add.Tensor(%mul_1, %row_1)
        %mul_2: f32[2,3] = aten.mul.Tensor(%add_1, %w)
        %add_2: f32[2,3] = aten.add.Tensor(%mul_2, %row_2)
        %mul_3: f32[2,3] = aten.mul.Tensor(%add_2, %w)
        %add_3: f32[2,3] = aten.add.Tensor(%mul_3, %row_3)
        %stack: f32[2,4,3] = aten.stack.default([%row_0, %add_1, %add_2, %add_3], 1)
        return value "h" = %stack
    becomes
        CAPTURED program
        %x: f32[2,4,3] = batch "0"
        %w: f32[3] = parameter "w"
        %steps: f32[4,2,3] = aten.permute.default(%x, [1, 0, 2])
        %mul: f32[4,2,3] = aten.mul.Tensor(%steps, %w)
        %repeated: f32[4,2,3] = aten.expand.default(%w, [4, 2, 3])
        %state: f32[4,2,3] = autopar.linear_scan.default(%repeated, %mul, None, 0, False)
        %pad_rows: f32[4,2,3] = autopar.pad_rows.default(%state, 0, 1, -1)
        %add: f32[4,2,3] = aten.add.Tensor(%pad_rows, %steps)
        %stack: f32[2,4,3] = aten.permute.default(%add, [1, 0, 2])
        return value "h" = %stack

    Python writes each step of a loop anew, and autograd each step of its gradient. Nodes that do the same in all steps
    are a family, which is one op with the step as its dim 0, if it has such a form (`step_forms.py`). A state that is
    carried from step to step is a `linear_scan` if it is h[t] = a[t] h[t-1] + b[t], element by element (selective state
    spaces: arXiv 2312.00752; parallel scans of them: Blelloch 1990); so is its gradient, from the end. What is
    added up over the steps, as gradients of weights are, is a sum over that dim. The first and the last step may read
    other values. A state of another kind (an LSTM's, a maximum) is a `chain`: one call with the text of its step, of
    which ranks take turns. What neither is keeps its steps, and what reads them alone is stacked.
    """
    size = math.prod(size for _, size in context_axes(plan.mesh))
    program = with_chains(program)
    lengths = _lengths(program, size)
    if size == 1 or not lengths or not _has_rows(program, lengths):
        return program
    families = Families(Reading(program, lengths))
    chosen = choose(families, table_of(plan))
    return FamilyWriter(chosen).run() if chosen.is_worth_it else program


def _lengths(program: Program, size: int) -> set[int]:
    """The lengths of the batch's dims but the first, which the axis divides."""
    shapes = [record(node).type.shape for node, entry in program.entries if entry.kind == "batch"]
    return {length for shape in shapes for length in shape[1:] if length >= SHORTEST and length % size == 0}


def _has_rows(program: Program, lengths: set[int]) -> bool:
    """Whether as many rows are taken one by one as a sequence is long."""
    count = sum((piece := piece_of(node)) is not None and piece.length in lengths for node in program.calls())
    return count >= min(lengths) - 2
