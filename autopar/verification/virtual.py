"""The programs of all ranks in one process, as one side of `verify`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import autopar.runtime.kernels  # noqa: F401  registers the kernels of our ops
from autopar.capture import Captured
from autopar.capture.capture import state_of
from autopar.capture.raising import default_dtype
from autopar.compiler.lowered import Lowered
from autopar.ir.layout import combine, replica_error
from autopar.ir.program import record
from autopar.parallel.padding import beginning
from autopar.runtime.executor import Executable, Kernels, Outputs
from autopar.runtime.pipeline import compile_rank, outputs_of
from autopar.runtime.virtual import VirtualMesh
from autopar.verification.borrowed import Borrowed
from autopar.verification.comparison import Values
from autopar.verification.dtypes import dtype_of
from autopar.verification.inputs import Whole, scattered, whole_inputs
from autopar.verification.reference import SCALE, OptimizerFactory, optimized


class Virtual:
    """The programs of all ranks on a virtual mesh; the optimizer steps on the whole parameters, as on DTensors.
    kernels: of the programs' groups."""

    def __init__(
        self, model: nn.Module, captured: Captured, compiled: Lowered, make: OptimizerFactory,
        kernels: Kernels | None = None,
    ) -> None:  # fmt: skip
        self.model, self.captured, self.compiled = model, captured, compiled
        self.optimizer = make(optimized(model))
        self.replicas: dict[tuple[str, str], float] = {}
        self.parameters, self.buffers = (
            {entry.name: tensor for entry, tensor in state_of(model).entries if entry.kind == kind}
            for kind in ("parameter", "buffer")
        )
        self.dtype, self.device = dtype_of(model), next(iter(self.parameters.values())).device
        self.kernels = kernels
        self.partners = Borrowed(captured.partners, self.dtype).values

    def step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: torch.Tensor) -> Values:
        self.optimizer.zero_grad()
        program, mesh = self.compiled.program, self.compiled.mesh
        with default_dtype(self.dtype):  # a number and a bool add up to it
            outputs = self._run(self.whole(args, kwargs, seed))
        found: Values = {}
        layouts = record(program.graph.output_node()).operands
        shapes = {name: tensor.shape for name, tensor in (*self.parameters.items(), *self.partners.items())}
        for i, (out, layout) in enumerate(zip(program.outputs, layouts, strict=True)):
            parts = [rank[i] for rank in outputs if rank[i] is not None]
            # the gradient of a parameter is on the ranks of one stage
            held = mesh if len(parts) == mesh.size else self.compiled.plan.mesh_of_stage
            if out.kind == "guard":
                self.captured.reads[int(out.name)].check(combine(parts, layout, held))
                continue
            whole_ = combine(parts, layout, held)
            found[out.kind, out.name] = beginning(whole_, shapes[out.name]) if out.kind == "gradient" else whole_
            self.replicas[out.kind, out.name] = replica_error(parts, layout, held)
            if out.kind == "gradient" and any(entry.kind == "scale" for entry in program.inputs):
                found[out.kind, out.name] /= SCALE
        self._update(found)
        return found

    def _run(self, whole: Whole) -> list[Outputs]:
        """The outputs of every rank, None for those that other stages have."""
        mesh, program, pipeline = self.compiled.mesh, self.compiled.program, self.compiled.pipeline
        inputs = scattered(program, pipeline, mesh, whole)
        if pipeline is None:
            executable = Executable(program.graph, device=self.device, kernels=self.kernels)
            return VirtualMesh(mesh).run(executable, [given.values() for given in inputs])
        codes = [compile_rank(pipeline, place, None, self.device, self.kernels) for place in range(pipeline.flow.size)]
        return [outputs_of(finals, program.outputs) for finals in VirtualMesh(mesh).run_pipeline(codes, inputs)]

    def _update(self, found: Values) -> None:
        for name, parameter in self.parameters.items():
            gradient = found.get(("gradient", name))
            parameter.grad = None if gradient is None else gradient.clone()  # an optimizer may clip it in place
        self.optimizer.step()
        for name, parameter in self.parameters.items():
            found["weight", name] = parameter.detach().clone()
        for name, tensor in self.buffers.items():
            new = found.setdefault(("buffer", name), tensor.clone())
            tensor.copy_(new)
        for name in self.partners:
            if ("buffer", name) in found:
                self.partners[name] = found["buffer", name].clone()

    def whole(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: torch.Tensor) -> Whole:
        """The whole values of the inputs of a step."""
        tensors = {entry.name: tensor.detach() for entry, tensor in state_of(self.model).entries}
        return whole_inputs({**tensors, **self.partners, **self.captured.constants}, args, kwargs, seed)
