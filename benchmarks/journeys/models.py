"""The models of journeys: chains of small blocks, each with something that breaks, and a loss that reads Python.

Tensor names carry their shape: B rows, T positions, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.torch_compat import on_data
from autopar.verification.dtypes import module_in
from benchmarks.journeys.parts import third_of, weighted

TIME, VOCABULARY, EXPERTS = 4, 10, 4
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
Values = Mapping[str, Any]

temperature = 1.0  # a global that the loss reads, and that loops change


class MLP(nn.Module):
    """A residual MLP. `hidden` may be a size that nothing divides."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + self.down(torch.tanh(self.up(x_BTD)))


class Attention(nn.Module):
    """Two heads behind a fused qkv weight: split over tp it is `[3:tp,-]`. No bias of keys, whose gradient is zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x_BTD).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x_BTD + self.out(mixed.transpose(1, 2).flatten(2))


class Multihead(nn.Module):
    """Attention of torch, which sees its weights through views. The bias of its keys has no gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + self.attention(x_BTD, x_BTD, x_BTD, need_weights=False)[0]


class Mixer(nn.Module):
    """A token shift and a causal convolution: each position reads some before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift, self.mix = nn.ZeroPad2d((0, 0, 1, -1)), nn.Parameter(torch.rand(width))
        self.convolution = nn.Conv1d(width, width, 3, groups=width, padding=2)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTD = x_BTD + self.mix * self.shift(x_BTD)
        mixed = self.convolution(h_BTD.transpose(1, 2))[..., : h_BTD.shape[1]].transpose(1, 2)
        return x_BTD + torch.tanh(mixed)


class Recurrence(nn.Module):
    """A gated state that a loop carries over the positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        state_BD, found = torch.zeros_like(x_BTD[:, 0]), []
        for row_BD in x_BTD.unbind(1):
            keep_BD = torch.sigmoid(self.gate(row_BD))
            state_BD = keep_BD * state_BD + (1 - keep_BD) * self.value(row_BD)
            found.append(state_BD)
        return x_BTD + torch.stack(found, 1)


