"""A few torch functions, raised to semantic ops while a model is traced: `raised.py` says which ones and how."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autopar.capture.batch_forms import ASKED, is_asked_by_user
from autopar.capture.data.casts import TO_WIDE, lifted, of_dtype, traced
from autopar.capture.data.coins import COMPARISONS, decided
from autopar.capture.data.folding import FOLDED, folded
from autopar.capture.data.item_values import Items, asker
from autopar.capture.data.known_values import MEMORY, RANDOM, STEADY
from autopar.capture.data.open_classes import cut_later
from autopar.capture.data.reads import READERS, Reads
from autopar.capture.data.recorded_calls import RecordedCalls
from autopar.capture.data.row_counts import with_sizes
from autopar.capture.data.same import SET_DATA, compared, set_data
from autopar.capture.data.specialised import specialised
from autopar.capture.data_facts import DataFacts
from autopar.capture.draws.host_inputs import HostInputs
from autopar.capture.draws.step_coins import Coins
from autopar.capture.draws.trail import FIRST, numbered
from autopar.capture.forks import Forks
from autopar.capture.inputs.arrays import FROM_ARRAY, BatchArray
from autopar.capture.inputs.in_parts import InParts, whole_value, with_inputs
from autopar.capture.inputs.outside import Outside
from autopar.capture.inputs.partners import Partners, check_plain, inlined
from autopar.capture.model_call import ModelCall
from autopar.capture.ops.functions import Dropout
from autopar.capture.ops.raised import ALWAYS, raised
from autopar.capture.ops.raised_lookups import counts_rows, deep_copy, dense, rejoined, renormed
from autopar.capture.ops.raised_norms import NORMS, Norm, is_count, norm_of
from autopar.capture.ops.raised_recurrent import NOTE as PACKED_NOTE
from autopar.capture.ops.raised_recurrent import PACKING, Packs, PlainPacks
from autopar.capture.ops.validation import FAULTS, as_torch_says, is_validation, note_of
from autopar.capture.per_microbatch import dealt, dealt_plainly, in_microbatches
from autopar.capture.python.ran import Ran
from autopar.capture.python.stand_in import with_tensors
from autopar.capture.refusals.constructs import DENSE, NOTED, READS, REFUSED, SEEDED, SPARSE
from autopar.capture.refusals.explain_failure import SIZE, refusal, wants_data
from autopar.capture.refusals.location import Line, Locator, is_user_code, user_frame
from autopar.capture.rows.row_draws import PlainDraws
from autopar.capture.rows.selected import Selected
from autopar.capture.rows.selections import asks_for_places, masked
from autopar.errors import CaptureError
from autopar.ir.ops.op_facts import ALIKE, QUERIES
from autopar.ir.ops.ops import op
from autopar.torch_compat import PACK_PADDED, in_transform, no_function_modes, on_data

Tensor = torch.Tensor


class Raise(TorchFunctionMode):
    """Raises functions, and tells the locator of every call; without one, only those of `ALWAYS` are raised.

    `seed` feeds the random ops, which are told apart by their number: the count is kept as the seed of torch's own
    generator, so that `torch.utils.checkpoint`, which puts that back, draws the same again. `lift` is a dtype that
    all floating-point casts in the model go to instead of their own, and tensors of the user's that have another (see
    `verify` and `default_dtype`). `calls` is told of every call of the forward pass, and `calling` is the function that
    runs, or that failed. `reads` answers where the model reads a value; without its permission that is an error, and
    facts alone are asked for. `keeps_casts`: a cast to float32 of what is float32 leaves a trace, for under mixed
    precision it may be something else; and so do regions without autocast. `partners` are the other models that the
    loss may call. is_first: of the runs that are compared.
    """

    def __init__(
        self, locator: Locator | None = None, seed: Tensor | None = None, lift: torch.dtype | None = None,
        calls: RecordedCalls | None = None, reads: Reads | None = None, keeps_casts: bool = False,
        partners: Partners | None = None, is_first: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.selected = Selected(is_first, reads, locator)
        self.locator, self.seed, self.lift = locator, seed, lift
        self.calls = calls or RecordedCalls()
        self.reads, self.permitted = reads, reads if reads is not None and reads.is_permitted else None
        self.packs = PlainPacks() if locator is None else Packs()
        self.keeps_casts, self.partners = keeps_casts, partners
        self.device_type = seed.device.type if seed is not None else "cpu"
        self.calling: Any = None
        self.failed: tuple[Exception, Any] | None = None  # with the function that raised it
        self.may_specialize = False  # where the function that failed reads what a step leaves as it is
        self.notes: dict[str, None] = {}
        self.validated: dict[str, None] = {}  # lines of the user's where torch.distributions checks its arguments
        self.random_ops: set[int] = set()
        self.statistics = "batch"  # of which samples norms take mean and variance: the option `batch_statistics`
        self.microbatches = 1  # of all data ranks, for `autopar.per_microbatch`
        self.plain_norm: Callable[..., Any] | None = None  # of the plain module, where it takes those of groups
        self.items, self.forks, self.coins, self.plain = Items(), Forks(), Coins(), PlainDraws()
        self.hosts: HostInputs | None = None  # where numbers of the host are drawn
        self.ran = Ran()
        self.in_parts: InParts | None = None  # what lies in parts on ranks, and is none of the model's own
        self.inputs, self.outside = dict[int, Tensor](), dict[int, Outside]()  # the user's, by id: with inputs, without
        self.known, self._drew = self.calls.values, list[Tensor]()  # uniform draws of the call that runs
        self.facts = DataFacts(self.known, self.selected, reads, locator)
        self.values, self.differentiated = list[Tensor](), list[Tensor]()  # whose values, and gradients, were read
        self._fork = torch.random.fork_rng(devices=[])
        self._interceptors = tuple(self._in_order())

    def __enter__(self) -> Raise:
        self._fork.__enter__()
        torch.default_generator.manual_seed(FIRST)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.facts.forms is not None:
            self.facts.forms.end()
        self._fork.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self.ran.unwatched(func, types, args, kwargs):
            call = ModelCall(func, args, kwargs or {}, sys._getframe(1))
            results = (intercept(self, call) for intercept in self._interceptors)  # all: torch gives none, `y == None`
            return next((result for result in results if result is not NotImplemented), NotImplemented)

    def _in_order(self) -> Iterator[_Interceptor]:
        """What is done about each call, in this order, until one gives a result. They are functions, not methods of
        this object, which must not hold itself: the tensors of a trace go with it."""
        yield Raise._copy  # before the others, which would give it a copy of the memo; it becomes calls that they see
        yield Raise._put_inputs  # for a parameter of the user's or a number that stands for a tensor is no value
        yield Raise._set_data  # it becomes calls, which the others see
        yield Raise._make_dense  # before it is raised, also in the plain module: a program has no sparse gradients
        yield Raise._run_partner  # before anything takes the model that is called for an argument
        yield Raise._take_array  # it becomes a cast, which the next ones look at
        if self.keeps_casts:
            yield Raise._show_cast  # before `lift`, which would make of it a cast to another dtype
        if self.lift is not None:
            yield Raise._lift  # before anything is noted of the call: what is known is known of the lifted tensors
        if not self.captures:
            yield Raise._run_plain  # the plain module that is compared: nothing is noted, all has data
            return
        yield Raise._mark_place  # before all that can fail, or makes nodes
        yield Raise._decide_comparison  # it makes a constant of the call, which those after it see
        yield Raise._note_operands  # as they are before the call, in the form that runs
        yield Raise._give_value  # before the refusals: the same functions are refused where nothing gives their value
        yield Raise._see_outside  # after the values, for one that is read of a constant is compared as such
        yield Raise._refuse  # before the call changes anything
        yield Raise._compute  # the call itself, of which is noted what it gave

    # -- the call as another one --------------------------------------------------------------------------------

    def _put_inputs(self, call: ModelCall) -> Any:
        if self.coins.trail is not None:
            self.coins.join(partial(self.made, torch.where))
        given = with_inputs((call.args, call.kwargs), self.inputs, self.in_parts, call.frame)
        self.selected.refresh(self.made, given if self._computes() else (), call.function)
        made, mode, cut = whole_value(call.function, given[0], call.frame), self.__torch_function__, self.selected.cut
        if made is NotImplemented and self.captures:
            made = cut(mode, call.function, given[0], given[1], call.line)
        if made is NotImplemented:
            if self.hosts is not None:
                given = self.hosts.put(call.function, given[0], given[1], call.line, self._is_forward())
            call.function, call.args, call.kwargs = with_tensors(call.function, *given)
        return made

    def _make_dense(self, call: ModelCall) -> Any:
        if self.captures:
            call.args, call.kwargs = renormed(self.__torch_function__, call.function, call.args, call.kwargs)
        made = dense(call.function, call.args, call.kwargs)
        if made is not None:
            call.args, call.kwargs = made
            if self.captures and call.line:
                self.notes[DENSE.format(*call.line)] = None
        return NotImplemented

    def _set_data(self, call: ModelCall) -> Any:
        if not (self.captures and call.function == SET_DATA and isinstance(call.args[1], Tensor)):
            return NotImplemented
        return set_data(self.__torch_function__, self.known, self.selected.views.copies, *call.args)

    def _run_partner(self, call: ModelCall) -> Any:
        if call.function is not inlined:
            return NotImplemented
        return self.partners.met(call.args[0]) if self.partners is not None else check_plain(call.args[0])

    def _copy(self, call: ModelCall) -> Any:
        if call.function is not Tensor.__deepcopy__:
            return NotImplemented
        return deep_copy(self.__torch_function__, *call.args) if self.captures else call.function(*call.args)

    def _take_array(self, call: ModelCall) -> Any:
        if call.function in FROM_ARRAY and call.args and isinstance(call.args[0], BatchArray):
            call.function, call.args, call.kwargs = FROM_ARRAY[call.function](*call.args, **call.kwargs)
        return NotImplemented

    def _show_cast(self, call: ModelCall) -> Any:
        if call.function in TO_WIDE:
            is_itself, x = "copy" not in call.kwargs, call.args[0]
            call.function, call.args, call.kwargs = traced(call.function, call.args, call.kwargs)
            if is_itself and "copy" in call.kwargs and self.captures and self.known.is_input(x):
                return self.selected.views.copied(self.made, x)
        return NotImplemented

    def _lift(self, call: ModelCall) -> Any:
        assert self.lift is not None
        call.asked = call.function, call.args, call.kwargs
        call.function, args, kwargs = lifted(*call.asked, self.lift)
        convert = partial(self.__torch_function__, Tensor.to, ())
        call.args, call.kwargs = of_dtype(call.function, args, kwargs, self.lift, convert)
        return NotImplemented

    def _decide_comparison(self, call: ModelCall) -> Any:
        """Make of a comparison with a draw that comes out one way whatever is drawn a call that makes its result."""
        call.args = self.selected.order.with_number(call.function, call.args)
        if call.function in COMPARISONS:
            found = decided(self.known, call.function, call.args, partial(self._number_of, call))
            if found is not None:
                device = next(each.device for each in call.args if isinstance(each, Tensor))
                call.function, call.args, call.kwargs = torch.full, found, {"dtype": torch.bool, "device": device}
        return NotImplemented

    # -- what is known before it --------------------------------------------------------------------------------

    def _mark_place(self, call: ModelCall) -> Any:
        assert self.locator is not None
        if self.keeps_casts:
            self.locator.exact = not torch.is_autocast_enabled(self.device_type)
        call.place = self.locator.mark()
        self.calling = call.function
        return NotImplemented

    def _note_operands(self, call: ModelCall) -> Any:
        if call.function not in QUERIES:
            call.before = self.known.operands(call.args, call.kwargs)
        return NotImplemented

    def _see_outside(self, call: ModelCall) -> Any:
        """Note tensors of the user's that a gradient would go to, and those whose values are read."""
        for arg in call.args:
            if type(arg) not in (Tensor, torch.nn.Parameter):
                continue
            if arg.layout != torch.strided:
                raise refusal(SPARSE, call.line)
            if call.function in (Tensor.numpy, Tensor.__array__):  # torch would give the memory of a stand-in
                raise refusal(READS[call.function], call.line)
            if call.function in _TO_VALUES:
                self.values.append(arg)
            if arg.requires_grad and arg.is_leaf and id(arg) not in self.outside:
                self.outside[id(arg)] = Outside.of(arg, call.frame)
        return NotImplemented

    def _refuse(self, call: ModelCall) -> Any:
        if call.function in NOTED and call.place[1]:
            self.notes[NOTED[call.function].format(call.place[1])] = None
        if call.function in REFUSED and self._is_forward():
            raise refusal(REFUSED[call.function], call.line)
        return NotImplemented

    # -- a value that Python asks for ---------------------------------------------------------------------------

    def _give_value(self, call: ModelCall) -> Any:
        if call.function not in FOLDED or self.selected.order.mask_of(call.function, call.args) is not None:
            return NotImplemented
        values = (give(self, call) for give in _VALUES)
        return next((value for value in values if value is not NotImplemented), NotImplemented)

    def _updates(self, call: ModelCall) -> Any:
        """Any number, where a norm turns the count of its updates to one: what is raised reads the count itself."""
        if call.function not in (Tensor.item, Tensor.__float__) or not is_count(call.args[0], call.frame):
            return NotImplemented
        self.calling = None
        return 1.0

    def _constant(self, call: ModelCall) -> Any:
        value = self.known.answer(call.function, call.args, call.kwargs, call.before)
        return value if value is NotImplemented else self._took(call, value)

    def _same(self, call: ModelCall) -> Any:
        return compared(call.function, call.args)

    def _drawn(self, call: ModelCall) -> Any:
        is_drawn = call.function is Tensor.__float__ and call.before.kinds & ~MEMORY == RANDOM
        return self._take(call.args[0], call.line, float) if is_drawn and call.args[0].numel() == 1 else NotImplemented

    def _chance(self, call: ModelCall) -> Any:
        """What Python takes out of a tensor that random numbers alone decide: a truth or an integer."""
        is_drawn = call.function in READERS and call.before.kinds & ~MEMORY == RANDOM and self._is_forward()
        if not is_drawn or call.args[0].numel() != 1:
            return NotImplemented
        tensor, line = call.args[0], call.line
        is_int = call.function is Tensor.__int__ or not tensor.dtype.is_floating_point
        if call.function is Tensor.item and call.args[0].dtype != torch.bool:
            asked = (tensor, line, False, self._take)
            number = self.items.number(*asked, is_drawn=True) if is_user_code(call.frame) else NotImplemented
            if self.known.is_draw(tensor) and number is not NotImplemented:
                self.known.saw_draws(None, (), None, [number.tensor()])
            return number
        if call.function is Tensor.__bool__ or call.function is Tensor.item:
            return self._take(tensor, line, bool)
        return self._take(tensor, line, int) if is_int else NotImplemented

    def _take(self, tensor: Tensor, line: Line | None, read: Callable[[Any], Any]) -> Any:
        """What Python takes out of what random numbers decide; in a first capture a float that shows if it matters."""
        if read is float and self.hosts is None:
            return self.calls.draw(self.known.is_draw(tensor))
        if not self._is_forward():
            return NotImplemented
        with no_function_modes():  # no draw may decide otherwise
            sure = self.known.answer(read, (tensor,), {}, self.known.operands(tensor, None))
        if sure is not NotImplemented:
            return sure
        self.calls.read(read, (tensor,), {}, line)  # what it is computed of must be so in the next run
        return self.coins.take(tensor, line, read)

    def _checked(self, call: ModelCall) -> Any:
        """True for what torch.distributions asks of its arguments, with a note."""
        if not is_validation(call.function, call.frame):
            return NotImplemented
        self.validated[call.place[1]] = None
        return True

    def _read(self, call: ModelCall) -> Any:
        """A value of the data: an item that may stay a tensor, the side of a branch, or that of the example batch."""
        if call.function not in READERS or not self._is_forward():
            return NotImplemented
        may_specialize, line = not call.before.kinds & ~STEADY, call.line
        is_users, is_listed = asker(call.frame, line)
        asked = (call.args[0], line, may_specialize, self._guard, is_listed)
        number = self.items.number(*asked) if is_users and call.function is Tensor.item else NotImplemented
        is_known = self.permitted is not None and may_specialize
        if number is not NotImplemented and not is_known:
            number.span = self.selected.segments.span_of(call.args[0])
            return number
        is_truth = call.function is Tensor.__bool__ or call.args[0].dtype == torch.bool
        is_written = not call.before.kinds & MEMORY  # else it is nothing that another step could check
        if is_truth and is_written and not is_known:
            return self._guard(call.args[0], line, bool, call.function is Tensor.__bool__)
        return NotImplemented if self.permitted is None else self.permitted.take(call.function, call.args[0], line)

    def _as_array(self, call: ModelCall) -> Any:
        """Counts as an array of numbers that stay tensors, as `tolist()` gives them."""
        is_asked = call.function is Tensor.numpy and self._is_forward() and is_user_code(call.frame)
        given = self.selected.segments.elements(self.__torch_function__, call.args[0]) if is_asked else []
        return self.items.array(given, call.line, self._guard) if given else NotImplemented

    def _guard(self, tensor: Tensor, line: Line | None, read: Callable[[Any], Any], may_fork: bool = False) -> Any:
        """The truth of data, of which each step checks that it is so; NotImplemented as long as nothing is guarded."""
        side = self.selected.asks(tensor, line) if read is bool else NotImplemented
        side = self.forks.take(line, may_fork) if side is None else side
        if side is not None or self.reads is None or not self.reads.guards:
            return NotImplemented if side is None else side
        last = self.calls.made[-1].function if self.calls.made else ""
        return self.reads.guard(tensor, line, last == "all")

    def _equal(self, call: ModelCall) -> Any:
        """Whether tensors are alike, as the truth of a tensor."""
        if call.function not in ALIKE or not self._is_forward():
            return NotImplemented
        is_known = self.permitted is not None and not call.before.kinds & ~STEADY
        if not is_known and (self.reads is None or not self.reads.guards):
            return self._guard(call.args[0], call.line, bool)
        compare, together = ALIKE[call.function]
        truth = self.made(together, self.made(compare, *call.args, **call.kwargs))
        if is_known and self.permitted is not None:
            return self.permitted.take(Tensor.__bool__, truth, call.line)
        return self._guard(truth, call.line, bool)

    def _number_of(self, call: ModelCall, tensor: Tensor) -> Any:
        """The value of a tensor that hangs on no input; NotImplemented of another one."""
        return self._constant(
            ModelCall(Tensor.item, (tensor,), {}, call.frame, before=self.known.operands(tensor, None))
        )

    def _took(self, call: ModelCall, value: Any) -> Any:
        """A value that hangs on no input: the next run must have the same, and the user's tensors behind it as well."""
        self.values[:] = {id(t): t for t in (*self.values, *self.known.was_read.values())}.values()
        if self._is_forward():
            self.calls.read(call.function, call.args, call.kwargs, call.line)
        self.calling = None
        return value

    # -- the call itself ----------------------------------------------------------------------------------------

    def _compute(self, call: ModelCall) -> Any:
        """The result of a call, of which all is noted that others ask for."""
        assert self.locator is not None
        func, args, kwargs, before = call.function, call.args, call.kwargs, call.before
        if self.hosts is not None:
            if func in FROM_ARRAY and not before.tensors:
                with no_function_modes(), on_data():
                    return self.hosts.enter(func(*args, **kwargs))
            for operand in before.tensors:
                self.hosts.enter(operand)
        args, kwargs = with_sizes(func, args, kwargs) if self.selected.known else (args, kwargs)  # of selected rows
        if asks_for_places(func, args, kwargs) and not self._is_sized(call, before.kinds):
            result = folded(self.known, func, args, kwargs, before)
            if result is NotImplemented:
                result = self.selected.places_of(func, kwargs, args[0], call.line, not before.kinds & ~STEADY)
            else:
                result = self._took(call, result)
        elif (packed := self._packs(call)) is not NotImplemented:
            result = packed
        elif (turned := self.facts.turned(func, args, kwargs, call.line)) is not None:
            result = turned
        else:
            function, given = self._by_places(call, args) if self._computes() else (func, args)
            is_followed, run = self._computes() and self.selected.concerns(given, kwargs), partial(self._run, call)
            result = (
                self.selected.call(run, function, given, kwargs) if is_followed else run(function, *given, **kwargs)
            )
        self.selected.saw(func, args, kwargs, result, self._computes())
        written = [] if func in QUERIES else self.known.saw(func, args, kwargs, before, result, call.asked)
        self.selected.order.saw(func, args, kwargs, result, written)
        self.selected.views.wrote(self.made, written if self._computes() else ())
        self.known.saw_draws(func, args, result, self._drew)
        self._drew.clear()
        self.locator.adopt(result, call.place)
        if self._is_forward():
            self.calls.saw(func, args, kwargs, result, self.locator.line(call.place[1]), written, self.selected.known)
            if self.coins.trail is not None and func not in QUERIES:
                self.coins.trail.saw(func, args, kwargs, result, written)
        self.calling = None
        return result

    def _by_places(self, call: ModelCall, args: Any) -> tuple[Any, Any]:
        """A function and its arguments, with the places of a mask in its place where rows are taken or put by it."""
        function, given, mask = masked(call.function, args, self.selected.is_first)
        kinds = 0 if mask is None else self.known.operands(args[1], None).kinds
        found = None
        if mask is not None and kinds and not self._is_sized(call, kinds):
            found = self.selected.by_places(call.function, given, mask, call.line, not kinds & ~STEADY)
        return (call.function, args) if found is None else (function, found)

    def _run_plain(self, call: ModelCall) -> Any:
        if call.function is in_microbatches:
            return dealt_plainly(call.args[0], self.microbatches, call.line)
        self.plain.saw(call.function, call.args, call.kwargs)
        made = self.packs.call(self, call.function, call.args, call.kwargs, call.frame)
        return self._run(call, call.function, *call.args, **call.kwargs) if made is NotImplemented else made

    def _run(self, call: ModelCall, func: Any, *args: Any, **kwargs: Any) -> Any:
        """What a function gives, raised if that is known of it. What fails so is told in torch's words."""
        try:
            result = self._form(call, func, args, kwargs)
        except FAULTS as error:
            raise as_torch_says(error, func, args, kwargs) from None
        return self._called(call, func, args, kwargs) if result is NotImplemented else result

    def _form(self, call: ModelCall, func: Any, args: Any, kwargs: Any) -> Any:
        result: Any = NotImplemented
        if func in ALWAYS:
            result = ALWAYS[func](self, *args, **kwargs)
        elif func is in_microbatches:
            result = dealt(args[0], self.microbatches)
        elif func in NORMS and not in_transform():
            result = self._norm(func, norm_of(call.frame), *args, **kwargs)
        elif self.captures and not in_transform():
            result = raised(self.made, func, args, kwargs)
        if result is NotImplemented and self.selected.tracer is not None and not in_transform():
            result = rejoined(func, args, kwargs, self.selected.tracer.node_of)
        if result is NotImplemented and func in ASKED and self._asks(call):
            result = ASKED[func](self.facts, *args, **kwargs)
        return result

    def _norm(self, func: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        if self.captures:
            return NORMS[func](Norm(self.statistics, module), *args, **kwargs)
        return NotImplemented if self.plain_norm is None else self.plain_norm(func, module, args, kwargs)

    def _packs(self, call: ModelCall) -> Any:
        """What a call gives that packs sequences, or takes packed ones; NotImplemented for another one."""
        self.facts.line = call.line if call.function in PACKING else self.facts.line
        made = self.packs.call(self, call.function, call.args, call.kwargs, call.frame)
        if call.function is PACK_PADDED:
            self.notes[PACKED_NOTE] = None
        return made

    def _asks(self, call: ModelCall) -> bool:
        """True where a fact of the data may be asked for."""
        self.facts.line, self.facts.is_users = call.line, is_asked_by_user(call.frame)
        return self.captures and not in_transform() and not self.selected.is_inside

    def _called(self, call: ModelCall, func: Any, args: Any, kwargs: Any) -> Any:
        """What torch gives, or where it wants data what is known of that without the data of an input."""
        try:
            if self.captures and counts_rows(func, args):
                raise RuntimeError(SIZE)
            return func(*args, **kwargs)
        except Exception as error:
            if not (self.captures and wants_data(error)):
                raise
            result = folded(self.known, func, args, kwargs, call.before)
            if result is not NotImplemented:
                return self._took(ModelCall(func, args, kwargs, call.frame), result)
            result = self.selected.views.call(self.made, func, args, kwargs, self._is_drawn)
            if result is not NotImplemented:
                return result
            specialized = self._specialized(call, func, args, kwargs) or cut_later(func, args, kwargs, call.line)
            if specialized is None:
                self.failed = error, func
                raise
        return specialized()

    def _specialized(self, call: ModelCall, func: Any, args: Any, kwargs: Any) -> Callable[[], Any] | None:
        """The call with the numbers of the example batch; without the permission just whether it would do."""
        if not self._is_forward():
            return None
        if func in READERS:
            self.may_specialize = not call.before.kinds & ~STEADY
            return None
        specialized, self.may_specialize = specialised(func, args, kwargs, self.permitted, self.known, call.line)
        return specialized

    def _is_sized(self, call: ModelCall, kinds: int) -> bool:
        """True where the number of rows is taken from the example batch."""
        if self.permitted is None or kinds & ~STEADY:
            return False
        self.permitted.selected.add(call.line)
        return call.line in self.permitted.sized

    def _is_drawn(self, tensor: Tensor) -> bool:
        return self.known.operands(tensor, None).kinds & ~MEMORY == RANDOM

    def _is_forward(self) -> bool:
        return self.locator is not None and self.locator.phase == "forward"

    def _computes(self) -> bool:
        """True where the model runs: in the forward pass, or once more, as a checkpoint does in the backward pass."""
        return self._is_forward() or torch.is_grad_enabled()

    # -- what it is asked for -----------------------------------------------------------------------------------

    def culprit(self) -> Any:
        """The function that runs, or that raised the error on its way: others run meanwhile, as what no_grad() ends."""
        error = sys.exc_info()[1]
        return self.failed[1] if self.failed is not None and self.failed[0] is error else self.calling

    def told(self) -> list[str]:
        """The notes of this run."""
        return [*self.notes, *([note_of(self.validated)] if self.validated else [])]

    @property
    def captures(self) -> bool:
        """True while a model is traced, False while the plain module runs for comparison."""
        return self.locator is not None

    def made(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """What a call gives that is made like one of the model's."""
        return self.__torch_function__(function, (), args, kwargs)

    def dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        """Dropout of the counter-based generator."""
        if not training or p == 0.0:
            return x
        result = self.plain.drawn(number := self._number(), x, lambda x: Dropout.apply(x, self.seed, number, float(p)))
        return x.copy_(result) if inplace else result

    def drawing(self) -> tuple[Tensor, int]:
        """The seed, and the key of one more random op."""
        assert self.seed is not None
        return self.seed, self._number()

    def drew(self, tensor: Tensor) -> None:
        """A tensor of uniform draws."""
        self._drew += [tensor] * self.captures

    def draw(self, kind: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Numbers of the counter-based generator: uniform in [0, 1), standard normal, or exponential of rate 1."""
        sizes = list(shape)
        value: Tensor = op("random")(self.seed, self._number(), kind, sizes, dtype, sizes, sizes, [0] * len(sizes))
        return value

    def _number(self) -> int:
        """The number of a random op, which is its key."""
        assert self.seed is not None
        number = self.plain.next(numbered() + 1, self.random_ops)
        if not 0 < number <= len(self.random_ops) + 1:
            raise refusal(SEEDED, user_frame(sys._getframe(1)))
        if self.locator and not self._is_forward() and self._computes() and number not in self.random_ops:
            raise CaptureError(
                "a random op inside torch.utils.checkpoint(preserve_rng_state=False) would draw other numbers when it "
                "is computed again, and the gradients would be wrong: leave preserve_rng_state at True."
            )
        self.random_ops.add(number)
        torch.default_generator.manual_seed(FIRST + number)
        return number


_TO_VALUES = frozenset(READERS) | {Tensor.tolist, Tensor.__complex__, Tensor.__contains__, torch.equal, Tensor.equal}
_Interceptor = Callable[[Raise, ModelCall], Any]
# Who gives a value that Python asks for, the surest first.
_VALUES: tuple[_Interceptor, ...] = (
    Raise._updates,  # it is raised with the call that follows
    Raise._constant,  # what hangs on no input is the same in each step
    Raise._same,  # so is the comparison of a tensor with itself
    Raise._drawn,  # before `_read`: a draw is no data of the batch
    Raise._chance,  # nor is what is computed of draws
    Raise._equal,
    Raise._checked,  # before `_read`, which would take a check for a branch of the model
    Raise._read,
    Raise._as_array,
)
