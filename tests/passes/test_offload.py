"""What the forward pass keeps waits in the host's memory: the same bits, less of the device, everywhere."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import offload_case as case
import pytest
import torch
from torch import fx

import autopar
from autopar.compiled import Compiled
from autopar.errors import PlanError, ScheduleError, VerificationError
from autopar.ir.check.check_levels import verify
from autopar.ir.ops.measure import local_bytes
from autopar.ir.ops.ops import AWAITED, COPIES, TO_DEVICE, TO_HOST
from autopar.ir.program import HOST, Level, Program, record, set_record
from autopar.ir.text.text import parse_program, print_program
from autopar.machines import DEVICES, Machine, named
from autopar.passes.recompute.budget import Elsewhere, _Step, _steps_within
from autopar.passes.schedules import check_schedule
from autopar.runtime.tiers.host_buffers import host_buffers, host_bytes

F64 = torch.float64
ON = {"offload": "activations"}


@functools.cache
def deep_alone(waits: bool = False) -> Compiled:
    """The 24 layers on one device, compiled once for all that look at them. waits: with what they keep elsewhere."""
    return case.compiled("deep", "dp=1", **(ON if waits else {}))


TABLE: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt", "dp=1", {}),
    ("gpt", "dp=2,tp=2", {"sequence_parallel": True}),
    ("gpt", "dp=2", {"zero": 1}),
    ("gpt", "dp=3", {"zero": 2}),
    ("gpt", "dp=2", {"zero": 3}),
    ("gpt", "cp=2", {"zero": 2}),
    ("gpt", "dp=2", {"recompute": "full"}),
    ("gpt", "dp=1", {"recompute": "selective"}),
    ("gpt", "dp=1", {"recompute": 0.3}),
    ("gpt", "dp=2", {"microbatches": 3, "zero": 3}),
    ("gpt", "dp=1", {"chunked_loss": 2000, "compile": "triton"}),
    ("deep", "pp=2", {"microbatches": 4}),
    ("deep", "pp=2", {"microbatches": 4, "schedule": "interleaved-1f1b", "recompute": "full"}),
    ("deep", "pp=2", {"microbatches": 4, "schedule": "zb-h1"}),
    ("deep", "pp=2,dp=2", {"microbatches": 4, "schedule": "zb-v", "zero": 2}),
    ("deep", "pp=2", {"microbatches": 4, "schedule": "gpipe", "recompute": 0.3}),
    ("gated", "pp=2", {"microbatches": 4}),
    ("gpt", "pp=2,dp=2", {"microbatches": 2, "zero": 3, "reshard_after_forward": False}),
    ("gpt", "pp=2", {"microbatches": 2, "slices": [5, 3], "schedule": "seq1f1b"}),
]  # fmt: skip


HOSTED: list[tuple[str, str, dict[str, Any]]] = [
    ("deep", "dp=1", {}),
    ("gpt", "dp=1", {"horizon": 2}),
    ("gpt", "dp=2,tp=2", {"sequence_parallel": True}),
    ("gpt", "dp=3", {"zero": 3, "recompute": "full"}),
    ("gpt", "cp=2", {"zero": 3}),
    ("gpt", "dp=1", {"offload": ["parameters", "activations"], "recompute": 0.3}),
]


@pytest.mark.parametrize(("name", "mesh", "options"), HOSTED, ids=str)
def test_parameters_that_wait_are_the_same_step_to_the_bit(name: str, mesh: str, options: dict[str, Any]):
    plain = {key: value for key, value in options.items() if key not in ("offload", "horizon")}
    plain |= {"recompute": "none"} if isinstance(plain.get("recompute"), float) else {}
    before = case.compiled(name, mesh, F64, **plain)
    want = case.step(name, before, F64)
    found = case.compiled(name, mesh, F64, **{"offload": "parameters", **options})
    got = case.step(name, found, F64)
    assert got.keys() == want.keys() and not [key for key in want if not torch.equal(got[key], want[key])]
    assert peak_of_all(found) < peak_of_all(before)
    entries = dict(found.program.entries)
    assert all((record(node).tier == HOST) == (entries[node].kind == "parameter") for node in entries)
    left = [node for node, out in found.program.leaving if out.kind == "gradient" and node is not None]
    assert left and all(record(node).tier == HOST for node in left)
    text = print_program(found.program)
    assert print_program(parse_program(text)) == text


STAGED: list[tuple[str, str, dict[str, Any]]] = [
    ("shallow", "dp=1", {"microbatches": 4}),
    ("shallow", "dp=2", {"microbatches": 3, "zero": 1}),
    ("shallow", "dp=3", {"zero": 2}),
    ("shallow", "fsdp=2,tp=2", {"microbatches": 2}),
    ("shallow", "pp=2", {"microbatches": 4, "schedule": "gpipe"}),
    ("shallow", "pp=2,dp=2", {"microbatches": 2, "schedule": "1f1b", "zero": 2}),
    ("shallow", "pp=2", {"microbatches": 4, "schedule": "zb-v", "offload": ["parameters", "activations"]}),
    ("shallow", "pp=2", {"microbatches": 3, "schedule": "dualpipev"}),
    ("gated", "pp=2", {"microbatches": 2}),
    ("gpt", "pp=2,dp=2", {"microbatches": 2, "zero": 3, "recompute": "full"}),
]


@pytest.mark.parametrize(("name", "mesh", "options"), STAGED, ids=str)
def test_sums_of_micro_batches_wait_with_parameters(name: str, mesh: str, options: dict[str, Any]):
    """To rounding: on the device a product may add to what is there, here what is there is added to it. Between graphs
    nothing of them is on the device, but for what stages send to others; and it holds less."""
    options = {"offload": "parameters", **options}
    alone = case.compiled(name, mesh, F64, **{key: value for key, value in options.items() if key != "offload"})
    found = case.compiled(name, mesh, F64, **options)
    want, got = case.step(name, alone, F64), case.step(name, found, F64)
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, rtol=1e-14, atol=1e-16)
    for graph in programs(found):
        here = [record(node).tier != HOST for node, entry in graph.entries if entry.kind in ("parameter", "part")]
        sums = [record(node).tier != HOST for node, out in graph.leaving if node is not None and out.kind == "part"]
        assert sum(here) + sum(sums) <= (name in ("gated", "gpt")) * 2 + 1  # the loss; what two stages read
        assert print_program(parse_program(print_program(graph))) == print_program(graph)
    assert peak_of_all(found) < peak_of_all(alone)


def test_of_micro_batches_the_device_holds_the_gradients_of_few_layers():
    plain, found = (case.compiled("deep", "dp=1", microbatches=4, **more) for more in ({}, {"offload": "parameters"}))
    before, report = plain.memory(device="cpu"), found.memory(device="cpu")
    every = before.states["parameters"]
    layer = (every - 4 * (16 * 16 + 16)) / case.LAYERS
    assert report.host == 4 * every and report.states["gradients"] == report.states["parameters"] == 0
    assert report.step <= before.step - 2 * every - before.states["optimizer states"] + 5 * layer


def test_of_parameters_that_wait_the_device_holds_two_layers():
    """And their gradients; the others, all gradients and all states are the host's: 16 bytes a parameter in fp32."""
    plain, found = deep_alone(), case.compiled("deep", "dp=1", offload="parameters")
    report, before = found.memory(device="cpu"), plain.memory(device="cpu")
    every = before.states["parameters"]
    layer = (every - 4 * (16 * 16 + 16)) / case.LAYERS
    assert report.states["parameters"] == report.states["optimizer states"] == report.states["gradients"] == 0
    assert report.host == 4 * every
    assert report.step <= before.step - every - before.states["optimizer states"] + 2 * layer


