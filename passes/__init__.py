"""What happens to a program? The passes, in the order in which it goes through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.ir.check.check_levels import verify
from autopar.ir.plan import Plan
from autopar.ir.program import Level, Program
from autopar.passes.chunked_loss.chunk_loss import chunk_loss
from autopar.passes.collectives.check_rules import check_rules
from autopar.passes.collectives.partition import partition
from autopar.passes.collectives.reshard import reshard
from autopar.passes.collectives.ring import ring
from autopar.passes.collectives.send_tokens import send_tokens
from autopar.passes.collectives.zero import zero
from autopar.passes.fuse import fuse
from autopar.passes.groups import group
from autopar.passes.lengths.convolution_windows import windows
from autopar.passes.lengths.lengthen import lengthen
from autopar.passes.lengths.reslice import reslice
from autopar.passes.lengths.scans import scans
from autopar.passes.lengths.shifts import shifts
from autopar.passes.lengths.unslice import unslice
from autopar.passes.masks.causal_masks import causal_masks
from autopar.passes.masks.compare_masks import compare_masks
from autopar.passes.masks.rowwise import rowwise
from autopar.passes.offload import offload
from autopar.passes.offload.host_parameters import host_parameters
from autopar.passes.overlap.beside_rows import beside_rows
from autopar.passes.overlap.bucket import bucket
from autopar.passes.overlap.decompose import decompose
from autopar.passes.overlap.overlap import overlap
from autopar.passes.overlap.prefetch import prefetch
from autopar.passes.pipeline import make_pipeline
from autopar.passes.precision import precision
from autopar.passes.precision.gradient_terms import check_sums
from autopar.passes.recompute import recompute
from autopar.passes.recompute.own_views import own_views
from autopar.passes.reroll import reroll
from autopar.passes.search.propagate import propagate
from autopar.passes.sorts.expert_loops import expert_loops
from autopar.passes.sorts.expert_tables import expert_tables
from autopar.passes.sorts.unsort import unsort

Pass = Callable[[Program, Plan], Program]

PASSES: tuple[tuple[Pass, Level], ...] = (
    (group, Level.CAPTURED),  # norms take the samples of a rank or a micro-batch together, where that is asked for
    (unsort, Level.CAPTURED),  # rows sorted by expert stay in their own order
    (expert_loops, Level.CAPTURED),  # a loop over experts takes the rows of all at once, for them to be split
    (expert_tables, Level.CAPTURED),  # what rows look up by their expert is split as experts are
    (rowwise, Level.CAPTURED),  # what a row looks up in itself is split with it
    (windows, Level.CAPTURED),  # convolutions along a sequence take in the pads and slices beside them
    (shifts, Level.CAPTURED),  # a sequence that is moved by some rows is one op
    (scans, Level.CAPTURED),  # a running sum is one op, and so is its gradient
    (reroll, Level.CAPTURED),  # a loop over positions, of which the trace has every step, is one op for each line
    (reslice, Level.CAPTURED),  # rows of a sequence are taken by slices, however the model spells it
    (unslice, Level.CAPTURED),  # a slice of a sequence that cp splits is the whole with rows that weigh nothing
    (compare_masks, Level.CAPTURED),  # a mask that compares vectors is known by them, not by its elements
    (causal_masks, Level.CAPTURED),  # with slices: a mask that hides what lies behind each query is causal
    (lengthen, Level.CAPTURED),  # a sequence with a class token gets rows until cp divides it
    (precision, Level.CAPTURED),  # products in a short float, with casts around them
    (propagate, Level.SHARDED),  # every value gets a layout
    (own_views, Level.SHARDED),  # of a parameter that is gathered for each pass, so that none is kept
    (zero, Level.SHARDED),  # parameters lie split over the data axes
    (reshard, Level.EXPLICIT),  # layout differences become collectives
    (send_tokens, Level.EXPLICIT),  # a token goes once to a rank that has several of its experts
    (chunk_loss, Level.EXPLICIT),  # logits are computed some tokens at a time
    (partition, Level.LOCAL),  # global shapes become one rank's
    (ring, Level.LOCAL),  # keys and values of other ranks go round under the products of attention
    (recompute, Level.LOCAL),  # what the backward pass computes again, it need not keep
    (beside_rows, Level.LOCAL),  # what stands beside experts is computed while rows go to them
    (offload, Level.LOCAL),  # what is kept for the backward pass waits in the host's memory
    (prefetch, Level.LOCAL),  # parameters are gathered a layer ahead
    (overlap, Level.LOCAL),  # other collectives start early, with gradients of weights under them
    (decompose, Level.LOCAL),  # a product beside a collective that nothing hides is computed in chunks
    (bucket, Level.LOCAL),  # gradients are reduced in buckets, under the backward pass
    (host_parameters, Level.LOCAL),  # parameters wait in the host's memory, and gradients go there
    (fuse, Level.LOCAL),  # calls between products and collectives become groups, each a kernel
)
OF_GRAPHS: frozenset[Pass] = frozenset({offload, prefetch, overlap, decompose, bucket, host_parameters, fuse})

__all__ = ["PASSES", "Pass", "make_pipeline", "run_passes"]


def run_passes(
    program: Program, plan: Plan, begun: Sequence[tuple[str, Program]] = (), is_verified: bool = True
) -> tuple[tuple[str, Program], ...]:
    """The program after each pass, by its name, from "capture" on. What a pass made is verified at its level. begun:
    the history up to a program that went through some passes already. is_verified: False of programs that costs are
    read off and that nothing runs: what a plan chooses is compiled anew."""
    if not begun and is_verified:
        verify(program, Level.CAPTURED)
    history = list(begun) or [("capture", program)]
    for step, level in PASSES[len(history) - 1 :]:
        if step in OF_GRAPHS and plan.is_staged:
            continue  # they come after the cut
        before, program = program, step(program, plan)
        is_new = program is not before or program.level != level  # else there was nothing to do
        if is_new and is_verified:
            verify(program, level)
            if level == Level.SHARDED:
                check_rules(program, plan)
            if level == Level.EXPLICIT:
                check_sums(program, plan)
        history.append((step.__name__, program))
    return tuple(history)
