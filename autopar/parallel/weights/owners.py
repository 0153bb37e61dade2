"""Find the owner of a program's tensor: the model itself, or another model in its loss (docs/several_models.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.capture import Captured
from autopar.capture.capture import state_of
from autopar.capture.inputs import tables
from autopar.capture.inputs.partners import Inlined, Partner
from autopar.compiler.lowered import Lowered
from autopar.errors import AutoparError, CaptureError, MeshError, PlanError
from autopar.ir.layout import Layout, replicated
from autopar.ir.mesh import PIPELINE, Mesh
from autopar.ir.options import Shard, StepOptions
from autopar.ir.plan import Fixed, Plan
from autopar.ir.program import PARTNER
from autopar.parallel.agree.agreement import Phase, lost_peers
from autopar.parallel.weights.store import ParameterStore
from autopar.runtime.ranks.wire import on_wire

Lines = list[str]


class _Settings(Protocol):
    @property
    def options(self) -> StepOptions: ...


class _Session(Protocol):
    """What is asked of a parallel partner's session."""

    @property
    def store(self) -> ParameterStore: ...
    @property
    def settings(self) -> _Settings: ...


class PlainStore:
    """What a rank holds of a plain module: all of it, the same on every rank, but what it shares with the model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in tables.named_parameters(self.model) if not isinstance(p, DTensor)}

    def given(self, name: str, layout: Layout) -> torch.Tensor:
        assert layout.is_replicated
        return tables.parameter(self.model, name).detach()

    def taken(self, name: str, value: torch.Tensor | None) -> torch.Tensor | None:
        return value

    def buffer(self, name: str) -> torch.Tensor:
        return tables.buffer(self.model, name)

    def set_buffer(self, name: str, value: torch.Tensor) -> None:
        with torch.no_grad():
            tables.buffer(self.model, name).copy_(value)

    def bind_buffer(self, name: str, value: torch.Tensor) -> None:
        tables.bind_buffer(self.model, name, value)

    def set_parameter(self, name: str, value: torch.Tensor) -> None:
        with torch.no_grad():
            tables.parameter(self.model, name).copy_(value)


Store = ParameterStore | PlainStore


@dataclass(frozen=True, slots=True)
class Owners:
    """The stores of a model and of its partners, by the first part of their tensors' names; that of its own is ""."""

    stores: Mapping[str, Store]
    shards: Mapping[str, Shard]  # that users asked for, of parallel partners

    @staticmethod
    def of(store: ParameterStore, partners: tuple[Partner, ...]) -> Owners:
        """Find the owners of a captured step."""
        parallel = [partner for partner in partners if isinstance(partner.module, Inlined)]
        return Owners(
            {"": store, **{partner.name: _store_of(partner) for partner in partners}},
            {partner.name: _session_of(partner).settings.options.shard or {} for partner in parallel},
        )

    def find(self, name: str) -> tuple[Store, str]:
        """The store that has a tensor, and its name there."""
        if not name.startswith(PARTNER):
            return self.stores[""], name
        owner, _, own = name.partition(".")
        return self.stores[owner], own

    def given(self, name: str, layout: Layout) -> torch.Tensor:
        """What a program takes of a parameter on this rank."""
        store, own = self.find(name)
        return store.given(own, layout)

    def taken(self, name: str, value: torch.Tensor | None) -> torch.Tensor | None:
        """This rank's part of a gradient, from what a program gives for the parameter; None on other stages."""
        store, own = self.find(name)
        return store.taken(own, value)

    def buffer(self, name: str) -> torch.Tensor:
        store, own = self.find(name)
        return store.buffer(own)

    def tensor(self, name: str) -> torch.Tensor:
        """A buffer or parameter."""
        store, own = self.find(name)
        return tables.tensor(store.model, own)

    def set_buffer(self, name: str, value: torch.Tensor) -> None:
        store, own = self.find(name)
        store.set_buffer(own, value)

    def bind_buffer(self, name: str, value: torch.Tensor) -> None:
        """Put another tensor in a buffer's place."""
        store, own = self.find(name)
        store.bind_buffer(own, value)

    def set_parameter(self, name: str, value: torch.Tensor) -> None:
        """Write what a program gives for a parameter into this rank's part of it."""
        store, own = self.find(name)
        store.set_parameter(own, value)

    def parameters(self) -> dict[str, nn.Parameter]:
        """By their names in the program."""
        return {
            f"{owner}.{name}" if owner else name: parameter
            for owner, store in self.stores.items()
            for name, parameter in store.parameters().items()
        }

    def bind(self, options: StepOptions, fixed: Fixed) -> tuple[StepOptions, Fixed]:
        """Add the layouts that are decided already: what lies somewhere stays there."""
        shard, stored = dict(options.shard or {}), {}
        for owner, store in self.stores.items():
            prefix = f"{owner}." if owner else ""
            if isinstance(store, PlainStore):
                stored.update({prefix + name: replicated(p.ndim) for name, p in store.parameters().items()})
                shard.update({prefix + name: replicated(p.ndim) for name, p in store.parameters().items()})
            elif store.is_placed:
                stored.update({prefix + name: layout for name, layout in store.layouts.items()})
                shard.update({prefix + name: layout for name, layout in store.searched.items()})
            elif owner:
                shard.update({prefix + pattern: layout for pattern, layout in self.shards[owner].items()})
        return replace(options, shard=shard), replace(fixed, stored=stored)

    def place(self, compiled: Lowered) -> None:
        """Parallel models that have no layouts yet take those of this program. Every rank must call this."""
        for owner, store in self.stores.items():
            if isinstance(store, ParameterStore) and not store.is_placed:
                store.adopt(compiled, f"{owner}." if owner else "")


