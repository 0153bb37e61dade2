"""Flows for the tests of schedules, and two slow ways to run them on numbers.

`flow_of` makes a chain of stages as a trained model has it: activations and gradients between neighbours, a skip
connection from the first stage to the last, a tied parameter that lives on the first stage's rank only, a count of the
whole batch before the step, and a loss that every rank reads at its end.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

import torch

from autopar.ir.program import TensorType
from autopar.ir.schedule import ONCE, Action, Flow, Instruction, Turn, Work, actions_of

Key = tuple[str, int]
PRIME = (1 << 61) - 1


def some(condition: bool, *names: str) -> tuple[str, ...]:
    return names if condition else ()


def flow_of(ranks: tuple[int, ...], microbatches: int, kinds: str = "FB") -> Flow:
    """kinds: "F", "FB", "FIW", or "FBIW" where a schedule mixes both."""
    last, works = len(ranks) - 1, dict[tuple[int, str], Work]()
    for s in range(last + 1):
        first, final = s == 0, s == last
        tied = some(last > 0 and (first or final), "tied")
        ends = (f"w{s}", *tied, *some(final, "scale"))
        incoming = some(not first, f"x{s}") + some(final and last > 0, "skip")
        saved = f"saved{s}"
        works[s, "F"] = Work(
            reads=incoming,
            writes=some(not final, f"x{s + 1}") + some(first and last > 0, "skip") + some(kinds != "F", saved),
            sums=some(final, "loss"),
            step_reads=ends,
        )
        grads_in = (saved, *some(not final, f"g{s + 1}"), *some(first and last > 0, "skip_grad"))
        grads_out = some(not first, f"g{s}") + some(final and last > 0, "skip_grad")
        weights = (f"gw{s}", *(f"{name}_grad{s}" for name in tied))
        if "B" in kinds:
            works[s, "B"] = Work(grads_in, grads_out, weights, ends)
        if "I" in kinds:
            works[s, "I"] = Work(grads_in, (*grads_out, f"mid{s}"), (), ends)
            works[s, "W"] = Work((saved, f"mid{s}"), (), weights)
    works[0, "P"] = Work(step_writes=("scale",))
    for rank in range(max(ranks) + 1):
        mine = [s for s in range(last + 1) if ranks[s] == rank]
        if kinds == "F":
            reads, writes = ("loss",), (f"report{rank}",)
        else:
            grads = tuple(f"gw{s}" for s in mine) + some(rank == 0 and last > 0, "tied_grad0", f"tied_grad{last}")
            reads, writes = (*grads, *(f"w{s}" for s in mine), "loss"), tuple(f"new_w{s}" for s in mine)
        works[rank, "E"] = Work(step_reads=reads, step_writes=writes)
    owners = {f"w{s}": (ranks[s],) for s in range(last + 1)} | ({"tied": (ranks[0],)} if last else {})
    names = {n for work in works.values() for f in work.__slots__ for n in getattr(work, f)}
    types = {n: TensorType((1 + zlib.crc32(n.encode()) % 5, 2), torch.float32) for n in sorted(names)}
    return Flow(ranks, microbatches, works, types, owners)


def with_host(flow: Flow) -> Flow:
    """The flow in which what each stage saves waits in the host's memory, and comes back for each that reads it."""
    works, types = dict(flow.works), dict(flow.types)
    stores, loads = dict[tuple[int, str], dict[str, str]](), dict[tuple[int, str], dict[str, str]]()
    for (s, kind), work in flow.works.items():
        saved, host = f"saved{s}", f"saved{s}_host{s}"
        if saved in work.writes:
            stores[s, kind] = {host: saved}
        if saved in work.reads:
            back = f"saved{s}_back{s}{kind}"
            loads[s, kind] = {back: host}
            works[s, kind] = replace(work, reads=tuple(back if name == saved else name for name in work.reads))
            types |= {host: types[saved], back: types[saved]}
    return replace(flow, works=works, types=types, stores=stores, loads=loads)


def number(*parts: object) -> int:
    return zlib.crc32(repr(parts).encode()) + 1


def result(action: Action, name: str, reads: Sequence[int]) -> int:
    """What an action writes: of all it reads, with factors that nothing else has, so that nothing can be exchanged."""
    total = number(action.stage, action.kind, action.microbatch, name)
    for place, value in enumerate(reads):
        total += value * number(action.stage, action.kind, action.microbatch, name, place)
    return total % PRIME


class Wrong(Exception):
    """Lists that hang, read what is not there, leave something behind, or come to other numbers."""


def run_action(memory: dict[Key, int], work: Work, action: Action) -> None:
    try:
        reads = [memory[name, action.microbatch] for name in work.reads] + [
            memory[name, ONCE] for name in work.step_reads
        ]
    except KeyError as error:
        raise Wrong(f"{action} reads {error}") from error
    for name in work.writes:
        memory[name, action.microbatch] = result(action, name, reads)
    for name in work.step_writes:
        memory[name, ONCE] = result(action, name, reads)
    for name in work.sums:
        memory[name, ONCE] = (memory.get((name, ONCE), 0) + result(action, name, reads)) % PRIME


def at_home(flow: Flow) -> dict[Key, int]:
    return {(name, ONCE): number("owner", name) for name in flow.owners}


def is_step(flow: Flow, name: str) -> bool:
    return name in flow.owners or any(name in (*w.sums, *w.step_writes) for w in flow.works.values())


