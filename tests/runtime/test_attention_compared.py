"""Attention with a mask that is known by a condition, against the same mask as a tensor; what is computed of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attention_stubs import stubbed
from off_host import off_host
from torch import Tensor

from autopar.errors import PlanError
from autopar.ir.comparisons import holds, opposite, parse_condition
from autopar.runtime.attention import attention_compared, compared_blocks
from autopar.runtime.attention.attention_compared import compared_attention, compared_attention_backward
from autopar.runtime.attention.attention_kernels import KernelDevice
from autopar.runtime.attention.attention_whole import attention, attention_backward

D = torch.float64
B, H, S, T = 3, 4, 37, 29  # no multiples of a block


def vectors(s: int, t: int) -> tuple[list[Tensor], list[Tensor]]:
    """Of each query its position, the number of its document and a flag; of each key too, and a flag of each head."""
    torch.manual_seed(0)
    document = torch.randint(4, (B, 1, max(s, t))).sort().values
    pads = torch.rand(B, 1, t) < 0.7
    pads[1, :, : t // 2] = False
    rows = [torch.arange(s).view(1, 1, s), document[..., :s], torch.rand(B, 1, s) < 0.8]
    return rows, [torch.arange(t).view(1, 1, t), document[..., :t], pads, torch.rand(1, H, t) < 0.5]


CONDITIONS = [
    "c0<=r0", "c0>r0", "c1==r1", "c1!=r1 & c0<=r0", "c2", "~c2 & r2", "c1==r1 & c2 | c0<r0 & ~r2", "c3 & c1<=r1",
    "(c0<=r0 | c2) & (c1>=r1 | c3)", "r2",
]  # fmt: skip


def tensor_mask(condition: str, rows: Sequence[Tensor], columns: Sequence[Tensor], causal: Tensor | None) -> Tensor:
    values = {f"r{i}": one.unsqueeze(-1) for i, one in enumerate(rows)}
    values |= {f"c{i}": one.unsqueeze(-2) for i, one in enumerate(columns)}
    found = holds(parse_condition(condition), values)
    assert found is not None
    found = found if causal is None else found & causal
    return found.expand(B, H, rows[0].shape[-1], columns[0].shape[-1])


def both(
    operands: Sequence[Tensor], condition: str, rows: list[Tensor], columns: list[Tensor], mask: Tensor, **how: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Results and gradients by the condition, and by the tensor."""
    grad, q, k, v = operands
    causal = how.pop("causal", False)
    out, lse = compared_attention(q, k, v, rows, columns, condition, causal, 0.3, **how)
    grads = compared_attention_backward(
        grad, q, k, v, rows, columns, out, lse, condition, causal, 0.3, **how
    )  # fmt: skip
    want = attention(q, k, v, mask, False, 0.3)
    return [out, lse, *grads], [*want, *attention_backward(grad, q, k, v, mask, *want, False, 0.3)]


def random(s: int, t: int, dtype: torch.dtype = D, device: str = "cpu", width: int = 8) -> list[Tensor]:
    shapes = ((H, s, 16), (H, s, width), (2, t, width), (2, t, 16))
    return [torch.randn(B, n, h, d).to(device, dtype).transpose(1, 2) for h, n, d in shapes]


@pytest.mark.parametrize("size", [4, 5, 64])
@pytest.mark.parametrize("condition", CONDITIONS)
def test_it_is_attention_with_the_mask(condition: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compared_blocks, "_SIZE_CPU", size)
    rows, columns = vectors(S, T)
    got, want = both(random(S, T), condition, rows, columns, tensor_mask(condition, rows, columns, None))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("starts", [(), (8, 24), (3,)])
