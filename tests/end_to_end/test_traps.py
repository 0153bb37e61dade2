"""The silent-maths traps of data and tensor parallelism, each by its name: no error, no crash, only wrong numbers.

Every case runs against one device in float64, with plain descent: AdamW would forgive a gradient that is wrong by a
factor. Data are asymmetric, axes have unequal sizes, and where a trap has a tell-tale in the program it is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig
from models import Llama, labels, square_loss, token_loss, tokens, uneven
from models_special import ZOO
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from verified import verified

from autopar.api import parallelize
from autopar.compiled import Compiled
from autopar.errors import CaptureError
from autopar.verification.verify import Report, verify

MESHES = ["dp=2", "tp=2", "dp=3,tp=2", "dp=2,tp=4"]
WITH_DP = ["dp=2", "dp=4", "dp=3,tp=2"]
WITH_TP = ["tp=2", "tp=4", "dp=3,tp=2"]


def descent(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def check(
    model: nn.Module, meshes: list[str], loss_fn: Callable[..., Tensor] | None, batch: Any, **options: Any
) -> list[tuple[Report, Compiled]]:
    return verified(model, meshes, loss_fn, batch, **{"optimizer": descent, **options})


def names(report: Report, kind: str) -> set[str]:
    return {row.name for row in report.rows if row.kind == kind}


# Tensor parallelism


def test_row_parallel_bias_added_tp_times() -> None:
    """The bias of a row-parallel layer is added after the sum over tp, not to each part of it."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    with torch.no_grad():
        model[2].bias += 100 * torch.arange(1, 5)
    for _, compiled in check(model, WITH_TP, square_loss, (torch.randn(12, 8), torch.randn(12, 4))):
        assert str(compiled.layouts["2.weight"]) == "[-,tp]"


def test_number_added_to_a_partial_sum() -> None:
    """`Partial(sum) + 10` (wrong in DTensor 2.13), and other maps that are not linear, after a row-parallel layer."""

    class After(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.down(self.up(x)) + 10
            return (2 * y - y**2 / 7).clamp(max=5) + (3 - y).sum(0) + torch.exp(-(y**2))

    check(After(), WITH_TP, square_loss, (torch.randn(12, 8), torch.randn(12, 4)))


@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (6, 3), (12, 4), (8, 8)])
def test_uneven_head_counts(heads: tuple[int, int]) -> None:
    """Fewer key heads than ranks, one, and head counts that tp does not divide."""
    torch.manual_seed(2)
    model = uneven(Llama(1, 8 * heads[0], *heads, 48, 40, 8))
    check(model, WITH_TP, token_loss, (tokens(), labels()), steps=1)


def test_tied_embeddings() -> None:
    """One gradient, the sum of that of the table and that of the head; one updated weight under both names."""
    model, loss_fn, batch = models.short_gpt()
    for report, compiled in check(model, MESHES, loss_fn, batch):
        assert "tokens.weight" in names(report, "gradient") and "head.weight" not in names(report, "gradient")
        assert str(compiled.layouts["tokens.weight"]) == ("[tp,-]" if "tp" in report.mesh else "[-,-]")


def test_gradient_norm_counting_replicated_parameters() -> None:
    """A gradient that is whole on tp is the same on each rank, not a share of it; its norm is taken once."""

    class Clipped(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            parameters = [p for group in self.param_groups for p in group["params"]]
            norm = torch.nn.utils.clip_grad_norm_(parameters, 0.01)
            assert norm > 0.1  # it is clipped
            return super().step(closure)

    model, loss_fn, batch = models.short_gpt()
    for report, compiled in check(model, WITH_TP, loss_fn, batch, optimizer=lambda p: Clipped(p, lr=1.0)):
        replicated = {name for name, layout in compiled.layouts.items() if layout.is_replicated}
        assert {"norm.weight", "blocks.0.mlp.down.bias"} <= replicated
        assert all(row.replicas == 0.0 for row in report.rows if row.name in replicated)


# Data parallelism


def test_mean_over_unequal_shards() -> None:
    """Sums over sums, not the mean of the ranks' means, where shards count other numbers of elements."""

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        error = (model(x) - y).square().mean(-1)
        kept = weight > 0
        return (error * weight).sum() / weight.sum() + (error * kept).sum() / kept.sum() + error.mean()

    weight = torch.tensor([0, 0, 0, 1.0, 0, 0, 2, 0, 3, 4, 5, 0])
    model, _, (x, y) = models.mlp()
    check(model, WITH_DP, loss_fn, (x, y, weight))


@pytest.mark.parametrize(
    "options",
    [{}, {"ignore_index": 5}, {"reduction": "sum"}, {"label_smoothing": 0.2}, {"weight": torch.arange(40) / 20}],
    ids=str,
)
def test_ignored_labels_unevenly_spread(options: dict[str, Any]) -> None:
    """Row i ignores about i of its labels; whole rows, and a whole dp rank, count none."""
    y = labels()
    y[6:9] = -100
    if "ignore_index" in options:
        y = y.masked_fill(y == -100, 5)

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        given = {k: v.to(model.tokens.weight.dtype) if k == "weight" else v for k, v in options.items()}
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), **given)  # type: ignore[arg-type]

    check(models.short_gpt()[0], [*WITH_DP, "tp=2"], loss_fn, (tokens(), y), steps=1)


