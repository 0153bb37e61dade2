"""transformers' Trainer on a mesh, beside itself on one device: logs, events, evaluation, folders, resuming."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import as_torchrun_does
from processes import Ranks
from safetensors.torch import load_file

import autopar
from autopar.errors import AutoparError

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
import transformers
from trained import CONFIG, Penalised, Told, arguments, rows, trained, trainer_of

from autopar.integrations.transformers import ParallelTrainer, Trainer


class ParallelPenalised(ParallelTrainer, Penalised):
    pass


# mesh, options of the step, of TrainingArguments, the plain class and ours, and whether to go on from the plain folder
ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any], type, type, bool]] = {
    "data parallel": ("dp=2", {"zero": 2}, {}, transformers.Trainer, Trainer, False),
    "compute_loss_func, resumed from one device": (
        "tp=2", {}, {"has_own_function": True}, transformers.Trainer, Trainer, True,
    ),
    "a subclass's loss, smoothed, in a pipeline": (
        "pp=2", {"microbatches": 2}, {"average_tokens_across_devices": False, "label_smoothing_factor": 0.1}, Penalised,
        ParallelPenalised, False,
    ),
}  # fmt: skip


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def _on_a_mesh(rank: int, folder: str) -> dict[str, Any]:
    as_torchrun_does(rank, 2)
    logging.disable(logging.WARNING)
    found = {}
    for name, (mesh, options, more, _, kind, resumes) in ROWS.items():
        here, plain = Path(folder) / "mesh" / name, Path(folder) / "plain" / name
        resume = plain / "checkpoint-2" if resumes else None
        found[name] = trained(kind, here, resume, more, mesh=mesh, options=options)
    return found


@pytest.mark.gloo
def test_a_trainer_on_a_mesh_is_that_of_one_device(two: Ranks, tmp_path: Path) -> None:
    plain = {
        name: trained(kind, tmp_path / "plain" / name, None, more)
        for name, (_, _, more, kind, _, _) in ROWS.items()
    }  # fmt: skip
    for found in two.run(_on_a_mesh, str(tmp_path), timeout=180):
        for name, (logs, events, predictions, loss) in found.items():
            wanted = plain[name]
            resumed = ROWS[name][-1]
            assert events == (wanted[1][4:] if resumed else wanted[1]), name
            torch.testing.assert_close(torch.tensor(logs), torch.tensor(wanted[0]), rtol=2e-5, atol=2e-5)
            assert predictions == wanted[2] and loss == pytest.approx(wanted[3], rel=1e-5), name
    for name in ROWS:
        for part in ("final", "checkpoint-4"):
            ours, theirs = (_weights(tmp_path / side / name / part) for side in ("mesh", "plain"))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
        files = {path.name for path in (tmp_path / "mesh" / name / "checkpoint-4").iterdir()}
        assert files - {"autopar_state.pt"} == {
            path.name for path in (tmp_path / "plain" / name / "checkpoint-4").iterdir()
        }
        saved = torch.load(tmp_path / "mesh" / name / "final" / "training_args.bin", weights_only=False)
        assert type(saved) is transformers.TrainingArguments
    # one device goes on from what a mesh wrote
    again = trained(transformers.Trainer, tmp_path / "again", tmp_path / "mesh" / "data parallel" / "checkpoint-2")
    torch.testing.assert_close(torch.tensor(again[0]), torch.tensor(plain["data parallel"][0]), rtol=2e-5, atol=2e-5)


def _adapted(kind: type, folder: Path, resume: bool = False, **kwargs: Any) -> tuple[list[float], dict[str, Any]]:
    import peft

    torch.manual_seed(0)
    model = peft.get_peft_model(
        transformers.LlamaForCausalLM(CONFIG), peft.LoraConfig(r=2, lora_dropout=0.0, target_modules=["q_proj"])
    )
    trainer = kind(model, arguments(folder), train_dataset=rows(14, 7), eval_dataset=rows(6, 5), **kwargs)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
    trainer.save_model(str(folder / "final"))
    saved = load_file(folder / "final" / "adapter_model.safetensors")
    return [
        entry[name] for entry in trainer.state.log_history for name in ("loss", "eval_loss") if name in entry
    ], saved


def _adapted_on_a_mesh(rank: int, folder: str) -> list[Any]:
    as_torchrun_does(rank, 2)
    return [_adapted(Trainer, Path(folder), resume, mesh="tp=2") for resume in (False, True)]


@pytest.mark.gloo
def test_adapters_of_peft(two: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="adapters need PEFT: pip install peft")
    logs, saved = _adapted(transformers.Trainer, tmp_path / "plain")
    for found in two.run(_adapted_on_a_mesh, str(tmp_path / "mesh"), timeout=120):
        for one, weights in found:
            torch.testing.assert_close(torch.tensor(one), torch.tensor(logs), rtol=2e-5, atol=2e-5)
            torch.testing.assert_close(weights, saved, rtol=0, atol=1e-5)


def test_the_captured_loss_is_right_on_any_mesh(tmp_path: Path) -> None:
    """The very loss function that a Trainer's step captures, on meshes that are simulated."""
    trainer = trainer_of(ParallelPenalised, tmp_path, Told(), {}, mesh="dp=1")
    inputs = {name: torch.stack([row[name] for row in rows(4, 7)]) for name in ("input_ids", "labels")}
    for mesh in ("dp=2,tp=2", "tp=2,pp=2"):
        model = trainer_of(Penalised, tmp_path, Told(), {}).model
        report = autopar.verify(model, mesh, loss_fn=trainer._computing.loss, batch=(inputs, torch.tensor(17.0)))
        assert report.ok, report


def test_a_trainer_says_what_does_not_go(tmp_path: Path) -> None:
    def said(more: dict[str, Any], **kwargs: Any) -> str:
        with pytest.raises(AutoparError) as caught:
            trainer_of(Trainer, tmp_path, Told(), more, mesh="dp=1", **kwargs)
        return str(caught.value)

    assert said({"torch_compile": True}) == (
        "TrainingArguments(torch_compile=True) is left out with autopar; in its place of options: compile='inductor'."
    )
    assert said({"gradient_checkpointing": True}).endswith("in its place of options: recompute='full' or 'selective'.")
    assert said({"bf16": True}, options={"precision": "fp16"}) == (
        "mixed_precision='bf16', but options say precision='fp16': say one."
    )
    assert said({}, options={"loss_fn": len}) == (
        "options={'loss_fn': ...}: a Trainer says these itself. Its loss is compute_loss, its batch the whole one on "
        "every rank, its device that of TrainingArguments."
    )


def test_words_of_precision_are_those_of_the_step(tmp_path: Path) -> None:
    assert trainer_of(Trainer, tmp_path, Told(), {"bf16": True}, mesh="dp=1")._asked.options == {"precision": "bf16"}
