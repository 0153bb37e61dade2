"""A parallel model behaves as the user's module: methods, properties, special methods, names, signatures."""

from __future__ import annotations

import copy
import io
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from processes import Ranks
from torch import Tensor, nn
from torch.nn.utils import prune
from users_module import SAME, Net, loss, pair, tokens

import autopar
from autopar.errors import AutoparError, CaptureError
from autopar.torch_compat import SUBCLASSED_DTENSORS

pytestmark = pytest.mark.gloo


@pytest.mark.parametrize("what", SAME)
def test_as_the_users_module(what: str) -> None:
    plain, model = pair()
    plain.eval(), model.eval()
    got, want = SAME[what](model), SAME[what](plain)
    if isinstance(want, Tensor):
        assert torch.allclose(got, want, rtol=1e-9)
    else:
        assert got == want


def _values(rank: int, mesh: str, options: dict[str, Any]) -> None:
    """On ranks that hold parts: values, gradients, and what methods write."""
    plain, model = pair(mesh, **options)
    model.eval(), plain.eval()
    for _ in range(2):  # before the first program, and as it placed parameters
        for name, function in SAME.items():
            got, want = function(model), function(plain)
            if isinstance(want, Tensor):
                assert not hasattr(got, "full_tensor") or "on a part" in name, f"{name} gives a plain tensor"
                assert torch.allclose(got, want, rtol=1e-9), name
                assert got.requires_grad == want.requires_grad, name
                for without in (torch.no_grad, torch.inference_mode):
                    with without():
                        assert torch.allclose(function(model), want.detach(), rtol=1e-9), (name, without)
                has_backward = (
                    "calls" not in name and SUBCLASSED_DTENSORS
                )  # a compiled forward, and torch 2.11, have none
                if got.requires_grad and has_backward:
                    got.sum().backward(), want.sum().backward()
                    for path, parameter in plain.named_parameters():
                        gradient = dict(model.named_parameters())[path].grad
                        assert (gradient is None) == (parameter.grad is None), (name, path)
                        if gradient is not None and parameter.grad is not None:
                            assert torch.allclose(gradient.full_tensor(), parameter.grad, rtol=1e-9), (name, path)
                    plain.zero_grad(), model.zero_grad()
        model.reset(), plain.reset()
        for path, value in plain.state_dict().items():
            held = model.state_dict()[path]
            assert torch.equal(held.full_tensor() if hasattr(held, "full_tensor") else held, value), path
        want = loss(plain, tokens()).detach()
        assert torch.allclose(model.forward_backward(tokens()).detach(), want, rtol=1e-9)
        model.zero_grad()


@pytest.mark.parametrize(("mesh", "options"), [("tp=2", {}), ("pp=2", {"microbatches": 2})])
def test_on_parameters_in_parts(two: Ranks, mesh: str, options: dict[str, Any]) -> None:
    two.run(_values, mesh, options)


def _other_data(rank: int) -> str:
    _, model = pair("tp=2")
    with pytest.raises(Exception) as caught:
        model.head(torch.full((2, 8), float(rank), dtype=torch.float64))
    return f"{type(caught.value).__name__}: {caught.value}"


def test_other_data_on_each_rank_is_refused_by_the_op(two: Ranks) -> None:
    for said in two.run(_other_data):
        assert said == (
            "RankError: 'addmm' of a distributed tensor and a plain tensor of shape [2, 8]: the plain one must be the "
            "same on every rank, but rank 1 has other values than rank 0. Make it alike on all ranks (the same seed, "
            "or a broadcast); for data of each rank's own there is `with model.gathered() as plain`."
        )


def test_a_call_in_a_method_runs_the_program() -> None:
    _, model = pair()
    model.generate(tokens())
    assert len(model.programs) == 1 and not model.training and not model.original.training
    model.encode(tokens())
    assert len(model.programs) == 1


