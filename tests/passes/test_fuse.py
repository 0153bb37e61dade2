"""Groups of calls: what they save, where they may run, and that they compute what their calls do."""

from __future__ import annotations

import builtins
import copy
import os
from pathlib import Path
from typing import Any

import models
import pytest
import random_graphs
import torch
from inductor_count import MEASURED, graphs, ours
from recompute_case import captured, compiled
from torch import fx

from autopar.api import compile, parallelize
from autopar.compiled import load
from autopar.ir.check.check_levels import verify
from autopar.ir.layout import local_part
from autopar.ir.ops.fused import Fused, fused_of
from autopar.ir.ops.ops import is_collective, op
from autopar.ir.ops.unfused import in_place, unfused
from autopar.ir.plan import Plan
from autopar.ir.program import Level, Program, record
from autopar.ir.text.text import parse_program, print_program
from autopar.passes.fuse import fuse, fused
from autopar.passes.fuse import groups as groups_module
from autopar.passes.fuse.facts import Facts
from autopar.passes.fuse.fits import MOST_VALUES
from autopar.runtime.executor.executor import Executable
from autopar.runtime.executor.run_fused import plain
from autopar.runtime.ranks.virtual import VirtualMesh
from autopar.verification.verify import verify_compiled

RANDOM = int(os.environ.get("AUTOPAR_RANDOM_GRAPHS", "40"))  # `AUTOPAR_RANDOM_GRAPHS=500 make ...` at night
aten = torch.ops.aten


def groups_of(program: Program) -> list[tuple[fx.Node, Fused]]:
    return [(node, found) for node in program.calls() if (found := fused_of(node)) is not None]


def run(program: Program, given: list[list[torch.Tensor]], **options: Any) -> list[Any]:
    with torch.no_grad():
        return VirtualMesh(program.mesh).run(Executable(program.graph, **options), [list(x) for x in given])


def assert_same(program: Program, other: Program, given: list[list[torch.Tensor]], **options: Any) -> None:
    """To the last bit on every rank."""
    for want, got in zip(run(program, given), run(other, given, **options), strict=True):
        for out, a, b in zip(program.outputs, want, got, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape, out
            assert torch.equal(a.nan_to_num(), b.nan_to_num()), f"{out}: {(a - b).abs().max()}"


def parts_of(program: Program, seed: int = 0) -> list[list[torch.Tensor]]:
    """Random numbers for a program, as each rank holds them."""
    generator = torch.Generator().manual_seed(seed)
    whole = []
    for node in program.placeholders:
        type_ = record(node).type
        draw = torch.randint(0, 4, type_.shape, generator=generator)
        whole.append(
            torch.randn(type_.shape, generator=generator).to(type_.dtype) / 4
            if type_.dtype.is_floating_point
            else draw.to(type_.dtype)
        )
    layouts = [record(node).layout for node in program.placeholders]
    return [
        [local_part(value, layout, program.mesh, coord) for value, layout in zip(whole, layouts, strict=True)]
        for coord in program.mesh.coords()
    ]


# -- what is saved ----------------------------------------------------------------------------------------------------

# kernels and bytes of the step of a block at B2 T4096 (of D4096, T5: D1024) without groups, and the kernels with them
BLOCKS = {"gpt": (33, 6.2e9, 17), "llama": (71, 10.7e9, 12), "t5": (105, 18e9, 17)}


@pytest.mark.parametrize("block", BLOCKS)
def test_groups_of_a_block_move_no_more_than_inductor(block: str) -> None:
    """In as many kernels at most: the step as one graph, and forward and backward as graphs of their own."""
    for name, program in graphs(block):
        found, (kernels, bytes_) = ours(name, fused(program)), MEASURED[name]
        print(name, found.kernels, found.bytes_)
        assert found.kernels <= kernels and found.bytes_ <= bytes_, (name, found)


@pytest.mark.parametrize("block", BLOCKS)
def test_groups_beside_the_same_calls_alone(block: str) -> None:
    (name, program), *_ = graphs(block)
    before, after = ours(name, program), ours(name, fused(program))
    kernels, bytes_, most = BLOCKS[block]
    assert before.kernels >= kernels * 0.9 and before.bytes_ >= bytes_ and after.kernels <= most
    assert after.bytes_ < 0.6 * before.bytes_
    assert after.calls == before.calls, "products and attention are no group's"


def test_a_group_says_what_it_saves_and_why_it_ends() -> None:
    program = compiled("gpt", "dp=2,tp=2", double=False, compile="triton").program
    reasons = [record(node).reason for node, _ in groups_of(program)]
    assert all(" move " in reason and " in place of " in reason for reason in reasons)
    for why in ("a product (%", "a collective (%", "forward and backward stay apart (%", "computes again %"):
        assert any(why in reason for reason in reasons), why


def test_explain_knows_the_groups_of_a_value_and_of_a_module() -> None:
    found = compiled("gpt", "dp=2,tp=2", double=False, compile="triton")
    node, group = groups_of(found.program)[0]
    assert "one kernel of kind" in str(found.explain(f"%{node.name}"))
    assert any(node.name in line for line in found.explain(f"%{group.calls[0].name}").groups)
    assert found.explain("blocks.0.mlp").groups


class Largest(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x * self.weight) * 1.7).amax(-1)


