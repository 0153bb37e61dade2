"""Two models with two optimizers, calls of other forms, and what a user may take for the same."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from autopar.errors import AutoparError
from benchmarks.journeys.actions import action
from benchmarks.journeys.parts import ROWS
from benchmarks.journeys.side import Side

SEEDS = st.integers(0, 5)


@action("ready", "critic", "!dropout", seed=SEEDS)
def train_critic(side: Side, seed: int) -> Tensor:
    """A step of the other network, whose loss calls this one."""
    critic, optimizer = side.critic, side.critic_optimizer
    optimizer.zero_grad()
    side.mark()
    x, y = side.batch(ROWS, seed)
    if side.is_parallel:
        loss = critic.forward_backward(x, y)
    else:
        loss = side.built.critic_loss(critic, x, y)
        loss.backward()
    side.mark()
    optimizer.step()
    side.mark()
    return loss.detach()


@action("ready", "critic", "optimizer", "!dropout", seed=SEEDS)
def train_against_critic(side: Side, seed: int) -> list[Tensor]:
    """A round of a GAN: the other network, then this one, whose loss calls the other."""
    first = train_critic(side, seed)
    assert side.optimizer is not None
    side.optimizer.zero_grad()
    second = side.forward_backward(*side.batch(ROWS, seed))
    side.step()
    return [first, second]


@action("ready", "!local", "!dropout", must_refuse=AutoparError, seed=SEEDS)
def backward_of_forward(side: Side, seed: int) -> None:
    """Autograd by hand, which a parallel model has no graph for."""
    loss = side.built.loss_fn(side.model, *side.batch(ROWS, seed))
    side.mark()  # a forward pass may write buffers
    (loss[0] if isinstance(loss, tuple) else loss).backward()


@action("ready", "!dropout", seed=SEEDS)
def forward_with_gradients_on(side: Side, seed: int) -> Tensor:
    """The outputs in whatever mode the model is, detached after that."""
    return side.forward(side.batch(ROWS, seed)[0]).detach()


@action("ready", "exact", "optimizer", "!dropout", "!pp", seed=SEEDS)
def lbfgs(side: Side, seed: int) -> Tensor:
    """An optimizer that calls the step itself."""
    batch = side.batch(ROWS, seed)
    optimizer = torch.optim.LBFGS([p for p in side.model.parameters() if p.requires_grad], lr=0.05, max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        return side.forward_backward(*batch)

    return torch.as_tensor(optimizer.step(closure)).detach()


@action("ready", "exact", "smooth", seed=SEEDS)
def rprop(side: Side, seed: int) -> None:
    """An optimizer that looks at signs alone."""
    side.start("Rprop")
    for i in range(2):
        assert side.optimizer is not None
        side.optimizer.zero_grad()
        side.forward_backward(*side.batch(ROWS, seed + i))
        side.step()
