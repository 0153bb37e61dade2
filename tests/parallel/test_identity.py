"""Parameters become parallel in place: what cannot is refused by name, unharmed."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import Ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import autopar
from autopar.errors import AutoparError, RankError
from autopar.parallel.tensors.parameter import ParameterTensor
from autopar.torch_identity import SlotlessDTensor


class Slotted(nn.Parameter):
    __slots__ = ("kept",)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def parallel(model: nn.Module, **options: Any) -> Any:
    return autopar.parallelize(model, "dp=1", loss_fn=loss_fn, **options)


def net() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)).double()


X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)


# -- what cannot become parallel ------------------------------------------------------------------------------------


def _slots(model: nn.Sequential) -> Any:
    model[1].weight = Slotted(model[1].weight.detach())


def _weak(model: nn.Sequential) -> Any:
    return torch._C._WeakTensorRef(model[1].weight)


def _node_hook(model: nn.Sequential) -> Any:
    node = torch.autograd.graph.get_gradient_edge(model[1].weight).node
    return node, node.register_hook(lambda *_: None)


def _attribute(model: nn.Sequential) -> Any:
    model[1].weight.place = "mine"


def _several(model: nn.Sequential) -> Any:
    return torch.autograd.graph.register_multi_grad_hook(tuple(model[1].parameters()), lambda _: None)


def _memory(model: nn.Sequential) -> Any:
    model[0].weight.data = model[0].weight.data[:3].clone()
    model[1].weight.data = model[0].weight.data


def _sparse(model: nn.Sequential) -> Any:
    model[1].weight = nn.Parameter(model[1].weight.detach().to_sparse())


def _inference(model: nn.Sequential) -> Any:
    with torch.inference_mode():
        model[1].weight = nn.Parameter(torch.ones(3, 6))


KEEPS = "parallelize makes each parameter parallel in place, so that optimizers and lists that hold it stay right"
REFUSED: dict[str, tuple[Callable[[nn.Sequential], Any], str]] = {
    "slots": (_slots, (
        f"the parameter '1.weight' is a Slotted, whose class has __slots__: {KEEPS}, which Python cannot do with such "
        f"an object. Leave out __slots__ of the class, or use an nn.Parameter with attributes.")),
    "weak reference of torch": (_weak, (
        f"torch holds a weak reference to the parameter '1.weight' (torch._C._WeakTensorRef): {KEEPS}, which torch "
        f"refuses then. Delete it before autopar.parallelize, or use weakref.ref of Python, which stays right.")),
    "hook of a node": (_node_hook, (
        "the AccumulateGrad node of the parameter '1.weight' has a hook, which a compiled step would not run. Use "
        "parameter.register_hook(...) or parameter.register_post_accumulate_grad_hook(...), which it runs.")),
    "hook of several": (_several, (
        "register_multi_grad_hook was called on the parameter '1.weight' before autopar.parallelize: it keeps autograd "
        "nodes that the parallel parameter has no more. Register it after the first step, or after prepare().")),
    "attribute": (_attribute, (
        "the parameter '1.weight' has an attribute 'place', a name that parallel parameters use for themselves. Give "
        "it another name.")),
    "sparse": (_sparse, (
        "the tensor '1.weight' of the model is a sparse tensor (torch.sparse_coo). Use a dense one (a.to_dense(), "
        "beforehand), or keep its indices and its values: the product a @ x of a matrix is x.new_zeros(rows, "
        "x.shape[1]).index_add(0, row, value[:, None] * x[column]).")),
    "inference": (_inference, (
        "the parameter '1.weight' was made under torch.inference_mode(), and cannot be trained: build the model "
        "outside of it.")),
    "memory of another": (_memory, (
        "the parameters '0.weight' and '1.weight' lie in the same memory, but are two objects: parallel ones would be "
        "two values. Tie them as one nn.Parameter, as in `b.weight = a.weight`; or give one of them memory of its own "
        "(`b.weight.data = b.weight.data.clone()`).")),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_become_parallel_is_refused_unharmed(name: str) -> None:
    spoil, text = REFUSED[name]
    model = net()
    kept = spoil(model)
    kinds = list(map(type, model.parameters()))
    with pytest.raises(AutoparError) as caught:
        parallel(model)
    assert str(caught.value) == text
    assert list(map(type, model.parameters())) == kinds
    if name not in ("memory of another", "sparse", "inference"):
        loss_fn(model, X).backward()
        assert all(p.grad is not None for p in model.parameters())
    del kept


def _on_one_rank(rank: int) -> tuple[str, str]:
    model = net()
    kept = _weak(model) if rank == 1 else None
    try:
        autopar.parallelize(model, "dp=2", loss_fn=loss_fn)
    except AutoparError as error:
        text = str(error)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    loss_fn(model, X).backward()
    del kept
    if rank == 1:
        model[0].bias.grad.add_(1)  # type: ignore[union-attr, operator]
    try:
        autopar.parallelize(model, "dp=2", loss_fn=loss_fn)
    except AutoparError as error:
        return text, str(error)
    return text, ""


@pytest.mark.gloo
def test_ranks_agree_on_what_cannot_become_parallel(two: Ranks) -> None:
    (first, gradients), (second, _) = two.run(_on_one_rank)
    assert second.startswith("torch holds a weak reference to the parameter '1.weight'")
    assert first.startswith(
        "the model failed on some ranks, not on this one:\n  rank 1: AutoparError: torch holds a weak"
    )
    assert gradients.startswith("ranks disagree on the gradients:\n  rank 1 has 'gradient of '0.bias' with digest")


# -- what became parallel -------------------------------------------------------------------------------------------


def _twice_used(model: nn.Sequential) -> Tensor:
    return (model[0].weight * model[0].weight).sum() + model[0].weight[0].sum()


def test_backward_of_what_was_computed_before_is_refused() -> None:
    model = net()
    old, view = _twice_used(model), model[1].weight[0].sum()
    parallel(model)
    for loss, name in ((old, "0.weight"), (view, "1.weight")):
        with pytest.raises(AutoparError) as caught:
            loss.backward()
        assert str(caught.value) == (
            f"backward() of what was computed from '{name}' before autopar.parallelize made it parallel: its gradient "
            f"would go nowhere. Compute it again, with the parameter as it is now."
        )
    assert all(p.grad is None for p in model.parameters())


class Unread(nn.Module):
    """A parameter that no program reads."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.unread = nn.Linear(6, 4), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(x)


