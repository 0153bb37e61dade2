"""`cuda_graphs`: what a recorded step gives stays right, whatever a user does around it. Without a GPU, by a dry run
that reads and writes the memory of the recording as a CUDA graph does; float64, beside the plain module."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import square_loss
from processes import Ranks
from side_by_side import train_both
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, CompileError
from autopar.runtime.compilers.cuda_graphs import DryGraph, GraphRunner
from autopar.runtime.ranks.recorder import Recorder

DRY: Any = "dry-run"


class Net(nn.Module):
    """With a buffer that a step changes, one that it reads, and a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Linear(12, 4)
        self.register_buffer("shift", torch.linspace(0, 1, 12))
        self.table = torch.linspace(-1, 1, 4)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.norm(self.up(x)) + self.shift)) * self.factor + self.table


def net() -> Net:
    torch.manual_seed(3)
    made = Net().double()
    made.table = made.table.double()
    return made


def batch(rows: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 8).double(), torch.randn(rows, 4).double()


class Pair:
    """A recorded model and the plain one, that take the same steps."""

    def __init__(self, make: Callable[[], nn.Module] = net, loss_fn: Any = square_loss, **options: Any) -> None:
        self.plain, self.loss_fn = make(), loss_fn
        self.model = autopar.parallelize(copy.deepcopy(self.plain), "dp=1", loss_fn=loss_fn, cuda_graphs=DRY, **options)
        self.optimize(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))

    def optimize(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.optimizers = make(self.model.parameters()), make(self.plain.parameters())

    def backward(self, *args: Any) -> tuple[Tensor, Tensor]:
        want = self.loss_fn(self.plain, *args)
        want.backward()
        got = self.model.forward_backward(*args)
        self.compare("gradients")
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
        return got, want.detach()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.compare("weights")

    def zero(self, to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=to_none)

    def compare(self, what: str) -> None:
        got = self.model.full_gradients() if what == "gradients" else self.model.full_state_dict()
        want = (
            {name: p.grad for name, p in self.plain.named_parameters() if p.grad is not None}
            if what == "gradients"
            else self.plain.state_dict()
        )
        assert got.keys() == want.keys()
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-11, atol=1e-13, msg=lambda s, n=name: f"{n}: {s}")

    @property
    def runner(self) -> GraphRunner:
        found = self.model.programs[-1].runner
        assert isinstance(found, GraphRunner)
        return found


def test_steps_are_recorded_once_and_replayed() -> None:
    pair = Pair()
    for i in range(5):
        pair.backward(*batch())
        pair.step()
        pair.zero()
        assert pair.runner.count == min(i, 1)  # the first run is not recorded


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_add_up_over_steps_until_they_are_zeroed(to_none: bool) -> None:
    pair = Pair()
    for _ in range(3):
        for _ in range(3):
            pair.backward(*batch())
        pair.step()
        pair.zero(to_none)
    assert pair.runner.count == 1


def test_what_a_user_keeps_does_not_change() -> None:
    """Losses, what the loss function returns beside, gradients, and outputs of the model, of the steps before."""

    def with_aux(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        out = model(x)
        return (out - y).square().mean(), out

    torch.manual_seed(1)
    model = autopar.parallelize(net(), "dp=1", loss_fn=with_aux, cuda_graphs=DRY)
    kept: list[tuple[Tensor, Tensor]] = []
    for _ in range(4):
        loss, x = model.forward_backward(*batch()), model(batch()[0])
        gradient = next(model.parameters()).grad
        values = [loss.detach(), x.detach(), model.last_aux, gradient.to_local()]  # type: ignore[union-attr]
        kept += [(value, value.clone()) for value in values]
        model.zero_grad()
    for now, then in kept:
        torch.testing.assert_close(now, then, rtol=0, atol=0)


def test_another_optimizer_another_batch_size_and_forward_passes_between() -> None:
    pair = Pair()
    for i, rows in enumerate((6, 6, 9, 6, 9, 9, 6)):
        if i == 3:
            pair.optimize(lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3))
        pair.backward(*batch(rows))
        pair.step()
        pair.zero()
        x = batch(4)[0]
        with torch.inference_mode() if i % 2 else torch.no_grad():
            got, want = pair.model.eval()(x), pair.plain.eval()(x)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
        pair.model.train(), pair.plain.train()
    runners = [running.runner for running in pair.model.programs]
    assert [runner.count for runner in runners if isinstance(runner, GraphRunner)] == [1, 1, 1]


