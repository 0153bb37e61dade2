"""Fits on made-up measurements: the constants of a known machine are found again."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
import torch

from autopar.machines import named
from autopar.machines.fit import TimedPoint, fit_curve, fit_device, fit_link, fits
from autopar.machines.measurement_plan import SIZES, items_of
from autopar.machines.model import FRESH, MESSAGE, PRODUCTS, Curve, Machine, RankGroup
from autopar.machines.samples import PRODUCT, SHARED, STREAM, UPDATE, Item, MeasuredCall, Sample
from autopar.machines.workload import (
    KINDS,
    attentions,
    convolutions,
    least,
    norms,
    products,
    streams,
    transfers,
    updates,
)  # fmt: skip


def seen(machine: Machine, items: list[Item], noise: float = 0.0) -> list[Sample]:
    """What one would measure on a machine, each time wrong by up to `noise`."""
    random = Random(1)
    return [Sample(item, item.us_on(machine) * (1 + noise * random.uniform(-1, 1))) for item in items]


def calls() -> list[Item]:
    """Those of a GPU, without asking for one."""
    sizes = SIZES["cuda"]
    found: list[Item] = [least(sizes.main), *attentions(sizes.main, sizes.attentions, sizes.heads)]
    for dtype in PRODUCTS:
        found += products(dtype, sizes.products)
    found += [*convolutions(sizes.main, sizes.channels), *norms(sizes.main, sizes.norms)]
    return [*found, *streams(sizes.main, sizes.streams)]


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("name", ["a100-80g", "h100-80g", "h200"])
def test_a_device_is_found_again(name: str, noise: float):
    known = replace(named(name), device=replace(named(name).device, convolution=0.4, norm=0.3))
    found = fit_device(seen(known, calls(), noise), known.device.memory, "bfloat16")
    reached = known.device.products(2 * 12288**3), known.device.streams(2**30)
    for dtype in PRODUCTS:
        assert found.flops[dtype] == pytest.approx(known.device.flops[dtype] * reached[0], rel=0.02 + noise)
    assert found.bandwidth == pytest.approx(known.device.bandwidth * reached[1], rel=0.02 + noise)
    assert found.memory == pytest.approx(known.device.memory, rel=1e-3)
    assert found.attention == pytest.approx(known.device.attention, rel=0.05 + noise)
    assert found.convolution == pytest.approx(0.4, rel=0.05 + noise)
    assert found.norm == pytest.approx(0.3, rel=0.1 + noise)  # as near as the curve of streams is
    for flops in (1e9, 1e11, 2e12):
        ratio = found.products(flops) * found.flops["bfloat16"] / known.device.products(flops)
        assert ratio == pytest.approx(known.device.flops["bfloat16"], rel=0.08 + noise)


def test_new_pages_of_a_host_are_found_again():
    """Large results take longer than their bytes; the bandwidth is that of the others."""
    known = named("cpu")
    known = replace(known, device=replace(known.device, fresh=1e9))
    sizes = SIZES["cpu"]
    items: list[Item] = [least("float32"), *products("float32", sizes.products), *streams("float32", sizes.streams)]
    assert any(isinstance(item, MeasuredCall) and item.result >= FRESH for item in items)
    found = fit_device(seen(known, items), 1e9, "float32", is_host=True)
    assert found.fresh == pytest.approx(1e9, rel=0.02)
    assert found.bandwidth * found.streams(1e8) == pytest.approx(known.device.bandwidth, rel=0.02)
    blind = fit_device(seen(known, items), 1e9, "float32")
    assert blind.fresh == math.inf and blind.bandwidth * blind.streams(1e8) < 0.5 * known.device.bandwidth


def test_what_an_optimizer_reaches_is_found_again():
    known = named("cpu")
    known = replace(known, device=replace(known.device, update=0.7))
    items: list[Item] = [least("float32"), *streams("float32", (2**20,)), *updates("float32", SIZES["cpu"].updates)]
    found = fit_device(seen(known, [*items, *products("float32", (64,))]), 1e9, "float32")
    assert found.update == pytest.approx(0.7, rel=0.01)
    assert replace(known, device=found).update_us(1e7) == pytest.approx(
        1e7 / 0.7 / known.device.bandwidth * 1e6, rel=0.01
    )
    assert fit_device(seen(known, [*items[:-3], *products("float32", (64,))]), 1e9, "float32").update is None


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("name", ["a100-80g", "h100-80g", "cpu"])
def test_a_network_is_found_again(name: str, noise: float):
    known, inside, between = named(name), RankGroup(8), RankGroup(4, 1)
    samples = seen(known, transfers((inside, between), SIZES["cuda"].transfers), noise)
    links = {group: fit_link(samples, group) for group in (inside, between)}
    found = replace(known, inside=links[inside], between=links[between])
    for group, link in ((inside, known.inside), (between, known.between)):
        assert links[group].start_us == pytest.approx(link.start_us, rel=0.05 + 2 * noise)
        for kind in KINDS:
            for bytes_ in (1e2, 1e5, 3e6, 1e8, 5e8):
                item = transfers((group,), (int(bytes_),))[KINDS.index(kind)]
                assert item.us_on(found) == pytest.approx(item.us_on(known), rel=0.12 + 1.5 * noise), (kind, bytes_)


def test_hops_are_found_again():
    known, group = named("h100-80g"), RankGroup(4, 1)
    link = fit_link(seen(known, transfers((group,), (64, 2**20, 2**24))), group)
    assert link.hop_us == pytest.approx(known.between.hop_us, rel=0.02)


def test_a_slow_kind_has_its_latency_in_its_curve():
    """Messages start in 20 us; an all-reduce of as little takes 300."""
    known, group = named("cpu"), RankGroup(2)
    slow = replace(known, inside=replace(known.inside, start_us=300.0))
    fast = replace(known, inside=replace(known.inside, start_us=20.0))
    items = transfers((group,), SIZES["cpu"].transfers)
    samples = [Sample(item, item.us_on(fast if item.kind == MESSAGE else slow)) for item in items]
    found = replace(known, inside=fit_link(samples, group))
    assert found.inside.start_us == pytest.approx(20, rel=0.01)
    assert {kind: fit.most < 0.25 for kind, fit in fits(found, samples).items()} == dict.fromkeys(KINDS, True)


def test_outliers_do_not_move_a_curve():
    points = [TimedPoint(10.0**k, 5.0, 10.0**k, 5.0 + 10.0**k / 0.5) for k in range(1, 7) for _ in range(4)]
    points[9] = replace(points[9], us=40 * points[9].us)
    assert [share for _, share in fit_curve(points).points] == pytest.approx([0.5] * 6, rel=0.1)


def test_shapes_do_not_bend_the_curve_of_products():
    """Every second size is of shapes that reach less: a product of a quarter's rows takes a quarter of the time."""
    points = [TimedPoint(4.0**k, 0.0, 4.0**k, 4.0**k / (0.9 if k % 2 else 0.7)) for k in range(1, 9)]
    bent, even = (fit_curve(points, rises=rises) for rises in (False, True))
    assert [share for _, share in bent.points] == pytest.approx([0.9, 0.7] * 4, rel=1e-3)
    shares = [share for _, share in even.points]
    assert shares == sorted(shares) and 0.7 < shares[1] < 0.9 and shares[-1] / shares[1] < 1.02
    rising = [TimedPoint(4.0**k, 0.0, 4.0**k, 4.0**k / (k / 10)) for k in range(1, 9)]
    assert [share for _, share in fit_curve(rising, rises=True).points] == pytest.approx([k / 10 for k in range(1, 9)])


