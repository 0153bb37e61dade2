"""`autopar.parallelize` on a mesh of size 1, which needs no launcher: what a user may do with the result."""

from __future__ import annotations

import copy
import gc
import io
import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from models_special import ZOO
from side_by_side import adamw, assert_close, case, momentum, plain_loss, train_both
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import AutoparError, CaptureError
from autopar.parallel.programs import maker
from autopar.parallel.programs.make_runner import make_runner


def test_a_start_imports_without_looking_for_garbage() -> None:
    """Red where Python's collector goes through what is imported, which stays: 0.4 of 1.1 s of each rank."""
    script = (
        "import gc, torch\n"
        "import autopar\n"
        "seen = []\n"
        "gc.callbacks.append(lambda phase, info: seen.append(info['generation']))\n"
        "autopar.parallelize\n"
        "print(seen.count(2), gc.isenabled())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["0", "True"], done.stderr


def test_a_start_draws_none_of_the_users_random_numbers() -> None:
    """A script seeds at its top, and draws what it likes behind `parallelize`: imports draw too. Red where that of
    rich, for timelines in the terminal, took numbers of Python's `random`."""
    script = (
        "import random, numpy, torch\n"
        "import autopar\n"
        "def state():\n"
        "    return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()\n"
        "net, x = torch.nn.Linear(4, 4), torch.ones(4, 4)\n"
        "before = state()\n"
        "model = autopar.parallelize(net, 'dp=1', loss_fn=lambda m, x: m(x).square().mean())\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "model.training_loss(x).backward(), optimizer.step(), model(x), model.full_state_dict()\n"
        "print(*(a == b for a, b in zip(before, state())))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True"] * 3, done.stderr


def test_a_program_is_made_ready_without_looking_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red where Python's collector goes through a program that has just been read: a quarter of what a rank does."""
    seen: list[bool] = []

    def noted(*args: Any) -> Any:
        seen.append(gc.isenabled())
        return make_runner(*args)

    monkeypatch.setattr(maker, "make_runner", noted)
    model, _, x, y = mlp_pair()
    model.prepare(x, y)
    assert seen == [False] and gc.isenabled()


def mlp_pair(**options: Any) -> tuple[autopar.ParallelModule, nn.Module, Tensor, Tensor]:
    plain, loss_fn, (x, y), _ = case("mlp")
    return autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=loss_fn, **options), plain, x, y


# -- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "gpt", "nanogpt", "hf_llama", "resnet", "frozen", "unused"])
def test_training_equals_the_plain_loop(name: str) -> None:
    train_both(name, "dp=1,tp=1", clip=1e-3)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_momentum_accumulation_and_schedule(set_to_none: bool) -> None:
    train_both("gpt", "dp=1", momentum, steps=3, accumulate=2, set_to_none=set_to_none, schedule=True)


class Forms(nn.Module):
    """One model, whose forward returns its loss in different forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(16, 8), form

    def forward(self, x: Tensor, y: Tensor) -> Any:
        out = self.linear(x)
        loss = F.mse_loss(out, y)
        return {
            "scalar": loss, "loss first": (loss, out), "loss last": (out, loss), "list": [loss],
            "object": SimpleNamespace(loss=loss, logits=out), "dict": {"logits": out, "loss": loss},
        }[self.form]  # fmt: skip


@pytest.mark.parametrize("form", ["scalar", "loss first", "loss last", "list", "object", "dict"])
def test_a_module_that_returns_its_loss(form: str) -> None:
    plain = Forms(form).double()
    x, y = torch.randn(12, 16).double(), torch.randn(12, 8).double()
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1")
    want = F.mse_loss(plain.linear(x), y)
    want.backward()
    torch.testing.assert_close(model.forward_backward(x, y), want.detach())
    assert_close(model.full_gradients(), {n: p.grad for n, p in plain.named_parameters()}, "gradient")


def nested_loss(model: nn.Module, pair: Any, *, factor: float, options: dict[str, Any]) -> Tensor:
    scaled = model(pair[0]["x"]) * factor + options["shift"]
    assert options["name"] == "mse" and options["none"] is None
    return F.mse_loss(scaled, pair[1][0])


def test_nested_batches_with_leaves_that_are_no_tensors() -> None:
    plain, _, (x, y), _ = case("mlp")
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=nested_loss)
    for factor in (2.0, -1.0):  # a Python value is part of the program: another one is another program
        shift = torch.tensor(0.5).double()
        batch = ({"x": x}, [y]), {"shift": shift, "name": "mse", "none": None}
        want = nested_loss(plain, batch[0], factor=factor, options=batch[1])
        torch.testing.assert_close(model.forward_backward(batch[0], factor=factor, options=batch[1]), want.detach())


class Shared(nn.Module):
    """Gradients that are one tensor for two parameters, and one that is a mere expansion."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.delta = (nn.Parameter(torch.randn(8, 16)) for _ in range(2))
        self.free = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(F.linear(x, self.weight + self.delta), y) + self.free.sum()


