"""What a measurement times: calls of one device, and transfers between ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.machines.model import ATTENTION, CONVOLUTION, MESSAGE, NORM, Machine, RankGroup

PRODUCT, STREAM, UPDATE, LEAST = "product", "stream", "update", "least"
SHARED = (ATTENTION, CONVOLUTION, NORM)  # kinds that reach a share of what products do, or memory-bound calls


@dataclass(frozen=True, slots=True)
class MeasuredCall:
    """A call on one device. kind: PRODUCT, ATTENTION, CONVOLUTION, STREAM, NORM (its gradient), UPDATE (an
    optimizer's), or LEAST: the smallest there is. name: what is called. bytes_: read and written. make: the call, with
    its operands on a device. result: bytes of what it gives."""

    kind: str
    name: str
    flops: float
    bytes_: float
    dtype: str
    make: Callable[[Any], Callable[[], object]] = field(compare=False, repr=False)
    result: float = 0.0

    @property
    def size(self) -> float:
        """What its share of a peak goes by."""
        return self.flops or self.bytes_

    @property
    def family(self) -> tuple[object, ...]:
        """What it shares with those that differ in size."""
        return self.kind, self.name.split(" ")[0], self.dtype

    def us_on(self, machine: Machine) -> float:
        if self.kind == UPDATE:
            return machine.update_us(self.bytes_)
        took = machine.call_us(self.flops, self.dtype, self.bytes_, self.kind)
        return took + machine.fresh_us(self.result)


@dataclass(frozen=True, slots=True)
class MeasuredTransfer:
    """A collective or a message on a value of `bytes_`, as it is whole."""

    kind: str
    bytes_: float
    group: RankGroup

    name = ""
    dtype = ""

    @property
    def size(self) -> float:
        return self.bytes_

    @property
    def family(self) -> tuple[object, ...]:
        return self.kind, self.group

    def us_on(self, machine: Machine) -> float:
        if self.kind == MESSAGE:
            return machine.message_us(self.bytes_, self.group)
        return machine.collective_us(self.kind, self.bytes_, self.group)

    def parts_on(self, machine: Machine) -> tuple[float, float]:
        """The microseconds that no size changes, and those of its bytes."""
        fixed = replace(self, bytes_=0.0).us_on(machine)
        return fixed, self.us_on(machine) - fixed


Item = MeasuredCall | MeasuredTransfer


@dataclass(frozen=True, slots=True)
class Sample:
    """What an item took, in microseconds."""

    item: Item
    us: float
