"""Train a small mixture of experts on Milton's Paradise Lost, and show which expert took how many tokens.

    torchrun --nproc-per-node 4 examples/train_experts.py --mesh ep=4        # two experts on each rank
    torchrun --nproc-per-node 4 examples/train_experts.py --mesh dp=2,ep=2   # four on each of two, twice over
    autopar run examples/train_experts.py:job --mesh ep=4 --steps 100        # without a loop of one's own

The model is one for a single device: it sorts tokens by expert, and knows nothing of ranks. docs/experts.md explains.
Names are those of gpt.py, and E experts, K of them for a token, N = B T tokens.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
import train_gpt
from gpt import Attention, GPTConfig
from show import beside, one_device
from torch import Tensor, nn

import autopar

EXPERTS, CHOSEN, LAYERS = 8, 2, 2
BALANCE = 0.02  # how much it costs that some experts take more tokens than others


class Mixture(nn.Module):
    """A router sends each token to K of E small MLPs, whose results it weighs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, width, width) / width**0.5)

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """The results, and how unlike the experts are used: 1 where all are alike, up to E."""
        chances_NE = self.router(x_ND).softmax(-1)
        weights_NK, experts_NK = chances_NE.topk(CHOSEN)
        expert_S = experts_NK.flatten()  # S = N K rows: a copy of a token for each expert that it takes
        order_S = expert_S.argsort(stable=True)
        counts_E = F.one_hot(expert_S, EXPERTS).sum(0)
        token_S, ends_E = order_S // CHOSEN, counts_E.cumsum(0).to(torch.int32)
        hidden_SF = F.gelu(F.grouped_mm(x_ND[token_S], self.up, offs=ends_E))
        y_SD = F.grouped_mm(hidden_SF, self.down, offs=ends_E) * weights_NK.flatten()[order_S, None]
        out_ND = torch.zeros_like(x_ND).index_add(0, token_S, y_SD)
        return out_ND, EXPERTS * (counts_E / len(expert_S) * chances_NE.mean(0)).sum()


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attn, self.mixture = Attention(config), Mixture(config.width)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD))
        y_ND, unlike = self.mixture(self.mlp_norm(x_BTD).flatten(0, 1))
        return x_BTD + y_ND.view_as(x_BTD), unlike


class MixtureGPT(nn.Module):
    """The GPT of gpt.py with experts in place of its MLPs."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        x_BTD = self.tokens(tokens_BT) + self.positions(torch.arange(tokens_BT.shape[1], device=tokens_BT.device))
        unlike = []
        for block in self.blocks:
            x_BTD, its = block(x_BTD)
            unlike.append(its)
        return self.head(self.norm(x_BTD)), torch.stack(unlike).mean()


def loss_fn(model: nn.Module, x_BT: Tensor, y_BT: Tensor) -> Tensor:
    logits_BTV, unlike = model(x_BT)
    return F.cross_entropy(logits_BTV.flatten(0, 1), y_BT.flatten()) + BALANCE * unlike


def job() -> autopar.Job:
    return replace(train_gpt.job(), model=MixtureGPT(train_gpt.CONFIG), loss_fn=loss_fn, after=None)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, with a table of the tokens that each expert took; the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="ep=4")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps from one line of the table to the next")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    task = job()
    plain = copy.deepcopy(task.model)
    model = autopar.parallelize(task.model, args.mesh, loss_fn=loss_fn)
    optimizer = task.make_optimizer(model.parameters())
    is_first = dist.get_rank() == 0
    if is_first:
        named = "".join(f"{f'expert {expert}':>10}" for expert in range(EXPERTS))
        print(f"  step    loss  {'layer':16}{named}  imbalance")
    losses = []
    for step in range(args.steps):
        losses.append(model.forward_backward(*task.batch_of(step)).item())
        optimizer.step()
        optimizer.zero_grad()
        if step % args.every == 0 or step == args.steps - 1:
            for layer in model.last.experts:  # every rank asks: they tell one another
                if is_first:
                    rows = "".join(f"{rows:10}" for rows in layer.by_expert)
                    print(
                        f"{step + 1:6}  {losses[-1]:6.3f}  {layer.module:16}{rows}  {layer.imbalance:9.2f}", flush=True
                    )
    if is_first:
        alone = one_device(plain, loss_fn, task.make_optimizer(plain.parameters()), task.batch_of, args.steps)
        print(beside(losses, alone))
    return losses


if __name__ == "__main__":
    main()
