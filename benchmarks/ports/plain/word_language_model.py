"""Train a recurrent language model by truncated backpropagation: hidden states carried along, updates by hand."""

import math

import torch
from torch import nn

ntokens, ninp, nhid, nlayers, bptt, clip = 40, 16, 16, 2, 8, 0.25


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(ntokens, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers)
        self.decoder = nn.Linear(nhid, ntokens)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.encoder(input), hidden)
        return torch.log_softmax(self.decoder(output).view(-1, ntokens), dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return (weight.new_zeros(nlayers, bsz, nhid), weight.new_zeros(nlayers, bsz, nhid))


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous()


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


def get_batch(source, i):
    seq_len = min(bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


def evaluate(model, criterion, source):
    model.eval()
    total_loss = 0.0
    hidden = model.init_hidden(source.size(1))
    with torch.no_grad():
        for i in range(0, source.size(0) - 1, bptt):
            data, targets = get_batch(source, i)
            output, hidden = model(data, hidden)
            hidden = repackage_hidden(hidden)
            total_loss += len(data) * criterion(output, targets).item()
    return total_loss / (len(source) - 1)


def train(model, criterion, source, lr):
    model.train()
    losses = []
    hidden = model.init_hidden(source.size(1))
    for i in range(0, source.size(0) - 1, bptt):
        data, targets = get_batch(source, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        losses.append(loss.item())
    return losses


def main():
    torch.manual_seed(1111)
    words = torch.arange(121) * 7 % ntokens
    train_data, val_data = batchify(words, 6), batchify(words[:60], 4)
    model = RNNModel()
    criterion = nn.NLLLoss()
    lr, best_val_loss, log = 2.0, None, []
    for _ in range(2):
        log += train(model, criterion, train_data, lr)
        val_loss = evaluate(model, criterion, val_data)
        log += [val_loss, math.exp(val_loss)]
        if not best_val_loss or val_loss < best_val_loss:
            torch.save(model.state_dict(), "ckpt.pt")
            best_val_loss = val_loss
        else:
            lr /= 4.0
    return log


if __name__ == "__main__":
    main()
