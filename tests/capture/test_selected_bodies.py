"""What may stand between the rows that a mask selects and their places: the rules of the ops decide, and no list."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from verified import verified

from autopar.capture import capture
from autopar.errors import CaptureError

Body = Callable[[Any, Tensor, Tensor], Tensor]


class Loop(nn.Module):
    """Each body is an expert, of the rows whose first number is larger than one of its own."""

    def __init__(self, *bodies: Body) -> None:
        super().__init__()
        self.bodies = bodies
        self.w = nn.Parameter(torch.randn(8, 8) * 0.3)
        self.b = nn.Parameter(torch.rand(8) * 0.1 + 0.1)
        self.seq = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.ln, self.rms, self.bn = nn.LayerNorm(8), nn.RMSNorm(8), nn.BatchNorm1d(8)
        self.gru = nn.GRUCell(8, 8)
        self.table, self.conv = nn.Embedding(8, 8), nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y, total = x + 0.01 * self.b, x.square().mean()
        for body in self.bodies:
            (at,) = torch.where(x[:, 0] > 0)
            total = total + torch.zeros_like(x).index_add(0, at, body(self, y[at], self.w)).square().mean()
        return total


def rows() -> Tensor:
    """Some are selected, some not: of those the first number is negative, or zero."""
    x = torch.randn(6, 8)
    x[:, 0] = torch.tensor([0.3, -1.0, 1.2, 0.0, -0.2, 0.7])
    return x


def gated(y: Tensor, gate: Tensor) -> Tensor:
    return F.silu(gate) * y


def wide(w: Tensor) -> Tensor:
    return torch.cat([w, w], 1)


def attended(h: Tensor) -> Tensor:
    q = h.view(-1, 1, 2, 4)
    return F.scaled_dot_product_attention(q, q, q).reshape(-1, 8)


def in_place(s: Any, h: Tensor, w: Tensor) -> Tensor:
    y = h * h[:, :1].clone().log_()
    y += s.b
    return y.mul_(w[0])


ROW_BY_ROW: dict[str, Body] = {
    "linear": lambda s, h, w: F.linear(h, w),
    "matmul": lambda s, h, w: h @ w,
    "einsum": lambda s, h, w: torch.einsum("nd,de->ne", h, w),
    "layer_norm": lambda s, h, w: s.ln(h @ w),
    "rms_norm": lambda s, h, w: s.rms(h @ w),
    "softmax": lambda s, h, w: (h @ w).softmax(-1),
    "log_softmax": lambda s, h, w: F.log_softmax(h @ w, -1),
    "normalize": lambda s, h, w: F.normalize(h @ w, dim=-1),
    "glu": lambda s, h, w: F.glu(h @ wide(w), -1),
    "chunk": lambda s, h, w: gated(*(h @ wide(w)).chunk(2, -1)),
    "split": lambda s, h, w: gated(*(h @ wide(w)).split(8, -1)),
    "every other column, as gpt-oss": lambda s, h, w: (lambda y: F.silu(y[..., ::2]) * (y[..., 1::2] + 1))(h @ wide(w)),
    "cat": lambda s, h, w: torch.cat([h @ w, h], -1)[..., :8],
    "unflatten": lambda s, h, w: (h @ w).unflatten(-1, (2, 4)).flatten(1),
    "view and transpose": lambda s, h, w: (h @ w).view(-1, 2, 4).transpose(1, 2).reshape(-1, 8),
    "cumsum": lambda s, h, w: (h @ w).cumsum(-1),
    "sum": lambda s, h, w: (h @ w) * (h @ w).sum(-1, keepdim=True),
    "amax": lambda s, h, w: (h @ w) - (h @ w).amax(-1, keepdim=True),
    "max": lambda s, h, w: (h @ w) - (h @ w).max(-1, keepdim=True).values,
    "sort": lambda s, h, w: (h @ w).sort(-1).values,
    "clamp": lambda s, h, w: (h @ w).clamp(-1, 1),
    "dropout": lambda s, h, w: F.dropout(F.dropout(h @ w, 0.3) + h, 0.2, inplace=True),
    "dropout of columns": lambda s, h, w: F.dropout((h @ w).T, 0.3).T,
    "dropout of channels": lambda s, h, w: F.dropout1d((h @ w).unflatten(-1, (4, 2)), 0.3).flatten(1),
    "dropout of nothing": lambda s, h, w: F.dropout(h @ w, 0.0),
    "where": lambda s, h, w: torch.where((h @ w) > 0, h, -h),
    "masked_fill": lambda s, h, w: (h @ w).masked_fill(h > 0, 0.0),
    "modules": lambda s, h, w: s.seq(h),
    "addmm": lambda s, h, w: torch.addmm(h.new_zeros(8), h, w),
    "mean": lambda s, h, w: (h @ w) - (h @ w).mean(-1, keepdim=True),
    "a mean of rows": lambda s, h, w: h - h.mean(0),
    "the largest": lambda s, h, w: h / h.max(),
    "data": lambda s, h, w: h + h.data.sum(),
    "detached": lambda s, h, w: h / h.detach().norm(),
    "a count of ones": lambda s, h, w: h / torch.ones_like(h).sum(0),
    "var": lambda s, h, w: (h @ w) * (h @ w).var(-1, keepdim=True),
    "norm": lambda s, h, w: (h @ w) / (h @ w).norm(dim=-1, keepdim=True),
    "flip": lambda s, h, w: (h @ w).flip(-1),
    "roll": lambda s, h, w: (h @ w).roll(1, -1),
    "stack": lambda s, h, w: torch.stack([h @ w, h], -1).sum(-1),
    "repeat": lambda s, h, w: (h @ w).repeat(1, 2)[:, :8],
    "pad": lambda s, h, w: F.pad(h @ w, (0, 2))[:, :8],
    "group_norm": lambda s, h, w: F.group_norm(h @ w, 2),
    "prelu": lambda s, h, w: F.prelu(h @ w, torch.tensor([0.1])),
    "addcmul": lambda s, h, w: torch.addcmul(h, h, h @ w),
    "lerp": lambda s, h, w: torch.lerp(h, h @ w, 0.5),
    "tril": lambda s, h, w: h @ w.tril(),
    "squared relu": lambda s, h, w: F.relu(h @ w).square(),
    "hardshrink": lambda s, h, w: F.hardshrink(h @ w),
    "expm1": lambda s, h, w: (h @ w).expm1(),
    "atan2": lambda s, h, w: torch.atan2(h @ w, h),
    "transposed": lambda s, h, w: (w.t() @ h.t()).t(),
    "attention in a row": lambda s, h, w: attended(h @ w),
    "a view of as many rows": lambda s, h, w: (h @ w).view(h.size(0), 2, 4).transpose(1, 2).reshape(h.shape[0], -1),
    "the shape of before": lambda s, h, w: (h @ w).reshape(*h.shape[:-1], 2, 4).sum(-2).repeat(1, 2),
    "new rows": lambda s, h, w: torch.cat([torch.ones(h.shape[0], 4, dtype=h.dtype), h.new_zeros(h.size(0), 4)], 1) * h,
    "a matrix a row": lambda s, h, w: torch.bmm(h[:, None], w.expand(h.shape[0], 8, 8))[:, 0],
    "a weight a row": lambda s, h, w: s.b.unsqueeze(0).expand(h.shape[0], -1) * s.b.repeat(h.size(0), 1) * h,
    "a weight as the rows": lambda s, h, w: s.b.expand_as(h) * h[:, :1].log(),
    "beside a row that torch repeats": lambda s, h, w: F.cosine_similarity(h, s.b[None], -1)[:, None] * h,
    "a cell": lambda s, h, w: s.gru(h),
    "none alike": lambda s, h, w: h + torch.zeros_like(h) + h.new_ones(8),
}
# Where the model computes nothing these have no value, or no finite derivative: no gradient may see that.
PARTIAL: dict[str, Body] = {
    "log": lambda s, h, w: h * h[:, :1].log(),
    "log, then weights": lambda s, h, w: s.seq(h * h[:, :1].log()),
    "weights, then log": lambda s, h, w: s.seq(h) * h[:, :1].log() + s.b,
    "log of a weight": lambda s, h, w: h * (h[:, :1] * s.b).log(),
    "sqrt": lambda s, h, w: F.linear(h, w, s.b) + h[:, :1].sqrt() * s.b,
    "rsqrt": lambda s, h, w: (h * h[:, :1].rsqrt()) @ w + s.b,
    "asin": lambda s, h, w: h * (1 - h[:, :1]).clamp(max=0.9).asin() + s.b,
    "acosh": lambda s, h, w: h * (h[:, :1] + 1).acosh() * s.b,
    "a power of a weight": lambda s, h, w: h[:, :1].pow(s.b) * h,
    "a weight to a power": lambda s, h, w: s.b.pow(-h[:, :1]),
    "0.3": lambda s, h, w: h[:, :1] ** 0.3 * h @ w,
    "divided": lambda s, h, w: h / F.relu(h[:, :1]) + s.b,
    "a weight divided": lambda s, h, w: s.b / F.relu(h[:, :1]),
    "remainder": lambda s, h, w: torch.remainder(s.b, F.relu(h[:, :1])),
    "overflow": lambda s, h, w: s.seq((-h[:, :1] * 1e4).exp() * h),
    "in place": in_place,
    "layer_norm": lambda s, h, w: s.ln(h * h[:, :1].log()),
    "prelu": lambda s, h, w: F.prelu(h * h[:, :1].log(), s.b),
    "softmax of nothing": lambda s, h, w: h.masked_fill(h[:, :1] <= 0, float("-inf")).softmax(-1) @ w + s.b,
    "a norm of zero": lambda s, h, w: (lambda y: y / y.norm(dim=-1, keepdim=True))(F.relu(h[:, :1]) * h) * s.b,
    "atan2": lambda s, h, w: torch.atan2(F.relu(h[:, :1]), F.relu(h[:, :1])) * s.b,
    "einsum": lambda s, h, w: torch.einsum("nd,ed->ne", h * h[:, :1].log(), w),
    "einsum of three": lambda s, h, w: torch.einsum("nd,de,e->ne", h * h[:, :1].log(), w, s.b),
    "cat": lambda s, h, w: torch.cat([h[:, :1].log(), h], 1)[:, :8] * s.b,
    "numbers that no table has": lambda s, h, w: s.table((h[:, 0] * 8).ceil().long().clamp(max=7)) * h,
    "of a table that is fixed": lambda s, h, w: s.table.weight.detach()[(h[:, 0] * 8).ceil().long().clamp(max=7)] * h,
    "an index of a weight": lambda s, h, w: w[(h[:, 0] * 8).ceil().long().clamp(max=7)] * h,
}


def groups(bodies: dict[str, Body], size: int = 8) -> list[Any]:
    names = iter(bodies)
    return [pytest.param([bodies[one] for one in some], id=", ".join(some)) for some in _in_groups(names, size)]


def _in_groups(names: Any, size: int) -> Any:
    while some := list(itertools.islice(names, size)):
        yield some


@pytest.mark.parametrize("bodies", [*groups(ROW_BY_ROW), *groups(PARTIAL, 9)])
def test_what_takes_each_row_by_itself_is_right(bodies: list[Body]) -> None:
    torch.manual_seed(0)
    verified(Loop(*bodies), ("dp=2",), None, (rows(),), steps=1)


def add(x: Tensor, y: Tensor) -> Tensor:
    (at,) = torch.where(x[:, 0] > 0)
    return torch.zeros_like(x).index_add(0, at, torch.tanh(y[at]))


def by_mask(x: Tensor, y: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[x[:, 0] > 0] = torch.tanh(y[x[:, 0] > 0])
    return out


def added_by_mask(x: Tensor, y: Tensor) -> Tensor:
    mask, out = x[:, 0] > 0, torch.zeros_like(x)
    out[mask] += torch.tanh(y[mask]) * x[mask, 0][:, None]
    return out


def by_two_masks(x: Tensor, y: Tensor) -> Tensor:
    out, inside = torch.zeros_like(x), x[:, 0] > 0
    out[inside] = torch.tanh(y[inside])
    out[~inside] = torch.sin(y[~inside])
    return out


def by_mask_of_two(x: Tensor, y: Tensor) -> Tensor:
    """Rows of rows: [3, 2, 8]."""
    x, y = x.view(3, 2, 8), y.view(3, 2, 8)
    out = torch.zeros_like(x)
    out[x[..., 0] > 0] = torch.tanh(y[x[..., 0] > 0])
    return out


def flat_places(x: Tensor, y: Tensor) -> Tensor:
    at = torch.nonzero(x[:, 0] > 0).squeeze(-1)
    return torch.zeros_like(x).index_copy(0, at, torch.tanh(y.index_select(0, at)))


def column_of_places(x: Tensor, y: Tensor) -> Tensor:
    at = torch.argwhere(x[:, 0] > 0)[:, 0]
    return torch.zeros_like(x).index_put((at,), torch.tanh(y[at]), accumulate=True)


class Taken(nn.Module):
    def __init__(self, take: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.take, self.layer = take, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.take(x, self.layer(x)).square().mean()


@pytest.mark.parametrize(
    "take", [add, by_mask, added_by_mask, by_two_masks, by_mask_of_two, flat_places, column_of_places]
)
def test_however_rows_are_taken_and_put_back(take: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    verified(Taken(take), ("dp=2", "tp=2"), None, (rows(),), steps=1)


def test_products_of_any_spelling_leave_the_padding_out() -> None:
    spelled = [ROW_BY_ROW[name] for name in ("linear", "matmul", "einsum", "addmm")]
    spelled.append(lambda s, h, w: torch.einsum("nd, ed -> ne", h, w))
    found = capture(Loop(*spelled), None, (rows(),), {})
    targets = [str(node.target) for node in found.program.calls()]
    assert targets.count("autopar.expert_mm.default") == 2 * len(spelled) and "autopar.einsum.default" not in targets


class Own(torch.autograd.Function):
    """Each row by itself in the forward pass, and not in the backward pass."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2 + grads[0].mean()