def on_one_device(flow: Flow, actions: Sequence[Action]) -> dict[str, int]:
    """The values of the step after all actions, one after another: what it makes must not depend on a schedule."""
    memory = at_home(flow)
    for action in actions:
        run_action(memory, flow.works[action.stage, action.kind], action)
    return {name: value for (name, k), value in memory.items() if k == ONCE}


def plain_order(flow: Flow, orders: Sequence[Sequence[Turn]] = ()) -> list[Action]:
    """Prologues, each micro-batch there and back, epilogues: what needs no schedule. orders: which of B or I and W a
    micro-batch has, where stages have all."""
    of_stages = {action for order in orders for action in actions_of(order)}
    ranks, ks = range(flow.size), range(flow.microbatches)
    order = [Action(r, "P") for r in ranks]
    for k in ks:
        order += [Action(s, "F", k) for s in range(flow.stages)]
        back = [Action(s, kind, k) for s in reversed(range(flow.stages)) for kind in "BIW"]
        order += [action for action in back if not of_stages or action in of_stages]
    order += [Action(r, "E") for r in ranks]
    return [a for a in order if (a.stage, a.kind) in flow.works]


def on_numbers(lists: Sequence[Sequence[Instruction]], flow: Flow) -> dict[str, int]:
    """Run lists of ranks with a memory of their own each, where every send and receive blocks; or `Wrong`.

    Written for sureness and not for speed: in each round the ranks try their next instructions. What is freed is
    forgotten, a buffer has a shape, and at the end only what ranks own is left. Returned: each value of the step as it
    was when it was freed, or is at the end.
    """
    memories = [{key: v for key, v in at_home(flow).items() if r in flow.owners[key[0]]} for r in range(len(lists))]
    at, found = [0] * len(lists), dict[str, int]()
    parts = {name: 0 for work in flow.works.values() for name in work.sums}
    needed = dict.fromkeys(parts, 0)
    for run in (run for each in lists for line in each for run in line.runs):
        for name in flow.works.get((run.action.stage, run.action.kind), Work()).sums:
            needed[name] += 1

    def key(name: str, line: Instruction) -> Key:
        return name, ONCE if is_step(flow, name) else line.action.microbatch

    def forget(rank: int, line: Instruction) -> None:
        for name in line.frees:
            if rank in flow.owners.get(name, ()) or key(name, line) not in memories[rank]:
                raise Wrong(f"rank {rank} frees {name}")
            value = memories[rank].pop(key(name, line))
            if key(name, line)[1] == ONCE:
                found.setdefault(name, value)
                if found[name] != value:
                    raise Wrong(f"two values of {name}")

    def complete(name: str) -> None:
        if name in parts and parts[name] != needed[name]:
            raise Wrong(f"{name} is used before it is whole")

    def step(rank: int) -> bool:
        line = lists[rank][at[rank]]
        if line.op == "RUN":
            there = set(memories[rank])
            for run in line.runs:
                work = flow.works.get((run.action.stage, run.action.kind))
                if work is None or flow.rank_of(run.action) != rank:
                    raise Wrong(f"rank {rank} has no {run.action}")
                if not there.issuperset(flow.reads_of(run.action)):
                    raise Wrong(f"{run.action} reads what is not there, or what the action beside it makes")
                for name in work.step_reads:
                    complete(name)
                run_action(memories[rank], work, run.action)
            for run in line.runs:
                for name in flow.works[run.action.stage, run.action.kind].sums:
                    parts[name] += 1
        elif line.is_copy:
            if flow.types_of(line.action, line.values) != line.types:
                raise Wrong(f"{line} has other buffers")
            for name in line.values:
                source = flow.copies(line).get(name)
                if source is None or (source, line.action.microbatch) not in memories[rank]:
                    raise Wrong(f"rank {rank} copies {source}")
                memories[rank][name, line.action.microbatch] = memories[rank][source, line.action.microbatch]
        elif line.op == "RECV" or not 0 <= line.peer < len(lists) or at[line.peer] == len(lists[line.peer]):
            return False  # a message is the act of its sender
        else:
            other = lists[line.peer][at[line.peer]]
            if other.op != "RECV" or other.peer != rank:
                return False
            actual = tuple(flow.types.get(name) for name in line.values)
            if line.types != actual or other.types != actual or len(other.values) != len(line.values):
                raise Wrong(f"{line} has other buffers than {other}")
            for name, arriving in zip(line.values, other.values, strict=True):
                complete(name)
                if key(name, line) not in memories[rank]:
                    raise Wrong(f"rank {rank} sends {name}")
                memories[line.peer][key(arriving, other)] = memories[rank][key(name, line)]
            forget(line.peer, other)
            at[line.peer] += 1
        for one in line.runs or (line,):
            forget(rank, one)
        at[rank] += 1
        return True

    going = True
    while going:
        going = any(step(rank) for rank in range(len(lists)) if at[rank] < len(lists[rank]))
    if any(place < len(lines) for place, lines in zip(at, lists, strict=True)):
        raise Wrong("hangs")
    for rank, memory in enumerate(memories):
        if left := [name for name, _ in memory if rank not in flow.owners.get(name, ())]:
            raise Wrong(f"rank {rank} keeps {left}")
        found |= {name: value for (name, _), value in memory.items()}
    return found


def resized(line: Instruction) -> Instruction:
    """With another shape of its first value."""
    return replace(line, types=(TensorType((7, *line.types[0].shape), line.types[0].dtype), *line.types[1:]))
