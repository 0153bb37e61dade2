"""The programs of all ranks in one process, as one side of `verify`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from autopar.capture import Captured
from autopar.capture.capture import state_of
from autopar.capture.data.casts import default_dtype
from autopar.capture.data.reads import check_reads
from autopar.capture.rows.row_draws import PlainDraws
from autopar.compiler.lowered import Lowered
from autopar.ir.layout import combine, replica_error
from autopar.ir.program import AS_PARAMETER, BESIDE, INPUT_GRADIENT, OLD_BUFFER, record
from autopar.parallel.tensors.padding import beginning
from autopar.runtime.executor.executor import Kernels, Outputs
from autopar.verification.borrowed import Borrowed
from autopar.verification.dtypes import dtype_of
from autopar.verification.judge.comparison import Values
from autopar.verification.places import Batches, Made, aux_at, meshes_of_place, places_of, seeds_of, with_means
from autopar.verification.plain import (
    SCALE,
    DrawsOf,
    OptimizerFactory,
    as_they_come,
    begin_with,
    draws_of,
    numbered,
    optimized,
)
from autopar.verification.versions import Versions
from autopar.verification.virtual_inputs import RankPrograms, Whole, whole_inputs

OF_A_PLACE = (*BESIDE, "guard")  # outputs that are not of all places together


class Virtual:
    """The programs of all ranks on a virtual mesh; the optimizer steps on the whole parameters, as on DTensors.
    kernels: of the programs' groups. others: the programs of the places behind the first one, where each place has a
    batch of its own. versions: all programs of the step, if draws or data decide which one runs."""

    def __init__(
        self, model: nn.Module, captured: Captured, compiled: Lowered, make: OptimizerFactory,
        kernels: Kernels | None = None, others: Sequence[Made] = (), versions: Versions | None = None,
    ) -> None:  # fmt: skip
        self.model, self.captured, self.compiled = model, captured, compiled
        self.programs: list[Made] = [(captured, compiled), *others]
        self.versions = versions or Versions([self.programs])
        self.optimizer = make(optimized(model))
        self.replicas: dict[tuple[str, str], float] = {}
        self.parameters, self.buffers = (
            {
                entry.name: tensor
                for entry, tensor in state_of(model, scratch=captured.constants).entries
                if entry.kind == kind
            }
            for kind in ("parameter", "buffer")
        )
        self.dtype, self.device = dtype_of(model), next(iter(self.parameters.values())).device
        self.kernels = kernels
        borrowed = Borrowed(captured.partners, self.dtype)
        self.partners, self.partner_kinds = borrowed.values, borrowed.kinds
        self._ready: dict[int, RankPrograms] = {}  # by their compiled programs, which these hold
        self._drew: dict[tuple[int, ...], DrawsOf] = {}  # how the steps so far drew, by their seeds

    def draws_of(self, seed: torch.Tensor) -> PlainDraws:
        """How the plain module draws in a step that was made with a seed."""
        return self._drew.get(tuple(seed.tolist()), as_they_come)(seed)

    def step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: torch.Tensor) -> Values:
        """What a step on a global batch gives."""
        return self.step_on(((args, kwargs),), seed)

    def step_on(self, batches: Batches, seed: torch.Tensor) -> Values:
        """What a step gives, on one batch or on one for each place."""
        values: Values = {}
        self.optimizer.zero_grad()
        self.versions.run(seed, lambda programs: self._take_programs(programs, batches, seed, values))
        self._update(values)
        return values

    def begin(self, values: Values) -> None:
        """Take the weights and buffers that a step gave in place of one's own."""
        begin_with(values, self.parameters, self.buffers)

    def _take_programs(self, programs: list[Made], batches: Batches, seed: torch.Tensor, values: Values) -> None:
        """Enter what a step gives with some programs into `values`. Raises OtherValues for a step that wants others."""
        values.clear()  # of programs that were not those of this step, and had gradients that these have not
        self.replicas.clear()
        self.programs, (self.captured, self.compiled) = programs, programs[0]
        program, plan = self.compiled.program, self.compiled.plan
        with default_dtype(self.dtype):  # a number and a bool add up to it
            outputs = self._run(self.compiled, batches, seed) if len(batches) == 1 else self._run_own(batches, seed)
        guards: list[torch.Tensor] = []
        layouts = record(program.graph.output_node()).operands
        shapes = {name: tensor.shape for name, tensor in (*self.parameters.items(), *self.partners.items())}
        for i, (out, layout) in enumerate(zip(program.outputs, layouts, strict=True)):
            if (out.kind in OF_A_PLACE and len(batches) > 1) or out.kind == OLD_BUFFER:  # which no module holds
                continue
            # the gradient of a parameter, and its new value, are on the ranks of one stage
            parts = [rank[i] for rank in outputs if rank[i] is not None]
            held = self.compiled.mesh if len(parts) == self.compiled.mesh.size else plan.mesh_of_stage
            if out.kind == "guard":
                guards.append(combine(parts, layout, held))
                continue
            whole_ = combine(parts, layout, held)
            values[out.kind, out.name] = beginning(whole_, shapes[out.name]) if out.kind in AS_PARAMETER else whole_
            self.replicas[out.kind, out.name] = replica_error(parts, layout, held)
            if out.kind in ("gradient", INPUT_GRADIENT) and any(entry.kind == "scale" for entry in program.inputs):
                values[out.kind, out.name] /= SCALE
        for place, (captured, _) in enumerate(programs):  # numbers that are the same in every step leave no program
            known = numbered(captured.result_leaves)
            values.update((key if len(batches) == 1 else aux_at(key, place), value) for key, value in known.items())
        counts = [guards[-1] if guards else None]  # of the rows of masks, at each place
        if len(batches) > 1:
            found, counts = self._of_places(outputs)
            values.update(found)
            guards = [torch.stack(rows).sum(0)] if (rows := [one for one in counts if one is not None]) else []
        else:
            check_reads(self.captured.reads, guards)
        for (captured, _), drawn, own in zip(self.programs, seeds_of(seed, len(batches)), counts, strict=True):
            self._drew[tuple(drawn.tolist())] = partial(draws_of, captured, rows=own)
        for name in self.captured.unused(guards):
            values.pop(("gradient", name), None)
        if self.captured.coins is not None:
            unused = [self.captured.coins.left_out(drawn) for drawn in seeds_of(seed, len(batches))]
            for name in frozenset.intersection(*unused):
                values.pop(("gradient", name), None)

    def _run(self, compiled: Lowered, batches: Batches, seed: torch.Tensor) -> list[Outputs]:
        """The outputs of every rank, None for those that other stages have."""
        seeds = seeds_of(seed, len(batches))
        every = [self.whole(*batch, drawn) for batch, drawn in zip(batches, seeds, strict=True)]
        ready = self._ready.get(id(compiled))
        if ready is None:
            ready = self._ready[id(compiled)] = RankPrograms(compiled, self.device, self.kernels)
        return ready.outputs(every)

    def _run_own(self, batches: Batches, seed: torch.Tensor) -> list[Outputs]:
        """The outputs of every rank, of the program and the batch of its place, with what all places have together."""
        by_rank = places_of(self.compiled.mesh)
        found: list[Outputs] = [()] * len(by_rank)
        for first, (_, compiled) in enumerate(self.programs):
            if found[by_rank.index(first)]:
                continue  # as an earlier place
            alike = [place for place, (_, other) in enumerate(self.programs) if other is compiled]
            # Ranks of other places, whose batches have other shapes, compute the first of these alike meanwhile.
            given = tuple(batches[place if place in alike else first] for place in range(len(batches)))
            for rank, outputs in enumerate(self._run(compiled, given, seed)):
                if by_rank[rank] in alike:
                    found[rank] = outputs
        return with_means(found, self.compiled, by_rank)

    def _of_places(self, outputs: Sequence[Outputs]) -> tuple[Values, list[torch.Tensor | None]]:
        """What comes beside the loss at each place, and what it counts last of the rows of masks; what the program of
        the place reads of its batch is checked."""
        values: Values = {}
        counts: list[torch.Tensor | None] = []
        by_rank = places_of(self.compiled.mesh)
        for place, (captured, compiled) in enumerate(self.programs):
            layouts = record(compiled.program.graph.output_node()).operands
            mesh, stage = meshes_of_place(compiled.mesh)
            last = None
            for i, (out, layout) in enumerate(zip(compiled.program.outputs, layouts, strict=True)):
                if out.kind not in OF_A_PLACE:
                    continue
                own = [rank[i] for rank, at in zip(outputs, by_rank, strict=True) if at == place]
                parts = [part for part in own if part is not None]
                held = mesh if len(parts) == mesh.size else stage
                if out.kind == "guard":
                    captured.reads[int(out.name)].check(last := combine(parts, layout, held))
                    continue
                key = aux_at((out.kind, out.name), place)
                values[key], self.replicas[key] = combine(parts, layout, held), replica_error(parts, layout, held)
            counts.append(last if captured.row_uses is not None else None)
        return values, counts

    def _update(self, values: Values) -> None:
        begin_with({key: value for key, value in values.items() if key[0] == "weight"}, self.parameters, {})
        for name, parameter in self.parameters.items():
            gradient = values.get(("gradient", name))
            parameter.grad = None if gradient is None else gradient.clone()  # an optimizer may clip it in place
        self.optimizer.step()
        for name, parameter in self.parameters.items():
            values["weight", name] = parameter.detach().clone()
        begin_with(values, {}, self.buffers)
        for name, tensor in self.buffers.items():
            values.setdefault(("buffer", name), tensor.clone())
        for name, kind in self.partner_kinds.items():
            self.partners[name] = values.setdefault((kind, name), self.partners[name]).clone()

    def whole(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: torch.Tensor) -> Whole:
        """The whole values of the inputs of a step."""
        tensors = {entry.name: tensor.detach() for entry, tensor in state_of(self.model).entries}
        return whole_inputs({**tensors, **self.partners, **self.captured.constants}, args, kwargs, seed)
