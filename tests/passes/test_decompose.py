"""Products and collectives in chunks: only where the times of a machine promise a gain, and with the same numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from models import few_kv_heads, llama, mlp, resnet
from overlapping import compiled_case, large_llama, verify_random
from shares import share
from test_golden import compare

import autopar
from autopar.ir.check.check_levels import verify
from autopar.ir.ops.ops import op
from autopar.ir.plan import Fixed, Plan
from autopar.ir.program import Program, record
from autopar.ir.text.text import parse_program, print_program
from autopar.machines import Machine, named
from autopar.passes.costs.node_costs import node_times
from autopar.passes.overlap.decompose import decompose

# Products and links take about as long, copies and calls nothing: what can be cut pays.
WORTH = Fixed(machine=Machine.flat(1e2, 1e5, 1e1, 1e-3, 1e-3))
EINSUM = op("einsum")


def cut_in(program: Program) -> Counter[str]:
    """By kind, the starts that the pass made."""
    made = [node for node in program.calls() if record(node).made_by == "decompose"]
    return Counter(str(node.target) for node in made if "_start" in node.name)


def before_and_plan(case: object, mesh: str, **options: object) -> tuple[Program, autopar.Compiled]:
    compiled = compiled_case(case, mesh, **options)
    return dict(compiled.history)["overlap"], compiled


@pytest.mark.parametrize(
    ("case", "mesh"), list(share(2, [mlp, llama, few_kv_heads, resnet], ["tp=2", "dp=2,tp=2", "dp=3,tp=2"]))
)
def test_the_step_computes_the_same(case: object, mesh: str) -> None:
    before, compiled = before_and_plan(case, mesh)
    after = decompose(before, replace(compiled.plan, fixed=WORTH))
    verify(after, after.level)
    assert cut_in(after) or case is resnet
    compare(print_program(before), print_program(after), compiled.plan, seed=len(mesh))


def test_gathers_and_scatters_of_sequence_parallel_layers() -> None:
    before, compiled = before_and_plan(llama, "dp=2,tp=2", sequence_parallel=True)
    after = decompose(before, replace(compiled.plan, fixed=WORTH))
    verify(after, after.level)
    found = cut_in(after)
    assert found["autopar.reduce_scatter_start.default"] and found["autopar.all_gather_start.default"], found
    compare(print_program(before), print_program(after), compiled.plan, seed=1)


def test_nothing_is_cut_where_it_does_not_pay() -> None:
    before, compiled = before_and_plan(llama, "dp=2,tp=2")
    late = Machine.flat(1e1, 1e5, 1e1, 1e9, 1e-3)  # a collective's latency is all
    for machine in (named("cpu"), named("h100-80g"), late):
        assert decompose(before, replace(compiled.plan, fixed=Fixed(machine=machine))) is before


def test_chunks_hide_what_the_forward_pass_of_a_large_model_sums() -> None:
    """Of the sums over tp half or more goes under products."""
    compiled = large_llama()
    server = Machine.flat(4e8, 2e6, 1e5, 10, 2)  # whose links are a quarter of an H100's
    before = dict(compiled.history)["overlap"]
    after = decompose(before, replace(compiled.plan, fixed=Fixed(machine=server)))
    times = node_times(before, server)
    late = [
        node
        for node in before.calls()
        if node.target is op("all_reduce") and node.args[0].target is EINSUM and len(node.args[0].users) == 1  # type: ignore[union-attr]
    ]
    in_layers = [node for node in late if record(node).module.startswith("blocks.") and times[node] > 100]
    assert len(in_layers) >= 6
    assert not [node for node in in_layers if node.name in {other.name for other in after.nodes}]
    assert cut_in(after)["autopar.all_reduce_start.default"] >= 2 * len(in_layers)


@pytest.mark.parametrize("seed", list(share(2, range(20))))
def test_steps_of_random_programs_are_right_where_all_that_can_be_is_cut(seed: int) -> None:
    verify_random(seed, WORTH)


OWN_DIM = """LOCAL program on tp=2
%w: f32[1,64] of [2,64] [tp,-] = parameter "w"
%v: f32[2,1] of [2,2] [-,tp] = parameter "v"
%x: f32[8,64] of [16,64] [tp,-] = batch "0"
%relu: f32[8,64] of [16,64] [tp,-] = aten.relu.default(%x)
%all_gather: f32[16,64] [-,-] = autopar.all_gather.default(%relu, "tp", 0, 1)
%einsum: f32[16,1] of [16,2] [-,tp] = autopar.einsum.default(%all_gather, %w, "ca,ba->cb")
%einsum_1: f32[16,2] [-,-] partial(tp) = autopar.einsum.default(%einsum, %v, "ca,ba->cb")
%reduce_scatter: f32[8,2] of [16,2] [tp,-] = autopar.reduce_scatter.default(%einsum_1, "tp", 0, 1, "sum")
%all_gather_1: f32[16,2] [-,-] = autopar.all_gather.default(%reduce_scatter, "tp", 0, 1)
return value "y" = %all_gather_1
"""


def test_the_dim_that_a_collective_moves_is_left_whole() -> None:
    """Chunks of it would bring the rows of all ranks into another order."""
    before = parse_program(OWN_DIM)
    after = decompose(before, Plan(before.mesh, fixed=Fixed(machine=Machine.flat(1, 10, 5, 0.5, 0.1))))
    verify(after, after.level)
    assert after is before
    compare(OWN_DIM, print_program(after), Plan(before.mesh), seed=0)
