"""Small models of a few blocks, drawn, under a loss, drawn: what a block computes beside its samples (of parameters or
of positions alone) meets losses that take samples together."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.coverage.plain import Case, ids

POSITIONS, WIDTH, HEADS, TOKENS, CLASSES, SAMPLES = 8, 8, 2, 32, 3, 12


class Block(nn.Module):
    """What a residual stream [samples, positions, WIDTH] has added."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class Mlp(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(h))))


class Places(Block):
    """A network of the positions alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        place = torch.arange(POSITIONS, dtype=h.dtype) / POSITIONS
        return self.net(torch.stack([place, place.square()], -1)).expand_as(h)


class Attention(Block):
    """Causal."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in self.project(h).chunk(3, -1))
        return self.linear(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Biased(Attention):
    """With a bias by a network of distances, as in Swin v2 (arXiv 2111.09883)."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, HEADS))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(POSITIONS, dtype=q.dtype)
        bias = self.bias((place[:, None] - place)[..., None]).permute(2, 0, 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(len(q), -1, -1, -1))


class Relative(Attention):
    """With a bias that is looked up by distance, and spelled, as in T5 (arXiv 1910.10683)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * POSITIONS, HEADS)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(POSITIONS)
        bias = self.table(place[:, None] - place + POSITIONS).permute(2, 0, 1)
        return (q @ k.transpose(-1, -2) + bias).softmax(-1) @ v


class Queries(Attention):
    """By learned queries."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(HEADS, POSITIONS, WIDTH // HEADS))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.queries.expand_as(q), k, v)


class Weights(Block):
    """A matrix by a network of a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.net = nn.Parameter(torch.randn(4)), nn.Linear(4, WIDTH * WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.linear(h) @ (self.net(self.code).view(WIDTH, WIDTH) / WIDTH))


class Normed(Block):
    """A matrix that is divided by its norm."""

    def forward(self, h: Tensor) -> Tensor:
        return F.linear(h, self.linear.weight / self.linear.weight.norm(), self.linear.bias).tanh()


class Twice(Block):
    def forward(self, h: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.linear(h)))


class Recurrence(Block):
    def __init__(self) -> None:
        super().__init__()
        self.core = nn.GRU(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return self.core(h.transpose(0, 1))[0].transpose(0, 1)


class Convolution(Block):
    def __init__(self) -> None:
        super().__init__()
        self.core, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.GroupNorm(2, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return self.norm(self.core(h.transpose(1, 2))).relu().transpose(1, 2)


class Experts(Block):
    """Two of four for each position, by zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.Parameter(torch.randn(4, WIDTH, WIDTH) / WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        shares, chosen = self.gate(h).softmax(-1).topk(2, -1)
        shares = h.new_zeros(*h.shape[:-1], 4).scatter(-1, chosen, shares)
        return torch.einsum("bte,btd,edf->btf", shares, h, self.experts)


class Adapted(Block):
    """A frozen matrix, and two small ones beside it (LoRA, arXiv 2106.09685)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return self.linear(h) + self.b(self.a(h))


class Codebook(Block):
    """The nearest of seven vectors, and what it is by way of the stream (arXiv 1711.00937)."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(7, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        found = self.codes[(h.unsqueeze(-2) - self.codes).square().sum(-1).argmin(-1)]
        return self.linear(h + (found - h).detach()) + 0.1 * found


class Dropped(Block):
    def forward(self, h: Tensor) -> Tensor:
        return F.dropout(self.linear(h).relu(), 0.2, self.training)


class Sums(Block):
    def forward(self, h: Tensor) -> Tensor:
        return self.linear(h.cumsum(1) / POSITIONS)


class Sorted(Block):
    """Positions in the order of a score."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, h: Tensor) -> Tensor:
        order = self.score(h).squeeze(-1).argsort(1)
        return self.linear(h.gather(1, order[..., None].expand_as(h)))


BLOCKS: Mapping[str, type[Block]] = {
    block.__name__.lower(): block
    for block in (
        Mlp, Places, Attention, Biased, Relative, Queries, Weights, Normed, Twice, Recurrence, Convolution, Experts,
        Adapted, Codebook, Dropped, Sums, Sorted,
    )
}  # fmt: skip


class Composed(nn.Module):
    """Tokens, blocks, a norm and a head: what samples are, and the logits of their positions."""

    def __init__(self, blocks: list[str], is_tied: bool) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(TOKENS, WIDTH), nn.ModuleList(BLOCKS[name]() for name in blocks)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.3))
        if is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.tokens(x)
        for block in self.blocks:
            h = h + block(h)
        h = self.norm(h)
        return h.mean(1), self.head(h)


Loss = Callable[[Composed, Tensor, Tensor], Tensor]


def _each(model: Composed, x: Tensor, y: Tensor) -> Tensor:
    """The loss of each sample."""
    return F.cross_entropy(model(x)[1].transpose(1, 2), y, reduction="none").mean(1)


def _mean(model: Composed, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x)[1].flatten(0, 1), y.flatten())


def _counted(model: Composed, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x)[1].flatten(0, 1), y.where(y > 4, -100).flatten())


def _penalty(model: Composed, x: Tensor, y: Tensor) -> Tensor:
    """The likeness of two views (CLIP, arXiv 2103.00020), and a penalty on all weights."""
    weights = [weight.square().sum() for weight in model.parameters() if weight.requires_grad]
    return _views(model, x, y) + 0.01 * torch.stack(weights).sum()


def _views(model: Composed, x: Tensor, y: Tensor) -> Tensor:
    p, q = (F.normalize(model(each)[0], dim=-1) for each in (x, y))
    alike, labels = p @ q.T * model.scale.exp(), torch.arange(len(x))
    return (F.cross_entropy(alike, labels) + F.cross_entropy(alike.T, labels)) / 2


