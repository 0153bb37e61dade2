"""What an optimizer's step costs the host on the cheapest tensor subclasses that torch allows: the floor of ours.

    timeout 300 .venv/bin/python -m benchmarks.floor [--layers 12] [--rounds 60]

The same GPT and the same AdamW as `benchmarks.launch`: CPU seconds of this process, in turns, and of each the median,
over that of plain tensors.

- named: real memory, no dispatch; nothing but another class
- wrapper: a part within, as a DTensor has it, and the least `__torch_dispatch__`: it checks nothing
- led: the first tensor of each list has a `__torch_function__`, which torch asks before it reads a list
- ours: the parameters of a parallel model
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from autopar.torch_compat import no_torch_function
from benchmarks.launch import Pair, medians
from benchmarks.records import Figure, Records, record_option

WAYS = (("for each tensor", {"foreach": False}), ("foreach", {"foreach": True}), ("fused", {"fused": True}))


class Named(Tensor):
    __torch_function__ = nn.Parameter.__torch_function__  # none


class Wrapper(Tensor):
    __slots__ = ("part",)
    __torch_function__ = nn.Parameter.__torch_function__
    part: Tensor

    @staticmethod
    def __new__(cls, part: Tensor, requires_grad: bool = False) -> Any:
        made = Tensor._make_wrapper_subclass(cls, part.shape, dtype=part.dtype, requires_grad=requires_grad)
        made.part = part
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = on_parts(func, args, kwargs)
        if not func._schema.name.endswith("_"):
            return out if out is None else around(out)
        return None if isinstance(args[0], list) else args[0]


class Led(Wrapper):
    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.__name__.startswith(("_foreach", "_fused")):
            with no_torch_function():
                out = func(*args, **(kwargs or {}))
            return led(out) if func.__name__ == "zeros_like" else out
        out = on_parts(func, args, kwargs)
        if func.__name__.endswith("_"):
            increment_version(args[0])
            return None
        out = around(out)
        return [led(out[0]), *out[1:]]


def led(tensor: Any) -> Any:
    tensor.__class__ = Led
    return tensor


def on_parts(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*map(part_of, args), **{name: part_of(value) for name, value in (kwargs or {}).items()})


_part = attrgetter("part")


def part_of(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], Wrapper):
        return list(map(_part, value))
    return value.part if isinstance(value, Wrapper) else value


def around(out: Any) -> Any:
    return list(map(Wrapper, out)) if isinstance(out, (list, tuple)) else Wrapper(out)


def named(tensor: Tensor) -> Any:
    return tensor.detach().clone().as_subclass(Named)


def wrapped(tensor: Tensor) -> Any:
    return Wrapper(tensor.detach().clone())


def copies(parameters: Sequence[Tensor], make: Any, has_lead: bool = False) -> list[Any]:
    """Parameters of a class, with gradients of it."""
    made = []
    for at, parameter in enumerate(parameters):
        pair = [make(parameter), make(parameter.grad)]
        value, gradient = map(led, pair) if has_lead and not at else pair
        value.requires_grad_()
        value.grad = gradient
        made.append(value)
    return made


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=60)
    record_option(parser)
    args = parser.parse_args(argv)
    records = Records("floor", args.record)
    torch.set_num_threads(1)
    pair = Pair.of(args.layers)
    pair.step()
    pair.plain_step()
    plain = list(pair.plain.parameters())
    rivals = {
        "plain": plain, "named": copies(plain, named), "wrapper": copies(plain, wrapped),
        "led": copies(plain, wrapped, has_lead=True), "ours": list(pair.ours.parameters()),
    }  # fmt: skip
    print(f"{'AdamW':18}", *(f"{name:>14}" for name in rivals))
    for name, options in WAYS:
        taken = medians(args.rounds, *(torch.optim.AdamW(group, **options).step for group in rivals.values()))
        print(f"{name:18}", *(f"{us:6.0f} us {us / taken[0]:4.2f}x" for us in taken))
        for rival, us in zip(list(rivals)[1:], taken[1:], strict=True):
            records.add(Figure(f"AdamW, {name}, {rival}", "CPU time beside plain tensors", "us", us, taken[0]))


if __name__ == "__main__":
    main()
