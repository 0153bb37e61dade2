"""Ops of a user's own in models: split by the search, right by `verify`, saved, loaded and trained."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from custom_op_kernels import RIGHT, biased, define, largest, lookup, mixed, project, reversed_heads, scale
from processes import ranks_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.custom_ops.registry import CUSTOM_OPS, CustomOps, register_rule
from autopar.errors import ArtifactError, RuleError, WrongRule
from autopar.ir.ops.fused import fused_of
from autopar.ir.program import record

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> CustomOps:
    """The registry of the process, empty for the time of a test."""
    monkeypatch.setattr(CUSTOM_OPS, "rules", {})
    monkeypatch.setattr(CUSTOM_OPS, "checked", set())
    return CUSTOM_OPS


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(16, 8) / 3)
        self.gain = nn.Parameter(torch.rand(16))
        self.down = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = scale(project(x, self.up), self.gain)
        return self.down(reversed_heads(hidden, 4).tanh())


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 3, 8), torch.randn(6, 3, 4)


def register(*names: str) -> None:
    for name in names:
        pattern, options, _ = RIGHT[name]
        autopar.register_rule(f"own_tests::{name}", pattern.replace("b (", "... ("), **options)


ALL = ("scale", "project", "project_weight", "reversed_heads")


def layouts(compiled: autopar.Compiled, op: str) -> list[str]:
    calls = [node for node in compiled.program.calls() if str(node.target) == f"own_tests.{op}.default"]
    return [str(record(node).layout) for node in calls]


def test_a_custom_op_stays_a_call_between_groups(own: CustomOps) -> None:
    register(*ALL)
    found = autopar.compile(Net(), "dp=2", loss_fn=loss_fn, batch=batch(), compile="triton")
    groups = [group for node in found.program.calls() if (group := fused_of(node)) is not None]
    assert groups and not [call for group in groups for call in group.calls if "own_tests" in str(call.target)]
    assert layouts(found, "scale") and layouts(found, "reversed_heads")
    assert autopar.verify(Net().double(), "dp=2", loss_fn=loss_fn, batch=batch(), compile="triton").ok


def test_a_model_of_custom_ops_is_split_and_right(own: CustomOps) -> None:
    register(*ALL)
    compiled = autopar.compile(Net(), "dp=2,tp=2", loss_fn=loss_fn, batch=batch())
    assert compiled.notes == ()
    assert {name: str(layout) for name, layout in compiled.layouts.items()} == {
        "up": "[tp,-]", "gain": "[tp]", "down.weight": "[-,tp]", "down.bias": "[-]",
    }  # fmt: skip
    assert layouts(compiled, "scale") == ["[dp,-,tp]"]
    assert layouts(compiled, "project") == ["[dp,-,tp]"]
    assert layouts(compiled, "project_weight") == ["[tp,-] partial(dp)"]
    assert layouts(compiled, "reversed_heads") == ["[dp,-,tp]"] * 2
    heads = [n.args[1] for n in compiled.program.calls() if str(n.target) == "own_tests.reversed_heads.default"]
    assert heads == [2, 2], "each rank has half of the 4 heads"
    assert "autopar.coord" not in compiled.text(), "the number of heads needs no coordinate"
    activations = [c for c in compiled.collectives if c.axis == "tp"]
    assert [c.op for c in activations] == ["all_reduce"], "one sum, of the row-parallel product"
    for mesh in ("dp=2,tp=2", "dp=3", "tp=4"):
        report = autopar.verify(Net(), mesh, loss_fn=loss_fn, batch=batch())
        assert report.ok and report.max_error <= 1e-10, report


class Recomputed(Net):
    """In-place ops, which are made functional by a second trace, in a region that is computed again."""

    def body(self, x: Tensor) -> Tensor:
        return scale(project(x, self.up), self.gain).clone().mul_(2).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(checkpoint(self.body, x, use_reentrant=False))


def test_custom_ops_in_a_recomputed_region(own: CustomOps) -> None:
    register(*ALL)
    compiled = autopar.compile(Recomputed(), "dp=2,tp=2", loss_fn=loss_fn, batch=batch())
    assert compiled.notes == () and layouts(compiled, "project") == ["[dp,-,tp]"] * 2
    report = autopar.verify(Recomputed(), "dp=2,tp=2", loss_fn=loss_fn, batch=batch())
    assert report.ok and report.max_error <= 1e-10, report


def test_a_rule_without_a_split_lets_a_saved_program_load(own: CustomOps, tmp_path: Path) -> None:
    register("project", "project_weight", "reversed_heads")
    autopar.register_rule("own_tests::scale", "... h, h -> ... h", replicated=("...", "h"))
    compiled = autopar.compile(Net(), "dp=2,tp=2", loss_fn=loss_fn, batch=batch())
    assert compiled.notes == () and layouts(compiled, "scale") == ["[-,-,-]"]
    compiled.save(tmp_path)
    assert autopar.load(tmp_path).text() == compiled.text()


def test_ops_without_a_rule_run_whole_and_are_reported(own: CustomOps) -> None:
    register("project", "project_weight", "reversed_heads")
    compiled = autopar.compile(Net(), "dp=2,tp=2", loss_fn=loss_fn, batch=batch())
    (note,) = compiled.notes
    assert note.startswith("op 'own_tests.scale.default' has no rule: replicated, computed on every rank (1 times, ")
    assert note.endswith("; autopar.register_rule can give it one")
    assert layouts(compiled, "scale") == ["[-,-,-]"]
    report = autopar.verify(Net(), "dp=2,tp=2", loss_fn=loss_fn, batch=batch())
    assert report.ok and report.max_error <= 1e-10, report


def test_a_lookup_and_an_optional_bias_in_a_model(own: CustomOps) -> None:
    """Forward-only ops, behind which nothing is trained; one is called in two ways."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(10, 8))
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, index: Tensor) -> Tensor:
            x = lookup(self.table, index)
            return self.down(self.up(biased(x) + biased(x, self.table[0])).relu())

    register("lookup")
    autopar.register_rule("own_tests::biased", *RIGHT["biased"][:1], **RIGHT["biased"][1])
    data = (torch.randint(0, 10, (6,)), torch.randn(6, 4))
    compiled = autopar.compile(Frozen(), "dp=2,tp=2", loss_fn=loss_fn, batch=data)
    assert compiled.notes == ()
    assert layouts(compiled, "lookup") == ["[dp,-]"] and layouts(compiled, "biased") == ["[dp,-]"] * 2
    report = autopar.verify(Frozen(), "dp=2,tp=2", loss_fn=loss_fn, batch=data)
    assert report.ok and report.max_error <= 1e-10, report