def _gradients_from_before(rank: int) -> list[str]:
    wrong = []
    for zero in (0, 1, 2, 3):
        torch.manual_seed(0)
        base = Unread().double()
        for parameter in base.parameters():
            parameter.grad = torch.randn_like(parameter)
        values = {name: p.grad.clone() for name, p in base.named_parameters()}  # type: ignore[union-attr]
        held = {name: p.grad for name, p in base.named_parameters()}
        model = autopar.parallelize(base, "dp=2", zero=zero, loss_fn=lambda m, x: m(x).sum())
        x = torch.ones(4, 6).double()
        model.prepare(x)
        for name, p in model.named_parameters():
            if p.grad is not held[name] or p.grad.to_local().shape != p.to_local().shape:
                wrong.append(f"zero={zero}: {name} has {p.grad.to_local().numel()}, not {p.to_local().numel()}")
            torch.testing.assert_close(p.grad.full_tensor(), values[name])
        model.forward_backward(x)
        for name, p in model.named_parameters():
            added = 4.0 if name.startswith("read") else 0.0
            torch.testing.assert_close(p.grad.full_tensor(), values[name] + added)
    return wrong


@pytest.mark.gloo
def test_a_gradient_from_before_lies_as_its_parameter_does(two: Ranks) -> None:
    assert two.run(_gradients_from_before) == [[], []]


def _before_the_layout(rank: int) -> str:
    model = net()
    made = autopar.parallelize(model, "fsdp=2", loss_fn=loss_fn)
    old = _twice_used(model)
    model[0].weight.sum().backward()  # a gradient that is there when the layout changes
    grad = model[0].weight.grad
    made.forward_backward(X)
    assert model[0].weight.grad is grad
    twin = net()
    twin[0].weight.sum().backward()
    loss_fn(twin, X).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)  # type: ignore[union-attr]
    try:
        old.backward()
    except AutoparError as error:
        return str(error)
    return ""


