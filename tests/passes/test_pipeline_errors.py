"""What a user can get wrong about pipelines: each with what, where, both numbers and what to do."""

from __future__ import annotations

import re
from pathlib import Path

import gpt
import models
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import BatchError, LayoutError, MeshError, ScheduleError

X, Y = torch.randn(12, 16), torch.randn(12, 8)


def mlp(depth: int = 3) -> nn.Module:
    torch.manual_seed(0)
    hidden = [layer for _ in range(depth - 2) for layer in (nn.Linear(24, 24), nn.Tanh())]
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), *hidden, nn.Linear(24, 8))


def compiled(mesh: str = "pp=2", model: nn.Module | None = None, **options: object) -> autopar.Compiled:
    options = {"loss_fn": models.square_loss, "batch": (X, Y), "microbatches": 4, **options}
    return autopar.compile(model or mlp(), mesh, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "text", "options"),
    [
        (BatchError, "microbatches=5 does not divide the 12 samples that a rank computes. It may be 1, 2, 3, 4, 6 or "
                     "12 here, or take a batch size that is a multiple of 5.", {"microbatches": 5}),
        (BatchError, "microbatches=4 does not divide the 6 samples (12 over 2 ranks) that a rank computes. It may be "
                     "1, 2, 3 or 6 here, or take a batch size that is a multiple of 8.", {"mesh": "pp=2,dp=2"}),
        (BatchError, "microbatches=0: write a number of 1 or more.", {"microbatches": 0}),
        (BatchError, "microbatches=True: write a number of 1 or more.", {"microbatches": True}),
        (LayoutError, "16 stages need 15 cuts, but the forward pass has only 9 places to cut: fewer stages (a smaller "
                      "pp, or fewer chunks a rank) would do.", {"mesh": "pp=16"}),
        (ScheduleError, "schedule '2f2b' is unknown. Known are gpipe, 1f1b, seq1f1b, interleaved-1f1b, zb-h1, zb-h2, "
                        "zb-v, dualpipev; or give a function or a CSV file.", {"schedule": "2f2b"}),
        (ScheduleError, "stages= names 3 stages, but pp=2 has as many on each rank: 2, 4, ...",
         {"stages": ["0", "2", "4"]}),
        (ScheduleError, "stages= names 2 stages, but pp=2 has 4: 2 on each rank.",
         {"stages": ["0", "2-4"], "chunks": 2, "schedule": "interleaved-1f1b"}),
        (ScheduleError, "chunks=0: write a number of 1 or more.", {"chunks": 0}),
        (LayoutError, "stages='0, 2': write a list of modules, a stage an entry: [\"blocks.0-3\", \"blocks.4-7\"].",
         {"stages": "0, 2"}),
        (LayoutError, "stages: stages[1] names 'head', which is no module of the forward pass. Nearest names: 0, 1, 2."
                      "\nno stage names '4'.", {"stages": ["0", "2, head"]}),
        (LayoutError, "stages: module '2' is in stages 0 and 1: a module has one stage.",
         {"stages": ["0-2", "2, 4"]}),
        (LayoutError, "stages: no stage names '2', '4'.", {"stages": ["0", "1"]}),
        (MeshError, "mesh 'mb=2': axis 'mb' has no meaning; known axes are cp, dp, ep, fsdp, pp, tp, ulysses.",
         {"mesh": "mb=2"}),
    ],
)  # fmt: skip
def test_messages(error: type[Exception], text: str, options: dict[str, object]):
    with pytest.raises(error) as raised:
        compiled(**options)  # type: ignore[arg-type]
    assert str(raised.value) == text


def test_stages_against_the_flow_of_data():
    text = (
        r"stages: '2' \(models.py:\d+\) is in stage 0, but needs a value of '1' \(models.py:\d+\) in stage 1: values "
        r"flow forwards only\.\n'4'"
    )
    with pytest.raises(LayoutError, match=text):
        compiled(stages=["2, 4", "0, 1, 3"])


def test_stages_by_hand():
    known = compiled(stages=["0-1", "2-4"])
    assert known.pipeline is not None
    assert known.pipeline.owners == {"0.weight": 0, "0.bias": 0, "2.weight": 1, "2.bias": 1, "4.weight": 1, "4.bias": 1}
    options = {"loss_fn": models.square_loss, "batch": (X, Y), "microbatches": 4}
    report = autopar.verify(
        mlp(), "pp=2", stages=["0", "1", "2-3", "4"], chunks=2, schedule="interleaved-1f1b", **options
    )
    assert report.ok, report


