"""CPU seconds and memory of compiling one training step of a large model, by stage, on the meta device.

    timeout 600 .venv/bin/python benchmarks/compile_speed.py                       # Llama-70B shape, dp=16,tp=8
    timeout 600 .venv/bin/python benchmarks/compile_speed.py --model hf_llama      # the same of transformers
    timeout 600 .venv/bin/python benchmarks/compile_speed.py --layers 8 --mesh dp=512,tp=8
    timeout 600 .venv/bin/python benchmarks/compile_speed.py --mesh pp=8,dp=4,tp=8 --microbatches 64 --batch 256
    timeout 600 .venv/bin/python benchmarks/compile_speed.py --model deepseek_v3 --layers 61 --mesh pp=16,ep=64 \\
        --microbatches 32 --batch 2048
    timeout 600 .venv/bin/python benchmarks/compile_speed.py --model unrolled_gru --mesh dp=2,tp=2
    timeout 600 .venv/bin/python benchmarks/compile_speed.py --profile /tmp/compile.prof

The other models are small, and of many nodes of which few are alike (tests/support/unlike.py): their `propagate` is
nearly all search; --layers and --batch say nothing there. Of the large models nothing is allocated. No process is
started. CPU seconds are user and system time of this process, all threads; what is verified, and that Python looks
for no garbage meanwhile, is as in `autopar.compile`. To save the programs is no part of that, and comes after it.
"""

from __future__ import annotations

import time

START = time.process_time()  # before the imports: they are part of what a user waits for

import argparse  # noqa: E402
import cProfile  # noqa: E402
import resource  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable  # noqa: E402
from contextlib import nullcontext  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / folder) for folder in ("", "tests/support", "examples")]

from models import Llama, token_loss  # noqa: E402
from unlike import UNLIKE, unlike  # noqa: E402

from autopar.capture import capture  # noqa: E402
from autopar.compiled import Compiled  # noqa: E402
from autopar.compiler.garbage import uncollected  # noqa: E402
from autopar.ir.check.check_levels import verify  # noqa: E402
from autopar.ir.mesh import parse_mesh  # noqa: E402
from autopar.ir.options import StepOptions  # noqa: E402
from autopar.ir.plan import Plan  # noqa: E402
from autopar.ir.program import Level  # noqa: E402
from autopar.passes import PASSES, bucket, make_pipeline  # noqa: E402
from autopar.passes.collectives.check_rules import check_rules  # noqa: E402
from benchmarks.records import Figure, Records, record_option  # noqa: E402
from benchmarks.yardstick import told, yardstick  # noqa: E402

WIDTH, HEADS, KV_HEADS, HIDDEN, VOCABULARY, CONTEXT = 8192, 64, 8, 28672, 128256, 4096


def llama(layers: int) -> tuple[nn.Module, Any]:
    return Llama(layers, WIDTH, HEADS, KV_HEADS, HIDDEN, VOCABULARY, CONTEXT), token_loss


def hf_llama(layers: int) -> tuple[nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=CONTEXT, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), lambda model, x, y: model(input_ids=x, labels=y).loss


def deepseek_v3(layers: int) -> tuple[nn.Module, Any]:
    """The shape of DeepSeek-V3 (arXiv 2412.19437): 256 experts and one that takes all tokens, behind 3 dense layers."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(num_hidden_layers=layers, max_position_embeddings=CONTEXT, use_cache=False)
    config._experts_implementation = "grouped_mm"
    return DeepseekV3ForCausalLM(config), lambda model, x, y: model(input_ids=x, labels=y).loss


MODELS: dict[str, Callable[[int], tuple[nn.Module, Any]]] = {
    "llama": llama, "hf_llama": hf_llama, "deepseek_v3": deepseek_v3,
}  # fmt: skip


def case(model_name: str, layers: int, batch: int) -> tuple[nn.Module, Any, tuple[Any, ...]]:
    """A model, its loss function and a batch."""
    if model_name in UNLIKE:
        return unlike(model_name)
    with torch.device("meta"):
        model, loss_fn = MODELS[model_name](layers)
        x, y = (torch.empty(batch, CONTEXT, dtype=torch.long) for _ in range(2))
    return model, loss_fn, (x, y)


class Stages:
    """Prints the CPU seconds since the last stage, stage by stage."""

    def __init__(self) -> None:
        self.last = START

    def done(self, name: str) -> None:
        now = time.process_time()
        print(f"{name:<16}{now - self.last:7.2f} s", flush=True)
        self.last = now


@uncollected()
def run(
    model_name: str, layers: int, batch: int, mesh_text: str, microbatches: int, schedule: str
) -> tuple[float, int]:
    """CPU seconds of a program that is compiled, imports included, and the most bytes that this process had."""
    stages = Stages()
    stages.done("import")
    model, loss_fn, args = case(model_name, layers, batch)
    stages.done("build the model")
    mesh = parse_mesh(mesh_text)
    program = capture(model, loss_fn, args, {}).program
    verify(program, Level.CAPTURED)
    stages.done("capture")
    print(f"  {len(program.nodes)} nodes")
    plan = Plan(mesh, options=StepOptions(microbatches=microbatches, schedule=schedule))
    history = [("capture", program)]
    for step, level in PASSES:
        if step is bucket and plan.is_staged:
            continue
        before, program = program, step(program, plan)
        history.append((step.__name__, program))
        stages.done(step.__name__)
        if program is before and program.level == level:  # as `run_passes` has it
            continue
        verify(program, level)
        if level == Level.SHARDED:
            check_rules(program, plan)
        stages.done("  verify")
    pipeline = make_pipeline(program, plan) if plan.is_staged else None
    stages.done("make_pipeline")
    compiled = Compiled(plan, tuple(history), pipeline)
    if pipeline is not None:
        print(f"  {len(pipeline.graphs)} graphs, {sum(map(len, pipeline.lists))} instructions")
        shared = {id(rank.programs) for rank in compiled.ranks}
        print(f"  {len(compiled.ranks)} ranks with {len(shared)} sets of programs")
        stages.done("ranks")
    usage = resource.getrusage(resource.RUSAGE_SELF)
    made = usage.ru_utime + usage.ru_stime
    with tempfile.TemporaryDirectory() as folder:  # a pipeline is not saved yet
        if pipeline is None:
            compiled.save(folder)
            stages.done("save")
    return made, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted([*MODELS, *UNLIKE]), default="llama")
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--mesh", default="dp=16,tp=8")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--profile", help="write a cProfile here")
    record_option(parser)
    args = parser.parse_args()
    records = Records("compile_speed", args.record)
    profile = cProfile.Profile() if args.profile else None
    with profile or nullcontext():
        spent, peak = run(args.model, args.layers, args.batch, args.mesh, args.microbatches, args.schedule)
    stick = yardstick()
    print(f"{'compiled':<16}{told(spent, stick)}, peak RSS {peak / 2**30:.2f} GiB")
    case = f"{args.model}, {args.layers} layers, {args.mesh}" if args.model in MODELS else f"{args.model}, {args.mesh}"
    goal = "<=8" if case == "llama, 80 layers, dp=16,tp=8" else "<="
    records.add(Figure(case, "compiled", "s CPU", spent, goal=goal, yardstick=stick))
    records.add(Figure(case, "peak memory of the process", "GiB", peak / 2**30))
    if profile:
        profile.dump_stats(args.profile)


if __name__ == "__main__":
    main()
