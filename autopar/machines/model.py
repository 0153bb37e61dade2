"""What a machine needs for a call, a collective and a message: the one cost model of the compiler.

A `Machine` is a device, a network of two levels (within a node, and between nodes) and a host. Its constants come from
a TOML file (`autopar/machines`) or from `autopar machine measure`. All times are microseconds, all speeds bytes or
floating-point operations a second.

    call         max(least, FLOPs / (peak of the dtype * share of it that a product of so many FLOPs reaches),
                     bytes / (bandwidth of memory * share that so many bytes reach))           a roofline
    collective   latency + bytes that each rank sends / speed of its ring                      ring algorithms
    message      latency + bytes / speed of the link

A rank sends 2 (n-1)/n B in an all-reduce, (n-1)/n B in an all-gather or a reduce-scatter and (n-1)/n B/n in an
all-to-all, for a value of B bytes on n ranks (arXiv 2104.04473, section 3.2). Ranks that fill several nodes make as
many rings as they are in a node, each over a card of its own, so they are as fast as the slower of the two levels:
min(inside, ranks in a node * between).
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

PRODUCTS = ("float64", "float32", "tfloat32", "bfloat16", "float16")  # the dtypes whose peaks a device has


@dataclass(frozen=True, slots=True)
class Curve:
    """The share of a peak that is reached, by size: straight between its points over the logarithm of the size, and
    that of the first or the last point outside of them."""

    points: tuple[tuple[float, float], ...] = ((1.0, 1.0),)

    def __call__(self, size: float) -> float:
        i = bisect(self.points, (size, math.inf))
        if i in (0, len(self.points)):
            return self.points[max(0, i - 1)][1]
        (low, first), (high, last) = self.points[i - 1 : i + 1]
        return first + (last - first) * math.log(size / low) / math.log(high / low)

    def rising(self) -> Curve:
        """The lowest curve that lies nowhere below this one and never falls."""
        shares = accumulate((share for _, share in self.points), max)
        return Curve(tuple((size, share) for (size, _), share in zip(self.points, shares, strict=True)))


ALL = Curve()
FRESH = 32 * 2**20  # glibc's largest M_MMAP_THRESHOLD: what is larger is mapped anew, page by page, each time
ANY = "any"
MESSAGE = "message"
ADAMW = 7  # reads of weight, gradient and two moments, writes of all but the gradient, by a fused kernel
ATTENTION, CONVOLUTION = "attention", "convolution"  # kinds of calls whose FLOPs reach what is no product's share
NORM = "norm"  # the gradient of a norm, whose bytes do not reach what those of other calls reach
LARGE = 1e8  # bytes of a message that reaches the full speed of its link
LARGE_FLOPS = 1e12  # of a product that reaches all that a product reaches
H100 = 132  # multiprocessors
TO_HOST = 25e9  # bytes a second over PCIe 4.0 with 16 lanes, where a file says nothing
HOST_FITS = 0.9  # of a host's memory: the rest is the system's, and that of what reads the data
DISK = 5e9  # bytes a second of one NVMe disk on four lanes of PCIe 4.0, read or written
HOST_UPDATE = 200e9  # bytes a second of an optimizer on the cores of a node: a third of 16 channels of DDR5-4800
# Queries and keys that fused attention takes at a time: what lies behind the diagonal of a causal mask it leaves out by
# such tiles. Of FlashAttention-2 (from memory of arXiv 2307.08691), and of torch's kernel for CPUs (docs/machines.md).
TILE, TILE_CPU = 128, 512


@dataclass(frozen=True, slots=True)
class Device:
    """One device. flops: its peaks by dtype, a second. products: the share of a peak that a product reaches, by its
    FLOPs; attention: the same of one fused attention, of what a product of its FLOPs reaches; convolution: of a
    convolution. bandwidth: of its memory, bytes a second. streams: the share of it, by the bytes that a call reads and
    writes. memory: bytes. least_us: of a call. processors: streaming multiprocessors of a GPU, those of an H100 if not
    given. communicating: the share of the device that collectives take from the calls beside them. fresh: bytes a
    second that the system gives of new pages, as a result of `FRESH` bytes or more needs them on a host. update: the
    share of the bandwidth that an optimizer reaches, which writes where it has read. norm: what the gradient of a norm
    reaches, of what another memory-bound call of as many bytes does."""

    flops: Mapping[str, float]
    bandwidth: float
    memory: float
    least_us: float
    products: Curve = ALL
    streams: Curve = ALL
    attention: float = 1.0
    processors: int = H100
    communicating: float = 0.0
    fresh: float = math.inf
    update: float | None = None
    convolution: float = 1.0
    norm: float = 1.0

    def reached(self, kind: str) -> float:
        """By a kind of call, of what a product of as many FLOPs reaches, or another call of as many bytes (NORM)."""
        return {ATTENTION: self.attention, CONVOLUTION: self.convolution, NORM: self.norm}.get(kind, 1.0)


@dataclass(frozen=True, slots=True)
class Link:
    """One level of a network. bandwidth: of a rank in one direction, bytes a second. start_us: of a collective or a
    message. hop_us: from one rank of a ring to the next. reached: the share of the bandwidth, by the bytes of the
    value, for each collective that has a curve of its own (switches add up), and "any"."""

    bandwidth: float
    start_us: float
    hop_us: float
    reached: Mapping[str, Curve] = field(default_factory=lambda: {ANY: ALL})

    def speed(self, kind: str, bytes_: float) -> float:
        """Bytes a second of a collective, or of a message, on a value of so many bytes."""
        return self.bandwidth * (self.reached.get(kind) or self.reached[ANY])(bytes_)


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks of a collective. inside: how many of them lie in one node."""

    size: int
    inside: int = field(default=0)

    def __post_init__(self) -> None:
        if not 1 <= self.inside <= self.size:
            object.__setattr__(self, "inside", self.size)

    @property
    def nodes(self) -> int:
        return -(-self.size // self.inside)


@dataclass(frozen=True, slots=True)
class Machine:
    """A cluster of equal nodes. ranks: devices of a node. launch_us: what the host needs for a call. is_host: the
    devices are cores, which launch calls and move data as well as compute, one after the other. to_host: bytes a second
    that a device and its host's memory exchange, each way. host_memory: bytes of a node's host; 0 where nobody says.
    host_update: bytes a second that an optimizer on its cores reads and writes, of all ranks of a node together. disk:
    bytes a second that its disk reads or writes, of all ranks together. disk_folder: where files of a step may lie on
    it, of at most disk_memory bytes together; "" where nobody says."""

    name: str
    device: Device
    inside: Link
    between: Link
    ranks: int = 8
    launch_us: float = 0.0
    is_host: bool = False
    to_host: float = TO_HOST
    host_memory: float = 0.0
    host_update: float = HOST_UPDATE
    disk: float = DISK
    disk_folder: str = ""
    disk_memory: float = 0.0

    @classmethod
    def flat(cls, flops: float, memory: float, link: float, latency_us: float, least_us: float) -> Machine:
        """One whose speeds (FLOPs and bytes a microsecond) no size and no dtype changes: for tests and examples."""
        device = Device(dict.fromkeys(PRODUCTS, flops * 1e6), memory * 1e6, math.inf, least_us)
        level = Link(link * 1e6, latency_us, 0.0)
        return cls("flat", device, level, level, ranks=2**62)

    def rising(self) -> Machine:
        """One that is nowhere slower, and the faster the larger a call or a collective is."""
        device = replace(
            self.device, products=self.device.products.rising(), streams=self.device.streams.rising()
        )  # fmt: skip
        inside, between = (
            replace(link, reached={kind: curve.rising() for kind, curve in link.reached.items()})
            for link in (self.inside, self.between)
        )
        return replace(self, device=device, inside=inside, between=between)

    # -- a call -----------------------------------------------------------------------------------------------------

    def product_us(self, flops: float, dtype: str, kind: str = "") -> float:
        """The time of a product by its FLOPs on one rank. dtype: of its operands ("bfloat16"). kind: ATTENTION or
        CONVOLUTION of one that is more than a product."""
        if not flops:
            return 0.0
        peak = self.device.flops.get(dtype) or self.device.flops["float32"]
        share = self.device.products(flops) * self.device.reached(kind)
        return flops / (peak * share) * 1e6

    def square(self, width: int) -> float:
        """The share of a square of so many queries and keys that fused attention computes under a causal mask: of n
        tiles a side (n + 1) / 2n."""
        return (1 + min(1.0, (TILE_CPU if self.is_host else TILE) / width)) / 2

    def memory_us(self, bytes_: float) -> float:
        """The time to read and write so many bytes."""
        return bytes_ / (self.device.bandwidth * self.device.streams(bytes_)) * 1e6

    def update_us(self, bytes_: float) -> float:
        """The time of an optimizer that reads and writes so many bytes of weights, gradients and states."""
        share = self.device.update
        return self.memory_us(max(1.0, bytes_)) if share is None else bytes_ / (self.device.bandwidth * share) * 1e6

    def call_us(self, flops: float, dtype: str, bytes_: float, kind: str = "") -> float:
        """The time of a call: of its products, or of the bytes that it reads and writes."""
        moved = self.memory_us(bytes_) / (self.device.norm if kind == NORM else 1.0)
        return max(self.device.least_us, self.product_us(flops, dtype, kind), moved)

    def fresh_us(self, result: float) -> float:
        """The time until a result of so many bytes has its pages: none where an allocator keeps them."""
        return result / self.device.fresh * 1e6 if result >= FRESH else 0.0

    def bytes_per_flop(self, kind: str = "") -> float:
        """The bytes that a link within a node moves while a device does one operation of a large product in a short
        float. kind: as of `product_us`."""
        return self.inside.speed(ANY, LARGE) * self.product_us(LARGE_FLOPS, "bfloat16", kind) / LARGE_FLOPS / 1e6

    def copy_us(self, bytes_: float) -> float:
        """The time of a copy into the host's memory, or back."""
        return bytes_ / self.to_host * 1e6

    def host_share(self, ranks: int) -> float:
        """Bytes of the host's memory that each of some ranks may take; 0 where nobody says how much there is."""
        return HOST_FITS * self.host_memory / min(ranks, self.ranks)

    def disk_share(self, ranks: int) -> float:
        """Bytes of a node's disk that each of some ranks may take; 0 where nobody says where."""
        return self.disk_memory / min(ranks, self.ranks) if self.disk_folder else 0.0

    def disk_us(self, bytes_: float, ranks: int) -> float:
        """The time in which so many bytes of each of some ranks are read from the disk, or written."""
        return bytes_ * min(ranks, self.ranks) / self.disk * 1e6

    def from_disk(self, ranks: int) -> Machine:
        """This machine, where what some ranks copy from the host lies on its disk, which those of a node share."""
        return replace(self, to_host=min(self.to_host, self.disk / min(ranks, self.ranks)))

    def host_update_us(self, bytes_: float, ranks: int) -> float:
        """The time of an optimizer on the host that reads and writes so many bytes of each of some ranks."""
        return bytes_ * min(ranks, self.ranks) / self.host_update * 1e6

    # -- between ranks ----------------------------------------------------------------------------------------------

    def collective_us(self, kind: str, bytes_: float, group: RankGroup) -> float:
        """The time of a collective ("all_reduce") on a value of `bytes_`, as it is whole, on all ranks of a group."""
        if group.size == 1:
            return 0.0
        rounds = 2 if kind == "all_reduce" else 1
        sent = rounds * bytes_ * (group.size - 1) / group.size
        if kind == "all_to_all":
            sent /= group.size
        return self._latency_us(group, rounds) + sent / self._speed(kind, bytes_, group) * 1e6

    def start_us(self, kind: str, group: RankGroup) -> float:
        """The time of a collective that moves nothing: rings and trees pass it on from rank to rank."""
        return self._latency_us(group, 2 if kind == "all_reduce" else 1) if group.size > 1 else 0.0

    def half_bytes(self, kind: str, group: RankGroup) -> float:
        """The bytes that a collective moves, at the full speed of its links, in the time of its start."""
        return self.start_us(kind, group) * self._speed(kind, LARGE, group) / 1e6

    def message_us(self, bytes_: float, group: RankGroup) -> float:
        """The time of a message from one rank of a group to the next."""
        link = self._link(group)
        return link.start_us + bytes_ / link.speed(MESSAGE, bytes_) * 1e6

    def message_line(self, group: RankGroup) -> tuple[float, float]:
        """(us to start one, bytes a us) of large messages from one rank of a group to the next, whatever their size."""
        link = self._link(group)
        return link.start_us, link.speed(MESSAGE, LARGE) / 1e6

    def _link(self, group: RankGroup) -> Link:
        return self.inside if group.nodes == 1 else self.between

    def _speed(self, kind: str, bytes_: float, group: RankGroup) -> float:
        inside = self.inside.speed(kind, bytes_)
        if group.nodes == 1:
            return inside
        between = group.inside * self.between.speed(kind, bytes_)
        return min(inside, between) if group.inside > 1 else between

    def _latency_us(self, group: RankGroup, rounds: int) -> float:
        """A ring has a step for each rank but one. An all-reduce may go up and down a tree instead."""
        inside, between = self.inside, self.between
        within = rounds * group.nodes * (group.inside - 1) * inside.hop_us
        if group.nodes == 1:
            return inside.start_us if rounds == 2 else max(inside.start_us, within)
        ring = within + rounds * (group.nodes - 1) * between.hop_us
        if rounds == 1:
            return between.start_us + ring
        tree = (inside.start_us if group.inside > 1 else 0.0) + 2 * between.hop_us * math.log2(group.nodes)
        return between.start_us + min(ring, tree)

    @property
    def latency_us(self) -> float:
        """What one more collective or message within a node costs to start."""
        return self.inside.start_us
