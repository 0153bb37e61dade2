"""The kernels of the semantic ops against eager PyTorch, its autograd and its float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from semantic_examples import semantic_examples
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.ir.ops.ops import equation_shape, op
from autopar.runtime.attention.attention_plain import plain, plain_backward
from autopar.runtime.attention.attention_whole import attention, attention_backward
from autopar.runtime.attention.blocks import AttentionCall
from autopar.runtime.executor.kernel_table import KERNELS
from autopar.runtime.kernels import direct
from autopar.runtime.kernels.contraction import add_contraction, contraction_plan, einsum
from autopar.runtime.kernels.embedding import add_embedding_gradient, embedding, embedding_backward
from autopar.runtime.kernels.experts import expert_mm, expert_mm_backward
from autopar.runtime.kernels.loss_kernels import cross_entropy_backward, cross_entropy_backward_inplace, logsumexp, pick
from autopar.torch_compat import tree_map

pytestmark = pytest.mark.usefixtures("each_side")

D = torch.float64

# --- einsum

EQUATIONS = [
    "abc,dc->abd", "abd,dc->abc", "abd,abc->dc", "abcd,abde->abce", "abcd,abed->abce", "abc,dc->adb", "ab,b->a",
    "a,b->ab", "abc,cbd->abd", "abc,dbc->da", "a,a->", "abcd,bd->ac", "aab,b->a", "abc,cd->bda", "ab,cb->ca",
    "abe,cb->ca", "ab,ab->ab", "ab,ac->abc", "ab,cd->ac",
]  # fmt: skip


def _operands(equation: str) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = dict(zip("abcde", (2, 3, 4, 5, 6), strict=True))
    names_a, names_b = equation.split("->")[0].split(",")
    return tuple(torch.randn([sizes[n] for n in names], dtype=D) for names in (names_a, names_b))  # type: ignore


@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize("strided", [False, True])
def test_contract_is_einsum(equation: str, strided: bool) -> None:
    a, b = _operands(equation)
    if strided:  # same values, other strides
        a, b = (x.permute(*reversed(range(x.ndim))).contiguous().permute(*reversed(range(x.ndim))) for x in (a, b))
    got, want = einsum(a, b, equation), torch.einsum(equation, a, b)
    assert got.shape == want.shape == equation_shape(equation, tuple(a.shape), tuple(b.shape))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("equation", EQUATIONS)
def test_a_product_is_added(equation: str) -> None:
    total, again = einsum(*_operands(equation), equation), _operands(equation)
    want = total + torch.einsum(equation, *again)
    assert add_contraction(total, *again, equation) is total
    torch.testing.assert_close(total, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "equation", ["abc,dc->abd", "abd,dc->abc", "abd,abc->dc", "abcd,abde->abce", "abcd,abed->abce"]
)
def test_common_contractions_copy_nothing(equation: str) -> None:
    a, b = _operands(equation)
    plan = contraction_plan(equation, tuple(a.shape), tuple(b.shape))
    assert plan is not None and plan.a.is_view and plan.b.is_view and plan.permute is None
    assert {x.data_ptr() for x in plan.matrices(a, b)} == {a.data_ptr(), b.data_ptr()}


def test_a_result_with_its_columns_first_is_not_permuted() -> None:
    a, b = _operands("abc,cd->dab")
    assert einsum(a, b, "abc,cd->dab").is_contiguous()


@pytest.mark.parametrize("sizes", [(0, 3, 4, 5), (2, 3, 0, 5), (1, 1, 1, 1)])
def test_contract_of_empty_and_unit_dims(sizes: tuple[int, ...]) -> None:
    a, b = torch.randn(*sizes[:3], dtype=D), torch.randn(sizes[3], sizes[2], dtype=D)
    torch.testing.assert_close(einsum(a, b, "abc,dc->abd"), torch.einsum("abc,dc->abd", a, b))


# --- attention


def _eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: object) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(
        q,
        k.repeat_interleave(group, 1),
        v.repeat_interleave(group, 1),
        **kwargs,  # type: ignore[arg-type]
    )


def _mask(kind: str, s: int, t: int, dtype: torch.dtype) -> torch.Tensor | None:
    match kind:
        case "none":
            return None
        case "bool":
            seen = torch.rand(s, t) > 0.3
            seen[2] = False  # a row that sees nothing
            return seen
        case "bool_batch":
            return torch.rand(2, 1, 1, t) > 0.3
        case "float":
            return torch.randn(s, t, dtype=dtype)
        case "float_head":
            return torch.randn(4, s, t, dtype=dtype)
        case "float_rows":
            return torch.zeros(1, 1, s, t, dtype=dtype).masked_fill_(torch.arange(s).view(-1, 1) == 1, -torch.inf)
    raise AssertionError(kind)


MASKS = ["none", "bool", "bool_batch", "float", "float_head", "float_rows"]


def _check_attention(
    dtype: torch.dtype,
    heads: int,
    causal: bool,
    mask_kind: str,
    s: int,
    t: int,
    e: int,
    tolerance: float,
    is_plain: bool,
) -> None:
    q = torch.randn(2, s, 4, 8, dtype=dtype).transpose(1, 2)  # the strides that a model has
    k, v = (torch.randn(2, t, heads, d, dtype=dtype).transpose(1, 2) for d in (8, e))
    mask = _mask(mask_kind, s, t, dtype)
    call = AttentionCall(mask, causal, 0.4)
    out, lse = plain(q, k, v, call) if is_plain else attention(q, k, v, mask, causal, 0.4)
    wide = [x.clone().to(D).requires_grad_() for x in (q, k, v)]
    both = mask if mask is None or mask.dtype == torch.bool else mask.to(D)
    if causal and mask is not None:  # eager refuses both at once
        lower = torch.ones(s, t, dtype=torch.bool).tril()
        both = both & lower if both.dtype == torch.bool else both.masked_fill(~lower, -torch.inf)
    want = _eager(*wide, attn_mask=both, is_causal=causal and mask is None, scale=0.4)
    grad = torch.randn(2, s, 4, e, dtype=dtype).transpose(1, 2)
    want_grads = torch.autograd.grad(want, wide, grad.to(D))
    grads = (
        plain_backward(grad, q, k, v, out, lse, call)
        if is_plain
        else attention_backward(grad, q, k, v, mask, out, lse, causal, 0.4)
    )
    assert lse.dtype == (D if dtype == D else torch.float32)
    torch.testing.assert_close(out.to(D), want.detach(), rtol=tolerance, atol=tolerance)
    for got, expected, x in zip(grads, want_grads, (q, k, v), strict=True):
        assert got.shape == x.shape and got.dtype == dtype
        torch.testing.assert_close(got.to(D), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask_kind", MASKS)
@pytest.mark.parametrize("s,t,e", [(5, 7, 8), (7, 5, 8), (6, 6, 3)])
def test_attention_float64(is_plain: bool, heads: int, causal: bool, mask_kind: str, s: int, t: int, e: int) -> None:
    _check_attention(D, heads, causal, mask_kind, s, t, e, 1e-12, is_plain)


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize(
    "dtype,tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 6e-2), (torch.float16, 1e-2)], ids=str
)
@pytest.mark.parametrize("heads,mask_kind", [(4, "none"), (2, "bool"), (1, "float"), (2, "none")])
def test_attention_other_dtypes(
    is_plain: bool, dtype: torch.dtype, tolerance: float, heads: int, mask_kind: str
) -> None:
    _check_attention(dtype, heads, mask_kind == "none", mask_kind, 300, 530, 8, tolerance, is_plain)


def test_attention_strides_the_flash_kernel_misreads() -> None:
    """A last dim that is not contiguous gives garbage in the ATen kernel; ours copies it first."""
    q, k, v, grad = (torch.randn(2, 4, 8, n, dtype=D).mT for n in (5, 7, 7, 5))
    out, lse = attention(q, k, v, None, False, 0.4)
    want, want_lse = plain(q, k, v, AttentionCall(None, False, 0.4))
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    expanded = torch.ones((), dtype=D).expand(out.shape)
    for g in (grad, expanded):
        got = attention_backward(g, q, k, v, None, out, lse, False, 0.4)
        torch.testing.assert_close(got, plain_backward(g, q, k, v, out, lse, AttentionCall(None, False, 0.4)))


@pytest.mark.parametrize("shape", [(0, 4, 5, 8), (2, 4, 0, 8), (2, 0, 5, 8)])
def test_attention_of_nothing(shape: tuple[int, ...]) -> None:
    q = torch.randn(shape)
    out, lse = attention(q, q, q, None, True, 0.4)
    assert out.shape == shape and lse.shape == shape[:3]
    assert [g.shape for g in attention_backward(out, q, q, q, None, out, lse, True, 0.4)] == [shape] * 3


def test_attention_row_that_sees_nothing() -> None:
    q, k, v = (torch.randn(1, 1, 4, 8, dtype=D) for _ in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    for out, lse in (attention(q, k, v, mask, False, 0.4), plain(q, k, v, AttentionCall(mask, False, 0.4))):
        assert out[0, 0, 2].abs().max() == 0 and lse[0, 0, 2] == 0


# --- cross entropy


@pytest.mark.parametrize("shape", [(7, 11), (2, 3, 70_001), (1, 1), (300, 4096)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_cross_entropy(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    index = torch.randint(0, shape[-1], shape[:-1])
    index.view(-1)[0] = -100
    x_wide = x.detach().clone().to(D).requires_grad_()
    lse = logsumexp(x)
    loss = lse - pick(x, index)
    assert lse.dtype == loss.dtype == (torch.float32 if dtype == torch.bfloat16 else D)
    want_lse = torch.logsumexp(x_wide, -1)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(lse.to(D), want_lse, rtol=tolerance, atol=tolerance)
    valid = index >= 0
    want = F.cross_entropy(x_wide.view(-1, shape[-1]), index.view(-1), reduction="none", ignore_index=-100)
    torch.testing.assert_close(
        torch.where(valid, loss, 0).to(D).view(-1), want.detach(), rtol=tolerance, atol=2 * tolerance
    )
    grad = torch.randn(shape[:-1]).to(dtype) * valid
    (want_grad,) = torch.autograd.grad(want, x_wide, grad.to(D).view(-1))
    got = cross_entropy_backward(grad, x, lse, index)
    assert got.dtype == dtype and got.shape == x.shape
    torch.testing.assert_close(got.to(D), want_grad.view(shape), rtol=2 * tolerance, atol=tolerance)
    kept = x.clone()
    written = cross_entropy_backward_inplace(grad, kept, lse, index)
    assert written.data_ptr() == kept.data_ptr() and torch.equal(written, got)


def test_of_confident_samples_no_digits_are_lost() -> None:
    """The label's logit is the largest of large ones: what is left of logsumexp - logit is 1e-3 of what 60 has in
    float32, and so is what is left of the gradient."""
    x = torch.randn(64, 50) * 2 + 60
    index = torch.randint(0, 50, (64,))
    x[torch.arange(64), index] += 16
    lse = logsumexp(x)
    wide = x.to(D).requires_grad_()
    want = F.cross_entropy(wide, index, reduction="none")
    (want_grad,) = torch.autograd.grad(want.sum(), wide)
    torch.testing.assert_close(lse - pick(x, index), want.detach(), rtol=0, atol=4e-7)
    got = cross_entropy_backward(torch.ones(64), x, lse, index)
    off = got.to(D).scatter(1, index[:, None], 0)
    torch.testing.assert_close(off, want_grad.scatter(1, index[:, None], 0), rtol=2e-6, atol=0)
    traced = [KERNELS[op(name)].traced for name in ("logsumexp", "cross_entropy_backward")]
    compiled = traced[1](torch.ones(64), x, traced[0](x), index)
    torch.testing.assert_close(compiled, got, rtol=1e-6, atol=1e-7)


def test_cross_entropy_over_a_split_vocabulary() -> None:
    x, index, grad = torch.randn(6, 12, dtype=D), torch.randint(0, 12, (6,)), torch.randn(6, dtype=D)
    lse = logsumexp(x)
    halves = [(part.contiguous(), offset) for part, offset in zip(x.chunk(2, -1), (0, 6), strict=True)]
    picked = [pick(part, index, offset=offset) for part, offset in halves]
    torch.testing.assert_close(picked[0] + picked[1], pick(x, index))
    grads = [cross_entropy_backward(grad, part, lse, index, offset=offset) for part, offset in halves]
    torch.testing.assert_close(torch.cat(grads, -1), cross_entropy_backward(grad, x, lse, index))


def test_logsumexp_of_infinities() -> None:
    inf = torch.inf
    x = torch.tensor([[-inf, -inf], [-inf, 1.0], [inf, 1.0], [3.0, 4.0]], dtype=D)
    torch.testing.assert_close(logsumexp(x), torch.logsumexp(x, -1))
    grad = cross_entropy_backward(torch.ones(4, dtype=D), x, logsumexp(x), torch.tensor([-100, 1, 0, 0]))
    assert torch.equal(grad[0], torch.zeros(2, dtype=D)) and not grad[[0, 1, 3]].isnan().any()
    for run in (logsumexp, KERNELS[op("logsumexp")].traced):
        assert run is not None and run(torch.empty(2, 0)).tolist() == [-inf, -inf]


# --- embedding


@pytest.mark.parametrize("padding", [-1, 0, 3, 5])
def test_embedding_whole_and_split(padding: int) -> None:
    weight = torch.randn(9, 4, dtype=D, requires_grad=True)
    index, grad = torch.tensor([[0, 3, 8], [3, 5, 1]]), torch.randn(2, 3, 4, dtype=D)
    want = F.embedding(index, weight, padding_idx=padding if padding >= 0 else None)
    (want_grad,) = torch.autograd.grad(want, weight, grad)
    torch.testing.assert_close(embedding(weight.detach(), index), want.detach())
    torch.testing.assert_close(embedding_backward(grad, index, 9, padding), want_grad)
    parts = [(weight.detach()[start : start + 3], start) for start in (0, 3, 6)]
    torch.testing.assert_close(sum(embedding(part, index, offset=start) for part, start in parts), want.detach())
    grads = [embedding_backward(grad, index, 3, padding, offset=start) for _, start in parts]
    torch.testing.assert_close(torch.cat(grads), want_grad)


@pytest.mark.parametrize("padding", [-1, 0, 3])
@pytest.mark.parametrize("offset", [0, 4])
def test_an_embedding_gradient_is_added(padding: int, offset: int) -> None:
    """Also where some indices lie in another rank's rows (offset 4)."""
    indices, grads = torch.randint(0, 6, (2, 3, 5)), torch.randn(2, 3, 5, 4, dtype=D)
    first, second = (
        embedding_backward(grad, index, 6, padding, offset=offset) for grad, index in zip(grads, indices, strict=True)
    )
    total = first.clone()
    assert add_embedding_gradient(total, grads[1], indices[1], 6, padding, offset=offset) is total
    torch.testing.assert_close(total, first + second, rtol=0, atol=1e-12)


