"""Recurrent layers with dropout between them, a layer at a time: torch would draw of its own generator. And packed
sequences (`pack_padded_sequence`), raised to padded ones: the steps of all sequences, with those that count.

How many rows a packed sequence has, and how many sequences each step, is data. Here it has a row for each step of each
sequence; rows behind the end of one are padding, which nobody may see (`capture/rows/selected.py` follows the rows). A
recurrent layer computes all steps: what comes behind the end of a sequence changes nothing before it. The last state is
looked up at the end of each; backwards each sequence is turned round up to its end. torch sorts sequences by length,
which changes no sequence: so it is left out, and samples stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from autopar.torch_compat import PACK_PADDED, PAD_PACKED

Tensor = torch.Tensor
_ROOMS = ("torch.nn.utils.rnn", "torch.nn.modules.rnn")
_KINDS = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
PACKING: frozenset[Any] = frozenset((PACK_PADDED, PAD_PACKED, *_KINDS))
NOTE = (
    "pack_padded_sequence checks that no length is 0 or longer than the padded batch, and with enforce_sorted=True "
    "that they fall: no step checks it"
)


class RecurrentMode(Protocol):
    """What is needed of the raising mode."""

    def dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any: ...


class PackingMode(RecurrentMode, Protocol):
    """What is needed of the raising mode for packed sequences."""

    @property
    def facts(self) -> PackedFacts: ...


class PackedFacts(Protocol):
    """What is known of the rows of packed sequences."""

    def are_rows(self, data: Tensor, valid: Tensor) -> Tensor:
        """Note rows, of which those count where `valid` [n] is True."""

    def rows_of(self, data: Tensor, valid: Tensor) -> Tensor:
        """All those rows, where `valid` was noted of them."""

    def longest(self, lengths: Tensor, most: int) -> int:
        """The length of the longest sequence of a batch, padded to `most`."""

    def constant(self, make: Callable[[], Tensor]) -> Tensor:
        """A tensor that is made of no input."""


def layer_by_layer(
    run: Callable[[Tensor, Any, list[Tensor]], Any], input: Tensor, hx: Any, weights: Any, num_layers: int,
    drop: Callable[[Tensor], Tensor],
) -> Any:  # fmt: skip
    """The results of recurrent layers, with dropout between them. run: a layer on its input, states and weights."""
    is_several = isinstance(hx, (tuple, list))
    each, own = len(hx[0] if is_several else hx) // num_layers, len(weights) // num_layers
    states: list[tuple[Tensor, ...]] = []
    for layer in range(num_layers):
        at = slice(layer * each, (layer + 1) * each)
        start = [state[at] for state in hx] if is_several else hx[at]
        input, *state = run(input, start, list(weights[layer * own : (layer + 1) * own]))
        states.append(tuple(state))
        if layer + 1 < num_layers:
            input = drop(input)
    return input, *(torch.cat(each) for each in zip(*states, strict=True))


def _by_layer(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.lstm, torch.gru or torch.rnn_*, of a padded batch. NotImplemented without dropout, and for a packed one."""

    def raised(
        mode: RecurrentMode, input: Tensor, hx: Any, weights: Any, has_biases: Any, num_layers: Any, dropout: float,
        train: bool, bidirectional: bool, batch_first: Any = None,
    ) -> Any:  # fmt: skip
        is_padded = isinstance(weights, (tuple, list)) and batch_first is not None
        if not is_padded or not train or dropout == 0.0 or num_layers == 1:
            return NotImplemented

        def run(x: Tensor, start: Any, part: list[Tensor]) -> Any:
            return function(x, start, part, has_biases, 1, 0.0, train, bidirectional, batch_first)

        return layer_by_layer(run, input, hx, weights, num_layers, lambda x: mode.dropout(x, dropout))

    return raised


RECURRENT: dict[Any, Callable[..., Any]] = {
    function: _by_layer(function) for function in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
}


@dataclass(frozen=True, slots=True)
class _Pack:
    """Which steps count. valid: [steps, sequences], and `flat` of each row; most: steps of the padded batch, which may
    be more or less; batch_sizes: held, so that its id stays its own."""

    lengths: Tensor
    valid: Tensor
    flat: Tensor
    most: int
    batch_sizes: Tensor

    def fits(self, steps: Tensor) -> bool:
        """True if a padded batch [steps, sequences, ..] has as many sequences, in the same place."""
        return self.valid.shape[1] == steps.shape[1] and self.valid.device == steps.device

    def apart(self, rows: Tensor) -> Tensor:
        """Rows as [steps, sequences, ..]."""
        return rows.reshape(*self.valid.shape, *rows.shape[1:])

    def at_end(self, values: Tensor) -> Tensor:
        """The value at the last step of each sequence: [1, sequences, ..]."""
        last = (self.lengths - 1).clamp(min=0)[None, :, None].to(values.device)
        return values.gather(0, last.expand(1, *values.shape[1:]))

    def turned(self, values: Tensor) -> Tensor:
        """Each sequence from its end on."""
        steps = torch.arange(len(values), device=values.device)[:, None]
        place = torch.where(self.valid, self.lengths.to(values.device) - 1 - steps, steps)
        return values.gather(0, place.clamp(min=0).unsqueeze(-1).expand(values.shape))


