"""Messages of pipelines as NCCL is asked for them: one a boundary and micro-batch, two queues, no wait for a send."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipelines import flow_of
from test_gloo_driver import TIMEOUT, _join, _spawn
from torch import nn

import autopar
from autopar.ir.mesh import parse_mesh
from autopar.ir.program import TensorType
from autopar.ir.schedule import Action, Costs, Instruction
from autopar.parallel.programs import maker as making
from autopar.passes.schedules import parse_schedule, simulate, with_transfers
from autopar.report.memory.simulate_rank import FakeGroup
from autopar.runtime.pipeline.arrivals import arrivals
from autopar.runtime.pipeline.run_pipeline import Await, Send
from autopar.runtime.ranks.p2p import Peers
from autopar.runtime.ranks.process_groups import Group, connect, make_groups

VALUES = (
    torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(),  # 12 bytes: what follows is aligned all the same
    torch.tensor([True, False, True]),
    torch.randn(3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)),
    torch.arange(5, dtype=torch.int64) << 40,
    torch.empty(0, 4),
)
BACK = tuple(value.logical_not() if value.dtype == torch.bool else -value for value in VALUES)
TYPES = tuple(TensorType(tuple(value.shape), value.dtype) for value in VALUES)


def _line(op_name: str, kind: str, peer: int, count: int = len(TYPES)) -> Instruction:
    return Instruction(op_name, Action(0, kind, 0), peer, tuple(f"v{i}" for i in range(count)), TYPES[:count])


class Queue(FakeGroup):
    """Notes what is sent and received, and how often somebody waits."""

    def __init__(self, is_done: bool = True) -> None:
        super().__init__(0, 2, copies=False)
        self.posted: list[tuple[str, torch.Size, torch.dtype]] = []
        self.waits, self.is_done = 0, is_done

    def send(self, tensors: list[torch.Tensor], *_: Any) -> dist.Work:
        return self._posted("send", tensors)

    def recv(self, tensors: list[torch.Tensor], *_: Any) -> dist.Work:
        return self._posted("recv", tensors)

    def _posted(self, what: str, tensors: list[torch.Tensor]) -> Any:
        self.posted += [(what, tensor.shape, tensor.dtype) for tensor in tensors]
        return SimpleNamespace(wait=self._wait, is_completed=lambda: self.is_done)

    def _wait(self) -> None:
        self.waits += 1


def _peers(is_done: bool = True, device: str = "meta") -> tuple[Peers, Queue, Queue]:
    forward, backward = Queue(is_done), Queue(is_done)
    return Peers(Group.of(forward, 2, None, backward), torch.device(device)), forward, backward


def test_a_message_is_one_call() -> None:
    """Red before: one a tensor, each with a launch and a turn in the queue."""
    peers, forward, backward = _peers()
    given = tuple(value.to("meta") for value in VALUES)
    peers.send(Send(_line("SEND", "F", 1), given))
    received = peers.receive(_line("RECV", "B", 1))
    assert [what for what, *_ in forward.posted] == ["send"] and [what for what, *_ in backward.posted] == ["recv"]
    assert forward.posted[0][1:] == backward.posted[0][1:], "the two ends agree"
    found = tuple(TensorType(tuple(value.shape), value.dtype) for value in received.tensors)
    assert found == TYPES and len({value.untyped_storage()._cdata for value in received.tensors}) == 1


def test_a_message_of_one_tensor_is_not_copied() -> None:
    peers, forward, _ = _peers()
    value = torch.empty(4, 4, device="meta")
    types = (TensorType((4, 4), torch.float32),)
    peers.send(Send(Instruction("SEND", Action(0, "F", 0), 1, ("v",), types), (value,)))
    assert forward.posted == [("send", value.shape, value.dtype)]
    assert peers.leaving[0].sent is value


@pytest.mark.parametrize("is_done", [True, False])
def test_no_send_is_waited_for(is_done: bool) -> None:
    """Red before: `wait` lets the stream that computes stand still until the other rank has received."""
    peers, forward, backward = _peers(is_done)
    for microbatch in range(20):
        for kind in "FB":
            peers.send(Send(_line("SEND", kind, 1), tuple(value.to("meta") for value in VALUES)))
        assert not is_done or len(peers.leaving) == 1, microbatch
    peers.finish()
    assert forward.waits == backward.waits == 0
    assert len(peers.leaving) == (1 if is_done else 40), "what has not left keeps its memory"


def test_what_the_optimizer_writes_to_has_left_at_the_end_of_a_step() -> None:
    """Parameters go to another stage before the first action: their memory is not the step's own."""
    peers, forward, _ = _peers(is_done=False)
    for kind in "PF":
        peers.send(Send(_line("SEND", kind, 1), tuple(value.to("meta") for value in VALUES)))
    peers.finish()
    assert forward.waits == 1 and len(peers.leaving) == 1


