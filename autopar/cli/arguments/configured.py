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
_KINDS = ("ForCausalLM", "ForMaskedLM")  # whose loss is of the tokens that they are given


def job_of_config(file: Path, rows: int, length: int | None) -> Job:
    """A step of the language model that a config.json describes. rows: of its batch, each of `length` tokens. Raises
    TargetError."""
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
    names = said.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else f"{kind}ForCausalLM"
    if not name.endswith(_KINDS):
        raise TargetError(
            f"--hf {file}: {name} is none of {', '.join(f'...{each}' for each in _KINDS)}, whose batch and loss are "
            f"known. Write a TARGET with its batch and its loss instead."
        )
    auto = transformers.AutoModelForMaskedLM if name.endswith(_KINDS[1]) else transformers.AutoModelForCausalLM
    most = said.get("max_position_embeddings")
    most = most if isinstance(most, int) and most > 0 else _LONGEST
    if length is not None and length > most:
        raise TargetError(f"--sequence {length}: the model has {most} positions (max_position_embeddings in {file}).")
    tokens = torch.empty(rows, length or min(most, _LONGEST), dtype=torch.long, device="meta")
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict({**said, "use_cache": False})
        with torch.device("meta"):
            # As it is trained; a configuration says in which dtype its weights are stored. --precision shortens it.
            model: nn.Module = auto.from_config(config, dtype=torch.float32)
    except Exception as error:
        raise TargetError(f"--hf {file}: transformers cannot build it: {type(error).__name__}: {error}") from error
    return Job(model, loss_fn=_token_loss, batch=(tokens, tokens))


def _token_loss(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=labels).loss
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
