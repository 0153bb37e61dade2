"""The parameters and buffers of a parallel module: their layouts and owner stages, and the way in and out of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import chain
from operator import is_
from pathlib import Path
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.capture.capture import state_of
from autopar.capture.inputs import tables
from autopar.compiler.lowered import Lowered
from autopar.errors import AutoparError
from autopar.ir.layout import Layout, replicated
from autopar.ir.program import Input
from autopar.parallel.agree.agreement import Agreement, lost_peers
from autopar.parallel.tensors.parameter import ParameterTensor
from autopar.parallel.weights.distribute import SMALL, Distributor
from autopar.parallel.weights.identity import lay_out, make_parallel, tell_held, tell_moved
from autopar.parallel.weights.materialize import materialize
from autopar.runtime.ranks.process_groups import default_group
from autopar.runtime.ranks.wire import on_wire
from autopar.torch_compat import local_of

BUNDLE = 1 << 22  # bytes that are sent at once
_ADVICE = (
    "programs and optimizers hold those that were distributed. Change the plain module before autopar.parallelize; "
    "new values go into the old parameters by load_state_dict, or under torch.no_grad() by copy_."
)


class ParameterStore:
    """What this rank holds of a module. Until the first compilation decides layouts parameters are split over all axes,
    and small ones whole."""

    def __init__(self, model: nn.Module, distributor: Distributor, device: torch.device) -> None:
        self.model, self.distributor, self.device = model, distributor, device
        self.layouts: dict[str, Layout] = {}  # by first name
        self.searched: Mapping[str, Layout] = {}  # the same without what ZeRO splits
        self.owners: dict[str, int | None] = {}  # the stage where a parameter lies; None: on every one
        self.is_placed = False  # by a program
        self.told: Set[str] = set()  # parameters of which others hold the memory, as the user knows
        self.stages: Mapping[str, int] | None = None  # that keep the parameters, once there are some

    # -- making it ----------------------------------------------------------------------------------------------

    def distribute(self, agreement: Agreement, seed: int, weights: str | Path | None = None) -> None:
        """Parameters become DTensors with rank 0's values; buffers lie whole on every rank. All do so in place. Every
        rank must call this, with models of the same state. No more than one parameter is whole on the device at a time,
        but for small ones.

        weights: the files of what is on the meta device; None for `reset_parameters`.
        """
        self.told = tell_held(self.model) if default_group().rank() == 0 else set()
        home = torch.device("cpu") if self.distributor.on_host else self.device
        materialize(self.model, self.distributor, home, agreement, seed, weights)
        entries = self.entries()[::-1]
        small = self._sent_together(entries)
        while entries:  # taken off the list, so that nobody keeps a whole value whose part is taken
            entry, tensor = entries.pop()
            made = self._distributed(entry, tensor, small.pop(entry.name, None))
            if isinstance(made, ParameterTensor):
                self.layouts[entry.name], self.owners[entry.name] = made.place.layout, None
            make_parallel(entry.name, tensor, made)
        self.structure = Structure(self.model)

    def _sent_together(self, entries: Sequence[tuple[Input, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Send rank 0's values of what lies whole in any case, in few messages: a deep model has a thousand, which cost
        a rank more time one by one than all else that it does here."""
        if default_group().size() == 1:
            return {}
        small = {entry.name: tensor for entry, tensor in entries if tensor.numel() < SMALL}
        values = {
            name: self._own(tensor) for name, tensor in small.items() if type(tensor.detach()) is torch.Tensor
        }  # a tensor of a class of its own need not be plain bytes
        for some in in_bundles(list(values.values()), BUNDLE):
            with lost_peers(f"sending {len(some)} parameters and buffers from rank 0"):
                pieces = [value.reshape(-1).view(torch.uint8) for value in some]
                sent = torch.cat(pieces)
                dist.broadcast(sent, src=0)
            for piece, coming in zip(pieces, sent.split([len(piece) for piece in pieces]), strict=True):
                piece.copy_(coming)
        return values

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """The memory of a whole value on this rank, to send or to receive."""
        is_missing = tensor.device.type == "meta"  # and rank 0 has it
        value = torch.empty_like(tensor, device=self.device) if is_missing else tensor.detach().to(self.device)
        return value.contiguous() if default_group().size() > 1 else value

    def _distributed(self, entry: Input, tensor: torch.Tensor, value: torch.Tensor | None) -> torch.Tensor:
        """What this rank holds of a parameter or buffer. value: rank 0's, if it was sent before."""
        with lost_peers(f"sending {entry.kind} '{entry.name}' from rank 0"):
            if isinstance(tensor, ParameterTensor):
                part = self.distributor.made_alike(local_of(tensor), tensor.place.layout, tensor.shape)
                return nn.Parameter(part, requires_grad=tensor.requires_grad)
            if value is None:
                value = self._own(tensor)
                if default_group().size() > 1:
                    dist.broadcast(on_wire(value), src=0)
        if entry.kind != "parameter":
            return value
        value.requires_grad_(tensor.requires_grad)
        return self.distributor.parameter(value, self.distributor.waiting(value.shape))

    def adopt(self, compiled: Lowered, prefix: str = "") -> None:
        """Take the layouts and owner stages that the first program wants, which knows the parameters with a prefix.
        Every rank must call this."""
        owners, searched, layouts = compiled.owners, compiled.searched, compiled.layouts
        inner = {name: f"{prefix}{name}" for name in self.layouts}
        self.relayout(
            {name: layouts[known] for name, known in inner.items()},
            {name: owners[known] for name, known in inner.items()},
        )
        self.searched = {name: searched[known] for name, known in inner.items()}
        self.is_placed = True
        self.stages = compiled.pipeline.owners if compiled.pipeline is not None else None

    def relayout(self, layouts: Mapping[str, Layout], owners: Mapping[str, int | None]) -> None:
        """Move parameters to other layouts and stages, in place. Every rank must call this."""
        wanted = {name: (layout, owners.get(name)) for name, layout in layouts.items()}
        moved = {name: to for name, to in wanted.items() if to != (self.layouts[name], self.owners[name])}
        parameters = {name: tables.parameter(self.model, name) for name in moved}
        if default_group().rank() == 0:
            tell_moved(parameters, self.told)
        for name, (layout, owner) in moved.items():
            self.distributor.relayout(name, parameters[name], self.layouts[name], layout, self.owners[name], owner)
            self.layouts[name], self.owners[name] = layout, owner

    def move(self, other: Distributor) -> None:
        """Lie over another mesh of the same ranks, as before the first program; the next one decides layouts. Who
        holds parameters keeps holding them. Every rank must call this, in a call that announced itself."""
        if default_group().rank() == 0:
            tell_moved(self.parameters(), self.told)
        for name, parameter in self.parameters().items():
            layout, owner = self.layouts[name], self.owners[name]
            value = self.distributor.gather_everywhere(local_of(parameter), layout, parameter.shape, owner)
            self.layouts[name], self.owners[name] = other.waiting(parameter.shape), None
            lay_out(name, parameter, other.parameter(value, self.layouts[name]))
        self.distributor, self.searched, self.is_placed, self.stages = other, {}, False, None
        self.told = set(self.layouts)

    # -- what it holds ------------------------------------------------------------------------------------------

    def entries(self) -> list[tuple[Input, torch.Tensor]]:
        """Parameters and buffers, tied ones once with all their names."""
        return _entries(self.model)

    def is_ours(self, parameter: Any) -> TypeGuard[ParameterTensor]:
        """True for a parameter of the model."""
        return isinstance(parameter, ParameterTensor) and parameter.place.world is self.distributor.world

    def parameters(self) -> dict[str, nn.Parameter]:
        """By first name."""
        return dict(tables.named_parameters(self.model))

    def given(self, name: str, layout: Layout) -> torch.Tensor:
        """What a program takes of a parameter on this rank."""
        parameter = tables.parameter(self.model, name)
        if self.structure.meanwhile:
            raise AutoparError(self.structure.meanwhile)
        assert isinstance(parameter, DTensor)
        return self.distributor.given(parameter, layout)

    def buffer(self, name: str) -> torch.Tensor:
        return tables.buffer(self.model, name)

    def set_buffer(self, name: str, value: torch.Tensor) -> None:
        """Write a buffer's new value into it."""
        with torch.no_grad():
            tables.buffer(self.model, name).copy_(value)

    def bind_buffer(self, name: str, value: torch.Tensor) -> None:
        """Put another tensor in a buffer's place."""
        tables.bind_buffer(self.model, name, value)

    def set_parameter(self, name: str, value: torch.Tensor) -> None:
        """Write what a program gives for a parameter into this rank's part of it."""
        part = self.taken(name, value)
        assert part is not None
        with torch.no_grad():
            local_of(tables.parameter(self.model, name)).copy_(part)

    def taken(self, name: str, value: torch.Tensor | None) -> torch.Tensor | None:
        """This rank's part of a gradient or a new value, from what a program gives for the parameter; None on other
        stages."""
        if value is None:
            return None
        return self.distributor.taken(value, self.layouts[name], tables.parameter(self.model, name).shape)

    # -- out of it and into it ----------------------------------------------------------------------------------

    def whole_state(self) -> dict[str, torch.Tensor]:
        """Whole CPU tensors under the original names on rank 0; empty on the other ranks. Every rank must call it."""
        found = {}
        for entry, tensor in self.entries():
            value = self._gather(entry.name, tensor)
            if value is not None:
                found.update(dict.fromkeys(entry.names, value))
        return {name: found[name] for name in nn.Module.state_dict(self.model, keep_vars=True) if name in found}

    def whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The whole value of a parameter or buffer on every rank, the very memory where each has all of it. Every rank
        must call it, in a call that announced itself."""
        if not isinstance(tensor, DTensor):
            return tensor
        layout, owner = self.layouts[name], self.owners[name]
        return self.distributor.gather_everywhere(local_of(tensor), layout, tensor.shape, owner)

    def with_gradients(self) -> list[str]:
        """The parameters that have gradients, by first name."""
        return [name for name, parameter in self.parameters().items() if isinstance(parameter.grad, DTensor)]

    def whole_gradients(self) -> dict[str, torch.Tensor]:
        """Whole CPU gradients by parameter name on rank 0; empty on the others. Every rank must call it."""
        whole_gradients = {}
        for name in self.with_gradients():
            gradient = tables.parameter(self.model, name).grad
            assert gradient is not None
            value = self._gather(name, gradient)
            if value is not None:
                whole_gradients[name] = value
        return whole_gradients

    def refuse_assign(self, _module: Any, state: dict[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
        """Keep the parameters that programs and optimizers hold: a hook of load_state_dict."""
        if metadata.get("assign_to_params_buffers"):
            raise AutoparError(
                "load_state_dict(assign=True) would replace the parameters of a parallel model, which programs and "
                "optimizers hold. Leave assign out: values are copied into this rank's parts."
            )

    def _gather(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        part = local_of(tensor) if isinstance(tensor, DTensor) else tensor
        layout, owner = self.layouts.get(name), self.owners.get(name)
        if layout is None and isinstance(tensor, ParameterTensor):  # under another name since, as of `prune.remove`
            layout, owner = tensor.place.layout, tensor.place.owner
        return self.distributor.gather(part, layout or replicated(tensor.ndim), tensor.shape, owner)


def describe_state(model: nn.Module) -> list[str]:
    """The parameters and buffers of a model as ranks compare them."""
    return [_describe(entry, tensor) for entry, tensor in _entries(model)]


def in_bundles(values: Sequence[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    """Tensors in their order, as many at once as have so many bytes together, or one that has more."""
    bundle: list[torch.Tensor] = []
    bytes_ = 0
    for value in values:
        bytes_ += value.nbytes
        if bundle and bytes_ > most:
            yield bundle
            bundle, bytes_ = [], value.nbytes
        bundle.append(value)
    if bundle:
        yield bundle


def _entries(model: nn.Module) -> list[tuple[Input, torch.Tensor]]:
    return [(entry, tensor) for entry, tensor in state_of(model).entries if entry.kind != "constant"]


def _describe(entry: Input, tensor: torch.Tensor) -> str:
    """A parameter or buffer as ranks compare it."""
    names = " = ".join(entry.names)
    frozen = " frozen" if entry.kind == "parameter" and not tensor.requires_grad else ""
    return f"{entry.kind} {names} {list(tensor.shape)} {tensor.dtype}{frozen}"


# -- which parameters there are ---------------------------------------------------------------------------------------


class Structure:
    """Which submodules and parameters there are, by module.

    modules, parameters: each once, the latter by first name. They stay the same as long as there is no `fault`.
    meanwhile: why others stand in their places for a while; see `gathered.py`.
    """

    meanwhile: str = ""

    def __init__(self, model: nn.Module) -> None:
        self.modules = tuple(tables.modules(model))
        self.parameters = dict(tables.named_parameters(model))
        self._kept: list[tuple[str, dict[str, Any], tuple[tuple[str, Any], ...]]] = [
            (path, table, tuple(table.items()))
            for path, module in tables.named_modules(model, remove_duplicate=False)
            for table in (module._modules, module._parameters)
        ]
        self._tables = [table for _, table, _ in self._kept]
        self._sizes, self._names = list(map(len, self._tables)), list(chain.from_iterable(self._tables))
        self._values = tuple(self._all())

    def _all(self) -> chain[object]:
        return chain.from_iterable(map(dict.values, self._tables))

    def fault(self) -> str:
        """What was added, removed or put in another's place; empty if nothing was."""
        if self.meanwhile:
            return self.meanwhile
        is_alike = list(map(len, self._tables)) == self._sizes and all(map(is_, self._all(), self._values))
        if is_alike and list(chain.from_iterable(self._tables)) == self._names:
            return ""
        for path, table, items in self._kept:
            before = dict(items)
            for name in {**before, **table}:
                if before.get(name) is not table.get(name):
                    what = "added" if name not in before else "removed" if name not in table else "replaced"
                    whole = f"{path}.{name}" if path else name
                    return f"'{whole}' was {what} after autopar.parallelize, but {_ADVICE}"
        return ""
