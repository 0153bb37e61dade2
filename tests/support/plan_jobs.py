"""Jobs that plans are made for."""

from __future__ import annotations

import torch
from models import Llama, token_loss

import autopar


def llama_job(
    layers: int = 6,
    width: int = 256,
    heads: int = 8,
    hidden: int = 512,
    words: int = 512,
    length: int = 64,
    rows: int = 2,
) -> autopar.Job:  # fmt: skip
    """A Llama with as many heads of keys as of queries, on no device."""
    with torch.device("meta"):
        model = Llama(layers, width, heads, heads, hidden, words, length)
        ids = torch.empty(rows, length, dtype=torch.int64)
    return autopar.Job(model, token_loss, (ids, ids), precision="bf16")
