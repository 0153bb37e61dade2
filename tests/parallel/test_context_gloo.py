"""Context parallelism over Gloo: a user's training, evaluation and checkpoint beside one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Llama, token_loss
from models_special import hybrid
from processes import Ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

import autopar
from autopar.runtime.ranks import distributed

ROWS, TIME, VOCABULARY = 4, 24, 40
Result = dict[str, Any]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Llama(2, 32, 4, 2, 48, VOCABULARY, 2 * TIME).double()


def _batches() -> list[tuple[Tensor, Tensor]]:
    """Of two lengths, the first one again behind the other; ignored labels lie unevenly."""
    draw = torch.Generator().manual_seed(1)
    batches = []
    for time in (TIME, 32, TIME):
        x, y = torch.randint(VOCABULARY, (2, ROWS, time), generator=draw)
        y[0, 3:9], y[2, :12] = -100, -100
        batches.append((x, y))
    return batches


def _train(step: Any, model: nn.Module) -> Result:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses, norms = [], []
    for x, y in _batches():
        optimizer.zero_grad()
        losses.append(float(step(x, y).detach()))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    model.eval()
    with torch.no_grad():
        logits = model(_batches()[0][0])
    full = StateDictOptions(full_state_dict=True)
    states: Any = get_optimizer_state_dict(model, optimizer, options=full)["state"]
    return {
        "losses": torch.tensor(losses), "norms": torch.tensor(norms), "logits": logits,
        **{f"weight {name}": value for name, value in get_model_state_dict(model, options=full).items()},
        **{f"state {name}": value["exp_avg_sq"] for name, value in states.items()},
    }  # fmt: skip


def _plain() -> Result:
    model = _model()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = token_loss(model, x, y)
        loss.backward()
        return loss.detach()

    return _train(step, model)


def _parallel(rank: int, mesh: str, options: dict[str, Any]) -> Result:
    model = autopar.parallelize(_model(), mesh, loss_fn=token_loss, **options)
    return _train(model.forward_backward, model)


WAYS: list[tuple[str, dict[str, Any]]] = [
    ("dp=2,cp=2", {"zero": 2}),
    ("cp=2,tp=2", {"attention": "ulysses", "sequence_parallel": True}),
    ("cp=2,pp=2", {"microbatches": 2, "recompute": "full"}),
    ("cp=4", {"attention": "gather"}),
    ("cp=2,ulysses=2", {}),
    ("dp=2,cp=2", {"attention": "ring", "zero": 3}),
]
MORE: list[tuple[str, dict[str, Any]]] = [
    ("cp=4", {"attention": "ring"}),
    ("cp=2,pp=2", {"attention": "ring", "microbatches": 2}),
]


def _batched(rank: int, mesh: str, options: dict[str, Any]) -> Result:
    """The two messages of a step posted as one batch, as NCCL wants them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "has_queues", lambda device: True)
        return _parallel(rank, mesh, options)


@pytest.mark.gloo
@pytest.mark.parametrize("train", [_parallel, _batched])
def test_a_ring_of_two(two: Ranks, train: Any) -> None:
    wanted = _plain()
    for found in two.run(train, "cp=2", {"attention": "ring"}):
        for name, value in wanted.items():
            assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-11), name


def _hybrid(rank: int, mesh: str, options: dict[str, Any]) -> Result:
    model, loss, batch = hybrid()
    parallel = autopar.parallelize(model.double(), mesh, loss_fn=loss, **options)
    parallel.forward_backward(*batch)
    return parallel.full_gradients()


@pytest.mark.gloo
@pytest.mark.parametrize(("mesh", "options"), [("cp=4", {}), ("cp=2,pp=2", {"microbatches": 2, "recompute": "full"})])
def test_convolutions_and_shifts_get_the_rows_beside_their_pieces(
    four: Ranks, mesh: str, options: dict[str, Any]
) -> None:
    model, loss, batch = hybrid()
    model.double()
    loss(model, *batch).backward()
    for found in four.run(_hybrid, mesh, options)[:1]:  # rank 0 has them all
        for name, parameter in model.named_parameters():
            assert torch.allclose(found[name], parameter.grad, rtol=1e-9, atol=1e-11), name


@pytest.mark.gloo
@pytest.mark.parametrize(("mesh", "options"), [*WAYS, *(pytest.param(*way, marks=pytest.mark.slow) for way in MORE)])
def test_training_is_that_of_one_device(four: Ranks, mesh: str, options: dict[str, Any]) -> None:
    wanted = _plain()
    for found in four.run(_parallel, mesh, options):
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            assert torch.allclose(value, wanted[name], rtol=1e-9, atol=1e-11), name