@pytest.mark.parametrize(("place", "name", "mesh", "options"), [(i, *row) for i, row in enumerate(TABLE)], ids=str)
def test_it_is_the_same_step_to_the_bit(place: int, name: str, mesh: str, options: dict[str, Any]):
    horizon = ("auto", 1)[place % 2]
    alone = {**options, "recompute": "none"} if isinstance(options.get("recompute"), float) else options
    before = case.compiled(name, mesh, F64, **alone)
    want = case.step(name, before, F64)
    found = case.compiled(name, mesh, F64, **options, **ON, horizon=horizon)
    assert any(node.target in COPIES for program in programs(found) for node in program.calls()), found.notes
    got = case.step(name, found, F64)
    assert got.keys() == want.keys()
    different = [key for key in want if not torch.equal(got[key], want[key])]
    assert not different
    assert peak_of_all(found) <= peak_of_all(before)


def programs(found: Any) -> list[Program]:
    return [found.program] if found.pipeline is None else [one.program for one in found.pipeline.every_graph()]


def peak_of_all(found: Any) -> int:
    return max(found.memory(ranks[0], device="cuda").peak for ranks in found.alike)


def peak(found: Any) -> int:
    """The bytes of the device in a step, beside what is there before and after it."""
    report = found.memory(device="cuda")
    return report.step - report.states["parameters"] - report.states["optimizer states"] - report.states["inputs"]