@pytest.mark.gloo
def test_backward_across_the_first_step_is_refused(two: Ranks) -> None:
    text = "backward() of what was computed from '0.weight' before its layout was decided: its gradient would go"
    assert all(found.startswith(text) for found in two.run(_before_the_layout))


def test_it_is_the_same_object_of_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
        model[2].weight = model[0].weight
    held, buffers, weak = list(model.parameters()), list(model.buffers()), weakref.ref(model[0].weight)
    optimizer = torch.optim.SGD(held, 0.1)
    made = parallel(model)
    before = [p.full_tensor().clone() for p in held]  # type: ignore[attr-defined]
    made.forward_backward(X.float())
    optimizer.step()
    assert all(a is b for a, b in zip(held, made.parameters(), strict=True)) and weak() is held[0]
    assert all(a is b for a, b in zip(buffers, made.buffers(), strict=True)) and int(model[1].num_batches_tracked) == 1
    assert all(not torch.equal(a, b.full_tensor()) for a, b in zip(before, held, strict=True))  # type: ignore[attr-defined]


def test_states_without_values_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 6))
    optimizer = torch.optim.Adagrad(model.parameters())  # which makes its states at once
    made = parallel(model)
    made.forward_backward(X.float())
    with pytest.raises(AutoparError) as caught:
        optimizer.step()
    assert str(caught.value) == (
        "the state 'sum' of Adagrad is on the meta device, without values: this optimizer makes states when it is "
        "made. Make it after autopar.parallelize."
    )


def _loaded(rank: int, early: bool) -> str:
    """Options of a scheduler, which torch's loader gives to rank 0 alone."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def made() -> tuple[Any, torch.optim.Optimizer]:
        model = autopar.parallelize(net(), "fsdp=2", loss_fn=loss_fn)
        return model, torch.optim.Adam(model.parameters(), 0.1)

    model, optimizer = made()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model.forward_backward(X)
    optimizer.step()
    scheduler.step()
    states = get_optimizer_state_dict(model, optimizer, options=whole)
    model, optimizer = made()
    if early:
        torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, optimizer, states, options=options)
    model.forward_backward(X)
    try:
        optimizer.step()
    except RankError as error:
        return str(error)
    return str(optimizer.param_groups[0]["initial_lr"])


@pytest.mark.gloo
def test_options_that_torch_loads_on_one_rank_are_told(two: Ranks) -> None:
    assert two.run(_loaded, True) == ["0.1", "0.1"]
    text = (
        "ranks disagree on the parameter groups of Adam:\n  rank 1 has 'nothing' where the others have 'group 0: 4 "
        "parameters, initial_lr=0.1'\nGive every rank the same parameter groups of Adam. (torch's "
        "set_optimizer_state_dict(broadcast_from_rank0=True) gives options that an optimizer has not yet, as a "
        "scheduler's initial_lr, to rank 0 alone: make the scheduler before it.)"
    )
    assert two.run(_loaded, False) == [text, text]


def test_a_parallel_parameter_has_all_that_a_dtensor_has() -> None:
    """The torch in use may have given DTensor something new."""
    own = {"_local_tensor", "_spec", "__slots__", "__slotnames__"}  # the last one is of pickle
    assert set(vars(DTensor)) - own <= set(vars(SlotlessDTensor)) | {"__init__", "__annotations__", "__annotate_func__"}
    model = net()
    parallel(model)
    weight: Any = model[0].weight
    assert isinstance(weight, DTensor) and isinstance(weight, nn.Parameter) and type(weight) is ParameterTensor
    copied = copy.deepcopy(weight)
    copied.mine = 1
    assert torch.equal(copied.full_tensor(), weight.full_tensor()) and copy.deepcopy(copied).mine == 1


def test_a_copy_of_what_shares_a_parameter_has_no_gradient() -> None:
    """Red where it kept the gradient, which torch's own copy drops."""
    plain, other = net(), nn.Linear(6, 6).double()
    other.weight = plain[0].weight
    model = parallel(plain)
    model.forward_backward(X)
    copied = copy.deepcopy(other)
    assert other.weight.grad is not None and copied.weight.grad is None
    assert copy.deepcopy(model[0].weight).grad is None
    weight: Any = copied.weight
    assert torch.equal(weight.full_tensor(), model.full_state_dict()["0.weight"])


