"""Machines as files: what is written is read again, and what is wrong with a file is said in words."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.errors import MachineError
from autopar.machines import built_in, check_writable, machine_text, named, notes_of, path_of, read_machine
from autopar.machines import write_machine as write
from autopar.machines.model import Curve, Machine


@pytest.fixture(params=built_in())
def machine(request: pytest.FixtureRequest) -> Machine:
    return named(request.param)


def test_four_machines_are_built_in():
    assert built_in() == ("a100-80g", "cpu", "h100-80g", "h200")


def test_what_is_written_is_read_again(machine: Machine, tmp_path: Path):
    odd = replace(machine.device, bandwidth=1.23456789e12 / 7, products=Curve(((1e6 / 3, 0.1), (1e9 / 7, 1 / 3))))
    other = replace(machine, device=odd, launch_us=1 / 3, is_host=not machine.is_host)
    for each in (machine, other, replace(machine, to_host=4e10, host_memory=1.28e11, host_update=5e10, disk=3e9)):
        path = tmp_path / f"{machine.name}.toml"
        write(each, path, ["Measured on a Monday.", "By hand."])
        assert read_machine(path) == each
        assert named(str(tmp_path / f"{machine.name}.toml")).name == machine.name
        assert notes_of(path) == ("Measured on a Monday.", "By hand.")


def test_each_value_is_written_with_its_unit(machine: Machine):
    lines = [line for line in machine_text(machine).splitlines() if "=" in line]
    flops = [line for line in lines if line.split(" ")[0] in machine.device.flops]
    assert [line for line in lines if "#" not in line] == flops
    assert "[device.flops]  # FLOP/s, the peaks" in machine_text(machine)


GOOD = """
ranks = 8
launch_us = 6
[device]
bandwidth = 2e12
memory = 8e10
least_us = 2
products = [[1e6, 0.5], [1e9, 0.9]]
[device.flops]
float32 = 2e13
[inside]
bandwidth = 3e11
start_us = 20
hop_us = 4
reached.any = [[1e6, 0.5]]
[between]
bandwidth = 2e10
start_us = 20
hop_us = 4
"""
SHOW = "A file has the keys of the built-in ones: autopar machine show a100-80g."
# What stands there, what stands there instead, and what is said.
WRONG = {
    "no key": ("least_us = 2\n", "", f"lacks 'device.least_us'. {SHOW}"),
    "no ranks": ("ranks = 8\n", "", f"lacks 'ranks'. {SHOW}"),
    "no table": ("[between]", "[betwixt]", f"lacks 'between'. {SHOW}"),
    "no float32": ("float32", "float16", f"lacks 'device.flops.float32'. {SHOW}"),
    "unknown key": ("least_us = 2", "least_us = 2\nleast_ms = 2", f"nobody knows 'device.least_ms'. {SHOW}"),
    "unknown at the top": ("ranks = 8", "ranks = 8\nrank = 8", f"nobody knows 'rank'. {SHOW}"),
    "unknown dtype": ("float32 = 2e13", "float32 = 2e13\nfloat8 = 2e13", f"nobody knows 'device.flops.float8'. {SHOW}"),
    "unknown curve": ("reached.any", "reached.all", f"nobody knows 'inside.reached.all'. {SHOW}"),
    "GB of a host": ("ranks = 8", "ranks = 8\nhost_memory = 128", "'host_memory' is 128; it is 1e+07 to 1e+14 bytes."),
    "text": ("launch_us = 6", 'launch_us = "6"', "'launch_us' is '6'; it is a number, 0 to 1e+06 us."),
    "a flag": ("launch_us = 6", "launch_us = true", "'launch_us' is True; it is a number, 0 to 1e+06 us."),
    "no flag": ("ranks = 8", "ranks = 8\nis_host = 1", "'is_host' is 1; it is true or false."),
    "no table but a number": ("reached.any = [[1e6, 0.5]]", "reached = 3", "'inside.reached' is 3; it is a table."),
    "half a rank": ("ranks = 8", "ranks = 2.5", "'ranks' is 2.5; it is a whole number, 1 to 1e+06 devices."),
    "no ranks at all": ("ranks = 8", "ranks = 0", "'ranks' is 0; it is 1 to 1e+06 devices."),
    "TFLOP/s": ("float32 = 2e13", "float32 = 20", "'device.flops.float32' is 20; it is 1e+08 to 1e+17 FLOP/s."),
    "GB": ("memory = 8e10", "memory = 80", "'device.memory' is 80; it is 1e+07 to 1e+14 bytes."),
    "seconds before": ("hop_us = 4\nr", "hop_us = -4\nr", "'inside.hop_us' is -4; it is 0 to 1e+06 us."),
    "nan": ("bandwidth = 2e12", "bandwidth = nan", "'device.bandwidth' is nan; it is 100000 to 1e+15 bytes/s."),
    "no share": ("[1e9, 0.9]", "[1e9, 90]", "'device.products' is 90.0; it is shares of 1e-06 to 2 of the peak."),
    "share 0": ("[1e6, 0.5]]", "[1e6, 0]]", "'inside.reached.any' is 0.0; it is shares of 1e-06 to 2 of the peak."),
    "unsorted": (
        "[[1e6, 0.5], [1e9", "[[1e9, 0.5], [1e6",
        "'device.products' is [[1000000000.0, 0.5], [1000000.0, 0.9]]; it is a list of [size, share] with ascending "
        "sizes above 0.",
    ),
    "twice": ("[[1e6, 0.5], [1e9", "[[1e9, 0.5], [1e9", "with ascending sizes above 0."),
    "endless": ("[1e9, 0.9]", "[inf, 0.9]", "with ascending sizes above 0."),
    "no points": ("[[1e6, 0.5], [1e9, 0.9]]", "[]", " is []; it is a list of [size, share], both numbers."),
    "no pairs": ("[[1e6, 0.5], [1e9, 0.9]]", "[1e6, 1e9]", "it is a list of [size, share], both numbers."),
    "texts": ('[1e9, 0.9]', '["1e9", 0.9]', "it is a list of [size, share], both numbers."),
    "no TOML": (
        "ranks = 8", "ranks 8", "is no TOML: Expected '=' after a key in a key/value pair (at line 2, column 7).",
    ),
}  # fmt: skip


def test_the_good_file_is_one(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    assert read_machine(path).device.products(1e6) == 0.5


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_refused(case: str, tmp_path: Path):
    there, instead, said = WRONG[case]
    assert there in GOOD
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace(there, instead, 1))
    with pytest.raises(MachineError) as error:
        read_machine(path)
    assert str(error.value).startswith(f"machine file '{path}'")
    assert str(error.value).endswith(said)


def test_files_that_cannot_be_read(tmp_path: Path):
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.toml").mkdir()
    said = {"none": "No such file or directory.", "folder": "no file.", "bytes": "invalid start byte at byte 0."}
    for name, end in said.items():
        with pytest.raises(MachineError, match=rf"^machine file '{tmp_path}/{name}\.toml'.*{end}$"):
            named(str(tmp_path / f"{name}.toml"))


def test_a_name_that_nobody_knows():
    with pytest.raises(MachineError) as error:
        path_of("h1000")
    assert "machine 'h1000': there is " in str(error.value)
    assert all(name in str(error.value) for name in built_in())


def test_files_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "folder.toml").mkdir()
    said = {
        "mine.txt": "write a name that ends in .toml, by which machines are read.",
        "none/mine.toml": f"there is no folder '{tmp_path}/none'; make it first.",
        "folder.toml": "it is a folder; write the name of a file.",
    }
    for name, end in said.items():
        with pytest.raises(MachineError) as error:
            check_writable(tmp_path / name)
        assert str(error.value) == f"machine file '{tmp_path / name}': {end}"
    for name in ("none/mine.toml", "folder.toml"):
        with pytest.raises(MachineError, match=f"^machine file '{tmp_path / name}': "):
            write(named("cpu"), tmp_path / name)
    check_writable(tmp_path / "mine.toml")
    assert os.listdir(tmp_path) == ["folder.toml"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_not_ours(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(MachineError, match="you may not write there; write another name"):
        check_writable(tmp_path / "mine.toml")
