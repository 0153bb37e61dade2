"""Small programs as users write them: what a capture takes, refuses or notes. `# HERE` marks the line to be named."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

log = logging.getLogger(__name__)
TOTAL: list[Any] = [0]
SEEN = 0


class Net(nn.Module):
    """A module whose forward is `body`; what the bodies keep on it is made here."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body = body
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4, 4))
        self.counter = 0
        self.history: list[Any] = []
        self.cache: dict[str, Tensor] = {}
        self.kept: Tensor | None = None
        self.flag = False

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


# Control flow that reads data


def if_sum(m: Any, x: Tensor) -> Tensor:
    if x.sum() > 0:  # HERE
        return m.linear(x)
    return -m.linear(x)


def while_norm(m: Any, x: Tensor) -> Tensor:
    while x.norm() > 1:  # HERE
        x = m.linear(x) / 2
    return x


def for_range(m: Any, x: Tensor) -> Tensor:
    for _ in range(int(x.max())):  # HERE
        x = m.linear(x)
    return x


def boolean_and(m: Any, x: Tensor) -> Tensor:
    positive = x.sum() > 0 and m.training  # HERE
    return m.linear(x) if positive else x


def boolean_not(m: Any, x: Tensor) -> Tensor:
    empty = not x.any()  # HERE
    return m.linear(x) if empty else m.linear(-x)


def asserts(m: Any, x: Tensor) -> Tensor:
    assert (x < 100).all(), "too large"  # HERE
    return m.linear(x)


def raises_on_nan(m: Any, x: Tensor) -> Tensor:
    if torch.isnan(x).any():  # HERE
        raise ValueError("nan in the input")
    return m.linear(x)


def ternary(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) if x.mean() > 0 else x  # HERE


def all_close(m: Any, x: Tensor) -> Tensor:
    if torch.allclose(x, torch.zeros_like(x)):  # HERE
        return x
    return m.linear(x)


def is_equal(m: Any, x: Tensor) -> Tensor:
    if torch.equal(x, x.T):  # HERE
        return x
    return m.linear(x)


def membership(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) if 1.0 in x else m.linear(-x)  # HERE


# Values taken out of a tensor


