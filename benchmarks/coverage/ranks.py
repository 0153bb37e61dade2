"""Architectures of every kind in float32 on two Gloo ranks, beside the plain model: losses, gradients and weights of
three AdamW steps.

    timeout 3600 .venv/bin/python -m benchmarks.coverage.ranks [NAME ...] [--mesh dp=2] [--steps 3] [--out FILE]

Both sides are float32, so that neither is exact: the plain model trains in float64 as well, and each side's error is
its distance from that. A tensor's error is the norm of the difference over the norm of the tensor, of a weight over
that of what the steps changed of it. The parallel one's may be at most `TIMES` that of the plain float32 model, of each
loss, gradient, updated weight and buffer of each step. The plain error is the largest of several: of the model as it
is, and of `SAMPLES` more whose weights begin a unit in the last place away, for one run may be right by luck. AdamW's
eps is that of `autopar.verify`: with 1e-8 it makes whole steps of gradients that are nothing but rounding, on each side
others. "open": the plain model's own error leaves nothing to compare. Each step has another batch, of rows with other
numbers of labels and of padding. The models are those of `benchmarks.coverage`, with their own defaults: dropout and
other draws are on, and the plain model draws the parallel one's. One row runs on dp=2, the next one on tp=2.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.capture.draws.host_draws import drawing_for
from autopar.capture.inputs.containers import map_tensors
from autopar.compiler.compile import batch_arguments
from autopar.verification.copies import copied
from autopar.verification.dtypes import cast, in_dtype, module_in
from autopar.verification.judge.comparison import Values
from autopar.verification.judge.rounding import Units
from autopar.verification.plain import Plain, draws_of, optimized
from autopar.verification.verify import descent
from benchmarks.coverage import architectures, plain
from benchmarks.coverage.measure import fault_of, quiet
from benchmarks.records import Figure, Records, record_option
from tests.support.processes import Ranks

RANKS, MESHES, SECONDS = 2, ("dp=2", "tp=2"), 300
TIMES, SAMPLES = 4.0, 3
OPEN = 0.1
# Where the plain model's own error is less, by luck, this counts for it. A unit in the last place is 1.2e-7.
LEAST = 1e-6
# A tensor whose norm is a smaller share of the largest of its kind counts as one of this share: a gradient that is zero
# on paper is rounding on each side.
SHARE = 1e-4

ROWS = {
    "decoders": "llama qwen3 gemma2 gpt2 gpt_neox opt bloom falcon phi3 olmo2 cohere2 minicpm3 xlnet diffllama doge",
    "mixtures of experts": "mixtral qwen3_moe deepseek_v3 gpt_oss switch_transformers flex_olmo phimoe granitemoe",
    "state spaces and recurrences": "mamba mamba2 falcon_h1 rwkv recurrent_gemma lstm",
    "encoders": "bert roberta albert deberta-v2 modernbert mpnet fnet funnel roformer nystromformer esm layoutlm",
    "encoders with decoders": "t5 bart pegasus_x led prophetnet m2m_100",
    "vision": "vit swin convnext resnet segformer dinov2 pvt regnet",
    "audio": "wav2vec2 wavlm whisper",
    "several modalities": "clip (pairs);siglip (pairs)",
}  # fmt: skip


@dataclass
class Row:
    """ours, plain: the largest error of each kind of tensor. times: the largest ratio, of the `worst` tensor."""

    name: str
    mesh: str
    ours: dict[str, float] = field(default_factory=dict)
    plain: dict[str, float] = field(default_factory=dict)
    times: float = math.nan
    worst: str = ""
    seconds: float = math.nan
    fault: str = ""

    @property
    def verdict(self) -> str:
        if self.fault or not self.times <= TIMES:
            return "NO"
        return "open" if max(self.plain.values()) > OPEN else "ok"


def rows() -> list[tuple[str, str, str]]:
    """Kind, name and mesh of each row."""
    found = [(kind, name) for kind, names in ROWS.items() for name in names.split(";" if ";" in names else None)]
    return [(kind, name, MESHES[i % len(MESHES)]) for i, (kind, name) in enumerate(found)]


def train(rank: int, name: str, mesh: str, steps: int, is_loud: bool = False) -> Row | None:
    """Train both sides on this rank; the row is rank 0's. is_loud: with the warnings of models."""
    if not is_loud:
        quiet()
    row, start = Row(name, mesh), time.monotonic()
    try:
        _compare(row, steps)
    except Exception as error:
        row.fault = fault_of(error)
    row.seconds = time.monotonic() - start
    return row if rank == 0 or row.fault else None


