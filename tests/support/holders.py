"""A training script that holds everything from before `parallelize`: run beside itself on the plain module."""

from __future__ import annotations

import copy
import io
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel
from torch.utils.weak import WeakTensorKeyDictionary

Train = Callable[[], Tensor]  # one forward and backward pass; gives the loss
Stage = tuple[str, list[Tensor]]


class Held(nn.Module):
    """Tied weights, lists and dicts of parameters and of modules, a number, odd sizes, one that waits split."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.tied = nn.Linear(6, 16), nn.Linear(16, 3), nn.Linear(6, 16)
        self.wide = nn.Parameter(torch.randn(4096, 16) / 64)  # as large as what does not wait whole (distribute.py)
        self.tied.weight = self.first.weight
        self.scale, self.shifts = nn.Parameter(torch.tensor(0.5)), nn.ParameterList([torch.zeros(5), torch.ones(3)])
        self.more = nn.ParameterDict({"a": nn.Parameter(torch.full((3,), 0.1))})
        self.inside = {"of": [self.last.weight, self.more["a"]]}

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x) * self.wide.sum(0) * self.scale + self.tied(x))
        return (
            F.linear(x, self.inside["of"][0], self.last.bias)
            + self.shifts[1] * self.inside["of"][1]
            + self.shifts[0].sum()
        )


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(3)
    while True:
        yield tuple(torch.randn(8, n, generator=random, dtype=torch.float64) for n in (6, 3))  # type: ignore[misc]


def plain() -> Held:
    torch.manual_seed(5)
    return Held().double()


def whole(value: Any) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)).detach().clone()


def script(base: Held, wrap: Callable[[nn.Module], Any], real: bool = True) -> Iterator[Stage]:
    """What each holder made of the weights, one after the other. real: the module has values before it is wrapped."""
    held, given = list(base.parameters()), batches()
    matrices, others = [p for p in held if p.ndim == 2], [p for p in held if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.1, "lr": 0.02}, {"params": others, "weight_decay": 0.0}]
    lists, loop = (
        torch.optim.AdamW(groups, 0.01, foreach=True),
        torch.optim.SGD(held, 0.05, momentum=0.9, foreach=False),
    )
    fused, later = torch.optim.Adam(held, 0.01, fused=True), torch.optim.Adamax(matrices, 0.02)
    factored, lbfgs = torch.optim.Adafactor(held, 0.02), torch.optim.LBFGS(held, 0.1, max_iter=2, history_size=2)
    schedule = torch.optim.lr_scheduler.StepLR(lists, 1, 0.5)
    made = [lists, loop, fused, later, factored]
    if real:  # gradients and states that are there already
        for _ in range(2):
            loss_fn(base, *next(given)).backward()
            for optimizer in made:
                optimizer.step()
        lbfgs.step(lambda: _closure(lbfgs, lambda: _backward(base, given)))
        loss_fn(base, *next(given)).backward()
    grads = [p.grad for p in held]
    names, keyed, weak = dict(base.named_parameters()), {p: i for i, p in enumerate(held)}, weakref.ref(held[0])
    in_torch = WeakTensorKeyDictionary({p: i for i, p in enumerate(held)})
    average = AveragedModel(base, avg_fn=lambda a, p, _: a + 0.3 * (p - a)) if real else None
    means = [p.detach().clone() for p in held] if real else None
    seen: list[float] = []
    hooks = [held[0].register_hook(lambda g: g * 0.5), held[3].register_post_accumulate_grad_hook(_noted(seen))]
    held[2].no_decay, other = "mine", nn.Linear(16, 3).double() if real else None  # type: ignore[attr-defined]
    if other is not None:
        other.weight = base.last.weight  # a module that is not parallelized
        other.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    model = wrap(base)
    assert all(map(lambda a, b: a is b, held, model.parameters())) and len(held) == len(list(model.parameters()))
    train: Train = lambda: model.train_on(*next(given))  # noqa: E731
    assert held[2].no_decay == "mine" and base.inside["of"][0] is base.last.weight  # type: ignore[attr-defined]
    assert weak() is held[0] and [keyed[p] for p in held] == [in_torch[p] for p in held] == list(range(len(held)))

    def stage(name: str, *more: Any) -> Stage:
        assert all(map(lambda a, b: a is b, held, model.parameters())), name
        return name, [*map(whole, more), *map(whole, held)]

    yield stage("gradients from before", train(), *(p.grad for p in held))
    assert not real or all(p.grad is grad for p, grad in zip(held, grads, strict=True))
    lists.step()
    schedule.step()
    yield stage("AdamW of lists, with groups, states and a schedule", schedule.get_last_lr()[0])
    assert len(seen) == 1
    yield stage("a hook of a gradient that was accumulated", *seen)
    for hook in hooks:
        hook.remove()
    for optimizer in made:
        optimizer.zero_grad()
        numbers = train(), clip_grad_norm_(held, 0.5)
        optimizer.step()
        yield stage(f"{type(optimizer).__name__} with states", *numbers)
    later.add_param_group({"params": others, "lr": 0.01})
    later.step()
    yield stage("add_param_group")
    lbfgs.step(lambda: _closure(lbfgs, train))
    yield stage("LBFGS")
    for p in held:
        p.grad = None
    yield stage(".grad = None", train(), parameters_to_vector(held))
    for p in matrices:
        p.requires_grad_(False)
    before = whole(matrices[0])
    lists.zero_grad()
    yield stage("a list that is frozen", train())
    lists.step()
    assert torch.equal(whole(matrices[0]), before)
    for p in matrices:
        p.requires_grad_(True)
    yield stage("and thawed", train(), *(p.grad for p in held))
    vector_to_parameters(parameters_to_vector(held) * 0.9, held)
    yield stage("vector_to_parameters", *(names[name] for name in names))
    if means is not None and average is not None:
        for mean, p in zip(means, held, strict=True):
            mean.mul_(0.9).add_(p.detach(), alpha=0.1)
        average.update_parameters(model)
        average.update_parameters(model)
        yield stage("averages", *means, *average.parameters())
    if other is not None:
        for p in held:
            p.grad = None
        loss = other(torch.ones(2, 16, dtype=torch.float64)).square().sum()
        loss.backward()
        yield stage("a module that is not parallelized", loss, base.last.weight.grad, other.bias.grad)
    copies = copy.deepcopy(held)
    stream = io.BytesIO()
    torch.save(held[:4], stream)
    stream.seek(0)
    for p, loaded in zip(held, torch.load(stream, weights_only=False), strict=False):
        copies.append(torch.empty_like(p).copy_(loaded))
    yield stage("copies and pickles", *copies)


def _closure(optimizer: torch.optim.Optimizer, train: Train) -> Tensor:
    optimizer.zero_grad()
    return train()


def _backward(model: nn.Module, given: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
    loss = loss_fn(model, *next(given))
    loss.backward()
    return loss.detach()


def _noted(seen: list[float]) -> Callable[[Tensor], None]:
    return lambda p: seen.append(float(p.grad.sum()))  # type: ignore[union-attr]
