"""Optimizer states in the host's memory: any optimizer, its own step, the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import offload_case as case
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import PlanError
from autopar.report.memory.track import Tracker
from autopar.runtime.tiers.offloaded_states import chunks_of, moving_of
from autopar.torch_compat import local_of

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
ON: dict[str, Any] = {"offload": "optimizer"}
o = torch.optim
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda p: o.AdamW(p, lr=1e-2),
    "AdamW foreach": lambda p: o.AdamW(p, lr=1e-2, foreach=True),
    "AdamW fused": lambda p: o.AdamW(p, lr=1e-2, fused=True),
    "Adam amsgrad": lambda p: o.Adam(p, lr=1e-2, amsgrad=True),
    "SGD": lambda p: o.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: o.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
    "NAdam": o.NAdam, "RAdam": o.RAdam, "Adagrad": o.Adagrad, "Adadelta": o.Adadelta, "Adamax": o.Adamax,
    "ASGD": o.ASGD, "Rprop": o.Rprop,
    "Adafactor": lambda p: o.Adafactor(p, lr=1e-2),
    "Muon": lambda p: o.Muon([q for q in p if q.ndim == 2]),
}  # fmt: skip


class Lion(o.Optimizer):
    """A user's: it makes a new tensor for its state at each step."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                held = self.state[p].get("held", torch.zeros_like(p))
                p.add_((0.9 * held + 0.1 * p.grad).sign(), alpha=-group["lr"])
                self.state[p]["held"] = 0.99 * held + 0.01 * p.grad


class Averaged(o.AdamW):
    """A user's, whose step calls that of torch."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


OPTIMIZERS |= {"Lion": Lion, "a subclass": lambda p: Averaged(p, lr=1e-2)}


def part(x: torch.Tensor) -> torch.Tensor:
    return local_of(x) if isinstance(x, DTensor) else x


def train(make: Make, steps: int = 5, **options: Any) -> tuple[Any, torch.optim.Optimizer, torch.Tensor]:
    model, loss_fn, batch = case.deep(4)
    parallel = autopar.parallelize(model.double(), "dp=1", loss_fn=loss_fn, device="cpu", **options)
    optimizer = make(parallel.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = parallel.forward_backward(batch[0].double())
        optimizer.step()
    return parallel, optimizer, loss


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_the_step_to_the_bit(name: str):
    """Weights, gradients and states, by their names."""
    want, plain, loss = train(OPTIMIZERS[name])
    got, other, its_loss = train(OPTIMIZERS[name], **ON)
    assert torch.equal(loss, its_loss)
    for (key, p), q in zip(want.named_parameters(), got.parameters(), strict=True):
        assert torch.equal(local_of(p), local_of(q)) and torch.equal(local_of(p.grad), local_of(q.grad)), key
    mine, its = plain.state_dict(), other.state_dict()
    assert mine["param_groups"] == its["param_groups"] and mine["state"].keys() == its["state"].keys()
    for place, states in mine["state"].items():
        assert states.keys() == its["state"][place].keys()
        for key, value in states.items():
            found = its["state"][place][key]
            same = torch.equal(part(value), part(found)) if isinstance(value, torch.Tensor) else value == found
            assert same and type(value) is type(found), (place, key)


def test_two_chunks_are_on_the_device():
    parallel, optimizer, _ = train(OPTIMIZERS["AdamW"], 2, **ON)
    states = [x for s in optimizer.state.values() for x in s.values() if x.ndim]
    parts = [local_of(x) for x in states]
    largest = max(sum(local_of(p).nbytes for p in chunk) for chunk in chunks_of(list(parallel.parameters())))
    tracker = Tracker()
    tracker.leave_out([*parts, *(local_of(x) for p in parallel.parameters() for x in (p, p.grad))])
    with tracker:
        optimizer.step()
    assert 0 < tracker.peak_bytes() <= 2 * 2 * largest + 3 * largest + 4096, "two chunks, and what one step makes"
    tracker.close()
    assert sum(x.nbytes for x in parts) > 3 * tracker.peak_bytes()
    assert [x.data_ptr() for x in parts] == [
        local_of(x).data_ptr() for s in optimizer.state.values() for x in s.values() if x.ndim
    ], "the same memory at each step"


def test_a_part_stays():
    """The same ones at each step, whichever have a gradient."""
    parallel, optimizer, _ = train(OPTIMIZERS["SGD"], 2, offload={"optimizer": 0.5})
    parameters = list(parallel.parameters())
    moving = moving_of(parameters, 0.5, str)
    assert moving and moving == parameters[: len(moving)] and len(moving) < len(parameters)
    waiting = [local_of(optimizer.state[p]["momentum_buffer"]).data_ptr() for p in parameters]
    for p in parameters[::2]:
        p.grad = None
    optimizer.step()
    assert waiting == [local_of(optimizer.state[p]["momentum_buffer"]).data_ptr() for p in parameters]


def test_hooks_schedulers_and_scalers_see_one_step():
    model, loss_fn, batch = case.deep(4)
    parallel = autopar.parallelize(model, "dp=1", loss_fn=loss_fn, device="cpu", **ON)
    optimizer = o.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    scheduler = o.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    seen: list[str] = []

    def before(opt: Any, args: Any, kwargs: Any) -> None:
        seen.append(f"before {sum(p.grad is not None for p in parallel.parameters())}")
        for p in parallel.parameters():
            p.grad.mul_(0.5)  # as clipping does

    def behind(opt: Any, args: Any, kwargs: Any) -> None:
        seen.append(f"behind {sum(p.grad is not None for p in parallel.parameters())}")

    optimizer.register_step_post_hook(behind)
    plain = case.deep(4)[0]
    reference = o.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    count = len(list(parallel.parameters()))
    for step in range(3):
        parallel.forward_backward(*batch)
        if step == 1:
            optimizer.register_step_pre_hook(before)
        optimizer.step()
        scheduler.step()
        loss_fn(plain, *batch).backward()
        if step >= 1:
            for p in plain.parameters():
                p.grad.mul_(0.5)  # type: ignore[union-attr]
        reference.step()
        reference.param_groups[0]["lr"] *= 0.5
        optimizer.zero_grad(), reference.zero_grad()
    assert seen == [f"behind {count}", f"before {count}", f"behind {count}", f"before {count}", f"behind {count}"]
    assert scheduler.last_epoch == 3 and optimizer.param_groups[0]["lr"] == 0.0125
    for p, q in zip(parallel.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(local_of(p), q, 1e-6, 1e-7)


def test_a_grad_scaler_unscales_all_and_skips_all():
    """torch's own, by hand: a step with an infinite gradient anywhere does nothing."""
    parallel, optimizer, _ = train(OPTIMIZERS["AdamW"], 1, **ON)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))  # it makes its tensors late
    weights = [local_of(p).clone() for p in parallel.parameters()]
    last = local_of(list(parallel.parameters())[-1].grad)
    last[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(a, local_of(p)) for a, p in zip(weights, parallel.parameters(), strict=True))
    last[0] = 1.0
    scaler.step(optimizer)
    scaler.update()
    assert not any(torch.equal(a, local_of(p)) for a, p in zip(weights, parallel.parameters(), strict=True))


