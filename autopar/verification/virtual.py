"""The programs of all ranks in one process, as one side of `verify`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import fx, nn

import autopar.runtime.kernels  # noqa: F401  registers the kernels of our ops
from autopar.capture import Captured
from autopar.capture.capture import state_of
from autopar.capture.containers import take_call_apart
from autopar.capture.raising import default_dtype
from autopar.compiler.lowered import Lowered
from autopar.ir.layout import Layout, combine, replica_error
from autopar.ir.mesh import MICROBATCH, Mesh
from autopar.ir.program import Input, Program, Record, operand_nodes, record
from autopar.parallel.padding import beginning, padded_part
from autopar.runtime.executor import Executable, Outputs
from autopar.runtime.pipeline import compile_rank
from autopar.runtime.staged import given_of
from autopar.runtime.virtual import VirtualMesh
from autopar.verification.borrowed import Borrowed
from autopar.verification.comparison import ZERO, Mismatch, Values, error_of, norm_of
from autopar.verification.dtypes import dtype_of
from autopar.verification.reference import SCALE, OptimizerFactory


class Virtual:
    """The programs of all ranks on a virtual mesh; the optimizer steps on the whole parameters, as on DTensors."""

    def __init__(self, model: nn.Module, captured: Captured, compiled: Lowered, make: OptimizerFactory) -> None:
        self.model, self.captured, self.compiled = model, captured, compiled
        self.optimizer = make([p for p in model.parameters() if p.requires_grad])
        self.replicas: dict[tuple[str, str], float] = {}
        parameter = next(model.parameters())
        self.dtype, self.device = dtype_of(model), parameter.device
        self.partners = Borrowed(captured.partners, self.dtype).values

    def step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: torch.Tensor) -> Values:
        self.optimizer.zero_grad()
        program, mesh = self.compiled.program, self.compiled.mesh
        whole = self._inputs(program, args, kwargs, seed)
        with default_dtype(self.dtype):  # a number and a bool add up to it
            run = self._run if self.compiled.pipeline is None else self._run_pipeline
            outputs = run(whole)
        found: Values = {}
        layouts = record(program.graph.output_node()).operands
        shapes = {name: tensor.shape for name, tensor in (*self.model.named_parameters(), *self.partners.items())}
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

    def _run(self, whole: list[torch.Tensor]) -> list[Outputs]:
        """The outputs of every rank."""
        program, mesh = self.compiled.program, self.compiled.mesh
        return VirtualMesh(mesh).run(Executable(program.graph, device=self.device), _scatter(program, whole, mesh))

    def _run_pipeline(self, whole: list[torch.Tensor]) -> list[Outputs]:
        """As `_run`; an output is None on the ranks that do not have it."""
        compiled, mesh = self.compiled, self.compiled.mesh
        pipeline, program = compiled.pipeline, compiled.program
        assert pipeline is not None
        value = dict(zip(program.inputs, whole, strict=True))

        def part_of(entry: Input, layout: Layout, coord: Mapping[str, int]) -> torch.Tensor:
            return padded_part(value[entry], layout, program.mesh, coord)

        given = []
        for coord in mesh.coords():
            mine = {**coord, MICROBATCH: 0}
            value_of = functools.partial(part_of, coord=mine)
            given.append(given_of(program, pipeline, coord, value_of, part_of))
        codes = [compile_rank(pipeline, place, device=self.device) for place in range(pipeline.flow.size)]
        finals = VirtualMesh(mesh).run_pipeline(codes, given)
        return [tuple(rank.get((out.kind, out.name)) for out in program.outputs) for rank in finals]

    def _update(self, found: Values) -> None:
        for name, parameter in self.model.named_parameters():
            gradient = found.get(("gradient", name))
            parameter.grad = None if gradient is None else gradient.clone()  # an optimizer may clip it in place
        self.optimizer.step()
        for name, parameter in self.model.named_parameters():
            found["weight", name] = parameter.detach().clone()
        for name, tensor in self.model.named_buffers():
            new = found.setdefault(("buffer", name), tensor.clone())
            tensor.copy_(new)
        for name in self.partners:
            if ("buffer", name) in found:
                self.partners[name] = found["buffer", name].clone()

    def _inputs(
        self, program: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: torch.Tensor
    ) -> list[torch.Tensor]:
        tensors = {entry.name: tensor.detach() for entry, tensor in state_of(self.model).entries}
        tensors.update(self.partners)
        tensors.update(self.captured.constants)
        leaves = take_call_apart(args, kwargs).leaves
        return [_input(entry, tensors, leaves, seed) for entry in program.inputs]

    def locate(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: torch.Tensor, tolerance: float
    ) -> Mismatch | None:
        """Run the captured and the final program side by side; the first node whose value differs."""
        captured, final = self.captured.program, self.compiled.program
        mesh = final.mesh  # micro-batches side by side: what is cut afterwards shows in no node
        whole = self._inputs(final, args, kwargs, seed)
        expected: dict[str, torch.Tensor] = {}

        def keep(_rank: int, node: fx.Node, value: Any) -> None:
            if isinstance(value, torch.Tensor):
                expected[node.name] = value

        one = Mesh(())
        with default_dtype(self.dtype):
            executable = Executable(captured.graph, device=self.device)
            VirtualMesh(one).run(executable, [self._inputs(captured, args, kwargs, seed)], keep)
        parts: dict[fx.Node, list[torch.Tensor]] = {}

        def collect(_rank: int, node: fx.Node, value: Any) -> None:
            if isinstance(value, torch.Tensor) and record(node).origin in expected:
                parts.setdefault(node, [None] * mesh.size)[_rank] = value  # type: ignore[list-item]

        with default_dtype(self.dtype), suppress(RuntimeError):  # the values up to there say enough
            VirtualMesh(mesh).run(Executable(final.graph, device=self.device), _scatter(final, whole, mesh), collect)
        leaving = captured.leaving
        gradients = norm_of({(out.kind, out.name): expected[node.name] for node, out in leaving if node}, "gradient")
        for node in final.graph.nodes:
            if node in parts and all(part is not None for part in parts[node]):
                found = record(node)
                value = expected[found.origin]
                origins = [record(operand).origin for operand in operand_nodes(node)]
                norms = [
                    norm_of({("node", origin): expected[origin]}, "node") for origin in origins if origin in expected
                ]
                floor = ZERO["node"] * max(norms, default=0.0)
                if found.is_backward:
                    floor = max(floor, ZERO["gradient"] * gradients)
                error = _node_error(parts[node], found, mesh, value, floor)
                if not error <= tolerance:
                    text = node.format_node() or ""
                    return Mismatch(node.name, found.made_by, found.module, found.source, error, text)
        wanted = record(final.graph.output_node()).operands
        for node, out, layout in zip(final.results, final.outputs, wanted, strict=True):
            if node is not None and record(node).layout != layout:
                found = record(node)
                text = f"it is in {found.layout}, but leaves as the {out.kind} '{out.name}' in {layout}: no collective"
                return Mismatch(node.name, found.made_by, found.module, found.source, float("inf"), text)
        text = "every node agrees with the captured program: the captured program itself differs from the plain module"
        if self.compiled.pipeline is not None:
            text += ", or the pipeline from the program that was cut"
        return Mismatch("", "capture", "", "", float("nan"), text)


def _node_error(parts: list[torch.Tensor], found: Record, mesh: Mesh, value: torch.Tensor, floor: float) -> float:
    whole = beginning(combine(parts, found.layout, mesh), value.shape)
    if whole.shape != value.shape:
        return float("inf")
    return max(error_of(whole, value, floor), replica_error(parts, found.layout, mesh))


def _input(
    entry: Input, tensors: Mapping[str, torch.Tensor], leaves: Sequence[Any], seed: torch.Tensor
) -> torch.Tensor:
    if entry.kind == "batch":
        leaf = leaves[int(entry.name)]
        assert isinstance(leaf, torch.Tensor)
        return leaf
    if entry.kind == "scale":
        return torch.tensor(SCALE, device=seed.device)
    return seed if entry.kind == "seed" else tensors[entry.name]


def _scatter(program: Program, whole: list[torch.Tensor], mesh: Mesh) -> list[list[torch.Tensor]]:
    """Each rank's part of every input."""
    layouts = [record(node).layout for node in program.placeholders]
    return [
        [padded_part(value, layout, mesh, coord) for value, layout in zip(whole, layouts, strict=True)]
        for coord in mesh.coords()
    ]
