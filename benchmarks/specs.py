"""Thousands of wrong meshes, layouts, stages, schedules, plans and machine files: is each refused in words?

    timeout 1200 .venv/bin/python -m benchmarks.specs --count 2000 --seed 0

Draws a text of one kind by a small grammar, changes it in some places (a character, a number, a word of another kind,
what Python's readers stumble over), and gives it to what reads it; a step is compiled where it can be read. Allowed are
a result and an error of ours with more than a few words, within LIMIT_S CPU seconds. All else is printed and counted: a
traceback of another kind, a time-out, memory beyond LIMIT_MIB. Exits with 1 if there was any.
"""

from __future__ import annotations

import argparse
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.api import compile as compile_
from autopar.errors import AutoparError
from autopar.machines.files import read_machine
from autopar.planning.space.decisions import read_plan

LIMIT_S, LIMIT_MIB = 2, 400  # of a spec, in CPU seconds: a machine may have other work
HANGS_S = 20  # by the clock
AXES = ("dp", "tp", "pp", "fsdp", "cp", "ulysses", "ep", "xx", "")
WORDS = ("auto", "gpipe", "1f1b", "zb-v", "full", "[tp,-]", "[-,-]", "partial(tp)", "2~cp", "@ep", "true", "nan", "inf")
ODD = ("\0", "\n", "'", '"', "{", "}", "²", "٣", "\ud800".encode("utf-8", "replace").decode(), "-", "=", ",", " ", "\\",
       "9" * 5000, "1e999", "99999999999", "[" * 2000, "é", "\x1b[31m", "%s", "../" * 20)  # fmt: skip


class Net(nn.Module):
    """Two linear layers in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    value: Tensor = model(x).square().mean()
    return value


class TooLong(Exception):
    """A spec took longer than HANGS_S."""


def drawn_mesh(dice: random.Random) -> str:
    return ",".join(f"{dice.choice(AXES[:7])}={dice.choice((1, 2, 3, 4, -1))}" for _ in range(dice.randint(1, 3)))


def drawn_layout(dice: random.Random) -> str:
    dims = (dice.choice(("-", "tp", "dp", "dp:tp", "2:tp", "2~cp", "@ep")) for _ in range(dice.randint(1, 3)))
    return f"[{','.join(dims)}]{dice.choice(('', ' partial(tp)', ' partial(max:dp)'))}"


def drawn_table(dice: random.Random) -> str:
    ranks, parts = dice.randint(1, 3), dice.randint(1, 3)
    rows = [[f"{rank}{kind}{part}" for kind in "FB" for part in range(parts)] for rank in range(ranks)]
    for row in rows:
        if dice.random() < 0.3:
            dice.shuffle(row)
    return "\n".join(",".join(row) for row in rows)


def drawn_plan(dice: random.Random) -> str:
    lines = [f'mesh = "{drawn_mesh(dice)}"']
    lines += dice.sample(
        ["zero = 3", "microbatches = 2", 'schedule = "1f1b"', 'recompute = "full"', "recompute = 0.5", "slices = 2",
         'shard = { "layers.0.weight" = "[tp,-]" }', "stages = { }", 'precision = "bf16"', "chunked_loss = true"],
        dice.randint(0, 4),
    )  # fmt: skip
    return "\n".join(lines)


def drawn_machine(dice: random.Random) -> str:
    text = (Path(__file__).parent.parent / "autopar" / "machines" / "cpu.toml").read_text()
    lines = text.splitlines()
    if dice.random() < 0.5:
        del lines[dice.randrange(len(lines))]
    return "\n".join(lines)


def changed(text: str, dice: random.Random) -> str:
    """The text with up to three changes; in one of four it stays."""
    for _ in range(dice.choice((0, 1, 1, 2, 3))):
        at = dice.randint(0, len(text))
        kind = dice.random()
        if kind < 0.4:
            text = text[:at] + dice.choice(ODD) + text[at:]
        elif kind < 0.6:
            text = text[:at] + text[at + dice.randint(1, 6) :]
        elif kind < 0.8:
            text = text[:at] + str(dice.choice((0, -1, 7, 10**6, 10**12, 2**63, 10**30, 1.5))) + text[at + 1 :]
        else:
            text = text[:at] + dice.choice(WORDS) + text[at:]
    return text


def _compile(mesh: Any, **options: Any) -> None:
    compile_(NET, mesh, loss_fn=loss_fn, batch=(X,), **options)


def _written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(text.encode("utf-8", "surrogateescape") if "²" not in text else text.encode("utf-16"))
    return path


def _plan(text: str, folder: Path) -> None:
    plan = read_plan(_written(folder, "plan.toml", text))
    _compile(plan.mesh, **plan.said)


def _stages(text: str, folder: Path) -> None:
    first, _, second = text.partition(",")
    _compile("pp=2", stages={first: 0, second: 1})


NET = Net()
X = torch.randn(12, 8)
KINDS: dict[str, tuple[Callable[[random.Random], str], Callable[[str, Path], object]]] = {
    "mesh": (drawn_mesh, lambda text, folder: _compile(text)),
    "mesh of a dict": (
        drawn_mesh, lambda text, folder: _compile({part.partition("=")[0]: _number(part) for part in text.split(",")}),
    ),
    "shard": (drawn_layout, lambda text, folder: _compile("dp=2,tp=2", shard={"layers.0.weight": text})),
    "pattern": (
        lambda dice: dice.choice(("layers.*.weight", "layers.[01].*", "*")),
        lambda text, folder: _compile("dp=2,tp=2", shard={text: "[tp,-]"}),
    ),
    "stages": (lambda dice: "layers.[01],layers.[23]", _stages),
    "schedule": (drawn_table, lambda text, folder: _compile("pp=2", microbatches=2, schedule=text)),
    "schedule file": (
        drawn_table,
        lambda text, folder: _compile("pp=2", microbatches=2, schedule=str(_written(folder, "order.csv", text))),
    ),
    "schedule name": (
        lambda dice: dice.choice(("1f1b", "orders.csv", "zb-v")),
        lambda text, folder: _compile("pp=2", microbatches=2, schedule=text),
    ),
    "plan": (drawn_plan, _plan),
    "plan's path": (lambda dice: "plan.toml", lambda text, folder: read_plan(text)),
    "machine": (drawn_machine, lambda text, folder: read_machine(_written(folder, "here.toml", text))),
    "number": (
        lambda dice: dice.choice(("microbatches=2", "zero=1", "slices=2", "recompute=0.5", "bucket_bytes=10")),
        lambda text, folder: _compile("dp=2", **{text.partition("=")[0]: _number(text)}),
    ),
}  # fmt: skip


def _number(text: str) -> Any:
    value = text.partition("=")[2]
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def fault_of(run: Callable[[], object], names: str = "") -> str | None:
    """What is wrong with how a spec was taken; None if nothing is. names: what every error has to name."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    signal.setitimer(signal.ITIMER_REAL, HANGS_S)
    try:
        run()
    except AutoparError as error:
        if len(str(error)) < 25:
            return f"few words: {error}"
        if names not in str(error):
            return f"no name: {error}"
    except TooLong:
        return f"no end after {HANGS_S} s"
    except Exception as error:
        if isinstance(error, TypeError) and str(error).startswith("there is no option"):
            return None  # Python's own kind for an argument that a function has not
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    if grown > LIMIT_MIB:
        return f"{grown} MiB more"
    took = time.process_time() - start
    return f"{took:.1f} CPU s" if took > LIMIT_S else None


