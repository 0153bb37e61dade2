"""In shorter floats `verify` runs the programs in float64 as well, and so finds what their resolution hides."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpt import GPT, GPTConfig
from models import labels, square_loss, token_loss, tokens, uneven
from processes import Ranks
from test_noise import _copied, drop, scale
from torch import Tensor, nn

import autopar
from autopar.capture import Captured, capture
from autopar.compiler.check_options import options_of
from autopar.compiler.compile import lower
from autopar.compiler.lowered import Lowered
from autopar.ir.mesh import parse_mesh
from autopar.ir.ops.ops import is_collective, op
from autopar.job import Job
from autopar.parallel.module import ParallelModule
from autopar.verification import lifted
from autopar.verification.dtypes import cast, module_in
from autopar.verification.judge.comparison import Report, Table
from autopar.verification.verify import verify_compiled
from autopar.verification.verify_ranks import verify_on_ranks

ROWS = 8


def _gpt() -> tuple[nn.Module, Any, tuple[Tensor, ...]]:
    torch.manual_seed(3)
    model = uneven(GPT(GPTConfig(24, 4, layers=1, heads=2, width=8)))
    return model, token_loss, (tokens(ROWS, 4, 24), labels(ROWS, 4, 24))


def _mlp() -> tuple[nn.Module, Any, tuple[Tensor, ...]]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
    return model, square_loss, (torch.randn(ROWS, 8), torch.randn(ROWS, 4))


def _conv() -> tuple[nn.Module, Any, tuple[Tensor, ...]]:
    torch.manual_seed(3)
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64, 3)), square_loss, (torch.randn(ROWS, 2, 6, 6), torch.randn(ROWS, 3))


FORMS: dict[str, tuple[torch.dtype | None, dict[str, Any]]] = {
    "f32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "fp16": (torch.float16, {}),
    "precision bf16": (None, {"precision": "bf16"}),
}
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp=2": ("dp=2", {}),
    "dp=2,tp=2": ("dp=2,tp=2", {}),
    "zero": ("dp=2", {"zero": 3}),
}
MODELS = {"gpt": _gpt, "mlp": _mlp, "conv": _conv}


@functools.cache
def compiled_case(name: str, form: str, plan: str) -> tuple[nn.Module, Any, tuple[Tensor, ...], Captured, Lowered]:
    model, loss_fn, batch = MODELS[name]()
    dtype, more = FORMS[form]
    mesh, options = PLANS[plan]
    if dtype is not None:
        model, batch = module_in(model, dtype), tuple(cast(x, dtype) for x in batch)
    chosen = options_of(**more, **options)
    captured = capture(model, loss_fn, batch, {}, lift=dtype, precision=chosen.precision)
    return model, loss_fn, batch, captured, lower(captured, parse_mesh(mesh), chosen)


def measured(case: tuple[Any, ...], compiled: Lowered) -> Report:
    model, loss_fn, batch, captured, _ = case
    return verify_compiled(model, captured, compiled, loss_fn=loss_fn, batch=batch, steps=1)


RIGHT = [
    ("gpt", "bf16", "dp=2,tp=2"),
    ("mlp", "fp16", "zero"),
    ("conv", "bf16", "dp=2"),
    ("mlp", "precision bf16", "dp=2"),
]


@pytest.mark.parametrize("name, form, plan", RIGHT)
def test_what_is_right_is_right(name: str, form: str, plan: str) -> None:
    case = compiled_case(name, form, plan)
    report = measured(case, case[-1])
    assert report.ok and report.exact is not None and not report.exact.failed, str(report)
    assert "the same in float64: all equal, max error" in str(report)


# Of the sums those with these numbers: all are too many for a test.
SOME = {("gpt", "bf16", "dp=2,tp=2"): (0, 6), ("conv", "bf16", "dp=2"): (0, 2), ("gpt", "f32", "dp=2,tp=2"): (3, 6)}


@pytest.mark.parametrize("name, form, plan", [*RIGHT, ("gpt", "f32", "dp=2,tp=2")])
def test_what_is_wrong_is_found(name: str, form: str, plan: str) -> None:
    """A sum that is left out, and one of 99 %: the hundredth part is within the resolution of bf16."""
    first, every = SOME.get((name, form, plan), (0, 1))
    case = compiled_case(name, form, plan)
    kinds = (op("all_reduce"), op("all_reduce_start"))
    names = [node.name for node in case[-1].program.calls() if is_collective(node.target) and node.target in kinds]
    assert names or plan == "zero"
    for change in (drop, functools.partial(scale, factor=0.99)):
        for each in names[first::every]:
            program = _copied(case[-1].program)
            change(program, next(node for node in program.graph.nodes if node.name == each))
            report = measured(case, replace(case[-1], history=(*case[-1].history, ("sabotage", program))))
            assert not report.ok, f"{each}: {report}"


def test_what_does_not_run_in_float64_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no kernel. More.")

    monkeypatch.setattr(lifted, "_lifted", fails)
    case = compiled_case("mlp", "bf16", "dp=2")
    report = measured(case, case[-1])
    assert "not compared in float64, where the programs do not run: RuntimeError: no kernel" in str(report)


class Only(nn.Module):
    """Runs in one dtype alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise TypeError("no float64 here")
        return self.layer(x)