def item(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * x.mean().item()  # HERE


def tolist(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * x[0].tolist()[0]  # HERE


def float_of(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * float(x.mean())  # HERE


def int_of(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * int(x.max())  # HERE


def bool_of(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * bool(x.max() > 0)  # HERE


def numpy_of(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * float(x.detach().numpy().sum())  # HERE


def numpy_asarray(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * float(np.asarray(x.detach()).sum())  # HERE


def numpy_trip(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) + torch.from_numpy(np.tanh(x.detach().cpu().numpy()))  # HERE


def index_of_tensor(m: Any, x: Tensor) -> Tensor:
    scales = [1.0, 2.0, 3.0]
    return m.linear(x) * scales[x.argmax()]  # HERE


def slice_by_tensor(m: Any, x: Tensor) -> Tensor:
    n = (x > 0).sum()
    return m.linear(x)[:n]  # HERE


def size_of_tensor(m: Any, x: Tensor) -> Tensor:
    n = x.max().long()
    return m.linear(x).sum() + torch.zeros(n).sum()  # HERE


def prints(m: Any, x: Tensor) -> Tensor:
    print("mean", x.mean())  # HERE
    return m.linear(x)


def prints_item(m: Any, x: Tensor) -> Tensor:
    print(f"mean {x.mean().item():.3f}")  # HERE
    return m.linear(x)


def formats(m: Any, x: Tensor) -> Tensor:
    _text = f"mean {x.mean():.3f}"  # HERE
    return m.linear(x)


def logs(m: Any, x: Tensor) -> Tensor:
    log.warning("mean %s", x.mean())  # HERE
    return m.linear(x)


# Results whose size depends on data


def nonzero(m: Any, x: Tensor) -> Tensor:
    return m.linear(x)[x.nonzero()[:, 0]]  # HERE


def boolean_mask(m: Any, x: Tensor) -> Tensor:
    return m.linear(x)[x > 0]  # HERE


def mask_write(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    h[x > 0] = 0
    return h


def unique(m: Any, x: Tensor) -> Tensor:
    return m.linear(x).sum() * torch.unique(x).sum()  # HERE


def masked_select(m: Any, x: Tensor) -> Tensor:
    return torch.masked_select(m.linear(x), x > 0)  # HERE


def where_one(m: Any, x: Tensor) -> Tensor:
    rows, _ = torch.where(x > 0)  # HERE
    return m.linear(x)[rows]


def repeats(m: Any, x: Tensor) -> Tensor:
    return torch.repeat_interleave(m.linear(x), x[:, 0].long().abs(), dim=0)  # HERE


def bincount(m: Any, x: Tensor) -> Tensor:
    return m.linear(x).sum() * torch.bincount(x.flatten().long().abs()).sum()  # HERE


def split_by_tensor(m: Any, x: Tensor) -> Tensor:
    parts = m.linear(x).split(x[:, 0].long().tolist())  # HERE
    return parts[0]


# In place, views, aliases


def writes_input_view(m: Any, x: Tensor) -> Tensor:
    x[:, 0] = 0  # HERE
    return m.linear(x)


def adds_to_input(m: Any, x: Tensor) -> Tensor:
    x.add_(1)  # HERE
    return m.linear(x)


def writes_clone(m: Any, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0] = 0
    return m.linear(x.add_(1))


def data_mul(m: Any, x: Tensor) -> Tensor:
    m.linear.weight.data.mul_(0.9)  # HERE
    return m.linear(x)


def parameter_copy(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.linear.weight.copy_(m.linear.weight / m.linear.weight.norm())  # HERE
    return m.linear(x)


def leaf_in_place(m: Any, x: Tensor) -> Tensor:
    m.scale.add_(1)  # HERE
    return m.linear(x) * m.scale


def replaces_data(m: Any, x: Tensor) -> Tensor:
    m.linear.weight.data = m.linear.weight.data * 0.5  # HERE
    return m.linear(x)


def replaces_parameter(m: Any, x: Tensor) -> Tensor:
    m.linear.weight = nn.Parameter(m.linear.weight.detach() * 0.5)  # HERE
    return m.linear(x)


def new_parameter(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "late"):
        m.late = nn.Parameter(torch.ones(4))  # HERE
    return m.linear(x) * m.late


def new_module(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "late"):
        m.late = nn.Linear(4, 4)  # HERE
    return m.linear(m.late(x))


def resizes(m: Any, x: Tensor) -> Tensor:
    return m.linear(x.clone().resize_(2, 4))  # HERE


def sets(m: Any, x: Tensor) -> Tensor:
    y = torch.empty(0)
    y.set_(x.clone())  # HERE
    return m.linear(y)


def strided(m: Any, x: Tensor) -> Tensor:
    return m.linear(x).as_strided((2, 4), (8, 1))


def out_argument(m: Any, x: Tensor) -> Tensor:
    y = torch.empty(4, 4)
    torch.mul(x, 2, out=y)
    return m.linear(y)


def buffer_view(m: Any, x: Tensor) -> Tensor:
    m.mean[0].copy_(x.mean(0))
    return m.linear(x) + m.mean


def buffer_replaced(m: Any, x: Tensor) -> Tensor:
    m.mean = m.mean * 0.9 + x.detach() * 0.1
    return m.linear(x) + m.mean


def buffer_grows(m: Any, x: Tensor) -> Tensor:
    m.mean = torch.cat([m.mean, x.detach()])  # HERE
    return m.linear(x) + m.mean.mean(0)


def buffer_with_grad(m: Any, x: Tensor) -> Tensor:
    m.mean = m.mean * 0.9 + m.linear(x) * 0.1  # HERE
    return m.mean * 2


def overwritten_for_backward(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x).exp()
    g = h * 2
    h.add_(1)  # HERE
    return g


# Python state


def counts(m: Any, x: Tensor) -> Tensor:
    m.counter += 1  # HERE
    return m.linear(x)


def counter_used(m: Any, x: Tensor) -> Tensor:
    m.counter += 1  # HERE
    return m.linear(x) * m.counter


def appends(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    m.history.append(h.detach())  # HERE
    return h


def caches(m: Any, x: Tensor) -> Tensor:
    if "mask" not in m.cache:
        m.cache["mask"] = torch.ones(4, 4).tril()  # HERE
    return m.linear(x) * m.cache["mask"]


def caches_data(m: Any, x: Tensor) -> Tensor:
    last = m.cache.get("last", x)
    m.cache["last"] = x * 2  # HERE
    return m.linear(x + last)


def keeps(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    if m.kept is not None:
        h = h + m.kept
    m.kept = h.detach()  # HERE
    return h


def sets_flag(m: Any, x: Tensor) -> Tensor:
    if not m.flag:
        m.flag = True  # HERE
    return m.linear(x)


def global_list(m: Any, x: Tensor) -> Tensor:
    TOTAL[0] += 1  # HERE
    return m.linear(x) * TOTAL[0]


def global_name(m: Any, x: Tensor) -> Tensor:
    global SEEN
    SEEN = SEEN + 1  # HERE
    return m.linear(x) * SEEN


def own_side_loss(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    m.penalty = h.abs().mean()  # HERE
    return h


def random_random(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * random.random()  # HERE


def layer_drop(m: Any, x: Tensor) -> Tensor:
    if random.random() < 0.5:  # HERE
        return m.linear(x)
    return m.linear(m.linear(x))


def numpy_random(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * np.random.rand()  # HERE


def numpy_generator(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * np.random.default_rng().random()  # HERE


def reads_time(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * (time.time() % 2)  # HERE


def times_itself(m: Any, x: Tensor) -> Tensor:
    start = time.perf_counter()
    h = m.linear(x)
    m.seconds = time.perf_counter() - start  # HERE
    return h


def seeds(m: Any, x: Tensor) -> Tensor:
    torch.manual_seed(0)  # HERE
    return m.linear(x) + torch.randn(4, 4)


def opens_file(m: Any, x: Tensor) -> Tensor:
    with open("/dev/null", "w") as file:
        file.write("step\n")
    return m.linear(x)


# Gradients by hand


def gradient_penalty(m: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    h = m.linear(x).tanh()
    (grad,) = torch.autograd.grad(h.sum(), x, create_graph=True)
    return h + grad.square()


def inner_gradient(m: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(m.linear(x).tanh().sum(), x)
    return m.linear(x) * grad


def func_grad(m: Any, x: Tensor) -> Tensor:
    slope = torch.func.grad(lambda v: m.linear(v).tanh().sum())(x)
    return m.linear(x) * slope


def vmapped(m: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: m.linear(row).tanh())(x)


def no_grad_part(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = m.linear(x)
    return m.linear(x * 2) - target


def detaches(m: Any, x: Tensor) -> Tensor:
    return m.linear(m.linear(x).detach())


def tensor_hook(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    h.register_hook(lambda grad: grad * 0.5)
    return h.tanh()


def retained(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    h.retain_grad()
    return h


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.max().item()  # BACKWARD


def reads_in_backward(m: Any, x: Tensor) -> Tensor:
    return ReadsInBackward.apply(m.linear(x))


# Kinds of tensors, and the user's own faults


def nested(m: Any, x: Tensor) -> Tensor:
    n = torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged)  # HERE
    return m.linear(n.values())


def to_sparse(m: Any, x: Tensor) -> Tensor:
    return torch.sparse.mm(x.to_sparse(), m.linear(x))  # HERE


def complex_numbers(m: Any, x: Tensor) -> Tensor:
    return torch.fft.fft(m.linear(x)).abs()


def quantized(m: Any, x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(m.linear(x), 0.1, 0, torch.qint8).dequantize()  # HERE


def to_cuda(m: Any, x: Tensor) -> Tensor:
    return m.linear(x.cuda())  # HERE


def to_meta(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) + torch.ones(4, device="meta")  # HERE


def own_exception(m: Any, x: Tensor) -> Tensor:
    if x.shape[1] == 4:
        raise ValueError("the width must not be 4")  # HERE
    return m.linear(x)


def own_assert(m: Any, x: Tensor) -> Tensor:
    assert x.shape[1] == 5  # HERE
    return m.linear(x)


def key_error(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * {"a": 1}["b"]  # HERE


def wrong_shape(m: Any, x: Tensor) -> Tensor:
    return m.linear(x.T[:, :3])  # HERE


def recursion(m: Any, x: Tensor) -> Tensor:
    return recursion(m, m.linear(x))  # HERE


def collective(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    torch.distributed.all_reduce(h)  # HERE
    return h


def asks_rank(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * torch.distributed.get_rank()  # HERE


def generator_forward(m: Any, x: Tensor) -> Iterator[Tensor]:
    for _ in range(2):
        x = m.linear(x)
        yield x


def returns_input(m: Any, x: Tensor) -> Tensor:
    m.linear(x)
    return x


def list_multiply(m: Any, x: Tensor) -> Tensor:
    return F.relu(m.linear(x), inplace=True)


PROGRAMS: dict[str, Callable[..., Any]] = {
    name: value for name, value in list(globals().items())
    if callable(value) and getattr(value, "__module__", "") == __name__
    and not isinstance(value, type) and name != "squares"
}  # fmt: skip


# Losses


def backward_in_loss(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().sum()
    loss.backward()  # HERE
    return loss


def step_in_loss(model: nn.Module, x: Tensor) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(x).square().sum()
    optimizer.zero_grad()
    loss.backward()  # HERE
    optimizer.step()
    return loss


def item_loss(model: nn.Module, x: Tensor) -> float:
    return model(x).square().sum().item()  # HERE


def logging_loss(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().sum()
    TOTAL.append(loss.item())  # HERE
    return loss


def keeping_loss(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().sum()
    TOTAL.append(loss.detach())  # HERE
    return loss