def _compare(row: Row, steps: int) -> None:
    model, loss_fn, batches = _made(row.name, steps)
    options: dict[str, Any] = {"specialize": True} if row.name in architectures.SPECIALIZED else {}
    parallel = autopar.parallelize(copied(model), row.mesh, loss_fn=loss_fn, device="cpu", **options)
    optimizer, ours, draws = descent(optimized(parallel)), [], []
    seeds = [torch.tensor([0, step]) for step in range(steps)]
    for batch, drawn in zip(batches, seeds, strict=True):
        with drawing_for(drawn):  # what the host draws is the same on both sides
            ours.append(_step(parallel, optimizer, batch))
        running = parallel.programs[-1]
        draws.append(partial(draws_of, running.captured, rows=running.mask_rows))
    if dist.get_rank() == 0:
        train = partial(_plainly, model, loss_fn, batches, seeds, draws)
        exact, others = train(torch.float64), [train(torch.float32)]
        others += [train(torch.float32, Units(sample)) for sample in range(SAMPLES)]
        _judge(row, dict(model.state_dict()), ours, others, exact)


def _made(name: str, steps: int) -> tuple[nn.Module, Any, list[Any]]:
    """A model of the table, its loss function, and a batch for each step."""
    torch.manual_seed(0)
    if name in plain.MODELS:
        made = [plain.MODELS[name]() for _ in range(steps)]
        return made[0][0], made[0][1], [batch for *_, batch in made]
    task, kind = architectures.case_of(name)
    model, batch = architectures.build(task, kind)
    more = architectures.TASKS[task][1]
    return model, architectures.loss_fn, [batch, *(more() for _ in range(steps - 1))]


def _step(model: autopar.ParallelModule, optimizer: torch.optim.Optimizer, batch: Any) -> Values:
    """What a step of the ranks gives: on rank 0 all of it."""
    args, kwargs = batch_arguments(map_tensors(torch.clone, batch))
    optimizer.zero_grad()
    values: Values = {("loss", "loss"): model.forward_backward(*args, **kwargs).detach()}
    values.update({("gradient", name): value for name, value in model.full_gradients().items()})
    optimizer.step()
    return {**values, **{("state", name): value for name, value in model.full_state_dict().items()}}


def _plainly(
    model: nn.Module, loss_fn: Any, batches: Sequence[Any], seeds: Sequence[torch.Tensor], draws: Sequence[Any],
    dtype: torch.dtype, units: Units | None = None,
) -> list[Values]:  # fmt: skip
    """What each step of the plain model gives in a dtype, from the same weights or with units added to them, of which
    what it led to is free."""
    own, found = module_in(copied(model), dtype), []
    if units is not None:
        units.add_to_parameters(own)
    begun = model.state_dict()
    away = {name: value.double() - begun[name].double() for name, value in own.state_dict().items()}
    side = Plain(own, loss_fn, descent)
    with in_dtype(own, loss_fn, dtype):
        for batch, drawn, side.draws in zip(batches, seeds, draws, strict=True):
            args, kwargs = batch_arguments(map_tensors(partial(cast, dtype=dtype), batch))
            values = side.step(args, kwargs, drawn)
            state = own.state_dict()
            kept = {key: value for key, value in values.items() if key[0] in ("loss", "gradient")}
            moved = {name: _less(value, away[name]) for name, value in state.items()}
            found.append({**kept, **{("state", name): value for name, value in moved.items()}})
    return found


def _less(value: torch.Tensor, away: torch.Tensor) -> torch.Tensor:
    """Where training led to, without how far away from the others it began."""
    return value.double() - away if value.is_floating_point() else value.clone()