def _classes(model: Composed, x: Tensor, y: Tensor) -> Tensor:
    """Samples of a class beside one another (SupCon, arXiv 2004.11362)."""
    z, own = F.normalize(model(x)[0], dim=-1), torch.eye(len(x), dtype=torch.bool)
    alike, labels = (z @ z.T / 0.5).masked_fill(own, -1e4), y[:, 0] % CLASSES
    same = ((labels[:, None] == labels) & ~own).to(z.dtype)
    return -((alike.log_softmax(-1) * same).sum(-1) / same.sum(-1).clamp(min=1)).mean()


def _covariance(model: Composed, x: Tensor, y: Tensor) -> Tensor:
    """Barlow twins (arXiv 2103.03230)."""
    p, q = ((z - z.mean(0)) / (z.std(0) + 1e-3) for z in (model(x)[0], model(y)[0]))
    return (p.T @ q / len(x) - torch.eye(WIDTH, dtype=p.dtype)).square().sum()


def _centres(model: Composed, x: Tensor, y: Tensor) -> Tensor:
    """Distances from the mean of the class."""
    z, labels = model(x)[0], y[:, 0] % CLASSES
    sums = z.new_zeros(CLASSES, WIDTH).index_add(0, labels, z)
    counts = z.new_zeros(CLASSES).index_add(0, labels, torch.ones_like(z[:, 0]))
    return (z - (sums / counts.clamp(min=1)[:, None])[labels]).square().mean()


def _rolled(model: Composed, x: Tensor, y: Tensor) -> Tensor:
    z = model(x)[0]
    return F.triplet_margin_loss(z, z.roll(1, 0), z.roll(2, 0))


def _balance(model: Composed, x: Tensor, y: Tensor) -> Tensor:
    p = model(x)[1].softmax(-1)
    return p.square().mean() + (p.mean((0, 1)) * F.one_hot(p.argmax(-1), TOKENS).to(p.dtype).mean((0, 1))).sum()


def _ranks(model: Composed, x: Tensor, y: Tensor) -> Tensor:
    """Of all pairs of samples the order of their scores."""
    z = model(x)[1].mean((1, 2))
    wanted = y.to(z.dtype).mean(1)
    return F.softplus(-(z[:, None] - z) * (wanted[:, None] - wanted).sign()).mean()


def _worst(model: Composed, x: Tensor, y: Tensor) -> Tensor:
    losses = _each(model, x, y)
    return losses.topk(len(x) // 2).values.mean() + losses.max()


def _kernel(model: Composed, x: Tensor, y: Tensor) -> Tensor:
    """Maximum mean discrepancy (Gretton et al. 2012)."""
    p, q = model(x)[0], model(y)[0]
    near = [torch.exp(-(a[:, None] - b).square().sum(-1)).mean() for a, b in ((p, p), (q, q), (p, q))]
    return near[0] + near[1] - 2 * near[2]


def _assigned(model: Composed, x: Tensor, y: Tensor) -> Tensor:
    """To prototypes, each with as many samples (SwAV's Sinkhorn steps, arXiv 2006.09882)."""
    scores = model(x)[1].mean(1)[:, :6]
    shares = scores.detach().exp()
    for _ in range(3):
        shares = shares / shares.sum(0)
        shares = shares / shares.sum(1, keepdim=True)
    return -(shares * scores.log_softmax(-1)).sum(-1).mean()


def _halves(model: Composed, x: Tensor, y: Tensor) -> Tensor:
    """Two views of each sample, one behind the other in the batch (SimSiam, arXiv 2011.10566)."""
    p, q = (model(half)[0] for half in x.chunk(2))
    return -F.cosine_similarity(p, q.detach(), dim=-1).mean() + F.mse_loss(p, q)


def _support(model: Composed, x: Tensor, y: Tensor) -> Tensor:
    """Nearest means of classes that other samples give (prototypical networks, arXiv 1703.05175)."""
    count = len(x) // 3
    known, asked = model(x[:count])[0], model(x[count:])[0]
    means = torch.stack([rows.mean(0) for rows in known.split(count // 2)])
    far = (asked[:, None] - means).square().sum(-1)
    return F.cross_entropy(-far, y[count:, 0] % len(means))


def _groups(model: Composed, x: Tensor, y: Tensor) -> Tensor:
    """Pieces of the batch, each with its own loss."""
    pieces = zip(x.view(3, -1, x.shape[1]), y.split(len(y) // 3), strict=True)
    return torch.stack([_mean(model, *piece).sqrt() for piece in pieces]).sum()


LOSSES: Mapping[str, Loss] = {
    loss.__name__[1:]: loss
    for loss in (
        _mean, _counted, _penalty, _views, _classes, _covariance, _centres, _rolled, _balance, _ranks, _worst, _kernel,
        _assigned, _halves, _support, _groups,
    )
}  # fmt: skip


def drawn(dice: random.Random) -> str:
    """The name of a model, e.g. "mlp+places tied views"."""
    blocks = "+".join(dice.choice([*BLOCKS]) for _ in range(dice.choice((2, 3, 4))))
    return f"{blocks}{' tied' if dice.random() < 0.4 else ''} {dice.choice([*LOSSES])}"


def is_composed(name: str) -> bool:
    """True for a name that `drawn` gives."""
    return name.split()[-1] in LOSSES and {*name.split()[0].split("+")} <= BLOCKS.keys()


def made(name: str) -> Case:
    """The model, the loss and the batch of a name."""
    blocks, *_, loss = name.split()
    model = Composed(blocks.split("+"), "tied" in name.split()[1:])
    return model, LOSSES[loss], (ids(SAMPLES, POSITIONS, high=TOKENS), ids(SAMPLES, POSITIONS, high=TOKENS))
