"""Train a model whose training state is larger than the device that it is given: what waits is in the host's memory.

    python examples/offload.py

On a CPU the device is a part of its memory: a budget that a tracker watches. The plain step needs more than it allows;
with activations and optimizer states on the host it fits, with activations and parameters into less, and every loss is
the same to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autopar

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


def train(**options: object) -> tuple[list[float], int, int]:
    """The losses, and the peaks of the device and of the host, in bytes."""
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
    return losses, report.peak, report.host


def main() -> None:
    plain, needs, _ = train()
    budget = needs // 2
    print(f"a step on the device alone needs {needs / 1e6:.1f} MB; the device is given {budget / 1e6:.1f} MB")
    for what, share in (("optimizer", 1.0), ("parameters", 0.7)):  # with parameters all that is behind them
        losses, device, host = train(offload=["activations", what], horizon=1)
        print(
            f"with activations and {what} there: {device / 1e6:.1f} MB of the device, {host / 1e6:.1f} MB of the host"
        )
        print(f"losses {', '.join(f'{loss:.6f}' for loss in losses)}: {'the same' if losses == plain else 'others'}")
        assert device <= share * budget and losses == plain


if __name__ == "__main__":
    main()
