"""check_schedule: a proof that the lists of all ranks run to their end and use every value rightly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autopar.errors import ScheduleError
from autopar.ir.program import TensorType
from autopar.ir.schedule import ONCE, ONCE_KINDS, OUT, Action, Flow, Instruction, Work
from autopar.ir.text.text import print_type
from autopar.passes.schedules.flows import check_flow

_SHOWN = 5  # faults named in one message
_FREED, _THERE, _OWNED = 0, 1, 2  # the states of a value on a rank; one that has never been there has none


def check_schedule(lists: Sequence[Sequence[Instruction]], flow: Flow) -> None:
    """Run the lists without numbers and refuse what could go wrong with them; nothing comes back.

    A SEND and its RECV happen together: each blocks its rank until the other rank is there. This is stricter than any
    way to run the lists. Who meets whom does not depend on which rank is faster, so one run is a proof for all:

    - no rank waits for ever, and each message is received as it was sent: values, shapes, dtypes;
    - each action of the flow is run once, by the rank of its stage, when all it reads is there;
    - a value comes to a rank once and is freed once, after its last use; a sum is there when all its parts are;
    - what goes into the host's memory is there when its copy starts, and what comes back has gone out before;
    - where micro-batches are slices of sequences, a stage runs them in order, and back in reverse.
    """
    check_flow(flow)
    run = _Run(lists, flow)
    if run.advance_all():
        run.check_end()
    if run.faults:
        more = f"; and {len(run.faults) - _SHOWN} more" if len(run.faults) > _SHOWN else ""
        raise ScheduleError(f"these lists of instructions are wrong: {'; '.join(run.faults[:_SHOWN])}{more}.")


class _Run:
    """`values[rank][k]`: the values of micro-batch k on a rank and their states; the last, of the step (k = ONCE)."""

    def __init__(self, lists: Sequence[Sequence[Instruction]], flow: Flow) -> None:
        self.lists, self.flow = lists, flow
        self.faults: list[str] = []
        self.faulty: set[tuple[int, int]] = set()  # the ranks and instructions of the faults
        self.step = flow.step_values()
        self.at = [0] * len(lists)
        self.values: list[list[dict[str, int]]] = [[{} for _ in range(flow.microbatches + 1)] for _ in lists]
        for name, owners in flow.owners.items():
            for rank in owners:
                if rank < len(lists):
                    self.values[rank][ONCE][name] = _OWNED
        # by stage and kind: the rank, the work, and for each micro-batch whether it was done
        self.todo: dict[tuple[int, str], tuple[int, Work, bytearray]] = {
            (stage, kind): (
                flow.rank_of(Action(stage, kind)),
                work,
                bytearray(1 if kind in ONCE_KINDS else flow.microbatches),
            )
            for (stage, kind), work in flow.works.items()
        }
        self.split = {stage for stage, kind in flow.works if kind == "B"} & {
            stage for stage, kind in flow.works if kind in "IW"
        }  # stages that may run a micro-batch either way
        self.parts: Counter[str] = Counter()  # of each sum, that are not added yet
        for stage, kind in flow.works:
            if kind not in "IW" or stage not in self.split:
                self.parts.update(dict.fromkeys(flow.works[stage, kind].sums, flow.microbatches))
        self.known_types: dict[tuple[int, tuple[str, ...]], tuple[TensorType, ...]] = {}

    def fault(self, rank: int, text: str) -> None:
        spot = (rank, self.at[rank])
        if spot not in self.faulty:  # the first fault of an instruction makes the others
            self.faulty.add(spot)
            self.faults.append(f"rank {rank}, instruction {spot[1]} ({self.lists[rank][spot[1]]}): {text}")

    def advance_all(self) -> bool:
        """Let each rank go on until it waits for one that has not come to the same message; not past a wrong one."""
        lists, at = self.lists, self.at
        ready = list(range(len(lists)))
        while ready:
            rank = ready.pop()
            lines = lists[rank]
            while at[rank] < len(lines):
                line = lines[at[rank]]
                if line.op == "RUN":
                    self.run(rank, line)
                elif line.is_copy:
                    self.copy(rank, line)
                else:
                    peer = line.peer
                    if not self.meets(rank, line):
                        break
                    other = lists[peer][at[peer]]
                    halves = (rank, line, peer, other) if line.op == "SEND" else (peer, other, rank, line)
                    if not self.transfer(*halves):
                        return False
                    at[peer] += 1
                    ready.append(peer)
                at[rank] += 1
        return True

    def meets(self, rank: int, line: Instruction) -> bool:
        """Whether the peer stands at the other half of a message, right or wrong."""
        peer = line.peer
        if not 0 <= peer < len(self.lists) or peer == rank or self.at[peer] == len(self.lists[peer]):
            return False
        other = self.lists[peer][self.at[peer]]
        return other.peer == rank and other.op == ("RECV" if line.op == "SEND" else "SEND")

    def run(self, rank: int, line: Instruction) -> None:
        """Run a turn. What is read must be there before it begins: an action of a pair has nothing of the other."""
        known = [run for run in line.runs if self.begin(rank, run.action)]
        for run in known:
            self.end(rank, run)
        for run in known:  # when both have ended
            if run.frees:
                self.free(rank, run, self.values[rank][run.action.microbatch], self.values[rank][ONCE])

    def begin(self, rank: int, action: Action) -> bool:
        """Whether there is such an action; with what it reads."""
        found = self.todo.get((action.stage, action.kind))
        if found is None:
            self.fault(rank, "the flow has no such action")
            return False
        owner, work, done = found
        k = action.microbatch
        if k != ONCE if action.kind in ONCE_KINDS else not 0 <= k < len(done):
            self.fault(rank, "the flow has no such micro-batch")
            return False
        if owner != rank:
            self.fault(rank, f"this is an action of rank {owner}")
        if done[k]:
            self.fault(rank, "this action is run twice")
        # Slices of a sequence read what the slice before them left on this stage.
        before = self.flow.carrier(action)
        if before is not None and not done[before.microbatch]:
            carried = ", ".join(f"%{name}" for name in work.carries)
            self.fault(rank, f"it takes over {carried} of the slice that {before} computes, which runs later")
        # Values of the micro-batch, and those that stand once a step.
        here, step = self.values[rank][k], self.values[rank][ONCE]
        for name in work.reads:
            if not here.get(name):
                self.fault(rank, f"it reads %{name}, which {self.state(here, name)}")
        for name in work.step_reads:
            if not step.get(name):
                self.fault(rank, f"it reads %{name}, which {self.state(step, name)}")
        return True

    def end(self, rank: int, line: Instruction) -> None:
        """What an action makes is there."""
        action = line.action
        _, work, done = self.todo[action.stage, action.kind]
        here, step = self.values[rank][action.microbatch], self.values[rank][ONCE]
        if done[action.microbatch]:  # beside itself
            self.fault(rank, "this action is run twice")
        done[action.microbatch] = 1
        for name in work.writes:
            self.put(rank, here, name)
        for name in work.step_writes:
            self.put(rank, step, name)
        # A sum is there when its last micro-batch was added.
        for name in work.sums:
            self.parts[name] -= 1
            if not self.parts[name]:
                self.put(rank, step, name)

    def copy(self, rank: int, line: Instruction) -> None:
        """Copy values into the host's memory, or back: two values of this rank, each with its own end."""
        action, known = line.action, self.flow.copies(line)
        k = action.microbatch
        if not 0 <= k < self.flow.microbatches:
            self.fault(rank, "the flow has no such micro-batch")
            return
        if (action.stage, action.kind) not in self.flow.works or self.flow.rank_of(action) != rank:
            self.fault(rank, "this is no action of the rank")
            return
        if unknown := [name for name in line.values if name not in known]:
            way = "goes out behind" if line.op == OUT else "comes back for"
            self.fault(rank, f"the flow knows no %{unknown[0]} that {way} {action}")
            return
        if line.types != self.flow.types_of(action, line.values):
            self.fault(rank, f"the flow knows other types than {_texts(line)}")
        here = self.values[rank][k]
        for name in line.values:
            if not here.get(known[name]):
                self.fault(rank, f"it copies %{known[name]}, which {self.state(here, known[name])}")
            self.put(rank, here, name)
        self.free(rank, line, here, self.values[rank][ONCE])

    def transfer(self, source: int, send: Instruction, target: int, recv: Instruction) -> bool:
        """Whether it was one message on both ranks, so that what follows means anything."""
        if send.action != recv.action or send.values != recv.values:
            where = f"instruction {self.at[target]} of rank {target} ({recv})"
            self.fault(source, f"this meets {where}, which is another message")
            return False
        if send.types != recv.types:
            self.fault(source, f"rank {target} receives {_texts(recv)} here, but what is sent is {_texts(send)}")
        k = send.action.microbatch
        if not ONCE <= k < self.flow.microbatches:
            self.fault(source, "the flow has no such micro-batch")
            return False
        known = (self.flow.length_of(send.action), send.values)
        types = self.known_types.get(known)
        if types is None:
            names = (name for name in send.values if name in self.flow.types)
            types = self.known_types[known] = self.flow.types_of(send.action, names)
        if send.types != types:
            self.fault(source, f"the flow knows other types than {_texts(send)}")
        here, step = self.values[source][k], self.values[source][ONCE]
        for name in send.values:
            if not (here.get(name) or step.get(name)):
                self.fault(source, f"it sends %{name}, which {self.state(step if name in self.step else here, name)}")
        if send.frees:
            self.free(source, send, here, step)
        here, step = self.values[target][k], self.values[target][ONCE]
        for name in recv.values:
            self.put(target, step if name in self.step else here, name)
        if recv.frees:
            self.free(target, recv, here, step)
        return True

    def put(self, rank: int, values: dict[str, int], name: str) -> None:
        state = values.get(name)
        if state is None:
            values[name] = _THERE
        elif state != _OWNED or self.lists[rank][self.at[rank]].op == "RECV":  # the epilogue may renew what it owns
            self.fault(rank, f"%{name} comes to this rank twice")

    def free(self, rank: int, line: Instruction, here: dict[str, int], step: dict[str, int]) -> None:
        for name in line.frees:
            values = step if name in self.step else here
            if values.get(name) == _THERE:
                values[name] = _FREED
            elif values.get(name) == _OWNED:
                self.fault(rank, f"it frees %{name}, whose owner is this rank")
            else:
                self.fault(rank, f"it frees %{name}, which {self.state(values, name)}")

    def state(self, values: dict[str, int], name: str) -> str:
        """Why a value is not there."""
        if name in values:
            return "is freed already"
        return f"lacks {self.parts[name]} of its parts" if self.parts.get(name) else "is not there"

    def check_end(self) -> None:
        stuck = [rank for rank, lines in enumerate(self.lists) if self.at[rank] < len(lines)]
        for rank in stuck:
            peer = self.lists[rank][self.at[rank]].peer
            if not 0 <= peer < len(self.lists):
                state = "does not exist"
            elif self.at[peer] == len(self.lists[peer]):
                state = "has come to its end"
            else:
                state = f"waits at instruction {self.at[peer]} ({self.lists[peer][self.at[peer]]})"
            self.fault(rank, f"it waits for rank {peer}, which {state}")
        if not stuck:
            self.faults[:0] = self.not_run()
        if not self.faults:  # otherwise what is left is a consequence
            self.faults = self.left_over()

    def not_run(self) -> list[str]:
        faults = []
        for (stage, kind), (owner, _, done) in self.todo.items():
            for k, is_done in enumerate(done):
                if stage in self.split and kind in "BIW":
                    others = "IW" if kind == "B" else "B"
                    is_due = not any(self.todo[stage, other][2][k] for other in others if (stage, other) in self.todo)
                else:
                    is_due = True
                action = Action(stage, kind, ONCE if kind in ONCE_KINDS else k)
                if is_due and not is_done:
                    faults.append(f"rank {owner}: {action} is not run")
                elif is_done and not is_due:
                    faults.append(f"rank {owner}: {action} is run, and the same gradient another way")
        return faults

    def left_over(self) -> list[str]:
        faults = []
        for rank, all_values in enumerate(self.values):
            for k, values in enumerate(all_values):
                left = [name for name, state in values.items() if state == _THERE]
                of = f" of micro-batch {k}" if k < self.flow.microbatches else ""
                faults += [f"rank {rank}: %{name}{of} is never freed" for name in left]
        return faults


def _texts(line: Instruction) -> str:
    return ", ".join(f"%{name}: {print_type(type_)}" for name, type_ in zip(line.values, line.types, strict=False))
