"""The programs of a parallel module: each call's is found by what decides it, agreed on by all ranks, or made."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from operator import attrgetter
from typing import Any, TypeVar

import torch

from autopar.capture.batch_forms import answers
from autopar.capture.captured import drawing_host
from autopar.capture.code_checks import check_inference
from autopar.capture.data.reads import Answers, OtherValues, Value
from autopar.capture.draws.host_draws import Drawn, generators, set_generators
from autopar.capture.inputs.batch_dims import Dims
from autopar.capture.inputs.containers import take_call_apart
from autopar.capture.inputs.leaves import text_of
from autopar.capture.inputs.partners import Partner
from autopar.capture.python.spots import Numbers
from autopar.capture.step_kind import StepKind
from autopar.errors import AutoparError, BatchError, CaptureError, RankError
from autopar.parallel.agree.agreement import difference
from autopar.parallel.batches import batch_checks as batches
from autopar.parallel.batches.digests import Digests
from autopar.parallel.programs.maker import Maker
from autopar.parallel.programs.portions import Given, Portion, Portions
from autopar.parallel.programs.running import Running
from autopar.parallel.programs.shared_batch import WrittenMemory
from autopar.parallel.programs.surroundings import check_surroundings
from autopar.parallel.session.session import Session
from autopar.parallel.weights.gradients import check_enabled
from autopar.parallel.weights.owners import describe, fault_in, flags_of
from autopar.runtime.ranks.process_groups import default_group
from autopar.torch_compat import no_torch_function

_log = logging.getLogger("autopar")
VALUES = 8  # of one signature, for other values that the model reads from its tensors (specialize=True)
PROGRAMS = 32  # compiled at a time; the one unused longest goes first
_WAYS = 64  # through a model that random numbers decide
_NAMED = 3  # changes that a note names
_FEW = 3  # programs of `model(x)` that are each told of
_FIRST = "Python values as at first"
_COMPARED, _REFUSED = "batch and modes", "arguments refused: "
_training, _requires_grad = attrgetter("training"), attrgetter("requires_grad")
# What a step gives, arguments, whether gradients are on, modes; last those of the partners, what the code asks of the
# batch beside its values, and what of it lies in memory that the step writes.
Key = tuple[Any, ...]
_BESIDE = 3  # of these, what is known once there is a program
T = TypeVar("T")


@dataclass(slots=True)
class CallSignature:
    """The programs of a key, the last used first, which differ in what was read in Python. lines: what ranks compare of
    it, by the dims of samples."""

    key: Key
    programs: list[Running] = field(default_factory=list)
    lines: dict[Dims | None, list[str]] = field(default_factory=dict)
    by_chance: int = 0  # programs made so far of which random numbers decide the way

    def line(self) -> str:
        """How what stands in Python now differs from what the first program read."""
        if not self.programs:
            return _FIRST
        first = min(self.programs, key=attrgetter("number"))
        return "; ".join(change.line for change in first.guards.changes()) or first.line

    def find(self, fits: Callable[[Running], bool]) -> tuple[Running | None, list[str]]:
        """The program to run, None where none fits; and what ranks must agree on.

        Changes nothing: the ranks may not agree, and what programs are made of must stay the same on all of them.
        """
        for running in self.programs:
            if fits(running) and running.guards.holds() and running.constants.fit():
                alike = sum(other.line == running.line for other in self.programs)  # they differ in values of tensors
                which = [f"program {running.number}"] * (alike > 1)
                return running, [running.line, *which, *running.constants.lines()]
        return None, [self.line()]


@dataclass(slots=True)
class _KnownOfCall:
    """What the programs of a call have shown. asked: of the batch's tensors beside their values."""

    partners: tuple[Partner, ...] = ()
    written: WrittenMemory = field(default_factory=WrittenMemory)
    asked: set[str] = field(default_factory=set)

    def add(self, running: Running) -> None:
        """Know another program."""
        self.partners = running.captured.partners
        self.written.add(running.captured, running.owners, running.guards)
        self.asked |= running.captured.ran.asked


class _Uneven(Exception):
    """Ranks have unlike numbers of samples."""

    def __init__(self, portion: Portion) -> None:
        super().__init__()
        self.portion = portion


