"""Collectives of tensor parallel layers move while gradients of weights are computed (see the golden files too)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models import Llama, few_kv_heads, gpt, llama, mlp, resnet, square_loss, token_loss
from random_programs import Program as RandomModel
from test_golden import compare
from verified import verified

import autopar
from autopar.errors import LayoutError
from autopar.ir.ops import is_collective, op
from autopar.ir.plan import Fixed, Machine
from autopar.ir.program import Program, record
from autopar.ir.text import print_program
from autopar.ir.verify import verify
from autopar.passes.overlap import overlap

SLOW = Fixed(machine=Machine(1e3, 1e2, 1e1, 1.0, 0.1))  # a machine that has to wait, at the sizes of tests
OPTIONS = ({}, {"zero": 3}, {"zero": 2, "microbatches": 2}, {"recompute": "full"}, {"sequence_parallel": "auto"})
EINSUM, WAIT = op("einsum"), op("wait")


def large_llama(**options: object) -> Program:
    """Three layers of a Llama on two GPUs, without data."""
    with torch.device("meta"):
        model = Llama(3, 4096, 32, 8, 11008, 32000, 2048)
        batch = torch.empty(2, 2048, dtype=torch.int64), torch.empty(2, 2048, dtype=torch.int64)
    return autopar.compile(model, "tp=2", loss_fn=token_loss, batch=batch, precision="bf16", **options).program  # type: ignore[arg-type]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_collective_of_a_backward_layer_has_products_under_it(sequence_parallel: bool) -> None:
    program = large_llama(sequence_parallel=sequence_parallel)
    nodes, hidden, exposed = program.nodes, 0, []
    for i, node in enumerate(nodes):
        if not is_collective(node.target) or node.target is WAIT:
            continue
        if not record(node).is_backward or not record(node).module.startswith("blocks.1"):
            continue
        (wait,) = (user for user in node.users if user.target is WAIT) if "_start" in str(node.target) else (node,)
        under = [other for other in nodes[i : nodes.index(wait)] if other.target is EINSUM]
        hidden += bool(under)
        exposed += [] if under else [f"{node} {record(node).layout}"]
    assert hidden >= 2, "nothing moves, or nothing is hidden"
    assert not exposed


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2", "dp=3,tp=2"])
@pytest.mark.parametrize("case", [mlp, llama, few_kv_heads, resnet])
def test_the_step_computes_the_same(case: object, mesh: str) -> None:
    model, loss_fn, batch = case()  # type: ignore[operator]
    compiled = autopar.compile(model, mesh, loss_fn=loss_fn, batch=batch)
    before = dict(compiled.history)["prefetch"]
    after = overlap(before, replace(compiled.plan, fixed=SLOW))
    verify(after, after.level)
    assert any("_start" in node.name for node in after.nodes)
    compare(print_program(before), print_program(after), compiled.plan, seed=len(mesh))


@pytest.mark.parametrize("seed", range(20))
def test_steps_of_random_programs_are_right_where_everything_moves_early(seed: int) -> None:
    model: torch.nn.Module = RandomModel(seed)
    batch, loss_fn = model.batch(), square_loss  # type: ignore[operator]
    if seed % 4 == 0:
        model, _, batch = gpt() if seed % 8 else llama()
        loss_fn = token_loss
    mesh = ("dp=2,tp=2", "dp=3,tp=2", "tp=2,dp=2", "pp=2,tp=2")[seed // 2 % 4]
    options = {"microbatches": 2} if "pp" in mesh else OPTIONS[seed % len(OPTIONS)]
    said = f"{mesh} {options}\n{model}"
    print(said)
    try:
        verified(model, [mesh], loss_fn, batch, fixed=SLOW, **options)  # type: ignore[arg-type]
    except LayoutError as error:
        assert "can split no weight" in str(error) or "micro-batches cannot be" in str(error), said  # refused is right
