"""Train a model whose training state is larger than the device that it is given: what waits is in the host's memory,
or on a disk.

    python examples/offload.py

On a CPU the device is a part of its memory: a budget that a tracker watches. The plain step needs more than it allows;
with activations and optimizer states on the host it fits, with activations and parameters into less, of which nothing
need be in memory where there is a disk. With memory= what moves and what is computed again is found, for a limit. Every
loss is the same to the bit.
"""

from __future__ import annotations

import tempfile

import torch
from torch import Tensor, nn

import autopar
from autopar.report.memory.report import MemoryReport

WIDTH, LAYERS, ROWS, STEPS = 64, 8, 512, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def train(**options: object) -> tuple[list[float], MemoryReport]:
    """The losses, and what is held: by the device at its peak, by the host and by the disk."""
    torch.manual_seed(0)
    model = autopar.parallelize(Model(), "dp=1", loss_fn=loss_fn, **options)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    report = model.prepare(*batch).memory(optimizer=torch.optim.AdamW)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(model.forward_backward(*batch).item())
        optimizer.step()
    return losses, report


def main() -> None:
    plain, needs = train()
    budget = needs.peak // 2
    print(f"a step on the device alone needs {needs.peak / 1e6:.1f} MB; the device is given {budget / 1e6:.1f} MB")
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, dict[str, object]] = {
            "activations and optimizer states wait": {"offload": ["activations", "optimizer"], "horizon": 1},
            "activations and parameters wait": {"offload": ["activations", "parameters"], "horizon": 1},
            "activations wait, parameters lie in files": {
                "offload": {"activations": 1.0, "parameters": "disk"}, "offload_dir": folder, "horizon": 1
            },
            "states wait, memory= finds the rest": {"offload": "optimizer", "memory": budget},
        }  # fmt: skip
        for what, options in ways.items():
            losses, held = train(**options)
            sizes = f"{held.peak / 1e6:.1f} MB of the device, {held.host / 1e6:.1f} of the host, {held.disk / 1e6:.1f}"
            print(f"{what}: {sizes} of the disk")
            print(f"  losses {', '.join(f'{loss:.6f}' for loss in losses)}: {'the same' * (losses == plain)}")
            assert held.peak <= budget and losses == plain


if __name__ == "__main__":
    main()
