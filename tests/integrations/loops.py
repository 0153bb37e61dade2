"""Training loops as users of other libraries write them, to be run beside the same on one device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def as_torchrun_does(rank: int, size: int) -> None:
    """Set the variables of torchrun, which Accelerate and Lightning read."""
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in values.items()})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "29999"})  # the ranks are joined already


def net() -> nn.Module:
    """A model with running statistics, and a weight of two names."""
    torch.manual_seed(3)
    once, again = nn.Linear(8, 8), nn.Linear(8, 8)
    again.weight = once.weight
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), once, nn.Tanh(), again, nn.Linear(8, 4)
    ).double()


def data() -> TensorDataset:
    x = torch.randn(22, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return TensorDataset(x, x[:, :4].argmax(-1))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def accelerated(accelerator: Any, folder: Path, resume: Path | None = None) -> dict[str, Any]:
    """A loop of Accelerate: accumulation, clipping, a schedule, a short last batch, metrics, state saved and loaded."""
    model: Any = net()
    torch.manual_seed(7)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader: Any = DataLoader(data(), batch_size=6, shuffle=True)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    if resume is not None:
        accelerator.load_state(str(resume))
    found: dict[str, Any] = {"losses": [], "norms": [], "rates": [], "right": [], "count": []}
    for _ in range(counter.epochs, 2):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = model.training_loss(x, y) if hasattr(model, "training_loss") else loss_fn(model, x, y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    found["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            found["losses"].append(loss.item())
            found["rates"].append(scheduler.get_last_lr()[0])
        model.eval()
        seen = right = 0
        for batch in DataLoader(data(), batch_size=6):
            x, y = (leaf.to(accelerator.device) for leaf in batch)
            with torch.no_grad():
                guess = model(x).argmax(-1)
            guess, y = accelerator.gather_for_metrics((guess, y))
            seen, right = seen + len(y), right + int((guess == y).sum())
        found["right"].append(right / seen)
        found["count"].append(len(accelerator.gather_for_metrics(["a"])))
        counter.epochs += 1
        accelerator.save_state(str(folder / f"state-{counter.epochs}"))
    accelerator.wait_for_everyone()
    weights = accelerator.get_state_dict(model)
    accelerator.save(weights, str(folder / "weights.pt"))
    accelerator.save_model(accelerator.unwrap_model(model), str(folder / "model"))
    accelerator.wait_for_everyone()
    return found


class Counter:
    """What a script registers for its checkpoints."""

    epochs = 0

    def state_dict(self) -> dict[str, int]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epochs = state["epochs"]