def test_what_is_compared_bit_by_bit_is_computed_once() -> None:
    """The gradient of a maximum goes to the elements that equal it: two kernels may round a product and a sum in
    another way, and no element would."""
    program = compile(
        Largest(), "dp=1", loss_fn=lambda m, x: m(x).square().sum(), batch=torch.randn(32, 64), compile="triton"
    ).program
    calls = [call for _, found in groups_of(program) for call in found.calls]
    (equal,) = (call for call in calls if call.target is aten.eq.Tensor)
    assert [operand.op for operand in equal.all_input_nodes] == ["placeholder", "placeholder"]


def test_nothing_is_fused_without_being_asked_for() -> None:
    program = compiled("gpt", "dp=2,tp=2", double=False).program
    assert not groups_of(program)
    assert fuse(program, Plan(program.mesh)) is program


# -- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(RANDOM))
def test_random_graphs(seed: int) -> None:
    program = random_graphs.program(seed)
    verify(program, Level.LOCAL)
    found = fused(program)
    verify(found, Level.LOCAL)
    given = [random_graphs.inputs(program, seed)]
    assert_same(program, found, given)
    assert_same(program, found, given, kernels=lambda group, over: plain(group))
    assert print_program(parse_program(print_program(found))) == print_program(found)


def test_random_graphs_have_groups_of_every_kind() -> None:
    found = [group for seed in range(20) for _, group in groups_of(fused(random_graphs.program(seed)))]
    assert {group.kind for group in found} == {"points", "rows", "columns"} and len(found) > 60


