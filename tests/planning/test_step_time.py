"""Steps simulated on a machine: what their time is made of, against formulas."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from models import Llama, token_loss
from torch import Tensor, nn

import autopar
from autopar.cli import commands as cli
from autopar.cli import estimating
from autopar.errors import ArtifactError, MachineError
from autopar.ir.schedule import Action
from autopar.machines import Machine, named
from autopar.machines.model import ADAMW, TILE
from autopar.planning import StepTime
from autopar.planning.price.pipeline_time import emitted_costs

ROWS, WIDTH = 2**15, 2048
FLAT = Machine.flat(1e3, 1e6, 1e5, 1e-3, 1e-3)  # nothing costs but products: 1e3 FLOPs a microsecond


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def stack(layers: int, mesh: str, **options: object) -> autopar.Compiled:
    """Equal layers, and a first one that needs no gradient of its input, on tensors without data."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(layers)))
        batch = torch.empty(ROWS, WIDTH, requires_grad=False)
    return autopar.compile(model, mesh, loss_fn=square, batch=batch, **options)  # type: ignore[arg-type]


def llama(mesh: str, **options: object) -> autopar.Compiled:
    with torch.device("meta"):
        model = Llama(2, 1024, 8, 8, 2816, 8000, 512)
        batch = torch.empty(8, 512, dtype=torch.int64), torch.empty(8, 512, dtype=torch.int64)
    return autopar.compile(model, mesh, loss_fn=token_loss, batch=batch, precision="bf16", **options)  # type: ignore[arg-type]


def test_a_step_on_one_device_is_its_products_and_the_optimizer() -> None:
    found = stack(4, "dp=1").time(FLAT)
    assert found.flops == (3 * 4 - 1) * 2 * ROWS * WIDTH**2 and found.recomputed == 0
    assert found.computed == pytest.approx(found.flops / 1e3, rel=1e-2)
    assert found.optimizer == pytest.approx(ADAMW * 4 * 4 * WIDTH**2 / 1e6)
    assert found.total == pytest.approx(found.computed + found.optimizer)
    assert found.mfu == found.hfu == pytest.approx(found.flops / 1e3 / found.total)
    assert not found.exposed and found.tokens == ROWS


def test_dp_divides_the_products_and_adds_the_sums_of_gradients() -> None:
    one, four = stack(4, "dp=1").time(FLAT), stack(4, "dp=4").time(FLAT)
    assert four.flops == one.flops
    assert four.computed == pytest.approx(one.computed / 4, rel=1e-2)
    slow = stack(4, "dp=4").time(Machine.flat(1e7, 1e6, 1, 1e-3, 1e-3))
    gradients = 4 * 4 * WIDTH**2
    assert set(slow.exposed) == {"dp"}
    assert slow.exposed["dp"] <= 2 * 3 / 4 * gradients + 1 < slow.exposed["dp"] + slow.computed


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (2, 8), (4, 4)])
def test_the_bubble_of_a_pipeline(ranks: int, microbatches: int) -> None:
    """(p - 1) / (m + p - 1) for equal stages; the first layer, which gives no gradient on, makes its stage shorter."""
    compiled = stack(32, f"pp={ranks}", microbatches=microbatches, schedule="1f1b")
    found = compiled.time(FLAT)
    share = found.bubble / (found.total - found.optimizer)
    assert share == pytest.approx((ranks - 1) / (microbatches + ranks - 1), abs=0.05)
    assert found.timeline is not None and len(found.timeline.ranks) == ranks
    assert found.computed == pytest.approx(found.flops / 1e3 / ranks, rel=0.1)


@pytest.mark.parametrize("slices", [[256, 256], [384, 128], [192, 128, 128, 64]], ids=str)
def test_slices_together_take_what_the_step_takes(slices: list[int]) -> None:
    """Each slice of its own length, its attention by the positions before it: all of them are the model's products, but
    for what the mask of attention hides."""
    found = llama("pp=2", microbatches=2, slices=slices, schedule="seq1f1b").time(FLAT)
    assert found.timeline is not None
    spans = [span for rank in (0, 1) for span in found.timeline.runs(rank)]
    attention = 2 * 14 * 8 * 8 * 512**2 * 128  # of two layers, as if it were not causal
    hidden = attention * (1 - TILE / 512) / 2
    assert sum(span.end_us - span.start_us for span in spans) == pytest.approx((found.flops - hidden) / 1e3, rel=0.01)
    last = max((0, 1), key=lambda rank: found.timeline.ranks[rank][-1].end_us)
    busy = sum(span.end_us - span.start_us for span in found.timeline.runs(last))
    assert busy == pytest.approx(found.computed + found.hosted + sum(found.exposed.values()), rel=1e-6)


def test_slices_on_another_machine_than_that_of_their_pipeline() -> None:
    """Later slices attend to more, by that machine's FLOPs; one that is twice as fast takes half as long."""
    compiled = llama("pp=2", microbatches=2, slices=4, schedule="seq1f1b")
    slow, fast = (compiled.time(Machine.flat(*(speed * each for each in (1e3, 1e6, 1e5)), 0, 0)) for speed in (1, 2))
    spans = ([span.end_us - span.start_us for span in found.timeline.runs(1)] for found in (slow, fast))
    assert all(before == pytest.approx(2 * now) for before, now in zip(*spans, strict=True))
    assert slow.total == pytest.approx(2 * fast.total)
    assert slow.timeline is not None
    forwards = [span for span in slow.timeline.runs(0) if span.instruction.action.kind == "F"][:4]
    first, *_, last = (span.end_us - span.start_us for span in forwards)
    assert last > 1.05 * first


