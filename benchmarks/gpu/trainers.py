"""Accelerate's loop and transformers' Trainer on one rank over NCCL, each beside the same without autopar."""

from __future__ import annotations

import importlib.util
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.gpu.models import ROOT

CLOSE = {"Accelerate": 1e-6, "Trainer": 1e-3}  # the loop is in float64, and Trainer in float32


def trainers(device: str) -> None:
    """The largest relative difference of losses, norms, rates and metrics."""
    missing = [name for name in ("accelerate", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}")
        return
    sys.path.append(str(ROOT / "tests" / "integrations"))
    logging.disable(logging.WARNING)
    sides = {"Accelerate": _accelerate, "Trainer": _trainer}
    with tempfile.TemporaryDirectory() as folder:
        pairs = {name: side(device, Path(folder)) for name, side in sides.items()}
        dist.destroy_process_group()  # while its file is there: a group that ends looks for it
    wrong = []
    for name, (ours, theirs) in pairs.items():
        apart = max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(ours, theirs, strict=True))
        print(f"- {name}: {len(ours)} numbers, largest relative difference {apart:.1e}")
        wrong += [name] * (apart > CLOSE[name])
    assert not wrong, f"not as without autopar: {wrong}"


def _accelerate(device: str, folder: Path) -> tuple[list[float], list[float]]:
    import accelerate
    from loops import accelerated, as_torchrun_does, loss_fn

    from autopar.integrations.accelerate import Accelerator

    more: dict[str, Any] = {"gradient_accumulation_steps": 2, "cpu": device == "cpu"}
    plain = _numbers(accelerated(accelerate.Accelerator(**more), folder / "plain"))
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    as_torchrun_does(0, 1)
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
    return _numbers(accelerated(Accelerator(mesh="dp=1", loss_fn=loss_fn, **more), folder / "ours")), plain


def _trainer(device: str, folder: Path) -> tuple[list[float], list[float]]:
    import transformers
    from trained import trained

    from autopar.integrations.transformers import Trainer

    more = {"use_cpu": device == "cpu"}
    ours = trained(Trainer, folder / "trainer", None, more, mesh="dp=1")
    return ours[0], trained(transformers.Trainer, folder / "plain trainer", None, more)[0]


def _numbers(found: dict[str, Any]) -> list[float]:
    return [value for values in found.values() if isinstance(values, list) for value in values]