def check_partners(captured: Captured, model: nn.Module, mesh: Mesh, options: StepOptions) -> None:
    """Raise an error that names a partner which cannot be computed in a step of `model`."""
    if dict(mesh.axes).get(PIPELINE, 1) > 1:
        trained = {out.name.partition(".")[0] for out in captured.program.outputs if out.kind == "gradient"}
        for partner in captured.partners:
            _check_in_pipeline(partner, partner.name in trained, model, mesh)
    for partner in captured.partners:
        if not isinstance(partner.module, Inlined):
            continue
        other = _session_of(partner)
        if fault := fault_in((partner,)):
            raise AutoparError(fault)
        who = f"the loss of {type(model).__name__} calls the parallel model '{partner.name.removeprefix(PARTNER)}'"
        if other.store.distributor.mesh != mesh:
            where = other.store.distributor.mesh
            raise MeshError(f"{who} on mesh '{where}', but it is on '{mesh}' itself. Give both the same mesh.")
        zeros = [Plan(mesh, options=each).zero for each in (other.settings.options, options)]
        if zeros[0] != zeros[1]:
            raise PlanError(f"{who} with zero={zeros[0]}, but has zero={zeros[1]} itself. Give both the same zero.")


def fault_in(partners: tuple[Partner, ...]) -> str:
    """What was added to, removed from or replaced in a parallel partner; empty if nothing was."""
    for partner in partners:
        fault = _session_of(partner).store.structure.fault() if isinstance(partner.module, Inlined) else ""
        if fault:
            return f"in '{partner.name.removeprefix(PARTNER)}', which the loss calls, {fault}"
    return ""


def _check_in_pipeline(partner: Partner, is_trained: bool, model: nn.Module, mesh: Mesh) -> None:
    """A plain module that is not trained is whole on every stage; for others there is no place."""
    name, is_parallel = partner.name.removeprefix(PARTNER), isinstance(partner.module, Inlined)
    if is_parallel or is_trained:
        what, instead = ("parallel model", "") if is_parallel else ("model", f", or {name}.requires_grad_(False)")
        raise MeshError(
            f"the loss of {type(model).__name__} calls the {what} '{name}', which the step "
            f"{'shares' if is_parallel else 'trains'}, but mesh '{mesh}' has stages, and '{name}' has no place on one "
            f"of them. Use a mesh without pp{instead}."
        )


def as_trained(captured: Captured) -> Captured:
    """The same program, in which ZeRO splits what the partners' own steps train."""
    return replace(captured, frozen=frozenset(name for name in captured.frozen if not name.startswith(PARTNER)))


def flags_of(partners: tuple[Partner, ...]) -> tuple[tuple[bool, ...], ...]:
    """What a program holds of its partners, besides tensors: compared at each step."""
    return tuple(partner.flags for partner in partners)


def describe(partners: tuple[Partner, ...]) -> Lines:
    """Modes of partners, as ranks compare them."""
    lines = []
    for partner in partners:
        evaluated = [name or "the root" for name, module in tables.named_modules(partner.traced) if not module.training]
        frozen = [name for name, parameter in tables.named_parameters(partner.traced) if not parameter.requires_grad]
        lines.append(f"{partner.name} in eval mode: {', '.join(evaluated) or 'nothing'}")
        lines.append(f"{partner.name} frozen: {', '.join(frozen) or 'nothing'}")
    return lines


class Joined:
    """Plain partners that have rank 0's values already, as `parallelize` gives them to a model."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.known: WeakSet[nn.Module] = WeakSet()

    def check(self, partners: tuple[Partner, ...], phase: Phase) -> None:
        """Check those that have them not; the phase gets what ranks must have alike."""
        phase.now = "model in the loss"
        for partner in self._new(partners):
            self._check_device(partner)
            entries = state_of(partner.module).entries
            lines = [f"{entry.kind} {entry.name} {list(tensor.shape)} {tensor.dtype}" for entry, tensor in entries]
            phase.texts[f"model '{partner.name.removeprefix(PARTNER)}' in the loss"] = lines

    def add(self, partners: tuple[Partner, ...]) -> None:
        """Send rank 0's values. Every rank must call this with the partners of the same step."""
        for partner in self._new(partners):
            self.known.add(partner.module)
            known = state_of(partner.module).entries
            entries = [(entry, tensor.detach()) for entry, tensor in known if not isinstance(tensor, DTensor)]
            for entry, tensor in entries if dist.get_world_size() > 1 else ():
                value = tensor.contiguous()
                with lost_peers(f"sending {entry.kind} '{partner.name}.{entry.name}' from rank 0"):
                    dist.broadcast(on_wire(value), src=0)
                if value.data_ptr() != tensor.data_ptr():
                    tensor.copy_(value)

    def _new(self, partners: tuple[Partner, ...]) -> list[Partner]:
        plain = {partner.module: partner for partner in partners if not isinstance(partner.module, Inlined)}
        return [partner for module, partner in plain.items() if module not in self.known]

    def _check_device(self, partner: Partner) -> None:
        for entry, tensor in state_of(partner.module).entries:
            if tensor.device.type != self.device.type or tensor.device.index not in (None, self.device.index):
                raise CaptureError(
                    f"'{entry.name}' of '{partner.name.removeprefix(PARTNER)}', which the loss calls, is on "
                    f"{tensor.device}, but the model trains on {self.device}: move it there."
                )


def _store_of(partner: Partner) -> Store:
    return _session_of(partner).store if isinstance(partner.module, Inlined) else PlainStore(partner.module)


def _session_of(partner: Partner) -> _Session:
    return cast(_Session, partner.module._session)
