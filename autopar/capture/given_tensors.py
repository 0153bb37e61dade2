"""Give a run of the model its tensors: parameters, buffers, constants and the batch, each with what is known of it."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopar.capture.data.recorded_calls import CHANGING, RecordedCalls, behind_of
from autopar.capture.inputs.in_parts import InParts
from autopar.capture.inputs.leaves import attributes_of
from autopar.capture.inputs.outside import Outside
from autopar.ir.program import IN_PARTS, PARTNER, Input
from autopar.torch_compat import as_parameter

Tensor = torch.Tensor


@dataclass(slots=True)
class GivenTensors:
    """The tensors of a run. values: all of them, in order. swapped, constants: by path in the step. trainable: those
    that get a gradient, with their names. untrained: names of plain attributes that require one, by id; outside: where
    those in parts were met. parameters: by the id of what each stands for, with tensors in parts. leaves: of the batch.
    extra: what is behind it: the loss scale, the seed."""

    values: list[Tensor]
    leaves: list[Any]
    swapped: dict[str, Tensor] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    trainable: list[tuple[str, Tensor]] = field(default_factory=list)
    untrained: dict[int, str] = field(default_factory=dict)
    outside: dict[int, Outside] = field(default_factory=dict)
    parameters: dict[int, Tensor] = field(default_factory=dict)
    extra: list[Tensor] = field(default_factory=list)

    def asked(self) -> list[tuple[str, Tensor]]:
        """The leaves that get a gradient, with their numbers: those too that a model makes so (requires_grad_)."""
        leaves = ((str(i), leaf) for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor))
        return [(number, leaf) for number, leaf in leaves if leaf.requires_grad and leaf.is_leaf]


def give_tensors(
    entries: Sequence[tuple[Input, Tensor]], leaves: Sequence[Any], inputs: Sequence[Tensor], calls: RecordedCalls,
    in_parts: InParts, written: Container[str] = (),
) -> GivenTensors:  # fmt: skip
    """The tensors of a run whose calls are recorded, for the model's own tensors and the leaves of the batch: with
    gradients off they say as well as with gradients on whether they require one. written: parameters that the step
    writes."""
    given, behind = GivenTensors(list(inputs), list(leaves)), list[int]()
    for position, (entry, tensor) in enumerate(entries):
        value, is_in_parts = inputs[position], entry.name.startswith(IN_PARTS)
        if entry.kind in ("parameter", "constant") and tensor.requires_grad:
            value = value.detach().requires_grad_()
            if entry.kind == "parameter":
                given.trainable.append((entry.name, value))
            elif is_in_parts:
                given.untrained[id(value)], given.outside[id(value)] = "", in_parts.outside(tensor)
            else:
                given.untrained[id(value)] = entry.name
        if entry.kind == "parameter":  # a loss that takes what is a parameter would leave it out in silence
            as_parameter(value)
        is_written = entry.kind == "parameter" and entry.name in written
        behind.append(CHANGING if is_written else behind_of(position, entry, tensor))
        if not calls.keep(behind[-1], value, tensor, position):
            calls.values.given(value, entry.kind, tensor)
        for name in () if is_in_parts else entry.names:
            path = name if name.startswith(PARTNER) else f"model.{name}"
            (given.constants if entry.kind == "constant" else given.swapped)[path] = value
        given.values[position] = value
        if entry.kind == "parameter" or is_in_parts:
            given.parameters[id(tensor)] = value
    position = len(entries)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            # Of a form of its own, which a run may change (`x.unsqueeze_(0)`).
            value = given.values[position] = inputs[position].detach()
            if leaf.requires_grad:
                value.requires_grad_()
            if type(leaf) is nn.Parameter:
                as_parameter(value)
            vars(value).update(attributes_of(leaf))
            given.leaves[i] = value
            calls.values.given(value, "batch", leaf)
            position += 1
    given.extra = list(inputs[position:])
    for extra in given.extra:
        calls.values.given(extra, "seed")
    calls.given(given.values, [*behind, *[CHANGING] * (len(given.values) - len(behind))])
    return given
