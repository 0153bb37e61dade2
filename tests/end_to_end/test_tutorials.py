"""docs/tutorials: both sides of each run and have the same losses, and the pages show the true difference."""

from __future__ import annotations

import difflib
import multiprocessing
import os
import random
import runpy
import socket
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT

TUTORIALS = ROOT / "docs" / "tutorials"
NAMES = ("ddp", "fsdp2", "transformers", "trainer")
ALONE = {"transformers_before", "trainer_before"}  # the others are for torchrun: here with two ranks


class Scripts:
    """Two processes that run scripts as torchrun does, one script after another: torch is imported once."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "torch.distributed.checkpoint", "autopar", "transformers"])
        self.pipes, self.processes = [], []
        for rank in range(2):
            mine, theirs = context.Pipe()
            self.pipes.append(mine)
            self.processes.append(context.Process(target=_serve, args=(rank, theirs), daemon=True))
            self.processes[-1].start()

    def losses(self, name: str, folder: Path) -> list[float]:
        """What the `main` of a script returns on every rank."""
        pipes = self.pipes[:1] if name in ALONE else self.pipes
        port = _port()
        for pipe in pipes:
            pipe.send((name, len(pipes), port, str(folder)))
        found = [pipe.recv() if pipe.poll(120) else f"rank {rank} hangs" for rank, pipe in enumerate(pipes)]
        assert not [each for each in found if isinstance(each, str)], "\n".join(map(str, found))
        assert found == [found[0]] * len(pipes)
        return found[0]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _port() -> int:
    """A free one, below those that the system gives to connections: no other test takes it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as free:
            if free.connect_ex(("localhost", port)):  # nobody listens
                return port


def _serve(rank: int, pipe: Connection) -> None:
    sys.path.insert(0, str(TUTORIALS))
    torch.set_num_threads(1)
    # Gloo loses what has not left when a group ends. So one ends when both ranks have answered: before the next script.
    destroy, dist.destroy_process_group = dist.destroy_process_group, lambda: None
    while True:
        name, size, port, folder = pipe.recv()
        if dist.is_initialized():
            destroy()
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "localhost"}
        for variable, value in (variables | {"MASTER_PORT": port}).items():
            os.environ.pop(variable, None)
            if size > 1:
                os.environ[variable] = str(value)
        if "accelerate" in sys.modules:  # it asks for the variables once in a process
            sys.modules["accelerate.state"].AcceleratorState._reset_state(True)
        os.chdir(folder)
        try:
            pipe.send(runpy.run_path(str(TUTORIALS / f"{name}.py"))["main"]())
        except Exception:
            pipe.send(traceback.format_exc())


@pytest.fixture(scope="module")
def scripts() -> Iterator[Scripts]:
    pool = Scripts()
    yield pool
    pool.close()


@pytest.mark.gloo
@pytest.mark.parametrize("name", NAMES)
def test_both_sides_have_the_same_losses(name: str, scripts: Scripts, tmp_path: Path) -> None:
    if name == "trainer":
        pytest.importorskip("accelerate", reason="transformers' Trainer needs it: pip install accelerate")
    before, after = (scripts.losses(f"{name}_{side}", tmp_path) for side in ("before", "after"))
    assert len(before) == 4 and before[-1] < before[0] - 0.2  # it learns
    torch.testing.assert_close(after, before, rtol=1e-6, atol=0)


@pytest.mark.gloo
def test_a_model_without_values_goes_on_from_files(
    scripts: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the plain model that `from_pretrained` loads."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(TUTORIALS))
    from toy import dataset

    scripts.losses("transformers_before", tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    optimizer, wanted = torch.optim.SGD(plain.parameters(), lr=0.1), []
    for tokens, _ in torch.utils.data.DataLoader(dataset(), batch_size=8):
        loss = plain(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    torch.testing.assert_close(scripts.losses("transformers_meta", tmp_path), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_the_difference(name: str) -> None:
    assert difference(name) in (TUTORIALS / f"from_{name}.md").read_text(), f"docs/tutorials/from_{name}.md is behind"


def difference(name: str) -> str:
    """What `diff -u` says of the two scripts of a tutorial."""
    sides = [(TUTORIALS / f"{name}_{side}.py").read_text().splitlines() for side in ("before", "after")]
    lines = difflib.unified_diff(*sides, f"{name}_before.py", f"{name}_after.py", lineterm="", n=2)
    return "\n".join(["```diff", *lines, "```"])
