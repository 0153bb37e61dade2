"""Run a script on local ranks as torchrun does: what its `main` returns, and the checkpoints that it wrote."""

from __future__ import annotations

import functools
import importlib.util
import logging
import multiprocessing
import os
import random
import sys
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

CHECKPOINT = "ckpt.pt"
PRELOADED = ["torch._dynamo", "torch.distributed.checkpoint", "autopar", "benchmarks.ports.warm"]
SECONDS = 120  # of a run, as long as it may take on a crowded machine


@dataclass(frozen=True, slots=True)
class Run:
    """numbers: what `main` returned. weights: the tensors of its checkpoint by path. fault: why there are none.
    cpu_s: the CPU time of all ranks."""

    numbers: tuple[float, ...] = ()
    weights: Mapping[str, torch.Tensor] | None = None
    fault: str = ""
    missing: str = ""
    cpu_s: float = 0.0


def run(text: str, name: str, size: int, folder: Path, dtype: torch.dtype) -> Run:
    """The outcome of a script; all ranks must return the same numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / f"{name}.py"
    script.write_text(text)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port, pipes, processes = random.SystemRandom().randrange(20_000, 32_000), [], []
    for rank in range(size):
        mine, theirs = context.Pipe()
        processes.append(context.Process(target=_rank, args=(rank, size, port, script, dtype, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(mine)
    try:
        found = [_received(pipe, rank) for rank, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return _joined(found, folder)


def tensors(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    """The tensors and numbers in a checkpoint, by path."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    if isinstance(value, (int, float)):
        return {path: torch.tensor(value)}
    items = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    )
    return {name: tensor for key, each in items for name, tensor in tensors(each, f"{path}/{key}").items()}


def _received(pipe: Connection, rank: int) -> Run:
    if not wait([pipe], SECONDS):
        return Run(fault=f"rank {rank} hangs")
    try:
        found: Run = pipe.recv()
    except EOFError:
        return Run(fault=f"rank {rank} died")
    return found


def _joined(found: list[Run], folder: Path) -> Run:
    cpu_s = sum(each.cpu_s for each in found)
    for each in found:
        if each.fault or each.missing:
            return Run(fault=each.fault, missing=each.missing, cpu_s=cpu_s)
    if any(each.numbers != found[0].numbers for each in found):
        return Run(fault=f"ranks return other numbers: {[each.numbers[:6] for each in found]}", cpu_s=cpu_s)
    saved = {path.name: load_file(path) for path in sorted(folder.rglob("*.safetensors"))}
    if (folder / CHECKPOINT).exists():
        saved[CHECKPOINT] = torch.load(folder / CHECKPOINT, weights_only=False)
    return Run(found[0].numbers, tensors(saved), cpu_s=cpu_s)


def _rank(rank: int, size: int, port: int, script: Path, dtype: torch.dtype, pipe: Connection) -> None:
    import resource

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.set_default_dtype(dtype)
    os.chdir(script.parent)
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items() if size > 1})
    if rank:
        sys.stdout = sys.stderr = Path(f"rank{rank}.log").open("w")  # noqa: SIM115  as long as the process
    before = _cpu(resource.getrusage(resource.RUSAGE_SELF))
    try:
        found = Run(numbers=tuple(float(number) for number in _module(script).main()))
    except ModuleNotFoundError as error:
        found = Run(missing=str(error.name))
    except Exception as error:
        found = Run(fault=_said(error, script))
    spent = _cpu(resource.getrusage(resource.RUSAGE_SELF)) - before
    pipe.send(Run(found.numbers, None, found.fault, found.missing, spent))
    pipe.recv() if size > 1 and not found.fault else None  # Gloo loses what has not left when a rank ends


def _cpu(usage: Any) -> float:
    return float(usage.ru_utime + usage.ru_stime)


def _module(script: Path) -> Any:
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.stem] = module
    spec.loader.exec_module(module)
    return module


@functools.cache
def _ours() -> tuple[type[Exception], ...]:
    from autopar import AutoparError

    return (AutoparError,)


def _said(error: Exception, script: Path) -> str:
    """What a user reads: our sentence, or the end of a traceback."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, _ours()):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    lines = [
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in frames
        if "/ports/" in frame.filename or frame is frames[-1]
    ]
    (script.parent / "traceback.log").write_text("".join(traceback.format_exception(error)))
    return f"{text[:500]} ({', '.join(lines)})"
