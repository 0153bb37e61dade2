"""The cost model against public measurements (sources: docs/machines.md), and the groups that it is asked of."""

from __future__ import annotations

import pytest

from autopar.ir.mesh import parse_mesh
from autopar.ir.ops.measure import group_of
from autopar.machines import named
from autopar.machines.model import Curve, Device, Link, Machine, RankGroup

H100, A100 = named("h100-80g"), named("a100-80g")
MIB, LARGE = 2**20, 16 * 2**30


def cluster(nodes: int, ranks: int) -> RankGroup:
    return RankGroup(nodes * ranks, ranks)


# (nodes, ranks of a node): latency in us, and bytes of the value in GB/s where they are many
RINGS = {
    (2, 8): (70, 410),
    (8, 8): (297, 390),
    (32, 8): (1204, 386),
    (2, 1): (22, 96),
    (8, 1): (106, 55),
    (32, 1): (442, 50),
}


@pytest.mark.parametrize("shape", RINGS, ids=str)
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_rings_between_nodes_of_h100(kind: str, shape: tuple[int, int]):
    latency, speed = RINGS[shape]
    assert H100.collective_us(kind, 0, cluster(*shape)) == pytest.approx(latency, rel=0.15)
    assert speed_of(H100, kind, shape) == pytest.approx(speed, rel=0.15)


def speed_of(machine: Machine, kind: str, shape: tuple[int, int]) -> float:
    group = cluster(*shape)
    return LARGE / (machine.collective_us(kind, LARGE, group) - machine.collective_us(kind, 0, group)) / 1e3


@pytest.mark.parametrize(("shape", "speed"), {(2, 8): 205, (8, 8): 195, (2, 1): 48, (8, 1): 27}.items(), ids=str)
def test_an_all_reduce_between_nodes_of_h100_is_as_fast_as_a_ring(shape: tuple[int, int], speed: float):
    assert speed_of(H100, "all_reduce", shape) == pytest.approx(speed, rel=0.15)


@pytest.mark.parametrize(("shape", "latency"), {(2, 8): 53, (4, 8): 81, (32, 8): 165, (2, 1): 36}.items(), ids=str)
def test_the_latency_of_an_all_reduce_between_nodes_of_h100(shape: tuple[int, int], latency: float):
    """A tree's where it is less than a ring's, which has (2, 8) 132 us."""
    assert H100.collective_us("all_reduce", 0, cluster(*shape)) == pytest.approx(latency, rel=0.15)


# 8 x H100, all-reduce: bytes to us
BY_SIZE = {
    8: 13.7, 1024: 16.9, 2**16: 19.5, 2**18: 20.4, MIB: 27.4, 4 * MIB: 54.2, 16 * MIB: 123.8, 64 * MIB: 324.7,
    256 * MIB: 1112, 1024 * MIB: 4029, 16384 * MIB: 62648,
}  # fmt: skip


@pytest.mark.parametrize(("bytes_", "us"), BY_SIZE.items(), ids=str)
def test_an_all_reduce_of_eight_h100(bytes_: int, us: float):
    assert H100.collective_us("all_reduce", bytes_, RankGroup(8)) == pytest.approx(us, rel=0.10)


@pytest.mark.parametrize(("mib", "us"), {1: 93, 8: 134, 32: 358, 128: 1162, 512: 4192, 1024: 8193}.items())
def test_an_all_reduce_of_eight_a100(mib: int, us: float):
    assert A100.collective_us("all_reduce", mib * MIB, RankGroup(8)) == pytest.approx(us, rel=0.15)


def test_the_largest_gathers_of_eight_h200():
    bus = 7 / 8 * LARGE / named("h200").collective_us("all_gather", LARGE, RankGroup(8)) / 1e3
    assert bus == pytest.approx(362, rel=0.05)


# -- the parts of the model -----------------------------------------------------------------------------------------


def test_a_curve_is_straight_over_the_logarithm_and_flat_outside():
    curve = Curve(((100.0, 0.2), (10_000.0, 0.8)))
    assert [curve(size) for size in (0, 1, 100, 1000, 10_000, 1e9)] == pytest.approx([0.2, 0.2, 0.2, 0.5, 0.8, 0.8])