def test_each_gradient_is_memory_of_its_own() -> None:
    plain = Shared().double()
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1")
    x, y = torch.randn(12, 16).double(), torch.randn(12, 8).double()
    for _ in range(2):
        model.forward_backward(x, y)
        plain(x, y).backward()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, plain)]
    torch.testing.assert_close(norms[0].full_tensor(), norms[1])
    assert_close(model.full_gradients(), {n: p.grad for n, p in plain.named_parameters()}, "gradient")
    assert all(p.grad.to_local().is_contiguous() for p in model.parameters())


# -- making one -----------------------------------------------------------------------------------------------------


def test_decorators() -> None:
    @autopar.parallelize("dp=1", loss_fn=models.square_loss, seed=3)
    class Net(nn.Sequential):
        """Two layers."""

        def __init__(self, width: int) -> None:
            super().__init__(nn.Linear(16, width), nn.Linear(width, 8))

    @autopar.parallelize({"dp": 1}, loss_fn=models.square_loss, seed=3)
    def build(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(16, width), nn.Linear(width, 8))

    before = torch.get_rng_state()
    first, second = Net(24), build(width=24)
    assert torch.equal(before, torch.get_rng_state()), "the user's generator was moved"
    assert isinstance(first, autopar.ParallelModule) and Net.__name__ == "Net" and Net.__doc__ == "Two layers."
    assert_close(first.full_state_dict(), second.full_state_dict(), "weight of one seed")
    torch.manual_seed(3)
    assert_close(first.full_state_dict(), nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 8)).state_dict(), "weight")
    x, y = torch.randn(4, 16), torch.randn(4, 8)
    assert torch.equal(first.forward_backward(x, y), second.forward_backward(x, y))


def test_every_way_to_write_a_mesh() -> None:
    losses = []
    for mesh in ("dp=1,tp=1", "dp=-1,tp=1", {"dp": 1, "tp": 1}, {"tp": -1}, autopar.Mesh((("dp", 1), ("tp", 1)))):
        plain, loss_fn, args, _ = case("mlp")
        losses.append(autopar.parallelize(plain, mesh, loss_fn=loss_fn, device="cpu").forward_backward(*args))
    plain, loss_fn, args, _ = case("mlp")
    named = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    losses.append(autopar.parallelize(plain, named, loss_fn=loss_fn).forward_backward(*args))
    assert all(torch.equal(loss, losses[0]) for loss in losses) and torch.isfinite(losses[0])


@pytest.mark.parametrize("name", ["gpt", "frozen", "unused", "resnet", "nanogpt"])
def test_names_ties_and_frozen_parameters(name: str) -> None:
    plain, loss_fn, args, _ = case(name)
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=loss_fn)
    for duplicates in (True, False):
        got, want = (dict(m.named_parameters(remove_duplicate=duplicates)) for m in (model, plain))
        assert list(got) == list(want)
        assert all(isinstance(p, DTensor) and isinstance(p, nn.Parameter) for p in got.values())
        assert [p.requires_grad for p in got.values()] == [p.requires_grad for p in want.values()]
    assert list(dict(model.named_buffers())) == list(dict(plain.named_buffers()))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_children()] == [n for n, _ in plain.named_children()]
    model.forward_backward(*args)
    plain_loss(plain, loss_fn, args, {}).backward()
    without = {n for n, p in plain.named_parameters() if p.grad is None}
    assert {n for n, p in model.named_parameters() if p.grad is None} == without
    assert bool(without) == (name in ("frozen", "unused"))
    adamw(model.parameters()).step()
    if name in ("gpt", "nanogpt"):
        first, second = ("tokens", "head") if name == "gpt" else ("wte", "lm_head")
        assert getattr(model, first).weight is getattr(model, second).weight
        whole = model.full_state_dict()
        assert torch.equal(whole[f"{first}.weight"], whole[f"{second}.weight"])


