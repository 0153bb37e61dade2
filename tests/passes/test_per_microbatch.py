"""`autopar.per_microbatch`: the mean of a value of each micro-batch, beside a loop of plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.compiler.check_options import options_of
from autopar.compiler.meshes import mesh_of
from autopar.errors import AutoparError, BatchError, CaptureError, MeshError
from autopar.ir.ops.ops import op
from autopar.report.memory.within_memory import compile_step
from autopar.verification.plain import Plain

torch.manual_seed(0)
X = torch.randn(12, 3, 6, dtype=torch.float64)
Y = torch.tensor([[0, 1, 2], [3, 0, 0], [0, 0, 0], [4, 4, 1]] * 3)  # label 0 counts for nothing: parts differ


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out


NET = Router().double()


def balance(logits: Tensor) -> Tensor:
    p = logits.softmax(-1)
    chosen = F.one_hot(p.topk(2, -1).indices, 5).to(p.dtype)
    return (chosen.sum((0, 1)) / len(p) * p.mean(0)).sum() * 5


def of_tokens(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean over the tokens that count in a micro-batch, and a balance loss of its tokens."""
    out = model(x).flatten(0, 1)
    mean: Tensor = autopar.per_microbatch(lambda o, t: F.cross_entropy(o, t, ignore_index=0), out, y.flatten())
    return mean + 0.1 * autopar.per_microbatch(balance, out)


