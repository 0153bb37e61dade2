"""One model of the table: captured, searched, verified, and what of it is really split."""

from __future__ import annotations

import logging
import math
import resource
import time
import traceback
import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

MESHES = ("dp=2,tp=2", "dp=3")


@dataclass
class Row:
    """errors: the largest of loss, gradients and weights by mesh. shares, in per cent: of the matrix operations that tp
    and dp divide, and of the parameter bytes that tp splits."""

    name: str
    capture_s: float = math.nan
    search_s: float = math.nan
    errors: dict[str, float] = field(default_factory=dict)
    tp_flops: float = math.nan
    dp_flops: float = math.nan
    tp_bytes: float = math.nan
    without_rule: tuple[str, ...] = ()
    collectives: int = 0
    memory_mib: int = 0
    fault: str = ""

    def ok(self, is_transformer: bool) -> bool:
        right = not self.fault and len(self.errors) == 2
        return right and self.dp_flops >= 95 and (self.tp_flops >= 95 if is_transformer else self.tp_flops > 0)


def measure(name: str) -> Row:
    """The row of one model; what goes wrong stands in `fault`."""
    quiet()
    row = Row(name)
    try:
        _fill(row)
    except Exception as error:
        row.fault = fault_of(error)
    row.memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return row


def fault_of(error: Exception) -> str:
    """What a row says of an error, with the line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]} ({frame.filename.rsplit('/', 1)[-1]}:{frame.lineno})"


def model_of(name: str) -> tuple[Any, Any, Any]:
    """The model of a row, its loss function and a batch; the same each time."""
    from benchmarks.coverage import architectures, plain

    torch.manual_seed(0)
    if name in plain.MODELS:
        return plain.MODELS[name]()
    model, batch = architectures.build(*architectures.case_of(name))
    return model, architectures.loss_fn, batch


def quiet() -> None:
    """On one thread, without the warnings of models."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)


def _made(name: str, mesh: Any, answers: Any) -> tuple[Any, Any]:
    """The program of another way through a model: as draws or data decide."""
    from autopar.compiler.compile import lower

    captured = captured_model(name, answers=answers)[-1]
    return captured, lower(captured, mesh)


def captured_model(name: str, row: Row | None = None, answers: Any = None) -> tuple[Any, Any, Any, Any]:
    """As `model_of` in float64, and its step; `row` gets the seconds."""
    from autopar.capture import capture
    from autopar.compiler.compile import batch_arguments
    from autopar.torch_compat import tree_map
    from autopar.verification.verify import cast
    from benchmarks.coverage.architectures import SPECIALIZED

    model, loss_fn, batch = model_of(name)
    dtype = torch.float64
    model = model.to(dtype)
    batch = tree_map(lambda leaf: cast(leaf, dtype), batch)
    args, kwargs = batch_arguments(batch)
    start = time.process_time()
    captured = capture(model, loss_fn, args, kwargs, lift=dtype, specialize=name in SPECIALIZED, answers=answers)
    if row is not None:
        row.capture_s = time.process_time() - start
    return model, loss_fn, batch, captured


def _fill(row: Row) -> None:
    from autopar.compiler.compile import lower
    from autopar.ir.mesh import parse_mesh
    from autopar.verification.verify import verify_ways

    model, loss_fn, batch, captured = captured_model(row.name, row)
    for mesh in MESHES:
        start = time.process_time()
        compiled = lower(captured, parse_mesh(mesh))
        if mesh == MESHES[0]:
            row.search_s = time.process_time() - start
            _shares(row, compiled)
        else:
            row.dp_flops = min(row.dp_flops, flops_split(compiled, "dp"))
        remake = partial(_made, row.name, parse_mesh(mesh))
        report = verify_ways(model, (captured, compiled), remake, loss_fn, batch)
        row.errors[mesh] = report.max_error
        if not report.ok:
            row.fault = row.fault or " ".join(str(report.mismatch).split())[:300]


def _shares(row: Row, compiled: object) -> None:
    from autopar.compiler.lowered import Lowered

    assert isinstance(compiled, Lowered)
    row.tp_flops, row.dp_flops = flops_split(compiled, "tp"), flops_split(compiled, "dp")
    row.tp_bytes = bytes_split(compiled, "tp")
    row.collectives = len(compiled.collectives)
    marker = "no rule"
    row.without_rule = tuple(note for note in compiled.notes if marker in note)


def bytes_split(compiled: object, axis: str) -> float:
    """Per cent of the parameters' bytes that an axis splits."""
    from autopar.compiler.lowered import Lowered
    from autopar.ir.program import record

    assert isinstance(compiled, Lowered)
    parameters = [record(node) for node, _ in dict(compiled.history)["propagate"].parameters()]
    split = sum(known.type.bytes_ for known in parameters if axis in known.layout.axes)
    return 100 * split / max(sum(known.type.bytes_ for known in parameters), 1)


def flops_split(compiled: object, axis: str) -> float:
    """Per cent of the matrix operations that an axis divides."""
    from autopar.compiler.lowered import Lowered
    from autopar.ir.program import record
    from autopar.passes.rules import call_of, rule_of

    assert isinstance(compiled, Lowered)
    total = split = 0
    for node in dict(compiled.history)["propagate"].calls():
        found = rule_of(call_of(node))
        if found is None or not found[0].flops:
            continue
        layouts = [layout for layout in (*record(node).operands, *record(node).layouts) if layout is not None]
        total += found[0].flops
        split += found[0].flops if any(axis in layout.axes for layout in layouts) else 0
    return 100 * split / max(total, 1)
