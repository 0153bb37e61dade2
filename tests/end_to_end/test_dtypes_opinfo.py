"""Each op of PyTorch's own database in float32, bf16, fp16 and complex: every value has the type that is recorded.

float64 proves the algebra; the CPU dispatches other kernels in other dtypes, whose results may have another type than
torch infers. So a step of each op is captured in each dtype and run, every value's dtype is compared with its record,
and loss and gradients with the plain module's; and of ops whose gradient leaves results out, each subset of what is
trained. `make test-all` runs all samples, `make test` one op in sixteen and those that were wrong once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from itertools import combinations, islice
from typing import Any

import pytest
import torch
from rule_brute_force import tensors_in, with_tensors
from torch import Tensor, nn

import autopar.runtime.executor.kernel_table
from autopar.compiler.check_options import options_of
from autopar.compiler.meshes import mesh_of
from autopar.errors import CaptureError
from autopar.ir.program import record
from autopar.report.memory.within_memory import compile_step
from autopar.runtime.executor.executor import Executable
from autopar.runtime.ranks.virtual import VirtualMesh
from autopar.torch_compat import schema_of
from autopar.verification.virtual_inputs import scattered
from autopar.verification.virtual_side import Virtual

DTYPES = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05, torch.complex64: 1e-3}  # with a tolerance
LARGEST = 20_000  # elements of one sample
OTHER_KINDS = ("jiterator", "sparse", "_refs", "torch.ops.aten._safe")
# Wrong once: raised forms on complex numbers, kernels that want contiguous operands, a mask of outputs.
ONCE = ("istft", "nn.functional.rms_norm", "nn.functional.embedding_bag", "nn.functional.grid_sample", "mul", "div")


class Step(nn.Module):
    """A sample of an op, whose float tensors are the parameters."""

    def __init__(self, info: Any, sample: Any) -> None:
        super().__init__()
        self.info, self.sample = info, sample
        self.given = [t.detach().clone() for t in tensors_in([sample.input, sample.args, sample.kwargs])]
        self.trained = nn.ParameterList(nn.Parameter(t) for t in self.given if _is_float(t))

    def forward(self, x: Tensor) -> Tensor:
        trained = iter(self.trained)
        values = [next(trained) * 1 if _is_float(t) else t for t in self.given]
        one, args, kwargs = with_tensors([self.sample.input, list(self.sample.args), dict(self.sample.kwargs)], values)
        out = [t for t in tensors_in([self.info(one, *args, **kwargs)]) if _is_float(t)]
        squares = [(t * t.conj()).real if t.is_complex() else t * t for t in out]
        return sum((t.float().sum() for t in squares), x.sum())


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def difference(step: Step, tolerance: float) -> str:
    """What is not as it should be; empty if all is. `masked` if ops of the step leave results out."""
    x = torch.ones(2)
    try:
        loss = step(x)
        loss.backward()
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        return ""  # the op itself does not do that
    want = {name: p.grad for name, p in step.named_parameters()}
    # A gradient that is zero on paper (RMSNorm of one element) is rounding of the size of others.
    sizes = [loss.abs().item(), *(g.abs().max().item() for g in want.values() if g is not None and g.numel())]
    floor = max([0.1 * size for size in sizes if size < float("inf")] + [1e-2])
    try:
        captured, compiled = compile_step(step, None, (x,), {}, mesh_of("dp=1"), options_of())
    except CaptureError:
        return ""  # a draw, or a value that is read: refused in our own words
    run = Virtual(step, captured, compiled, lambda given: torch.optim.SGD(given, 0.0))
    found: list[str] = []

    def observe(rank: int, node: Any, value: Any) -> None:
        types, values = record(node).types, value if isinstance(value, (tuple, list)) else (value,)
        for type_, one in zip(types, values, strict=False):
            if type_ is not None and isinstance(one, Tensor) and one.dtype != type_.dtype:
                found.append(f"{node.target} gives {one.dtype}, and is recorded as {type_.dtype}")

    program, mesh = compiled.program, compiled.mesh
    given = scattered(program, None, mesh, [run.whole((x,), {}, torch.tensor([0, 0]))])
    executable = Executable(program.graph, device=torch.device("cpu"))
    (outputs,) = VirtualMesh(mesh).run(executable, [one.values() for one in given], observe)
    for out, value in zip(program.outputs, outputs, strict=True):
        expected = loss.detach() if out.kind == "loss" else want.get(out.name)
        if expected is None or value is None or not bool(torch.isfinite(expected).all()) or not expected.numel():
            continue
        error, size = ((value - expected).abs().max().item(), expected.abs().max().item())
        if not error <= tolerance * max(size, floor):
            found.append(f"{out.kind} {out.name} is off by {error:.2e} of {size:.2e}")
    return "; ".join(found[:3])


def _is_masked(step: Step) -> bool:
    compiled = compile_step(step, None, (torch.ones(2),), {}, mesh_of("dp=1"), options_of())[1]
    schemas = [schema_of(node.target) for node in compiled.program.calls() if hasattr(node.target, "_schema")]
    return any(argument.name == "output_mask" for schema in schemas for argument in schema.arguments)


@cache
def infos() -> tuple[Any, ...]:
    module = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    return tuple(info for info in module.op_db if not info.name.startswith(OTHER_KINDS))


def samples(info: Any, dtype: torch.dtype, count: int) -> Iterator[Any]:
    try:
        found = list(islice(info.sample_inputs_func(info, "cpu", dtype, info.supports_autograd), count))
    except (RuntimeError, TypeError, ValueError, ImportError):
        return
    for one in found:
        tensors = tensors_in([one.input, one.args, one.kwargs])
        if any(map(_is_float, tensors)) and sum(t.numel() for t in tensors) <= LARGEST:
            yield one


def wrong(chosen: list[Any], count: int) -> tuple[list[str], int]:
    """What is wrong with samples of some ops, and how many were tried."""
    found, tried = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in chosen:
            for dtype, tolerance in DTYPES.items():
                for one in samples(info, dtype, count) if dtype in info.dtypes else ():
                    tried += 1
                    text = difference(Step(info, one), tolerance)
                    found += [f"{info.name} in {dtype}: {text}"] * bool(text)
    return found, tried


def test_each_value_has_the_type_that_is_recorded() -> None:
    chosen = [info for at, info in enumerate(infos()) if at % 16 == 3 or info.name in ONCE]
    found, tried = wrong([info for info in chosen if not info.name.startswith("linalg")], 1)
    assert not found, "\n".join(found)
    assert tried > 100


@pytest.mark.slow
def test_each_value_of_all_samples() -> None:
    found, tried = wrong(list(infos()), 3)
    assert not found, "\n".join(found)
    assert tried > 4000


MASKED = ("grid_sampler_3d", "nn.functional.conv2d", "nn.functional.grid_sample", "nn.functional.layer_norm",
          "nn.functional.group_norm", "nn.functional.conv_transpose1d")  # fmt: skip


@pytest.mark.parametrize("name", MASKED)
def test_each_subset_of_what_is_trained(name: str) -> None:
    info = next(info for info in infos() if info.name == name)
    found, tried = [], 0
    for one in islice(samples(info, torch.float32, 4), 2):
        step = Step(info, one)
        assert _is_masked(step)
        every = range(len(step.trained))
        for chosen in (set(c) for size in range(1, len(every)) for c in combinations(every, size)):
            step = Step(info, one)
            for at, parameter in enumerate(step.trained):
                parameter.requires_grad_(at in chosen)
            tried += 1
            text = difference(step, DTYPES[torch.float32])
            found += [f"{sorted(chosen)}: {text}"] * bool(text)
    assert not found and tried, "\n".join(found)


RECURRENT = {
    "LSTM": lambda: nn.LSTM(6, 8, batch_first=True),
    "LSTM, both ways": lambda: nn.LSTM(6, 8, bidirectional=True),
    "LSTM, two layers": lambda: nn.LSTM(6, 8, num_layers=2, bias=False),
    "GRU": lambda: nn.GRU(6, 8, batch_first=True),
    "RNN": lambda: nn.RNN(6, 8),
}


def squares(model: nn.Module, x: Tensor) -> Tensor:
    out, state = model(x)
    states = state if isinstance(state, tuple) else (state,)
    return out.float().square().mean() + sum(each.float().sum() for each in states) * 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = RECURRENT[name]().to(dtype), torch.randn(4, 12, 6).to(dtype)
    loss = squares(model, x)
    loss.backward()
    want = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
    model.zero_grad()
    parallel = autopar.parallelize(model, "dp=1", loss_fn=squares, device="cpu")
    tolerance = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(parallel.forward_backward(x), loss.detach(), rtol=tolerance, atol=tolerance)
    for name, gradient in parallel.full_gradients().items():
        assert gradient.dtype == dtype
        size = want[name].abs().max().item()
        torch.testing.assert_close(gradient, want[name], rtol=tolerance, atol=tolerance * size)
