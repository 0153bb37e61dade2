"""Models that enlarge rounding: `verify` measures by how much, and excuses what lies within it and is not wrong."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from models import BATCH, square_loss
from processes import Ranks
from torch import Tensor, fx, nn

import autopar
from autopar.capture import Captured, capture
from autopar.compiled import Compiled
from autopar.ir.mesh import parse_mesh
from autopar.ir.ops.ops import op
from autopar.ir.plan import Plan
from autopar.ir.program import Program, record, set_record
from autopar.job import Job
from autopar.parallel.module import ParallelModule
from autopar.passes import run_passes
from autopar.verification.judge import noise
from autopar.verification.judge.comparison import ComparedRow, Report, Table
from autopar.verification.judge.noise import Limits, Trained, judged
from autopar.verification.judge.rounding import Rounded
from autopar.verification.verify import descent, verify_compiled
from autopar.verification.verify_ranks import verify_on_ranks

Case = tuple[nn.Module, tuple[Tensor, Tensor]]


def norms_of_equal_rows(depth: int, spread: float) -> Case:
    """Rows that differ by next to nothing, behind normalisations over the batch that enlarge the difference, as they
    follow features of one position in a vision model. With no spread at all they normalise what is only rounding."""
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(16, 16), nn.BatchNorm1d(16))]
    model = nn.Sequential(*layers, nn.Tanh(), nn.Linear(16, 4)).double()
    x = torch.randn(1, 16, dtype=torch.float64) + spread * torch.randn(BATCH, 16, dtype=torch.float64)
    return model, (x, torch.randn(BATCH, 4, dtype=torch.float64))


SPREADS = [(3, 1e-9), (3, 0.0)]
FAR = 1.0  # nothing is enlarged


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=3"])
@pytest.mark.parametrize("depth, spread", SPREADS)
def test_a_program_as_exact_as_the_model_allows_is_right(depth: int, spread: float, mesh: str) -> None:
    model, batch = norms_of_equal_rows(depth, spread)
    report = autopar.verify(model, mesh, loss_fn=square_loss, batch=batch)
    excused = [row for row in report.rows if row.noise is not None]
    assert report.ok and report.mismatch is None and len(excused) > 4
    for row in excused:
        assert row.noise is not None and report.tolerance < row.error <= Limits.of(torch.float64).factor * row.noise
    last = max(excused, key=lambda row: row.error)
    said = f"{last.error:.2e}  ok: as exact as the model allows,  rounding alone gives {last.noise:.2e}"
    assert said in str(report)
    assert f"all equal, {len(excused)} of {len(report.rows)} as exactly as the model allows: max error" in str(report)


def test_what_is_right_costs_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(_: object) -> None:
        raise AssertionError("the noise was measured")

    monkeypatch.setattr(noise, "Rounded", asked)
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    assert autopar.verify(model, "dp=2,tp=2", loss_fn=square_loss, batch=(torch.randn(12, 16), torch.randn(12, 4))).ok
    model_, batch = norms_of_equal_rows(*SPREADS[0])
    with pytest.raises(AssertionError, match="the noise was measured"):
        autopar.verify(model_, "dp=2,tp=2", loss_fn=square_loss, batch=batch)


def test_a_sample_that_excuses_all_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample is a whole training of the plain module, and with a large one they take most of the time of `verify`."""
    drawn = []
    monkeypatch.setattr(noise, "Rounded", lambda seed: drawn.append(seed) or Rounded(seed))
    model, batch = norms_of_equal_rows(3, 1e-9)
    assert autopar.verify(model, "dp=3", loss_fn=square_loss, batch=batch).ok
    assert drawn == [0, 0], "one here, one elsewhere"


def _on_ranks(rank: int, factor: float) -> None:
    """verify_on_ranks of a model that enlarges rounding; its gradients are multiplied with a factor."""
    full_gradients = ParallelModule.full_gradients
    model, batch = norms_of_equal_rows(*SPREADS[0])
    job = Job(model=model, loss_fn=square_loss, batch=batch, optimizer=descent)
    with pytest.MonkeyPatch.context() as patch:
        changed = lambda self: {name: value * factor for name, value in full_gradients(self).items()}  # noqa: E731
        patch.setattr(ParallelModule, "full_gradients", changed)
        report = verify_on_ranks(job, "dp=2", steps=2, seed=0)
    assert (report is None) == (rank > 0)
    if report is None:
        return
    noisy = [row for row in report.rows if row.noise is not None]
    assert noisy, str(report)
    assert report.ok == (factor == 1.0), str(report)
    assert all(row.error > report.tolerance for row in noisy)


@pytest.mark.gloo
@pytest.mark.parametrize("factor", [1.0, 0.99])
def test_on_ranks_too(two: Ranks, factor: float) -> None:
    two.run(_on_ranks, factor, timeout=120)


# Sabotages