class Named(nn.Module):
    """Names that a parallel module has itself, and attributes of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled, self.original = nn.Linear(16, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8))
        self.config, self.scale = SimpleNamespace(width=16), 2.0

    def count(self) -> int:
        return 7

    @property
    def width(self) -> int:
        return self.config.width

    def forward(self, x: Tensor) -> Tensor:
        return self.original(self.compiled(x)) * self.weight * self.scale


def test_attributes_of_the_root() -> None:
    plain = Named()
    twin = copy.deepcopy(plain)
    model = autopar.parallelize(plain, "dp=1", loss_fn=models.square_loss)
    assert model.config is plain.config and model.width == 16 and model.scale == 2.0
    assert model.weight is plain.weight and list(model.state_dict()) == list(twin.state_dict())
    assert model.original is plain, "a name of ours wins; the module is still there"
    assert model.original.compiled is plain.compiled
    model.scale = 3.0
    assert plain.scale == 3.0 and "scale" not in vars(model)
    x = torch.randn(4, 16)
    twin.scale = 3.0
    torch.testing.assert_close(model(x), twin(x).detach())
    assert not hasattr(model, "nothing")
    assert model.count() == 7
    with pytest.raises(AutoparError) as refused:
        model.head = nn.Linear(8, 2)
    assert str(refused.value) == (
        "cannot set 'head' of a parallel model to a Linear: its modules and tensors are distributed already. Change "
        "the plain module before autopar.parallelize."
    )


def test_copies_and_conversions_are_refused() -> None:
    model, _, x, y = mlp_pair()
    for copied in (copy.deepcopy, copy.copy, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(AutoparError) as caught:
            copied(model)
        assert str(caught.value) == (
            "a parallel model cannot be copied or pickled: it holds process groups and this rank's part of the "
            "parameters. Save state_dict() (torch.distributed.checkpoint) or full_state_dict() instead; averages of "
            "its weights are autopar.EMA(model); for another copy, copy the plain module before autopar.parallelize."
        )
    with pytest.raises(AutoparError) as refused:
        model.float()
    assert str(refused.value) == (
        "cannot turn the tensors of a parallel model from torch.float64 on cpu into torch.float32 on cpu. Convert the "
        "plain module before autopar.parallelize; device= says where it goes."
    )
    assert model.to("cpu") is model and model.double() is model
    assert torch.isfinite(model.forward_backward(x, y))
    torch.save(model.state_dict(), saved := io.BytesIO())
    saved.seek(0)
    model.load_state_dict(torch.load(saved, weights_only=False))


# -- forward --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", ["resnet", "gpt"])
def test_forward_in_train_and_eval_mode(name: str, trained: bool) -> None:
    """BatchNorm: in train mode the batch's statistics, and they are kept; in eval mode the running ones."""
    plain, loss_fn, args, _ = case(name)
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=loss_fn)
    if trained:
        model.forward_backward(*args)
        plain_loss(plain, loss_fn, args, {})
    for training in (True, False, True):
        assert model.train(training) is model and plain.train(training).training == model.training
        got = model(args[0])
        assert not isinstance(got, DTensor) and got.requires_grad, "as on one device"
        torch.testing.assert_close(got, plain(args[0]).detach(), rtol=1e-10, atol=1e-12)
    assert_close(model.full_state_dict(), plain.state_dict(), "buffer")


def test_flags_of_submodules_are_respected() -> None:
    """BatchNorm frozen in eval mode inside a model in train mode, as fine-tuning does."""
    plain, loss_fn, args, _ = case("resnet")
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=loss_fn)
    for frozen in (False, True):
        for m in (model, plain):
            m.train()
            m[1].train(not frozen) if m is plain else getattr(m, "1").train(not frozen)
        torch.testing.assert_close(
            model.forward_backward(*args), plain_loss(plain, loss_fn, args, {}).detach(), rtol=1e-10, atol=0
        )
    assert_close(model.full_state_dict(), plain.state_dict(), "buffer")


def test_dropout_is_off_in_eval_mode_and_drawn_anew_at_each_step() -> None:
    plain = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 8))
    x, y = torch.randn(12, 16), torch.randn(12, 8)
    runs = []
    for seed in (0, 0, 1):
        model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=models.square_loss, seed=seed)
        runs.append([float(model.forward_backward(x, y)) for _ in range(3)])
    assert runs[0] == runs[1] and len({*runs[0], *runs[2]}) == 6
    torch.testing.assert_close(model.eval()(x), plain.eval()(x).detach())