@dataclass(slots=True)
class Packs:
    """The packed sequences of a run. orders: the tensors that stand for the order of a sort by length, which is left
    out."""

    known: dict[int, _Pack] = field(default_factory=dict)
    orders: dict[int, Tensor] = field(default_factory=dict)
    given: tuple[Any, ...] = ()  # the lengths that torch was given last, as the model has them
    packed: list[tuple[tuple[Any, ...], _Pack]] = field(default_factory=list)  # the first of each lengths

    def call(self, mode: PackingMode, function: Any, args: Any, kwargs: Any, frame: FrameType) -> Any:
        """What a call gives that packs, unpacks, or takes a packed sequence; NotImplemented for any other."""
        is_packing = frame.f_code is pack_padded_sequence.__code__
        lengths = frame.f_locals["lengths"] if is_packing else None
        if is_packing and (function is torch.as_tensor or (function is Tensor.to and args[0] is lengths)):
            self.given = _seen(lengths)
        if is_packing and function is torch.sort:
            order = torch.arange(args[0].numel(), device=args[0].device)
            self.orders[id(order)] = order
            return torch.return_types.sort((args[0].clone(), order))
        if function is PACK_PADDED:
            return self._packed(mode, *args, **kwargs)
        if function is PAD_PACKED and self._pack_of(args[1]) is not None:
            return self._padded(mode, frame.f_locals.get("total_length") is not None, *args, **kwargs)
        if function in _KINDS and self._pack_of(args[1]) is not None:
            return self._recurrent(mode, function, *args)
        return self._ordered(function, args, frame) if self.orders else NotImplemented

    def _ordered(self, function: Any, args: Any, frame: FrameType) -> Any:
        """What torch does with the order of sequences: they are in it already."""
        is_order = any(isinstance(each, Tensor) and id(each) in self.orders for each in args)
        if not is_order or frame.f_globals.get("__name__") not in _ROOMS:
            return NotImplemented
        if function is Tensor.index_select:
            return args[0]
        if function in (Tensor.to, Tensor.scatter_):
            order = function(*args)
            self.orders[id(order)] = order
            return order
        return NotImplemented

    def _pack_of(self, batch_sizes: Any) -> _Pack | None:
        return self.known.get(id(batch_sizes))

    def _packed(self, mode: PackingMode, input: Tensor, lengths: Tensor, batch_first: bool) -> Any:
        """Pack: the rows, and how many sequences each step has. Packed by the same lengths they are the same rows, also
        where they were padded to another length: no sequence is longer than the shorter one."""
        steps = input.transpose(0, 1) if batch_first else input
        most, given, self.given = len(steps), self.given, ()
        batch_sizes = mode.facts.constant(partial(torch.full, steps.shape[:1], steps.shape[1]))
        like = next((pack for one, pack in self.packed if _are_alike(one, given) and pack.fits(steps)), None)
        if like is None:
            valid = torch.arange(most, device=input.device)[:, None] < lengths.to(input.device)[None]
            pack = _Pack(lengths, valid, valid.flatten(), most, batch_sizes)
            self.packed.append((given, pack))
        else:
            pack = replace(like, most=most, batch_sizes=batch_sizes)
            steps = _of_length(steps, len(pack.valid))
        self.known[id(batch_sizes)] = pack
        return mode.facts.are_rows(steps.flatten(0, 1), pack.flat), batch_sizes

    def _padded(
        self, mode: PackingMode, is_said: bool, data: Tensor, batch_sizes: Tensor, batch_first: bool,
        padding_value: float, total: int,
    ) -> Any:  # fmt: skip
        """Unpack: the padded sequences, and their lengths. is_said: how long they are."""
        pack = self.known[id(batch_sizes)]
        values = pack.apart(mode.facts.rows_of(data, pack.flat))
        values = torch.where(
            pack.valid.reshape(*pack.valid.shape, *(1 for _ in values.shape[2:])), values, padding_value
        )
        length = total if is_said else mode.facts.longest(pack.lengths, min(len(values), pack.most))
        values = _of_length(values, length, padding_value)
        return (values.transpose(0, 1) if batch_first else values), pack.lengths.clone()

    def _recurrent(self, mode: PackingMode, function: Any, data: Tensor, batch_sizes: Tensor, *rest: Any) -> Any:
        """Recurrent layers of a packed sequence. rest: torch's own arguments, by position."""
        hx, weights, has_biases, num_layers, dropout, train, bidirectional = rest
        pack = self.known[id(batch_sizes)]

        def one(x: Tensor, start: Any, part: list[Tensor]) -> tuple[Tensor, ...]:
            """A direction of a layer: what all its states are after each step."""
            if function is torch.lstm:
                return _lstm(x, start, part, has_biases)
            return (function(x, start[None], part, has_biases, 1, 0.0, train, False, False)[0],)

        def run(x: Tensor, start: Any, part: list[Tensor]) -> Any:
            """Both directions of a layer."""
            ways = zip(*start, strict=True) if function is torch.lstm else iter(start)
            there = one(x, next(ways), part[: len(part) // (1 + bidirectional)])
            if not bidirectional:
                return there[0], *map(pack.at_end, there)
            back = one(pack.turned(x), next(ways), part[len(part) // 2 :])
            ends = (torch.cat([pack.at_end(a), pack.at_end(b)]) for a, b in zip(there, back, strict=True))
            return torch.cat([there[0], pack.turned(back[0])], -1), *ends

        def drop(x: Tensor) -> Tensor:
            return x if not train or not dropout else mode.dropout(x, dropout)

        rows = torch.where(pack.valid.unsqueeze(-1), pack.apart(mode.facts.rows_of(data, pack.flat)), 0)
        values, *states = layer_by_layer(run, rows, hx, weights, num_layers, drop)
        values = torch.where(pack.valid.unsqueeze(-1), values, 0)
        return mode.facts.are_rows(values.flatten(0, 1), pack.flat), *states


@dataclass(slots=True)
class PlainPacks:
    """The packed sequences of a run of the plain module, so that dropout between its layers draws what the raised ones
    draw: for each step of each sequence, where it stood before the sort by length."""

    order: Tensor | None = None  # of the sort that was seen last
    known: dict[int, tuple[Tensor, Tensor | None, int]] = field(default_factory=dict)

    def call(self, mode: PackingMode, function: Any, args: Any, kwargs: Any, frame: FrameType) -> Any:
        """What a call gives; NotImplemented where torch's own does."""
        if function is torch.sort and frame.f_code is pack_padded_sequence.__code__:
            by_length = torch.sort(*args, **kwargs)
            self.order = by_length.indices
            return by_length
        if function is PACK_PADDED:
            input, _, batch_first = args
            found, order, self.order = function(*args, **kwargs), self.order, None
            self.known[id(found[1])] = found[1], order, input.shape[1 if batch_first else 0]
            return found
        if function not in _KINDS or id(args[1]) not in self.known:
            return NotImplemented
        data, batch_sizes, hx, weights, has_biases, layers, dropout, train, bidirectional = args
        if not train or not dropout or layers == 1:
            return NotImplemented

        def run(x: Tensor, start: Any, part: list[Tensor]) -> Any:
            return function(x, batch_sizes, start, part, has_biases, 1, 0.0, train, bidirectional)

        def drop(x: Tensor) -> Tensor:
            return self._dropped(mode, x, batch_sizes, dropout)

        return layer_by_layer(run, data, hx, weights, layers, drop)

    def _dropped(self, mode: PackingMode, rows: Tensor, batch_sizes: Tensor, dropout: float) -> Tensor:
        _, order, steps = self.known[id(batch_sizes)]
        order = torch.arange(int(batch_sizes[0]), device=rows.device) if order is None else order
        factor = mode.dropout(rows.new_ones(steps, len(order), rows.shape[1]), dropout)
        counts = batch_sizes.tolist()
        return rows * torch.cat([factor[step, order[:count]] for step, count in enumerate(counts)])


def _seen(lengths: Any) -> tuple[Any, ...]:
    """The lengths that the model packs by, to be compared with others by `_are_alike`."""
    return (lengths, lengths._version) if isinstance(lengths, Tensor) else tuple(lengths)


def _are_alike(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """True if lengths show as the same: one tensor, or lists of the same numbers."""
    pairs = zip(some, others, strict=False)
    return 0 < len(some) == len(others) and all(a is b or (type(a) is type(b) is int and a == b) for a, b in pairs)


def _of_length(steps: Tensor, length: int, value: float = 0) -> Tensor:
    """The first steps of a padded batch, with more behind them where it has less."""
    if len(steps) >= length:
        return steps if len(steps) == length else steps[:length]
    return F.pad(steps, (*(0, 0) * (steps.ndim - 1), 0, length - len(steps)), value=value)


def _lstm(x: Tensor, start: tuple[Tensor, Tensor], weights: Any, has_biases: bool) -> tuple[Tensor, Tensor]:
    """The hidden and the cell state of an LSTM after each step. weights: of the input and of the state, biases if there
    are any, and what makes a smaller hidden state of it."""
    bias: Any = weights[2:4] if has_biases else (None, None)
    project = weights[-1] if len(weights) in (3, 5) else None
    hidden, cell = start
    rows, hiddens, cells = F.linear(x, weights[0], bias[0]), [], []
    for row in rows.unbind(0):
        gates = (row + F.linear(hidden, weights[1], bias[1])).chunk(4, 1)
        cell = gates[1].sigmoid() * cell + gates[0].sigmoid() * gates[2].tanh()
        hidden = gates[3].sigmoid() * cell.tanh()
        hidden = hidden if project is None else F.linear(hidden, project)
        hiddens.append(hidden)
        cells.append(cell)
    return torch.stack(hiddens), torch.stack(cells)