class Programs:
    """Finds or makes the program of a call. Every rank must make the same calls."""

    def __init__(self, session: Session) -> None:
        where = session.store.distributor
        self._session = session
        self._digests = Digests(where.mesh, where.coord, session.settings.is_local)
        self._portions, self._maker = Portions(session), Maker(session)
        self.signatures: dict[Key, CallSignature] = {}
        self._known = defaultdict[Key, _KnownOfCall](_KnownOfCall)  # by the call's and the model's own part of a key
        self._numbers: Numbers = {}  # of the call at hand
        self._uses = self._made = 0
        self._drawn: Drawn | None = None  # on the host, for the call at hand

    # -- what a call asks for -----------------------------------------------------------------------------------

    @property
    def all(self) -> list[Running]:
        """The programs that there are, the last used last."""
        found = [running for signature in self.signatures.values() for running in signature.programs]
        return sorted(found, key=attrgetter("used"))

    @property
    def last_trained(self) -> Running | None:
        """The training program used last."""
        return next((running for running in reversed(self.all) if running.kind.trains), None)

    def prepare(self, call: str, args: Any, kwargs: Any, kind: StepKind) -> tuple[Running, Given]:
        """The program for a call of that name, compiled if there is none yet, and its arguments, taken apart."""
        check_surroundings()
        session, given = self._session, self._take(call, args, kwargs, kind)
        self._drawn = None
        try:
            signature, running = self._agree(call, given, kind)
            given = given.agreed()
        except _Uneven as found:
            given = given.agreed(found.portion)
            signature, running = self._agree(call, given, kind)
        if kind.trains:
            check_enabled(call)
            if session.replicas.is_due(session.random.steps):
                session.replicas.check(session.random.steps)
        return self._use(signature, running) if running else self._make(signature, given, kind, ()), given

    def run(
        self, call: str, args: Any, kwargs: Any, kind: StepKind, step: Callable[[Running, Given], T]
    ) -> tuple[Running, T]:
        """What a step gives with the program of a call. If it was specialised to other values than those of the batch
        (OtherValues), another one of this signature is taken, or compiled."""
        made = self._made
        running, given = self.prepare(call, args, kwargs, kind)
        while True:
            try:
                return running, step(running, given)
            except OtherValues as found:
                other = found
            if running.number > made and not other.read.is_guess:
                why = " It was compiled for this very batch: a number that is summed in another order is another one."
                raise other.read.refused(other.values[-1], why)
            guessed = running if running.number > made else None
            running = self._for_values(call, given, kind, other)
            if guessed is not None:  # it has never run
                self._forget(guessed)

    def _for_values(self, call: str, given: Given, kind: StepKind, other: OtherValues) -> Running:
        """The program for a batch with these values among its reads, which every rank has found."""

        def fits(running: Running) -> bool:
            return all(read.is_(value) for read, value in zip(running.captured.reads, other.values, strict=False))

        signature, running = self._agree(call, given, kind, fits)
        if running:
            return self._use(signature, running)
        count = sum(bool(each.captured.reads) for each in signature.programs)
        if count >= (PROGRAMS if other.read.is_guard else VALUES):
            raise other.read.refused(other.values[-1], f" {count} programs were compiled for other values already.")
        if default_group().rank() == 0:
            _log.warning("%s is %s for this batch and was another value: compiling again", other.read, other.values[-1])
        try:
            return self._make(signature, given, kind, other.values)
        except CaptureError as error:
            raise other.raised(error) from error

    # -- which program it is ------------------------------------------------------------------------------------

    def _take(self, call: str, args: Any, kwargs: Any, kind: StepKind) -> Given:
        """The arguments of a call. What one rank refuses is an error on all of them."""
        loss_fn = self._session.settings.loss_fn
        called = loss_fn if kind.gives_loss and loss_fn is not None else self._session.store.model.forward
        try:
            parts = take_call_apart(args, batches.in_order(kwargs, called))
            return self._portions.of(parts, kind)
        except BatchError as error:
            nothing = self._digests.vector(None, at_once=False)
            fault = partial(_refused_fault, error)
            self._session.announcer.call(call, [f"{_REFUSED}{error}"], what=_COMPARED, data=nothing, fault=fault)
            raise

    def _key(self, given: Given, kind: StepKind) -> Key:
        """What the call, the model and its partners decide."""
        structure = self._session.store.structure
        flags = tuple(map(_training, structure.modules))
        with no_torch_function():  # or torch looks, at each, for a function of ours that it would ask
            wanted = tuple(map(_requires_grad, structure.parameters.values()))
        others = given.portion.sizes if given.portion is not None and given.is_unlike else ()
        has_grads = kind.trains or torch.is_grad_enabled()
        asked = tuple(i for i, tensor in given.parts.tensors() if tensor.requires_grad)
        own = kind, batches.signature_of(given.whole), has_grads, flags, wanted, others, asked
        return (*own, *self._beside(own, given))

    def _beside(self, own: Key, given: Given) -> Key:
        """What is known of a key once there is a program."""
        known, leaves = self._known[own], list(given.parts.tensors())
        said = answers(known.asked, [leaf for _, leaf in given.whole.tensors()]) if known.asked else ()
        return flags_of(known.partners), said, known.written.met(leaves)

    def _agree(
        self, call: str, given: Given, kind: StepKind, fits: Callable[[Running], bool] = lambda _: True
    ) -> tuple[CallSignature, Running | None]:
        """The program to run, if there is one: all ranks make this call, with the same batch, modes and values. fits:
        whether a program will do."""
        self._numbers.clear()
        self._numbers.update(batches.numbers_of(given.parts))
        key = self._key(given, kind)
        signature = self.signatures.get(key) or CallSignature(key)
        fault = self._session.store.structure.fault() or fault_in(self._known[key[:-_BESIDE]].partners)
        if key[-1] and given.portion is not None and not fault:
            fault = _IN_PARTS.format("; ".join(key[-1]))
        by_chance = self._draw(signature, kind)
        running, values = (None, [fault]) if fault else signature.find(lambda one: by_chance(one) and fits(one))
        if self._session.agreement.size > 1:
            self._compare(call, signature, given, values, is_new=running is None)
        if fault:
            raise AutoparError(fault)
        return signature, running

    def _draw(self, signature: CallSignature, kind: StepKind) -> Callable[[Running], bool]:
        """Which programs a call may run, as random numbers decide. What the model draws on the host is drawn, once a
        call, from the generators of rank 0."""
        seed = cache(
            partial(self._session.random.tensor, torch.device("cpu"), kind.trains)
        )  # which few programs ask for
        host = drawing_host((one.captured for one in signature.programs), seed)
        if host is not None and self._drawn is None:
            with self._as_rank_0():
                self._drawn = host.draw(seed())
        drawn = self._drawn

        def fits(one: Running) -> bool:
            coins, host = one.captured.coins, one.captured.host
            is_way = host is None or drawn is None or host.way == drawn.way
            return is_way and (coins is None or coins.fit(seed()))

        return fits

    @contextmanager
    def _as_rank_0(self) -> Iterator[None]:
        """Draw on the host what rank 0 draws; the generators of other ranks stay as they are."""
        agreement, own = self._session.agreement, generators()
        if agreement.equal("generators of the host", [repr(own)]):
            yield
            return
        rank = default_group().rank()
        set_generators(agreement.everyone("generators of the host", own if rank == 0 else None)[0])
        try:
            yield
        finally:
            if rank:
                set_generators(own)

    def _compare(self, call: str, signature: CallSignature, given: Given, values: list[str], is_new: bool) -> None:
        """Raise RankError on every rank if ranks differ; _Uneven if in how many samples they have alone. values: what
        `CallSignature.find` says. is_new: a program is made."""
        session, parts, portion, key = self._session, given.parts, given.portion, signature.key
        if given.unlike not in signature.lines:
            partners = describe(self._known[key[:-_BESIDE]].partners)
            lines = batches.signature_lines(session.store.model, parts, given.unlike)
            signature.lines[given.unlike] = [*lines, *partners, *map(str, key[-2]), *key[-1]]
        states = [f"{path} {text_of(number)}" for (_, path, *name), number in self._numbers.items() if not name]
        states += [f"random_state {session.random.state_dict()}"] + [str(session.scale)] * (session.scale is not None)
        states += ["gradients off"] * (not torch.is_grad_enabled()) + values
        states += [f"{path} on a device" for path in batches.off_host(parts)]
        states += [f"{parts.paths[i]} gets a gradient" for i, each in parts.tensors() if each.requires_grad]
        states += [portion.line()] if portion is not None else []
        at_once = is_new or (portion is not None and portion.is_agreed)  # a second comparison leaves nothing on its way
        digest = self._digests.vector(parts, at_once, given.shared)
        try:
            text = [*signature.lines[given.unlike], *states]
            fault = None if portion is None else partial(self._fault, portion)
            if not session.announcer.call(call, text, what=_COMPARED, data=digest, fault=fault):
                batches.tell_apart(session.agreement, parts, self._digests, portion, session.random.steps)
        except (RankError, _Uneven):
            self._digests.forget()
            raise

    def _fault(self, portion: Portion, what: str, everyone: list[list[str]]) -> Exception:
        """What ranks with parts of their own differ in."""
        settled = portion.settled(everyone, self._session.store.distributor.mesh)
        return difference(what, everyone, batches.PADDED) if settled is None else _Uneven(settled)

    # -- keep and forget ----------------------------------------------------------------------------------------

    def _use(self, signature: CallSignature, running: Running) -> Running:
        """A program, as the one used last."""
        self._uses += 1
        running.used = self._uses
        if self._drawn is not None and running.captured.host is not None:
            running.constants.put(running.captured.host.values(self._drawn))
        running.constants.gather()
        if signature.programs[0] is not running:
            signature.programs.sort(key=lambda each: each is not running)
        return running

    def _make(self, signature: CallSignature, given: Given, kind: StepKind, values: tuple[Value, ...]) -> Running:
        """Compile a program and keep it; forget the one unused longest. values: of the first of its reads."""
        self._tell(signature, given, kind)
        self._made += 1  # also of one that fails: on all ranks
        has_grads, is_inference = signature.key[2], torch.is_inference_mode_enabled()
        # What is made here is trained later.
        with torch.inference_mode(False), torch.set_grad_enabled(has_grads), self._as_rank_0():
            if self._drawn is not None:
                set_generators(self._drawn.start)
            if signature.by_chance >= _WAYS:
                raise BatchError(
                    f"random numbers decided {_WAYS} programs of this step already, each another way through the "
                    f"model. Keep what they decide in tensors (torch.where, a factor of 0 or 1, rows by an index)."
                )
            left = {each.name: each for running in self.all for each in running.captured.left}
            answers = Answers(self._session.random.numbers(kind.trains), values, left=tuple(left.values()))
            running = self._maker.make(given, self._numbers, kind, not self.signatures, answers)
        if is_inference:
            check_inference(running.captured.ran)
        self._portions.learn(given, kind)
        running.number = self._made
        # Only now are its partners known, whose modes are in its key.
        own = signature.key[:-_BESIDE]
        self._known[own].add(running)
        key = (*own, *self._beside(own, given))
        signature = signature if key == signature.key else self.signatures.get(key) or CallSignature(key)
        running.line = signature.line()
        signature.by_chance += running.captured.is_by_chance
        signature.programs.insert(0, running)
        self.signatures[key] = signature
        self._use(signature, running)
        leaves = frozenset(each.name for each in running.captured.left)
        running.looked_at = leaves | left.keys()
        for other in [each for each in self.all if not leaves <= each.looked_at]:
            self._forget(other)  # it may read what this one leaves: it is looked at when it is made anew
        if len(self.all) > PROGRAMS:
            self._forget(self.all[0])
        return running

    def _tell(self, signature: CallSignature, given: Given, kind: StepKind) -> None:
        """Log on rank 0 why there is another program; count changes of Python numbers."""
        more = ""
        if signature.programs:
            changes = signature.programs[0].guards.changes()
            why = "; ".join(map(str, changes[:_NAMED]))
            self._maker.numbers.saw(changes)
        else:
            alike = sum(kind is running.kind for running in self.all)
            is_told = alike and (kind.gives_loss or alike <= _FEW)
            described = f"new input signature ({', '.join(batches.describe(given.whole))})"
            why = self._difference(signature.key) or described if is_told else ""
            more = _GROWS if alike == _FEW and not kind.gives_loss else ""
        if why and default_group().rank() == 0:
            _log.warning("%s: compiling again%s", why, more)

    def _difference(self, key: Key) -> str:
        """What a program is made for beside arguments that another one was made for; nothing if there is none."""
        others = (other for other in self.signatures if other is not key and other[:2] == key[:2])
        alike = next(others, key)
        pairs = zip(_BESIDE_ARGUMENTS, alike[2:], key[2:], strict=False)
        return " and ".join(text for text, one, other in pairs if one != other)

    def _forget(self, running: Running) -> None:
        signature = next((each for each in self.signatures.values() if running in each.programs), None)
        if signature is None:  # already
            return
        signature.programs.remove(running)
        if not signature.programs:
            del self.signatures[signature.key]


_IN_PARTS = (
    "{}, and the step writes there: what one device reads after it cannot be told for a batch of which each rank has a "
    "part. Give it memory of its own: .clone()."
)
_BESIDE_ARGUMENTS = (  # what a key has behind the call and its arguments, and how it is told that this is another one
    "gradients are on or off, unlike before", "modules are in another mode", "other parameters are frozen",
    "ranks have parts of other sizes",
    "other tensors of the batch require a gradient", "models that the loss calls are in another mode",
    "tensors of the batch lie otherwise in memory, or have another part in autograd, and the code asks for that",
    "other tensors of the batch lie in memory that the step writes",
)  # fmt: skip
# What makes a token at a time (`generate`) has a new shape for each.
_GROWS = (
    ". Each shape has a program of its own, and no more of them are told of. Inputs that grow call by call "
    "(`generate`) are faster with whole weights: `with model.gathered() as plain: plain.generate(...)`; others with "
    "padding to a few shapes"
)


def _refused_fault(error: BatchError, what: str, everyone: list[list[str]]) -> Exception:
    """What a rank that refused its arguments raises: its own error, if all refused theirs."""
    are_all = all(lines[0].startswith(_REFUSED) for lines in everyone)
    return error if are_all else difference(what, everyone)
