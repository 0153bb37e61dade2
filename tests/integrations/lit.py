"""A LightningModule and a run of its Trainer as users write them."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from loops import data
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy


class Classifier(L.LightningModule):
    def __init__(self, uses_number: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 4)).double()
        self.uses_number = uses_number
        self.accuracy, self.seen = MulticlassAccuracy(4), SumMetric()
        self.of_batch = MetricCollection({"macro": MulticlassAccuracy(4), "top": MulticlassAccuracy(4, top_k=2)})
        self.kept = self.of_batch.clone(prefix="kept_")
        self.by_part = nn.ModuleDict({"fit": self.of_batch.clone(prefix="fit_")})

    def forward(self, x: Any) -> Any:
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        output = self(x)
        loss = F.cross_entropy(output, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"right": (output.argmax(-1) == y).double().mean()}, on_step=False, on_epoch=True)
        self.accuracy(output, y)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log_dict(self.of_batch(output, y), on_step=False, on_epoch=True)
        self.kept.update(output, y)
        self.log_dict(self.kept, on_step=False, on_epoch=True)
        for name, value in self.by_part["fit"](output, y).items():
            self.log(name, value, on_step=False, on_epoch=True)
        return {"loss": loss, "norm": output.square().sum()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        output = self(x)
        self.log("val_loss", F.cross_entropy(output, y))
        self.log("val_acc", (output.argmax(-1) == y).double().mean(), sync_dist=True)
        self.seen.update(float(len(x)))
        self.log("seen", self.seen)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)]


class Told(Callback):
    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        found = outputs if isinstance(outputs, dict) else {"loss": outputs}
        self.events += [trainer.global_step, *(float(value) for value in found.values())]

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.events.append("validated")


def fitted(folder: Path, resume: Path | None = None, **kwargs: Any) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module, told = Classifier(), Told()
    torch.manual_seed(7)
    trainer = L.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, gradient_clip_val=0.5, accumulate_grad_batches=2, default_root_dir=folder,
        callbacks=[told, ModelCheckpoint(folder, "{epoch}", save_top_k=-1)], **kwargs,
    )  # fmt: skip
    valid = DataLoader(data(), batch_size=6)
    trainer.fit(module, DataLoader(data(), batch_size=6, shuffle=resume is None), valid, ckpt_path=resume)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    predicted = torch.cat(trainer.predict(module, valid)).tolist()  # type: ignore[arg-type]
    return {"events": told.events, "metrics": metrics, "predicted": predicted, "step": trainer.global_step}
