"""Models that enlarge rounding: `verify` measures by how much, and excuses what lies within it and is not wrong."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from models import BATCH, square_loss
from processes import Ranks
from torch import Tensor, fx, nn

import autopar
from autopar.capture import Captured, capture
from autopar.compiled import Compiled
from autopar.ir.mesh import parse_mesh
from autopar.ir.ops import op
from autopar.ir.options import StepOptions
from autopar.ir.plan import Plan
from autopar.ir.program import Program, record, set_record
from autopar.job import Job
from autopar.parallel.module import ParallelModule
from autopar.passes import run_passes
from autopar.verification import noise
from autopar.verification.comparison import Report, Row, Table
from autopar.verification.copies import copied
from autopar.verification.distributed import verify_on_ranks
from autopar.verification.noise import Limits, Trained, judged
from autopar.verification.rounding import Rounded
from autopar.verification.verify import descent, verify_compiled

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


def reductions(depth: int, spread: float) -> list[str]:
    program = compiled_case(depth, spread)[2].program
    return [node.name for node in program.calls() if node.target in (op("all_reduce"), op("all_reduce_start"))]


@pytest.mark.parametrize("change", [drop, pytest.param(double, marks=pytest.mark.slow), shrink_a_little])
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


INF = float("inf")
KEY, ROW = ("gradient", "w"), Row("gradient", "w", 1e-3, 0.0, ok=False)


def trained(error: float, noise: float, *, share: float = 1.0, replicas: float = 0.0, value: float = 1.0) -> Trained:
    """A trial of one tensor whose error and noise are known."""
    table = Table(1e-10, {KEY: error}, {KEY: replicas}, shares={KEY: share})
    steps = [{KEY: torch.full((2,), value, dtype=torch.float64)}]
    again = lambda *_: [{KEY: steps[0][KEY] * (1 + noise)}]  # noqa: E731  errors are relative, and this one is `noise`
    return Trained(table, steps, again, Limits.of(torch.float64))


def is_excused(here: Trained, away: Trained | None) -> bool:
    return judged([ROW], here, lambda: away)[0].ok


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
    ],
)  # fmt: skip
def test_what_noise_excuses(here: Trained, away: Trained | None, ok: bool) -> None:
    assert is_excused(here, away) == ok


# Kinds of models that were called wrong


class Masked(nn.Module):
    """Attention with a mask: -inf in the scores, and keys whose bias has no gradient but for rounding."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value, self.table = value, nn.Embedding(20, 12)
        self.q, self.k, self.v = (nn.Linear(12, 12) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        q, k, v = (layer(h).view(*x.shape, 3, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-1, -2)).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), self.value)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Probabilities(nn.Module):
    """What torch checks to lie in [0, 1], behind normalisations of inputs that are next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        norm = lambda width: [nn.Linear(width, 16), nn.BatchNorm1d(16), nn.ReLU()]  # noqa: E731
        self.layers = nn.Sequential(*norm(8), *norm(16), nn.Linear(16, 1), nn.Sigmoid(), nn.Flatten(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Tied(nn.Module):
    """Functions that close over the module: an attribute, a hook, a default, a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.scale = nn.Embedding(20, 6), nn.Linear(6, 6)
        self.head = lambda x: x @ self.table.weight.t()
        self.steps = {"scale": [lambda x, layer=self.scale: layer(x)]}
        self.scale.register_forward_hook(lambda layer, given, x: x + self.table.weight[0])
        plain = self.scale.forward
        self.scale.forward = lambda x: plain(x) * 2.0  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.steps["scale"][0](self.table(x)))


class Normalised(nn.Module):
    """A bias before a BatchNorm has no gradient but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def policy(model: nn.Module, x: Tensor, chosen: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """PPO's loss in its first step: the ratio is 1 and the advantages add up to zero, and so does the loss."""
    likely = -F.cross_entropy(model(x), chosen, reduction="none")
    whitened = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ratio = (likely - likely.detach()).exp()
    return -torch.min(ratio * whitened, ratio.clamp(0.8, 1.2) * whitened).mean(), whitened.mean()