@functools.cache
def compiled_case(depth: int, spread: float) -> tuple[Case, Captured, Compiled]:
    model, batch = norms_of_equal_rows(depth, spread)
    captured = capture(model, square_loss, batch, {})
    plan = Plan(parse_mesh("dp=2,tp=2"))
    return (model, batch), captured, Compiled(plan, run_passes(captured.program, plan))


@functools.cache
def broken(depth: int, spread: float, name: str, change: Callable[[Program, fx.Node], None]) -> Report:
    (model, batch), captured, compiled = compiled_case(depth, spread)
    program = _copied(compiled.program)
    change(program, next(node for node in program.graph.nodes if node.name == name))
    program.graph.lint()
    sabotaged = replace(compiled, history=(*compiled.history, ("sabotage", program)))
    return verify_compiled(model, captured, sabotaged, loss_fn=square_loss, batch=batch)


def waited(node: fx.Node) -> fx.Node:
    """The value of a reduction: of one that is started, what its wait gives."""
    return next(iter(node.users)) if node.target is op("all_reduce_start") else node


def drop(program: Program, node: fx.Node) -> None:
    operand, last = node.args[0], waited(node)
    assert isinstance(operand, fx.Node)
    last.replace_all_uses_with(operand)
    program.graph.erase_node(last)
    if last is not node:
        program.graph.erase_node(node)


def scale(program: Program, node: fx.Node, factor: float) -> None:
    value = waited(node)
    with program.graph.inserting_after(value):
        scaled = program.graph.call_function(torch.ops.aten.mul.Scalar, (value, factor))
    set_record(scaled, record(value))
    value.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)


def double(program: Program, node: fx.Node) -> None:
    scale(program, node, 2.0)


def shrink_a_little(program: Program, node: fx.Node) -> None:
    scale(program, node, 0.99)


REDUCTIONS = op("all_reduce"), op("all_reduce_start")


def reductions(depth: int, spread: float) -> list[str]:
    program = compiled_case(depth, spread)[2].program
    return [node.name for node in program.calls() if node.target in REDUCTIONS]


LARGER = [pytest.param(change, marks=pytest.mark.slow) for change in (drop, double)]


@pytest.mark.parametrize("change", [*LARGER, shrink_a_little])
@pytest.mark.parametrize("depth, spread", SPREADS)
def test_noise_excuses_nothing_that_is_wrong(
    depth: int, spread: float, change: Callable[[Program, fx.Node], None]
) -> None:
    """What is found with rows far apart, where the tolerance alone decides, is found with equal rows too. (Twice the
    gradient of a bias before a normalisation is found in neither: it is zero.)"""
    names = reductions(depth, spread)
    assert names == reductions(depth, FAR)
    wrong = [name for name in names if not broken(depth, FAR, name, change).ok]
    assert len(wrong) > len(names) / 2
    assert not [name for name in wrong if broken(depth, spread, name, change).ok]


# Rounding that grows from step to step


class Waves(nn.Module):
    """Features that turn round many times: of what a step changes in them by rounding the next one makes more. On any
    CPU there is some: the features are sums of two ranks' parts."""

    def __init__(self, frequency: float) -> None:
        super().__init__()
        self.frequency, self.outer = frequency, nn.Linear(16, 4)
        self.inner = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer((self.frequency * self.inner(x)).sin())


def waves(frequency: float) -> Case:
    torch.manual_seed(0)
    model = Waves(frequency).double()
    return model, (torch.randn(BATCH, 16, dtype=torch.float64), torch.randn(BATCH, 4, dtype=torch.float64))


