"""Further mixtures as public code has them on an axis `ep`: which are divided, and what is said of the others."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import nn
from verified import Once

import autopar
from autopar.errors import CaptureError, LayoutError
from autopar.ir.program import record
from autopar.verification.verify import verify
from benchmarks.spellings import expert_variants as ways
from benchmarks.spellings.expert_spellings import batch, spelled

DIVIDED = (
    ways.unique, ways.unique_list, ways.pairs, ways.unbound, ways.turned_pairs, ways.as_tuple, ways.argwhere,
    ways.split_pairs, ways.token_numbers, ways.listed, ways.makemoe, ways.tensor_split, ways.tensor_split_list,
    ways.tec, ways.bmm, ways.expert_choice, ways.expert_choice_hot, ways.soft, ways.switch_room, ways.hashed,
    ways.of_low_rank, ways.left_out, ways.last_pieces,
)  # fmt: skip
ROUTINGS = {"one has none": (1.0, -50.0, 0.5, -0.5), "uniform": (0.0,) * 4, "one has all": (50.0, 0.0, -50.0, -50.0)}
CASES = [(mesh, routing) for mesh in ("ep=2", "ep=4", "dp=2,ep=2", "ep=2,tp=2") for routing in ROUTINGS]


def _module(way: Any, routing: str = "one has none") -> nn.Module:
    source = inspect.getsource(way)
    module = spelled(way, "m.up" in source or "_experts(" in source, 1 if way in (ways.hashed, ways.in_place) else 2)
    _route(module, routing)
    return module


def _route(module: nn.Module, routing: str) -> None:
    with torch.no_grad():
        module.router.bias.copy_(torch.tensor(ROUTINGS[routing]))


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    """Decays weights whose gradient is zero, and leaves those alone that have none."""
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


@pytest.mark.parametrize("way", DIVIDED, ids=lambda way: way.__name__)
def test_it_is_divided_and_its_step_is_that_of_one_device(way: Any) -> None:
    """Each on three of the meshes and routings, by turns."""
    once = Once.of(_module(way), None, batch())
    for turn in range(3):
        mesh, routing = CASES[(DIVIDED.index(way) * 5 + turn * 4 + turn) % len(CASES)]
        _route(once.model, routing)
        _, compiled = once.right(mesh, optimizer=_adamw)
    program = compiled.program
    layouts = {entry.name: str(record(node).layout) for node, entry in program.parameters()}
    experts = [layout for name, layout in layouts.items() if name.startswith(("experts.", "up", "down"))]
    assert experts and all("ep" in layout for layout in experts), layouts
    assert not any("leaves experts whole" in note for note in program.notes), program.notes


LOOP = "takes one at a time"
NO_PRODUCT = "the model has no product that takes the matrix of each row by an index"
NOT_DIVIDED: list[tuple[Any, type[Exception], str]] = [
    (ways.unique_floats, CaptureError, "unique()"),
    (ways.a_set, CaptureError, "sorted(set(chosen.flatten().tolist()))"),
    (ways.unsorted_set, CaptureError, "set(chosen.view(-1).tolist())"),
    (ways.is_in_set, CaptureError, "set(chosen.flatten().tolist())"),
    (ways.binned, CaptureError, "torch.bincount(index, minlength=n)"),
    (ways.selected, CaptureError, "masked_select"),
    (ways.scattered, CaptureError, "scatter_reduce() does not"),
    (ways.joined, CaptureError, "cat() does not"),
    (ways.sparse_dispatcher, CaptureError, "nonzero()"),
    (ways.dropped_pieces, CaptureError, "it draws a number for each place"),
    (ways.routing_map, CaptureError, "masked_select"),
    (ways.grouped_map, CaptureError, "masked_select"),
    (ways.searched, CaptureError, "a slice whose length a tensor decides"),
    (ways.fewer_pieces, CaptureError, ".tolist()"),
    (ways.in_place, LayoutError, LOOP),
    (ways.shared, LayoutError, LOOP),
    (ways.dense_masked, LayoutError, NO_PRODUCT),
    (ways.tec_modules, LayoutError, NO_PRODUCT),
    (ways.expert_choice_loop, LayoutError, NO_PRODUCT),
    (ways.stacked_dense, LayoutError, NO_PRODUCT),
    (ways.of_depths, LayoutError, NO_PRODUCT),
    (ways.fewer, LayoutError, "ep=2 does not divide the 3 experts of experts.0.gate.weight: ep may be 1 or 3"),
]


@pytest.mark.parametrize(("way", "error", "text"), NOT_DIVIDED, ids=lambda one: getattr(one, "__name__", ""))
def test_what_is_not_divided_is_said(way: Any, error: type[Exception], text: str) -> None:
    """What `ep` cannot divide other axes can: their numbers are right."""
    with pytest.raises(error, match=re.escape(text)) as found:
        autopar.compile(_module(way), "ep=2", batch=batch())
    assert "expert_variants.py:" in str(found.value) or error is LayoutError
    if error is LayoutError:
        report = verify(_module(way), "dp=2", batch=batch())
        assert report.ok and report.max_error < 1e-10, report


def test_choices_in_loops_of_their_own_are_divided_in_part() -> None:
    module = _module(ways.each_choice)
    assert verify(module, "ep=2", batch=batch()).max_error < 1e-10
    notes = autopar.compile(module, "ep=2", batch=batch()).program.notes
    assert any("leaves experts whole, 76.1 % of the work" in note for note in notes), notes


def test_experts_of_a_product_that_ep_does_not_divide() -> None:
    with pytest.raises(LayoutError, match=r"ep=8 does not divide the 4 experts of up: ep may be 1, 2 or 4"):
        autopar.compile(_module(ways.tec), "ep=8", batch=batch())


class _Heads(nn.Module):
    """A matrix for each head, and no experts."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Parameter(torch.randn(4, 2, 8) * 0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.unflatten(-1, (4, 2)).transpose(0, 1), self.heads).square().mean()


def test_what_is_taken_for_experts_is_said() -> None:
    """Of a model without an index nobody knows what its batched products are of."""
    said = "takes for experts what as many parts of the batch are multiplied by: "
    notes = autopar.compile(_Heads(), "ep=2", batch=batch()).program.notes
    assert any(f"{said}'heads' [4, 2, 8]. If they are of heads, say, give" in note for note in notes), notes
    notes = autopar.compile(_module(ways.tec), "ep=2", batch=batch()).program.notes
    assert any(f"{said}'up' [4, 8, 12], 'down' [4, 12, 8]. If" in note for note in notes), notes
    for mesh, way in (("dp=2", ways.tec), ("ep=2", ways.unique)):
        assert not any(said in note for note in autopar.compile(_module(way), mesh, batch=batch()).program.notes)


def test_a_capacity_is_of_the_global_batch() -> None:
    """Rows of one rank that come first leave no room for those of another one: as on one device. What moves are rows of
    the room that experts have, [E, c, w], and not the experts."""
    report = verify(_module(ways.tec, "one has all"), "ep=4", batch=batch(), dtype=torch.float32)
    assert report.ok, report
