"""Train a variational autoencoder: noise inside of the model, a loss of sums, samples decoded from a prior."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 32), nn.Linear(32, 4), nn.Linear(32, 4)
        self.fc3, self.fc4 = nn.Linear(4, 32), nn.Linear(32, 64)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 64))
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
    return BCE - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def main():
    torch.manual_seed(1)
    train_loader = DataLoader(torch.rand(20, 1, 8, 8), batch_size=8, shuffle=True)
    test_loader = DataLoader(torch.rand(11, 1, 8, 8), batch_size=8)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    log = []
    for _ in range(2):
        model.train()
        train_loss = 0
        for data in train_loader:
            optimizer.zero_grad()
            recon_batch, mu, logvar = model(data)
            loss = loss_function(recon_batch, data, mu, logvar)
            loss.backward()
            train_loss += loss.item()
            optimizer.step()
        log.append(train_loss / len(train_loader.dataset))
        model.eval()
        test_loss = 0
        with torch.no_grad():
            for data in test_loader:
                recon_batch, mu, logvar = model(data)
                test_loss += loss_function(recon_batch, data, mu, logvar).item()
        log.append(test_loss / len(test_loader.dataset))
        with torch.no_grad():
            sample = model.decode(torch.randn(4, 4)).cpu()
            log.append(sample.view(4, 1, 8, 8).mean().item())
    torch.save(model.state_dict(), "ckpt.pt")
    return log


if __name__ == "__main__":
    main()
