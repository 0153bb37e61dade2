"""Parameters that lie on one stage of a pipeline: the numbers of one device, on every rank."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from processes import Ranks
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import autopar
from autopar.errors import AutoparError
from autopar.ir.layout import local_part, parse_layout
from autopar.parallel.module import ParallelModule
from autopar.parallel.tensors.parameter import ParameterTensor, accumulate
from autopar.torch_compat import TorchDispatchMode, local_of
from autopar.torch_identity import SlotlessDTensor

pytestmark = pytest.mark.gloo
# `scale` has no dims, `tied` lies on every stage.
LAYOUTS = {
    "first.weight": ("[3:tp,-]", 0),
    "first.bias": ("[3:tp]", 0),
    "norm.weight": ("[-]", 0),
    "norm.bias": ("[-]", 1),
    "scale": ("[]", 1),
    "last.weight": ("[-,tp]", 1),
    "last.bias": ("[-]", 1),
    "tied": ("[tp]", None),
}
OPTIMIZERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "foreach": True}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("Adam", {"amsgrad": True, "foreach": True}),
    ("AdamW", {}),
    ("AdamW", {"foreach": True}),
    ("AdamW", {"fused": True}),
    ("AdamW", {"maximize": True, "lr": torch.tensor(0.01)}),
    ("NAdam", {}),
    ("NAdam", {"foreach": True}),
    ("RAdam", {}),
    ("RAdam", {"foreach": True}),
    ("Adamax", {"foreach": False}),
    ("Adagrad", {"lr_decay": 0.1}),
    ("Adagrad", {"fused": True}),
    ("Adadelta", {"foreach": True}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("RMSprop", {"foreach": True}),
    ("ASGD", {}),
    ("ASGD", {"foreach": True}),
    ("SGD", {"momentum": 0.9, "fused": True}),
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 12), nn.LayerNorm(5), nn.Linear(4, 1)
        self.scale, self.tied = nn.Parameter(torch.tensor(3.0)), nn.Parameter(torch.randn(2))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)


def plain() -> Model:
    torch.manual_seed(0)
    return Model().double()


def made(mesh: str, moved: bool = True) -> tuple[ParallelModule, Model]:
    """A parallel model whose parameters lie as after a compilation, and the plain one."""
    model = autopar.parallelize(plain(), mesh, loss_fn=lambda m, x: x.sum())
    if moved:
        model._store.relayout(*places(mesh))
    return model, plain()


def places(mesh: str) -> tuple[dict[str, Any], dict[str, int | None]]:
    layouts, owners = {}, {}
    for name, (text, owner) in LAYOUTS.items():
        if "pp" not in mesh:
            text, owner = text.replace("3:tp", "-"), None
        layouts[name] = parse_layout(text if "tp" in mesh else text.replace("3:tp", "-").replace("tp", "-"))
        owners[name] = owner
    return layouts, owners


def give_gradients(model: ParallelModule, single: Model, seed: int = 0) -> None:
    """The same random gradients to both, to each rank of `model` those that its program would give."""
    random = torch.Generator().manual_seed(seed)
    where, known = model._store.distributor, dict(model.named_parameters())
    for name, parameter in single.named_parameters():
        if not parameter.requires_grad:
            continue
        value = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
        parameter.grad = value if parameter.grad is None else parameter.grad + value
        here = where.is_owner(model._store.owners[name])
        part = local_part(value, model._store.layouts[name], where.mesh, where.coord).clone() if here else None
        accumulate([known[name]], [part])


def assert_same(model: ParallelModule, single: Model, what: str) -> None:
    """Every rank's whole values, and what rank 0 gathers, are those of one device."""
    gathered, known = model.full_state_dict(), dict(model.named_parameters())
    assert bool(gathered) == (torch.distributed.get_rank() == 0)
    for key, value in single.state_dict().items():
        found = full(known[key])
        torch.testing.assert_close(found, value, rtol=1e-11, atol=1e-13, msg=f"{what} {key}")
        assert not gathered or torch.equal(gathered[key], found), key


