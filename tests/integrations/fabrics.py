"""A loop of Lightning's Fabric as users write it, to be run on a mesh and on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from loops import data, loss_fn, net
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset[Any]):
    """Samples with noise of torch and numpy, drawn as they are read."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        x, y = data()[at]
        return x + 0.1 * torch.randn(6, dtype=torch.float64) + 0.1 * float(np.random.rand()), y


def fabricated(fabric: Any, folder: Path, resume: Path | None = None) -> dict[str, Any]:
    """Accumulation, clipping, a schedule, a short last batch, data with noise, metrics, state saved and loaded."""
    fabric.seed_everything(7, verbose=False)
    fabric.launch()
    model: Any = net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(Noisy(), batch_size=6, shuffle=True))
    assert len(loader) == 4 and loader.batch_size == 6 and len(loader.dataset) == 22
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epochs": 0}
    if resume is not None:
        assert fabric.load(resume, state).keys() == set()
    found: dict[str, Any] = {"losses": [], "norms": [], "rates": [], "right": []}
    for epoch in range(state["epochs"], 2):
        model.train()
        fabric.seed_everything(11 + epoch + 10 * fabric.global_rank, verbose=False)  # a loader draws as rank 0 does
        for number, (x, y) in enumerate(loader):
            accumulates = number % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulates):
                loss = model.training_loss(x, y) if hasattr(model, "training_loss") else loss_fn(model, x, y)
                fabric.backward(loss / 2)
            if not accumulates:
                limit = {"max_norm": 0.5} if epoch == 0 else {"clip_val": 0.02}
                found["norms"].append(float(fabric.clip_gradients(model, optimizer, **limit) or 0))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            found["losses"].append(fabric.all_reduce(loss.detach()).item())
            found["rates"].append(scheduler.get_last_lr()[0])
        model.eval()
        x, y = data().tensors
        with torch.no_grad():
            guess = fabric.all_gather(model(x).argmax(-1))
        found["right"].append(float((guess == y).double().mean()))
        state["epochs"] = epoch + 1
        fabric.save(folder / f"{epoch}.ckpt", state, filter={"scheduler": lambda name, _: name != "_is_initial"})
    found["ranks"] = [fabric.world_size, fabric.broadcast("said"), fabric.is_global_zero == (fabric.global_rank == 0)]
    return found
