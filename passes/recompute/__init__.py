"""What does the forward pass keep for the backward pass, and what does the backward pass compute again?"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from autopar.ir.ops.storage import kept_values, root_of
from autopar.ir.options import STAGE, STAGE_AND_LAYERS, Recompute
from autopar.ir.plan import Plan
from autopar.ir.program import Program, given_of, is_gathered_input, record
from autopar.passes.costs.node_costs import local_bytes
from autopar.passes.recompute.choose import choose
from autopar.passes.recompute.graph import is_backward
from autopar.passes.recompute.policies import Policies, policies_of
from autopar.passes.recompute.rematerialize import GroupOf, RecomputedCall, rematerialize
from autopar.passes.recompute.stage_inputs import from_stage_inputs

__all__ = ["recompute"]


def recompute(program: Program, plan: Plan) -> Program:
    """LOCAL -> LOCAL. The backward pass computes again what `plan.options.recompute` says, and the rest is kept.

        recompute: "full"
        LOCAL program
        %w: f32[8,4] [-,-] = parameter "layers.0.up.weight"
        %x: f32[6,4] [-,-] = batch "0"
        %einsum: f32[6,8] [-,-] = autopar.einsum.default(%x, %w, "ca,ba->cb")   # layers.0.up
        %gelu: f32[6,8] [-,-] = aten.gelu.default(%einsum)   # layers.0
        %sum_1: f32[] [] = aten.sum.default(%gelu)
        %einsum_1: f32[8,4] [-,-] = autopar.einsum.default(%gelu, %x, "cb,ca->ba")   # layers.0.up  backward
        return loss "loss" = %sum_1
        return gradient "layers.0.up.weight" = %einsum_1
    becomes
        LOCAL program
        %w: f32[8,4] [-,-] = parameter "layers.0.up.weight"
        %x: f32[6,4] [-,-] = batch "0"
        %einsum: f32[6,8] [-,-] = autopar.einsum.default(%x, %w, "ca,ba->cb")
        %gelu: f32[6,8] [-,-] = aten.gelu.default(%einsum)
        %sum_1: f32[] [] = aten.sum.default(%gelu)
        %einsum_recomputed: f32[6,8] [-,-] = autopar.einsum.default(%x, %w, "ca,ba->cb")
        %gelu_recomputed: f32[6,8] [-,-] = aten.gelu.default(%einsum_recomputed)
        %einsum_1: f32[8,4] [-,-] = autopar.einsum.default(%gelu_recomputed, %x, "cb,ca->ba")
        return loss "loss" = %sum_1
        return gradient "layers.0.up.weight" = %einsum_1

    - "none": the program as it is.
    - "full": of a layer (a member of a list of modules) only what enters it is kept, as by torch.utils.checkpoint
      around each layer; products and collectives are computed again with the rest.
    - "selective" (arXiv 2205.05198, section 5): the attention core, where a layer has it written out. In other layers
      attention is one op that keeps no core, and all is computed again that is neither product nor collective.
    - a number: as many bytes of a rank, or such a part of what "none" keeps, may be kept; what is computed again for
      it takes the least time, and is neither product nor collective. With micro-batches these are the bytes of one
      of them, with a pipeline those of all stages.
    - those by pattern of modules; the first pattern that fits a module is its own.
    - "stage": of a micro-batch only what enters its stage is kept between the passes (`stage_inputs.py`); its backward
      pass begins with its forward pass. "stage+full": that one keeps what enters each layer, as under "full".

    A number and "selective" keep the rows of a table that would be gathered, or loaded from the host, once more for it.
    Random ops are functions of their key and of the seed, so clones draw the same masks. Raises PlanError for a
    pattern that no module has, and for a budget that cannot be met.
    """
    wanted = plan.options.recompute
    if wanted == "none" or not any(map(is_backward, program.nodes)):
        return program
    if wanted == STAGE:
        return from_stage_inputs(program, plan)
    if wanted == STAGE_AND_LAYERS:
        return from_stage_inputs(_by_modules(program, plan, "full"), plan)
    return _by_modules(program, plan, wanted)


def _by_modules(program: Program, plan: Plan, wanted: Recompute) -> Program:
    """Compute again what the policies of modules say."""
    policies = policies_of(program, wanted)
    recomputed = choose(program, plan, policies, lambda: _bytes_of_full(program, plan))
    recomputed |= _gathered(program, plan, recomputed) if plan.gathers_again else {}
    return rematerialize(program, recomputed, _group_of(policies)) if recomputed else program


def _group_of(policies: Policies) -> GroupOf:
    """The modules that are computed again together with the one of a backward node."""
    return lambda node: policies.group(record(node).module) if is_backward(node) else None


def _gathered(
    program: Program, plan: Plan, recomputed: Mapping[fx.Node, RecomputedCall]
) -> dict[fx.Node, RecomputedCall]:
    """The inputs that what is computed again reads, where each use gathers them anew (ZeRO-3)."""
    names = {node: entry.name for node, entry in program.entries}
    groups: dict[fx.Node, set[str]] = {}
    for node, found in recomputed.items():
        for root in map(root_of, node.all_input_nodes):
            if is_gathered_input(root) and plan.is_gathered_again(names[given_of(root)]):
                groups.setdefault(root, set()).add(found.group)
    return {
        root: RecomputedCall(next(iter(names)), "gathered again: ZeRO-3 keeps no parameter whole")
        for root, names in groups.items()
        if len(names) == 1
    }


def _bytes_of_full(program: Program, plan: Plan) -> int:
    policies: Policies = policies_of(program, "full")
    found = rematerialize(program, choose(program, plan, policies, int), _group_of(policies))
    return sum(local_bytes(value, found.mesh) for value in kept_values(found))
