"""The steps of a ring: which products, in which order with the transfers, and how blocks are joined."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import Llama, token_loss

import autopar
from autopar.ir.ops.ops import op
from autopar.ir.ops.ring_ops import RING_ATTENTION, RING_ATTENTION_BACKWARD, RING_COMPARED, RING_COMPARED_BACKWARD
from autopar.runtime.attention import ring_attention, ring_kernels
from autopar.runtime.attention.attention_compared import compared_attention, compared_attention_backward
from autopar.runtime.attention.attention_whole import attention, attention_backward
from autopar.runtime.attention.blocks import RowRuns, blocks_of, runs_at
from autopar.runtime.attention.ring_kernels import RINGS
from autopar.runtime.collectives.collectives import together
from autopar.runtime.collectives.mesh_ops import COORD, WAIT, pieces

# -- blocks ---------------------------------------------------------------------------------------------------------


def positions(runs: RowRuns) -> list[int]:
    return [start + i for start in runs.starts for i in range(runs.width)]


def geometries() -> Iterator[tuple[RowRuns, RowRuns]]:
    """Pieces of all ranks of some axes, of sequences of one and of two lengths; and runs that no layout makes."""
    for n, (outer, s), (other, t) in itertools.product((2, 3), ((1, 12), (-2, 24), (-4, 24)), ((1, 12), (-2, 12))):
        for i, j in itertools.product(range(n), repeat=2):
            yield runs_at(i, n, outer, s // n), runs_at(j, n, other, t // n)
    yield RowRuns((7, 0), 3), RowRuns((0, 7), 3)
    yield RowRuns((2,), 9), RowRuns((5,), 2)


@pytest.mark.parametrize("causal", [True, False])
def test_each_pair_is_in_one_block(causal: bool) -> None:
    for rows, keys in geometries():
        query, key = torch.tensor(positions(rows)), torch.tensor(positions(keys))
        seen = torch.zeros(len(query), len(key), dtype=torch.int)
        for block in blocks_of(rows, keys, causal):
            part = seen[block.rows, block.keys[0]]
            part += torch.ones_like(part).tril() if block.causal else 1
            assert not block.causal or part.shape[0] == part.shape[1]
        wanted = query[:, None] >= key if causal else torch.ones_like(seen, dtype=torch.bool)
        assert torch.equal(seen, wanted.int()), (rows, keys)


def test_pieces_are_where_the_layout_says() -> None:
    for n, outer in itertools.product((2, 3, 4), (1, 2, -2, -4)):
        whole = pieces(torch.arange(48), n, 0, outer)
        for place in range(n):
            assert positions(runs_at(place, n, outer, 48 // n)) == whole[place].tolist()


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_mirrored_pieces_are_one_call_a_step_and_alike(n: int) -> None:
    """(2 n - 1) w^2 + w (w + 1) pairs on every rank; pieces in order: r c^2 + c (c + 1) / 2."""
    w = 3
    for outer, width in ((-2, 2 * w), (1, w)):
        for rank in range(n):
            rows = runs_at(rank, n, outer, width)
            steps = [blocks_of(rows, runs_at((rank - step) % n, n, outer, width), True) for step in range(n)]
            assert [len(found) for found in steps] == [1 if outer < 0 or step <= rank else 0 for step in range(n)]
            pairs = sum(_pairs(block) for found in steps for block in found)
            assert pairs == ((2 * n - 1) * w**2 + w * (w + 1) if outer < 0 else rank * w**2 + w * (w + 1) // 2)


def _pairs(block: Any) -> int:
    rows, keys = (part.stop - part.start for part in (block.rows, *block.keys))
    return rows * (rows + 1) // 2 if block.causal else rows * keys


# -- a ring without an executor -------------------------------------------------------------------------------------

SHIFT = op("shift_start")


def together_driven(steps: list[Any]) -> list[Any]:
    """The results of the generators of all ranks, which ask for the same at the same time."""
    answers: list[Any] = [None] * len(steps)
    while True:
        requests, results = [], []
        for step, answer in zip(steps, answers, strict=True):
            try:
                requests.append(step.send(answer))
            except StopIteration as done:
                results.append(done.value)
        if results:
            assert len(results) == len(steps)
            return results
        assert len({target for target, _ in requests}) == 1
        answers = [[one] for one in _answers(requests)]


def _answers(requests: list[Any]) -> list[Any]:
    if requests[0][0] == COORD:
        return list(range(len(requests)))
    return [args[0] for _, args in requests] if requests[0][0] == WAIT else together(requests)


def ask(target: Any, *args: Any) -> Any:
    return target, args


def shared(x: torch.Tensor, n: int, outer: int) -> list[torch.Tensor]:
    return list(pieces(x, n, 2, outer))


def ring_of(
    n: int, outer: int, causal: bool, grad: Any, q: Any, k: Any, v: Any, mask: Any = None
) -> tuple[torch.Tensor, ...]:
    """(out, lse, dq, dk, dv) of n ranks, put together. mask: vectors of queries and of keys, and a condition."""
    parts = [shared(x, n, outer) for x in (grad, q, k, v)]
    rest = ["x", n, outer, causal, 0.3]
    starts = [list(runs_at(rank, n, outer, q.shape[2] // n).starts) for rank in range(n)]
    targets = (RING_ATTENTION, RING_ATTENTION_BACKWARD) if mask is None else (RING_COMPARED, RING_COMPARED_BACKWARD)
    forward, backward = (RINGS[target].run for target in targets)
    vectors: list[Any] = [[]] * n
    if mask is not None:
        rows = [list(shared(x, n, outer)) for x in mask[0]]
        vectors, rest = [[[row[r] for row in rows], mask[1]] for r in range(n)], [mask[2], *rest]
    outs = together_driven(
        [forward(ask, *(x[r] for x in parts[1:]), *vectors[r], *rest, starts=starts[r]) for r in range(n)]
    )
    grads = together_driven(
        [backward(ask, *(x[r] for x in parts), *vectors[r], *outs[r], *rest, starts=starts[r]) for r in range(n)]
    )
    order = torch.cat([torch.tensor(positions(runs_at(r, n, outer, q.shape[2] // n))) for r in range(n)]).argsort()
    keys = torch.cat([torch.tensor(positions(runs_at(r, n, outer, k.shape[2] // n))) for r in range(n)]).argsort()
    found = [torch.cat(list(each), 2) for each in (*zip(*outs, strict=True), *zip(*grads, strict=True))]
    return tuple(x[:, :, order if i < 3 else keys] for i, x in enumerate(found))


def operands(dtype: torch.dtype, s: int = 24, t: int = 24, heads: int = 2) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(3)
    shapes = (2, 4, s, 6), (2, 4, s, 5), (2, heads, t, 5), (2, heads, t, 6)
    return tuple(torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes)


def whole(causal: bool, grad: Any, q: Any, k: Any, v: Any) -> tuple[torch.Tensor, ...]:
    out, lse = attention(q, k, v, None, causal, 0.3)
    return out, lse, *attention_backward(grad, q, k, v, None, out, lse, causal, 0.3)


@pytest.mark.parametrize(("n", "outer"), [(2, 1), (2, -2), (3, -2), (4, 1), (4, -2), (1, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_a_ring_is_attention_to_the_whole(n: int, outer: int, causal: bool) -> None:
    for heads, t in ((1, 24), (4, 24), (2, 24 if causal else 48)):
        given = operands(torch.float64, t=t, heads=heads)
        for got, want in zip(ring_of(n, outer, causal, *given), whole(causal, *given), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


CONDITIONS = ["c0<=r0", "c0>r1", "c1==r2", "c2", "c1==r2 & c2", "(c0>r1 | c2) & c0<=r0", "c0>r0 & c1!=r2", "c3"]


@pytest.mark.parametrize(("n", "outer"), [(2, 1), (2, -2), (4, 1), (3, -2), (1, 1)])
@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("causal", [True, False])
def test_a_ring_under_a_condition(
    n: int, outer: int, condition: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks smaller than a piece: positions, a window, documents of each sample, padding; rows that see nothing."""
    monkeypatch.setattr("autopar.runtime.attention.compared_blocks._SIZE_CPU", 4)
    place, document = torch.arange(24).view(1, 1, 24), torch.tensor([[7], [15]]).le(torch.arange(24)).long()[:, None]
    pads = torch.ones(2, 1, 24, dtype=torch.bool)
    pads[0, :, :9], pads[1, :, 17:] = False, False
    rows, columns = [place, place - 5, document], [place, document, pads, pads & ~pads]
    given = operands(torch.float64)
    out, lse = compared_attention(*given[1:], rows, columns, condition, causal, 0.3)
    want = out, lse, *compared_attention_backward(*given, rows, columns, out, lse, condition, causal, 0.3)
    for got, wanted in zip(ring_of(n, outer, causal, *given, (rows, columns, condition)), want, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 2.0), (torch.bfloat16, 2.0)])
