"""Arguments for every row of the rule table: views, pieces, reductions, products, indexing, creation.

`r` draws reals, `n` whole numbers below a bound. Sizes of 4, 6 and 12 are divided by axes of 2 and 3, and by 2 again.
"""

from __future__ import annotations

import math

import torch
from rule_brute_force import Sample, sample

from autopar.ir.ops.ops import op  # noqa: F401  (the ops of our own are defined on import)

F64, C128 = torch.float64, torch.complex128
Samples = dict[str, list[Sample]]


def r(*shape: int, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.rand(shape, dtype=dtype) + 0.1


def n(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape)


def mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape) < 0.6


def is_mask(index: object) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype is torch.bool


def view_samples() -> Samples:
    reshapes = [
        (r(4, 6, 36), [4, 6, 3, 6, 2]), (r(4, 6, 3, 12), [24, 36]), (r(24, 6), [4, 6, 6]), (r(6, 4), [4, 6]),
        (r(6, 4), [2, 12]), (r(12, 5), [6, 10]), (r(4, 1, 6), [1, 24, 1]), (r(1), []), (r(0, 4), [4, 0]),
        (r(6, 10, 4), [4, 15, 4]), (r(12), [12, 1]),
    ]  # fmt: skip
    views = [sample(x, shape) for x, shape in reshapes]
    return {
        "aten.view.default": [*views, sample(r(4, 6), [-1, 3])],
        "aten._unsafe_view.default": views,
        "aten.reshape.default": views,
        "aten.view_copy.default": views,
        "aten.permute.default": [sample(r(4, 6, 12), [2, 0, 1]), sample(r(4, 1, 6), [-1, 0, 1])],
        "aten.transpose.int": [sample(r(4, 6, 12), -1, -2), sample(r(4, 1), 0, 1)],
        "aten.t.default": [sample(r(4, 6)), sample(r(6))],
        "aten.unsqueeze.default": [sample(r(4, 6), 1), sample(r(4, 6), -1), sample(r(), 0)],
        "aten.squeeze.default": [sample(r(4, 1, 2))],
        "aten.squeeze.dim": [sample(r(2, 1, 6), 1), sample(r(2, 1, 6), 0), sample(r(2, 1, 6), -1)],
        "aten.squeeze.dims": [sample(r(2, 1, 6, 1), [0, 1, -1]), sample(r(2, 1), [])],
        "aten.expand.default": [
            sample(r(4, 1, 6), [4, 6, 6]), sample(r(6), [4, -1]), sample(r(1, 1), [6, 2, 4]), sample(r(), [6]),
        ],
        "aten.repeat.default": [sample(r(4, 6), [2, 1, 3]), sample(r(6), [2]), sample(r(1, 4), [6, 1])],
        "aten.flip.default": [sample(r(4, 6), [0]), sample(r(4, 6), [-1, 0])],
        "aten.roll.default": [sample(r(4, 6), [1], [1]), sample(r(4, 6), [2], []), sample(r(4, 6), [1, 2], [0, -1])],
        "aten.tril.default": [sample(r(2, 4, 6)), sample(r(4, 6), 1)],
        "aten.triu.default": [sample(r(2, 4, 6)), sample(r(4, 6), -1)],
        "aten.unfold.default": [sample(r(4, 6), 1, 2, 2), sample(r(4, 6), 0, 3, 1), sample(r(6), 0, 6, 1)],
        "aten.unfold_backward.default": [sample(r(4, 3, 2), [4, 6], 1, 2, 2)],
        "aten.diagonal.default": [sample(r(4, 6, 6), 0, 1, 2), sample(r(4, 6, 2), 1, 0, -2)],
        "aten.diagonal_scatter.default": [
            sample(r(4, 6, 6), r(4, 6), 0, 1, 2), sample(r(4, 6), r(4)), sample(r(6, 4, 6), r(4, 5), 1, 0, 2),
        ],
        "aten.diagonal_backward.default": [sample(r(4, 6), [4, 6, 6], 0, 1, 2)],
        "aten.view_as_real.default": [sample(r(4, 6, dtype=C128))],
        "aten.view_as_complex.default": [sample(r(4, 6, 2))],
    }  # fmt: skip


