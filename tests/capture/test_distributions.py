"""torch.distributions as models use it: its arguments are checked by default, which is a branch on data each time."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
from torch import Tensor, nn
from verified import verified

import autopar
from autopar.errors import CaptureError

Body = Callable[[Any, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _checked() -> Iterator[None]:
    """torch._dynamo turns the checks off for the whole process."""
    before = D.Distribution._validate_args
    D.Distribution.set_default_validate_args(True)
    yield
    D.Distribution.set_default_validate_args(before)


class Net(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.hidden, self.loc, self.scale = (nn.Linear(8, 8) for _ in range(3))
        self.log_std = nn.Parameter(torch.zeros(8))
        self.register_buffer("prior_loc", torch.zeros(8))
        self.prior = D.Normal(torch.zeros(8), torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.hidden(x), x)

    def normal(self, h: Tensor) -> D.Normal:
        return D.Normal(self.loc(h), F.softplus(self.scale(h)) + 1e-3)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def made(body: Body) -> Net:
    torch.manual_seed(1)
    return Net(body)


def rows() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(12, 5, 8)


def autoencoder(m: Any, h: Tensor, x: Tensor) -> Tensor:
    q = m.normal(h)
    p = D.Normal(torch.zeros_like(q.loc), torch.ones_like(q.scale))
    z = q.rsample()
    return z * 0.1 + D.kl_divergence(q, p) - q.log_prob(z.detach()) + q.entropy()


def independent(m: Any, h: Tensor, x: Tensor) -> Tensor:
    q = D.Independent(m.normal(h), 1)
    p = D.Independent(D.Normal(m.prior_loc.expand_as(h), torch.ones_like(h)), 1)
    return h + D.kl_divergence(q, p)[..., None] + q.log_prob(x)[..., None] + m.prior.log_prob(h)


def policy(m: Any, h: Tensor, x: Tensor) -> Tensor:
    steps, choices = D.Normal(m.loc(h), m.log_std.exp()), D.Categorical(logits=h)
    taken = choices.sample()
    return (
        h + steps.log_prob(x).sum(-1, keepdim=True) + choices.log_prob(taken)[..., None] + choices.entropy()[..., None]
    )


def counts(m: Any, h: Tensor, x: Tensor) -> Tensor:
    d = D.NegativeBinomial(F.softplus(h) + 0.1, logits=m.scale(h))
    return h - d.log_prob(x.abs().floor()) - D.Poisson(F.softplus(h)).log_prob(x.abs().floor())


def heavy(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h - D.StudentT(F.softplus(m.scale(h)) + 2, m.loc(h), F.softplus(h) + 0.1).log_prob(x)


def mixture(m: Any, h: Tensor, x: Tensor) -> Tensor:
    d = D.MixtureSameFamily(D.Categorical(logits=h), m.normal(h))
    return h - d.log_prob(x[..., 0])[..., None]


def gaussian(m: Any, h: Tensor, x: Tensor) -> Tensor:
    d = D.MultivariateNormal(m.loc(h), scale_tril=torch.diag_embed(F.softplus(m.scale(h)) + 0.1))
    return h - d.log_prob(x)[..., None]


def squashed(m: Any, h: Tensor, x: Tensor) -> Tensor:
    d = D.TransformedDistribution(m.normal(h), [D.TanhTransform(cache_size=1), D.AffineTransform(m.log_std, 2.0)])
    z = d.rsample()
    return z + d.log_prob(z)


def coins(m: Any, h: Tensor, x: Tensor) -> Tensor:
    wanted = (x > 0).to(h.dtype)
    relaxed = D.RelaxedOneHotCategorical(torch.tensor(0.5), logits=h).rsample()
    return relaxed - D.Bernoulli(logits=h).log_prob(wanted) - D.Bernoulli(probs=h.sigmoid()).log_prob(wanted)


def others(m: Any, h: Tensor, x: Tensor) -> Tensor:
    loc, scale = m.loc(h), F.softplus(m.scale(h)) + 0.1
    found = D.Laplace(loc, scale).rsample() + D.LogNormal(loc, scale).log_prob(x.exp()) + D.Gumbel(loc, scale).mean
    found = found - D.Gamma(scale, scale).log_prob(x.exp()) - D.Beta(scale, scale).log_prob(x.sigmoid())
    return found + D.Geometric(probs=h.sigmoid()).log_prob(x.abs().floor()) + D.Uniform(loc - 99, loc + 99).log_prob(x)


BODIES = [autoencoder, independent, policy, counts, heavy, mixture, gaussian, squashed, coins, others]


@pytest.mark.parametrize("body", BODIES)
def test_the_numbers_are_those_of_one_device(body: Body) -> None:
    model = made(body)
    model.prior = D.Normal(torch.zeros(8).double(), torch.ones(8).double())
    verified(model, ["dp=2,tp=2", "dp=3"], loss_fn, (rows(),))


@pytest.mark.parametrize("body", [autoencoder, policy, counts])
@pytest.mark.parametrize("options", [{"microbatches": 2}, {"zero": 3, "recompute": "full", "microbatches": 2}], ids=str)
def test_with_microbatches(body: Body, options: dict[str, Any]) -> None:
    verified(made(body), ["dp=2"], loss_fn, (rows(),), **options)


def test_what_is_left_out_is_noted_with_its_lines() -> None:
    found = autopar.compile(made(autoencoder), "dp=2", loss_fn=loss_fn, batch=(rows(),))
    (note,) = found.notes
    first, line = Net.normal.__code__.co_firstlineno + 1, autoencoder.__code__.co_firstlineno
    lines = ", ".join(f"test_distributions.py:{at}" for at in (first, line + 4))  # line + 2 has but the form of q
    assert note == (
        f"torch.distributions checks its arguments at {lines}: a compiled step leaves out the checks of what depends "
        f"on the batch, a parameter or a buffer; validate_args=False does so in the plain model"
    )
    assert {out.kind for out in found.program.outputs} == {"loss", "gradient", "buffer"}


def test_there_is_no_note_where_nothing_is_left_out() -> None:
    def unchecked(m: Any, h: Tensor, x: Tensor) -> Tensor:
        prior = D.Normal(torch.zeros(8), torch.ones(8))  # of constants, which the capture checks
        kl = D.kl_divergence(D.Normal(m.loc(h), m.log_std.exp(), validate_args=False), prior)
        return h + kl

    assert not autopar.compile(made(unchecked), "dp=2", loss_fn=loss_fn, batch=(rows(),)).notes


def test_specialize_is_not_asked_for_it() -> None:
    report = autopar.verify(made(autoencoder), "dp=2", loss_fn=loss_fn, batch=(rows(),), specialize=True)
    assert report.ok and report.max_error < 1e-10, report


def test_constants_are_checked_at_the_capture() -> None:
    def wrong(m: Any, h: Tensor, x: Tensor) -> Tensor:
        return h + D.Normal(torch.tensor(0.0), torch.tensor([1.0, -1.0]).repeat(4)).log_prob(h)

    with pytest.raises(CaptureError, match=r"ValueError: Expected parameter scale .* of distribution Normal") as caught:
        autopar.compile(made(wrong), "dp=2", loss_fn=loss_fn, batch=(rows(),))
    assert f"{__file__}:{wrong.__code__.co_firstlineno + 1}" in str(caught.value)


def test_a_step_that_the_plain_model_would_refuse_shows_in_its_loss(caplog: pytest.LogCaptureFixture) -> None:
    """The price of the decision: no ValueError, but a loss that is not finite, and a note when it was compiled."""

    def raw(m: Any, h: Tensor, x: Tensor) -> Tensor:
        return h + D.Normal(m.loc(h), m.scale(h)).log_prob(x)

    plain = made(raw)
    with torch.no_grad():
        plain.scale.bias.fill_(9)
    parallel = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=loss_fn)
    with caplog.at_level(logging.INFO, "autopar"):
        loss = parallel.forward_backward(rows())
    torch.testing.assert_close(loss, loss_fn(plain, rows()).detach())
    assert "torch.distributions checks its arguments" in caplog.text
    with torch.no_grad():
        for model in (plain, parallel):
            model.get_parameter("scale.bias").fill_(-9)
    with pytest.raises(ValueError, match="Expected parameter scale"):
        loss_fn(plain, rows())
    assert parallel.forward_backward(rows()).isnan()


def test_a_check_of_the_users_own_is_made_in_each_step() -> None:
    class Positive(D.Normal):
        def __init__(self, loc: Tensor, scale: Tensor) -> None:
            assert (scale > 0).all()
            super().__init__(loc, scale)

    def asserted(m: Any, h: Tensor, x: Tensor) -> Tensor:
        return h + Positive(m.loc(h), m.log_std.exp()).log_prob(x)

    model = made(asserted)
    parallel = autopar.parallelize(model, "dp=1", loss_fn=loss_fn)
    parallel.forward_backward(rows())
    with torch.no_grad():
        model.log_std.fill_(-torch.inf)
    with pytest.raises(AssertionError):
        parallel.forward_backward(rows())


def test_what_draws_otherwise_is_refused_with_its_line() -> None:
    def gamma(m: Any, h: Tensor, x: Tensor) -> Tensor:
        return h + D.Gamma(F.softplus(h) + 0.1, torch.ones(())).rsample()

    line = gamma.__code__.co_firstlineno + 1
    with pytest.raises(
        CaptureError, match=rf"_standard_gamma.default' at test_distributions.py:{line} .*docs/random.md"
    ):
        autopar.compile(made(gamma), "dp=2", loss_fn=loss_fn, batch=(rows(),))
