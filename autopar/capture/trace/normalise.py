"""Turn the tracer's recording into a program: functional, without dead or idle nodes, every value typed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.func import functionalize
from torch.fx import traceback as fx_traceback

from autopar.capture.ops.canonical import (
    choice_by_mask,
    filled,
    joined,
    memory_of_operand,
    own_dtype,
    squeezed_dims,
    table_gradient,
    view_of_copy,
)
from autopar.capture.refusals.location import is_exact, place_of
from autopar.capture.trace.tracer import Traced, trace
from autopar.errors import CaptureError
from autopar.ir.ops.op_facts import facts_of
from autopar.ir.ops.ops import op
from autopar.ir.program import Input, Output, Program, Record, TensorType, erase_unused, record, set_record
from autopar.torch_compat import FakeTensorMode, OpOverload
from autopar.torch_shortcuts import add_call

aten = torch.ops.aten

# A view's strides are those of the whole value; a piece has others. Reshape is right for both.
_RESHAPE = frozenset((aten.view.default, aten._unsafe_view.default, aten.reshape.default))
# They speak of memory: a piece of a value, or one that was moved, lies otherwise.
_STRIDED = frozenset((aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default))
_LIFTS = (aten.lift_fresh.default, aten.lift_fresh_copy.default)  # of what the model writes as a list
# They mark a tensor for the next op, or for a copy, which is idle here: the values themselves.
_MARKS = {aten._conj.default: aten.conj_physical.default, aten._neg_view.default: aten.neg.default}
_PLACEMENT = ("device", "pin_memory", "layout", "memory_format")


def is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def check_drawn_by_seed(node: fx.Node) -> None:
    """Raise CaptureError for a random op of torch's own generator, which has other numbers on each rank."""
    if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return
    _, module, source = place_of(node)
    raise CaptureError(
        f"random op '{node.target}' at {source or 'an unknown line'} (module '{module}') cannot be made the same "
        f"on every rank. Draw the numbers outside of the model and pass them in with the batch; "
        f"what is supported is listed in docs/random.md."
    )


def functional(traced: Traced, inputs: Sequence[Any], fake: FakeTensorMode) -> Traced:
    """The same graph without in-place ops; nodes keep their place. A mutated input comes out as a new value."""
    if not any(is_mutable(node) for node in traced.graph.nodes):
        return traced

    def run(*args: Any) -> Any:
        with fx_traceback.preserve_node_meta():
            return traced.run(*args)

    return trace(functionalize(run, remove="mutations"), inputs, fake, {})


def normalise(
    traced: Traced, inputs: tuple[Input, ...], outputs: tuple[Output, ...], keeps_casts: bool = False
) -> tuple[Program, dict[str, torch.Tensor]]:
    """A CAPTURED program and the constants that the model made, which become inputs. keeps_casts: also those that
    change nothing.

    Raises CaptureError for random ops that would draw other numbers on each rank.
    """
    return _Normaliser(traced, inputs, keeps_casts).run(outputs)


def without_seed(program: Program) -> Program:
    """The program without its input of kind "seed"."""
    for node, entry in program.entries:
        if entry.kind == "seed":
            program.graph.erase_node(node)
    return program.with_(inputs=tuple(entry for entry in program.inputs if entry.kind != "seed"))


