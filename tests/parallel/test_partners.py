"""Other models in a loss: two parallel ones, a plain teacher, a criterion that learns, an average of weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import Ranks
from side_by_side import assert_close, assert_same_gradients, assert_same_state
from torch import Tensor, nn

import autopar
from autopar.capture.capture import capture
from autopar.errors import AutoparError, CaptureError, MeshError
from autopar.ir.mesh import Mesh
from autopar.ir.options import StepOptions
from autopar.parallel.weights.owners import check_partners

TOLERANCE = 1e-9


class Net(nn.Module):
    """Two layers with a BatchNorm, which writes buffers."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(inside, 16), nn.BatchNorm1d(16), nn.Linear(16, outside)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.norm(self.up(x))))


class Gan:
    """A GAN as it is written for one device; `parallel` makes the models and takes a step's gradients."""

    def __init__(self, mesh: str | None, options: dict[str, Any], freezes: bool) -> None:
        torch.manual_seed(0)
        g, d = Net(4, 6).double(), Net(6, 1).double()
        self.freezes, self.is_parallel = freezes, mesh is not None
        self.g: Any = autopar.parallelize(g, mesh, loss_fn=self.loss_g, **options) if mesh else g
        self.d: Any = autopar.parallelize(d, mesh, loss_fn=self.loss_d, **options) if mesh else d
        self.adams = [torch.optim.Adam(m.parameters(), lr=1e-2, eps=1e-3) for m in (self.g, self.d)]

    def loss_g(self, g: nn.Module, z: Tensor) -> Tensor:
        return F.softplus(-self.d(g(z))).mean()

    def loss_d(self, d: nn.Module, x: Tensor, z: Tensor) -> Any:
        fake = self.g(z).detach()
        real, forged = d(x), d(fake)
        return F.softplus(-real).mean() + F.softplus(forged).mean(), (real > 0).double().mean()

    def step(self, x: Tensor, z: Tensor) -> Iterator[Tensor]:
        """Both models' turns; yields where gradients are to be compared."""
        turns = [(self.d, self.adams[1], (x, z)), (self.g, self.adams[0], (z,))]
        for model, adam, batch in reversed(turns) if self.freezes else turns:
            adam.zero_grad()
            if self.freezes:
                self.d.requires_grad_(model is self.d)
            if self.is_parallel:
                loss = model.forward_backward(*batch)
            else:
                result = self.loss_d(model, *batch) if model is self.d else self.loss_g(model, *batch)
                loss = result[0] if isinstance(result, tuple) else result
                loss.backward()
            yield loss.detach()
            adam.step()


def _gan(rank: int, mesh: str, options: dict[str, Any], freezes: bool) -> None:
    ours, plain = Gan(mesh, options, freezes), Gan(None, {}, freezes)
    for step in range(2):
        torch.manual_seed(step)
        x, z = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
        for turn, (got, want) in enumerate(zip(ours.step(x, z), plain.step(x, z), strict=True)):
            torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=0)
            for name, a, b in (("G", ours.g, plain.g), ("D", ours.d, plain.d)):
                assert_same_gradients(a, b, f"step {step} turn {turn} {name}.grad", TOLERANCE)
                assert_same_state(a, b, f"step {step} turn {turn} {name}", TOLERANCE)


GANS: list[tuple[str, dict[str, Any], bool]] = [
    ("dp=2,tp=2", {}, False),
    ("dp=2,tp=2", {"zero": 1}, True),
    ("dp=4", {"zero": 3}, False),
]


@pytest.mark.gloo
@pytest.mark.parametrize(("mesh", "options", "freezes"), GANS, ids=str)
def test_a_gan_trains_as_on_one_device(four: Ranks, mesh: str, options: dict[str, Any], freezes: bool) -> None:
    four.run(_gan, mesh, options, freezes, timeout=200)


