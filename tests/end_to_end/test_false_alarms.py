"""What is right is called right in each float, whatever a model makes of rounding; and what is wrong is found there."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig
from models import labels, token_loss, tokens, uneven
from torch import Tensor, fx, nn

import autopar
from autopar.capture import capture
from autopar.compiled import Compiled
from autopar.ir.mesh import parse_mesh
from autopar.ir.ops.ops import op
from autopar.ir.options import StepOptions
from autopar.ir.plan import Plan
from autopar.ir.program import Program, record, set_record
from autopar.passes import run_passes
from autopar.verification import places
from autopar.verification.copies import copied
from autopar.verification.judge.comparison import Table
from autopar.verification.judge.noise import Limits, Trained
from autopar.verification.judge.rounding import BLOCK, Rounded, Units
from autopar.verification.verify import verify_compiled
from benchmarks import composed

INF, KEY = float("inf"), ("gradient", "w")


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
    for seed, (mesh, form) in enumerate(zip(itertools.cycle(("dp=2,tp=2", "dp=3")), FORMS)):
        if form.get("dtype") is torch.bfloat16 and name in ("float64 inside", "a mask of the least float"):
            continue  # torch computes no such thing
        torch.manual_seed(seed)
        report = autopar.verify(make(), mesh, loss_fn=loss, batch=batch(), **form)
        assert report.ok, f"{mesh} {form}\n{report}"


def test_a_precision_has_noise_where_autocast_refuses_the_model() -> None:
    """And rounding makes NaN of it: the gradient of a maximum looks for what is equal to it."""
    torch.manual_seed(0)
    model, loss, batch = composed.made("normed+experts tied worst")
    report = autopar.verify(model, "dp=1", loss_fn=loss, batch=batch, precision="bf16")
    assert report.ok and any(row.noise for row in report.rows), report


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rounding_moves_every_element_by_a_unit_at_most(dtype: torch.dtype) -> None:
    """In any order of dims, with gaps, and of more elements than are changed at once; a third stays as it is."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    given = torch.rand(3, 5, 7000, 2).to(dtype) + 0.25
    for kept in (given, given.permute(2, 0, 3, 1), given[:, 1::2, 3:, :1], given[0, 0, :1, 0]):
        found = given.clone().as_strided(kept.size(), kept.stride(), kept.storage_offset())
        Units(0).add_to(found)
        units = (found.contiguous().view(bits).long() - kept.contiguous().view(bits).long()).flatten()
        assert units.abs().max() <= 1
        if units.numel() > 1000:
            counts = torch.bincount(units + 1, minlength=3) / units.numel()
            assert (counts > 0.3).all() and (counts < 0.4).all()
            assert not units[:BLOCK].equal(units[BLOCK : 2 * BLOCK])


def test_rounding_moves_large_whole_numbers() -> None:
    """They are whole because a float has no more digits."""
    large = torch.full((3000,), 2.0**60, dtype=torch.float64)
    mixed = torch.cat([large, torch.tensor([7.0, float("inf"), float("nan")], dtype=torch.float64)])
    Units(0).add_to(mixed)
    assert 1500 < int((mixed[:3000] != large).sum()) < 2500
    assert mixed[3000] == 7.0 and mixed[3001] == float("inf") and mixed[3002].isnan()


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


@pytest.mark.parametrize("form, factor", list(zip(FORMS[1:], (2.0, 0.0, 2.0), strict=True)))
def test_what_is_wrong_is_found_in_shorter_floats(form: dict[str, object], factor: float) -> None:
    """Each sum over ranks doubled, or lost: wherever float64 sees it, or nothing of it is there to see."""
    torch.manual_seed(0)
    model, batch = Masked(-INF), _tokens()
    seen = {dtype: _found(model, batch, factor, form if dtype is None else {}) for dtype in (torch.float64, None)}
    assert seen[torch.float64], "nothing was broken"
    assert seen[torch.float64] - seen[None] == set(), "wrong in float64, and not seen in a shorter float"


@pytest.mark.parametrize("form", FORMS[2:])
def test_what_is_too_little_for_a_short_float_is_found(
    form: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum over tp that changes gradients by next to nothing is lost: noise excuses it, and float64 tells."""
    compile_step = places.compile_step

    def broken(*args: object, **kwargs: object) -> tuple[object, Compiled]:
        captured, compiled = compile_step(*args, **kwargs)  # type: ignore[arg-type]
        program = _copied(compiled.program)
        place = next(node for node in program.graph.nodes if node.name == "all_reduce_1")
        _scale(program, place, 0.0)
        return captured, replace(compiled, history=(*compiled.history, ("sabotage", program)))

    torch.manual_seed(3)
    model, batch = uneven(GPT(GPTConfig(24, 4, layers=1, heads=2, width=8))), (tokens(6, 4, 24), labels(6, 4, 24))
    assert autopar.verify(model, "dp=2,tp=2", loss_fn=token_loss, batch=batch, **form).ok  # type: ignore[arg-type]
    monkeypatch.setattr(places, "compile_step", broken)
    report = autopar.verify(model, "dp=2,tp=2", loss_fn=token_loss, batch=batch, **form)  # type: ignore[arg-type]
    assert not report.ok, report


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
        _scale(program, next(node for node in program.graph.nodes if node.name == name), factor)
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


def _scale(program: Program, node: fx.Node, factor: float) -> None:
    """Multiply what a sum gives; of one that is started, what its wait gives."""
    value = next(iter(node.users)) if node.target is op("all_reduce_start") else node
    with program.graph.inserting_after(value):
        scaled = program.graph.call_function(torch.ops.aten.mul.Scalar, (value, factor))
    set_record(scaled, record(value))
    value.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
