"""What does the forward pass keep in the host's memory, and when is it copied there and back?"""

from __future__ import annotations

from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes.offload.choose_moves import choose, kept_of
from autopar.passes.offload.place_copies import CallLine, Moves, Ways, first_uses

__all__ = ["offload", "ways_of"]


def offload(program: Program, plan: Plan) -> Program:
    """LOCAL -> LOCAL. What the forward pass keeps is copied into the host's memory, and back before it is read again.

        offload: "activations"
        horizon: 1
        LOCAL program
        %x: f32[16,16] [-,-] = batch "0"
        %exp: f32[16,16] [-,-] = aten.exp.default(%x)   # layers.0
        %sin: f32[16,16] [-,-] = aten.sin.default(%exp)   # layers.1
        %cos: f32[16,16] [-,-] = aten.cos.default(%sin)   # layers.2
        %sum_1: f32[] [] = aten.sum.default(%cos)   # layers.2
        %mul: f32[16,16] [-,-] = aten.mul.Tensor(%cos, %sin)   # layers.2  backward
        %mul_1: f32[16,16] [-,-] = aten.mul.Tensor(%mul, %exp)   # layers.1  backward
        return loss "loss" = %sum_1
        return value "y" = %mul_1
    becomes
        LOCAL program
        note: offload: 1.02 kB of 3.07 kB kept wait in the host's memory (2.05 kB of what is read again at once stay)
        %x: f32[16,16] [-,-] = batch "0"
        %exp: f32[16,16] [-,-] = aten.exp.default(%x)
        %exp_out: f32[16,16] [-,-] in host = autopar.to_host_start.default(%exp)
        %sin: f32[16,16] [-,-] = aten.sin.default(%exp)
        %exp_host: f32[16,16] [-,-] in host = autopar.wait.default(%exp_out)
        %cos: f32[16,16] [-,-] = aten.cos.default(%sin)
        %sum_1: f32[] [] = aten.sum.default(%cos)
        %exp_load: f32[16,16] [-,-] = autopar.to_device_start.default(%exp_host)
        %mul: f32[16,16] [-,-] = aten.mul.Tensor(%cos, %sin)
        %exp_back: f32[16,16] [-,-] = autopar.wait.default(%exp_load)
        %mul_1: f32[16,16] [-,-] = aten.mul.Tensor(%mul, %exp_back)
        return loss "loss" = %sum_1
        return value "y" = %mul_1

    - A copy out starts where its value is made, and is awaited when it is done: a layer later at the latest, and not
      before the forward pass reads the value for the last time. There the device's memory is free.
    - A copy back starts `horizon` layers before the layer that reads it ("auto": as late as hides it, by the speed of
      the link in the machine's file, two layers ahead at most). Views of a value are made again of what came back.
    - What would be read again as soon as it is away stays, as do values of other memory (see `why_not`).

    The idea is vDNN's (arXiv 1602.08124); stages of a pipeline: `offload_stages.py`.
    """
    if not plan.offloads("activations"):
        return program
    line = CallLine(program, ways_of(plan))
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
