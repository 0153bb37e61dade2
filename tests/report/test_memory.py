"""What a rank is said to hold: counted by hand, and beside what it holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from models import gpt, token_loss
from processes import Ranks, ranks_of
from torch import nn

import autopar
from autopar.compiled import Compiled
from autopar.errors import PlanError, RankError
from autopar.report.memory.formula import WHOLE, saved_by_module
from autopar.report.memory.report import CATEGORIES, GRADIENTS, INPUTS, PARAMETERS, STATES, MemoryReport
from autopar.report.memory.simulate_rank import simulate
from autopar.report.memory.track import Tracker
from benchmarks.memory import MAX_LIMIT, Combination, Row, compare, row_of


@pytest.fixture(scope="module")
def ranks2() -> Iterator[Ranks]:
    with ranks_of(2) as ranks:
        yield ranks


# -- the tracker ------------------------------------------------------------------------------------------------------


def test_tracker_counts_a_known_sequence():
    tracker = Tracker()
    given = torch.zeros(100)
    tracker.add(given, "given")
    assert tracker.total == 400
    with tracker:
        a = torch.ones(1000)  # 4000
        view = a[10:20].view(5, 2)  # a's memory
        b = a.double()  # 8000
        assert tracker.total == 400 + 4000 + 8000
        del a
        assert tracker.total == 400 + 4000 + 8000, "the view keeps it alive"
        del view
        assert tracker.total == 400 + 8000
        wide = b.expand(3, 1000).transpose(0, 1)  # b's
        b.add_(1)
        assert tracker.total == 400 + 8000
        (b * 2).sum()  # 8000 more, and 8 of the sum
        assert tracker.total == 400 + 8000
    assert tracker.peak_bytes() == 400 + 16000 + 8
    del b, wide
    assert tracker.total == 400, "what ends outside is seen too"
    at = tracker.peak()
    assert sum(block.bytes for block in tracker.alive(at)) == tracker.events[at].total


@pytest.mark.gloo
def test_tracker_sees_the_local_parts_of_dtensors(ranks2: Ranks):
    assert ranks2.run(_local_parts) == [(3 * 4 * 4, 2 * 3 * 4 * 4)] * 2


def _local_parts(rank: int) -> tuple[int, int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    tensor = distribute_tensor(torch.ones(6, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    tracker = Tracker()
    tracker.add(tensor, "given")
    before = tracker.total
    with tracker:
        twice = tensor * 2
    after = tracker.total
    del twice
    return before, after


# -- by hand ----------------------------------------------------------------------------------------------------------


class Two(nn.Module):
    """Two layers without biases: all that is alive can be counted on a page."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32, bias=False), nn.Linear(32, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def total(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sum()


def two(mesh: str = "dp=1", **options: object) -> Compiled:
    return autopar.compile(Two(), mesh, loss_fn=total, batch=(torch.zeros(16, 8),), **options)  # type: ignore[arg-type]


