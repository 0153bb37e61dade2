"""What a step costs the host where tensors are so small that nothing else counts: against plain PyTorch.

    timeout 300 .venv/bin/python -m benchmarks.launch [--layers 12] [--rounds 40] [--inductor] [--profile /tmp/x.prof]

A GPT of width 16 on 8 tokens, one rank, one thread. CPU seconds of this process, ours and plain PyTorch's in turns, and
of each the median. Goals: forward and backward at most 1.0x eager; an optimizer's step at most 1.1x; at most 4 us a
parameter outside of the program; compiled by Inductor below torch.compile.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.parallel.programs.running import Running
from autopar.runtime.executor.inputs import StepInputs
from benchmarks.records import Figure, Records, record_option
from examples.gpt import GPT, GPTConfig

WIDTH, TOKENS, WARM = 16, 8, 5


def loss_fn(model: nn.Module, x_BT: Tensor, y_BT: Tensor) -> Tensor:
    return F.cross_entropy(model(x_BT).flatten(0, 1), y_BT.flatten())


@dataclass(frozen=True, slots=True)
class Row:
    """Medians in microseconds of CPU time."""

    name: str
    ours: float
    plain: float
    goal: float

    def __str__(self) -> str:
        ratio = self.ours / self.plain
        return f"{self.name:24} {self.ours:9.0f} us {self.plain:9.0f} us {ratio:6.2f}x  goal {self.goal:.1f}x"

    def figure(self) -> Figure:
        return Figure(self.name, "CPU time", "us", self.ours, self.plain, f"<={self.goal}")


def medians(rounds: int, *functions: Callable[[], object], between: Callable[[], object] = lambda: None) -> list[float]:
    """Microseconds of CPU time of each function, called in turns; `between` is not counted."""
    taken: list[list[int]] = [[] for _ in functions]
    for at in range(WARM + rounds):
        for function, times in zip(functions, taken, strict=True):
            between()
            start = time.process_time_ns()
            function()
            if at >= WARM:
                times.append(time.process_time_ns() - start)
    return [statistics.median(times) / 1e3 for times in taken]


@dataclass(frozen=True, slots=True)
class Pair:
    """The same small GPT twice, and a batch."""

    ours: autopar.ParallelModule
    plain: nn.Module
    batch: tuple[Tensor, Tensor]
    kept: list[object]  # what a program alone gave, which lives as long as gradients do

    @staticmethod
    def of(layers: int, compiler: str = "auto") -> Pair:
        torch.manual_seed(0)
        config = GPTConfig(context=TOKENS, layers=layers, width=WIDTH)
        plain = GPT(config)
        x, y = torch.randint(config.vocabulary, (2, 1, TOKENS))
        ours = autopar.parallelize(copy.deepcopy(plain), mesh="dp=1", loss_fn=loss_fn, compile=compiler)
        return Pair(ours, plain, (x, y), [])

    def step(self) -> None:
        """Forward and backward, ours."""
        self.ours.forward_backward(*self.batch)

    def plain_step(self, model: nn.Module | None = None) -> None:
        loss_fn(self.plain if model is None else model, *self.batch).backward()

    def forget(self) -> None:
        """Gradients are made anew."""
        self.kept.clear()
        for parameter in (*self.ours.parameters(), *self.plain.parameters()):
            parameter.grad = None

    def program(self) -> Callable[[], object]:
        """The step's program alone."""
        running: Running = self.ours.programs[-1]
        given: list[StepInputs] = []
        run = running.runner.run

        class Keeping:
            def run(self, inputs: StepInputs) -> object:
                given.append(dict(inputs))
                return run(inputs)

        before, running.runner = running.runner, Keeping()  # type: ignore[assignment]
        self.step()
        running.runner = before
        return lambda: self.kept.append(running.run(given[0]))


def forward_backward(pair: Pair, rounds: int) -> tuple[Row, float]:
    """The row, and microseconds a parameter outside of the program."""
    pair.step()
    ours, plain, program = medians(rounds, pair.step, pair.plain_step, pair.program(), between=pair.forget)
    return Row("forward and backward", ours, plain, 1.0), (ours - program) / len(list(pair.ours.parameters()))


def optimizers(pair: Pair, rounds: int) -> list[Row]:
    """Steps of AdamW in its ways."""
    pair.step()
    pair.plain_step()
    rows = []
    for name, options in (
        ("for each tensor", {"foreach": False}),
        ("foreach", {"foreach": True}),
        ("fused", {"fused": True}),
    ):
        both = [torch.optim.AdamW(model.parameters(), **options) for model in (pair.ours, pair.plain)]
        ours, plain = medians(rounds, *(optimizer.step for optimizer in both))
        rows.append(Row(f"AdamW, {name}", ours, plain, 1.1))
    return rows


def compiled(layers: int, rounds: int) -> Row:
    """By Inductor, against torch.compile."""
    pair = Pair.of(layers, compiler="inductor")
    model = torch.compile(pair.plain)
    pair.step()
    ours, plain = medians(rounds, pair.step, lambda: pair.plain_step(model), between=pair.forget)
    return Row("compiled", ours, plain, 1.0)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--profile", metavar="FILE", help="profile our steps instead, for pstats")
    record_option(parser)
    args = parser.parse_args(argv)
    records = Records("launch", args.record)
    torch.set_num_threads(1)
    pair = Pair.of(args.layers)
    if args.profile:
        pair.step()
        profile = cProfile.Profile()
        with profile:
            for _ in range(args.rounds):
                pair.forget()
                pair.step()
        profile.dump_stats(args.profile)
        return
    row, fixed = forward_backward(pair, args.rounds)
    print(
        f"{'':24} {'ours':>12} {'plain':>12}\n{row}\n{'outside of the program':24} {fixed:9.2f} us a parameter, goal 4"
    )
    rows = [row, *optimizers(pair, args.rounds)]
    print(*rows[1:], sep="\n")
    if args.inductor:
        rows.append(compiled(args.layers, args.rounds))
        print(rows[-1])
    records.add(*(row.figure() for row in rows))
    records.add(Figure("outside of the program", "CPU time a parameter", "us", fixed, goal="<=4"))


if __name__ == "__main__":
    main()
