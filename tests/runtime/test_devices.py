"""A program names no device: what a step makes lies where its parameters do. Without a GPU the meta device tells."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import autopar
from autopar.api import compile
from autopar.compiled import Compiled
from autopar.ir.layout import local_shape
from autopar.ir.ops.op_facts import creates
from autopar.ir.ops.ops import op
from autopar.ir.program import record
from autopar.passes.rules.creation import ROWS
from autopar.report.memory.simulate_rank import fake_groups
from autopar.runtime.compilers.functional import FunctionalCollectives
from autopar.runtime.compilers.rank_trace import RankTrace
from autopar.runtime.executor.executor import Executable
from autopar.runtime.ranks.distributed import DistributedDriver
from autopar.torch_compat import OpOverload

META = torch.device("meta")
TOKENS = torch.arange(24).view(4, 6) % 16
PLACES_OF_TOKENS = range(TOKENS.data_ptr(), TOKENS.data_ptr() + TOKENS.nbytes)


class Makes(nn.Module):
    """Makes tensors in all ways that models do."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.up = nn.Embedding(16, 8), nn.Embedding(6, 8), nn.Linear(8, 16)
        self.register_buffer("steps", torch.zeros(1))
        self.slopes = torch.ones(8)  # neither parameter nor buffer

    def forward(self, index: Tensor) -> Tensor:
        time, device = index.shape[1], self.up.weight.device
        place = torch.arange(time, device=device)
        x = self.tokens(index) + self.places(place) + self.slopes
        angle = place[:, None] / 10000 ** (torch.arange(0, 8, 2, device=device).float() / 8)
        x = x + torch.cat([angle.cos(), angle.sin()], -1)
        seen = torch.ones(time, time, dtype=torch.bool, device=device).tril()
        x = (x @ x.mT).masked_fill(~seen, -torch.inf).softmax(-1) @ x
        x = x + F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]
        x = x + torch.tensor([1.0, 2.0], device=device).sum() + torch.full((time, 1), 0.5, device=device)
        x = F.dropout(x, 0.1) + torch.rand(time, 8, device=device) + torch.zeros(8, device=device)
        x = x + torch.eye(time, 8, device=device) + torch.linspace(0, 1, 8, device=device) + x.new_ones(8)
        self.steps += 1
        return F.cross_entropy(self.up(x).flatten(0, 1), index.flatten()) * torch.scalar_tensor(2.0, device=device)


class Elsewhere(TorchDispatchMode):
    """Notes the ops that give a tensor on another device than meta, but for views of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device != META and leaf.data_ptr() not in PLACES_OF_TOKENS:
                self.found.add(str(func))
        return result


def inputs_of(compiled: Compiled) -> list[Tensor]:
    known = [record(node) for node in compiled.program.placeholders]
    return [
        torch.empty(local_shape(k.type.shape, k.layout, compiled.mesh), dtype=k.type.dtype, device=META) for k in known
    ]


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=2,tp=4"])
def test_each_rank_makes_its_tensors_where_its_inputs_are(mesh: str) -> None:
    compiled = compile(Makes(), mesh, batch=(TOKENS,))
    made = {str(node.target) for node in compiled.program.graph.nodes if creates(node.target)}
    assert {"aten.arange.default", "aten.ones.default", "aten.full.default", "aten.eye.m"} <= made
    executable = Executable(compiled.program.graph, device=META)
    for rank in range(compiled.mesh.size):
        driver = DistributedDriver(compiled.mesh, fake_groups(compiled.mesh, rank, compiled.axes, copies=False), rank)
        with Elsewhere() as elsewhere:
            outputs = driver.run(executable, inputs_of(compiled))
        assert not elsewhere.found
        assert {out.device for out in outputs} == {META}


@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"zero": 3}, {"precision": "bf16"}])
def test_a_step_lies_on_the_device_that_was_asked_for(options: dict[str, Any]) -> None:
    """Constants, buffers and the seed too; the batch comes from the CPU and is moved."""
    model = autopar.parallelize(Makes(), "dp=1", device="meta", **options)
    model.prepare(TOKENS)
    with Elsewhere() as elsewhere:
        loss = model.forward_backward(TOKENS)
    assert not elsewhere.found
    assert loss.device == META
    assert {p.grad.device for p in model.parameters() if p.grad is not None} == {META}
    assert {buffer.device for buffer in model.buffers()} == {META}


class Moves(TorchFunctionMode):
    """Notes how often tensors are moved, and how often without waiting."""

    only_watches = True

    def __init__(self) -> None:
        super().__init__()
        self.found: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to and args[1:] == (META,):
            self.found.append(bool((kwargs or {}).get("non_blocking")))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("pinned", [True, False])
def test_the_host_does_not_wait_for_a_pinned_batch(pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red before: it waited for all that was in the queue of the device."""
    model = autopar.parallelize(Makes(), "dp=1", device="meta")
    model.prepare(TOKENS)
    monkeypatch.setattr(Tensor, "is_pinned", lambda self, *_: pinned)
    with Moves() as moves:
        model.forward_backward(TOKENS)
    assert moves.found == [pinned]


def test_what_a_compiler_is_given_lies_there_too() -> None:
    compiled = compile(Makes(), "dp=1", batch=(TOKENS,))
    trace = RankTrace(compiled.program, FunctionalCollectives(compiled.mesh, {"dp": 0}, {}), META)
    with torch.no_grad():
        graph = make_fx(trace.run, tracing_mode="fake")(*inputs_of(compiled)).graph
    made = [node for node in graph.nodes if node.op == "call_function" and isinstance(node.meta.get("val"), Tensor)]
    assert len(made) > 50
    assert {node.meta["val"].device for node in made} == {META}


def test_which_ops_are_told_of_the_device() -> None:
    aten = torch.ops.aten
    told = (
        aten.arange.start_step,
        aten.full.default,
        aten.eye.m,
        aten.tril_indices.default,
        aten.empty_strided.default,
    )
    assert all(map(creates, told))
    has_operand = (aten.full_like.default, aten.new_zeros.default, aten._to_copy.default, aten.add.Tensor, op("random"))
    assert not any(map(creates, has_operand))


def test_every_op_with_a_rule_that_makes_a_tensor_is_told() -> None:
    for name in ROWS:
        packet, overload = name.removeprefix("aten.").split(".")
        target = getattr(getattr(torch.ops.aten, packet), overload)
        assert isinstance(target, OpOverload)
        assert creates(target) or isinstance(target._schema.arguments[0].type, torch.TensorType), name