def piece_samples() -> Samples:
    slices = [
        (1, 0, 2**63 - 1), (1, 0, 12), (1, 3, 6), (1, -6, None), (-1, 1, 4), (0, None, 2), (1, 0, 12, 2),
        (1, 1, 2**63 - 1, 3), (1, 4, 8), (1, 2, 9, 2), (1, 5, 6), (1, 12, 12), (0, 1, 4),
    ]  # fmt: skip
    # the backward form has numbers only
    full = [(dim, start or 0, 2**63 - 1 if end is None else end, *(step or (1,))) for dim, start, end, *step in slices]
    x = r(4, 12)
    cuts = [torch.rand_like(torch.ops.aten.slice.Tensor(x, *s)) for s in slices]
    pads = [(r(4, 6), [1, 1]), (r(4, 6), [0, 0, 1, 2]), (r(4, 6), [-1, 0]), (r(4, 1), [0, 0])]
    edges: Samples = {}
    for dim, shape in ((1, (2, 4, 6)), (2, (2, 4, 6, 6)), (3, (2, 4, 3, 4, 4))):
        pad = [1, 1] * dim
        padded = (*shape[:2], *(size + 2 for size in shape[2:]))
        for kind in ("reflection", "replication"):
            edges[f"aten.{kind}_pad{dim}d.default"] = [sample(r(*shape), pad)]
            edges[f"aten.{kind}_pad{dim}d_backward.default"] = [sample(r(*padded), r(*shape), pad)]
    splits = [
        sample(r(4, 12), 4, 1),
        sample(r(4, 12), 5, -1),
        sample(r(4, 12), 12, 1),
        sample(r(4, 12), 1),
        sample(r(2), 1),
    ]
    sized = [
        sample(r(4, 12), [6, 6], 1),
        sample(r(4, 12), [4, 8], 1),
        sample(r(12), [2] * 6),
        sample(r(4, 4), [1, 3], 1),
    ]
    return {
        "aten.split.Tensor": splits,
        "aten.unsafe_split.Tensor": splits,
        "aten.split_with_sizes.default": sized,
        "aten.unsafe_split_with_sizes.default": sized,
        "aten.cat.default": [
            sample([r(4, 6), r(4, 6)], 1), sample([r(4, 6), r(4, 3)], -1), sample([r(4), r(4), r(4)]),
            sample([r(4, 1), r(4, 1)], 1), sample([r(0), r(4, 6)], 1), sample([r(4, 6)], 0),
            sample([r(4, 6), r(4, 6), r(2, 6)], 0),
        ],
        "aten.stack.default": [sample([r(4, 6), r(4, 6)], 1), sample([r(4)], -1), sample([r(), r()])],
        "aten.unbind.int": [sample(r(4, 6), 1), sample(r(4, 6))],
        "aten.select.int": [sample(r(4, 6), 1, -1), sample(r(4, 1, 6), 1, 0)],
        "aten.select_backward.default": [sample(r(4, 6), [4, 3, 6], 1, -1), sample(r(4), [4, 1], 1, 0)],
        "aten.select_scatter.default": [sample(r(4, 3, 6), r(4, 6), 1, 2)],
        "aten.slice.Tensor": [
            *(sample(x, *s) for s in slices), sample(x), sample(x, 1, start=0, end=6), sample(r(1, 4), 0, 0, 1),
        ],
        "aten.slice_backward.default": [sample(cut, [4, 12], *s) for s, cut in zip(full, cuts, strict=True)],
        "aten.slice_scatter.default": [sample(x, cut, *s) for s, cut in zip(slices, cuts, strict=True)],
        "aten.constant_pad_nd.default": [sample(t, p, *v) for t, p in pads for v in ((), (2.5,), (0,))],
        **edges,
    }  # fmt: skip