def test_a_tiny_step_by_hand():
    """Peak at the gradient of tanh: its input `grad` becomes the result (a matrix product made it), beside tanh's
    result, the gradient of the second weight and the loss; or earlier. Counted here without any of our code."""
    first, second, x = 8 * 32 * 4, 32 * 4 * 4, 16 * 8 * 4
    hidden, out, loss = 16 * 32 * 4, 16 * 4 * 4, 4
    report = two().memory(device="cpu", optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    always = first + second + x
    assert report.states == {PARAMETERS: first + second, GRADIENTS: first + second, STATES: 0, INPUTS: x}
    # tanh runs over its dead operand, so that one `hidden` is alive until the backward pass; there a second one comes:
    # the gradient that reaches tanh, and (tanh_backward is not in place) its result for a moment.
    moments = {
        "forward": hidden + out + loss,
        "second weight": loss + 4 + hidden + second,
        "tanh backward": loss + second + 3 * hidden,
        "first weight": loss + second + hidden + first,
    }
    assert report.step == always + max(moments.values()), (report.step - always, moments)
    assert report.optimizer == always + first + second + loss  # SGD without momentum makes nothing
    assert report.place.node.startswith("tanh_backward") and report.place.module == ""
    assert report.place.source.startswith("test_memory.py:")


def test_expanded_values_and_views_hold_their_base():
    """Of [8, 50] two columns are used again: all is kept. The loss's gradient, expanded, is 4 bytes."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(50, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = torch.exp(x @ self.table.T)  # [8, 50], 1600 bytes
            return made[:, :2].square()  # a view of it is kept

    compiled = autopar.compile(Rows(), "dp=1", loss_fn=total, batch=(torch.zeros(8, 16),))
    kept = saved_by_module(compiled, device="cpu")[WHOLE]
    assert 8 * 50 * 4 <= kept <= 8 * 50 * 4 + 16, "all columns, once, and the loss"


@pytest.mark.parametrize(
    ("make", "each"),
    [
        (torch.optim.AdamW, 8),
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 4),
    ],
    ids=["adamw", "sgd", "momentum"],
)
def test_states_of_optimizers(make, each: int):
    report = two("tp=2").memory(1, make, device="cpu")
    elements = 8 * 32 // 2 + 32 * 4 // 2
    steps = 2 * 4 if each == 8 else 0  # Adam's count of steps, a number a tensor
    assert report.states[STATES] == each * elements + steps
    assert report.states[PARAMETERS] == 4 * elements
    on_gpu = two("tp=2").memory(1, make, device="cuda")
    assert on_gpu.states[STATES] == sum(-(-4 * n // 512) * 512 for n in (128, 64)) * (each // 4), "in blocks of 512"


# -- reports ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    model, loss_fn, batch = gpt()
    return autopar.compile(model, "dp=2,tp=2", loss_fn=loss_fn, batch=batch)


@pytest.fixture(scope="module")
def staged() -> Compiled:
    model, loss_fn, batch = gpt()
    return autopar.compile(model, "pp=2,dp=2", loss_fn=loss_fn, batch=batch, microbatches=3)


def check(report: MemoryReport, model: nn.Module) -> None:
    assert set(report.categories) == set(CATEGORIES) and sum(report.categories.values()) == report.peak
    assert report.peak == max(report.step, report.optimizer) == max(moment.peak for moment in report.timeline)
    modules = {name for name, _ in model.named_modules()}
    assert report.place.module in modules and ":" in report.place.source
    assert report.largest[0].bytes == max(value.bytes for value in report.largest)
    assert all(value.place for value in report.largest)
    after = [moment.after for moment in report.timeline]
    assert all(moment.peak >= moment.after for moment in report.timeline) and min(after) > 0
    text = str(report)
    assert f"{report.peak:,}" in text and report.place.source in text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_report_says_what_and_where(compiled: Compiled, staged: Compiled, device: str):
    model = gpt()[0]
    check(compiled.memory(3, device=device), model)
    ends = [staged.memory(staged.mesh.rank({"pp": place, "dp": 1}), device=device) for place in (0, 1)]
    for report in ends:
        check(report, model)
    assert [report.stages for report in ends] == [(0,), (1,)]
    assert ends[0].categories["saved activations"] != ends[1].categories["saved activations"]
    assert any(moment.graph.startswith("backward") and moment.action for moment in ends[0].timeline)


def test_estimates_are_the_same_each_time(compiled: Compiled):
    assert compiled.memory(device="cpu") == compiled.memory(device="cpu")


def test_more_ranks_hold_less(compiled: Compiled):
    model, loss_fn, batch = gpt()
    alone = autopar.compile(model, "dp=1", loss_fn=loss_fn, batch=batch).memory(device="cpu")
    report = compiled.memory(device="cpu")
    assert report.states[PARAMETERS] < 0.6 * alone.states[PARAMETERS]
    assert report.categories["saved activations"] < 0.5 * alone.categories["saved activations"]


def test_large_models_need_no_memory():
    """2 TB of weights, on a laptop."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**19, 2**19, bias=False), nn.Linear(2**19, 2**19, bias=False))
        batch = (torch.empty(64, 2**19),)
    report = autopar.compile(model, "tp=8", loss_fn=total, batch=batch).memory(5)
    assert report.states[PARAMETERS] == 2 * 2**38 * 4 // 8
    assert report.states[STATES] == 2 * report.states[PARAMETERS]


def test_errors(compiled: Compiled):
    with pytest.raises(RankError, match="there is no rank 4: mesh 'dp=2,tp=2' has ranks 0 to 3"):
        compiled.memory(4)
    with pytest.raises(PlanError, match="memory on device 'tpu': write cpu or cuda"):
        compiled.memory(device="tpu")


def test_random_numbers_stay_the_same_after_an_estimate():
    """An estimate must leave nothing without data in the tables that kernels keep."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    batch = (torch.ones(6, 8),)
    compiled = autopar.compile(model, "dp=1", loss_fn=total, batch=batch)
    for device in ("cpu", "cuda"):
        compiled.memory(device=device)
    found = autopar.verify(model, "dp=2", loss_fn=total, batch=batch, steps=1)
    assert found.ok


# -- beside what a run holds ------------------------------------------------------------------------------------------

QUICK = [
    Combination("mlp", "dp=2", optimizer="momentum"),
    Combination("gpt", "dp=2", {"zero": 2}),
    Combination("gpt", "dp=2", {"microbatches": 3, "precision": "bf16"}),
    Combination("gpt", "dp=2", {"zero": 3, "recompute": "full"}),
    Combination("gpt", "tp=2", {"sequence_parallel": True, "recompute": "full"}),
    Combination("gpt", "pp=2", {"microbatches": 3}),
    Combination("llama", "cp=2", {"attention": "ring"}),
]


@pytest.mark.gloo
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_estimate_is_what_a_rank_holds(ranks2: Ranks, case: Combination):
    for row in ranks2.run(row_of, case):
        assert isinstance(row, Row)
        assert row.worst <= MAX_LIMIT, f"{case} on rank {row.rank}: {row.estimated} estimated, {row.measured} measured"


@pytest.mark.gloo
def test_dropout_and_lookups(ranks2: Ranks):
    """Kernels that read values or draw random bits have stand-ins: the memory is the same."""
    for row in ranks2.run(_masked):
        assert row.worst <= MAX_LIMIT, row


def _masked(rank: int) -> Row:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(40, 32), nn.Dropout(0.3), nn.Linear(32, 64), nn.Dropout(0.1), nn.Linear(64, 40))
    x = torch.randint(40, (12, 16))
    return compare(rank, model, token_loss, (x, x.clone()), "tp=2", torch.optim.AdamW)


class Tied(nn.Module):
    """The table of the first stage is the head of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.table(x)))


