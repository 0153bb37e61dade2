"""The plain module for a while: whole tensors in the place of parameters and buffers, on every rank or on one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from autopar.capture.inputs import tables
from autopar.errors import AutoparError, RankError
from autopar.ir.program import Input
from autopar.parallel.agree.agreement import Phase
from autopar.parallel.session.session import Session
from autopar.parallel.tensors.parameter import ParameterTensor
from autopar.parallel.weights.materialize import assign
from autopar.parallel.weights.store import ParameterStore
from autopar.runtime.ranks.process_groups import default_group
from autopar.runtime.ranks.wire import on_wire
from autopar.torch_compat import local_of

_log = logging.getLogger("autopar")
_NAMED = 3  # tensors that a note names
_OF_PLACES = (
    "place",
    "base",
    "steps",
    "_local_tensor",
    "_spec",
)  # which are not the user's
_MEANWHILE = (
    "a parallel model is plain inside of `with model.gathered() as plain`: call `plain` there, and the parallel model "
    "behind the block."
)


@contextmanager
def gathered(session: Session, rank: int | None, write: bool) -> Iterator[nn.Module | None]:
    """See `ParallelModule.gathered`."""
    store, size = session.store, session.agreement.size
    fault = store.structure.fault()
    session.announcer.call("gathered", [f"rank={rank}", f"write={write}", fault])
    if fault:
        raise AutoparError(fault)
    if rank is not None and rank not in range(size):
        raise AutoparError(
            f"gathered(rank={rank}): there is no such rank. Give one of 0 to {size - 1}, or None for all."
        )
    plain = _Plain.of(store, is_here=rank in (None, default_group().rank()))
    failure: Exception | None = None
    try:
        yield store.model if plain.is_here else None
    except Exception as error:
        failure = error
    except BaseException:
        plain.take_back()
        raise
    values = plain.take_back()
    if write:
        _agree(session, plain, values, failure)
        plain.write(values, rank or 0)
    if failure is not None:
        raise failure
    if not write and default_group().rank() == (rank or 0) and (lost := plain.changed(values)):
        more = f" and {len(lost) - _NAMED} more" if lost[_NAMED:] else ""
        _log.warning(
            "changes inside of `with model.gathered()` are gone behind it (%s%s): gathered(write=True) keeps them",
            ", ".join(lost[:_NAMED]), more,
        )  # fmt: skip


def _agree(session: Session, plain: _Plain, values: Mapping[str, torch.Tensor], failure: Exception | None) -> None:
    """Raise on every rank if the block failed on one, or left what cannot be written. Nothing is written then."""

    def check(phase: Phase) -> None:
        phase.now = "block of gathered()"
        if failure is not None:
            raise failure
        if faults := plain.faults(values):
            raise AutoparError(f"gathered(write=True) cannot write {'; '.join(faults)}. Nothing was written.")

    with suppress(RankError) if failure is not None else nullcontext():  # a rank that never comes is told as well
        session.announcer.call("gathered", what="end of the block")
    session.agreement.together("block of gathered()", check)


@dataclass(frozen=True, slots=True)
class _Swap:
    """A parameter or buffer, and the plain tensor in its place with its version and memory at first. Nothing is in its
    place on a rank where the model stays parallel."""

    entry: Input
    held: torch.Tensor
    plain: torch.Tensor | None
    first: tuple[int, int] = (0, 0)

    @staticmethod
    def of(entry: Input, held: torch.Tensor, plain: torch.Tensor) -> _Swap:
        return _Swap(entry, held, plain, (plain._version, plain.data_ptr()))

    def is_changed(self, now: torch.Tensor | None) -> bool:
        return self.plain is not None and (now is not self.plain or (now._version, now.data_ptr()) != self.first)

    def fault(self, now: torch.Tensor | None) -> str:
        """Why what stands there now cannot be written; empty if it can."""
        shape = list(self.held.shape)
        if now is None:
            return f"'{self.entry.name}', which was removed"
        if list(now.shape) != shape:
            return f"'{self.entry.name}', which has the shape {list(now.shape)} now and had {shape}"
        return ""


@dataclass(frozen=True, slots=True)
class _Plain:
    """The tensors of a model while it is plain."""

    store: ParameterStore
    swaps: tuple[_Swap, ...]
    is_here: bool

    @staticmethod
    def of(store: ParameterStore, is_here: bool) -> _Plain:
        """Gather all tensors, one after the other, and put them in place. Every rank must call this."""
        made = _Plain(store, tuple(_gathered(store, is_here)), is_here)
        if is_here:
            store.structure.meanwhile = _MEANWHILE
            made._put({id(swap.held): swap.plain for swap in made.swaps if swap.plain is not None})
        return made

    def _put(self, others: Mapping[int, torch.Tensor]) -> None:
        """Put other tensors in the places of some, given by their ids."""
        for swap in self.swaps:
            tensor = swap.plain if id(swap.held) in others else swap.held
            assert tensor is not None
            for name in swap.entry.names:
                assign(self.store.model, name, tensor, swap.entry.kind)
        tables.assign_inside(self.store.model, others)

    def take_back(self) -> dict[str, torch.Tensor]:
        """Make the model parallel again. What stood there, by name."""
        if not self.is_here:
            return {}
        model = self.store.model
        named_parameters: dict[str, torch.Tensor] = dict(tables.named_parameters(model, remove_duplicate=False))
        named_parameters |= tables.named_buffers(model, remove_duplicate=False)
        self._put({id(swap.plain): swap.held for swap in self.swaps})
        self.store.structure.meanwhile = ""
        return named_parameters

    def changed(self, values: Mapping[str, torch.Tensor]) -> list[str]:
        return [swap.entry.name for swap in self.swaps if swap.is_changed(values.get(swap.entry.name))]

    def faults(self, values: Mapping[str, torch.Tensor]) -> list[str]:
        found = [swap.fault(values.get(swap.entry.name)) for swap in self.swaps] if self.is_here else []
        return [fault for fault in found if fault]

    @torch.no_grad()
    def write(self, values: Mapping[str, torch.Tensor], source: int) -> None:
        """Write what one rank has into the parts of all. Every rank must call this."""
        is_source = default_group().rank() == source
        for swap in self.swaps:
            held, local = swap.held, _memory(swap.held)
            value = torch.empty(held.shape, dtype=local.dtype, device=local.device)
            if is_source:
                value.copy_(values[swap.entry.name])
            if default_group().size() > 1:
                dist.broadcast(on_wire(value), src=source)
            local.copy_(held.place.part(value) if isinstance(held, ParameterTensor) else value)


def _gathered(store: ParameterStore, is_here: bool) -> Iterator[_Swap]:
    for entry, held in store.entries():
        value = store.whole(entry.name, held)
        if not is_here:
            yield _Swap(entry, held, None)
            continue
        plain = value.detach().clone() if value.data_ptr() == _memory(held).data_ptr() else value.detach()
        if entry.kind == "parameter":
            plain = nn.Parameter(plain, requires_grad=held.requires_grad)
            vars(plain).update({name: value for name, value in vars(held).items() if name not in _OF_PLACES})
        yield _Swap.of(entry, held, plain)


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return (local_of(tensor) if isinstance(tensor, ParameterTensor) else tensor).detach()
