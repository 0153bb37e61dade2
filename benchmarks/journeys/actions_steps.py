"""Steps: batches of other sizes and in other containers, accumulation, evaluation, metrics."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.journeys.actions import action
from benchmarks.journeys.parts import RANKS, ROWS, part_of
from benchmarks.journeys.side import SCALE, Side, parallel

SEEDS = st.integers(0, 5)


class BatchEncoding(Mapping[str, Any]):
    """A mapping that is no dict, as those of transformers."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "data":
            raise AttributeError(name)
        return self.data[name]


@dataclasses.dataclass
class Rows:
    x: Tensor
    y: Tensor


Named = collections.namedtuple("Named", ["x", "y"])

CONTAINERS: Mapping[str, Any] = {
    "dict": lambda x, y: ({"x": x, "y": y},),
    "dataclass": lambda x, y: (Rows(x, y),),
    "namedtuple": lambda x, y: (Named(x, y),),
    "mapping": lambda x, y: (BatchEncoding({"x": x, "y": y}),),
    "namespace": lambda x, y: (types.SimpleNamespace(x=x, y=y),),
    "arrays": lambda x, y: (x.numpy(), y.numpy()),
    "with a number": lambda x, y: ({"x": x, "y": y, "weight": 0.25},),
    "twice": lambda x, y: (x, x),
    "twice in a dict": lambda x, y: ({"x": x, "y": x},),
}
NUMBERS: Mapping[str, Callable[[int], Any]] = {
    "float": lambda i: 0.5 * i,
    "int": lambda i: i,
    "tensor": lambda i: torch.tensor(0.5 * i),
}


@action("ready", seed=SEEDS)
def forward_backward(side: Side, seed: int) -> Tensor:
    return side.forward_backward(*side.batch(ROWS, seed))


@action("ready", seed=SEEDS)
def backward_by_hand(side: Side, seed: int) -> Tensor:
    return side.forward_backward(*side.batch(ROWS, seed), by_hand=True)


@action("ready", "exact", seed=SEEDS)
def ask_for_gradients(side: Side, seed: int) -> list[Tensor]:
    """Gradients by themselves, of a loss beside a penalty, as methods that weigh tasks take them."""
    trained = [p for p in side.parameters() if p.requires_grad]
    loss = side.loss(*side.batch(ROWS, seed)) + 0.1 * trained[0].abs().sum()
    found = torch.autograd.grad(loss, trained, allow_unused=True)
    return [loss.detach(), *(torch.zeros_like(p) if g is None else g for p, g in zip(trained, found, strict=True))]


@action("ready", seed=SEEDS, by_hand=st.booleans())
def gradients_of_the_batch(side: Side, seed: int, by_hand: bool) -> list[Tensor]:
    """A step on what a script computed or perturbs: adversarial samples, a net in front, a prompt that is trained."""
    batch = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in side.batch(ROWS, seed))
    loss = side.forward_backward(*batch, by_hand=by_hand)
    found = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in batch)
    if side.batch_kind == "ddp" and side.setup.get("odd"):  # what all ranks share has another gradient on each
        return [loss]
    if side.is_parallel or side.marks == side.stop:
        return [loss, *found]
    if side.low is torch.float16:
        found = tuple(each / SCALE for each in found)
    if not side.has_parts:
        return [loss, *found]
    own = part_of(side.setup, found, dist.get_rank())  # under DDP of the rank's own loss, and not of the mean of all
    return [loss, *(each * RANKS if side.batch_kind == "ddp" else each for each in own)]


@action("ready", "optimizer", seed=SEEDS)
def train(side: Side, seed: int) -> Tensor:
    """A whole step of a loop."""
    assert side.optimizer is not None
    side.optimizer.zero_grad()
    loss = side.forward_backward(*side.batch(ROWS, seed))
    side.step()
    return loss


@action("ready", "stepped", seed=SEEDS)
def last_batch(side: Side, seed: int) -> Tensor:
    """The few rows at the end of an epoch."""
    return side.forward_backward(*side.batch(side.setup["rows"], seed))


@action("ready", "!odd", "!ddp", seed=SEEDS, kind=st.sampled_from(sorted(CONTAINERS)))
def in_a_container(side: Side, seed: int, kind: str) -> list[Tensor]:
    """Two batches of one container, one after the other."""
    return [side.forward_backward(*CONTAINERS[kind](*side.batch(ROWS, seed + i))) for i in range(2)]


@action("ready", "!odd", seed=SEEDS, kind=st.sampled_from(sorted(NUMBERS)))
def anneal_an_argument(side: Side, seed: int, kind: str) -> list[Tensor]:
    """A number beside the batch that each step changes, as the weight of a KL term."""
    return [side.forward_backward(*side.batch(ROWS, seed), NUMBERS[kind](i)) for i in range(3)]


@action("ready", "fp16", "!hook watching", seed=SEEDS)
def overflow(side: Side, seed: int) -> Tensor:
    """A step whose scaled gradients overflow, of which nothing is left."""
    try:
        if side.is_parallel:
            parallel(side).loss_scale.scale = 2.0**60
        return side.forward_backward(*side.batch(ROWS, seed))
    finally:
        if side.is_parallel:
            parallel(side).loss_scale.scale = SCALE
        elif side.marks != side.stop:
            side.model.zero_grad()


@action("ready", seed=SEEDS, parts=st.integers(2, 3))
def accumulate(side: Side, seed: int, parts: int) -> list[Tensor]:
    return [side.forward_backward(*side.batch(ROWS, seed + i)) for i in range(parts)]


@action("ready", seed=SEEDS)
def evaluate(side: Side, seed: int) -> Tensor:
    """The outputs of a batch in eval mode."""
    with side.in_mode(False), torch.no_grad():
        return side.forward(side.batch(ROWS, seed)[0])


@action("ready", seed=SEEDS, mode=st.booleans())
def validate(side: Side, seed: int, mode: bool) -> Tensor:
    """The loss of a batch that is not trained on, in train and in eval mode."""
    with side.in_mode(mode):
        return side.validation(*side.batch(ROWS, seed))


@action("ready", "aux", seed=SEEDS)
def metrics(side: Side, seed: int) -> Any:
    """What a loss function returns beside the loss."""
    loss = side.forward_backward(*side.batch(ROWS, seed))
    found = dict(side.aux)
    return [loss, found if side.is_parallel else {name: side.rows_of_rank(value) for name, value in found.items()}]
