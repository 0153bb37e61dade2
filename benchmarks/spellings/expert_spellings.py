"""Ways in which people write a mixture of experts: each a module with the same router, experts and loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HIDDEN, ROWS, EXPERTS, CHOSEN, VOCABULARY = 8, 12, 16, 4, 2, 16


class Expert(nn.Module):
    """A gated layer with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Spelled(nn.Module):
    """A mixture that a function of (experts, x, weights, chosen) computes. is_stacked: the experts' matrices are two
    parameters; else each is a module. The router sends few rows to the last expert, and none to one of the first."""

    def __init__(self, compute: Callable[..., Tensor], is_stacked: bool = False, chosen: int = CHOSEN) -> None:
        super().__init__()
        self.compute, self.chosen = compute, chosen
        self.router = nn.Linear(WIDTH, EXPERTS)
        with torch.no_grad():
            self.router.bias.copy_(torch.tensor([1.0, -50.0, 0.5, -0.5]))
        if is_stacked:
            self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * 0.4)
            self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * 0.4)
        else:
            self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.head(x))
        return (h + self.mix(h)).square().mean()

    def mix(self, x: Tensor) -> Tensor:
        """What experts make of rows."""
        weights, chosen = torch.topk(self.router(x).softmax(-1), self.chosen)
        return self.compute(self, x, weights / weights.sum(-1, keepdim=True), chosen)


def spelled(compute: Callable[..., Tensor], is_stacked: bool = False, chosen: int = CHOSEN) -> nn.Module:
    """The module of a spelling, the same in each process."""
    torch.manual_seed(1)
    return Spelled(compute, is_stacked, chosen)


def batch() -> tuple[Tensor]:
    """Rows that differ from part to part."""
    torch.manual_seed(2)
    return (torch.randn(ROWS, WIDTH) * torch.linspace(0.5, 2, ROWS)[:, None],)


# -- loops over experts ------------------------------------------------------------------------------------------------


