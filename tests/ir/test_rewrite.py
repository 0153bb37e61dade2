"""The one driver of passes that rewrite a program node by node."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import fx

from autopar.ir.program import Builder, Record, erase_unused, given_of, is_gathered_input, is_given, record
from autopar.ir.text.text import parse_program, print_program

aten = torch.ops.aten
TEXT = """CAPTURED program
%x: f32[4] = batch "0"
%neg: f32[4] = aten.neg.default(%x)
%exp: f32[4] = aten.exp.default(%neg)
%mul: f32[4] = aten.mul.Tensor(%neg, %exp)
return value "y" = %mul
"""


def test_what_is_not_put_is_copied() -> None:
    program, build = parse_program(TEXT), Builder("test")
    made = build.rewrite(program, lambda node: None, notes=("copied",))
    assert print_program(made) == TEXT.replace("program\n", "program\nnote: copied\n")
    assert print_program(program) == TEXT


def test_what_is_put_stands_in_the_place_of_a_node() -> None:
    program, build = parse_program(TEXT), Builder("test")

    def put(node: fx.Node) -> fx.Node | None:
        if node.name != "exp":
            return None
        return build.call(aten.cos.default, build.value[node.args[0]], like=record(node), name="cos")  # type: ignore[index]

    wanted = TEXT.replace("aten.exp", "aten.cos").replace("%exp", "%cos")
    assert print_program(build.rewrite(program, put)) == wanted.replace("(%neg)", "(%neg)   # by test  from exp")


def test_a_copy_with_other_operands_and_another_record() -> None:
    program, build = parse_program(TEXT), Builder("test")

    def put(node: fx.Node) -> fx.Node | None:
        if node.name != "mul":
            return None
        operands = iter((build.value[node.all_input_nodes[1]], build.value[node.all_input_nodes[0]]))
        return build.copy(node, lambda old: next(operands), like=record(node).with_(module="swapped"))

    made = build.rewrite(program, put)
    assert "aten.mul.Tensor(%exp, %neg)   # swapped\n" in print_program(made)
    assert "# swapped" not in print_program(program)


def test_a_value_that_is_there_already_is_passed_over() -> None:
    program, build = parse_program(TEXT), Builder("test")
    seen: list[str] = []
    x, neg, *_ = program.nodes
    build.copy(x)
    build.copy(neg)
    assert print_program(build.rewrite(program, lambda node: seen.append(node.name))) == TEXT
    assert seen == ["exp", "mul", "output"]


def test_what_comes_later_gets_its_value_when_the_pass_is_ready() -> None:
    program, build = parse_program(TEXT.replace("(%neg)", "(%x)")), Builder("test")
    _, neg, _, mul, _ = program.nodes

    def put(node: fx.Node) -> None:
        if node is mul:
            build.copy(neg)

    made = build.rewrite(program, put, later={neg})
    assert [node.name for node in made.nodes] == ["x", "exp", "neg", "mul", "output"]
    with pytest.raises(KeyError):  # its user needs it, and nobody gave it a value
        Builder("test").rewrite(program, lambda node: None, later={neg})


def test_calls_that_nothing_reads_are_erased() -> None:
    program = parse_program(TEXT.replace("= %mul\n", "= %neg\n"))
    erase_unused(program.graph)
    assert [node.name for node in program.nodes] == ["x", "neg", "output"]


def test_what_is_there_before_the_step_begins() -> None:
    """Inputs, themselves or in another dtype, and gathers of them; nothing that the step computes."""
    program = parse_program("""SHARDED program on dp=2
%w: f32[4] [dp] = parameter "w"
%cast: bf16[4] [dp] = aten._to_copy.default(%w, dtype=bf16)
%again: f32[4] [dp] = aten._to_copy.default(%cast, dtype=f32)
%neg: f32[4] [dp] = aten.neg.default(%w)
%short: bf16[4] [dp] = aten._to_copy.default(%neg, dtype=bf16)
%whole: f32[4] [-] = autopar.all_gather.default(%w, "dp", 0, 1)
%whole_cast: bf16[4] [-] = autopar.all_gather.default(%cast, "dp", 0, 1)
%whole_neg: f32[4] [-] = autopar.all_gather.default(%neg, "dp", 0, 1)
%whole_short: bf16[4] [-] = autopar.all_gather.default(%short, "dp", 0, 1)
return value "y" = %again
""")
    assert [node.name for node in program.nodes if is_given(node)] == ["w", "cast"]
    gathered = [node for node in program.nodes if is_gathered_input(node)]
    assert [(node.name, given_of(node).name) for node in gathered] == [("whole", "w"), ("whole_cast", "w")]


def test_a_record_is_copied_with_all_its_fields() -> None:
    values: dict[str, Any] = {each.name: f"<{each.name}>" for each in fields(Record)}
    known = Record(**values)
    made, wanted = known.with_(module="m", exact=True), replace(known, module="m", exact=True)
    assert {name: getattr(made, name) for name in values} == {name: getattr(wanted, name) for name in values}
    assert {name: getattr(known, name) for name in values} == values
    with pytest.raises(KeyError, match="phases"):
        known.with_(phases="forward")
