"""Program text: exact round trip, the allow-list, the messages, the diff."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable

import models
import pytest
import torch
from torch import fx

from autopar.api import compile
from autopar.errors import ArtifactError
from autopar.ir.layout import Layout, parse_layout, replicated
from autopar.ir.mesh import parse_mesh
from autopar.ir.ops.names import find_target, target_name
from autopar.ir.ops.ops import op
from autopar.ir.program import Input, Level, Output, Program, Record, TensorType, record, set_record
from autopar.ir.text.text import diff_programs, dtype_name, parse_program, print_node, print_program

aten = torch.ops.aten

MLP = """\
LOCAL program on dp=2,tp=2
note: 1 op stays replicated
%x: f32[4,16] of [8,16] [dp,-] = batch "0"
%w: f32[16,32] of [16,64] [-,tp] = parameter "up.weight", "down.weight"   # up
%mm: f32[4,32] of [8,64] [dp,tp] = aten.mm.default(%x, %w)   # up  gpt.py:41
%split: (f32[4,16] of [8,32] [dp,tp], f32[4,16] of [8,32] [dp,tp]) = aten.split.Tensor(%mm, 32, dim=1)   # gpt.py:42
%getitem: f32[4,16] of [8,32] [dp,tp] = operator.getitem(%split, 0)   # from split.0
%coord: - = autopar.coord.default("tp")   # by partition
%sum_1: f32[] [] partial(dp,tp) = aten.sum.default(%getitem)   # gpt.py:50  backward
%all_reduce: f32[] [] partial(dp) = autopar.all_reduce.default(%sum_1, "tp", "sum")   # by reshard  why: a sum, over tp
return loss "" = %all_reduce as []
return gradient "frozen" = None
"""


def same(a: Program, b: Program) -> None:
    """Assert that two programs are equal in everything but object identity."""
    assert (a.level, a.mesh, a.notes, a.inputs, a.outputs) == (b.level, b.mesh, b.notes, b.inputs, b.outputs)
    assert len(a.nodes) == len(b.nodes)
    for left, right in zip(a.nodes, b.nodes, strict=True):
        assert (left.op, left.name) == (right.op, right.name)
        if left.op == "call_function":
            assert left.target is right.target, left.name
        assert left.meta.get("autopar") == right.meta.get("autopar"), left.name
        assert repr(left.args) == repr(right.args), left.name
        assert repr(left.kwargs) == repr(right.kwargs), left.name


def round_trip(program: Program) -> str:
    text = print_program(program)
    again = parse_program(text)
    same(program, again)
    assert print_program(again) == text
    return text


def test_text_is_the_same_after_parsing():
    program = parse_program(MLP)
    assert print_program(program) == MLP
    same(program, parse_program(print_program(program)))


def test_parsed_values():
    program = parse_program(MLP)
    assert program.inputs[1] == Input("parameter", ("up.weight", "down.weight"))
    assert program.outputs == (Output("loss", ""), Output("gradient", "frozen"))
    assert program.results[1] is None
    mm, split, coord = program.nodes[2], program.nodes[3], program.nodes[5]
    assert mm.target is aten.mm.default
    assert record(mm).type == TensorType((8, 64), torch.float32)
    assert record(mm).operands == (parse_layout("[dp,-]"), parse_layout("[-,tp]"))
    assert record(mm).module == "up" and record(mm).source == "gpt.py:41" and record(mm).origin == "mm"
    assert record(split).several and split.kwargs == {"dim": 1}
    assert record(coord).types == (None,) and record(coord).layouts == (None,)
    assert record(program.nodes[6]).is_backward
    reduce = record(program.nodes[7])
    assert (reduce.made_by, reduce.reason, reduce.phase) == ("reshard", "a sum, over tp", "forward")
    assert record(program.nodes[-1]).operands == (replicated(0),)


def test_arguments_round_trip():
    graph = fx.Graph()
    x = graph.create_node("placeholder", "x", name="x")
    typed = Record((TensorType((4, 6), torch.float32),), origin="x")
    set_record(x, typed)
    arguments = [
        1, -3, 0.1, 1e-05, 1e22, -2.5e-300, math.inf, -math.inf, math.nan, True, False, None, "a \"b\" # %x, (é\n\\",
        [1, [2, x], []], (), (x,), (1, 2), torch.float32, torch.bool, torch.bfloat16, torch.channels_last,
        torch.contiguous_format, torch.preserve_format, torch.strided, 2**70,
        0j, complex(-0.5, 1e-05), complex(math.inf, -math.inf), [1 + 2j],
    ]  # fmt: skip
    graph.create_node("call_function", aten.add.Tensor, (x, *arguments), {"alpha": -1, "dtype": torch.int64}, name="a")
    set_record(graph.find_nodes(op="call_function", target=aten.add.Tensor)[0], typed.with_(origin="a"))
    set_record(graph.output((x,)), Record((None,)))
    text = round_trip(Program(graph, (Input("batch", ("0",)),), (Output("loss", ""),)))
    assert "torch.channels_last, torch.contiguous_format" in text and "dtype=i64" in text


def test_devices_are_not_emitted():
    graph = fx.Graph()
    kwargs = {"dtype": torch.float32, "device": torch.device("meta"), "pin_memory": False}
    node = graph.create_node("call_function", aten.ones.default, ([2],), kwargs, name="ones")
    set_record(node, Record((TensorType((2,), torch.float32),), origin="ones"))
    set_record(graph.output((node,)), Record((None,)))
    text = print_program(Program(graph, (), (Output("loss", ""),)))
    assert "%ones: f32[2] = aten.ones.default([2], dtype=f32, pin_memory=False)\n" in text
    assert "meta" not in text


TENSOR = TensorType((4, 6), torch.float32)
DP, TP, WHOLE = parse_layout("[dp,-]"), parse_layout("[-,2:tp]"), parse_layout("[-,-] partial(dp,max:tp)")


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize(
    "known",
    [
        Record((TENSOR,)),
        Record((TENSOR,), layouts=(DP,)),
        Record((TENSOR,), layouts=(DP,), operands=(DP,)),
        Record((TENSOR,), layouts=(WHOLE,), operands=(TP,)),
        Record((TENSOR,), layouts=(TP,), operands=(TP, DP)),
        Record((TENSOR,), operands=(TP,)),
        Record((TENSOR,), operands=(DP,)),
        Record((TENSOR,), layouts=(None,)),
        Record((None,)),
        Record((None,), layouts=(None,)),
        Record((), several=True),
        Record((TENSOR, None), several=True),
        Record((TENSOR, None), several=True, layouts=(DP, None)),
        Record((TENSOR, None), several=True, layouts=(None, None)),
        Record((None, None), several=True, layouts=(None, None)),
        Record((None, TENSOR, TENSOR), several=True, layouts=(None, TP, None), operands=(DP,)),
        Record((TENSOR,), module="blocks.0.mlp", source="gpt.py:41", phase="backward", origin="a"),
        Record((TENSOR,), module="backward", source="a b.py:4", phase="update", made_by="a b", origin="a  b"),
        Record(
            (TENSOR,), module='odd "name"  why: x', source="gpt.py", made_by="", reason='"quoted"', origin="split.1"
        ),
        Record((TENSOR,), source="gpt.py:41", made_by="reshard", reason="a partial sum over tp,  # wanted [dp,-]"),
        Record((TENSOR,), made_by="reshard", reason=" two\nlines\x85\u2028 "),
        Record((TENSOR,), reason="why: x"),
        Record((TENSOR,), module="by"),
        Record((TENSOR,), module="blocks.why", phase="backward", operands=(TP, WHOLE), reason="both"),
    ],
)
@pytest.mark.parametrize("has", [(), (DP,)])
def test_every_record_round_trips(known: Record, level: Level, has: tuple[Layout, ...]):
    graph = fx.Graph()
    x = graph.create_node("placeholder", "x", name="x")
    set_record(x, Record((TENSOR,), layouts=has, origin="x"))
    node = graph.create_node("call_function", aten.neg.default, (x,), name="neg")
    set_record(node, known)
    set_record(graph.output((node, x)), Record((None,)))
    mesh = parse_mesh("dp=2,tp=3")
    outputs = (Output("loss", ""), Output("buffer", 'odd "name" = %x'))
    notes = ("plain", '"odd"', " two\nlines")
    round_trip(Program(graph, (Input("buffer", ("a", "b c")),), outputs, level, mesh, notes))


@pytest.mark.parametrize("layouts", [(), (None,), (DP, TP)])
def test_the_record_of_the_output_round_trips(layouts: tuple[Layout, ...]):
    program = parse_program(MLP)
    output = program.graph.output_node()
    set_record(output, Record((TENSOR, TENSOR), several=True, layouts=(DP, TP), operands=(replicated(0),)))
    round_trip(program)
    set_record(output, Record((), operands=(parse_layout("[] partial(dp)"),), made_by="reshard"))
    round_trip(program)


def test_names_are_kept():
    names = ["mul", "mul_1", "mul_7", "mul_3", "sum_1", "_x", "a_0", "class_1"]
    graph = fx.Graph()
    nodes = [graph.create_node("call_function", aten.ones.default, ([],), name=name) for name in names]
    for node in nodes:
        set_record(node, Record((TensorType((), torch.float32),)))
    set_record(graph.output(tuple(nodes)), Record((None,)))
    round_trip(Program(graph, (), tuple(Output("value", n) for n in names)))


def test_shapes_below_local_are_global_ones():
    explicit = parse_program(MLP).with_(level=Level.EXPLICIT)
    assert "%mm: f32[8,64] [dp,tp] = aten.mm.default(%x, %w)" in print_program(explicit)
    round_trip(explicit)


def test_print_node():
    program = parse_program(MLP)
    assert print_node(program.nodes[1], program) == MLP.splitlines()[3]
    assert print_node(program.nodes[2], program) == MLP.splitlines()[4]


def test_dtype_names():
    assert [dtype_name(d) for d in (torch.bool, torch.bfloat16, torch.int64, torch.float8_e4m3fn)] == [
        "b8", "bf16", "i64", "f8e4m3fn",
    ]  # fmt: skip


@pytest.mark.parametrize("target", [aten.mul.Tensor, op("einsum"), operator.getitem, operator.mul, aten.__and__.Tensor])
def test_target_names(target: object):
    assert find_target(target_name(target)) is target


@pytest.mark.parametrize(
    "name",
    [
        "os.system", "builtins.eval", "operator.call", "operator.attrgetter", "torch.load", "aten.mul", "aten.mul.Nope",
        "aten.__class__.__init__", "aten.name.upper", "aten.mul.__call__", "aten.mul._overload_names", "aten.nope.x",
        "autopar._dir.clear", "aten.from_file.default", "aten.save.default", "prim.Print.default", "", "..",
    ],
)  # fmt: skip
def test_ops_that_are_not_allowed(name: str):
    with pytest.raises(ArtifactError, match="is not an op that a program may hold"):
        find_target(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("aten.mm.default(", "os.system("), r"line 5: 'os.system' is not an op that a program may hold"),
        (("(%x, %w)", "(%x, __import__('os'))"), "line 5: unknown name '__import__'"),
        (("(%x, %w)", "(%x, %nope)"), "line 5: unknown name 'nope'"),
        (("(%x, %w)", "(%x, %w"), "line 5: expected"),
        (("LOCAL program", "program"), "line 1: expected a first line"),
        (("dp=2,tp=2", "dp=2"), "names axis 'tp', which mesh 'dp=2' has not"),
        (("f32[4,32] of", "f32[8,32] of"), r"line 5: the local shape is \(4, 32\) by its layout, not \(8, 32\)"),
        (("%mm: f32", "%mm: f33"), "line 5: unknown name 'f33'"),
        (("%w: f32", "%x: f32"), "line 4: %x is defined twice"),
        (("# up  gpt", "# up / gpt"), "line 5: expected a comment of known fields"),
        (('"tp", "sum"', '"tp, "sum"'), "line 10: expected"),
        (("%mm: f32", "mm: f32"), "line 5: expected a value such as %mul_3 at column 1"),
        (("%mm: f32[4,32]", "%mm: [4,32]"), "line 5: expected a type such as f32"),
        (('batch "0"', "batch 0"), "line 3: expected a call, or an input such as parameter"),
        (("(%x, %w)", "(, %w)"), "line 5: expected an argument at column"),
        (("%sum_1, ", "%sum_1 "), "line 10: expected"),
        (("as []\n", "as [] x\n"), "line 11: cannot read what follows column"),
        (
            ("return gradient", "%y: f32[] [] = aten.neg.default(%sum_1)\nreturn gradient"),
            "line 12: a value stands after",
        ),
        (("%coord: - = ", "%split: - = "), "line 8: %split is defined twice"),
        (("dim=1)", "dim=1, 3)"), "line 6: an argument without a name follows one with a name"),
    ],
)
def test_errors_name_the_line(change: tuple[str, str], message: str):
    text = MLP.replace(*change)
    assert text != MLP
    with pytest.raises(ArtifactError, match=message):
        parse_program(text)


ABOVE = """\
LOCAL program on tp=2
%x: f32[8] [-] = batch "0"
%n: - = autopar.coord.default("tp")
%a: f32[8] [-] = aten.neg.default(%x)
"""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%b: f32[8] [-] = aten.neg.default(%nope)", "line 5: unknown name 'nope'"),
        ("%a: f32[8] [-] = aten.neg.default(%x)", "line 5: %a is defined twice"),
        ('return value "0" = %a\n%b: f32[8] [-] = aten.neg.default(%x)', "line 6: a value stands after"),
    ],
)
def test_a_line_like_one_above_is_read_with_the_same_care(line: str, message: str):
    """Of lines that differ in names alone only the first is read piece by piece."""
    for above in (ABOVE, ABOVE.replace("aten.neg", "aten.exp")):
        with pytest.raises(ArtifactError, match=message):
            parse_program(f"{above}{line}\n")


def test_a_number_where_a_line_above_has_a_tensor():
    """Numbers have no layout that a call could want."""
    lines = ABOVE.replace("neg.default(%x)", "add.Tensor(%x, %x)") + "%b: f32[8] [-] = aten.add.Tensor(%x, %n)\n"
    program = parse_program(f'{lines}return value "0" = %b\n')
    assert [record(node).operands for node in program.calls()] == [(), (Layout(((),)),) * 2, (Layout(((),)),)]


def test_empty_text():
    with pytest.raises(ArtifactError, match="it is empty"):
        parse_program("\n")


def test_deep_nesting_is_an_error():
    with pytest.raises(ArtifactError, match="line 5"):
        parse_program(MLP.replace("(%x, %w)", "(" + "[" * 100_000))


def test_diff():
    before = parse_program(MLP)
    after = parse_program(
        MLP.replace("(%x, %w)", "(%w, %x)")
        .replace('%coord: - = autopar.coord.default("tp")   # by partition\n', "")
        .replace("return loss", "%neg: f32[] [] = aten.neg.default(%all_reduce)\nreturn loss")
    )
    assert diff_programs(before, before) == ""
    assert diff_programs(before, after).splitlines() == [
        "...",
        '  %w: f32[16,32] of [16,64] [-,tp] = parameter "up.weight", "down.weight"   # up',
        "- %mm: f32[4,32] of [8,64] [dp,tp] = aten.mm.default(%x, %w)   # up  gpt.py:41",
        "+ %mm: f32[4,32] of [8,64] [dp,tp] = aten.mm.default(%w, %x)   # up  gpt.py:41",
        "  " + MLP.splitlines()[5],
        "  " + MLP.splitlines()[6],
        "- " + MLP.splitlines()[7],
        "  " + MLP.splitlines()[8],
        "  " + MLP.splitlines()[9],
        "+ %neg: f32[] [] = aten.neg.default(%all_reduce)",
        '  return loss "" = %all_reduce as []',
        "...",
    ]  # fmt: skip


@pytest.mark.parametrize("make", [models.gpt, models.resnet])
def test_real_programs_round_trip_after_every_pass(make: Callable[[], models.Case]):
    model, loss_fn, batch = make()
    compiled = compile(model, "dp=3,tp=2", loss_fn=loss_fn, batch=batch)
    assert len(compiled.history) > 3
    for _, program in compiled.history:
        round_trip(program)


def test_large_programs_are_quick():
    lines = MLP.splitlines()
    body = [lines[4].replace("%mm:", f"%mm_{i}:") for i in range(1, 15_000)]
    text = "\n".join([*lines[:4], *body, 'return loss "" = %mm_7']) + "\n"
    start = time.process_time()
    program = parse_program(text)
    assert print_program(program) == text
    assert time.process_time() - start < 10
