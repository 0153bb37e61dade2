"""Random ops draw the same on every mesh: each function against the plain module, which draws by the same counters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import square_loss
from torch import Tensor, nn
from torch.distributions import Beta
from torch.utils.checkpoint import checkpoint
from verified import verified

from autopar.api import compile
from autopar.capture import capture
from autopar.capture.raising import Raise
from autopar.errors import CaptureError
from autopar.passes.rules import TABLE
from autopar.passes.search.items import build_classes
from autopar.verification.verify import Report, verify

MESHES = ["dp=2", "dp=3,tp=2", "tp=4"]


def drop_path(x: Tensor, p: float) -> Tensor:
    """As transformers writes it."""
    noise = (1 - p) + torch.rand((x.shape[0],) + (1,) * (x.ndim - 1), dtype=x.dtype, device=x.device)
    noise.floor_()
    return x.div(1 - p) * noise


def stochastic_depth(x: Tensor, p: float) -> Tensor:
    """As timm and torchvision write it."""
    noise = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - p)
    noise.div_(1 - p)
    return x * noise


def hard_gumbel(x: Tensor) -> Tensor:
    return x + F.gumbel_softmax(x, tau=0.7, hard=True)


def into_a_view(x: Tensor) -> Tensor:
    noise = torch.zeros_like(x)
    noise[:, ::2].normal_(0.5, 2.0)
    noise[0].uniform_(-1, 1)
    return x + noise


def shuffled(x: Tensor) -> Tensor:
    return x[torch.randperm(x.shape[0])] + x[:, torch.randperm(x.shape[1], device=x.device)]


def initialised(x: Tensor) -> Tensor:
    init = nn.init
    noise = init.uniform_(torch.empty_like(x)) + init.normal_(torch.empty_like(x), std=0.1)
    matrix = torch.empty(32, 32, dtype=x.dtype)
    return x + noise + x @ init.kaiming_uniform_(matrix, mode="fan_out", nonlinearity="relu") + x @ matrix


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: x * torch.rand(12, 32),
    "rand of a tuple": lambda x: x * torch.rand((32,), dtype=x.dtype),
    "rand size=": lambda x: x * torch.rand(size=(12, 1), dtype=x.dtype),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x + torch.randn(x.shape, dtype=x.dtype),
    "randn_like": lambda x: x + 0.3 * torch.randn_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(torch.sigmoid(x)),
    "bernoulli p": lambda x: x * torch.bernoulli(x, 0.3) + x * x.bernoulli(0.7),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.4),
    "bernoulli_ of a tensor": lambda x: x * torch.empty_like(x).bernoulli_(torch.sigmoid(x.detach())),
    "bernoulli_ of bools": lambda x: x.masked_fill(torch.empty(x.shape, dtype=torch.bool).bernoulli_(0.4), 0.0),
    "uniform_": lambda x: x * x.new_empty(x.shape).uniform_(-1.0, to=2.0),
    "normal_": lambda x: x + x.new_empty(x.shape).normal_(std=0.1),
    "uniform_ between tensors": lambda x: x * torch.empty_like(x).uniform_(*torch.tensor([0.5, 2.0])),
    "uniform_ up to the largest": lambda x: x * torch.empty_like(x).uniform_(0.0, x.detach().max()),
    "initialised": initialised,
    "exponential_": lambda x: x * x.new_empty(x.shape).exponential_(2.0),
    "normal of tensors": lambda x: x + torch.normal(x, x.abs()),
    "normal of a mean": lambda x: x + torch.normal(x.mean(0), 0.5),
    "normal of a deviation": lambda x: x + torch.normal(1.0, x.abs()),
    "normal of numbers": lambda x: x + torch.normal(0.0, 1.0, (12, 32)),
    "randint": lambda x: x * torch.randint(5, (32,)) + torch.randint(-3, high=4, size=(12, 1)),
    "randint_like": lambda x: x * torch.randint_like(x, 5) + torch.randint_like(x, -2, 2),
    "randperm": shuffled,
    "multinomial": lambda x: x * torch.multinomial(x.detach().exp(), 1),
    "multinomial of some": lambda x: x + x.gather(1, x.detach().exp().multinomial(3)).sum(1, keepdim=True),
    "multinomial with replacement": lambda x: x.gather(1, x.detach().exp().multinomial(32, replacement=True)),
    "gumbel_softmax": lambda x: x + F.gumbel_softmax(x, tau=0.5),
    "hard gumbel_softmax": hard_gumbel,
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.4, training=True) + F.rrelu(x, 0.1, 0.4),
    "rrelu module": nn.RReLU(),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.2, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x.view(12, 8, 4), 0.2, training=True).flatten(1),
    "alpha dropout of all": lambda x: x + F.alpha_dropout(x, 1.0, training=True),
    "drop path": lambda x: drop_path(x, 0.4),
    "stochastic depth": lambda x: stochastic_depth(x, 0.4),
    "dropout in place": lambda x: F.dropout(x * 1, 0.3, inplace=True),
    "into a view": into_a_view,
}


class Drawing(nn.Module):
    """The function stands where dp splits rows and tp splits columns, and where both are whole."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.draw(self.down(torch.tanh(self.draw(self.up(x))))))


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    return torch.randn(12, 16), torch.randn(12, 8)


