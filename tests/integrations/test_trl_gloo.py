"""TRL's trainers on a mesh, beside themselves on one device: logs of every step, folders, resuming."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import as_torchrun_does
from processes import Ranks
from safetensors.torch import load_file

from autopar.errors import AutoparError, CaptureError

pytest.importorskip("trl", reason="TRL's tests need it: pip install trl")
pytest.importorskip("peft", reason="adapters need PEFT: pip install peft")
import peft
from trl import KTOTrainer
from tuned import PLAIN, tuned

from autopar.integrations.transformers import ParallelTrainer


class SFT(ParallelTrainer, PLAIN["sft"][0]):  # type: ignore[misc]
    pass


class DPO(ParallelTrainer, PLAIN["dpo"][0]):  # type: ignore[misc]
    pass


LORA = peft.LoraConfig(r=2, lora_dropout=0.0, target_modules=["q_proj"], task_type="CAUSAL_LM")
# kind, adapters, mesh, options of the step, and whether to go on from the plain folder
ROWS: dict[str, tuple[str, Any, str, dict[str, Any], bool]] = {
    "sft": ("sft", None, "dp=2", {"zero": 3}, False),
    "sft, resumed from one device": ("sft", None, "tp=2", {}, True),
    "dpo": ("dpo", None, "tp=2", {}, False),
    "dpo, the model without its adapters is the reference": ("dpo", LORA, "dp=2", {}, False),
}


def _on_a_mesh(rank: int, folder: str, name: str) -> Any:
    as_torchrun_does(rank, 2)
    logging.disable(logging.WARNING)
    kind, adapters, mesh, options, resumes = ROWS[name]
    resume = Path(folder) / "plain" / "checkpoint-2" if resumes else None
    return tuned(
        kind, SFT if kind == "sft" else DPO, Path(folder) / "mesh", resume, adapters, mesh=mesh, options=options
    )


@pytest.mark.gloo
@pytest.mark.parametrize("name", ROWS)
def test_a_trainer_of_trl_is_that_of_one_device(name: str, two: Ranks, tmp_path: Path) -> None:
    kind, adapters, *_ = ROWS[name]
    wanted = tuned(kind, PLAIN[kind][0], tmp_path / "plain", None, adapters)
    if ROWS[name][-1]:  # TRL's trainers count tokens from zero again
        wanted = tuned(kind, PLAIN[kind][0], tmp_path / "plain again", tmp_path / "plain" / "checkpoint-2", adapters)
    for found in two.run(_on_a_mesh, str(tmp_path), name, timeout=120):
        assert len(found) == len(wanted) == 6
        for one, other in zip(found, wanted, strict=True):
            assert one == pytest.approx(other, rel=2e-4, abs=2e-5)
    for part in ("final", "checkpoint-4"):
        (file,) = (tmp_path / "plain" / part).glob("*model.safetensors")
        ours, theirs = (load_file(tmp_path / side / part / file.name) for side in ("mesh", "plain"))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


class Deciding(DPO):
    """A loss that depends on a number of its logs."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss * (2.0 if self.accelerator.gather_for_metrics(loss.detach()).item() > 0 else 1.0)


def test_a_loss_that_its_logs_decide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="decides its loss"):
        tuned("dpo", Deciding, tmp_path, mesh="dp=1")


def test_checkpointing_of_trl_is_said_in_options(tmp_path: Path) -> None:
    with pytest.raises(AutoparError) as caught:
        tuned("sft", SFT, tmp_path, mesh="dp=1", checkpointing=True)
    assert str(caught.value) == (
        "TrainingArguments(gradient_checkpointing=True) is left out with autopar; in its place of options: "
        "recompute='full' or 'selective'."
    )


def test_a_trainer_that_nobody_compared_is_refused() -> None:
    with pytest.raises(AutoparError) as caught:
        type("Kto", (ParallelTrainer, KTOTrainer), {})(mesh="dp=1")
    assert str(caught.value).startswith(
        "KTOTrainer of TRL was not compared with one device: SFTTrainer and DPOTrainer were. Write its loss as a "
    )
