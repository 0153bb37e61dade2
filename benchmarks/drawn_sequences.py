"""Draw programs over the positions of sequences, and compare each with the plain module.

    timeout 700 .venv/bin/python -m benchmarks.drawn_sequences [--seconds 600] [--seed 0]

Attention with masks and places written in many ways, shifts, scans, pools, windows, segments and padding, in blocks of
a residual stream under a drawn loss, on meshes that cut positions, samples, widths and stages. Output and options are
those of `benchmarks.in_place`.
"""

from __future__ import annotations

import copy
import linecache
import random
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import verify
from autopar.errors import AutoparError, first_sentence
from benchmarks.in_place import search

# A mesh and the options of a step.
PLACES = (
    ("cp=2", {}), ("tp=2", {}), ("dp=2", {}), ("cp=2,tp=2", {}), ("dp=2,cp=2", {}), ("dp=3", {}), ("ulysses=2", {}),
    ("pp=2", {"microbatches": 2}), ("dp=1", {"microbatches": 3}), ("cp=2", {"attention": "ring"}),
    ("dp=2", {"zero": 3}), ("pp=2", {"microbatches": 2, "slices": 2, "schedule": "seq1f1b"}),
    ("cp=2,pp=2", {"microbatches": 2}), ("cp=2", {"recompute": "full"}), ("cp=4", {}), ("fsdp=2,cp=2", {}),
    ("cp=2", {"microbatches": 2}),
)  # fmt: skip
# Tensors of [b, s, d] are {s} and {o}; of [b, s] {n}; masks of [s, s] or what broadcasts with [b, 1, s, s] {m}.
NUMBERS = (
    "{s}.mean(-1)", "{s}[..., 0]", "self.score({s}).squeeze(-1)", "pad.to({s}.dtype)",
    "(torch.arange(S) / S + 0 * {s}[..., 0])", "({s} * {o}).sum(-1)", "{s}.amax(-1)",
    "(lengths[:, None] - torch.arange(S) + 0.0 * {s}[..., 1])", "(ids.to({s}.dtype) / 7)", "{s}.norm(dim=-1)",
    "self.score({s})[..., 0].softmax(1)", "self.score({s})[..., 0].sigmoid()", "(pad.cumsum(1).to({s}.dtype) / S)",
    "segments.to({s}.dtype)",
)  # fmt: skip
MASKS = (
    "torch.ones(S, S, dtype=torch.bool).tril()", "torch.arange(S)[:, None] >= torch.arange(S)",
    "(torch.arange(S)[:, None] - torch.arange(S)).abs() <= 2", "pad[:, None, None, :] | torch.eye(S, dtype=torch.bool)",
    "torch.ones(S, S, dtype=torch.bool).tril() & pad[:, None, None, :] | torch.eye(S, dtype=torch.bool)",
    "(segments[:, None, :, None] == segments[:, None, None, :])",
    "(segments[:, None, :, None] == segments[:, None, None, :]) & torch.ones(S, S).tril().bool()",
    "torch.full((S, S), float('-inf')).triu(1).exp().bool()", "~torch.ones(S, S, dtype=torch.bool).triu(1)",
    "self.causal[:S, :S]", "self.causal[None, None, :S, :S] & pad[:, None, None] | torch.eye(S, dtype=torch.bool)",
    "(torch.arange(S)[None, :] < lengths[:, None])[:, None, None, :]",
    "(torch.arange(S) <= torch.arange(S)[:, None]) & (torch.arange(S) > torch.arange(S)[:, None] - 3)",
    "(ids[:, None, :, None] % 2 == ids[:, None, None, :] % 2)", "torch.tril(torch.ones(S, S)) == 1",
    "(torch.arange(S)[:, None] // 4 >= torch.arange(S) // 4)", "(torch.arange(S) < 2) | torch.ones(S, S).tril().bool()",
)  # fmt: skip
BIASES = (
    "torch.zeros(S, S, dtype={q}.dtype).masked_fill(~({m}), -1e9)",
    "-(torch.arange(S)[:, None] - torch.arange(S)).abs() * 0.5",
    "self.table(torch.arange(S)[:, None] - torch.arange(S) + 15).permute(2, 0, 1)[None]",
    "torch.where({m}, 0.0, -1e4).to({q}.dtype)", "(1 - ({m}).to({q}.dtype)) * -1e9",
    "self.table.weight[(torch.arange(S)[:, None] - torch.arange(S)).clamp(-3, 3) + 3].movedim(-1, 0)",
    "torch.tensor([0.5, 0.25]).to({q}.dtype)[:, None, None] * (torch.arange(S) - torch.arange(S)[:, None])",
)  # fmt: skip
PLACED = (  # of q and k, [b, h, s, e]
    "{q}", "{q}", "rotated({q}, self.cos, self.sin)", "rotated({q}, *angles({q}))", "interleaved({q}, *angles({q}))",
    "complexes({q})", "{q} * torch.arange(1, S + 1)[:, None].to({q}.dtype).log1p()", "F.normalize({q}, dim=-1)",
    "rotated({q}, self.cos[torch.arange(S)], self.sin[torch.arange(S)])", "self.small({q})",
)  # fmt: skip
ATTENTION = (
    "sdpa({q}, {k}, {v}, is_causal=True)", "sdpa({q}, {k}, {v})", "sdpa({q}, {k}, {v}, attn_mask={m})",
    "sdpa({q}, {k}, {v}, attn_mask={bias})", "soft({q}, {k}, {m}) @ {v}",
    "(({q} @ {k}.transpose(-1, -2)) * 0.5 + {bias}).softmax(-1) @ {v}",
    "torch.einsum('bhij,bhje->bhie', soft({q}, {k}, {m}), {v})", "F.dropout(soft({q}, {k}, {m}), 0.0) @ {v}",
    "sdpa({q}, {k}[:, :1].expand_as({k}), {v}[:, :1].expand_as({v}), attn_mask={m})",
    "sdpa({q}, {k}[:, :1].repeat_interleave(2, 1), {v}, is_causal=True)",
    "sdpa({q}, {k}[:, :1], {v}[:, :1], is_causal=True, enable_gqa=True)",
    "(({q} @ {k}.mT).sigmoid() * ({m}).to({q}.dtype)) @ {v}", "linear_attention({q}, {k}, {v})",
    "sdpa({q}, {k}, {v}, is_causal=True, scale=0.3)", "sdpa({q}, pooled({k}), pooled({v}))",
    "torch.relu({q} @ {k}.mT).masked_fill(~({m}), 0) @ {v}",
    "((({q} @ {k}.mT).tanh() * 3).masked_fill(~({m}), float('-inf')).softmax(-1).nan_to_num()) @ {v}",
)  # fmt: skip
VALUES = (
    "{att}", "{att}", "{att}", "{att}", "torch.roll({s}, 1, 1)", "F.pad({s}, (0, 0, 1, -1))",
    "F.pad({s}, (0, 0, 1, 0))[:, :-1]", "torch.cat([torch.zeros_like({s}[:, :1]), {s}[:, :-1]], 1)",
    "{s}.cumsum(1) / torch.arange(1, S + 1)[:, None]", "{s}.cummax(1).values",
    "{s}.mean(1, keepdim=True).expand_as({s})", "{s}.flip(1)", "{s} - {s}.mean(1, keepdim=True)",
    "self.conv(F.pad({s}.transpose(1, 2), (2, 0))).transpose(1, 2)", "self.same({s}.mT).mT",
    "{s}.amax(1, keepdim=True) + 0 * {s}", "F.pad({s}, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1)",
    "{s}.unflatten(1, (-1, 2)).sum(2).repeat_interleave(2, 1)", "{s}[:, ::2].repeat_interleave(2, 1)",
    "{s}.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)", "F.avg_pool1d({s}.mT, 3, 1, 1).mT",
    "F.interpolate(F.max_pool1d({s}.mT, 2).mT.mT, scale_factor=2).mT", "{s} * pad[..., None]",
    "({s} * pad[..., None]).sum(1, keepdim=True) / pad.sum(1)[:, None, None] + 0 * {s}", "{s}[:, :1] + {s}",
    "{s}[:, -1:] * {o}", "{s}[torch.arange(B), lengths - 1][:, None] + {s}",
    "{s}.gather(1, (lengths - 1)[:, None, None].expand(-1, -1, D)) + {s}",
    "{s}.gather(1, ids[..., None].expand(-1, -1, D) % S)",
    "torch.zeros_like({s}).scatter_add(1, (ids % S)[..., None].expand(-1, -1, D), {s})", "{s}.sort(1).values",
    "{s}.take_along_dim({n}.argsort(1)[..., None], 1)", "torch.where(pad[..., None], {s}, self.absent)",
    "{s}.masked_fill(~pad[..., None], 0.5)", "self.norm({s})", "self.l({s}).relu()", "self.k({s}) * {n}[..., None]",
    "F.layer_norm({s}.mT, (S,)).mT", "self.batch({s}.mT).mT", "{s}.softmax(1)", "self.rnn({s})[0]",
    "self.gru({s}.flip(1))[0].flip(1)", "self.place(torch.arange(S)) + {s}", "self.place.weight[:S] + {s}",
    "{s} + self.place((pad.cumsum(1) - 1).clamp(min=0))", "loop({s}, {n})",
    "torch.stack([{s}[:, max(t - 1, 0)] for t in range(S)], 1)",
    "torch.fft.rfft({s}, dim=1).abs().sum(1, keepdim=True) / S + {s}",
    "torch.fft.irfft(torch.fft.rfft({s}, dim=1) * 0.5, n=S, dim=1)", "{s}.diff(dim=1, prepend={s}[:, :1])",
    "summed({s}, segments)", "picked({s}, {n})", "routed({s}, {n}, self.k)", "F.embedding(ids, self.words)",
    "self.mha({s}, {s}, {s}, need_weights=False, attn_mask=~self.causal[:S, :S])[0]",
    "self.mha({s}, {o}, {s}, key_padding_mask=~pad)[0]", "torch.tril(torch.ones(S, S, dtype={s}.dtype)) @ {s} / S",
    "torch.einsum('st,btd->bsd', self.mix, {s})", "self.mixer({s}.mT).mT", "{s}.reshape(B * S, D).view(B, S, D)",
    "self.l({s}.flatten(0, 1)).unflatten(0, (B, S))", "{s}.mT.reshape(B, S, D)",
    "torch.cat([{s}[:, :S // 2], {o}[:, S // 2:]], 1)", "torch.cat([{s}, {o}], 1)[:, 1::2]", "{s}.logcumsumexp(1)",
    "{s}.tanh().cumprod(1)", "torch.cat([{o}[:, -2:], {s}], 1)[:, :S]",
    "{s}.index_select(1, torch.arange(S - 1, -1, -1))", "{s}[:, torch.arange(S) % 3]",
    "torch.cdist({s}, {o}) @ {s} / S", "F.cosine_similarity({s}, {s}[:, :1], dim=-1)[..., None] * {o}",
    "{s} * (torch.arange(S) % 2 == 0)[:, None]", "vq({s}, self.words)",
    "{s}.index_put((torch.arange(B), lengths - 1), self.absent.expand(B, D))",
    "{s}.lerp({o}, {n}[..., None].sigmoid())", "written({s}, {o})",
    "torch.nn.utils.rnn.pad_sequence([{s}[i] for i in range(B)], batch_first=True)",
)  # fmt: skip
LOSSES = (
    "F.cross_entropy(z[:, :-1].flatten(0, 1), labels[:, 1:].flatten())",
    "F.cross_entropy(z.transpose(1, 2), labels, ignore_index=3)",
    "F.cross_entropy(z.flatten(0, 1), labels.masked_fill(~pad, -100).flatten())",
    "(F.cross_entropy(z.mT, labels, reduction='none') * pad).sum() / pad.sum()",
    "F.cross_entropy(z[:, :-1].reshape(-1, C), labels[:, 1:].masked_fill(~pad[:, 1:], -100).reshape(-1))",
    "F.cross_entropy((z * pad[..., None]).sum(1) / pad.sum(1, keepdim=True), labels[:, 0])",
    "F.cross_entropy(z[torch.arange(B), lengths - 1], labels[:, 0])", "F.cross_entropy(z[:, 0], labels[:, 0])",
    "F.cross_entropy(z.mean(1), labels[:, 1])", "(z[:, 1:] - z[:, :-1]).square().mean()",
    "-(z.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1) * pad).sum(1).div(lengths).mean()",
    "F.cross_entropy(z[pad], labels[pad])",
    "F.cross_entropy(z.flatten(0, 1), F.pad(labels, (0, 1), value=-100)[:, 1:].flatten(), ignore_index=-100)",
    "F.binary_cross_entropy_with_logits(z[..., 0], pad.to(z.dtype), reduction='sum') / B",
    "F.cross_entropy(z.mT, labels, label_smoothing=0.1)",
    "sum(F.cross_entropy(z[:, t], labels[:, t]) for t in range(S)) / S",
    "(z.logsumexp(-1).square() * pad).sum() / pad.sum() + z[..., 0].mean()",
    "F.kl_div(z.log_softmax(-1), z.detach().flip(1).softmax(-1), reduction='batchmean')",
    "F.cross_entropy(z.mT, labels, reduction='sum') / (labels != 3).sum()",
)  # fmt: skip
HEAD = """
sdpa = F.scaled_dot_product_attention
C = 5

def angles(q):
    t = torch.arange(q.shape[-2], dtype=q.dtype)
    a = torch.outer(t, 10.0 ** -torch.arange(0, q.shape[-1] // 2, dtype=q.dtype))
    a = torch.cat([a, a], -1)
    return a.cos(), a.sin()

def rotated(q, cos, sin):
    n = q.shape[-2]
    a, b = q.chunk(2, -1)
    return q * cos[:n].to(q.dtype) + torch.cat([-b, a], -1) * sin[:n].to(q.dtype)

def interleaved(q, cos, sin):
    a, b = q[..., ::2], q[..., 1::2]
    h = q.shape[-1] // 2
    c, s = cos[..., :h], sin[..., :h]
    return torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)

def complexes(q):
    t = torch.arange(q.shape[-2], dtype=torch.float64)
    angle = torch.outer(t, torch.tensor([1.0, 0.1], dtype=torch.float64))
    z = torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(torch.view_as_complex(q.unflatten(-1, (-1, 2)).contiguous()) * z).flatten(-2).to(q.dtype)

def soft(q, k, mask):
    return (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf")).softmax(-1)

def linear_attention(q, k, v):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    kv = torch.einsum("bhse,bhsf->bhsef", k, v).cumsum(2)
    return torch.einsum("bhse,bhsef->bhsf", q, kv) / (q * k.cumsum(2)).sum(-1, keepdim=True)

def pooled(k):
    return k.unflatten(2, (-1, 2)).mean(3)

def loop(t, n):
    state, found = torch.zeros_like(t[:, 0]), []
    for i in range(t.shape[1]):
        gate = n[:, i].sigmoid()[:, None]
        state = gate * state + (1 - gate) * t[:, i]
        found.append(state)
    return torch.stack(found, 1)

def summed(t, segments):
    flat = (segments + torch.arange(t.shape[0])[:, None] * 4).flatten()
    whole = torch.zeros(t.shape[0] * 4, t.shape[2], dtype=t.dtype).index_add(0, flat, t.flatten(0, 1))
    return whole[flat].view_as(t)

def picked(t, n):
    at = n.topk(3, 1).indices
    rows = t.gather(1, at[..., None].expand(-1, -1, t.shape[2]))
    return t.scatter(1, at[..., None].expand(-1, -1, t.shape[2]), rows * 2)

def routed(t, n, layer):
    keep = n > n.mean(1, keepdim=True)
    return torch.where(keep[..., None], layer(t), t)

def vq(t, words):
    code = words[(t[..., None, :] - words).square().sum(-1).argmin(-1)]
    return t + (code - t).detach() + (code - t.detach()) * 0.1

def written(t, o):
    t = t * 1
    t[:, 1:] = o[:, :-1] * 0.5
    t[:, 0] += 1
    return t

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        D = 8
        self.q, self.l, self.k, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.norm, self.batch, self.small = nn.LayerNorm(D), nn.BatchNorm1d(D), nn.RMSNorm(4)
        self.score = nn.Linear(D, 1)
        self.conv, self.same = nn.Conv1d(D, D, 3), nn.Conv1d(D, D, 3, padding=1, groups=2)
        self.rnn, self.gru = nn.LSTM(D, D, batch_first=True), nn.GRU(D, D, batch_first=True)
        self.place, self.table, self.mixer = nn.Embedding(16, D), nn.Embedding(31, 2), nn.Linear(8, 8)
        self.absent, self.words = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(11, D))
        self.mix = nn.Parameter(torch.randn(8, 8) / 8)
        self.mha = nn.MultiheadAttention(D, 2, batch_first=True)
        self.register_buffer("causal", torch.ones(16, 16, dtype=torch.bool).tril())
        cos, sin = angles(torch.zeros(16, 4))
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin, persistent=False)

    def heads(self, t):
        return [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.q(t).chunk(3, -1)]

    def joined(self, t):
        return self.out(t.transpose(1, 2).flatten(2))
"""
FORWARD = """
class Block{i}(Block):
    def forward(self, h, ids, pad, lengths, segments):
        B, S, D = h.shape
        a = self.norm(h)
"""
MODEL = """
class Drawn(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([{blocks}])
        self.head = nn.Linear(8, C)

    def forward(self, ids, labels, lengths):
        (B, S), D = ids.shape, 8
        pad = torch.arange(S) < lengths[:, None]
        segments = (ids == 0).cumsum(1).clamp(max=3)
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h, ids, pad, lengths, segments)
        z = self.head(h)
        return {loss}
"""


