"""Groups as text, and what the verifier says of one that is not what its node says."""

from __future__ import annotations

import pytest
import torch
from test_fuse import groups_of

from autopar.errors import ArtifactError, VerificationError
from autopar.ir.check.check_levels import verify
from autopar.ir.ops.fused import Fused
from autopar.ir.program import Level, Program, record, set_record
from autopar.ir.text.text import parse_program, print_program
from autopar.passes.fuse import fused

aten = torch.ops.aten


# -- faults that the verifier sees ------------------------------------------------------------------------------------


CAST = """\
LOCAL program
%x: bf16[4,8] [-,-] = batch "x"
%cast: f32[4,8] [-,-] = aten._to_copy.default(%x, dtype=f32)
%exp: f32[4,8] [-,-] = aten.exp.default(%cast)
%mul: f32[4,8] [-,-] = aten.mul.Tensor(%exp, %cast)
return value "y" = %mul
"""


def one_group() -> tuple[Program, Fused]:
    program = fused(parse_program(CAST))
    verify(program, Level.LOCAL)
    ((_, group),) = groups_of(program)
    return program, group


def test_planted_loss_of_a_cast_is_seen() -> None:
    program, group = one_group()
    cast = next(call for call in group.calls if call.target is aten._to_copy.default and call not in group.results)
    (operand,) = cast.all_input_nodes
    cast.replace_all_uses_with(operand)
    group.graph.erase_node(cast)
    with pytest.raises(VerificationError, match=r"gives torch\.\w+|group %fused"):
        verify(program, Level.LOCAL)


def test_planted_other_operand_is_seen() -> None:
    program, group = one_group()
    inner = group.placeholders[0]
    known = record(inner)
    set_record(inner, known.with_(types=tuple(type_ and type(type_)((9, 9), type_.dtype) for type_ in known.types)))
    with pytest.raises(VerificationError, match=f"%{inner.name} is "):
        verify(program, Level.LOCAL)


def test_planted_call_without_a_kernel_is_seen() -> None:
    program, group = one_group()
    call = next(call for call in group.calls if call.target is aten._to_copy.default)
    call.target = aten.cumsum.default
    with pytest.raises(VerificationError, match="has no kernel"):
        verify(program, Level.LOCAL)


def test_planted_two_views_of_a_value_are_seen() -> None:
    program, group = one_group()
    results = group.results
    group.graph.output_node().args = ((results[0], *results),)
    with pytest.raises(VerificationError, match="two views"):
        verify(program, Level.LOCAL)


# -- text -------------------------------------------------------------------------------------------------------------

GROUP = """\
LOCAL program
%x: f32[4] [-] = batch "x"
%fused_a: (f32[4] [-]) = fused.points "a"(%x)   # by fuse
    %x: f32[4] [-] = operand
    %exp: f32[4] [-] = aten.exp.default(%x)
    return %exp
%exp: f32[4] [-] = operator.getitem(%fused_a, 0)
return value "y" = %exp
"""


def test_text_of_a_group_is_the_same_after_parsing() -> None:
    assert print_program(parse_program(GROUP)) == GROUP
    node, group = groups_of(parse_program(GROUP))[0]
    assert (group.kind, group.name, node.name) == ("points", "a", "fused_a")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("fused.points", "fused.lines", "no kind of a group"),
        ("    return %exp\n", "", "no line below it says what it returns"),
        ("    return %exp\n", "    return %exp, %exp\n", "other operands or results"),
        ("    %x: f32[4] [-] = operand\n", '    %x: f32[4] [-] = batch "x"\n', "expected a call or `operand`"),
        ("    return %exp\n", "    return %x\n    %y: f32[4] [-] = operand\n", "stands after what it returns"),
        ("aten.exp.default(%x)\n", 'fused.points "b"(%x)\n', "none holds another"),
        ("aten.exp.default(%x)\n", "aten.exp.default(%y)\n", "unknown name"),
        ("aten.exp.default", "aten.save.default", "is not an op that a program may hold"),
    ],
)
def test_text_that_is_no_group_is_refused(old: str, new: str, said: str) -> None:
    assert old in GROUP
    with pytest.raises(ArtifactError, match=said):
        parse_program(GROUP.replace(old, new, 1))
