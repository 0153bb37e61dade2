"""A few torch functions, raised to semantic ops while a model is traced.

Each entry of `RAISED` takes the arguments of its torch function and returns a result with the same value and
gradients, or `NotImplemented` to leave the call to torch (right all the same, only less can be split).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from autopar.capture.arrays import FROM_ARRAY, BatchArray
from autopar.capture.calls import Calls
from autopar.capture.casts import TO_WIDE, lifted, traced
from autopar.capture.coins import COMPARISONS, Coins
from autopar.capture.constructs import NOTED, READS, REFUSED, SEEDED
from autopar.capture.explain import refusal, wants_data
from autopar.capture.folding import FOLDED, folded, with_numbers
from autopar.capture.functions import Dropout
from autopar.capture.location import Locator, user_frame
from autopar.capture.origins import QUERIES, STEADY, Operands
from autopar.capture.outside import Outside
from autopar.capture.partners import Partners, check_plain, inlined
from autopar.capture.raised_attention import attention, multi_head_attention
from autopar.capture.raised_experts import grouped_mm
from autopar.capture.raised_lookups import embedding_bag, fill_diagonal_, put, take, where, where_self
from autopar.capture.raised_losses import (
    ELEMENTWISE,
    batch_norm,
    cross_entropy,
    ctc_loss,
    embedding,
    instance_norm,
    linear_cross_entropy,
    log_softmax,
    nll_loss,
    rms_norm,
    with_reduction,
)
from autopar.capture.raised_products import (
    CONVOLUTIONS,
    addmm,
    bilinear,
    einsum,
    linear,
    matmul,
    rmatmul,
    with_bias_apart,
)
from autopar.capture.raised_random import RANDOM
from autopar.capture.raised_windows import as_strided, average_pool_of
from autopar.capture.reads import READERS, Reads
from autopar.capture.selected import Selected
from autopar.capture.stand_in import with_tensors
from autopar.capture.validation import is_validation, note_of
from autopar.errors import CaptureError
from autopar.ir.ops import op
from autopar.torch_compat import GROUPED_MM, in_transform

Tensor = torch.Tensor


class Raise(TorchFunctionMode):
    """Raises functions, and tells the locator of every call; without one, only those of `_ALWAYS` are raised.

    `seed` feeds the random ops, which are told apart by their number: the count is kept as the seed of torch's own
    generator, so that `torch.utils.checkpoint`, which puts that back, draws the same again. `lift` is a dtype that
    all floating-point casts in the model go to instead of their own (see `verify` and `default_dtype`). `calls` is told
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
        calls: Calls | None = None,
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
        self.calls = calls or Calls()
        self.reads = reads
        self.keeps_casts = keeps_casts
        self.partners = partners
        self.device_type = seed.device.type if seed is not None else "cpu"
        self.calling: Any = None
        self.may_specialize = False  # where the function that failed reads what a step leaves as it is
        self.notes: dict[str, None] = {}
        self.validated: dict[str, None] = {}  # lines of the user's where torch.distributions checks its arguments
        self.random_ops: set[int] = set()
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
        args, kwargs = with_tensors(func, args, kwargs or {})
        if func is inlined:
            return self.partners.met(args[0]) if self.partners is not None else check_plain(args[0])
        if func in FROM_ARRAY and args and isinstance(args[0], BatchArray):
            func, args, kwargs = FROM_ARRAY[func](*args, **kwargs)
        if self.keeps_casts and func in TO_WIDE:
            func, args, kwargs = traced(func, args, kwargs)
        if self.lift is not None:
            func, args, kwargs = lifted(func, args, kwargs, self.lift)
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
            number = self.coins.number(func, args)
            if number is not None:
                return number
            if is_validation(func, sys._getframe(1)):
                self.validated[place[1] if place else ""] = None
                return True
        if self.reads is not None and func in READERS and self.locator and self.locator.phase == "forward":
            return self.reads.take(func, args[0], user_frame(sys._getframe(1)))
        if self.locator:
            self._see_outside(func, args)
        if self.locator and func in REFUSED and self.locator.phase == "forward":
            raise refusal(REFUSED[func], user_frame(sys._getframe(1)))
        if func in NOTED and place and place[1]:
            self.notes[NOTED[func].format(place[1])] = None
        if self.captures and self._selects(func, args, kwargs):
            result = folded(self.origins, func, args, kwargs, before)
            if result is NotImplemented:
                result = self.selected.select(func, args[0], user_frame(sys._getframe(1)))
            else:
                result = self._took(func, args, kwargs, result)
        elif self.selected.concerns(args, kwargs) and self.locator and self.locator.phase == "forward":
            result = self.selected.call(partial(self._run, before), func, args, kwargs)
        else:
            result = self._run(before, func, *args, **kwargs)
        if self.locator and place:
            written = [] if is_query else self.origins.saw(func, args, kwargs, before, result)
            self.coins.saw(func, args, result, written)
            self.locator.adopt(result, place)
            if self.locator.phase == "forward":
                self.calls.saw(func, args, kwargs, result, self.locator.line(place[1]), written)
        self.calling = None
        return result

    def _run(self, before: Operands, func: Any, *args: Any, **kwargs: Any) -> Any:
        """A call, raised if that is known of it."""
        result: Any = NotImplemented
        if func in _ALWAYS:
            result = _ALWAYS[func](self, *args, **kwargs)
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
            return func(*args, **kwargs)
        except Exception as error:
            if not (self.locator and wants_data(error)):
                raise
            result = folded(self.origins, func, args, kwargs, before)
            if result is not NotImplemented:
                return self._took(func, args, kwargs, result)
            changed = self._specialized(func, args, kwargs, before)
            if changed is None:
                raise
        return func(*changed[0], **changed[1])

    def _specialized(self, func: Any, args: Any, kwargs: Any, before: Operands) -> tuple[Any, Any] | None:
        """The arguments with the numbers of the example batch for tensors of one integer; without the permission just
        whether it would do."""
        if not self.locator or self.locator.phase != "forward":
            return None
        if func in READERS:
            self.may_specialize = not before.kinds & ~STEADY
            return None
        line, reads = user_frame(sys._getframe(1)), self.reads
        numbers: list[Tensor] = []

        def number_of(tensor: Tensor) -> Any:
            numbers.append(tensor)
            return NotImplemented if reads is None else reads.take(Tensor.__int__, tensor, line)

        changed = with_numbers(func, args, kwargs, number_of, lambda mask: NotImplemented)
        self.may_specialize = bool(numbers) and not self.origins.operands(numbers, None).kinds & ~STEADY
        return changed

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
# Raised also where the plain module is run for comparison: what draws random numbers, or may, and what torch cannot
# compute in float64.
_ALWAYS: dict[Any, Callable[..., Any]] = {
    **RANDOM,
    F.scaled_dot_product_attention: attention,
    F.multi_head_attention_forward: multi_head_attention,
    GROUPED_MM: grouped_mm,
}


