"""What a step leaves in the model: the new values of buffers, and of parameters that the step itself writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.capture.data.recorded_calls import RecordedCalls, behind_of
from autopar.capture.given_tensors import GivenTensors
from autopar.capture.inputs.partners import Partners
from autopar.capture.trace.shown_memory import Shown, shown_memory
from autopar.capture.trace.writes import written_inputs
from autopar.ir.program import OLD_BUFFER, Input, Output

Tensor = torch.Tensor


class ChangedState:
    """What a run has changed in a model and its partners.

    written: the first names of parameters that the step writes (a momentum encoder, a weight that is kept short), and
    of buffers that it writes where torch does not count it (`buffer.data.mul_(0.9)`): as a trace before has shown.
    buffers: as the last trace left them. rebound: the names of those that a run bound to another tensor
    (`self.mean = 0.9 * self.mean + x`), each with a name whose tensor that is: its own, or another buffer's. leaves: of
    the batch that it writes.
    """

    def __init__(self, partners: Partners) -> None:
        self.written, self.leaves = frozenset[str](), frozenset[int]()
        self.buffers: list[tuple[str, Tensor]] = []
        self.rebound: dict[str, str] = {}
        self._partners = partners
        self.copied: list[str] = []  # notes on what is returned
        self._given: list[tuple[Input, Tensor, Tensor, int]] = []  # what it stands for, and what torch counted at first
        self._leaves: Sequence[Any] = ()

    def begin(self, entries: Sequence[tuple[Input, Tensor]], given: GivenTensors) -> None:
        """A run begins, with these tensors for the model's own."""
        self._leaves = given.leaves
        pairs = zip(entries, given.values, strict=False)
        self._given = [(entry, tensor, value, value._version) for (entry, tensor), value in pairs]

    def finds_writes(self, graph: fx.Graph, inputs: Sequence[Input]) -> bool:
        """True if a trace writes what was not known to be written: it is to be begun again."""
        counted = {entry.name: entry.kind for entry, _, value, before in self._given if value._version != before}
        entries = written_inputs(graph, inputs)
        self.leaves = frozenset(int(entry.name) for entry in entries if entry.kind == "batch")
        kinds = {entry.name: entry.kind for entry in entries}
        kinds |= {name: kind for name, kind in counted.items() if kind == "parameter"}  # of another form, in its memory
        found = {n for n, kind in kinds.items() if kind == "parameter" or (kind == "buffer" and n not in counted)}
        is_new, self.written = not found <= self.written, self.written | found
        return is_new

    def tensors(self) -> list[Tensor]:
        """All that a step may leave, as it is now."""
        return [*(tensor for _, tensor in self._partners.all_buffers()), *(value for _, value in self._weights())]

    def shown(self, values: Mapping[int, Tensor]) -> dict[int, Shown]:
        """What returned tensors show of the model's own, of the batch, and of each other: by the numbers of their
        leaves. A buffer that the run bound anew is left out: who holds its tensor holds that of one step."""
        now = dict(self._partners.all_buffers())
        held = ((entry, value) for entry, _, value, _ in self._given)
        given = [
            (entry.kind, entry.name, value)
            for entry, value in held
            if entry.kind != "buffer" or now.get(entry.name) is value
        ]
        given += [("batch", str(i), leaf) for i, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        found, self.copied = shown_memory(values, given)
        return found

    def outputs(self, joined: Callable[[Tensor], Tensor], calls: RecordedCalls) -> list[tuple[Output, Tensor]]:
        """What leaves the program, and where it goes; the calls of the run are told. A buffer that the step writes and
        binds anew leaves twice, as who holds its old tensor reads that. joined: gives what is used in place of a
        tensor."""
        now = dict(self._partners.all_buffers())
        found = {name: joined(tensor) for name, tensor in now.items()}
        given = {name: value for entry, _, value, _ in self._given if entry.kind == "buffer" for name in entry.names}
        bound = [name for name, value in given.items() if name in now and now[name] is not value]
        holders = {
            id(now[name]): name for name in (*reversed(bound), *(n for n in given if n in now and n not in bound))
        }
        self.rebound |= {name: holders[id(now[name])] for name in bound}
        self.buffers, old = [], list[tuple[str, Tensor]]()
        for position, (entry, tensor, value, version) in enumerate(self._given):
            is_buffer = entry.kind == "buffer"
            names = [name for name in entry.names if name in found] if is_buffer else []
            is_replaced = any(found[name] is not value for name in names)
            self.buffers += [(name, found[name]) for name in (names if is_replaced else names[:1])]
            is_written = value._version != version or entry.name in self.written
            if is_written and names and all(found[name] is not value for name in names):
                old.append((names[0], joined(value)))
            if is_replaced or (is_buffer and is_written):
                calls.wrote(behind_of(position, entry, tensor), is_replaced)
        left = [(Output("buffer", name), tensor) for name, tensor in self.buffers]
        left += [(Output(OLD_BUFFER, name), tensor) for name, tensor in old]
        return left + [(Output("weight", name), joined(value)) for name, value in self._weights()]

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for entry, _, value, _ in self._given:
            if entry.kind == "parameter" and entry.name in self.written:
                yield entry.name, value