def test_an_error_in_a_step_leaves_all_gradients():
    class Broken(o.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if sum(p.grad is not None for group in self.param_groups for p in group["params"]) == 1:
                raise RuntimeError("broken")

    model, loss_fn, batch = case.deep(2)
    parallel = autopar.parallelize(model, "dp=1", loss_fn=loss_fn, device="cpu", **ON)
    optimizer = Broken(parallel.parameters(), lr=0.1)
    parallel.forward_backward(*batch)
    with pytest.raises(RuntimeError, match="broken"):
        optimizer.step()
    assert all(p.grad is not None for p in parallel.parameters())


def test_states_load_and_go_on():
    first, optimizer, _ = train(OPTIMIZERS["AdamW"], 3, **ON)
    saved, weights = copy.deepcopy(optimizer.state_dict()), first.full_state_dict()
    want, _, loss = train(OPTIMIZERS["AdamW"], 5)
    model, loss_fn, batch = case.deep(4)
    parallel = autopar.parallelize(model.double(), "dp=1", loss_fn=loss_fn, device="cpu", **ON)
    parallel.load_state_dict(weights)
    other = OPTIMIZERS["AdamW"](parallel.parameters())
    other.load_state_dict(saved)
    for _ in range(2):
        other.zero_grad()
        its_loss = parallel.forward_backward(batch[0].double())
        other.step()
    assert torch.equal(loss, its_loss)
    for p, q in zip(want.parameters(), parallel.parameters(), strict=True):
        assert torch.equal(local_of(p), local_of(q))


# -- what is refused --------------------------------------------------------------------------------------------------


class Counting(o.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step()


class Strict(o.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert all(p.grad is not None for group in self.param_groups for p in group["params"]), "no gradient"
        super().step()


def refused(make: Make, *args: Any) -> str:
    model, loss_fn, batch = case.deep(2)
    parallel = autopar.parallelize(model, "dp=1", loss_fn=loss_fn, device="cpu", **ON)
    optimizer = make(parallel.parameters())
    parallel.forward_backward(*batch)
    before = {name: local_of(p).clone() for name, p in parallel.named_parameters()}
    with pytest.raises(PlanError) as caught:
        optimizer.step(*args)
    for name, p in parallel.named_parameters():
        assert torch.equal(before[name], local_of(p)) and p.grad is not None, name
    return str(caught.value)


COUNTS = (
    "offload=\"optimizer\": Counting.step() changes param_groups[0]['k'] once a call, and a few parameters step "
    "at a time here, each by a call. Keep that in the states of parameters, or leave offload out."
)


def test_what_is_refused_says_why_and_changes_nothing():
    assert refused(o.LBFGS, lambda: 0.0) == (
        'offload="optimizer": LBFGS.step(closure) needs all parameters at once, and a few step at a time here. Call '
        "step() without a closure, by an optimizer that needs none (all of torch.optim but LBFGS), or leave offload "
        "out."
    )
    for more in ({}, {"k": 0}, {"k": torch.tensor(0)}):
        counting = lambda p, more=more: Counting([{"params": list(p), **more}], lr=0.1)  # noqa: E731
        assert refused(counting) == COUNTS
    assert refused(lambda p: Strict(p, lr=0.1)) == (
        'offload="optimizer": Strict.step() fails where parameters have no gradient, and a few step at a time here, '
        "while the others seem to have none (AssertionError). Let it pass over parameters without a gradient, or leave "
        "offload out."
    )