def test_a_checkpoint_is_loaded_between_steps() -> None:
    pair = Pair()
    saved = copy.deepcopy(pair.plain.state_dict())
    for _ in range(3):
        pair.backward(*batch())
        pair.step()
        pair.zero()
    pair.plain.load_state_dict(saved)
    pair.model.load_state_dict(saved)
    pair.compare("weights")
    for _ in range(2):
        pair.backward(*batch())
        pair.step()
        pair.zero()
    assert pair.runner.count == 1


def test_what_a_model_reads_beside_the_batch_may_change() -> None:
    """A tensor of its own is written, another put in its place, and a Python number set."""
    pair = Pair()
    for i in range(8):
        for model in (pair.model.original, pair.plain):
            if i == 2:
                model.table.mul_(3.0)
            if i == 4:
                model.table = model.table + 1.0
            if i >= 5:
                model.factor = 1.0 / i
        pair.backward(*batch())
        pair.step()
        pair.zero()


def test_tensors_that_another_took_the_place_of_are_recorded_again(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair()
    for i in range(6):
        if i == 3:
            pair.model.norm.running_mean = torch.full((12,), 0.5).double()
            pair.model.shift.data = pair.model.shift * 2.0  # type: ignore[union-attr]
            pair.plain.norm.running_mean.fill_(0.5)
            pair.plain.shift.mul_(2.0)
        with caplog.at_level(logging.WARNING, "autopar"):
            pair.backward(*batch())
        pair.step()
        pair.zero()
    assert pair.runner.count == 2
    (said,) = [record.message for record in caplog.records if "cuda_graphs" in record.message]
    assert said.startswith("cuda_graphs: 2 tensors are no longer where the program on mesh dp=1 (")
    assert "(first 'norm.running_mean'): recorded again, and copied from now on. Write into a tensor" in said


def test_random_ops_draw_anew_at_each_step() -> None:
    make = lambda: nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 4)).double()  # noqa: E731
    torch.manual_seed(5)
    plain = make()
    ours = [autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=square_loss, cuda_graphs=g) for g in (False, DRY)]
    x, y = batch()
    losses = [[model.forward_backward(x, y).item() for model in ours] for _ in range(4)]
    assert all(a == b for a, b in losses) and len({a for a, _ in losses}) == 4
    assert ours[1].programs[-1].runner.count == 1  # type: ignore[attr-defined]


def test_a_scaled_loss() -> None:
    """fp16 asks for overflows outside of the recording, and halves the scale that it reads."""
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    ours = [
        autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=square_loss, precision="fp16", cuda_graphs=g)
        for g in (False, DRY)
    ]
    for i in range(5):
        x, y = torch.randn(6, 8), torch.randn(6, 4)
        for model in ours:
            assert model.loss_scale is not None
            model.loss_scale.scale = 2.0 ** (40 if i == 2 else 4 + i)
            model.zero_grad()
        assert len({model.forward_backward(x, y).item() for model in ours}) == 1
        skipped = {model.loss_scale.skipped for model in ours}  # type: ignore[union-attr]
        assert skipped == {int(i >= 2)}
        for a, b in zip(*(model.full_gradients().values() for model in ours), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert ours[1].programs[-1].runner.count == 1  # type: ignore[attr-defined]


def _two(rank: int, name: str, mesh: str, options: dict[str, Any]) -> list[int]:
    model = train_both(name, mesh, cuda_graphs=DRY, **options)
    return [each.runner.count for each in model.programs if isinstance(each.runner, GraphRunner)]


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("short_gpt", "tp=2", {}),
        ("short_gpt", "dp=2", {"zero": 3, "accumulate": 2}),
        ("conv", "dp=2", {"zero": 2, "clip": None}),
    ],
)
def test_two_ranks(two: Ranks, name: str, mesh: str, options: dict[str, Any]) -> None:
    for counts in two.run(_two, name, mesh, options, timeout=240):
        assert 1 in counts and max(counts) == 1, counts


