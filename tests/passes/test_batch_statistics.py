"""`batch_statistics`: BatchNorm with the samples of a micro-batch or a data rank, beside a loop of plain PyTorch."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from norm_case import F64, SCALE, Net, S, X, Y, loop, mse, norm
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.compiler.check_options import options_of
from autopar.compiler.meshes import mesh_of
from autopar.errors import AutoparError, BatchError, CoupledError, PlanError
from autopar.passes.groups import SampleGroups, groups_of
from autopar.report.memory.within_memory import compile_step
from autopar.verification.plain import Plain
from autopar.verification.plain_norms import PlainNorms
from autopar.verification.verify import verify_compiled

SEED = torch.tensor([0, 0])


def twice(net: Net, x: Tensor) -> Tensor:
    return net.o(net.b(net.c(net.b(net.a(x)).tanh())).tanh())


def time_first(net: Net, x: Tensor) -> Tensor:
    """Rows (time, sample), as speech models have them."""
    h = net.a(x).transpose(0, 1)
    return net.o(net.b(h.reshape(-1, 5)).reshape(h.shape).tanh()).mean(0)


def sample_first(net: Net, x: Tensor) -> Tensor:
    return net.o(net.b(net.a(x).reshape(-1, 5)).reshape(-1, 4, 5).tanh()).mean(1)


def two_views(net: Net, x: Tensor) -> Tensor:
    p, q = net.b(torch.cat([net.a(x), net.a(2 * x).sin()])).chunk(2)
    return net.o(p.tanh() * q)


def functional(net: Net, x: Tensor) -> Tensor:
    h = F.batch_norm(net.a(x), net.mean, net.variance, training=True, momentum=0.3)
    return net.o(torch.batch_norm(h.tanh(), None, None, net.mean, net.variance, True, 0.2, 1e-5, False))


def again(net: Net, x: Tensor) -> Tensor:
    h: Tensor = checkpoint(lambda v: net.b(net.a(v)).tanh(), x, use_reentrant=False)  # type: ignore[no-untyped-call]
    return net.o(h)


def frozen(net: Net, x: Tensor) -> Tensor:
    net.b.eval()
    return net.o(net.b(net.a(x)).tanh())


def codes(net: Net, x: Tensor) -> Tensor:
    """The rows of the norm hang on no sample."""
    return net.o(net.a(x) + net.b(net.c.weight).sum(0))


def in_place(net: Net, x: Tensor) -> Tensor:
    """As `nn.ReLU(inplace=True)` behind every norm of a ResNet."""
    return net.o(F.relu(net.b(net.a(x)), inplace=True))


def channels(net: Net, x: Tensor) -> Tensor:
    return net.o(net.b(net.a(x).mT).mT.tanh()).mean(1)


MODELS = {
    "plain": (Net(norm()), X),
    "no weight": (Net(norm(affine=False)), X),
    "no buffers": (Net(norm(track_running_stats=False)), X),
    "cumulative": (Net(norm(momentum=None)), X),
    "last alone": (Net(norm(momentum=1.0)), X),
    "twice": (Net(norm(), twice), X),
    "twice, cumulative": (Net(norm(momentum=None), twice), X),
    "time first": (Net(norm(), time_first), S),
    "sample first": (Net(norm(), sample_first), S),
    "written into": (Net(norm(), in_place), X),
    "two views": (Net(norm(), two_views), X),
    "three dims": (Net(norm(momentum=0.4), channels), S),
    "functional": (Net(nn.Identity, functional), X),
    "checkpoint": (Net(norm(), again), X),
    "frozen": (Net(norm(), frozen), X),
    "codes": (Net(norm(), codes), X),
    "instances": (Net(lambda: nn.InstanceNorm1d(5, affine=True, track_running_stats=True), channels), S),
    "instances, no momentum": (
        Net(lambda: nn.InstanceNorm1d(5, track_running_stats=True, momentum=None), channels),
        S,
    ),
}
PLANS: tuple[tuple[str, str, dict[str, Any], int, int], ...] = (  # mesh, statistics, options, ranks, parts
    ("dp=2", "microbatch", {"microbatches": 3}, 2, 3),
    ("dp=3", "rank", {}, 3, 1),
    ("pp=2", "microbatch", {"microbatches": 3}, 1, 3),
)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("name", MODELS)
def test_it_is_what_a_loop_of_plain_pytorch_does(name: str) -> None:
    """Three ways: the programs of all ranks, the plain side of `verify`, and a loop over the user's own module."""
    model, x = MODELS[name]
    for mesh, statistics, options, ranks, parts in PLANS:
        want = loop(copy.deepcopy(model), x, ranks, parts)
        given = options_of(batch_statistics=statistics, **options)
        captured, compiled = compile_step(model, mse, (x, Y), {}, mesh_of(mesh), given, lift=F64)
        side = Plain(copy.deepcopy(model), mse, sgd, norms=PlainNorms.of(compiled))
        for step in range(2):
            values = side.step((x, Y), {}, SEED)
            torch.testing.assert_close(values["loss", "loss"], want[f"loss {step}"], rtol=1e-10, atol=1e-12)
        for key, value in side.model.state_dict().items():
            torch.testing.assert_close(value, want[key], rtol=1e-9, atol=1e-12, msg=f"{name} {mesh} {key}")
        report = verify_compiled(model, captured, compiled, loss_fn=mse, batch=(x, Y), optimizer=sgd)
        assert report.ok, f"{name} {mesh}: {report}"