def reduction_samples() -> Samples:
    x = r(4, 6, 12)
    dims = [sample(x, [1]), sample(x, [0, -1], True), sample(r(4, 1), [1]), sample(r(6), [0])]
    one = [sample(x, 1), sample(x, -1, True), sample(r(4, 1), 1)]
    same = [sample(x, 1), sample(x, -1), sample(r(), 0)]
    plain = [sample(x), sample(r())]
    every = ("sum", "mean", "max", "min", "prod", "var", "std", "median", "nanmedian", "all", "any")
    named = ("any.dim", "all.dim", "prod.dim_int", "max.dim", "min.dim", "median.dim", "nanmedian.dim",
             "mode.default")  # fmt: skip
    along = ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "sort", "argsort")
    found: Samples = {f"aten.{name}.default": plain for name in every}
    found |= {f"aten.{name}.default": [*dims, sample(x)] for name in ("amax", "amin")}
    found |= {f"aten.{name}": [*dims, sample(x, None)] for name in ("mean.dim", "any.dims", "all.dims")}
    found |= {f"aten.{name}": one for name in named}
    found |= {
        f"aten.{name}.correction": [
            sample(x, [1]),
            sample(x, [0, -1], keepdim=True),
            sample(x),
            sample(x, [1], correction=0),
        ]
        for name in ("var", "var_mean", "std", "std_mean")
    }
    found |= {f"aten.{name}.dim": [sample(x, [1]), sample(x, [0, -1], False, True)] for name in ("var", "std")}
    found |= {f"aten.{name}.default": same for name in along}
    found |= {f"aten.{name}.default": [*one, sample(x)] for name in ("argmax", "argmin")}
    found |= {f"aten.{name}.default": [sample(x, d, False) for d in (1, -1)] for name in ("_softmax", "_log_softmax")}
    found["aten._safe_softmax.default"] = [sample(x, d) for d in (1, -1)]
    found |= {
        f"aten.{name}_backward_data.default": [sample(x, r(4, 6, 12), d, F64) for d in (1, -1)]
        for name in ("_softmax", "_log_softmax")
    }
    return found | {
        "aten.sum.dim_IntList": [
            *dims,
            sample(x, None),
            sample(x, []),
            sample(mask(4, 6), [0]),
            sample(n(5, 4, 6), [1]),
        ],
        "aten.sum.default": [*plain, sample(x * 5, dtype=torch.int64), sample(mask(6))],
        "aten.aminmax.default": [sample(x, dim=1), sample(x)],
        "aten.linalg_vector_norm.default": [
            sample(x, order, d) for order in (2, 1, math.inf, -math.inf, 0, 3.5) for d in ([1], None)
        ],
        "aten.logsumexp.default": [*dims, sample(x, [0, 1])],
        "autopar.logsumexp.default": [sample(x), sample(r(6))],
        "aten.histc.default": [sample(x, 6, 0, 1), sample(x, 6), sample(r(12), 4, min=0.2, max=0.8)],
        "aten.sort.stable": [sample(x, stable=True, dim=1), sample(x, stable=False)],
        "aten.topk.default": [sample(x, 2, 1), sample(x, 1), sample(r(), 1)],
        "aten.kthvalue.default": [sample(x, 2, 1), sample(x, 3)],
    }


def product_samples() -> Samples:
    a, b, vector = r(4, 6), r(6, 12), r(6)
    equations = [
        ("abc,dc->abd", r(4, 6, 12), r(6, 12)), ("abd,abc->dc", r(2, 4, 6), r(2, 4, 12)),
        ("abc,abdc->bad", r(4, 6, 2), r(4, 6, 3, 2)), ("ab,a->b", r(4, 6), r(4)), ("a,b->ab", r(4), r(6)),
        ("ab,cb->ac", r(4, 1), r(6, 1)), ("ab,c->c", r(4, 6), r(4)), ("a,a->", r(6), r(6)),
    ]  # fmt: skip
    return {
        "autopar.einsum.default": [sample(x, y, equation) for equation, x, y in equations],
        "aten.mm.default": [sample(a, b), sample(r(1, 6), b)],
        "aten.bmm.default": [sample(r(2, 4, 6), r(2, 6, 3))],
        "aten.mv.default": [sample(a, vector)],
        "aten.dot.default": [sample(vector, r(6))],
        "aten.vdot.default": [sample(r(6, dtype=C128), r(6, dtype=C128))],
        "aten.addmm.default": [sample(bias, a, b, beta=2, alpha=3) for bias in (r(12), r(4, 12), r(4, 1), r(1), r())],
        "aten.baddbmm.default": [sample(bias, r(2, 4, 6), r(2, 6, 3)) for bias in (r(2, 4, 3), r(1, 4, 3), r(3))],
        "aten.addmv.default": [sample(r(4), a, vector), sample(r(1), a, vector)],
        "aten._grouped_mm.default": [
            sample(r(8, 16).float(), r(2, 16, 48).float(), torch.tensor([4, 8], dtype=torch.int32)),
            sample(r(8, 16).float().t(), r(8, 48).float(), torch.tensor([4, 8], dtype=torch.int32)),
        ],
        "aten.linalg_solve_triangular.default": [
            sample(r(6, 4, 4) + 4 * torch.eye(4), r(6, 4, 12), upper=False),
            sample(r(1, 4, 4) + 4 * torch.eye(4), r(6, 2, 4), upper=True, left=False, unitriangular=True),
        ],
        "autopar.expert_mm.default": [sample(r(12, 6), r(4, 6, 2), n(4, 12)), sample(r(12, 4), r(6, 4, 3), n(2, 12))],
        "autopar.expert_mm_backward.default": [
            sample(r(12, 6), r(12, 2), n(4, 12), 4), sample(r(12, 4), r(12, 3), n(2, 12), 6),
        ],
    }  # fmt: skip