RAISED: dict[Any, Callable[..., Any]] = {
    F.linear: linear,
    torch.matmul: matmul,
    Tensor.matmul: matmul,
    Tensor.__matmul__: matmul,
    Tensor.__rmatmul__: rmatmul,
    torch.bmm: matmul,
    Tensor.bmm: matmul,
    torch.mm: matmul,
    Tensor.mm: matmul,
    torch.addmm: addmm,
    Tensor.addmm: addmm,
    torch.einsum: einsum,
    **dict.fromkeys((F.bilinear, torch.bilinear), bilinear),
    **dict.fromkeys((torch.take, Tensor.take), take),
    **dict.fromkeys((torch.put, Tensor.put), put),
    Tensor.fill_diagonal_: fill_diagonal_,
    F.cross_entropy: cross_entropy,
    F.nll_loss: nll_loss,
    **dict.fromkeys((F.ctc_loss, torch.ctc_loss), ctc_loss),
    getattr(F, "linear_cross_entropy", None): linear_cross_entropy,  # torch 2.13 has it
    **dict.fromkeys((F.log_softmax, torch.log_softmax, Tensor.log_softmax), log_softmax),
    F.adaptive_avg_pool1d: average_pool_of(1),
    F.adaptive_avg_pool2d: average_pool_of(2),
    F.adaptive_avg_pool3d: average_pool_of(3),
    torch.as_strided: as_strided,
    Tensor.as_strided: as_strided,
    F.embedding: embedding,
    F.embedding_bag: embedding_bag,
    torch.where: where,
    Tensor.where: where_self,
    F.batch_norm: batch_norm,
    **dict.fromkeys((F.rms_norm, torch.rms_norm), rms_norm),
    F.instance_norm: instance_norm,
    **{function: with_bias_apart(function) for function in CONVOLUTIONS},
    **{loss: with_reduction(loss) for loss in ELEMENTWISE},
}
