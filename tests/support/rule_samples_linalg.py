"""Samples of linear algebra on batches of matrices, of distances, and of what reads an image at places."""

from __future__ import annotations

import torch
from rule_brute_force import Sample, sample
from rule_samples import Samples, n, r

aten = torch.ops.aten


def _positive(*batch: int) -> torch.Tensor:
    a = r(*batch, 4, 4)
    return a @ a.mT + torch.eye(4, dtype=a.dtype)


def linalg_samples() -> Samples:
    square = [r(6, 4, 4) + torch.eye(4), r(2, 6, 4, 4), r(4, 4)]
    sides = [r(6, 4, 12), r(2, 6, 4, 12), r(4, 6)]
    positive, lower = _positive(6), torch.linalg.cholesky(_positive(2, 6))
    found: Samples = {
        f"aten.{name}.default": [sample(a) for a in square]
        for name in ("linalg_inv_ex", "linalg_lu", "linalg_lu_factor_ex",
                     "linalg_matrix_exp", "linalg_qr", "geqrf", "linalg_eig", "_linalg_svd")
    }  # fmt: skip
    found["aten._linalg_svd.default"] += [sample(r(6, 4, 2), True), sample(r(6, 4, 4), False, False)]
    found["aten.linalg_qr.default"] += [sample(r(6, 4, 2), "complete"), sample(r(6, 4, 2), "r")]
    for name in ("_linalg_eigh", "linalg_cholesky_ex", "cholesky_inverse", "linalg_ldl_factor_ex"):
        found[f"aten.{name}.default"] = [sample(positive), sample(_positive(2, 6))]
    lu, pivots = torch.linalg.lu_factor(square[0])
    ld, turns = torch.linalg.ldl_factor(positive)
    q, tau = torch.geqrf(r(6, 4, 4))
    return found | {
        "aten.cholesky_solve.default": [sample(r(2, 6, 4, 12), lower), sample(r(4, 6), lower[0, 0])],
        "aten.linalg_householder_product.default": [sample(q, tau)],
        "aten.linalg_ldl_solve.default": [sample(ld, turns, sides[0])],
        "aten.linalg_lstsq.default": [sample(r(6, 12, 4), r(6, 12, 2)), sample(r(6, 4, 4), r(6, 4, 2), driver="gelsd")],
        "aten.linalg_lu_solve.default": [
            sample(lu, pivots, sides[0]), sample(lu, pivots, r(6, 12, 4), left=False),
            sample(lu, pivots, sides[0], adjoint=True), sample(lu[0], pivots[0], r(6, 4, 2)),
        ],
        "aten.linalg_pinv.atol_rtol_tensor": [
            sample(r(6, 4, 2)), sample(r(6, 4, 2), atol=r(6) * 0.01, rtol=r() * 0.01),
        ],
        "aten.lu_unpack.default": [sample(lu, pivots), sample(lu, pivots, True, False)],
        "aten.ormqr.default": [sample(q, tau, sides[0]), sample(q, tau, r(6, 12, 4), False)],
        "aten.triangular_solve.default": [sample(sides[0], _positive(6)), sample(r(4, 6), _positive())],
    }  # fmt: skip


def distance_samples() -> Samples:
    x, y, few = r(4, 6, 12), r(4, 2, 12), r(2, 12)
    backward = [sample(r(4, 6, 2), x, y, p, aten._cdist_forward(x, y, p, None)) for p in (1.0, 2.0, 3.0)]
    return {
        "aten._cdist_forward.default": [sample(x, y, p, None) for p in (1.0, 2.0)] + [sample(x, few, 2.0, 1)],
        "aten._cdist_backward.default": backward,
        "aten._euclidean_dist.default": [sample(x, y), sample(r(6, 12), few)],
    }


def _grid(*shape: int) -> torch.Tensor:
    return r(*shape) * 2.4 - 1.2


def place_samples() -> Samples:
    found: Samples = {}
    for dims, image in ((2, r(4, 6, 4, 6)), (3, r(2, 6, 4, 4, 4))):
        grid = _grid(image.shape[0], *([4] * dims), dims)
        out = r(*image.shape[:2], *([4] * dims))
        modes = [(mode, padding, align) for mode in (0, 1) for padding in (0, 1) for align in (False, True)]
        found[f"aten.grid_sampler_{dims}d.default"] = [sample(image, grid, *how) for how in modes]
        found[f"aten.grid_sampler_{dims}d_backward.default"] = [
            sample(out, image, grid, *how, wanted) for how in modes[::3] for wanted in ([True, True], [False, True])
        ]
        found |= _pools(dims, image)
    return found


def margin_samples() -> Samples:
    x, label, weight = r(4, 6), n(6, 4), r(6)
    labels = torch.stack([torch.randperm(6) for _ in range(4)])
    out, hits = aten.multilabel_margin_loss_forward(x, labels, 0)
    found = {
        "multi_margin_loss": [sample(x, label, 1, 1, w, how) for w in (None, weight) for how in (0, 1, 2)],
        "multi_margin_loss_backward": [
            sample(r(4) if how == 0 else r(), x, label, 1, 1, w, how) for w in (None, weight) for how in (0, 1, 2)
        ],
        "multilabel_margin_loss_forward": [sample(x, labels, how) for how in (0, 1, 2)] + [sample(x[0], labels[0], 0)],
        "multilabel_margin_loss_backward": [sample(torch.rand_like(out), x, labels, 0, hits)],
        "renorm": [sample(x, 2, 0, 0.5), sample(r(4, 6, 2), 1, -1, 0.5)],
        "affine_grid_generator": [
            sample(r(4, 2, 3), [4, 3, 2, 6], False), sample(r(4, 3, 4), [4, 3, 2, 2, 6], True),
        ],
    }  # fmt: skip
    return {f"aten.{name}.default": samples for name, samples in found.items()}


def ctc_samples() -> Samples:
    x, targets = r(6, 4, 5).log_softmax(-1), 1 + n(4, 4, 2)
    lengths = torch.tensor([6, 5, 4, 6]), torch.tensor([2, 1, 2, 2])
    return {
        "autopar.ctc_loss.default": [sample(x, targets, *lengths, 0)],
        "autopar.ctc_loss_backward.default": [sample(r(4), x, targets, *lengths, 0, zero) for zero in (False, True)],
    }


def _pools(dims: int, image: torch.Tensor) -> Samples:
    size, spots = [2] * dims, r(*image.shape[:2], dims)
    kept, where = getattr(aten, f"fractional_max_pool{dims}d")(image, size, size, spots)
    found: dict[str, list[Sample]] = {
        f"fractional_max_pool{dims}d": [sample(image, size, size, spots), sample(image[0], size, size, spots[:1])],
        f"fractional_max_pool{dims}d_backward": [sample(torch.rand_like(kept), image, size, size, where)],
    }
    pooled, places = getattr(aten, f"max_pool{dims}d_with_indices")(image, size)
    rest = () if dims == 2 else (size, [0] * dims)
    found[f"max_unpool{dims}d"] = [sample(pooled, places, list(image.shape[2:]), *rest)]
    if dims == 3:
        out, at = aten.adaptive_max_pool3d(image, size)
        found["adaptive_max_pool3d"] = [sample(image, size)]
        found["adaptive_max_pool3d_backward"] = [sample(torch.rand_like(out), image, at)]
    return {f"aten.{name}.default": samples for name, samples in found.items()}


def lookup_samples() -> Samples:
    return {"aten.isin.Tensor_Tensor": [sample(n(9, 4, 6), n(9, 4)), sample(n(9, 4, 6), n(9, 4), invert=True)]}
