"""Balance a pole by PPO (arXiv 1707.06347), with an environment of our own: 32 carts at once.

    torchrun --nproc-per-node 2 examples/ppo.py --mesh dp=2

Three things of a loop of reinforcement learning: episodes are played with the plain module (`gathered`), the same on
every rank since all draw from one seed; the policy then learns from them in parallel steps, whose loss function takes
more than a pair of tensors; and what it returns beside the loss is in `model.last_aux`. At the end the same is done on
one device. It is in float64, so that rounding decides no draw: in these 20 iterations all episodes are the same ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from show import beside, curve
from torch import Tensor, nn

import autopar

CARTS, LENGTH, LIMIT = 32, 64, 200  # steps of a rollout, and of an episode
DISCOUNT, LAMBDA, CLIP, EPOCHS = 0.98, 0.95, 0.2, 4


class CartPoles:
    """The cart and pole of Barto, Sutton and Anderson (1983): push left or right, and the pole shall not fall."""

    def __init__(self, random: torch.Generator) -> None:
        self.random = random
        self.state, self.age = self.fresh(), torch.zeros(CARTS, dtype=torch.long)
        self.lengths: list[int] = []  # of the episodes that ended

    def fresh(self) -> Tensor:
        return torch.rand(CARTS, 4, generator=self.random, dtype=torch.float64) * 0.1 - 0.05

    def step(self, action: Tensor) -> Tensor:
        """Push every cart; True where an episode ends (and the next begins)."""
        x, v, angle, turn = self.state.unbind(-1)
        push = (20.0 * action - 10.0 + 0.05 * turn**2 * angle.sin()) / 1.1
        bend = (9.8 * angle.sin() - angle.cos() * push) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
        speed = push - 0.05 * bend * angle.cos() / 1.1
        moved = torch.stack((x + 0.02 * v, v + 0.02 * speed, angle + 0.02 * turn, turn + 0.02 * bend), -1)
        self.age += 1
        ended = (moved[:, 0].abs() > 2.4) | (moved[:, 2].abs() > 0.21) | (self.age >= LIMIT)
        self.lengths += self.age[ended].tolist()
        self.age[ended] = 0
        self.state = torch.where(ended[:, None], self.fresh(), moved)
        return ended


class Policy(nn.Module):
    """A state to the logits of two actions, and to its value."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(state).log_softmax(-1), self.critic(state)[..., 0]


def loss_fn(
    model: nn.Module, state: Tensor, action: Tensor, old: Tensor, advantage: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """PPO's clipped loss, with the mean entropy beside it."""
    chances, value = model(state)
    ratio = (chances.gather(-1, action[:, None])[:, 0] - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
    entropy = -(chances.exp() * chances).sum(-1).mean()
    return 0.5 * F.mse_loss(value, target) - gain - 0.01 * entropy, entropy


@torch.no_grad()
def rollout(policy: nn.Module, carts: CartPoles) -> tuple[Tensor, ...]:
    """Play, and estimate advantages (arXiv 1506.02438): the batch of `loss_fn`."""
    seen = []
    for _ in range(LENGTH):
        state = carts.state
        chances, value = policy(state)
        action = torch.multinomial(chances.exp(), 1, generator=carts.random)[:, 0]
        old = chances.gather(-1, action[:, None])[:, 0]
        seen.append((state, action, old, value, carts.step(action)))
    states, actions, olds, values, ended = (torch.stack(each) for each in zip(*seen, strict=True))
    advantages, after, running = torch.zeros_like(values), policy(carts.state)[1], torch.zeros(CARTS)
    for t in reversed(range(LENGTH)):
        goes_on = (~ended[t]).double()
        running = 1.0 + DISCOUNT * goes_on * after - values[t] + DISCOUNT * LAMBDA * goes_on * running
        advantages[t], after = running, values[t]
    targets, advantages = advantages + values, (advantages - advantages.mean()) / advantages.std()
    return tuple(each.flatten(0, 1) for each in (states, actions, olds, advantages, targets))


def train(
    iterations: int, update: Callable[..., None], playing: Callable[[], AbstractContextManager[nn.Module]]
) -> list[float]:
    """The mean length of the episodes that ended in each iteration.

    update: one step of the optimizer on a batch. playing: a context with the policy as a plain module.
    """
    random = torch.Generator().manual_seed(1)
    carts, scores = CartPoles(random), []
    for _ in range(iterations):
        carts.lengths = []
        with playing() as policy:
            batch = rollout(policy, carts)
        for _ in range(EPOCHS):
            for rows in torch.randperm(CARTS * LENGTH, generator=random).chunk(4):
                update(*(each[rows] for each in batch))
        scores.append(sum(carts.lengths) / max(len(carts.lengths), 1))
    return scores


def make() -> Policy:
    torch.manual_seed(0)
    return Policy().double()


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train; the mean lengths of the episodes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="dp=2")
    parser.add_argument("--iterations", type=int, default=20)
    args = parser.parse_args(arguments)
    model = autopar.parallelize(make(), args.mesh, loss_fn=loss_fn)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def update(*batch: Tensor) -> None:
        model.forward_backward(*batch)
        optimizer.step()
        optimizer.zero_grad()

    scores = train(args.iterations, update, model.gathered)
    if dist.get_rank() == 0:
        plain = make()
        own = torch.optim.Adam(plain.parameters(), lr=1e-3)

        def alone(*batch: Tensor) -> None:
            loss_fn(plain, *batch)[0].backward()
            own.step()
            own.zero_grad()

        print(curve(scores, f"steps until the pole falls, of {LIMIT} at most"))
        print(f"entropy of the last batch: {model.last_aux.item():.3f}")
        print(beside(scores, train(args.iterations, alone, lambda: nullcontext(plain)), "steps"))
    return scores


if __name__ == "__main__":
    main()