@pytest.mark.parametrize(
    ("mesh", "options"),
    [("dp=1", {}), ("dp=1", {"microbatches": 4}), ("pp=2", {"microbatches": 4}), ("dp=2", {"zero": 3})],
    ids=str,
)
def test_the_device_holds_less_the_fewer_layers_are_back(mesh: str, options: dict[str, Any]):
    plain = peak(case.compiled("deep", mesh, **options) if mesh != "dp=1" or options else deep_alone())
    wanted = (1, 2, 4, 8, "auto") if not options else (1, 8, "auto")
    shares = [peak(case.compiled("deep", mesh, **options, **ON, horizon=h)) / plain for h in wanted]
    assert shares[:-1] == sorted(shares[:-1]) and max(shares) <= 1.0
    assert shares[0] < 0.56 and shares[-1] <= shares[0] + 0.1, shares


def test_a_deep_model_holds_a_few_layers():
    """24 layers at a horizon of 1: three layers' kept bytes, the whole gradients, and what one layer computes with."""
    plain, found = deep_alone(), case.compiled("deep", "dp=1", **ON, horizon=1)
    layer = 192 * 4 * (16 + 64 + 64)  # the norm's and gelu's results, gelu's operand
    kept = case.LAYERS * layer
    assert peak(found) < peak(plain) - kept + 4 * layer
    assert found.memory(device="cpu").host == sum(size * n for size, n in host_buffers(found.program, None, 0).items())


def test_no_plan_is_worse_than_the_best_of_each_alone():
    """By the time that it is said to take, and on the device; for links from slow to fast."""
    steps = [_Step(0, None, bytes_, time) for bytes_, time in ((40, 10), (30, 20), (20, 60))]  # type: ignore[arg-type]
    for byte in (0.0, 0.3, 1.0, 3.0):
        for hides in (0.0, 20.0):
            for budget in range(0, 121, 10):
                elsewhere = Elsewhere(1.0, 10, hides, hides, byte)
                both = _steps_within(budget, 120, steps, elsewhere)
                alone = _steps_within(budget, 120, steps, None)
                times = []
                for count in (both, alone, 0):
                    if count is None:
                        continue
                    left = 120 - sum(step.bytes_ for step in steps[:count])
                    if max(0, left - budget) <= elsewhere.room(left):
                        times.append(sum(s.time for s in steps[:count]) + elsewhere.time(max(0, left - budget)))
                assert (both is None) == (budget < 10) and (not times or times[0] == min(times))


@pytest.mark.parametrize("link", [2e8, 2e9, 5e10], ids=["slow", "as fast", "fast"])
def test_no_emitted_program_is_slower_than_the_best_of_each_alone(link: float):
    """By the simulation of what is emitted, launches and all. Red before: 5 to 10 % slower, since the largest values
    moved, all of one layer, which hid none of their copies; of a Llama over a link of 12 GB/s 42 %."""
    for machine in (
        replace(named(DEVICES), to_host=link),
        replace(Machine.flat(1e6, 1e5, 1e3, 2.0, 1.0), to_host=link),
    ):
        there = case.compiled("deep", "dp=1", machine=machine, **ON)
        again = case.compiled("deep", "dp=1", machine=machine, recompute=0.6)
        both = case.compiled("deep", "dp=1", machine=machine, recompute=0.6, **ON)
        alone = min(one.time(machine).total for one in (again, there))
        assert both.time(machine).total <= 1.005 * alone
        assert peak(both) <= max(peak(again), peak(there)) * 1.05  # what is on its way is there beside what is kept


@pytest.mark.parametrize(
    ("part", "options"), [(0.15, {}), (0.5, {}), (0.3, {"microbatches": 2}), (0.8, {"zero": 3})], ids=str
)
def test_one_budget_is_for_both(part: float, options: dict[str, Any]):
    mesh = "dp=2" if "zero" in options else "dp=1"
    found = case.compiled("deep", mesh, **options, recompute=part, **ON)
    plain = case.compiled("deep", mesh, **options) if options else deep_alone()
    assert peak(found) < peak(plain) and "more than" not in found.notes[-1], found.notes
    slow = case.compiled("deep", mesh, machine=case.SLOW, **options, recompute=max(part, 0.8), **ON)
    assert any(node.name.endswith("_recomputed") for one in programs(slow) for node in one.calls())
    assert any(node.target is TO_HOST for one in programs(found) for node in one.calls())


