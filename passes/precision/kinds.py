"""In which dtype an op computes under mixed precision: the lists of torch.autocast, for ops of forward and backward.

An op that stands in no list computes in the widest dtype of its operands. Names are without overload. What our own
semantic ops compute in is part of their declaration (`autopar/ir/ops/ops.py`).
"""

from __future__ import annotations

import enum

from autopar.ir.ops.ops import NAMESPACE, SEMANTIC, op


class Kind(enum.Enum):
    """Where an op gets its dtype from."""

    LOW = "low"  # computes in the low dtype
    HIGH = "high"  # computes in float32
    INSIDE = "inside"  # takes what it is given and computes in float32, element by element: nothing is copied
    SUM = "sum"  # takes what it is given, adds in float32 and gives that
    PROMOTING = "promoting"  # as WIDEST, and torch takes operands of two dtypes as they are
    WIDEST = "widest"


# Products: the time and the memory of a step. Their kernels add in float32.
LOW = """
    aten.mm aten.bmm aten.mv aten.addmm aten.baddbmm aten.addmv aten._grouped_mm
    aten.convolution aten.convolution_backward
"""
# Norms, softmax, losses, functions that enlarge a rounding error or leave the range of a short float, and what adds
# many numbers up, one after the other.
HIGH = """
    aten.native_layer_norm aten.native_layer_norm_backward aten._fused_rms_norm aten._fused_rms_norm_backward
    aten.native_group_norm aten.native_group_norm_backward
    aten._native_batch_norm_legit_functional aten.native_batch_norm aten._native_batch_norm_legit_no_training
    aten.native_batch_norm_backward aten._weight_norm_interface aten._weight_norm_interface_backward
    aten._softmax aten._safe_softmax aten._log_softmax aten._softmax_backward_data aten._log_softmax_backward_data
    aten.logsumexp
    aten.mse_loss aten.smooth_l1_loss aten.huber_loss aten.soft_margin_loss
    aten.binary_cross_entropy aten.binary_cross_entropy_with_logits
    aten.mse_loss_backward aten.smooth_l1_loss_backward aten.huber_loss_backward aten.soft_margin_loss_backward
    aten.binary_cross_entropy_backward aten.nll_loss_forward aten.nll_loss2d_forward aten.nll_loss_backward
    aten.nll_loss2d_backward aten.log_sigmoid_forward aten.log_sigmoid_backward
    aten.softplus aten.softplus_backward aten.xlogy aten.logit aten.logit_backward
    aten.acos aten.acosh aten.asin aten.atanh aten.cosh aten.sinh aten.tan aten.erfinv
    aten.exp aten.exp2 aten.expm1 aten.log aten.log10 aten.log1p aten.log2 aten.logaddexp aten.logaddexp2
    aten.pow aten.square aten.reciprocal aten.rsqrt aten.digamma aten.lgamma
    aten.polygamma aten.mvlgamma aten.igamma aten.igammac
    aten._cdist_forward aten._cdist_backward aten._euclidean_dist aten.renorm aten.std_mean
    aten.cholesky aten.cholesky_inverse aten.cholesky_solve aten.geqrf aten.ormqr aten.triangular_solve aten.lu_unpack
    aten.grid_sampler_2d aten.grid_sampler_2d_backward aten.grid_sampler_3d aten.grid_sampler_3d_backward
    aten.affine_grid_generator aten._upsample_bilinear2d_aa aten._upsample_bilinear2d_aa_backward
    aten._upsample_bicubic2d_aa aten._upsample_bicubic2d_aa_backward
    aten.multi_margin_loss aten.multi_margin_loss_backward aten.multilabel_margin_loss_forward
    aten.multilabel_margin_loss_backward
    aten.mean aten.prod aten.cumsum aten.cumprod aten.logcumsumexp aten.var aten.var_mean aten.std
    aten.histc aten.polar aten.complex aten.view_as_complex
    aten._fft_r2c aten._fft_c2r aten._fft_c2c aten.avg_pool3d aten.avg_pool3d_backward
    aten.searchsorted aten.bucketize
    aten.embedding_dense_backward aten.index_add aten.index_put aten._unsafe_index_put
    aten.scatter_add aten.scatter_reduce
"""
# Whole families of the same kind.
HIGH_FAMILIES = ("aten.special_", "aten.linalg_", "aten._linalg_")
# The argument of a product that is a statistic of it, and comes in float32.
STATISTICS = {str(op(one.name)): one.statistic for one in SEMANTIC if one.statistic is not None}
SUMS = "aten.sum"
# What torch computes of two dtypes without a copy of either.
PROMOTING = """
    aten.add aten.sub aten.rsub aten.mul aten.div aten.where aten.maximum aten.minimum
    aten.eq aten.ne aten.lt aten.le aten.gt aten.ge
"""

_KINDS: dict[str, Kind] = {
    **dict.fromkeys(LOW.split(), Kind.LOW),
    **dict.fromkeys(HIGH.split(), Kind.HIGH),
    **dict.fromkeys(SUMS.split(), Kind.SUM),
    **dict.fromkeys(PROMOTING.split(), Kind.PROMOTING),
    **{f"{NAMESPACE}.{one.name}": Kind(one.precision) for one in SEMANTIC},
}


def kind_of(op: str) -> Kind:
    """The kind of an op by its full name, e.g. "aten.mm.default"."""
    other = Kind.HIGH if op.startswith(HIGH_FAMILIES) else Kind.WIDEST
    return _KINDS.get(op.rpartition(".")[0], other)