def _judge(
    row: Row, before: Mapping[str, torch.Tensor], ours: list[Values], others: list[list[Values]], exact: list[Values]
) -> None:
    """Fill in the errors of both sides, and the tensor where ours are the most times the plain model's."""
    row.times = 0.0
    for step, (our, right, *plainly) in enumerate(zip(ours, exact, *others, strict=True)):
        if differ := sorted(our.keys() ^ right.keys()):
            row.fault = f"step {step}: one side alone has {differ[:3]}"
            return
        samples = [_errors(before, other, right) for other in plainly]
        for key, error in _errors(before, our, right).items():
            kind, own = key[0], max(sample[key] for sample in samples)
            row.ours[kind], row.plain[kind] = max(error, row.ours.get(kind, 0.0)), max(own, row.plain.get(kind, 0.0))
            times = error / max(own, LEAST) if own < math.inf else 0.0  # the row is open then
            if times > row.times:
                row.times, row.worst = times, f"step {step} {kind} {key[1]}: {error:.0e}, plain {own:.0e}"


def _errors(before: Mapping[str, torch.Tensor], values: Values, right: Values) -> dict[tuple[str, str], float]:
    """The relative error of each tensor; of weights and buffers over how far the steps moved them. What is no float
    must be equal."""
    norms, errors = {}, {}
    for key, value in right.items():
        start = before[key[1]] if key[0] == "state" else torch.zeros(())
        norms[key] = float((value.double() - start.double()).norm())
        is_equal = values[key].shape == value.shape and torch.equal(values[key], value)
        off = float((values[key].double() - value.double()).norm()) if value.is_floating_point() else math.inf
        errors[key] = 0.0 if is_equal else math.inf if math.isnan(off) else off
    largest = {kind: max(norm for key, norm in norms.items() if key[0] == kind) for kind, _ in norms}
    return {key: errors[key] and errors[key] / max(norms[key], SHARE * largest[key[0]], 1e-30) for key in errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--mesh", choices=MESHES, help="for every row, in place of one mesh after the other")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path)
    record_option(parser)
    options = parser.parse_args()
    records = Records("coverage", options.record and not options.names)
    known = {name: (kind, name, options.mesh or mesh) for kind, name, mesh in rows()}
    others = {name for name in (*architectures.names(), *plain.MODELS) if name not in known}
    known.update((name, ("other", name, options.mesh or MESHES[i % 2])) for i, name in enumerate(sorted(others)))
    unknown = sorted(set(options.names) - set(known))
    if unknown:
        parser.error(f"no model is called {', '.join(unknown)}; there are {', '.join(known)}")
    wanted = [known[name] for name in options.names or [name for _, name, _ in rows()]]
    lines, good = [*header()], 0
    print("\n".join(lines), flush=True)
    for kind, row in measured(wanted, options.steps):
        good += row.verdict == "ok"
        lines.append(line(kind, row))
        print(lines[-1], flush=True)
    lines.append(f"\n{good} of {len(wanted)} are right.")
    print(lines[-1])
    records.add(Figure(f"{len(wanted)} models on two Gloo ranks", "right in float32", "models", good, goal=">="))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


def measured(wanted: Sequence[tuple[str, str, str]], steps: int) -> Iterator[tuple[str, Row]]:
    """The rows, one after another on a pool of ranks, which begins anew after a fault."""
    pool: Ranks | None = None
    for kind, name, mesh in wanted:
        pool = pool or Ranks(RANKS)
        try:
            found = [row for row in pool.run(train, name, mesh, steps, timeout=SECONDS) if row is not None]
            row = next((row for row in found if row.fault), found[0])
        except AssertionError as error:  # a rank died, or all hang
            row = Row(name, mesh, fault=" ".join(str(error).split())[:300])
        if row.fault:
            pool.close()
            pool = None
        yield kind, row
    if pool is not None:
        pool.close()


def header() -> list[str]:
    kinds = ("loss", "gradients", "changes of weights and buffers")
    errors = (f"{side}{kind}" for kind in kinds for side in ("", "plain "))
    names = ("kind", "model", "mesh", *errors, "times", "s", "worst or fault")
    return [f"| | {' | '.join(names)} |", f"|{'---|' * (len(names) + 1)}"]


def line(kind: str, row: Row) -> str:
    """A row of the table."""
    errors = [
        f"{side[each]:.0e}" if each in side else "-"
        for each in ("loss", "gradient", "state")
        for side in (row.ours, row.plain)
    ]
    said = (row.fault or row.worst * (row.verdict != "ok")).replace("|", "/")
    cells = [row.verdict, kind, row.name, row.mesh, *errors, f"{row.times:.1f}", f"{row.seconds:.0f}", said]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
