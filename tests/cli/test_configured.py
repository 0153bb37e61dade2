"""`autopar plan --hf`: a configuration of transformers is enough; nothing is downloaded, and nothing allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import __version__

import autopar
from autopar.cli import commands as cli
from autopar.cli.arguments.configured import job_of_config
from autopar.errors import TargetError

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    "max_position_embeddings": 64, "torch_dtype": "bfloat16",
}  # fmt: skip
BERT = {
    "architectures": ["BertForMaskedLM"], "model_type": "bert", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50, "max_position_embeddings": 16,
}  # fmt: skip


def written(folder: Path, says: Any) -> Path:
    file = folder / "config.json"
    file.write_text(says if isinstance(says, str) else json.dumps(says))
    return file


GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2,
    "n_positions": 24, "vocab_size": 50,
}  # fmt: skip
T5 = {
    "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64,
    "num_layers": 1, "num_heads": 4, "vocab_size": 50, "n_positions": 20, "decoder_start_token_id": 0,
    "pad_token_id": 0,
}  # fmt: skip
VIT = {
    "architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 8,
}  # fmt: skip
CLIP = {
    "architectures": ["CLIPModel"], "model_type": "clip", "projection_dim": 16,
    "text_config": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50,
        "max_position_embeddings": 12, "eos_token_id": 49,
    },
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
        "patch_size": 8,
    },
}  # fmt: skip
SIGLIP = {**CLIP, "architectures": ["SiglipModel"], "model_type": "siglip"}
WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "d_model": 32, "encoder_layers": 1,
    "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "vocab_size": 60, "num_mel_bins": 10, "max_source_positions": 20,
    "max_target_positions": 14, "pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("says", "length", "shapes"),
    [
        (LLAMA, None, [(6, 64)] * 2), (LLAMA, 8, [(6, 8)] * 2), (BERT, None, [(6, 16)] * 2),
        (GPT2, None, [(6, 24)] * 2), (T5, None, [(6, 20)] * 2), (T5, 40, [(6, 40)] * 2),
        (VIT, None, [(6, 3, 32, 32), (6,)]), (CLIP, None, [(6, 12), (6, 3, 32, 32)]),
        (SIGLIP, 8, [(6, 8), (6, 3, 32, 32)]), (WHISPER, None, [(6, 10, 40), (6, 14)]),
        ({**LLAMA, "architectures": None}, 8, [(6, 8)] * 2),
    ],
)  # fmt: skip
def test_a_job_of_a_configuration(tmp_path: Path, says: Any, length: int | None, shapes: list[tuple[int, ...]]) -> None:
    job = job_of_config(written(tmp_path, says), 6, length)
    assert type(job.model).__name__ == (says["architectures"] or ["LlamaForCausalLM"])[0]
    assert {p.device.type for p in job.model.parameters()} == {"meta"}
    assert {p.dtype for p in job.model.parameters()} == {torch.float32}, "as it is trained"
    assert [tuple(one.shape) for one in job.batch] == shapes


@pytest.mark.parametrize("says", [GPT2, T5, VIT, CLIP, SIGLIP, WHISPER], ids=lambda says: says["model_type"])
def test_its_step_is_captured(tmp_path: Path, says: Any) -> None:
    job = job_of_config(written(tmp_path, says), 6, None)
    made = autopar.compile(job.model, "dp=2", loss_fn=job.loss_fn, batch=job.batch)
    assert {row.axis for row in made.collectives} == {"dp"}


REFUSED: dict[str, tuple[Any, str]] = {
    "text": ("{", "it cannot be read as JSON: Expecting property name enclosed in double quotes: line 1 column 2 "
                  "(char 1). Name the config.json of a model, or its folder."),
    "list": ("[1]", "it is no configuration, but a JSON list."),
    "kind": ({**LLAMA, "model_type": "lama"}, f"model_type 'lama' is none that transformers {__version__} knows. Write "
                                              "a TARGET with the model instead."),
    "head": ({**LLAMA, "architectures": ["LlamaForSequenceClassification"]},
             "LlamaForSequenceClassification is no model with a loss of tokens, of classes of images, or of images and "
             "their texts (transformers has of llama: LlamaForCausalLM). Name one of these under 'architectures', or "
             "write a TARGET with the model, its batch and its loss instead."),
    "no head": ({"model_type": "wav2vec2"},
                "Wav2Vec2Config alone is no model with a loss of tokens, of classes of images, or of images and their "
                "texts (transformers has of wav2vec2: none)."),
    "speech": ({"architectures": ["MoonshineForConditionalGeneration"], "model_type": "moonshine"},
               "of models that write down speech Whisper is known, whose configuration says how long it is ("
               "num_mel_bins, max_source_positions). Write a TARGET with the model, its batch and its loss instead."),
    "broken": ({**LLAMA, "hidden_size": "wide"}, "transformers cannot build it: "),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_known_loss_is_refused(tmp_path: Path, name: str) -> None:
    says, why = REFUSED[name]
    file = written(tmp_path, says)
    with pytest.raises(TargetError) as refused:
        job_of_config(file, 4, None)
    assert str(refused.value).startswith(f"--hf {file}: {why}")


def test_images_have_no_tokens(tmp_path: Path) -> None:
    file = written(tmp_path, VIT)
    with pytest.raises(TargetError) as refused:
        job_of_config(file, 4, 9)
    assert str(refused.value) == f"--sequence 9: {file} is of a model of images, whose size stands there."


@pytest.mark.parametrize(
    ("says", "most", "name"),
    [
        (LLAMA, 64, "max_position_embeddings"),
        (CLIP, 12, "max_position_embeddings"),
        (WHISPER, 14, "max_target_positions"),
    ],
)
def test_more_tokens_than_positions(tmp_path: Path, says: Any, most: int, name: str) -> None:
    file = written(tmp_path, says)
    with pytest.raises(TargetError) as refused:
        job_of_config(file, 4, most + 1)
    assert str(refused.value) == f"--sequence {most + 1}: the model has {most} positions ({name} in {file})."


def test_it_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, LLAMA)
    plan = tmp_path / "plan.toml"
    words = f"plan --hf {tmp_path} --gpus 2 --batch 8 --machine h100-80g --top 1 --fix dp=2 --no-check --out {plan}"
    monkeypatch.setattr("sys.argv", ["autopar", *words.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    shown = capsys.readouterr()
    assert not ended.value.code, shown.err
    assert "2 devices of h100-80g, 8 rows (512 tokens) a step" in shown.out and "\ndp=2" in shown.out
    assert f"# autopar plan --hf {tmp_path} --gpus 2 --batch 8" in plan.read_text()