class Images(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.c, self.b, self.d = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, **options), nn.Conv2d(4, 4, 3)
        self.e, self.o = nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.e(self.d(self.b(self.c(x)).relu()))
        out: Tensor = self.o(F.dropout(h.relu().mean((2, 3)), 0.2))
        return out


IMAGES = torch.randn(12, 3, 5, 5, generator=torch.Generator().manual_seed(0)) * SCALE.float()[:, None, None, None]
LABELS = torch.tensor([0, 1, -100, -100, -100, 1, 0, 1, 1, 0, -100, 1])


def counted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A loss of the whole batch still: of unevenly spread ignored labels, with masks that are drawn once."""
    return F.cross_entropy(model(x), y)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("tp=2", {}),
        ("dp=3,tp=2", {"zero": 1}),
        ("dp=2", {"zero": 3, "microbatches": 3}),
        ("fsdp=2", {"precision": "bf16"}),
        ("dp=2,fsdp=2", {"recompute": "full", "microbatches": 3}),
        ("pp=2,dp=2", {"schedule": "zb-h1"}),
        ("pp=2", {"schedule": "1f1b", "microbatches": 6}),
        ("pp=2", {"schedule": "interleaved-1f1b", "chunks": 2, "microbatches": 4}),
    ],
)
def test_with_other_options(mesh: str, options: dict[str, Any]) -> None:
    given = {"batch_statistics": "microbatch", "microbatches": 2, **options}
    report = autopar.verify(Images(), mesh, loss_fn=counted, batch=(IMAGES, LABELS), **given)
    assert report.ok, report


class Dropped(nn.Module):
    """Norms behind dropouts of elements, of channels and of samples: each draws for the place that a sample has."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.conv, self.o = nn.Linear(3, 5), nn.Conv1d(5, 5, 3, padding=1), nn.Linear(5, 2)
        self.b, self.c = nn.BatchNorm1d(5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(F.dropout(self.a(x), 0.4)).tanh()
        h = self.c(F.dropout1d(self.conv(h[..., None].expand(-1, -1, 4)), 0.3))
        return self.o((h * (torch.rand(len(x), 1, 1) < 0.7)).mean(-1))


@pytest.mark.parametrize(("mesh", "statistics", "options", "ranks", "parts"), PLANS)
def test_norms_behind_dropouts(mesh: str, statistics: str, options: Any, ranks: int, parts: int) -> None:
    model = Dropped().to(F64)
    report = autopar.verify(
        model, mesh, loss_fn=lambda m, x: m(x).square().mean(), batch=(torch.randn(12, 3, dtype=F64),),
        batch_statistics=statistics, **options,
    )  # fmt: skip
    assert report.ok, report


def test_each_place_with_a_batch_of_its_own() -> None:
    given: Any = {"batch_statistics": "microbatch", "microbatches": 3, "ddp": True}
    assert autopar.verify(Net(norm()), "dp=2", loss_fn=mse, batch=(X, Y), **given).ok


@pytest.mark.parametrize("statistics", ["batch", "rank"])
def test_a_cumulative_average(statistics: str) -> None:
    """momentum=None: the mean of all updates, which a buffer counts."""
    given: Any = {"batch_statistics": statistics, "steps": 4}
    assert autopar.verify(MODELS["twice, cumulative"][0], "dp=2", loss_fn=mse, batch=(X, Y), **given).ok


SYNCED = Net(lambda: nn.SyncBatchNorm(5))


@pytest.mark.parametrize(
    ("mesh", "options", "same_as"),
    [
        ("dp=2", {"batch_statistics": "microbatch"}, {"batch_statistics": "batch"}),
        ("dp=2", {"batch_statistics": "rank"}, {"batch_statistics": "batch"}),
        ("pp=2", {"batch_statistics": "microbatch", "microbatches": 3}, None),
    ],
)
def test_a_synchronised_norm_takes_all_ranks(mesh: str, options: Any, same_as: Any) -> None:
    report = autopar.verify(SYNCED, mesh, loss_fn=mse, batch=(X, Y), **options)
    assert report.ok, report
    if same_as is not None:
        assert autopar.verify(SYNCED, mesh, loss_fn=mse, batch=(X, Y), **same_as).ok
        groups = groups_of_step(SYNCED, mesh, **options)
        assert all(one.sizes == (1, 1) for one in groups)


def groups_of_step(model: nn.Module, mesh: str, **options: Any) -> list[SampleGroups]:
    compiled = autopar.compile(model, mesh, loss_fn=mse, batch=(X, Y), **options)
    return [*groups_of(compiled.history[0][1], compiled.plan).values()]


def shuffled(net: Net, x: Tensor) -> Tensor:
    return net.o(net.b(net.a(x)[torch.arange(11, -1, -1)]))


def centred(net: Net, x: Tensor) -> Tensor:
    h = net.a(x)
    return net.o(net.b(h - h.mean(0)))


def dropped(net: Net, x: Tensor) -> Tensor:
    return net.o(net.b(F.dropout(net.a(x), 0.3)))


def met(net: Net, x: Tensor) -> Tensor:
    """Rows that are sums over samples."""
    h = net.a(x)
    return net.o(h) + net.b(h.mT @ h).mean()


def across(net: Net, x: Tensor) -> Tensor:
    h = net.a(x)
    return net.o((net.b(h[:5].T[:, :5]).sum() + h).tanh())


HERE = r"\w+\.py:\d+"
REFUSED: dict[str, tuple[nn.Module, str, dict[str, Any], type[AutoparError], str]] = {
    "a number of samples that ranks do not divide": (
        Net(norm()), "dp=5", {"batch_statistics": "rank"}, BatchError,
        r"the batch has 12 samples \(.*\), which axis 'dp' \(size 5\) cannot divide\. .*",
    ),
    "micro-batches that do not divide": (
        Net(norm()), "dp=2", {"microbatches": 4}, BatchError,
        r"microbatches=4 does not divide the 6 samples \(12 over 2 ranks\) that a rank computes\. .*",
    ),
    "groups of one sample": (
        Net(norm()), "dp=2", {"microbatches": 6}, BatchError,
        rf"batch_statistics: the norm 'b' at {HERE} has 1 value per channel in each of 12 groups of samples, of which "
        rf"there is no variance\. Use fewer micro-batches or data ranks, or a batch with larger parts \(drop_last=True "
        rf"leaves out the last one of an epoch\)\.",
    ),
    "samples in another order": (
        Net(norm(), shuffled), "dp=2", {}, BatchError,
        rf"batch_statistics='microbatch': the norm 'b' at {HERE} takes rows that are not the samples of the batch one "
        rf"by one \(it takes the rows together: op 'aten\.index\.Tensor' at {HERE}\), so that no part of them is a "
        rf"micro-batch's own\. Give it the samples in dim 0 and in their order, or use batch_statistics='batch' with "
        rf"microbatches=1\.",
    ),
    "samples that met before": (
        Net(norm(), met), "dp=2", {}, BatchError,
        rf".*\(samples are taken together: op '[\w.]+' at {HERE}\).*",
    ),
    "all ranks in each micro-batch": (
        SYNCED, "dp=2", {"microbatches": 3}, PlanError,
        rf"batch_statistics='microbatch': the norm 'b' at {HERE} is a SyncBatchNorm, which takes the samples of all 2 "
        rf"data ranks together, in each of 3 micro-batches: that is not supported\. Use microbatches=1, one data rank, "
        rf"or nn\.BatchNorm, whose statistics are those of a micro-batch on a rank\.",
    ),
    "a rank's samples with micro-batches": (
        Net(norm()), "dp=2", {"batch_statistics": "rank", "microbatches": 3}, CoupledError,
        r"micro-batches cannot be computed one after another: .* Use microbatches=1 .* For BatchNorm use "
        r"batch_statistics='microbatch', where it takes the samples of each micro-batch as other trainers do, or a "
        r"module without it \(GroupNorm, LayerNorm; BatchNorm in eval mode\)\. For a loss of each micro-batch by "
        r"itself there is autopar\.per_microbatch\(function, rows\)\.",
    ),
    "a word": (
        Net(norm()), "dp=2", {"batch_statistics": "micro-batch"}, PlanError,
        r"batch_statistics='micro-batch': write batch, rank or microbatch\.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    model, mesh, options, error, text = REFUSED[name]
    with pytest.raises(error) as raised:
        autopar.compile(model, mesh, loss_fn=mse, batch=(X, Y), **{"batch_statistics": "microbatch", **options})
    assert re.fullmatch(text, str(raised.value), re.DOTALL), raised.value


@pytest.mark.parametrize("run, mesh, options", [
    (dropped, "dp=2", {"microbatches": 3}), (dropped, "pp=2,dp=2", {"microbatches": 3}), (centred, "dp=2", {}),
])  # fmt: skip
def test_a_row_may_hang_on_its_place_and_on_the_whole_batch(run: Any, mesh: str, options: dict[str, Any]) -> None:
    """A mask of dropout, a mean that is subtracted: they stay those of the whole batch, and rows where they are."""
    report = autopar.verify(
        Net(norm(), run), mesh, batch=(X, Y), loss_fn=mse, batch_statistics="microbatch", optimizer=sgd, **options
    )
    assert report.ok, str(report)
