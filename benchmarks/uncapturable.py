"""Models that cannot be captured, or compute nothing that can be trained: is each refused in words, with its line?

    timeout 900 .venv/bin/python -m benchmarks.uncapturable [--count 60] [--record]

Each row is a forward pass of a small model that decides by its data, changes what it must not, leaves torch, has shapes
that do not fit, or loses its loss. Compiled for two meshes, it has to end within LIMIT_S CPU seconds in an error of
ours that names a line of the row, or, where no line is at fault, the loss function. Branches and the like, which can be
captured, are no rows here: tests/capture/ compares them with the plain module. All else is counted: a traceback of
another kind, no line, no end, a result.
"""

from __future__ import annotations

import argparse
import inspect
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api import compile as compile_
from autopar.errors import AutoparError
from benchmarks.records import Figure, Records, record_option

LIMIT_S, HANGS_S, WORDS = 2, 30, 60
MESHES = ("dp=2", "dp=2,tp=2")
Body = Callable[[Any, Tensor], Any]
ROWS: list[Body] = []


class Net(nn.Module):
    """Two linear layers, a table, a buffer, and a forward pass that a row is."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.up, self.down, self.table = nn.Linear(8, 16), nn.Linear(16, 8), nn.Embedding(10, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.register_buffer("seen", torch.zeros(8))
        self.body, self.calls = body, 0

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def row(body: Body) -> Body:
    ROWS.append(body)
    return body


# -- values of the data decide ---------------------------------------------------------------------------------------


@row
def loop_of_data(net: Any, x: Tensor) -> Any:
    h = net.layers[0](x)
    for _ in range(int(h.abs().sum())):
        h = net.layers[1](h)
    return h


@row
def item_in_python(net: Any, x: Tensor) -> Any:
    h = net.up(x)
    return net.down(h) * round(h.mean().item())


@row
def float_of_data(net: Any, x: Tensor) -> Any:
    import math

    h = net.up(x)
    return net.down(h) * math.exp(float(h.mean()))


@row
def list_of_data(net: Any, x: Tensor) -> Any:
    h = net.up(x)
    order = sorted(h[0].tolist())
    return net.down(h) * order[0]


@row
def numpy_of_data(net: Any, x: Tensor) -> Any:
    h = net.up(x)
    return net.down(h) * float(h.detach().numpy().max())


@row
def layer_by_data(net: Any, x: Tensor) -> Any:
    return net.layers[int(net.up(x).argmax() % 3)](x)


@row
def match_on_data(net: Any, x: Tensor) -> Any:
    h = net.up(x)
    match int(h.sum()) % 2:
        case 0:
            return net.down(h)
        case _:
            return -net.down(h)


@row
def length_of_data(net: Any, x: Tensor) -> Any:
    h = net.layers[0](x)
    return h.sum() * torch.arange(int(h.abs().max()) + 1).sum()


@row
def unique_values(net: Any, x: Tensor) -> Any:
    h = net.layers[0](x)
    return h.round().unique().numel() * h


@row
def is_nonzero_decides(net: Any, x: Tensor) -> Any:
    h = net.layers[0](x)
    return h if torch.is_nonzero(h.sum()) else h + 1


@row
def text_of_data(net: Any, x: Tensor) -> Any:
    h = net.layers[0](x)
    return h * len(f"{h.sum().item():.3f}")


@row
def split_by_data(net: Any, x: Tensor) -> Any:
    h = net.layers[0](x)
    sizes = h.abs().sum(1).long().tolist()
    return torch.cat(torch.split(h.repeat(1000, 1)[: sum(sizes)], sizes))


@row
def repeat_by_data(net: Any, x: Tensor) -> Any:
    h = net.layers[0](x)
    return h.repeat(int(h.sum().abs()) + 1, 1)


@row
def slice_by_data(net: Any, x: Tensor) -> Any:
    h = net.layers[0](x)
    return h[: int((h > 0).sum())]


@row
def power_by_data(net: Any, x: Tensor) -> Any:
    h = net.layers[0](x)
    return h ** int(h.sum().item())


@row
def try_and_see(net: Any, x: Tensor) -> Any:
    h = net.layers[0](x)
    try:
        return h / (1 / float(h[0, 0]))
    except ZeroDivisionError:
        return h


@row
def sort_key_of_data(net: Any, x: Tensor) -> Any:
    rows = sorted(net.layers[0](x), key=lambda each: each.sum().item())
    return torch.stack(rows)


@row
def set_of_values(net: Any, x: Tensor) -> Any:
    h = net.layers[0](x)
    return h * len(set(h.flatten().tolist()))


# -- what is written ---------------------------------------------------------------------------------------------------


@row
def parameter_in_place(net: Any, x: Tensor) -> Any:
    net.up.weight.add_(1)
    return net.down(net.up(x))


OUTSIDE = torch.ones(8)


@row
def outside_written(net: Any, x: Tensor) -> Any:
    OUTSIDE.mul_(0.9)
    return net.down(net.up(x)) * OUTSIDE


@row
def parameter_by_data(net: Any, x: Tensor) -> Any:
    h = net.up(x)
    net.up.weight.data = net.up.weight.data.clamp(-1, 1)  # behind its use
    return net.down(h)


@row
def parameter_replaced(net: Any, x: Tensor) -> Any:
    net.up.weight = nn.Parameter(net.up.weight * 2)
    return net.down(net.up(x))


@row
def parameter_added(net: Any, x: Tensor) -> Any:
    net.late = nn.Parameter(torch.ones(8))
    return net.down(net.up(x)) * net.late


@row
def module_added(net: Any, x: Tensor) -> Any:
    net.late = nn.Linear(8, 8)
    return net.late(net.down(net.up(x)))


@row
def parameter_frozen(net: Any, x: Tensor) -> Any:
    net.up.weight.requires_grad_(False)
    return net.down(net.up(x))


@row
def backward_inside(net: Any, x: Tensor) -> Any:
    h = net.down(net.up(x))
    h.sum().backward()
    return h.detach()


@row
def step_inside(net: Any, x: Tensor) -> Any:
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    return net.down(net.up(x)).detach()


@row
def no_gradient(net: Any, x: Tensor) -> Any:
    with torch.no_grad():
        return net.down(net.up(x))


@row
def detached(net: Any, x: Tensor) -> Any:
    return net.down(net.up(x)).detach()


@row
def inference(net: Any, x: Tensor) -> Any:
    with torch.inference_mode():
        return net.down(net.up(x))


@row
def leaves_torch(net: Any, x: Tensor) -> Any:
    import numpy

    return torch.from_numpy(numpy.tanh(net.down(net.up(x)).detach().numpy()))


# -- shapes and arguments that do not fit ------------------------------------------------------------------------------


@row
def product_that_does_not_fit(net: Any, x: Tensor) -> Any:
    return net.down(x)


@row
def sum_that_does_not_fit(net: Any, x: Tensor) -> Any:
    return net.up(x) + net.layers[0](x)


@row
def cat_that_does_not_fit(net: Any, x: Tensor) -> Any:
    return torch.cat([net.up(x), net.layers[0](x)], 0)


@row
def view_that_does_not_fit(net: Any, x: Tensor) -> Any:
    return net.up(x).view(7, -1)


@row
def dim_that_is_not_there(net: Any, x: Tensor) -> Any:
    return net.up(x).softmax(3)


@row
def stack_that_does_not_fit(net: Any, x: Tensor) -> Any:
    return torch.stack([net.up(x), net.layers[0](x)])


@row
def einsum_that_does_not_fit(net: Any, x: Tensor) -> Any:
    return torch.einsum("ab,cd->ae", net.up(x), net.layers[0](x))


@row
def index_out_of_range(net: Any, x: Tensor) -> Any:
    return net.up(x)[:, 16]


@row
def floats_as_indices(net: Any, x: Tensor) -> Any:
    return net.table(x)


@row
def attention_that_does_not_fit(net: Any, x: Tensor) -> Any:
    q, k = net.up(x)[None, None], net.layers[0](x)[None, None]
    return F.scaled_dot_product_attention(q, k, k)


@row
def convolution_that_does_not_fit(net: Any, x: Tensor) -> Any:
    return F.conv1d(net.up(x)[:, :, None], net.down.weight[:, :4, None])


@row
def targets_that_do_not_fit(net: Any, x: Tensor) -> Any:
    return F.cross_entropy(net.up(x), torch.zeros(5, dtype=torch.long))


@row
def bool_minus(net: Any, x: Tensor) -> Any:
    return (net.up(x) > 0) - (net.up(x) > 1)


@row
def unknown_argument(net: Any, x: Tensor) -> Any:
    return net.up(x, scale=2)


@row
def missing_attribute(net: Any, x: Tensor) -> Any:
    return net.middle(net.up(x))


@row
def error_of_the_user(net: Any, x: Tensor) -> Any:
    raise KeyError("layers.7")


@row
def assertion_of_the_user(net: Any, x: Tensor) -> Any:
    assert x.shape[1] == 9, f"{x.shape[1]} features, wanted 9"
    return net.up(x)


@row
def unpacked_wrongly(net: Any, x: Tensor) -> Any:
    a, b, c = net.up(x).chunk(2, 1)
    return a + b + c


@row
def recursion(net: Any, x: Tensor) -> Any:
    return net(net.layers[0](x))


@row
def two_dtypes(net: Any, x: Tensor) -> Any:
    return net.up(x) @ net.down.weight.double().t()


# -- what is not a step of one graph ---------------------------------------------------------------------------------


@row
def sparse_values(net: Any, x: Tensor) -> Any:
    h = net.layers[0](x).to_sparse()
    return torch.sparse.mm(h, net.layers[1].weight)


@row
def collective_of_its_own(net: Any, x: Tensor) -> Any:
    h = net.up(x)
    torch.distributed.all_reduce(h)
    return net.down(h)


@row
def other_device(net: Any, x: Tensor) -> Any:
    return net.down(net.up(x).to("cuda"))


@row
def nothing(net: Any, x: Tensor) -> Any:
    net.up(x)


@row
def a_text(net: Any, x: Tensor) -> Any:
    net.up(x)
    return "done"


@row
def nested_gradient_of_nothing(net: Any, x: Tensor) -> Any:
    (g,) = torch.autograd.grad(net.up(x).sum(), x)
    return g


@row
def quantised(net: Any, x: Tensor) -> Any:
    return torch.quantize_per_tensor(net.up(x), 0.1, 0, torch.qint8).dequantize()


@row
def negative_size(net: Any, x: Tensor) -> Any:
    return net.up(x).new_zeros(-1, 8) + net.down(net.up(x))


@row
def reduced_twice(net: Any, x: Tensor) -> Any:
    return net.up(x).sum((1, 1))


@row
def gather_that_does_not_fit(net: Any, x: Tensor) -> Any:
    return net.up(x).gather(1, torch.zeros(12, 8, 1, dtype=torch.long))


@row
def norm_that_does_not_fit(net: Any, x: Tensor) -> Any:
    return F.layer_norm(net.up(x), (8,))


@row
def a_generator(net: Any, x: Tensor) -> Any:
    return (layer(x) for layer in net.layers)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    value: Tensor = model(x).square().mean()
    return value


LOSS_LINE = inspect.getsourcelines(loss_fn)[1] + 1


def fault_of(body: Body, mesh: str) -> str | None:
    """What is wrong with how a row is refused; None if nothing is."""
    code = inspect.getsourcelines(body)
    lines = range(code[1], code[1] + len(code[0]))
    torch.manual_seed(0)
    start = time.process_time()
    signal.alarm(HANGS_S)
    try:
        compile_(Net(body), mesh, loss_fn=loss_fn, batch=(torch.randn(12, 8),))
        return "no error"
    except AutoparError as error:
        said = str(error)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.alarm(0)
    took = time.process_time() - start
    if took > LIMIT_S:
        return f"{took:.1f} CPU s"
    named = [int(line) for line in re.findall(rf"{Path(__file__).name}:(\d+)", said)]
    if not any(line in lines for line in named) and "loss_fn" not in said and f":{LOSS_LINE}" not in said:
        return f"no line of the row: {said[:300]}"
    return None if len(said) > WORDS else f"few words: {said}"


def faults(rows: list[Body], mesh: str) -> dict[str, str]:
    """What is wrong, by row."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"no end after {HANGS_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    try:
        return {body.__name__: fault for body in rows if (fault := fault_of(body, mesh))}
    finally:
        signal.signal(signal.SIGALRM, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=len(ROWS))
    record_option(parser)
    asked = parser.parse_args()
    records, bad = Records("uncapturable", asked.record), 0
    for mesh in MESHES:
        rows = ROWS[: asked.count]
        found = faults(rows, mesh)
        for name, fault in found.items():
            print(f"{mesh} {name}: {fault}")
        print(f"{mesh}: {len(rows)} models, {len(found)} refused wrongly")
        bad += len(found)
        records.add(Figure(f"{len(rows)} models, {mesh}", "refused wrongly", "models", len(found), goal="<=0"))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
