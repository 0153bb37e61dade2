"""Plant silent bugs of other systems in our source, one at a time: does a test see it?

    timeout 3600 .venv/bin/python -m benchmarks.historic [--only WORD] [--control]

Each was reported of a system that people train with: the loss looked fine, and gradients, weights or random numbers
were wrong. Here the same mistake is made where our source does the same thing, by a change of one line. As in
`benchmarks.mutants` no file is changed: a process of its own imports the changed source and runs the tests named beside
it, which pass as they are (`--control`). Exits with 1 if one is not seen.
"""

from __future__ import annotations

import argparse
import ast
import sys
import time
from dataclasses import dataclass, replace

from benchmarks.mutants import ROOT, judged


@dataclass(frozen=True, slots=True)
class Historic:
    """A bug. of: where it was reported, or A_KIND. what: went wrong there. old, new: of our source. seen: tests below
    tests/."""

    of: str
    what: str
    path: str
    old: str
    new: str
    seen: tuple[str, ...]

    def tree(self) -> ast.Module:
        source = (ROOT / self.path).read_text()
        if source.count(self.old) != 1:
            sys.exit(f"{self.of}: {self.path} has {source.count(self.old)} times: {self.old}")
        return ast.parse(source.replace(self.old, self.new))

    def tests(self) -> list[str]:
        return [str(ROOT / "tests" / name) for name in self.seen]


