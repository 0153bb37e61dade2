"""Random combinations of features on real architectures, each beside one device: what breaks together?

    timeout 1300 .venv/bin/python -m benchmarks.combinations --seconds 1200 --seed 0

Draws a model of the coverage table, a recurrence or a mixture of experts (in a way to write one), a mesh, options that
go together on paper (ZeRO, recomputation, micro-batches, stages, schedules, slices, sequence parallelism, buckets) and
a float: that of the model, or a precision.
`autopar.verify` judges: of loss, every gradient, every updated weight and buffer over two steps the largest relative
error is printed, or the refusal in full: an error of ours that says what to do. Replay one with `--only N`, the number
of its row; `--recurrent`: every model is a recurrence, `--mixtures`: a mixture, `--composed`: of blocks, and under a
loss, that are drawn (composed.py); `--float64`: no other float.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import re
import resource
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from autopar.capture.inputs.loss_outputs import LossFn, loss_of
from autopar.capture.per_microbatch import per_microbatch
from autopar.errors import AutoparError
from autopar.machines import Machine
from autopar.torch_compat import tree_map
from autopar.verification.verify import verify
from benchmarks import composed, mixtures, recurrences
from benchmarks.coverage import architectures, plain
from benchmarks.coverage.measure import model_of
from benchmarks.records import Figure, Records, record_option

LIMIT_S = 180
MESHES = ("dp=2", "dp=3", "tp=2", "fsdp=2", "dp=2,tp=2", "dp=3,tp=2", "dp=2,fsdp=2", "fsdp=2,tp=2", "tp=3",
          "cp=2", "dp=2,cp=2", "cp=2,tp=2", "ulysses=2", "fsdp=2,cp=2", "cp=2,ulysses=2")  # fmt: skip
STAGED = ("pp=2", "pp=3", "dp=2,pp=2", "pp=2,tp=2", "dp=2,pp=2,tp=2", "fsdp=2,pp=2", "cp=2,pp=2")
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipev")
SLICED = ("seq1f1b", "gpipe")
BY_STAGE = ("stage", "stage+full")
DECIDED = {"recompute", "offload", "reshard_after_forward"}  # by memory=
HOSTED = ("parameters", ["parameters", "activations"])
OFFLOADS = ("activations", {"activations": 0.5})
FLOATS: tuple[dict[str, Any], ...] = (
    {"dtype": torch.float32}, {"dtype": torch.float32}, {"dtype": torch.bfloat16}, {"dtype": torch.float16},
    {"precision": "bf16"}, {"precision": "bf16", "reduce_dtype": torch.bfloat16}, {"precision": "fp16"},
)  # fmt: skip
SHORT = (torch.bfloat16, torch.float16)
LENGTHS = {2: ((5, 3), (6, 2)), 4: ((3, 2, 2, 1), (1, 3, 1, 3))}  # of slices, in eighths of a sequence


class TooSlow(Exception):
    """A case took longer than LIMIT_S."""


def draw(
    seed: int,
    number: int,
    recurrent: bool = False,
    in_float64: bool = False,
    mixed: bool = False,
    is_composed: bool = False,
) -> tuple[str, str, dict[str, Any]]:
    """The model, the mesh and the options of a row. recurrent: the model is a recurrence, mixed: a mixture of experts;
    else one in eight is. is_composed: it is made of drawn blocks. in_float64: every row is; else one in two."""
    dice = random.Random(f"{seed} {number}")
    name = dice.choice([*architectures.names(), *plain.MODELS])
    options: dict[str, Any] = {}
    staged = dice.random() < 0.4
    mesh = dice.choice(STAGED if staged else MESHES)
    if staged:
        options["microbatches"] = dice.choice((2, 3, 6) if "2" in mesh.partition("pp")[0] else (2, 3, 4, 6))
        options["schedule"] = dice.choice(SCHEDULES)
    elif dice.random() < 0.3:
        options["microbatches"] = dice.choice((2, 3))
    if "dp" in mesh or "fsdp" in mesh:
        options["zero"] = dice.choice((0, 1, 2, 3))
        if options["zero"] == 3 and dice.random() < 0.3:
            options["reshard_after_forward"] = False
    if "tp" in mesh and dice.random() < 0.4:
        options["sequence_parallel"] = dice.choice((True, "auto"))
    if "cp" in mesh and "ulysses" not in mesh and dice.random() < 0.5:
        options["attention"] = dice.choice(("gather", "ring", "ulysses"))
    if dice.random() < 0.5:
        options["recompute"] = dice.choice(("full", "selective", 0.7, 0.9))
    if dice.random() < 0.3:
        options["chunked_loss"] = dice.choice((True, 2000))
    if dice.random() < 0.3:
        options["bucket_bytes"] = dice.choice((1, 1000, 100_000))
    if name in architectures.SPECIALIZED:
        options["specialize"] = True
    if staged and dice.random() < 0.3:  # last, so that the rows before it stay as they were
        options |= {"slices": dice.choice((2, 4)), "schedule": dice.choice(SLICED)}
        if dice.random() < 0.5:
            options["slices"] = dice.choice(LENGTHS[options["slices"]])
    if dice.random() < 0.3:
        options["compile"] = "triton"  # groups, which a CPU runs call by call
    if dice.random() < 1 / 8 or recurrent:
        name = dice.choice([*recurrences.MODELS, "lstm", "gru"])
        options.pop("specialize", None)
    if dice.random() < 1 / 2 and not in_float64:  # last, so that the rows before it stay as they were
        options |= dice.choice(FLOATS)
    if name in architectures.MIXTURES and dice.random() < 1 / 2:
        mesh = re.sub(r"\b(dp|fsdp)=\d", "ep=2", mesh, count=1) if "dp" in mesh else f"ep=2,{mesh}"
        if dice.random() < 1 / 3:
            options["expert_rows"] = 2.0  # as many as there may be
    if name not in (*recurrences.MODELS, *plain.MODELS) and dice.random() < 1 / 8:
        options["per_microbatch"] = True
    if dice.random() < 1 / 4:
        options |= {"offload": dice.choice(OFFLOADS), "horizon": dice.choice(("auto", 1, 2))}
    if options.get("reshard_after_forward", True) and dice.random() < 1 / 4:
        options["offload"] = dice.choice(HOSTED)
    axes = re.findall(r"\b(dp|fsdp|cp)=2", mesh)
    if name in architectures.MIXTURES and "ep=" not in mesh and axes and dice.random() < 1 / 2:
        options["experts"] = ":".join(axes[:2])  # two axes leave each rank one expert of four
    if not staged and "microbatches" in options and "slices" not in options and dice.random() < 1 / 3:
        options["schedule"] = "dualpipev"  # the halves of a model side by side
    if options.get("zero") == 3 and "offload" not in options and dice.random() < 1 / 4:
        options["reshard_after_forward"] = {"*": False}
    if not DECIDED.intersection(options) and dice.random() < 1 / 4:
        options["memory"] = dice.choice((0.9, 0.95))
    if (dice.random() < 1 / 8 or mixed) and not recurrent:  # last, so that the rows before it stay as they were
        name, mesh, options = _with_experts(dice, mesh, options)
    if "recompute" in options and options.get("microbatches", 1) > 1 and dice.random() < 1 / 2:  # last, as well
        options["recompute"] = dice.choice(BY_STAGE)
    first = f"{name}, positions first"
    if first in recurrences.POSITIONS_FIRST and dice.random() < 1 / 2:  # last, as well
        name = first
    if dice.random() < 1 / 4:  # last, as well
        options["input_gradients"] = True
    if dice.random() < 1 / 6:  # last, as well
        options["written"] = True
    if dice.random() < 1 / 6:  # last, as well
        options["places"] = True
    if dice.random() < 1 / 6:  # last, as well
        options["asking"] = True
    if is_composed:
        name = composed.drawn(dice)
        if name.endswith("worst"):  # rounding decides which samples are the worst: of short floats nothing is left
            options = {key: value for key, value in options.items() if key not in ("precision", "reduce_dtype")}
            options = {key: value for key, value in options.items() if value not in SHORT}
        for key in ("specialize", "per_microbatch", "expert_rows", "experts", *["slices"] * (dice.random() < 0.7)):
            options.pop(key, None)
        if "schedule" in options and dice.random() < 0.7:
            options["schedule"] = "gpipe"  # the others let micro-batches go back too early for most of these losses
        mesh = mesh.replace("ep=", "dp=") if "dp=" not in mesh else re.sub(r"ep=\d,?", "", mesh)
    return name, mesh, options


def _with_experts(dice: random.Random, mesh: str, options: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """A row of which the model is a mixture in some way to write one, over an axis of its own or one that is there."""
    name = dice.choice([*mixtures.MODELS])
    for key in ("specialize", "per_microbatch", "expert_rows", "experts", "slices"):
        options.pop(key, None)
    if options.get("schedule") in SLICED and "pp" not in mesh:
        del options["schedule"]
    if options.get("dtype") in SHORT:  # whose rounding decides which expert a row takes: nothing is left to compare
        del options["dtype"]
    axes = re.findall(r"\b(?:dp|fsdp|cp)=2", mesh)
    if name in {way.__name__ for way in mixtures.COUPLED}:
        options |= {"microbatches": 1} if "microbatches" in options else {}
    if "ep=" not in mesh and axes and dice.random() < 1 / 2:
        options["experts"] = ":".join(axis.partition("=")[0] for axis in axes[:2])
    elif "ep=" not in mesh:
        mesh = re.sub(r"\b(dp|fsdp)=\d", "ep=2", mesh, count=1) if "dp" in mesh else f"ep=2,{mesh}"
    if dice.random() < 1 / 4:
        options["expert_rows"] = 4.0  # as many as there may be
    if dice.random() < 1 / 2:
        options["machine"] = mixtures.AT_ONCE
    return name, mesh, options


def run(name: str, mesh: str, options: Mapping[str, Any], rows: int) -> float:
    """The largest error, of a row that `verify` calls right. `rows` is the size of the batch, repeated as often as it
    takes."""
    torch.manual_seed(0)
    made = {**recurrences.MODELS, **recurrences.POSITIONS_FIRST, **mixtures.MODELS}.get(name)
    if composed.is_composed(name):
        made = partial(composed.made, name)
    model, loss_fn, batch = made() if made is not None else model_of(name)
    if isinstance(slices := options.get("slices"), tuple):
        options = {**options, "slices": _lengths(batch, slices)}
    batch = _grown(batch, rows)
    if "input_gradients" in options:
        tree_map(lambda leaf: leaf.requires_grad_(leaf.is_floating_point()), _leaves(batch))
    loss_fn = _of_parts if "per_microbatch" in options else loss_fn
    for name_, wrapped in (("written", _writing), ("places", _with_places), ("asking", _asking)):
        loss_fn = partial(wrapped, loss_fn) if name_ in options else loss_fn
    options = {key: value for key, value in options.items() if key not in _OF_THE_LOSS}
    report = verify(model, mesh, loss_fn=loss_fn, batch=batch, **options)
    if not report.ok:
        wrong = "; ".join(f"{row.kind} {row.name} {row.error:.0e}" for row in report.rows if not row.ok)
        raise ArithmeticError(" ".join(f"{wrong} {'; '.join(report.sums)} {report.mismatch or ''}".split()))
    return report.max_error


def _writing(loss_fn: LossFn | None, model: nn.Module, *args: Any, **batch: Any) -> Any:
    """A loss in which the step writes some of the parameters before it uses them: by themselves, and by others."""
    parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    with torch.no_grad():
        for parameter, other in zip(parameters[::3], parameters[3::3], strict=False):
            parameter.mul_(0.95)
            if parameter.shape == other.shape:
                parameter.lerp_(other, 0.1)
    parameters[-1].data = parameters[-1].data.clamp(-0.5, 0.5)
    return loss_of(model(*args, **batch)) if loss_fn is None else loss_fn(model, *args, **batch)


def _with_places(loss_fn: LossFn | None, model: nn.Module, *args: Any, **batch: Any) -> Any:
    """A loss with a term of a table that is read and written at places that tensors hold."""
    loss = loss_of(model(*args, **batch)) if loss_fn is None else loss_fn(model, *args, **batch)
    table = torch.stack([parameter.float().mean() for parameter in model.parameters()] * 2) * 1.0
    size = len(table)
    drawn, counted = torch.randint(0, size - 2, ()), (table.detach() > 1e-3).sum() % (size - 1)
    part = table[counted : counted + 2]
    table[drawn : drawn + 3].mul_(0.5)
    table[counted.item()] += 1
    table[drawn.item() : counted] = 0.25
    return loss + 0.01 * ((table.tanh() * torch.arange(size)).square().mean() + part.sum())


def _asking(loss_fn: LossFn | None, model: nn.Module, *args: Any, **batch: Any) -> Any:
    """A loss that asks for the gradients of its batch itself."""
    tree_map(lambda leaf: leaf.requires_grad_(leaf.is_floating_point()), _leaves((args, batch)))
    return loss_of(model(*args, **batch)) if loss_fn is None else loss_fn(model, *args, **batch)


_OF_THE_LOSS = ("input_gradients", "per_microbatch", "written", "places", "asking")


def _of_parts(model: nn.Module, **batch: Any) -> torch.Tensor:
    """The loss of a model, with a term of each micro-batch by itself."""
    out = model(**batch)
    first = next(value for value in out.values() if isinstance(value, torch.Tensor) and value.ndim > 1)
    term: torch.Tensor = per_microbatch(lambda value: value.square().mean().square(), first)
    return out.loss + term


def _lengths(batch: Any, shares: tuple[int, ...]) -> int | list[int]:
    """Slices of so many eighths of a sequence, or as many equal ones where it has no eighths."""
    positions = next((leaf.shape[1] for leaf in _leaves(batch) if leaf.ndim > 1), 1)
    return len(shares) if positions % 8 else [share * positions // 8 for share in shares]


def _grown(batch: Any, rows: int) -> Any:
    """The batch with as many rows: copies of its own, each rolled by another number of places."""
    sizes = Counter(leaf.shape[0] for leaf in _leaves(batch) if leaf.ndim)
    if not sizes or rows == 0:
        return batch
    size = sizes.most_common(1)[0][0]

    def grow(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim or leaf.shape[0] != size:
            return leaf
        copies = [leaf.roll(shift, -1) if leaf.ndim > 1 else leaf.roll(shift) for shift in range(-(-rows // size))]
        return torch.cat(copies)[:rows]

    return tree_map(grow, batch)


def _leaves(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map(lambda leaf: found.append(leaf) if isinstance(leaf, torch.Tensor) else None, batch)
    return found


def _alarm(*_: object) -> None:
    raise TooSlow(f"more than {LIMIT_S} s")


def case(seed: int, number: int, rows: int, *kinds: bool) -> tuple[str, str]:
    """The verdict on a row (ok, refused, slow, WRONG, BROKEN), and its line. kinds: those of `draw`."""
    name, mesh, options = draw(seed, number, *kinds)
    text = " ".join(f"{key}={value.name if isinstance(value, Machine) else value}" for key, value in options.items())
    start, error = time.process_time(), ""
    signal.signal(signal.SIGALRM, _alarm)
    signal.alarm(LIMIT_S)
    try:
        largest = run(name, mesh, options, rows)
        verdict, error = "ok", f"{largest:.0e}"
    except AutoparError as refusal:
        verdict, error = "refused", f"{type(refusal).__name__}: {refusal}"
    except TooSlow as slow:
        verdict, error = "slow", str(slow)
    except ArithmeticError as wrong:
        verdict, error = "WRONG", str(wrong)
    except Exception as broken:
        frame = traceback.extract_tb(broken.__traceback__)[-1]
        place = f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
        verdict, error = "BROKEN", f"{type(broken).__name__}: {broken} ({place})"
    finally:
        signal.alarm(0)
    seconds = time.process_time() - start
    return verdict, f"{verdict:8} {number:4} {name:24} {mesh:14} {text}  [{seconds:.0f} s]  {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first row")
    parser.add_argument("--only", type=int, action="append", help="the number of a row")
    parser.add_argument("--rows", type=int, default=12, help="rows of a batch: what 2, 3, 4 and 6 parts divide")
    parser.add_argument("--recurrent", action="store_true", help="every model is a recurrence")
    parser.add_argument("--mixtures", action="store_true", help="every model is a mixture of experts")
    parser.add_argument("--composed", action="store_true", help="every model is one of drawn blocks")
    parser.add_argument("--float64", action="store_true", help="every model is in float64")
    parser.add_argument("--count", type=int, help="the number of rows to draw")
    record_option(parser)
    options = parser.parse_args()
    records = Records("combinations", options.record)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    found: Counter[str] = Counter()
    end = time.monotonic() + options.seconds
    drawn = itertools.islice(itertools.count(options.first), options.count)
    numbers = drawn if options.only is None else options.only
    for number in numbers:
        kinds = options.recurrent, options.float64, options.mixtures, options.composed
        verdict, line = case(options.seed, number, options.rows, *kinds)
        found[verdict] += 1
        print(line, flush=True)
        if time.monotonic() > end:
            break
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(
        ", ".join(f"{count} {verdict}" for verdict, count in found.most_common()), f"(seed {options.seed}, {peak} MiB)"
    )
    case_ = f"seed {options.seed}, {found.total()} rows"
    records.add(*(Figure(case_, verdict, "rows", count, goal="") for verdict, count in found.most_common()))


if __name__ == "__main__":
    main()