def lines(dice: random.Random) -> Iterator[str]:
    """Draw the body of a block; every tensor of it has a share in the result."""
    known = ["a", "h"]

    def filled(text: str) -> str:
        for name, ways in (("{att}", ATTENTION), ("{bias}", BIASES), ("{n}", NUMBERS), ("{m}", MASKS)):
            while name in text:
                text = text.replace(name, dice.choice(ways), 1)
        if "{q}" in text or "{v}" in text:
            place = dice.choice(PLACED)
            text = text.replace("{q}", place.replace("{q}", "q")).replace("{k}", place.replace("{q}", "k"))
            text = f"q, k, v = self.heads({dice.choice(known)}); {{t}} = self.joined({text.replace('{v}', 'v')})"
        else:
            text = f"{{t}} = {text}"
        return text.replace("{s}", dice.choice(known)).replace("{o}", dice.choice(known))

    for number in range(dice.randint(1, 4)):
        yield filled(dice.choice(VALUES)).replace("{t}", f"v{number}")
        known.append(f"v{number}")
    yield f"return h + ({' + '.join(known)}).tanh()"


def made(number: int) -> tuple[nn.Module, str]:
    """The module of a number, and its source."""
    dice = random.Random(number)
    count = 2 if dice.random() < 0.7 else 4
    source = HEAD
    for i in range(2):
        source += FORWARD.format(i=i) + "".join(f"        {line}\n" for line in lines(dice))
    blocks = ", ".join(f"Block{i % 2}()" for i in range(count))
    source += MODEL.replace("{blocks}", blocks).replace("{loss}", dice.choice(LOSSES))
    name = f"<drawn {number}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # where errors look for lines
    found = {"torch": torch, "nn": nn, "F": F}
    exec(compile(source, name, "exec"), found)
    torch.manual_seed(0)
    return found["Drawn"]().double(), source[len(HEAD) :]  # type: ignore[operator]


