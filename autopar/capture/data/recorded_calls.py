"""Record the torch calls of one run of the model, so that two runs can be compared.

A call's key is made of its function, its numbers and the keys of its tensors; with each tensor goes which inputs are
behind it, as bits. What hangs on no input that changes from step to step counts only where it is used, so that a mask
or a rotary table which the first run makes and the next one finds in a cache is the same one. What data made is not: a
tensor of an earlier run where this one would use its own (`cache.setdefault(key, x.mean())`) is another one.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autopar.capture.data.coins import MIDDLE
from autopar.capture.data.known_values import Values
from autopar.capture.data.row_counts import RowCount
from autopar.capture.inputs.containers import take_apart
from autopar.capture.refusals.location import Line
from autopar.ir.ops.op_facts import form_argument
from autopar.ir.program import PARTNER, Input
from autopar.torch_compat import OpOverload, storage_of

# What torch's machinery calls on a tensor that it takes over, in one run and not in the other.
_SAME = (torch.ops.aten.lift_fresh, torch.ops.aten.lift_fresh_copy, torch.ops.aten.detach, torch.ops.aten.alias)
# Memory that holds nothing yet: torch's machinery makes some for a stand-in of the user's tensors.
_UNWRITTEN = ("empty", "empty_strided")
_BYTES = 1 << 20  # of a numpy array: larger ones are compared by their first ones


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call that an input is behind. `numbers` are those among its arguments, `behind` the bits of inputs."""

    key: int
    function: str
    line: Line | None
    numbers: tuple[Any, ...]
    behind: int


@dataclass(frozen=True, slots=True)
class HostFloat:
    """A float that a call was given where the host may have drawn it. place: the number of the call among such calls,
    and the argument."""

    place: tuple[int, int | str]
    function: str
    value: float
    line: Line | None


_Key = tuple[Any, int, int]  # the tensor, its key, and the bits of the inputs behind it
CHANGING = 1  # the bit of the inputs that each step has anew; those that no step changes have none
_ALWAYS, _NOTHING = -1, 0
GIVEN = "return"  # in the place of a call's function: what a run gives back
_COMPARED = frozenset((int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, RowCount))


