"""The groups that the generated kernels are proved with, by hand: the pointwise parts of the blocks of common models.

A case makes operands for (batch, time, width) in a dtype, and computes with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import autopar.runtime.executor.kernel_table  # noqa: F401  registers the semantic ops
from autopar.ir.ops.ops import op

aten = torch.ops.aten
Dims = tuple[int, int, int]
SEED = torch.tensor([5, 2**33 + 7])


@dataclass(frozen=True)
class Case:
    """function: of the operands that `shapes` gives for (b, t, d): a letter string, whose first is the kind: x is of
    the case's dtype, f float32, m bool, i an index below the width, s the seed, n a number. kind: of the group."""

    name: str
    kind: str
    function: Callable[..., Any]
    operands: Callable[[int, int, int], Sequence[tuple[str, tuple[int, ...]]]]

    def make(self, dims: Dims, dtype: torch.dtype, seed: int = 0) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)

        def one(kind: str, shape: tuple[int, ...]) -> Any:
            if kind == "s":
                return SEED
            if kind == "n":
                return 1
            if kind == "m":
                return torch.rand(shape, generator=generator) < 0.7
            if kind == "i":
                return torch.randint(-1, dims[2], shape, generator=generator)
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            if kind == "p":
                drawn = drawn.abs() + 0.5
            return drawn.to(torch.float32 if kind in ("f", "p") else dtype)

        return [one(*operand) for operand in self.operands(*dims)]


def _x(count: int) -> Callable[[int, int, int], list[tuple[str, tuple[int, ...]]]]:
    return lambda b, t, d: [("x", (b, t, d))] * count


def rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


def unrotated(g: Tensor) -> Tensor:
    """The gradient of `rotated`, as autograd takes it apart."""
    half = g.shape[-1] // 2
    ends = [g[..., half:], g[..., :half]]
    n = g.shape[-1]
    a = aten.slice_backward(ends[0], list(g.shape), g.ndim - 1, 0, half, 1)
    b = aten.slice_backward(-ends[1], list(g.shape), g.ndim - 1, half, n, 1)
    return a + b


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.reshape(*x.shape[:-1], heads, -1).transpose(1, 2)


