"""Proves generated kernels on a machine without a GPU: run by test_triton_kernels.py, in processes of its own.

TRITON_INTERPRET=1 python tests/support/triton_fused_case.py interpret   # by hand: numbers, bytes, orders, places
TRITON_INTERPRET=1 python tests/support/triton_fused_case.py programs    # of real programs: numbers
TRITON_INTERPRET=1 python tests/support/triton_fused_case.py faults      # kernels with a fault are seen
TRITON_INTERPRET=1 python tests/support/triton_fused_case.py step        # a step of `autopar.parallelize`
TRITON_INTERPRET=1 python tests/support/triton_fused_case.py exact       # its bits, by what the environment says
python tests/support/triton_fused_case.py compile                        # machine code for GPUs that are not here

Several, with commas between them and `faults` last (new memory is NaN from there on), run in one process.
`every` behind interpret, programs or compile: all combinations, which take minutes; without it a case has one of its
shapes, a program one mesh, machine code every second way.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hand_groups import group
from triton_groups import CASES, DIMS, LOOPED, MOVING, WIDTH_OF_LOOPS, Case, Dims

from autopar.ir.ops.fused import Fused
from autopar.runtime.executor.run_fused import plain
from autopar.runtime.triton.emit import KernelText
from autopar.runtime.triton.launch_kernel import FusedKernel
from autopar.runtime.triton.library import Library

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float64: 1e-15, torch.float32: 1e-7, torch.bfloat16: 1e-3, torch.float16: 1.3e-4}


@functools.cache
def _strict() -> None:
    """Once a process: its patches wrap what they find."""
    import strict_triton

    strict_triton.install()


class Wide(torch.fx.Interpreter):
    """A group in float64: every float is one."""

    def run_node(self, n: torch.fx.Node) -> Any:
        return _wide(super().run_node(n))

    def fetch_args_kwargs_from_env(self, n: torch.fx.Node) -> Any:
        floats = (torch.float32, torch.bfloat16, torch.float16)
        both = super().fetch_args_kwargs_from_env(n)
        return torch.fx.node.map_aggregate(both, lambda a: torch.float64 if a in floats else a)


def _wide(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_wide, value))
    return value.double() if isinstance(value, torch.Tensor) and value.dtype.is_floating_point else value


def reference(fused: Fused, operands: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    module = torch.fx.GraphModule(torch.nn.Module(), fused.graph)
    return tuple(Wide(module).run(*map(_wide, operands)))


def strided(operands: Sequence[Any]) -> list[Any]:
    """The same values in every second column of wider memory, or transposed."""

    def one(i: int, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.ndim < 2:
            return x
        if i % 2:
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), 7, dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]

    return [one(i, x) for i, x in enumerate(operands)]


def compare(name: str, got: Sequence[Any], eager: Sequence[Any], want: Sequence[Any]) -> None:
    """At most 1.2 times eager's error beside float64, or that of rounding once."""
    assert len(got) == len(eager) == len(want)
    for i, (a, b, c) in enumerate(zip(got, eager, want, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype, (name, i, a.shape, b.shape, a.dtype, b.dtype)
        if not a.dtype.is_floating_point:
            assert torch.equal(a, b), (name, i)
            continue
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf()), (name, i, "not finite")
        a, b, c = (v[a.isfinite() & c.isfinite()] for v in (a, b, c))
        error, allowed = (a.double() - c).square().mean().sqrt(), (b.double() - c).square().mean().sqrt()
        rounding = ROUNDING[a.dtype] * c.square().mean().sqrt()
        assert not error > 1.2 * allowed + rounding, (name, i, error.item(), allowed.item(), rounding.item())


class Made:
    """A case at a shape: its group, operands, and what should come out."""

    def __init__(self, case: Case, dims: Dims, dtype: torch.dtype, folder: Path) -> None:
        self.name, self.folder = f"{case.name} {dims} {dtype}", folder
        self.operands = case.make(dims, dtype)
        self.fused = group(case.function, self.operands, case.name, case.kind)
        self.eager, self.want = plain(self.fused)(*self.operands), reference(self.fused, self.operands)

    def kernel(self, over: Sequence[int | None] = ()) -> FusedKernel:
        return Library(self.folder, CPU, plain)(self.fused, tuple(over))

    def check(self, kernel: FusedKernel, operands: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        got = kernel(*operands)
        assert not kernel.reason, (self.name, kernel.reason)
        compare(self.name, got, self.eager, self.want)
        return got


def interpret(every: bool) -> None:
    """Each case at three odd shapes, or one of them: one counted, one strided and in shuffled order, one written over
    operands; in turns, so that all shapes meet all dtypes. Some again with rows too long for registers."""
    _strict()
    checks: Sequence[Callable[[Made, bool], None]] = (_counted, _shuffled, _in_place)
    with tempfile.TemporaryDirectory() as folder:
        for i, case in enumerate(CASES):
            for j in range(3) if every else (i % 3,):
                dims, check = DIMS[j], checks[j]
                check(Made(case, dims, DTYPES[(i // 3 + i + j) % 3], Path(folder)), case.name in MOVING)
            if case.name in LOOPED:
                made = Made(case, (1, 3, WIDTH_OF_LOOPS), DTYPES[i % 3], Path(folder))
                made.check(made.kernel(), made.operands)
        _exact(Path(folder))
        _far(Path(folder))
    print(len(CASES), "kernels right")


def _exact(folder: Path) -> None:
    """With `exact` every op rounds as eager does: the same bits, which a kernel that rounds once does not give."""
    x, y = (torch.randn(5, 40, generator=torch.Generator().manual_seed(i)).bfloat16() for i in (1, 2))
    fused = group(lambda x, y: (x * y + x) * y - x, [x, y], "chain", "points")
    (want,), (once,) = plain(fused)(x, y), Library(folder, CPU, plain)(fused)(x, y)
    (each,) = Library(folder, CPU, plain, exact=True)(fused)(x, y)
    assert torch.equal(each, want) and not torch.equal(once, want)


def _far(folder: Path) -> None:
    """With places of 64 bits, as tensors of more than 2^31 elements need them."""
    long = (1, 3, WIDTH_OF_LOOPS)
    for name, dims in (
        ("rms_norm_backward", DIMS[0]),
        ("rope", DIMS[0]),
        ("dropout_piece", DIMS[1]),
        ("softmax", long),
    ):
        case = next(case for case in CASES if case.name == name)
        made = Made(case, dims, torch.float32, folder)
        kernel = made.kernel()
        launch = kernel._launch
        kernel._launch = lambda *args, launch=launch: replace(launch(*args), is_far=True)  # type: ignore[method-assign,misc]
        made.check(kernel, made.operands)


def _counted(made: Made, moves: bool) -> None:
    """What is as large as the domain is read once and written once: so as many bytes move as operands and results have.

    A case that moves elements between rows may read what another program reads as well.
    """
    from strict_triton import watched

    kernel = made.kernel()
    lowered, results = kernel.lowered, list[torch.Tensor]()
    assert lowered is not None
    allocate = kernel._allocate
    kernel._allocate = lambda *args: results.extend(allocate(*args)) or results  # type: ignore[method-assign,func-returns-value]
    tensors = [o for o in made.operands if isinstance(o, torch.Tensor)]
    with watched(lambda: [*tensors, *results]) as accesses:
        made.check(kernel, made.operands)
    size = lowered.rows * lowered.width
    for tensor, counts in zip(tensors, accesses.read, strict=False):
        if tensor.numel() >= size:
            assert counts.max() <= (2 if moves else 1), (made.name, "reads twice", counts.max())
    for result, counts in zip(lowered.results, accesses.written[len(tensors) :], strict=True):
        assert counts.min() == counts.max() == 1, (made.name, "writes", result.extent, counts.min(), counts.max())


def _shuffled(made: Made, moves: bool) -> None:
    """Strided operands, and programs in another order: the same numbers, to the bit."""
    from strict_triton import watched

    operands, kernel = strided(made.operands), made.kernel()
    want = made.check(kernel, operands)
    with watched(lambda: [], seed=3):
        got = kernel(*operands)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (made.name, "depends on the order")


def _in_place(made: Made, moves: bool) -> None:
    """Results written over the operands that the kernel says."""
    kernel = made.kernel()
    assert kernel.kernel is not None
    over: list[int | None] = []
    for places in kernel.kernel.in_place:
        over.append(next((place for place in places if place not in over), None))
    operands = [o.clone() if isinstance(o, torch.Tensor) else o for o in made.operands]
    got = made.check(made.kernel(over), operands)
    for place, result in zip(over, got, strict=True):
        assert place is None or result.data_ptr() == operands[place].data_ptr(), made.name


def programs(every: bool) -> None:
    """Every kernel of the programs, and those of float64 copies of nothing: as they are, at their own shapes."""
    from triton_programs import groups, operands_of

    _strict()
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        library = Library(Path(folder), CPU, plain)
        for name, fused in groups(every):
            operands = operands_of(fused)
            kernel = library(fused)
            got = kernel(*operands)
            assert not kernel.reason, (name, kernel.reason)
            compare(name, got, plain(fused)(*operands), reference(fused, operands))
            count += 1
        _maxima(library)
    assert count >= (60 if every else 30), count
    print(count, "kernels right")


def _maxima(library: Library) -> None:
    """The gradient of a maximum goes to where it is, also if one kernel wrote it and another one makes its row again.

    The row is rounded as it was in memory; with numbers that are not, no element is as large as the maximum.
    """
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(32, 64, generator=generator).bfloat16(), torch.randn(64, generator=generator).bfloat16()

    def largest(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x * w) * 1.7).amax(-1, keepdim=True)

    def counted(x: torch.Tensor, w: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x * w) * 1.7 == most).sum(-1, keepdim=True)

    (most,) = library(group(largest, [x, w], "largest", "rows"))(x, w)
    fused = group(counted, [x, w, most], "count_of_largest", "rows")
    (count,) = library(fused)(x, w, most)
    assert (count >= 1).all(), "a row has none"


def step() -> None:
    """A training step whose groups are kernels, beside the plain model; the kernels are shown with the user's lines."""
    import models

    import autopar

    _strict()
    model, loss_fn, batch = models.short_gpt()
    want = loss_fn(model, *batch)
    want.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()  # a parallel model adds to what is there
    parallel = autopar.parallelize(model, "dp=1", loss_fn=loss_fn, compile="triton")
    torch.testing.assert_close(parallel.forward_backward(*batch), want.detach())
    for name, gradient in parallel.full_gradients().items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-6)
    code = parallel.generated_code
    assert code is not None and code.count("@triton.jit") >= 5 and "aten.gelu  gpt.py:" in code, code
    print("a step of kernels")


class Chain(torch.nn.Module):
    """Products and sums of bfloat16, element by element: rounded after each they have other bits than rounded once."""

    def __init__(self) -> None:
        super().__init__()
        self.y = torch.nn.Parameter(torch.randn(5, 40, generator=torch.Generator().manual_seed(2)).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x * self.y + x) * self.y - x) * self.y + x


def exact() -> None:
    """Whether what a chain gives and its gradient have eager's bits: AUTOPAR_EXACT_KERNELS decides."""
    _strict()
    for flag in ("1", "0"):
        os.environ["AUTOPAR_EXACT_KERNELS"] = flag
        _chain()


def _chain() -> None:
    import autopar

    model, x = Chain(), torch.randn(5, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    want = model(x)
    (gradient,) = torch.autograd.grad(want.sum(), model.y)
    parallel = autopar.parallelize(model, "dp=1", loss_fn=lambda model, x: model(x).sum(), compile="triton")
    got = parallel(x)
    parallel.forward_backward(x)
    code = parallel.generated_code
    assert code is not None and code.count("@triton.jit") >= 2, code
    print("output", torch.equal(got, want), "gradient", torch.equal(parallel.full_gradients()["y"], gradient))


def offload() -> None:
    """Whether activations in the host's memory change no bit. AUTOPAR_EXACT_KERNELS decides: a copy ends a group."""
    for flag in ("1", "0"):
        os.environ["AUTOPAR_EXACT_KERNELS"] = flag
        plain, moved = (_trained(each) for each in (None, "activations"))
        print("exact" if flag == "1" else "rounded once", all(map(torch.equal, plain, moved)))


def _trained(where: str | None) -> list[torch.Tensor]:
    import offload_case

    import autopar

    torch.manual_seed(0)
    model = autopar.parallelize(
        offload_case.Deep(2), "dp=1", loss_fn=offload_case.squares, compile="triton", precision="bf16", offload=where
    )
    optimizer, x = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.randn(64, 16)
    for _ in range(2):
        model.forward_backward(x)
        optimizer.step()
    return list(model.full_state_dict().values())


# -- faults that the checks must see -----------------------------------------------------------------------------------


def _replaced(old: str, new: str) -> Callable[[KernelText], KernelText]:
    def fault(kernel: KernelText) -> KernelText:
        body = tuple(line.replace(old, new) for line in kernel.body)
        assert body != kernel.body, old
        return replace(kernel, body=body)

    return fault


def _sees(case_name: str, check: Callable[[Made, bool], None], fault: Callable[[KernelText], KernelText]) -> str:
    """What a check says of a kernel with a fault; it must say something."""
    case = next(case for case in CASES if case.name == case_name)
    with tempfile.TemporaryDirectory() as folder:
        made = Made(case, (3, 50, 40), torch.float32, Path(folder))  # several programs

        def kernel(over: Sequence[int | None] = ()) -> FusedKernel:
            library = Library(made.folder, CPU, plain)
            found = library(made.fused, tuple(over))
            found.compiled = lambda kernel: library._function(fault(kernel))
            return found

        check(made, False)
        made.kernel = kernel  # type: ignore[method-assign]
        torch.use_deterministic_algorithms(True, warn_only=True)  # new memory is NaN: else it may hold the right result
        try:
            check(made, False)
        except (AssertionError, IndexError) as error:
            return str(error)
    raise SystemExit(f"nothing is seen: {case_name}")


def faults() -> None:
    _strict()
    said = [
        _sees("softmax", _counted, _replaced(", mask=inside, other=0", "")),  # a load of what is not there
        _sees("layer_norm", _counted, _replaced("tl.where(inside, value, 0.0)", "value")),  # a sum of padded lanes
        _sees("rms_norm_backward", _counted, _replaced("tl.where(inside, value_2, 0)", "value_2 + 1")),
        _sees("gelu_backward", _shuffled, _replaced("row * 80 + column * 2", "row * 40 + column")),  # a wrong stride
        _sees("bias_gradient", _shuffled, _replaced("tl.program_id(0) * 40 + column", "column")),  # all to one place
        _sees("flip_add", _shuffled, _replaced("tl.store(out0", "tl.store(in0")),  # over what others read still
    ]
    print(len(said), "faults seen")


def main(ways: str, every: bool) -> None:
    """Each way after its name, where they are several."""
    for way in ways.split(","):
        if way != ways:
            print(f"== {way}")
        if way == "compile":
            from triton_machine_code import compile_

            compile_(every)
        elif way in ("interpret", "programs"):
            {"interpret": interpret, "programs": programs}[way](every)
        else:
            {"faults": faults, "step": step, "exact": exact, "offload": offload}[way]()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] == ["every"])