def test_containers_of_torch() -> None:
    model: Any = autopar.parallelize(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), "dp=1", loss_fn=loss)
    assert len(model) == 3 and type(model[1]) is nn.ReLU and [type(m) for m in model] == [nn.Linear, nn.ReLU, nn.Linear]
    x = torch.ones(2, 4)
    assert torch.equal(model[:2](x), model.original[:2](x)) and type(model[:2]) is nn.Sequential
    assert isinstance(model, nn.Sequential) and isinstance(model, autopar.ParallelModule)
    plain: Any = autopar.parallelize(nn.Linear(4, 4), "dp=1", loss_fn=loss)
    assert bool(plain) and not hasattr(plain, "__len__") and not hasattr(plain, "__iter__")
    with pytest.raises(TypeError):
        len(plain)


class Overrides(nn.Module):
    """Methods in place of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.head.parameters(recurse)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.body.eval()
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {f"own.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict({n.removeprefix("own."): v for n, v in state_dict.items()}, *args, **kwargs)


def test_methods_in_place_of_torchs() -> None:
    plain = Overrides()
    model: Any = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=loss)
    assert len(list(model.parameters())) == 2 and len(list(model.named_parameters())) == 6
    assert model.train() is model and model.training and not model.body.training and model.head.training
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict({name: torch.zeros_like(value) for name, value in plain.state_dict().items()})
    assert not model.head.weight.any()
    assert list(model.full_state_dict()) == list(nn.Module.state_dict(plain))


class Trainer(nn.Linear):
    """A layer that trains itself, by a method that has the name of one of torch's (mnist_forward_forward)."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.optimizer: Any = None

    def train(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        step: Any = getattr(self, "training_loss", None)
        for _ in range(3):
            out = step(x, y) if step else self(x).square().mean() + y.mean()
            self.optimizer.zero_grad()
            out.backward()
            self.optimizer.step()
        return self(x).detach()  # type: ignore[no-any-return]


def test_a_method_trains_the_module_that_it_is_of() -> None:
    plain = Trainer().double()
    model: Any = autopar.parallelize(
        copy.deepcopy(plain), "dp=1", loss_fn=lambda model, x, y: model(x).square().mean() + y.mean()
    )
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    for each in (plain, model):
        each.optimizer = torch.optim.Adam(each.parameters(), lr=0.1)
    torch.testing.assert_close(model.train(x, y), plain.train(x, y), rtol=1e-12, atol=0)
    torch.testing.assert_close(model.full_state_dict(), plain.state_dict(), rtol=1e-12, atol=0)
    assert not hasattr(model.original, "training_loss")  # of the parallel model alone


def test_hooks_of_state_dicts_run() -> None:
    plain = nn.Linear(2, 2)
    plain.register_state_dict_post_hook(lambda module, state, prefix, _: state.update(extra=torch.ones(1)))
    plain.register_load_state_dict_pre_hook(lambda module, state, *_: state.pop("extra", None))
    model: Any = autopar.parallelize(plain, "dp=1", loss_fn=loss)
    assert list(model.state_dict()) == ["weight", "bias", "extra"]
    model.load_state_dict(model.state_dict())


def test_setting_and_deleting() -> None:
    plain, model = pair()
    model.extra, model._hidden, model.width = 3, 4, 6
    assert plain.config.width == 8 and model.original.extra == 3 and model.original._hidden == 4
    assert model.config.width == 6 and "extra" not in vars(model)
    model.mask = torch.ones(2)
    assert model.original.mask is model.mask
    del model.extra
    assert not hasattr(model, "extra") and not hasattr(model.original, "extra")
    for value, kind in ((nn.Linear(2, 2), "Linear"), (nn.Parameter(torch.ones(2)), "Parameter")):
        with pytest.raises(AutoparError) as caught:
            model.new = value
        assert str(caught.value) == (
            f"cannot set 'new' of a parallel model to a {kind}: its modules and tensors are distributed already. "
            f"Change the plain module before autopar.parallelize."
        )


def test_a_tensor_that_is_kept_is_handed_out_itself() -> None:
    """An average of weights on the model: a copy would take the writes. So with what a method of the user's gives."""
    _, model = pair()
    model.kept = model.head.weight.detach().clone()
    type(model.original).average = lambda self: self.kept
    try:
        for _ in range(2):
            model.kept.mul_(0.5)
            model.average().add_(1.0)
    finally:
        del type(model.original).average
    torch.testing.assert_close(model.kept.full_tensor(), model.head.weight.detach().full_tensor() / 4 + 1.5)


def test_another_forward_is_refused() -> None:
    """It would be passed over: the program is called."""
    _, model = pair()
    with pytest.raises(AutoparError) as caught:
        model.forward = torch.no_grad()(model.forward)
    assert str(caught.value) == (
        "cannot set 'forward' of a parallel model: its programs come from the module's own. Wrap the plain module's "
        "before autopar.parallelize, or call a function of yours around the model."
    )


def test_private_names_are_not_offered() -> None:
    _, model = pair()
    assert not [name for name in dir(model) if name.startswith("_") and not name.endswith("__")]
    assert {"forward_backward", "gathered", "original", "encode"} <= {*dir(model)}
    for one in (model, model.remember(1), model._stand_in):
        with pytest.raises(AttributeError) as caught:
            one.secret  # noqa: B018
        text = "".join(traceback.format_exception(caught.value))
        assert "'Net' object has no attribute 'secret'" in text and "_secret" not in text


def test_what_is_no_part_of_a_parallel_model() -> None:
    """Neither of it nor of what methods see of it."""
    _, model = pair()
    for one in (model, model._stand_in):
        for copied in (copy.deepcopy, copy.copy, lambda m: torch.save(m, io.BytesIO())):
            with pytest.raises(AutoparError, match="cannot be copied or pickled"):
                copied(one)
        with pytest.raises(AutoparError, match="cannot turn the tensors"):
            one.half()
        for compiled in (torch.compile, lambda m: m.compile()):
            with pytest.raises(AutoparError) as caught:
                compiled(one)
            assert str(caught.value) == (
                "torch.compile of a parallel model: its steps are compiled already, with what moves between ranks in "
                'them. Leave torch.compile out; autopar.parallelize(..., compile="inductor") compiles what each rank '
                "computes with Inductor."
            )


class Named(nn.Module):
    """Methods by names of ours: ours win, but not within the module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.compiled = nn.Linear(4, 4), "mine"

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.prepare(x))  # type: ignore[no-any-return]

    def prepare(self, x: Tensor) -> Tensor:
        return x + 1

    def both(self, x: Tensor) -> Tensor:
        return self.layer(self.prepare(x)) if self.compiled == "mine" else x  # type: ignore[no-any-return]


def test_names_of_ours_win_but_not_within_the_module() -> None:
    model: Any = autopar.parallelize(Named(), "dp=1", loss_fn=loss)
    x = torch.ones(2, 4)
    torch.testing.assert_close(model.both(x), model(x), check_stride=False)
    assert model.compiled is None and model.original.compiled == "mine"


def test_methods_in_the_loss_of_another_model() -> None:
    """They are a part of that one's step: the partner's gradients come, and BatchNorm writes."""

    def run(is_parallel: bool) -> list[Tensor]:
        torch.manual_seed(0)
        critic: Any = Net().double()
        model: Any = nn.Linear(4, 8).double()

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            h = critic.attention(model(x)[None], model(x)[None], model(x)[None])[0] if not is_parallel else None
            h = h if h is not None else critic.attend(model(x)[None])
            return h.square().sum() + critic.largest * critic.width

        Net.attend = lambda self, h: self.attention(h, h, h)[0]  # type: ignore[attr-defined]
        x = torch.randn(6, 4, dtype=torch.float64)
        if is_parallel:
            critic = autopar.parallelize(critic, "dp=1", loss_fn=loss)
            model = autopar.parallelize(model, "dp=1", loss_fn=loss)
            value = model.forward_backward(x)
        else:
            value = loss(model, x)
            value.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for m in (model, critic) for p in m.parameters() if p.grad is not None]
        return [value.detach(), *(g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients)]

    want, got = run(False), run(True)
    assert len(want) > 5
    nonzero = [g for g in got if g.any()]
    torch.testing.assert_close(nonzero, [g for g in want if g.any()])


def test_a_part_of_another_model_is_refused() -> None:
    _, critic = pair()
    model: Any = autopar.parallelize(nn.Linear(4, 8).double(), "dp=1", loss_fn=lambda m, x: critic.norm(m(x)).sum())
    with pytest.raises(CaptureError, match="a part of another parallel model"):
        model.forward_backward(torch.ones(3, 4, dtype=torch.float64))


class Binding(nn.Module):
    """A method that the step calls too, and that binds a buffer to what it computed."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(4, 4).double()
        self.register_buffer("mean", torch.ones(4, dtype=torch.float64))

    def encode(self, x: Tensor) -> Tensor:
        h: Tensor = self.up(x)
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h * self.mean

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


def _binding(rank: int, mesh: str) -> None:
    plain, x = Binding(), torch.randn(4, 4, dtype=torch.float64)
    model = autopar.parallelize(copy.deepcopy(plain), mesh, loss_fn=lambda m, x: m(x).square().mean())
    for _ in range(2):
        torch.testing.assert_close(model.forward_backward(x), plain(x).square().mean().detach())
        torch.testing.assert_close(model.encode(x), plain.encode(x))
        torch.testing.assert_close(model.mean, plain.mean)


def test_a_buffer_that_a_method_binds(two: Ranks) -> None:
    """Red where the next step was refused, for it held a tensor of the parallel model then."""
    two.run(_binding, "tp=2")


def _set_anew(rank: int, mesh: str) -> None:
    torch.manual_seed(0)
    plain, x = nn.Linear(4, 6, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    model = autopar.parallelize(copy.deepcopy(plain), mesh, loss_fn=lambda m, x: m(x).square().mean())
    for _ in range(2):
        loss = plain(x).square().mean()
        loss.backward()
        torch.testing.assert_close(model.forward_backward(x), loss.detach())
        with torch.no_grad():
            for each in (plain, model):
                each.weight -= 0.1 * each.weight.grad
                each.bias -= 0.1 * each.bias.grad
                each.bias = each.bias
        plain.zero_grad(), model.zero_grad()
    torch.testing.assert_close(model.weight.full_tensor(), plain.weight)
    with pytest.raises(AutoparError, match="cannot set 'weight' of a parallel model"):
        model.weight = nn.Parameter(torch.ones(6, 4))


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_a_parameter_that_is_changed_in_place_is_set_anew(two: Ranks, mesh: str) -> None:
    """Python's `model.weight -= step` sets what it changed. Red where that was refused, with the weight changed."""
    two.run(_set_anew, mesh)


def _pruned(rank: int, mesh: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(8, 4, dtype=torch.float64)), torch.randn(8, 8, dtype=torch.float64)
    prune.l1_unstructured(plain[0], "weight", 0.3)
    again = nn.Sequential(prune.custom_from_mask(nn.Linear(8, 4, dtype=torch.float64), "weight", plain[0].weight_mask))
    again.load_state_dict(plain.state_dict())
    model = autopar.parallelize(again, mesh, loss_fn=lambda m, x: m(x).square().mean(), **options)
    model.forward_backward(x)
    with torch.no_grad():
        for each in (plain, model):
            each[0].weight_orig.mul_(1.5)
            each(x)
            prune.remove(each[0], "weight")
    whole = model.full_state_dict()
    for name, value in plain.state_dict().items() if rank == 0 else ():
        torch.testing.assert_close(whole[name], value)
    with pytest.raises(AutoparError, match=r"'0.weight_orig' was removed after autopar.parallelize"):
        model.forward_backward(x)


@pytest.mark.parametrize(("mesh", "options"), [("tp=2", {}), ("dp=2", {"zero": 3})])
def test_a_parameter_under_another_name_is_whole(two: Ranks, mesh: str, options: dict[str, Any]) -> None:
    """Red where the whole state had the part of the first rank."""
    two.run(_pruned, mesh, options)
