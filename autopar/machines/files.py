"""Machines as TOML files: read with every value checked, and written."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import MachineError, one_of
from autopar.machines.model import (
    ALL,
    ANY,
    DISK,
    H100,
    HOST_UPDATE,
    MESSAGE,
    PRODUCTS,
    TO_HOST,
    Curve,
    Device,
    Link,
    Machine,
)
from autopar.text_files import read_text, read_toml

_FOLDER = Path(__file__).parent
DEVICES = "h100-80g"  # the machine that plans are made for where nobody names one
MachineLike = str | Path | Machine
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True, slots=True)
class _Range:
    """What a number may be; outside of it is a slip of units."""

    least: float
    most: float
    unit: str

    def __str__(self) -> str:
        return f"{self.least:g} to {self.most:g} {self.unit}"


_FLOPS = _Range(1e8, 1e17, "FLOP/s")
_SPEED = _Range(1e5, 1e15, "bytes/s")
_BYTES = _Range(1e7, 1e14, "bytes")
_US = _Range(0, 1e6, "us")
_SHARE = _Range(1e-6, 2, "of the peak")
_PART = _Range(0, 0.9, "of the device")
_RANKS = _Range(1, 1e6, "devices")
_PROCESSORS = _Range(1, 1e4, "multiprocessors")


def built_in() -> tuple[str, ...]:
    """The names of the machines that come with autopar."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


@functools.cache
def named(name: str) -> Machine:
    """A machine by its name ("h100-80g") or by the path of its file. Raises MachineError if there is none."""
    return read_machine(path_of(name))


def machine_like(given: MachineLike) -> Machine:
    """The machine that is meant by itself, its name or its file. Raises MachineError as `named`, and for what is none
    of the three."""
    if isinstance(given, Machine):
        return given
    if not isinstance(given, (str, Path)):
        raise MachineError(f"machine={given!r}: write a name ({one_of(built_in())}), the path of a file, or a Machine.")
    return named(str(given))


def path_of(name: str) -> Path:
    """The file of a machine. Raises MachineError for a name that is neither built in nor that of a TOML file."""
    if name in built_in():
        return _FOLDER / f"{name}.toml"
    if not name.endswith(".toml"):
        raise MachineError(f"machine '{name}': there is {one_of(built_in())}, or the path of a .toml file.")
    return Path(name)


def notes_of(path: Path) -> tuple[str, ...]:
    """What the first lines of a file say of its machine."""
    text = read_text(path, "machine file", MachineError)
    lines = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    return tuple(line.removeprefix("#").strip() for line in lines)


def read_machine(path: Path) -> Machine:
    """The machine of a TOML file; its keys are those of the built-in files. Raises MachineError."""
    table = read_toml(path, "machine file", MachineError)
    root = _Table(table, str(path), "")
    machine = Machine(
        path.stem, _device(root.table("device")), _link(root.table("inside")), _link(root.table("between")),
        root.count("ranks", _RANKS), root.number("launch_us", _US), root.flag("is_host"),
        root.number("to_host", _SPEED, TO_HOST), root.number("host_memory", _BYTES, 0.0),
        root.number("host_update", _SPEED, HOST_UPDATE), root.number("disk", _SPEED, DISK),
        root.text("disk_folder"), root.number("disk_memory", _BYTES, 0.0),
    )  # fmt: skip
    root.end()
    return machine


def _device(table: _Table) -> Device:
    flops = table.table("flops")
    peaks = {dtype: flops.number(dtype, _FLOPS) for dtype in PRODUCTS if dtype in flops.values}
    if "float32" not in peaks:
        flops.number("float32", _FLOPS)
    flops.end()
    device = Device(
        peaks, table.number("bandwidth", _SPEED), table.number("memory", _BYTES), table.number("least_us", _US),
        table.curve("products"), table.curve("streams"), table.number("attention", _SHARE, 1.0),
        table.count("processors", _PROCESSORS) if "processors" in table.values else H100,
        table.number("communicating", _PART, 0.0), table.number("fresh", _SPEED, math.inf),
        table.number("update", _SHARE) if "update" in table.values else None,
        table.number("convolution", _SHARE, 1.0), table.number("norm", _SHARE, 1.0),
    )  # fmt: skip
    table.end()
    return device


