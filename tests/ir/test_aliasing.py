"""What `autopar/ir/ops/op_facts.py` reads from schemas, beside what the ops do with the samples of their rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rule_brute_force import RUN_AS, Sample, op_of, sample, tensors_in
from rule_samples import r
from rule_samples_all import every_sample
from torch import fx

from autopar.ir.ops import op_facts
from autopar.ir.ops.op_facts import facts_of, is_fresh, is_view, is_whole_view, may_return_operand
from autopar.ir.ops.ops import op
from autopar.passes.rules import TABLE
from autopar.runtime.executor.kernel_table import function_of
from autopar.runtime.executor.lifetime import lifetimes
from autopar.torch_compat import is_composite, schema_of

aten = torch.ops.aten
Tensors = list[torch.Tensor]


@pytest.fixture(scope="module")
def samples() -> dict[str, list[Sample]]:
    return every_sample()


def calls(target: Any, given: list[Sample]) -> Iterator[tuple[Tensors, Tensors]]:
    """The operands and results of an op, as the executor calls it."""
    no_kernel = target is aten._fused_rms_norm_backward.default  # on a CPU
    function = RUN_AS[target] if no_kernel else function_of(target)
    for one in given:
        with torch.no_grad():
            yield tensors_in([one.args, one.kwargs]), tensors_in([function(*one.args, **one.kwargs)])


def memory(tensors: Tensors) -> set[int]:
    """Where tensors with elements lie."""
    return {t.untyped_storage().data_ptr() for t in tensors if t.numel()}


def shows_once(tensor: torch.Tensor) -> bool:
    """True if no element of a tensor stands twice in it."""
    return all(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def contradictions(target: Any, given: list[Sample]) -> list[str]:
    """What the facts of an op say that the samples show to be otherwise."""
    wrong, seen = [], list(calls(target, given))
    shared = [bool(memory(operands) & memory(results)) for operands, results in seen]
    if is_fresh(target):
        if any(shared):
            wrong.append("fresh, but a result lies in an operand")
        if any(len(memory(results)) < sum(t.numel() > 0 for t in results) for _, results in seen):
            wrong.append("fresh, but two results lie in the same memory")
        if not all(shows_once(t) for _, results in seen for t in results):
            wrong.append("fresh, but an element of a result stands twice: it cannot be written over")
    elif is_view(target):
        if not any(shared):
            wrong.append("a view, but no result lies in an operand")
    elif not (is_composite(target) or may_return_operand(target)):
        wrong.append("neither fresh nor a view, and no reason why")
    if is_whole_view(target):
        for (operands, results), aliased in zip(seen, shared, strict=True):
            if aliased and not (results[0].numel() == operands[0].numel() and shows_once(results[0])):
                wrong.append("a whole view, but not every element once")
    return wrong


def test_facts_are_what_every_op_of_the_table_does(samples: dict[str, list[Sample]]) -> None:
    wrong = {name: found for name in TABLE if (found := contradictions(op_of(name), samples[name]))}
    assert wrong == {}
    fresh = sum(is_fresh(op_of(name)) for name in TABLE)
    views = sum(is_view(op_of(name)) for name in TABLE)
    assert fresh > 370 and views > 30, (fresh, views)


def test_a_wrong_fact_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each exception is needed, and an op that torch says to be fresh is no view."""
    reshape, lift = [sample(r(4, 6), [24])], [sample(r(4))]
    monkeypatch.setattr(op_facts, "_UNMARKED_VIEWS", {"mm": "wrong"})
    monkeypatch.setattr(op_facts, "_MAY_RETURN_OPERAND", {})
    monkeypatch.setattr(op_facts, "_KNOWN", {"expand": {"moves": "flat"}, "slice": {"moves": "same"}})
    _forget()
    try:
        assert contradictions(aten._unsafe_view.default, reshape) == ["fresh, but a result lies in an operand"]
        assert contradictions(aten.lift.default, lift) == ["fresh, but a result lies in an operand"]
        assert contradictions(aten.mm.default, [sample(r(2, 3), r(3, 2))]) == [
            "a view, but no result lies in an operand"
        ]
        for target, one in ((aten.expand.default, sample(r(1), [4])), (aten.slice.Tensor, sample(r(4), 0, 0, 2))):
            assert contradictions(target, [one]) == ["a whole view, but not every element once"]
    finally:
        _forget()


def _forget() -> None:
    for fact in (facts_of, is_view, is_whole_view, may_return_operand, is_fresh):
        fact.cache_clear()


@pytest.mark.parametrize("name", sorted(op_facts._UNMARKED_VIEWS | op_facts._MAY_RETURN_OPERAND))
def test_an_exception_is_an_op_whose_schema_says_nothing(name: str) -> None:
    packet = getattr(aten, name)
    schemas = [schema_of(getattr(packet, overload)) for overload in packet.overloads()]
    assert any(not schema.is_mutable and not any(r.alias_info for r in schema.returns) for schema in schemas)


def test_ops_that_nobody_vouches_for_are_not_fresh() -> None:
    composite = (aten.einsum.default, aten.type_as.default, aten.broadcast_tensors.default, aten.atleast_1d.default)
    assert not any(map(is_fresh, composite)), "torch may return a view, and its schema does not say so"
    assert not is_fresh(aten.add_.Tensor) and not is_fresh(len)
    with torch.library._scoped_library("aliasing_test", "DEF") as library:
        library.define("own(Tensor x) -> Tensor")
        assert not is_fresh(torch.ops.aliasing_test.own.default)


def test_ops_of_our_own() -> None:
    assert is_fresh(op("all_reduce")) and is_fresh(op("all_gather_start")) and is_fresh(op("einsum"))
    assert is_view(op("wait")) and is_whole_view(op("wait"))
    for name in ("shard", "keep_first", "checked_index", "checked_values"):
        assert not is_fresh(op(name)) and not is_view(op(name))


def test_what_a_collective_moves_is_not_written_over_before_its_wait() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    made, lone = graph.call_function(aten.exp.default, (x,)), graph.call_function(aten.exp.default, (x,))
    start = graph.call_function(op("all_gather_start"), (made, "tp", 0, 1))
    alone = graph.call_function(op("all_reduce_start"), (lone, "tp", "sum"))
    during = graph.call_function(aten.neg.default, (made,))
    waits = [graph.call_function(op("wait"), (one,)) for one in (start, alone)]
    after = graph.call_function(aten.neg.default, (during,))
    graph.output((after, *waits))
    lives = lifetimes(graph)
    assert not lives.may_overwrite(made, during), "the collective may still read it"
    assert not lives.may_overwrite(made, start) and lives.may_overwrite(lone, alone)
    assert lives.may_overwrite(during, after)


def test_what_shares_memory_dies_together() -> None:
    """The result of an op of which the schema says "Tensor" may be written over; of one that shows its operand not."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(aten.erf.default, (x,))
    view = graph.call_function(aten._unsafe_view.default, (made, [4]))
    twice = graph.call_function(aten.neg.default, (view,))
    graph.output((twice, made))
    lives = lifetimes(graph)
    assert lives.share[view] is lives.share[made] and lives.share[made] is not lives.share[x]
    assert not lives.may_overwrite(view, twice), "`made` leaves the graph"
