"""Groups as text, and what the verifier says of one that is not what its node says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from test_fuse import groups_of
from torch import fx

from autopar.errors import ArtifactError, VerificationError
from autopar.ir.check.check_levels import verify
from autopar.ir.mesh import parse_mesh
from autopar.ir.ops.fused import Fused
from autopar.ir.program import Level, Program, TensorType, record, set_record
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


HELD = """\
LOCAL program on tp=2
%x: f32[4,8] [-,-] = batch "x"
%fused_a: (f32[4,8] [-,-], f32[4,2,4] [-,-,-], f32[4,1] [-,-]) = fused.rows "a"(%x)   # by fuse
    %x: f32[4,8] [-,-] = operand
    %exp: f32[4,8] [-,-] = aten.exp.default(%x)
    %relu: f32[4,8] [-,-] = aten.relu.default(%exp)
    %shown: f32[4,2,4] [-,-,-] = aten.view.default(%relu, [4, 2, 4])
    %sum_1: f32[4,1] [-,-] = aten.sum.dim_IntList(%relu, [1], True)
    return %exp, %shown, %sum_1
%exp: f32[4,8] [-,-] = operator.getitem(%fused_a, 0)
%shown: f32[4,2,4] [-,-,-] = operator.getitem(%fused_a, 1)
%sum_1: f32[4,1] [-,-] = operator.getitem(%fused_a, 2)
return value "x" = %exp
return value "y" = %shown
return value "z" = %sum_1
"""
FAULTS = {
    "kind": ("fused.rows", "fused.points", "is of kind points, and its calls are rows"),
    "wider kind": ("fused.rows", "fused.columns", "is of kind columns, and its calls are rows"),
    "keywords": ('"a"(%x)', '"a"(%x, dim=0)', "1 operands for 1 of its body"),
    "number": ('"a"(%x)', '"a"(3)', "operand 3 is no value"),
    "type of an operand": ("    %x: f32[4,8] [-,-] = operand", "    %x: f32[4,9] [-,-] = operand", "%x is .*and %x"),
    "layout of an operand": ("    %x: f32[4,8] [-,-] = op", "    %x: f32[4,4] of [4,8] [-,tp] = op", "%x is .*and %x"),
    "layout of a result": ("%fused_a: (f32[4,8] [-,-]", "%fused_a: (f32[4,4] of [4,8] [-,tp]", "gives .*, and says"),
    "an operand returned": ("    return %exp, ", "    return %x, ", "gives two views of one value, or an operand"),
    "two views": ("    return %exp, ", "    return %relu, ", "gives two views of one value, or an operand"),
    "shape of a call": ("    %relu: f32[4,8]", "    %relu: f32[4,7]", r"gives torch.float32\[4, 8\].*\[4, 7\]"),
    "dtype of a call": ("    %relu: f32[4,8]", "    %relu: f64[4,8]", r"gives torch.float32.*as torch.float64"),
    "int of a call": ("    %relu: f32[4,8]", "    %relu: i64[4,8]", r"gives torch.float32.*as torch.int64"),
    "backward": ("aten.relu.default(%exp)\n", "aten.relu.default(%exp)   # backward\n", "is of the backward pass"),
    "layout of a call": ("aten.relu.default(%exp)", "aten.relu.default(%exp as [tp,-])", r"%relu wants .*\[tp,-\]"),
}  # fmt: skip


@pytest.mark.parametrize("what", FAULTS)
def test_a_group_that_is_not_what_its_node_says_is_refused(what: str) -> None:
    verify(parse_program(HELD), Level.LOCAL)
    old, new, said = FAULTS[what]
    assert HELD.count(old) == 1
    with pytest.raises(VerificationError, match=rf"^group %fused_a .*{said}"):
        verify(parse_program(HELD.replace(old, new)), Level.LOCAL)


def plant_operands(node: fx.Node, group: Fused) -> None:
    node.args = (*node.args, *node.args)


def plant_type(node: fx.Node, group: Fused) -> None:
    first, *others = record(node).types
    assert first is not None
    set_record(node, record(node).with_(types=(TensorType((4, 9), first.dtype), *others)))


def plant_single(node: fx.Node, group: Fused) -> None:
    set_record(node, record(node).with_(several=False))


def plant_mesh(node: fx.Node, group: Fused) -> None:
    node.target = replace(group, mesh=parse_mesh("tp=4"))


def plant_bare(node: fx.Node, group: Fused) -> None:
    next(call for call in group.calls if call.name == "relu").meta.clear()


PLANTED: list[tuple[Callable[[fx.Node, Fused], None], str]] = [
    (plant_operands, "2 operands for 1 of its body"), (plant_type, "gives .*, and says"),
    (plant_single, "gives .*, and says"), (plant_bare, "nodes without a record: relu"),
    (plant_mesh, "is of mesh 'tp=4', and stands in a program on 'tp=2'"),
]  # fmt: skip


@pytest.mark.parametrize(("plant", "said"), PLANTED)
def test_what_no_text_can_say_of_a_group_is_refused(plant: Callable[[fx.Node, Fused], None], said: str) -> None:
    program = parse_program(HELD)
    plant(*groups_of(program)[0])
    with pytest.raises(VerificationError, match=f"^group %fused_a .*{said}"):
        verify(program, Level.LOCAL)


LARGE = """\
LOCAL program
%x: f32[1048576] [-] = batch "x"
%fused_a: (f32[1048576,1048576] [-,-]) = fused.points "a"(%x)   # by fuse
    %x: f32[1048576] [-] = operand
    %full: f32[1048576,1048576] [-,-] = aten.full.default([1048576, 1048576], 1.0)
    %mul: f32[1048576,1048576] [-,-] = aten.mul.Tensor(%full, %x)
    return %mul
%mul: f32[1048576,1048576] [-,-] = operator.getitem(%fused_a, 0)
return value "y" = %mul
"""


def test_groups_are_checked_without_memory_for_their_values() -> None:
    """4 TB of ones, which torch would not get."""
    verify(parse_program(LARGE), Level.LOCAL)
    with pytest.raises(VerificationError, match=r"gives torch.float32\[1048576, 1048576\]"):
        verify(parse_program(LARGE.replace("%full: f32[1048576,", "%full: f32[1,")), Level.LOCAL)


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