def hooked(h: Tensor) -> Tensor:
    y = h * 2
    y.register_hook(lambda grad: grad / grad.norm())
    return y


def written(h: Tensor) -> Tensor:
    y = h * 1
    y[0] = 0
    return y


TOGETHER, ORDER, SUM = "it takes the rows together", "it sees the order of the rows", "it adds the rows up"
PART, PLACES = "it takes some of the rows apart", "its tensors have the rows at different places"
JOINED, OTHER = "it joins them with another dim", "another tensor has as many rows of its own"
NUMBER = "how many rows a mask selects"
REFUSED: dict[str, tuple[Body, str]] = {
    "cumsum": (lambda s, h, w: h.cumsum(0), TOGETHER),
    "flip": (lambda s, h, w: h.flip(0), ORDER),
    "roll": (lambda s, h, w: h.roll(1, 0), TOGETHER),
    "softmax": (lambda s, h, w: h.softmax(0), TOGETHER),
    "softmax of halves": (lambda s, h, w: h.view(2, -1, 8).softmax(1).view(-1, 8), PART),
    "mean of pairs": (lambda s, h, w: h.view(-1, 2, 8).mean(1, keepdim=True).expand(-1, 2, 8).reshape(-1, 8), PART),
    "softmax of all": (lambda s, h, w: h.reshape(-1).softmax(0).view(-1, 8), JOINED),
    "batch_norm": (lambda s, h, w: s.bn(h), SUM),
    "cdist": (lambda s, h, w: torch.cdist(h, h)[:, :1] * h, PLACES),
    "products of rows": (lambda s, h, w: (h @ h.T) @ h, PLACES),
    "products of columns": (lambda s, h, w: h @ (h.T @ h), SUM),
    "sort": (lambda s, h, w: h.sort(0).values, TOGETHER),
    "topk": (lambda s, h, w: h * h.topk(2, 0).values.sum(), TOGETHER),
    "the first row": (lambda s, h, w: h - h[:1], TOGETHER),
    "a row": (lambda s, h, w: h - h[0], TOGETHER),
    "every other row": (lambda s, h, w: torch.cat([h[::2], h[1::2]]), PART),
    "hook": (lambda s, h, w: hooked(h), "here register_hook.. does not: what it does with them is not known"),
    "a backward of one's own": (
        lambda s, h, w: Own.apply(h),
        "Own has a backward of its own, which may see other rows",
    ),
    "padded rows": (lambda s, h, w: F.pad(h, (0, 0, 1, 0))[:-1], TOGETHER),
    "rows twice": (lambda s, h, w: torch.cat([h, h], 0)[: h.shape[0]], JOINED),
    "repeat": (lambda s, h, w: h.repeat(2, 1)[: h.shape[0]], JOINED),
    "normalize": (lambda s, h, w: F.normalize(h, dim=0), TOGETHER),
    "std": (lambda s, h, w: h / h.std(0), TOGETHER),
    "convolution": (lambda s, h, w: s.conv(h.T[None])[0].T, TOGETHER),
    "their own order": (lambda s, h, w: h[h[:, 0].argsort()], TOGETHER),
    "inverse": (lambda s, h, w: torch.linalg.inv(h.view(-1, 2, 2, 2)).reshape(-1, 8), "it may refuse a row"),
    "dropout of rows of rows": (
        lambda s, h, w: h.index_put([h[:, 0] > 0], F.dropout(h[h[:, 0] > 0], 0.3)),
        "here dropout.. does not: it draws a number for each place",
    ),
    "noise": (lambda s, h, w: h + torch.randn_like(h), OTHER),
    "numbers of rows": (lambda s, h, w: h * torch.arange(h.shape[0])[:, None], OTHER),
    "divided by their number": (lambda s, h, w: h / len(h), NUMBER),
    "a matrix a row": (lambda s, h, w: torch.bmm(h[:, None], w.expand(len(h), 8, 8))[:, 0], OTHER),
    "a table as long": (lambda s, h, w: h + s.b.repeat(6, 1), OTHER),
    "twice as many": (lambda s, h, w: h + h.new_zeros(2 * h.shape[0], 8)[:6], OTHER),
    "their number as a value": (lambda s, h, w: h + torch.full((8,), h.shape[0]), NUMBER),
    "mapped": (lambda s, h, w: torch.func.vmap(lambda row: row * 2)(h), NUMBER),
    "norm over rows": (lambda s, h, w: F.instance_norm(h.T[None])[0].T, TOGETHER),
    "attention between rows": (lambda s, h, w: F.scaled_dot_product_attention(h, h, h), PLACES),
    "windows": (lambda s, h, w: h.unfold(0, 2, 1).sum() * h, TOGETHER),
    "triangle": (lambda s, h, w: h.tril(), TOGETHER),
    "written": (lambda s, h, w: written(h), "here setitem"),
    "rows of rows": (lambda s, h, w: h.masked_scatter(h > 0, h * 2), "no rule is known of it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_takes_rows_together_is_refused(name: str) -> None:
    body, said = REFUSED[name]
    with pytest.raises(CaptureError, match=said):
        capture(Loop(body).double(), None, (rows().double(),), {})


class _OneOfEachRow(nn.Module):
    """As ArcFace takes the cosine of each sample's own class: by a mask that has one place in each row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        cosine = self.inner(x)
        mask = torch.zeros(len(x), 6, dtype=x.dtype)
        mask[torch.arange(len(x)), y] = 1
        own = cosine[mask == 1]
        return (cosine + mask * (own.square() - own).unsqueeze(1)).square().mean()


def test_what_needs_the_number_of_rows_is_offered_it() -> None:
    """And not told that the model fails, where torch could not join as many rows as there may be."""
    batch = torch.randn(8, 4), torch.arange(8) % 6
    with pytest.raises(CaptureError) as caught:
        capture(_OneOfEachRow(), None, batch, {})
    said = " ".join(str(caught.value).split())
    assert "index by a boolean mask (x[mask])" in said and "here mul() does not: it takes them for as many as" in said
    assert said.endswith(
        "Or specialize=True takes the value from the example batch, and checks at each step that it still holds."
    )
    assert capture(_OneOfEachRow(), None, batch, {}, specialize=True)