def test_rounding_is_that_of_one_kernel(dtype: torch.dtype, factor: float) -> None:
    """Against float64, at most twice the error of the same kernel on the whole."""
    exact = whole(True, *(x.double() for x in operands(dtype)))
    for got, plain, want in zip(
        ring_of(4, -2, True, *operands(dtype)), whole(True, *operands(dtype)), exact, strict=True
    ):
        assert got.dtype == plain.dtype
        assert (got - want).norm() <= factor * (plain - want).norm() + 1e-12


def test_gradients_are_added_up_in_float32() -> None:
    """A fourth each of 256, 1, 1 and 1, from four ranks: 64.75, or 65 in bf16, where 64 + 0.25 would stay 64."""
    q, grad = torch.zeros(1, 1, 4, 1, dtype=torch.bfloat16), torch.ones(1, 1, 4, 1, dtype=torch.bfloat16)
    grad[0, 0, 0] = 256
    *_, dv = ring_of(4, 1, False, grad, q, q, q)
    assert torch.equal(dv, torch.full_like(dv, 65))


def test_transfers_are_under_way_during_the_products() -> None:
    """Forward each step's; backward each but the first, which has nothing to compute."""
    seen: list[str] = []

    def noted(name: str, kernel: Any) -> Any:
        return lambda *args: (seen.append(name), kernel(*args))[1]

    n, given = 3, operands(torch.float64)
    forward = ring_kernels._attention(noted("*", attention), ask, *given[1:], "x", n, 1, False, 0.3)
    backward = ring_kernels._attention_backward(
        noted("*", attention_backward), ask, *given, *whole(False, *given)[:2], "x", n, 1, False, 0.3
    )
    for steps, wanted in ((forward, "[*][*]*"), (backward, "[][*[]*][*]")):
        seen.clear()
        _alone(steps, seen)
        assert "".join(seen) == wanted