def test_a_part_moves_or_as_many_bytes():
    def moved(amount: float | int) -> int:
        return host_bytes(case.compiled("deep", "dp=1", offload={"activations": amount}).program, None, 0)

    every = moved(1.0)
    assert moved(0.0) == 0 and 0 < moved(0.5) <= 0.5 * every * 1.01 and moved(100_000) <= 100_000 < every
    assert moved(100_000) > 50_000


def test_both_halves_of_the_way_out_are_in_the_forward_graph():
    found = case.compiled("deep", "pp=2", microbatches=4, schedule="zb-v", **ON)
    assert found.pipeline is not None
    for (_, kind), graph in found.pipeline.graphs.items():
        targets = [node.target for node in graph.calls()]
        assert (TO_HOST in targets) == (kind == "F") and (TO_DEVICE in targets) <= (kind in "BIW")
        for node in graph.calls():
            if node.target in COPIES:
                (wait,) = node.users
                assert wait.target is AWAITED
    sent = [line for lines in found.pipeline.lists for line in lines if line.op in ("SEND", "RECV")]
    assert not any("_host" in name for line in sent for name in line.values)


def test_what_waits_between_the_passes_of_a_micro_batch_waits_across_those_of_others():
    """Under gpipe all micro-batches wait at once, in as many buffers, and the device holds what one of them computes
    with. The proof of the schedule covers them: what dies early, or is read before it went out, is named."""
    plain, found = (case.compiled("deep", "pp=2", microbatches=4, schedule="gpipe", **more) for more in ({}, ON))
    assert found.pipeline is not None
    graph = found.pipeline.graphs[0, "F"]
    waiting = {out.name: node for node, out in graph.leaving if node is not None and record(node).tier == HOST}
    bytes_ = sum(local_bytes(node, graph.mesh) for node in waiting.values())
    bytes_ += sum(found.pipeline.flow.types[name].bytes_ for name in found.pipeline.flow.stores[0, "F"])
    assert waiting and host_bytes(found.program, found.pipeline, 0) == 4 * bytes_
    assert peak(found) <= peak(plain) - 2 * bytes_  # one computes, and what no layer hides of another comes or goes
    first, *others = found.pipeline.lists
    name = min(waiting)
    runs = {str(line.action): place for place, line in enumerate(first) if line.op == "RUN"}

    def lists(place: int, line: Any) -> list[Any]:
        return [(*first[:place], line, *first[place + 1 :]), *others]

    early = first[runs["0F2"]]
    with pytest.raises(ScheduleError, match=f"0B2.*{name}|{name}.*0B2"):
        dies = replace(early, frees=(*early.frees, name))
        check_schedule(lists(runs["0F2"], dies), found.pipeline.flow)
    turned = list(first)
    turned[runs["0F3"]], turned[runs["0B3"]] = turned[runs["0B3"]], turned[runs["0F3"]]
    with pytest.raises(ScheduleError, match="0B3"):
        check_schedule([tuple(turned), *others], found.pipeline.flow)


@pytest.mark.parametrize(("mesh", "options"), [("dp=1", {}), ("pp=2", {"microbatches": 4})], ids=str)
def test_text_is_read_again(mesh: str, options: dict[str, Any]):
    texts = [print_program(program) for program in programs(case.compiled("deep", mesh, **options, **ON))]
    assert [print_program(parse_program(text)) for text in texts] == texts
    assert "in host = autopar.to_host_start.default(" in "".join(texts)


# -- what verify finds ------------------------------------------------------------------------------------------------


def broken(change: Any) -> str:
    program = parse_program(print_program(deep_alone(waits=True).program))
    verify(program, Level.LOCAL)
    nodes = {target: [node for node in program.calls() if node.target is target] for target in (*COPIES, AWAITED)}
    change(nodes)
    program.graph.lint()
    with pytest.raises(VerificationError) as caught:
        verify(program, Level.LOCAL)
    return str(caught.value)


def host(nodes: Any) -> fx.Node:
    return next(node for node in nodes[AWAITED] if record(node).tier == HOST)


