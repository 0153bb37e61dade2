"""What a loss function returns beside the loss: the same as on one device, whatever the mesh."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import ranks_of
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from autopar.ir.program import record
from autopar.torch_compat import tree_flatten


class Classifier(nn.Module):
    """Two layers whose weights tp splits, with dropout-free, batch-wise maths."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


def with_metrics(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    """A mean, a count, a largest value, all logits, numbers of Python: in a dict with a list."""
    logits = model(x)
    right = logits.argmax(-1) == y
    metrics = {
        "accuracy": right.float().mean(),
        "right": right.sum(),
        "largest": logits.abs().max(),
        "logits": logits,
        "parts": [logits[:, 0], right, {"classes": logits.shape[-1]}],
        "none": None,
    }
    return F.cross_entropy(logits, y), metrics


def batch(size: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(size, 8, generator=generator), torch.randint(0, 12, (size,), generator=generator)


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("dp=2", {}),
    ("tp=2", {}),
    ("dp=2,tp=2", {"zero": 3}),
    ("dp=2", {"microbatches": 3}),
    ("pp=2,dp=2", {"microbatches": 3}),
    ("pp=2,tp=2", {"microbatches": 2, "schedule": "zb-h1"}),
    ("dp=2", {"recompute": "full"}),
    ("dp=2,tp=2", {"precision": "bf16"}),
    ("dp=2", {"precision": "fp16"}),
]


@pytest.mark.parametrize(("mesh", "options"), OPTIONS, ids=str)
def test_values_are_those_of_one_device(mesh: str, options: dict[str, Any]) -> None:
    report = autopar.verify(Classifier(), mesh, loss_fn=with_metrics, batch=batch(), **options)
    assert report.ok, report
    assert sum(row.kind == "aux" for row in report.rows) == 7  # numbers are compared, too


def test_a_step_computes_nothing_twice_for_them() -> None:
    """Logits are gathered where they leave; the loss is that of the program without metrics, on pieces."""
    with_, without = (
        autopar.compile(Classifier(), "dp=2,tp=2", loss_fn=loss_fn, batch=batch())
        for loss_fn in (with_metrics, lambda model, x, y: with_metrics(model, x, y)[0])
    )
    flops = [sum(record(node).flops for node in c.program.nodes if record(node).flops) for c in (with_, without)]
    assert flops[0] == flops[1]
    gathered = [c.name for c in with_.program.nodes if "all_gather" in str(c.target)]
    assert len(gathered) <= 6, gathered


def two(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    logits = model(x)
    return F.cross_entropy(logits, y), logits.argmax(-1), 3


def as_mapping(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    logits = model(x)
    return {"loss": F.cross_entropy(logits, y), "logits": logits}


def number(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(model(x), y)


CONTAINERS: list[tuple[Any, Any, Any]] = [
    (with_metrics, lambda result: result[0], lambda result: result[1]),
    (two, lambda result: result[0], lambda result: result[1:]),
    (as_mapping, lambda result: result["loss"], lambda result: result),
    (number, lambda result: result, lambda result: None),
]


@pytest.mark.parametrize(("loss_fn", "loss_of", "aux_of"), CONTAINERS)
def test_the_container_comes_back(loss_fn: Any, loss_of: Any, aux_of: Any) -> None:
    """Of a tuple the rest, of a mapping the mapping; nothing for a loss alone. In no graph."""
    torch.manual_seed(0)
    plain = Classifier()
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=loss_fn)
    assert model.last_aux is None
    loss, result = model.forward_backward(*batch()), loss_fn(plain, *batch())
    torch.testing.assert_close(loss, loss_of(result))
    (leaves, spec), (others, other) = tree_flatten(model.last_aux), tree_flatten(aux_of(result))
    assert spec == other
    for got, want in zip(leaves, others, strict=True):
        assert type(got) is type(want) and not getattr(got, "requires_grad", False)
        torch.testing.assert_close(got, want)


def _global_values(rank: int, mesh: str, place: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain, given = Classifier().double(), [leaf.double() if leaf.is_floating_point() else leaf for leaf in batch()]
    model = autopar.parallelize(copy.deepcopy(plain), mesh, loss_fn=with_metrics, batch=place, **options)
    mine = [leaf.chunk(2)[rank // 2] for leaf in given] if place == "local" else given
    for _ in range(2):  # what is read of an earlier step stays as it is
        before = model.last_aux
        model.forward_backward(*mine, whole=True)
        _, want = with_metrics(plain, *given)
        for aux in [model.last_aux] + [before] * (before is not None):
            torch.testing.assert_close(aux, {**want, "logits": want["logits"].detach()}, rtol=1e-9, atol=1e-9)


@pytest.mark.gloo
def test_every_rank_has_those_of_the_whole_batch() -> None:
    with ranks_of(4) as four:
        four.run(_global_values, "dp=2,tp=2", "local", {"zero": 2})
        four.run(_global_values, "dp=2,pp=2", "global", {"microbatches": 3})


class OwnLoss(Classifier):
    """Returns its loss and its logits, as the models of transformers do."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = super().forward(x)
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def test_the_logits_beside_a_modules_own_loss_cost_nothing() -> None:
    compiled = autopar.compile(OwnLoss(), "dp=2,tp=2", batch=batch())
    assert all(out.kind != "aux" for out in compiled.program.outputs)
    assert autopar.verify(OwnLoss(), "dp=2", batch=batch()).ok
    model = autopar.parallelize(OwnLoss(), "dp=1")
    model.forward_backward(*batch())
    with pytest.raises(AutoparError, match=r"OwnLoss returns its own loss; .* with a function that returns it beside"):
        _ = model.last_aux


def test_what_cannot_be_made_again_is_refused() -> None:
    with pytest.raises(AutoparError, match=r"beside the loss is a generator, which can be run through once only"):
        autopar.compile(
            Classifier(), "dp=2", batch=batch(),
            loss_fn=lambda model, x, y: (F.cross_entropy(model(x), y), (row for row in x)),
        )  # fmt: skip
