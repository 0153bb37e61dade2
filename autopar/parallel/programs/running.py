"""Bind a program to what this rank holds, once: a step is then a few passes over lists.

A model has hundreds of parameters, and a step of a small one is over before Python has looked up each of them by its
path. The modules and parameters of a model stay (`Structure`), and so do layouts once there is a program; the memory of
a parameter need not, and is read at each step. What partners hold may be exchanged, and is looked up by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from autopar.capture import Captured
from autopar.capture.python.guards import Guards
from autopar.capture.step_kind import StepKind
from autopar.capture.trace.shown_memory import RESULT, Shown
from autopar.compiler.batch_rows import BatchRows
from autopar.compiler.lowered import Lowered
from autopar.ir.layout import padded_shape
from autopar.ir.ops.ops import op
from autopar.ir.program import INPUT_GRADIENT, OLD_BUFFER, PARTNER
from autopar.parallel.programs.constants import Constants
from autopar.parallel.programs.own_batch import AveragedOutputs
from autopar.parallel.weights.owners import Owners
from autopar.parallel.weights.store import ParameterStore
from autopar.runtime.executor.executor import Outputs
from autopar.runtime.executor.inputs import Slot, Source, StepInputs
from autopar.runtime.executor.outputs import own_memory, shared_outputs
from autopar.runtime.ranks.runner import Runner
from autopar.torch_compat import local_of

Tensor = torch.Tensor
_ROUTES = frozenset((op("route"), op("route_start")))
_GIVEN = {"batch", "scale", "seed"}  # inputs that each step has anew


@dataclass(frozen=True, slots=True)
class Built:
    """A program with what it was captured from, and what that read in Python. rows: of a batch that ranks have in
    parts."""

    captured: Captured
    compiled: Lowered
    guards: Guards
    constants: Constants
    rows: BatchRows | None
    kind: StepKind


class Running:
    """A program that is ready to run: where its inputs are read on this rank, and where its outputs go.

    `number`, `line`, `used`: what `Programs` knows it by: a count, what it read in Python beside the first of its
    signature, and when it ran last. `looked_at`: names of what programs leave in Python, on which it does not hang.
    `mask_rows`: how many rows each mask selected in the last step, where that matters.
    """

    number, line, used = 0, "", 0
    looked_at = frozenset[str]()
    mask_rows: torch.Tensor | None = None

    def __init__(
        self, built: Built, runner: Runner, slots: tuple[Slot, ...], store: ParameterStore, owners: Owners
    ) -> None:
        self.captured, self.compiled, self.rows, self.kind = built.captured, built.compiled, built.rows, built.kind
        self.guards, self.constants, self.runner = built.guards, built.constants, runner
        self._store, self.owners = store, owners
        self._keys = [slot.key for slot in slots]
        self._given = [(at, slot) for at, slot in enumerate(slots) if slot.entry.kind in _GIVEN]
        self._reads = [self._read(slot) for slot in slots]
        outputs = list(enumerate(built.compiled.program.outputs))
        self.together = AveragedOutputs.of(built.compiled.program.outputs)
        bounded = built.compiled.plan.options.expert_rows is not None
        self.is_bounded = bounded and any(node.target in _ROUTES for node in built.compiled.program.calls())
        self.losses = [at for at, out in outputs if out.kind == "loss"]
        self.reads = [at for at, out in outputs if out.kind == "guard"]
        self.asked = [(at, int(out.name)) for at, out in outputs if out.kind == INPUT_GRADIENT]
        leaves = built.captured.result_leaves
        returned = [(at, out.name) for at, out in outputs if out.kind in ("value", "aux")]
        self.places = {name: at for at, name in returned}
        known_views = [(at, leaf) for at, name in returned if isinstance(leaf := leaves[int(name)], Shown)]
        self.shown = sorted(known_views, key=lambda each: each[1].kind == RESULT)  # of what is there by then
        self._buffers = [(at, out.name) for at, out in outputs if out.kind == "buffer"]
        self._old_buffers = [(at, out.name) for at, out in outputs if out.kind == OLD_BUFFER]
        self._written = [(at, out.name) for at, out in outputs if out.kind == "weight"]
        trained = [(at, out.name) for at, out in outputs if out.kind == "gradient"]
        self._gradients = [at for at, _ in trained]
        known = store.structure.parameters
        self._trained = [known.get(name) for _, name in trained]
        names = self._names = [name for _, name in trained]
        self._foreign = [(at, name) for at, name in enumerate(names) if name.startswith(PARTNER)]
        self._padded = [(at, name) for at, name in enumerate(names) if self._is_padded(name)]
        self._shared: frozenset[int] | None = None  # outputs that are not memory of their own, once known

    def run(self, inputs: StepInputs) -> Outputs:
        """The outputs, each in memory of its own; None for those that other stages have."""
        outputs = self.runner.run(inputs)
        if self._shared is None:
            self._shared = shared_outputs(outputs, inputs.values())
        return own_memory(outputs, self._shared)

    def inputs(self, given: Source) -> StepInputs:
        """What a step begins with. given: the batch, the seed and the scale."""
        values = [read(held) for read, held in self._reads]
        for at, slot in self._given:
            values[at] = given(slot.entry, slot.layout, slot.coord)
        return dict(zip(self._keys, values, strict=True))

    def gradients(
        self, outputs: Outputs, unused: frozenset[str] = frozenset()
    ) -> tuple[Sequence[nn.Parameter], list[Tensor | None]]:
        """The parameters that a step trains, and this rank's part of each one's gradient; None on other stages. unused:
        those that the step leaves without."""
        values = [outputs[at] for at in self._gradients]
        for at, name in self._padded:
            values[at] = self.owners.taken(name, values[at])
        trained: list[Any] = self._trained
        if self._foreign:
            known = self.owners.parameters()
            trained = list(trained)
            for at, name in self._foreign:
                trained[at], values[at] = known[name], self.owners.taken(name, values[at])
        if unused:
            used = [at for at, name in enumerate(self._names) if name not in unused]
            return [trained[at] for at in used], [values[at] for at in used]
        return trained, values

    @property
    def trained(self) -> Sequence[str]:
        """The names of the parameters that a step trains, in the order of `gradients`."""
        return self._names

    @property
    def writes_weights(self) -> bool:
        """Whether a step writes parameters itself."""
        return bool(self._written)

    def write_state(self, outputs: Outputs) -> None:
        """Buffers take the values that the step gave them, and so do parameters that it wrote. Who holds a buffer that
        the step binds anew keeps what it was, or what the step wrote into it."""
        rebound = self.captured.rebound
        for at, name in self._old_buffers:
            self.owners.set_buffer(name, outputs[at])
        for at, name in self._buffers:
            if name not in rebound:
                self.owners.set_buffer(name, outputs[at])
            elif rebound[name] == name:
                with torch.inference_mode(False), torch.no_grad():
                    self.owners.bind_buffer(name, torch.empty_like(self.owners.buffer(name)).copy_(outputs[at]))
        for name, other in rebound.items():
            if other != name:
                self.owners.bind_buffer(name, self.owners.buffer(other))
        for at, name in self._written:
            if outputs[at] is not None:  # else another stage has it
                self.owners.set_parameter(name, outputs[at])

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Parameters of the model and its partners, by their names in the program."""
        return self._store.structure.parameters if len(self.owners.stores) == 1 else self.owners.parameters()

    def _read(self, slot: Slot) -> tuple[Callable[[Any], Any], Any]:
        """A function, and what of it is the input's value."""
        kind, name = slot.entry.kind, slot.entry.name
        if kind == "parameter":
            if name.startswith(PARTNER):
                return partial(self.owners.given, layout=slot.layout), name
            parameter = self._store.structure.parameters[name]
            if not self._is_padded(name):
                return local_of, parameter
            return partial(self._store.distributor.given, layout=slot.layout), parameter
        if kind == "buffer":
            return self.owners.buffer, name
        return (self.constants.__getitem__, name) if kind == "constant" else (_nothing, None)

    def _is_padded(self, name: str) -> bool:
        """Whether an own parameter's part in the program is longer than its part on some rank."""
        if name.startswith(PARTNER):
            return False
        shape, layout = tuple(self._store.structure.parameters[name].shape), self._store.layouts[name]
        return padded_shape(shape, layout, self._store.distributor.inner) != shape


def _nothing(_: object) -> None:
    return None
