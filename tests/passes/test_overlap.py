"""Collectives of tensor parallel layers move while gradients of weights are computed (see the golden files too)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from models import few_kv_heads, llama, mlp, resnet
from overlapping import compiled_case, large_llama, verify_random
from shares import share
from test_golden import compare
from torch import Tensor, nn
from verified import verified

from autopar.ir.check.check_levels import verify
from autopar.ir.ops.ops import is_collective, op
from autopar.ir.plan import Fixed
from autopar.ir.program import record
from autopar.ir.text.text import print_program
from autopar.machines import Machine
from autopar.passes.overlap.overlap import overlap

SLOW = Fixed(machine=Machine.flat(1e3, 1e2, 1e1, 1.0, 0.1))  # a machine that has to wait, at the sizes of tests
EINSUM, WAIT = op("einsum"), op("wait")


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_collective_of_a_backward_layer_has_products_under_it(sequence_parallel: bool) -> None:
    program = large_llama(sequence_parallel=sequence_parallel).program
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


@pytest.mark.parametrize(
    ("case", "mesh"), list(share(2, [mlp, llama, few_kv_heads, resnet], ["tp=2", "dp=2,tp=2", "dp=3,tp=2"]))
)
def test_the_step_computes_the_same(case: object, mesh: str) -> None:
    compiled = compiled_case(case, mesh)
    before = dict(compiled.history)["prefetch"]
    after = overlap(before, replace(compiled.plan, fixed=SLOW))
    verify(after, after.level)
    assert any("_start" in node.name for node in after.nodes)
    compare(print_program(before), print_program(after), compiled.plan, seed=len(mesh))


@pytest.mark.parametrize("seed", list(share(2, range(20))))
def test_steps_of_random_programs_are_right_where_everything_moves_early(seed: int) -> None:
    verify_random(seed, SLOW)


class Twice(nn.Module):
    """Queries, keys and values of tokens and of a few vectors by the same weights: their gradients are sums of two
    products, and collectives stand between the two."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors, self.table, self.norm = nn.Embedding(8, 32), nn.Embedding(40, 32), nn.LayerNorm(32)
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=False) for _ in range(3))

    def heads(self, y: Tensor) -> Tensor:
        return y.unflatten(-1, (4, -1)).transpose(1, 2)

    def forward(self, tokens: Tensor, y: Tensor) -> Tensor:
        x, few = self.norm(self.table(tokens)), self.norm(self.vectors.weight.expand(len(tokens), -1, -1))
        seen = [self.heads(torch.cat([project(few), project(x)], 1)) for project in (self.k, self.v)]
        a, b = (F.scaled_dot_product_attention(self.heads(self.q(each)), *seen) for each in (x, few))
        return (a.transpose(1, 2).flatten(2) * y).square().mean() + b.mean()


def test_what_is_sunk_for_one_collective_is_sunk_for_no_other() -> None:
    batch = torch.randint(40, (4, 16)), torch.randn(4, 16, 32)
    verified(Twice(), ["tp=2", "cp=2", "cp=2,tp=2"], None, batch, fixed=SLOW)
