"""The executor: order, liveness, what may be overwritten, and errors that name the node."""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from autopar.errors import BatchError
from autopar.ir.layout import Layout, replicated
from autopar.ir.ops.ops import op
from autopar.ir.program import Record, TensorType, set_record
from autopar.runtime.executor.executor import Executable, Request, at_call, describe, describe_read, run, written_over
from autopar.runtime.executor.lifetime import lifetimes

aten = torch.ops.aten


class Build:
    """A graph with records, by hand: every value a tensor of one shape unless told otherwise."""

    def __init__(self, shape: tuple[int, ...] = (4, 6), dtype: torch.dtype = torch.float64) -> None:
        self.graph = fx.Graph()
        self.type = TensorType(shape, dtype)

    def input(self, name: str) -> fx.Node:
        return self._noted(self.graph.placeholder(name), self.type.shape)

    def call(self, target: Any, *args: Any, shape: tuple[int, ...] | None = None, **kwargs: Any) -> fx.Node:
        return self._noted(self.graph.call_function(target, args, kwargs), shape or self.type.shape)

    def several(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        set_record(node, Record((self.type, self.type), several=True, layouts=(replicated(2), replicated(2))))
        return node

    def done(self, *results: fx.Node) -> Executable:
        self.graph.output(results)
        return Executable(self.graph)

    def _noted(self, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        layout: Layout = replicated(len(shape))
        type_ = TensorType(shape, self.type.dtype)
        made = Record((type_,), layouts=(layout,), module="blocks.0.mlp", source="gpt.py:41", made_by="reshard")
        set_record(node, made)
        return node


def finish(
    executable: Executable, inputs: list[Any], answer: Callable[[Request], Any] | None = None, observe: Any = None
) -> tuple[Any, ...]:
    """Drive to the end; `answer` serves the requests."""
    with torch.no_grad():
        steps = run(executable, inputs, observe)
        given: list[Any] | None = None
        try:
            while True:
                request = steps.send(given)
                assert answer is not None
                given = [answer(request)]
        except StopIteration as stop:
            return stop.value


def test_arguments_of_every_kind() -> None:
    build = Build()
    x, y = build.input("x"), build.input("y")
    cat = build.call(aten.cat.default, [x, y], 1, shape=(4, 12))
    pair = build.several(aten.max.dim, cat, 1)
    top = build.call(operator.getitem, pair, 0, shape=(4,))
    zeros = build.call(aten.zeros.default, [4], dtype=torch.float64, shape=(4,))
    low = build.call(aten.clamp.default, top, min=float("-inf"), max=0.5, shape=(4,))
    total = build.call(aten.add.Tensor, low, zeros, alpha=3, shape=(4,))
    picked = build.call(operator.getitem, x, (slice(None, 2, None), None, 1), shape=(2, 1))
    executable = build.done(total, picked, top)
    a, b = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    got = finish(executable, [a, b])
    want = torch.cat([a, b], 1).max(1).values
    assert torch.equal(got[2], want) and torch.equal(got[0], want.clamp(max=0.5))
    assert torch.equal(got[1], a[:2, None, 1])
    assert "add" in executable.source


def test_a_factor_stays_with_its_operand() -> None:
    """x + 3y is written over y by a call that has no factor for x; x + y is."""
    for factor in ({}, {"alpha": 3}):
        build = Build()
        x = build.input("x")
        total = build.call(aten.add.Tensor, x, build.call(aten.exp.default, x), **factor)
        given = torch.randn(4, 6, dtype=torch.float64)
        executable = build.done(total)
        assert torch.equal(finish(executable, [given])[0], torch.add(given, given.exp(), **factor))
        assert (total in written_over(executable.graph, ())) is not bool(factor)


def test_results_may_repeat_or_be_inputs_or_none() -> None:
    build = Build()
    x = build.input("x")
    build.input("unused")
    build.graph.output((x, x, None))
    value = torch.randn(2)
    assert finish(Executable(build.graph), [value, 3]) == (value, value, None)
    empty = fx.Graph()
    empty.output(())
    assert finish(Executable(empty), []) == ()


def test_constants_of_the_module() -> None:
    module = torch.nn.Module()
    module.register_buffer("table", torch.arange(3.0))
    graph = fx.Graph(owning_module=module)  # type: ignore[arg-type]
    graph.output((graph.call_function(aten.neg.default, (graph.get_attr("table"),)),))
    assert finish(Executable(graph), [])[0].tolist() == [0, -1, -2]
    assert module.table.tolist() == [0, 1, 2]  # a constant is not the graph's to overwrite


def test_kwargs_of_mesh_ops_come_in_schema_order() -> None:
    build = Build()
    x = build.input("x")
    y = build.call(op("all_gather"), x, "tp", outer=3, dim=1)
    executable = build.done(y)
    seen: list[tuple[Any, ...]] = []
    finish(executable, [torch.ones(1)], lambda request: seen.append(request.args[1:]))
    assert seen == [("tp", 1, 3)]


def test_values_are_freed_at_their_last_use() -> None:
    """Inputs, intermediates and answers alike: dead before the next value is made."""
    build = Build()
    x = build.input("x")
    a = build.call(aten.sin.default, x)
    b = build.call(op("all_reduce"), a, "tp", "sum")
    c = build.call(aten.cos.default, b)
    d = build.call(aten.sin.default, c)
    e = build.call(op("all_reduce"), d, "tp", "sum")
    executable = build.done(e)
    watched: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def answer(request: Request) -> torch.Tensor:
        gc.collect()
        alive.append(sum(ref() is not None for ref in watched))
        watched.append(weakref.ref(request.args[0]))
        result = request.args[0] + 1
        watched.append(weakref.ref(result))
        return result

    start = torch.randn(4, 6, dtype=torch.float64)
    watched.append(weakref.ref(start))
    inputs = [start]
    del start
    with torch.no_grad():
        steps = run(executable, inputs)
        inputs.clear()
        request = steps.send(None)
        assert watched[0]() is None, "the input was used last by %sin"
        box = [answer(request)]
        del request
        request = steps.send(box)
        assert alive == [0]
        assert watched[1]() is None and watched[2]() is None, "operand and answer of the first all_reduce"
        with pytest.raises(StopIteration):
            steps.send([answer(request)])


def test_last_use_is_said_only_of_own_memory() -> None:
    """An all-reduce may be in place where, and only where, nothing else sees the memory."""

    def last_use(make: Callable[[Build, fx.Node], tuple[fx.Node, list[fx.Node]]]) -> bool:
        build = Build()
        value, kept = make(build, build.input("x"))
        reduced = build.call(op("all_reduce"), value, "tp", "sum")
        executable = build.done(reduced, *kept)
        seen: list[bool] = []

        def answer(request: Request) -> Any:
            seen.append(request.last_use)
            return request.args[0]

        finish(executable, [torch.randn(4, 6, dtype=torch.float64)], answer)
        return seen[0]

    def fresh(b: Build, x: fx.Node) -> fx.Node:
        return b.call(aten.mul.Tensor, x, 2)

    def view(b: Build, x: fx.Node) -> fx.Node:
        return b.call(aten.view.default, x, [4, 6])

    def both(b: Build, x: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
        y = fresh(b, x)
        return y, [view(b, y)]

    def viewed(b: Build, x: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
        y = fresh(b, x)
        return view(b, y), [y]

    assert last_use(lambda b, x: (fresh(b, x), []))
    assert last_use(lambda b, x: (view(b, fresh(b, x)), []))
    assert not last_use(lambda b, x: (x, []))  # the graph's input
    assert not last_use(lambda b, x: (view(b, x), []))  # a view of it
    assert not last_use(both)  # a view of it is returned
    assert not last_use(viewed)  # it is a view of something returned
    assert not last_use(lambda b, x: (b.call(aten.contiguous.default, x), []))  # may be x itself


def test_dying_operands_are_overwritten_and_nothing_else_is() -> None:
    build = Build()
    x = build.input("x")
    a = build.call(aten.mul.Tensor, x, 2.0)  # x is an input: not in place
    b = build.call(aten.exp.default, a)  # a dies: in place
    c = build.call(aten.add.Tensor, b, b)  # in place, the same operand twice
    v = build.call(aten.view.default, c, [4, 6])
    d = build.call(aten.neg.default, c)  # v lives: not in place
    e = build.call(aten.mul.Tensor, v, d)  # d dies: in place over the second operand
    row = build.call(aten.sum.dim_IntList, e, [1], True, shape=(4, 1))
    wide = build.call(aten.expand.default, row, [4, 6])
    f = build.call(aten.neg.default, wide)  # an expanded view: not in place
    executable = build.done(f, e, c)
    value = torch.randn(4, 6, dtype=torch.float64)
    kept = value.clone()
    got = finish(executable, [value])
    doubled = 2 * (2 * kept).exp()
    assert torch.equal(value, kept)
    torch.testing.assert_close(got[2], doubled)
    torch.testing.assert_close(got[1], -doubled * doubled)
    torch.testing.assert_close(got[0], (doubled * doubled).sum(1, keepdim=True).expand(4, 6))
    lives = lifetimes(build.graph)
    nodes = {node.name: node for node in build.graph.nodes}
    written = {n: [a for a in nodes[n].all_input_nodes if lives.may_overwrite(a, nodes[n])] for n in nodes}
    assert written["exp_default"] == [a] and written["add_tensor"] == [b]
    assert written["mul_tensor"] == [] and written["neg_default"] == []
    assert torch.equal(finish(executable, [value], observe=lambda node, seen: None)[0], got[0])


def test_what_a_view_shows_is_overwritten_if_nothing_else_looks_at_it() -> None:
    """Labels are flattened before a cross entropy: its gradient need not stand beside the logits."""
    build = Build()
    x = build.input("x")
    made = build.call(aten.mul.Tensor, x, 2.0)
    flat = build.call(aten.view.default, made, [24], shape=(24,))
    kept = build.call(aten.exp.default, flat, shape=(24,))  # in place of what `mul` made
    executable = build.done(kept)
    value = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(finish(executable, [value])[0], (2 * value).exp().flatten())
    assert "exp_" in {getattr(thing, "__name__", "") for thing in executable.code.function.__globals__.values()}


def test_a_broadcast_operand_is_not_overwritten() -> None:
    build = Build()
    x = build.input("x")
    row = build.call(aten.sum.dim_IntList, x, [0], True, shape=(1, 6))
    executable = build.done(build.call(aten.add.Tensor, row, x))
    value = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(finish(executable, [value])[0], value.sum(0, keepdim=True) + value)


def test_an_operand_that_another_operand_views_is_not_overwritten() -> None:
    build = Build((4, 4))
    x = build.input("x")
    a = build.call(aten.mul.Tensor, x, 2.0)
    b = build.call(aten.transpose.int, a, 0, 1)
    executable = build.done(build.call(aten.add.Tensor, a, b))
    value = torch.randn(4, 4, dtype=torch.float64)
    torch.testing.assert_close(finish(executable, [value])[0], 2 * value + 2 * value.t())
    assert torch.Tensor.add_ not in executable.code.function.__globals__.values()


def test_observer_sees_and_may_keep_every_value() -> None:
    build = Build()
    x = build.input("x")
    a = build.call(aten.mul.Tensor, x, 2.0)
    b = build.call(aten.exp.default, a)
    c = build.call(aten.neg.default, b)
    executable = build.done(c)
    value = torch.randn(4, 6, dtype=torch.float64)
    kept: dict[fx.Node, torch.Tensor] = {}
    finish(executable, [value], observe=kept.__setitem__)
    assert list(kept) == [x, a, b, c]
    torch.testing.assert_close(kept[a], 2 * value)
    torch.testing.assert_close(kept[b], (2 * value).exp())


def test_an_error_keeps_its_type_and_names_node_module_and_line() -> None:
    build = Build()
    x = build.input("x")
    executable = build.done(build.call(aten.mm.default, x, x))
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        finish(executable, [torch.randn(4, 6, dtype=torch.float64)])
    assert caught.value.__notes__ == ["in %mm_default = aten.mm  (made by reshard)  # blocks.0.mlp  gpt.py:41"]


def products_summed(reads_total: bool) -> tuple[Executable, list[torch.Tensor]]:
    """x a + x b, or x a + (x a) b: the second product may be added to the first where it does not read it."""
    build = Build((4, 4))
    x, a, b = build.input("x"), build.input("a"), build.input("b")
    first = build.call(op("einsum"), x, a, "ca,ab->cb")
    second = build.call(op("einsum"), first if reads_total else x, b, "ca,ab->cb")
    total = build.call(aten.add.Tensor, first, second)
    third = build.call(op("einsum"), x, b, "ca,ab->cb")
    return build.done(build.call(aten.add.Tensor, total, third)), list(torch.randn(3, 4, 4, dtype=torch.float64))


def test_a_product_adds_itself_to_a_sum_of_products() -> None:
    executable, (x, a, b) = products_summed(reads_total=False)
    assert executable.source.count(", added") == 2
    (found,) = finish(executable, [x, a, b])
    torch.testing.assert_close(found, x @ a + 2 * x @ b)


def test_but_not_where_it_reads_that_sum() -> None:
    executable, (x, a, b) = products_summed(reads_total=True)
    assert executable.source.count(", added") == 0
    (found,) = finish(executable, [x, a, b])
    torch.testing.assert_close(found, x @ a + x @ a @ b + x @ b)


def test_what_is_said_of_a_value() -> None:
    """Where it comes from, and the input whose values it reads, if there is one."""
    build = Build()
    x, y = build.input("x"), build.input("y")
    cut = build.call(aten.relu.default, build.call(aten.neg.default, x))
    both = build.call(aten.mul.Tensor, cut, y)
    behind = build.call(aten.exp.default, both)
    place = "  (made by reshard)  # blocks.0.mlp  gpt.py:41"
    assert describe(cut) == f"%{cut.name} = aten.relu{place}"
    assert describe_read(cut) == f"%{cut.name} = aten.relu{place}, of %x"
    assert describe_read(both) == describe(both) and describe_read(behind) == describe(behind)
    assert describe_read(x) == describe(x)
    assert str(at_call(BatchError("No."), cut)) == "No. It is at gpt.py:41 in blocks.0.mlp."
    bare = build.graph.call_function(operator.getitem, (both, 0))
    assert describe(bare) == f"%{bare.name} = getitem"
    set_record(bare, Record((build.type,), source="gpt.py:7"))
    assert str(at_call(BatchError("No."), bare)) == "No. It is at gpt.py:7."
    set_record(bare, Record((build.type,), made_by="zero"))
    assert describe(bare) == f"%{bare.name} = getitem  (made by zero)"