def _alone(steps: Any, seen: list[str]) -> None:
    """Drive one rank that is given back what it sends. "[" starts a transfer, "]" waits for one."""
    answer = None
    while True:
        try:
            target, args = steps.send(answer)
        except StopIteration:
            return
        seen += {SHIFT: "[", WAIT: "]"}.get(target, "")
        answer = [1 if target == COORD else args[0].clone()]


# -- what is broken is seen, at its node ----------------------------------------------------------------------------


def _verified() -> Any:
    x = torch.randint(40, (2, 24), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    return autopar.verify(Llama(1, 32, 4, 2, 48, 40, 24), "cp=4", loss_fn=token_loss, batch=(x, x), attention="ring")


def _wrong_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank's keys are taken to lie in order."""
    monkeypatch.setattr(
        ring_attention, "runs_at", lambda place, n, outer, count: runs_at(place, n, outer if place else 1, count)
    )


def _last_hop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last message of keys and values does not arrive: the one before is used again."""
    monkeypatch.setattr(ring_attention, "_unpacked", _once_stale(ring_attention._unpacked))


def _once_stale(unpacked: Any) -> Any:
    before: dict[tuple[int, ...], Any] = {}

    def stale(message: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        found = unpacked(message, k, v)
        key = (k.data_ptr(),)
        count, last = before.get(key, (0, found))
        before[key] = count + 1, found
        return last if count == 2 else found

    return stale


def _no_rescale(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logsumexp of what was joined is not kept."""
    monkeypatch.setattr(torch, "logaddexp", lambda a, b: a)


def _no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes round beside keys and values stays zero."""
    monkeypatch.setattr(ring_attention, "add_to_keys", lambda parts, *grads: None)


@pytest.mark.parametrize(
    ("broken", "node"),
    [(_wrong_fold, "%ring_attention,"), (_last_hop, "%ring_attention,"), (_no_rescale, "%ring_attention,"),
     (_no_gradients, "%ring_attention_backward,")],
)  # fmt: skip
def test_what_is_broken_is_found_at_its_node(broken: Any, node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _verified().ok
    broken(monkeypatch)
    report = _verified()
    assert not report.ok and node in str(report.mismatch), str(report)