def _link(table: _Table) -> Link:
    reached = table.table("reached") if "reached" in table.values else None
    curves = {ANY: ALL}
    if reached is not None:
        curves |= {key: reached.curve(key) for key in (ANY, MESSAGE, *COLLECTIVES) if key in reached.values}
        reached.end()
    bandwidth, start, hop = (table.number(key, what) for key, what in zip(_LINK, (_SPEED, _US, _US), strict=True))
    table.end()
    return Link(bandwidth, start, hop, curves)


_LINK = {
    "bandwidth": "bytes a second, of a rank in one direction",
    "start_us": "us, of a collective or a message",
    "hop_us": "us, from a rank to the next",
}


@dataclass(slots=True)
class _Table:
    """A table of a file; what is read is taken out, so that `end` finds what nobody knows."""

    values: dict[str, Any]
    file: str
    name: str

    def table(self, key: str) -> _Table:
        found = self._take(key)
        if not isinstance(found, dict):
            raise self._wrong(key, found, "a table")
        return _Table(dict(found), self.file, f"{self.name}{key}.")

    def number(self, key: str, what: _Range, default: float | None = None) -> float:
        if default is not None and key not in self.values:
            return default
        found = self._take(key)
        if isinstance(found, bool) or not isinstance(found, (int, float)):
            raise self._wrong(key, found, f"a number, {what}")
        if not what.least <= found <= what.most:
            raise self._wrong(key, found, str(what))
        return float(found)

    def count(self, key: str, what: _Range) -> int:
        number = self.number(key, what)
        if number != int(number):
            raise self._wrong(key, number, f"a whole number, {what}")
        return int(number)

    def text(self, key: str) -> str:
        """A string; "" where the table has none."""
        value = self.values.pop(key, "")
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def flag(self, key: str) -> bool:
        flag = self.values.pop(key, False)
        if not isinstance(flag, bool):
            raise self._wrong(key, flag, "true or false")
        return flag

    def curve(self, key: str) -> Curve:
        """Points [size, share], sizes ascending; a share of 1 at all sizes if the key is missing."""
        if key not in self.values:
            return ALL
        found = self._take(key)
        if not isinstance(found, list) or not found or not all(_is_point(each) for each in found):
            raise self._wrong(key, found, "a list of [size, share], both numbers")
        points = tuple((float(size), float(share)) for size, share in found)
        sizes = [size for size, _ in points]
        if sizes != sorted(set(sizes)) or not 0 < sizes[0] <= sizes[-1] < math.inf:
            raise self._wrong(key, found, "a list of [size, share] with ascending sizes above 0")
        for _, share in points:
            if not _SHARE.least <= share <= _SHARE.most:
                raise self._wrong(key, share, f"shares of {_SHARE}")
        return Curve(points)

    def end(self) -> None:
        if self.values:
            raise MachineError(f"machine file '{self.file}': nobody knows '{self.name}{min(self.values)}'. A file has "
                               f"the keys of the built-in ones: autopar machine show {built_in()[0]}.")  # fmt: skip

    def _take(self, key: str) -> Any:
        if key not in self.values:
            raise MachineError(f"machine file '{self.file}' lacks '{self.name}{key}'. A file has the keys of the "
                               f"built-in ones: autopar machine show {built_in()[0]}.")  # fmt: skip
        return self.values.pop(key)

    def _wrong(self, key: str, found: object, wanted: str) -> MachineError:
        return MachineError(f"machine file '{self.file}': '{self.name}{key}' is {found!r}; it is {wanted}.")


def _is_point(found: object) -> bool:
    return isinstance(found, list) and len(found) == 2 and all(type(value) in (int, float) for value in found)


