"""What the tests of the passes `overlap` and `decompose` share: programs in which collectives can go under products."""

from __future__ import annotations

import torch
from models import Llama, gpt, llama, square_loss, token_loss
from random_programs import Program as RandomModel
from verified import verified

import autopar
from autopar.errors import LayoutError
from autopar.ir.plan import Fixed

OPTIONS = ({}, {"zero": 3}, {"zero": 2, "microbatches": 2}, {"recompute": "full"}, {"sequence_parallel": "auto"})
MESHES = ("dp=2,tp=2", "dp=3,tp=2", "tp=2,dp=2", "pp=2,tp=2")


def large_llama(**options: object) -> autopar.Compiled:
    """Three layers of a Llama on two GPUs, without data."""
    with torch.device("meta"):
        model = Llama(3, 4096, 32, 8, 11008, 32000, 2048)
        batch = torch.empty(2, 2048, dtype=torch.int64), torch.empty(2, 2048, dtype=torch.int64)
    return autopar.compile(model, "tp=2", loss_fn=token_loss, batch=batch, precision="bf16", **options)  # type: ignore[arg-type]


def compiled_case(case: object, mesh: str, **options: object) -> autopar.Compiled:
    model, loss_fn, batch = case()  # type: ignore[operator]
    return autopar.compile(model, mesh, loss_fn=loss_fn, batch=batch, **options)  # type: ignore[arg-type]


def verify_random(seed: int, fixed: Fixed) -> None:
    """A random model, or a GPT or Llama, with an option and on a mesh by the seed; what is refused is right."""
    model: torch.nn.Module = RandomModel(seed)
    batch, loss_fn = model.batch(), square_loss  # type: ignore[operator]
    if seed % 4 == 0:
        model, _, batch = gpt() if seed % 8 else llama()
        loss_fn = token_loss
    mesh = MESHES[seed // 2 % 4]
    options = {"microbatches": 2} if "pp" in mesh else OPTIONS[seed % len(OPTIONS)]
    said = f"{mesh} {options}\n{model}"
    print(said)
    try:
        verified(model, [mesh], loss_fn, batch, fixed=fixed, **options)  # type: ignore[arg-type]
    except LayoutError as error:
        assert "can split no weight" in str(error) or "micro-batches cannot be" in str(error), said