class _Normaliser:
    def __init__(self, traced: Traced, inputs: tuple[Input, ...], keeps_casts: bool) -> None:
        self.traced, self.keeps_casts = traced, keeps_casts
        self.inputs = list(inputs)
        self.graph = fx.Graph()
        self.value: dict[fx.Node, fx.Node] = {}
        self.constants: dict[str, torch.Tensor] = {}

    def run(self, outputs: tuple[Output, ...]) -> tuple[Program, dict[str, torch.Tensor]]:
        nodes = list(self.traced.graph.nodes)
        live = _live(nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        assert len(placeholders) == len(self.inputs)
        names = _Names()
        for node, entry in zip(placeholders, self.inputs, strict=True):
            self.value[node] = self._placeholder(names.of(entry), _types(node)[0])
        for node in nodes:
            if node.op == "get_attr":
                self._constant(node, names)
        for node in nodes:
            if node.op == "call_function" and node in live:
                self._call(node)
        results = self._results(nodes[-1], len(outputs))
        self.graph.output(results)
        set_record(self.graph.output_node(), Record((None,)))
        kept = [(r, o) for r, o in zip(results, outputs, strict=True) if r is not None]
        if len(kept) < len(outputs):
            self.graph.output_node().args = (tuple(r for r, _ in kept),)
        erase_unused(self.graph)
        program = Program(self.graph, tuple(self.inputs), tuple(o for _, o in kept))
        self.graph.lint()
        return program, self.constants

    def _placeholder(self, name: str, type_: TensorType | None) -> fx.Node:
        node = self.graph.placeholder(name)
        set_record(node, Record((type_,), origin=node.name))
        return node

    def _constant(self, node: fx.Node, names: _Names) -> None:
        value = getattr(self.traced.root, str(node.target))
        made_here = all(user.target in _LIFTS for user in node.users)  # by the trace, and no tensor of the user's
        if made_here and is_range(value):
            self.value[node] = self._make(node, aten.arange.default, (len(value),), {"dtype": value.dtype}, like=node)
            return
        name = f"constant.{len(self.constants)}"
        self.constants[name] = value
        entry = Input("constant", (name,))
        self.inputs.append(entry)
        self.value[node] = self._placeholder(names.of(entry), TensorType(tuple(value.shape), value.dtype))

    def _call(self, node: fx.Node) -> None:
        target: Any = node.target
        same = _same_value(node)
        if same is not None and not (self.keeps_casts and _is_cast(node)):
            self.value[node] = self.value[same]
            return
        check_drawn_by_seed(node)
        _, module, source = place_of(node)
        if target is aten.native_batch_norm.default and node.args[5] and node.args[3] is not None:
            # Its schema does not say that it writes the running statistics, so nothing made that functional.
            raise CaptureError(
                f"a normalisation with running statistics at {source or 'an unknown line'} (module '{module}') cannot "
                f"be captured: use track_running_stats=False, or nn.BatchNorm."
            )
        target, args, kwargs = filled(node) or (view_of_copy(target), node.args, node.kwargs)
        args = (joined(node) or args[0], *args[1:]) if args else args
        if getattr(target, "namespace", "aten") in ("aten", "prims"):  # in an op of the user's they mean something else
            kwargs = {key: value for key, value in kwargs.items() if key not in _PLACEMENT} | own_dtype(node)
        dims = squeezed_dims(node)
        if dims is not None:
            target, args = aten.squeeze.dims, (node.args[0], dims)
        target = _MARKS.get(target, target)
        if target in _RESHAPE:
            target = aten.reshape.default
        args, kwargs = fx.node.map_arg((args, kwargs), self.value.__getitem__)
        if node.target in _STRIDED:
            args = (self._in_memory_order(node, args[0]), *args[1:])
        gradient = table_gradient(node)
        if gradient is not None:
            values, index, rows = gradient
            place = self._place_in_table(node, index, rows)
            target, args, kwargs = op("embedding_backward"), (self.value[values], place, rows, -1), {}
        choice = choice_by_mask(node)
        if choice is not None:
            mask, shape, given, sizes = choice
            chosen = self._reshaped(node, mask, shape), self._reshaped(node, given, sizes)
            target, args, kwargs = aten.where.self, (*chosen, args[0]), {}
        self.value[node] = self._make(node, target, args, kwargs, like=node)

    def _reshaped(self, node: fx.Node, value: fx.Node, shape: list[int]) -> fx.Node:
        """A value in another shape, for a call that stands in place of `node`."""
        type_ = record(self.value[value]).type
        if list(type_.shape) == shape:
            return self.value[value]
        args = (self.value[value], shape)
        return self._of_type(TensorType(tuple(shape), type_.dtype), node, aten.reshape.default, args)

    def _of_type(self, type_: TensorType, node: fx.Node, target: Any, args: Any) -> fx.Node:
        """A call with one result of a type, which stands before `node`."""
        phase, module, source = place_of(node)
        made = add_call(self.graph, target._opname, target, args, {})
        set_record(made, Record((type_,), module=module, source=source, phase=phase, origin=made.name))
        return made

    def _place_in_table(self, node: fx.Node, index: fx.Node, rows: int) -> fx.Node:
        """The rows to which `index_add` or `index_put` adds, from 0 on.

        Where the model calls it the index is checked as torch does, for the kernel leaves out what no rank holds; in
        the backward pass of what has read these rows it was checked.
        """
        place, is_put = self.value[index], node.target is not aten.index_add.default
        if place_of(node)[0] != "backward":
            checked = (place, rows, None, -rows) if is_put else (place, rows, None)
            place = self._make(index, op("checked_index"), checked, {}, like=node)
        return self._make(index, aten.remainder.Scalar, (place, rows), {}, like=node)  # -1 is the last one

    def _in_memory_order(self, node: fx.Node, value: Any) -> fx.Node:
        """The operand of an `as_strided`, contiguous as it lay in memory when it was traced."""
        order = memory_of_operand(node)
        is_kept = order == list(range(len(order or ())))
        if order is None or (node.target is not aten.as_strided.default and not is_kept):
            _, module, source = place_of(node)
            raise CaptureError(
                f"as_strided at {source or 'an unknown line'} (module '{module}') reads memory beside the tensor that "
                f"it is called on. Call .contiguous() before it, or use unfold, slices or reshape."
            )
        if is_kept:
            return value
        type_ = record(value).type
        permuted = TensorType(tuple(type_.shape[dim] for dim in order), type_.dtype)
        return self._of_type(permuted, node, aten.permute.default, (value, order))

    def _make(self, typed: fx.Node, target: Any, args: Any, kwargs: Any, *, like: fx.Node) -> fx.Node:
        """A call whose results have the types of `typed`, in the place of `like`."""
        made = add_call(self.graph, getattr(target, "_opname", None), target, args, kwargs)
        several = isinstance(typed.meta.get("val"), (tuple, list))
        phase, module, source = place_of(like)
        made_here = Record(_types(typed), several, (), (), module, source, phase, "capture", made.name)
        set_record(made, made_here.with_(exact=is_exact(like)))
        return made

    def _results(self, output: fx.Node, count: int) -> tuple[fx.Node | None, ...]:
        found: Any = output.args[0]
        flat = list(found) if isinstance(found, (tuple, list)) else [found]
        assert len(flat) == count
        return tuple(None if item is None else self.value[item] for item in flat)


class _Names:
    """Names of placeholders, from the names of what they hold."""

    def __init__(self) -> None:
        self.used: set[str] = set()

    def of(self, entry: Input) -> str:
        base = "".join(c if c.isalnum() else "_" for c in entry.name)
        base = f"{entry.kind}_{base}" if not base[:1].isalpha() else base
        name, count = base, 0
        while name in self.used:
            count += 1
            name = f"{base}_{count}"
        self.used.add(name)
        return name


def _types(node: fx.Node) -> tuple[TensorType | None, ...]:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(
        TensorType(tuple(int(s) for s in v.shape), v.dtype) if isinstance(v, torch.Tensor) else None for v in values
    )


def _same_value(node: fx.Node) -> fx.Node | None:
    """The operand whose value a node passes on that changes nothing, without mutation: each value stands for itself."""
    source: Any = node.args[0] if node.args else None
    if squeezed_dims(node) == []:
        return source
    held = joined(node)
    if held is not None and len(held) == 1:
        return held[0]
    if node.target is aten.copy.default:
        source = node.args[1]
    elif facts_of(node.target).moves != "same":
        return None
    if not isinstance(source, fx.Node):
        return None  # a number that torch casts
    value, result = source.meta["val"], node.meta["val"]
    return source if value.dtype == result.dtype and value.shape == result.shape else None


def is_range(value: torch.Tensor) -> bool:
    """True for 0, 1, ... as `x[range(n), index]` makes it: written out it depends on no input."""
    if value.ndim != 1 or len(value) < 2 or value.dtype not in (torch.int32, torch.int64):
        return False
    return bool(torch.equal(value, torch.arange(len(value), dtype=value.dtype, device=value.device)))


def _is_cast(node: fx.Node) -> bool:
    """True for a cast that names a floating-point dtype, though it may change nothing."""
    dtype = node.kwargs.get("dtype")
    return node.target is aten._to_copy.default and isinstance(dtype, torch.dtype) and dtype.is_floating_point


def _live(nodes: list[fx.Node]) -> set[fx.Node]:
    live: set[fx.Node] = set()
    pending = [node for node in nodes if node.op == "output"]
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in live:
                live.add(source)
                pending.append(source)
    return live
