"""What ranks are given: every step compares it, by a digest in the exchange that it makes anyway."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from off_host import off_host
from processes import Ranks
from torch import Tensor, nn

import autopar
from autopar.capture.inputs.containers import take_call_apart
from autopar.errors import BatchError, RankError
from autopar.parallel.batches import digests
from autopar.parallel.batches.digests import EVERY, SAMPLE

ONE = digests._Digest()


def digest(*tensors: Tensor, call: int = 0, in_full: bool = False) -> int:
    parts = take_call_apart(tensors, {})
    given = [(i, parts.paths[i], leaf) for i, leaf in parts.tensors()]
    return ONE.of(given, None if in_full else call, at_once=True)


def kinds() -> Iterator[Tensor]:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64):
        yield torch.randn(5, 7).to(dtype)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
        yield torch.randint(0, 100, (5, 7), dtype=dtype)
    yield torch.rand(5, 7) > 0.5


def test_one_element_and_another_order_make_another_digest() -> None:
    for x in kinds():
        seen = {digest(x)}
        assert digest(x.clone()) == digest(x.T.contiguous().T) == digest(torch.stack([x, x], -1)[..., 0]) == digest(x)
        for i in range(x.numel()):
            other = x.clone()
            other.view(-1)[i] = ~other.view(-1)[i] if x.dtype == torch.bool else other.view(-1)[i] + 1
            seen.add(digest(other))
        assert len(seen) == 1 + x.numel(), x.dtype
        assert digest(x, x.flip(0)) != digest(x.flip(0), x)
    for mask in (torch.float32, torch.float64, torch.int64):  # only a high bit differs, or all bits do
        for zero, one in ((0, 1), (0, -1)):
            x = torch.full((200,), zero, dtype=mask)
            found = {digest(x.index_fill(0, torch.tensor([i]), one)) for i in range(200)}
            assert len(found | {digest(x)}) == 201
    assert digest(torch.tensor(3.0)) != digest(torch.tensor(4.0))
    assert digest(torch.empty(0, 3)) == 0


def test_numpy_and_torch_compute_the_same() -> None:
    """A copy of a batch that is written on a GPU, and one that is not, are alike."""
    words = torch.randn(64).view(torch.int64)
    assert int(ONE._sum(words.numpy())) == int(_by_torch(words))


def _by_torch(words: Tensor) -> Tensor:
    factors = torch.from_numpy(digests._odd_numbers(SAMPLE))
    mixed = words >> 32
    mixed *= digests._FOLD
    mixed += words
    mixed *= factors[: len(words)]
    return mixed.sum()


def test_samples_of_a_long_tensor_move_until_all_is_seen() -> None:
    x = torch.zeros(3 * SAMPLE + 5)
    other = x.clone()
    other[12_345] = 1e-30
    stride = -(-x.numel() // SAMPLE)
    seen = [digest(x, call=call) != digest(other, call=call) for call in range(1, 1 + stride)]
    assert seen.count(True) == 1
    assert digest(x, in_full=True) != digest(other, in_full=True)
    moved = torch.stack([x, other])[:, ::1]
    assert digest(moved.T, call=1) != digest(moved.flip(0).T, call=1) or stride > 1


# -- on ranks -------------------------------------------------------------------------------------------------------


def _loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def _parallel(mesh: str, **options: Any) -> autopar.ParallelModule:
    torch.manual_seed(0)
    return autopar.parallelize(nn.Linear(4, 4), mesh, loss_fn=_loss, **options)


def _moved_once(rank: int, mesh: str, batch: str, forward: bool) -> tuple[list[str], float]:
    """A generator that moves on rank 1, once, after three steps."""
    model = _parallel(mesh, batch=batch)
    place = rank // 2 if batch == "local" else 0
    generator = torch.Generator().manual_seed(place)
    errors = []
    start = time.monotonic()
    for step in range(5):
        if step == 3 and rank == 1:
            torch.rand(1, generator=generator)
        x = torch.rand(8, 4, generator=generator)
        try:
            if forward:
                model(x)
            else:
                model.forward_backward({"y": torch.full((8, 4), float(place)), "x": x})
        except RankError as error:
            errors.append(str(error))
            break
        errors.append("")
    return errors, time.monotonic() - start


def test_a_generator_that_moves_on_one_rank_is_found_at_that_step(two: Ranks) -> None:
    for errors, seconds in two.run(_moved_once, "dp=2", "global", False):
        assert errors[:3] == ["", "", ""] and len(errors) == 4 and seconds < 30
        assert errors[3] == (
            "ranks were given different data at step 3:\n"
            "  rank 1 has other values than rank 0 in argument 0['x']\n"
            'Pass the same whole batch on every rank, or batch="local" if each rank loads a part of its own.'
        )
    for errors, _ in two.run(_moved_once, "tp=2", "global", True):
        assert errors[:3] == ["", "", ""] and "has other values than rank 0 in argument 0\n" in errors[3]


def test_ranks_of_one_data_coordinate_are_compared(four: Ranks) -> None:
    for errors, _ in four.run(_moved_once, "dp=2,tp=2", "local", False):
        assert errors[:3] == ["", "", ""]
        assert errors[3] == (
            "ranks were given different data at step 3:\n"
            "  rank 1 has other values than rank 0 in argument 0['x']\n"
            'With batch="local", ranks of one dp coordinate pass the same part.'
        )


def _moved_on_a_device(rank: int) -> list[str]:
    with off_host():
        return _moved_once(rank, "dp=2", "global", False)[0]


def test_what_lies_on_a_device_is_compared_in_the_next_call(two: Ranks) -> None:
    """At once, the host would wait for all that the device has to do."""
    for errors in two.run(_moved_on_a_device):
        assert errors[:4] == ["", "", "", ""]
        assert errors[4].startswith("ranks were given different data at step 4:\n")
        names = "argument 0['x'], argument 0['x'] of the call before\n"
        assert f"  rank 1 has other values than rank 0 in {names}" in errors[4]


def _after_an_error(rank: int) -> list[str]:
    """A batch that rank 1 refuses, then one that differs, each followed by two that are alike."""
    model, x = _parallel("dp=2"), torch.ones(8, 4)
    fine, other = {"x": x, "y": x + 0}, {"x": x, "y": x + rank}
    refused: dict[str, Any] = {"x": 2 * x, "y": iter([x]) if rank else 2 * x}
    errors = []
    with off_host():
        for batch in (fine, fine, refused, fine, fine, other, fine, fine, fine):
            try:
                model.forward_backward(batch)
            except (RankError, BatchError) as error:
                errors.append(type(error).__name__)
            else:
                errors.append("")
    return errors


def test_an_error_leaves_nothing_to_compare_in_the_next_call(two: Ranks) -> None:
    """What was on its way when a call failed is compared on no rank."""
    for errors in two.run(_after_an_error):
        assert errors == ["", "", "RankError", "", "", "", "RankError", "", ""]


def _on_a_device_on_one(rank: int) -> str:
    model, batch = _parallel("dp=2"), {"x": torch.zeros(8, 4), "y": torch.zeros(8, 4)}
    with off_host() if rank else nullcontext():
        try:
            model.forward_backward(batch)
        except RankError as error:
            return str(error)
    return ""


def test_a_batch_lies_on_the_device_of_every_rank_or_of_none(two: Ranks) -> None:
    for text in two.run(_on_a_device_on_one):
        assert "rank 1 has 'argument 0['x'] on a device' where the others have 'nothing'" in text


def _one_element(rank: int) -> int:
    model = _parallel("dp=2")
    x, y = torch.zeros(20_000, 4), torch.zeros(20_000, 4)
    for step in range(EVERY + 1):
        if rank == 1 and step == 2:
            x[1_234, 3] = 1.0
        try:
            model.prepare({"x": x, "y": y})
        except RankError:
            return step
    return -1


def test_one_element_of_a_large_batch_is_found_in_time(two: Ranks) -> None:
    steps = two.run(_one_element)
    assert steps[0] == steps[1] and 2 <= steps[0] <= 2 + 80_000 // SAMPLE + 1


def _refused_on_one(rank: int) -> str:
    model = _parallel("dp=2")
    x = torch.zeros(4, 4)
    try:
        model.forward_backward({"x": x, "y": iter([x]) if rank else x})
    except (RankError, BatchError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_what_one_rank_refuses_is_an_error_on_all(two: Ranks) -> None:
    for text in two.run(_refused_on_one):
        assert text.startswith("RankError: ranks disagree on the batch and modes:\n  rank 1 has 'arguments refused: ")
        assert "argument 0['y'] is a list_iterator" in text


def _containers(rank: int, batch: str) -> list[float]:
    """The same data in arrays and dicts, given whole and in parts."""
    model = _parallel("dp=2", batch=batch)
    found = []
    for step in range(2):
        rows = np.arange(32, dtype=np.float32).reshape(8, 4) + step
        mine = rows if batch == "global" else rows[4 * rank : 4 * rank + 4]
        found.append(model.forward_backward({"x": torch.from_numpy(mine), "y": torch.from_numpy(mine * 2)}).item())
    return found


def test_local_and_global_batches_train_alike(two: Ranks) -> None:
    whole, parts = two.run(_containers, "global"), two.run(_containers, "local")
    assert whole[0] == whole[1] and whole == parts