class Head(nn.Module):
    """A criterion with weights of its own; also a frozen table that it reads without a call."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.shift = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((x * self.scale + self.shift - y) ** 2).mean() - self.scale.log().sum()


class Distillation:
    """A student with a frozen teacher, an average of its own weights, and a criterion that learns."""

    def __init__(self, mesh: str | None, options: dict[str, Any], seed: int = 0) -> None:
        torch.manual_seed(seed)
        student, self.is_frozen = Net(4, 3).double(), "microbatches" in options
        self.teacher, self.head, self.mean = (
            Net(4, 3).double().requires_grad_(False),
            Head().double(),
            Net(4, 3).double(),
        )
        if self.is_frozen:  # BatchNorm of the whole batch has no micro-batches, a criterion that learns no stage
            student.eval()
            self.mean.eval()
            self.head.requires_grad_(False)
        self.is_parallel = mesh is not None
        self.student: Any = autopar.parallelize(student, mesh, loss_fn=self.loss, **options) if mesh else student
        self.adams = [
            torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3)
            for m in (self.student, self.head)[: 2 - self.is_frozen]
        ]

    def loss(self, student: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        weighted = nn.CrossEntropyLoss(weight=torch.arange(1.0, 4.0, dtype=x.dtype))  # made at each call
        with torch.no_grad():
            wanted, slow = self.teacher(x), self.mean(x)
        out = student(x)
        return F.mse_loss(out, wanted) + 0.5 * F.mse_loss(out, slow) + self.head(out, wanted) + weighted(out, y)

    def step(self, step: int, x: Tensor, y: Tensor) -> Tensor:
        # Its BatchNorm takes its statistics from the batch at first, then keeps them.
        self.teacher.train(step < 1 and not self.is_frozen)
        for adam in self.adams:
            adam.zero_grad()
        if self.is_parallel:
            loss = self.student.forward_backward(x, y)
        else:
            loss = self.loss(self.student, x, y)
            loss.backward()
        return loss.detach()

    def update(self) -> None:
        for adam in self.adams:
            adam.step()
        with torch.no_grad():
            for slow in self.mean.parameters():
                slow.mul_(0.9).add_(0.01)


def _distil(rank: int, mesh: str, options: dict[str, Any]) -> None:
    ours, plain = Distillation(mesh, options, seed=rank), Distillation(None, options)  # rank 0's weights count
    for step in range(3):
        torch.manual_seed(step)
        batch = torch.randn(8, 4, dtype=torch.float64), torch.randint(0, 3, (8,))
        got, want = ours.step(step, *batch), plain.step(step, *batch)
        torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=0)
        assert_same_gradients(ours.student, plain.student, f"step {step} gradient", TOLERANCE)
        grads = [{n: p.grad for n, p in each.head.named_parameters() if p.grad is not None} for each in (ours, plain)]
        assert grads[1].keys() == (set() if plain.is_frozen else {"scale"})
        assert_close(*grads, f"step {step} gradient of the criterion", TOLERANCE)
        for each in (ours, plain):
            each.update()
        assert_same_state(ours.student, plain.student, f"step {step} weight", TOLERANCE)
        for name in ("teacher", "head", "mean"):
            pair = [getattr(each, name).state_dict() for each in (ours, plain)]
            assert_close(*pair, f"step {step} {name}", TOLERANCE)
        assert all(p.grad is None for p in (*ours.teacher.parameters(), *ours.mean.parameters()))


@pytest.mark.gloo
@pytest.mark.parametrize(("mesh", "options"), [("dp=2,tp=2", {"zero": 3}), ("pp=2,dp=2", {"microbatches": 2})], ids=str)
def test_plain_models_in_a_loss(four: Ranks, mesh: str, options: dict[str, Any]) -> None:
    four.run(_distil, mesh, options, timeout=200)


def _models() -> tuple[nn.Module, Head, nn.Module]:
    torch.manual_seed(0)
    return Net(4, 3).requires_grad_(False), Head(), Net(4, 3)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [("dp=2,tp=2", {"zero": 3}), ("dp=2", {"precision": "bf16"}), ("dp=2", {"microbatches": 2, "zero": 2})],
    ids=str,
)
def test_verify_compares_them_and_leaves_them_alone(mesh: str, options: dict[str, Any]) -> None:
    teacher, head, student = _models()
    if "microbatches" in options:  # whose BatchNorm needs the whole batch
        teacher, student = teacher.eval(), student.eval()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return head(model(x), teacher(x).detach())

    before = {name: value.clone() for name, value in (*teacher.state_dict().items(), *head.state_dict().items())}
    report = autopar.verify(student, mesh, loss_fn=loss, batch=torch.randn(8, 4), **options)
    assert report.ok, report
    names = {(row.kind, row.name) for row in report.rows}
    assert {("gradient", "@head.scale"), ("buffer", "@teacher.norm.running_mean")} <= names
    assert ("gradient", "@head.shift") not in names
    after = {**teacher.state_dict(), **head.state_dict()}
    assert all(torch.equal(after[name], value) for name, value in before.items()) and head.scale.grad is None


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"zero": 1}, "the loss of Net calls the parallel model 'd' with zero=0, but has zero=1 itself"),
    ({"mesh": "tp=1"}, "parallel model 'd' on mesh 'dp=1', but it is on 'tp=1' itself. Give both the same mesh"),
    ({"part": True}, "a part of another parallel model (Linear), called by itself"),
    ({"made": True}, "a module (Head) with parameters that is made in the loss function"),
    ({"backward": True}, "forward_backward of Net is called in the loss function of another model"),
]


@pytest.mark.parametrize(("case", "message"), REFUSED)
def test_what_has_no_meaning_is_refused(case: dict[str, Any], message: str) -> None:
    options = {"zero": case["zero"]} if "zero" in case else {}
    d = autopar.parallelize(Net(3, 1), "dp=1", loss_fn=lambda m, x: m(x).sum())

    def loss(g: nn.Module, x: Tensor) -> Tensor:
        out = g(x)
        if "part" in case:
            return d.up(out).mean()
        if "made" in case:
            return Head()(out, out)
        return d.forward_backward(out) if "backward" in case else d(out).mean()

    g = autopar.parallelize(Net(4, 3), case.get("mesh", "dp=1"), loss_fn=loss, **options)
    with pytest.raises(AutoparError, match=re.escape(message)):
        g.forward_backward(torch.randn(4, 4))


def test_stages_have_no_place_for_what_a_loss_trains() -> None:
    """And `verify` none for a parallel model, whose weights lie on ranks."""
    _, head, student = _models()
    captured = capture(student, lambda m, x: head(m(x), x[:, :3]), (torch.randn(8, 4),), {})
    with pytest.raises(MeshError, match=r"calls the model 'head', which the step trains.*head.requires_grad_\(False\)"):
        check_partners(captured, student, Mesh((("pp", 2),)), StepOptions())
    d = autopar.parallelize(Net(3, 1), "dp=1", loss_fn=lambda m, x: m(x).sum())
    captured = capture(student, lambda m, x: d(m(x)).mean(), (torch.randn(8, 4),), {})
    with pytest.raises(MeshError, match=r"calls the parallel model 'd'.*Use a mesh without pp\."):
        check_partners(captured, student, Mesh((("pp", 2),)), StepOptions())
    with pytest.raises(CaptureError, match="give verify a loss function of plain modules"):
        autopar.verify(student, "dp=2", loss_fn=lambda m, x: d(m(x)).mean(), batch=torch.randn(8, 4))


def of_a_new_class(holds: str) -> Callable[[nn.Module, Tensor], Tensor]:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        class Shift(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                if holds == "buffer":
                    self.register_buffer("by", torch.ones(4, dtype=torch.float64))
                else:
                    self.by = nn.Parameter(torch.ones(4, dtype=torch.float64))

            def forward(self, y: Tensor) -> Tensor:
                return y + self.by

        shifted: Tensor = Shift()(model(x))
        return shifted.square().mean()

    return loss


def test_a_module_of_a_class_that_each_step_makes() -> None:
    """Red before: each trace met another one, without an end."""
    net, x = nn.Linear(4, 4).double(), torch.ones(4, 4, dtype=torch.float64)
    report = autopar.verify(net, "dp=2", loss_fn=of_a_new_class("buffer"), batch=x)
    assert report.ok, str(report)
    with pytest.raises(CaptureError, match=r"a module \(Shift\) with parameters that is made in the loss function"):
        autopar.verify(net, "dp=2", loss_fn=of_a_new_class("parameter"), batch=x)


@pytest.mark.parametrize("is_known", [False, True], ids=["first", "later"])
def test_a_parallel_partner_that_was_changed_is_refused_by_name(is_known: bool) -> None:
    """Red where a program looked for a weight that is there no more: a KeyError from inside."""
    d = autopar.parallelize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "dp=1")
    g = autopar.parallelize(nn.Linear(4, 4), "dp=1", loss_fn=lambda g, x: d(g(x)).square().mean())
    if is_known:
        g.forward_backward(torch.ones(2, 4))
    nn.utils.parametrizations.weight_norm(d[0])
    with pytest.raises(AutoparError, match=r"^in 'd', which the loss calls, '0\.parametrizations' was added after"):
        g.forward_backward(torch.ones(2, 4))
