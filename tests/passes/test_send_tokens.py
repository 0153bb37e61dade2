"""A token that several experts of a rank take goes there once: right on any ranks and routing, and faults are seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mixtures import Kind, Mixtures, mixture_case
from shares import pairs
from torch import Tensor, fx, nn
from verified import Once

import autopar
from autopar.ir.ops.measure import share_of_tokens
from autopar.ir.ops.ops import op
from autopar.ir.plan import Fixed
from autopar.ir.program import Program, Record, TensorType, record, set_record
from autopar.passes.collectives.followed_dims import followed, moves_only, parts_of
from autopar.runtime.collectives import collectives, mesh_ops, rows_to_owners
from autopar.verification.verify import verify
from benchmarks.mixtures import AT_ONCE

# Experts chosen by a token; routed alike, with ties, to two experts of one rank, so that others have no rows.
CHOSEN, SKEWS = (2, 4, 8), (0.0, -1.0, 50.0)


def _trips(program: Program, name: str) -> list[str]:
    """The types of what goes by trips of tokens."""
    found = (node for node in program.calls() if node.target in (op(name), op(f"{name}_start")) and len(node.args) > 5)
    return [f"{record(node).type.dtype} {record(node).type.shape[1]}" for node in found]


@pytest.mark.parametrize(("chosen", "skew", "ranks"), list(pairs(CHOSEN, SKEWS, (2, 4))))
def test_a_step_is_that_of_one_device(chosen: int, skew: float, ranks: int) -> None:
    """Any two of these come together; all three in `make test-all`."""
    model, batch = mixture_case(Kind(chosen=chosen, skew=skew, blocks=1))
    _, compiled = Once.of(model, None, batch).right(f"ep={ranks}", fixed=Fixed(machine=AT_ONCE))
    assert _trips(compiled.program, "dispatch") and _trips(compiled.program, "combine")


@pytest.mark.parametrize("skew", SKEWS)
def test_ranks_that_are_no_power_of_two(skew: float) -> None:
    model, (tokens, labels) = mixture_case(Kind(experts=6, chosen=3, skew=skew, blocks=1))
    report = verify(model, "ep=3", batch=(tokens[:6], labels[:6]), machine=AT_ONCE)
    assert report.ok and report.max_error < 1e-10, report


# (kind, mesh, options): what else there is beside rows, and how they lie.
BESIDE: list[tuple[Kind, str, dict[str, Any]]] = [
    (Kind(chosen=4, way="loop", blocks=1), "ep=4", {}),
    (Kind(chosen=4, bias=True, shared=True, aux=True), "dp=2,ep=2", {"zero": 3}),
    (Kind(chosen=4), "ep=2,tp=2", {"sequence_parallel": True}),
    (Kind(chosen=4), "dp=2,cp=2", {"experts": "cp"}),  # a rank's tokens are a piece of each of its samples
    (Kind(chosen=4), "dp=2,fsdp=2", {"experts": "dp:fsdp"}),
    (Kind(chosen=8), "ep=2", {"recompute": "full"}),
    (Kind(chosen=4), "pp=2,ep=2", {"microbatches": 4, "schedule": "dualpipev"}),
    (Kind(chosen=4), "ep=2", {"microbatches": 2, "zero": 2}),
    (Kind(chosen=4, normed=True, blocks=1), "ep=2", {}),  # calls of several results, at the owners of rows
]


@pytest.mark.parametrize(("kind", "mesh", "options"), BESIDE, ids=str)
def test_with_all_else(kind: Kind, mesh: str, options: dict[str, Any]) -> None:
    model, batch = mixture_case(kind)
    report = verify(model, mesh, batch=batch, **options, machine=AT_ONCE)
    assert report.ok and report.max_error < 1e-10, report


def test_short_floats_are_added_in_float32() -> None:
    """Each token goes in the dtype of its rows, and comes back in that of their sum."""
    model, batch = mixture_case(Kind(chosen=8, blocks=1))
    program = autopar.compile(model, "ep=2", batch=batch, precision="bf16", machine=AT_ONCE).program
    assert _trips(program, "dispatch") == ["torch.bfloat16 12"] * 2
    assert _trips(program, "combine") == ["torch.float32 12"] * 2
    assert verify(model, "ep=2", batch=batch, precision="bf16", machine=AT_ONCE).ok


@pytest.mark.parametrize(
    ("kind", "options"), [(Kind(chosen=1), {}), (Kind(chosen=8), {"expert_rows": 4.0})], ids=["one expert", "padded"]
)
def test_rows_go_where_tokens_would_bring_nothing(kind: Kind, options: dict[str, Any]) -> None:
    model, batch = mixture_case(kind)
    program = autopar.compile(model, "ep=4", batch=batch, **options, machine=AT_ONCE).program
    assert not _trips(program, "dispatch") + _trips(program, "combine")


@pytest.mark.parametrize(("width", "goes"), [(12, 0), (1024, 2)])
def test_messages_and_calls_have_their_price(width: int, goes: int) -> None:
    """A host needs 0.1 ms for a message and a link moves 1 GB/s: of short rows two thirds less bring nothing."""
    model, batch = mixture_case(Kind(chosen=8, width=width, blocks=1))
    program = autopar.compile(model, "ep=2", batch=batch, machine="cpu").program
    assert len(_trips(program, "dispatch")) == len(_trips(program, "combine")) == goes


def test_weights_stay_where_they_would_cost_more_than_they_save() -> None:
    """Two of eight experts over four ranks: 0.93 of the bytes, of which two numbers a row are more than the rest."""
    model, batch = mixture_case(Kind(blocks=1))
    program = autopar.compile(model, "ep=4", batch=batch, machine=AT_ONCE).program
    assert _trips(program, "dispatch") == _trips(program, "combine") == ["torch.float32 12"]
    assert next(record(node).type.shape for node in program.calls() if node.target is op("combine")) == (96, 12)


@pytest.mark.parametrize(("ranks", "chosen"), [(2, 8), (4, 8), (4, 4), (4, 2)])
def test_bytes_are_those_of_the_formula(ranks: int, chosen: int) -> None:
    """Expected ones, as the report counts them, of experts that are wide: n / k (1 - (1 - 1/n)^k) of those of rows,
    where experts are many."""
    experts, tokens = 8 * ranks, 48
    model, batch = mixture_case(Kind(experts=experts, chosen=chosen, width=512, blocks=1))
    compiled = autopar.compile(model, f"ep={ranks}", batch=batch, machine=AT_ONCE)
    moved = [one.bytes for one in compiled.collectives if one.op in ("dispatch", "combine")]
    wide = [bytes_ for bytes_ in moved if bytes_ > tokens // ranks * chosen * 4]  # a number a row
    share = share_of_tokens(experts, ranks, chosen)
    assert wide == [round(tokens // ranks * ranks * share) * 512 * 4] * 4
    assert ranks / chosen * share == pytest.approx(ranks / chosen * (1 - (1 - 1 / ranks) ** chosen), rel=0.06)


def test_bytes_that_leave_are_counted_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the virtual mesh, of all routings: what the program says of each row and each token, times how many left."""
    for chosen, skew in ((3, 0.0), (8, -1.0), (4, 50.0)):
        kind = Kind(chosen=chosen, skew=skew, blocks=1)
        model, batch = mixture_case(kind)
        seen: list[int] = []
        with monkeypatch.context() as patch:
            patch.setattr(collectives, "_rows_sent", _counting(collectives._rows_sent, seen))
            verify(model, "ep=4", batch=batch, machine=AT_ONCE)
        rows, tokens = _leaving(model.double(), batch, kind, 4)
        assert sum(seen) == 2 * (tokens * 4 * 12 * 8 + rows * (2 * 8 + 4)), "of two runs"


