"""Know which tensors of a capture hang on no input of the step, and what they hold.

Each tensor has the kinds of input behind it, as bits. The calls behind those without any are kept; the first read of
such a tensor runs them on data, in their order, so that writes in place and views do as they do in the plain model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch

from autopar.capture.stand_in import stands_for_number
from autopar.torch_compat import FakeTensor, in_transform, on_data, storage_of

Tensor = torch.Tensor
BATCH, BUFFER, CONSTANT, PARAMETER, RANDOM, OTHER = (1 << i for i in range(6))
KINDS = {"batch": BATCH, "buffer": BUFFER, "constant": CONSTANT, "parameter": PARAMETER, "seed": RANDOM, "scale": OTHER}
STEADY = BATCH | BUFFER | CONSTANT  # what a step leaves as it is

_PLAIN = (int, float, complex, str, bytes, bool, type(None), type(...), range, Enum, np.generic,
          torch.dtype, torch.device, torch.layout, torch.memory_format)  # fmt: skip
_ARRAYS = (np.ndarray, np.memmap)
# Their results are not decided by their arguments: what is drawn, and memory as it was found.
_UNDECIDED = frozenset(
    ("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "normal_",
     "uniform_", "bernoulli", "bernoulli_", "exponential_", "random_", "cauchy_", "log_normal_", "geometric_",
     "multinomial", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "dropout", "dropout1d", "dropout2d",
     "dropout3d", "alpha_dropout", "feature_alpha_dropout", "feature_dropout", "rrelu", "rrelu_", "gumbel_softmax",
     "native_dropout", "dropout_", "new", "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty",
     "new_empty_strided", "resize_", "resize_as_", "set_", "scaled_dot_product_attention",
     "multi_head_attention_forward", "fractional_max_pool2d", "fractional_max_pool3d")
)  # fmt: skip


@dataclass(slots=True)
class _Known:
    """A tensor of the capture. `value`: what it holds, once it was asked for, or what stands behind it."""

    tensor: Tensor  # held, so that its id stays its own
    kinds: int
    version: int
    value: Tensor | None = None
    outside: frozenset[int] = frozenset()  # ids of the user's tensors that its value was computed from


@dataclass(frozen=True, slots=True)
class _Call:
    function: Any
    args: Any
    kwargs: Any
    results: tuple[Tensor, ...]


@dataclass(slots=True)
class Operands:
    """The tensors among the arguments of a call, as they were before it."""

    tensors: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kinds: int = 0  # of input behind any of them
    outside: frozenset[int] = frozenset()


class Origins:
    """The tensors of one run; `earlier` is the run before it, whose tensors may turn up again."""

    def __init__(self, earlier: Origins | None = None) -> None:
        self._known: dict[int, _Known] = dict(earlier._known) if earlier else {}
        self._stored: dict[int, list[_Known]] = {k: list(v) for k, v in earlier._stored.items()} if earlier else {}
        self._calls: list[_Call] = []  # those that were not run on data yet
        self._earlier = earlier
        self.outside: dict[int, Tensor] = dict(earlier.outside) if earlier else {}  # the user's, by their ids
        self.was_read: dict[int, Tensor] = {}  # those whose data decided a value that was read

    def given(self, tensor: Tensor, kind: str, original: Tensor | None = None) -> None:
        """An input of the step. A plain tensor attribute is known by its `original`, for no step may write it."""
        if kind == "constant" and original is not None and _has_data(original):
            self._outside(tensor, original)
        else:
            self._enter(tensor, KINDS[kind])

    def kinds(self, tensor: Tensor) -> int:
        """The kinds of input behind a tensor, as bits."""
        known = self._of(tensor)
        return OTHER if known is None else known.kinds

    def operands(self, args: Any, kwargs: Any) -> Operands:
        """What a call is about to be given."""
        found = Operands()
        for leaf in _leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                found.tensors.append(leaf)
                found.versions.append(_version(leaf))
                known = self._entered(leaf)
                found.kinds, found.outside = found.kinds | known.kinds, found.outside | known.outside
            elif not isinstance(leaf, _PLAIN) and type(leaf) not in _ARRAYS:
                found.kinds |= OTHER
        return found

    def saw(self, function: Any, args: Any, kwargs: Any, before: Operands, result: Any) -> list[Tensor]:
        """A call with what it returned. Returns those of its arguments that it wrote into."""
        made = [leaf for leaf in _leaves(result) if isinstance(leaf, Tensor)]
        written = [
            tensor for tensor, old in zip(before.tensors, before.versions, strict=True) if _version(tensor) != old
        ]
        if not made and not written:
            return written
        kinds = before.kinds | (RANDOM if _is_undecided(function) else 0)
        if any(type(tensor) is not FakeTensor for tensor in written):  # the user's own, which no run on data may change
            kinds |= OTHER
        if not kinds:
            self._calls.append(_Call(function, _copied(args), _copied(kwargs), tuple(made)))
        given = {id(tensor) for tensor in before.tensors}
        for tensor in made:
            if id(tensor) not in given:
                self._enter(tensor, kinds, outside=before.outside)
        for tensor in written:
            self._wrote(tensor, kinds, before.outside)
        return written

    def is_known(self, before: Operands) -> bool:
        """True for a call whose arguments all hang on no input."""
        return bool(before.tensors) and not before.kinds and not in_transform()

    def answer(self, function: Any, args: Any, kwargs: Any, before: Operands) -> Any:
        """What a call gives whose arguments all hang on no input; NotImplemented where data cannot tell."""
        if not self.is_known(before) or not self._run(before.tensors):
            return NotImplemented
        with on_data():
            result = function(*self._on_data(args), **self._on_data(kwargs))
        self.was_read.update((key, self.outside[key]) for key in before.outside)
        return self._taken(result, before.outside)

    def _taken(self, result: Any, outside: frozenset[int]) -> Any:
        """A result as the model is given it: tensors as constants of the capture."""
        if isinstance(result, Tensor):
            made = result.clone()
            self._enter(made, 0, result, outside)
            return made
        return _mapped(lambda item: self._taken(item, outside), _frozen(result))

    # -- which ones are known -----------------------------------------------------------------------------------

    def _entered(self, tensor: Tensor) -> _Known:
        known = self._of(tensor)
        if known is None and type(tensor) is not FakeTensor and _has_data(tensor):
            return self._outside(tensor, tensor)
        return known or self._enter(tensor, OTHER)

    def _of(self, tensor: Tensor) -> _Known | None:
        known = self._known.get(id(tensor))
        if known is not None and not known.kinds and known.version != _version(tensor):
            known.kinds |= OTHER  # written where nobody saw it
        return known

    def _enter(
        self, tensor: Tensor, kinds: int, value: Tensor | None = None, outside: frozenset[int] = frozenset()
    ) -> _Known:
        known = self._known[id(tensor)] = _Known(tensor, kinds, _version(tensor), value, outside)
        storage = storage_of(tensor)
        if storage is None:
            known.kinds |= OTHER
        else:
            self._stored.setdefault(storage, []).append(known)
        return known

    def _outside(self, tensor: Tensor, original: Tensor) -> _Known:
        """A tensor of the user's, which stays as it is while a copy of it is computed with."""
        if stands_for_number(original) or original.requires_grad:
            return self._enter(tensor, OTHER)
        self.outside[id(original)] = original
        with on_data():
            value = original.detach().clone()
        return self._enter(tensor, 0, value, frozenset((id(original),)))

    def _wrote(self, tensor: Tensor, kinds: int, outside: frozenset[int]) -> None:
        """A write into a tensor: into all that share its memory."""
        storage = storage_of(tensor)
        own = self._known.get(id(tensor))
        for known in [*self._stored.get(storage, ()), *((own,) if own else ())] if storage is not None else ():
            known.kinds |= kinds
            known.outside |= outside
            known.version = _version(known.tensor)

    # -- what they hold -----------------------------------------------------------------------------------------

    def _run(self, wanted: list[Tensor]) -> bool:
        """Run the calls that are due on data; False if what is wanted did not come of it."""
        if self._earlier is not None:
            self._earlier._run([])
        calls, self._calls = self._calls, []
        with on_data():
            for call in calls:
                self._run_one(call)
        return all(self._known[id(tensor)].value is not None for tensor in wanted)

    def _run_one(self, call: _Call) -> None:
        state = torch.default_generator.get_state()
        try:
            result = call.function(*self._on_data(call.args), **self._on_data(call.kwargs))
            values = [leaf for leaf in _leaves(result) if isinstance(leaf, Tensor)]
            is_steady = torch.equal(state, torch.default_generator.get_state())
        except Exception:
            values, is_steady = [], False
        torch.default_generator.set_state(state)
        is_alike = is_steady and len(values) == len(call.results) and all(map(_alike, values, call.results))
        for position, tensor in enumerate(call.results):
            known = self._known[id(tensor)]
            if is_alike:
                known.value = values[position]
            else:
                known.kinds |= OTHER
        if not is_alike:  # it may have written, or not
            for leaf in _leaves((call.args, call.kwargs)):
                if isinstance(leaf, Tensor):
                    self._wrote(leaf, OTHER, frozenset())

    def _on_data(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return _mapped(self._on_data, value)
        found = self._known[id(value)].value
        if found is None:  # not to be taken for an argument that was left out
            raise LookupError
        return found


def _is_undecided(function: Any) -> bool:
    """True for a function whose result its arguments do not decide."""
    return getattr(function, "__name__", "") in _UNDECIDED or getattr(function, "__module__", "") == "torch.nn.init"


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _has_data(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and tensor.device.type != "meta"


def _alike(value: Tensor, fake: Tensor) -> bool:
    return value.shape == fake.shape and value.dtype == fake.dtype


def _frozen(result: Any) -> Any:
    """An array that shares memory with a tensor would let numpy write where no capture sees it."""
    if isinstance(result, np.ndarray):
        result = result.copy()
        result.flags.writeable = False
    return result


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, slice):
        yield from _leaves((value.start, value.stop, value.step))
    else:
        yield value


def _mapped(function: Any, value: Any) -> Any:
    """A container with other leaves."""
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(function, value))
    if isinstance(value, (tuple, list)):
        return type(value)(map(function, value))
    if isinstance(value, dict):
        return {key: function(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(function(value.start), function(value.stop), function(value.step))
    return value


def _copied(value: Any) -> Any:
    """The same arguments, which the user's code cannot change any more."""
    return value.copy() if type(value) in _ARRAYS else _mapped(_copied, value)
