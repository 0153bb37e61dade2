"""Batches and sequences of other sizes: compiled anew, right, and not kept for ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpt import GPT, GPTConfig
from models import square_loss, token_loss
from processes import Ranks
from torch import nn

import autopar
from autopar.errors import BatchError
from autopar.ir.program import record
from autopar.parallel.programs import programs

pytestmark = pytest.mark.gloo


def _plain() -> nn.Module:
    torch.manual_seed(3)
    return GPT(GPTConfig(40, 16, layers=1, heads=4, width=16)).double()


def _train(model: Any, step: Any, batches: list[Any]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for x, y in batches:
        losses.append(float(step(x, y)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _epoch(rank: int, sequence_parallel: bool) -> None:
    """A batch of 6, one of 6 with a longer sequence, one of 6 with an odd one, the last of 5, then 6 again."""
    shapes = [(6, 8), (6, 16), (6, 7), (5, 8), (6, 8)]
    if sequence_parallel:
        shapes.remove((6, 16))  # the odd one is what a split sequence does not take
    generator = torch.Generator().manual_seed(5)
    batches = [(torch.randint(40, s, generator=generator), torch.randint(40, s, generator=generator)) for s in shapes]
    plain = _plain()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = token_loss(plain, x, y)
        loss.backward()
        return loss.detach()

    want = _train(plain, step, batches)
    model = autopar.parallelize(_plain(), "dp=2,tp=2", loss_fn=token_loss, sequence_parallel=sequence_parallel)
    found = _train(model, model.forward_backward, batches)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(want), rtol=1e-10, atol=0)
    whole = model.full_state_dict()
    for name, value in plain.state_dict().items() if rank == 0 else ():
        torch.testing.assert_close(whole[name], value, rtol=1e-8, atol=1e-10, msg=name)
    one = torch.randint(40, (1, 8), generator=generator)
    with torch.no_grad():
        torch.testing.assert_close(model(one), plain(one), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_an_epoch_of_unequal_batches_equals_one_device(four: Ranks, sequence_parallel: bool) -> None:
    four.run(_epoch, sequence_parallel)


def _look_first(rank: int) -> None:
    """The model on one sample, and the loss of three, before the first step: policies, checks before a training."""
    generator = torch.Generator().manual_seed(5)
    (one, _), three, *steps = [
        (torch.randint(40, s, generator=generator), torch.randint(40, s, generator=generator))
        for s in ((1, 8), (3, 8), (6, 8), (6, 8))
    ]
    plain, model = _plain(), autopar.parallelize(_plain(), "dp=2,tp=2", loss_fn=token_loss)
    with torch.no_grad():
        torch.testing.assert_close(model(one), plain(one), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(model.training_loss(*three), token_loss(plain, *three), rtol=1e-9, atol=0)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = token_loss(plain, x, y)
        loss.backward()
        return loss.detach()

    found, want = _train(model, model.forward_backward, steps), _train(plain, step, steps)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(want), rtol=1e-10, atol=0)
    whole = model.full_state_dict()
    for name, value in plain.state_dict().items() if rank == 0 else ():
        torch.testing.assert_close(whole[name], value, rtol=1e-8, atol=1e-10, msg=name)
    assert model.programs[-1].compiled.plan.batch_replicated is False  # the steps are split over dp


def test_a_look_at_one_sample_before_the_training(four: Ranks) -> None:
    four.run(_look_first)


def test_the_first_batch_must_divide() -> None:
    """Else a whole run would be data parallel in name only."""
    with pytest.raises(BatchError, match="which axis 'dp' \\(size 2\\) cannot divide"):
        autopar.compile(nn.Linear(4, 4), "dp=2", loss_fn=square_loss, batch=(torch.randn(5, 4), torch.randn(5, 4)))


def test_programs_that_are_not_used_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "PROGRAMS", 3)
    model = autopar.parallelize(nn.Linear(4, 4), "dp=1", loss_fn=square_loss)
    model._session.agreement.size = 2  # one rank alone compares nothing, and keeps no lines for that
    for rows in (1, 2, 3, 1, 4, 5):
        model.forward_backward(torch.randn(rows, 4), torch.randn(rows, 4))
    assert len(model.programs) == sum(len(each.lines) for each in model._programs.signatures.values()) == 3
    kept = [running.compiled.program for running in model.programs]
    entries = [dict(zip((e.kind for e in p.inputs), p.placeholders, strict=True)) for p in kept]
    rows = [record(found["batch"]).type.shape[0] for found in entries]
    assert rows == [1, 4, 5]
