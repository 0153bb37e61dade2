"""Mixtures of experts as public code has them: further ways than those of `expert_spellings.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.spellings.expert_spellings import CHOSEN, EXPERTS, WIDTH

Way = Callable[[Any, Tensor, Tensor, Tensor], Tensor]  # of a module, rows [n, w], weights [n, k] and experts [n, k]


def _table(x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Weights by expert [n, E]."""
    return torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(1, chosen, weights)


# -- which experts are gone through ------------------------------------------------------------------------------------


def unique(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in torch.unique(chosen):
        rows, place = torch.where(chosen == e)
        out[rows] += m.experts[int(e)](x[rows]) * weights[rows, place, None]
    return out


def unique_list(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in chosen.unique().tolist():
        rows, place = torch.where(chosen == e)
        out.index_add_(0, rows, m.experts[e](x[rows]) * weights[rows, place, None])
    return out


def unique_floats(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Numbers that are floats, which nobody can count as places."""
    out = torch.zeros_like(x)
    for e in torch.unique(chosen.to(x.dtype)):
        rows, place = torch.where(chosen == e)
        out[rows] += m.experts[int(e)](x[rows]) * weights[rows, place, None]
    return out


def a_set(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in sorted(set(chosen.flatten().tolist())):
        rows, place = torch.where(chosen == e)
        out.index_add_(0, rows, m.experts[e](x[rows]) * weights[rows, place, None])
    return out


def unsorted_set(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    table = _table(x, weights, chosen)
    out = torch.zeros_like(x)
    for e in set(chosen.view(-1).tolist()):
        mask = (chosen == e).any(-1)
        out[mask] += m.experts[e](x[mask]) * table[mask, e, None]
    return out


def is_in_set(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out, used = torch.zeros_like(x), set(chosen.flatten().tolist())
    for e, expert in enumerate(m.experts):
        if e not in used:
            continue
        rows, place = torch.where(chosen == e)
        out.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
    return out


def binned(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """bincount without minlength: as long as the largest expert that was chosen."""
    out = torch.zeros_like(x)
    for e, count in enumerate(torch.bincount(chosen.flatten()).tolist()):
        if count == 0:
            continue
        rows, place = torch.where(chosen == e)
        out[rows] += m.experts[e](x[rows]) * weights[rows, place, None]
    return out


# -- how its rows are taken and put back -------------------------------------------------------------------------------


def pairs(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """nonzero() as it is: a row for each place."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        places = (chosen == e).nonzero()
        rows, place = places[:, 0], places[:, 1]
        out[rows] += expert(x[rows]) * weights[rows, place].unsqueeze(-1)
    return out


def unbound(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        rows, place = (chosen == e).nonzero().unbind(1)
        out.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
    return out


def turned_pairs(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        rows, place = torch.nonzero(chosen == e).T
        out.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
    return out


def as_tuple(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        rows, place = (chosen == e).nonzero(as_tuple=True)
        out = out.index_add(0, rows, expert(x.index_select(0, rows)) * weights[rows, place][:, None])
    return out


def argwhere(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        places = torch.argwhere(chosen == e)
        if len(places) == 0:
            continue
        out[places[:, 0]] += expert(x[places[:, 0]]) * weights[places[:, 0], places[:, 1]][:, None]
    return out


def split_pairs(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        rows, place = (chosen == e).nonzero().split(1, dim=1)
        rows, place = rows.squeeze(-1), place.squeeze(-1)
        out.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
    return out


def selected(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """masked_select and masked_scatter, whose elements are viewed as rows."""
    table = _table(x, weights, chosen)
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = (chosen == e).any(-1)
        rows = torch.masked_select(x, mask[:, None]).view(-1, WIDTH)
        y = expert(rows) * table[mask, e, None]
        out = out + torch.zeros_like(x).masked_scatter(mask[:, None], y)
    return out


def token_numbers(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """masked_select of the numbers of rows, and index_put_."""
    table = _table(x, weights, chosen)
    out, numbers = torch.zeros_like(x), torch.arange(len(x))
    for e, expert in enumerate(m.experts):
        mask = (chosen == e).any(-1)
        rows = numbers.masked_select(mask)
        y = expert(x[rows]) * table[rows, e, None]
        out.index_put_((rows,), y, accumulate=True)
    return out


def in_place(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """x[mask] = expert(x[mask]), one expert a row."""
    x = x.clone()
    for e, expert in enumerate(m.experts):
        mask = chosen[:, 0] == e
        x[mask] = expert(x[mask])
    return x * weights[:, :1]


def scattered(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        rows, place = torch.where(chosen == e)
        y = expert(x[rows]) * weights[rows, place, None]
        out = out.scatter_reduce(0, rows[:, None].expand(-1, WIDTH), y, reduce="sum")
    return out


def dense_masked(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """No selection: every expert with every row."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        weight = weights.masked_fill(chosen != e, 0).sum(-1, keepdim=True)
        out = out + expert(x) * weight
    return out


def each_choice(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """As Mistral's first reference: a loop over choices within the one over experts."""
    out = torch.zeros_like(x)
    for k in range(CHOSEN):
        for e, expert in enumerate(m.experts):
            mask = chosen[:, k] == e
            if mask.any():
                out[mask] += weights[mask, k].unsqueeze(-1) * expert(x[mask])
    return out


def listed(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """What experts give is kept in a list, and added after the loop."""
    given = []
    for e, expert in enumerate(m.experts):
        rows, place = torch.where(chosen == e)
        given.append((rows, expert(x[rows]) * weights[rows, place, None]))
    out = torch.zeros_like(x)
    for rows, y in given:
        out.index_add_(0, rows, y)
    return out


def joined(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Rows and results of all experts joined, and added at once."""
    found = [torch.where(chosen == e) for e in range(EXPERTS)]
    y = torch.cat([m.experts[e](x[rows]) * weights[rows, place, None] for e, (rows, place) in enumerate(found)])
    return torch.zeros_like(x).index_add(0, torch.cat([rows for rows, _ in found]), y)


def sparse_dispatcher(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """As David Rau's mixture-of-experts: sorted pairs of nonzero(), cut by the numbers of rows."""
    gates = _table(x, weights, chosen)
    order = torch.nonzero(gates)[torch.nonzero(gates)[:, 1].sort(stable=True, dim=0)[1]]
    sizes = (gates > 0).sum(0).tolist()
    rows = torch.split(x[order[:, 0]], sizes)
    y = torch.cat([expert(rows[e]) for e, expert in enumerate(m.experts)])
    y = y * gates[order[:, 0], order[:, 1]][:, None]
    return torch.zeros_like(x).index_add(0, order[:, 0], y)


def makemoe(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """As makeMoE: flattened rows, a flat mask, and squeeze."""
    flat, gates, out = x.view(-1, WIDTH), _table(x, weights, chosen), torch.zeros_like(x)
    for i, expert in enumerate(m.experts):
        mask = (chosen == i).any(dim=-1)
        flat_mask = mask.view(-1)
        if flat_mask.any():
            scores = gates[flat_mask, i].unsqueeze(1)
            out[mask] += (expert(flat[flat_mask]) * scores).squeeze(1)
    return out


# -- sorted, and cut ---------------------------------------------------------------------------------------------------


def tensor_split(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Ends of counts."""
    flat = chosen.flatten()
    order = torch.argsort(flat, stable=True)
    ends = torch.bincount(flat, minlength=EXPERTS).cumsum(0)
    pieces = x[order // CHOSEN].tensor_split(ends[:-1].cpu())
    y = torch.cat([expert(piece) for expert, piece in zip(m.experts, pieces, strict=True)])
    return torch.zeros_like(x).index_add(0, order // CHOSEN, y * weights.flatten()[order, None])


def tensor_split_list(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    flat = chosen.flatten()
    order = torch.argsort(flat, stable=True)
    ends = torch.bincount(flat, minlength=EXPERTS).cumsum(0).tolist()
    pieces = torch.tensor_split(x[order // CHOSEN], ends[:-1])
    y = torch.cat([expert(piece) for expert, piece in zip(m.experts, pieces, strict=True)])
    return torch.zeros_like(x).index_add(0, order // CHOSEN, y * weights.flatten()[order, None])


def dropped_pieces(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    flat = chosen.flatten()
    order = torch.argsort(flat, stable=True)
    pieces = x[order // CHOSEN].split(torch.bincount(flat, minlength=EXPERTS).tolist())
    y = torch.cat([F.dropout(expert(piece), 0.3) for expert, piece in zip(m.experts, pieces, strict=True)])
    return torch.zeros_like(x).index_add(0, order // CHOSEN, y * weights.flatten()[order, None])


def routing_map(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """As Megatron permutes: the numbers of rows that a table [E, n] selects, sorted by expert as they come."""
    table = torch.zeros(len(x), EXPERTS, dtype=torch.bool).scatter(1, chosen, True)
    sizes = table.sum(0).tolist()
    by_expert = table.T.contiguous()
    numbers = torch.arange(len(x)).unsqueeze(0).expand(EXPERTS, -1).masked_select(by_expert)
    chances = _table(x, weights, chosen).T.contiguous().masked_select(by_expert)
    pieces = x.index_select(0, numbers).split(sizes)
    y = torch.cat([expert(piece) for expert, piece in zip(m.experts, pieces, strict=True)]) * chances[:, None]
    return torch.zeros_like(x).scatter_add_(0, numbers.unsqueeze(1).expand(-1, WIDTH), y)


def grouped_map(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """The same with grouped products."""
    table = torch.zeros(len(x), EXPERTS, dtype=torch.bool).scatter(1, chosen, True)
    by_expert = table.T.contiguous()
    numbers = torch.arange(len(x)).unsqueeze(0).expand(EXPERTS, -1).masked_select(by_expert)
    ends = table.sum(0).cumsum(0).to(torch.int32)
    y = F.grouped_mm(F.relu(F.grouped_mm(x[numbers], m.up, offs=ends)), m.down, offs=ends)
    y = y * _table(x, weights, chosen).T.contiguous().masked_select(by_expert)[:, None]
    return torch.zeros_like(x).index_add(0, numbers, y)


def searched(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Slices between searched ends, tensors all the way (no list)."""
    keys, order = chosen.flatten().sort(stable=True)
    ends, out = torch.searchsorted(keys, torch.arange(EXPERTS + 1)), torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        rows = order[ends[e] : ends[e + 1]]
        out.index_add_(0, rows // CHOSEN, expert(x[rows // CHOSEN]) * weights.flatten()[rows, None])
    return out


# -- a capacity, one-hot -----------------------------------------------------------------------------------------------


def _experts(m: Any, inputs: Tensor) -> Tensor:
    """What stacked experts make of rows [E, c, w]."""
    return torch.einsum("ech,ehm->ecm", F.relu(torch.einsum("ecm,emh->ech", inputs, m.up)), m.down)


def _dispatch(x: Tensor, weights: Tensor, chosen: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """Which place of which expert a row has [n, E, c], and what it weighs there."""
    hot = F.one_hot(chosen[:, 0], EXPERTS)
    place = (torch.cumsum(hot, 0) - 1) * hot
    kept = hot * (place < room)
    dispatch = kept.to(x.dtype)[..., None] * F.one_hot(place.clamp(max=room - 1), room).to(x.dtype)
    return dispatch, dispatch * weights[:, :1, None]


def tec(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """As Switch and DeepSpeed dispatch."""
    dispatch, combine = _dispatch(x, weights, chosen, 6)
    return torch.einsum("tec,ecm->tm", combine, _experts(m, torch.einsum("tec,tm->ecm", dispatch, x)))


def tec_modules(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """As DeepSpeed and fairscale: pieces by chunk, a module each."""
    dispatch, combine = _dispatch(x, weights, chosen, 6)
    inputs = torch.einsum("sec,sm->ecm", dispatch, x)
    y = torch.cat([expert(piece) for expert, piece in zip(m.experts, inputs.chunk(EXPERTS, dim=0), strict=True)])
    return torch.einsum("sec,ecm->sm", combine, y)


def bmm(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """As products of views and bmm."""
    dispatch, combine = _dispatch(x, weights, chosen, 6)
    inputs = (dispatch.flatten(1).t() @ x).view(EXPERTS, 6, WIDTH)
    y = torch.bmm(F.gelu(torch.bmm(inputs, m.up)), m.down)
    return combine.flatten(1) @ y.reshape(-1, WIDTH)


def expert_choice(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Each expert takes its top rows (Zhou et al., arXiv 2202.09368)."""
    scores = m.router(x).softmax(-1)
    gates, rows = torch.topk(scores.t(), 6)  # [E, c]
    y = _experts(m, x[rows]) * gates[..., None]
    return torch.zeros_like(x).index_add(0, rows.flatten(), y.flatten(0, 1))


def expert_choice_hot(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """The same in one-hot products, as the paper has it."""
    gates, rows = torch.topk(m.router(x).softmax(-1).t(), 6)
    hot = F.one_hot(rows, len(x)).to(x.dtype)  # [E, c, n]
    y = _experts(m, torch.einsum("ecn,nm->ecm", hot, x))
    return torch.einsum("ecn,ec,ecm->nm", hot, gates, y)


def expert_choice_loop(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    gates, rows = torch.topk(m.router(x).softmax(-1), 6, dim=0)
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        out.index_add_(0, rows[:, e], expert(x[rows[:, e]]) * gates[:, e, None])
    return out


def soft(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Soft MoE: every slot is a mean of rows (Puigcerver et al., arXiv 2308.00951)."""
    logits = torch.einsum("nm,em->ne", x, m.router.weight)[..., None] * torch.arange(1.0, 3.0, dtype=x.dtype)
    inputs = torch.einsum("nec,nm->ecm", logits.softmax(0), x)
    return torch.einsum("nec,ecm->nm", logits.flatten(1).softmax(-1).view_as(logits), _experts(m, inputs))


def stacked_dense(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Every expert with every row, in one product."""
    y = torch.einsum("neh,ehm->nem", F.relu(torch.einsum("nm,emh->neh", x, m.up)), m.down)
    return torch.einsum("nem,ne->nm", y, _table(x, weights, chosen))


def switch_room(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Tutel: rows are put into places of [E * c] by index, and taken back by it."""
    room, hot = 6, F.one_hot(chosen[:, 0], EXPERTS)
    place = ((hot.cumsum(0) - 1) * hot).sum(1)
    kept = (place < room).to(x.dtype)[:, None]
    where = chosen[:, 0] * room + place.clamp(max=room - 1)
    inputs = torch.zeros(EXPERTS * room, WIDTH, dtype=x.dtype).index_add(0, where, x * kept)
    y = _experts(m, inputs.view(EXPERTS, room, WIDTH)).reshape(-1, WIDTH)
    return y[where] * kept * weights[:, :1]


# -- other mixtures ----------------------------------------------------------------------------------------------------


def shared(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """The first expert takes every row besides."""
    out = m.experts[0](x)
    for e, expert in enumerate(m.experts):
        rows, place = torch.where(chosen == e)
        out = out.index_add(0, rows, expert(x[rows]) * weights[rows, place, None])
    return out


def hashed(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Hash layers: what is no weight says the expert."""
    out, which = torch.zeros_like(x), (x[:, 0] * 1000).long() % EXPERTS
    for e, expert in enumerate(m.experts):
        mask = which == e
        out[mask] = expert(x[mask])
    return out


def of_low_rank(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """MoE-LoRA: a shared layer, and a low rank beside it for each expert."""
    base, out = m.head(x), torch.zeros_like(x)
    for e in range(EXPERTS):
        rows, place = torch.where(chosen == e)
        out.index_add_(0, rows, (x[rows] @ m.up[e] @ m.down[e]) * weights[rows, place, None] * 0.5)
    return base + out


def of_depths(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Mixture of depths: the top rows pass one expert, the others stay."""
    gates, rows = torch.topk(m.router(x)[:, 0], 6)
    return x.index_add(0, rows, m.experts[0](x[rows]) * gates.sigmoid()[:, None])


def left_out(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Rows that have no expert, -1, stay away."""
    chosen = chosen.masked_fill(weights < 0.35, -1)
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        rows, place = torch.where(chosen == e)
        out.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
    return out


def fewer(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """The last expert is left out of the loop."""
    out = torch.zeros_like(x)
    for e in range(EXPERTS - 1):
        rows, place = torch.where(chosen == e)
        out.index_add_(0, rows, m.experts[e](x[rows]) * weights[rows, place, None])
    return out


def fewer_pieces(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Rows without an expert are sorted to the front, and no piece has them."""
    flat = chosen.masked_fill(weights < 0.35, -1).flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.stack([(flat == e).sum() for e in range(EXPERTS)]).tolist()
    out, start = torch.zeros_like(x), len(flat) - sum(counts)
    for e, count in enumerate(counts):
        rows = order[start : start + count]
        out.index_add_(0, rows // CHOSEN, m.experts[e](x[rows // CHOSEN]) * weights.flatten()[rows, None])
        start += count
    return out


def last_pieces(m: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Rows without an expert come last, behind all pieces."""
    flat = chosen.masked_fill(weights < 0.35, EXPERTS).flatten()
    order = torch.argsort(flat, stable=True)
    counts, out, start = torch.bincount(flat, minlength=EXPERTS + 1)[:EXPERTS].tolist(), torch.zeros_like(x), 0
    for e, count in enumerate(counts):
        rows = order[start : start + count]
        out.index_add_(0, rows // CHOSEN, m.experts[e](x[rows // CHOSEN]) * weights.flatten()[rows, None])
        start += count
    return out
