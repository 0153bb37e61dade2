"""What ptxas makes of generated kernels, for GPUs that are not here: registers, spills, and how wide accesses are."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from hand_groups import group
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton_groups import CASES, Case

from autopar.runtime.triton.emit import KernelText, emit
from autopar.runtime.triton.library import load, name_of
from autopar.runtime.triton.lowering.lower import LoweredGroup, lower

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.int64: "*i64", torch.int32: "*i32", torch.bool: "*i1",
}  # fmt: skip
NARROW = ("one_before", "stacked_numbers")  # rows of odd lengths, and groups of two numbers
REGISTERS = 65_536  # of a multiprocessor
# Bytes of a thread's stack, where spilled values lie: none, but from Triton 3.8 on (3.9 seen) in two kernels of halfs.
STACKS = {"powers": 8, "router": 8} if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8) else {}
WIDTHS = (8192, 16_384, 32_000)  # of rows that fill the registers, and of some that do not fit
WIDE = ("rms_norm_backward", "layer_norm", "cross_entropy", "softmax_backward", "add_rms_norm")
FAR = ("rms_norm_backward", "rope", "dropout", "layer_norm", "swiglu_backward")


@dataclass(frozen=True)
class Code:
    """registers: of a thread. stack: bytes, of which spilled values are. loads, stores: the widths of the accesses to
    memory, in bits."""

    registers: int
    stack: int
    loads: tuple[int, ...]
    stores: tuple[int, ...]


def code_of(kernel: KernelText, lowered: LoweredGroup, function: Any, capability: int, far: bool) -> Code:
    """Compile a kernel as a launch with aligned tensors does. far: with places of 64 bits."""
    signature = {f"in{i}": "i32" if t is None else TYPES[t.dtype] for i, t in enumerate(lowered.operands)}
    for i, r in enumerate(lowered.results):
        signature[f"out{i}"] = TYPES[r.value.dtype if r.extent == "columns" else r.type.dtype]
    signature |= {"rows": "i32", "WIDE": "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
    source = ASTSource(fn=function, signature=signature, constexprs={"WIDE": far}, attrs=aligned)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": kernel.tile.warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [BIN / "cuobjdump", "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    ptx = compiled.asm["ptx"]
    return Code(registers, stack, _widths("ld", ptx), _widths("st", ptx))


def _widths(kind: str, ptx: str) -> tuple[int, ...]:
    found = re.findall(rf"\b{kind}\.global(?:\.v(\d))?\.b(\d+)", ptx)
    return tuple(int(count or 1) * int(bits) for count, bits in found)


def check(case: Case, width: int, dtype: torch.dtype, capability: int, folder: Path, far: bool = False) -> None:
    """No spill, at least two programs a multiprocessor (one of longer rows), 128 bits for each main operand."""
    examples = case.make((1, 64, width), dtype) if width <= 4096 else case.make((1, 2, width), dtype)
    fused = group(case.function, examples, case.name, case.kind)
    lowered = lower(fused)
    kernel = emit(lowered)
    (function,) = _functions([kernel], folder)
    code = code_of(kernel, lowered, function, capability, far)
    name = f"{case.name} of {width} {dtype} on sm_{capability}: {code}"
    assert code.stack <= (STACKS.get(case.name, 0) if dtype == torch.float16 else 0), name
    assert code.registers * 32 * kernel.tile.warps * (1 if width > 4096 else 2) <= REGISTERS, name
    if case.name in NARROW:
        return
    main = sum("tl.load" in line and "column" in line for line in kernel.body)
    narrow = sum(("tl.load" in line and "column" not in line) or "key_of" in line for line in kernel.body)
    assert code.loads.count(128) >= main, name
    if not narrow:
        assert set(code.loads) <= {128}, name
    results = sum(result.extent == "all" for result in lowered.results)
    assert code.stores.count(128) >= results or not results, name


def _functions(kernels: Sequence[KernelText], folder: Path) -> list[Any]:
    return [getattr(load([kernel], folder), name_of(kernel)) for kernel in kernels]


def compile_(every: bool) -> None:
    """Each case for one GPU, and one of long rows and of far places of each kind of loop; or every combination."""
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        for i, case in enumerate(CASES):
            for width, dtype, capability, far in list(_ways(i, case))[:: 1 if every else 2]:
                check(case, width, dtype, capability, Path(folder), far)
                count += 1
    print(count, "compiled")


def _ways(i: int, case: Case) -> Iterator[tuple[int, torch.dtype, int, bool]]:
    """Of a case: width, dtype, GPU, and whether places have 64 bits."""
    capabilities = (80, 90) if i % 2 else (90, 80)
    for j, capability in enumerate(capabilities):
        yield 4096, (torch.bfloat16, torch.float32, torch.float16)[(i + j) % 3], capability, False
    if case.name in WIDE:
        for width in WIDTHS:
            if width <= 16_384 or case.kind != "columns":
                yield width, torch.bfloat16, 90, False
    if case.name in FAR:
        yield 4096, torch.bfloat16, 90, True
