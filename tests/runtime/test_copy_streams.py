"""Copies on streams of their own, without a GPU: every access is ordered behind those that it must follow.

A recorder stands in for `torch.cuda`: its streams and events carry vector clocks, and a dispatch mode tells it what
each op reads and writes. An access to memory that another stream wrote, or that one may still read, without an event
between them, is a race; so is memory that dies while a stream may still be at work on it, since the allocator gives it
to whatever the computing stream does next.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import offload_case as case
import pytest
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.ir.mesh import PIPELINE
from autopar.ir.ops.ops import TO_DEVICE, TO_HOST
from autopar.ir.schedule import Instruction
from autopar.report.memory.simulate_rank import fake_groups
from autopar.runtime.executor.executor import Study
from autopar.runtime.executor.inputs import inputs_of, slots_of
from autopar.runtime.ranks.distributed import DistributedDriver
from autopar.runtime.ranks.runner import executor_runner
from autopar.runtime.tiers.host_buffers import host_buffers
from autopar.runtime.tiers.host_tier import CopyQueues, HostPool, HostTier, HostValue, Queues, host_tier

CPU = torch.device("cpu")
Clock = dict[str, int]


@dataclass
class Stream:
    name: str
    clock: Clock = field(default_factory=dict)
    host: Stream | None = None

    def synchronize(self) -> None:
        assert self.host is not None
        self.host.wait_event(self.record_event())

    def record_event(self) -> Clock:
        return dict(self.clock)

    def wait_event(self, event: Clock) -> None:
        for name, count in event.items():
            self.clock[name] = max(self.clock.get(name, 0), count)


class Recorded:
    """In place of `torch.cuda`. races: what was found, each with the node at which it was."""

    def __init__(self) -> None:
        self.main, self.host = Stream("compute"), Stream("host")
        self.current, self.made = self.main, 0
        self.node, self.races = "", list[str]()

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    def Stream(self, device: torch.device) -> Stream:
        self.made += 1
        return Stream(("out", "back")[self.made - 1], host=self.host)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.current, before = stream, self.current
        yield
        self.current = before


class Watch(TorchDispatchMode):
    """Tells a recorder of every access. last: of each memory, the accesses that nothing has followed."""

    def __init__(self, api: Recorded) -> None:
        super().__init__()
        self.api = api
        self.last: dict[int, dict[str, tuple[str, int, str]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        stream = self.api.current
        stream.wait_event(self.api.host.clock)  # the host has launched it
        stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
        written = {id(x.untyped_storage()) for x in tree_leaves(out) if isinstance(x, Tensor)}
        if func._schema.is_mutable or func is torch.ops.aten.empty.memory_format:
            written |= {id(x.untyped_storage()) for x in args[:1] if isinstance(x, Tensor)}
        elif all(result.alias_info is not None for result in func._schema.returns):
            return out  # a view does not touch memory
        for x in tree_leaves((args, kwargs, out)):
            if isinstance(x, Tensor):
                self._see(x, "write" if id(x.untyped_storage()) in written else "read", stream)
        return out

    def _see(self, x: Tensor, how: str, stream: Stream) -> None:
        storage = x.untyped_storage()
        if id(storage) not in self.last:
            self.last[id(storage)] = {}
            weakref.finalize(storage, self._end, id(storage))
        for (what, name), (_, count, node) in self._known(storage).items():
            if (how == "write" or what == "write") and stream.clock.get(name, 0) < count:
                self.api.races.append(f"{stream.name} {how}s at %{self.api.node} what {name} {what}s at %{node}")
        self.last[id(storage)][how + " " + stream.name] = how, stream.clock[stream.name], self.api.node

    def _known(self, storage: Any) -> dict[tuple[str, str], tuple[str, int, str]]:
        return {tuple(key.split()): value for key, value in self.last[id(storage)].items()}  # type: ignore[misc]

    def _end(self, key: int) -> None:
        for access, (_, count, node) in self.last.pop(key, {}).items():
            name = access.split()[1]
            if name != "host" and self.api.main.clock.get(name, 0) < count:  # the host is done with what it lets go of
                self.api.races.append(f"memory ends at %{self.api.node} that {name} still uses since %{node}")


class Named:
    """A tier that tells a recorder which instruction copies."""

    def __init__(self, tier: HostTier, api: Recorded) -> None:
        self._tier, self._api = tier, api

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def copy(self, line: Instruction, values: Any) -> Any:
        self._api.node = f"{line.op} {line.action}"
        return self._tier.copy(line, values)


def races_of(
    make: Callable[[Recorded], Queues], options: dict[str, Any], tier: type[HostTier] = HostTier, mesh: str = "dp=1",
    rank: int = 0,
) -> list[str]:  # fmt: skip
    """The races of two steps of a rank, and no buffer is made in them. What other ranks send is whatever lies there."""
    found = case.compiled("deep", mesh, **options)
    api, coord = Recorded(), found.mesh.coord(rank)
    pool = HostPool(lambda size: torch.empty(size, dtype=torch.uint8))
    pool.fill(host_buffers(found.program, found.pipeline, coord.get(PIPELINE, 0)))
    made = tier(pool, make(api), torch.device("cpu"))
    groups = fake_groups(found.mesh, rank, found.axes, copies=True)
    driver = DistributedDriver(found.mesh, groups, rank, tier=Named(made, api))

    def enter(node: fx.Node) -> None:
        api.node = node.name

    runner = executor_runner(found.program, found.pipeline, driver, CPU, Study(enter, {}))
    model, _, batch = case.captured("deep")
    parameters = dict(model.named_parameters())
    slots = slots_of(found.program, found.pipeline, {PIPELINE: 0, **coord})

    def value_of(entry: Any, layout: Any, coord: Any) -> Any:
        from autopar.ir.layout import local_part

        if entry.kind == "parameter":
            return parameters[entry.name].detach()
        if entry.kind == "seed":
            return torch.zeros(2, dtype=torch.int64)
        return local_part(batch[0], layout, found.program.mesh, coord)

    steps_on_host = "parameters" in found.plan.options.offloaded
    with Watch(api):
        for _ in range(2):
            outputs = runner.run(inputs_of(slots, value_of))
            with api.stream(api.host) if steps_on_host else contextlib.nullcontext():
                for out, value in zip(found.program.outputs, outputs, strict=True):
                    if out.kind == "gradient" and steps_on_host:
                        api.node = out.name
                        parameters[out.name].detach().sub_(value)
                del outputs
    assert not pool.missed and not pool.held and pool.moved["back"] > 0
    assert steps_on_host or pool.moved["out"] == pool.moved["back"]
    return list(dict.fromkeys(api.races))


@pytest.mark.parametrize("horizon", [1, 4, "auto"])
@pytest.mark.parametrize("options", [{}, {"microbatches": 4}, {"recompute": "full"}], ids=str)
def test_every_access_is_ordered(options: dict[str, Any], horizon: Any):
    assert not races_of(lambda api: CopyQueues(api, CPU), {"offload": "activations", "horizon": horizon, **options})


# no layer hides a copy, so copies are instructions of the list
BESIDE: dict[str, Any] = {"offload": "activations", "microbatches": 4, "schedule": "gpipe", "machine": case.SLOW}


def test_every_access_of_copies_beside_the_turns_of_others_is_ordered():
    found = case.compiled("deep", "dp=1", **BESIDE)
    assert found.pipeline is not None and {line.op for line in found.pipeline.lists[0]} == {"RUN", "OUT", "IN"}
    for schedule in ("gpipe", "dualpipev"):
        assert not races_of(lambda api: CopyQueues(api, CPU), {**BESIDE, "schedule": schedule})


def test_each_sabotage_of_copies_beside_is_found_by_name():
    dropped = races_of(lambda api: NoWait(api, CPU), BESIDE)
    assert any(race.startswith("compute reads at") and "what back writes at %IN 0B0" in race for race in dropped)
    assert any("still uses since %OUT 0F1" in race for race in dropped), dropped[:3]
    ahead = races_of(lambda api: Ahead(api, CPU), BESIDE)
    assert any(race.startswith("out reads at %OUT 0F0 what compute writes") for race in ahead), ahead[:3]
    soon = races_of(lambda api: TooSoon(api, CPU), BESIDE)
    assert not soon  # the memory of the copy out is given back before, so the computing stream has waited for it


PIPELINE_BESIDE = {**BESIDE, "microbatches": 8}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-v", "dualpipev"])
def test_every_access_of_a_pipeline_is_ordered(schedule: str, rank: int):
    """Of both ranks, whose lists send, receive, and copy activations out and back beside the turns of others."""
    options = {**PIPELINE_BESIDE, "schedule": schedule}
    found = case.compiled("deep", "pp=2", **options)
    assert found.pipeline is not None and {"OUT", "IN", "SEND", "RECV"} <= {line.op for line in found.pipeline.lists[0]}
    assert not races_of(lambda api: CopyQueues(api, CPU), options, mesh="pp=2", rank=rank)


class Forgets(HostTier):
    """A copy back does not hold its buffer: it is lent again while it is read."""

    def _back(self, value: HostValue) -> Any:
        copying = super()._back(value)
        copying.held = None
        return copying


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-v"])
def test_each_sabotage_of_a_pipeline_is_found_by_name(schedule: str):
    """An event dropped, a load before its copy out has ended, a buffer used again early."""
    options = {**PIPELINE_BESIDE, "schedule": schedule}
    dropped = races_of(lambda api: NoWait(api, CPU), options, mesh="pp=2")
    assert any(race.startswith("compute reads at %") and "what back writes at %IN " in race for race in dropped)
    soon = races_of(lambda api: NeitherWaits(api, CPU), options, mesh="pp=2")
    assert any(race.startswith("back reads at %IN ") and "what out writes at %OUT " in race for race in soon), soon[:3]
    early = races_of(lambda api: CopyQueues(api, CPU), options, Forgets, mesh="pp=2")
    assert any(race.startswith("out writes at %OUT ") and "what back reads at %IN " in race for race in early), early[
        :3
    ]


@pytest.mark.parametrize("more", [{}, {"microbatches": 3}], ids=str)
@pytest.mark.parametrize("horizon", [1, "auto"])
def test_every_access_of_parameters_that_wait_is_ordered(horizon: Any, more: dict[str, Any]):
    """The optimizer reads gradients and writes parameters on the host, which has waited for their copies; sums of
    micro-batches come back behind the copy out of those before, and their memory is lent again."""
    for offload in ("parameters", ["parameters", "activations"]):
        assert not races_of(lambda api: CopyQueues(api, CPU), {"offload": offload, "horizon": horizon, **more})


class NeverDone(CopyQueues):
    """The host does not wait for copies at the end of a step."""

    def finish(self) -> None:
        return


def test_a_sum_that_comes_back_too_soon_is_found_by_name():
    races = races_of(lambda api: NoWait(api, CPU), {"offload": "parameters", "microbatches": 3})
    assert any(race.startswith("back reads at %") and " what out writes at %" in race for race in races), races[:3]


def test_a_host_that_does_not_wait_is_found_by_name():
    races = races_of(lambda api: NeverDone(api, CPU), {"offload": "parameters"})
    assert any(race.startswith("host reads at %head.weight what out writes at %") for race in races), races[:3]
    assert any(race.startswith("host writes at %") and " what back reads at %" in race for race in races), races[:3]


class NoWait(CopyQueues):
    """The computing stream does not wait for copies."""

    def wait(self, event: Any) -> None:
        return


class TooSoon(CopyQueues):
    """A copy back does not wait for its copy out."""

    def copy(self, way: str, move: Callable[[], None], after: Iterable[Any] = ()) -> Any:
        return super().copy(way, move)


class NeitherWaits(TooSoon):
    """Nor does the computing stream, which else has waited for it by then."""

    def wait(self, event: Any) -> None:
        return


class Ahead(CopyQueues):
    """A copy does not wait for what is computed."""

    def copy(self, way: str, move: Callable[[], None], after: Iterable[Any] = ()) -> Any:
        stream = self._streams[way]
        for event in after:
            stream.wait_event(event)
        with self.api.stream(stream):
            move()
        return stream.record_event()


def test_each_sabotage_is_found_by_name():
    on = {"offload": "activations", "horizon": 2}
    dropped = races_of(lambda api: NoWait(api, CPU), on)
    assert any("_back what back writes at %" in race or "compute reads at" in race for race in dropped)
    assert any("still uses since %" in race and "_out" in race for race in dropped), dropped[:3]
    ahead = races_of(lambda api: Ahead(api, CPU), on)
    assert any(race.startswith("out reads at %") and "_out what compute writes" in race for race in ahead), ahead[:3]


# A copy back that starts before its copy out is awaited, and a buffer that is used again before its load has ended, are
# in no program; by hand:


def by_hand(make: Callable[[Recorded], CopyQueues], early: bool = False) -> list[str]:
    api = Recorded()
    pool = HostPool(lambda size: torch.empty(size, dtype=torch.uint8))
    pool.fill({64: 2})
    tier = HostTier(pool, make(api), torch.device("cpu"))
    with Watch(api):
        api.node = "x_out"
        x = torch.ones(16)
        out = tier.start(TO_HOST, x)
        stored: HostValue = out.result
        api.node = "x_load"
        load = tier.start(TO_DEVICE, stored)
        if early:
            pool.give(stored.size, stored.buffer)
        api.node = "y_out"
        other = tier.start(TO_HOST, torch.ones(16))
        out.wait(), load.wait(), other.wait()
    stored.pool = HostPool(lambda size: None) if early else stored.pool
    return api.races


def test_what_no_program_does():
    assert by_hand(lambda api: CopyQueues(api, CPU)) == []
    assert by_hand(lambda api: TooSoon(api, CPU)) == ["back reads at %x_load what out writes at %x_out"]
    assert "out writes at %y_out what back reads at %x_load" in by_hand(lambda api: CopyQueues(api, CPU), early=True)


def test_memory_is_lent_again_when_the_tensor_that_had_it_is_gone():
    """Of gradients: a view holds it, a step that follows makes none, and nothing is used twice at once."""
    tier, x = host_tier(CPU), torch.arange(6.0).view(2, 3)
    made, make = list[int](), tier.pool.make
    tier.pool.make = lambda size: made.append(size) or make(size)  # type: ignore[func-returns-value]
    first = tier.start(TO_HOST, x, True).wait()
    place, view = first.data_ptr(), first.view(-1)
    del first
    other = tier.start(TO_HOST, x + 1, True).wait()
    assert other.data_ptr() != place and torch.equal(view, x.view(-1)) and made == [24, 24]
    del view
    again = tier.start(TO_HOST, x + 2, True).wait()
    assert again.data_ptr() == place and torch.equal(again, x + 2) and torch.equal(other, x + 1) and made == [24, 24]
    assert tier.start(TO_HOST, x[:0], True).wait().shape == (0, 3)
