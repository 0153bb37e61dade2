"""The benchmark of what a step costs the host runs, and its numbers are of the right things."""

from __future__ import annotations

import pytest
import torch

from benchmarks import floor
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


def test_the_floor_is_of_classes_that_compute_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        floor.main(["--layers", "1", "--rounds", "2"])
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out.split()
    assert all(name in printed for name in ("named", "wrapper", "led", "ours"))
    start = torch.randn(3, 2, requires_grad=True)
    start.grad = torch.randn(3, 2)
    for _, options in floor.WAYS:
        groups = [floor.copies([start], make) for make in (floor.named, floor.wrapped)]
        groups.append(floor.copies([start], floor.wrapped, has_lead=True))
        plain = start.detach().clone().requires_grad_()
        plain.grad = start.grad.clone()
        for group in (*groups, [plain]):
            optimizer = torch.optim.AdamW(group, lr=0.1, **options)
            optimizer.step()
            optimizer.step()
        for (found,) in groups:
            torch.testing.assert_close(floor.part_of(found).detach().as_subclass(torch.Tensor), plain.detach())