def test_all_labels_ignored_is_nan_as_on_one_device() -> None:
    y = torch.full((12, 8), -100)
    report = verify(
        models.short_gpt()[0], "dp=2,tp=2", loss_fn=token_loss, batch=(tokens(), y), steps=1, optimizer=descent
    )
    assert report.ok, str(report)


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 3, padding=1), norm, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.norm(self.first(x))).mean((2, 3)))


NORMS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.BatchNorm2d(8),
    "slow": lambda: nn.BatchNorm2d(8, momentum=0.01, eps=0.1),
    "without weights": lambda: nn.BatchNorm2d(8, affine=False),
    "without statistics": lambda: nn.BatchNorm2d(8, track_running_stats=False),
    "evaluated": lambda: nn.BatchNorm2d(8).eval(),
    "groups": lambda: nn.GroupNorm(4, 8),
    "instances": lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
}


@pytest.mark.parametrize("kind", NORMS)
def test_batch_norm_under_dp(kind: str) -> None:
    """The statistics are those of the whole batch, and so are the running ones, unbiased by its size."""
    torch.manual_seed(3)
    model = uneven(Normed(NORMS[kind]()))
    x = torch.randn(12, 3, 4, 4) * (1 + torch.arange(12).view(-1, 1, 1, 1)) + torch.arange(12).view(-1, 1, 1, 1)
    running = {name for name, _ in model.named_buffers()}
    for report, _ in check(model, ["dp=2", "dp=3,tp=2"], square_loss, (x, torch.randn(12, 4)), steps=3):
        assert names(report, "buffer") == running
    assert len(running) == (0 if kind in ("without statistics", "groups") else 3)


def test_batch_norm_of_what_is_centred_already() -> None:
    """Its running mean is zero but for rounding: no reason to call it wrong."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(16, 24), nn.BatchNorm1d(24), nn.Linear(24, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.last(torch.tanh(self.norm(h - h.mean(0))))

    check(uneven(Centred()), ["dp=2", "dp=3,tp=2"], square_loss, (torch.randn(12, 16), torch.randn(12, 8)))


def test_batch_norm_that_counts_in_python() -> None:
    """momentum=None divides by the number of batches as a Python float."""
    check(
        uneven(Normed(nn.BatchNorm2d(8, momentum=None))),
        ["dp=2"],
        square_loss,
        (torch.randn(12, 3, 4, 4), torch.randn(12, 4)),
    )


# Parameters, buffers, views


def test_frozen_and_unused_parameters() -> None:
    model, loss_fn, batch = ZOO["frozen"]()
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    for report, _ in check(model, MESHES, loss_fn, batch):
        assert len(frozen) == 3 and not frozen & names(report, "gradient") and frozen <= names(report, "weight")
    model, loss_fn, batch = ZOO["unused"]()
    for report, _ in check(model, MESHES, loss_fn, batch):
        assert names(report, "gradient") == {"used.weight", "used.bias", "last.weight", "last.bias", "scale"}


class InPlace(nn.Module):
    """Writes into its input, into views of it, and into buffers; reads them afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(16))
        self.calls: Tensor
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x[:, ::2] *= 2
        x.select(1, 3).add_(1)
        left, right = x.chunk(2, dim=1)
        left.sub_(right)
        h = self.up(x)
        with torch.no_grad():
            self.calls += 1
            self.mean.lerp_(h.mean(0), 0.25)
        h = h - self.mean
        h[:, :3] = h[:, 3:6].clone()
        h.view(-1)[::5].mul_(0.5)
        return self.down(F.relu(h, inplace=True)).add_(x)