class RecordedCalls:
    """The calls of one run. `earlier` is the run before it, whose tensors may turn up again.

    `by_value`: of what no input is behind that steps change, the key is what it holds, not how it was made.
    """

    def __init__(self, earlier: RecordedCalls | None = None, by_value: bool = False) -> None:
        self.by_value = by_value
        self.values: Values = Values(earlier.values if earlier else None)
        self.made: list[RecordedCall] = []
        self.changing: int = earlier.changing if earlier else CHANGING  # the bits of what steps change
        self.shows_data = False  # what tensors hold that nobody made before the run's eyes is a part of their keys
        self.rebound = 0  # the bits of the buffers that are other tensors after a run
        self.draws: Callable[[], float] = lambda: MIDDLE  # what a draw is that the model makes a float of
        self.has_floats = False  # it does
        self.has_any = False  # and one of those may be any number
        self.has_hooks = False  # it registers some on gradients, which may lead to no parameter
        self.floats: list[HostFloat] = []  # that calls were given, where the model draws on the host
        self._of_rows: set[int] = set(earlier._of_rows) if earlier else set()  # calls on forms that are data
        self._kept: dict[int, torch.Tensor] = {}  # buffers, by their places among the inputs
        self._left: dict[int, torch.Tensor | None] = {}  # what a first run left in them; None if data of the batch
        self._inputs: set[int] = set()
        # The tensor is held, so that its id stays its own.
        self._known: dict[int, _Key] = dict(earlier._known) if earlier else {}
        self._lying: dict[Any, _Key] = dict(earlier._lying) if earlier else {}  # by the memory that they show
        self._old = set(self._known)  # tensors that only the runs before have met

    def given(self, tensors: Iterable[torch.Tensor], behind: Iterable[int]) -> None:
        """The inputs of the step, with their bits. What an earlier run knew of their memory is not known yet."""
        tensors = list(tensors)
        own = {storage_of(tensor) for tensor in tensors}
        known = self._lying.items()
        self._lying = {memory: at for memory, at in known if not (isinstance(memory, tuple) and memory[0] in own)}
        for position, (tensor, bit) in enumerate(zip(tensors, behind, strict=True)):
            self._inputs.add(id(tensor))
            self._enter(tensor, hash(("input", position)), bit, is_new=True)

    def met(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tensors that are others in each step, and no inputs: what other programs leave in Python."""
        for number, tensor in enumerate(tensors):
            self._enter(tensor, hash(("left", number)), CHANGING, is_new=True)

    def keep(self, bit: int, tensor: torch.Tensor, original: torch.Tensor, position: int) -> bool:
        """Take an input by its value, if runs are compared by values and the step does not have it anew: a buffer as
        the run before left it."""
        if not self.by_value or bit & self.changing:
            return False
        if bit:
            self._kept[position] = tensor
        found = self._left.get(position, original)
        if found is None:
            return False
        self.values.kept(tensor, found, position)
        return True

    def held(self) -> list[Any]:
        """What the buffers hold after a run; None for one that the batch or a weight was written into."""
        return [self.values.content(tensor) for tensor in self._kept.values()]

    def wrote(self, bit: int, is_replaced: bool) -> None:
        """The step writes into a buffer, or binds it to another tensor, which no later run is given."""
        self.changing |= 0 if self.by_value else bit
        self.rebound |= bit * is_replaced

    def by_values(self) -> RecordedCalls:
        """For a first run that is compared by values, of the step that these are of."""
        recorded_calls = RecordedCalls(by_value=True)
        recorded_calls.changing |= self.rebound
        return recorded_calls

    def left(self) -> Callable[[], RecordedCalls]:
        """Makes the records of another run that begins as this one did, but for its buffers: they are as this one left
        them."""
        left = {position: self.values.copy_of(tensor) for position, tensor in self._kept.items()}

        def made() -> RecordedCalls:
            calls = RecordedCalls(by_value=True)
            calls.changing, calls._of_rows, calls._left = self.changing, set(self._of_rows), left
            return calls

        return made

    def _enter(self, tensor: torch.Tensor, key: int, behind: int, is_new: bool) -> None:
        """`is_new`: what its memory holds is."""
        self._known[id(tensor)] = (tensor, key, behind)
        self._old.discard(id(tensor))
        memory = _memory_of(tensor)
        if is_new or memory not in self._lying:
            self._lying[memory] = (tensor, key, behind)

    def comes_from_input(self, tensor: Any) -> bool:
        """True unless the tensor is known to be made of what no step changes."""
        known = self._known.get(id(tensor))
        return known is None or bool(known[2] & self.changing)

    def saw(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, line: Line | None,
        written: Sequence[torch.Tensor] = (), rows: Container[int] = (),
    ) -> None:  # fmt: skip
        """A call with what it returned, and those of its arguments that it wrote into. rows: the ids of tensors whose
        form is data, how many rows a mask selects."""
        name = getattr(function, "__name__", "")
        self.has_hooks |= function is torch.Tensor.register_hook
        owner = getattr(getattr(function, "__self__", None), "__name__", "") if name == "__get__" else ""
        results = result if isinstance(result, (tuple, list)) else (result,)
        made = [(i, item) for i, item in enumerate(results) if isinstance(item, torch.Tensor)]
        if not made and not written:
            return
        is_machinery = isinstance(function, OpOverload)  # called by torch itself, not in both runs alike
        if is_machinery and function.overloadpacket in _SAME:
            for _, item in made:
                lying = None if id(args[0]) in self._old else self._lying.get(_memory_of(item))
                self._known[id(item)] = (item, *(lying[1:] if lying else self._key(args[0], [])))
                self._old.discard(id(item))
            return
        if name in _UNWRITTEN:
            return
        numbers: list[Any] = []
        key, behind = self._key((args, kwargs), numbers)
        asked = form_argument(name)  # a call may look at the form of a tensor alone
        if asked is not None and len(args) > asked and isinstance(like := args[asked], torch.Tensor):
            if id(like) in rows:
                self._of_rows.add(key)
            elif key not in self._of_rows:
                form = (*args[:asked], tuple(like.shape), like.dtype, *args[asked + 1 :])
                key, behind = self._key((form, kwargs), numbers := [])
        key = hash((name or repr(function), owner, key))
        if behind and not is_machinery:
            self.made.append(RecordedCall(key, owner or name, line, tuple(numbers), behind))
        changed = {id(tensor) for tensor in written}
        passed = {id(arg) for arg in args} - changed  # x.to(x.device) is x
        for position, item in [*((0, tensor) for tensor in written), *made]:
            if id(item) not in passed:
                self._enter(item, hash((key, position)), behind, is_new=id(item) in changed)

    def way(self) -> int:
        """A key for the calls that steps make anew."""
        return hash(tuple(call.key for call in self.made if call.behind & self.changing))

    def read(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], line: Line | None) -> None:
        """A value that was taken out of tensors that no input is behind: they must be the same in the next run."""
        if self.by_value:
            return
        numbers: list[Any] = []
        key, _ = self._key((args, kwargs), numbers)
        name = getattr(function, "__name__", "")
        self.made.append(RecordedCall(hash((name, key)), name, line, tuple(numbers), _ALWAYS))

    def gave(self, result: Any, function: Any) -> Any:
        """What the run returned, which must be the same in the next run: nothing need be computed with it. function:
        that returned it; None for a module's own loss, beside which nothing leaves a step."""
        code = getattr(getattr(function, "forward", function), "__code__", None)
        line = None if code is None else (code.co_filename, code.co_firstlineno)
        for position, leaf in enumerate(() if function is None else take_apart(result, lenient=True).leaves):
            numbers: list[Any] = []
            is_known = isinstance(leaf, torch.Tensor) or type(leaf) in _COMPARED
            key, _ = self._key(leaf if is_known else type(leaf).__qualname__, numbers)
            self.made.append(RecordedCall(hash((GIVEN, position, key)), GIVEN, line, tuple(numbers), _ALWAYS))
        return result

    def draw(self, is_uniform: bool) -> float:
        """A random number that is made a float. is_uniform: between 0 and 1."""
        self.has_floats, self.has_any = True, self.has_any or not is_uniform
        return self.draws()

    def _key(self, value: Any, numbers: list[Any]) -> tuple[int, int]:
        if isinstance(value, torch.Tensor):
            held = self.values.content(value) if self.by_value and id(value) not in self._inputs else None
            if held is not None:
                return hash(held), _NOTHING
            known = self._known.get(id(value)) or self._lying.get(_memory_of(value))
            if known is None and self.shows_data and type(value) is torch.Tensor and value.device.type != "meta":
                return hash((tuple(value.shape), value.detach().cpu().numpy().tobytes())), _NOTHING
            if known is None:  # entered, or another run would take it for a view of it that this one makes first
                known = value, hash((tuple(value.shape), str(value.dtype))), _NOTHING
                self._enter(*known, is_new=False)
            is_carried = id(value) in self._old and known[2] & self.changing
            return hash(("carried", known[1])) if is_carried else known[1], known[2]
        if isinstance(value, (tuple, list)):
            parts = [self._key(item, numbers) for item in value]
        elif isinstance(value, dict):
            parts = [self._key(item, numbers) for item in value.values()]
            parts.append((hash(tuple(value)), _NOTHING))
        elif isinstance(value, slice):
            parts = [self._key(item, numbers) for item in (value.start, value.stop, value.step)]
        elif isinstance(value, np.ndarray):
            return hash(
                (value.shape, value.tobytes() if value.nbytes < _BYTES else value.ravel()[:1000].tobytes())
            ), _NOTHING
        elif isinstance(value, RowCount):
            numbers.append(1)
            return hash(("int", "1")), _NOTHING  # as it is in the second run
        elif isinstance(value, (int, float, complex, np.generic)):
            numbers.append(value)
            return hash((type(value).__name__, repr(value))), _NOTHING
        else:
            plain = isinstance(value, (str, bytes, type(None), torch.dtype, torch.device))
            return hash(repr(value) if plain else type(value).__qualname__), _NOTHING
        return hash(tuple(key for key, _ in parts)), functools.reduce(
            operator.or_, (bits for _, bits in parts), _NOTHING
        )


def _memory_of(tensor: torch.Tensor) -> Any:
    """Key a tensor by its memory: equal where the same values are shown there, its own for a tensor without any."""
    storage = storage_of(tensor)
    if storage is None:
        return id(tensor)
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def behind_of(position: int, entry: Input, tensor: torch.Tensor) -> int:
    """The bit of an input that is part of the model. A buffer has one of its own: what the step writes is changing."""
    if entry.kind == "buffer":
        return 2 << position
    is_frozen = entry.kind == "parameter" and not tensor.requires_grad and not entry.name.startswith(PARTNER)
    return _NOTHING if is_frozen else CHANGING


def first_difference(
    first: RecordedCalls, second: RecordedCalls
) -> tuple[RecordedCall | None, RecordedCall | None] | None:
    """The first calls that are not the same, None for a run that has ended; None altogether if there are none."""
    changing = first.changing | second.changing
    one_run, other_run = ([call for call in run.made if call.behind & changing] for run in (first, second))
    for one, other in zip(one_run, other_run, strict=False):
        if one.key != other.key:
            return one, other
    shorter = min(len(one_run), len(other_run))
    if len(one_run) == len(other_run):
        return None
    return one_run[shorter] if shorter < len(one_run) else None, (
        other_run[shorter] if shorter < len(other_run) else None
    )