def test_a_call_that_fits_no_pattern_is_an_error(own: CustomOps) -> None:
    autopar.register_rule("own_tests::scale", "b h, h -> b h")
    register("project", "project_weight", "reversed_heads")
    with pytest.raises(RuleError) as found:
        autopar.compile(Net(), "tp=2", loss_fn=loss_fn, batch=batch())
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "hidden = scale(" in text)
    assert str(found.value) == (
        "'own_tests::scale' is called with 'x', 'w' of shapes [6, 3, 16], [16], which fits no pattern of its rule:\n"
        "  'b h, h -> b h' does not fit a shape of (6, 3, 16)\n"
        "Register the patterns of all calls: register_rule(op, [pattern, pattern]).\n"
        f"The call is at {Path(__file__).name}:{line}."
    )


def shifted_(x: Tensor, dim: int) -> Tensor:
    return x.roll(1, dim)


shifted = define("shifted", shifted_)
shifted.register_autograd(
    lambda ctx, g: (shifted(g.flip(ctx.dim), ctx.dim).flip(ctx.dim), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "dim", inputs[1]),
)


class Shifting(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(shifted(self.up(x), self.dim))


def test_a_rule_is_checked_for_the_arguments_of_each_call(own: CustomOps) -> None:
    """The rule is for the last dim, whatever the op is told: with another it would be silently wrong."""
    autopar.register_rule("own_tests::shifted", "b s h -> b s h", replicated="h", args={"dim": -1})
    assert autopar.compile(Shifting(2), "dp=2", loss_fn=loss_fn, batch=batch()).notes == ()
    assert own.checked == {("own_tests.shifted.default", "{'dim': 2}")}
    with pytest.raises(
        RuleError, match=r"^With dim=1, as at test_custom_ops_models.py:\d+: the rule of own_tests::shifted, "
    ) as found:
        autopar.compile(Shifting(1), "dp=2", loss_fn=loss_fn, batch=batch())
    assert "\n  's' is not splittable: 's' (size 6) in 2 pieces: result 0 at [0, 0, 0]: " in str(found.value)


def test_arguments_that_cannot_be_checked_are_noted(own: CustomOps) -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x + largest(x.repeat(1, 8).detach(), 20)[:, :4])

    autopar.register_rule("own_tests::largest", *RIGHT["largest"][:1], **RIGHT["largest"][1])
    data = (torch.randn(4, 4), torch.randn(4, 4))
    (note,) = autopar.compile(Narrow(), "dp=2", loss_fn=loss_fn, batch=data).notes
    assert note.startswith(
        "the rule of own_tests::largest is not checked for k=20: own_tests::largest on operands of shapes"
    )
    assert autopar.verify(Narrow(), "dp=2", loss_fn=loss_fn, batch=data).ok