class Renormed(nn.Module):
    """Its gradient is computed in float64, whatever the model is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.renorm(self.layer(x), 2, 0, 1.0)


def _of_tokens(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _checked(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy(model(x), y)


def _tokens() -> tuple[Tensor, ...]:
    return (torch.randint(0, 20, (6, 8)),)


def _small() -> tuple[Tensor, ...]:
    return 1e-4 * torch.randn(12, 8), torch.randint(0, 2, (12,)).float()


def _choices() -> tuple[Tensor, ...]:
    return torch.randn(6, 4), torch.randint(0, 3, (6,)), torch.randn(6)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[..., object], Callable[[], tuple[Tensor, ...]]]] = {
    "a mask of -inf": (lambda: Masked(-INF), _of_tokens, _tokens),
    "a mask of the least float": (lambda: Masked(torch.finfo(torch.float32).min), _of_tokens, _tokens),
    "probabilities that are checked": (Probabilities, _checked, _small),
    "a bias before a norm": (Normalised, _of_tokens, lambda: (torch.randn(12, 4),)),
    "a loss that is zero on paper": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), policy, _choices),
    "float64 inside": (Renormed, _of_tokens, lambda: (torch.randn(6, 4),)),
    "functions over self": (Tied, _of_tokens, _tokens),
}  # fmt: skip
FORMS = [{"dtype": torch.float64}, {"dtype": torch.float32}, {"dtype": torch.bfloat16}, {"precision": "bf16"}]


@pytest.mark.parametrize("name", KINDS)
def test_what_is_right_is_called_right(name: str) -> None:
    make, loss, batch = KINDS[name]
    for seed, (mesh, form) in enumerate(itertools.product(("dp=2,tp=2", "dp=3"), FORMS)):
        if form.get("dtype") is torch.bfloat16 and name in ("float64 inside", "a mask of the least float"):
            continue  # torch computes no such thing
        torch.manual_seed(seed)
        report = autopar.verify(make(), mesh, loss_fn=loss, batch=batch(), **form)
        assert report.ok, f"{mesh} {form}\n{report}"


def test_a_copy_reads_nothing_of_its_original() -> None:
    model = Tied()
    copy, x = copied(model), torch.arange(3)
    expected = model(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert copy(x).equal(expected)
    assert not {id(p) for p in copy.parameters()} & {id(p) for p in model.parameters()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rounding_keeps_what_is_exact(dtype: torch.dtype) -> None:
    """Whole numbers, what is not finite, the largest float; and no value gets out of the whole numbers around it."""
    largest = torch.finfo(dtype).max
    exact = torch.tensor(
        [0.0, 1.0, -1.0, 3.0, float("inf"), -float("inf"), float("nan"), largest, -largest], dtype=dtype
    )
    inside = torch.rand(2000, dtype=dtype)
    changed = 0
    for seed in range(5):
        with Rounded(seed):
            kept, near = exact.clone(), inside.clone()
        assert (kept[:6] == exact[:6]).all() and kept[6].isnan() and kept[7:].isfinite().all()
        assert ((near >= 0) & (near <= 1)).all() and (near.floor() == inside.floor()).all()
        changed += int((near != inside).sum())
    assert changed > 2000


def test_a_model_that_refuses_rounded_numbers_is_not_said_to_fail() -> None:
    """Its checks are for its own numbers: then the weights alone are moved."""

    class Exact(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            torch._check(bool((x * 4.0).round().equal(x * 4.0)), lambda: "only quarters")
            return self.norm(self.layer(x))

    expected = _trained(Exact(), lambda _: None)
    found = Trained(Table(1e-4), expected, lambda change, _: _trained(Exact(), change), Limits.of(torch.float32))
    assert list(found._errors(0))


def _trained(model: nn.Module, change: Callable[[nn.Module], None]) -> list[dict[tuple[str, str], Tensor]]:
    change(model)
    return [{KEY: model(torch.tensor([[0.25, 0.5, 1.0, -0.75], [0.0, 2.25, 3.0, 1.0]]).clone())}]


# The same models broken: found in a short float as well


@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize("factor", [2.0, 0.0])
def test_what_is_wrong_is_found_in_shorter_floats(form: dict[str, object], factor: float) -> None:
    """Each sum over ranks doubled, or lost: wherever float64 sees it, or nothing of it is there to see."""
    torch.manual_seed(0)
    model, batch = Masked(-INF), _tokens()
    seen = {dtype: _found(model, batch, factor, form if dtype is None else {}) for dtype in (torch.float64, None)}
    assert seen[torch.float64], "nothing was broken"
    assert seen[torch.float64] - seen[None] == set(), "wrong in float64, and not seen in a shorter float"


def _found(model: nn.Module, batch: tuple[Tensor, ...], factor: float, form: dict[str, object]) -> set[str]:
    """The sums over dp that are found to be wrong, of those of gradients and of the loss."""
    dtype = form.get("dtype", torch.float64) if "precision" not in form else torch.float32
    assert isinstance(dtype, torch.dtype)
    changed = copied(model).to(dtype)
    lift = None if "precision" in form else dtype
    captured = capture(changed, _of_tokens, batch, {}, lift=lift, precision=form.get("precision"))  # type: ignore[arg-type]
    plan = Plan(parse_mesh("dp=2"), options=StepOptions(**({"precision": form["precision"]} if lift is None else {})))  # type: ignore[arg-type]
    compiled = Compiled(plan, run_passes(captured.program, plan))
    found = set()
    for place, name in enumerate(_sums(compiled.program)):
        program = _copied(compiled.program)
        scale(program, next(node for node in program.graph.nodes if node.name == name), factor)
        sabotaged = replace(compiled, history=(*compiled.history, ("sabotage", program)))
        if not verify_compiled(changed, captured, sabotaged, loss_fn=_of_tokens, batch=batch, steps=1).ok:
            found.add(str(place))
    return found


def _sums(program: Program) -> list[str]:
    return [node.name for node in program.calls() if node.target in (op("all_reduce"), op("all_reduce_start"))]


def _copied(program: Program) -> Program:
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in program.graph.nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
    return program.with_(graph=graph)