def test_a_call_takes_its_products_its_bytes_or_the_least():
    device = Device({"float32": 1e12, "bfloat16": 4e12}, 1e11, 1e9, 5.0, Curve(((1e6, 0.5),)), attention=0.5)
    machine = Machine("", device, *[Link(1e9, 1.0, 0.0)] * 2)
    assert machine.call_us(1e9, "float32", 0) == pytest.approx(2000)
    assert machine.call_us(1e9, "bfloat16", 0) == pytest.approx(500)
    assert machine.call_us(1e9, "int8", 0) == pytest.approx(2000)  # a dtype without a peak of its own
    assert machine.call_us(1e9, "bfloat16", 0, "attention") == pytest.approx(1000)
    assert machine.call_us(1e9, "bfloat16", 1e9) == pytest.approx(10_000)
    assert machine.call_us(0, "", 100) == 5.0


def test_ranks_of_several_nodes_share_what_is_slower():
    """Two nodes of 4 cards, 1 GB/s each: 4 GB/s together, or the 3 GB/s of a rank in its node."""
    device = Device({"float32": 1e12}, 1e11, 1e9, 1.0)
    fast, slow = (Machine("", device, Link(speed, 0.0, 0.0), Link(1e9, 0.0, 0.0)) for speed in (1e10, 3e9))
    sent = 8e9 * 7 / 8
    assert fast.collective_us("all_gather", 8e9, RankGroup(8, 4)) == pytest.approx(sent / 4e3)
    assert slow.collective_us("all_gather", 8e9, RankGroup(8, 4)) == pytest.approx(sent / 3e3)
    assert slow.collective_us("all_gather", 8e9, RankGroup(2, 1)) == pytest.approx(8e9 / 2 / 1e3)
    assert slow.collective_us("all_to_all", 8e9, RankGroup(8, 4)) == pytest.approx(sent / 8 / 3e3)
    assert slow.collective_us("all_reduce", 8e9, RankGroup(1)) == 0


# -- the group of an axis -------------------------------------------------------------------------------------------

GROUPS = {
    ("dp=2,tp=8", "tp"): RankGroup(8, 8),
    ("dp=2,tp=8", "dp"): RankGroup(2, 1),
    ("dp=2,tp=8", "dp:tp"): RankGroup(16, 8),
    ("dp=2,tp=4", "dp"): RankGroup(2, 2),
    ("dp=4,tp=4", "dp"): RankGroup(4, 2),
    ("dp=2,tp=16", "tp"): RankGroup(16, 8),
    ("pp=2,dp=4,tp=8", "pp"): RankGroup(2, 1),
    ("pp=2,dp=4,tp=8", "dp"): RankGroup(4, 1),
    ("pp=2,dp=4,tp=8", "tp"): RankGroup(8, 8),
    ("pp=2,dp=4,tp=8", "dp:tp"): RankGroup(32, 8),
    ("dp=2,cp=4,tp=2", "dp:cp"): RankGroup(8, 4),
    ("dp=2,cp=2,tp=2", "dp:tp"): RankGroup(4, 4),
}


@pytest.mark.parametrize(("mesh", "axis"), GROUPS, ids=str)
def test_the_last_axes_of_a_mesh_lie_in_a_node(mesh: str, axis: str):
    assert group_of(parse_mesh(mesh), axis, ranks=8) == GROUPS[mesh, axis]


def test_a_rising_curve_lies_nowhere_below_and_never_falls() -> None:
    dented = Curve(((1.0, 0.2), (10.0, 0.6), (100.0, 0.4), (1000.0, 0.8)))
    assert dented.rising().points == ((1.0, 0.2), (10.0, 0.6), (100.0, 0.6), (1000.0, 0.8))
    machine = named("h100-80g").rising()
    assert machine.call_us(1e9, "bfloat16", 1e6) <= named("h100-80g").call_us(1e9, "bfloat16", 1e6)