def test_a_table_that_waits_in_a_circle():
    table = "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0"
    with pytest.raises(ScheduleError, match=re.escape("0B0")) as raised:
        compiled(schedule=table, microbatches=2)
    assert "rank 0 waits" in str(raised.value) and "rank 1 waits" in str(raised.value)


def test_a_table_from_a_file(tmp_path: Path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
    report = autopar.verify(mlp(), "pp=2", loss_fn=models.square_loss, batch=(X, Y), microbatches=2, schedule=path)
    assert report.ok, report
    with pytest.raises(ScheduleError, match=r"mine\.csv"):
        compiled(schedule=str(path), microbatches=4)


def test_a_function():
    def backwards_in_reverse(stages: int, chunks: int, microbatches: int, costs: object) -> list[list[str]]:
        forward = [[f"{s}F{i}" for i in range(microbatches)] for s in range(stages)]
        return [row + [f"{s}B{i}" for i in reversed(range(microbatches))] for s, row in enumerate(forward)]

    options = {"loss_fn": models.square_loss, "batch": (X, Y), "microbatches": 3}
    report = autopar.verify(mlp(), "pp=2,dp=2", schedule=backwards_in_reverse, **options)
    assert report.ok, report


def test_stage_memory():
    model = mlp(6)
    bytes_ = sum(parameter.numel() * 4 * 4 for parameter in model.parameters())
    with pytest.raises(LayoutError, match=r"no cut into 2 stages keeps each within 100 bytes"):
        compiled(model=model, stage_memory=100)
    pipeline = compiled(model=model, stage_memory=bytes_ * 3 // 4).pipeline
    assert pipeline is not None
    sizes = dict(model.named_parameters())
    held = [
        sum(sizes[name].numel() * 16 for name, owner in pipeline.owners.items() if owner == stage) for stage in (0, 1)
    ]
    assert max(held) <= bytes_ * 3 // 4


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 24), nn.BatchNorm1d(24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)))  # the norm


def test_samples_that_need_each_other():
    here = Path(__file__).name
    with pytest.raises(LayoutError) as raised:
        compiled(model=Normed())
    told = "micro-batches cannot be computed one after another: op 'aten.sum.dim_IntList' ('norm' at " + here
    assert str(raised.value).startswith(told)
    assert "BatchNorm in eval mode" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "masked_scatter",
            r"op 'aten.masked_scatter.default' has no rule \(.*\) and takes the whole batch .*docs/rules",
        ),
        ("sort", r"op 'aten.(sort.default|scatter.src)' \(.*\) needs the whole batch .*microbatches=1"),
    ],
)
def test_the_op_that_needs_all_samples_is_named_first(name: str, reason: str):
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm = nn.Linear(16, 8), nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8))

        def forward(self, x: Tensor) -> Tensor:
            z = self.up(x)
            mixed = z.sort(0)[0] if name == "sort" else z.masked_scatter(z > 0, z.detach())
            return self.norm(mixed * z)

    with pytest.raises(LayoutError, match=f"^micro-batches cannot be computed one after another: {reason}"):
        compiled(model=Mixing())


def test_batch_norm_in_one_piece():
    """One micro-batch is the whole batch: its statistics are exact, with stages too."""
    options = {"loss_fn": models.square_loss, "batch": (X, Y), "microbatches": 1}
    report = autopar.verify(Normed(), "pp=2,dp=2", **options)
    assert report.ok, report


def test_a_default_for_microbatches():
    """Up to four for each stage, as many as divide the samples of a rank."""
    for mesh, expected in (("pp=2", 6), ("pp=3", 12), ("pp=2,dp=2", 6), ("dp=2", None)):
        pipeline = compiled(mesh, microbatches=None).pipeline
        assert (pipeline.microbatches if pipeline else None) == expected, mesh


def test_capture_is_not_asked_for_more():
    """A model too small for its stages still trains on fewer."""
    config = gpt.GPTConfig(vocabulary=8, context=4, layers=1, heads=1, width=4)
    batch = (torch.randint(0, 8, (4, 4)), torch.randint(0, 8, (4, 4)))
    report = autopar.verify(gpt.GPT(config), "pp=4", loss_fn=models.token_loss, batch=batch, microbatches=2)
    assert report.ok, report
