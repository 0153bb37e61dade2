"""Train a DCGAN: two nets, two optimizers, a discriminator that sees real and generated images in turn."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

nz, ngf, ndf = 8, 8, 8


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False), nn.BatchNorm2d(ngf * 2), nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False), nn.BatchNorm2d(ngf), nn.ReLU(True),
            nn.ConvTranspose2d(ngf, 3, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip

    def forward(self, input):
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(3, ndf, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(ndf * 2), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, 1, 4, 1, 0, bias=False), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, input):
        return self.main(input).view(-1, 1).squeeze(1)


def weights_init(m):
    if "Conv" in m.__class__.__name__:
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif "BatchNorm" in m.__class__.__name__:
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


def main():
    torch.manual_seed(999)
    dataloader = DataLoader(TensorDataset(torch.rand(20, 3, 16, 16) * 2 - 1), batch_size=8, shuffle=True)
    netG = Generator()
    netG.apply(weights_init)
    netD = Discriminator()
    netD.apply(weights_init)
    criterion = nn.BCELoss()
    fixed_noise = torch.randn(4, nz, 1, 1)
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    log = []
    for _ in range(2):
        for (real,) in dataloader:
            netD.zero_grad()
            label = torch.full((real.size(0),), 1.0)
            output = netD(real)
            errD_real = criterion(output, label)
            errD_real.backward()
            D_x = output.mean().item()
            noise = torch.randn(real.size(0), nz, 1, 1)
            fake = netG(noise)
            label.fill_(0.0)
            output = netD(fake.detach())
            errD_fake = criterion(output, label)
            errD_fake.backward()
            errD = errD_real + errD_fake
            optimizerD.step()
            netG.zero_grad()
            label.fill_(1.0)
            output = netD(fake)
            errG = criterion(output, label)
            errG.backward()
            optimizerG.step()
            log += [errD.item(), errG.item(), D_x, output.mean().item()]
        log.append(netG(fixed_noise).detach().std().item())
    torch.save({"G": netG.state_dict(), "D": netD.state_dict()}, "ckpt.pt")
    return log


if __name__ == "__main__":
    main()