def spec(seed: int, number: int) -> tuple[str, str]:
    """The kind and the text of a row."""
    dice = random.Random(f"{seed} {number}")
    kind = dice.choice(sorted(KINDS))
    return kind, changed(KINDS[kind][0](dice), dice)


def timed(run: Callable[[int], str | None], numbers: range, seconds: float) -> tuple[dict[int, str], int]:
    """What is wrong, by row, and how many rows were tried within a time."""
    found: dict[int, str] = {}
    end, tried = time.monotonic() + seconds, 0

    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    try:
        for number in numbers:
            if time.monotonic() > end:
                break
            tried += 1
            if fault := run(number):
                found[number] = fault
    finally:
        signal.signal(signal.SIGALRM, before)
    return found, tried


def faults(seed: int, numbers: range, seconds: float) -> tuple[dict[int, str], int]:
    """What is wrong, by row, and how many rows were tried."""
    with tempfile.TemporaryDirectory() as folder:

        def run(number: int) -> str | None:
            kind, text = spec(seed, number)
            fault = fault_of(lambda: KINDS[kind][1](text, Path(folder)))
            return f"{kind} {text[:100]!r}: {fault}" if fault else None

        return timed(run, numbers, seconds)


def command(text: str, faults: Callable[[int, range, float], tuple[dict[int, str], int]], what: str) -> int:
    """Draw rows as the command line says, and print what is wrong. text: of its help. what: the rows in words."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=900)
    options = parser.parse_args()
    found, tried = faults(options.seed, range(options.first, options.first + options.count), options.seconds)
    for number, fault in found.items():
        print(number, fault)
    print(f"{tried} {what}, {len(found)} taken wrongly")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(command(__doc__ or "", faults, "specs"))