def test_in_place_ops_and_views_on_inputs() -> None:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x.clone()), y)

    for report, _ in check(InPlace(), MESHES, loss_fn, (torch.randn(12, 8), torch.randn(12, 8)), steps=3):
        assert names(report, "buffer") == {"calls", "mean"}


# Random numbers


def dropping(attention: float = 0.1, probability: float = 0.1) -> nn.Module:
    torch.manual_seed(4)
    model = uneven(GPT(GPTConfig(40, 8, layers=1, heads=4, width=32, dropout=probability)))
    for block in model.blocks:
        block.attn.dropout = attention  # type: ignore[union-attr]
    return model.train()


def test_dropout_masks_per_axis() -> None:
    """One mask for the whole batch, drawn by logical index: other ranks of dp drop others, those of tp the same."""
    check(dropping(), [*MESHES, "dp=12", "tp=4", "tp=2,dp=2"], token_loss, (tokens(), labels()))


def test_dropout_does_drop_and_the_seed_counts() -> None:
    """Else all meshes would agree for a trivial reason."""
    batch = (tokens(), labels())
    values = set()

    def spy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = token_loss(model, x, y)
        if loss.device.type == "cpu" and not hasattr(loss, "fake_mode"):
            values.add(float(loss.detach()))
        return loss

    for seed in (1, 1, 2):
        check(dropping(), ["dp=2"], spy, batch, steps=1, seed=seed)
    check(dropping().eval(), ["dp=2"], spy, batch, steps=1)
    assert len(values) == 3, values  # seed 1, seed 2, no dropout


class Recomputed(nn.Module):
    """Two checkpointed regions with dropout, and dropout between them. Reentrant ones need an input with a gradient."""

    def __init__(self, probability: float, **options: Any) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(32, 8)
        self.middle = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Dropout(probability), nn.Tanh())
        self.probability, self.options = probability, options

    def body(self, x: Tensor) -> Tensor:
        return F.dropout(F.gelu(self.up(x)), self.probability, self.training)

    def recomputed(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return checkpoint(function, x, **self.options) if self.options else function(x)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.recomputed(self.body, self.first(x)), self.probability)
        return self.down(self.recomputed(self.middle, h))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("probability", [0.0, 0.3])
def test_dropout_with_recompute(probability: float, reentrant: bool) -> None:
    """A checkpointed region draws the same masks again in the backward pass."""
    torch.manual_seed(5)
    batch = torch.randn(12, 16), torch.randn(12, 8)
    model = Recomputed(probability, use_reentrant=reentrant)
    for report, _ in check(model, ["dp=2", "dp=3,tp=2"], square_loss, batch):
        assert len(names(report, "gradient")) == 10


@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_changes_no_gradient(reentrant: bool) -> None:
    """Both sides of `verify` recompute: here one does and the other does not."""
    torch.manual_seed(5)
    plain, other = Recomputed(0.3), Recomputed(0.3, use_reentrant=reentrant)
    other.load_state_dict(plain.state_dict())
    batch = torch.randn(12, 16), torch.randn(12, 8)
    found = []
    for model in (plain, other):
        parallel = parallelize(model.double(), "dp=1", loss_fn=square_loss, seed=3)
        parallel.forward_backward(*(part.double() for part in batch))
        found.append(parallel.full_gradients())
    assert len(found[0]) == 10 and found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-12, atol=1e-12, msg=name)


def test_recompute_with_other_masks_is_refused() -> None:
    model = Recomputed(0.3, use_reentrant=False, preserve_rng_state=False)
    with pytest.raises(CaptureError, match="preserve_rng_state"):
        verify(model, "dp=2", loss_fn=square_loss, batch=(torch.randn(12, 16), torch.randn(12, 8)))


def test_capture_leaves_the_random_state_of_torch_alone() -> None:
    model, batch = Recomputed(0.3, use_reentrant=False), (torch.randn(12, 16), torch.randn(12, 8))
    torch.rand(3)
    before = torch.get_rng_state()
    check(model, ["dp=2"], square_loss, batch)
    assert torch.equal(before, torch.get_rng_state())


def test_shared_modules_are_called_twice() -> None:
    """Both calls add to one gradient, and draw other masks."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.2), nn.Tanh(), nn.Linear(32, 16))
            self.last = nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inner(self.inner(x) + x))

    check(Twice(), MESHES, square_loss, (torch.randn(12, 16), torch.randn(12, 8)))
