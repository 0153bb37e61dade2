"""The groups of real programs, whole and split: those that have different kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import models
import torch
from gpt import GPT, GPTConfig

import autopar
from autopar.ir.ops.fused import Fused, fused_of
from autopar.ir.ops.measure import local_type
from autopar.ir.program import record
from autopar.passes.fuse.fuse import fused
from autopar.runtime.triton.emit import emit
from autopar.runtime.triton.lowering.lower import lower

MESHES: tuple[tuple[str, dict[str, Any]], ...] = (("dp=1", {}), ("dp=2,tp=2", {"precision": "bf16"}))


def gpt_with_dropout() -> models.Case:
    torch.manual_seed(2)
    model = GPT(GPTConfig(models.VOCABULARY, models.TIME, layers=1, heads=4, width=32, dropout=0.1))
    return model.train(), models.token_loss, (models.tokens(), models.labels())


def t5() -> models.Case:
    import transformers

    sizes = {"vocab_size": 40, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    config = transformers.T5Config(**sizes, dropout_rate=0.1, decoder_start_token_id=0, pad_token_id=0)
    batch = models.tokens(), models.tokens()
    return (
        transformers.T5ForConditionalGeneration(config),
        lambda model, x, y: model(input_ids=x, labels=y).loss,
        batch,
    )


def mixtral() -> models.Case:
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, router_aux_loss_coef=0.01, output_router_logits=True,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    return model, lambda model, x: model(input_ids=x, labels=x).loss, (models.tokens(),)


PROGRAMS: dict[str, Callable[[], models.Case]] = {
    "gpt": gpt_with_dropout,
    "llama": models.llama,
    "t5": t5,
    "vit": models.vit,
    "mixtral": mixtral,
    "convolution": models.conv,
}


def groups(every: bool) -> Iterator[tuple[str, Fused]]:
    """Each group of the programs that is not like one before: on every mesh, or each program on one, in turns."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    seen: set[str] = set()
    for i, (name, make) in enumerate(PROGRAMS.items()):
        for mesh, options in MESHES if every else (MESHES[i % 2],):
            model, loss_fn, batch = make()
            program = autopar.compile(model, mesh, loss_fn=loss_fn, batch=batch, **options).program
            for node in fused(program).calls():
                group = fused_of(node)
                if group is None:
                    continue
                digest = emit(lower(group)).digest
                if digest not in seen:
                    seen.add(digest)
                    yield f"{name} {mesh} {group.name}", group


def operands_of(group: Fused, seed: int = 0) -> list[Any]:
    """Values that suit a group's operands: what has one number a row is positive, as the factors of norms are."""
    generator = torch.Generator().manual_seed(seed)
    found: list[Any] = []
    for node in group.placeholders:
        if record(node).types[0] is None:
            found.append(1)
            continue
        type_ = local_type(node, group.mesh)
        if type_.dtype == torch.bool:
            found.append(torch.rand(type_.shape, generator=generator) < 0.6)
        elif type_.dtype.is_floating_point:
            drawn = torch.randn(type_.shape, generator=generator, dtype=torch.float64)
            is_of_row = bool(type_.shape) and type_.shape[-1] == 1
            found.append((drawn.abs() + 0.5 if is_of_row else drawn).to(type_.dtype))
        else:
            found.append(torch.randint(0, 6, type_.shape, generator=generator).to(type_.dtype))
    return found
