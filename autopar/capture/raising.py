"""A few torch functions, raised to semantic ops while a model is traced.

Which ones and how: `raised.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autopar.capture.data.casts import TO_WIDE, lifted, of_dtype, traced
from autopar.capture.data.coins import COMPARISONS, Coins
from autopar.capture.data.folding import FOLDED, folded
from autopar.capture.data.item_values import Items
from autopar.capture.data.origins import QUERIES, STEADY, Operands
from autopar.capture.data.reads import READERS, Reads
from autopar.capture.data.recorded_calls import RecordedCalls
from autopar.capture.data.same import compared, is_idle
from autopar.capture.data.selected import Selected
from autopar.capture.data.specialised import specialised
from autopar.capture.forks import Forks
from autopar.capture.inputs.arrays import FROM_ARRAY, BatchArray
from autopar.capture.inputs.outside import Outside, with_inputs
from autopar.capture.inputs.partners import Partners, check_plain, inlined
from autopar.capture.ops.functions import Dropout
from autopar.capture.ops.raised import ALWAYS, RAISED
from autopar.capture.ops.raised_lookups import counts_rows, looked_up
from autopar.capture.ops.validation import is_validation, note_of
from autopar.capture.python.ran import Ran
from autopar.capture.python.stand_in import with_tensors
from autopar.capture.refusals.constructs import NOTED, READS, REFUSED, SEEDED
from autopar.capture.refusals.explain_failure import SIZE, refusal, wants_data
from autopar.capture.refusals.location import Locator, is_user_code, user_frame
from autopar.errors import CaptureError
from autopar.ir.ops.ops import op
from autopar.torch_compat import in_transform

Tensor = torch.Tensor


class Raise(TorchFunctionMode):
    """Raises functions, and tells the locator of every call; without one, only those of `ALWAYS` are raised.

    `seed` feeds the random ops, which are told apart by their number: the count is kept as the seed of torch's own
    generator, so that `torch.utils.checkpoint`, which puts that back, draws the same again. `lift` is a dtype that
    all floating-point casts in the model go to instead of their own, and tensors of the user's that have another (see
    `verify` and `default_dtype`). `calls` is told
    of every call of the forward pass, and `calling` is the function that runs, or that failed. `reads` answers where
    the model reads a value; without it that is an error. `keeps_casts`: a cast to float32 of what is float32 leaves a
    trace, for under mixed precision it may be something else; and so do regions without autocast. `partners` are the
    other models that the loss may call. is_first: of the runs that are compared.
    """

    def __init__(
        self,
        locator: Locator | None = None,
        seed: Tensor | None = None,
        lift: torch.dtype | None = None,
        calls: RecordedCalls | None = None,
        reads: Reads | None = None,
        keeps_casts: bool = False,
        partners: Partners | None = None,
        is_first: bool = True,
    ) -> None:
        super().__init__()
        self.selected = Selected(is_first)
        self.locator = locator
        self.seed = seed
        self.lift = lift
        self.calls = calls or RecordedCalls()
        self.reads = reads
        self.keeps_casts = keeps_casts
        self.partners = partners
        self.device_type = seed.device.type if seed is not None else "cpu"
        self.calling: Any = None
        self.may_specialize = False  # where the function that failed reads what a step leaves as it is
        self.notes: dict[str, None] = {}
        self.validated: dict[str, None] = {}  # lines of the user's where torch.distributions checks its arguments
        self.random_ops: set[int] = set()
        self.items, self.forks = Items(), Forks()
        self.ran = Ran()
        self.inputs: dict[int, Tensor] = {}  # by the id of the parameter that each stands for
        self.outside: dict[int, Outside] = {}  # tensors of the user's that no input stands for
        self.origins, self.coins = self.calls.origins, Coins()
        self.values: list[Tensor] = []  # those whose values were read
        self._fork = torch.random.fork_rng(devices=[])

    def __enter__(self) -> Raise:
        self._fork.__enter__()
        torch.default_generator.manual_seed(_FIRST)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._fork.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self.ran.unwatched(func, types, args, kwargs):
            args, kwargs = with_tensors(func, *with_inputs((args, kwargs or {}), self.inputs))
            if func is inlined:
                return self.partners.met(args[0]) if self.partners is not None else check_plain(args[0])
            if func in FROM_ARRAY and args and isinstance(args[0], BatchArray):
                func, args, kwargs = FROM_ARRAY[func](*args, **kwargs)
            if self.keeps_casts and func in TO_WIDE:
                func, args, kwargs = traced(func, args, kwargs)
            asked = None
            if self.lift is not None:
                asked = func, args, kwargs
                func, args, kwargs = lifted(func, args, kwargs, self.lift)
                args, kwargs = of_dtype(func, args, kwargs, self.lift, partial(self.__torch_function__, Tensor.to, ()))
            if self.locator and self.keeps_casts:
                self.locator.exact = not torch.is_autocast_enabled(self.device_type)
            place = self.locator.mark() if self.locator else None
            self.calling = func
            if self.locator and func in COMPARISONS:
                func, args, kwargs = self._decided(func, args, kwargs)
            is_query = func in QUERIES or not self.locator
            before = Operands() if is_query else self.origins.operands(args, kwargs)
            if self.locator and func in FOLDED:
                value = self.origins.answer(func, args, kwargs, before)
                if value is not NotImplemented:
                    return self._took(func, args, kwargs, value)
                is_equal = compared(func, args)
                if is_equal is not None:
                    return is_equal
                number = self.coins.number(func, args)
                if number is not None:
                    return number
                if self.coins.is_float(func, args):
                    return self.calls.draw(user_frame(sys._getframe(1)))
                if is_validation(func, sys._getframe(1)):
                    self.validated[place[1] if place else ""] = None
                    return True
            if func in READERS and self.locator and self.locator.phase == "forward":
                may_specialize, line = not before.kinds & ~STEADY, user_frame(sys._getframe(1))
                is_item = func is Tensor.item and is_user_code(sys._getframe(1))  # .tolist() calls it too
                number = self.items.number(args[0], line, may_specialize) if is_item else NotImplemented
                if number is not NotImplemented and (self.reads is None or not may_specialize):
                    return number
                is_known = self.reads is not None and may_specialize
                side = self.forks.take(line) if func is Tensor.__bool__ and not is_known else None
                if side is not None:
                    return side
                if self.reads is not None:
                    return self.reads.take(func, args[0], line)
            if self.locator:
                self._see_outside(func, args)
            if self.locator and func in REFUSED and self.locator.phase == "forward":
                if is_idle(func, args):
                    return None
                raise refusal(REFUSED[func], user_frame(sys._getframe(1)))
            if func in NOTED and place and place[1]:
                self.notes[NOTED[func].format(place[1])] = None
            if self.captures and self._selects(func, args, kwargs) and not self._is_sized(before):
                result = folded(self.origins, func, args, kwargs, before)
                if result is NotImplemented:
                    result = self.selected.select(
                        func, args[0], user_frame(sys._getframe(1)), not before.kinds & ~STEADY
                    )
                else:
                    result = self._took(func, args, kwargs, result)
            elif self.selected.concerns(args, kwargs) and self._computes():
                result = self.selected.call(partial(self._run, before), func, args, kwargs)
            else:
                result = self._run(before, func, *args, **kwargs)
            if self.locator and place:
                written = [] if is_query else self.origins.saw(func, args, kwargs, before, result, asked)
                self.coins.saw(func, args, result, written)
                self.locator.adopt(result, place)
                if self.locator.phase == "forward":
                    self.calls.saw(func, args, kwargs, result, self.locator.line(place[1]), written)
            self.calling = None
            return result

    def _run(self, before: Operands, func: Any, *args: Any, **kwargs: Any) -> Any:
        """A call, raised if that is known of it."""
        result: Any = NotImplemented
        if func in ALWAYS:
            result = ALWAYS[func](self, *args, **kwargs)
        elif func in RAISED and self.captures and not in_transform():
            result = RAISED[func](*args, **kwargs)
        return self._called(func, args, kwargs, before) if result is NotImplemented else result

    @staticmethod
    def _selects(func: Any, args: Any, kwargs: Any) -> bool:
        """True where the places of a mask are asked for: a tensor a dim."""
        if (
            not args
            or len(args) > 1
            or not isinstance(args[0], Tensor)
            or args[0].ndim not in (1, 2)
            or args[0].numel() < 2
        ):
            return False
        return (func is torch.where and not kwargs) or (func in _NONZERO and kwargs == {"as_tuple": True})

    def _computes(self) -> bool:
        """True where the model runs: in the forward pass, or once more, as a checkpoint does in the backward pass."""
        return self.locator is not None and (self.locator.phase == "forward" or torch.is_grad_enabled())

    def _is_sized(self, before: Operands) -> bool:
        """True where the number of rows is taken from the example batch."""
        if self.reads is None or before.kinds & ~STEADY:
            return False
        line = user_frame(sys._getframe(2))
        self.reads.selected.add(line)
        return line in self.reads.sized

    def _decided(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """A comparison with a draw that comes out one way whatever is drawn, as a call that makes its result."""
        found = self.coins.decided(func, args, self.number_of)
        if found is None:
            return func, args, kwargs
        return torch.full, found, {"dtype": torch.bool, "device": next(t.device for t in args if isinstance(t, Tensor))}

    def number_of(self, tensor: Tensor) -> Any:
        """The value of a tensor that hangs on no input; NotImplemented of another one."""
        value = self.origins.answer(Tensor.item, (tensor,), {}, self.origins.operands(tensor, None))
        return value if value is NotImplemented else self._took(Tensor.item, (tensor,), {}, value)

    def _called(self, func: Any, args: Any, kwargs: Any, before: Operands) -> Any:
        """What torch gives, or where it wants data what is known of that without the data of an input."""
        try:
            if self.captures and counts_rows(func, args):
                raise RuntimeError(SIZE)
            return func(*args, **kwargs)
        except Exception as error:
            if not (self.locator and wants_data(error)):
                raise
            result = folded(self.origins, func, args, kwargs, before)
            if result is not NotImplemented:
                return self._took(func, args, kwargs, result)
            result = looked_up(func, args)
            if result is not NotImplemented:
                return result
            call = self._specialized(func, args, kwargs, before)
            if call is None:
                raise
        return call()

    def _specialized(self, func: Any, args: Any, kwargs: Any, before: Operands) -> Callable[[], Any] | None:
        """The call with the numbers of the example batch; without the permission just whether it would do."""
        if not self.locator or self.locator.phase != "forward":
            return None
        if func in READERS:
            self.may_specialize = not before.kinds & ~STEADY
            return None
        line = user_frame(sys._getframe(1))
        call, self.may_specialize = specialised(func, args, kwargs, self.reads, self.origins, line)
        return call

    def _took(self, func: Any, args: Any, kwargs: Any, value: Any) -> Any:
        """A value that hangs on no input: the next run must have the same, and the user's tensors behind it as well."""
        self.values[:] = {id(t): t for t in (*self.values, *self.origins.was_read.values())}.values()
        if self.locator and self.locator.phase == "forward":
            self.calls.read(func, args, kwargs, user_frame(sys._getframe(2)))
        self.calling = None
        return value

    def _see_outside(self, func: Any, args: Any) -> None:
        for arg in args:
            if type(arg) not in _REAL:
                continue
            if func in _TO_NUMPY:  # torch would give the memory of a stand-in, whatever is there
                raise refusal(READS[func], user_frame(sys._getframe(2)))
            if func in _TO_VALUES:
                self.values.append(arg)
            if arg.requires_grad and arg.is_leaf and id(arg) not in self.outside:
                self.outside[id(arg)] = Outside.of(arg, sys._getframe(2))

    def told(self) -> list[str]:
        """The notes of this run."""
        return [*self.notes, *([note_of(self.validated)] if self.validated else [])]

    @property
    def captures(self) -> bool:
        """True while a model is traced, False while the plain module runs for comparison."""
        return self.locator is not None

    def dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        """Dropout of the counter-based generator."""
        if not training or p == 0.0:
            return x
        result = Dropout.apply(x, self.seed, self._number(), float(p))
        return x.copy_(result) if inplace else result

    def drawing(self) -> tuple[Tensor, int]:
        """The seed, and the key of one more random op."""
        assert self.seed is not None
        return self.seed, self._number()

    def drew(self, tensor: Tensor) -> None:
        """A tensor of uniform draws."""
        self.coins.add(tensor)

    def draw(self, kind: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Numbers of the counter-based generator: uniform in [0, 1), standard normal, or exponential of rate 1."""
        sizes = list(shape)
        value: Tensor = op("random")(self.seed, self._number(), kind, sizes, dtype, sizes, sizes, [0] * len(sizes))
        return value

    def _number(self) -> int:
        """The number of a random op, which is its key."""
        assert self.seed is not None
        number = torch.default_generator.initial_seed() - _FIRST + 1
        if not 0 < number <= len(self.random_ops) + 1:
            raise refusal(SEEDED, user_frame(sys._getframe(1)))
        if self.locator and self.locator.phase == "backward" and number not in self.random_ops:
            raise CaptureError(
                "a random op inside torch.utils.checkpoint(preserve_rng_state=False) would draw other numbers when it "
                "is computed again, and the gradients would be wrong: leave preserve_rng_state at True."
            )
        self.random_ops.add(number)
        torch.default_generator.manual_seed(_FIRST + number)
        return number


@contextmanager
def idle_autocast(device_type: str) -> Iterator[None]:
    """Autocast to float32, which changes nothing in a model of that dtype: it shows where the model turns it off."""
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, torch.float32)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Where a dtype is given, new tensors that name none have it as long as the context lasts."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# Numbers begin here, so that a seed which the model sets is told from a number of ours.
_FIRST = 1 << 40

_REAL = (Tensor, torch.nn.Parameter)
_TO_NUMPY: frozenset[Any] = frozenset((Tensor.numpy, Tensor.__array__))
_TO_VALUES: frozenset[Any] = frozenset(
    (*READERS, Tensor.tolist, Tensor.__complex__, Tensor.__contains__, torch.equal, Tensor.equal)
)

_NONZERO = (torch.nonzero, Tensor.nonzero)
