"""What torch refuses is refused by a capture too, also where another form runs in the place of torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rule_brute_force import tensors_in, with_tensors
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.errors import AutoparError, CaptureError, CompileError

LABELS = torch.tensor([0, 1, 2, 3])
TAKEN = {  # with other arguments than torch takes, before
    "weights of other classes": lambda h: F.cross_entropy(h, LABELS, weight=torch.ones(5)),
    "weights of other classes, picked": lambda h: F.nll_loss(h, LABELS, weight=torch.ones(5)),
    "smoothing": lambda h: F.cross_entropy(h, LABELS, label_smoothing=2.0),
    "beta": lambda h: F.smooth_l1_loss(h, h * 2, beta=-1.0),
    "beta by its place": lambda h: F.smooth_l1_loss(h, h * 2, None, None, "mean", -1.0),
    "dropout": lambda h: F.dropout(h, 1.5),
    "dropout1d": lambda h: F.dropout1d(h, -0.5),
    "alpha dropout": lambda h: F.alpha_dropout(h, 1.5, training=True),
    "rrelu": lambda h: F.rrelu(h, 0.3, 0.1, training=True),
    "a mean of integers": lambda h: h + LABELS.mean(),
    "a bias of another dtype": lambda h: F.conv1d(h[None], torch.ones(3, 4, 3), torch.ones(3, dtype=torch.float64)),
}
SAID = {  # in words of ours, or of what runs in the place of torch's own, before
    "no labels": lambda h: F.cross_entropy(h, None),  # type: ignore[arg-type]
    "fewer labels": lambda h: F.cross_entropy(h, LABELS[:3]),
    "no labels, picked": lambda h: F.nll_loss(h, None),  # type: ignore[arg-type]
    "fewer labels, picked": lambda h: F.nll_loss(h, LABELS[:3]),
    "no indices": lambda h: F.embedding(None, h),  # type: ignore[arg-type]
}


class Wrong(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.call = nn.Linear(8, 6), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.linear(x)).sum()


@pytest.mark.parametrize("case", [*TAKEN, *SAID])
def test_a_wrong_call_is_refused_as_by_torch(case: str) -> None:
    model, x = Wrong({**TAKEN, **SAID}[case]), torch.randn(4, 8)
    with pytest.raises(Exception) as plain:  # whatever torch raises
        model(x)
    with pytest.raises(CaptureError) as ours:
        autopar.compile(model, "dp=2", batch=x)
    assert __file__ in str(ours.value), "the line is named"
    if case in SAID:
        assert f"{type(plain.value).__name__}: {str(plain.value).splitlines()[0].rstrip()}" in str(ours.value)


# Of torch's own samples of wrong calls those that its functions of shapes take too. A step that computes them fails.
BY_KERNELS = {
    "complex", "gradient", "masked_scatter", "as_strided_scatter", "gather", "index_add", "scatter", "scatter_add",
    "bucketize",
}  # fmt: skip


class Sample(nn.Module):
    def __init__(self, info: Any, sample: Any) -> None:
        super().__init__()
        self.info, self.sample, self.factor = info, sample, nn.Parameter(torch.ones(()))

    def forward(self, *values: Tensor) -> Tensor:
        given = [self.sample.input, list(self.sample.args), dict(self.sample.kwargs)]
        one, args, kwargs = with_tensors(given, list(values))
        found = tensors_in([self.info(one, *args, **kwargs)])
        return self.factor * sum((t.real if t.is_complex() else t).float().sum() for t in found)


@pytest.mark.slow
def test_the_wrong_calls_of_torchs_own_database_are_refused() -> None:
    module: Any = pytest.importorskip("torch.testing._internal.common_methods_invocations")  # it sets flags of torch
    tried, taken = 0, set[str]()
    for info in module.op_db:
        for error in list(info.error_inputs("cpu"))[:40] if info.error_inputs_func is not None else ():
            sample = error.sample_input
            values = tensors_in([sample.input, list(sample.args), dict(sample.kwargs)])
            model = Sample(info.op, sample)
            if "out" in sample.kwargs or not _fails(lambda model=model, values=values: model(*values), Exception):
                continue
            tried += 1
            ran = not _fails(
                lambda model=model, values=values: autopar.compile(model, "dp=1", batch=tuple(values)), AutoparError
            )
            taken |= {info.name} if ran else set()
    assert taken <= BY_KERNELS and tried > 400, sorted(taken - BY_KERNELS)


def _fails(call: Callable[[], object], kind: type[Exception]) -> bool:
    try:
        call()
    except kind:
        return True
    return False


FACTORISED: dict[str, Callable[[Tensor], Tensor]] = {
    "cholesky": torch.linalg.cholesky,
    "inv": torch.linalg.inv,
    "solve": lambda a: torch.linalg.solve(a, torch.eye(3)[:, :2]),
    "lu_factor": lambda a: torch.linalg.lu_factor(a)[0],
    "matrix_power": lambda a: torch.linalg.matrix_power(a, -2),
}


@pytest.mark.parametrize("name", FACTORISED)
def test_a_matrix_without_a_factorisation_ends_the_step(name: str) -> None:
    """Silent before: the look at what a factorisation says of itself has no result, and was left out of the program."""
    factor, good = Factor(FACTORISED[name]), torch.eye(3) * torch.arange(1.0, 5.0)[:, None, None]
    ours = autopar.parallelize(Factor(FACTORISED[name]), "dp=1")
    assert torch.equal(ours.forward_backward(good), factor(good))
    with pytest.raises(RuntimeError, match=r"\(Batch element 0\)"):
        factor(good * 0)
    ours.zero_grad()
    with pytest.raises(RuntimeError, match=r"\(Batch element 0\)"):
        ours.forward_backward(good * 0)
    assert all(p.grad is None for p in ours.parameters())


def test_a_look_of_the_host_is_not_recorded() -> None:
    ours = autopar.parallelize(Factor(torch.linalg.inv), "dp=1", cuda_graphs="dry-run")
    with pytest.raises(CompileError, match=r"cuda_graphs cannot record(.|\n)*inv_ex(.|\n)*Leave cuda_graphs out"):
        ours.forward_backward(torch.eye(3).expand(2, 3, 3))


class Factor(nn.Module):
    def __init__(self, factorise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale, self.factorise = nn.Parameter(torch.tensor(1.5)), factorise

    def forward(self, x: Tensor) -> Tensor:
        return self.factorise(self.scale * x).square().sum()