def full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor().detach().clone() if isinstance(value, DTensor) else value


def _taken_out(rank: int, mesh: str) -> None:
    """What was taken out stays as it was, whatever happens to the weights and to it."""
    model, single = made(mesh)
    taken = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
    state = model.full_state_dict()
    with torch.no_grad():
        for value in taken.values():
            value.add_(7)
    assert_same(model, single, "written to what was taken out")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    for name, value in single.state_dict().items():
        assert rank or torch.equal(state[name], value), name


@pytest.mark.parametrize("mesh", ["dp=4", "pp=2,tp=2", "pp=4"])
def test_what_is_taken_out_is_memory_of_its_own(four: Ranks, mesh: str) -> None:
    four.run(_taken_out, mesh)


def _optimizers(rank: int, mesh: str, names: tuple[tuple[str, dict[str, Any]], ...]) -> None:
    model, _ = made(mesh)
    held, start = list(model.parameters()), plain().state_dict()
    for name, options in names:
        single, what = plain(), f"{name} {options} {mesh}"
        model.load_state_dict(start)
        model.zero_grad()
        theirs = getattr(torch.optim, name)(single.parameters(), **copy.deepcopy(options))
        ours = getattr(torch.optim, name)(model.parameters(), **copy.deepcopy(options))
        schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (theirs, ours)]
        for step in range(2):
            give_gradients(model, single, step)
            give_gradients(model, single, step + 10)  # accumulated
            wanted = nn.utils.clip_grad_norm_(single.parameters(), 0.5)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            torch.testing.assert_close(norm.full_tensor(), wanted, rtol=1e-12, atol=0, msg=what)
            for optimizer, schedule in zip((theirs, ours), schedules, strict=True):
                optimizer.step()
                schedule.step()
                optimizer.zero_grad(set_to_none=step > 0)
        assert_same(model, single, what)
        assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
        for parameter, state in ours.state.items():
            empty = local_of(parameter).numel() == 0
            assert not empty or not any(local_of(v).numel() for v in state.values() if isinstance(v, DTensor)), what


FEW = OPTIMIZERS[1::5]  # foreach SGD, fused AdamW, foreach RAdam, centered RMSprop


@pytest.mark.parametrize(
    ("mesh", "names"),
    [("pp=2,tp=2", OPTIMIZERS), ("tp=2,pp=2", FEW), ("pp=2,dp=2", FEW), ("pp=4", FEW)],
    ids=lambda given: given if isinstance(given, str) else str(len(given)),
)
def test_every_optimizer_takes_the_steps_of_one_device(four: Ranks, mesh: str, names: Any) -> None:
    """Where a parameter lies matters to no optimizer by itself: all of them on one mesh, each kind on the others."""
    four.run(_optimizers, mesh, names)


# -- what else one does with parameters -----------------------------------------------------------------------------


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _norms(rank: int, mesh: str) -> None:
    model, single = made(mesh)
    give_gradients(model, single)
    for order in (2.0, 1, 3.5, float("inf")):
        for foreach in (None, True, False):
            pair = [nn.utils.get_total_norm(gradients(m), order, foreach=foreach) for m in (model, single)]
            torch.testing.assert_close(pair[0].full_tensor(), pair[1], rtol=1e-12, atol=0)
            torch.testing.assert_close(pair[0].item(), pair[1].item(), rtol=1e-12, atol=0)
        for foreach in (None, True, False):
            for m in (model, single):
                nn.utils.clip_grad_norm_(m.parameters(), 0.9 * float(pair[1]), order, foreach=foreach)
    for foreach in (None, True, False):
        for m in (model, single):
            nn.utils.clip_grad_value_(m.parameters(), 0.1, foreach=foreach)
    found, wholes = model.full_gradients(), {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    for name, parameter in single.named_parameters():
        ours = dict(model.named_parameters())[name].grad
        assert (ours is None) == (parameter.grad is None) == (name == "frozen")
        if parameter.grad is not None:
            torch.testing.assert_close(wholes[name], parameter.grad, rtol=1e-12, atol=0)
            assert rank or torch.equal(found[name], wholes[name])
    infinite, half = torch.zeros(1), torch.tensor(0.5)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients(model), infinite, half)  # what a GradScaler calls
    assert not infinite and torch.equal(full(model.get_parameter("scale").grad), wholes["scale"] / 2)
    bad = dict(model.named_parameters())["last.bias"].grad
    bad.fill_(float("nan"))
    assert torch.isnan(
        nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).full_tensor()
    )
    torch._amp_foreach_non_finite_check_and_unscale_(gradients(model), infinite, half)
    assert infinite
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("mesh", ["pp=2,tp=2", "pp=4"])
def test_norms_and_clipping_span_all_stages(four: Ranks, mesh: str) -> None:
    four.run(_norms, mesh)


