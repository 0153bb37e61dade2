"""Pooling, resizing, image patches and Fourier transforms: the dims they run over are replicated, all others free."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.passes.rules.build import FIRST, NONE, Linear, build, dims_argument, named, names_of
from autopar.passes.rules.local import with_arg
from autopar.passes.rules.notation import instantiate
from autopar.passes.rules.rule import Arguments, Call, Dims, Pieces, Row, Rule


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


def _grid(dims: int) -> str:
    """The places of a grid: one for each element of the output, with a coordinate a dim."""
    return " ".join(f"y{i}" for i in range(dims))


def _sampled(dims: int) -> Row:
    """Each place is read by itself, of every channel alike."""
    space, grid = " ".join(f"x{i}" for i in range(dims)), _grid(dims)
    spec = f"n c {space}, n {grid} d -> n c {grid}"
    return Row(lambda call: instantiate(spec, call, replicated={"d", *space.split()}, linear=({0},)))


def _sampled_backward(dims: int) -> Row:
    """The gradient of the image is a sum over the places, that of the grid one over the channels. The kernel leaves out
    the former alone where the mask says so; the latter it always computes."""
    space, grid = " ".join(f"x{i}" for i in range(dims)), _grid(dims)

    def rule(call: Call) -> Rule:
        both = f"n c {space}", f"n {grid} d"
        made = both if len(call.results) == 2 else [one for one, on in zip(both, call.args[6], strict=True) if on]
        spec = f"n c {grid}, n c {space}, n {grid} d -> {', '.join(made)}"
        return instantiate(spec, call, replicated={"d", *space.split()}, linear=({0},))

    return Row(rule)


def _affine_grid(call: Call) -> Rule:
    """The grid of each image from its own matrix [d, d + 1]; `size` begins with their number."""
    space = " ".join(f"y{i}" for i in range(len(call.results[0].shape) - 2))
    return instantiate(f"n e f -> n {space} d", call, replicated={"d", "e", "f", *space.split()}, linear=({0},))


def _affine_grid_local(pieces: Pieces) -> Arguments:
    args = pieces.call.args
    return with_arg(args, 1, [pieces.shapes[0][0], *args[1][1:]]), dict(pieces.call.kwargs)


def _fractional(dims: int) -> Row:
    """Where the windows of each plane lie is drawn beforehand, and is operand 1."""

    def rule(call: Call) -> Rule:
        lead = "n c" if len(call.operands[0].shape) == dims + 2 else "c"
        space, out = (" ".join(f"{letter}{i}" for i in range(dims)) for letter in "xy")
        drawn = "n c d" if lead == "n c" else "1 c d"
        spec = f"{lead} {space}, {drawn} -> {lead} {out}, {lead} {out}"
        return instantiate(spec, call, replicated={"d", *space.split(), *out.split()})

    return Row(rule)


ROWS: Mapping[str, Row] = {
    "aten.max_pool2d_with_indices.default": _row(2, NONE),
    "aten.max_pool2d_with_indices_backward.default": _row(2),
    "aten.max_pool3d_with_indices.default": _row(3, NONE),
    "aten.max_pool3d_with_indices_backward.default": _row(3),
    "aten.adaptive_max_pool2d.default": _row(2, NONE),
    "aten.adaptive_max_pool2d_backward.default": _row(2),
    "aten.adaptive_max_pool3d.default": _row(3, NONE),
    "aten.adaptive_max_pool3d_backward.default": _row(3),
    "aten.fractional_max_pool2d.default": _fractional(2),
    "aten.fractional_max_pool2d_backward.default": _row(2),
    "aten.fractional_max_pool3d.default": _fractional(3),
    "aten.fractional_max_pool3d_backward.default": _row(3),
    "aten.max_unpool2d.default": _row(2),
    "aten.max_unpool3d.default": _row(3),
    "aten.grid_sampler_2d.default": _sampled(2),
    "aten.grid_sampler_2d_backward.default": _sampled_backward(2),
    "aten.grid_sampler_3d.default": _sampled(3),
    "aten.grid_sampler_3d_backward.default": _sampled_backward(3),
    "aten.affine_grid_generator.default": Row(_affine_grid, local=_affine_grid_local),
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
    **_resizing("_upsample_nearest_exact1d", 1, 2),
    **_resizing("_upsample_nearest_exact2d", 2, 2),
    **_resizing("_upsample_nearest_exact3d", 3, 2),
    **_resizing("_upsample_bilinear2d_aa", 2, 2),
    **_resizing("_upsample_bicubic2d_aa", 2, 2),
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
