"""A module with everything that a class of the user's may have, and what must be the same of a parallel one."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar


class Base(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.config = SimpleNamespace(width=width)
        self.tokens, self.recurrent = nn.Embedding(12, width), nn.GRU(width, width, batch_first=True)

    def encode(self, x: Tensor) -> Tensor:
        """Tokens to features."""
        return self.recurrent(self.tokens(x))[0]  # type: ignore[no-any-return]


class Net(Base):
    """Every kind of thing that a class of the user's may have."""

    version = 3

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.norm, self.attention = nn.BatchNorm1d(width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.head, self.scale = nn.Linear(width, 12), nn.Parameter(torch.tensor(2.0))
        self.register_buffer("seen", torch.zeros(()))
        self.history: list[int] = []
        self._secret = 5

    def forward(self, x: Tensor, scale: float = 1.0, *, shift: int = 0) -> Tensor:
        h = self.encode(x)
        h = self.norm(h.flatten(0, 1)).view_as(h)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.head(h) * self.scale * scale + shift  # type: ignore[no-any-return]

    def encode(self, x: Tensor, twice: bool = False) -> Tensor:
        """Tokens to features, by way of the class below."""
        h = super().encode(x).tanh()
        return h * 2 if twice else h

    def generate(self, x: Tensor, count: int = 2) -> Tensor:
        """Calls the model itself."""
        self.eval()
        for _ in range(count):
            x = torch.cat([x[:, 1:], self(x)[:, -1].argmax(-1, keepdim=True)], 1)
        return x

    def sample(self, x: Tensor) -> Tensor:
        return self.forward(x, shift=1).softmax(-1)

    def configure_optimizers(self, rate: float) -> torch.optim.Optimizer:
        decayed = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim <= 1]
        return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest}], lr=rate)

    def no_weight_decay(self) -> set[str]:
        return {"tokens.weight"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {"coarse": coarse}

    def num_params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def penalty(self) -> Tensor:
        return torch.stack([p.square().sum() for p in self.parameters()]).sum()

    def remember(self, number: int) -> Any:
        self.history.append(number)
        self.last = number
        return self

    def logits_of(self, word: int) -> Tensor:
        return F.linear(torch.ones(2, self.config.width, dtype=self.scale.dtype), self.head.weight[word : word + 2])

    def branches(self) -> int:
        return 1 if self.head.weight.sum() > 0 and float(self.scale) > 1 else 2

    def names(self) -> Iterator[str]:
        for name, _ in self.named_parameters():
            yield name

    def made(self) -> tuple[nn.Module, nn.Module]:
        return self.__class__(4), type(self)(4)

    @torch.no_grad()
    def reset(self) -> None:
        nn.init.constant_(self.head.weight, 0.25)
        self.scale.fill_(1.5)
        self.seen += 1

    @classmethod
    def build(cls, width: int) -> nn.Module:
        return cls(width)

    @staticmethod
    def double_of(x: int) -> int:
        return 2 * x

    @property
    def width(self) -> int:
        return self.config.width  # type: ignore[no-any-return]

    @width.setter
    def width(self, value: int) -> None:
        self.config.width = value

    @property
    def largest(self) -> Tensor:
        return self.head.weight.abs().amax()

    @functools.cached_property
    def table(self) -> list[int]:
        return [self.version, self._secret]

    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: int) -> nn.Module:
        return list(self.children())[at]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.children())

    def __contains__(self, name: str) -> bool:
        return name in self._modules

    def __enter__(self) -> Any:
        self.history.append(-1)
        return self

    def __exit__(self, *_: Any) -> None:
        self.history.append(-2)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def tokens() -> Tensor:
    return torch.randint(0, 12, (4, 5), generator=torch.Generator().manual_seed(1))


def pair(mesh: str = "dp=1", **options: Any) -> tuple[Net, Any]:
    torch.manual_seed(0)
    plain = Net().double()
    return plain, autopar.parallelize(copy.deepcopy(plain), mesh, loss_fn=loss, **options)


def entered(model: Any) -> Any:
    with model as inside:
        return inside is model, list(model.history)


def groups(model: Any) -> Any:
    optimizer = model.configure_optimizers(0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    return [([names[id(p)] for p in group["params"]], group["weight_decay"]) for group in optimizer.param_groups]


# What gives the same of a plain and of a parallel model.
SAME: dict[str, Callable[[Any], Any]] = {
    "a method": lambda m: m.encode(tokens()),
    "its options": lambda m: m.encode(tokens(), twice=True),
    "a method that calls the model": lambda m: m.generate(tokens()),
    "a method that calls forward": lambda m: m.sample(tokens()),
    "an optimizer": groups,
    "a set": lambda m: m.no_weight_decay(),
    "asked for by name": lambda m: getattr(m, "group_matcher", None)(coarse=True),
    "a default": lambda m: (getattr(m, "nothing", 7), hasattr(m, "nothing"), hasattr(m, "no_weight_decay")),
    "a count": lambda m: m.num_params(),
    "a sum over parameters": lambda m: m.penalty(),
    "a functional call on a part": lambda m: m.logits_of(3),
    "a branch on values": lambda m: m.branches(),
    "a generator": lambda m: list(m.names()),
    "returns itself": lambda m: (m.remember(3) is m, m.history, m.last),
    "others of the class": lambda m: [type(other) for other in m.made()],
    "a class method": lambda m: type(m.build(4)),
    "a static method": lambda m: m.double_of(4),
    "a class attribute": lambda m: m.version,
    "a property": lambda m: m.width,
    "a property of a parameter": lambda m: m.largest,
    "a cached property": lambda m: m.table is m.table and m.table,
    "a private name": lambda m: m._secret,
    "its length": lambda m: (len(m), bool(m)),
    "an item": lambda m: type(m[1]),
    "items": lambda m: [type(child) for child in m],
    "contains": lambda m: ("head" in m, "tail" in m),
    "a context": entered,
    "its class": lambda m: (isinstance(m, Net), isinstance(m, Base), m.__class__ is Net, m.__class__.__name__),
    "a signature": lambda m: str(inspect.signature(m.forward)),
    "all arguments": lambda m: inspect.getfullargspec(m.forward).args[-2:],
    "the signature of a method": lambda m: str(inspect.signature(m.encode)),
    "a bound method": lambda m: (inspect.ismethod(m.encode), m.encode.__self__ is m, m.forward.__self__ is m),
    "a docstring": lambda m: (m.encode.__doc__, m.forward.__doc__, m.encode.__name__),
    "its names": lambda m: {"encode", "width", "head", "seen", "scale", "config", "version", "train"} - {*dir(m)},
    "a function of torch on a part": lambda m: m.head(torch.ones(2, 8, dtype=torch.float64)),
    "a part by name": lambda m: type(m.get_input_embeddings()),
}
