"""CPU seconds and memory of finding a plan for a large model, from cold, and the plans.

    timeout 900 .venv/bin/python benchmarks/planning.py            # all sizes, each in a process of its own
    timeout 300 .venv/bin/python benchmarks/planning.py 8B         # one of them

Llama-3 8B on 64 devices, 70B on 512 and 405B on 16,384 (h100-80g, 8,192 tokens a row, bf16). The model lies on the meta
device. CPU seconds are user and system time of the process, all threads, imports and capture included.
"""

from __future__ import annotations

import time

START = time.process_time()  # before the imports: they are part of what a user waits for

import argparse  # noqa: E402
import resource  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / folder) for folder in ("", "tests/support", "examples")]

from models import Llama, token_loss  # noqa: E402

from autopar.job import Job  # noqa: E402
from autopar.machines import named  # noqa: E402
from autopar.planning.planner import Asked, plan  # noqa: E402
from autopar.report.plans import planned_text  # noqa: E402
from benchmarks.records import Figure, Records, record_option  # noqa: E402
from benchmarks.yardstick import told, yardstick  # noqa: E402

LENGTH, WORDS = 8192, 128256


@dataclass(frozen=True)
class Size:
    """A model, and what it is planned for. goal: CPU seconds."""

    layers: int
    width: int
    heads: int
    hidden: int
    gpus: int
    batch: int
    goal: int

    def job(self) -> Job:
        with torch.device("meta"):
            model = Llama(self.layers, self.width, self.heads, 8, self.hidden, WORDS, LENGTH)
            ids = torch.empty(2, LENGTH, dtype=torch.int64)
        return Job(model, token_loss, (ids, ids), precision="bf16")


SIZES = {
    "8B": Size(32, 4096, 32, 14336, 64, 128, 15),
    "70B": Size(80, 8192, 64, 28672, 512, 1024, 30),
    "405B": Size(126, 16384, 128, 53248, 16384, 2048, 60),
}


def measure(name: str, is_recorded: bool) -> None:
    """Plan one size, and say what it took."""
    records = Records("planning", is_recorded)
    size = SIZES[name]
    found = plan(size.job(), Asked(size.gpus, size.batch, named("h100-80g"), top=3))
    spent, rss = time.process_time() - START, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stick = yardstick()
    print(f"Llama-3 {name} on {size.gpus:,}: {told(spent, stick)}, goal {size.goal}; {rss / 1e6:.2f} GB")
    print(planned_text(found), flush=True)
    case = f"Llama-3 {name} on {size.gpus:,} devices"
    records.add(Figure(case, "planned", "s CPU", spent, goal=f"<={size.goal}", yardstick=stick))
    records.add(Figure(case, "peak memory of the process", "GB", rss / 1e6))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", nargs="?", choices=SIZES, help="one size; else all, each in a process of its own")
    record_option(parser)
    args = parser.parse_args()
    if args.size:
        measure(args.size, args.record)
    else:
        for name in SIZES:
            subprocess.run([sys.executable, __file__, name, *["--record"] * args.record], check=True)


if __name__ == "__main__":
    main()