def with_negatives(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Each sample beside the others of its micro-batch."""

    def info_nce(z: dict[str, Tensor]) -> Tensor:
        scores = F.normalize(z["a"], dim=-1) @ F.normalize(z["b"], dim=-1).T
        return F.cross_entropy(scores, torch.arange(len(scores)))

    out = model(x)
    value: Tensor = autopar.per_microbatch(info_nce, {"a": out[:, 0], "b": out[:, 1]})
    return value


def of_the_batch(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A value of the whole batch beside one of each micro-batch."""
    out = model(x)
    means: Tensor
    means, biggest = autopar.per_microbatch(lambda z: (z.mean((0, 1)).square(), z.amax()), out)
    return means.sum() + biggest + out.square().mean()


LOSSES: dict[str, Callable[..., Tensor]] = {f.__name__: f for f in (of_tokens, with_negatives, of_the_batch)}


def parts_of(loss_fn: Callable[..., Tensor], count: int) -> tuple[Tensor, dict[str, Tensor]]:
    """What a trainer gives that runs the plain loss on each part of the batch and takes the mean."""
    model = copy.deepcopy(NET)
    losses = [loss_fn(model, x, y) for x, y in zip(X.chunk(count), Y.chunk(count), strict=True)]
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.detach(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("name", LOSSES)
def test_the_plain_side_is_a_loop_over_micro_batches(name: str) -> None:
    wanted, gradients = parts_of(LOSSES[name], 6)
    plain = Plain(copy.deepcopy(NET), LOSSES[name], lambda ps: torch.optim.SGD(ps, 0.1), microbatches=6)
    found = plain.forward_backward((X, Y), {}, torch.tensor([0, 0]))
    torch.testing.assert_close(found["loss", "loss"], wanted, rtol=1e-13, atol=0)
    for key, gradient in gradients.items():
        torch.testing.assert_close(found["gradient", key], gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("mesh, options", [
    ("dp=2", {}), ("dp=2,tp=2", {"microbatches": 3}), ("fsdp=2", {"microbatches": 2, "zero": 3}), ("tp=3", {}),
    ("pp=2,dp=2", {"microbatches": 3, "schedule": "1f1b"}), ("pp=2", {}), ("dp=3", {"recompute": "full"}),
])  # fmt: skip
def test_it_is_verified(name: str, mesh: str, options: dict[str, Any]) -> None:
    report = autopar.verify(NET, mesh, batch=(X, Y), loss_fn=LOSSES[name], **options)
    assert report.ok, str(report)


@pytest.mark.parametrize("mesh, options, count", [
    ("dp=2,tp=2", {"microbatches": 3}, 6), ("fsdp=2,dp=3", {}, 6), ("pp=2", {}, 6), ("tp=2", {}, 1), ("cp=3", {}, 1),
])  # fmt: skip
def test_how_many_there_are(mesh: str, options: dict[str, Any], count: int) -> None:
    """Of all data ranks; without a word as many as a pipeline takes."""
    captured, _ = compile_step(NET, of_tokens, (X, Y), {}, mesh_of(mesh), options_of(**options))
    calls = [node.args[1] for node in captured.program.calls() if node.target is op("in_microbatches")]
    assert set(calls) == {count}


def test_a_step_is_the_loop_also_where_the_batch_gets_smaller() -> None:
    model = autopar.parallelize(copy.deepcopy(NET), "dp=1", loss_fn=with_negatives, microbatches=2)
    for rows, count in ((12, 2), (8, 2), (9, 3), (12, 2)):  # of 9 rows micro-batches have 3 each
        loss = model.forward_backward(X[:rows], Y[:rows])
        parts = zip(X[:rows].chunk(count), Y[:rows].chunk(count), strict=True)
        wanted = torch.stack([with_negatives(NET, x, y) for x, y in parts]).mean()
        torch.testing.assert_close(loss.detach(), wanted.detach(), rtol=1e-13, atol=0)


def test_outside_of_a_step_it_is_the_function() -> None:
    assert autopar.per_microbatch(lambda x: x.sum(), X) == X.sum()


def shuffled(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    return autopar.per_microbatch(balance, model(x).flatten(0, 1).flip(0))


def time_first(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    return autopar.per_microbatch(balance, model(x).transpose(0, 1).flatten(0, 1))


def samples_in_dim_1(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    return autopar.per_microbatch(lambda z: z.mean(), model(x).transpose(0, 1).repeat(4, 1, 1))


def few_rows(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    return autopar.per_microbatch(lambda z: z.mean(), model(x)[:7])


def no_rows(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    return autopar.per_microbatch(lambda z: z, model(x).mean())


def nothing(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    return autopar.per_microbatch(lambda: model(x).mean())


@pytest.mark.parametrize("loss_fn, kind, words", [
    (shuffled, BatchError, "rows that are not the samples of the batch one by one"),
    (time_first, BatchError, "its rows have 3 parts with all samples in each"),
    (samples_in_dim_1, BatchError, "its samples lie in dim 1"),
    (few_rows, BatchError, "7 rows are not those of 4 micro-batches"),
    (no_rows, CaptureError, "was given a tensor without dims"),
    (nothing, CaptureError, "it needs a row for each sample"),
])  # fmt: skip
def test_what_is_refused(loss_fn: Any, kind: type[AutoparError], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        compile_step(NET, loss_fn, (X, Y), {}, mesh_of("dp=2"), options_of(microbatches=2))
    assert "test_per_microbatch.py" in str(caught.value)
    assert "autopar.per_microbatch" in str(caught.value)


def test_a_plan_cannot_choose_their_number() -> None:
    with pytest.raises(MeshError, match="Write a mesh and microbatches= in place of a plan"):
        autopar.parallelize(copy.deepcopy(NET), "auto", loss_fn=of_tokens).forward_backward(X, Y)


class Drawing(nn.Module):
    """Numbers of numpy in each step, and layers that a coin leaves out."""

    def __init__(self, drops: bool) -> None:
        super().__init__()
        self.drops, self.layers = drops, nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.tensor(np.random.rand(6) > 0.5)
        for layer in self.layers:
            if not (self.drops and torch.rand([]) < 0.5):
                x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize(("mesh", "drops"), [("dp=2", True), ("pp=2", False)])
def test_draws_of_the_host_and_coins_stay_those_of_the_step(mesh: str, drops: bool) -> None:
    """Red before: what vmap makes was taken for numbers of the host, and left-out weights had gradients of zeros; a
    capture for another number of micro-batches drew other numbers."""

    def loss_fn(model: nn.Module, x: Tensor) -> Any:
        return autopar.per_microbatch(lambda y: y.square().mean().square(), model(x))

    torch.manual_seed(0)
    report = autopar.verify(Drawing(drops), mesh, loss_fn=loss_fn, batch=(torch.randn(12, 6),))
    assert report.ok, report