def test_the_sum_of_a_tied_weights_gradients_needs_no_third_one():
    """What micro-batches added up to is the epilogue's own, to write over."""
    x = torch.randint(40, (12, 5))
    program = autopar.compile(Tied(), "dp=3,pp=2", loss_fn=token_loss, batch=(x, x.roll(1, 1)), microbatches=2)
    timeline = program.memory(0, device="cpu").timeline
    found = [
        (now.peak, before.after)
        for before, now in itertools.pairwise(timeline)
        if now.graph == "epilogue" and now.node.startswith("add")
    ]
    assert found and all(peak == before for peak, before in found), found


@pytest.mark.parametrize(("mesh", "is_more"), [("pp=2", True), ("dp=2", False)])
def test_a_step_begins_with_what_the_one_before_sent_last(mesh: str, is_more: bool) -> None:
    """One step is simulated where it leaves nothing behind, else the second one."""
    model, loss_fn, batch = gpt()
    compiled = autopar.compile(model, mesh, loss_fn=loss_fn, batch=batch, microbatches=2)
    trace = simulate(compiled, 1, lambda parameters: torch.optim.SGD(parameters, lr=0.1), "cuda")
    left = [block for block in trace.tracker.alive(trace.start - 1) if not block.kind]
    assert bool(left) == is_more, left
