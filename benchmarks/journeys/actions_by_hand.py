"""What loops compute of gradients and weights by hand: norms, clips, decays, averages, masks."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from benchmarks.journeys.actions import action
from benchmarks.journeys.side import Side

LIMITS = st.sampled_from([0.01, 0.3, 5.0])


@action("ready", "gradients", limit=LIMITS)
def clip_grad_norm(side: Side, limit: float) -> Tensor:
    return clip_grad_norm_(side.parameters(), limit)


@action("ready", "exact", "gradients", limit=st.sampled_from([0.001, 0.05]))
def clip_grad_value(side: Side, limit: float) -> None:
    clip_grad_value_(side.parameters(), limit)


@action("ready", "gradients", limit=LIMITS)
def clip_by_sums(side: Side, limit: float) -> float:
    """The norm of many scripts: squares, summed to Python numbers."""
    norm = sum(p.grad.pow(2).sum().item() for _, p in side.trained()) ** 0.5
    if norm > limit:
        for _, p in side.each(side.trained()):
            p.grad.mul_(limit / norm)
    return norm


@action("ready", "gradients", limit=LIMITS)
def clip_by_norms(side: Side, limit: float) -> float:
    norm = torch.stack([p.grad.norm() for _, p in side.trained()]).norm()
    if float(norm) > limit:
        for _, p in side.each(side.trained()):
            p.grad.mul_(limit / float(norm))
    return float(norm)


@action("ready", "exact", "gradients", limit=st.sampled_from([0.001, 0.05]))
def clip_by_comparison(side: Side, limit: float) -> None:
    for _, p in side.each(side.trained()):
        p.grad[p.grad > limit] = limit


@action("ready", "exact", "gradients", limit=st.sampled_from([0.001, 0.05]))
def clip_by_where(side: Side, limit: float) -> None:
    for _, p in side.each(side.trained()):
        p.grad.copy_(torch.where(p.grad.abs() > limit, p.grad.sgn() * limit, p.grad))


@action("ready", "gradients", factor=st.sampled_from([0.5, -1.0]))
def scale_gradients(side: Side, factor: float) -> None:
    for i, (_, p) in enumerate(side.each(side.trained())):
        if i % 2:
            p.grad *= factor
        else:
            p.grad = p.grad * factor


@action("ready", "exact", "gradients")
def read_gradients(side: Side) -> list[Tensor]:
    return [p.grad for _, p in side.trained()]


@action("ready")
def largest_weights(side: Side) -> list[float]:
    with torch.no_grad():
        return [p.abs().max().item() for p in side.parameters()]


@action("ready", "exact", how=st.sampled_from(["sum", "mean", "norm", "std", "amin", "prod", "float(sum)", "all"]))
def numbers(side: Side, how: str) -> list[object]:
    """One number of each weight, as a loop logs it."""
    reduce = {
        "sum": lambda p: p.sum().item(),
        "mean": lambda p: p.mean().item(),
        "norm": lambda p: p.norm().item(),
        "std": lambda p: p.std().item() if p.numel() > 1 else 0.0,
        "amin": lambda p: float(p.amin()),
        "prod": lambda p: p.prod().item(),
        "float(sum)": lambda p: float((p * p).sum()),
        "all": lambda p: bool((p < 0.9).all()),
    }[how]
    with torch.no_grad():
        return [reduce(p) for p in side.parameters()]


@action("ready", "gradients")
def norm_of_a_list(side: Side) -> Tensor:
    """By the list functions of torch."""
    return get_total_norm([p.grad for _, p in side.trained()], foreach=True)


@action("ready", "exact")
def equal_to_itself(side: Side) -> list[bool]:
    with torch.no_grad():
        return [torch.equal(p, p.clone()) for p in side.parameters()] + [
            torch.equal(p, p + 1) for p in side.parameters()
        ]


@action("ready", factor=st.sampled_from([0.9, 0.99]))
def decay(side: Side, factor: float) -> None:
    for p in side.each(side.parameters()):
        p.data.mul_(factor)


@action("ready", "exact", limit=st.sampled_from([0.05, 0.2]))
def mask_weights(side: Side, limit: float) -> None:
    with torch.no_grad():
        for p in side.each(side.parameters()):
            p.mul_(p.abs() > limit)


@action("ready", "exact")
def first_row_to_zero(side: Side) -> None:
    with torch.no_grad():
        for p in side.each(side.parameters()):
            if p.ndim:
                p[0].zero_()


@action("ready", scale=st.sampled_from([0.01, 0.1]))
def add_noise(side: Side, scale: float) -> None:
    with torch.no_grad():
        for p in side.each(side.parameters()):
            p.add_(torch.randn_like(p) * scale)


@action("ready", "exact", kind=st.sampled_from(["normal_", "uniform_", "trunc_normal_", "xavier_uniform_"]))
def initialise(side: Side, kind: str) -> None:
    for p in side.each(side.parameters()):
        if p.ndim >= 2:
            getattr(torch.nn.init, kind)(p)


@action("ready", way=st.sampled_from(["lerp", "mul_add", "formula"]))
def average_weights(side: Side, way: str) -> None:
    """A moving average: started the first time, moved after that."""
    with torch.no_grad():
        if side.average is None:
            side.average = {name: p.detach().clone() for name, p in side.model.named_parameters()}
            return
        for name, p in side.each(side.model.named_parameters()):
            if way == "lerp":
                side.average[name].lerp_(p, 0.1)
            elif way == "mul_add":
                side.average[name].mul_(0.9).add_(p, alpha=0.1)
            else:
                side.average[name] = 0.9 * side.average[name] + 0.1 * p


@action("ready", "average")
def take_averages(side: Side) -> None:
    """Evaluate with the averages: they are copied into the weights."""
    assert side.average is not None
    with torch.no_grad():
        for name, p in side.each(side.model.named_parameters()):
            p.copy_(side.average[name])


@action("ready", "exact", "average")
def distance_to_averages(side: Side) -> list[float]:
    assert side.average is not None
    with torch.no_grad():
        return [(p - side.average[name]).norm().item() for name, p in side.model.named_parameters()]