_NORM = 'results = _masked((full, norm, norm), argument(call, 7, "output_mask"))\n    return instantiate('
A_KIND = "a kind"  # that several systems had
RULES = ("passes/test_rules.py",)
BUGS = (
    Historic(
        "Megatron-LM#1446", "gradients of norms differ from rank to rank where the sequence is split",
        "passes/rules/normalisation.py",
        f'{_NORM}f"{{operands}} -> {{results}}", call, replicated=norm.split(), linear=({{0}},))',
        f'{_NORM}f"{{operands}} -> {{results}}", call, replicated=norm.split(), linear=({{0}},), partial="max")', RULES,
    ),
    Historic(
        "Megatron-LM#7452", "each rank of tp adds the bias to its part of a sum", "passes/rules/pointwise.py",
        "BOTH: Linear = (frozenset({0, 1}),)", "BOTH: Linear = (frozenset({0, 1}), frozenset({0}))", RULES,
    ),
    Historic(
        "pytorch#163193", "a number is added to each part of a sum", "passes/rules/pointwise.py",
        'return FIRST if _is_zero(argument(call, 1, "other")) else NONE', "return FIRST", RULES,
    ),
    Historic(
        "pytorch#162692", "the mean of a loss divides by the count of one rank", "passes/rules/losses.py",
        'replicated = {"c", "n", "..."} if reduction == MEAN else {"c"}', 'replicated = {"c"}', RULES,
    ),
    Historic(
        "Megatron-LM#673", "the loss over cp is scaled by the ranks", "runtime/collectives/collectives.py",
        'return Move("reduce", x, _as_it_is, kind, owned)',
        'return Move("reduce", x / member.size if kind == "sum" else x, _as_it_is, kind, owned)',
        ("passes/test_context.py",),
    ),
    Historic(
        "Megatron-LM#1464", "attention over cp has other gradients: a square of the causal mask is off by a key",
        "runtime/attention/blocks.py", "keys.start + diagonal - key\n", "keys.start + diagonal - key + (row > key)\n",
        ("runtime/test_ring_steps.py", "passes/test_ring.py"),
    ),
    Historic(
        "torchtitan#1732", "gradients of micro-batches are averaged as they come, and the first ones fade",
        "runtime/pipeline/microbatches.py", "self.parts[name].add_(part)", "self.parts[name].add_(part).div_(2)",
        ("passes/test_pipeline_models.py", "passes/test_pipeline.py"),
    ),
    Historic(
        "NeMo Automodel#3530", "the last micro-batch alone is trained on", "runtime/pipeline/microbatches.py",
        "self.parts[name] = torch.add(self.parts[name], part)", "self.parts[name] = part.clone()",
        ("passes/test_pipeline_models.py", "passes/test_pipeline.py"),
    ),
    Historic(
        "torchtitan#2972", "what counts tokens sees one micro-batch", "runtime/pipeline/microbatches.py",
        "results = _met([requests[number] for number in group])",
        "results = [requests[number].args[0].clone() for number in group]",
        ("passes/test_pipeline.py", "passes/test_pipeline_models.py"),
    ),
    Historic(
        A_KIND, "the logit of a label is looked up in another rank's part of the vocabulary",
        "runtime/kernels/loss_kernels.py", "column, outside = _columns(index, x.shape[-1], offset)",
        "column, outside = _columns(index, x.shape[-1], 0)", ("passes/test_rules_models.py", "runtime/test_kernels.py"),
    ),
    Historic(
        A_KIND, "tokens of other ranks read the first row",
        "runtime/kernels/embedding.py", "weight.index_select(0, row).masked_fill_((row != flat).unsqueeze(-1), 0)",
        "weight.index_select(0, row)", ("runtime/test_kernels.py", "passes/test_rules_models.py"),
    ),
    Historic(
        A_KIND, "the gradient of a padded row is trained", "runtime/kernels/embedding.py",
        "ignored = padding - offset if padding >= 0 else -1", "ignored = -1", ("runtime/test_kernels.py",),
    ),
    Historic(
        A_KIND, "all ranks drop the same elements of their samples", "runtime/kernels/dropout.py",
        "runs = PieceRuns.of(whole, local, offsets)\n    limit, scale = _limit(p)",
        "runs = PieceRuns.of(whole, local, [0] * len(offsets))\n    limit, scale = _limit(p)",
        ("runtime/test_dropout.py",),
    ),
    Historic(
        A_KIND, "ranks draw the numbers of the first piece", "runtime/kernels/random_kernels.py",
        "runs, kernels = PieceRuns.of(whole, local, offsets), kernels or", "runs, kernels = PieceRuns.of(whole, local, "
        "[0] * len(offsets)), kernels or", ("runtime/test_random.py",),
    ),
    Historic(
        A_KIND, "clipping counts what several ranks hold several times", "autopar/parallel/tensors/place.py",
        "if any(at and axis not in self.layout.axes for axis, at in coord.items() if axis != PIPELINE):",
        "if False:", ("parallel/test_tensors.py", "parallel/test_likeness.py"),
    ),
    Historic(
        A_KIND, "pieces that two axes cut are put together in the other order",
        "runtime/collectives/mesh_ops.py", "x = parts.unflatten(dim + 1, (blocks, rest)).movedim(0, dim + 1)",
        "x = parts.unflatten(dim + 1, (blocks, rest)).movedim(0, dim if blocks > 1 else dim + 1)",
        ("runtime/test_collective_ops.py", "passes/test_reshard.py"),
    ),
    Historic(
        A_KIND, "gradients leave a bucket in another order", "passes/overlap/coalesce.py",
        "for i, (node, type_) in enumerate(zip(nodes, types, strict=True)):\n            item",
        "for i, (node, type_) in enumerate(zip(reversed(nodes), reversed(types), strict=True)):\n            item",
        ("passes/test_reshard.py", "passes/test_rules_models.py", "passes/test_golden.py"),
    ),
    Historic(
        A_KIND, "a sum of gradients is taken in a short float", "passes/collectives/reshard.py",
        "made = self._cast(made, self.plan.options.reduce_dtype, like)\n            for step",
        "made = self._cast(made, record(node).type.dtype, like)\n            for step",
        ("passes/test_gradient_sums.py", "passes/test_precision.py"),
    ),
    Historic(
        A_KIND, "rows come back from their experts in the order in which they went",
        "runtime/collectives/rows_to_owners.py", "return torch.empty_like(rows).index_copy_(0, order, rows)",
        "return rows.clone()", ("runtime/test_rows_to_owners.py", "runtime/test_experts.py"),
    ),
    Historic(
        A_KIND, "rows beyond a capacity are dropped without a word",
        "runtime/collectives/rows_to_owners.py", "is_sent = (chosen >= 0) & (chosen < groups)",
        "is_sent = (chosen >= 0) & (chosen < groups) & (within < bound - 1)",
        ("runtime/test_rows_to_owners.py", "passes/test_experts_split.py"),
    ),
    Historic(
        A_KIND, "statistics are those of a rank", "passes/rules/normalisation.py",
        'return instantiate(spec, call, replicated={"n", "e", "..."})',
        'return instantiate(spec, call, replicated={"e"})', RULES,
    ),
    Historic(
        A_KIND, "a convolution sees zeros where the next rank has rows", "runtime/collectives/halo_rows.py",
        "[part for own, run in parts for part in (ends.before(run, wrap), own, ends.behind(run, wrap))], dim",
        "[part for own, run in parts for part in (0 * ends.before(run, wrap), own, ends.behind(run, wrap))], dim",
        ("passes/test_halos.py", "runtime/test_collective_ops.py"),
    ),
    Historic(
        A_KIND, "gradients are used as the loss scale left them", "autopar/parallel/session/loss_scale.py",
        "torch.full((), 1.0 / self.scale, device=lies)", "torch.full((), 1.0, device=lies)",
        ("parallel/test_loss_scale.py",),
    ),
    Historic(
        A_KIND, "a resumed run begins with other random numbers", "autopar/checkpoint/load.py",
        'if isinstance(model, ParallelModule):\n            if "random" in entry:',
        'if isinstance(model, ParallelModule):\n            if "random_" in entry:',
        ("checkpoint/test_checkpointer.py",),
    ),
    Historic(
        A_KIND, "an optimizer's states are left as they were when a run is resumed",
        "autopar/checkpoint/load.py", 'if name in entry["state"]\n', 'if name in entry["state"] and not name\n',
        ("checkpoint/test_checkpointer.py",),
    ),
    Historic(
        A_KIND, "averages of weights are not those that were saved", "autopar/ema.py", "tensor.copy_(given[name])",
        "tensor.zero_()", ("parallel/test_ema.py",),
    ),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="those in whose words this one is")
    parser.add_argument("--control", action="store_true", help="see that the tests pass with nothing changed")
    options = parser.parse_args()
    import torch  # noqa: F401  each process begins with it

    missed = 0
    for bug in (bug for bug in BUGS if options.only in f"{bug.of} {bug.what}"):
        start = time.monotonic()
        found = judged(replace(bug, new=bug.old) if options.control else bug)
        missed += found != ("survived" if options.control else "killed")
        print(f"{found:9} {bug.of}: {bug.what}  {time.monotonic() - start:.0f} s", flush=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
