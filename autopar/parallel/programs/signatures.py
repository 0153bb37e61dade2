"""What decides the program of a call: its arguments, modes and what was read in Python, agreed on by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from autopar.capture.inputs.containers import check_detached, take_call_apart
from autopar.capture.inputs.leaves import text_of
from autopar.capture.inputs.partners import Partner
from autopar.capture.python.guards import Guards
from autopar.capture.python.spots import Numbers
from autopar.errors import AutoparError, BatchError, RankError
from autopar.parallel.agree.agreement import difference
from autopar.parallel.batches.batch_checks import (
    PADDED,
    in_order,
    numbers_of,
    off_host,
    signature_lines,
    signature_of,
    tell_apart,
)
from autopar.parallel.batches.digests import Digests
from autopar.parallel.programs.execution import Running
from autopar.parallel.programs.portions import Given, Portion, Portions
from autopar.parallel.programs.variants import Variants
from autopar.parallel.session.session import Session
from autopar.parallel.weights.owners import describe, flags_of
from autopar.torch_compat import no_torch_function

_COMPARED, _REFUSED = "batch and modes", "arguments refused: "
_training, _requires_grad = attrgetter("training"), attrgetter("requires_grad")


def _refused_fault(error: BatchError, what: str, everyone: list[list[str]]) -> Exception:
    """What a rank that refused its arguments raises: its own error, if all refused theirs."""
    are_all = all(lines[0].startswith(_REFUSED) for lines in everyone)
    return error if are_all else difference(what, everyone)


class _Uneven(Exception):
    """Ranks have unlike numbers of samples."""

    def __init__(self, portion: Portion) -> None:
        super().__init__()
        self.portion = portion


class Signatures:
    """Reads what a call wants and agrees on it with all ranks. Every rank must make the same calls."""

    def __init__(self, session: Session) -> None:
        settings, where = session.settings, session.store.distributor
        self._session = session
        self._digests = Digests(where.mesh, where.coord, settings.is_local)
        self._partners: dict[Any, tuple[Partner, ...]] = {}  # by the model's own part of a key
        self.lines: dict[tuple[Any, Any], list[str]] = {}  # what ranks compare, by key and dims of samples
        self.variants = Variants()
        self.portions = Portions(session)
        self.numbers: Numbers = {}  # among the arguments of the call at hand

    def take(self, call: str, args: Any, kwargs: Any, train: bool) -> Given:
        """The arguments of a call. What one rank refuses is an error on all of them."""
        try:
            parts = take_call_apart(args, in_order(kwargs, self._called(train)))
            if train:
                check_detached(parts)
            return self.portions.of(parts, train)
        except BatchError as error:
            nothing = self._digests.vector(None, at_once=False)
            fault = partial(_refused_fault, error)
            self._session.announcer.call(call, [f"{_REFUSED}{error}"], what=_COMPARED, data=nothing, fault=fault)
            raise

    def _called(self, train: bool) -> Callable[..., Any]:
        """The user's function that is given the arguments."""
        loss_fn = self._session.settings.loss_fn
        return loss_fn if train and loss_fn is not None else self._session.store.model.forward

    def key(self, given: Given, train: bool) -> tuple[Any, ...]:
        """What the call, the model and its partners decide; the last of it is the partners'."""
        structure = self._session.store.structure
        flags = tuple(map(_training, structure.modules))
        with no_torch_function():  # or torch looks, at each, for a function of ours that it would ask
            wanted = tuple(map(_requires_grad, structure.parameters.values()))
        others = given.portion.sizes if given.portion is not None and given.is_unlike else ()
        own = train, signature_of(given.whole), flags, wanted, others
        return (*own, flags_of(self._partners.get(own, ())))

    def settle(self, call: str, given: Given, known: Container[Any], train: bool) -> tuple[Given, Any, int]:
        """The arguments of a call with the sizes that ranks agree on, the key of their program, and its number."""
        try:
            key = self.key(given, train)
            number = self.agree(call, key, given, known)
            return given.agreed(), key, number
        except _Uneven as found:
            given = given.agreed(found.portion)
        key = self.key(given, train)
        return given, key, self.agree(call, key, given, known)

    def agree(
        self, call: str, key: tuple[Any, ...], given: Given, known: Container[Any],
        fits: Callable[[int], bool] = lambda _: True,
    ) -> int:  # fmt: skip
        """The number of the program to run: all ranks make this call, with the same batch, modes and values.

        known: the keys and numbers of programs that there are. fits: whether one, by its number, will do.
        """
        self.numbers.clear()
        self.numbers.update(numbers_of(given.parts))
        fault = self._session.store.structure.fault()
        number, values = (0, [fault]) if fault else self.variants.find(key, fits)
        if self._session.agreement.size > 1:
            self._compare(call, key, given, values, is_new=(*key, number) not in known)
        if fault:
            raise AutoparError(fault)
        self.variants.use(key, number)
        return number

    def _compare(self, call: str, key: tuple[Any, ...], given: Given, values: list[str], is_new: bool) -> None:
        """Raise RankError on every rank if ranks differ; _Uneven if in how many samples they have alone. values: as of
        `Variants.find`. is_new: a program is made."""
        session, parts, portion = self._session, given.parts, given.portion
        lines = (key, given.unlike)
        if lines not in self.lines:
            partners = describe(self._partners.get(key[:-1], ()))
            self.lines[lines] = signature_lines(session.store.model, parts, given.unlike) + partners
        states = [f"{path} {text_of(number)}" for (_, path), number in self.numbers.items()]
        states += [f"random_state {session.random.state_dict()}"] + [str(session.scale)] * (session.scale is not None)
        states += ["gradients off"] * (key[0] and not torch.is_grad_enabled()) + values
        states += [f"{path} on a device" for path in off_host(parts)]
        states += [portion.line()] if portion is not None else []
        at_once = is_new or (portion is not None and portion.is_agreed)  # a second comparison leaves nothing on its way
        digest = self._digests.vector(parts, at_once, given.shared)
        try:
            text = [*self.lines[lines], *states]
            fault = None if portion is None else partial(self._fault, portion)
            if not session.announcer.call(call, text, what=_COMPARED, data=digest, fault=fault):
                tell_apart(session.agreement, parts, self._digests, portion, session.random.steps)
        except (RankError, _Uneven):
            self._digests.forget()
            raise

    def _fault(self, portion: Portion, what: str, everyone: list[list[str]]) -> Exception:
        """What ranks with parts of their own differ in."""
        settled = portion.settled(everyone, self._session.store.distributor.mesh)
        return difference(what, everyone, PADDED) if settled is None else _Uneven(settled)

    def add(self, key: tuple[Any, ...], number: int, running: Running, guards: Guards) -> tuple[Any, ...]:
        """Remember what a new program of a key read in Python; its own key, which knows its partners."""
        own, partners = key[:-1], running.captured.partners
        self._partners[own] = partners
        found = (*own, flags_of(partners))
        self.variants.add(found, number, guards, running.constants)
        return found

    def forget(self, key: tuple[Any, ...], number: int) -> None:
        """Drop a program."""
        if self.variants.forget(key, number):
            for lines in [lines for lines in self.lines if lines[0] == key]:
                del self.lines[lines]