def index_samples() -> Samples:
    x = r(4, 6, 12)
    i, j = n(4, 6), n(6, 6)
    puts = [
        ((r(4, 6, 12), [i]), r(6, 6, 12)), ((r(4, 6, 12), [None, n(6, 2, 3)]), r(4, 2, 3, 12)),
        ((r(4, 6, 12), [i, None, n(12, 6)]), r(6, 6)), ((r(4, 6), [i]), r(6)), ((r(4, 6), [i, j]), r(1)),
        ((r(4, 6), [mask(4)]), r()), ((r(4, 6, 2), [n(4, 4, 1), n(6, 6)]), r(4, 6, 2)),
    ]  # fmt: skip
    index = [
        sample(x, [i]), sample(x, [None, n(6, 2, 3)]), sample(x, [i, None, n(12, 6)]), sample(x, [None, i, n(12, 6)]),
        sample(x, [n(4, 4, 1), n(6, 6)]), sample(x, [mask(4)]), sample(x, [n(4)]), sample(r(4), [n(4, 1)]),
        sample(r(4, 6, 2, 3), [None, i, None, n(3, 6)]),  # looked up apart from each other, and not at the front
    ]  # fmt: skip
    gather = [(r(4, 6), 1, n(6, 4, 3)), (r(4, 6), 0, n(4, 2, 6)), (r(4, 6), -1, n(6, 2, 4)), (r(), 0, n(1))]
    scatter = [(r(4, 6), 1, torch.stack([torch.randperm(6)[:3] for _ in range(4)]))]
    scatter += [
        (r(4, 6), 0, torch.stack([torch.randperm(4)[:2] for _ in range(3)], 1)),
        (r(6), 0, torch.randperm(6)[:4]),
    ]
    sources = [(*s, r(*s[2].shape)) for s in scatter] + [
        (r(4, 6), 1, n(6, 4, 3).sort(1).values * 0 + torch.arange(3), r(4, 6))
    ]
    rows = [
        ((x, [None, n(6, 4)], [-1, 0]), r(4, 12)), ((x, [None, n(6, 4, 6)], [-2, 0]), r(4, 6, 12)),
        ((x, [None, None, n(12, 4, 6, 2)], [-3, -2, 0]), r(4, 6, 2)), ((x, [n(4, 6), None], [0, -1]), r(12)),
        ((x, [None, None, n(12, 4, 3)], [-2, 0, 0]), r(4, 3, 6)), ((r(4, 6), [None, -1 - n(6, 3)], [-2, 0]), r(4, 3)),
        ((x, [None, n(6, 6)], [-2, 0]), r(4, 1, 12)), ((x, [None, None, n(12, 2, 1, 4)], [-1, 0, 0]), r(2, 1, 4, 6)),
        ((x, [None, n(6, 4, 2), n(12, 2)], [-2, 0, 0]), r()),
    ]  # fmt: skip
    unique = [(r(4, 6, 12), 1, torch.randperm(6)[:4], r(4, 4, 12)), (r(6), 0, torch.randperm(6)[:2], r(2))]
    weight, positions = r(12, 6), n(12, 4, 6)
    return {
        "autopar.embedding.default": [sample(weight, positions), sample(weight, n(12, 4)), sample(weight, n(12))],
        "autopar.embedding_backward.default": [
            *(sample(r(4, 6, 12), n(12, 4, 6), 12, padding) for padding in (-1, 0, 7)),
            sample(r(6, 4, 12), n(12, 6), 12, -1), sample(r(4, 6), n(12, 4, 6), 12, -1),
        ],
        "autopar.checked_index.default": [sample(n(6, 12, 4), 6, None), sample(n(2, 12) * -100, 1, -100)],
        "autopar.checked_values.default": [sample(r(6, 12, 4), -9.0, 9.0, "a reader")],
        "autopar.pick.default": [sample(x, n(12, 4, 6)), sample(r(6), n(6))],
        "autopar.cross_entropy_backward.default": [
            sample(r(4, 6), x, x.logsumexp(-1), n(12, 4, 6)), sample(r(4), r(4, 6), r(4), n(6, 4)),
            sample(r(4, 6), x, x.logsumexp(-1), n(12, 4, 6), r(4, 6)),
        ],
        "autopar.pick_backward.default": [sample(r(4, 6), n(12, 4, 6), 12), sample(r(), n(6), 6)],
        "aten.embedding.default": [sample(weight, positions), sample(weight, n(12, 4), 3)],
        "aten.embedding_dense_backward.default": [
            sample(r(4, 6, 12), n(12, 4, 6), 12, padding, scale) for padding in (-1, 0, 7) for scale in (False, True)
        ],
        "aten.index.Tensor": index,
        "aten._unsafe_index.Tensor": [one for one in index if not any(is_mask(i) for i in one.args[1])],
        "aten.index_put.default": [sample(*s, values, True) for s, values in puts]
        + [sample(r(4, 6, 12), [None, torch.randperm(6)[:4]], r(4, 4, 1), False)],
        "aten._unsafe_index_put.default": [sample(*s, values, True) for s, values in puts],
        "autopar.index_of_rows.default": [sample(*s) for s, _ in rows],
        "autopar.index_put_of_rows.default": [sample(*s, values, True) for s, values in rows]
        + [sample(r(4, 6), [None, torch.rand(4, 6).argsort()[:, :3]], [-2, 0], r(4, 3), False)],
        "aten.gather.default": [sample(*s) for s in gather],
        "aten.scatter.src": [sample(*s) for s in sources],
        "aten.scatter.value": [sample(*s, v) for s in scatter for v in (0, 2.5)],
        "aten.scatter.reduce": [sample(*s, reduce=kind) for s in sources for kind in ("add", "multiply")],
        "aten.scatter_add.default": [sample(*s) for s in sources],
        "aten.scatter_reduce.two": [
            sample(*s, kind, include_self=own) for s in sources for kind in ("sum", "amax") for own in (True, False)
        ],
        "aten.searchsorted.Tensor": [
            sample(r(8).sort().values, r(4, 6), right=True), sample(r(8), r(12), sorter=torch.randperm(8)),
            sample(r(4, 8).sort().values, r(4, 6), out_int32=True), sample(r(4, 6, 8).sort().values, r(4, 6, 12)),
        ],
        "aten.bucketize.Tensor": [sample(r(4, 6), r(8).sort().values), sample(r(12), r(4).sort().values, right=True)],
        "aten.index_select.default": [sample(x, 1, n(6, 4)), sample(x, -1, n(12)), sample(r(), 0, n(1))],
        "aten.index_add.default": [sample(*s) for s in unique] + [sample(r(4, 6), 1, n(6, 4), r(4, 4), alpha=2)],
        "aten.index_copy.default": [sample(*s) for s in unique],
        "aten.index_reduce.default": [sample(*s, kind) for s in unique for kind in ("prod", "amax", "mean")],
        "aten.index_fill.int_Scalar": [sample(*s[:3], 2.5) for s in unique],
        "aten.index_fill.int_Tensor": [sample(*s[:3], r()) for s in unique],
    }  # fmt: skip