def _train(rank: int, registered: tuple[str, ...], mesh: str = "dp=2,tp=2") -> list[str]:
    register(*registered)
    torch.manual_seed(1)
    plain = Net()
    model = autopar.parallelize(copy.deepcopy(plain), mesh, loss_fn=loss_fn)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, model)]
    for _ in range(3):
        x, y = batch()
        expected = loss_fn(plain, x, y)
        expected.backward()
        torch.testing.assert_close(model.forward_backward(x, y), expected.detach())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.full_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], msg=name)
    return [str(parameter.placements) for parameter in model.parameters()]


@pytest.mark.gloo
def test_training_over_gloo_equals_the_plain_loop() -> None:
    with ranks_of(4) as ranks:
        placements = ranks.run(_train, ALL)[0]
        assert placements[0] == "(Replicate(), Shard(dim=0))", "up is split over tp by a product of the user's own"


def _train_unlike(rank: int) -> None:
    _train(rank, ALL if rank else ALL[1:], "tp=2")


@pytest.mark.gloo
def test_ranks_with_other_rules_are_an_error() -> None:
    with ranks_of(2) as ranks:
        outcomes = ranks.attempt(_train_unlike)
        assert all(one.error and one.error.startswith("RankError: ranks disagree on the program:") for one in outcomes)


def test_batch_dims_do_not_broadcast(own: CustomOps) -> None:
    """The check did not see it: a gradient would have to be summed over the dims of size 1."""

    class Broadcast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return mixed(self.up(x).detach(), None, x[:, :1, :4]) + self.up(x)

    autopar.register_rule("own_tests::mixed", ["..., -, ... -> ...", "..., ..., ... -> ..."])
    with pytest.raises(RuleError, match=r"'\.\.\., -, \.\.\. -> \.\.\.': '\.\.\.' is \[6, 3, 4\] and \[6, 1, 4\]"):
        autopar.compile(Broadcast(), "dp=2", loss_fn=loss_fn, batch=batch())


def test_a_saved_program_loads_where_its_ops_are_registered(
    own: CustomOps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(*ALL)
    compiled = autopar.compile(Net(), "dp=2,tp=2", loss_fn=loss_fn, batch=batch())
    compiled.save(tmp_path)
    assert autopar.load(tmp_path).text() == compiled.text()
    assert "torch.ops.own_tests.scale.default(" in (tmp_path / "program_0_step.py").read_text()
    monkeypatch.setattr(own, "rules", {op: one for op, one in own.rules.items() if "scale" not in op})
    message = r"'own_tests\.scale\.default' is not an op that a program may hold.*call autopar\.register_rule before"
    with pytest.raises(ArtifactError, match=message):
        autopar.load(tmp_path)


def test_the_example_of_the_docs_runs(own: CustomOps, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = (DOCS / "custom_ops.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    example = tmp_path / "example.py"
    example.write_text(code)
    exec(compile(code, str(example), "exec"), {"__name__": "example"})
    assert "all equal" in capsys.readouterr().out
    assert own.names() == {"mylib.norm.default", "mylib.norm_backward.default"}
    with pytest.raises(WrongRule) as found:  # the error that the page shows
        register_rule("mylib::norm", "... h, h -> ... h", args={"eps": 1e-6}, registry=CustomOps())
    shown = re.findall(r"^    WrongRule: (.*?)\n\n", page, re.MULTILINE | re.DOTALL)
    assert [re.sub(r"\n    ", "\n", text) for text in shown] == [str(found.value)]
