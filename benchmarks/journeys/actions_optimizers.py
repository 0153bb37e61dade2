"""Optimizers: ten of torch.optim and two more, groups, schedulers, zero_grad."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from benchmarks.journeys.actions import action
from benchmarks.journeys.side import OPTIMIZERS, Side

SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 1, 0.7),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "warmup": lambda o: lr_scheduler.LinearLR(o, 0.5, total_iters=3),
    "cycle": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
}


@action("ready", "exact", name=st.sampled_from([name for name in OPTIMIZERS if name not in ("LBFGS", "Rprop")]))
def new_optimizer(side: Side, name: str) -> None:
    side.start(name)


@action(
    "ready",
    "exact",
    name=st.sampled_from(["Adam", "AdamW", "SGD", "Adagrad"]),
    kind=st.sampled_from(["foreach", "fused"]),
)
def new_quick_optimizer(side: Side, name: str, kind: str) -> None:
    side.start(name, **({"amsgrad": False} if name == "Adam" else {}), **{kind: True})


@action("ready", "exact", decay=st.sampled_from([0.1, 0.3]))
def groups(side: Side, decay: float) -> None:
    """Matrices decay, vectors do not."""

    def make(_: nn.Module) -> torch.optim.Optimizer:
        matrices, vectors = _by_dims(side)
        decayed = {"params": matrices, "weight_decay": decay}
        return torch.optim.AdamW([decayed, {"params": vectors, "weight_decay": 0.0, "lr": 0.02}], lr=0.01, eps=1e-6)

    side.use(make)


@action("ready")
def add_group(side: Side) -> None:
    """First the vectors alone, then the rest with another rate."""

    def make(_: nn.Module) -> torch.optim.Optimizer:
        matrices, vectors = _by_dims(side)
        made = torch.optim.SGD(vectors, lr=0.02, momentum=0.5)
        made.add_param_group({"params": matrices, "lr": 0.01})
        return made

    side.use(make)


def _by_dims(side: Side) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    parameters = side.parameters()
    return [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]


@action("ready", "optimizer", "gradients")
def optimizer_step(side: Side) -> None:
    side.step()


@action("ready", "optimizer", set_to_none=st.booleans())
def zero_grad(side: Side, set_to_none: bool) -> None:
    assert side.optimizer is not None
    side.optimizer.zero_grad(set_to_none=set_to_none)


@action("ready", set_to_none=st.booleans())
def zero_grad_of_the_module(side: Side, set_to_none: bool) -> None:
    side.model.zero_grad(set_to_none=set_to_none)


@action("ready", "optimizer", kind=st.sampled_from(sorted(SCHEDULERS)))
def new_scheduler(side: Side, kind: str) -> None:
    side.scheduler = SCHEDULERS[kind](side.optimizer)


@action("ready", "scheduler", "optimizer", "gradients")
def scheduler_step(side: Side) -> list[float]:
    assert side.scheduler is not None
    side.step()
    side.mark()
    side.scheduler.step()
    return side.scheduler.get_last_lr()