def rope_forward(q: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q = _heads(q, 2)
    return (q * cos + rotated(q) * sin).clone(memory_format=torch.contiguous_format)


def rope_backward(g: Tensor, cos: Tensor, sin: Tensor) -> Any:
    back = g * cos + unrotated(g * sin)
    return back.transpose(1, 2).reshape(g.shape[0], g.shape[2], -1)


def packed_backward(dq: Tensor, dk: Tensor, dv: Tensor) -> Any:
    rows = [g.transpose(1, 2).reshape(g.shape[0], g.shape[2], -1) for g in (dq, dk, dv)]
    return torch.cat(rows, -1), torch.cat(rows, -1).sum([0, 1])


def swiglu_backward(g: Tensor, gate: Tensor, up: Tensor) -> Any:
    return aten.silu_backward(g * up, gate), g * F.silu(gate)


def hf_norm(x: Tensor, w: Tensor) -> Any:
    """As transformers writes an RMS norm."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * h.to(x.dtype)


def hf_norm_backward(g: Tensor, x: Tensor, w: Tensor, r: Tensor) -> Any:
    """Its gradient, as autograd takes it apart."""
    h = x.float()
    gw = (g * (h * r).to(x.dtype)).sum([0, 1], keepdim=True)
    gh = (g * w).float()
    gr = (gh * h).sum(2, keepdim=True)
    gv = gr * (-0.5 * r.pow(3)) / x.shape[-1]
    return (gh * r + gv.expand(x.shape) * 2.0 * h.pow(1.0)).to(x.dtype), gw.reshape(-1)


def softmax_dropout(x: Tensor, mask: Tensor, seed: Tensor, n: int) -> Any:
    b, h, t = x.shape
    p = torch.softmax((x * 0.125).masked_fill(mask, -1e4), -1)
    return p, op("dropout")(p, seed, 3, 0.2, [4 * b, h, t], [b, h, t], [n, 0, 0])


def softmax_dropout_backward(g: Tensor, p: Tensor, mask: Tensor, seed: Tensor, n: int) -> Any:
    b, h, t = g.shape
    g = op("dropout")(g, seed, 3, 0.2, [4 * b, h, t], [b, h, t], [n, 0, 0])
    return aten._softmax_backward_data(g, p, -1, p.dtype).masked_fill(mask, 0) * 0.125


def residual_dropout_norm(x: Tensor, y: Tensor, w: Tensor, b: Tensor, bias: Tensor, seed: Tensor) -> Any:
    shape = list(x.shape)
    h = x + op("dropout")(y + bias, seed, 9, 0.1, shape, shape, [0, 0, 0])
    out, mean, rstd = aten.native_layer_norm(h.float(), [x.shape[-1]], w, b, 1e-5)
    return h, out.to(x.dtype), mean, rstd


def norm_residual_dropout_backward(
    g: Tensor, gh: Tensor, h: Tensor, mean: Tensor, rstd: Tensor, w: Tensor, b: Tensor, seed: Tensor
) -> Any:
    """All of the gradients of `residual_dropout_norm`, in one pass."""
    shape = list(h.shape)
    both, width = (g.float(), h.float()), [h.shape[-1]]
    dx, dw, db = aten.native_layer_norm_backward(*both, width, mean, rstd, w, b, [True, True, True])
    total = dx.to(gh.dtype) + gh
    dy = op("dropout")(total, seed, 9, 0.1, shape, shape, [0, 0, 0])
    return total, dw, db, dy, dy.sum([0, 1])


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Any:
    out, mean, rstd = aten.native_layer_norm(x.float(), [x.shape[-1]], w, b, 1e-5)
    return out.to(x.dtype), mean, rstd


def layer_norm_backward(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor, b: Tensor) -> Any:
    both, width = (g.float(), x.float()), [x.shape[-1]]
    dx, dw, db = aten.native_layer_norm_backward(*both, width, mean, rstd, w, b, [True] * 3)
    return dx.to(x.dtype), dw, db


def cross_entropy(x: Tensor, index: Tensor) -> Any:
    lse = op("logsumexp")(x)
    kept = index != -1
    return lse, torch.where(kept, lse - op("pick")(x, torch.where(kept, index, 0)), 0.0)


def cross_entropy_backward(g: Tensor, x: Tensor, lse: Tensor, index: Tensor, n: int) -> Any:
    return op("cross_entropy_backward")(torch.where(index != -1, g, 0.0), x, lse, index, offset=n)


def router(x: Tensor) -> Any:
    p = torch.softmax(x.float(), -1)
    return p, op("logsumexp")(x), p.sum([0, 1])


def rms(x: Tensor, r: Tensor, w: Tensor) -> Any:
    h = x + r
    return h, *op("rms_norm")(h, w, 1e-5)


def rms_backward(g: Tensor, x: Tensor, w: Tensor, factor: Tensor, r: Tensor) -> Any:
    dx, dw = op("rms_norm_backward")(g, x, w, factor)
    return dx + r, dw


def qk_norm_rope(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """A norm of each head, then the rotation (Qwen 3)."""
    q = x.reshape(*x.shape[:-1], 2, -1)
    y, factor = op("rms_norm")(q, w, 1e-6)
    return y * cos + rotated(y) * sin, factor


def batch_norm(x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor, b: Tensor) -> Any:
    x = x.unsqueeze(-1)
    mean, rstd, w, b = (v.reshape(1, -1, 1, 1) for v in (mean, rstd, w, b))
    return F.relu((x - mean) * rstd * w + b).squeeze(-1)


def _norm(b: int, t: int, d: int) -> list[tuple[str, tuple[int, ...]]]:
    return [("x", (b, t, d)), ("x", (b, t, d)), ("f", (d,))]


def _even(d: int) -> int:
    return d + d % 2 if (d + d % 2) % 4 == 0 else d + d % 2 + 2


def _head(b: int, t: int, d: int) -> tuple[int, int, int, int]:
    return (b, 2, t, _even(d) // 2)


def _attention(b: int, t: int, d: int) -> list[tuple[str, tuple[int, ...]]]:
    return [("x", (b, t, d)), ("m", (t, d))]


_R3 = lambda b, t, d: ("p", (b, t, 1))  # noqa: E731
CASES = (
    Case("add_bias_gelu", "points", lambda x, b: F.gelu(x + b), lambda b, t, d: [("x", (b, t, d)), ("x", (d,))]),
    Case("gelu_tanh", "points", lambda x: F.gelu(x, approximate="tanh"), _x(1)),
    Case("silu_mul", "points", lambda x, y: F.silu(x) * y, _x(2)),
    Case("relu_squared", "points", lambda x: F.relu(x).pow(2), _x(1)),
    Case("tanh_sigmoid", "points", lambda x, y: torch.tanh(x) * torch.sigmoid(y), _x(2)),
    Case("gelu_backward", "points", lambda g, x: aten.gelu_backward(g, x), _x(2)),
    Case("gelu_tanh_backward", "points", lambda g, x: aten.gelu_backward(g, x, approximate="tanh"), _x(2)),
    Case("swiglu_backward", "points", swiglu_backward, _x(3)),
    Case("relu_backward", "points", lambda g, x: aten.threshold_backward(g, F.relu(x), 0), _x(2)),
    Case("tanh_backward", "points", lambda g, x: aten.tanh_backward(g, torch.tanh(x)), _x(2)),
    Case("sigmoid_backward", "points", lambda g, y: aten.sigmoid_backward(g, torch.sigmoid(y)), _x(2)),
    Case("leaky_relu", "points", lambda x, g: (F.leaky_relu(x), aten.leaky_relu_backward(g, x, 0.01, False)), _x(2)),
    Case("softplus", "points", lambda x, g: (F.softplus(x), aten.softplus_backward(g, 30 * x, 1, 20)), _x(2)),
    Case("elu", "points", lambda x: F.elu(x, 0.5) + F.selu(x), _x(1)),
    Case("hard", "points", lambda x, g: (F.relu6(4 * x), F.hardswish(4 * x), aten.hardsigmoid_backward(g, 4 * x),
         aten.hardswish_backward(g, 4 * x), aten.hardtanh_backward(g, 4 * x, 0, 6), F.hardsigmoid(x)), _x(2)),
    Case("near_zero", "points", lambda x: torch.log1p(x.abs() * 1e-3) + torch.expm1(x * 1e-3), _x(1)),
    Case("mse", "points", lambda g, x, y: (F.mse_loss(x, y, reduction="none"), aten.mse_loss_backward(g, x, y, 0)),
         _x(3)),
    Case("clamp_exp_log", "points", lambda x: (x.clamp(-1, 1).exp() + 1).log(), _x(1)),
    Case("soft_cap", "points", lambda x: 30.0 * torch.tanh(x / 30.0), _x(1)),
    Case("masked", "points", lambda x, m: torch.where(m, x, -1e4) + x.masked_fill(m, 0.5), _attention),
    Case("powers", "points", lambda x: (x.abs() + 1).pow(-0.5) + x.pow(3) - x.square().sqrt(), _x(1)),
    Case("extremes", "points", lambda x, y: torch.maximum(x, y) - torch.minimum(x, 0.5 * y), _x(2)),
    Case("casts", "points", lambda x, f: (x.float() + f, f.to(x.dtype) * x),
         lambda b, t, d: [("x", (b, t, d)), ("f", (b, t, d))]),
    Case("compare", "points", lambda x, y: ((x > y) & ~(x < 0), (x >= y).to(torch.int64)), _x(2)),
    Case("dropout", "points", lambda x, s, n: op("dropout")(x, s, 3, 0.3, [4 * x.shape[0], *x.shape[1:]],
         list(x.shape), [n, 0, 0]), lambda b, t, d: [("x", (b, t, d)), ("s", (2,)), ("n", ())]),
    Case("dropout_piece", "points", lambda x, s, n: op("dropout")(x, s, 3, 0.3, [*x.shape[:2], 4 * x.shape[2]],
         list(x.shape), [0, 0, n]), lambda b, t, d: [("x", (b, t, d)), ("s", (2,)), ("n", ())]),
    Case("dropout_far", "points", lambda x, s, n: op("dropout")(x, s, 3, 0.3, [2**10, 2**25, x.shape[2]],
         list(x.shape), [n, 5, 0]), lambda b, t, d: [("x", (b, t, d)), ("s", (2,)), ("n", ())]),
    Case("dropout_mirrored", "points", lambda x, s, n: op("dropout")(x, s, 3, 0.3, [x.shape[0], 2, -4, *x.shape[2:]],
         [x.shape[0], 2, 1, *x.shape[2:]], [0, 0, n, 0, 0]),
         lambda b, t, d: [("x", (b, 2, t, d)), ("s", (2,)), ("n", ())]),
    Case("dropout_mirrored_columns", "points", lambda x, s, n: op("dropout")(x, s, 3, 0.3, [*x.shape[:2], 2, -8, 3],
         [*x.shape[:2], 2, 1, 3], [0, 0, 0, n, 0]), lambda b, t, d: [("x", (b, t, 6)), ("s", (2,)), ("n", ())]),
    Case("dropout_mirrored_far", "points", lambda x, s, n: op("dropout")(x, s, 3, 0.3, [2**10, 4, -2**20, *x.shape[2:]],
         [x.shape[0], 4, 1, *x.shape[2:]], [n, 0, n, 0, 0]),
         lambda b, t, d: [("x", (b, 4, t, d)), ("s", (2,)), ("n", ())]),
    Case("dropout_slices", "points", lambda x, s, n: op("dropout")(x, s, 3, 0.3, [x.shape[0], 6, *x.shape[1:]],
         [x.shape[0], -2, *x.shape[1:]], [0, n, 0, 0]),
         lambda b, t, d: [("x", (b, 2 * t, d)), ("s", (2,)), ("n", ())]),
    Case("noise_mirrored", "points", lambda x, s, n: x + op("random")(s, 3, "uniform", list(x.shape), x.dtype,
         [x.shape[0], 2, -4, *x.shape[2:]], [x.shape[0], 2, 1, *x.shape[2:]], [0, 0, n, 0, 0]),
         lambda b, t, d: [("x", (b, 2, t, d)), ("s", (2,)), ("n", ())]),
    Case("noise", "points", lambda x, s: x + op("random")(s, 3, "uniform", list(x.shape), x.dtype, list(x.shape),
         list(x.shape), [0, 0, 0]), lambda b, t, d: [("x", (b, t, d)), ("s", (2,))]),
    Case("add_positions", "points", lambda x, p: x + p, lambda b, t, d: [("x", (b, t, d)), ("x", (t, d))]),
    Case("class_token", "points", lambda c, x, p: torch.cat([c.expand(x.shape[0], -1, -1), x], 1) + p,
         lambda b, t, d: [("x", (1, 1, d)), ("x", (b, t, d)), ("x", (t + 1, d))]),
    Case("select_backward", "points", lambda g, x: aten.select_backward(g, list(x.shape), 1, 0) + x,
         lambda b, t, d: [("x", (b, d)), ("x", (b, t, d))]),
    Case("pad_shift", "points", lambda x: F.pad(x, (0, 0, 1, -1)) + x, _x(1)),
    Case("flip_add", "points", lambda x: x.flip(1) + x, _x(1)),
    Case(
        "one_before", "points", lambda one, x: torch.cat([one.expand(*x.shape[:2], 1), x], -1) * 2,
        lambda b, t, d: [("x", (1, 1, 1)), ("x", (b, t, d))],
    ),
    Case(
        "stacked_numbers", "columns", lambda x, y: torch.stack([x, y]).sum(0), lambda b, t, d: [("x", ()), ("x", ())]
    ),
    Case("stack", "points", lambda x, y: torch.stack([x + y, x - y], 2), _x(2)),
    Case("split_gate", "points", lambda x: torch.split(x, x.shape[-1] // 2, -1)[0] * torch.sigmoid(
         torch.split(x, x.shape[-1] // 2, -1)[1]), lambda b, t, d: [("x", (b, t, _even(d)))]),
    Case("rope", "points", rope_forward,
         lambda b, t, d: [("x", (b, t, _even(d))), ("f", (t, _even(d) // 2)), ("f", (t, _even(d) // 2))]),
    Case("rope_backward", "points", rope_backward,
         lambda b, t, d: [("x", _head(b, t, d)), ("f", (t, _even(d) // 2)), ("f", (t, _even(d) // 2))]),
    Case("batch_norm_relu", "points", batch_norm, lambda b, t, d: [("x", (b, t, d)), *[("p", (t,))] * 4]),
    Case("cross_entropy_backward", "points", cross_entropy_backward,
         lambda b, t, d: [("f", (b, t)), ("x", (b, t, d)), ("f", (b, t)), ("i", (b, t)), ("n", ())]),
    Case("pick_backward", "points", lambda g, x, i: x + op("pick_backward")(g, i, x.shape[-1]),
         lambda b, t, d: [("x", (b, t)), ("x", (b, t, d)), ("i", (b, t))]),
    Case("row_numbers", "points", lambda a, b: ((a - b) * 2, (a > b)), lambda b, t, d: [("f", (b * t,))] * 2),
    Case("rms_norm", "rows", lambda x, w: op("rms_norm")(x, w, 1e-5), lambda b, t, d: [("x", (b, t, d)), ("f", (d,))]),
    Case("add_rms_norm", "rows", rms, _norm),
    Case("hf_norm", "rows", hf_norm, lambda b, t, d: [("x", (b, t, d)), ("x", (d,))]),
    Case("layer_norm", "rows", layer_norm, lambda b, t, d: [("x", (b, t, d)), ("f", (d,)), ("f", (d,))]),
    Case("residual_dropout_norm", "rows", residual_dropout_norm,
         lambda b, t, d: [*[("x", (b, t, d))] * 2, *[("f", (d,))] * 2, ("x", (d,)), ("s", (2,))]),
    Case("qk_norm_rope", "rows", qk_norm_rope, lambda b, t, d: [
         ("x", (b, t, _even(d))), ("f", (_even(d) // 2,)), ("f", (t, 1, _even(d) // 2)), ("f", (t, 1, _even(d) // 2))]),
    Case("softmax", "rows", lambda x: torch.softmax(x, -1), _x(1)),
    Case("log_softmax", "rows", lambda x: torch.log_softmax(x, -1), _x(1)),
    Case("scale_mask_softmax", "rows", lambda x, m: torch.softmax((x * 0.1).masked_fill(m, -1e4), -1), _attention),
    Case("softmax_dropout", "rows", softmax_dropout,
         lambda b, t, d: [("x", (b, t, d)), ("m", (t, d)), ("s", (2,)), ("n", ())]),
    Case("softmax_backward", "rows", lambda g, x: aten._softmax_backward_data(g, torch.softmax(x, -1), -1, g.dtype),
         _x(2)),
    Case("log_softmax_backward", "rows",
         lambda g, x: aten._log_softmax_backward_data(g, torch.log_softmax(x, -1), -1, g.dtype), _x(2)),
    Case("softmax_dropout_backward", "rows", softmax_dropout_backward,
         lambda b, t, d: [*[("x", (b, t, d))] * 2, ("m", (t, d)), ("s", (2,)), ("n", ())]),
    Case("position_bias_softmax", "rows", lambda x, p: torch.softmax(x + p, -1),
         lambda b, t, d: [("x", (b, t, d)), ("x", (1, t, d))]),
    Case("logsumexp", "rows", lambda x: op("logsumexp")(x * 2), _x(1)),
    Case("cross_entropy", "rows", cross_entropy, lambda b, t, d: [("x", (b, t, d)), ("i", (b, t))]),
    Case("amax_amin", "rows", lambda x: (x.amax(-1), x.amin(-1, keepdim=True)), _x(1)),
    Case("normalise", "rows", lambda x: x / (x.square().sum(-1, keepdim=True).sqrt() + 1e-6), _x(1)),
    Case("mean_row", "rows", lambda x, y: (x * y).mean(-1), _x(2)),
    Case("square_loss", "rows", lambda x, y: ((x - y).square()).sum([1, 2]), _x(2)),
    Case("rms_norm_backward", "columns", rms_backward, lambda b, t, d: [
         *_norm(b, t, d), _R3(b, t, d), ("x", (b, t, d))]),
    Case("hf_norm_backward", "columns", hf_norm_backward, lambda b, t, d: [
         ("x", (b, t, d)), ("x", (b, t, d)), ("x", (d,)), _R3(b, t, d)]),
    Case("layer_norm_backward", "columns", layer_norm_backward,
         lambda b, t, d: [*[("x", (b, t, d))] * 2, ("f", (b, t, 1)), _R3(b, t, d), ("f", (d,)), ("f", (d,))]),
    Case("norm_residual_dropout_backward", "columns", norm_residual_dropout_backward, lambda b, t, d: [
         *[("x", (b, t, d))] * 3, ("f", (b, t, 1)), _R3(b, t, d), ("f", (d,)), ("f", (d,)), ("s", (2,))]),
    Case("bias_gradient", "columns", lambda g: g.sum([0, 1]), _x(1)),
    Case("gelu_bias_backward", "columns", lambda g, x: (lambda y: (y, y.sum([0, 1])))(aten.gelu_backward(g, x)), _x(2)),
    Case("dropout_bias_backward", "columns", lambda g, s: (lambda y: (y, y.sum([0, 1], dtype=torch.float32)))(
         op("dropout")(g, s, 3, 0.3, list(g.shape), list(g.shape), [0, 0, 0])),
         lambda b, t, d: [("x", (b, t, d)), ("s", (2,))]),
    Case("positions_gradient", "columns", lambda g: (g * 0.5, (g * 0.5).sum([0], keepdim=True)), _x(1)),
    Case("packed_qkv_backward", "columns", packed_backward, lambda b, t, d: [("x", _head(b, t, d))] * 3),
    Case("router", "columns", router, _x(1)),
)  # fmt: skip
LOOPED = ("softmax", "cross_entropy", "layer_norm", "cross_entropy_backward", "softmax_backward", "amax_amin")
MOVING = ("flip_add", "pad_shift", "class_token")  # elements come from other rows
DIMS: tuple[Dims, ...] = ((3, 5, 40), (2, 7, 130), (1, 19, 265))
WIDTH_OF_LOOPS = 16_384 + 37
