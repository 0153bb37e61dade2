"""precision: products compute in a short float, what needs more stays in float32, and casts stand between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.ir.ops.names import dtype_name
from autopar.ir.ops.op_facts import facts_of
from autopar.ir.ops.ops import semantic_of
from autopar.ir.ops.storage import is_view
from autopar.ir.plan import Plan
from autopar.ir.program import (
    Builder,
    Program,
    TensorType,
    Types,
    erase_unused,
    is_getitem,
    operand_nodes,
    record,
    set_record,
)
from autopar.passes.precision.gradient_terms import gradient_terms, sum_dtype
from autopar.passes.rules import TABLE, Table, table_of

# The types of a call's results for operands of other dtypes than it was traced with: asked of the op itself.


class ResultTypes:
    """Runs ops on tensors without data; a call like an earlier one is not run again."""

    def __init__(self) -> None:
        self._known: dict[object, tuple[torch.dtype | None, ...]] = {}

    def of(self, node: fx.Node) -> Types:
        """The types of a node's results. The shapes are those that its record has."""
        known = record(node)
        if is_getitem(node):
            producer, index = node.args
            assert isinstance(producer, fx.Node) and isinstance(index, int)
            return (record(producer).types[index],)
        return tuple(
            TensorType(type_.shape, dtype) if type_ is not None and dtype is not None else type_
            for type_, dtype in zip(known.types, self._dtypes(node), strict=True)
        )

    def _dtypes(self, node: fx.Node) -> tuple[torch.dtype | None, ...]:
        key = node.target, repr(fx.node.map_arg((node.args, dict(node.kwargs)), _types_of))
        if key not in self._known:
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), _empty)
            target: Any = node.target
            results = target(*args, **kwargs)
            results = results if isinstance(results, (tuple, list)) else (results,)
            self._known[key] = tuple(r.dtype if isinstance(r, torch.Tensor) else None for r in results)
        return self._known[key]


def _types_of(node: fx.Node) -> Any:
    return [type_ and (type_.shape, type_.dtype) for type_ in record(node).types]


def _empty(node: fx.Node) -> Any:
    """A tensor without data, or a tuple of them."""
    known = record(node)
    made = [None if t is None else torch.empty(t.shape, dtype=t.dtype, device="meta") for t in known.types]
    return tuple(made) if known.several else made[0]


MADE_BY = "precision"
WIDE = torch.float32
aten = torch.ops.aten


def precision(program: Program, plan: Plan) -> Program:
    """CAPTURED -> CAPTURED. Every op gets the dtype that it computes in, as under torch.autocast (arXiv 1710.03740).

        precision: bf16
        CAPTURED program
        %w: f32[6,4] = parameter "w"
        %x: f32[8,4] = batch "0"
        %einsum: f32[8,6] = autopar.einsum.default(%x, %w, "ca,ba->cb")
        %exp: f32[8,6] = aten.exp.default(%einsum)
        return value "y" = %exp
    becomes
        CAPTURED program
        note: precision bf16: 3 of 5 values are bf16, with 3 casts; f32 stay exp
        %w: f32[6,4] = parameter "w"
        %x: f32[8,4] = batch "0"
        %cast: bf16[8,4] = aten._to_copy.default(%x, dtype=bf16)
        %cast_1: bf16[6,4] = aten._to_copy.default(%w, dtype=bf16)
        %einsum: bf16[8,6] = autopar.einsum.default(%cast, %cast_1, "ca,ba->cb")
        %cast_2: f32[8,6] = aten._to_copy.default(%einsum, dtype=f32)
        %exp: f32[8,6] = aten.exp.default(%cast_2)
        return value "y" = %exp

    The table is `kinds.py`; it holds for the backward pass as well. A value is cast once for all its users, a parameter
    where it enters. What leaves the program has the dtype that it had. A bias is added in the dtype of its product.
    What a gradient goes through behind its product is float32, so that the uses of a weight and ranks add up there.
    Products that hang on no parameter stay as they are: tables of positions need all their digits. Gradients are cast
    to `reduce_dtype` where that is shorter; the search sums them there, and only the uses of a weight add up before.
    """
    options = plan.options
    if options.sums_dtype is None:
        return program
    return _Precision(program, options.low_dtype, options.reduce_dtype, table_of(plan)).run()


