"""`training_loss`, a loss whose `backward()` a loop calls itself, and `autopar.save_file`, its checkpoint."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Ranks
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, CaptureError

pytestmark = pytest.mark.gloo


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
    ).double()


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) * torch.linspace(-1, 1, 4, dtype=x.dtype)).square().mean()


def _batch(at: int) -> Tensor:
    return torch.randn(8 - 2 * (at % 2), 6, generator=torch.Generator().manual_seed(at), dtype=torch.float64)


def _of(model: Any, x: Tensor) -> Tensor:
    return model.training_loss(x) if isinstance(model, autopar.ParallelModule) else _loss(model, x)


def _accumulated(model: Any, optimizer: Any, scaler: Any, at: int) -> Tensor:
    for i in range(2):
        loss = _of(model, _batch(at + i)) / 2
        loss.backward()
    return loss


def _zeroed_between(model: Any, optimizer: Any, scaler: Any, at: int) -> Tensor:
    loss = _of(model, _batch(at))
    optimizer.zero_grad()
    loss.backward()
    return loss


def _sum_of_losses(model: Any, optimizer: Any, scaler: Any, at: int) -> Tensor:
    loss = 3 * _of(model, _batch(at)) - _of(model, _batch(at + 1)) ** 2
    loss.backward()
    return loss


def _left_out(model: Any, optimizer: Any, scaler: Any, at: int) -> Tensor:
    dropped, loss = _of(model, _batch(at)), _of(model, _batch(at + 1))
    del dropped
    loss.backward()
    return loss


def _scaled(model: Any, optimizer: Any, scaler: Any, at: int) -> Tensor:
    loss = _of(model, _batch(at))
    scaler.scale(loss).backward()
    return loss


def _penalised(model: Any, optimizer: Any, scaler: Any, at: int) -> Tensor:
    """With a term of the parameters beside it, and as its factor."""
    loss = _of(model, _batch(at))
    (loss + 0.1 * sum(parameter.abs().sum() for parameter in model.parameters())).backward()
    (_of(model, _batch(at + 1)) * next(model.parameters()).norm()).backward()
    return loss


def _asked_for(model: Any, optimizer: Any, scaler: Any, at: int) -> Tensor:
    """Some or all gradients by themselves, as of tasks that are weighed against each other; with a term in front."""
    parameters = list(model.parameters())
    for i in range(2):
        loss = _of(model, _batch(at + i)) + 0.1 * parameters[0].square().sum()
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient if i == 0 else parameter.grad + 0.5 * gradient
    _of(model, _batch(at)).backward(inputs=parameters[:3])
    (gradient,) = torch.autograd.grad(2 * _of(model, _batch(at + 1)), [parameters[3]], allow_unused=True)
    parameters[3].grad.add_(gradient)
    return loss


LOOPS = {
    loop.__name__: loop
    for loop in (_accumulated, _zeroed_between, _sum_of_losses, _left_out, _scaled, _penalised, _asked_for)
}
OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dp=2", {}), ("tp=2", {}), ("pp=2", {}), ("dp=2", {"zero": 3}), ("dp=2", {"zero": 2, "microbatches": 2}),
)  # fmt: skip


def _train(model: Any, name: str) -> tuple[list[float], list[float], dict[str, Any]]:
    """Losses, norms of gradients, and what a checkpoint of model and optimizer holds."""
    seen: list[float] = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    first = next(model.parameters())
    first.register_hook(lambda gradient: seen.append(gradient.norm().item()))
    first.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.norm().item()))
    losses = []
    for at in range(2):
        losses.append(LOOPS[name](model, optimizer, scaler, at).item())
        scaler.unscale_(optimizer)
        seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return losses, seen, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


def _beside_plain(rank: int, folder: str) -> None:
    for mesh, options in OPTIONS:
        for name in LOOPS:
            model = autopar.parallelize(_net(), mesh, loss_fn=_loss, **options)
            wanted, found = _train(_net(), name), _train(model, name)
            torch.testing.assert_close(found[:2], wanted[:2], rtol=1e-9, atol=0)
            file = Path(folder) / f"{name}.pt"
            autopar.save_file(found[2], file)
            saved = torch.load(file)  # plain tensors alone: torch reads them without permission
            torch.testing.assert_close(saved, wanted[2], rtol=1e-6, atol=1e-9)


def test_a_loop_that_calls_backward_is_that_of_one_device(two: Ranks, tmp_path: Path) -> None:
    two.run(_beside_plain, str(tmp_path))


def _goes_on(rank: int, folder: str) -> None:
    """A checkpoint of a pipeline is loaded by the plain model and its optimizer, and by another mesh."""
    file = Path(folder) / "checkpoint.pt"
    autopar.save_file(_train(autopar.parallelize(_net(), "pp=2", loss_fn=_loss), "_scaled")[2], file)
    losses = []
    for model in (_net(), autopar.parallelize(_net(), "dp=2", loss_fn=_loss)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
        state = torch.load(file)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        for at in range(2):
            losses.append(_scaled(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), at).item())
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(losses[2:], losses[:2], rtol=1e-9, atol=0)


def test_a_checkpoint_goes_on_anywhere(two: Ranks, tmp_path: Path) -> None:
    two.run(_goes_on, str(tmp_path))


def _said(rank: int, folder: str) -> dict[str, str]:
    model = autopar.parallelize(_net(), "dp=2", loss_fn=_loss)
    again = model.training_loss(_batch(0))
    again.backward(retain_graph=True)
    inside = autopar.parallelize(_net(), "dp=2", loss_fn=lambda m, x: _loss(m, x) + model.training_loss(x))
    tries = {
        "twice": again.backward,
        "off": torch.no_grad()(lambda: model.forward_backward(_batch(0))),
        "inside": lambda: inside.prepare(_batch(0)),
        "file": lambda: autopar.save_file(model.state_dict(), Path(folder) / "none" / "x.pt"),
    }
    found = {}
    for name, attempt in tries.items():
        with pytest.raises((AutoparError, CaptureError)) as caught:
            attempt()
        found[name] = str(caught.value)
    found["dropped"] = "; ".join(_heard(model))
    return found


def _update_and_drop(parameter: Tensor) -> None:
    parameter.data.sub_(parameter.grad, alpha=0.1)
    parameter.grad = None


def _heard(model: Any) -> list[str]:
    """What is logged where gradients go unused, and where they do not."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: heard.append(entry.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("autopar.parallel.agree.agreement")
    logger.addHandler(handler)
    fused = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)  # whose steps leave the versions of tensors
    for optimizer in (fused, fused, torch.optim.SGD(model.parameters(), lr=0.1)):  # right: used, then dropped
        model.forward_backward(_batch(0))
        optimizer.step()
        optimizer.zero_grad()
    handles = [p.register_post_accumulate_grad_hook(_update_and_drop) for p in model.parameters()]
    for _ in range(2):  # right: an update in the backward pass
        model.forward_backward(_batch(0))
    for handle in handles:
        handle.remove()
    for _ in range(2):  # right: gradients of several losses that a loop puts together itself
        model.training_loss(_batch(0)).backward()
        optimizer.zero_grad()
    assert not heard
    for _ in range(3):  # wrong, told once
        model.forward_backward(_batch(0))
        optimizer.zero_grad()
        optimizer.step()
    logger.removeHandler(handler)
    return heard


