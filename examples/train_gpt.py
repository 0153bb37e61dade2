"""Train the GPT of gpt.py on Milton's Paradise Lost, letter by letter.

    autopar run examples/train_gpt.py:job --mesh dp=2,tp=2 --steps 300

The model, the loss and the data are those of one device; the mesh is said on the command line alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig, sample
from torch import Tensor, nn
from verse import batches, decode, encode

import autopar

CONFIG = GPTConfig(vocabulary=128, context=48, layers=2, heads=4, width=128)
BATCH = 24
PROMPT = "Of Man's first disobedience"


def loss_fn(model: nn.Module, x_BT: Tensor, y_BT: Tensor) -> Tensor:
    logits_BTV = model(x_BT)
    return F.cross_entropy(logits_BTV.flatten(0, 1), y_BT.flatten())


def job() -> autopar.Job:
    data = batches(BATCH, CONFIG.context)

    def after(model: nn.Module) -> str:
        """What the trained model makes of the poem's first words."""
        return decode(sample(model, encode(PROMPT), 240, (BATCH, CONFIG.context)))

    return autopar.Job(
        model=GPT(CONFIG),
        loss_fn=loss_fn,
        batch=data(0),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95)),
        data=data,
        after=after,
    )
