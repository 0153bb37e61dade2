"""Train a LightningModule by Lightning's Trainer: a schedule, clipping, metrics of validation, a checkpoint."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
        self.losses = []

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        output = self(x)
        self.log("val_loss", F.cross_entropy(output, y))
        self.log("val_acc", (output.argmax(-1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)]


def main():
    torch.manual_seed(0)
    x = torch.randn(39, 12)
    y = x[:, :4].argmax(-1)
    module = Classifier()
    trainer = L.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0, gradient_clip_val=0.5,
    )  # fmt: skip
    train_loader = DataLoader(TensorDataset(x[:24], y[:24]), batch_size=8, shuffle=True)
    trainer.fit(module, train_loader, DataLoader(TensorDataset(x[24:], y[24:]), batch_size=8))
    torch.save(module.model.state_dict(), "ckpt.pt")
    return module.losses + [trainer.callback_metrics[name].item() for name in ("val_loss", "val_acc")]


if __name__ == "__main__":
    main()
