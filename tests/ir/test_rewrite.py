"""The one driver of passes that rewrite a program node by node."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar.ir.program import Builder, erase_unused, record
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
