"""Generated kernels: each group of the programs of `steps`, beside Inductor's code for it and its calls one by one."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import autopar
from autopar.ir.ops.fused import Fused, fused_of
from autopar.ir.ops.measure import local_type
from autopar.ir.program import record
from autopar.runtime.compilers.inductor import InductorWriter
from autopar.runtime.compilers.rank_trace import RankTrace
from autopar.runtime.executor.run_fused import kernels_for, plain
from autopar.torch_compat import FakeTensorMode
from benchmarks.gpu.steps import cases, token_loss

Call = Callable[[], Sequence[torch.Tensor]]
ERROR = 2e-2  # of bf16, relative to the largest value of a result


def kernels(device: str) -> None:
    """GB/s of each group, of what it reads and writes once, and its largest error beside its calls one by one."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    print("| model | group | kind | MB | ours GB/s | Inductor GB/s | calls GB/s | error |")
    print(f"|{8 * '---|'}")
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for name in cases(device):
            found = list(groups(name, device))
            for i, fused in enumerate(found if device == "cuda" else found[:6]):
                error = _row(name, fused, device, Path(folder), with_inductor=device == "cuda" or i == 0)
                wrong += [f"{name} {fused.name}: {error:.1e}"] * (error > ERROR)
    assert not wrong, f"further than bf16's rounding: {wrong}"


def groups(name: str, device: str) -> Iterator[Fused]:
    """The groups of a model's step in bf16, each kind once."""
    make, rows, positions, vocabulary = cases(device)[name]
    with torch.device("meta"):
        model, batch = make(), tuple(torch.randint(vocabulary, (rows, positions)) for _ in range(2))
    options: dict[str, Any] = {"precision": "bf16", "compile": "triton"}
    program = autopar.compile(model, "dp=1", loss_fn=token_loss, batch=batch, **options).program
    seen = set()
    for node in program.calls():
        fused = fused_of(node)
        alike = fused and (fused.name, *(record(operand).types for operand in fused.placeholders))
        if fused is not None and alike not in seen:
            seen.add(alike)
            yield fused


def _row(name: str, fused: Fused, device: str, folder: Path, *, with_inductor: bool) -> float:
    """Print the line of a group; its error."""
    where = torch.device(device)
    operands = [_operand(node, fused, where) for node in fused.placeholders]
    make = kernels_for("triton", where, device == "cpu", folder)
    assert make is not None
    kernel, calls = make(fused, (None,) * len(fused.results)), plain(fused, where)
    given, wanted = kernel(*operands), calls(*operands)
    error = max(map(_apart, given, wanted))
    moved = sum(x.nbytes for x in (*operands, *given) if isinstance(x, torch.Tensor))
    theirs = _rate(inductor_of(fused, operands, where), moved, device) if with_inductor else "-"
    rates = _rate(lambda: kernel(*operands), moved, device), theirs, _rate(lambda: calls(*operands), moved, device)
    print(
        f"| {name} | {fused.name} | {fused.kind} | {moved / 1e6:.2f} | {' | '.join(rates)} | {error:.1e} |", flush=True
    )
    return error


def inductor_of(fused: Fused, operands: Sequence[Any], device: torch.device) -> Call:
    """The same as code that Inductor writes."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode, torch.no_grad():
        like = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in operands]
        trace: Any = RankTrace(SimpleNamespace(graph=fused.graph), None, device)  # type: ignore[arg-type]
        code, _ = InductorWriter(0).write(trace.run, like, f"the group {fused.name}")
    return lambda: code.run(list(operands))


def _operand(node: Any, fused: Fused, device: torch.device) -> Any:
    """Values like an operand's, in its shape and dtype; zero for what is an index."""
    if not record(node).is_tensor:
        return 0
    type_ = local_type(node, fused.mesh)
    if type_.dtype.is_floating_point:
        return torch.randn(type_.shape, device=device).to(type_.dtype)
    made = torch.zeros(type_.shape, dtype=type_.dtype, device=device)
    return ~made if type_.dtype == torch.bool else made


def _apart(given: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far two results are from each other, beside the largest value."""
    a, b = given.double(), wanted.double()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) if a.numel() else 0.0


def _rate(call: Call, moved: int, device: str) -> str:
    """GB/s, over the median of some calls."""
    times = []
    for _ in range(25 if device == "cuda" else 2):
        started = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return f"{moved / statistics.median(times[len(times) // 3 :]) / 1e9:.3g}"
