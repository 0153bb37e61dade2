"""Memory of generated kernels on a GPU: results, and the partial sums of programs that run at once. And what ops give
that a report has called before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_groups import group
from torch import Tensor, nn

import autopar
from autopar.compiled import Compiled
from autopar.ir.plan import Fixed
from autopar.machines.files import named
from autopar.report.memory.known_results import KnownResults
from autopar.report.memory.meta_kernels import ON_GPU, unlaunched
from autopar.report.memory.track import Tracker
from autopar.runtime.executor.run_fused import plain
from autopar.runtime.kernels.dropout import dropout, dropout_inplace
from autopar.runtime.kernels.random_kernels import random
from autopar.torch_compat import OpOverload, TorchDispatchMode, storage_of

META = torch.device("meta")
aten = torch.ops.aten
WIDTH, ROWS, FLOAT = 1024, 4096, 4


def sums(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """As the gradients of a norm's weight and bias: reads rows, and sums over them."""
    z = x * y.softmax(-1)
    return z.sum(0), y.sum(0)


def norms() -> Compiled:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    batch = (torch.empty(ROWS, WIDTH),)
    return autopar.compile(model, "dp=1", loss_fn=lambda m, x: m(x).square().mean(), batch=batch, compile="triton")


def on(found: Compiled, machine: str) -> Compiled:
    return replace(found, plan=replace(found.plan, fixed=Fixed(machine=named(machine))))