class _Precision:
    def __init__(self, program: Program, low: torch.dtype | None, sums: torch.dtype, table: Table) -> None:
        self.program, self.low, self.sums = program, low, sums
        self.build, self.types = Builder(MADE_BY), ResultTypes()
        self.casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
        self.widened: dict[fx.Node, fx.Node] = {}  # what was only made wider, and of what
        self.copies: set[fx.Node] = set()  # new nodes: what the model itself made wider, and views of it
        self.of_parameters: set[fx.Node] = set()  # new nodes: parameters and views of them
        self.vectors: set[fx.Node] = set()  # of these, those of parameters with one dim
        self.products: set[fx.Node] = set()  # new nodes
        self.parameters = {node for node, _ in program.parameters()}
        self.leaving = self._leaving()
        self.weighted = _weighted(program)
        self.terms = _wide_terms(program, table, sums is not low)

    def run(self) -> Program:
        rewritten = self.build.rewrite(self.program, self._put)
        erase_unused(rewritten.graph)
        return rewritten.with_(notes=(*self.program.notes, *self._note()))

    def _put(self, node: fx.Node) -> fx.Node:
        if node.op == "placeholder":
            made = self.build.copy(node)
            if node in self.parameters:
                self._is_parameter(made, len(record(node).type.shape) == 1)
            return made
        if node.op == "output":
            leaving = self.program.leaving
            return self.build.output((self._left(x, out.kind) for x, out in leaving if x is not None), record(node))
        made = self._call(node)
        for kind in self.leaving.get(node, ()):
            self._left(node, kind)  # where it is made, so that a gradient is on its way early
        return made

    def _is_parameter(self, made: fx.Node, is_vector: bool) -> None:
        self.of_parameters.add(made)
        if is_vector:
            self.vectors.add(made)

    # -- calls --------------------------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> fx.Node:
        if node.target is aten._to_copy.default and (known := self._already(node)) is not None:
            self.build.value[node] = known
            return known
        wanted = self._wanted(node) if self.low is not None and not is_getitem(node) else {}
        made = self.build.copy(node, lambda old: self._as(self.build.value[old], wanted.get(old), node))
        if self.low is None:
            return made
        kind = facts_of(node.target).precision
        operands = operand_nodes(made)
        if kind == "sum" and made.kwargs.get("dtype") is None and self._has(operands, self.low):
            made.kwargs = {**made.kwargs, "dtype": WIDE}
        set_record(made, record(node).with_(types=self.types.of(made)) if self._differs(node, made) else record(node))
        if kind == "low":
            self.products.add(made)
        if is_view(made) or is_getitem(made):
            source = made.args[0]
            assert isinstance(source, fx.Node)
            if source in self.of_parameters:
                self._is_parameter(made, source in self.vectors)
            if source in self.products and is_getitem(made):
                self.products.add(made)
            if source in self.copies:
                self.copies.add(made)
        if node.target is aten._to_copy.default:  # the model's own
            self.casts.setdefault((operands[0], record(made).type.dtype), made)
            if (record(operands[0]).type.dtype, record(made).type.dtype) == (self.low, WIDE):
                self.widened[made] = operands[0]
                self.copies.add(made)
        return made

    def _wanted(self, node: fx.Node) -> dict[fx.Node, torch.dtype]:
        """The dtypes in which a call takes its operands, where it does not take them as they are."""
        low, kind = self.low, facts_of(node.target).precision
        assert low is not None
        operands = [old for old in dict.fromkeys(operand_nodes(node)) if self._dtype(old) in (low, WIDE)]
        if node.target is aten._to_copy.default:
            return {}
        # As it was traced: where the user turned autocast off, and a custom op or of which little is known.
        if record(node).exact or str(node.target) not in TABLE:
            return {old: record(old).type.dtype for old in operands}
        if kind == "low" and node in self.weighted:
            semantic = semantic_of(node.target)
            statistic = semantic.statistic if semantic else None
            return {old: low for old in operands if statistic is None or old is not node.args[statistic]}
        if kind == "high" or node in self.terms or _exceeds(node, low):
            return dict.fromkeys(operands, WIDE)
        if kind == "inside":  # a gradient is rounded to what it is the gradient of: once, on its way into a product
            if record(node).is_backward and not self._enters_products(node):
                return dict.fromkeys(operands, WIDE)
            return {old: low for old in operands if self.build.value[old] in self.copies}
        if kind == "sum":
            return {}
        bias = self._bias(node)
        if bias is not None:
            return {bias: low}
        if kind == "promoting":
            return {}
        sized = [old for old in operands if record(old).type.shape] or operands
        widest = WIDE if any(self._dtype(old) is WIDE for old in sized) else low
        return dict.fromkeys(operands, widest)

    def _enters_products(self, node: fx.Node) -> bool:
        """True if all users compute in the low dtype, or add up what they are given."""

        def takes(user: fx.Node) -> bool:
            kind = facts_of(user.target).precision
            return kind == "sum" or (kind == "low" and user in self.weighted)

        return all(self._enters_products(user) if is_view(user) else takes(user) for user in node.users)

    def _bias(self, node: fx.Node) -> fx.Node | None:
        """What is added to a product as its bias: a vector of the model's."""
        if node.target is not aten.add.Tensor or len(operand_nodes(node)) != 2:
            return None
        product, bias = operand_nodes(node)
        is_low = self.build.value[product] in self.products and self._dtype(product) is self.low
        return bias if is_low and self.build.value[bias] in self.vectors else None

    def _already(self, node: fx.Node) -> fx.Node | None:
        """What a cast of the model's own would make, if there is one: the value itself, or one that is cast already."""
        (operand,) = operand_nodes(node)
        dtype, value = node.kwargs.get("dtype"), self.build.value[operand]
        if dtype is not None and self._dtype(operand) is not dtype:
            value = self.casts.get((value, dtype), value)  # type: ignore[arg-type]
        return value if dtype is not None and record(value).type.dtype is dtype else None

    def _dtype(self, old: fx.Node) -> torch.dtype:
        return record(self.build.value[old]).type.dtype

    def _has(self, operands: tuple[fx.Node, ...], dtype: torch.dtype) -> bool:
        return any(record(operand).type.dtype is dtype for operand in operands)

    def _differs(self, node: fx.Node, made: fx.Node) -> bool:
        """True if a call's operands are of other types than when it was traced."""
        pairs = zip(node.all_input_nodes, made.all_input_nodes, strict=False)
        same = len(node.all_input_nodes) == len(made.all_input_nodes) and node.kwargs.keys() == made.kwargs.keys()
        return not same or any(record(old).types != record(new).types for old, new in pairs)

    # -- casts --------------------------------------------------------------------------------------------------

    def _as(self, value: fx.Node, dtype: torch.dtype | None, user: fx.Node) -> fx.Node:
        """A value in a dtype, None for its own; made once for all users."""
        known = record(value)
        if dtype is None or known.type.dtype is dtype:
            return value
        if value in self.widened and record(self.widened[value]).type.dtype is dtype:
            return self.widened[value]
        if (value, dtype) not in self.casts:
            is_view_of_known = value in self.of_parameters or (value in self.copies and dtype is self.low)
            made = self._view(value, dtype, user) if is_view_of_known else None
            self.casts[value, dtype] = made or self._cast(value, dtype, user)
        return self.casts[value, dtype]

    def _cast(self, value: fx.Node, dtype: torch.dtype, user: fx.Node) -> fx.Node:
        known, where = record(value), record(user)
        is_input = value.op == "placeholder"
        like = known.with_(
            types=(TensorType(known.type.shape, dtype),),
            module=where.module if is_input else known.module,
            source=where.source if is_input else known.source,
            phase=known.phase if user.op == "output" else where.phase,
            reason=f"%{user.name} takes it in {dtype_name(dtype)}" if user.op != "output" else "",
        )
        made = self.build.call(aten._to_copy.default, value, dtype=dtype, like=like, name="cast")
        if dtype.itemsize > known.type.dtype.itemsize:
            self.widened[made] = value
        return made

    def _view(self, value: fx.Node, dtype: torch.dtype, user: fx.Node) -> fx.Node | None:
        """A view of a parameter in a dtype: the view of the cast parameter. None for the parameter itself."""
        if value.op == "placeholder":
            return None
        source = value.args[0]
        assert isinstance(source, fx.Node)
        if record(source).several:
            instead = self.casts.get((source, dtype)) or self._again(source, dtype, user)
            self.casts[source, dtype] = instead
            return self._on(value, instead, dtype)
        return self._again(value, dtype, user)

    def _again(self, view: fx.Node, dtype: torch.dtype, user: fx.Node) -> fx.Node:
        source = view.args[0]
        assert isinstance(source, fx.Node)
        return self._on(view, self._as(source, dtype, user), dtype)

    def _on(self, view: fx.Node, source: fx.Node, dtype: torch.dtype) -> fx.Node:
        """The same view of another value."""
        known = record(view)
        types = tuple(None if type_ is None else TensorType(type_.shape, dtype) for type_ in known.types)
        like = known.with_(types=types)
        return self.build.call(view.target, source, *view.args[1:], like=like, **view.kwargs)  # type: ignore[arg-type]

    # -- what leaves --------------------------------------------------------------------------------------------

    def _leaving(self) -> dict[fx.Node, list[str]]:
        """What leaves the program, and as what."""
        leaving: dict[fx.Node, list[str]] = {}
        for node, out in self.program.leaving:
            assert node is not None
            leaving.setdefault(node, []).append(out.kind)
        return leaving

    def _left(self, node: fx.Node, kind: str) -> fx.Node:
        """What leaves in place of a node."""
        dtype, value, output = record(node).type.dtype, self.build.value[node], self.program.graph.output_node()
        if kind == "gradient" and (in_ := sum_dtype(dtype, self.sums)) is not WIDE:
            value = self._as(value, in_, output)
        return self._as(value, dtype if dtype.is_floating_point else None, output)

    def _note(self) -> list[str]:
        """How many values are short, and which ops are not."""
        if self.low is None:
            return []
        calls = [node for node in self.build.graph.nodes if node.op == "call_function" and not is_getitem(node)]
        short = sum(any(t is not None and t.dtype is self.low for t in record(node).types) for node in calls)
        kept = {_name(node) for node in calls if facts_of(node.target).precision == "high"}
        names = ", ".join(sorted(kept)) or "no op"
        casts = sum(node.target is aten._to_copy.default for node in calls)
        name = dtype_name(self.low)
        return [f"precision {name}: {short} of {len(calls)} values are {name}, with {casts} casts; f32 stay {names}"]


def _name(node: fx.Node) -> str:
    return str(node.target).split(".")[1]


def _weighted(program: Program) -> set[fx.Node]:
    """The nodes that hang on a parameter, and all of the backward pass: what hangs on none has no gradient."""
    weighted = {node for node, entry in program.parameters()}
    for node in program.calls():
        if record(node).is_backward or any(operand in weighted for operand in node.all_input_nodes):
            weighted.add(node)
    return weighted


def _exceeds(node: fx.Node, low: torch.dtype) -> bool:
    """True for a call with a number that no short float holds: the least float32, of a mask."""
    numbers = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, float)]
    return any(torch.finfo(low).max < abs(value) < float("inf") for value in numbers)


def _wide_terms(program: Program, table: Table, is_cast: bool) -> frozenset[fx.Node]:
    """The calls behind the products that make gradients that are computed in float32: all, so that ranks add up what a
    product gave in a dtype of its own (`is_cast`); or those by which the uses of a weight add up."""
    terms = gradient_terms(program, table)
    return frozenset(node for node, operands in terms.items() if is_cast or len(operands) > 1)
