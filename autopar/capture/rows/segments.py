"""Sorted rows that are cut by counts of the data: `x.split(counts.tolist())`, `x[start:end]`, and put together again.

A piece is the rows of one group, and so those that a mask selects: `x[group == e]`, where the group of a row is found
from where groups end. Put together in their order the pieces are all rows, each where it was.

Which calls put pieces together, or copy rows, only the run that is captured can tell, since it knows what became of
them: others go by the line.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch

from autopar.capture.python.spans import CountSum, RowGroup, piece_between
from autopar.capture.python.stand_in import Scalar
from autopar.capture.refusals.location import Line
from autopar.capture.rows.row_rules import ValidRows
from autopar.capture.rows.row_sides import UnfitRows
from autopar.capture.rows.turns import MaskOrder
from autopar.capture.trace.computed_views import ComputedViews
from autopar.capture.trace.tracer import Tracer
from autopar.ir.ops.ops import op

Tensor = torch.Tensor
Run = Callable[..., Any]  # a call of the model's

_SPLITS = (torch.split, Tensor.split, torch.split_with_sizes, Tensor.split_with_sizes)
_CATS = (torch.cat, torch.concat, torch.concatenate)
_PIECES = (Tensor.unbind, torch.unbind, Tensor.__iter__)
_CASTS = (Tensor.to, Tensor.int, Tensor.long, Tensor.cpu, Tensor.detach, Tensor.clone, Tensor.type)
_ENDS = (torch.cumsum, Tensor.cumsum, torch.searchsorted)
_AT_ENDS = (torch.tensor_split, Tensor.tensor_split)
_CUTS = frozenset((*_SPLITS, *_AT_ENDS, *_CATS, Tensor.contiguous, Tensor.__getitem__, Tensor.__setitem__))


class CutRows(Protocol):
    """What is asked of the rows of a run."""

    is_first: bool
    tracer: Tracer | None
    order: MaskOrder
    known: dict[int, ValidRows]
    views: ComputedViews

    def row_of(self, value: Any) -> ValidRows | None:
        """What a tensor is, if it is such rows."""


@dataclass(slots=True)
class _Groups:
    """Rows that are cut. group: of each row. masks: of each group. taken: of a group that was, which of its rows count,
    and what is kept in `RowSides`."""

    tensor: Tensor  # of counts, or of ends; held, so that its id stays its own
    group: Tensor
    count: int
    masks: dict[int, Tensor] = field(default_factory=dict)
    taken: dict[int, tuple[Tensor | None, tuple[int, int]]] = field(default_factory=dict)


@dataclass(slots=True)
class Segments:
    """The pieces of one run. is_cutting: rows are selected that the model cuts, and no mask of its own.

    elements: of tensors of integers, by the id of each. ends: tensors that say where groups end.
    parts: slices of such tensors, with what each is of, and from where."""

    is_cutting: bool = False
    last: _Groups | None = None
    _groups: dict[Any, _Groups] = field(default_factory=dict)
    _elements: dict[int, tuple[Tensor, CountSum]] = field(default_factory=dict)
    _ends: dict[int, Tensor] = field(default_factory=dict)
    _parts: dict[int, tuple[Tensor, Tensor, int]] = field(default_factory=dict)

    def saw(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note the elements of tensors of integers, and which of these say where groups end."""
        source = args[0] if args else None
        if not isinstance(source, Tensor) or source.ndim != 1 or source.is_floating_point():
            return
        if function in _PIECES and isinstance(result, (tuple, list)):
            for place, one in enumerate(result):
                self._elements[id(one)] = one, CountSum.element(source, place)
        elif function is Tensor.__getitem__ and type(args[1]) is int and isinstance(result, Tensor):
            self._elements[id(result)] = result, CountSum.element(source, args[1] % len(source))
        elif isinstance(result, Tensor):
            if function in _ENDS or (function in _CASTS and id(source) in self._ends):
                self._ends[id(result)] = result
            base, first = self._parts.get(id(source), (source, source, 0))[1:]
            if function is Tensor.__getitem__ and type(args[1]) is slice and args[1].step in (None, 1):
                self._parts[id(result)] = result, base, first + args[1].indices(len(source))[0]
            elif function in _CASTS and base is not source:
                self._parts[id(result)] = result, base, first

    def span_of(self, tensor: Tensor) -> CountSum | None:
        """What a tensor of one element is an element of."""
        found = self._elements.get(id(tensor))
        return found[1] if found is not None and found[0] is tensor else None

    def _of_all(self, span: Any) -> Any:
        """The same numbers as those of the tensor of which one of counts, or of ends, is a slice."""
        if not isinstance(span, CountSum) or id(span.tensor) not in self._parts:
            return span
        part, base, first = self._parts[id(span.tensor)]
        is_as_it_was = part._version == span.version == base._version
        places = tuple(first + place for place in span.places)
        return CountSum(base, places, span.version) if is_as_it_was else span

    def elements(self, mode: Run, tensor: Tensor) -> list[tuple[Tensor, CountSum | None]]:
        """The elements of a tensor of integers, each with what it is; none of another tensor."""
        if tensor.ndim != 1 or tensor.is_floating_point():
            return []
        return [(one, self.span_of(one)) for one in mode(Tensor.unbind, (), (tensor,))]

    def call(self, selected: CutRows, mode: Run, function: Any, args: Any, kwargs: Any, line: Line | None) -> Any:
        """What a call gives that cuts rows, or puts them together; NotImplemented for another one. mode: makes a call
        of the model's."""
        if function not in _CUTS:
            return NotImplemented

        def run(one: Any, *given: Any, **named: Any) -> Any:
            return mode(one, (), given, named)

        if function is Tensor.contiguous:
            return self._copied(selected, run, line, *args, **kwargs)
        if function in _SPLITS:
            return self._split(selected, run, *args, **kwargs)
        if function in _AT_ENDS:
            return self._at_ends(selected, run, *args, **kwargs)
        if function in (Tensor.__getitem__, Tensor.__setitem__):
            return self._sliced(selected, run, function, *args)
        return self._joined(selected, run, line, *args, **kwargs) if function in _CATS else NotImplemented

    def _copied(self, selected: CutRows, run: Run, line: Line | None, x: Tensor, **layout: Any) -> Any:
        """Rows that lie otherwise, as a copy: where there is one of them, torch would give them as they are."""
        lines = selected.order.branches.copied
        if selected.row_of(x) is not None and not layout and not x.is_contiguous():
            lines.add(line)
        is_known = line in lines and not layout
        return run(Tensor.clone, x, memory_format=torch.contiguous_format) if is_known else NotImplemented

    # -- cut ----------------------------------------------------------------------------------------------------

    def _split(self, selected: CutRows, run: Run, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes, dim = (*args, *kwargs.values(), 0)[:2]
        given = [size.span for size in sizes if type(size) is Scalar] if isinstance(sizes, (list, tuple)) else []
        spans = [span for span in given if span is not None]
        if not spans or dim not in (0, -x.ndim) or not len(spans) == len(sizes) == len(spans[0].tensor):
            return NotImplemented
        if any(not span.is_of(spans[0]) or span.places != (place,) for place, span in enumerate(spans)):
            return NotImplemented
        groups = self._of(selected, run, RowGroup(spans[0].tensor, 0, False), x)
        return tuple(self._take(selected, run, x, groups, place) for place in range(len(spans)))

    def _at_ends(self, selected: CutRows, run: Run, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """tensor_split: where all groups but the last one end."""
        ends, dim = (*args, *kwargs.values(), 0)[:2]
        if isinstance(ends, Tensor):
            ends = [self.span_of(one) for one in run(Tensor.unbind, ends)] if ends.ndim == 1 else []
        elif isinstance(ends, (list, tuple)):
            ends = [one.span if type(one) is Scalar else None for one in ends]
        spans = [0, *map(self._of_all, ends)] if isinstance(ends, list) else []
        found = [piece_between(*pair) for pair in pairwise(spans)]
        pieces = [piece for piece in found if piece is not None and piece.is_next]
        if not pieces or dim not in (0, -x.ndim) or len(pieces) + 1 != len(getattr(spans[-1], "tensor", ())):
            return NotImplemented
        if len(pieces) < len(found) or any(piece.place != at for at, piece in enumerate(pieces)):
            return NotImplemented
        if pieces[-1].is_ended and id(pieces[-1].tensor) not in self._ends:
            return NotImplemented
        groups = self._of(selected, run, RowGroup(pieces[-1].tensor, 0, pieces[-1].is_ended), x)
        return tuple(self._take(selected, run, x, groups, place) for place in range(len(pieces) + 1))

    def _sliced(self, selected: CutRows, run: Run, function: Any, x: Any, key: Any, *value: Any) -> Any:
        first, *rest = (key if isinstance(key, tuple) else (key,)) or (slice(None),)
        if type(first) is not slice or type(first.stop) is not Scalar or first.step is not None:
            return NotImplemented
        if not isinstance(x, Tensor) or any(item != slice(None) for item in rest):
            return NotImplemented
        start, end = first.start or 0 if type(first.start) is not Scalar else first.start.span, first.stop.span
        piece = piece_between(self._of_all(start), self._of_all(end))
        if piece is None or not (piece.is_next or selected.order.sides is not None):
            if start != 0 or value or end is None or end.places != tuple(range(len(end.tensor))):
                return NotImplemented
            self._of(selected, run, RowGroup(end.tensor, 0, False), x)  # all rows, which it checks
            return x
        groups = self._of(selected, run, piece, x)
        if not value:
            return self._take(selected, run, x, groups, piece.place)
        run(Tensor.__setitem__, x, groups.masks[piece.place], *value)
        return None

    def _of(self, selected: CutRows, run: Run, piece: RowGroup, x: Tensor) -> _Groups:
        """The groups of as many rows as `x` has."""
        key = id(piece.tensor), piece.tensor._version, x.shape[0]
        if key not in self._groups:
            sides = selected.order.sides
            with nullcontext() if sides is None else sides.trail.idle():  # whichever mask is the first to have rows
                self._groups[key] = made = self._made(run, piece, x)
            for place, mask in made.masks.items() if sides is not None else ():
                assert sides is not None
                sides.trail.joined(mask, ("by", "piece", place, sides.trail.place_of(piece.tensor)))
        self.last = self._groups[key]
        return self.last

    def _made(self, run: Run, piece: RowGroup, x: Tensor) -> _Groups:
        """The masks of all groups. That each row has one is checked in each step."""
        tensor = piece.tensor
        is_ended = piece.is_ended or id(tensor) in self._ends
        ends = tensor if is_ended else run(torch.cumsum, tensor, 0)
        group = run(torch.searchsorted, ends, run(torch.arange, x.shape[0], device=x.device), right=True)
        group = run(op("checked_index"), group, len(tensor), None)
        made = _Groups(tensor, group, len(tensor))
        made.masks.update((place, run(Tensor.__eq__, group, place)) for place in range(len(tensor)))
        return made

    def _take(self, selected: CutRows, run: Run, x: Tensor, groups: _Groups, place: int) -> Tensor:
        mask = groups.masks[place]
        made = self._rows(x, mask, run)
        selected.views.note(x, made, partial(self._rows, x, mask), lambda run: run(Tensor.__setitem__, x, mask, made))
        mine = selected.row_of(made)
        if mine is not None:  # of integers what others have there is as good an index
            selected.known[id(made)] = replace(mine, origin=torch.split, is_whole=not x.is_floating_point())
        if place not in groups.taken:
            sides = selected.order.sides
            groups.taken[place] = None if mine is None else mine.valid, (0, 0) if sides is None else sides.cut()
        return made

    def _rows(self, x: Tensor, mask: Tensor, run: Run) -> Tensor:
        self.is_cutting = True
        try:
            made: Tensor = run(Tensor.__getitem__, x, mask)
        finally:
            self.is_cutting = False
        return made

    # -- put together -------------------------------------------------------------------------------------------

    def _joined(
        self, selected: CutRows, run: Run, line: Line | None, tensors: Any, dim: int = 0, **other: Any
    ) -> Any:  # fmt: skip
        groups, pieces, lines = self.last, list(tensors), selected.order.branches.joined
        if groups is None or other or not pieces or dim not in (0, -pieces[0].ndim):
            return NotImplemented
        if selected.is_first and selected.tracer is not None:
            valid = [(mine := selected.row_of(one)) is not None and mine.dim == 0 and mine.valid for one in pieces]
            wanted = [groups.taken.get(place, (None,))[0] for place in range(groups.count)]
            if len(valid) != len(wanted) or any(one is not other for one, other in zip(valid, wanted, strict=True)):
                return NotImplemented
            lines.add(line)
        elif line not in lines:
            return NotImplemented
        like, sides = pieces[0], selected.order.sides
        shape = (len(groups.group), *like.shape[1:])
        taken = sorted(groups.taken.items())
        if len(taken) != len(pieces):
            raise UnfitRows
        if sides is not None:
            made = torch.zeros(shape, dtype=like.dtype, device=like.device)
            sides.joined([at for _, (_, at) in taken], pieces, made)
            return made
        made = run(torch.zeros, shape, dtype=like.dtype, device=like.device)
        for (place, _), piece in zip(taken, pieces, strict=True):
            run(Tensor.__setitem__, made, groups.masks[place], piece)
        return made