def test_no_share_is_more_than_all_and_none_is_nothing():
    curve = fit_curve(
        [TimedPoint(1e3, 0.0, 10.0, 1.0), TimedPoint(1e6, 9.0, 0.1, 10.0), TimedPoint(1e9, 0.0, 1.0, 1e9)]
    )
    assert [share for _, share in curve.points] == pytest.approx([1, 0.1, 2e-6], rel=0.01)
    assert fit_curve([]) == Curve()


def test_how_well_a_machine_tells_is_said_by_kind():
    known = named("h200")
    samples = seen(known, calls())
    assert {kind: fit.most for kind, fit in fits(known, samples).items()} == pytest.approx(
        dict.fromkeys(("least", PRODUCT, *SHARED, STREAM), 0.0)
    )
    samples = [Sample(each.item, each.us * (2 if each.item.kind == STREAM else 1)) for each in samples]
    samples[-1] = replace(samples[-1], us=samples[-1].us / 8)
    fit = fits(known, samples)[STREAM]
    assert (fit.count, fit.most) == (len(SIZES["cuda"].streams) * 7, pytest.approx(3))
    assert fit.worst == samples[-1]
    assert fit.mean == pytest.approx(0.5 + 2.5 / fit.count)
    assert fits(known, samples)[PRODUCT].most == pytest.approx(0)


def test_what_is_measured_on_a_cpu():
    items = items_of(torch.device("cpu"), (RankGroup(2),))
    assert {item.kind for item in items} == {"least", PRODUCT, *SHARED, STREAM, UPDATE, *KINDS}
    assert {item.dtype for item in items if item.kind == PRODUCT} == {"float64", "float32", "bfloat16", "float16"}
    assert len(set(items)) == len(items)
    assert not [item for item in items_of(torch.device("cpu"), ()) if item.kind in KINDS]


def test_time_that_runs_out_takes_a_bit_of_all():
    """All families go from small to large, side by side."""
    items = items_of(torch.device("cpu"), (RankGroup(2),))
    for family in {item.family for item in items}:
        sizes = [item.size for item in items if item.family == family]
        assert sizes == sorted(sizes), family
        half = [item for item in items[: len(items) // 2] if item.family == family]
        assert abs(len(half) - len(sizes) / 2) <= 1, family
