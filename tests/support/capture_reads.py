"""Programs that read data, hold odd kinds of tensors, or fail by themselves."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from capture_case import guarded, noted, refused, works
from torch import Tensor

log = logging.getLogger(__name__)
log.addHandler(logging.StreamHandler())
log.propagate = False  # the handlers of pytest would print the tensor again


# Control flow that reads data


@guarded
def if_sum(m: Any, x: Tensor) -> Tensor:
    if x.sum() > 0:  # HERE
        return m.linear(x)
    return -m.linear(x)


@guarded
def while_norm(m: Any, x: Tensor) -> Tensor:
    while x.norm() > 1:  # HERE
        x = m.linear(x) / 2
    return x


@refused("a tensor as a Python integer", "Pass the number in as a Python int")
def for_range(m: Any, x: Tensor) -> Tensor:
    for _ in range(int(x.max())):  # HERE
        x = m.linear(x)
    return x


@guarded
def boolean_and(m: Any, x: Tensor) -> Tensor:
    positive = x.sum() > 0 and m.training  # HERE
    return m.linear(x) if positive else x


@guarded
def boolean_not(m: Any, x: Tensor) -> Tensor:
    empty = not x.any()  # HERE
    return m.linear(x) if empty else m.linear(-x)


@guarded
def asserts(m: Any, x: Tensor) -> Tensor:
    assert (x < 100).all(), "too large"  # HERE
    return m.linear(x)


@guarded
def raises_on_nan(m: Any, x: Tensor) -> Tensor:
    if torch.isnan(x).any():  # HERE
        raise ValueError("nan in the input")
    return m.linear(x)


@guarded
def ternary(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) if x.mean() > 0 else x  # HERE


@guarded
def all_close(m: Any, x: Tensor) -> Tensor:
    if torch.allclose(x, torch.zeros_like(x)):  # HERE
        return x
    return m.linear(x)


@guarded
def is_equal(m: Any, x: Tensor) -> Tensor:
    if torch.equal(x, x.T):  # HERE
        return x
    return m.linear(x)


@guarded
def membership(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) if 1.0 in x else m.linear(-x)  # HERE


# Values taken out of a tensor


@works
def item(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * x.mean().item()


@guarded
def item_of_a_branch(m: Any, x: Tensor) -> Tensor:
    mean = x.mean().item()  # HERE
    return m.linear(x) if mean > 0 else x


@refused(".tolist()", "Leave it a tensor")
def tolist(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * len(f"{x[0].tolist()[0]}")  # HERE


@refused("float() of a tensor", "Leave it a tensor")
def float_of(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * float(x.mean())  # HERE


@refused("a tensor as a Python integer", "Pass the number in as a Python int")
def int_of(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * int(x.max())  # HERE


@guarded
def bool_of(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * bool(x.max() > 0)  # HERE


@refused("a way to numpy", "Use the torch function of the same name")
def numpy_of(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * float(x.detach().numpy().sum())  # HERE


@refused("a way to numpy", "Use the torch function of the same name")
def numpy_asarray(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * float(np.asarray(x.detach()).sum())  # HERE


@refused("a way to numpy", "Use the torch function of the same name")
def numpy_trip(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) + torch.from_numpy(np.tanh(x.detach().cpu().numpy()))  # HERE


@refused("a tensor as a Python integer", "table[index]")
def index_of_tensor(m: Any, x: Tensor) -> Tensor:
    scales = [1.0, 2.0, 3.0]
    return m.linear(x) * scales[x.argmax()]  # HERE


@refused("a slice whose length a tensor decides", "mask the rest")
def slice_by_tensor(m: Any, x: Tensor) -> Tensor:
    n = (x > 0).sum()
    return m.linear(x)[:n]  # HERE


@refused("a tensor as a Python integer", "a fixed size and a mask")
def size_of_tensor(m: Any, x: Tensor) -> Tensor:
    n = x.max().long()
    return m.linear(x).sum() + torch.zeros(n).sum()  # HERE


@noted("a tensor is printed at", "print the loss after the step")
def prints(m: Any, x: Tensor) -> Tensor:
    print("mean", x.mean())  # HERE
    return m.linear(x)


@refused(".item()", "read after the step")
def prints_item(m: Any, x: Tensor) -> Tensor:
    print(f"mean {x.mean().item():.3f}")  # HERE
    return m.linear(x)


@refused("the text of a tensor", "read its value after the step")
def formats(m: Any, x: Tensor) -> Tensor:
    _text = f"mean {x.mean():.3f}"  # HERE
    return m.linear(x)


@noted("a tensor is printed at", "print the loss after the step")
def logs(m: Any, x: Tensor) -> Tensor:
    log.warning("mean %s", x.mean())  # HERE
    return m.linear(x)


# Results whose size depends on data


@works
def nonzero(m: Any, x: Tensor) -> Tensor:
    return m.linear(x)[x.nonzero()[:, 0]]


@works
def boolean_mask(m: Any, x: Tensor) -> Tensor:
    return m.linear(x)[x > 0]


@works
def mask_write(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    h[x > 0] = 0
    return h


@refused("unique()", "pad to a fixed size")
def unique(m: Any, x: Tensor) -> Tensor:
    return m.linear(x).sum() * torch.unique(x).sum()  # HERE


@works
def masked_select(m: Any, x: Tensor) -> Tensor:
    return torch.masked_select(m.linear(x), x > 0)


@works
def where_one(m: Any, x: Tensor) -> Tensor:
    rows, _ = torch.where(x > 0)
    return m.linear(x)[rows]


@refused("repeat_interleave with a tensor of repeats", "output_size=")
def repeats(m: Any, x: Tensor) -> Tensor:
    return torch.repeat_interleave(m.linear(x), x[:, 0].long().abs(), dim=0)  # HERE


@refused("bincount without minlength", "torch.bincount(index, minlength=n)")
def bincount(m: Any, x: Tensor) -> Tensor:
    return m.linear(x).sum() * torch.bincount(x.flatten().long().abs()).sum()  # HERE


@refused("linalg.lstsq, which has residuals", "torch.linalg.pinv(a) @ b")
def least_squares(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * torch.linalg.lstsq(x, x[:, :1]).solution.sum()  # HERE


@refused(".tolist()", "All counts of a tensor may be the sizes of split()")
def split_by_tensor(m: Any, x: Tensor) -> Tensor:
    parts = m.linear(x).split(x[:, 0].long().tolist()[::-1])  # HERE
    return parts[0]


# Kinds of tensors, and the user's own faults


@refused("a nested tensor", "Pad to one length and pass a mask")
def nested(m: Any, x: Tensor) -> Tensor:
    n = torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged)  # HERE
    return m.linear(n.values())


@refused("a sparse tensor", "Use a dense one")
def to_sparse(m: Any, x: Tensor) -> Tensor:
    return torch.sparse.mm(x.to_sparse(), m.linear(x))  # HERE


@works
def complex_numbers(m: Any, x: Tensor) -> Tensor:
    return torch.fft.fft(m.linear(x)).abs()


@refused("a quantized tensor", "Train in floating point")
def quantized(m: Any, x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(m.linear(x), 0.1, 0, torch.qint8).dequantize()  # HERE


@refused("device", "autopar places the model")  # here it is unknown, or another than that of the model
def to_cuda(m: Any, x: Tensor) -> Tensor:
    return m.linear(x.cuda())  # HERE


@refused("tensors on several devices", "device=x.device")
def to_meta(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) + torch.ones(4, device="meta")  # HERE


@refused("ValueError: the width must not be 4", "")
def own_exception(m: Any, x: Tensor) -> Tensor:
    if x.shape[1] == 4:
        raise ValueError("the width must not be 4")  # HERE
    return m.linear(x)


@refused("AssertionError, without a text", "")
def own_assert(m: Any, x: Tensor) -> Tensor:
    assert x.shape[1] == 5  # HERE
    return m.linear(x)


@refused("KeyError: 'b'", "")
def key_error(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * {"a": 1}["b"]  # HERE


@refused("shapes [4, 3] and [4, 4] cannot be multiplied", "")
def wrong_shape(m: Any, x: Tensor) -> Tensor:
    return m.linear(x.T[:, :3])  # HERE


@refused("a recursion that does not end", "without a last case")
def recursion(m: Any, x: Tensor) -> Tensor:
    def again(x: Tensor) -> Tensor:
        return again(m.linear(x))  # HERE

    return again(x)


@refused("a call of torch.distributed inside the model", "Write the model for one device")
def collective(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x)
    torch.distributed.all_reduce(h)  # HERE
    return h


@refused("a call of torch.distributed inside the model", "Write the model for one device")
def asks_rank(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * torch.distributed.get_rank()  # HERE


@refused("a generator (a forward with `yield`)", "Return a list")
def generator_forward(m: Any, x: Tensor) -> Iterator[Tensor]:
    for _ in range(2):
        x = m.linear(x)
        yield x
