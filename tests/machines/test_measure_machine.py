"""Measuring: by ranks and clocks that pretend, by Gloo ranks, and by the command line."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import ranks_of

from autopar.cli.measuring import _groups, _Together, _Transfers, ranks_asked
from autopar.errors import MachineError
from autopar.machines import named, read_machine
from autopar.machines.fit import fits
from autopar.machines.measure_calls import Alone, measure
from autopar.machines.measurement_plan import items_of, measure_machine
from autopar.machines.model import MESSAGE, NORM, Machine, RankGroup
from autopar.machines.runners import CACHES, SETS, CudaRunner, HostRunner
from autopar.machines.samples import PRODUCT, SHARED, STREAM, UPDATE, Item, MeasuredCall, MeasuredTransfer
from autopar.machines.workload import KINDS, attentions, least, products, streams, transfers
from autopar.settings import Settings

CPU = torch.device("cpu")


@dataclass
class Pretended:
    """Runs nothing, on a machine that takes the time of its model; its clock is ahead by that. extra_us: what the n-th
    run takes more. Also the ranks, of which another one is a bit slower."""

    machine: Machine
    extra_us: Callable[[int], float] = lambda run: 0.0
    slower: float = 1.0
    seconds: float = 0.0
    runs: int = 0
    made: list[Item] = field(default_factory=list)

    def ready(self, item: Item) -> Callable[[int], float]:
        self.made.append(item)

        def run(times: int) -> float:
            self.runs += 1
            us = item.us_on(self.machine) + self.extra_us(self.runs)
            self.seconds += times * us / 1e6
            return us

        return run

    def launch_us(self) -> float:
        return self.machine.launch_us

    def host(self) -> tuple[float, float] | None:
        return None if self.machine.is_host else (self.machine.to_host, self.machine.host_update / self.machine.ranks)

    def largest(self, value: float) -> float:
        return value * self.slower

    def mean(self, value: float) -> float:
        return value * (1 + self.slower) / 2

    def now(self) -> float:
        return self.seconds


ITEMS: list[Item] = [
    least("float32"), *products("float32", (64, 256)), *attentions("float32", (64,), 2),
    *streams("float32", (2**16, 2**20)), *transfers((RankGroup(2),), (64, 2**10, 2**20)),
]  # fmt: skip


def measured(fake: Pretended, seconds: float, items: list[Item] = ITEMS) -> dict[Item, float]:
    return {each.item: each.us for each in measure(items, fake, fake, seconds, now=fake.now)}


def test_each_item_is_measured_as_it_is():
    fake = Pretended(named("cpu"))
    assert measured(fake, 10) == pytest.approx({item: item.us_on(named("cpu")) for item in ITEMS})
    assert fake.made == [*ITEMS, *ITEMS]
    assert fake.seconds <= 10


def test_what_now_and_then_takes_longer_counts_not():
    """Nor does the first run, nor a second in which others work."""
    fake = Pretended(named("cpu"), extra_us=lambda run: 5e4 if run % 3 == 1 else 0.0)
    assert measured(fake, 600) == pytest.approx({item: item.us_on(named("cpu")) for item in ITEMS})


def test_of_transfers_those_count_too_whose_thread_waited_for_a_core():
    """Of others not."""
    fake = Pretended(named("cpu"), extra_us=lambda run: 300.0 if run % 3 == 1 else 0.0)
    for item, us in measured(fake, 600).items():
        extra = us - item.us_on(named("cpu"))
        assert extra == (
            pytest.approx(100.0, rel=0.3) if isinstance(item, MeasuredTransfer) else pytest.approx(0.0, abs=1e-6)
        )


def test_the_slowest_rank_counts_and_of_transfers_the_mean():
    fake = Pretended(named("cpu"), slower=1.5)
    slower = {item: 1.25 if isinstance(item, MeasuredTransfer) else 1.5 for item in ITEMS}
    assert measured(fake, 10) == pytest.approx({item: slower[item] * item.us_on(named("cpu")) for item in ITEMS})


def test_what_takes_too_long_is_left_out_and_the_time_is_kept():
    items: list[Item] = [*products("float32", (64, 256, 1024, 4096, 16384)), *ITEMS]
    fake = Pretended(named("cpu"))
    found = {item.name for item in measured(fake, 20, items)}
    assert {"square 64", "square 256", "square 1024"} <= found
    assert not {"square 4096", "square 16384"} & found
    assert fake.seconds <= 21


def test_progress_is_told():
    fake, told = Pretended(named("cpu")), []
    measure(ITEMS, fake, fake, 1, lambda done, total, item: told.append((done, total, item)), fake.now)
    assert told == [(done, 2 * len(ITEMS), item) for done, item in enumerate(2 * ITEMS)]


# -- a whole machine ------------------------------------------------------------------------------------------------


def whole(groups: tuple[RankGroup, ...]) -> Any:
    fake = Pretended(replace(named("cpu"), launch_us=7.0))
    return measure_machine("mine", CPU, groups, fake, fake, 1e4, lambda *_: None)


def test_a_machine_is_made_of_what_was_measured():
    found = whole((RankGroup(2), RankGroup(2, 1)))
    assert found.remarks == ()
    assert (found.machine.ranks, found.machine.is_host, found.machine.name) == (2, True, "mine")
    assert found.machine.launch_us == 7.0
    assert found.machine.device.memory == pytest.approx(
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2, rel=1e-3
    )
    assert {kind: fit.mean < 0.15 for kind, fit in fits(found.machine, found.samples).items()} == dict.fromkeys(
        ("least", PRODUCT, *SHARED, STREAM, UPDATE, *KINDS), True
    )


def test_the_memory_of_the_host_is_measured_where_devices_have_their_own():
    class OnDevices(Pretended):
        def host(self) -> tuple[float, float]:
            return 41.234567e9, 30e9

    fake = OnDevices(named("cpu"))
    found = measure_machine("mine", CPU, (RankGroup(2),), fake, fake, 1e4, lambda *_: None).machine
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert (found.to_host, found.host_update) == (41.23e9, 60e9)
    assert found.host_memory == pytest.approx(memory, rel=1e-3)
    alone = whole((RankGroup(2),)).machine
    assert (alone.host_memory, alone.to_host, alone.host_update) == (
        0.0,
        named("cpu").to_host,
        named("cpu").host_update,
    )


def test_a_node_says_nothing_of_a_network_between_nodes():
    found = whole((RankGroup(2),))
    assert found.machine.between == found.machine.inside
    assert found.remarks == ("One node has no network to others: [between] is as [inside]. Write what yours has.",)


def test_one_process_says_nothing_of_a_network():
    found = whole(())
    assert (found.machine.inside, found.machine.between) == (named("cpu").inside, named("cpu").between)
    assert found.remarks == ("One process has no network: [inside] and [between] are those of cpu.",)


def test_each_node_of_several_is_one_level():
    found = whole((RankGroup(4, 1),))
    assert found.machine.ranks == 1
    assert found.machine.inside == found.machine.between


# -- on this machine ------------------------------------------------------------------------------------------------


def test_every_call_runs_on_this_host():
    """Each reads and writes as many bytes, and makes what its name says."""
    items = [item for item in items_of(CPU, ()) if isinstance(item, MeasuredCall) and item.size < 1e6]
    assert {item.kind for item in items} == {"least", PRODUCT, STREAM, NORM}
    for item in (*items, *attentions("float32", (16,), 2)):
        assert item.make(CPU)() is not None, item
    batched = next(item for item in items if item.name == "batched 64")
    assert batched.make(CPU)().shape == (8, 32, 32)
    assert batched.bytes_ == 4 * 8 * 3 * 32 * 32


def test_operands_take_turns_where_caches_would_hold_them():
    seen = list[int]()

    def make(device: torch.device) -> Callable[[], object]:
        x = torch.ones(4)
        return lambda: seen.append(id(x)) or x

    runner = HostRunner(CPU, lambda item: lambda: None)
    for bytes_, sets in ((16.0, SETS), (CACHES / 3, 3), (2.0 * CACHES, 1)):
        seen.clear()
        runner.ready(MeasuredCall(STREAM, "look", 0.0, bytes_, "float32", make))(2 * SETS)
        assert len(seen) == 2 * SETS and len(set(seen)) == sets, bytes_
        assert seen[sets:] == seen[:-sets]


def test_what_comes_before_a_collective_does_not_count():
    asked = list[MeasuredTransfer]()

    def transfer(item: MeasuredTransfer) -> Callable[[], object]:
        return lambda: asked.append(item)

    (item, *_) = transfers((RankGroup(2),), (64,))
    begun = time.perf_counter()
    us = HostRunner(CPU, transfer).ready(item)(5)
    assert asked == [item] * 5
    assert us < (time.perf_counter() - begun) * 1e6 / 5 / 5, "the products before it take many times as long"


def test_the_host_has_a_clock():
    slow = MeasuredCall(STREAM, "nap", 0.0, 1.0, "float32", lambda device: lambda: time.sleep(0.002))
    (sample,) = measure([slow], HostRunner(CPU, lambda item: lambda: None), Alone(), 0.2)
    assert 1500 < sample.us < 20_000


def test_a_call_after_a_product_takes_longer():
    """Its code and its operands are in no cache: some 5 to 30 us of 2."""
    runner = HostRunner(CPU, lambda item: lambda: None)
    assert 0.2 < max(runner.launch_us() for _ in range(3)) < 2000


@pytest.mark.gpu
def test_a_gpu_has_a_clock():
    device = torch.device("cuda", 0)
    runner = CudaRunner(device, lambda item: lambda: None)
    items = [least("bfloat16"), *products("bfloat16", (512,)), *products("tfloat32", (512,))]
    items += [*attentions("bfloat16", (512,), 8), *streams("bfloat16", (2**20,))]
    before = torch.get_float32_matmul_precision()
    found = {each.item: each.us for each in measure(items, runner, Alone(), 3)}
    assert set(found) == set(items) and all(0.5 < us < 1000 for us in found.values()), found
    assert 0.5 < runner.launch_us() < 100
    assert torch.get_float32_matmul_precision() == before


def transferred(rank: int) -> dict[str, Any]:
    """In a rank of six: three of each of two nodes."""
    groups = _groups(Settings(rank=rank, world_size=6, local_rank=rank % 3, local_world_size=3))
    make, found = _Transfers(groups, CPU), {}
    for group in groups:
        for kind in KINDS:
            for size in (64, 9 * 2**16):
                call = make(MeasuredTransfer(kind, float(size), group))
                results = [call() for _ in range(4)]
                found[kind, group.size, size] = None if results[0] is None else results[0].numel()
    together = _Together(CPU)
    agreed = together.largest(float(rank)), together.mean(float(rank))
    return {"found": found, "groups": list(groups), "agreed": agreed}


@pytest.mark.gloo
def test_six_ranks_of_two_nodes_move_what_they_are_asked_for():
    with ranks_of(6) as six:
        for outcome in six.run(transferred):
            assert outcome["groups"] == [RankGroup(3, 3), RankGroup(2, 1)]
            assert outcome["agreed"] == (5, 2.5)
            for (kind, size, bytes_), count in outcome["found"].items():
                if kind == MESSAGE:
                    assert count is None
                elif bytes_ > 64:
                    part = 1 if kind in ("all_reduce", "all_gather") else size
                    assert count * part * 4 == bytes_, (kind, size)


def raises(settings: Settings, **asked: Any) -> str:
    with pytest.raises(MachineError) as error:
        ranks_asked(asked.get("ranks"), asked.get("device", "cpu"), settings)
    return str(error.value)


def test_how_many_ranks_measure(monkeypatch: pytest.MonkeyPatch):
    assert ranks_asked(3, "cpu", Settings()) == 3
    for cores, ranks in ((1, 2), (4, 4), (64, 8)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert ranks_asked(None, "cpu", Settings()) == ranks
    assert ranks_asked(None, "cpu", Settings(world_size=6)) == 6
    said = "--ranks 4: this job has 2 ranks; leave --ranks out, or start 4."
    assert raises(Settings(world_size=2), ranks=4) == said
    assert raises(Settings(), ranks=0) == "--ranks 0: write a number of 1 or more."
    assert raises(Settings(), device="tpu") == "--device tpu: write cpu or cuda."


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    said = f"--device cuda: torch {torch.__version__} sees no GPU here. Write --device cpu."
    assert raises(Settings(), device="cuda") == said
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert ranks_asked(None, "cuda", Settings()) == 2
    assert raises(Settings(), device="cuda", ranks=4) == "--ranks 4: this machine has 2 GPUs; write at most 2."


# -- the command line -----------------------------------------------------------------------------------------------


def autopar(*arguments: str, folder: Path, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": str(folder / "tmp")}
    (folder / "tmp").mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-m", "autopar", "machine", *arguments], cwd=folder, env=environment, text=True,
        capture_output=True, timeout=timeout,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.gloo
def test_two_ranks_measure_this_machine(tmp_path: Path):
    done = autopar(
        "measure", "--out", "mine.toml", "--ranks", "2", "--device", "cpu", "--seconds", "10", folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    machine = read_machine(tmp_path / "mine.toml")
    assert (machine.name, machine.ranks, machine.is_host) == ("mine", 2, True)
    assert machine.between == machine.inside
    assert set(machine.inside.reached) == {"any", *KINDS}
    assert 1e9 < machine.device.flops["float32"] < 1e13
    for kind in (PRODUCT, STREAM, "all_reduce", "all_to_all", MESSAGE):
        assert f"  {kind}" in done.stdout
    threads = max(1, (os.cpu_count() or 1) // 2)
    said = f"2 x CPU process of {threads} thread{'s' * (threads > 1)},"
    assert said in (tmp_path / "mine.toml").read_text()
    assert sorted(os.listdir(tmp_path)) == ["mine.toml", "tmp"]
    assert [name for name in os.listdir(tmp_path / "tmp") if "autopar" in name] == []
    shown = autopar("show", "mine.toml", folder=tmp_path)
    assert shown.stdout == (tmp_path / "mine.toml").read_text()
