"""Rows that a mask selects (`torch.where(mask)`, `mask.nonzero(as_tuple=True)`): as many as the data say.

A loop over experts takes the tokens of each, and adds what comes out to their rows. Here all places of the mask are
taken, and those where it is False are padding, which nobody may see: what is made of such rows is followed through the
model, and every function on the way must take each row by itself. Where they are added back the padding adds nothing.
Products leave it out at run time, as those by expert do, so that a loop over experts computes no more than it should.

How many rows there are shows nowhere in the tensors. So that no number is made of it, the second run of the capture
(see `determinism.py`) has one row, and whatever depends on the number differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from autopar.capture.data.reads import ANY_ROWS, Branches, Reads
from autopar.capture.data.row_counts import RowCount, counted, counts_in, sizes_in
from autopar.capture.refusals.constructs import SIZES, Construct
from autopar.capture.refusals.explain_failure import size_refusal, wants_data
from autopar.capture.refusals.location import Line, Locator
from autopar.capture.rows.classes import unique
from autopar.capture.rows.row_draws import RowDraws
from autopar.capture.rows.row_places import added, as_index_add, column_of, indexed, picked, places_in_range
from autopar.capture.rows.row_rules import (
    AddedRows,
    Guard,
    Refused,
    Run,
    ValidRows,
    Value,
    are_views,
    follow_rows,
    looks_up,
    loss_of_rows,
    only_valid,
    product,
    puts_back,
    repeated_rows,
    source_of,
    together,
)
from autopar.capture.rows.row_sides import lies_at
from autopar.capture.rows.segments import Segments
from autopar.capture.rows.selections import NONZERO, mask_of, selecting
from autopar.capture.rows.turns import MaskOrder
from autopar.capture.trace.computed_views import STRIDED, ComputedViews, note_origin
from autopar.capture.trace.tracer import Tracer
from autopar.errors import CaptureError
from autopar.ir.ops.op_facts import QUERIES, form_argument, writes_first
from autopar.torch_compat import custom_function, storage_of

Tensor = torch.Tensor


@dataclass(slots=True)
class Selected:
    """The tensors of a run whose rows a mask selected. is_first: of the run that is captured; a later one has one row
    and is not looked at."""

    is_first: bool = True
    reads: Reads | None = None
    locator: Locator | None = None
    known: dict[int, ValidRows] = field(default_factory=dict)
    tracer: Tracer | None = None  # of the run that is captured
    masks: dict[Any, tuple[Tensor, tuple[Tensor, ...]]] = field(default_factory=dict)  # by what each is: it, its places
    sums: dict[int, AddedRows] = field(default_factory=dict)  # rows of a tensor with something added, by their id
    order: MaskOrder = field(init=False)
    asked: set[int] = field(default_factory=set)  # ids of what says which rows count, where it is asked how many do
    taken: set[int] = field(default_factory=set)  # likewise, where rows are taken together
    decided: dict[tuple[int, int], tuple[Tensor, bool]] = field(default_factory=dict)  # masks, and if they select any
    _shown_masks: dict[Any, Tensor] = field(default_factory=dict)  # of those that lie alike the first
    is_inside: bool = False  # of a call that is followed: torch may spell it out in calls of its own
    draws: RowDraws = field(default_factory=RowDraws)
    segments: Segments = field(default_factory=Segments)
    views: ComputedViews = field(default_factory=ComputedViews)

    def __post_init__(self) -> None:
        self.order = MaskOrder(self.locator, Branches() if self.reads is None else self.reads.branches)

    def concerns(self, args: Any, kwargs: Any) -> bool:
        """True if a call takes such rows."""
        return bool(self.known) and not self.is_inside and next(self.rows_in((args, kwargs)), None) is not None

    @property
    def may_specialize(self) -> bool:
        """True if any of them could be taken by a number of the example batch."""
        return any(rows.may_specialize for rows in self.known.values())

    def asks(self, truth: Tensor, line: Line | None) -> bool | None:
        """What a branch is told that asks for a number of rows; None for another one, and where each is guarded."""
        is_followed = self.reads is not None and not self.reads.counts and not self.reads.branches.is_off
        return self.order.asks(truth, line) if is_followed else None

    def select(
        self, function: Any, condition: Tensor, line: Line | None, may_specialize: bool = False
    ) -> tuple[Tensor, ...]:
        """The places of all elements of a condition, in torch's order; none where it has no rows."""
        valid = (condition != 0).reshape(-1)
        number, has_rows = self.order.begin(valid, line, condition)
        has_rows = self._has_rows(condition, function, line) and has_rows
        valid = self.order.narrowed(valid, condition)
        count = (valid.numel() if self.is_first else min(valid.numel(), 1)) if has_rows else 0
        places, step = [], 1
        every = torch.arange(count, device=condition.device)
        for size in reversed(condition.shape):
            places.append((every // step) % max(size, 1))
            step *= size
        places.reverse()
        for dim, place in enumerate(places if self.is_first and has_rows else ()):
            self.known[id(place)] = ValidRows(
                place, valid, 0, line, function, tuple(condition.shape), dim, may_specialize
            )
        self.order.selected(number, places, condition)
        return tuple(places)

    def places_of(self, function: Any, kwargs: Any, mask: Tensor, line: Line | None, may_specialize: bool) -> Any:
        """The places of a mask as a call gives them: a tensor for each dim, or a row for each place."""
        places = self.select(function, mask, line, may_specialize)
        if function not in NONZERO or kwargs.get("as_tuple"):
            return places
        made = places[0].unsqueeze(1) if len(places) == 1 else torch.stack(places, 1)
        self.order.gave(places, made)
        if id(places[0]) in self.known:
            self.known[id(made)] = replace(self.known[id(places[0])], tensor=made, place=None, columns=places)
        return made

    def by_places(
        self, function: Any, args: Any, mask: Tensor, line: Line | None, may_specialize: bool
    ) -> tuple[Any, ...] | None:  # fmt: skip
        """The arguments of `x[mask]`, and of `x[mask] = rows` for rows that the mask selected, with its places in place
        of the mask; None for another call."""
        has_rows = self._has_rows(mask, function, line)
        if self.is_inside or self.row_of(args[0]) is not None or self.row_of(mask) is not None:
            return None  # see `_again`
        if not has_rows and mask.numel():
            return _of_none(function, args, mask)
        key = args[1] if isinstance(args[1], tuple) else (args[1],)
        known = self.masks.get(self._mask_key(mask))
        if function is Tensor.__setitem__:
            is_mine = isinstance(args[2], Tensor) and (self.row_of(args[2]) is not None or not self.is_first)
            if known is None or not is_mine or args[2].shape[:1] != known[1][0].shape:
                return None
        if known is None:
            known = mask, self.select(function, mask, line, may_specialize)
            self.masks[self._mask_key(mask)] = known
        return args[0], (*known[1], *key[1:]), *args[2:]

    def _mask_key(self, mask: Tensor) -> Any:
        """What a mask is made of: two of the same are one. In a run that is not looked at all of a shape are."""
        mask = self._shown_masks.setdefault(lies_at(mask), mask)
        if self.order.sides is not None:
            return self.order.sides.trail.made_of(mask), mask._version
        if not self.is_first or self.tracer is None:
            return tuple(mask.shape)
        node = self.tracer.node_of(mask)
        return (id(mask) if node is None else _made_of(node)), mask._version

    def enter(self, rows: Tensor, valid: Tensor, function: Any, line: Line | None) -> Tensor:
        """Note rows, of which those count where `valid` is True: one of them in a run that is not looked at."""
        if not self.is_first:
            return rows[:1]
        self.known[id(rows)] = ValidRows(rows, valid, 0, line, function)
        return rows

    def all_rows(self, rows: Tensor, valid: Tensor) -> Tensor | None:
        """All of the rows of which `valid` was noted; None for others."""
        if not self.is_first:
            return rows[:1].expand(len(valid), *rows.shape[1:])
        mine = self.row_of(rows)
        return rows if mine is not None and mine.valid is valid and mine.dim == 0 else None

    def rows_in(self, value: Any) -> Iterator[ValidRows]:
        """Find the selected rows among the arguments of a call."""
        if isinstance(value, Tensor):
            found = self.known.get(id(value))
            if found is not None and found.tensor is value:
                yield found
        elif isinstance(value, (tuple, list)):
            for item in value:
                yield from self.rows_in(item)
        elif isinstance(value, dict):
            yield from self.rows_in(list(value.values()))
        elif isinstance(value, RowCount):
            yield value.rows

    def saw(self, function: Any, args: Any, kwargs: Any, result: Any, computes: bool) -> None:
        """A call with what it returned. computes: it is the model's."""
        self.segments.saw(function, args, kwargs, result)
        note_origin(function, args, kwargs, result)
        if computes and not self.segments.is_cutting and selecting(function, args, kwargs) is not None:
            mine = None if self.row_of(args[0]) else next(self.rows_in(result), None)
            self.draws.selected(None if mine is None else mine.valid)

    def refresh(self, run: Run, given: Any, function: Any = None) -> None:
        """Look up again what a call is given whose original was written since. What the model returns is given to calls
        in any case: it is asked for its form."""
        if function in STRIDED:
            self.views.check_strides(_tensors_in(given))
        if self.views.are_stale:
            self.views.refresh(run, _tensors_in(given))

    def call(self, run: Run, function: Any, args: Any, kwargs: Any) -> Any:
        """A call that takes such rows. Raises CaptureError unless it takes each by itself."""
        rows, name = list(self.rows_in((args, kwargs))), getattr(function, "__name__", str(function))
        self.is_inside = True
        try:
            if any(one.valid is not rows[0].valid for one in rows):
                raise Refused("it takes rows of two masks")
            return self._call(rows, name, run, function, args, kwargs)
        except (Refused, IndexError) as error:
            because = str(error) if isinstance(error, Refused) else ""
            raise _refusal(rows[0], name, because) from None
        except RuntimeError as error:
            if wants_data(error):
                raise
            # There are as many rows as there could be: another size than the data's is no fault of the model's.
            raise _refusal(rows[0], name, "it takes them for as many as something else has") from error
        finally:
            self.is_inside = False

    def _call(self, rows: list[ValidRows], name: str, run: Run, function: Any, args: Any, kwargs: Any) -> Any:
        like = rows[0]
        if function in QUERIES:
            mine = self.row_of(args[0])
            result = run(function, *args, **kwargs)
            return result if mine is None else counted(function, result, args, mine, self.asked)
        if like.columns and len(rows) == 1 and not writes_first(name):
            result = self._columns(like, run, function, args, kwargs)
            if result is not NotImplemented:
                return result
        if name in ("unbind", "__iter__"):  # as many turns of a loop as the data say
            raise Refused(
                "it goes through as many as there are. Go through all (for e in range(experts)): those without rows "
                "add nothing"
            )
        for one in rows:
            _check_gradient(one.tensor)
        read = args[1:] if form_argument(name) == 0 else args
        is_new = next(counts_in((args, kwargs)), None) is not None
        if name == "expand_as" or (is_new and not any(self.row_of(one) for one in _tensors_in((read, kwargs)))):
            return self._shown(name, args, self._sized(like, run, function, args, kwargs))
        if puts_back(name) and not self._is_within(name, args):
            return added(self, *as_index_add(self, name, like, *args), **kwargs)
        if mask_of(function, args, True) is not None and not puts_back(name):
            return self._again(*args)
        if name in ("__getitem__", "index_select") and self.row_of(args[0]) is None:
            result, dim = (indexed if name == "__getitem__" else picked)(self, run, function, *args, **kwargs)
            if name == "__getitem__":
                if (numbers := places_in_range(self, args[0], args[1])) is not None:
                    return numbers
                self.sums[id(result)] = AddedRows.of(result, *args)
            return self._note(like, result, dim, [self._guard(result, like.valid, dim)])
        each = partial(self._call, rows, name, run)
        for take in (partial(loss_of_rows, each=each), together):
            result = take(self, run, function=function, args=args, kwargs=kwargs)
            if result is not NotImplemented:
                self.taken.add(id(like.valid))
                return result
        made = product(self, name, args, kwargs)
        if made is not None:
            result, is_biased = made
            return self._note(like, result, like.dim, [self._guard(result, like.valid, like.dim)] if is_biased else [])
        taken = self.taken_of(args[0]) if name in ("__iadd__", "add_", "__add__", "add") and not kwargs else None
        result = self._followed(rows, name, run, function, args, kwargs)
        if (
            taken is not None
            and taken.added is None
            and self.row_of(args[1]) is not None
            and args[1].shape == result.shape
        ):
            self.sums[id(result)] = AddedRows.of(result, taken.base, taken.key, args[1])
        return self._shown(name, args, result)

    def _columns(self, like: ValidRows, run: Run, function: Any, args: Any, kwargs: Any) -> Any:
        """What a view of the places of a mask is, a row for each; NotImplemented where something is computed."""
        result = run(function, *args, **kwargs)
        parts = result if isinstance(result, (tuple, list)) else (result,)
        if not all(isinstance(one, Tensor) and storage_of(one) == storage_of(like.tensor) for one in parts):
            return NotImplemented
        found = [column_of(one, like) for one in parts]
        for one, shown in zip(parts, found, strict=True):
            if isinstance(shown, int):
                self.known[id(one)] = replace(like, tensor=one, dim=shown)
        made = [one if isinstance(shown, int) else shown for one, shown in zip(parts, found, strict=True)]
        return type(result)(made) if isinstance(result, (tuple, list)) else made[0]

    def _shown(self, name: str, args: Any, result: Any) -> Any:
        """The result of a view, with a note of the numbers that it shows."""
        numbers = repeated_rows(name, self.row_of(args[0]) if args else None, result)
        mine = self.row_of(result)
        if numbers is not None and mine is not None:
            self.known[id(result)] = replace(mine, repeats=numbers)
        return result

    def _again(self, rows: Tensor, mask: Tensor) -> Tensor:
        """Rows that a mask made of such rows selects once more."""
        mine, chosen = self.row_of(rows), self.row_of(mask)
        if mine is None or chosen is None or mine.dim or mask.ndim > 1:
            raise Refused
        if not self.decided.get((id(mask), mask._version), (mask, True))[1]:
            return rows[:0]
        made, valid = rows.clone(), mine.valid & mask
        return self._note(replace(mine, valid=valid), made, 0, [self._guard(made, valid, 0)])

    def _has_rows(self, mask: Tensor, function: Any, line: Line | None) -> bool:
        """False where a mask selects none, for a model that asks how many there are: then it is given none."""
        key, mine = (id(mask), mask._version), self.row_of(mask)
        if self.reads is None or not self.reads.counts or not mask.numel():
            return mask.numel() > 0
        if key not in self.decided:
            if not self.reads.guards or self.locator is None or self.locator.phase != "forward":
                raise size_refusal(SIZES[function], line, False)
            found = (mask if mine is None else only_valid(mask, mine.valid, mine.dim)).any()
            self.decided[key] = mask, bool(self.reads.guard(found, line, True, ANY_ROWS))
        return self.decided[key][1]

    def _is_within(self, name: str, args: Any) -> bool:
        """True for a write to a part of each of some rows, `rows[..., 0] = 1`."""
        mine = self.row_of(args[0])
        if name != "__setitem__" or mine is None or mine.dim or any(self.rows_in(args[1])):
            return False
        items = args[1] if isinstance(args[1], tuple) else (args[1],)
        if any(isinstance(item, (Tensor, list)) or item is None for item in items):
            return False
        first, is_short = items[0], len(items) <= mine.tensor.ndim
        return is_short and (first is Ellipsis or (isinstance(first, slice) and first == slice(None)))

    def taken_of(self, rows: Any) -> AddedRows | None:
        """What rows are that nobody has written to since."""
        known = self.sums.get(id(rows))
        return known if known is not None and known.rows is rows and known.is_as_it_was() else None

    def _sized(self, like: ValidRows, run: Run, function: Any, args: Any, kwargs: Any) -> Any:
        """A new tensor, or a view, of as many rows: each is the same."""
        count = like.valid.numel()
        sizes = args[1].shape if function is Tensor.expand_as else sizes_in(function, args, kwargs) or ()
        result = run(function, *args, **kwargs)
        dims = [dim for dim, size in enumerate(sizes) if isinstance(size, RowCount)]
        if function is Tensor.expand_as:
            dims = [dim for dim in (like.dim,) if like.tensor is args[1]]
        if len(dims) != 1 or not isinstance(result, Tensor) or result.ndim != len(sizes):
            raise Refused("it has another size made of their number")
        is_spread = isinstance(args[0], Tensor) and form_argument(function.__name__) != 0
        given = (1,) * (result.ndim - args[0].ndim) + tuple(args[0].shape) if is_spread else (1,) * result.ndim
        before = given[dims[0]]
        if before != 1 or result.shape[dims[0]] != count:
            raise Refused("another tensor has as many rows of its own")
        return self._note(like, result, dims[0], [self._guard(result, like.valid, dims[0])])

    def _followed(self, rows: list[ValidRows], name: str, run: Run, function: Any, args: Any, kwargs: Any) -> Any:
        """Any other call, by the rules of the ops that torch makes of it."""
        assert self.tracer is not None
        like, count = rows[0], rows[0].valid.numel()
        others = [one for one in _tensors_in((args, kwargs)) if self.row_of(one) is None]
        meets = torch.is_grad_enabled() and any(one.requires_grad for one in others)  # gradients that add up rows
        if others:
            args, kwargs = self._filled((args, kwargs), meets, writes_first(name))
        result, nodes, places = self._traced(run, function, args, kwargs)
        if not others and not writes_first(name) and any(map(looks_up, nodes)):  # a place of the padding may be outside
            args, kwargs = self._filled((args, kwargs), meets, False)
            result, nodes, places = self._traced(run, function, args, kwargs)
        rows, node_of = list(self.rows_in((args, kwargs))), self.tracer.node_of
        found = follow_rows(nodes, places, count)
        self.draws.saw(nodes, found, like.valid)
        made = _tensors_in(args[0] if name == "__setitem__" else result)
        if not made and name != "__get__":
            raise Refused("what it does with them is not known")
        guards = {id(guard): guard for one in rows for guard in one.guards}
        if not are_views(nodes):
            for guard in guards.values():
                guard.is_needed = True
            guards.clear()
        for one in made:
            node = node_of(one)
            at = None if node is None else found.get(source_of(node))
            if node is None or (at is not None and one.shape[at[0]] != count):
                raise Refused("it joins them with another dim")
            if at is not None:
                more = [self._guard(one, like.valid, at[0])] if meets else []
                self._note(like, one, at[0], [*guards.values(), *more])
        return result

    def _traced(
        self, run: Run, function: Any, args: Any, kwargs: Any
    ) -> tuple[Any, list[fx.Node], dict[Value, tuple[int, int]]]:
        """What a call gives, the nodes that it made, and where those have rows that it reads."""
        assert self.tracer is not None
        rows, last = self.rows_in((args, kwargs)), next(iter(reversed(self.tracer.graph.nodes)))
        read = [(self.tracer.node_of(one.tensor), one.dim) for one in rows]
        places = {source_of(node): (dim, 1) for node, dim in read if node is not None}
        result = run(function, *args, **kwargs)
        return result, list(_since(last)), places

    def _filled(self, value: Any, meets: bool, writes: bool) -> Any:
        """Arguments with harmless numbers for the padding: 0 for what may be looked up; beside a tensor that gets a
        gradient (meets) 1, where what divides, or is a base or an exponent, has a finite derivative. writes: into the
        first of them, which must stay the same tensor."""
        if isinstance(value, Tensor):
            mine, is_number = self.row_of(value), value.is_floating_point() or value.is_complex()
            if mine is None or mine.place is not None or value.dtype is torch.bool or (is_number and not meets):
                return value
            if writes:
                valid = mine.valid.reshape(-1, *(1 for _ in value.shape[mine.dim + 1 :]))
                return value.masked_fill_(~valid, int(is_number))
            return self._fill(value, mine, int(is_number))
        if isinstance(value, (tuple, list)):
            return type(value)([self._filled(one, meets, writes) for one in value])
        return (
            {key: self._filled(one, meets, writes) for key, one in value.items()} if isinstance(value, dict) else value
        )

    def _fill(self, value: Tensor, mine: ValidRows, number: int) -> Tensor:
        return self._note(mine, only_valid(value, mine.valid, mine.dim, number), mine.dim, [])

    def in_range(self, index: Tensor) -> Tensor:
        """Places of rows, or numbers made of them, which the padding may have anywhere."""
        mine = self.known[id(index)]
        return index if mine.place is not None or mine.is_whole else self._fill(index, mine, 0)

    def _guard(self, tensor: Tensor, valid: Tensor, dim: int) -> Guard:
        """Watch the gradient of rows behind which it is added up."""
        guard = Guard(valid, dim)
        if tensor.requires_grad:
            tensor.register_hook(guard)
        return guard

    def _note(self, like: ValidRows, tensor: Tensor, dim: int, guards: Iterable[Guard]) -> Tensor:
        self.known[id(tensor)] = replace(like, tensor=tensor, dim=dim, place=None, columns=(), guards=tuple(guards))
        return tensor

    def cut(self, mode: Run, function: Any, args: Any, kwargs: Any, line: Line | None) -> Any:
        """What a call gives that cuts rows, puts them together, or tells which numbers there are; NotImplemented for
        another one."""
        if self.is_inside:
            return NotImplemented
        if self.reads is None or not self.reads.is_permitted:
            made = unique(mode, self.order.branches, self.tracer, function, args, kwargs, line)
            if made is not NotImplemented:
                return made
        return self.segments.call(self, mode, function, args, kwargs, line)

    def check_counts(self) -> None:
        """Raise CaptureError where the model asks how many rows there are, and takes the same ones together, if it is
        not known that there are any: for none it may do something else."""
        found = self.asked & self.taken
        if found and self.reads is not None and not self.reads.counts:
            self.reads.has_counted = True
            raise _refusal(next(one for one in self.known.values() if id(one.valid) in found), "len")

    def check_leaving(self, results: Any) -> None:
        """Raise CaptureError if any of them leaves the model."""
        for one in self.rows_in(results):
            raise _refusal(one, "")

    def row_of(self, value: Any) -> ValidRows | None:
        """What a tensor is, if it is such rows."""
        return next(self.rows_in(value), None) if isinstance(value, Tensor) else None


def _of_none(function: Any, args: Any, mask: Tensor) -> tuple[Any, ...]:
    """The arguments of `x[mask]`, or of `x[mask] = rows`, for a mask that selects none: nothing hangs on the batch, but
    a gradient of zero."""
    if function is Tensor.__setitem__:
        return args[0], Ellipsis, args[0].clone()
    key = args[1][1:] if isinstance(args[1], tuple) else ()
    none = args[0].sum() if args[0].requires_grad else args[0].new_zeros(())
    return none.expand(0, *args[0].shape[mask.ndim :]).clone(), (slice(None), *key)


def _made_of(node: fx.Node, depth: int = 8) -> Any:
    """What computes a value: the same for two that are computed alike of the same, as it is now."""
    if node.op != "call_function" or not depth:
        return node
    args = fx.node.map_arg((node.args, node.kwargs), lambda one: _made_of(one, depth - 1))
    return str(node.target), getattr(node.meta["val"], "_version", 0), repr(args)


def _since(last: fx.Node) -> Iterator[fx.Node]:
    """The nodes of a trace after one."""
    while (last := last.next).op != "root":
        yield last


def _tensors_in(value: Any) -> list[Tensor]:
    """The tensors among arguments or results."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return _tensors_in(list(value.values()))
    return [one for item in value for one in _tensors_in(item)] if isinstance(value, (tuple, list)) else []


def _check_gradient(tensor: Tensor) -> None:
    """Raise Refused for what a function with a gradient of its own made, which may take the rows together."""
    function = custom_function(tensor.grad_fn)
    if function is not None and function.__module__.partition(".")[0] not in ("torch", "autopar"):
        raise Refused(f"{function.__qualname__} has a backward of its own, which may see other rows")


def _refusal(rows: ValidRows, name: str, because: str = "") -> CaptureError:
    return size_refusal(_seen(rows, name, because), rows.line, rows.may_specialize)


def _seen(rows: ValidRows, name: str, because: str) -> Construct:
    known = SIZES[rows.origin]
    seen = f"{name.strip('_')}()" if name else "what the model returns"
    why = f": {because}" if because else ""
    return Construct(
        known.name,
        f"{known.instead} Where its places choose rows, only what takes each row by itself may follow (layers, "
        f"activations, weights by row) until index_add_ puts them back; here {seen} does not{why}.",
    )