def test_what_verify_says_of_copies():
    def read_by_another(nodes: Any) -> None:
        other = next(node for node in host(nodes).graph.nodes if node.name == "gelu_backward")
        other.replace_input_with(other.args[1], host(nodes))

    def awaited_twice(nodes: Any) -> None:
        (wait,) = nodes[TO_DEVICE][0].users
        with wait.graph.inserting_after(wait):
            set_record(wait.graph.call_function(AWAITED, wait.args), record(wait))

    def loads_the_device(nodes: Any) -> None:
        load, other = nodes[TO_DEVICE][0], nodes[TO_HOST][0].args[0]
        load.args = (other,)

    def told_wrong(nodes: Any) -> None:
        set_record(host(nodes), record(host(nodes)).with_(tier=""))

    assert "lies in the host's memory, and %gelu_backward reads it, which is no load" in broken(read_by_another)
    assert "is under way and is not awaited, once, in its own graph" in broken(awaited_twice)
    assert "which is on the device" in broken(loads_the_device)
    assert "lies in the tier 'device', which is not what it makes" in broken(told_wrong)


# -- bad input --------------------------------------------------------------------------------------------------------

WHAT = (
    "write activations, optimizer or parameters, a list of them, or parts from 0.0 to 1.0: "
    '{"activations": 0.5} (parameters: 1.0 or "disk"; optimizer: also a list of patterns of modules).'
)
REFUSED = [
    ({"offload": "weights"}, f"offload='weights': {WHAT}"),
    ({"offload": {"activations": 1.5}}, f"offload={{'activations': 1.5}}: {WHAT}"),
    ({"offload": {"activations": -1}}, f"offload={{'activations': -1}}: {WHAT}"),
    ({"offload": {"activations": True}}, f"offload={{'activations': True}}: {WHAT}"),
    ({"offload": {"optimizer": 1000}}, f"offload={{'optimizer': 1000}}: {WHAT}"),
    ({"offload": ["activations", "disk"]}, f"offload=['activations', 'disk']: {WHAT}"),
    ({"horizon": 0}, 'horizon=0: write a number of 1 or more of layers, or "auto".'),
    ({"horizon": "early"}, "horizon='early': write a number of 1 or more of layers, or \"auto\"."),
    (
        {"horizon": 2},
        'horizon=2 is of offload="activations" or "parameters", neither of which is asked for: write both, or none.',
    ),
    ({"offload": {"parameters": 0.5}}, f"offload={{'parameters': 0.5}}: {WHAT}"),
    (
        {"offload": ["parameters", "optimizer"]},
        "offload=['parameters', 'optimizer']: an optimizer makes its states where the parameters lie, which is the "
        'host\'s memory. Write "parameters" without "optimizer".',
    ),
    (
        {**ON, "compile": "inductor"},
        "offload='activations' with compile=\"inductor\": its code holds no copies that go on beside it. "
        'Write compile="executor" or "triton", or leave offload out.',
    ),
]


def test_parameters_that_would_be_gathered_once():
    with pytest.raises(PlanError) as caught:
        case.compiled("deep", "fsdp=2", offload="parameters", reshard_after_forward=False)
    assert str(caught.value) == (
        "offload='parameters' with reshard_after_forward=False on mesh 'fsdp=2': every rank would keep all parameters "
        "that it has gathered for the rest of the step. Leave reshard_after_forward out."
    )


@pytest.mark.parametrize(("options", "text"), REFUSED, ids=str)
def test_what_is_refused(options: dict[str, Any], text: str):
    with pytest.raises(PlanError) as caught:
        case.compiled("deep", "dp=1", **options)
    assert str(caught.value) == text


def test_a_budget_that_nothing_keeps_to_says_what_stays():
    with pytest.raises(PlanError) as caught:
        case.compiled("deep", "dp=1", recompute=0, **ON)
    assert str(caught.value) == (
        "recompute=0: a rank has to keep at least 4 bytes of the forward pass on the device, which neither offload= "
        "moves nor recompute= computes again under a budget. Allow 4 bytes or more."
    )


def test_a_model_that_keeps_nothing_movable_is_told():
    model = torch.nn.Linear(4, 4)
    found = autopar.compile(model, "dp=1", loss_fn=case.squares, batch=(torch.ones(3, 4),), **ON)
    assert found.notes[-1] == ("offload: 0 B of 52 B kept wait in the host's memory (52 B of small values stay)")


def test_it_leaves_others_as_they_were():
    plain, other = deep_alone(), case.compiled("deep", "dp=1", offload={"activations": 0.0})
    assert print_program(plain.program) == print_program(other.program)