def drawn_batch(number: int) -> dict[str, Tensor]:
    """Draw twelve sequences of eight, of unequal lengths."""
    dice = torch.Generator().manual_seed(number)
    ids, labels = torch.randint(0, 11, (12, 8), generator=dice), torch.randint(0, 5, (12, 8), generator=dice)
    return {"ids": ids, "labels": labels, "lengths": torch.randint(2, 9, (12,), generator=dice)}


def runs(model: nn.Module, batch: dict[str, Tensor]) -> bool:
    """Whether plain PyTorch takes two steps, with gradients that are finite."""
    try:
        for _ in range(2):
            model(**batch).backward()
    except Exception:
        return False
    return all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def verdict(number: int) -> tuple[str, str]:
    """What became of a program: "plain" (PyTorch does not run it), ok, refused, WRONG or BROKEN; and what was said."""
    model, source = made(number)
    batch = drawn_batch(number)
    if not runs(copy.deepcopy(model), batch):
        return "plain", ""
    mesh, options = PLACES[number % len(PLACES)]
    try:
        report = verify(model, mesh, batch=batch, steps=2, **options)  # type: ignore[arg-type]
    except AutoparError as refusal:
        return "refused", first_sentence(str(refusal).rpartition("This line has ")[2]).split("\n")[0]
    except Exception as broken:
        return "BROKEN", f"{mesh} {options} {type(broken).__name__}: {broken}\n{source}"
    return ("ok", "") if report.ok else ("WRONG", f"{mesh} {options}\n{report}\n{source}")


if __name__ == "__main__":
    search(verdict, __doc__)
