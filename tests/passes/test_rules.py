"""Every row of the rule table by brute force; rows that are wrong on purpose must be refused."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from rule_brute_force import Sample, WrongRule, check, check_permuted, make_call, op_of, sample
from rule_samples import r
from rule_samples_all import every_sample
from torch import Tensor, nn

import autopar
from autopar.errors import RuleError
from autopar.ir.ops.ops import SEMANTIC, op
from autopar.ir.program import TensorType, record
from autopar.passes.rules import TABLE, form_of, rule_of
from autopar.passes.rules.build import build, named, replicated_rule
from autopar.passes.rules.notation import instantiate, parse
from autopar.passes.rules.pointwise import pointwise
from autopar.passes.rules.rule import Call, Row, Rule, allows


@pytest.fixture(scope="module")
def samples() -> dict[str, list[Sample]]:
    return every_sample()


def test_every_row_has_a_sample_and_every_sample_a_row(samples: dict[str, list[Sample]]) -> None:
    assert sorted(name for name in TABLE if not samples.get(name)) == []
    assert sorted(set(samples) - set(TABLE)) == []


@pytest.mark.parametrize("name", sorted(TABLE))
def test_row(name: str, samples: dict[str, list[Sample]]) -> None:
    torch.manual_seed(0)
    for one in samples[name]:
        check(name, one)


def test_every_output_mask(samples: dict[str, list[Sample]]) -> None:
    """The gradients of an op, whichever of them are asked for."""
    torch.manual_seed(0)
    seen = set()
    for name in TABLE:
        arguments = [each.name for each in op_of(name)._schema.arguments] if name.startswith("aten.") else []
        if "output_mask" not in arguments:
            continue
        at = arguments.index("output_mask")
        for one in (one for one in samples[name] if all(one.args[at])):
            for mask in itertools.product((True, False), repeat=len(one.args[at])):
                if any(mask):
                    seen.add(name)
                    check(name, replace(one, args=(*one.args[:at], list(mask), *one.args[at + 1 :])))
    assert len(seen) > 5, seen


def test_the_buffer_of_log_sigmoid_is_empty_on_a_gpu() -> None:
    """There it has no dim that could be split with the others; on the CPU it has all."""
    call, *_ = make_call("aten.log_sigmoid_forward.default", sample(r(4, 6)))
    empty = TensorType((0,), torch.float64)
    on_gpu = replace(call, results=(call.results[0], empty))
    back = replace(
        call, op="aten.log_sigmoid_backward.default", operands=(*call.operands * 2, empty), results=call.operands
    )
    rules = [TABLE[one.op].rule(one) for one in (call, on_gpu, back)]
    assert [len(rules[0].results[1]), len(rules[1].results[1]), len(rules[2].operands[2])] == [2, 1, 1]
    free = [rule.names() for rule in rules]
    assert free[0] == free[1] == free[2] and len(free[0]) == 2
    assert [rule.linear for rule in rules] == [(), (), (frozenset({0}),)]


def _free(call: Call) -> Rule:
    """Every dim free, as if the op were pointwise."""
    return pointwise(call)


def _linear(call: Call) -> Rule:
    return pointwise(call, (frozenset({0}),))


def _contracted_without_sum(call: Call) -> Rule:
    return instantiate("m k, k n -> m n", call, partial="max")


def _bias_on_every_rank(call: Call) -> Rule:
    return instantiate("n, m k, k n -> m n", call)


def _reduced(call: Call) -> Rule:
    """The last dim is reduced as a sum."""
    dims = named(call.operands[0].shape)
    return build(call, [dims], [dims[:-1]])


def _halves_swapped(call: Call) -> Rule:
    """The minor factor of the long dim is said to be the count of pieces."""
    sizes = {"c": 2, "x": 6}
    return build(call, [(("x", "c"),)], [(("x",),)] * 2, replicated={"c"}, sizes=sizes)


def _view_swapped(call: Call) -> Rule:
    return build(call, [(("a", "b"),)], [(("b",), ("a",))], sizes={"a": 6, "b": 2})


@pytest.mark.parametrize(
    ("name", "one", "row"),
    [
        ("aten._softmax.default", sample(r(4, 6), 1, False), Row(_free)),
        ("aten.cumsum.default", sample(r(4, 6), 1), Row(_free)),
        ("aten.add.Tensor", sample(r(4, 6), 10), Row(_linear)),
        ("aten.add.Tensor", sample(r(4, 6), r(4, 6)), Row(_linear)),
        ("aten.div.Tensor", sample(r(4, 6), r(4, 6)), Row(lambda c: pointwise(c, (frozenset({1}),)))),
        ("aten.mul.Tensor", sample(r(4, 6), r(4, 6)), Row(lambda c: pointwise(c, (frozenset({0, 1}),)))),
        ("aten.masked_fill.Scalar", sample(r(4, 6), r(4, 6) > 0.5, 2.5), Row(_linear)),
        ("aten.gelu.default", sample(r(4, 6)), Row(_linear)),
        ("aten._to_copy.default", sample(r(4, 6) * 9, dtype=torch.int64), Row(_linear)),
        ("aten.mm.default", sample(r(4, 6), r(6, 4)), Row(_contracted_without_sum)),
        ("aten.addmm.default", sample(r(4), r(4, 6), r(6, 4)), Row(_bias_on_every_rank)),
        ("aten.amax.default", sample(r(4, 6), [-1]), Row(_reduced)),
        ("aten.mean.dim", sample(r(4, 6), [-1]), Row(_reduced)),
        ("aten.split.Tensor", sample(r(12), 6), Row(_halves_swapped, size_arg=(1, "x"))),
        ("aten.view.default", sample(r(12), [2, 6]), Row(_view_swapped, shape_arg=1)),
        ("aten.view.default", sample(r(4, 6), [4, 2, 3]), Row(TABLE["aten.view.default"].rule)),
        ("aten.squeeze.dim", sample(r(2, 6), 0), Row(lambda c: pointwise(c))),
        ("aten.flip.default", sample(r(4, 6), [1]), Row(_free)),
        ("aten.tril.default", sample(r(6, 6)), Row(_free)),
        ("aten.arange.default", sample(12), Row(lambda c: build(c, [], [named(c.results[0].shape)]))),
        (
            "aten.embedding.default",
            sample(r(12, 4), torch.tensor([1, 2, 11, 5])),
            Row(lambda c: instantiate("v h, ... -> ... h", c)),
        ),
        (
            "autopar.embedding.default",  # the offset is not passed
            sample(r(12, 4), torch.tensor([1, 2, 11, 5])),
            Row(lambda c: instantiate("v h, ... -> ... h", c)),
        ),
        (
            "autopar.attention.default",  # each piece of rows would begin its own causal mask
            sample(r(1, 2, 4, 4), r(1, 2, 4, 4), r(1, 2, 4, 4), None, True, 1.0),
            Row(lambda c: instantiate("b h s d, b h t d, b h t e -> b h s e, b h s", c, replicated={"t", "d", "e"})),
        ),
        (
            "autopar.dropout.default",  # every piece draws the mask of the first
            sample(r(4, 6), torch.tensor([1, 2]), 3, 0.5, [4, 6], [4, 6], [0, 0]),
            Row(lambda c: instantiate("a b, s -> a b", c, replicated={"s"}), local=lambda p: (
                (*p.call.args[:4], *([list(p.shapes[0])] * 2), [0, 0]), {})),
        ),
        (
            "autopar.random.default",  # likewise
            sample(torch.tensor([1, 2]), 3, "normal", [4, 6], torch.float64, [4, 6], [4, 6], [0, 0]),
            Row(lambda c: instantiate("s -> a b", c, replicated={"s"}), shape_arg=3, local=lambda p: (
                (*p.call.args[:5], *([list(p.shapes[0])] * 2), [0, 0]), {})),
        ),
        (
            "autopar.pick_backward.default",  # the offset is not passed
            sample(r(4), torch.tensor([1, 2, 11, 5]), 12),
            Row(lambda c: instantiate("..., ... -> ... v", c), size_arg=(2, "v")),
        ),
        (
            "aten.native_layer_norm_backward.default",  # the gradient of the weight is a sum over the batch
            sample(r(4, 6), r(4, 6), [6], r(4, 1), r(4, 1), r(6), None, [True, True, False]),
            Row(lambda c: instantiate("n h, n h, n 1, n 1, h -> n h, h", c, replicated={"h"}, partial="max")),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_wrong_rows_are_caught(name: str, one: Sample, row: Row) -> None:
    torch.manual_seed(0)
    with pytest.raises((WrongRule, RuntimeError, IndexError)):
        check(name, one, row)


def test_rules_that_name_the_wrong_shape_are_caught() -> None:
    with pytest.raises(WrongRule, match="is not"):
        check("aten.neg.default", sample(r(4, 6)), Row(lambda c: Rule((((), ()),), (((), ()),), {})))
    with pytest.raises(WrongRule, match="the rule has"):
        check("aten.neg.default", sample(r(4)), Row(lambda c: Rule((), (), {})))


@pytest.mark.parametrize(
    ("size", "n", "outer", "allowed"),
    [(8, 2, 1, True), (8, 2, 2, True), (8, 2, 4, True), (8, 2, 8, False), (7, 2, 1, False), (2, 3, 1, False),
     (3, 3, 1, True), (1, 2, 1, False), (0, 2, 1, False), (6, 2, 2, False)],
)  # fmt: skip
def test_a_split_divides_or_is_refused(size: int, n: int, outer: int, allowed: bool) -> None:
    rule = Rule(((("a",),),), ((("a",),),), {"a": size})
    assert allows(rule, "a", n, outer) is allowed


def test_whole_and_indexed_names() -> None:
    rule = Rule(((("a",), ("v",)),), ((),), {"a": 4, "v": 4}, replicated=frozenset("a"), indexed=frozenset("v"))
    assert not allows(rule, "a", 2) and not allows(rule, "b", 2)
    assert allows(rule, "v", 2) and not allows(rule, "v", 2, 2)
    assert rule.names() == ("v",)
    assert rule.neighbours == frozenset() and rule.ordered == frozenset("v")


def test_neighbours_are_those_of_halos_scans_and_turns() -> None:
    rule = Rule(((("a",), ("b",)),), ((("a",), ("b",)),), {"a": 4, "b": 4})
    assert replace(rule, turns="a").neighbours == frozenset("a")
    assert replace(rule, scan=("b", False)).neighbours == frozenset("b")


def test_a_rule_is_known_again_by_numbers_of_its_type_alone() -> None:
    """1, 1.0 and True are equal, and rules tell them apart."""
    call, _, _ = make_call("aten.add.Scalar", sample(r(4, 6), 1))
    forms = {form_of(replace(call, args=(call.args[0], number))) for number in (1, 1.0, True, False, 0)}
    assert len(forms) == 5 and form_of(call) in forms


def test_uneven_pieces_are_whole(samples: dict[str, list[Sample]]) -> None:
    for name in ("aten.split.Tensor", "aten.cat.default", "aten.slice.Tensor"):
        uneven = {
            "aten.split.Tensor": sample(r(4, 12), 5, 1),
            "aten.cat.default": sample([r(4, 6), r(4, 3)], 1),
            "aten.slice.Tensor": sample(r(4, 12), 1, 1, 4),
        }[name]
        assert _rule(name, uneven).names() == ("d0",)


def _rule(name: str, one: Sample) -> Rule:
    pair = rule_of(make_call(name, one)[0])
    assert pair is not None
    return pair[0]


def test_a_fused_qkv_is_a_compound_dim() -> None:
    rule = _rule("aten.view.default", sample(r(2, 4, 18), [2, 4, 3, 2, 3]))
    assert rule.operands == ((("n0",), ("n1",), ("n2", "n3", "n4")),)
    assert rule.results == ((("n0",), ("n1",), ("n2",), ("n3",), ("n4",)),)
    assert not rule.replicated


def test_no_row_and_replicated() -> None:
    call, _, _ = make_call("aten.nonzero.default", sample(torch.tensor([1, 0, 2])))
    assert rule_of(call) is None
    assert replicated_rule(call).names() == ()


def test_notation() -> None:
    spec = parse("b (k g) ... 1, -> , b k")
    assert spec.operands == ((("b",), ("k", "g"), ("...",), ()), ())
    assert spec.results == ((), (("b",), ("k",)))
    assert parse("-> a").operands == ()
    with pytest.raises(RuleError, match="no '->'"):
        parse("a b")
    with pytest.raises(RuleError, match="cannot read"):
        parse("a (b -> a")
    with pytest.raises(RuleError, match=r"two '\.\.\.'"):
        parse("... ... -> a")


@pytest.mark.parametrize(
    ("spec", "message"),
    [("m k, k n, n -> m n", "does not have its"), ("m k, k n -> m n, m", "does not have its"),
     ("m, k n -> m n", "does not fit"), ("k m, k n -> m n", "'k' is"),
     ("m (k a), k n -> m n", "is 12, not 6|does not divide"), ("(a b) k, k n -> (a b) n", "no dim tells")],
)  # fmt: skip
def test_a_spec_that_does_not_fit_says_so(spec: str, message: str) -> None:
    call, _, _ = make_call("aten.mm.default", sample(r(4, 6), r(6, 12)))
    with pytest.raises(RuleError, match=message):
        instantiate(spec, call, sizes={"a": 2} if "(k a)" in spec else None)


def test_flops_are_those_that_pytorch_counts(samples: dict[str, list[Sample]]) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    for name in ("mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward"):
        for one in samples[f"aten.{name}.default"]:
            if name == "convolution_backward" and one.args[9] > 1:
                continue  # PyTorch counts the products between groups too
            counter = FlopCounterMode(display=False)
            with counter:
                call, _, _ = make_call(f"aten.{name}.default", one)
            pair = rule_of(call)
            assert pair is not None and pair[0].flops == counter.get_total_flops(), (name, call)


# Where an element stands decides what is drawn.
_DRAWS = tuple(f"autopar.{one.name}.default" for one in SEMANTIC if one.random)


@pytest.mark.parametrize("name", sorted(set(TABLE).difference(_DRAWS)))
def test_what_may_be_split_may_be_permuted(name: str, samples: dict[str, list[Sample]]) -> None:
    torch.manual_seed(0)
    for one in samples[name]:
        check_permuted(name, one)


def test_an_op_that_sees_the_order_is_noticed() -> None:
    """Test the tester: a running sum, taken for an op that goes element by element."""
    with pytest.raises(WrongRule, match="do not go through one by one"):
        check_permuted("aten.cumsum.default", sample(torch.rand(4, 6), 0), Row(_free))


@pytest.mark.parametrize("first", [0, 0.0])
def test_a_total_that_begins_at_0_is_summed_over_ranks_once(first: float) -> None:
    """Red before: a number was added to partial sums, so the first term became whole by itself."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        total = first
        for layer in model:  # type: ignore[attr-defined]
            x = layer(x)
            total = total + x.square().mean()
        return 1 - (total - 0)  # type: ignore[return-value]

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    program = autopar.compile(model, "dp=4", loss_fn=loss, batch=torch.randn(8, 8)).program
    sums = [node for node in program.calls() if node.target is op("all_reduce") and not record(node).type.shape]
    assert len(sums) == 1
