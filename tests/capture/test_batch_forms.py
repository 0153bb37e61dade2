"""What code asks of the tensors of a batch beside their values: attributes, class, memory, their part in autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, BatchError, CaptureError

Forward = Callable[[Any, Tensor], Tensor]
Make = Callable[[], Tensor]


class Net(nn.Module):
    def __init__(self, body: Forward) -> None:
        super().__init__()
        self.one, self.body = nn.Linear(3, 3), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.one, x)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain() -> Tensor:
    return values(4, 3)


def with_(**attributes: Any) -> Make:
    def make() -> Tensor:
        x = plain()
        for name, value in attributes.items():
            setattr(x, name, value)
        return x

    return make


def turned() -> Tensor:
    return values(3, 4).t()


def later() -> Tensor:
    return values(6, 3)[2:]


def trained() -> Tensor:
    return plain().requires_grad_()


def computed() -> Tensor:
    return trained() * 2


def retained() -> Tensor:
    x = computed()
    x.retain_grad()
    return x


class Holder:
    def __init__(self, factor: float) -> None:
        self.factor = factor


MASKS = [values(4, 1, seed=seed) for seed in range(4)]
# What forward does, and the batches of four steps or so: each is made anew for the plain module and for ours.
SEEN: dict[str, tuple[Forward, Sequence[Make]]] = {
    "attribute": (lambda f, x: f(x) * getattr(x, "tag", 1.0), [plain, with_(tag=3.0), with_(tag=5.0), plain]),
    "attribute that is there": (
        lambda f, x: f(x) * (2 if hasattr(x, "tag") else 1), [with_(tag=1), plain, with_(tag=1)]
    ),
    "number": (lambda f, x: f(x) * x.tag, [with_(tag=k / 3) for k in range(1, 7)]),
    "text": (lambda f, x: f(x) * (2 if x.tag == "a" else 1), [with_(tag="a"), with_(tag="b"), with_(tag="a")]),
    "tensor": (lambda f, x: f(x) * x.mask, [with_(mask=mask) for mask in MASKS]),
    "tensor of another shape": (lambda f, x: f(x) * x.mask, [with_(mask=m) for m in (MASKS[0], plain(), MASKS[1])]),
    "tensor or nothing": (
        lambda f, x: f(x) * (1 if x.mask is None else x.mask), [with_(mask=m) for m in (None, MASKS[0], None)]
    ),
    "dict": (
        lambda f, x: f(x) * x.more["mask"] * x.more["k"], [with_(more={"mask": m, "k": m[0].item()}) for m in MASKS]
    ),
    "list": (lambda f, x: f(x) * sum(x.more), [with_(more=MASKS[:1]), with_(more=MASKS[:3]), with_(more=MASKS[1:2])]),
    "object": (lambda f, x: f(x) * x.more.factor, [with_(more=Holder(k)) for k in (1.0, 2.0, 3.0)]),
    "of the very tensor": (
        lambda f, x: f(x) * (2 if hasattr(x.detach(), "tag") else 1), [plain, with_(tag=1), plain]
    ),
    "name that is computed": (lambda f, x: f(x) * getattr(x, "t" + "ag".lower(), 1.0), [plain, with_(tag=3.0)]),
    "parameter": (
        lambda f, x: f(x) * (2 if isinstance(x, nn.Parameter) else 1), [trained, lambda: nn.Parameter(plain()), trained]
    ),
    "parameter that is not trained": (
        lambda f, x: f(x) * (2 if isinstance(x, nn.Parameter) else 1),
        [lambda: nn.Parameter(plain(), requires_grad=False), plain],
    ),
    "buffer": (lambda f, x: f(x) * (2 if isinstance(x, nn.Buffer) else 1), [plain, lambda: nn.Buffer(plain()), plain]),
    "contiguous": (lambda f, x: f(x) * (2 if x.is_contiguous() else 1), [plain, turned, plain]),
    "contiguous view": (lambda f, x: f(x) * (2 if x.t().is_contiguous() else 1), [plain, turned, plain]),
    "contiguous result": (lambda f, x: f(x) * (2 if (x * 2).is_contiguous() else 1), [turned, plain]),
    "channels last": (
        lambda f, x: f(x.mean((2, 3))) * (2 if x.is_contiguous(memory_format=torch.channels_last) else 1),
        [lambda: values(2, 3, 4, 4), lambda: values(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)],
    ),
    "stride": (lambda f, x: f(x) * float(x.stride(0)), [plain, lambda: values(4, 6)[:, :3], plain]),
    "order of dims": (lambda f, x: f(x) * float(1 + x.dim_order()[0]), [plain, turned, plain]),
    "strides of memory": (lambda f, x: f(torch.as_strided(x, (4, 3), (3, 1))), [plain, turned, plain]),
    "offset": (lambda f, x: f(x) * float(1 + x[1:].storage_offset()), [later, plain, later]),
    "shared": (
        lambda f, x: f(x) * (2 if x[1:].is_shared() else 1) * (3 if (x * 2).is_shared() else 1),
        [plain, lambda: plain().share_memory_(), plain],
    ),
    "negated": (
        lambda f, x: f(x) * (2 if x.is_neg() else 1), [plain, lambda: torch.complex(plain(), plain()).conj().imag]
    ),
    "conjugated": (
        lambda f, x: f(x.imag) * (2 if torch.is_conj(x) else 1),
        [lambda: torch.complex(plain(), plain()), lambda: torch.complex(plain(), plain()).conj()],
    ),
    "view": (lambda f, x: f(x) * (2 if x._is_view() else 1), [plain, lambda: values(12).view(4, 3), plain]),
    "leaf": (lambda f, x: f(x) * (2 if x.is_leaf else 1), [trained, computed, trained]),
    "kept gradient": (lambda f, x: f(x) * (2 if x.retains_grad else 1), [computed, retained]),
    "place among results": (
        lambda f, x: f(x) * float(1 + x.output_nr),
        [trained, lambda: torch.unbind(torch.stack([plain()] * 2).requires_grad_())[1]],
    ),
}  # fmt: skip


SEEN["other sizes"] = (
    lambda f, x: f(x) * (2 if x.is_contiguous() else 1) * getattr(x, "tag", 1),
    [plain, lambda: values(6, 3), lambda: values(3, 8).t(), lambda: values(8, 3), lambda: values(10, 3), turned],
)


@pytest.mark.parametrize("name", SEEN)
def test_a_step_sees_what_the_plain_module_sees(name: str) -> None:
    """Red before, each: a capture has stand-ins, which say otherwise, and nothing told one batch from another."""
    body, batches = SEEN[name]
    torch.manual_seed(0)
    module = Net(body).double()
    model = autopar.parallelize(copy.deepcopy(module), "dp=1", loss_fn=loss_fn)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (module, model)]
    for make in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        want = loss_fn(module, make())
        want.backward()
        torch.testing.assert_close(model.forward_backward(make()), want.detach())
        torch.testing.assert_close(model.full_gradients(), {n: p.grad for n, p in module.named_parameters()})
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(model.full_state_dict(), module.state_dict())


def test_a_number_on_a_tensor_becomes_an_input() -> None:
    model = autopar.parallelize(Net(lambda f, x: f(x) * x.tag).double(), "dp=1", loss_fn=loss_fn)
    for k in range(8):
        model.forward_backward(with_(tag=k / 3)())
    assert len(model.programs) <= 3


def test_what_nobody_reads_compiles_nothing() -> None:
    """Neither attributes, of which some cannot be carried, nor where a tensor lies."""
    model = autopar.parallelize(Net(lambda f, x: f(x)).double(), "dp=1", loss_fn=loss_fn)
    unread = [with_(path=f"image {k}", turns=iter("ab"), make=lambda: 1, boxes=[plain()] * k) for k in range(3)]
    for make in (plain, *unread, turned, later, plain):
        model.forward_backward(make())
    assert len(model.programs) == 1


def test_attributes_stay_what_they_were() -> None:
    model = autopar.parallelize(Net(lambda f, x: f(x) * x.tag).double(), "dp=1", loss_fn=loss_fn)
    for k in range(4):
        x = with_(tag=k / 3)()
        model.forward_backward(x)
        assert vars(x) == {"tag": k / 3} and type(x.tag) is float


def held(f: Any, x: Tensor) -> Tensor:
    x.seen = getattr(x, "seen", 0) + 1
    return f(x) * x.seen


def with_gradient() -> Tensor:
    x = trained()
    x.grad = torch.ones_like(x)
    return x


REFUSED: dict[str, tuple[Forward, Make, str]] = {
    "writes": (lambda f, x: f(x) * float(1 + x._version), plain, r"number of writes to a tensor.*Count in Python"),
    "address": (lambda f, x: f(x) * (2 if x.data_ptr() % 64 else 1), plain, r"the memory of a tensor \(data_ptr"),
    "storage": (lambda f, x: f(x) * float(x.untyped_storage().nbytes()), plain, r"the memory of a tensor"),
    "base": (lambda f, x: f(x) * (2 if x._base is None else 1), lambda: values(12).view(4, 3), r"\._base of a tensor"),
    "graph": (lambda f, x: f(x) * (2 if x.grad_fn is None else 1), computed, r"\.grad_fn of a tensor of the batch"),
    "gradient": (lambda f, x: f(x) * (2 if x.grad is None else 1), with_gradient, r"\.grad of a tensor of the batch"),
    "memory before it": (lambda f, x: f(torch.as_strided(x, (2, 3), (3, 1), 3)), later, r"as_strided, with an offset"),
    "class by is": (lambda f, x: f(x) * (2 if type(x) is Tensor else 1), plain, r"isinstance\(x, torch.Tensor\)"),
    "class by ==": (lambda f, x: f(x) * (2 if type(x) == torch.Tensor else 1), plain, r"comparison of a class"),  # noqa: E721
    "class among others": (
        lambda f, x: f(x) * (2 if x.__class__ in (torch.Tensor, nn.Parameter) else 1), plain, r"comparison of a class"
    ),
    "name of the class": (lambda f, x: f(x) * (2 if type(x).__name__ == "Tensor" else 1), plain, r"of a class"),
    "attribute that is left": (held, plain, r"left on a tensor of the batch \('seen'\)"),
    "attribute that is trained": (lambda f, x: f(x) * x.mask, with_(mask=trained()), r"requires a gradient and is no"),
    "seed": (lambda f, x: f(x) * float(torch.initial_seed() % 7), plain, r"torch.initial_seed\(\).*seed= given"),
    "seed of the generator": (
        lambda f, x: f(x) * float(torch.default_generator.initial_seed() % 7), plain, r"torch.initial_seed\(\)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_program_can_follow_is_refused(name: str) -> None:
    """Red before, nearly all: the stand-in's answer was taken in silence."""
    body, make, message = REFUSED[name]
    model = autopar.parallelize(Net(body).double(), "dp=1", loss_fn=loss_fn)
    with pytest.raises(CaptureError, match=r"(?s)test_batch_forms.py:\d+.*" + message):
        model.forward_backward(make())