def _semantics(rank: int) -> None:
    model, single = made("pp=2,tp=2")
    ours, theirs = dict(model.named_parameters()), dict(single.named_parameters())
    for name, parameter in ours.items():
        value, owner = theirs[name].detach(), LAYOUTS.get(name, (None, None))[1]
        assert isinstance(parameter, ParameterTensor) and isinstance(parameter, nn.Parameter)
        assert (parameter.shape, parameter.dtype) == (value.shape, value.dtype)
        away = owner is not None and owner != model._store.distributor.coord["pp"]
        assert (parameter.to_local().untyped_storage().nbytes() == 0) == away and "DTensor" in repr(parameter)
        assert (parameter.device_mesh.get_coordinate() is None) == away
        with torch.no_grad():
            for op in ("sum", "mean", "max", "min", "norm", "prod"):
                got = getattr(parameter, op)()
                torch.testing.assert_close(got.full_tensor(), getattr(value, op)(), equal_nan=True, msg=f"{op} {name}")
                torch.testing.assert_close(float(got), float(getattr(value, op)()), equal_nan=True)
            if value.ndim == 2:
                torch.testing.assert_close(parameter.norm(dim=0).full_tensor(), value.norm(dim=0))
            cases = {
                "map": (
                    torch.tanh(parameter * 2 + 1) / 3 - parameter.square(),
                    torch.tanh(value * 2 + 1) / 3 - value**2,
                ),
                "number": (parameter * got, value * value.prod()),
                "dtype": (parameter.float(), value.float()),
                "bool": (parameter.isnan() | (parameter > 0), value > 0),
                "like": (torch.ones_like(parameter) + torch.zeros_like(parameter), torch.ones_like(value)),
                "data": (parameter.data, value),
            }
            for case, (found, expected) in cases.items():
                assert type(found) is ParameterTensor and found.dtype == expected.dtype, case
                torch.testing.assert_close(found.full_tensor(), expected, msg=f"{case} {name}")
        twin = copy.deepcopy(parameter)
        assert (
            type(twin) is ParameterTensor
            and isinstance(twin, nn.Parameter)
            and twin.requires_grad == parameter.requires_grad
        )
        kept = io.BytesIO()
        torch.save(parameter, kept)
        kept.seek(0)
        back = torch.load(kept, weights_only=False)
        if parameter.place.is_replicated:
            assert type(back) is nn.Parameter and torch.equal(back, parameter.to_local())
        else:
            assert type(back) is DTensor and back.placements == parameter.placements
            assert torch.equal(back.to_local(), parameter.to_local())
        with torch.no_grad():
            parameter.copy_(back * 2)
            parameter.add_(back)
        torch.testing.assert_close(full(parameter), 3 * value)
    with torch.no_grad():  # of two stages, and of two placements
        moved = ours["norm.weight"] + ours["norm.bias"]
        torch.testing.assert_close(full(moved), 3 * (theirs["norm.weight"] + theirs["norm.bias"]).detach())
        other = model._store.distributor.split(theirs["last.weight"].detach().clone(), parse_layout("[-,-]"), 0)
        other.sub_(ours["last.weight"])
        torch.testing.assert_close(full(other), -2 * theirs["last.weight"].detach())