def test_one_compilation_a_signature(caplog: pytest.LogCaptureFixture) -> None:
    model, plain, x, y = mlp_pair()
    with caplog.at_level(logging.WARNING, "autopar"):
        for rows in (12, 12, 8, 12, 8):
            want = models.square_loss(plain, x[:rows], y[:rows]).detach()
            torch.testing.assert_close(model.forward_backward(x[:rows], y[:rows]), want)
    said = [record.getMessage() for record in caplog.records if "signature" in record.getMessage()]
    assert said == [
        "new input signature (argument 0 [8, 16] torch.float64, argument 1 [8, 8] torch.float64): compiling again"
    ]


def test_inputs_that_grow_are_told_of_a_few_times(caplog: pytest.LogCaptureFixture) -> None:
    """Red before: `generate` logged a line for each token, and none said what to do."""
    model, plain, x, _ = mlp_pair()
    with caplog.at_level(logging.WARNING, "autopar"), torch.no_grad():
        for rows in range(2, 14, 2):
            torch.testing.assert_close(model.eval()(x[:rows]), plain.eval()(x[:rows]))
    said = [record.getMessage() for record in caplog.records if "signature" in record.getMessage()]
    assert len(said) == 3 and "with model.gathered() as plain" in said[-1]


# -- checkpoints and optimizers -------------------------------------------------------------------------------------


def test_plain_checkpoints_load_strictly() -> None:
    model, plain, x, y = mlp_pair()
    model.forward_backward(x, y)
    state = {name: torch.randn_like(value) for name, value in plain.state_dict().items()}
    kept = dict(model.named_parameters())
    assert model.load_state_dict(state).missing_keys == []
    assert_close(model.full_state_dict(), state, "weight")
    assert all(kept[name] is parameter for name, parameter in model.named_parameters())
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0\.bias"'):
        model.load_state_dict({n: v for n, v in state.items() if n != "0.bias"})
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "more"'):
        model.load_state_dict({**state, "more": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.bias"):
        model.load_state_dict({**state, "0.bias": torch.ones(5).double()})
    with pytest.raises(AutoparError) as caught:
        model.load_state_dict(state, assign=True)
    assert str(caught.value) == (
        "load_state_dict(assign=True) would replace the parameters of a parallel model, which programs and optimizers "
        "hold. Leave assign out: values are copied into this rank's parts."
    )


# -- models on the meta device --------------------------------------------------------------------------------------


def test_a_model_on_the_meta_device_gets_values() -> None:
    with torch.device("meta"):
        model, loss_fn, _ = ZOO["gpt"]()
        other, _, _ = ZOO["resnet"]()
    made = autopar.parallelize(model, "dp=1", loss_fn=loss_fn, seed=5)
    assert made.tokens.weight is made.head.weight
    whole = made.full_state_dict()
    assert all(torch.isfinite(value).all() and value.std() > 0 for n, value in whole.items() if value.ndim == 2)
    assert torch.equal(whole["norm.weight"], torch.ones(32)) and torch.equal(whole["norm.bias"], torch.zeros(32))
    with torch.device("meta"):
        again, _, _ = ZOO["gpt"]()
    assert_close(autopar.parallelize(again, "dp=1", seed=5).full_state_dict(), whole, "weight of one seed")
    assert torch.isfinite(made.forward_backward(models.tokens(), models.labels()))
    assert int(autopar.parallelize(other, "dp=1").full_state_dict()["1.num_batches_tracked"]) == 0


def test_a_meta_model_that_nothing_can_fill() -> None:
    with torch.device("meta"):
        model = Shared()
        llama = models.llama()[0]
    with pytest.raises(CaptureError) as caught:
        autopar.parallelize(model, "dp=1")
    assert str(caught.value) == (
        "the model is on the meta device, and no reset_parameters() or _init_weights() gives values to 'weight', "
        "'delta', 'free'. Define reset_parameters() on the module that owns them, build the model on a real device, or "
        "say which files have its values: parallelize(..., weights=FOLDER)."
    )
    with pytest.raises(CaptureError, match=r"gives values to 'blocks\.0\.attn_norm\.weight', .* and 4 more\."):
        autopar.parallelize(llama, "dp=1")