def _counting(send: Callable[..., Any], seen: list[int]) -> Callable[..., Any]:
    def sent(moves: list[Any]) -> Any:
        for place, move in enumerate(moves):
            seen.append((sum(move.sent) - move.sent[place]) * move.x[0].numel() * move.x.itemsize if len(move.x) else 0)
        return send(moves)

    return sent


def _leaving(model: nn.Module, batch: tuple[Tensor, ...], kind: Kind, ranks: int) -> tuple[int, int]:
    """How many rows leave their rank, and to how many other ranks tokens go."""
    found: list[tuple[int, int]] = []

    def look(mixture: Any, args: tuple[Tensor], _: Any) -> None:
        scores = mixture.router(args[0].flatten(0, 1)) + mixture.skew
        owners = scores.softmax(-1).topk(kind.chosen).indices // (kind.experts // ranks)
        own = torch.arange(ranks).repeat_interleave(len(owners) // ranks)[:, None]
        pairs = [{*row} - {home} for row, home in zip(owners.tolist(), own.flatten().tolist(), strict=True)]
        found.append((int((owners != own).sum()), sum(map(len, pairs))))

    assert isinstance(model, Mixtures)
    model.mixed[0].register_forward_hook(look)
    model(*batch)
    return found[0]


# -- models write it in other ways ------------------------------------------------------------------------------------


class _Spelled(nn.Module):
    """A mixture whose rows are made, or added up, in another way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first, self.router = nn.Linear(12, 12), nn.Linear(12, 8)
        self.up, self.down = nn.Parameter(torch.randn(8, 12, 6) * 0.3), nn.Parameter(torch.randn(8, 6, 12) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        weights, experts = self.router(x).softmax(-1).topk(4)
        order = experts.flatten().argsort(stable=True)
        ends = torch.histc(experts.flatten().float(), 8, 0, 7).cumsum(0, dtype=torch.int32)
        rows = x.repeat_interleave(4, 0)[order] if self.way == "repeated" else x[order // 4]
        y = torch.tanh(nn.functional.grouped_mm(rows, self.up, offs=ends))
        y = nn.functional.grouped_mm(y, self.down, offs=ends)
        if self.way == "weighed before":
            y = y * weights.flatten()[order, None]
            return torch.zeros_like(x).index_add(0, order // 4, y).square().mean()
        back = torch.empty_like(y).index_copy(0, order, y).view(len(x), 4, 12)
        if self.way == "a product":
            return torch.einsum("tkh,tk->th", back, weights).square().mean()
        return (back * weights.unsqueeze(-1)).sum(1).square().mean()


@pytest.mark.parametrize("way", ["gathered", "repeated", "weighed before", "a product"])
def test_other_spellings(way: str) -> None:
    torch.manual_seed(0)
    model, batch = _Spelled(way), (torch.randn(16, 12),)
    program = autopar.compile(model, "ep=2", batch=batch, loss_fn=_called, machine=AT_ONCE).program
    trips = len(_trips(program, "dispatch")), len(_trips(program, "combine"))
    assert trips == ((1, 1) if way == "a product" else (2, 2)), trips
    report = verify(model, "ep=2", batch=batch, loss_fn=_called, machine=AT_ONCE)
    assert report.ok and report.max_error < 1e-10, report


def _called(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


# -- sabotage: what may go wrong with tokens is seen, and where -------------------------------------------------------


def _lost_term(x: Tensor, places: Tensor, count: int) -> Tensor:
    return _ADDED(torch.cat([x[:1] * 0, x[1:]]), places, count)


def _twice(x: Tensor, places: Tensor, count: int) -> Tensor:
    return _ADDED(torch.cat([x, x[-1:]]), torch.cat([places, places[-1:]]), count)


def _elsewhere(x: Tensor, places: Tensor, count: int) -> Tensor:
    return _ADDED(x, places.flip(0), count)


_ADDED = rows_to_owners._added


@pytest.mark.parametrize("way", [_lost_term, _twice, _elsewhere])
def test_sums_that_are_wrong_are_found(way: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_to_owners, "_added", way)
    model, batch = mixture_case(Kind(chosen=4))
    report = verify(model, "ep=2", batch=batch, machine=AT_ONCE)
    assert not report.ok and report.mismatch is not None and report.mismatch.module == "mixed.0", report
    assert report.mismatch.node == "combine"


def test_tokens_of_other_rows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank is sent the neighbours of the tokens that it needs."""

    def shifted(index: Tensor, size: int, groups: int, chosen: int) -> Tensor:
        return rows_to_owners.tokens_by_owner(index, size, groups, chosen).roll(1, 0)

    monkeypatch.setattr(mesh_ops, "tokens_by_owner", shifted)
    model, batch = mixture_case(Kind(chosen=4))
    report = verify(model, "ep=2", batch=batch, machine=AT_ONCE)
    assert not report.ok and report.mismatch is not None and report.mismatch.module == "mixed.0", report


def test_places_of_other_rows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def reversed_(*args: Any) -> Any:
        step = rows_to_owners.token_places(*args)
        assert isinstance(step, collectives.Move)
        then = step.then
        return collectives.Move("rows", step.x, lambda rows: then(rows).flip(0), sent=step.sent, received=step.received)

    monkeypatch.setitem(collectives._BEGIN, op("token_places"), reversed_)  # type: ignore[arg-type]
    model, batch = mixture_case(Kind(chosen=4))
    report = verify(model, "ep=2", batch=batch, machine=AT_ONCE)
    assert not report.ok and report.mismatch is not None and report.mismatch.module == "mixed.0", report


@pytest.mark.parametrize(
    ("target", "args", "shape", "parts"),
    [
        (torch.ops.aten.reshape.default, [24], (24,), ["a4 b6"]),
        (torch.ops.aten.reshape.default, [1, 4, 6], (1, 4, 6), ["", "a4", "b6"]),
        (torch.ops.aten.reshape.default, [2, 12], (2, 12), None),  # a is taken apart
        (torch.ops.aten.reshape.default, [8, 3], (8, 3), None),
        (torch.ops.aten.permute.default, [1, 0], (6, 4), ["b6", "a4"]),
        (torch.ops.aten.transpose.int, (0, 1), (6, 4), ["b6", "a4"]),
    ],
)
def test_dims_are_followed_where_none_is_taken_apart(
    target: Any, args: Any, shape: tuple[int, ...], parts: list[str] | None
) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(target, (x, *args) if isinstance(args, tuple) else (x, args))
    for one, size in ((x, (4, 6)), (node, shape)):
        set_record(one, Record((TensorType(size, torch.float32),)))
    assert moves_only(node)
    found = followed(parts_of([[("a", 4), ("c", 1)], [("b", 6)]]), node)
    assert parts == (found and [" ".join(f"{name}{size}" for name, size in dim) for dim in found])
