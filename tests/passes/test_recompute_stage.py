"""recompute="stage": of a micro-batch nothing is kept between the passes but what enters its stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recompute_case import check, compiled, duplicates
from test_coupled_microbatches import LOSSES, X
from torch import Tensor, nn

import autopar
from autopar.errors import PlanError
from autopar.ir.pipeline import Pipeline
from autopar.ir.program import record
from benchmarks.memory import OPTIMIZERS, compare

POLICIES = ("stage", "stage+full")
F64 = torch.float64


# -- the step of one device ---------------------------------------------------------------------------------------

WAYS: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt", "dp=2", {"microbatches": 3, "schedule": "gpipe"}),
    ("gpt", "dp=2,tp=2", {"microbatches": 2, "sequence_parallel": True}),
    ("gpt", "pp=2", {"microbatches": 4}),
    ("gpt", "pp=2", {"microbatches": 4, "schedule": "zb-h1"}),
    ("gpt", "pp=2", {"microbatches": 4, "schedule": "interleaved-1f1b", "chunks": 2}),
    ("gpt", "pp=2,dp=2", {"microbatches": 3, "zero": 3}),
    ("gpt", "pp=2", {"microbatches": 2, "slices": 2, "schedule": "seq1f1b"}),
    ("gpt", "dp=2", {"microbatches": 3, "zero": 3, "offload": "parameters"}),
    ("tied", "pp=2", {"microbatches": 2}),
    ("written_out", "dp=2,tp=2", {"microbatches": 2, "zero": 1}),
]


@pytest.mark.parametrize(("name", "mesh", "options"), WAYS)
def test_every_gradient_equals_one_device(name: str, mesh: str, options: dict[str, Any]) -> None:
    """With dropout, and after two steps; and nothing of the forward pass is kept."""
    found = compiled(name, mesh, recompute=_policy(options), **options)
    report = check(name, found, steps=2)
    assert report.ok and report.max_error < 1e-10, str(report)
    assert duplicates(found.program)
    assert found.pipeline is not None and not list(kept(found.pipeline))


def _policy(options: dict[str, Any]) -> str:
    """Each for some of the settings."""
    return POLICIES[options["microbatches"] % 2]


def kept(pipeline: Pipeline) -> Iterator[str]:
    """What a stage keeps of its own forward pass for its backward pass."""
    graphs = pipeline.graphs
    for (stage, kind), graph in graphs.items():
        if kind in "BIW":
            own = {out.name for out in graphs[stage, "F"].outputs if out.kind == "saved"}
            yield from (f"{stage}{kind} {entry.name}" for entry in graph.inputs if own.intersection(entry.names))


COUPLED: list[tuple[str, str, dict[str, Any]]] = [
    ("clip", "dp=1", {"microbatches": 3}),
    ("clip", "dp=2,tp=2", {"microbatches": 2, "zero": 1}),
    ("simclr", "dp=3", {"microbatches": 2, "zero": 2}),
    ("variance", "dp=2,tp=3", {"microbatches": 2}),
    ("balance", "pp=2,dp=2", {"microbatches": 3, "zero": 3}),
    ("dice", "pp=2", {"microbatches": 4}),
    ("covariance", "dp=2", {"microbatches": 3, "zero": 3}),
]


@pytest.mark.parametrize(("name", "mesh", "options"), COUPLED)
def test_losses_that_take_samples_together(name: str, mesh: str, options: dict[str, Any]) -> None:
    (make, loss, batch), options = LOSSES[name], {**options, "recompute": _policy(options)}
    report = autopar.verify(make(), mesh, loss_fn=loss, batch=batch, **options)
    assert report.ok and report.max_error < 1e-9, report
    made = autopar.compile(make(), mesh, loss_fn=loss, batch=batch, **options)
    assert made.pipeline is not None and not list(kept(made.pipeline))


class Counting(nn.Module):
    """BatchNorm, whose statistics move with each micro-batch, and a buffer that its forward pass writes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.down = nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.up = nn.Linear(6, 8, bias=False)  # the gradient of one would be rounding alone
        self.register_buffer("mean", torch.zeros(8, dtype=F64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.up(x))
        self.mean.mul_(0.9).add_(0.1 * h.detach().square().mean(0))
        self.calls.add_(1)
        return self.down(F.dropout(h.relu(), 0.3))


def of_weights(model: nn.Module, x: Tensor) -> Tensor:
    """A term of the weights alone, some of which their own values choose."""
    table = torch.stack([parameter.mean() for parameter in model.parameters()])
    first = (table.detach() > 0.05).sum() % 4
    return model(x).square().mean() + table[first : first + 3].tanh().square().mean() + table[first].sin()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "options", [{"zero": 3}, {"zero": 2, "offload": "parameters"}, {"zero": 3, "schedule": "zb-h1"}]
)
def test_terms_of_weights_alone(options: dict[str, Any], policy: str) -> None:
    """Red before: a KeyError, where micro-batches gather weights anew and read what is computed of these again."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    report = autopar.verify(
        model, "pp=2,dp=2", loss_fn=of_weights, batch=torch.randn(8, 8), microbatches=2, recompute=policy, **options
    )
    assert report.ok and report.max_error < 1e-10, str(report)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mesh", ["dp=2", "pp=2"])
def test_buffers_change_once(mesh: str, policy: str) -> None:
    report = autopar.verify(
        Counting().double(), mesh, loss_fn=lambda model, x: model(x).square().mean(), batch=X, microbatches=3,
        batch_statistics="microbatch", recompute=policy, steps=2,
    )  # fmt: skip
    assert report.ok and report.max_error < 1e-10, report
    assert {"norm.running_mean", "mean", "calls"} <= {row.name for row in report.rows}


def test_in_mixed_precision() -> None:
    make, loss, batch = LOSSES["clip"]
    report = autopar.verify(
        make().float(), "dp=2", loss_fn=loss, batch=tuple(x.float() for x in batch), microbatches=3, zero=3,
        precision="bf16", recompute="stage",
    )  # fmt: skip
    assert report.ok, report


# -- what it is for -----------------------------------------------------------------------------------------------


class Tower(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.normalize(x.mean(1), dim=-1)


def pairs(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    similarities = 8 * model.image(x) @ model.text(y).T  # type: ignore[operator]
    return F.cross_entropy(similarities, torch.arange(len(x), device=x.device))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = Tower(4, 16), Tower(4, 16)


def towers() -> tuple[nn.Module, Any, tuple[Tensor, Tensor]]:
    return Pair(), pairs, (torch.randn(64, 32, 16), torch.randn(64, 32, 16))


def test_memory_is_that_of_a_micro_batch() -> None:
    """Measured as estimated; with twice as many micro-batches the activations take half as much."""
    model, loss, batch = towers()

    def held(policy: str, count: int) -> int:
        made = autopar.compile(model, "dp=1", loss_fn=loss, batch=batch, microbatches=count, recompute=policy)
        report = made.memory(0, device="cpu")
        return report.step - sum(report.states.values())

    more, some, few = (held("stage", count) for count in (2, 4, 8))
    assert more - some == pytest.approx(2 * (some - few), rel=0.05)
    assert held("stage+full", 4) < held("full", 4) / 2 and few < held("full", 8)
    for policy in POLICIES:
        row = compare(0, *towers(), "dp=1", OPTIMIZERS["adamw"], microbatches=4, recompute=policy)
        assert row.worst < 0.01, row


def test_a_pipeline_keeps_what_stages_received() -> None:
    bytes_: dict[str, int] = {}
    for policy in ("none", "full", *POLICIES):
        made = compiled("gpt", "pp=2", recompute=policy, microbatches=4, schedule="gpipe").pipeline
        assert made is not None
        flow = made.flow
        bytes_[policy] = sum(flow.types[name].bytes_ for work in flow.works.values() for name in work.reads)
    assert bytes_["stage"] == bytes_["stage+full"] < bytes_["full"] / 2 < bytes_["none"] / 4


def test_parameters_are_gathered_once_more() -> None:
    """ZeRO-3: what the second forward pass gathers does not stay until the gradients need it."""
    plain, made = (compiled("gpt", "dp=2", recompute=policy, microbatches=3, zero=3) for policy in ("none", "stage"))
    assert plain.pipeline is not None and made.pipeline is not None
    forward, backward = (_gathered_bytes(plain.pipeline, kind) for kind in "FB")
    assert _gathered_bytes(made.pipeline, "F") == forward > 0
    assert _gathered_bytes(made.pipeline, "B") > backward + 0.8 * forward  # the head reads its weights once for both


def _gathered_bytes(pipeline: Pipeline, kind: str) -> int:
    """Of all parameters that a graph gathers."""
    gathers = (node for node in pipeline.graphs[0, kind].calls() if "all_gather" in str(node.target))
    return sum(record(node).type.bytes_ for node in gathers)


# -- what it is not for -------------------------------------------------------------------------------------------


def test_without_stages_and_micro_batches_it_is_left_out() -> None:
    assert not duplicates(compiled("gpt", "dp=2", recompute="stage").program)
    assert len(duplicates(compiled("gpt", "dp=2", recompute="stage+full").program)) == len(
        duplicates(compiled("gpt", "dp=2", recompute="full").program)
    )


def test_one_module_cannot_be_a_stage() -> None:
    with pytest.raises(
        PlanError,
        match=r"^recompute='stage': write none, selective or full, a number of bytes .*; or, for all modules together, "
        r"stage or stage\+full\.$",
    ):
        autopar.compile(
            nn.Linear(6, 4).double(), "dp=1", loss_fn=lambda m, x: m(x).sum(), batch=X, recompute={"*": "stage"}
        )