def test_a_prologue_counts_every_microbatch() -> None:
    """What a mean over the tokens that count needs beforehand: the graph C runs once for each micro-batch."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, 8, bias=False))
        batch = torch.empty(ROWS, WIDTH), torch.empty(ROWS, dtype=torch.int64)
    compiled = autopar.compile(model, "pp=2", loss_fn=masked_loss, batch=batch, microbatches=4, schedule="1f1b")
    pipeline = compiled.pipeline
    assert pipeline is not None
    (rank,) = {place for place, kind in pipeline.graphs if kind == "C"}
    machine = Machine.flat(1e3, 1e6, 1e5, 0, 1.0)
    times = emitted_costs(pipeline, machine)
    count, whole = times.graphs[rank, "C", 0].total, times.time_us(Action(rank, "P"))
    assert count > 0 and whole == pytest.approx(4 * count + times.graphs[rank, "P", 0].total)


def masked_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y, ignore_index=0)


def test_a_loaded_program_says_that_it_has_no_flops(tmp_path: Path) -> None:
    stack(2, "dp=2").save(tmp_path / "saved")
    with pytest.raises(
        ArtifactError, match=re.escape("the time of these programs on 'dp=2' cannot be simulated: they ")
    ):
        autopar.load(tmp_path / "saved").time(FLAT)


def test_recomputation_counts_beside_the_flops_of_the_model() -> None:
    plain, again = llama("tp=2").time(), llama("tp=2", recompute="full").time()
    assert again.flops == plain.flops and plain.recomputed == 0
    assert 0.2 < again.recomputed / again.flops < 1 / 3
    assert again.hfu == pytest.approx(again.mfu * (1 + again.recomputed / again.flops))
    assert again.total > plain.total and again.dtype == "bfloat16"


def test_an_axis_that_crosses_nodes_is_slower() -> None:
    times = {mesh: llama(mesh).time(named("h100-80g")) for mesh in ("dp=4,tp=2", "tp=2,dp=4", "tp=2,dp=8")}
    waits = {mesh: found.exposed["tp"] for mesh, found in times.items()}
    assert waits["dp=4,tp=2"] == pytest.approx(waits["tp=2,dp=4"], rel=0.2), "all of them lie in one node"
    assert waits["tp=2,dp=8"] > 1.5 * waits["tp=2,dp=4"], "the two ranks of tp lie in two nodes"


def test_ranks_by_the_thousand_cost_no_more_to_simulate() -> None:
    found = llama("dp=8,tp=8").time()
    assert isinstance(found, StepTime) and found.ranks == 64


def test_a_machine_that_is_not_known() -> None:
    with pytest.raises(MachineError, match=re.escape("machine 'b300': there is a100-80g, cpu, h100-80g or h200")):
        stack(2, "dp=1").time("b300")


def test_estimate_compiles_for_the_machine_that_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cut of stages, prefetch and buckets are decided for it, not for the default."""
    asked: list[str] = []
    plain = estimating.compiled_of

    def compiled_of(*args: object) -> autopar.Compiled:
        made = plain(*args)  # type: ignore[arg-type]
        asked.append(made.plan.fixed.machine.name)
        return made

    monkeypatch.setattr(estimating, "compiled_of", compiled_of)
    target = f"{ROOT / 'examples' / 'train_gpt.py'}:job"
    cli.app(["estimate", target, "--mesh", "pp=2", "--microbatches", "2", "--machine", "cpu"], standalone_mode=False)
    assert asked == ["cpu"]


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("dp=1", {"chunked_loss": True}), ("tp=2", {"chunked_loss": True}), ("dp=1", {"microbatches": 2}),
        ("tp=2", {"sequence_parallel": True}), ("pp=2", {"microbatches": 4}), ("dp=2", {"zero": 3}),
    ],
    ids=str,
)  # fmt: skip
def test_nothing_is_computed_again_without_recomputation(mesh: str, options: dict[str, object]) -> None:
    found = llama(mesh, **options).time()
    assert found.recomputed == 0
    assert found.flops == llama("dp=1").time().flops


@pytest.mark.parametrize(
    ("mesh", "options"), [("pp=2", {"microbatches": 4}), ("dp=1", {"chunked_loss": True})], ids=str
)
def test_what_is_computed_again_is_the_same_however_the_step_is_cut(mesh: str, options: dict[str, object]) -> None:
    whole = llama("dp=1", recompute="full").time()
    assert llama(mesh, recompute="full", **options).time().recomputed == pytest.approx(whole.recomputed, rel=0.2)


def test_estimate_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = f"{ROOT / 'examples' / 'train_gpt.py'}:job"
    cli.app(["estimate", target, "--mesh", "dp=2,tp=2", "--machine", "a100-80g"], standalone_mode=False)
    said = capsys.readouterr().out
    assert re.search(r"a step on dp=2,tp=2 of a100-80g: [\d.]+ (us|ms), [\d,]+ tokens a second, MFU [\d.]+%", said)
    for part in ("computing", "waits for tp", "waits for dp", "waits for the host", "optimizer (AdamW)", "of 85.9 GB"):
        assert part in said
