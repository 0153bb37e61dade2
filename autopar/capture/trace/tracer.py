"""Write the ops that a function runs down as a graph.

What `make_fx` does, in a third of its time: nothing here follows modules, symbolic sizes or torch's own functions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx import traceback as fx_traceback

from autopar.capture.trace.results import Results
from autopar.ir.ops.ops import semantic_of
from autopar.torch_compat import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    function_modes,
    fx_tracing,
    is_composite,
    is_of_lists,
    no_function_modes,
    one_by_one,
    saved_tensor_hooks,
    schema_of,
)
from autopar.torch_shortcuts import DispatchMode, add_call

aten = torch.ops.aten
_KNOWN = (torch.Tensor, nn.Parameter, FakeTensor)  # other classes take their ops apart themselves
_DEVICE = torch.ops.prim.device.default
# What asks for a property of a tensor and computes nothing.
_ASKED = frozenset((_DEVICE, aten.size.default, aten.stride.default, aten.storage_offset.default))
PLACE = "stack_trace"


def trace(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor], fake: FakeTensorMode,
    decompositions: Mapping[Any, Callable[..., Any]],
) -> Traced:  # fmt: skip
    """The ops of `function(*inputs)`, which returns a flat sequence of tensors and None. inputs: of the mode `fake`.

    decompositions: the spelling of ops in others. Each node has the tensors that it made in `meta["val"]`, and the
    place that was set by `fx.traceback` when it ran.
    """
    return Tracer(inputs, decompositions, Results(fake)).trace(function, inputs, fake)


@dataclass(frozen=True, slots=True)
class Traced:
    """A graph of ops, whose constants are attributes of `root`."""

    root: nn.Module
    graph: fx.Graph

    def run(self, *inputs: Any) -> Any:
        """What the graph gives."""
        return fx.Interpreter(cast(fx.GraphModule, self.root), graph=self.graph).run(*inputs)


class Unseen(DispatchMode):
    """Shows a function mode the ops of a run without a trace that it has not seen, as a trace does: those that C++
    calls, as the functions of torch.jit.script do. is_unseen: it need not see them."""

    def __init__(self, results: Results, is_unseen: bool = False) -> None:
        super().__init__()
        self._results, self._is_unseen = results, is_unseen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        args, kwargs = self._results.unwritten(func, args, kwargs or {})
        if function_modes() and not self._is_unseen:
            return func(*args, **kwargs)
        return self._results.call(func, func, args, kwargs)


class Tracer(DispatchMode):
    """Adds a node to `graph` for each op. A tensor that no op made is a constant, an attribute of `root`.

    is_unseen: no function mode needs to see what C++ calls, as the gradients of torch's own ops."""

    def __init__(
        self, inputs: Sequence[torch.Tensor], decompositions: Mapping[Any, Callable[..., Any]], results: Results
    ) -> None:
        super().__init__()
        self._results, self.is_unseen = results, False
        self.graph, self.root = fx.Graph(), nn.Module()
        self._decompositions = decompositions
        self._nodes: dict[int, tuple[torch.Tensor, fx.Node]] = {}  # the tensor is held, so that its id stays its own
        for position, tensor in enumerate(inputs):
            self._made(self.graph.placeholder(f"input_{position}"), tensor)
        self.is_packed = False  # functions of Python's take what autograd saves, as checkpoints do

    def trace(self, function: Callable[..., Any], inputs: Sequence[torch.Tensor], fake: FakeTensorMode) -> Traced:
        """See `trace`."""
        with fx_tracing(), fake, self, _no_autocast_cache():
            results = function(*inputs)
        self.graph.output(tuple(self.argument(result) for result in results))
        return Traced(self.root, self.graph)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if any(kind not in _KNOWN for kind in types):
            return NotImplemented
        self.is_packed |= saved_tensor_hooks() is not None
        if func in _ASKED:
            return func(*args, **kwargs)
        if func is aten._linalg_check_errors.default:
            return self._check(args[0])
        result = self._taken_apart(func, args, kwargs)
        return self._call(func, args, kwargs) if result is NotImplemented else result

    def _check(self, info: torch.Tensor) -> None:
        """Let the factorisation that tells by `info` how it went raise torch's error itself, when it is computed."""
        told = self.node_of(info)
        if told is not None and told.target is operator.getitem:
            factors: Any = told.args[0]
            factors.kwargs = {**factors.kwargs, "check_errors": True}

    def _taken_apart(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        ways = self._decompositions.get(func), _parts(func)
        for way in ways:
            if way is not None:
                with self:
                    result = way(*args, **kwargs)
                if result is not NotImplemented:
                    return result
        return NotImplemented

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = self.argument(args), self.argument(kwargs)
        args, kwargs = self._results.unwritten(func, args, kwargs)
        if torch.Tag.inplace_view in func.tags:  # what was recorded of it before stays
            node = self._nodes[id(args[0])][1]
            node.meta["val"] = torch.empty_strided(
                args[0].shape, args[0].stride(), dtype=args[0].dtype, device=args[0].device
            )
        own = semantic_of(func)
        call = partial(self._meta, own.meta) if own else func
        if function_modes() and not self.is_unseen:
            result = call(*args, **kwargs)
        else:
            result = self._results.call(call, func, args, kwargs)
        mask = _mask_place(func)
        if mask is not None:  # what nobody asked for has no type, though torch's inference may give it one
            wanted = kwargs["output_mask"] if "output_mask" in kwargs else args[mask]
            result = tuple(each if is_wanted else None for each, is_wanted in zip(result, wanted, strict=True))
        if func is aten.detach.default:  # torch itself does that to what it made from nothing
            self._nodes[id(result)] = result, given[0][0]
            return result
        made = add_call(self.graph, None, _recorded(func), *given)
        self._made(made, result)
        return result

    def _meta(self, meta: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The results of an op of ours, which makes empty tensors."""
        with Unseen(self._results, is_unseen=True), no_function_modes():
            return meta(*args, **kwargs)

    def node_of(self, tensor: torch.Tensor) -> fx.Node | None:
        """The node that stands for a tensor; None for one that was not seen."""
        known = self._nodes.get(id(tensor))
        return known[1] if known else None

    def argument(self, value: Any) -> Any:
        """What stands in a node's arguments for a value."""
        if isinstance(value, torch.Tensor):
            known = self._nodes.get(id(value))
            return known[1] if known else self._constant(value)
        if isinstance(value, (tuple, list)):
            return type(value)(map(self.argument, value))
        if isinstance(value, dict):
            return {key: self.argument(item) for key, item in value.items()}
        return value

    def _constant(self, tensor: torch.Tensor) -> fx.Node:
        name = f"constant_{len(self._nodes)}"
        setattr(self.root, name, tensor)
        node = self.graph.create_node("get_attr", name)
        self._made(node, tensor)
        return node

    def _made(self, node: fx.Node, value: Any) -> None:
        node.meta["val"] = value
        place = fx_traceback.get_current_meta().get(PLACE)
        if place is not None:
            node.meta[PLACE] = place
        if isinstance(value, torch.Tensor):
            self._nodes[id(value)] = value, node
        elif isinstance(value, (tuple, list)):
            for position, item in enumerate(value):
                if isinstance(item, torch.Tensor):
                    self._made(add_call(self.graph, None, operator.getitem, (node, position), {}), item)


@cache
def _recorded(func: OpOverload) -> OpOverload:
    """What stands in the graph for an op: of a view in place (`x.unsqueeze_(0)`) the view, for the tensor that has its
    form from then on, and of a list of the user's a copy, which an op in place may change."""
    if func is aten.lift_fresh.default:
        return aten.lift_fresh_copy.default
    if torch.Tag.inplace_view not in func.tags:
        return func
    views = getattr(aten, schema_of(func).name.removeprefix("aten::").removesuffix("_"), None)
    found = (getattr(views, name) for name in (views.overloads() if views is not None else ()))
    alike = (view for view in found if _arguments(view) == _arguments(func) and _is_view(view))
    return next(alike, func)  # itself where it changes more than a form (`x.resize_(8)`)


def _is_view(func: OpOverload) -> bool:
    aliases = [returned.alias_info for returned in schema_of(func).returns]
    return all(alias is not None and not alias.is_write for alias in aliases)


def _arguments(func: OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in schema_of(func).arguments]


@cache
def _parts(func: OpOverload) -> Callable[..., Any] | None:
    """How torch itself puts an op together from others, whatever the device; None where it has a kernel."""
    if is_of_lists(func):
        return partial(one_by_one, func)
    return func.decompose if is_composite(func) else None


@cache
def _mask_place(func: OpOverload) -> int | None:
    """The place of the argument that says which results of a gradient are asked for; None where there is none."""
    return next((at for at, each in enumerate(schema_of(func).arguments) if each.name == "output_mask"), None)


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Autocast keeps what it made of a parameter, behind the tracer's back."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
