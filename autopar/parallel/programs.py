"""The programs of a parallel module: compiled at the first call with a new signature, kept, and run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from autopar.capture.capture import check_detached, fake_like
from autopar.capture.containers import Parts, take_call_apart
from autopar.capture.guards import Guards
from autopar.capture.partners import Partner
from autopar.capture.raising import default_dtype
from autopar.capture.spots import Numbers
from autopar.errors import AutoparError, BatchError
from autopar.ir.layout import Layout, local_part
from autopar.ir.program import Input
from autopar.parallel.agreement import Agreement
from autopar.parallel.announce import Announcer
from autopar.parallel.batches import (
    describe,
    in_order,
    numbers_of,
    of_local_batch,
    signature_lines,
    signature_of,
    tell_apart,
)
from autopar.parallel.digests import Digests
from autopar.parallel.execution import Running
from autopar.parallel.gradients import check_enabled
from autopar.parallel.loss_scale import LossScale
from autopar.parallel.making import Maker, StepSettings
from autopar.parallel.partners import describe as describe_partners
from autopar.parallel.partners import flags_of
from autopar.parallel.random_state import RandomState
from autopar.parallel.replicas import Replicas
from autopar.parallel.store import ParameterStore
from autopar.parallel.variants import Variants
from autopar.runtime.pipeline import Given
from autopar.runtime.staged import given_of

_log = logging.getLogger("autopar")
PROGRAMS = 32  # compiled for as many signatures at a time; the one unused longest goes first


class Programs:
    """Finds, compiles and runs the program of a call. Every rank must make the same calls."""

    def __init__(
        self, settings: StepSettings, store: ParameterStore, agreement: Agreement, announcer: Announcer,
        replicas: Replicas, random: RandomState, scale: LossScale | None,
    ) -> None:  # fmt: skip
        self.settings, self.store, self.agreement, self.announcer = settings, store, agreement, announcer
        self.replicas, self.random, self.scale = replicas, random, scale
        self.partners: dict[Any, tuple[Partner, ...]] = {}  # by the model's own part of a signature
        self.running: dict[Any, Running] = {}  # by signature, the last used last
        self.signatures: dict[Any, list[str]] = {}
        self.variants = Variants()
        self._maker = Maker(settings, store, agreement, self.variants.numbers)
        self._given: Numbers = {}  # the numbers among the arguments of the call at hand
        self._digests = Digests(store.distributor.mesh, store.distributor.coord, settings.is_local, settings.device)

    @property
    def last_trained(self) -> Running | None:
        """The training program used last."""
        steps = [running for (train, *_), running in self.running.items() if train]
        return steps[-1] if steps else None

    def prepare(self, call: str, args: Any, kwargs: Any, train: bool) -> tuple[Running, Parts]:
        """The program for a call of that name, compiled if there is none yet, and its arguments, taken apart."""
        parts = self._taken(call, args, kwargs, train)
        own = self._own_key(parts, train)
        key = (*own, flags_of(self.partners.get(own, ())))
        number = self._agreed(call, key, own, parts)
        if train:
            check_enabled(call)
            if self.replicas.is_due(self.random.steps):
                self.replicas.check(self.random.steps)
        if (*key, number) in self.running:
            self.running[*key, number] = self.running.pop((*key, number))  # the last used stands last
            return self.running[*key, number], parts
        is_new = not self.variants.knows(key) and any(train == known[0] for known in self.running)
        if is_new and dist.get_rank() == 0:
            _log.warning("new input signature (%s): compiling again", ", ".join(describe(parts)))
        with torch.inference_mode(False):  # what is made here is trained later
            running, guards = self._maker.make(parts, self._given, train, is_first=not self.running)
        self.partners[own] = running.captured.partners
        self._keep((*own, flags_of(running.captured.partners)), number, running, guards)
        return running, parts

    def _own_key(self, parts: Parts, train: bool) -> Any:
        """The part of a signature that the call and the model decide."""
        model = self.store.model
        flags = tuple(module.training for module in model.modules())
        wanted = tuple(parameter.requires_grad for parameter in model.parameters())
        return train, signature_of(parts), flags, wanted

    def _agreed(self, call: str, key: Any, own: Any, parts: Parts) -> int:
        """The number of the program to run: all ranks make this call, with the same batch, modes and values."""
        if key not in self.signatures:
            partners = describe_partners(self.partners.get(own, ()))
            self.signatures[key] = signature_lines(self.store.model, parts) + partners
        self._given.clear()
        self._given.update(numbers_of(parts))
        states = [f"{path} {number!r}" for (_, path), number in self._given.items()]
        states += [f"random_state {self.random.state_dict()}"] + [str(self.scale)] * (self.scale is not None)
        fault = self.store.structure.fault()
        number, values = (0, [fault]) if fault else self.variants.find(key)
        states += ["gradients off"] * (key[0] and not torch.is_grad_enabled()) + values
        digest = self._digests.vector(parts, in_full=(*key, number) not in self.running)
        if not self.announcer.call(call, [*self.signatures[key], *states], what="batch and modes", data=digest):
            tell_apart(self.agreement, parts, self._digests.part, self.settings.is_local, self.random.steps)
        if fault:
            raise AutoparError(fault)
        self.variants.use(key, number)
        return number

    def _keep(self, key: Any, number: int, running: Running, guards: Guards) -> None:
        """Remember a program with what it read in Python; forget the one unused longest."""
        self.variants.add(key, number, guards, running.constants)
        self.running[*key, number] = running
        if len(self.running) > PROGRAMS:
            oldest = next(iter(self.running))
            del self.running[oldest]
            if self.variants.forget(oldest[:-1], oldest[-1]):
                self.signatures.pop(oldest[:-1], None)

    def _taken(self, call: str, args: Any, kwargs: Any, train: bool) -> Parts:
        """The arguments of a call. What one rank refuses is an error on all of them."""
        try:
            parts = take_call_apart(args, in_order(kwargs, self._called(train)))
            if train:
                check_detached(parts)
        except BatchError as error:
            nothing = self._digests.vector(None, in_full=False)
            self.announcer.call(call, [f"arguments refused: {error}"], what="batch and modes", data=nothing)
            raise
        return parts

    def _called(self, train: bool) -> Callable[..., Any]:
        """The user's function that is given the arguments."""
        return self.settings.loss_fn if train and self.settings.loss_fn is not None else self.store.model.forward

    def run(self, running: Running, parts: Parts) -> tuple[torch.Tensor, ...]:
        """The outputs of this rank; the values that the program was specialised to are those of this batch too."""
        for i, tensor in parts.tensors():
            if fake_like(tensor):
                where = "is on the meta device, where nothing has data"
                raise BatchError(f"{parts.paths[i]} {where}: only prepare() can take it.")
        with default_dtype(self.settings.lift):
            outputs = running.run(self._inputs(running, parts.leaves))
        for out, value in zip(running.compiled.program.outputs, outputs, strict=True):
            if out.kind == "guard":
                running.captured.reads[int(out.name)].check(value)
        return outputs

    # -- running ------------------------------------------------------------------------------------------------

    def _inputs(self, running: Running, leaves: Sequence[Any]) -> list[torch.Tensor] | Given:
        where, device, is_local = self.store.distributor, self.settings.device, self.settings.is_local

        def value_of(entry: Input, layout: Layout) -> torch.Tensor:
            if entry.kind == "parameter":
                return running.owners.given(entry.name, layout)
            if entry.kind == "buffer":
                return running.owners.buffer(entry.name)
            if entry.kind == "constant":
                return running.constants[entry.name]
            if entry.kind == "scale":
                return torch.tensor(self.scale.scale if self.scale else 1.0, device=device)
            if entry.kind == "seed":
                return torch.tensor([self.random.seed, self.random.steps], device=device)
            return part_of(entry, layout, where.coord)

        def part_of(entry: Input, layout: Layout, coord: Mapping[str, int]) -> torch.Tensor:
            leaf = leaves[int(entry.name)].detach()
            layout = of_local_batch(layout) if is_local else layout
            return local_part(leaf, layout, running.compiled.program.mesh, coord).to(device)

        pipeline = running.compiled.pipeline
        if pipeline is not None:
            return given_of(running.compiled.program, pipeline, where.coord, value_of, part_of)
        return [value_of(entry, layout) for entry, layout in running.slots]