def where_(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        rows, place = torch.where(chosen == e)
        out.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
    return out


def stacked_where(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        rows, place = torch.where(chosen == e)
        out[rows] += F.gelu(x[rows] @ m.up[e]) @ m.down[e] * weights[rows, place, None]
    return out


def transposed_where(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Matrices are kept as nn.Linear has them."""
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        rows, place = torch.where(chosen == e)
        y = F.linear(F.relu(F.linear(x[rows], m.up[e].t())), m.down[e].t())
        out = out.index_add(0, rows, y * weights[rows, place].unsqueeze(-1))
    return out


def mixtral(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """transformers before 5."""
    out = torch.zeros_like(x)
    mask = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
    for e in range(EXPERTS):
        place, rows = torch.where(mask[e])
        current = x[None, rows].reshape(-1, WIDTH)
        out.index_add_(0, rows, (m.experts[e](current) * weights[rows, place, None]).to(x.dtype))
    return out


def nonzero(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """One expert a row."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        rows = (chosen[:, 0] == e).nonzero(as_tuple=True)[0]
        out.index_add_(0, rows, expert(x[rows]) * weights[:, 0][rows][:, None])
    return out


def any_place(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """A mask of the rows that chose an expert at any place, and weights by expert."""
    by_expert = torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(1, chosen, weights)
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        rows = (chosen == e).any(-1).nonzero(as_tuple=True)[0]
        out.index_add_(0, rows, expert(x[rows]) * by_expert[rows, e][:, None])
    return out


def many_hot(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """A table of the experts of each row."""
    by_expert = torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(1, chosen, weights)
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        (rows,) = torch.where(by_expert[:, e] > 0)
        out[rows] += expert(x[rows]) * by_expert[:, e][rows].unsqueeze(1)
    return out


def capacity(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Each expert takes the first rows of the batch that chose it, as Switch Transformers does; others are left out."""
    hot = F.one_hot(chosen[:, 0], EXPERTS)
    hot = hot * (torch.cumsum(hot, 0) <= 3)
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        (rows,) = torch.where(hot[:, e])
        out.index_add_(0, rows, expert(x[rows]) * weights[rows, 0, None])
    return out


def masked(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """x[mask] and out[mask] = rows, as makeMoE and Switch Transformers before 5 have it."""
    by_expert = torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(1, chosen, weights)
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = (chosen == e).any(-1)
        out[mask] += expert(x[mask]) * by_expert[mask, e].unsqueeze(1)
    return out


def switch(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Rows that no expert takes stay as they are."""
    hot = F.one_hot(chosen[:, 0], EXPERTS)
    hot = (hot * (torch.cumsum(hot, 0) <= 3)).bool()
    out = x.clone()
    for e, expert in enumerate(m.experts):
        out[hot[:, e]] = expert(x[hot[:, e]])
    return out * weights[:, :1]


def _dropping(m: Spelled, e: int, x: Tensor) -> Tensor:
    """An expert with dropout of what it takes, in its middle and of what it gives."""
    expert, x = m.experts[e], F.dropout(x, 0.1) * 2
    hidden = F.dropout(F.silu(expert.gate(x)) * expert.up(x), 0.3)
    return F.dropout(expert.down(hidden), 0.2)


def dropped(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        rows, place = torch.where(chosen == e)
        out.index_add_(0, rows, _dropping(m, e, x[rows]) * weights[rows, place, None])
    return F.dropout(out, 0.1)


def dropped_hit(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """As Switch Transformers since transformers 5: experts without rows draw nothing."""
    out = torch.zeros_like(x)
    mask = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
    for e in torch.greater(mask.sum((-1, -2)), 0).nonzero():
        place, rows = torch.where(mask[e].squeeze(0))
        current = x[None, rows].reshape(-1, WIDTH)
        out.index_add_(0, rows, _dropping(m, int(e), current) * weights[rows, place, None])
    return F.dropout(out, 0.1)


def dropped_mask(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    by_expert = torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(1, chosen, weights)
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        mask = (chosen == e).any(-1)
        out[mask] += _dropping(m, e, x[mask]) * by_expert[mask, e].unsqueeze(1)
    return F.dropout(out, 0.1)


def overwritten(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Of two experts of a row the later one counts."""
    out = x.clone()
    for e, expert in enumerate(m.experts):
        mask = (chosen == e).any(-1)
        out[mask] = expert(x[mask])
    return out


def flat(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Rows repeated for each choice, of which each expert puts its own in place, as DeepSeek's MoE trains."""
    repeated, which = x.repeat_interleave(CHOSEN, 0), chosen.view(-1)
    y = torch.empty_like(repeated)
    for e, expert in enumerate(m.experts):
        y[which == e] = expert(repeated[which == e])
    return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


def counted(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Experts without rows are passed over by their counts, as DeepSeek-V3's own code does."""
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        if counts[e] == 0:
            continue
        rows, place = torch.where(chosen == e)
        out[rows] += expert(x[rows]) * weights[rows, place, None]
    return out


def counted_hot(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """The same by the sum of a one-hot tensor, which stays a tensor, and with a mask of rows."""
    counts = F.one_hot(chosen, EXPERTS).sum((0, 1))
    by_expert = torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(1, chosen, weights)
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        if counts[e] > 0:
            mask = (chosen == e).any(-1)
            out[mask] += expert(x[mask]) * by_expert[mask, e].unsqueeze(1)
    return out


def counted_items(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Numbers one at a time, of which Python asks for the truth."""
    counts = torch.bincount(chosen.view(-1), minlength=EXPERTS)
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        if not counts[e].item():
            continue
        place, rows = torch.where(chosen.t() == e)
        out.index_add_(0, rows, F.relu(x[rows] @ m.up[e]) @ m.down[e] * weights[rows, place, None])
    return out


def counted_table(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """A table of who chose whom, as in DeepSeek's models, added up."""
    table = chosen.new_zeros((len(chosen), EXPERTS))
    table.scatter_(1, chosen, 1)
    out = torch.zeros_like(x)
    for e, rows_of_it in enumerate(table.sum(0).tolist()):
        if rows_of_it == 0:
            continue
        rows, place = torch.where(chosen == e)
        out[rows] += m.experts[e](x[rows]) * weights[rows, place, None]
    return out


def counted_masks(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """The mask of each expert is asked."""
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        mask = chosen == e
        if not mask.any():
            continue
        rows, place = torch.where(mask)
        out[rows] += m.experts[e](x[rows]) * weights[rows, place, None]
    return out


def counted_otherwise(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """What an expert without rows leaves out is more than its rows."""
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        if counts[e] == 0:
            continue
        rows, place = torch.where(chosen == e)
        out[rows] += expert(x[rows]) * weights[rows, place, None]
        out = out + 0.1 * expert.gate.bias.sum()
    return out


# -- rows sorted by expert, and cut by counts --------------------------------------------------------------------------


def titan(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """As torchtitan's experts in a loop: split by counts, each with its matrices, put together and added up."""
    flat = chosen.view(-1)
    counts = torch.histc(flat.float(), bins=EXPERTS, min=0, max=EXPERTS)
    order = torch.argsort(flat, stable=True)
    places = (order // CHOSEN).reshape(-1, 1).expand(-1, WIDTH)
    rows, sizes, given = torch.gather(x, 0, places), counts.int().tolist(), []
    for e, part in enumerate(torch.split(rows[: sum(sizes)], split_size_or_sections=sizes, dim=0)):
        given.append(torch.matmul(F.silu(torch.matmul(part, m.up[e])), m.down[e]))
    y = torch.cat(given, dim=0) * weights.view(-1)[order].reshape(-1, 1)
    return torch.zeros_like(x).scatter_add(0, places, y)


def megatron(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """As Megatron's sequential experts: modules take pieces, and rows are put back before they are weighed."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    pieces = x.index_select(0, order // CHOSEN).split(torch.bincount(flat, minlength=EXPERTS).tolist())
    y = torch.cat([expert(piece) for expert, piece in zip(m.experts, pieces, strict=True)])
    back = torch.zeros(len(flat), WIDTH, dtype=y.dtype).scatter(0, order.unsqueeze(1).expand(-1, WIDTH), y)
    return (back.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1)


def moe_infer(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """As DeepSeek's own code infers: counts on the host, and experts without rows passed over."""
    table = chosen.new_zeros((len(chosen), EXPERTS))
    table.scatter_(1, chosen, 1)
    order = chosen.view(-1).argsort()
    rows, given, start = x[order // chosen.shape[1]], [], 0
    for e, count in enumerate(table.sum(dim=0).cpu().numpy()):
        end = start + count
        if count == 0:
            continue
        given.append(m.experts[e](rows[start:end]))
        start = end
    y = torch.cat(given, dim=0) if len(given) else rows.new_empty(0)
    back = torch.empty_like(y)
    back[order] = y
    return back.view(*chosen.shape, -1).mul_(weights.unsqueeze(-1)).sum(1)


def slices(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Slices of the order between running sums, added up by scatter."""
    order, out = chosen.view(-1).argsort(), torch.zeros_like(x)
    ends, tokens = torch.bincount(chosen.view(-1), minlength=EXPERTS).cumsum(0).tolist(), order // CHOSEN
    for e, end in enumerate(ends):
        start = 0 if e == 0 else ends[e - 1]
        if start == end:
            continue
        rows = tokens[start:end]
        y = m.experts[e](x[rows]) * weights.view(-1, 1)[order[start:end]]
        out.scatter_add_(0, rows.view(-1, 1).repeat(1, x.shape[-1]), y)
    return out


def written(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Each slice is written into its place."""
    keys, order = torch.sort(chosen.view(-1), stable=True)
    ends = [0, *torch.searchsorted(keys, torch.arange(EXPERTS), right=True).tolist()]
    rows = x[order // CHOSEN]
    y = torch.zeros_like(rows)
    for e, expert in enumerate(m.experts):
        if ends[e] < ends[e + 1]:
            y[ends[e] : ends[e + 1]] = expert(rows[ends[e] : ends[e + 1]])
    return torch.zeros_like(x).index_add(0, order // CHOSEN, y * weights.view(-1)[order, None])


def columns(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """The rows of an expert as columns, and scatter_add in place of index_add."""
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        rows, place = torch.where(chosen == e)
        y = (m.down[e].T @ F.silu(m.up[e].T @ x[rows].T.contiguous())).T * weights[rows, place, None]
        out.scatter_add_(0, rows.unsqueeze(-1).expand(-1, WIDTH), y)
    return out


# -- without a loop over rows ------------------------------------------------------------------------------------------


def dense(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Every expert with every row, of which most weigh nothing."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        out = out + expert(x) * torch.where(chosen == e, weights, 0).sum(-1, keepdim=True)
    return out


def gshard(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """One-hot dispatch with a capacity, in einsums (GShard, arXiv 2006.16668)."""
    room = 6
    hot = F.one_hot(chosen, EXPERTS).to(x.dtype)
    place = (hot.sum(1).cumsum(0) - 1).long().clamp(0, room - 1)
    dispatch = hot.sum(1)[..., None] * F.one_hot(place, room).to(x.dtype)
    inputs = torch.einsum("sec,sm->ecm", dispatch, x)
    y = torch.einsum("ech,ehm->ecm", F.relu(torch.einsum("ecm,emh->ech", inputs, m.up)), m.down)
    return torch.einsum("sec,ecm->sm", dispatch * (hot * weights[..., None]).sum(1)[..., None], y)


def gathered(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Each row gets copies of its matrices."""
    y = F.relu(torch.einsum("nm,nkmh->nkh", x, m.up[chosen]))
    return torch.einsum("nkh,nkhm,nk->nm", y, m.down[chosen], weights)


def sorted_(m: Spelled, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Rows sorted by expert, and grouped products."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    ends = torch.bincount(flat, minlength=EXPERTS).cumsum(0).to(torch.int32)
    y = F.grouped_mm(F.relu(F.grouped_mm(x[order // CHOSEN], m.up, offs=ends)), m.down, offs=ends)
    return torch.zeros_like(x).index_add(0, order // CHOSEN, y * weights.flatten()[order][:, None])


# -- in a model --------------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """A small language model, of whose layers each has attention, a dense layer and a mixture."""

    def __init__(self, mixtures: Iterable[Spelled]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.mixed = nn.ModuleList(mixtures)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in self.mixed)
        self.dense = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in self.mixed)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for qkv, dense, mixed in zip(self.qkv, self.dense, self.mixed, strict=True):
            q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in qkv(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + torch.tanh(dense(x))
            x = x + mixed.mix(x.reshape(-1, WIDTH)).view_as(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def layers(compute: Callable[..., Tensor], is_stacked: bool = False, chosen: int = CHOSEN) -> nn.Module:
    """A model with two mixtures of a spelling, the same in each process."""
    torch.manual_seed(1)
    return Layers(Spelled(compute, is_stacked, chosen) for _ in range(2))


def tokens() -> tuple[Tensor, Tensor]:
    """Sequences of unlike frequent tokens, with labels."""
    torch.manual_seed(3)
    drawn = (torch.rand(8, 8) ** 2 * torch.linspace(4, VOCABULARY, 8).view(-1, 1)).long()
    return drawn, (drawn * 7 + torch.arange(8)) % VOCABULARY
