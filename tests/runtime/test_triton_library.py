"""Files of generated kernels: when they are written, what they share, and what happens where none can be had."""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hand_groups import group
from torch import Tensor

from autopar.errors import CompileError
from autopar.ir.ops.fused import Fused
from autopar.ir.options import StepOptions
from autopar.parallel.session.compilers import compiler_on
from autopar.runtime.executor.run_fused import kernels_for, plain
from autopar.runtime.triton import library as source
from autopar.runtime.triton import toolchain
from autopar.runtime.triton.emit import KernelText, emit
from autopar.runtime.triton.launch_kernel import FusedKernel
from autopar.runtime.triton.lowering.lower import lower
from autopar.runtime.triton.lowering.values import CannotEmit
from autopar.runtime.triton.toolchain import check_toolchain

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def gated(rows: int = 4) -> Fused:
    return group(lambda x, y: F.silu(x) * y, [torch.empty(rows, 3, 96), torch.empty(rows, 3, 96)], "silu_mul", "points")


def kernel_of(fused: Fused) -> KernelText:
    return emit(lower(fused))


def library(directory: Path) -> Any:
    pytest.importorskip("triton", reason="Triton has no package for this machine")
    made = kernels_for("triton", CPU, True, directory)
    assert made is not None
    return made


def test_a_cpu_has_no_kernels_unless_the_interpreter_is_asked_for(tmp_path: Path) -> None:
    assert kernels_for("triton", CPU, False, tmp_path) is None
    assert kernels_for(None, CPU, True, tmp_path) is None


# -- files ------------------------------------------------------------------------------------------------------------


def test_another_batch_size_is_the_same_kernel() -> None:
    assert kernel_of(gated(4)).digest == kernel_of(gated(7)).digest


def test_another_width_dtype_or_stride_is_another_kernel() -> None:
    wide = group(lambda x, y: F.silu(x) * y, [torch.empty(4, 3, 128)] * 2, "silu_mul", "points")
    short = group(lambda x, y: F.silu(x) * y, [torch.empty(4, 3, 96).half()] * 2, "silu_mul", "points")
    transposed = emit(lower(gated()), ((288, 1, 3), (288, 96, 1)))
    assert len({kernel.digest for kernel in (kernel_of(gated()), kernel_of(wide), kernel_of(short), transposed)}) == 4


def test_alike_groups_stand_in_the_file_once(tmp_path: Path) -> None:
    made = library(tmp_path)
    made(gated()), made(gated())
    made(group(lambda x: x.relu(), [torch.empty(4, 96)], "relu", "points"))
    assert made.source.count("@triton.jit") == 2
    assert "silu_mul_" in made.source and "relu_" in made.source


def test_the_lines_of_a_kernel_name_the_ops_and_the_users_lines() -> None:
    text = source.text_of([kernel_of(gated())])
    assert "# %silu  aten.silu  model.py:1" in text
    assert "# in0: %arg0_1 float32[4, 3, 96]" in text


