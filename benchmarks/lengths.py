"""CPU seconds of what a new length costs: the second and every further size of the same call, of a two-layer BERT.

    timeout 300 .venv/bin/python -m benchmarks.lengths                     # dp=2,tp=2
    timeout 300 .venv/bin/python -m benchmarks.lengths --sequence-parallel auto
    timeout 300 .venv/bin/python -m benchmarks.lengths --profile

What a rank does for a call whose sizes are new: the step is captured (from the fourth length on its forward pass
alone), its guards are read, the layouts of the first length are bound, the passes run, the program is printed for the
ranks to agree on and made runnable. No process is started: what ranks say to each other is left out. Goal: at most
0.2 s on a quiet machine. On a busy one the least of all lengths is the closest to it.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture import Earlier
from autopar.capture.python.guards import Guards
from autopar.capture.resizing.earlier import ENOUGH
from autopar.compiler.compile import capture_step, lower
from autopar.ir.mesh import parse_mesh
from autopar.ir.options import StepOptions
from autopar.ir.plan import Decided, Fixed
from autopar.runtime.executor.executor import Executable
from benchmarks.records import Figure, Records, record_option

ROWS, WORDS = 8, 1000
LENGTHS = range(16, 56, 2)


def model() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256
    )
    made: nn.Module = BertForMaskedLM(config)
    return made


def loss(module: Any, x: Tensor, y: Tensor) -> Any:
    return module(input_ids=x, labels=y).loss


def batch(length: int) -> Tensor:
    return torch.randint(0, WORDS, (ROWS, length), generator=torch.Generator().manual_seed(length))


class Lengths:
    """The programs of one call, size by size, as `parallel/programs/building.py` makes them."""

    def __init__(self, mesh: str, options: StepOptions) -> None:
        self.model, self.mesh, self.options = model(), parse_mesh(mesh), options
        self.decided: dict[Hashable, Decided] = {}
        self.sequence: bool | None = None
        self.earlier = Earlier()

    def seconds(self, length: int) -> dict[str, float]:
        """CPU seconds of each part for one more length."""
        x, parts = batch(length), dict[str, float]()
        start = time.process_time()

        def done(name: str) -> None:
            parts[name] = time.process_time() - start - sum(parts.values())

        captured = capture_step(self.model, loss, (x, x), {}, self.options, earlier=self.earlier)
        done("capture")
        Guards(self.model, loss, captured.ran)
        done("guards")
        fixed = Fixed(uneven=bool(self.decided), decided=dict(self.decided), sequence=self.sequence)
        compiled = lower(captured, self.mesh, self.options, fixed)
        self.decided.setdefault(*compiled.decided)
        self.sequence = compiled.sequence if self.sequence is None else self.sequence
        done("passes")
        list(compiled.lines())
        done("text")
        Executable(compiled.program.graph)
        done("executable")
        return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mesh", default="dp=2,tp=2")
    parser.add_argument("--sequence-parallel", choices=("auto",), default=False)
    parser.add_argument("--profile", action="store_true", help="print a profile of the further lengths")
    record_option(parser)
    arguments = parser.parse_args()
    records = Records("lengths", arguments.record)
    torch.set_num_threads(1)
    lengths = Lengths(arguments.mesh, StepOptions(sequence_parallel=arguments.sequence_parallel))
    print(f"the first: {sum(lengths.seconds(LENGTHS[0]).values()):.3f} s")
    profile = cProfile.Profile()
    if arguments.profile:
        profile.enable()
    found = [lengths.seconds(length) for length in LENGTHS[1:]]
    profile.disable()
    captured = sorted(sum(parts.values()) for parts in found[: ENOUGH - 1])
    print(f"captured in full: {', '.join(f'{total:.3f}' for total in captured)} s; the others:")
    found = found[ENOUGH - 1 :]
    assert lengths.earlier.made == len(found), "these were captured as well"
    for name in found[0]:
        print(f"  {name:12}{statistics.median(parts[name] for parts in found):.3f} s")
    totals = [sum(parts.values()) for parts in found]
    print(
        f"a further one: {statistics.median(totals):.3f} s (median of {len(totals)}), "
        f"{min(totals):.3f} to {max(totals):.3f} s"
    )
    records.add(
        Figure("a further length of BERT, two layers", "compiled", "s CPU", statistics.median(totals), goal="<=0.2")
    )
    if arguments.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(60)
        pstats.Stats(profile).sort_stats("cumtime").print_stats(90)


if __name__ == "__main__":
    main()