ORDERS = [("1f1b", 1, "FB"), ("gpipe", 1, "FB"), ("zb-h1", 1, "FIW"), ("interleaved-1f1b", 2, "FB"), ("zb-v", 2, "FIW")]


@pytest.mark.parametrize("name, chunks, kinds", ORDERS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_is_said_to_have_arrived_has(name: str, chunks: int, kinds: str, ranks: int) -> None:
    """Whatever actions and messages take. Of a step whose ranks answer each other few messages stay unknown."""
    draw = random.Random(ranks)
    schedule = parse_schedule(name, ranks, 2 * ranks, chunks * ranks)
    flow = flow_of(schedule.ranks, 2 * ranks, kinds)
    for prefetch in (False, True):
        lists = with_transfers(schedule.orders, flow, Costs(), prefetch)
        told = [arrivals(lists, flow, rank) for rank in range(ranks)]
        for _ in range(5):
            costs = Costs({key: draw.uniform(0.1, 9) for key in flow.works}, latency_us=draw.uniform(0, 9))
            at = [{span.instruction: span for span in spans} for spans in simulate(lists, flow, costs).ranks]
            for rank, found in enumerate(told):
                for place, sends in found.items():
                    came = at[rank][lists[rank][place]].end_us
                    assert all(at[rank][send].end_us <= came for send in sends), (rank, place)
        sent = [sum(line.op == "SEND" for line in lines) for lines in lists]
        known = [sum(map(len, found.values())) for found in told]
        assert name == "gpipe" or sum(known) >= 0.5 * sum(sent), (known, sent)


def test_what_has_arrived_is_let_go_whatever_the_host_knows() -> None:
    """Red before: on a GPU, whose host is ahead, all messages of a step were held at once (up to LEAVING_BYTES)."""
    peers, forward, _ = _peers(is_done=False)
    value, types = torch.empty(4, 4, device="meta"), (TensorType((4, 4), torch.float32),)
    lines = [Instruction("SEND", Action(0, "F", i), 1, ("v",), types) for i in range(3)]
    for line in lines:
        peers.send(Send(line, (value,)))
    answer = Instruction("RECV", Action(1, "B", 0), 1, ("g",), types)
    peers.wait(Await(peers.receive(answer), answer, (lines[1],)))
    assert [one.line for one in peers.leaving] == [lines[0], lines[2]] and forward.waits == 1
    peers.finish()
    peers.send(Send(lines[0], (value,)))
    peers.wait(Await(peers.receive(answer), answer))
    assert [one.step for one in peers.leaving] == [1], "an answer in the next step: all of the last one has arrived"


def test_messages_on_their_way_do_not_grow_with_micro_batches() -> None:
    """The estimate counts a GPU whose host knows of no send that it is done."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to("meta")
    peaks = []
    for microbatches in (4, 16):
        batch = (torch.empty(64 * microbatches, 64, device="meta"),)
        compiled = autopar.compile(
            model, "pp=2", batch=batch, loss_fn=lambda model, x: model(x).square().mean(), microbatches=microbatches
        )
        reports = [compiled.memory(rank, device="cuda") for rank in (0, 1)]
        peaks.append([report.step - report.categories["inputs"] for report in reports])
    assert peaks[0] == peaks[1]


class InOrder(Peers):
    """As on a GPU, over Gloo."""

    @property
    def in_order(self) -> bool:
        return True


def _exchange(rank: int, size: int, path: str) -> None:
    _join(rank, size, path)
    mesh = parse_mesh(f"pp={size}")
    groups = make_groups(mesh, ("pp",), None, TIMEOUT, twice=("pp", None))
    group = groups["pp"]
    assert group.handles[0] is not group.handles[1]
    lines = [[_line("SEND", "F", other) for other in (rank + 1,) if other < size] for rank in range(size)]
    lines[1].append(_line("SEND", "B", 0))
    connect(groups, SimpleNamespace(graphs={}, lists=lines), rank, torch.device("cpu"))  # type: ignore[arg-type]
    peers = InOrder(group, torch.device("cpu"))
    # the receive of a later message is posted first: it holds nothing back
    came = [peers.receive(_line("RECV", "B", 1))] if rank == 0 else []
    came += [peers.receive(_line("RECV", "F", rank - 1))] if rank else []
    if rank + 1 < size:
        peers.send(Send(_line("SEND", "F", rank + 1), VALUES))
    if rank == 1:
        peers.send(Send(_line("SEND", "B", 0), BACK))
    for received in came:
        for got, want in zip(received.wait(), VALUES if rank else BACK, strict=True):
            assert got.dtype == want.dtype and torch.equal(got, want)
    for one in peers.leaving:
        one.work.wait()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.gloo
def test_messages_in_one_piece_over_two_groups(tmp_path: Path) -> None:
    _spawn(_exchange, 3, tmp_path)


@pytest.mark.parametrize("device", ["cuda", "cpu", "meta"])
def test_off_the_cpu_groups_connect_before_the_first_step(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red before: NCCL connected inside of it, and had one queue for both ways."""
    calls: list[tuple[str, Any]] = []
    monkeypatch.setattr(making, "make_groups", lambda *_, twice: calls.append(("make", tuple(twice))) or {"pp": 1})
    monkeypatch.setattr(making, "connect", lambda groups, *_: calls.append(("connect", tuple(groups))))
    maker: Any = object.__new__(making.Maker)
    maker._groups, maker._settings = {}, SimpleNamespace(device=torch.device(device), timeout=None)
    maker._agreement = SimpleNamespace(patience=None)
    maker._store = SimpleNamespace(distributor=SimpleNamespace(mesh=None, device_mesh=None, coord={"pp": 0}))
    maker._connect(["pp"], SimpleNamespace(plan=SimpleNamespace(zero_axes=("dp",)), pipeline=None))
    assert calls == ([("make", ("dp", "pp")), ("connect", ("pp",))] if device == "cuda" else [("make", ())])


def test_gathers_and_sums_have_their_own_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are used once to connect them, in the same order on every rank; that of sums goes before what computes."""
    made: list[tuple[list[int], Any]] = []
    kept: list[FakeGroup] = []  # as torch does

    def new_group(ranks: list[int], timeout: Any, pg_options: Any) -> FakeGroup:
        made.append((ranks, pg_options))
        kept.append(FakeGroup(0, 2, copies=False))
        return kept[-1]

    nccl = SimpleNamespace(Options=lambda: SimpleNamespace(is_high_priority_stream=False))
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda handle: [0, 1])
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    groups = make_groups(parse_mesh("dp=2"), ("dp",), twice=("dp",))
    assert [ranks for ranks, _ in made] == [[0, 1], [0, 1]]
    assert made[0][1] is None and made[1][1].is_high_priority_stream
    used: list[Any] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: used.append(group))
    connect(groups, None, 0, torch.device("meta"))
    assert used == list(groups["dp"].handles)