@pytest.mark.parametrize("is_parameter", (False, True))
def test_verify_gives_both_sides_what_a_batch_carries(is_parameter: bool) -> None:
    """Red before: copies of the batch carried nothing, and were no parameters."""

    def body(f: Any, x: Tensor) -> Tensor:
        return f(x) * x.factor * x.row * (2 if isinstance(x, nn.Parameter) is is_parameter else x.nothing)  # type: ignore[attr-defined]

    x = nn.Parameter(plain()) if is_parameter else plain()
    x.factor, x.row = 3.0, values(3)  # type: ignore[attr-defined]
    assert autopar.verify(Net(body), "dp=2", loss_fn=loss_fn, batch=(x,), steps=2).ok


def test_a_class_of_tensors_is_refused() -> None:
    class Own(torch.Tensor):
        pass

    model = autopar.parallelize(Net(lambda f, x: f(x)).double(), "dp=1", loss_fn=loss_fn)
    with pytest.raises(BatchError, match=r"argument 0 is a Own, a class of tensors of its own: pass .as_subclass"):
        model.forward_backward(plain().as_subclass(Own))


def test_inference_mode_is_none_of_a_program() -> None:
    """Red before: a program is made outside of it, and said so to the model."""
    asks = Net(lambda f, x: f(x) * (2 if torch.is_inference_mode_enabled() else 1)).double()
    model = autopar.parallelize(copy.deepcopy(asks), "dp=1", loss_fn=loss_fn)
    with torch.no_grad():
        torch.testing.assert_close(model(plain()), asks(plain()))
    other = autopar.parallelize(asks, "dp=1", loss_fn=loss_fn)
    with (
        torch.inference_mode(),
        pytest.raises(AutoparError, match=r"is_inference_mode_enabled\(\), asked in"),
    ):
        other(plain())


def test_torchs_own_classes_may_be_compared() -> None:
    """With what is no tensor, and where nobody asks for the class of one."""

    def body(f: Any, x: Tensor) -> Tensor:
        kinds = {torch.Tensor: 2, nn.Linear: 3}
        return f(x) * kinds[type(f) if type(x.shape) is torch.Size else nn.Linear]

    module = Net(body).double()
    model = autopar.parallelize(copy.deepcopy(module), "dp=1", loss_fn=loss_fn)
    torch.testing.assert_close(model.forward_backward(plain()), loss_fn(module, plain()).detach())
