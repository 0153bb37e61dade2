"""verify: the plain module on one device against the emitted programs of all ranks, in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

import autopar.runtime.kernels  # noqa: F401  registers the kernels of our ops
from autopar.capture import Captured, capture
from autopar.capture.capture import LossFn, loss_of, state_of
from autopar.capture.raising import Raise, default_dtype
from autopar.compiled import Compiled
from autopar.compiler import Choices, SequenceParallel, Shard, batch_arguments, check_model, lower
from autopar.ir.layout import combine, local_part, replica_error
from autopar.ir.mesh import Mesh
from autopar.ir.program import Input, Program, Record, operand_nodes, record
from autopar.meshes import MeshLike, mesh_of
from autopar.runtime.executor import compile_graph
from autopar.runtime.virtual import VirtualMesh
from autopar.torch_compat import backward, tree_flatten, tree_map

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
# A tensor that is zero but for rounding (the gradient of a key's bias) is measured against this share of the norm of
# all of its kind; of a node, against that of its largest operand, and in the backward pass of all gradients. AdamW
# enlarges the rounding, so weights get more.
ZERO = {"gradient": 1e-5, "weight": 1e-3, "buffer": 1e-5, "node": 1e-6}


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: `kind` is loss, gradient, weight or buffer.

    error: norm of the difference over the norm of the single-device value, the worst of all steps.
    replicas: the largest difference between ranks that should hold the same.
    """

    kind: str
    name: str
    error: float
    replicas: float
    ok: bool


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first node whose logical value differs from the captured program's."""

    node: str
    pass_name: str
    module: str
    source: str
    error: float
    text: str

    def __str__(self) -> str:
        return (
            f"first difference at %{self.node} (made by pass '{self.pass_name}', {self.module or 'no module'}, "
            f"{self.source}), relative error {self.error:.2e}:\n  {self.text}"
        )


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify` found; prints as a table."""

    mesh: str
    dtype: torch.dtype
    steps: int
    tolerance: float
    rows: tuple[Row, ...]
    mismatch: Mismatch | None = None

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    @property
    def max_error(self) -> float:
        return max((row.error for row in self.rows), default=0.0)

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        lines = [f"{self.mesh}  {self.dtype}  {self.steps} steps  tolerance {self.tolerance:.0e}"]
        for row in self.rows:
            mark = "ok" if row.ok else "WRONG"
            replicas = f"  ranks differ by {row.replicas:.1e}" if row.replicas else ""
            lines.append(f"{row.kind:9} {row.name:{width}} {row.error:9.2e}  {mark}{replicas}")
        lines.append(f"{'all equal' if self.ok else 'NOT EQUAL'}: max error {self.max_error:.2e}")
        if self.mismatch is not None:
            lines.append(str(self.mismatch))
        return "\n".join(lines)


def verify(
    model: nn.Module,
    mesh: MeshLike,
    *,
    loss_fn: LossFn | None = None,
    batch: Any,
    steps: int = 2,
    dtype: torch.dtype = torch.float64,
    optimizer: OptimizerFactory | None = None,
    shard: Shard | None = None,
    sequence_parallel: SequenceParallel = False,
    specialize: bool = False,
    seed: int = 0,
) -> Report:
    """Train `steps` steps twice from the same weights: plainly, and with the programs of every rank of `mesh`.

    Loss, every gradient, every updated weight and buffer are put together from the ranks and compared. Random ops
    draw from the counter-based generator on both sides, and casts that the model itself makes to another float
    (`.float()` in a norm) go to `dtype` on both sides: else their rounding, not the programs, would be compared. The
    model is copied and not changed; `optimizer` makes one
    from parameters (AdamW by default, see `descent`). On a difference the report names the first node that differs.
    """
    check_model(model)
    parsed = mesh_of(mesh)  # what is cheap to find is found first
    model = copy.deepcopy(model).to(dtype=dtype)
    batch = tree_map(lambda leaf: cast(leaf, dtype), batch)
    args, kwargs = batch_arguments(batch)
    captured = capture(model, loss_fn, args, kwargs, lift=dtype, specialize=specialize)
    compiled = lower(captured, parsed, Choices(shard, sequence_parallel))
    return verify_compiled(
        model, captured, compiled, loss_fn=loss_fn, batch=batch, steps=steps, optimizer=optimizer, seed=seed
    )


def verify_compiled(
    model: nn.Module,
    captured: Captured,
    compiled: Compiled,
    *,
    loss_fn: LossFn | None,
    batch: Any,
    steps: int = 2,
    optimizer: OptimizerFactory | None = None,
    seed: int = 0,
) -> Report:
    """As `verify`, for a program that is compiled already; `model` and `batch` have the dtype to compare in."""
    make = optimizer or descent
    dtype = next(model.parameters()).dtype
    args, kwargs = batch_arguments(batch)
    plain = Plain(copy.deepcopy(model), loss_fn, make)
    virtual = _Virtual(copy.deepcopy(model), captured, compiled, make)
    table = Table.of(dtype)
    for step in range(steps):
        drawn = torch.tensor([seed, step])
        expected, given = plain.step(args, kwargs, drawn), virtual.step(args, kwargs, drawn)
        table.compare(expected, given, virtual.replicas)
    rows = table.rows()
    mismatch = None
    if not all(row.ok for row in rows):
        first = _Virtual(copy.deepcopy(model), captured, compiled, make)
        mismatch = first.locate(args, kwargs, torch.tensor([seed, 0]), table.tolerance)
    return Report(str(compiled.mesh), dtype, steps, table.tolerance, rows, mismatch)


def descent(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with an eps far above rounding. With 1e-8 the step of a weight whose gradient is zero but for rounding (a
    bias before a normalisation) would be rounding enlarged 1e8 times, and the next gradients' too."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4)


def cast(leaf: Any, dtype: torch.dtype) -> Any:
    """A floating-point tensor in `dtype`; anything else as it is."""
    return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


Values = dict[tuple[str, str], torch.Tensor]  # by (kind, name)


class Plain:
    """The user's module, trained as it is."""

    def __init__(self, model: nn.Module, loss_fn: LossFn | None, make: OptimizerFactory) -> None:
        self.model, self.loss_fn = model, loss_fn
        self.optimizer = make([p for p in model.parameters() if p.requires_grad])

    def step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: torch.Tensor) -> Values:
        self.optimizer.zero_grad()
        args, kwargs = tree_map(_copied, (args, dict(kwargs)))  # the model may write into them
        dtype = next(self.model.parameters()).dtype
        with default_dtype(dtype), Raise(None, seed, dtype):
            if self.loss_fn is None:
                loss = loss_of(self.model(*args, **kwargs))
            else:
                loss = self.loss_fn(self.model, *args, **kwargs)
            backward(loss)
        found: Values = {("loss", "loss"): loss.detach()}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                found["gradient", name] = parameter.grad.clone()
        self.optimizer.step()
        for name, parameter in self.model.named_parameters():
            found["weight", name] = parameter.detach().clone()
        for name, tensor in self.model.named_buffers():
            found["buffer", name] = tensor.clone()
        return found


class _Virtual:
    """The programs of all ranks on a virtual mesh; the optimizer steps on the whole parameters, as on DTensors."""

    def __init__(self, model: nn.Module, captured: Captured, compiled: Compiled, make: OptimizerFactory) -> None:
        self.model, self.captured, self.compiled = model, captured, compiled
        self.optimizer = make([p for p in model.parameters() if p.requires_grad])
        self.replicas: dict[tuple[str, str], float] = {}
        self.dtype = next(model.parameters()).dtype

    def step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: torch.Tensor) -> Values:
        self.optimizer.zero_grad()
        program = self.compiled.program
        mesh = self.compiled.mesh
        whole = self._inputs(program, args, kwargs, seed)
        with default_dtype(self.dtype):  # a number and a bool add up to it
            outputs = VirtualMesh(mesh).run(compile_graph(program.graph), _scatter(program, whole, mesh))
        found: Values = {}
        layouts = record(program.graph.output_node()).operands
        for i, (out, layout) in enumerate(zip(program.outputs, layouts, strict=True)):
            parts = [rank[i] for rank in outputs]
            if out.kind == "guard":
                self.captured.reads[int(out.name)].check(combine(parts, layout, mesh))
                continue
            found[out.kind, out.name] = combine(parts, layout, mesh)
            self.replicas[out.kind, out.name] = replica_error(parts, layout, mesh)
        self._update(found)
        return found

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

    def _inputs(
        self, program: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: torch.Tensor
    ) -> list[torch.Tensor]:
        tensors = {entry.name: tensor.detach() for entry, tensor in state_of(self.model).entries}
        tensors.update(self.captured.constants)
        leaves, _ = tree_flatten((args, dict(kwargs)))
        return [_input(entry, tensors, leaves, seed) for entry in program.inputs]

    def locate(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: torch.Tensor, tolerance: float
    ) -> Mismatch | None:
        """Run the captured and the final program side by side; the first node whose value differs."""
        captured, final, mesh = self.captured.program, self.compiled.program, self.compiled.mesh
        whole = self._inputs(final, args, kwargs, seed)
        expected: dict[str, torch.Tensor] = {}

        def keep(_rank: int, node: fx.Node, value: Any) -> None:
            if isinstance(value, torch.Tensor):
                expected[node.name] = value

        one = Mesh(())
        with default_dtype(self.dtype):
            VirtualMesh(one).run(compile_graph(captured.graph), [self._inputs(captured, args, kwargs, seed)], keep)
        parts: dict[fx.Node, list[torch.Tensor]] = {}

        def collect(_rank: int, node: fx.Node, value: Any) -> None:
            if isinstance(value, torch.Tensor) and record(node).origin in expected:
                parts.setdefault(node, [None] * mesh.size)[_rank] = value  # type: ignore[list-item]

        with default_dtype(self.dtype), suppress(RuntimeError):  # the values up to there say enough
            VirtualMesh(mesh).run(compile_graph(final.graph), _scatter(final, whole, mesh), collect)
        leaving = zip(captured.results, captured.outputs, strict=True)
        gradients = _norm({(out.kind, out.name): expected[node.name] for node, out in leaving if node}, "gradient")
        for node in final.graph.nodes:
            if node in parts and all(part is not None for part in parts[node]):
                found = record(node)
                value = expected[found.origin]
                origins = [record(operand).origin for operand in operand_nodes(node)]
                norms = [expected[origin].double().norm().item() for origin in origins if origin in expected]
                floor = ZERO["node"] * max(norms, default=0.0)
                if found.phase == "backward":
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
        return Mismatch("", "capture", "", "", float("nan"), "every node agrees with the captured program: the "
                        "captured program itself differs from the plain module")  # fmt: skip


def _node_error(parts: list[torch.Tensor], found: Record, mesh: Mesh, value: torch.Tensor, floor: float) -> float:
    whole = combine(parts, found.layout, mesh)
    if whole.shape != value.shape:
        return float("inf")
    return max(_error(whole, value, floor), replica_error(parts, found.layout, mesh))


def _input(entry: Input, tensors: Mapping[str, torch.Tensor], leaves: list[Any], seed: torch.Tensor) -> torch.Tensor:
    if entry.kind == "batch":
        leaf = leaves[int(entry.name)]
        assert isinstance(leaf, torch.Tensor)
        return leaf
    return seed if entry.kind == "seed" else tensors[entry.name]


def _scatter(program: Program, whole: list[torch.Tensor], mesh: Mesh) -> list[list[torch.Tensor]]:
    """Each rank's part of every input."""
    layouts = [record(node).layout for node in program.placeholders]
    return [
        [local_part(value, layout, mesh, coord) for value, layout in zip(whole, layouts, strict=True)]
        for coord in mesh.coords()
    ]


def _error(given: torch.Tensor, expected: torch.Tensor, floor: float) -> float:
    """Norm of the difference over the norm of the expected value, or over `floor` if that is larger."""
    if not expected.is_floating_point():
        return 0.0 if torch.equal(given, expected) else float("inf")
    a, b = given.double(), expected.double()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, a - b).norm().item()
    if difference == 0.0:
        return 0.0
    scale = max(b.nan_to_num(0.0, 0.0, 0.0).norm().item(), floor)
    return difference / scale if scale > 0 else float("inf")


@dataclass(slots=True)
class Table:
    """The worst errors so far, by (kind, name)."""

    tolerance: float
    errors: dict[tuple[str, str], float] = field(default_factory=dict)
    replicas: dict[tuple[str, str], float] = field(default_factory=dict)

    @staticmethod
    def of(dtype: torch.dtype) -> Table:
        """An empty table with the tolerance of a dtype."""
        return Table(TOLERANCE.get(dtype, 1e-2))

    def compare(self, expected: Values, given: Values, replicas: Mapping[tuple[str, str], float]) -> None:
        floors = {kind: ZERO[kind] * _norm(expected, kind) for kind in ("gradient", "weight", "buffer")}
        for key in sorted(expected.keys() | given.keys()):
            wrong = key not in expected or key not in given
            error = float("inf") if wrong else _error(given[key], expected[key], floors.get(key[0], 0.0))
            self.errors[key] = _worse(error, self.errors.get(key, 0.0))
            self.replicas[key] = max(replicas.get(key, 0.0), self.replicas.get(key, 0.0))

    def rows(self) -> tuple[Row, ...]:
        order = ("loss", "gradient", "weight", "buffer")
        keys = sorted(self.errors, key=lambda key: order.index(key[0]))
        return tuple(Row(*key, self.errors[key], self.replicas[key], self._is_right(key)) for key in keys)

    def _is_right(self, key: tuple[str, str]) -> bool:
        return self.errors[key] <= self.tolerance and self.replicas[key] <= self.tolerance


def _norm(values: Values, kind: str) -> float:
    """The norm of all floating-point tensors of a kind, as of one."""
    found = [value for (other, _), value in values.items() if other == kind and value.is_floating_point()]
    squares = [value.double().norm().item() ** 2 for value in found]
    return float(sum(squares) ** 0.5)


def _worse(a: float, b: float) -> float:
    """The larger one; NaN is the worst."""
    return a if a != a or a > b else b
