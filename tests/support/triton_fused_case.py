"""Proves generated kernels on a machine without a GPU: run by test_triton_kernels.py, in processes of its own.

TRITON_INTERPRET=1 python tests/support/triton_fused_case.py interpret   # numbers, bytes, orders
python tests/support/triton_fused_case.py compile                        # machine code for GPUs that are not here
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from hand_groups import group, plain
from triton_groups import CASES, DIMS, LOOPED, WIDTH_OF_LOOPS, Case, Dims

from autopar.ir.fused import Fused
from autopar.runtime.triton.launch import FusedKernel

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALF_PLACE = {torch.float64: 1e-15, torch.float32: 1e-7, torch.bfloat16: 1e-3, torch.float16: 1.3e-4}


class Wide(torch.fx.Interpreter):
    """A group in float64: every float is one."""

    def run_node(self, n: torch.fx.Node) -> Any:
        return _wide(super().run_node(n))

    def fetch_args_kwargs_from_env(self, n: torch.fx.Node) -> Any:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        floats = (torch.float32, torch.bfloat16, torch.float16)
        change = lambda a: torch.float64 if a in floats else a  # noqa: E731
        return torch.fx.node.map_aggregate((args, kwargs), lambda a: change(a) if isinstance(a, torch.dtype) else a)


def _wide(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_wide, value))
    return value.double() if isinstance(value, torch.Tensor) and value.dtype.is_floating_point else value


def reference(fused: Fused, operands: list[Any]) -> tuple[torch.Tensor, ...]:
    module = torch.fx.GraphModule(torch.nn.Module(), fused.graph)
    return tuple(Wide(module).run(*map(_wide, operands)))


def strided(operands: list[Any]) -> list[Any]:
    """The same values, in every second column of wider memory, or transposed."""

    def one(i: int, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.ndim < 2:
            return x
        if i % 2:
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), 7, dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]

    return [one(i, x) for i, x in enumerate(operands)]


def compare(name: str, got: Any, eager: Any, want: Any) -> None:
    """At most 1.2 times eager's error, or that of one rounding."""
    for i, (a, b, c) in enumerate(zip(got, eager, want, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype, (name, i, a.shape, b.shape, a.dtype, b.dtype)
        if not a.dtype.is_floating_point:
            assert torch.equal(a, b), (name, i)
            continue
        assert torch.equal(a.isnan(), b.isnan()), (name, i, "NaN")
        error, allowed = (a.double() - c).square().mean().sqrt(), (b.double() - c).square().mean().sqrt()
        size = c.square().mean().sqrt()
        assert error <= 1.2 * allowed + HALF_PLACE[a.dtype] * size, (name, i, error.item(), allowed.item(), size.item())


def cases() -> Iterator[tuple[Case, Dims, torch.dtype]]:
    """Every case at three shapes, each in another dtype; in turns, so that all shapes meet all dtypes."""
    for i, case in enumerate(CASES):
        for j, dims in enumerate(DIMS):
            yield case, dims, DTYPES[(i + j) % 3]
        if case.name in LOOPED:
            yield case, (1, 3, WIDTH_OF_LOOPS), DTYPES[i % 3]


def interpret() -> None:
    import strict_triton

    strict_triton.install()
    torch.manual_seed(0)
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        for case, dims, dtype in cases():
            operands = case.make(dims, dtype)
            fused = group(case.function, operands, case.name, case.kind)
            name = f"{case.name} {dims} {dtype}"
            eager, want = plain(fused)(*operands), reference(fused, operands)
            kernel = FusedKernel(fused, plain(fused), Path(folder), CPU)
            compare(name, kernel(*operands), eager, want)
            assert not kernel.reason, (name, kernel.reason)
            others = strided(operands)
            shuffled, again = FusedKernel(fused, plain(fused), Path(folder), CPU), kernel(*others)
            compare(f"{name} strided", again, eager, want)
            assert not kernel.reason, (name, kernel.reason)
            count += 1
    print(count, "right")


if __name__ == "__main__":
    {"interpret": interpret}[sys.argv[1]]()