@pytest.mark.parametrize(("processors", "programs"), [(132, 528), (108, 432), (2, 8), (2000, ROWS)])
def test_each_program_has_a_row_of_partial_sums(processors: int, programs: int) -> None:
    """Four programs of four warps run at once on a processor; there are no more of them than rows."""
    fused = group(sums, [torch.empty(ROWS, WIDTH)] * 2, "sums", "columns")
    x, y = (torch.empty(ROWS, WIDTH, device=META) for _ in range(2))
    with Tracker("meta") as tracker:
        found = unlaunched(processors)(fused, (None, None))(x, y)
    assert [(tuple(each.shape), each.dtype) for each in found] == [((WIDTH,), torch.float32)] * 2
    row = WIDTH * FLOAT
    # both partial sums are there until the launch has been asked for, and the first total beside them
    assert [event.total // row for event in tracker.events[:3]] == [programs, 2 * programs, 2 * programs + 1]
    del found
    assert tracker.total == 0


def test_random_bits_stay_in_registers() -> None:
    """Dropout on a GPU writes its result and no more, over its operand or beside it; other draws begin with their bits
    in memory."""
    x, seed = torch.empty(ROWS, WIDTH, device=META), torch.empty(2, dtype=torch.int64, device=META)
    place = seed, 3, 0.1, (ROWS, WIDTH), (ROWS, WIDTH), (0, 0)
    draws = (
        (lambda: ON_GPU[dropout](x, *place), 1),
        (lambda: ON_GPU[dropout_inplace](x, *place), 0),
        (lambda: ON_GPU[random](seed, 3, "uniform", x.shape, torch.float32, *place[3:]), 3),  # bits, as floats
    )
    for draw, values in draws:
        with Tracker("meta") as tracker:
            draw()
        assert tracker.peak_bytes() // x.nbytes == values


def test_a_report_counts_no_bits() -> None:
    """The dropout of a model by itself, in the forward pass and in the backward pass."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))
    batch = (torch.empty(ROWS, WIDTH),)
    found = autopar.compile(model, "dp=1", loss_fn=lambda m, x: m(x).square().mean(), batch=batch)
    assert sum("dropout" in str(node.target) for node in found.program.nodes) == 2
    assert not any("dropout" in each.node for each in found.memory(device="cuda").timeline), "both write over operands"


def test_a_report_counts_them() -> None:
    """The gradients of a norm's weight and bias and of the bias before it, on an H100 and on an A100."""
    found = norms()

    def at_norm(machine: str) -> int:
        moments = on(found, machine).memory(device="cuda").timeline
        (moment,) = (each for each in moments if "native_layer_norm_backward" in each.node)
        return moment.peak

    assert at_norm("h100-80g") - at_norm("a100-80g") == 3 * 4 * (132 - 108) * WIDTH * FLOAT


def test_a_group_without_a_kernel_takes_what_its_calls_take(caplog: pytest.LogCaptureFixture) -> None:
    """Sums over rows that no program holds; an estimate launches nothing, so it warns of nothing."""
    fused = group(lambda x: (lambda y: (y, y.sum(0)))(x.softmax(-1)), [torch.empty(4, 20_000)], "long")
    x = torch.empty(4, 20_000, device=META)
    peaks = []
    for call in (unlaunched(132)(fused, (None, None)), plain(fused, META)):
        with Tracker("meta") as tracker:
            call(x)
        peaks.append(tracker.peak_bytes())
    assert peaks[0] == peaks[1] == (4 + 1) * 20_000 * FLOAT and not caplog.messages


def test_the_launcher_allocates_them(tmp_path: Path) -> None:
    """What runs, in memory of the CPU, allocates what the estimate says of as many processors."""
    from autopar.runtime.triton.launch_kernel import FusedKernel

    class Nothing:
        def __getitem__(self, grid: tuple[int, ...]):
            assert grid == (8, 1)
            return lambda *operands, **options: None

    fused = group(sums, [torch.empty(ROWS, WIDTH)] * 2, "sums", "columns")
    seen = []
    for device, kernel in (
        ("cpu", FusedKernel(fused, plain(fused), lambda _: Nothing(), torch.device("cpu"), processors=2)),
        ("meta", unlaunched(2)(fused, (None, None))),
    ):
        x, y = (torch.empty(ROWS, WIDTH, device=device) for _ in range(2))
        with Tracker(device) as tracker:
            kernel(x, y)
        seen.append([event.total for event in tracker.events])
    assert seen[0] == seen[1] and max(seen[0]) > 2 * 8 * WIDTH * FLOAT


# -- results that are known -------------------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """The ops that run, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[OpOverload] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def form(value: Any, operands: list[Tensor]) -> Any:
    """All that a report sees of a result: sizes, and whose memory it is (in numbers of operands)."""
    if isinstance(value, (list, tuple)):
        return type(value), [form(each, operands) for each in value]
    if value is None:
        return None
    shown = [at for at, each in enumerate(operands) if storage_of(each) == storage_of(value)]
    place = value.shape, value.stride(), value.storage_offset(), value.untyped_storage().nbytes()
    return type(value), place, value.dtype, value.device, shown


X, WHOLE = torch.empty(4, 6, device=META), torch.empty(4, 6, dtype=torch.int64, device=META)
COIN, ROW = torch.empty(4, 6, dtype=torch.bool, device=META), torch.empty(6, device=META)
NORM = (X, X, [6], torch.empty(4, 1, device=META), torch.empty(4, 1, device=META), ROW, ROW)
CALLS = [
    (aten.add.Scalar, COIN, 1), (aten.add.Scalar, COIN, 1.0), (aten.add.Scalar, COIN, True),
    (aten.add.Scalar, WHOLE, 1), (aten.add.Scalar, WHOLE, 1.0), (aten.add.Scalar, X, 1),
    (aten.sum.dim_IntList, X, [0]), (aten.sum.dim_IntList, X, [1]), (aten.sum.dim_IntList, X, [0, 1]),
    (aten.sum.dim_IntList, X, [0], True), (aten.sum.dim_IntList, X.t(), [0]), (aten.sum.dim_IntList, WHOLE, [0]),
    (aten.clone.default, X), (aten.clone.default, X.t()), (aten.clone.default, X[1:]), (aten.clone.default, X[:, :1]),
    (aten.mul.Tensor, X, X), (aten.mul.Tensor, X, ROW), (aten.mul.Tensor, WHOLE, X), (aten.mul.Tensor, X, 2),
    (aten.topk.default, X, 2), (aten.topk.default, X, 3), (aten.native_layer_norm.default, X, [6], ROW, ROW, 1e-5),
    (aten.native_layer_norm_backward.default, *NORM, [True, True, True]),
    (aten.native_layer_norm_backward.default, *NORM, [True, False, False]),
    (aten._foreach_sqrt.default, [X, ROW]), (aten.cat.default, [X, X]), (aten.cat.default, [X, X], 1),
    (aten.view.default, X, [24]), (aten.slice.Tensor, X, 0, 1), (aten._unsafe_view.default, X, [24]),
    (aten.unbind.int, X), (aten.add_.Tensor, X, ROW), (aten._foreach_add_.Scalar, [X, ROW], 1),
]  # fmt: skip


def test_a_known_result_is_what_the_op_gives() -> None:
    """Whichever calls were before: scalars of another type, lists, views, several results, None, writes in place."""
    known = KnownResults()
    for func, *args in CALLS * 2:
        operands = [each for each in args if isinstance(each, Tensor)]
        result, plain = known.call(func, tuple(args), {}), func(*args)
        assert form(result, operands) == form(plain, operands), (func, args)
    assert known.call(aten.add_.Tensor, (X, ROW), {}) is X
    assert known.call(aten.sum.default, (X,), {"dtype": torch.float64}).dtype == torch.float64
    assert known.call(aten.sum.default, (X,), {"dtype": torch.float32}).dtype == torch.float32


def test_a_known_op_does_not_run() -> None:
    known = KnownResults()
    with Calls() as calls:
        made = [known.call(aten.mul.Tensor, (torch.empty(4, 6, device=META), X), {}) for _ in range(3)]
    assert calls.ops.count(aten.mul.Tensor) == 1 and len({storage_of(each) for each in made}) == 3


def test_calls_of_which_a_key_does_not_tell_all_run_each_time() -> None:
    """The user's own ops may do anything, draws differ, tensors with data give data, and a result may lie in memory
    that is larger than it."""
    known, here = KnownResults(), torch.ones(2)
    users, ours = torch.library.Library("known_results", "DEF"), torch.library.Library("autopar", "FRAGMENT")
    for library, name, kernel in ((users, "twice", lambda x: x * 2), (ours, "a_corner", lambda x: (x * 2)[:2, :2])):
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, kernel, "Meta")
    twice, corner = torch.ops.known_results.twice.default, torch.ops.autopar.a_corner.default
    for func, *args in ((twice, X), (corner, X), (aten.rand_like.default, X), (aten.mul.Tensor, here, here)):
        with Calls() as calls:
            for _ in range(3):
                known.call(func, tuple(args), {})
        assert calls.ops.count(func) == 3
    assert known.call(aten.mul.Tensor, (here, 3), {}).tolist() == [3, 3]