CASES = {
    "tp": ("gpt", "dp=2,tp=2", {}),
    "bf16 sp": ("llama", "tp=2", {"precision": "bf16", "sequence_parallel": True}),
    "zero": ("gpt", "dp=2", {"zero": 3, "recompute": "selective"}),
    "chunks": ("llama", "dp=2", {"chunked_loss": True, "precision": "bf16"}),
    "cp": ("gpt", "cp=2", {}),
    "written out": ("written_out", "dp=2,tp=2", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_models_compute_the_same_to_the_last_bit(case: str) -> None:
    name, mesh, options = CASES[case]
    program = compiled(name, mesh, double=False, **options).program
    found = fused(program)
    verify(found, Level.LOCAL)
    assert len(groups_of(found)) > 8
    given = parts_of(program)
    assert_same(program, found, given)
    assert_same(program, found, given, kernels=lambda group, over: plain(group))


@pytest.mark.parametrize(
    ("mesh", "options"),
    [("dp=2,tp=3", {}), ("pp=2,dp=2", {"microbatches": 2}), ("dp=2", {"zero": 2, "microbatches": 3})],
)
def test_verified_in_float64(mesh: str, options: dict[str, Any]) -> None:
    name = "mlp" if "tp=3" in mesh else "gpt"
    found = compiled(name, mesh, compile="triton", **options)
    graphs_ = [found.program] if found.pipeline is None else found.pipeline.graphs.values()
    assert sum(len(groups_of(graph)) for graph in graphs_) >= 3
    (model, loss_fn, batch), known = captured(name)
    result = verify_compiled(copy.deepcopy(model), known, found, loss_fn=loss_fn, batch=batch, steps=1)
    assert result.ok, str(result)


# -- the place of a group ---------------------------------------------------------------------------------------------

PLACED: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt", "tp=2", {"sequence_parallel": True}),
    ("llama", "dp=4", {"zero": 3, "recompute": "selective"}),
    ("gpt", "dp=2,tp=2", {"precision": "bf16", "chunked_loss": True}),
    ("gpt", "dp=2,tp=2", {"microbatches": 2}),
    ("gpt", "pp=2,tp=2", {"microbatches": 2, "zero": None}),
    ("gpt", "pp=2", {"microbatches": 4, "schedule": "zb-h1"}),
]


def in_order(program: Program) -> list[str]:
    """The calls that no group holds and none moves: products, attention, collectives and the like."""
    facts = Facts.of(program)
    return [node.name for node in facts.slot if node.op == "call_function"]


def both(name: str, mesh: str, options: dict[str, Any]) -> list[tuple[Program, Program]]:
    before, after = (compiled(name, mesh, double=False, compile=one, **options) for one in ("executor", "triton"))
    if before.pipeline is None:
        return [(before.program, after.program)]
    assert after.pipeline is not None
    return [(graph, after.pipeline.graphs[key]) for key, graph in before.pipeline.graphs.items()]


@pytest.mark.parametrize(("name", "mesh", "options"), PLACED)
def test_collectives_and_products_keep_their_order(name: str, mesh: str, options: dict[str, Any]) -> None:
    """So a start stands behind no more products than before, and a wait before no fewer."""
    pairs = both(name, mesh, options)
    for before, after in pairs:
        assert [each for each in in_order(after) if not each.startswith("fused_")] == in_order(before)
    assert sum(len(groups_of(after)) for _, after in pairs) > 4


@pytest.mark.parametrize(("name", "mesh", "options"), PLACED)
def test_groups_are_of_one_pass_and_hold_no_collective(name: str, mesh: str, options: dict[str, Any]) -> None:
    for _, after in both(name, mesh, options):
        for node, group in groups_of(after):
            assert not any(is_collective(call.target) for call in group.calls)
            assert record(node).is_backward or not any(record(call).is_backward for call in group.calls)


def test_planted_group_across_a_collective_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the tester: slots are not looked at, and what waits for a collective joins what it waits for."""
    program = compiled("gpt", "tp=2", double=False, sequence_parallel=True).program
    old = groups_module.Groups.why_not

    def anywhere(self: Any, a: Any, b: Any, calls: Any) -> Any:
        slots = (a.after, a.before, b.after, b.before)
        a.after = b.after = -1
        a.before = b.before = groups_module.END
        found = old(self, a, b, calls)
        a.after, a.before, b.after, b.before = slots
        return found

    monkeypatch.setattr(groups_module.Groups, "why_not", anywhere)
    with pytest.raises(AssertionError):
        made = fused(program)
        assert [each for each in in_order(made) if not each.startswith("fused_")] == in_order(program)


# -- running ----------------------------------------------------------------------------------------------------------


def test_a_dying_operand_is_offered_to_a_kernel() -> None:
    """`over`: of an operand that nothing reads again, and not of one that is read behind the group."""
    text = """\
LOCAL program
%x: f32[4,8] [-,-] = batch "x"
%cumsum: f32[4,8] [-,-] = aten.cumsum.default(%x, 0)
%cumsum_1: f32[4,8] [-,-] = aten.cumsum.default(%x, 1)
%exp: f32[4,8] [-,-] = aten.exp.default(%cumsum)
%mul: f32[4,8] [-,-] = aten.mul.Tensor(%exp, %cumsum_1)
%cumsum_2: f32[4,8] [-,-] = aten.cumsum.default(%mul, 0)
%add: f32[4,8] [-,-] = aten.add.Tensor(%cumsum_2, %cumsum_1)
return value "y" = %add
"""
    program = fused(parse_program(text))
    offered = []

    def kernels(group: Fused, over: tuple[int | None, ...]) -> Any:
        offered.append([None if place is None else group.placeholders[place].name for place in over])
        return plain(group)

    given = [[torch.randn(4, 8)]]
    assert_same(parse_program(text), program, given, kernels=kernels)
    assert offered[0] == ["cumsum"]
    ((_, group),) = groups_of(program)
    assert in_place(group) == ((0, 1),)


def test_an_operand_that_is_read_elsewhere_in_a_row_is_not_written_over() -> None:
    text = """\
LOCAL program
%x: f32[4,8] [-,-] = batch "x"
%flip: f32[4,8] [-,-] = aten.flip.default(%x, [1])
%add: f32[4,8] [-,-] = aten.add.Tensor(%flip, %x)
return value "y" = %add
"""
    ((_, group),) = groups_of(fused(parse_program(text)))
    assert in_place(group) == ((),)


def test_without_kernels_the_calls_of_a_group_run_as_if_there_were_none() -> None:
    program = compiled("gpt", "dp=2", double=False, compile="triton").program
    flat = unfused(program.graph)
    assert not any(isinstance(node.target, Fused) for node in flat.graph.nodes)
    assert {type(flat.home[node]) for node in flat.graph.nodes if node.op == "call_function"} == {fx.Node}
    names = [node.name for node in flat.graph.nodes]
    assert len(names) == len(set(names))


def test_memory_on_a_gpu_holds_results_of_groups_alone() -> None:
    """What the forward pass keeps falls: a gate is computed again."""
    before, after = (compiled("llama", "dp=2", double=False, compile=one) for one in ("executor", "triton"))
    kept = [found.memory(device="cuda").categories["saved activations"] for found in (before, after)]
    assert kept[1] < kept[0]


def test_dropout_of_mirrored_pieces_is_in_groups() -> None:
    """Those of cp: in every second of them the rank's place counts from the end."""
    model = models.GPT(models.GPTConfig(models.VOCABULARY, models.TIME, layers=1, heads=4, width=32, dropout=0.1))
    batch = models.tokens(), models.labels()
    options = {"compile": "triton", "attention": "ring"}
    program = compile(model, "cp=2", loss_fn=models.token_loss, batch=batch, **options).program
    drawn = [call for _, group in groups_of(program) for call in group.calls if call.target == op("dropout")]
    assert drawn and all(min(call.args[4]) < 0 for call in drawn)
    assert not [call for call in program.calls() if call.target == op("dropout")]


# -- limits -----------------------------------------------------------------------------------------------------------


def sum_of(count: int, shape: str = "[4,8]") -> str:
    lines = [f'%x{i}: f32{shape} [-,-] = batch "x{i}"' for i in range(count)]
    total = "x0"
    for i in range(1, count):
        lines.append(f"%a{i}: f32{shape} [-,-] = aten.add.Tensor(%{total}, %x{i})")
        total = f"a{i}"
    return "LOCAL program\n" + "\n".join(lines) + f'\nreturn value "y" = %{total}\n'


def test_a_group_has_no_more_operands_than_a_kernel_takes() -> None:
    made = fused(parse_program(sum_of(50)))
    found = groups_of(made)
    assert len(found) == 2 and all(len(node.args) + len(group.results) <= MOST_VALUES for node, group in found)
    assert "more than 32 operands and results" in record(found[0][0]).reason


def test_a_row_that_registers_do_not_hold_ends_a_group() -> None:
    rows = [f"%s{i}: f32[64,1] [-,-] = aten.sum.dim_IntList(%a{i}, [-1], True)" for i in range(1, 9)]
    text = sum_of(9, "[64,16384]").replace("return", "\n".join(rows) + "\nreturn")
    for i in range(1, 9):
        text += f'return value "s{i}" = %s{i}\n'
    made = fused(parse_program(text))
    for _, group in groups_of(made):
        if group.kind != "points":
            assert sum(record(operand).type.bytes_ // 64 for operand in group.placeholders) <= 65_536 * 4
    assert any("the register budget" in record(node).reason for node, _ in groups_of(made))


def test_models_of_the_zoo_have_groups() -> None:
    model, loss_fn, batch = models.vit()
    program = compile(model, "tp=2", loss_fn=loss_fn, batch=batch, compile="triton").program
    assert len(groups_of(program)) > 10


def test_saved_programs_have_groups_as_functions(tmp_path: Path) -> None:
    """Python that a person may read and run; it is loaded from the text beside it."""
    found = compiled("gpt", "dp=2", double=False, compile="triton")
    found.save(tmp_path / "saved")
    assert load(tmp_path / "saved").text() == found.text()
    (file,) = (tmp_path / "saved").glob("*.py")
    text = file.read_text()
    builtins.compile(text, str(file), "exec")
    node, group = groups_of(found.program)[0]
    assert f"    def {node.name}_calls({', '.join(each.name for each in group.placeholders)}):" in text
    assert f"    {node.name} = {node.name}_calls(" in text


def test_training_is_the_same_to_the_last_bit() -> None:
    """Two steps of AdamW on one rank, beside the executor without groups."""
    model, loss_fn, batch = models.mlp()
    weights = []
    for compiler in ("executor", "triton"):
        trained = parallelize(copy.deepcopy(model), "dp=1", loss_fn=loss_fn, compile=compiler)
        optimizer = torch.optim.AdamW(trained.parameters())
        for _ in range(2):
            trained.forward_backward(*batch)
            optimizer.step()
            optimizer.zero_grad()
        weights.append([parameter.full_tensor().detach() for parameter in trained.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
