"""Whoever holds a parameter from before `parallelize` holds the parallel one: on every mesh, at each ZeRO stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from holders import Held, loss_fn, plain, script
from processes import Ranks
from safetensors.torch import save_file
from torch import Tensor, nn

import autopar

pytestmark = pytest.mark.gloo
ON_TWO: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dp=2", {}), ("dp=2", {"zero": 1}), ("dp=2", {"zero": 2}), ("dp=2", {"zero": 3}), ("tp=2", {}),
    ("pp=2", {"microbatches": 2}), ("auto", {}),
)  # fmt: skip
ON_FOUR: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dp=2,pp=2", {"microbatches": 2, "zero": 1}), ("fsdp=2,tp=2", {}),
)  # fmt: skip


class Single(nn.Module):
    """The plain module, trained as a parallel one is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parameters, self.model = model.parameters, model  # type: ignore[method-assign]

    def train_on(self, *batch: Tensor) -> Tensor:
        loss = loss_fn(self.model, *batch)
        loss.backward()
        return loss.detach()


def _table(rank: int, rows: tuple[tuple[str, dict[str, Any]], ...], folder: str | None = None) -> None:
    """folder: of the values of models that are built on the meta device."""
    real = folder is None
    expected = list(script(plain(), Single, real))
    for mesh, options in rows:
        base = plain() if real else _on_meta()
        if not real:
            options = {**options, "weights": folder}

        def parallel(model: nn.Module) -> Any:
            made = autopar.parallelize(model, mesh, loss_fn=loss_fn, **options)  # noqa: B023
            object.__setattr__(made, "train_on", made.forward_backward)
            return made

        for (name, found), (_, wanted) in zip(script(base, parallel, real), expected, strict=True):
            assert len(found) == len(wanted)
            for at, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
                torch.testing.assert_close(
                    mine, theirs, rtol=1e-9, atol=1e-10,
                    msg=lambda text: f"{mesh} {options} {name} [{at}]: {text}",  # noqa: B023
                )  # fmt: skip


def _on_meta() -> Held:
    with torch.device("meta"):
        return plain()


def test_holders_of_a_model_on_the_meta_device(two: Ranks, tmp_path: Path) -> None:
    known = plain()
    save_file({name: value.detach() for name, value in known.named_parameters()}, tmp_path / "model.safetensors")
    two.run(_table, (("fsdp=2", {}), ("pp=2", {"microbatches": 2})), str(tmp_path), timeout=200)


def test_holders_on_two_ranks(two: Ranks) -> None:
    two.run(_table, ON_TWO, timeout=200)


def test_holders_on_four_ranks(four: Ranks) -> None:
    four.run(_table, ON_FOUR, timeout=200)