def test_a_parameter_is_the_same_value_on_every_rank(four: Ranks) -> None:
    four.run(_semantics)


def _refusals(rank: int) -> None:
    model, single = made("pp=2,tp=2")
    weight, value = model.get_parameter("first.weight"), single.get_parameter("first.weight").detach()
    refused = {
        "redistribute": lambda: weight.redistribute(placements=[Shard(0), Shard(1)]),
        "data = ": lambda: setattr(weight, "data", value[:2]),
        "numpy": lambda: weight.detach().numpy(),
        "resize_": lambda: weight.detach().resize_(3),
        "to_local of a view": lambda: weight[0].to_local(),
    }
    for text, call in refused.items():
        with torch.no_grad(), pytest.raises(AutoparError, match=text):
            call()
    with torch.no_grad():
        got = {
            "item": (weight[0], value[0]),
            "transposed": (weight.T, value.T),
            "view": (weight.view(-1), value.view(-1)),
            "product": (weight @ weight.T, value @ value.T),
            "joined": (torch.cat([weight, weight]), torch.cat([value, value])),
            "plain": (weight + value, 2 * value),
            "number": (model.get_parameter("scale") + weight, single.get_parameter("scale").detach() + value),
        }
        for what, (found, wanted) in got.items():
            torch.testing.assert_close(found.full_tensor(), wanted, msg=what)
        assert torch.equal(torch.zeros(12, 6, dtype=torch.float64).copy_(weight), value)
        weight[0] = 1
        weight.T[1].fill_(2)
        value[0] = 1
        value.T[1].fill_(2)
    assert torch.equal(weight.full_tensor(), value)
    for m in (weight, single.get_parameter("first.weight")):
        (m * m).sum().backward()
    assert torch.equal(weight.grad.full_tensor(), single.get_parameter("first.weight").grad)
    weight.grad = None
    if torch.__version__ < "2.12":
        with pytest.raises(AutoparError, match="cannot bring a gradient from a plain tensor"):
            weight.full_tensor().sum().backward()
    else:
        weight.full_tensor().sum().backward()
        assert torch.equal(weight.grad.full_tensor(), torch.ones_like(value))


def test_views_writes_and_gradients_are_one_devices(four: Ranks) -> None:
    four.run(_refusals)


class Kernels(TorchDispatchMode):
    """Counts the ops on plain tensors that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, (DTensor, SlotlessDTensor)) for kind in types):
            return NotImplemented
        if not func.is_view and "c10d" not in str(func):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def _few_kernels(rank: int, mesh: str) -> None:
    model, single = made(mesh)
    give_gradients(model, single)
    counts = []
    torch._foreach_norm(gradients(model), 2)  # places are looked up once
    for repeats in (1, 3):
        with Kernels() as kernels:
            torch._foreach_norm(gradients(model) * repeats, 2)
        assert kernels.found.count("aten._foreach_norm.Scalar") <= 2
        counts.append(len(kernels.found))
    assert counts[0] == counts[1] < 40, (counts, kernels.found)


def test_norms_take_as_many_kernels_for_many_tensors_as_for_few(four: Ranks) -> None:
    """Red before: a norm, a cast and a copy for each."""
    four.run(_few_kernels, "pp=2,tp=2")


def _orders_complex(rank: int) -> None:
    model, _ = made("pp=2,tp=2")
    for parameter in model.parameters():
        turned = parameter.detach() * 1j
        with pytest.raises(NotImplementedError, match="not implemented for 'Complex"):
            turned > 0.5  # noqa: B015
        assert full((turned * turned).real).shape == parameter.shape  # and ranks are at the same point


def test_what_a_kernel_refuses_it_refuses_on_ranks_of_all_stages(four: Ranks) -> None:
    """Red before: ranks of other stages had nothing to refuse, and went on to the next line, where all waited."""
    four.run(_orders_complex)
