"""Which kernel computes an attention, and what CUDA's are given: by stubs, on a CPU."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch
from attention_stubs import stubbed
from test_memory_formula import Scaled, total
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import autopar
from autopar.compiled import Compiled
from autopar.ir.ops.ops import attention as meta_attention
from autopar.runtime.attention.attention_kernels import (
    PLAIN,
    TABLE,
    AttentionKernel,
    AttentionShape,
    KernelDevice,
    chosen,
    kernel_for,
)
from autopar.runtime.attention.attention_plain import plain, plain_backward
from autopar.runtime.attention.attention_whole import KERNELS
from autopar.runtime.attention.blocks import AttentionCall

D = torch.float64
DOCS = (Path(__file__).parents[2] / "docs/attention.md").read_text()
DEVICES = {
    "H100": KernelDevice("cuda", (9, 0)),
    "A100": KernelDevice("cuda", (8, 0)),
    "T4": KernelDevice("cuda", (7, 5)),
    "MI300": KernelDevice("cuda", (9, 4), is_hip=True),
    "CPU": KernelDevice("cpu", is_host=True),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": D}
H100, A100 = DEVICES["H100"], DEVICES["A100"]
NAMED = {kernel.name: kernel for kernel in TABLE}


def documented() -> list[tuple[AttentionShape, str]]:
    """The examples of the docs: a call, and the kernel that they say."""
    found = []
    for line in DOCS.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 8 and cells[0] in DEVICES:
            (h, hk), (s, t), (d, e) = ([int(number) for number in cell.split("/")] for cell in cells[2:5])
            sizes = {"s": s, "t": t}
            mask = tuple(sizes.get(size) or int(size) for size in cells[6].split(" x ")) if cells[6] else None
            rest = 8, h, hk, s, t, d, e, cells[5] == "yes", mask
            found.append((AttentionShape(DEVICES[cells[0]], DTYPES[cells[1]], *rest), cells[7].strip("`")))
    return found


@pytest.mark.parametrize("call,name", documented())
def test_the_docs_say_which_kernel(call: AttentionShape, name: str) -> None:
    assert chosen(call).name == name


def test_the_docs_name_all_kernels() -> None:
    assert len(documented()) > 15 and {name for _, name in documented()} == set(NAMED)
    rows = re.findall(r"^\| `([^`]+)` \|", DOCS, re.MULTILINE)
    assert rows == [kernel.name for kernel in TABLE], "the table of the docs has another order"


@pytest.mark.parametrize("change", [{"b": 0}, {"t": 0}, {"d": 0}, {"h": 1 << 16, "hk": 1 << 16}])
def test_what_no_fused_kernel_takes(change: dict[str, int]) -> None:
    call = AttentionShape(H100, torch.bfloat16, 2, 4, 4, 8, 8, 16, 16)
    assert chosen(call).name == "flash" and chosen(call._replace(s=32, t=32)).name == "cudnn"
    for each in (call, call._replace(s=32, t=32)):
        assert chosen(each._replace(**change)) is PLAIN


def test_a_user_switches_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.empty(2, 4, 32, 16, dtype=torch.bfloat16, device="meta")
    call = functools.partial(kernel_for, q, q, q, AttentionCall(None, True, 1.0))
    assert call().name == "cudnn"
    torch.use_deterministic_algorithms(True)
    try:
        assert call().name == "flash"
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    assert call().name == "flash"
    monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: False)
    assert call().name == "efficient"
    monkeypatch.setattr(torch.backends.cuda, "mem_efficient_sdp_enabled", lambda: False)
    assert call() is PLAIN


# -- the calls of CUDA's kernels


def _operands(h: int, hk: int, s: int, t: int, d: int, e: int, dtype: torch.dtype) -> list[Tensor]:
    """grad, q, k, v with the strides that a model has."""
    shapes = ((h, s, e), (h, s, d), (hk, t, d), (hk, t, e))
    return [torch.randn(2, length, heads, width).to(dtype).transpose(1, 2) for heads, length, width in shapes]


def _mask(kind: str, s: int, t: int, dtype: torch.dtype) -> Tensor | None:
    hidden = torch.rand(s, t) < 0.3
    hidden[3 % s] = True  # a row that sees nothing
    match kind:
        case "none":
            return None
        case "bool":
            return ~hidden
        case "keys":
            return torch.rand(2, 1, 1, t) > 0.3
        case "expanded":
            return (~hidden).expand(2, 1, s, t)
        case "additive":
            return torch.randn(4, s, t, dtype=dtype).masked_fill_(hidden, -torch.inf)
    raise AssertionError(kind)


def _check(
    kernel: AttentionKernel, operands: list[Tensor], mask: Tensor | None, causal: bool, tolerance: float
) -> None:
    grad, q, k, v = operands
    scale = q.shape[3] ** -0.5
    want, want_lse = plain(q, k, v, AttentionCall(mask, causal, scale))
    want_grads = plain_backward(grad, q, k, v, want, want_lse, AttentionCall(mask, causal, scale))
    with stubbed() as called:
        out, lse = kernel.attention(q, k, v, AttentionCall(mask, causal, scale))
        grads = kernel.attention_backward(grad, q, k, v, out, lse, AttentionCall(mask, causal, scale))
        elsewhere = kernel.attention_backward(grad, q, k, v, out.contiguous(), lse, AttentionCall(mask, causal, scale))
    assert called == [kernel.name, *[f"{kernel.name}_backward"] * 2]
    assert out.transpose(1, 2).is_contiguous(), "the view that follows would be a copy"
    for got, expected in zip((out, lse, *grads), (want, want_lse, *want_grads), strict=True):
        assert got.shape == expected.shape and got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    assert all(map(torch.equal, grads, elsewhere)), "what is saved may lie otherwise"


@pytest.mark.parametrize("dtype,tolerance", [(D, 1e-12), (torch.bfloat16, 6e-2)], ids=str)
@pytest.mark.parametrize("hk", [4, 2, 1])
@pytest.mark.parametrize("causal,s,t", [(False, 5, 40), (True, 40, 40)])
@pytest.mark.parametrize("d,e", [(8, 8), (12, 12), (24, 8), (5, 16), (200, 200)])
def test_flash(dtype: torch.dtype, tolerance: float, hk: int, causal: bool, s: int, t: int, d: int, e: int) -> None:
    assert chosen(AttentionShape(A100, torch.bfloat16, 2, 4, hk, s, t, d, e, causal)).name == "flash"
    _check(NAMED["flash"], _operands(4, hk, s, t, d, e, dtype), None, causal, tolerance)


@pytest.mark.parametrize("dtype,tolerance", [(D, 1e-12), (torch.float32, 2e-5), (torch.float16, 1e-2)], ids=str)
@pytest.mark.parametrize("hk", [4, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["none", "bool", "keys", "expanded", "additive"])
@pytest.mark.parametrize("s,t,d,e", [(5, 40, 8, 8), (40, 37, 12, 12), (64, 16, 8, 24)])
def test_efficient_and_cudnn(
    dtype: torch.dtype, tolerance: float, hk: int, causal: bool, kind: str, s: int, t: int, d: int, e: int
) -> None:
    mask = _mask(kind, s, t, dtype)
    shape = None if mask is None else tuple(mask.shape)
    if kind != "none" or (causal and s != t):
        assert chosen(AttentionShape(A100, torch.float16, 2, 4, hk, s, t, d, e, causal, shape)).name == "efficient"
    for name in ("efficient", "cudnn"):
        _check(NAMED[name], _operands(4, hk, s, t, d, e, dtype), mask, causal, tolerance)


@pytest.mark.parametrize("name", ["cudnn", "flash", "efficient"])
def test_rows_at_odd_addresses_are_copied(name: str) -> None:
    """The stubs refuse what the kernels would misread: a piece of a wider row, a transposed one, an expanded one."""
    grad, q, k, v = _operands(4, 4, 16, 16, 8, 8, D)
    wide = torch.randn(2, 4, 16, 11, dtype=D)
    for odd in (wide[..., 3:], torch.randn(2, 4, 8, 16, dtype=D).mT):
        _check(NAMED[name], [grad, odd, k, odd], None, True, 1e-12)
    _check(NAMED[name], [torch.ones((), dtype=D).expand(grad.shape), q, k, v], None, True, 1e-12)


# -- plain products


@pytest.mark.parametrize("kind", ["none", "bool", "keys", "additive"])
@pytest.mark.parametrize("hk", [4, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_of_queries_are_the_whole(kind: str, hk: int, causal: bool) -> None:
    grad, q, k, v = _operands(4, hk, 21, 16, 8, 12, D)
    mask = _mask(kind, 21, 16, D)
    want = plain(q, k, v, AttentionCall(mask, causal, 0.4))
    block = 5 * 2 * 4 * 16 * 8  # five rows, and one at the end
    got = plain(q, k, v, AttentionCall(mask, causal, 0.4), block)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
    rest = *want, AttentionCall(mask, causal, 0.4)
    torch.testing.assert_close(
        plain_backward(grad, q, k, v, *rest, block), plain_backward(grad, q, k, v, *rest), rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("dtype", [D, torch.float32], ids=str)
def test_a_row_that_finite_numbers_hide_sees_all_alike(dtype: torch.dtype) -> None:
    """Beside torch.finfo(dtype).min a logsumexp has lost log(n). Plain products give the formula's results all the
    same; torch's kernel of the CPU, which the table takes, gives this row n times the formula's gradients."""
    grad, q, k, v = _operands(4, 4, 6, 5, 8, 8, dtype)
    mask = torch.zeros(6, 5, dtype=dtype)
    mask[1], mask[4, :2] = torch.finfo(dtype).min, torch.finfo(dtype).min
    operands = [one.clone().requires_grad_() for one in (q, k, v)]
    want = torch.softmax(operands[0] @ operands[1].mT * 0.3 + mask, -1) @ operands[2]
    wanted = [want.detach(), *torch.autograd.grad(want, operands, grad)]
    block = 2 * 4 * 3 * 5 * 8
    out, lse = plain(q, k, v, AttentionCall(mask, False, 0.3), block)
    got = [out, *plain_backward(grad, q, k, v, out, lse, AttentionCall(mask, False, 0.3), block)]
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == D else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(got, wanted, **tolerance)
    alone = torch.zeros_like(grad)
    alone[:, :, 1] = grad[:, :, 1]
    results = KERNELS["attention"].run(q, k, v, mask, False, 0.3)
    of_table = KERNELS["attention_backward"].run(alone, q, k, v, mask, *results, False, 0.3)
    of_formula = plain_backward(alone, q, k, v, out, lse, AttentionCall(mask, False, 0.3))
    torch.testing.assert_close(results[0], out, **tolerance)
    torch.testing.assert_close(of_table[2], 5 * of_formula[2], **tolerance)


def test_plain_results_lie_as_the_op_says() -> None:
    """A compiler is told of the op, and reads the results by these strides."""
    grad, q, k, v = (x.contiguous() for x in _operands(4, 2, 21, 16, 8, 12, D))
    found, said = plain(q, k, v, AttentionCall(None, True, 0.4)), meta_attention.meta(q, k, v, None, True, 0.4)
    assert [x.stride() for x in found] == [x.stride() for x in said]
    grads = plain_backward(grad, q, k, v, *found, AttentionCall(None, True, 0.4))
    assert [x.stride() for x in grads] == [x.stride() for x in (q, k, v)]


# -- under a compiler, and in memory


@pytest.mark.parametrize("dtype,op_name", [(torch.bfloat16, "cudnn"), (torch.float32, "efficient"), (D, "attention")])
def test_a_compiler_is_given_one_op(dtype: torch.dtype, op_name: str) -> None:
    def step(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out, lse = KERNELS["attention"].traced(q, k, v, None, True, 0.4)
        return KERNELS["attention_backward"].traced(grad, q, k, v, None, out, lse, True, 0.4)

    operands = [x.to("meta") for x in _operands(4, 2, 64, 64, 8, 8, dtype)]
    with torch.no_grad():
        graph = make_fx(step)(*operands).graph
    calls = [node for node in graph.nodes if node.op == "call_function" and isinstance(node.meta.get("val"), tuple)]
    names = {"attention": "autopar.attention"}.get(op_name, f"aten._scaled_dot_product_{op_name}_attention")
    assert [str(node.target) for node in calls] == [f"{names}.default", f"{names}_backward.default"]
    single = (node.meta["val"] for node in graph.nodes if isinstance(node.meta.get("val"), Tensor))
    assert not any(x.shape[-2:] == (64, 64) for x in single), "the scores of the whole"


@functools.cache
def _layer(length: int, dtype: torch.dtype, grouped: bool = False) -> Compiled:
    with torch.device("meta"):
        model = Scaled({"s": length, "h": 256, "a": 4}).to(dtype)
        x = torch.empty(1, length, 256, dtype=dtype)
    return autopar.compile(model, "dp=1", loss_fn=total, batch=(x,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, D], ids=str)
def test_a_layer_grows_with_the_sequence_and_not_with_its_square(dtype: torch.dtype) -> None:
    def activations(length: int) -> int:
        report = _layer(length, dtype).memory(0, device="cuda")
        return report.peak - sum(report.states.values())

    assert activations(8192) <= 2.1 * activations(4096)
