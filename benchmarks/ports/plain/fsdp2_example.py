"""Train a small transformer on random tokens, save model and optimizer, load them into new ones and go on."""

import torch
import torch.nn.functional as F
from torch import nn

vocab_size, dim, n_heads, n_layers, length = 32, 32, 4, 3, 16


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.w1, self.w2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        h = self.attention_norm(x)
        q, k, v = (w(h).unflatten(-1, (n_heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.w2(F.gelu(self.w1(self.ffn_norm(x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings, self.pos_embeddings = nn.Embedding(vocab_size, dim), nn.Embedding(length, dim)
        self.layers = nn.ModuleList(Layer() for _ in range(n_layers))
        self.norm, self.output = nn.LayerNorm(dim), nn.Linear(dim, vocab_size, bias=False)
        self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens):
        x = self.tok_embeddings(tokens) + self.pos_embeddings(torch.arange(tokens.size(1)))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def train(model, optim, steps):
    losses = []
    for _ in range(steps):
        x = torch.randint(0, vocab_size, (8, length))
        loss = model(x).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def main():
    torch.manual_seed(0)
    log = []
    for round_ in range(2):
        model = Transformer()
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)
        if round_:
            state = torch.load("ckpt.pt")
            model.load_state_dict(state["model"])
            optim.load_state_dict(state["optim"])
        log += train(model, optim, 3)
        torch.save({"model": model.state_dict(), "optim": optim.state_dict()}, "ckpt.pt")
    return log


if __name__ == "__main__":
    main()
