"""Train a small convolutional net on digits: Adadelta, a schedule by epochs, a test set whose last batch is short."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, 1), nn.Conv2d(4, 8, 3, 1)
        self.fc1, self.fc2 = nn.Linear(128, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(F.max_pool2d(x, 2), 1)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def train(model, train_loader, optimizer, log):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % 1 == 0:
            log.append(loss.item())


def test(model, test_loader, log):
    model.eval()
    test_loss = correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            pred = output.argmax(dim=1, keepdim=True)
            correct += pred.eq(target.view_as(pred)).sum().item()
    log += [test_loss / len(test_loader.dataset), correct]


def main():
    torch.manual_seed(1)
    images = torch.randn(43, 1, 12, 12)
    labels = images.flatten(1).sum(1).long() % 10
    train_loader = DataLoader(TensorDataset(images[:28], labels[:28]), batch_size=8, shuffle=True)
    test_loader = DataLoader(TensorDataset(images[28:], labels[28:]), batch_size=4)
    model, log = Net(), []
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(2):
        train(model, train_loader, optimizer, log)
        test(model, test_loader, log)
        scheduler.step()
    torch.save(model.state_dict(), "ckpt.pt")
    return log


if __name__ == "__main__":
    main()
