"""Train a ResNet on images of folders: meters, top-1 and top-5, SGD by steps, validation, checkpoints of the best."""

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        shortcut = [nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)]
        self.downsample = nn.Sequential(*shortcut) if stride != 1 else None

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layer1, self.layer2 = BasicBlock(8, 8, 1), BasicBlock(8, 16, 2)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(16, classes)

    def forward(self, x):
        return self.fc(torch.flatten(self.avgpool(self.layer2(self.layer1(self.stem(x)))), 1))


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0.0

    def update(self, value, n):
        self.sum, self.count = self.sum + value * n, self.count + n

    @property
    def avg(self):
        return self.sum / self.count


def accuracy(output, target, topk):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).float().sum(0) * (100.0 / target.size(0)) for k in topk]


def dataset(rows):
    images = torch.randn(rows, 3, 8, 8)
    return TensorDataset(images, images.mean((2, 3)).abs().mul(100).sum(1).long() % 10)


def train(loader, model, criterion, optimizer):
    losses, top1, top5 = AverageMeter(), AverageMeter(), AverageMeter()
    model.train()
    for images, target in loader:
        output = model(images)
        loss = criterion(output, target)
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        losses.update(loss.item(), images.size(0))
        top1.update(acc1.item(), images.size(0))
        top5.update(acc5.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [losses.avg, top1.avg, top5.avg]


def validate(loader, model, criterion):
    losses, top1 = AverageMeter(), AverageMeter()
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            output = model(images)
            losses.update(criterion(output, target).item(), images.size(0))
            top1.update(accuracy(output, target, topk=(1,))[0].item(), images.size(0))
    return [losses.avg, top1.avg]


def main():
    torch.manual_seed(1)
    train_loader = DataLoader(dataset(20), batch_size=8, shuffle=True)
    val_loader = DataLoader(dataset(11), batch_size=8)
    model = ResNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.1)
    log, best_acc1 = [], -1.0
    for epoch in range(2):
        log += train(train_loader, model, criterion, optimizer)
        log += validate(val_loader, model, criterion)
        scheduler.step()
        if log[-1] > best_acc1:
            best_acc1 = log[-1]
            state = {"epoch": epoch + 1, "best_acc1": best_acc1, "scheduler": scheduler.state_dict()}
            torch.save({**state, "state_dict": model.state_dict()}, "ckpt.pt")
    return log


if __name__ == "__main__":
    main()
