"""Arguments for every row of the rule table: attention, norms, convolution, space, losses, random, pointwise."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from rule_brute_force import Sample, op_of, run, sample
from rule_samples import C128, F64, Samples, mask, n, r
from semantic_examples import STEP

from autopar.runtime.kernels.convolve import convolution

aten = torch.ops.aten


def attention_samples() -> Samples:
    masks: list[Any] = [None, r(6, 4), mask(2, 1, 6, 4), r(2, 12, 1, 4), r(1, 12, 6, 4), r(1, 4)]
    # the causal form is square, or its meaning is a matter of taste
    cases = [
        (heads, m, False)
        for heads, m in itertools.product((12, 6, 2), masks)
        if m is None or heads == 12 or m.dim() < 3
    ]
    forward, backward = [], []
    for heads, bias, causal in [*cases, (12, None, True)]:
        keys = 6 if causal else 4
        kv = 6 if heads == 12 else heads
        q, k, v = r(2, heads, 6, 4), r(2, kv, keys, 4), r(2, kv, keys, 8)
        if bias is not None and bias.dtype == torch.bool:
            bias = bias | (torch.arange(keys) == 0)  # each row attends to something
        forward.append(sample(q, k, v, bias, causal, 0.5))
        out, lse = run("autopar.attention.default", (q, k, v, bias, causal, 0.5), {})
        backward.append(sample(r(2, heads, 6, 8), q, k, v, bias, out, lse, causal, 0.5))
    return {
        "autopar.attention.default": forward,
        "autopar.attention_backward.default": backward,
        **dropped_attention_samples(),
        **compared_attention_samples(),
        **checked_causal_samples(),
    }


def compared_attention_samples() -> Samples:
    """Vectors of samples, of heads, of both and of none; causal and not."""
    name = "autopar.compared_attention.default"
    places, ids = torch.arange(6).view(1, 1, 6), torch.randint(3, (2, 1, 6)).sort().values
    first = (torch.arange(4) == 0).view(1, 1, 4)
    forward, backward = [], []
    for heads, kv, keys, rows, columns, compare, causal in (
        (12, 6, 6, [places - 3], [places], "c0>r0", True),
        (6, 6, 6, [ids], [ids], "c0==r0", False),
        (4, 2, 4, [], [mask(2, 4, 4) | first], "c0", False),
        (2, 2, 4, [torch.arange(6).view(1, 1, 6) % 2 == 0], [first, mask(1, 2, 4)], "r0 | c1 & ~c0 | c0", False),
    ):
        q, k, v = r(2, heads, 6, 4), r(2, kv, keys, 4), r(2, kv, keys, 8)
        args = rows, columns, compare, causal, 0.5
        forward.append(sample(q, k, v, *args))
        out, lse = run(name, (q, k, v, *args), {})
        backward.append(sample(r(2, heads, 6, 8), q, k, v, rows, columns, out, lse, *args[2:]))
    return {name: forward, name.replace("attention", "attention_backward"): backward}


def checked_causal_samples() -> Samples:
    """Masks of samples, of heads and of both, and vectors that are alike for all or not."""
    places, ids = torch.arange(6).view(1, 1, 6), torch.arange(6).view(1, 1, 6) + torch.tensor([3, 9]).view(2, 1, 1)
    masks = (torch.ones(shape, dtype=torch.bool).tril() for shape in ((2, 1, 6, 6), (1, 4, 6, 6), (2, 4, 6, 6)))
    by_vectors = ((places, [places], [places]), (ids, [places, ids], [places, ids]), (places, [places, ids], [ids]))
    return {
        "autopar.checked_causal.default": [
            *(sample(mask, [], [], "") for mask in masks),
            *(sample(x, rows, columns, f"c0<r{len(rows) - 1} & c0<=r0") for x, rows, columns in by_vectors),
        ]
    }


def dropped_attention_samples() -> Samples:
    name, seed = "autopar.dropped_attention.default", torch.tensor([5, 7])
    forward, backward = [], []
    for b, heads, kv, bias, causal in ((2, 12, 6, None, True), (2, 6, 6, r(2, 1, 6, 6), False), (1, 4, 2, None, False)):
        shape = [b, heads, 6, 6]
        q, k, v, drawn = r(b, heads, 6, 4), r(b, kv, 6, 4), r(b, kv, 6, 8), (causal, 0.5, 3, 0.4, shape, shape, [0] * 4)
        forward.append(sample(q, k, v, bias, seed, *drawn))
        out, lse = run(name, (q, k, v, bias, seed, *drawn), {})
        backward.append(sample(r(b, heads, 6, 8), q, k, v, bias, out, lse, seed, *drawn))
    return {name: forward, name.replace("attention", "attention_backward"): backward}


def norm_samples() -> Samples:
    x, w, b = r(4, 6, 12), r(12), r(12)
    layer, layer_back = [], []
    for shape, wb in itertools.product(([12], [6, 12]), ((True, True), (True, False), (False, False))):
        weight, bias = (r(*shape) if on else None for on in wb)
        layer.append(sample(x, shape, weight, bias, 1e-5))
        _, mean, rstd = aten.native_layer_norm(x, shape, weight, bias, 1e-5)
        for wanted in ([True, wb[0], wb[1]], [False, wb[0], wb[1]], [True, False, False]):
            if any(wanted):
                layer_back.append(sample(r(4, 6, 12), x, shape, mean, rstd, weight, bias, wanted))
    group, group_back = [], []
    y = r(4, 12, 2, 3)
    for groups, affine in itertools.product((1, 4, 12, 2), (True, False)):
        weight, bias = (w, b) if affine else (None, None)
        group.append(sample(y, weight, bias, 4, 12, 6, groups, 1e-5))
        _, mean, rstd = aten.native_group_norm(y, weight, bias, 4, 12, 6, groups, 1e-5)
        group_back.append(sample(r(4, 12, 2, 3), y, mean, rstd, weight, 4, 12, 6, groups, [True, affine, affine]))
    batch, evaluation, batch_back = [], [], []
    for training in (True, False):
        batch.append(sample(y, w, b, r(12), r(12), training, 0.1, 1e-5))
        mean, rstd = (y.mean((0, 2, 3)), y.var((0, 2, 3)).rsqrt()) if training else (r(0), r(0))
        batch_back.append(sample(r(4, 12, 2, 3), y, w, r(12), r(12), mean, rstd, training, 1e-5, [True, True, True]))
        batch_back.append(sample(r(4, 12, 2, 3), y, w, r(12), r(12), mean, rstd, training, 1e-5, [True, False, False]))
    evaluation = [sample(y, w, b, r(12), r(12), 0.1, 1e-5), sample(y, None, None, r(12), r(12), 0.1, 1e-5)]
    rms = [sample(x, [12], weight, 1e-5) for weight in (w, None)]
    rms_back = [
        sample(r(4, 6, 12), x, [12], aten._fused_rms_norm(x, [12], w, 1e-5)[1], w, wanted)
        for wanted in ([True, True], [True, False])
    ]
    weight_norms = [(r(6, 4, 2), r(6, 1, 1), 0), (r(4, 2, 6), r(1, 1, 6), 2)]
    normed = [aten._weight_norm_interface(*one)[1] for one in weight_norms]
    return {
        "aten.native_layer_norm.default": layer,
        "aten.native_layer_norm_backward.default": layer_back,
        "autopar.in_groups.default": [sample(r(12, 6, 4), False), sample(r(12, 4), True, r(2, 3, 2, 4))],
        "autopar.in_microbatches.default": [sample(r(12, 6), 2), sample(r(12), 3)],
        "autopar.running_average.default": [
            sample(r(6), r(1, 1, 1, 6, 1), None, 0.1),
            sample(r(6), r(1, 1, 1, 6), torch.tensor(9), 0.0),
        ],
        "autopar.rms_norm.default": [sample(x, r(12), 1e-5), sample(x, r(6, 12), 1e-5), sample(r(12), r(12), 1e-5)],
        "autopar.rms_norm_backward.default": [
            sample(r(4, 6, 12), x, r(12), r(4, 6, 1)),
            sample(r(4, 6, 12), x, r(6, 12), r(4, 1, 1)),
            sample(r(12), r(12), r(12), r(1)),
        ],
        "aten._fused_rms_norm.default": rms,
        "aten._fused_rms_norm_backward.default": rms_back,
        "aten.native_group_norm.default": group,
        "aten.native_group_norm_backward.default": group_back,
        "aten._native_batch_norm_legit_functional.default": batch,
        "aten.native_batch_norm.default": [sample(*one.args) for one in batch],
        "aten._native_batch_norm_legit_no_training.default": evaluation,
        "aten.native_batch_norm_backward.default": batch_back,
        "aten._weight_norm_interface.default": [sample(*one) for one in weight_norms],
        "aten._weight_norm_interface_backward.default": [
            sample(r(*v.shape), v, g, norm, dim) for (v, g, dim), norm in zip(weight_norms, normed, strict=True)
        ],
    }


def convolution_samples() -> Samples:
    cases = [  # input, weight, stride, padding, transposed, groups
        (r(4, 6, 5, 5), r(12, 6, 3, 3), [1, 1], [1, 1], False, 1), (r(2, 12, 6), r(12, 2, 3), [2], [0], False, 6),
        (r(4, 6, 4, 6), r(12, 6, 1, 1), [1, 1], [0, 0], False, 1), (r(2, 6, 4), r(6, 1, 3), [1], [2], False, 6),
        (r(4, 6, 4, 4), r(6, 4, 2, 2), [2, 2], [0, 0], True, 1), (r(2, 12, 4), r(12, 2, 3), [2], [1], True, 2),
        (r(2, 6, 4, 6), r(4, 3, 1, 1), [1, 1], [0, 0], False, 2),
        (r(2, 4, 3, 4, 4), r(6, 4, 2, 2, 2), [1] * 3, [0] * 3, False, 1),
        (r(2, 4, 12, 5), r(6, 4, 2, 3), [2, 1], [0, 1], False, 1),
        (r(2, 4, 6, 4), r(4, 3, 2, 3), [2, 1], [0, 1], True, 1),
        (r(2, 4, 24), r(6, 4, 3), [3], [0], False, 1), (r(2, 4, 25), r(6, 4, 2), [2], [0], False, 1),
        (r(2, 4, 4, 6), r(6, 4, 2, 3), [2, 3], [0], False, 1),
    ]  # fmt: skip
    forward, backward = [], []
    for x, w, stride, padding, transposed, groups in cases:
        channels = w.shape[1] * groups if transposed else w.shape[0]
        zero, one = [0] * len(stride), [1] * len(stride)
        rest = (stride, padding, one, transposed, zero, groups)
        forward += [sample(x, w, bias, *rest) for bias in (None, r(channels))]
        grad = torch.rand_like(aten.convolution(x, w, None, *rest))
        for wanted in ([True, True, True], [True, True, False], [False, True, True], [True, False, False]):
            sizes = [channels] if wanted[2] else None
            backward.append(sample(grad, x, w, sizes, *rest, wanted))
    return {"aten.convolution.default": forward, "aten.convolution_backward.default": backward}


def window_samples() -> Samples:
    cases = [  # input, weight, stride, before, after, dilation, groups
        (r(2, 4, 12), r(6, 4, 3), [1], [1], [1], [1], 1), (r(2, 6, 24), r(6, 1, 4), [1], [3], [0], [1], 6),
        (r(2, 4, 12), r(6, 2, 3), [2], [1], [1], [1], 2), (r(2, 4, 24), r(2, 4, 3), [2], [0], [1], [2], 1),
        (r(2, 4, 12), r(2, 4, 3), [1], [-1], [3], [1], 1), (r(2, 4, 12), r(2, 4, 3), [1], [4], [-2], [1], 1),
        (r(2, 2, 12), r(2, 2, 9), [1], [4], [4], [1], 1), (r(2, 4, 12), r(6, 4, 1), [2], [0], [-1], [1], 1),
        (r(2, 4, 12, 6), r(6, 4, 3, 3), [1, 2], [1, 1], [1, 0], [1, 1], 1),
        (r(2, 4, 11), r(6, 4, 3), [2], [1], [1], [1], 1),
        (r(2, 4, 24, 12), r(6, 4, 4, 3), [4, 1], [0, 2], [0, 0], [1, 1], 1),
    ]  # fmt: skip
    rows = [
        (r(4, 12), 1, 2, -2),
        (r(12, 4), 0, -1, 1),
        (r(4, 12, 2), 1, -5, 5),
        (r(4, 12), 0, 1, 0),
        (r(4, 12), 1, 7, -7),
    ]
    sums = [sample(r(*shape), dim, reverse) for shape, dim in (((4, 12), 1), ((12, 4), 0)) for reverse in (False, True)]
    rolled = [sample(*one, wrap=True) for one in rows if one[2] == -one[3]]
    moved = [*(sample(*one) for one in rows), *rolled]
    states = [
        sample(r(*shape), r(*shape), start, dim, reverse)
        for shape, dim, start in (((4, 12), 1, None), ((12, 4), 0, None), ((4, 12, 2), 1, r(4, 1, 2)))
        for reverse in (False, True)
    ]
    heads = (
        'v0 = autopar.einsum.default(h0, w0, "bhd,de->bhe"); v1 = aten.add.Tensor(v0, x0); v2 = aten.tanh.default(v1); '
        "v3 = aten.reshape.default(v2, [4, 12]); v4 = aten.split.Tensor(v3, 6, 1); v5 = operator.getitem(v4, 1); "
        "v6 = aten.maximum.default(v5, h1); rows = [v2, v6]; states = [v2, v6]"
    )
    chains = [
        sample([r(4, 6), r(4, 6)], [r(5, 4, 6)], [r(6)], one, reverse)
        for one in (
            "v0 = aten.mul.Tensor(h0, w0); v1 = aten.maximum.default(v0, x0); rows = [v1, v0]; states = [v1, h1]",
        )
        for reverse in (False, True)
    ]
    chains += [
        sample([r(4, 6)], [r(5, 4, 6)], [r(6, 6)], STEP, False),
        sample([r(4, 2, 6), r(4, 6)], [r(5, 4, 2, 6)], [r(6, 6)], heads, True),
    ]
    found: Samples = {"autopar.linear_scan.default": states, "autopar.chain.default": chains}
    found |= {"autopar.running_sum.default": sums, "autopar.pad_rows.default": moved}
    for x, w, *shape in cases:
        y = convolution(x, w, *shape)
        grad = torch.rand_like(y)
        found.setdefault("autopar.convolution.default", []).append(sample(x, w, *shape))
        given = sample(grad, w, list(x.shape[2:]), *shape)
        found.setdefault("autopar.convolution_input_backward.default", []).append(given)
        given = sample(grad, x, list(w.shape[2:]), *shape)
        found.setdefault("autopar.convolution_weight_backward.default", []).append(given)
    return found


def spatial_samples() -> Samples:
    x, y = r(4, 6, 4, 6), r(2, 4, 4, 4, 4)
    found: Samples = {}
    for image, dim in ((x, 2), (y, 3)):
        pool, back = getattr(aten, f"max_pool{dim}d_with_indices"), f"aten.max_pool{dim}d_with_indices"
        args = ([2] * dim, [2] * dim, [0] * dim, [1] * dim, False)
        out, where = pool(image, *args)
        found[f"{back}.default"] = [sample(image, *args), sample(image[0], *args)]
        found[f"{back}_backward.default"] = [sample(torch.rand_like(out), image, *args, where)]
        args = ([2] * dim, [2] * dim, [0] * dim, False, True, None)
        out = getattr(aten, f"avg_pool{dim}d")(image, *args)
        found[f"aten.avg_pool{dim}d.default"] = [sample(image, *args)]
        found[f"aten.avg_pool{dim}d_backward.default"] = [sample(torch.rand_like(out), image, *args)]
        size = [2] * dim
        found[f"aten._adaptive_avg_pool{dim}d.default"] = [sample(image, size), sample(image, [1] * dim)]
        found[f"aten._adaptive_avg_pool{dim}d_backward.default"] = [sample(r(*image.shape[:2], *size), image)]
    out, where = aten.adaptive_max_pool2d(x, [2, 2])
    found["aten.adaptive_max_pool2d.default"] = [sample(x, [2, 2])]
    found["aten.adaptive_max_pool2d_backward.default"] = [sample(torch.rand_like(out), x, where)]
    resizings = [("upsample_nearest1d", 1, ()), ("upsample_nearest2d", 2, ()), ("upsample_nearest3d", 3, ())]
    resizings += [(f"_upsample_nearest_exact{dim}d", dim, ()) for dim in (1, 2, 3)]
    resizings += [("upsample_linear1d", 1, (True,)), ("_upsample_bilinear2d_aa", 2, (False,))]
    resizings += [("_upsample_bicubic2d_aa", 2, (False,))]
    resizings += [("upsample_bilinear2d", 2, (False,)), ("upsample_bicubic2d", 2, (True,))]
    resizings += [("upsample_trilinear3d", 3, (False,))]
    for name, dim, align in resizings:
        image = r(4, 6, *([4] * dim))
        size = [6] * dim
        found[f"aten.{name}.default"] = [sample(image, size, *align)]
        found[f"aten.{name}.vec"] = [sample(image, size, *align, None), sample(image, None, *align, [1.5] * dim)]
        found[f"aten.{name}_backward.default"] = [sample(r(4, 6, *size), size, list(image.shape), *align)]
    patch = ([2, 2], [1, 1], [0, 0], [2, 2])
    z = r(4, 6, 4, 6, dtype=C128)
    return found | {
        "aten.im2col.default": [sample(x, *patch), sample(x[0], *patch)],
        "aten.col2im.default": [sample(r(4, 24, 6), [4, 6], *patch), sample(r(24, 6), [4, 6], *patch)],
        "aten._fft_c2c.default": [sample(z, [2, 3], 0, True), sample(z, [3], 1, False), sample(z, [], 0, True)],
        "aten._fft_r2c.default": [sample(x, [2, 3], 0, True), sample(x, [3], 0, False)],
        "aten._fft_c2r.default": [sample(z, [2, 3], 2, 6), sample(z, [3], 2, 10)],
    }


def loss_samples() -> Samples:
    x, y = r(4, 6, 12) / 2, r(4, 6, 12) / 2
    found: Samples = {}
    last = {"smooth_l1_loss": (0.5,), "huber_loss": (0.5,)}
    for name in ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"):
        rest = last.get(name, ())
        found[f"aten.{name}.default"] = [sample(x, y, how, *rest) for how in (0, 1, 2)]
        found[f"aten.{name}_backward.default"] = [
            sample(grad, x, y, how, *rest) for how, grad in ((0, r(4, 6, 12)), (0, r()), (1, r()), (2, r()))
        ]
    weights = (None, r(4, 6, 12))
    found["aten.binary_cross_entropy.default"] = [sample(x, y, w, how) for w in weights for how in (0, 1, 2)]
    found["aten.binary_cross_entropy_backward.default"] = [
        sample(r(4, 6, 12) if how == 0 else r(), x, y, w, how) for w in weights for how in (0, 1, 2)
    ]
    found["aten.binary_cross_entropy_with_logits.default"] = [
        sample(x, y, w, p, how) for w in (None, r(12), r(4, 6, 12)) for p in (None, r(12)) for how in (0, 1, 2)
    ]
    for shape, suffix in (((6, 12), ""), ((4, 12, 2, 3), "2d")):
        target = n(12, shape[0], *shape[2:])
        forward, backward = [], []
        for how, weight, ignored in itertools.product((0, 1, 2), (None, r(12)), (-100, 3)):
            logits = r(*shape)
            forward.append(sample(logits, target, weight, how, ignored))
            out, total = run(f"aten.nll_loss{suffix}_forward.default", forward[-1].args, {})
            backward.append(sample(torch.rand_like(out), logits, target, weight, how, ignored, total))
        found[f"aten.nll_loss{suffix}_forward.default"] = forward
        found[f"aten.nll_loss{suffix}_backward.default"] = backward
    found["aten.nll_loss_forward.default"].append(sample(r(12), n(12), None, 2, -100))
    found["aten.glu.default"] = [sample(r(4, 12)), sample(r(4, 12), 0)]
    found["aten.glu_backward.default"] = [sample(r(4, 6), r(4, 12), -1), sample(r(2, 12), r(4, 12), 0)]
    return found


def random_samples() -> Samples:
    x, seed = r(4, 6, 12), torch.tensor([7, 9])
    return {
        "autopar.dropout.default": [
            sample(x, seed, 3, 0.4, [4, 6, 12], [4, 6, 12], [0, 0, 0]),
            sample(r(1, 12), seed, 0, 0.5, [1, 12], [1, 12], [0, 0]),
            sample(x, seed, 3, 0.0, [4, 6, 12], [4, 6, 12], [0, 0, 0]),
        ],
        "autopar.dropout_of_rows.default": [
            sample(r(4, 6, 12), seed, 3, 2, 0.4, n(9, 4), n(5, 4), [9, 6, 12], [6, 12], [0, 0]),
            sample(r(12), seed, 0, 1, 0.5, n(20, 12), n(5, 12), [20], [], []),
        ],
        "autopar.random.default": [
            sample(seed, 3, kind, shape, torch.float64, shape, shape, [0] * len(shape))
            for kind in ("uniform", "normal", "exponential") for shape in ([4, 6, 12], [1, 12], [])
        ],
    }  # fmt: skip


def pointwise_samples(name: str) -> list[Sample]:
    """From the schema: tensors of one shape, then broadcast ones; reals, else whole numbers, else complex ones."""
    given = SPECIAL.get(name)
    if given is not None:
        return given
    found = []
    shapes = [(4, 6, 12)] * 3, [(4, 6, 12), (12,), (6, 1)], [(4, 1, 12), (6, 1), (1, 1, 12)], [(), (), ()]
    for shape in shapes:
        for make in (r, lambda *s: n(3, *s) + 1, lambda *s: r(*s, dtype=C128)):
            one = _from_schema(name, iter(shape), make)
            try:
                run(name, one.args, one.kwargs)
            except (RuntimeError, NotImplementedError, IndexError):
                continue
            found.append(one)
            break
    return found


def _from_schema(name: str, shapes: Any, make: Any) -> Sample:
    args = []
    for argument in op_of(name)._schema.arguments:
        kind = str(argument.type)
        if argument.kwarg_only:
            continue
        if "Tensor" in kind:
            args.append(make(*next(shapes, (4, 6, 12))))
        elif argument.has_default_value() and "number" not in kind.lower():
            args.append(argument.default_value)
        else:
            args.append(False if "bool" in kind else 2)
    rounding = {"rounding_mode": "floor"} if name.endswith("_mode") else {}
    return sample(*args, **rounding)


def _backward(count: int, *rest: Any) -> list[Sample]:
    """A gradient and what was saved, all of one shape."""
    return [
        sample(*(r(4, 6, 12) - 0.4 for _ in range(count + 1)), *rest),
        sample(*(r(6) for _ in range(count + 1)), *rest),
    ]


def special_samples() -> Samples:
    x, y, c = r(4, 6, 12), r(6, 1), mask(6, 12)
    z = r(4, 6, dtype=C128)
    copies = [
        sample(x, dtype=torch.float32), sample(x * 4, dtype=torch.int64), sample(x, dtype=torch.bool),
        sample(n(9, 4), dtype=F64), sample(n(9, 4), dtype=torch.int32), sample(z, dtype=F64), sample(c, dtype=F64),
        sample(x, dtype=C128),
    ]  # fmt: skip
    numbers = [sample(x, y), sample(x, 2.5), sample(y, x), sample(x, x)]
    return {
        "aten.add.Tensor": [*numbers, sample(x, 0), sample(x, y, alpha=2), sample(c, mask(4, 1, 1))],
        "aten.sub.Tensor": [*numbers, sample(x, 0), sample(x, y, alpha=2)],
        "aten.mul.Tensor": [*numbers, sample(x, c), sample(n(4, 6), r(4, 6))],
        "aten.div.Tensor": numbers,
        "aten.clamp.default": [sample(x, 0.3, 0.6), sample(x, None, 0.5)],
        "aten.clamp.Tensor": [sample(x, y, None), sample(x, None, y), sample(x, y, r(12))],
        "aten._to_copy.default": copies,
        "aten.where.self": [sample(c, x, y), sample(mask(12), r(4, 6, 12), r()), sample(c, x, r(4, 6, 12))],
        "aten.where.Scalar": [sample(c, 1.0, 2.0)],
        "aten.where.ScalarOther": [sample(c, x, 0), sample(c, x, 2.5)],
        "aten.where.ScalarSelf": [sample(c, 0, x), sample(c, 2.5, x)],
        "aten.masked_fill.Scalar": [sample(x, c, 0), sample(x, c, -1e4), sample(x, c, False)],
        "aten.masked_fill.Tensor": [sample(x, c, r())],
        "aten.fill.Scalar": [sample(x, 0), sample(x, 2.5)],
        "aten.fill.Tensor": [sample(x, r())],
        "aten.full_like.default": [sample(x, 0), sample(x, 2.5)],
        "aten.empty_like.default": [sample(x, compare=False)],
        "aten.copy.default": [sample(x, y), sample(x, r(4, 6, 12))],
        "aten.complex.default": [sample(x, r(12))],
        "aten.polar.default": [sample(x, r(4, 6, 12))],
        "aten.real.default": [sample(z)],
        "aten.imag.default": [sample(z)],
        "aten.polygamma.default": [sample(1, x), sample(2, r(6))],
        "aten.mvlgamma.default": [sample(x + 2, 2)],
        "aten.lerp.Scalar": [sample(x, y, 0.3)],
        "aten.round.decimals": [sample(x, decimals=1)],
        "aten.logit_backward.default": _backward(1, 0.1),
        "aten.elu_backward.default": [sample(x, 1.5, 1.0, 1.0, kind, x - 0.4) for kind in (False, True)],
        "aten.hardtanh_backward.default": _backward(1, -0.2, 0.3),
        "aten.softplus_backward.default": _backward(1, 1, 20),
        "aten.leaky_relu_backward.default": _backward(1, 0.1, False),
        "aten.gelu_backward.default": [*_backward(1), sample(x, x, approximate="tanh")],
        "aten.threshold_backward.default": _backward(1, 0),
        "aten.log_sigmoid_forward.default": [sample(x)],
        "aten.log_sigmoid_backward.default": [sample(x, x, aten.log_sigmoid_forward(x)[1]), sample(x, x, r(0))][:1],
        "aten.native_dropout_backward.default": [sample(x, mask(4, 6, 12), 2.0)],
        "aten.rrelu_with_noise_backward.default": _backward(2, 0.1, 0.3, True, False),
        "aten.isinf.default": [sample(x.where(x > 0.5, torch.inf))],
        "aten.isnan.default": [sample(x.where(x > 0.5, torch.nan))],
    }


SPECIAL: Samples = special_samples()