def machine_text(machine: Machine, notes: Iterable[str] = ()) -> str:
    """A machine as the text of its file, each value with its unit. notes: of its first lines."""
    device = machine.device
    lines = [f"# {note}" for note in notes]
    lines += [f"ranks = {machine.ranks}  # devices of a node"]
    lines += [f"launch_us = {_word(machine.launch_us)}  # us, the host's time to launch a call"]
    if machine.to_host != TO_HOST:
        lines += [f"to_host = {_word(machine.to_host)}  # bytes a second to the host's memory, and as many back"]
    if machine.host_memory:
        lines += [f"host_memory = {_word(machine.host_memory)}  # bytes, of a node's host"]
    if machine.host_update != HOST_UPDATE:
        lines += [f"host_update = {_word(machine.host_update)}  # bytes a second, of an optimizer on a node's cores"]
    if machine.disk != DISK:
        lines += [f"disk = {_word(machine.disk)}  # bytes a second that a node's disk reads or writes"]
    if machine.disk_folder:
        lines += [f"disk_folder = {json.dumps(machine.disk_folder)}  # where files of a step may lie"]
        lines += [f"disk_memory = {_word(machine.disk_memory)}  # bytes, of all of them on a node"]
    lines += ["is_host = true  # the devices are cores, which move data as well"] if machine.is_host else []
    lines += ["", "[device]", f"bandwidth = {_word(device.bandwidth)}  # bytes a second, of its memory"]
    lines += [f"memory = {_word(device.memory)}  # bytes", f"least_us = {_word(device.least_us)}  # us, of any call"]
    lines += [f"attention = {_word(device.attention)}  # of what a product of as many FLOPs reaches"]
    lines += [f"convolution = {_word(device.convolution)}  # the same"] if device.convolution != 1.0 else []
    if device.norm != 1.0:
        lines += [f"norm = {_word(device.norm)}  # of what another call of as many bytes reaches, by a norm's gradient"]
    if not machine.is_host or device.processors != H100:
        lines += [f"processors = {device.processors}  # multiprocessors"]
    if not machine.is_host or device.communicating:
        lines += [f"communicating = {_word(device.communicating)}  # of the device, taken by collectives beside calls"]
    if device.fresh < math.inf:
        lines += [f"fresh = {_word(device.fresh)}  # bytes a second, of new pages for a result of 32 MiB or more"]
    if device.update is not None:
        lines += [f"update = {_word(device.update)}  # of the bandwidth, reached by an optimizer"]
    lines += [f"products = {_points(device.products)}  # [FLOPs, share of the peak]"]
    lines += [f"streams = {_points(device.streams)}  # [bytes read and written, share of the bandwidth]"]
    lines += ["", "[device.flops]  # FLOP/s, the peaks", *_pairs(device.flops)]
    for name, link in (("inside", machine.inside), ("between", machine.between)):
        lines += ["", f"[{name}]  # {_LEVELS[name]}"]
        lines += [f"{key} = {_word(getattr(link, key))}  # {unit}" for key, unit in _LINK.items()]
        lines += [f"reached.{kind} = {_points(curve)}  # {_REACHED}" for kind, curve in link.reached.items()]
    return "\n".join(lines) + "\n"


_LEVELS = {"inside": "the network of a node", "between": "the network between nodes"}
_REACHED = "[bytes of the value, share of the bandwidth]"


def write_machine(machine: Machine, path: Path, notes: Iterable[str] = ()) -> None:
    """Write a machine to a file that `read_machine` reads. Raises MachineError where it cannot be written."""
    try:
        path.write_text(machine_text(machine, notes))
    except OSError as error:
        raise MachineError(f"machine file '{path}': {error.strerror or error}.") from error


def check_writable(path: Path) -> None:
    """Check that a machine can be written to a file, and touch nothing. Raises MachineError."""
    if path.suffix != ".toml":
        raise MachineError(f"machine file '{path}': write a name that ends in .toml, by which machines are read.")
    if not path.parent.is_dir():
        raise MachineError(f"machine file '{path}': there is no folder '{path.parent}'; make it first.")
    if path.is_dir():
        raise MachineError(f"machine file '{path}': it is a folder; write the name of a file.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise MachineError(f"machine file '{path}': you may not write there; write another name.")


def _pairs(values: Mapping[str, float]) -> list[str]:
    return [f"{key} = {_word(value)}" for key, value in values.items()]


def _points(curve: Curve) -> str:
    return f"[{', '.join(f'[{_word(size)}, {_word(share)}]' for size, share in curve.points)}]"


def _word(value: float) -> str:
    """A number in TOML, by as few digits as read as the same number."""
    text = next(text for digits in (5, 9, 17) if float(text := f"{value:.{digits}g}") == value)
    return text.replace("e+", "e")
