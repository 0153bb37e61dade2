"""What a compiler needs of this machine, and the kernels that run the groups of a program."""

from __future__ import annotations

from dataclasses import replace

import torch

from autopar.errors import CompileError
from autopar.ir.options import Compiler, StepOptions
from autopar.runtime.executor.executor import CPU, Kernels
from autopar.runtime.executor.run_fused import kernels_for
from autopar.settings import Settings


def compiler_on(options: StepOptions, device: torch.device) -> StepOptions:
    """Choose the compiler for programs that run on a device, where the user leaves it to us."""
    if options.compile != "auto":
        return options
    from autopar.runtime.triton import toolchain

    return replace(options, compile="triton" if toolchain.has_toolchain(device) else "executor")


def check_compiler(name: Compiler, device: torch.device) -> None:
    """Raise CompileError for a compiler that is not to be had on this machine."""
    if name == "inductor":
        from autopar.runtime.compilers import inductor  # 1 s of imports, for those who want it

        inductor.check_toolchain(device)
    elif name == "triton":
        from autopar.runtime.triton import toolchain

        toolchain.check_toolchain(device, Settings.read().interpret)


def check_in_one_process(name: Compiler) -> None:
    """Raise CompileError for a compiler whose code one process cannot run for all ranks, or not here."""
    if name == "inductor":
        raise CompileError(
            'compile="inductor" compiles what a process runs, collectives included, and verify plays all ranks in one '
            "process. Verify it on processes: `autopar verify TARGET --mesh MESH --backend gloo --compile inductor`; "
            'or write compile="executor".'
        )
    check_compiler(name, CPU)


def kernels_of(compiler: Compiler, device: torch.device) -> Kernels | None:
    """What runs the groups of a program on a device; None where their calls run one by one."""
    settings = Settings.read()
    return kernels_for(compiler, device, settings.interpret, settings.kernels, settings.exact)
