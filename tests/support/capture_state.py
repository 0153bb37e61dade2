"""Programs that write in place, keep things between steps, or take gradients themselves; and losses that do."""

from __future__ import annotations

import io
import random
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from capture_case import noted, refused, works
from torch import Tensor, nn

TOTAL: list[Any] = [0]
SEEN = 0


# In place, views, aliases


@noted("the model writes into tensor 0 of the batch, at", "the caller's tensor stays as it is")
def writes_input_view(m: Any, x: Tensor) -> Tensor:
    x[:, 0] = 0  # HERE
    return m.linear(x)


@noted("the model writes into tensor 0 of the batch, at", "the caller's tensor stays as it is")
def adds_to_input(m: Any, x: Tensor) -> Tensor:
    x.add_(1)  # HERE
    return m.linear(x)


@works
def writes_clone(m: Any, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0] = 0
    return m.linear(x.add_(1))


@works
def data_mul(m: Any, x: Tensor) -> Tensor:
    m.linear.weight.data.mul_(0.9)  # HERE
    return m.linear(x)


@works
def parameter_copy(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.linear.weight.copy_(m.linear.weight / m.linear.weight.norm())  # HERE
    return m.linear(x)


@refused("a tensor that is pickled", "delete the file that this line began")
def kept_on_disk(m: Any, x: Tensor) -> Tensor:
    torch.save(torch.arange(x.shape[-1]), io.BytesIO())  # HERE
    return m.linear(x)


@refused("a parameter that is changed in place, and would get a gradient through that", "a new tensor")
def leaf_in_place(m: Any, x: Tensor) -> Tensor:
    m.scale.add_(1)  # HERE
    return m.linear(x) * m.scale


@works
def replaces_data(m: Any, x: Tensor) -> Tensor:
    m.linear.weight.data = m.linear.weight.data * 0.5
    return m.linear(x)


@refused("an assignment to .data of another form ([4, 4] of float32 becomes [2, 4] of float32)", "for one form")
def data_of_another_form(m: Any, x: Tensor) -> Tensor:
    m.linear.weight.data = m.linear.weight.data[:2]  # HERE
    return m.linear(x)


@refused("an assignment to .data of what is in the memory of a parameter", "x.data = y.detach().clone()")
def shares_data(m: Any, x: Tensor) -> Tensor:
    m.mean.data = m.linear.weight.data  # HERE
    return m.linear(x) + m.mean


@refused("an assignment to .data of a tensor that the backward pass may need", "before the first use")
def data_behind_use(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    m.linear.weight.data = m.linear.weight.data * 0.5  # HERE
    return m.linear(h)


@works
def data_copied_behind_use(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    m.linear.weight.data.mul_(0.5)
    return m.linear(h)


@works
def data_of_buffer(m: Any, x: Tensor) -> Tensor:
    m.mean.data = m.mean.data * 0.9 + x.detach() * 0.1
    return m.linear(x) + m.mean


@refused("a parameter 'linear.weight' that is made or replaced", "make it in __init__")
def replaces_parameter(m: Any, x: Tensor) -> Tensor:
    m.linear.weight = nn.Parameter(m.linear.weight.detach() * 0.5)  # HERE
    return m.linear(x)


@refused("a parameter 'late' that is made or replaced", "make it in __init__")
def new_parameter(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "late"):
        m.late = nn.Parameter(torch.ones(4))  # HERE
    return m.linear(x) * m.late


@refused("a module 'late' that is made", "Make it in __init__")
def new_module(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "late"):
        m.late = nn.Linear(4, 4)  # HERE
    return m.linear(m.late(x))


@works
def resizes(m: Any, x: Tensor) -> Tensor:
    return m.linear(x.clone().resize_(2, 4))  # HERE


@works
def strided(m: Any, x: Tensor) -> Tensor:
    return m.linear(x).as_strided((2, 4), (8, 1))


@works
def out_argument(m: Any, x: Tensor) -> Tensor:
    y = torch.empty(4, 4, dtype=x.dtype)
    torch.mul(x, 2, out=y)
    return m.linear(y)


@works
def buffer_view(m: Any, x: Tensor) -> Tensor:
    m.mean[0].copy_(x.mean(0))
    return m.linear(x) + m.mean


@works
def buffer_replaced(m: Any, x: Tensor) -> Tensor:
    m.mean = m.mean * 0.9 + x.detach() * 0.1
    return m.linear(x) + m.mean


@refused(
    "a buffer 'mean' of another form ([4, 4] of float32 before the step, [8, 4] of float32 after it)",
    "of its full size in __init__",
)
def buffer_grows(m: Any, x: Tensor) -> Tensor:
    m.mean = torch.cat([m.mean, x.detach()])  # HERE
    return m.linear(x) + m.mean.mean(0)


@refused("a buffer 'mean' whose new value has a gradient", "x.detach()")
def buffer_with_grad(m: Any, x: Tensor) -> Tensor:
    m.mean = m.mean * 0.9 + m.linear(x) * 0.1  # HERE
    return m.mean * 2


@refused("an in-place change of a tensor that the backward pass of this line needs", "without the underscore")
def overwritten_for_backward(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x).exp()  # HERE
    g = h * 2
    h.add_(1)
    return g


# Python state


@noted("'counter' is changed at", "it stays as it is")
def counts(m: Any, x: Tensor) -> Tensor:
    m.counter += 1  # HERE
    return m.linear(x)


@refused("'counter'", "self.register_buffer")
def counter_used(m: Any, x: Tensor) -> Tensor:
    m.counter += 1
    return m.linear(x) * m.counter  # HERE


@noted("'history' is changed at", "it stays as it is")
def appends(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    m.history.append(h.detach())  # HERE
    return h


@works
def caches(m: Any, x: Tensor) -> Tensor:
    if "mask" not in m.cache:
        m.cache["mask"] = torch.ones(4, 4).tril()  # HERE
    return m.linear(x) * m.cache["mask"]


@refused("'cache['last']'", "self.register_buffer")
def caches_data(m: Any, x: Tensor) -> Tensor:
    last = m.cache.get("last", x)
    m.cache["last"] = x * 2
    return m.linear(x + last)  # HERE


@refused("'kept'", "self.register_buffer")
def keeps(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    if m.kept is not None:
        h = h + m.kept  # HERE
    m.kept = h.detach()
    return h


@noted("'flag' is changed at", "it stays as it is")
def sets_flag(m: Any, x: Tensor) -> Tensor:
    if not m.flag:
        m.flag = True  # HERE
    return m.linear(x)


@refused("(1 first, then 2)", "pass it in with the batch")
def global_list(m: Any, x: Tensor) -> Tensor:
    TOTAL[0] += 1
    return m.linear(x) * TOTAL[0]  # HERE


@refused("(1 first, then 2)", "pass it in with the batch")
def global_name(m: Any, x: Tensor) -> Tensor:
    global SEEN
    SEEN = SEEN + 1
    return m.linear(x) * SEEN  # HERE


@noted("'penalty' is changed at", "it stays as it is")
def own_side_loss(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    m.penalty = h.abs().mean()  # HERE
    return h


@refused("computes with a float that it draws", "draw it by torch.rand")
def random_random(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * torch.full((4,), random.random())  # HERE


@refused("computes with a float that it draws", "draw it by torch.rand")
def numpy_random(m: Any, x: Tensor) -> Tensor:
    return F.dropout(m.linear(x), np.random.rand())  # HERE


@refused("It comes from a numpy generator", "pass it in with the batch")
def numpy_generator(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * np.random.default_rng().random()  # HERE


@refused("It comes from the clock", "pass it in with the batch")
def reads_time(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * (time.time() % 2)  # HERE


@noted("'seconds' is changed at", "it stays as it is")
def times_itself(m: Any, x: Tensor) -> Tensor:
    start = time.perf_counter()
    h = m.linear(x)
    m.seconds = time.perf_counter() - start  # HERE
    return h


@refused("a random op after the random state of torch was set", "leave the seeding out")
def seeds(m: Any, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return m.linear(x) + torch.randn(4, 4)  # HERE


# Gradients by hand


@works
def gradient_penalty(m: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    h = m.linear(x).tanh()
    (grad,) = torch.autograd.grad(h.sum(), x, create_graph=True)
    return h + grad.square()


@works
def penalty_through_softmax(m: Any, x: Tensor) -> Tensor:
    h = F.dropout(m.linear(x), 0.5)
    value = F.log_softmax(h, -1).square().sum() + h.logsumexp(-1).square().sum()
    (grad,) = torch.autograd.grad(value, h, create_graph=True)
    return F.log_softmax(h, -1, dtype=torch.float64) + grad


@works
def inner_gradient(m: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(m.linear(x).tanh().sum(), x)
    return m.linear(x) * grad


@works
def func_grad(m: Any, x: Tensor) -> Tensor:
    slope = torch.func.grad(lambda v: m.linear(v).tanh().sum())(x)
    return m.linear(x) * slope


@works
def vmapped(m: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: m.linear(row).tanh())(x)


@works
def no_grad_part(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = m.linear(x)
    return m.linear(x * 2) - target


@works
def detaches(m: Any, x: Tensor) -> Tensor:
    return m.linear(m.linear(x).detach())


@works
def tensor_hook(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    h.register_hook(lambda grad: grad * 0.5)
    return h.tanh()


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.max().item()  # HERE


@refused(".item()", "Leave it a tensor")
def reads_in_backward(m: Any, x: Tensor) -> Tensor:
    return ReadsInBackward.apply(m.linear(x))


@refused("a write to 'plain', a tensor that is neither a buffer nor a parameter", "self.register_buffer")
def plain_tensor(m: Any, x: Tensor) -> Tensor:
    m.plain += 1  # HERE
    return m.linear(x) * m.plain


@refused("'plain'", "self.register_buffer")
def plain_replaced(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x) * m.plain  # HERE
    m.plain = h.detach().mean()
    return h


@refused("a gradient with create_graph=True that goes through attention", "elementwise functions")
def second_derivative(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    loss = F.scaled_dot_product_attention(*[h[None, None]] * 3, dropout_p=0.1).sum()
    (grad,) = torch.autograd.grad(loss, h, create_graph=True)  # HERE
    return h + grad


# Losses


@refused("a backward pass of your own (.backward())", "Only return the loss")
def backward_in_loss(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().sum()
    loss.backward()  # HERE
    return loss


@refused("a backward pass of your own (.backward())", "Only return the loss")
def step_in_loss(model: nn.Module, x: Tensor) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(x).square().sum()
    optimizer.zero_grad()
    loss.backward()  # HERE
    optimizer.step()
    return loss


@refused(".item()", "Leave it a tensor")
def item_loss(model: nn.Module, x: Tensor) -> float:
    return model(x).square().sum().item()  # HERE


@refused(".item()", "read after the step")
def logging_loss(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().sum()
    TOTAL.append(loss.item())  # HERE
    return loss


@works
def keeping_loss(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().sum()
    TOTAL.append(loss.detach())  # HERE
    return loss
