"""Tensors side by side in one block of memory, and the copies that move many as one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.runtime.tiers.side_by_side import joined, side_by_side


def block(size: int) -> Tensor:
    return torch.full((size,), 7, dtype=torch.uint8)


def like() -> list[Tensor]:
    x = torch.arange(35.0).view(5, 7)
    return [x, x.t(), x.double(), x > 9, torch.tensor(3.0), x.to(torch.bfloat16)[:0], x.int(), x.expand(2, 5, 7)]


def test_a_copy_moves_all_that_lie_alike() -> None:
    wanted = like()
    there, back = side_by_side(wanted, block), side_by_side(wanted, block)
    assert len({x.untyped_storage().data_ptr() for x in there}) == 1
    for pair in zip(there, wanted, strict=True):
        assert pair[0].stride() == pair[1].stride() or pair[1].dim() == 3  # memory of its own for each element
    for to, source in joined(there, wanted):
        to.copy_(source)
    pairs = list(joined(back, there))
    assert len(pairs) == 1
    pairs[0][0].copy_(pairs[0][1])
    for ours, theirs in zip(back, wanted, strict=True):
        assert torch.equal(ours, theirs)


def test_what_lies_otherwise_is_copied_by_itself() -> None:
    wanted = [torch.randn(4, 4) for _ in range(3)]
    there = side_by_side(wanted, block)
    assert len(list(joined(there, wanted))) == 3  # memory of its own for each
    other = side_by_side([wanted[0], torch.randn(400), *wanted[1:]], block)
    assert len(list(joined([other[0], other[2], other[3]], there))) == 2  # not as far from one another
    turned = [there[0], there[1].t(), there[2]]
    pairs = list(joined(turned, side_by_side(wanted, block)))
    assert [len(to.shape) for to, _ in pairs] == [2, 2, 2]  # one between them has its elements in another order
    again = side_by_side(wanted, block)
    assert len(list(joined([again[1], again[0]], [there[1], there[0]]))) == 2  # from the last to the first


class Copies(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


def test_states_of_a_chunk_are_one_copy_each_way() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(200)))  # 400 parameters, in 32 chunks
    model = autopar.parallelize(layers, "dp=1", loss_fn=lambda model, x: model(x).square().mean(), offload="optimizer")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model.forward_backward(torch.randn(4, 8))
        optimizer.step()
    with Copies() as seen:
        optimizer.step()
    assert 60 <= seen.count <= 70