def _padded(rank: int) -> list[tuple[float, int]]:
    """Seven rows on two ranks: one of them pads its part anew at each step."""
    torch.manual_seed(2)
    made, found = nn.Linear(5, 7).double(), []
    ours = [autopar.parallelize(copy.deepcopy(made), "dp=2", loss_fn=square_loss, zero=3, cuda_graphs=DRY)]
    ours += [autopar.parallelize(copy.deepcopy(made), "dp=2", loss_fn=square_loss, zero=3)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in ours]
    for step in range(4):
        torch.manual_seed(step)
        x, y = torch.randn(6, 5).double(), torch.randn(6, 7).double()
        losses = []
        for model, optimizer in zip(ours, optimizers, strict=True):
            losses.append(model.forward_backward(x, y).item())
            optimizer.step()
            optimizer.zero_grad()
        found.append((losses[0] - losses[1], ours[0].programs[-1].runner.count))  # type: ignore[attr-defined]
    return found


@pytest.mark.gloo
def test_padded_parameters(two: Ranks) -> None:
    assert two.run(_padded, timeout=120) == [[(0.0, 0), (0.0, 1), (0.0, 1), (0.0, 1)]] * 2


# -- what cannot be recorded ----------------------------------------------------------------------------------------


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (2.0 if x[0, 0].item() > 0 else 1.0)


def _ctc(model: nn.Module, x: Tensor) -> Tensor:
    lengths = torch.full((2,), 5), torch.full((2,), 2)
    return F.ctc_loss(model(x).log_softmax(-1), torch.ones(2, 2, dtype=torch.int64), *lengths)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "cpu": (
        lambda: autopar.parallelize(net(), "dp=1", loss_fn=square_loss, cuda_graphs=True, device="cpu"),
        "cuda_graphs=True records what a GPU does, and this rank computes on 'cpu'. Leave it out here, or write "
        '"dry-run" to check that the step could be recorded.',
    ),
    "name": (
        lambda: autopar.parallelize(net(), "dp=1", loss_fn=square_loss, cuda_graphs="yes"),  # type: ignore[arg-type]
        "cuda_graphs='yes': write True, False or \"dry-run\".",
    ),
    "pipeline": (
        lambda: Pair(lambda: nn.Linear(8, 4).double(), microbatches=2).model.prepare(*batch()),
        "cuda_graphs records steps of one graph; this one is a pipeline (mesh dp=1, 2 micro-batches), whose messages "
        "are events of the host. Leave cuda_graphs out, or pp and microbatches.",
    ),
    "specialize": (
        lambda: Pair(lambda: Reads().double(), specialize=True).backward(*batch()),
        "cuda_graphs keeps the host from waiting for the GPU, and specialize=True lets it read values of the batch at "
        "every step: leave out one of the two.",
    ),
    "lengths": (
        lambda: Pair(lambda: nn.Linear(8, 4).double(), _ctc).model.prepare(torch.randn(5, 2, 8).double()),
        "cuda_graphs cannot record %ctc_loss = autopar.ctc_loss",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_recorded_is_refused(name: str) -> None:
    make, said = REFUSED[name]
    with pytest.raises(CompileError) as error:
        make()
    assert str(error.value).startswith(said), str(error.value)


def test_a_trace_is_refused() -> None:
    pair = Pair()
    pair.backward(*batch())
    with pytest.raises(CompileError, match="a trace watches a step op by op, and with cuda_graphs it is"):
        pair.model.record(Recorder())
    pair.model.record(None)


def test_an_op_that_cannot_be_recorded_is_named() -> None:
    class Stopped(DryGraph):
        def capture(self, run: Any, inputs: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    pair = Pair()
    pair.backward(*batch())
    pair.runner.make = Stopped
    with pytest.raises(CompileError) as error:
        pair.model.forward_backward(*batch())
    assert str(error.value).startswith("cuda_graphs=True cannot record the program on mesh dp=1 (")
    assert "operation not permitted when stream is capturing\n  Something in it asks the GPU" in str(error.value)


def test_the_dry_run_sees_memory_that_moved() -> None:
    """What no runner may let happen: the recording's own tensor has other memory."""
    x = torch.ones(3)
    graph = DryGraph()
    (out,) = graph.capture(lambda: (x * 2,), [x])
    x.fill_(2.0)
    graph.replay()
    assert out.tolist() == [4.0, 4.0, 4.0]
    x.set_(torch.ones(3))  # type: ignore[call-overload]
    with pytest.raises(AutoparError, match=r"cuda_graphs: input 0 of a recorded step lies at .* was recorded at"):
        graph.replay()
