"""Fine-tune a Llama of transformers with LoRA (arXiv 2106.09685): two small matrices beside each frozen weight.

    torchrun --nproc-per-node 2 examples/lora.py --mesh tp=2

The model is made here, and learns Paradise Lost on one device first, so that nothing is downloaded: put
`AutoModelForCausalLM.from_pretrained(...)` in its place. Then it learns the poem in capitals, through 5 % of its
parameters. With PEFT it is `get_peft_model(model, LoraConfig(...))` in the place of `add_lora(model)`; the rest stays.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from show import beside, curve, one_device
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from verse import batches

import autopar

ROWS, LENGTH = 16, 64


class LoRA(nn.Module):
    """y = x W^T + scale (x A^T) B^T: W frozen, A and B of a small rank are trained. B begins as zero."""

    def __init__(self, frozen: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.frozen, self.scale = frozen, scale
        self.a = nn.Linear(frozen.in_features, rank, bias=False)
        self.b = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.scale * self.b(self.a(x))


def add_lora(model: nn.Module, rank: int = 4, scale: float = 2.0) -> nn.Module:
    """Freeze a model, and put LoRA around every linear layer of its blocks."""
    model.requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and ".layers." in name:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, LoRA(layer, rank, scale))
    return model


def loss_fn(model: nn.Module, x_BT: Tensor, y_BT: Tensor) -> Tensor:
    return F.cross_entropy(model(input_ids=x_BT, use_cache=False).logits.flatten(0, 1), y_BT.flatten())


def make_optimizer(model: nn.Module, lr: float = 5e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=lr)


def pretrained(steps: int, batch: Callable[[int], tuple[Tensor, Tensor]]) -> nn.Module:
    """A model that has learnt something: the same on every rank."""
    torch.manual_seed(0)
    shape = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": LENGTH}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2))
    one_device(model, loss_fn, make_optimizer(model, lr=2e-3), batch, steps)
    return model


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Fine-tune; the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="tp=2")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args(arguments)
    poem, capitals = batches(ROWS, LENGTH), batches(ROWS, LENGTH, str.upper)

    def make() -> nn.Module:
        model = pretrained(args.steps, poem)
        torch.manual_seed(1)
        return add_lora(model)

    model = autopar.parallelize(make(), args.mesh, loss_fn=loss_fn)
    optimizer = make_optimizer(model)
    losses = []
    for step in range(args.steps):
        losses.append(model.forward_backward(*capitals(step)).item())
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        plain = make()
        trained = sum(one.numel() for one in plain.parameters() if one.requires_grad)
        print(f"{trained:,} of {sum(one.numel() for one in plain.parameters()):,} parameters are trained")
        print(curve(losses, "loss on capitals"))
        print(beside(losses, one_device(plain, loss_fn, make_optimizer(plain), capitals, args.steps)))
    return losses


if __name__ == "__main__":
    logging.getLogger("transformers").setLevel(logging.ERROR)
    main()