def test_a_file_is_written_once(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton has no package for this machine")
    kernels = [kernel_of(gated())]
    source.load(kernels, tmp_path)
    (path,) = tmp_path.glob("*.py")  # Python keeps its bytecode beside it
    written = path.stat().st_mtime_ns
    assert source.load(kernels, tmp_path) is source.load(kernels, tmp_path)
    assert [path] == list(tmp_path.glob("*.py")) and path.stat().st_mtime_ns == written


def test_a_directory_that_cannot_be_written_is_replaced_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton", reason="Triton has no package for this machine")
    taken = tmp_path / "file"
    taken.write_text("")
    with caplog.at_level(logging.WARNING, "autopar"):
        source.load([kernel_of(gated())], taken)
        source.load([kernel_of(group(lambda x: x.relu(), [torch.empty(4, 96)], "relu"))], taken)
    (said,) = caplog.messages
    assert said.startswith(f"generated kernels cannot be kept in {taken} (File exists): they go to ")
    assert said.endswith("and are compiled anew in each run. AUTOPAR_KERNELS names another directory.")


def test_the_temporary_directory_goes_with_its_process(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton has no package for this machine")
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    script = """if True:
        import sys
        from pathlib import Path
        from autopar.runtime.triton import library as source
        from test_triton_library import gated, kernel_of
        print(source.load([kernel_of(gated())], Path(sys.argv[1])).__file__)"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "file")], capture_output=True, text=True,
        env=os.environ | {"TMPDIR": str(tmp_path / "temporary"), "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.stdout.startswith(str(tmp_path / "temporary" / "autopar_kernels_")), done.stderr
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_disk_that_is_full_keeps_no_part_of_a_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group then runs op by op: there is no room in the temporary directory either."""
    made, x = library(tmp_path)(gated()), torch.randn(4, 3, 96)

    def full(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(source.os, "replace", full)
    with caplog.at_level(logging.WARNING, "autopar"):
        assert torch.equal(made(x, x)[0], F.silu(x) * x)
    assert f"kept in {tmp_path} (No space left on device)" in caplog.messages[0]
    assert caplog.messages[1] == (
        "the group silu_mul runs op by op, without a kernel: OSError: [Errno 28] No space left on device"
    )
    assert list(tmp_path.iterdir()) == []


# -- no kernel --------------------------------------------------------------------------------------------------------


def test_a_kernel_that_cannot_be_launched_is_replaced_by_its_ops_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """This process does not interpret, so that a launch on a CPU finds no driver."""
    fused, x = group(lambda x: x.relu() * 3, [torch.empty(4, 3, 96)], "unlaunched", "points"), torch.randn(4, 3, 96)
    made = library(tmp_path)
    layers = made(fused), made(fused)
    with caplog.at_level(logging.WARNING, "autopar"):
        for layer in (*layers, *layers):
            assert torch.equal(layer(x)[0], x.relu() * 3)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("the group unlaunched runs op by op, without a kernel: ")


class Refusing:
    """A kernel whose machine code no assembler makes, at its first launch."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*operands: Any, **options: Any) -> None:
            raise RuntimeError("`ptxas` failed with error code 255:\nptxas fatal : Unresolved extern function")

        return launch


def unreadable(kernel: KernelText) -> Any:
    return compile("def kernel(:", "kernels.py", "exec")


@pytest.mark.parametrize(
    ("compiled", "reason"),
    [
        (lambda kernel: Refusing(), "RuntimeError: ptxas fatal : Unresolved extern function"),
        (unreadable, "SyntaxError: invalid syntax (kernels.py, line 1)"),
    ],
    ids=["assembler", "source"],
)
def test_a_kernel_that_does_not_compile_is_replaced_by_its_ops(
    compiled: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for each group: it is not tried again. Operands that it would have written over are as they were."""
    fused = group(lambda x: x.relu() * 3, [torch.empty(4, 96)], f"refused_by_{compiled.__name__}", "points")
    tries = []
    made = FusedKernel(fused, plain(fused), lambda kernel: tries.append(kernel) or compiled(kernel), CPU, over=(0,))
    x = torch.randn(4, 96)
    with caplog.at_level(logging.WARNING, "autopar"):
        for _ in range(2):
            assert torch.equal(made(x)[0], x.relu() * 3)
    assert made.reason == reason and len(tries) == 1
    (said,) = caplog.messages
    assert said == f"the group {fused.name} runs op by op, without a kernel: {reason}"


def test_operands_of_other_types_than_the_programs_run_op_by_op(tmp_path: Path) -> None:
    made = library(tmp_path)(group(lambda x: x + 1, [torch.empty(4, 96)], "typed", "points"))
    assert made(torch.zeros(4, 96, dtype=torch.float64))[0].dtype == torch.float64
    assert made.reason == "operand 0 is torch.float64 [4, 96], not torch.float32 [4, 96]"


def test_what_has_no_kernel_says_why(tmp_path: Path) -> None:
    def other_rows(x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True).flip(0)).contiguous()

    fused = group(other_rows, [torch.empty(4, 96)], "turned", "rows")
    with pytest.raises(CannotEmit, match="of a row is read in other rows"):
        kernel_of(fused)
    made, x = library(tmp_path)(fused), torch.randn(4, 96)
    assert "of a row is read in other rows" in made.reason and torch.equal(made(x)[0], other_rows(x))


def test_rows_of_two_widths_have_no_kernel() -> None:
    with pytest.raises(CannotEmit, match="it reads rows of 48 elements, 8 of them and of 96 elements, 4 of them"):
        kernel_of(group(lambda x: (x.sum(-1), x.reshape(8, 48).sum(-1)), [torch.empty(4, 96)], "two", "rows"))


def test_long_rows_are_not_summed_with_others() -> None:
    with pytest.raises(CannotEmit, match="it sums over rows of 20,000 elements, which a program does not hold"):
        kernel_of(group(lambda x: (lambda y: (y, y.sum(0)))(x.softmax(-1)), [torch.empty(4, 20_000)], "long"))


# -- machines ---------------------------------------------------------------------------------------------------------


def test_a_cpu_without_the_interpreter_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_toolchain(CPU, interpret=False)


def test_triton_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CompileError) as caught:
        check_toolchain(CUDA, interpret=False)
    assert str(caught.value) == (
        'compile="triton" on cuda needs Triton 3.6 or newer, which is not installed: pip install triton, or write '
        'compile="executor", which runs op by op, or compile="inductor".'
    )


def test_triton_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    old = types.SimpleNamespace(__version__="3.2.0+git1")
    monkeypatch.setattr(toolchain.importlib, "import_module", lambda name: old)
    with pytest.raises(CompileError, match=r"TRITON_INTERPRET=1 needs Triton 3\.6 or newer, and this is 3\.2\.0"):
        check_toolchain(CPU, interpret=True)


def test_a_gpu_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton has no package for this machine")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(CompileError) as caught:
        check_toolchain(CUDA, interpret=False)
    assert str(caught.value) == (
        'compile="triton" needs a GPU of compute capability 8.0 or newer (A100, H100), and cuda is a Tesla T4 of 7.5: '
        'write compile="executor", which runs op by op, or compile="inductor".'
    )
    auto = StepOptions()
    assert compiler_on(auto, CUDA).compile == "executor"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert compiler_on(auto, CUDA).compile == "triton" and compiler_on(auto, CPU).compile == "executor"
    assert compiler_on(StepOptions(compile="inductor"), CUDA).compile == "inductor"
    check_toolchain(CUDA, interpret=False)
