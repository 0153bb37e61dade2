"""Graphs of micro-batches write over what the forward pass saved: never over anything that somebody still reads.

`_Poisoned` fills the memory of every placeholder that a graph may write over, once the graph has run, with ones that
are no value of these models: whoever looked at it later, under whatever name, would compute another step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import models
import models_special
import pytest
import torch
from torch import Tensor, fx, nn

import autopar.runtime.executor.kernel_table  # noqa: F401  registers the kernels of our ops
from autopar.api import Compiled
from autopar.capture import capture
from autopar.compiler.meshes import mesh_of
from autopar.ir.options import StepOptions
from autopar.ir.pipeline import Pipeline
from autopar.ir.plan import Plan
from autopar.ir.program import record, set_record
from autopar.passes import make_pipeline, run_passes
from autopar.runtime.executor.executor import Executable
from autopar.runtime.executor.owned import own_results, owned
from autopar.runtime.pipeline.compiled_instructions import code_of, graphs_at, on_executor, sums_of
from autopar.runtime.pipeline.microbatches import ExecutorGraph, GraphTurn, StageGraph
from autopar.runtime.pipeline.run_pipeline import Finals, RankCode
from autopar.runtime.ranks.virtual import VirtualMesh
from autopar.verification.virtual_inputs import scattered
from autopar.verification.virtual_side import Virtual

Owned = Callable[[Pipeline, Any], frozenset[fx.Node]]
SEED = torch.tensor([3, 5])


class Kept(nn.Module):
    """What is saved lies in many ways in other memory: parts, views of parameters, a value under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(8, 12), nn.Linear(6, 8), nn.Parameter(torch.randn(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        left, right = hidden.chunk(2, -1)
        turned = hidden.view(-1, 2, 6).transpose(1, 2)
        gate = (turned * self.scale).exp().sum(-1)
        row = x[:, :6].cos()
        return self.second(left.sigmoid() * right * gate + row * left) * hidden[:, :8]


def kept() -> models.Case:
    torch.manual_seed(5)
    return Kept(), models.square_loss, (torch.randn(8, 8), torch.randn(8, 8))


@dataclass(frozen=True)
class _Poisoned:
    """A graph after which the memory of its own placeholders is spoiled, where no result lies in it."""

    graph: ExecutorGraph
    places: tuple[int, ...]

    @property
    def source(self) -> str:
        return self.graph.source

    @property
    def sums(self) -> tuple[str, ...]:
        return self.graph.sums

    def steps(self, items: list[Any], turn: GraphTurn) -> Generator[Any, Any, tuple[Any, ...]]:
        mine = [items[place] for place in self.places]
        outputs = yield from self.graph.steps(items, turn)
        left = {_memory(value) for value in outputs if isinstance(value, Tensor)}
        for value in mine:
            if _memory(value) not in left:
                value.fill_(torch.nan if value.is_floating_point() else 1)
        return outputs


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _compiled(case: Callable[[], models.Case], mesh: str, **options: Any) -> tuple[Compiled, list[Any]]:
    """A step of a model in float64, and what every rank is given."""
    model, loss_fn, batch = case()
    model = model.double()
    args = tuple(one.double() if one.is_floating_point() else one for one in batch)
    captured = capture(model, loss_fn, args, {}, lift=torch.float64)
    plan = Plan(mesh_of(mesh), options=StepOptions(**options))
    history = run_passes(captured.program, plan)
    found = Compiled(plan, history, make_pipeline(history[-1][1], plan))
    whole = Virtual(model, captured, found, lambda p: torch.optim.SGD(p, lr=0.1)).whole(args, {}, SEED)
    return found, scattered(found.program, found.pipeline, found.mesh, [whole])


def _nothing(pipeline: Pipeline, one: Any) -> frozenset[fx.Node]:
    return frozenset()


def _code(pipeline: Pipeline, rank: int, own: Owned, poison: bool = False) -> RankCode:
    graphs: dict[tuple[int, str, int], StageGraph] = {}
    for one in graphs_at(pipeline, rank):
        sums, mine = sums_of(one.program, pipeline), own(pipeline, one)
        graph = ExecutorGraph(Executable(one.program.graph, sums.values(), mine), tuple(sums))
        places = tuple(i for i, node in enumerate(one.program.placeholders) if node in mine)
        graphs[one.place] = _Poisoned(graph, places) if poison and one.key[1] not in "CE" else graph
    return code_of(pipeline, rank, graphs)


def _run(found: Compiled, given: list[Any], own: Owned, poison: bool = False, untouched: bool = True) -> list[Finals]:
    """What each rank gives. untouched: what it is given must be the same afterwards."""
    assert found.pipeline is not None
    codes = [_code(found.pipeline, rank, own, poison) for rank in range(found.pipeline.flow.size)]
    copies = [{key: value.clone() for key, value in inputs.items()} for inputs in given]
    finals = VirtualMesh(found.mesh).run_pipeline(codes, copies)
    for before, after in zip(given, copies, strict=True):
        assert not untouched or all(torch.equal(before[key], after[key]) for key in after), (
            "what a step is given stays as it is"
        )
    return finals


def _same(one: list[Finals], other: list[Finals]) -> bool:
    """But for roundings: what is written over a transposed value lies transposed, and its sums take another order."""
    return all(
        mine.keys() == its.keys() and all(torch.allclose(mine[key], its[key], 1e-12, 1e-15) for key in mine)
        for mine, its in zip(one, other, strict=True)
    )


WAYS = (
    ("dp=2", {"microbatches": 2}),
    ("pp=2,tp=2", {"microbatches": 4, "schedule": "1f1b"}),
    ("pp=2", {"microbatches": 4, "schedule": "zb-v", "chunks": 2}),
    ("pp=2,dp=2", {"microbatches": 2, "schedule": "zb-h1", "zero": 3}),
    ("pp=2", {"microbatches": 4, "schedule": "interleaved-1f1b", "chunks": 2, "recompute": "selective"}),
)
MODELS = (models.gpt, models.llama, models.vit, models_special.hybrid, models_special.frozen, kept)


@pytest.mark.parametrize(("mesh", "options"), WAYS, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("case", MODELS)
def test_nobody_reads_what_was_written_over(case: Callable[[], models.Case], mesh: str, options: dict[str, Any]):
    found, given = _compiled(case, mesh, **options)
    wanted = _run(found, given, _nothing)
    assert all(value.isfinite().all() for rank in wanted for value in rank.values())
    assert _same(_run(found, given, owned), wanted)
    assert _same(_run(found, given, owned, poison=True), wanted)


@pytest.mark.parametrize(("microbatches", "over"), [(1, False), (2, True)])
def test_sums_of_several_microbatches_alone_are_written_over(microbatches: int, over: bool):
    """The sum of one is the value itself, which somebody may hold."""
    found, _ = _compiled(kept, "pp=2", microbatches=microbatches)
    assert found.pipeline is not None
    ends = [one for rank in range(2) for one in graphs_at(found.pipeline, rank) if one.key[1] == "E"]
    assert len(ends) == 2 and any(owned(found.pipeline, one) for one in ends) is over


def test_poison_is_seen():
    """With all that was saved, a value that two graphs read is spoiled before the second one."""
    found, given = _compiled(models.gpt, "pp=2", microbatches=2, schedule="zb-h1")

    def all_saved(pipeline: Pipeline, one: Any) -> frozenset[fx.Node]:
        return frozenset(node for node, entry in one.program.entries if entry.kind == "saved")

    wanted = _run(found, given, _nothing)
    assert _same(wanted, _run(found, given, owned, poison=True))
    assert not _same(wanted, _run(found, given, all_saved, poison=True, untouched=False))


def test_the_gradient_of_the_logits_is_written_over_them():
    found, _ = _compiled(models.gpt, "dp=2", microbatches=2)
    assert found.pipeline is not None
    (backward,) = (one for one in graphs_at(found.pipeline, 0) if one.key == (0, "B"))
    graph = on_executor(found.pipeline, backward)
    called = {getattr(thing, "__name__", "") for thing in graph.executable.code.function.__globals__.values()}
    assert "cross_entropy_backward_inplace" in called


def test_results_in_memory_of_their_own():
    graph, aten = fx.Graph(), torch.ops.aten
    x, weight = graph.placeholder("x"), graph.placeholder("weight")

    def call(name: str, target: Any, *args: Any) -> fx.Node:
        return graph.create_node("call_function", target, args, name=name)

    own = call("own", aten.add.Tensor, x, x)
    turned = call("turned", aten.permute.default, call("made", aten.exp.default, x), [1, 0])
    given = call("given", aten.permute.default, weight, [1, 0])
    wide = call("wide", aten.expand.default, call("row", aten.sum.dim_IntList, x, [0], True), [4, 8])
    part = call("part", aten.slice.Tensor, call("whole", aten.cos.default, x), 0, 0, 2)
    both = call("both", aten.sin.default, x)
    again = call("again", aten.view.default, both, [-1])
    twice = call("twice", aten.tanh.default, x)
    graph.output((own, turned, given, wide, part, both, again, twice, twice, x, None))
    assert {node.name for node in own_results(graph)} == {"own", "turned"}


def test_which_gradients_add_to_their_sums_by_themselves():
    """Those of products; not one that somebody else reads as well."""
    found, _ = _compiled(kept, "dp=1", microbatches=2)
    assert found.pipeline is not None
    (backward,) = (one.program for one in graphs_at(found.pipeline, 0) if one.key == (0, "B"))
    sums = sums_of(backward, found.pipeline)
    assert len(sums) == 2 and all(record(node).flops for node in sums.values()), sums
    name, node = next(iter(sums.items()))
    with backward.graph.inserting_after(node):
        copy = backward.graph.call_function(torch.ops.aten.neg.default, (node,))
    set_record(copy, record(node))
    assert sums_of(backward, found.pipeline).keys() == sums.keys() - {name}
