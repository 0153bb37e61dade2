"""Pooling, resizing, image patches and Fourier transforms: the dims they run over are replicated, all others free."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.passes.rules.build import FIRST, NONE, Linear, build, dims_argument, named, names_of
from autopar.passes.rules.notation import instantiate
from autopar.passes.rules.rule import Call, Dims, Row, Rule


def _spatial(call: Call, count: int, linear: Linear) -> Rule:
    """The last `count` dims of every tensor are space and replicated; the leading ones are alike."""
    tensors: list[Dims] = []
    replicated: set[str] = set()
    for i, type_ in enumerate((*call.operands, *call.results)):
        lead = len(type_.shape) - count
        space = named(type_.shape, f"s{i}_")[lead:]
        replicated |= names_of(space)
        tensors.append((*named(type_.shape[:lead]), *space))
    operands = len(call.operands)
    return build(call, tensors[:operands], tensors[operands:], replicated=replicated, linear=linear)


def _row(count: int, linear: Linear = FIRST, shape_arg: int | None = None) -> Row:
    return Row(lambda call: _spatial(call, count, linear), shape_arg=shape_arg)


def _resizing(name: str, count: int, plain_shape: int) -> dict[str, Row]:
    """An upsampling, its form with scales, and its backward, whose argument `plain_shape` is the input's shape."""
    return {
        f"aten.{name}.default": _row(count),
        f"aten.{name}.vec": _row(count),
        f"aten.{name}_backward.default": _row(count, shape_arg=plain_shape),
    }


def _fft(call: Call) -> Rule:
    """Transformed dims are replicated, and may have another size in the result."""
    source, target = call.operands[0].shape, call.results[0].shape
    dims, result = named(source), list(named(target))
    transformed = dims_argument(call, 1) if call.args[1] else ()
    replicated: set[str] = set()
    for at in transformed:
        result[at] = dims[at] if source[at] == target[at] else () if target[at] == 1 else (f"f{at}",)
        replicated |= {*dims[at], *result[at]}
    return build(call, [dims], [tuple(result)], replicated=replicated, linear=FIRST)


def _patches(spec: str) -> Row:
    """im2col and col2im: each channel's patches (k) stand together."""

    def rule(call: Call) -> Rule:
        batch = "n " if len(call.operands[0].shape) == (4 if spec.startswith("c h") else 3) else ""
        left, right = spec.split(" -> ")
        channels = next(t.shape[-3] for t in (*call.operands, *call.results) if len(t.shape) == 3 + bool(batch))
        return instantiate(
            f"{batch}{left} -> {batch}{right}",
            call,
            replicated={"k", "l", "h", "w"},
            linear=({0},),
            sizes={"c": channels},
        )

    return Row(rule)


ROWS: Mapping[str, Row] = {
    "aten.max_pool2d_with_indices.default": _row(2, NONE),
    "aten.max_pool2d_with_indices_backward.default": _row(2),
    "aten.max_pool3d_with_indices.default": _row(3, NONE),
    "aten.max_pool3d_with_indices_backward.default": _row(3),
    "aten.adaptive_max_pool2d.default": _row(2, NONE),
    "aten.adaptive_max_pool2d_backward.default": _row(2),
    "aten.avg_pool2d.default": _row(2),
    "aten.avg_pool2d_backward.default": _row(2),
    "aten.avg_pool3d.default": _row(3),
    "aten.avg_pool3d_backward.default": _row(3),
    "aten._adaptive_avg_pool2d.default": _row(2),
    "aten._adaptive_avg_pool2d_backward.default": _row(2),
    "aten._adaptive_avg_pool3d.default": _row(3),
    "aten._adaptive_avg_pool3d_backward.default": _row(3),
    **_resizing("upsample_nearest1d", 1, 2),
    **_resizing("upsample_nearest2d", 2, 2),
    **_resizing("upsample_nearest3d", 3, 2),
    **_resizing("_upsample_nearest_exact2d", 2, 2),
    **_resizing("upsample_linear1d", 1, 2),
    **_resizing("upsample_bilinear2d", 2, 2),
    **_resizing("upsample_bicubic2d", 2, 2),
    **_resizing("upsample_trilinear3d", 3, 2),
    "aten.im2col.default": _patches("c h w -> (c k) l"),
    "aten.col2im.default": _patches("(c k) l -> c h w"),
    "aten._fft_c2c.default": Row(_fft),
    "aten._fft_r2c.default": Row(_fft),
    "aten._fft_c2r.default": Row(_fft),
}
