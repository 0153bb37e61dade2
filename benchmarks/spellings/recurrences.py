"""Ways to write a linear recurrence."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.compiled import Compiled
from benchmarks.spellings.data import WIDTH


class Recurrent(nn.Module):
    """A linear recurrence h = a h + (1 - a) u between projections."""

    def __init__(self, way: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.gate, self.up, self.down = (
            way,
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.way(self.gate(x).sigmoid(), self.up(x))).square().mean()


def appended(a: Tensor, u: Tensor) -> Tensor:
    h, found = torch.zeros_like(u[:, 0]), []
    for t in range(u.shape[1]):
        h = a[:, t] * h + (1 - a[:, t]) * u[:, t]
        found.append(h)
    return torch.stack(found, 1)


def assigned(a: Tensor, u: Tensor) -> Tensor:
    h, found = torch.zeros_like(u[:, 0]), torch.empty_like(u)
    for t in range(u.shape[1]):
        h = a[:, t] * h + (1 - a[:, t]) * u[:, t]
        found[:, t] = h
    return found


def unbound(a: Tensor, u: Tensor) -> Tensor:
    h, found = u.new_zeros(u.shape[0], u.shape[2]), []
    for at, ut in zip(a.unbind(1), u.unbind(1), strict=True):
        h = at * h + (1 - at) * ut
        found += [h]
    return torch.stack(found, dim=1)


def split_rows(a: Tensor, u: Tensor) -> Tensor:
    h, found = torch.zeros_like(u[:, :1]), []
    for at, ut in zip(a.split(1, 1), u.split(1, 1), strict=True):
        h = at * h + (1 - at) * ut
        found.append(h)
    return torch.cat(found, 1)


def lerped(a: Tensor, u: Tensor) -> Tensor:
    h, found = torch.zeros_like(u[:, 0]), []
    for t in range(u.shape[1]):
        h = torch.lerp(u[:, t], h, a[:, t])
        found.append(h)
    return torch.stack(found, 1)


def time_first(a: Tensor, u: Tensor) -> Tensor:
    a, u = a.transpose(0, 1), u.transpose(0, 1)
    h, found = torch.zeros_like(u[0]), []
    for at, ut in zip(a, u, strict=True):
        h = at * h + (1 - at) * ut
        found.append(h)
    return torch.stack(found).transpose(0, 1)


def first_apart(a: Tensor, u: Tensor) -> Tensor:
    found = [(1 - a[:, 0]) * u[:, 0]]
    for t in range(1, u.shape[1]):
        found.append(a[:, t] * found[-1] + (1 - a[:, t]) * u[:, t])
    return torch.stack(found, 1)


def none_at_first(a: Tensor, u: Tensor) -> Tensor:
    h, found = None, []
    for t in range(u.shape[1]):
        new = (1 - a[:, t]) * u[:, t]
        h = new if h is None else a[:, t] * h + new
        found.append(h)
    return torch.stack(found, 1)


def ahead(a: Tensor, u: Tensor) -> Tensor:
    """What a step adds is made before the loop."""
    new, h, found = (1 - a) * u, torch.zeros_like(u[:, 0]), []
    for t in range(u.shape[1]):
        h = torch.addcmul(new[:, t], a[:, t], h)
        found.append(h)
    return torch.stack(found, 1)


def in_place(a: Tensor, u: Tensor) -> Tensor:
    h, found = torch.zeros_like(u[:, 0]), []
    for t in range(u.shape[1]):
        h = h.mul(a[:, t]).add_((1 - a[:, t]) * u[:, t])
        found.append(h)
    return torch.stack(found, 1)


def function(a: Tensor, u: Tensor) -> Tensor:
    def step(h: Tensor, row: tuple[Tensor, Tensor]) -> Tensor:
        return row[0] * h + (1 - row[0]) * row[1]

    rows = zip(a.unbind(1), u.unbind(1), strict=True)
    return torch.stack(list(itertools.accumulate(rows, step, initial=torch.zeros_like(u[:, 0])))[1:], 1)


def padded(a: Tensor, u: Tensor) -> Tensor:
    """States stand in one tensor, of which the first row is the start."""
    h = [torch.zeros_like(u[:, :1])]
    for t in range(u.shape[1]):
        h.append(a[:, t : t + 1] * h[-1] + (1 - a[:, t : t + 1]) * u[:, t : t + 1])
    return torch.cat(h, 1)[:, 1:]


def by_select(a: Tensor, u: Tensor) -> Tensor:
    h, found = torch.zeros_like(u.select(1, 0)), []
    for t in range(u.size(1)):
        at = a.select(1, t)
        h = at * h + (1 - at) * u.select(1, t)
        found.append(h.unsqueeze(1))
    return torch.cat(found, 1)


def by_scan(a: Tensor, u: Tensor) -> Tensor:
    """The closed form by a running sum of logarithms."""
    total = a.log().cumsum(1)
    return total.exp() * ((1 - a) * u * (-total).exp()).cumsum(1)


RECURRENCES: Mapping[str, Any] = {
    "appended, stacked": appended,
    "written into a tensor": assigned,
    "unbind and zip": unbound,
    "split into rows, cat": split_rows,
    "torch.lerp": lerped,
    "time first": time_first,
    "found[-1]": first_apart,
    "no state at first": none_at_first,
    "inputs made ahead, addcmul": ahead,
    "mul, add_": in_place,
    "itertools.accumulate": function,
    "cat behind a first row": padded,
    "select and unsqueeze": by_select,
    "a running sum of logarithms": by_scan,
}


def is_rolled(compiled: Compiled) -> bool:
    """Whether the program does not grow with the sequence."""
    found = [str(node.target) for node in dict(compiled.history)["reroll"].calls()]
    return sum("select" in op or "unbind" in op for op in found) < 6
