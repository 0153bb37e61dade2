"""Milton's Paradise Lost as batches of letters: a text is ASCII, so a letter's code is its token, of 128."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

TEXT = Path(__file__).parent / "data" / "paradise_lost.txt"


def encode(text: str) -> list[int]:
    return list(text.encode("ascii"))


def decode(tokens: list[int]) -> str:
    return bytes(tokens).decode("ascii")


def batches(rows: int, length: int, change: Callable[[str], str] = str) -> Callable[[int], tuple[Tensor, Tensor]]:
    """The global batch of each step, (rows, length) letters and those one place further on. It depends on the number
    of the step only, so that any mesh, and a run that was stopped, trains on the same. change: what becomes of the text
    first, `str.upper` say."""
    text = torch.tensor(encode(change(TEXT.read_text(encoding="ascii"))))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(step)
        starts = torch.randint(len(text) - length, (rows,), generator=random).tolist()
        x_BT = torch.stack([text[i : i + length] for i in starts])
        y_BT = torch.stack([text[i + 1 : i + 1 + length] for i in starts])
        return x_BT, y_BT

    return batch
