"""Rows go to the rank of their expert and come back: every row once, in one order, however many each rank has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import autopar
from autopar.errors import BatchError, RankError
from autopar.ir.check.check_levels import moved_layout
from autopar.ir.layout import parse_layout
from autopar.ir.mesh import Mesh, parse_mesh
from autopar.ir.ops.ops import NO_EXPERT, op
from autopar.runtime.collectives import mesh_ops
from autopar.runtime.collectives.collectives import Member, Move, begin, together
from autopar.runtime.kernels import host
from benchmarks.spellings.expert_spellings import batch, capacity, spelled

MESH = Mesh((("ep", 3),))
EXPERTS, WIDTH = 6, 2
# The expert of each row, by rank.
ROUTINGS = {
    "uneven": [[5, 0, 1, 0], [2, 2, 2, 2], [0, 5, 3, 1]],
    "to one rank": [[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]],
    "none from one": [[], [4, 1, 0, 5], [2]],
    "none at all": [[], [], []],
}


def _routed(indices: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The orders, the counts, and the experts of the rows that come, by rank."""
    orders = [_local("order_by_owner", place, x, 0, 0) for place, x in enumerate(indices)]
    counts = together([(op("route"), (x, "ep", EXPERTS)) for x in indices])
    owned = [
        _local("owned_index", place, x, count, 0) for place, (x, count) in enumerate(zip(indices, counts, strict=True))
    ]
    return orders, counts, owned


def _local(name: str, place: int, x: Tensor, *rest: Tensor | int) -> Tensor:
    found = mesh_ops.local_answer(MESH, {"ep": place}, op(name), (x, "ep", *rest))
    assert isinstance(found, Tensor)
    return found


def _send(name: str, parts: list[Tensor], orders: list[Tensor], counts: list[Tensor]) -> list[Tensor]:
    return together([(op(name), (x, "ep", *rest)) for x, *rest in zip(parts, orders, counts, strict=True)])


@pytest.mark.parametrize("way", ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32, torch.bool])
@pytest.mark.parametrize("is_host", [True, False])
def test_every_row_goes_to_its_expert_and_back(
    way: str, dtype: torch.dtype, is_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "on_host", lambda x: is_host)
    indices = [torch.tensor(rows, dtype=torch.int64) for rows in ROUTINGS[way]]
    orders, counts, owned = _routed(indices)
    parts = [(torch.arange(len(x) * WIDTH).view(-1, WIDTH) + 100 * place).to(dtype) for place, x in enumerate(indices)]
    before = [part.clone() for part in parts]
    sent = _send("dispatch", parts, orders, counts)
    assert all(map(torch.equal, _send("dispatch", indices, orders, counts), owned)), "computed, not sent"
    for place, (rows, index) in enumerate(zip(sent, owned, strict=True)):
        assert (
            rows.dtype == dtype and len(rows) == len(index) and all(expert // 2 == place for expert in index.tolist())
        )
        runs = [run for x, part in zip(indices, parts, strict=True) for run in _run(x, part, place)]
        came = torch.stack(runs) if runs else rows[:0]
        if is_host:
            owners = torch.tensor([expert for x in indices for expert in sorted(x.tolist()) if expert // 2 == place])
            came, owners = came[owners.argsort(stable=True)], owners.sort().values
            assert owners.tolist() == index.tolist()
        assert torch.equal(rows, came), "by source, on a host by expert first, then in order"
    assert all(map(torch.equal, _send("combine", sent, orders, counts), parts))
    assert all(map(torch.equal, parts, before)), "the operands"
    assert all(count.shape == (6, 2) and count.device.type == "cpu" for count in counts)


def _run(index: Tensor, part: Tensor, place: int) -> list[Tensor]:
    """The rows of one rank for the experts of another."""
    chosen = [i for i, expert in enumerate(index.tolist()) if expert // 2 == place]
    return [part[i] for i in sorted(chosen, key=lambda i: index[i].item())]


def test_an_expert_that_does_not_exist_is_said_by_all() -> None:
    """And nobody waits: red when the check stood on the rank of the row alone."""
    for wrong, rows in ((6, 1), (-1, 2)):
        indices = [torch.tensor([0, 5]), torch.tensor([wrong] * rows + [1]), torch.tensor([3, 3])]
        steps = [begin(op("route"), (x, "ep", EXPERTS), Member(3, place)) for place, x in enumerate(indices)]
        given = [step for step in steps if isinstance(step, Move)]
        assert len(given) == 3
        for place, step in enumerate(given):
            with pytest.raises(BatchError) as error:
                step.then(torch.stack([one.x[place] for one in given]))
            assert str(error.value) == (
                f"expert {wrong} is out of range: there are 6, so an index is 0 to 5, and {rows} of the rows that rank "
                f"1 on their axis sends, part 1 of the batch, are of others. Correct the router."
            )


def test_counts_that_do_not_fit_are_seen() -> None:
    indices = [torch.tensor(rows) for rows in ROUTINGS["uneven"]]
    orders, counts, _ = _routed(indices)
    counts[0] = counts[0].roll(3, 0)
    with pytest.raises(RankError, match="awaits"):
        _send("dispatch", [torch.randn(4, WIDTH) for _ in indices], orders, counts)


def test_layouts() -> None:
    home, owned = parse_layout("[dp:ep:2:cp,tp]"), parse_layout("[dp:@ep:2:cp,tp]")
    route, mesh = ("ep", None, None), parse_mesh("dp=2,cp=2,ep=2,tp=2")
    assert moved_layout("dispatch", route, home, mesh) == owned and moved_layout("combine", route, owned, mesh) == home
    assert moved_layout("dispatch", route, owned, mesh) is None and moved_layout("combine", route, home, mesh) is None
    assert moved_layout("dispatch", ("tp", None, None), home, mesh) is None
    assert str(moved_layout("owned_index", ("ep", None), parse_layout("[dp:ep]"), mesh)) == "[dp:@ep]"
    assert str(moved_layout("route", ("ep", 6), parse_layout("[dp:ep:2:cp]"), mesh)) == "[dp:ep:cp,-]"


def test_a_row_without_an_expert_goes_nowhere_and_comes_back_as_zeros() -> None:
    indices = [torch.tensor(rows) for rows in ([5, NO_EXPERT, 1], [NO_EXPERT, NO_EXPERT], [0, NO_EXPERT, 2])]
    orders, counts, owned = _routed(indices)
    sent = _send("dispatch", [torch.ones(len(x), WIDTH) for x in indices], orders, counts)
    assert [len(rows) for rows in sent] == [len(experts) for experts in owned] == [2, 1, 1]
    for index, rows in zip(indices, _send("combine", sent, orders, counts), strict=True):
        assert torch.equal(rows, (index != NO_EXPERT).float()[:, None].expand(-1, WIDTH))


def test_a_loop_sends_only_rows_that_an_expert_takes() -> None:
    """Red when rows beyond a capacity went to some expert: the numbers are right then, too."""
    program = autopar.compile(spelled(capacity, chosen=1), "ep=2", batch=batch()).program
    (index,) = (node for node in program.calls() if node.target is op("route"))
    assert index.all_input_nodes[0].target is torch.ops.aten.where.self
