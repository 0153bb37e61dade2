"""Train a small Llama on 65,536 letters at a time, on four local processes that split the sequence.

    python examples/long_context.py     # memory of a rank, three steps, their timeline: three minutes on two cores

The model, the loss and the data are those of one device. `cp=4` gives each rank two of eight pieces of the sequence,
the first and the last, the second and the last but one, and so on, so that causal attention is as much work for each;
keys and values go round the ranks. `--zero 1` splits the optimizer's states over them too.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

TEXT = Path(__file__).parent / "data" / "paradise_lost.txt"
LENGTH, SHORT, MESH, ZERO = 65_536, 16_384, "cp=4", 1
VOCABULARY, LAYERS, HEADS, KEY_HEADS, HEAD = 128, 2, 2, 1, 32
WIDTH = HEADS * HEAD


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x_BTD: Tensor, angle_TC: Tensor) -> Tensor:
        h_BTD = self.attn_norm(x_BTD)
        q, k, v = (part(h_BTD).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(
            rotated(q, angle_TC), rotated(k, angle_TC), v, is_causal=True, enable_gqa=True
        )
        x_BTD = x_BTD + self.o(a.transpose(1, 2).flatten(2))
        h_BTD = self.mlp_norm(x_BTD)
        return x_BTD + self.down(F.silu(self.gate(h_BTD)) * self.up(h_BTD))


def rotated(x: Tensor, angle_TC: Tensor) -> Tensor:
    """Rotary embedding (arXiv 2104.09864): pairs of channels, turned by an angle that grows with the position."""
    left, right = x.chunk(2, -1)
    cos, sin = angle_TC.cos(), angle_TC.sin()
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x_BT: Tensor) -> Tensor:
        places_T = torch.arange(x_BT.shape[1], device=x_BT.device)
        angle_TC = places_T[:, None] / 10_000 ** (torch.arange(HEAD // 2, device=x_BT.device) / (HEAD // 2))
        h_BTD = self.tokens(x_BT)
        for block in self.blocks:
            h_BTD = block(h_BTD, angle_TC)
        return self.head(self.norm(h_BTD))


def loss_fn(model: nn.Module, x_BT: Tensor, y_BT: Tensor) -> Tensor:
    return F.cross_entropy(model(x_BT).flatten(0, 1), y_BT.flatten())


def job() -> autopar.Job:
    text = torch.tensor(list(TEXT.read_bytes()))

    def data(step: int) -> tuple[Tensor, Tensor]:
        start = int(torch.randint(len(text) - LENGTH, (), generator=torch.Generator().manual_seed(step)))
        return text[None, start : start + LENGTH], text[None, start + 1 : start + 1 + LENGTH]

    return autopar.Job(
        model=Model(),
        loss_fn=loss_fn,
        batch=data(0),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        data=data,
    )


def kept(mesh: str, length: int, zero: int | None = None) -> int:
    """Bytes that a rank holds at its fullest; nothing runs."""
    with torch.device("meta"):
        model, batch = Model(), torch.empty(1, length, dtype=torch.int64)
    return autopar.compile(model, mesh, loss_fn=loss_fn, batch=(batch, batch), zero=zero).memory().peak


def run(*arguments: str) -> int:
    """The command line of autopar; its exit status."""
    print(f"$ python -m autopar {' '.join(arguments)}", flush=True)
    command = [sys.executable, "-m", "autopar", *arguments]
    return subprocess.run(command, cwd=Path(__file__).parent.parent, check=False).returncode


def main() -> int:
    for mesh, length, zero in (("dp=1", SHORT, None), ("dp=1", LENGTH, None), (MESH, LENGTH, ZERO)):
        print(f"{length:6} letters on {mesh}: {kept(mesh, length, zero) / 2**20:6.1f} MiB at most on a rank")
    options = ["examples/long_context.py:job", "--mesh", MESH, "--zero", str(ZERO)]
    with tempfile.TemporaryDirectory() as folder:
        status = run("run", *options, "--steps", "3", "--trace", folder)
        return status or run("inspect", *options, "--timeline", "--over", folder)


if __name__ == "__main__":
    sys.exit(main())