def creation_samples() -> Samples:
    x = r(4, 6)
    real = {"dtype": F64}
    return {
        "aten.full.default": [sample([4, 6, 1], 2.5, **real), sample([], 1)],
        "aten.zeros.default": [sample([4, 6])],
        "aten.ones.default": [sample([4, 6])],
        "aten.empty.memory_format": [sample([4, 6], compare=False)],
        "aten.scalar_tensor.default": [sample(2.5)],
        "aten.new_zeros.default": [sample(x, [4, 6]), sample(x, [12])],
        "aten.new_empty.default": [sample(x, [4, 6], compare=False), sample(x, [12], compare=False)],
        "aten.new_ones.default": [sample(x, [4, 6]), sample(x, [12]), sample(x, [])],
        "aten.new_full.default": [sample(x, [4, 6], 2.5), sample(x, [12], 0), sample(x, [12], 2.5)],
        "aten.arange.default": [sample(12)],
        "aten.arange.start": [sample(2, 8)],
        "aten.arange.start_step": [sample(2, 8, 2)],
        "aten.linspace.default": [sample(0, 1, 12)],
        "aten.logspace.default": [sample(0, 1, 12)],
        "aten.eye.default": [sample(6)],
        "aten.eye.m": [sample(4, 6)],
        "aten.triu_indices.default": [sample(4, 6, 1)],
        "aten.tril_indices.default": [sample(4, 6)],
    }