def test_what_is_causal_counts_positions_of_the_whole(starts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a piece the queries are runs of the whole, whose rows of the vectors come along."""
    monkeypatch.setattr(compared_blocks, "_SIZE_CPU", 3)
    whole, columns = vectors(40, 40)
    width = 40 if not starts else 16 // len(starts)
    at = torch.cat([torch.arange(start, start + width) for start in starts or (0,)])
    rows = [one[..., at] for one in whole]
    causal = torch.arange(40) <= at[:, None]
    mask = tensor_mask("c1==r1 & c2", rows, columns, causal)
    got, want = both(random(len(at), 40), "c1==r1 & c2", rows, columns, mask, causal=True, starts=starts)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_row_that_sees_nothing_gives_and_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compared_blocks, "_SIZE_CPU", 4)
    operands, pads = random(12, 12), torch.ones(B, 1, 12, dtype=torch.bool)
    pads[1, :, :6], pads[2] = False, False
    out, lse = compared_attention(*operands[1:], [], [pads], "c0", True, 0.3)
    assert out[1, :, :6].abs().max() == out[2].abs().max() == lse[1, :, :6].abs().max() == lse[2].abs().max() == 0
    grads = compared_attention_backward(*operands, [], [pads], out, lse, "c0", True, 0.3)
    assert grads[0][1, :, :6].abs().max() == grads[1][2].abs().max() == grads[2][1, :, :6].abs().max() == 0
    assert all(torch.isfinite(one).all() for one in (out, lse, *grads))


def test_a_sequence_without_elements() -> None:
    for s, t in ((0, 5), (5, 0)):
        q, k = torch.randn(1, 2, s, 4), torch.randn(1, 2, t, 4)
        rows, columns = [torch.arange(s).view(1, 1, s)], [torch.arange(t).view(1, 1, t)]
        out, lse = compared_attention(q, k, k, rows, columns, "c0<=r0", False, 0.3)
        assert out.shape == q.shape and lse.abs().sum() == 0
        grads = compared_attention_backward(out, q, k, k, rows, columns, out, lse, "c0<=r0", False, 0.3)
        assert [one.shape for one in grads] == [q.shape, k.shape, k.shape]


def pairs(monkeypatch: pytest.MonkeyPatch, run: Any) -> tuple[int, int]:
    """Pairs of a query and a key that kernels compute, without a mask and with one."""
    found = [0, 0]

    def count(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *rest: Any) -> Any:
        found[mask is not None] += q.shape[0] * q.shape[2] * k.shape[2]
        return attention(q, k, v, mask, *rest)

    monkeypatch.setattr(attention_compared, "attention", count)
    run()
    return found[0], found[1]


def test_what_nobody_sees_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks of 8: a window of 16 meets two or three of them, of which one is seen whole; two documents each
    their own half; causal the ones below the diagonal whole."""
    monkeypatch.setattr(compared_blocks, "_SIZE_CPU", 8)
    q, place = torch.randn(1, 2, 64, 4), torch.arange(64).view(1, 1, 64)

    def computed(rows: list[Tensor], columns: list[Tensor], condition: str, causal: bool) -> tuple[int, int]:
        return pairs(monkeypatch, lambda: compared_attention(q, q, q, rows, columns, condition, causal, 0.5))

    assert computed([place - 16], [place], "c0>r0", True) == (7 * 64, (8 + 6) * 64)
    assert computed([place // 32], [place // 32], "c0==r0", False) == (2 * 16 * 64, 0)
    assert computed([place], [place], "c0<=r0", False) == (28 * 64, 8 * 64)
    pads = torch.arange(64).view(1, 1, 64) < 24
    assert computed([], [pads], "c0", False) == (8 * 3 * 64, 0)
    assert computed([], [pads & ~pads], "c0", False) == (0, 0)


def test_samples_skip_blocks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compared_blocks, "_SIZE_CPU", 8)
    q, pads = torch.randn(2, 1, 16, 4), torch.tensor([[[True] * 16], [[True] * 8 + [False] * 8]])
    assert pairs(monkeypatch, lambda: compared_attention(q, q, q, [], [pads], "c0", False, 0.5)) == (256 + 128, 0)


def test_on_a_gpu_what_is_seen_whole_has_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """By stubs that insist on what the kernels want: flash for blocks without a mask, efficient for the others."""
    monkeypatch.setattr(compared_blocks, "_SIZE_CPU", 16)
    monkeypatch.setattr(
        "autopar.runtime.attention.attention_kernels._device", lambda device: KernelDevice("cuda", (8, 0))
    )
    rows, columns = vectors(64, 64)
    operands = random(64, 64, torch.bfloat16)
    mask = tensor_mask("c0<=r0", rows, columns, None)
    with stubbed() as called:
        got, _ = both(operands, "c0<=r0", rows[:1], columns[:1], mask)
    assert set(called) == {"flash", "efficient", "flash_backward", "efficient_backward"}
    monkeypatch.undo()
    _, want = both([one.double() for one in operands], "c0<=r0", rows[:1], columns[:1], mask)
    for ours, its in zip(got, want, strict=True):
        torch.testing.assert_close(ours.double(), its, rtol=3e-2, atol=3e-2)


def test_a_recording_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a CUDA graph is recorded no block is known, and the mask of each is made."""
    monkeypatch.setattr(compared_blocks, "_SIZE", 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    q, place = torch.randn(1, 2, 32, 4), torch.arange(32).view(1, 1, 32)
    for recording, expected in ((True, (0, 32 * 32)), (False, (6 * 64, 4 * 64))):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda recording=recording: recording)
        with off_host():
            found = pairs(monkeypatch, lambda: compared_attention(q, q, q, [place], [place], "c0<=r0", False, 0.5))
        assert found == expected


devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("condition", ["c0<=r0", "c1==r1 & c0<=r0 & c2", "c0>r0 & c3"])
def test_a_device_computes_it(device: str, dtype: torch.dtype, condition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compared_blocks, "_SIZE_CPU", 32)
    monkeypatch.setattr(compared_blocks, "_SIZE", 32)
    rows, columns = ([one.to(device) for one in side] for side in vectors(160, 160))
    operands = random(160, 160, dtype, device, 16)
    mask = tensor_mask(condition, rows, columns, None)
    got, _ = both(operands, condition, rows, columns, mask)
    _, want = both([one.double() for one in operands], condition, rows, columns, mask)
    tolerance = 1e-4 if dtype == torch.float32 else 6e-2
    for ours, its in zip(got, want, strict=True):
        torch.testing.assert_close(ours.double(), its, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_bounds_are_those_of_all_elements(condition: str) -> None:
    """What is said of a block holds of each of its elements; what is said to be possible is not missed."""
    rows, columns = vectors(6, 5)
    values = {f"r{i}": one.unsqueeze(-1) for i, one in enumerate(rows)}
    values |= {f"c{i}": one.unsqueeze(-2) for i, one in enumerate(columns)}
    low, high = ({name: getattr(one, f"a{end}")() for name, one in values.items()} for end in ("min", "max"))
    surely, possibly = compared_blocks.bounds(parse_condition(condition), low, high)
    found = holds(parse_condition(condition), values)
    assert found is not None
    assert (not surely or bool(found.all())) and (bool(possibly) or not found.any())
    denied = holds(opposite(parse_condition(condition)), values)
    assert denied is not None and torch.equal(*torch.broadcast_tensors(denied, ~found))


@pytest.mark.parametrize("text", [*CONDITIONS, "true"])
def test_conditions_are_read_as_they_are_written(text: str) -> None:
    assert str(parse_condition(text)) == text


@pytest.mark.parametrize("text", ["c0<=", "r0<c0", "c0 c1", "(c0", "c0)", "x0", "", "c0 &", "c0<=c1"])
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"condition '.*': cannot read '.*'; write it like 'c0<=r0 & ~c1'\."):
        parse_condition(text)
