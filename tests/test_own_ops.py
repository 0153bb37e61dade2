"""Rules of users' ops: checked when they are registered, split by the search, right by verify."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from own_ops import biased, define, largest, lookup, project, reversed_heads, scale
from processes import ranks_of
from refusals import refused
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.errors import ArtifactError, RuleError, WrongRule
from autopar.ir.program import record
from autopar.own_ops import OWN_OPS, OwnOps, register_rule

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> OwnOps:
    """The registry of the process, empty for the time of a test."""
    monkeypatch.setattr(OWN_OPS, "rules", {})
    monkeypatch.setattr(OWN_OPS, "checked", set())
    return OWN_OPS


RIGHT: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "scale": ("... h, h -> ... h", {"linear": ["x", "w"]}, True),
    "project": ("... i, o i -> ... o", {"linear": ["x", "w"], "flops": "2*...*i*o"}, True),
    "project_weight": ("... o, ... i -> o i", {"linear": ["grad", "x"], "flops": "2*...*i*o"}, False),
    "reversed_heads": ("b (n d) -> b (n d)", {"size_args": {"n": "heads"}, "whole": "d", "linear": "x"}, True),
    "normalised": ("b ... h -> b ... h", {"whole": ["h"]}, False),
    "lookup": ("v h, n -> n h", {"whole": "v", "linear": "table", "args": {"index": torch.int64}}, False),
    "biased": (["... h, h -> ... h", "..., - -> ..."], {"linear": [("x", "bias")]}, False),
    "largest": ("b h -> b k", {"whole": ("h", "k"), "args": {"k": 3}}, False),
    "averaged": ("b h, h -> b h", {"whole": "b"}, True),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_rules_are_taken(name: str) -> None:
    pattern, options, gradients = RIGHT[name]
    registry = OwnOps()
    before = torch.random.get_rng_state()
    made = register_rule(f"own_tests::{name}", pattern, **options, registry=registry)
    assert made.gradients is gradients
    assert str(made).endswith("results and gradients checked" if gradients else "(it has no autograd formula) checked")
    assert registry.names() == {f"own_tests.{name}.default"}
    assert torch.equal(torch.random.get_rng_state(), before)


def without(name: str, key: str) -> dict[str, Any]:
    return {option: value for option, value in RIGHT[name][1].items() if option != key}


VALUES = r"-?[\d.e-]+ from the pieces, -?[\d.e-]+ from the whole"
WRONG: list[tuple[str, Any, dict[str, Any], str]] = [
    ("normalised", "b h -> b h", {},
     rf"'h' is not splittable: 'h' \(size \d+\) in 2 pieces: result 0 at \[0, 0\]: {VALUES}"),
    ("lookup", "v h, n -> n h", without("lookup", "whole"), rf"'v' is not splittable: .*{VALUES}"),
    ("reversed_heads", "b (n d) -> b (n d)", without("reversed_heads", "whole"), rf"'d' is not splittable: .*{VALUES}"),
    ("averaged", "b h, h -> b h", {}, rf"'b' is not splittable: .*: the gradient of operand 0 at \[0, 0\]: {VALUES}"),
    ("halves", "b h -> h, h", {}, rf"'b' is not splittable: .*result 1 at \[0\]: {VALUES}"),
    ("halves", "b h -> h, h", {"partial": "max"}, rf"'b' is not splittable: .*result 0 at \[0\]: {VALUES}"),
    ("scale", "b h, h -> b h", {"linear": [("x", "w")]},
     r"it is not linear in 'x', 'w': result 0 at \[0, 0\]: \S+ is f\(a\) \+ f\(b\), \S+ is f\(a \+ b\)"),
    ("biased", "... h, h -> ... h", {"linear": "x"}, "it is not linear in 'x'"),
    ("biased", ["..., - -> ...", "... h, h -> ... h"], {"linear": ["x"]}, "it is not linear in 'x'"),
    ("lookup", "v h, n -> n h", {**RIGHT["lookup"][1], "linear": "index"},
     "it is not linear in 'index': an operand that is no float has no partial sums"),
    ("largest", "b h -> b k", {"whole": "k", "args": {"k": 5}},
     "'h' is not splittable: .*it raised RuntimeError: selected index k"),
    ("project", "b i, o i -> b o", {"sizes": {"i": 7}}, "'i' is not checked: its size 7 can be cut in neither 2 nor 3"),
    ("project", "b i, o i -> b o", {"sizes": {"o": 1}}, "'o' is not checked: its size 1 can be cut in neither 2 nor 3"),
    ("normalised", "b ... -> b ...", {}, r"'\.\.\.' is not splittable: 'b0'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "pattern", "options", "message"), WRONG)
def test_wrong_rules_are_refused_for_the_right_name(
    name: str, pattern: Any, options: dict[str, Any], message: str
) -> None:
    registry = OwnOps()
    with pytest.raises(WrongRule, match=message) as found:
        register_rule(f"own_tests::{name}", pattern, **options, registry=registry)
    text = str(found.value)
    assert text.startswith(f"the rule of own_tests::{name}, ")
    assert not registry.rules, "a wrong rule must not be in use"
    bad = re.findall(r"^  '([\w.]+)' is not splittable", text, re.MULTILINE)
    assert len(bad) <= 1, text
    if bad:
        marks = tuple(sorted({*_several(options.get("whole", ())), *bad}))
        assert text.endswith(f"If the pattern is right, these must stay whole: whole={marks}.")


def _several(items: Any) -> tuple[str, ...]:
    return (items,) if isinstance(items, str) else tuple(items)


def test_the_two_values_are_those_of_the_op() -> None:
    """Ones: each is a quarter of a whole row, and a half of a piece of one."""
    values = "0.5 from the pieces, 0.25 from the whole"
    options: dict[str, Any] = {"sizes": {"b": 2, "h": 4}, "args": {"x": torch.ones}}
    expected = (
        'the rule of own_tests::normalised, "b h -> b h", does not hold:\n'
        f"  'h' is not splittable: 'h' (size 4) in 2 pieces: result 0 at [0, 0]: {values}\n"
        "If the pattern is right, these must stay whole: whole=('h',)."
    )
    refused(WrongRule, expected, lambda: rule("normalised", "b h -> b h", **options))


def rule(name: str, pattern: Any, **options: Any) -> object:
    return register_rule(name if "::" in name else f"own_tests::{name}", pattern, **options, registry=OwnOps())


def test_the_same_rule_again_is_fine_and_another_one_is_not() -> None:
    registry = OwnOps()
    again = [register_rule("own_tests::scale", "b h, h -> b h", linear="x", registry=registry) for _ in range(2)]
    assert again[0] is again[1]
    expected = (
        "own_tests::scale has another rule already: \"b h, h -> b h\", linear=[['x']]; "
        "now \"b h, h -> b h\", whole=['h']. An op has one rule in a process."
    )
    refused(
        RuleError, expected, lambda: register_rule("own_tests::scale", "b h, h -> b h", whole="h", registry=registry)
    )
    assert registry.rules["own_tests.scale.default"] is again[0]


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


def test_a_model_of_own_ops_is_split_and_right(own: OwnOps) -> None:
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


def test_own_ops_in_a_recomputed_region(own: OwnOps) -> None:
    register(*ALL)
    compiled = autopar.compile(Recomputed(), "dp=2,tp=2", loss_fn=loss_fn, batch=batch())
    assert compiled.notes == () and layouts(compiled, "project") == ["[dp,-,tp]"] * 2
    report = autopar.verify(Recomputed(), "dp=2,tp=2", loss_fn=loss_fn, batch=batch())
    assert report.ok and report.max_error <= 1e-10, report


def test_a_rule_without_a_split_lets_a_saved_program_load(own: OwnOps, tmp_path: Path) -> None:
    register("project", "project_weight", "reversed_heads")
    autopar.register_rule("own_tests::scale", "... h, h -> ... h", whole=("...", "h"))
    compiled = autopar.compile(Net(), "dp=2,tp=2", loss_fn=loss_fn, batch=batch())
    assert compiled.notes == () and layouts(compiled, "scale") == ["[-,-,-]"]
    compiled.save(tmp_path)
    assert autopar.load(tmp_path).text() == compiled.text()


def test_ops_without_a_rule_run_whole_and_are_reported(own: OwnOps) -> None:
    register("project", "project_weight", "reversed_heads")
    compiled = autopar.compile(Net(), "dp=2,tp=2", loss_fn=loss_fn, batch=batch())
    (note,) = compiled.notes
    assert note.startswith("op 'own_tests.scale.default' has no rule: computed whole on every rank (1 times, ")
    assert note.endswith("; autopar.register_rule can give it one")
    assert layouts(compiled, "scale") == ["[-,-,-]"]
    report = autopar.verify(Net(), "dp=2,tp=2", loss_fn=loss_fn, batch=batch())
    assert report.ok and report.max_error <= 1e-10, report


def test_a_lookup_and_an_optional_bias_in_a_model(own: OwnOps) -> None:
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


def test_a_call_that_fits_no_pattern_is_an_error(own: OwnOps) -> None:
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


def test_a_rule_is_checked_for_the_arguments_of_each_call(own: OwnOps) -> None:
    """The rule is for the last dim, whatever the op is told: with another it would be silently wrong."""
    autopar.register_rule("own_tests::shifted", "b s h -> b s h", whole="h", args={"dim": -1})
    assert autopar.compile(Shifting(2), "dp=2", loss_fn=loss_fn, batch=batch()).notes == ()
    assert own.checked == {("own_tests.shifted.default", "{'dim': 2}")}
    with pytest.raises(
        RuleError, match=r"^With dim=1, as at test_own_ops.py:\d+: the rule of own_tests::shifted, "
    ) as found:
        autopar.compile(Shifting(1), "dp=2", loss_fn=loss_fn, batch=batch())
    assert "\n  's' is not splittable: 's' (size 6) in 2 pieces: result 0 at [0, 0, 0]: " in str(found.value)


def test_arguments_that_cannot_be_checked_are_noted(own: OwnOps) -> None:
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


def test_every_pattern_is_checked_by_itself() -> None:
    """The second is hidden behind the first wherever that fits; it is checked all the same."""
    options = RIGHT["largest"][1]
    with pytest.raises(
        WrongRule, match=r'the rule of own_tests::largest, "h b -> h k", does not hold:\n  .b. is not spl'
    ):
        register_rule("own_tests::largest", ["b h -> b k", "h b -> h k"], **options, registry=OwnOps())


def _train(rank: int, registered: tuple[str, ...]) -> list[str]:
    register(*registered)
    torch.manual_seed(1)
    plain = Net()
    model = autopar.parallelize(copy.deepcopy(plain), "dp=2,tp=2", loss_fn=loss_fn)
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
    _train(rank, ALL if rank else ALL[1:])


@pytest.mark.gloo
def test_ranks_with_other_rules_are_an_error() -> None:
    with ranks_of(4) as ranks:
        outcomes = ranks.attempt(_train_unlike)
        assert all(one.error and one.error.startswith("RankError: ranks disagree on the program:") for one in outcomes)


def test_a_saved_program_loads_where_its_ops_are_registered(
    own: OwnOps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_the_example_of_the_docs_runs(own: OwnOps, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", (DOCS / "own_ops.md").read_text(), re.MULTILINE | re.DOTALL)
    example = tmp_path / "example.py"
    example.write_text(code)
    exec(compile(code, str(example), "exec"), {"__name__": "example"})
    assert "all equal" in capsys.readouterr().out
    assert own.names() == {"mylib.norm.default", "mylib.norm_backward.default"}
