"""A job from the configuration of a transformers model alone, as a folder of the hub has it: without weights, on the
meta device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import TargetError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from autopar.job import Job

_LONGEST = 4096  # tokens of a row, where nobody says how many
_IMAGES, _PAIRS, _SPEECH = "ImageClassification", "ZeroShotImageClassification", "SpeechSeq2Seq"
_MAPPINGS = {  # of what is trained with a known batch and loss: AutoModelFor..., and the models of each
    "CausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING", "Seq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MaskedLM": "MODEL_FOR_MASKED_LM_MAPPING", _IMAGES: "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    _PAIRS: "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING", _SPEECH: "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
}  # fmt: skip


def job_of_config(file: Path, rows: int, length: int | None) -> Job:
    """A step of the model that a config.json describes: of a language model, one that tells what is in an image, one
    of images and their texts (CLIP), or one that writes down speech (Whisper). rows: of its batch, each of `length`
    tokens. Raises TargetError."""
    try:
        import transformers
    except ImportError:
        raise TargetError(f"--hf {file}: transformers is not installed here: pip install transformers.") from None
    import torch

    from autopar.job import Job

    said = _read(file)
    kind = str(said.get("model_type"))
    if kind not in transformers.CONFIG_MAPPING:
        raise TargetError(
            f"--hf {file}: model_type {kind!r} is none that transformers {transformers.__version__} knows. Write a "
            f"TARGET with the model instead."
        )
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict({**said, "use_cache": False})
        task = _task(file, said.get("architectures"), config)
        with torch.device("meta"):
            # As it is trained; a configuration says in which dtype its weights are stored. --precision shortens it.
            auto = getattr(transformers, f"AutoModelFor{task}")
            model: nn.Module = auto.from_config(config, dtype=torch.float32)
    except TargetError:
        raise
    except Exception as error:
        raise TargetError(f"--hf {file}: transformers cannot build it: {type(error).__name__}: {error}") from error
    if task == _IMAGES:
        labels = torch.empty(rows, dtype=torch.long, device="meta")
        return Job(model, loss_fn=_image_loss, batch=(_images(file, config, rows, length), labels))
    if task == _PAIRS:
        tokens = _tokens(file, config.text_config, rows, length)
        return Job(model, loss_fn=_pair_loss, batch=(tokens, _images(file, config.vision_config, rows)))
    tokens = _tokens(file, config, rows, length)
    if task == _SPEECH:
        return Job(model, loss_fn=_speech_loss, batch=(_sounds(file, config, rows), tokens))
    return Job(model, loss_fn=_token_loss, batch=(tokens, tokens))


def _task(file: Path, names: object, config: Any) -> str:
    """What a model is trained for, by the class that its configuration names. Raises TargetError."""
    import transformers

    by_name: dict[str, str] = {}
    for task, mapping in _MAPPINGS.items():
        found = getattr(transformers, mapping).get(type(config), ())
        for each in found if isinstance(found, tuple) else (found,):
            by_name.setdefault(each.__name__, task)
    if not isinstance(names, list) or not names:
        names = [next(iter(by_name), f"{type(config).__name__} alone")]
    name = str(names[0])
    if name not in by_name:
        raise TargetError(
            f"--hf {file}: {name} is no model with a loss of tokens, of classes of images, or of images and their "
            f"texts (transformers has of {config.model_type}: {', '.join(by_name) or 'none'}). Name one of these under "
            f"'architectures', or write a TARGET with the model, its batch and its loss instead."
        )
    return by_name[name]


def _tokens(file: Path, config: Any, rows: int, length: int | None) -> torch.Tensor:
    """Rows of tokens. Raises TargetError for more than a model has positions."""
    import torch

    name = next((name for name in ("max_target_positions", "max_position_embeddings") if hasattr(config, name)), "")
    most = getattr(config, name, None)
    if isinstance(most, int) and 0 < most < (length or 0):
        raise TargetError(f"--sequence {length}: the model has {most} positions ({name} in {file}).")
    usual = most or getattr(config, "n_positions", None)  # T5 has more, but is not trained with them
    length = length or min(usual if isinstance(usual, int) and usual > 0 else _LONGEST, _LONGEST)
    return torch.empty(rows, length, dtype=torch.long, device="meta")


def _images(file: Path, config: Any, rows: int, length: int | None = None) -> torch.Tensor:
    """Images of the size that a configuration says. Raises TargetError."""
    import torch

    if length is not None:
        raise TargetError(f"--sequence {length}: {file} is of a model of images, whose size stands there.")
    size = getattr(config, "image_size", 224)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return torch.empty(rows, getattr(config, "num_channels", 3), height, width, device="meta")


def _sounds(file: Path, config: Any, rows: int) -> torch.Tensor:
    """Speech as a model reads it at its longest. Raises TargetError."""
    import torch

    bands, steps = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
    if config.model_type != "whisper" or bands is None or steps is None:
        raise TargetError(
            f"--hf {file}: of models that write down speech Whisper is known, whose configuration says how long it is "
            f"(num_mel_bins, max_source_positions). Write a TARGET with the model, its batch and its loss instead."
        )
    return torch.empty(rows, bands, 2 * steps, device="meta")  # its second convolution has a stride of 2


def _token_loss(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=labels).loss
    return loss


def _image_loss(model: nn.Module, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(pixel_values=pixels, labels=labels).loss
    return loss


def _pair_loss(model: nn.Module, tokens: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, pixel_values=pixels, return_loss=True).loss
    return loss


def _speech_loss(model: nn.Module, sounds: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_features=sounds, labels=labels).loss
    return loss


def _read(file: Path) -> dict[str, Any]:
    """What a config.json says; of a folder, its file of that name."""
    file = file / "config.json" if file.is_dir() else file
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise TargetError(
            f"--hf {file}: it cannot be read as JSON: {why}. Name the config.json of a model, or its folder."
        ) from None
    if not isinstance(said, dict):
        raise TargetError(f"--hf {file}: it is no configuration, but a JSON {type(said).__name__}.")
    return said