def _on_ranks(rank: int, factor: float, is_only: bool) -> tuple[bool | None, str]:
    full_gradients = ParallelModule.full_gradients
    model, loss_fn, batch = (Only(), square_loss, (torch.randn(8, 4), torch.randn(8, 4))) if is_only else _mlp()
    job = Job(model=model, loss_fn=loss_fn, batch=batch, optimizer=lambda p: torch.optim.SGD(p, lr=0.01))
    with pytest.MonkeyPatch.context() as patch:
        changed = lambda self: {name: value * factor for name, value in full_gradients(self).items()}  # noqa: E731
        patch.setattr(ParallelModule, "full_gradients", changed)
        report = verify_on_ranks(job, "dp=2", 1, 0, torch.bfloat16)
    return (None, "") if report is None else (report.ok, str(report))


@pytest.mark.gloo
def test_on_ranks_too(two: Ranks) -> None:
    assert [two.run(_on_ranks, factor, False)[0][0] for factor in (1.0, 0.99)] == [True, False]
    ok, text = two.run(_on_ranks, 1.0, True)[0]
    assert ok and "not compared in float64, where the programs do not run: " in text


class _BeforeNorm(nn.Module):
    """A bias whose gradient is zero on paper, and of a short float nothing but rounding, of 20,000 positions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((self.norm(self.conv(x)) + 3).mean((2, 3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mean_over_many_rows_is_the_same_error_in_all_of_them(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, 3, 56, 56) + 2, torch.randint(0, 5, (6,))
    report = autopar.verify(
        _BeforeNorm(), "dp=2", loss_fn=lambda model, x, y: nn.functional.cross_entropy(model(x).float(), y),
        batch=(x, y), dtype=dtype,
    )  # fmt: skip
    assert report.ok, report


class _Classes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.norm(self.a(x))))


def _predicted(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    logits = model(x)
    return nn.functional.cross_entropy(logits.float(), y), logits.argmax(-1), (logits > 0).sum(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_predictions_that_rounding_turns_are_right(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, y = torch.randn(64, 8), torch.randint(0, 40, (64,))
    report = autopar.verify(_Classes(), "dp=2", loss_fn=_predicted, batch=(x, y), dtype=dtype)
    assert report.ok, report
    turned = [row.error for row in report.rows if row.kind == "aux"]  # the share of those that differ
    assert all(0 < error < 1 for error in turned) or dtype == torch.float16


def test_a_prediction_that_differs_in_float64_is_wrong() -> None:
    table = Table(1e-4)
    table.compare({("aux", "0"): torch.arange(20_000)}, {("aux", "0"): torch.arange(20_000).clamp(max=19_998)}, {})
    (row,) = table.rows()
    assert row.error == 1 / 20_000 and not row.ok