def check(model: nn.Module, mesh: str, **options: Any) -> Report:
    options = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1), **options}
    report = verify(model, mesh, loss_fn=square_loss, batch=batch(), **options)
    assert report.ok and report.max_error < 1e-10, f"\n{report}"
    return report


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_the_same_on_every_mesh(name: str) -> None:
    torch.manual_seed(1)
    verified(Drawing(DRAWS[name]), MESHES, square_loss, batch(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))


@pytest.mark.parametrize(
    ("name", "plain"),
    [("rand_like", torch.sigmoid), ("bernoulli_", torch.sigmoid), ("drop path", torch.sigmoid),
     ("rrelu", F.leaky_relu)],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_draws_take_no_collective(name: str, plain: Callable[[Tensor], Tensor]) -> None:
    """A draw is made in pieces, wherever its user wants them: the program moves what it moves without it."""
    torch.manual_seed(1)
    moved = [
        sorted((c.op, c.axis, c.bytes) for c in compiled.collectives)
        for compiled in (
            compile(Drawing(draw), "dp=3,tp=2", loss_fn=square_loss, batch=batch()) for draw in (DRAWS[name], plain)
        )
    ]
    assert moved[0] == moved[1]


def test_multinomial_draws_by_its_weights() -> None:
    """10,000 rows of three weights, one of them zero: frequencies within four deviations, never twice the same."""
    p = torch.tensor([0.1, 0.0, 0.6, 0.3]).expand(10_000, 4)
    with Raise(None, torch.tensor([3, 0])):
        one, two, many = p.multinomial(1), p.multinomial(2), p.multinomial(3, replacement=True)
    for drawn in (one[:, 0], two[:, 0], many[:, 1]):
        share = torch.bincount(drawn, minlength=4) / len(drawn)
        assert (share - p[0]).abs().max() < 4 * 0.5 / 100 and share[1] == 0
    assert (two[:, 0] != two[:, 1]).all() and (many[:, 0] == many[:, 1]).any() and many.shape == (10_000, 3)


def test_draws_differ_between_ops_steps_and_seeds() -> None:
    seen: list[Tensor] = []

    def draw(x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        if not hasattr(noise, "fake_mode"):
            seen.append(noise)
        return x * noise

    for seed in (1, 1, 2):
        check(Drawing(draw), "dp=2", seed=seed)
    first, again, other = (seen[i : i + 4] for i in (0, 4, 8))  # two ops in two steps each
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    values = torch.stack(first + other).flatten(1)
    assert values.corrcoef().fill_diagonal_(0).abs().max() < 5 / values.shape[1] ** 0.5


def test_layers_that_draw_share_their_decisions() -> None:
    """The key of a draw tells layers apart, but not how they are split: the search does not grow with depth."""
    counts = []
    for layers in (8, 16):
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.RReLU(), nn.Dropout(0.1)) for _ in range(layers)]
        program = capture(nn.Sequential(*blocks), lambda m, x: m(x).sum(), (torch.randn(4, 16),), {}).program
        counts.append(len(build_classes(program, TABLE, {}).items))
    assert counts[0] == counts[1]


class Recomputed(Drawing):
    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(lambda x: self.draw(self.up(x)), x, use_reentrant=False, preserve_rng_state=self.preserve)
        return self.last(self.draw(self.down(torch.tanh(h))))

    preserve = True


def test_recomputed_draws_are_the_same() -> None:
    torch.manual_seed(1)
    check(Recomputed(DRAWS["rand_like"]), "dp=3,tp=2")
    check(Recomputed(DRAWS["uniform_"]), "dp=3,tp=2")
    model = Recomputed(DRAWS["rand_like"])
    model.preserve = False
    with pytest.raises(CaptureError, match=r"a random op inside .*preserve_rng_state"):
        check(model, "dp=2")


class LayerDrop(nn.Module):
    """As transformers writes it: the coin is thrown even where no layer is ever dropped."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)]), nn.Linear(16, 8)
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training:
                coin = torch.rand([])
                if coin < self.probability:
                    continue
            x = torch.tanh(layer(x))
        return self.head(x)


def test_layerdrop() -> None:
    torch.manual_seed(1)
    check(LayerDrop(0.0).train(), "dp=2")
    check(LayerDrop(0.4).train(), "dp=2")


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "multinomial of a generator": (
        lambda x: x * torch.multinomial(x.abs(), 1, generator=torch.Generator()), "multinomial at test_random.py"
    ),
    "poisson": (lambda x: x * torch.poisson(x.detach().abs()), "random op 'aten.poisson"),
    "float of cauchy": (lambda x: x * float(torch.empty(1).cauchy_()), "random op 'aten.cauchy_"),
    "truth of beta": (lambda x: x * (2 if Beta(0.5, 0.5).sample() > 0.5 else 1), "random op 'aten._sample_dirichlet"),
    "integer of random_": (lambda x: x * int(torch.empty(1).random_(5)), "random op 'aten.random_"),
    "generator": (lambda x: x * torch.rand(32, generator=torch.Generator()), "rand at test_random.py:.*of its own"),
    "filled by a generator": (
        lambda x: x * torch.empty(32).normal_(generator=torch.Generator()), "normal_ at test_random.py:.*of its own"
    ),
    "too many integers": (lambda x: x * torch.randint(2**40, (32,)), r"randint at test_random.py:.*2\^32 numbers"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_with_its_line(name: str) -> None:
    draw, message = REFUSED[name]
    with pytest.raises(CaptureError, match=message) as caught:
        check(Drawing(draw), "dp=2")
    assert "test_random.py:" in str(caught.value)
