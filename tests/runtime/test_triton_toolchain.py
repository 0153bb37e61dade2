"""What a machine lacks for generated kernels is said in words, before anything is compiled."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import CompileError
from autopar.runtime.triton import toolchain

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


def said(device: torch.device, interpret: bool = False) -> str:
    with pytest.raises(CompileError) as caught:
        toolchain.check_toolchain(device, interpret=interpret)
    return str(caught.value)


def test_a_cpu_needs_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_installed", lambda: None)
    toolchain.check_toolchain(CPU, interpret=False)


def test_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_installed", lambda: None)
    assert said(GPU) == (
        'compile="triton" on cuda:1 needs Triton, which is not installed: pip install triton, or leave compile= out.'
    )
    assert said(CPU, interpret=True).startswith('compile="triton" on TRITON_INTERPRET=1 needs Triton, which is not')


def test_an_old_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_installed", lambda: "3.5.1+git3")
    assert said(GPU) == (
        'compile="triton" on cuda:1 needs Triton 3.6 or later, and 3.5.1+git3 is installed: pip install -U triton, or '
        "leave compile= out."
    )
    monkeypatch.setattr(toolchain, "_installed", lambda: "3.10.0")
    toolchain.check_toolchain(CPU, interpret=True)


def test_an_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_installed", lambda: "3.6.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert said(GPU) == (
        'compile="triton" writes kernels for GPUs of compute capability 8.0 (A100) or later, and cuda:1 has 7.5: leave '
        "compile= out there, on every rank."
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    toolchain.check_toolchain(GPU, interpret=False)


def test_verify_asks_for_it_where_kernels_are_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_installed", lambda: None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(CompileError, match="TRITON_INTERPRET=1 needs Triton"):
        autopar.verify(nn.Linear(4, 4), "dp=1", batch=torch.ones(4, 4), compile="triton")


def test_verify_sends_inductor_to_processes() -> None:
    with pytest.raises(CompileError, match="autopar verify TARGET --mesh MESH --backend gloo --compile inductor"):
        autopar.verify(nn.Linear(4, 4), "dp=1", batch=torch.ones(4, 4), compile="inductor")
