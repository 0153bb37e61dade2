"""Steps whose equal layers are simulated until each is like the one before it, beside those of all layers."""

from __future__ import annotations

import random
from contextlib import nullcontext, suppress
from functools import cache

import pytest
from plan_jobs import llama_job, on_same_captures

from autopar.machines import named
from autopar.planning.planner import layers_of
from autopar.planning.price.layers import Layers
from autopar.planning.price.moving import Moving
from autopar.planning.price.pipelined import cost_of, data_of
from autopar.planning.price.steady import Before, UnsteadyError, leave_out
from autopar.planning.price.whole_step import WholeStep, _Asked, _short, roads_of
from autopar.planning.space.candidates import Again, Candidate
from autopar.planning.space.deal import whole

MACHINE = named("h100-80g")
DEPTH, COUNT, LEAST = 31, 24, 9  # candidates, and those of them that leave layers out, at least
CLOSE = 1e-5  # of what all layers take: of small sums the last ones are laid together otherwise


@cache
def layers(width: int, bucket_bytes: int | None) -> Layers:
    """width: of wide ones the device is busy, of narrow ones the host. bucket_bytes: which decides
    how many layers pass until a bucket of gradients begins anew with a layer."""
    if bucket_bytes is not None:
        return on_same_captures(layers(width, None), MACHINE, bucket_bytes=bucket_bytes)
    return layers_of(llama_job(DEPTH, width=width, heads=16, hidden=4 * width, words=4096, length=1024), MACHINE)


def drawn(of: random.Random) -> Candidate:
    again, policy = None, of.choice(["none", "selective", "full"])
    if of.random() < 0.4:
        less, more = of.choice([("none", "selective"), ("selective", "full"), ("none", "full")])
        again, policy = Again("layers.0", DEPTH, ((0, of.randrange(1, DEPTH)),), more, less), "layers"
    dp, tp, zero = of.choice([1, 2, 4]), of.choice([1, 1, 2]), of.choice([0, 1, 2, 3, 3, 3])
    rows, microbatches, fsdp = of.choice([1, 2]), of.choice([1, 1, 2, 4]), of.choice([1, 2, 8])
    return Candidate(dp, tp, 1, zero, policy, rows, microbatches, fsdp=fsdp, again=again)


@pytest.mark.parametrize(
    ("width", "bucket_bytes"), [(256, None), (256, 5 << 17), (512, 3 << 20), (2048, None), (1024, 3 << 24)]
)
def test_layers_that_are_left_out_take_what_they_would(width: int, bucket_bytes: int | None) -> None:
    of, left_out = random.Random(f"{width} {bucket_bytes}"), 0
    known = layers(width, bucket_bytes)
    for _ in range(COUNT):
        candidate = drawn(of)
        if candidate.data == 1 or (candidate.fsdp > 1 and not candidate.zero):
            continue
        split, net = known.ranks_of(candidate), data_of(candidate, known).net
        all_ = whole(known.equal, candidate.again.count if candidate.again else 0)
        once = cost_of(candidate, known).on(all_).once(known.equal)
        roads = roads_of(candidate, known, split)
        expected = _Asked(candidate, roads, roads, net, None).made(once)
        found = WholeStep.of(candidate, known, split, once, net)
        for kinds in _short(candidate):
            short = roads_of(candidate, known, split, is_short=True)
            with suppress(UnsteadyError):
                _Asked(candidate, roads, {**roads, **{kind: short[kind] for kind in kinds}}, net, None).made(once)
                left_out += 1
                break
        assert found.us == pytest.approx(expected.us, CLOSE)
        assert (found.before, found.after) == pytest.approx((expected.before, expected.after), CLOSE)
        for name in ("forward", "backward", "before", "once", "saved"):
            assert getattr(found.peaks, name) == pytest.approx(getattr(expected.peaks, name), 1e-12), (candidate, name)
        assert {kind: len(moves) for kind, moves in found.moves.items()} == {
            kind: len(moves) for kind, moves in expected.moves.items()
        }
    assert left_out >= LEAST


@pytest.mark.parametrize(("layers_more", "is_steady"), [(6, True), (60, False)])
def test_a_host_that_will_be_late_is_not_steady(layers_more: int, is_steady: bool) -> None:
    """Each layer the host comes 2 us nearer to the device, which is 20 us ahead."""
    moving = Moving(data_of(Candidate(2, 1, 1, 0, "none", 1, 1), layers(256, None)).net)
    seen = []
    for layer in range(7):
        moving.streams.host, moving.streams.device = 10.0 * layer, 32.0 + 8.0 * layer
        seen.append(Before.of(moving))
    with nullcontext() if is_steady else pytest.raises(UnsteadyError):
        leave_out(moving, layers_more, seen)
        assert (moving.streams.host, moving.streams.device) == (120.0, 128.0)