def fast(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_where_rounding_grows_from_step_to_step_each_is_compared_from_the_plain_weights() -> None:
    model, batch = waves(2e3)
    first = autopar.verify(model, "dp=2,tp=2", loss_fn=square_loss, batch=batch, steps=1, optimizer=fast)
    assert first.ok and not first.is_stepwise
    report = autopar.verify(model, "dp=2,tp=2", loss_fn=square_loss, batch=batch, steps=3, optimizer=fast)
    assert report.ok and report.is_stepwise and report.steps == 3
    assert "each step begins with the plain module's weights: over all steps rounding grows" in str(report)
    assert report.max_error > first.max_error, "the later steps are compared as well"
    noise_of_steps = [row.noise for row in report.rows if row.noise is not None]
    assert noise_of_steps and max(noise_of_steps) < Limits.of(torch.float64).clear, "of each step, not of all"


@pytest.mark.parametrize("change", [drop, shrink_a_little])
def test_a_wrong_program_is_found_where_rounding_grows(change: Callable[[Program, fx.Node], None]) -> None:
    model, batch = waves(3e4)
    captured = capture(model, square_loss, batch, {})
    plan = Plan(parse_mesh("dp=2,tp=2"))
    compiled = Compiled(plan, run_passes(captured.program, plan))
    right = verify_compiled(model, captured, compiled, loss_fn=square_loss, batch=batch, optimizer=fast)
    assert right.ok and right.is_stepwise
    name = next(node.name for node in compiled.program.calls() if node.target in REDUCTIONS)
    program = _copied(compiled.program)
    change(program, next(node for node in program.graph.nodes if node.name == name))
    sabotaged = replace(compiled, history=(*compiled.history, ("sabotage", program)))
    wrong = verify_compiled(model, captured, sabotaged, loss_fn=square_loss, batch=batch, optimizer=fast)
    assert not wrong.ok and wrong.mismatch is not None and wrong.mismatch.node


def test_what_rounding_leaves_open_is_said_to_be_undecided() -> None:
    model, batch = waves(1e9)
    report = autopar.verify(model, "dp=2,tp=2", loss_fn=square_loss, batch=batch, optimizer=fast)
    assert not report.ok and report.is_undecided and report.mismatch is None
    text = str(report)
    assert "UNDECIDED: max error" in text and "NOT EQUAL" not in text and "WRONG" not in text
    moved = r"rounding alone, of one unit in the last place of each result, moves (gradient|weight) inner"
    assert re.search(moved, text)
    assert re.search(r"[3-6] of 11 tensors leave nothing to compare\. Verify the model with a larger batch", text)


INF = float("inf")
KEY, ROW = ("gradient", "w"), ComparedRow("gradient", "w", 1e-3, 0.0, ok=False)


def trained(error: float, noise: float, *, share: float = 1.0, replicas: float = 0.0, value: float = 1.0) -> Trained:
    """A trial of one tensor whose error and noise are known."""
    table = Table(1e-10, {KEY: error}, {KEY: replicas}, shares={KEY: share})
    steps = [{KEY: torch.full((2,), value, dtype=torch.float64)}]
    again = lambda *_: [{KEY: steps[0][KEY] * (1 + noise)}]  # noqa: E731  errors are relative, and this one is `noise`
    return Trained(table, steps, again, Limits.of(torch.float64))


def is_excused(here: Trained, away: Trained | None) -> bool:
    return judged([ROW], here, lambda: away)[0].ok


def exact(here: Trained) -> Trained:
    """The same of a shorter float, where float64 is right."""
    return replace(here, limits=here.limits.after_float64())


CLEAR, ZERO = trained(1e-9, 1e-9), trained(0.5, 0.5, share=1e-9)


@pytest.mark.parametrize(
    "here, away, ok",
    [
        pytest.param(trained(1e-5, 1e-6), None, True, id="noise that leaves something to compare"),
        pytest.param(trained(1e-5, 1e-8), CLEAR, False, id="beyond the noise"),
        pytest.param(trained(0.5, 0.5), CLEAR, True, id="nothing but rounding here, right elsewhere"),
        pytest.param(trained(0.5, 0.5), trained(1e-3, 1e-9), False, id="wrong elsewhere"),
        pytest.param(trained(0.5, 0.5), trained(0.5, 0.5), False, id="nothing but rounding, and as large as others"),
        pytest.param(trained(0.5, 0.5), ZERO, True, id="zero elsewhere"),
        pytest.param(ZERO, trained(1e-3, 1e-9), False, id="zero here, wrong elsewhere"),
        pytest.param(ZERO, None, True, id="zero here, and there is no other place"),
        pytest.param(trained(0.5, 0.5), None, False, id="nothing but rounding, and there is no other place"),
        pytest.param(trained(float("nan"), 1.0), CLEAR, False, id="NaN on one side"),
        pytest.param(trained(1e-5, 1e-6, replicas=1e-3), CLEAR, False, id="ranks that differ"),
        pytest.param(trained(0.5, 0.5), trained(0.0, 0.0, value=float("nan")), False, id="NaN on both sides"),
        pytest.param(trained(1e-5, 1e-6), trained(1e-3, 1e-9), False, id="within the noise, but wrong elsewhere"),
        pytest.param(trained(1e-7, 1e-9), None, False, id="a hundred times the noise"),
        pytest.param(exact(trained(1e-7, 1e-9)), None, True, id="the same, right in float64"),
        pytest.param(exact(trained(1e-5, 1e-9)), None, False, id="far beyond the noise"),
        pytest.param(exact(trained(40.0, 0.5, share=1e-9)), None, True, id="small, right in float64"),
        pytest.param(exact(trained(40.0, 0.5, share=1e-3)), None, False, id="any rounding, and not small"),
        pytest.param(exact(trained(float("nan"), 1.0, value=float("nan"))), None, True, id="plain overflows"),
        pytest.param(exact(trained(float("nan"), 1.0)), None, False, id="we overflow"),
    ],
)  # fmt: skip
def test_what_noise_excuses(here: Trained, away: Trained | None, ok: bool) -> None:
    assert is_excused(here, away) == ok


def _copied(program: Program) -> Program:
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in program.graph.nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
    return program.with_(graph=graph)