def test_what_is_said(two: Ranks, tmp_path: Path) -> None:
    for said in two.run(_said, str(tmp_path)):
        assert said["twice"] == (
            "backward() of what training_loss() returned, for the second time: its gradients were added to .grad by "
            "the first."
        )
        assert said["off"].startswith("forward_backward() computes gradients, but was called under torch.no_grad()")
        assert "training_loss of Sequential is called in the loss function of another model" in said["inside"]
        assert said["file"].startswith(
            f"autopar.save_file: rank 0 could not write {tmp_path}/none/x.pt: RuntimeError: Parent"
        )
        assert said["dropped"] == (
            "all gradients of the last step were set to None before anything changed the weights. If zero_grad() "
            "stands between forward_backward() and optimizer.step(), no weight is ever trained: forward_backward() is "
            "the backward pass as well. Call zero_grad() before it, or write `loss = model.training_loss(*batch)`, "
            "whose backward() you call."
        )


class _TwoParts(nn.Module):
    """As an encoder-decoder model: `generate` calls the encoder once, and the model with its states."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, states: dict[str, Tensor] | None = None) -> Tensor:
        hidden = self.encoder(x).tanh() if states is None else states["hidden"]
        return self.decoder(hidden) + x  # type: ignore[no-any-return]

    def generate(self, x: Tensor) -> Tensor:
        states = {"hidden": self.encoder(x).tanh()}
        for _ in range(2):
            x = self(x, states=states)
        return x


def _generated(rank: int) -> None:
    for mesh in ("dp=2", "tp=2", "pp=2"):
        plain, model = _TwoParts().double(), autopar.parallelize(_TwoParts().double(), mesh, loss_fn=_loss_of_two)
        model.forward_backward(_batch(0))
        torch.testing.assert_close(model.generate(_batch(0)), plain.generate(_batch(0)).detach(), rtol=1e-9, atol=1e-9)


def _loss_of_two(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def test_what_a_method_computed_goes_in_whole(two: Ranks) -> None:
    two.run(_generated)


# -- several losses in one backward pass ------------------------------------------------------------------------------


def _hooked(model: Any) -> list[list[float]]:
    """What hooks of the first weight are given from now on."""
    given: list[list[float]] = []
    first = next(model.parameters())
    first.register_hook(lambda gradient: given.append(["before", gradient.norm().item()]))
    first.register_post_accumulate_grad_hook(lambda p: given.append(["behind", p.grad.norm().item()]))
    return given


def test_hooks_run_once_for_all_losses_of_a_backward_pass() -> None:
    """And for those of other models in it, each by its own."""
    seen = []
    for models in ([_net(), _net()], [autopar.parallelize(_net(), "dp=1", loss_fn=_loss) for _ in range(2)]):
        given = [_hooked(model) for model in models]
        for _ in range(2):
            sum(_of(model, _batch(at)) * (at + 1) for at in range(3) for model in models).backward()
        seen.append(given)
    assert [len(each) for each in seen[0]] == [4, 4]
    for found, wanted in zip(seen[1], seen[0], strict=True):
        assert [name for name, _ in found] == [name for name, _ in wanted]
        assert [norm for _, norm in found] == pytest.approx([norm for _, norm in wanted], rel=1e-9)


def test_a_backward_pass_that_fails_adds_nothing_then_or_later() -> None:
    model, plain = autopar.parallelize(_net(), "dp=1", loss_fn=_loss), _net()
    again = model.training_loss(_batch(0))
    again.backward()
    model.zero_grad()
    loss = model.training_loss(_batch(1))
    with pytest.raises(AutoparError, match="for the second time"):
        (loss + again).backward()  # the later loss first
    assert all(parameter.grad is None for parameter in model.parameters())
    model.training_loss(_batch(2)).backward()
    _loss(plain, _batch(2)).backward()
    torch.testing.assert_close(model.full_gradients(), {n: p.grad for n, p in plain.named_parameters()})


def test_a_backward_pass_through_gradients_that_were_asked_for_is_refused() -> None:
    model = autopar.parallelize(_net(), "dp=1", loss_fn=_loss)
    parameters = list(model.parameters())
    for way in (lambda norm: norm.backward(), lambda norm: torch.autograd.grad(norm, parameters, allow_unused=True)):
        gradients = torch.autograd.grad(model.training_loss(_batch(0)), parameters, create_graph=True)
        with pytest.raises(AutoparError, match="a step has the gradients of its batch and parameters"):
            way(sum(gradient.square().sum() for gradient in gradients))
    assert all(parameter.grad is None for parameter in parameters)


@pytest.mark.parametrize("is_first", [True, False])
def test_losses_of_which_one_overflows_leave_no_gradients(is_first: bool) -> None:
    model = autopar.parallelize(_net(), "dp=1", loss_fn=_loss, on_nonfinite="skip")
    losses = [model.training_loss(_batch(0) * factor) for factor in ((1e200, 1.0) if is_first else (1.0, 1e200))]
    (losses[0] + losses[1]).backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_is_frozen_before_backward_gets_no_gradient() -> None:
    found = []
    for model in (plain := _net(), autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=_loss)):
        loss = _of(model, _batch(0))
        model[0].weight.requires_grad_(False)
        model[3].bias.register_hook(lambda gradient: gradient * 2)
        loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert [each is None for each in found[0]] == [each is None for each in found[1]]
    assert found[1][0] is None
    for one, other in zip(*(filter(lambda each: each is not None, each) for each in found), strict=True):
        torch.testing.assert_close(one, other.full_tensor())
