"""The benchmark of what a step costs the host runs, and its numbers are of the right things."""

from __future__ import annotations

import pytest
import torch

from benchmarks.launch import Pair, forward_backward, main, optimizers


def test_the_benchmark_prints_a_row_for_each_goal(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        main(["--layers", "1", "--rounds", "2"])
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    for name in ("forward and backward", "outside of the program", "AdamW, for each tensor", "foreach", "fused"):
        assert name in printed


def test_both_sides_compute_the_same() -> None:
    pair = Pair.of(layers=1)
    row, outside = forward_backward(pair, rounds=2)
    assert row.ours > 0 and row.plain > 0 and outside < row.ours
    pair.forget()
    pair.step()
    pair.plain_step()
    for ours, plain in zip(pair.ours.parameters(), pair.plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), plain.grad)  # type: ignore[attr-defined, union-attr]
    assert len(optimizers(pair, rounds=2)) == 3
