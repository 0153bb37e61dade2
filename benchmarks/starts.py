"""CPU seconds of a start that finds its program compiled: of one rank, and of all ranks of a machine.

    timeout 900 .venv/bin/python -m benchmarks.starts [--layers 80] [--ranks 8] [--record]

A GPT of width 16. Each rank imports, builds the model and AdamW, calls `parallelize` with a cache, and has its program.
Measured are user and system time of each process: up to `import torch`, up to the optimizer (what plain PyTorch needs
as well: an optimizer loads its compiler), and up to the program. A resumed start reads; in a first one of several ranks
one compiles, and the others read. Python keeps its byte code, as it does unless PYTHONDONTWRITEBYTECODE says otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.records import Figure, Records, record_option

RANK = """
import json, sys, time
marks = {}
import torch
marks["torch"] = time.process_time()
import torch.distributed as dist
from torch.nn import functional as F
from examples.gpt import GPT, GPTConfig

def loss_fn(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

layers, mesh, cache = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
torch.manual_seed(0)
model = GPT(GPTConfig(context=8, layers=layers, width=16))
x, y = torch.randint(64, (2, 16, 8))
if mesh == "plain":
    optimizer = torch.optim.AdamW(model.parameters())
    marks["done"] = time.process_time()
else:
    import autopar
    autopar.parallelize  # which imports it
    marks["import"] = time.process_time()
    model = autopar.parallelize(model, mesh, loss_fn=loss_fn, cache=cache)
    marks["parallel"] = time.process_time()
    model.prepare(x, y)
    marks["done"] = time.process_time()
    marks["read"] = model.programs[-1].compiled.is_read
    optimizer = torch.optim.AdamW(model.parameters())
    marks["optimizer"] = time.process_time()
print(json.dumps(marks), flush=True)
if dist.is_initialized():
    dist.barrier()
"""


@dataclass(frozen=True, slots=True)
class Start:
    """CPU seconds of one rank. torch: its import; imported: autopar's as well; done: until the program is there, or the
    optimizer of plain PyTorch."""

    torch: float
    imported: float
    done: float
    is_read: bool

    @property
    def program(self) -> float:
        """From the imports to the program."""
        return self.done - self.imported


def start(layers: int, mesh: str, cache: str, ranks: int = 1) -> list[Start]:
    """Start all ranks, and give what each took. Raises CalledProcessError."""
    root = Path(__file__).resolve().parent.parent
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "WORLD_SIZE": str(ranks)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000)}
    environment |= {"LOCAL_WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-c", RANK, str(layers), mesh, cache]
    started = [
        subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True,
                         env=environment | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if mesh != "plain" else {}))
        for rank in range(ranks)
    ]  # fmt: skip
    found = []
    for process in started:
        said, _ = process.communicate(timeout=600)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command[:2])
        marks = json.loads(said.splitlines()[-1])
        found.append(
            Start(marks["torch"], marks.get("import", marks["torch"]), marks["done"], marks.get("read", False))
        )
    return found


def best(starts: list[Start]) -> Start:
    """The one that was disturbed least."""
    return min(starts, key=lambda start: start.done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--ranks", type=int, default=8, help="of one machine; 1 leaves this out")
    parser.add_argument("--rounds", type=int, default=3)
    record_option(parser)
    asked = parser.parse_args()
    records, case = Records("starts", asked.record), f"{asked.layers} layers"
    with tempfile.TemporaryDirectory() as folder:
        first = start(asked.layers, "dp=1", folder)[0]  # makes Python's byte code as well
        first = best([start(asked.layers, "dp=1", f"{folder}/{i}")[0] for i in range(asked.rounds)])
        begun = time.monotonic()
        resumed = best([start(asked.layers, "dp=1", folder)[0] for _ in range(asked.rounds)])
        wall = (time.monotonic() - begun) / asked.rounds
        plain = best([start(asked.layers, "plain", folder)[0] for _ in range(asked.rounds)])
        assert resumed.is_read and not first.is_read
        print(
            f"compiled {first}\nread     {resumed}, {wall:.2f} s by the clock with the end of Python\nplain    {plain}"
        )
        records.add(
            Figure(f"resumed, {case}", "until the program is there", "CPU s", resumed.done, goal="<=3.0"),
            Figure(f"resumed, {case}", "beside plain PyTorch with its optimizer", "CPU s", resumed.done, plain.done),
            Figure(f"resumed, {case}", "from the imports on", "CPU s", resumed.program, first.program),
        )
        if asked.ranks > 1:
            many = start(asked.layers, f"dp={asked.ranks}", f"{folder}/many", asked.ranks)
            assert sum(not each.is_read for each in many) == 1
            one = max(many, key=lambda each: each.program)  # who compiles
            whole, own = sum(each.done for each in many), sum(each.program for each in many)
            parts = ", ".join(f"{each.program:.2f}" for each in many)
            print(f"{asked.ranks} ranks, one compiles: {whole:.1f} CPU s, {own:.1f} from the imports on ({parts})")
            case, goal = f"{asked.ranks} ranks, {case}", "<=1.3"
            records.add(
                Figure(case, "with all imports, beside the rank that compiles", "CPU s", whole, one.done, goal),
                Figure(case, "from the imports on, beside the rank that compiles", "CPU s", own, one.program, goal),
            )


if __name__ == "__main__":
    main()