def _shared(rank: int) -> None:
    """A plain model in the loss with a parameter of the parallel model, and one of its own."""
    for trained, meshes in (True, ("dp=2", "tp=2")), (False, ("fsdp=2", "pp=2")):  # its own have no place on a stage
        wanted = _with_shared(None, trained)
        for mesh in meshes:
            torch.testing.assert_close(_with_shared(mesh, trained), wanted, msg=f"{mesh} {trained}")


def _with_shared(mesh: str | None, trained: bool) -> list[Tensor]:
    model, other = net(), nn.Linear(6, 6).double().requires_grad_(trained)
    other.weight = model[0].weight
    optimizer = torch.optim.SGD([*model.parameters(), other.bias][: None if trained else -1], 0.1)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() + other(x).square().mean()

    made = autopar.parallelize(model, mesh, loss_fn=loss) if mesh else None
    for i in range(3):
        made.forward_backward(X + i) if made else loss(model, X + i).backward()
        optimizer.step()
        optimizer.zero_grad()
    held = (*model.parameters(), other.bias)
    return [p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for p in held]


@pytest.mark.gloo
def test_a_plain_model_in_the_loss_may_share_a_parameter(two: Ranks) -> None:
    two.run(_shared)


def test_torch_cannot_swap_what_is_parallel() -> None:
    model = net()
    parallel(model)
    with pytest.raises(
        AutoparError, match=r"the class of a tensor of a parallel model is fixed, so that torch.utils.swap"
    ):
        torch.utils.swap_tensors(model[0].weight, copy.deepcopy(model[0].weight))
    other = nn.Linear(6, 6).double()
    other.weight = model[0].weight
    with pytest.raises(RuntimeError, match=r"Couldn't swap Linear\.weight") as caught:  # torch's own text
        other.cpu()
    assert "nor .cpu(), .cuda() or .to() of a plain module that shares a parameter" in str(caught.value.__cause__)
    assert "model.part.cpu() for part.cpu()" in str(caught.value.__cause__)


FOREIGN: dict[str, Callable[[Any, Any], Any]] = {
    "+": torch.add, "stack": lambda a, b: torch.stack([a, b]), "linear": nn.functional.linear,
    "foreach": lambda a, b: torch._foreach_add([a, a], [b, b])[1], "lerp": lambda a, b: a.lerp(b, 0.3),
    "where": lambda a, b: torch.where(a > 0, a, b), "mse": nn.functional.mse_loss,
    "copy_": lambda a, b: a.clone().copy_(b), "in place": lambda a, b: a.clone().add_(b),
    "equal": lambda a, b: torch.tensor(torch.equal(a, b)),
}  # fmt: skip


def _foreign(rank: int) -> list[str]:
    """A DTensor that is not the model's, before and behind a tensor of the model."""
    model = nn.Linear(5, 3).double()
    plain = model.weight.detach().clone()
    made = autopar.parallelize(model, "fsdp=2", loss_fn=loss_fn)
    made.prepare(X[:, :5])
    ours: Any = model.weight.detach()  # five columns or three rows: over two ranks, with padding
    random = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    other = distribute_tensor(random, ours.device_mesh, [Shard(0)])
    told = []
    for name, func in FOREIGN.items():
        out = func(ours, other)
        torch.testing.assert_close(
            out.full_tensor() if isinstance(out, DTensor) else out, func(plain, random), msg=name
        )
        try:
            out = func(other, ours)
        except AutoparError as error:
            told.append(str(error))
        else:  # before torch 2.13 ours are asked first
            torch.testing.assert_close(out.full_tensor() if isinstance(out, DTensor) else out, func(random, plain))
    like: Any = torch.empty_like(ours).copy_(other)
    torch.testing.assert_close((like + ours).full_tensor(), random + plain)
    return told


@pytest.mark.gloo
def test_a_dtensor_of_others_is_right_behind_and_refused_before_ours(two: Ranks) -> None:
    for told in two.run(_foreign):
        assert set(told) <= {
            "a DTensor that is not the model's stands before a tensor of the model in an op: torch would compute by "
            "placements, which do not say how the model's lies. Let the model's stand first, as in `parameter + other` "
            "for `other + parameter`, or make the other one its like: `torch.empty_like(parameter).copy_(other)`."
        }
