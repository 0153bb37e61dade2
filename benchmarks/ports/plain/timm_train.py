"""Train a vision transformer of timm: its optimizer with layer decay, mixup, a schedule, an average of the weights."""

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, ModelEmaV3, accuracy, dispatch_clip_grad
from torch.utils.data import DataLoader, TensorDataset


def validate(model, loader, loss_fn):
    losses, top1 = AverageMeter(), AverageMeter()
    model.eval()
    with torch.no_grad():
        for input, target in loader:
            output = model(input)
            losses.update(loss_fn(output, target).item(), input.size(0))
            top1.update(accuracy(output, target, topk=(1,))[0].item(), input.size(0))
    return [losses.avg, top1.avg]


def main():
    torch.manual_seed(42)
    model = timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=4,
                              num_classes=10)  # fmt: skip
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75)
    scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=2, warmup_epochs=1, warmup_lr=1e-4)
    model_ema = ModelEmaV3(model, decay=0.9)
    mixup_fn = Mixup(mixup_alpha=0.2, num_classes=10, label_smoothing=0.1)
    train_loss_fn, validate_loss_fn = SoftTargetCrossEntropy(), torch.nn.CrossEntropyLoss()
    images, labels = torch.randn(35, 3, 16, 16), torch.arange(35) % 10
    loader_train = DataLoader(TensorDataset(images[:24], labels[:24]), batch_size=8, shuffle=True)
    loader_eval = DataLoader(TensorDataset(images[24:], labels[24:]), batch_size=8)
    num_updates, log = 0, []
    for epoch in range(2):
        model.train()
        for input, target in loader_train:
            input, target = mixup_fn(input, target)
            output = model(input)
            loss = train_loss_fn(output, target)
            optimizer.zero_grad()
            loss.backward()
            dispatch_clip_grad(model.parameters(), value=1.0, mode="norm")
            optimizer.step()
            num_updates += 1
            model_ema.update(model, step=num_updates)
            scheduler.step_update(num_updates=num_updates, metric=loss.item())
            log.append(loss.item())
        log += validate(model, loader_eval, validate_loss_fn)
        log += validate(model_ema.module, loader_eval, validate_loss_fn)
        scheduler.step(epoch + 1, log[-1])
    torch.save({"model": model.state_dict(), "ema": model_ema.module.state_dict()}, "ckpt.pt")
    return log


if __name__ == "__main__":
    main()