def test_embedding_of_nothing() -> None:
    index = torch.zeros(0, 2, dtype=torch.int64)
    assert embedding(torch.randn(3, 4), index).shape == (0, 2, 4)
    assert embedding_backward(torch.randn(0, 2, 4), index, 3, -1).abs().sum() == 0


# --- experts


def test_experts_whole_and_split() -> None:
    x, w = torch.randn(30, 6, dtype=torch.float64), torch.randn(4, 6, 5, dtype=torch.float64)
    w.requires_grad_()
    index = torch.randint(0, 3, (30,))  # nobody goes to the last one
    want = torch.bmm(x.unsqueeze(1), w[index]).squeeze(1)
    grad = torch.randn_like(want)
    (want_grad,) = torch.autograd.grad(want, w, grad)
    parts = [(w.detach()[start : start + 2], start) for start in (0, 2)]
    torch.testing.assert_close(expert_mm(x, w.detach(), index), want.detach())
    torch.testing.assert_close(sum(expert_mm(x, part, index, offset=start) for part, start in parts), want.detach())
    torch.testing.assert_close(expert_mm_backward(x, grad, index, 4), want_grad)
    grads = [expert_mm_backward(x, grad, index, 2, offset=start) for _, start in parts]
    torch.testing.assert_close(torch.cat(grads), want_grad)