class Core(nn.Module):
    """A recurrence of torch."""

    def __init__(self, width: int, kind: type[nn.RNNBase], is_mirrored: bool = False) -> None:
        super().__init__()
        self.core = kind(width, width // (1 + is_mirrored), batch_first=True, bidirectional=is_mirrored)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + self.core(x_BTD)[0]


class Rotary(nn.Module):
    """Pairs of numbers turned by their position, as complex numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, width)
        self.register_buffer("rates", torch.linspace(0.2, 1.7, width // 2), persistent=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        turns = torch.arange(x_BTD.shape[1], device=x_BTD.device)[:, None] * self.rates
        turned = _complex(x_BTD) * torch.exp(1j * _wide(turns))
        return x_BTD + self.out(torch.view_as_real(turned).flatten(2).to(x_BTD.dtype))


class Spectral(nn.Module):
    """A complex parameter for each pair of numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(width // 2, dtype=torch.complex64))

    def forward(self, x_BTD: Tensor) -> Tensor:
        filtered = _complex(x_BTD) * self.filter
        return x_BTD + torch.view_as_real(filtered).flatten(2).to(x_BTD.dtype)


def _complex(x_BTD: Tensor) -> Tensor:
    return torch.view_as_complex(_wide(x_BTD).unflatten(-1, (-1, 2)).contiguous())


def _wide(x: Tensor) -> Tensor:
    """The same in a float that has complex numbers."""
    return x if x.dtype == torch.float64 else x.float()


class BatchNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.norm(x_BTD.flatten(0, 1)).view_as(x_BTD)


class Frozen(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.linear.weight.requires_grad_(False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + 0.5 * self.linear(x_BTD)


class Unused(nn.Module):
    """Parameters that no step reads, and one number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.never, self.gain = nn.Linear(width, 3), nn.Parameter(torch.tensor(1.25))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.gain * x_BTD


class Twice(nn.Module):
    """One inner module, called twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + self.inner(torch.tanh(self.inner(x_BTD)))


class Average(nn.Module):
    """A buffer that each step in training mode writes."""

    mean: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x_BTD.detach().mean((0, 1)), alpha=0.1)
        return x_BTD - 0.5 * self.mean


class Momentum(nn.Module):
    """A frozen layer that each step in training mode moves to the trained one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fast, self.slow = nn.Linear(width, width), nn.Linear(width, width)
        self.slow.requires_grad_(False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.slow.weight.lerp_(self.fast.weight, 0.1)
                self.slow.bias.data = 0.9 * self.slow.bias.data + 0.1 * self.fast.bias.data
        return x_BTD + 0.5 * torch.tanh(self.fast(x_BTD) - self.slow(x_BTD))


class Queue(nn.Module):
    """Rows that each step in training mode puts where a pointer says, which goes around (MoCo's queue)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.register_buffer("queue", torch.zeros(6, width))
        self.register_buffer("at", torch.zeros(1, dtype=torch.int64))

    def forward(self, x_BTD: Tensor) -> Tensor:
        at = self.at.item()
        if self.training:
            with torch.no_grad():
                self.queue[at : at + 2] = self.inner.weight[:2]
                self.queue[(at + 3) % 6].mul_(0.5)
                self.at[0] = (at + 2) % 6
        return x_BTD + self.inner(x_BTD) * (self.queue[at] + self.queue.mean(0))


class Force(nn.Module):
    """The gradient of an energy, where gradients are on: in training, and in evaluation as the caller has them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return 2 * x_BTD
        at_BTD = x_BTD.detach().requires_grad_()
        energy = torch.tanh(self.inner(at_BTD)).square().sum()
        (force_BTD,) = torch.autograd.grad(energy, at_BTD, create_graph=self.training)
        return x_BTD - 0.1 * force_BTD


class Experts(nn.Module):
    """A loop over experts, each of which takes the rows that chose it. One without rows is left out: by a test, or as
    the loop goes over those that have some alone ("hit", as transformers' models have it, or "unique")."""

    def __init__(self, width: int, over: str) -> None:
        super().__init__()
        self.router, self.over = nn.Linear(width, EXPERTS, bias=False), over
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(EXPERTS))

    def forward(self, x_BTD: Tensor) -> Tensor:
        rows_ND = x_BTD.flatten(0, 1)
        shares_NK, chosen_NK = self.router(rows_ND).softmax(-1).topk(2)
        hot_EKN = F.one_hot(chosen_NK, EXPERTS).permute(2, 1, 0)
        out_ND = torch.zeros_like(rows_ND)
        over: Any = range(EXPERTS)
        if self.over != "all":
            over = chosen_NK.unique() if self.over == "unique" else hot_EKN.sum((-1, -2)).nonzero()
        for e in over:
            at, row = torch.where(e == chosen_NK.T if self.over == "unique" else hot_EKN[e].squeeze(0))
            if row.numel() == 0:
                continue
            out_ND.index_add_(0, row, self.experts[e](rows_ND[row]) * shares_NK[row, at, None])
        return x_BTD + out_ND.view_as(x_BTD)


class Scale(nn.Module):
    """Reads a float and an integer attribute, a plain tensor attribute and a bool: what loops change."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.flipped, self.table = 1.5, False, torch.linspace(0.5, 1.5, width)
        self.tokens = 1  # a count whose square has no 64 bits

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD = self.scale * x_BTD * self.table.to(x_BTD.dtype) * (1 + self.tokens * self.tokens / 1e20)
        return -y_BTD if self.flipped else y_BTD


BLOCKS: Mapping[str, Callable[[int], nn.Module]] = {
    "mlp": lambda width: MLP(width, 2 * width),
    "odd": lambda width: MLP(width, 2 * width - 1),
    "norm": nn.LayerNorm,
    "attention": Attention,
    "multihead": Multihead,
    "mixer": Mixer,
    "recurrence": Recurrence,
    "lstm": lambda width: Core(width, nn.LSTM),
    "gru both ways": lambda width: Core(width, nn.GRU, True),
    "rnn": lambda width: Core(width, nn.RNN),
    "rotary": Rotary,
    "spectral": Spectral,
    "batchnorm": BatchNorm,
    "dropout": lambda width: nn.Dropout(0.25),
    "frozen": Frozen,
    "unused": Unused,
    "twice": Twice,
    "average": Average,
    "momentum": Momentum,
    "queue": Queue,
    "force": Force,
    "scale": Scale,
    "experts": lambda width: Experts(width, "all"),
    "experts hit": lambda width: Experts(width, "hit"),
    "experts unique": lambda width: Experts(width, "unique"),
}


class Chain(nn.Module):
    """Blocks between an input and a head. On tokens the head is the transposed table: one parameter, two names."""

    def __init__(self, blocks: tuple[str, ...], width: int, tied: bool) -> None:
        super().__init__()
        self.gain = 1.0
        self.first = nn.Embedding(VOCABULARY, width) if tied else nn.Linear(width, width)
        self.blocks = nn.ModuleList(BLOCKS[name](width) for name in blocks)
        self.head = nn.Linear(width, VOCABULARY if tied else 3, bias=not tied)
        if tied:
            self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x_BTD = self.first(x)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.gain * self.head(x_BTD)

    # -- what a script calls beside the model itself ------------------------------------------------------------

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))

    def predict(self, x: Tensor) -> Tensor:
        return self(x).softmax(-1)

    def count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def no_weight_decay(self) -> set[str]:
        return {"first.weight"}

    @property
    def largest(self) -> Tensor:
        return self.head.weight.abs().amax()

    def __len__(self) -> int:
        return len(self.blocks) + 2


Anchor = Tensor | tuple[Tensor, Tensor]  # beside its values how much each of them counts


@dataclass
class Built:
    """A plain model with its loss. `set_beta` changes the number in the loss's closure, and anchors are tensors in it,
    by the parameter that the loss draws to each."""

    model: nn.Module
    loss_fn: Callable[..., Any]
    set_beta: Callable[[float], None]
    critics: list[nn.Module]  # of a GAN one, which the loss calls
    generators: list[nn.Module]  # what the loss of the critic calls
    critic_loss: Callable[..., Tensor]
    anchors: dict[str, Anchor]


def _llama() -> nn.Module:
    """One of transformers, whose norms compute in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=12, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=TIME, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def output_of(module: nn.Module, x: Tensor) -> Tensor:
    """What a model gives, out of the object that transformers puts it in."""
    out = module(x)
    return getattr(out, "logits", out)


def unpack(batch: tuple[Any, ...]) -> tuple[Tensor, Tensor, Any]:
    """x, y and a weight (or None) of a batch, in whatever it came."""
    if len(batch) == 1 and isinstance(batch[0], Mapping):
        batch = (batch[0]["x"], batch[0]["y"], batch[0].get("weight"))
    elif len(batch) == 1:
        batch = (batch[0].x, batch[0].y)
    return torch.as_tensor(batch[0]), torch.as_tensor(batch[1]), batch[2] if len(batch) > 2 else None


def _errors(out_BTD: Tensor, y: Tensor) -> Tensor:
    """The error of each position, [B, T]."""
    if y.is_floating_point():
        return (out_BTD - y[..., :3]).square().mean(-1)
    return F.cross_entropy(out_BTD.transpose(1, 2), y, reduction="none")


def _is_coupled(setup: Values) -> bool:
    """True for losses that take samples together, where parts of a batch are a rank's or a micro-batch's alike."""
    goes_forward_first = (
        setup["options"].get("schedule", "1f1b") in ("1f1b", "gpipe") and "slices" not in setup["options"]
    )
    return setup["width"] == 6 and "batch" not in setup and goes_forward_first


@on_data()  # what rounding does to numbers of a generator is nobody's noise
def build(setup: Values) -> Built:
    """The model of a setup: the same weights at every call."""
    torch.manual_seed(setup.get("seed", 0))
    beta, is_tokens, auxiliary = 0.1, setup["head"] != "regress", setup.get("aux", False)
    odd, is_coupled = setup.get("odd", ""), _is_coupled(setup)
    if setup["head"] == "gpt":
        from gpt import GPT, GPTConfig

        model: nn.Module = GPT(GPTConfig(VOCABULARY, TIME, layers=1, heads=2, width=setup["width"]))
    elif setup["head"] == "llama":
        model = _llama()
    else:
        model = Chain(tuple(setup["blocks"]), setup["width"], is_tokens)
    with torch.no_grad():  # ones and zeros hide a bias that is added twice
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)

    def loss_fn(module: nn.Module, x: Any, *others: Any) -> Any:  # x as the module calls it: its dim is then said
        x, y, weight = unpack((x, *others))
        out = output_of(module, x)
        if odd:
            error = weighted(odd, _errors(out, y.transpose(0, 1) if odd == "time-major" else y), weight)
            weight = None
        else:
            error = F.cross_entropy(out.flatten(0, 1), y.flatten()) if is_tokens else F.mse_loss(out, y[..., :3])
        loss = temperature * error + beta * out.pow(2).mean()
        if is_coupled:
            share = out.softmax(-1).flatten(0, -2).mean(0)  # as a mixture's balance: of all samples, for each of them
            loss = loss + 0.1 * share.square().sum()
        if weight is not None:
            loss = loss + weight * out.mean()
        for name, anchor in anchors.items():
            at, importance = anchor if isinstance(anchor, tuple) else (anchor, 1.0)
            loss = loss + 0.02 * (importance * (module.get_parameter(name) - at).abs().square()).sum()
        for critic in critics:
            loss = loss - 0.1 * critic(out).mean()
        return (loss, {"error": error.detach(), "out": out.detach()}) if auxiliary else loss

    def set_beta(value: float) -> None:
        nonlocal beta
        beta = value

    def critic_loss(critic: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        made = generators[0](x).detach()
        return (critic(y) - 1).pow(2).mean() + critic(made).pow(2).mean()

    critics, anchors = list[nn.Module](), dict[str, Anchor]()
    generators = [model]
    if setup.get("gan"):
        critics.append(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double())
    return Built(module_in(model, dtype_of(setup)), loss_fn, set_beta, critics, generators, critic_loss, anchors)


def dtype_of(setup: Values) -> torch.dtype:
    """The dtype of the model of a setup: float64 but for some, and under a precision float32."""
    if low_of(setup) is not None:
        return torch.float32
    return DTYPES[setup.get("dtype", "float64")]


def low_of(setup: Values) -> torch.dtype | None:
    """The float of the precision of a setup."""
    name = setup["options"].get("precision")
    return None if name is None else {"bf16": torch.bfloat16, "fp16": torch.float16}[name]


def is_exact(setup: Values) -> bool:
    """True for what is computed in float64 throughout."""
    return dtype_of(setup) is torch.float64


def set_temperature(value: float) -> None:
    """Change the global that the loss reads."""
    global temperature
    temperature = value


@on_data()
def batch_of(setup: Values, rows: int, seed: int) -> tuple[Tensor, ...]:
    """Rows that no two ranks share, the same for one seed."""
    random, odd = torch.Generator().manual_seed(1000 * rows + seed), setup.get("odd", "")
    dtype = dtype_of(setup)
    if setup["head"] != "regress":
        x, y = (torch.randint(VOCABULARY, (rows, TIME), generator=random) for _ in range(2))
        y[::3, 0] = -100  # ignored, unevenly
    else:
        x = torch.randn(rows, TIME, setup["width"], generator=random, dtype=dtype)
        y = torch.randn(rows, TIME, 3, generator=random, dtype=dtype) + 1
    third = third_of(odd, (rows, TIME), random, dtype)
    return (x, y.transpose(0, 1).contiguous() if odd == "time-major" else y, *third)