def test_experts_of_no_rows() -> None:
    index = torch.zeros(0, dtype=torch.int64)
    assert expert_mm(torch.randn(0, 6), torch.randn(4, 6, 5), index).shape == (0, 5)
    assert expert_mm_backward(torch.randn(0, 6), torch.randn(0, 5), index, 4).abs().sum() == 0


# --- registration


def test_dispatcher_runs_the_kernels_and_meta_agrees() -> None:
    examples = semantic_examples()
    assert {op(name) for name in examples} == set(KERNELS)
    for name, args in examples.items():
        direct = KERNELS[op(name)].run(*args)
        real = op(name)(*args)
        with FakeTensorMode() as mode:
            fake = op(name)(*tree_map(lambda a: mode.from_tensor(a) if isinstance(a, torch.Tensor) else a, args))
        several = isinstance(direct, (tuple, list))
        for x, y, z in zip(*((r if several else (r,)) for r in (direct, real, fake)), strict=True):
            assert torch.equal(x, y), name
            assert (x.shape, x.dtype) == (z.shape, z.dtype), name


def test_direct_callables_do_what_their_ops_do() -> None:
    """Each row of the executor's table against the op that it stands for."""
    x, y = torch.rand(2, 3, 4) + 0.5, torch.rand(2, 3, 4) + 0.5
    aten = torch.ops.aten
    special = {
        aten.view.default: (x, [6, 4]), aten._unsafe_view.default: (x, [6, 4]), aten.reshape.default: (x, [6, -1]),
        aten.permute.default: (x, [2, 0, 1]), aten.transpose.int: (x, 0, 2), aten.t.default: (x[0],),
        aten.unsqueeze.default: (x, 1), aten.squeeze.dim: (x[:1], 0), aten.select.int: (x, 1, 2),
        aten.expand.default: (x[:1], [5, 3, 4]), aten.cat.default: ([x, y], 1), aten.mm.default: (x[0], y[0].t()),
        aten.bmm.default: (x, y.mT), aten.where.self: (x > y, x, y),
    }  # fmt: skip
    binary = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}
    for target, function in direct._DIRECT.items():
        args = special.get(target) or ((x, y) if target in binary else (x,))
        want = target(*args)
        got = function(*args)
        assert torch.equal(got, want), target
    for target, variants in direct.IN_PLACE.items():
        for which, function in variants:
            args = [x.clone(), y.clone()] if target in binary else [x.clone()]
            want = target(*args)
            assert function(*args) is args[which] and torch.equal(args[which], want), target
