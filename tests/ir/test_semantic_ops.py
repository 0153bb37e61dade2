"""Every semantic op that `autopar/ir/ops/ops.py` declares has all that an op needs: a new one fails here until it
has."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from semantic_examples import semantic_examples
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.ops import functions
from autopar.ir.ops.op_facts import is_check, is_fresh
from autopar.ir.ops.ops import SEMANTIC, SemanticOp, op
from autopar.ir.ops.semantic import Precision
from autopar.passes.rules import TABLE
from autopar.report.memory.meta_kernels import ON_CPU
from autopar.runtime.compilers.rank_trace import decomposed
from autopar.runtime.executor.kernel_table import KERNELS

each = pytest.mark.parametrize("one", SEMANTIC, ids=lambda one: one.name)

# Why an op has no gradient; one of which the name ends in "_backward" is a gradient itself.
NO_GRADIENT = {
    "checked_index": "integers", "checked_values": "what it checks has none",
    "checked_causal": "what it checks is of the batch",
    "random": "what is drawn depends on no tensor but the seed", "in_groups": "BatchNorm's own gradient has it",
    "in_microbatches": "a reshape, whose gradient is one",
    "running_average": "of buffers",
    **dict.fromkeys(
        ("index_of_rows", "index_put_of_rows", "convolution", "pad_rows", "running_sum", "linear_scan",
         "chain", "compared_attention", "dropout_of_rows"),
        "a pass puts them in a graph that has its backward part",
    ),
}  # fmt: skip


def missing(one: SemanticOp, examples: dict[str, Any]) -> list[str]:
    """What an op lacks."""
    name = f"autopar.{one.name}.default"
    kernels = {str(target): kernel for target, kernel in KERNELS.items()}
    excused = one.name in NO_GRADIENT or one.name.endswith("_backward")
    has = {
        "a rule: a row in passes/rules/": name in TABLE,
        "a kernel: an entry of KERNELS in a file of runtime/": name in kernels,
        "a precision: one of Precision": one.precision in get_args(Precision),
        "a gradient: a Function in capture/ops/functions.py": hasattr(functions, one.gradient) if one.gradient else
        excused, "a stand-in for its random bits: in report/memory/meta_kernels.py":
            not one.random or (name in kernels and kernels[name].run in ON_CPU),
        "an example: in tests/support/semantic_examples.py": one.name in examples,
    }  # fmt: skip
    return [what for what, there in has.items() if not there]


@each
def test_nothing_is_missing(one: SemanticOp) -> None:
    assert missing(one, semantic_examples()) == []


def test_what_is_missing_is_named() -> None:
    made_up = SemanticOp("made_up(Tensor x) -> Tensor", torch.empty_like, precision="low", random=True)
    assert len(missing(made_up, {})) == 5


def test_nothing_is_there_without_a_declaration() -> None:
    declared = {op(one.name) for one in SEMANTIC}
    names = set(map(str, declared))
    assert set(KERNELS) == declared
    assert {name for name in TABLE if name.startswith("autopar.")} == names
    assert set(semantic_examples()) == {one.name for one in SEMANTIC}


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def tensors(value: Any) -> tuple[torch.Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


@each
def test_a_compiler_traces_the_op_or_calls_it(one: SemanticOp) -> None:
    """What Inductor is given computes the same; a traced op is in aten's terms, an opaque one stands as it is."""
    torch.manual_seed(0)
    args, target = semantic_examples()[one.name], op(one.name)
    given = [arg for arg in args if isinstance(arg, torch.Tensor)]

    def call(*values: torch.Tensor) -> Any:
        rest = iter(values)
        return decomposed(target, "here")(*(next(rest) if isinstance(a, torch.Tensor) else a for a in args))

    want = tensors(KERNELS[target].run(*args))
    graph = make_fx(call)(*given)
    for got, expected in zip(tensors(graph(*given)), want, strict=True):
        torch.testing.assert_close(got, expected)
    ours = {node.target for node in graph.graph.nodes if str(node.target).startswith("autopar.")}
    opaque = {op(f"{one.name}_copy")} if is_check(target) else {target}
    assert ours == (set() if KERNELS[target].traced is not None else opaque)


@each
def test_aliasing_is_what_the_kernel_does(one: SemanticOp) -> None:
    args = semantic_examples()[one.name]
    memory = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
    results = tensors(KERNELS[op(one.name)].run(*args))
    shared = any(result.untyped_storage().data_ptr() in memory for result in results)
    assert shared == one.returns_operand == (not is_fresh(op(one.name)))


@each
def test_random_ops_are_those_that_take_a_seed(one: SemanticOp) -> None:
    assert one.random == ("Tensor seed" in one.schema)
    if one.statistic is not None:
        assert isinstance(semantic_examples()[one.name][one.statistic], torch.Tensor)


@each
def test_the_gradient_is_that_of_the_op(one: SemanticOp) -> None:
    """Against differences, in float64; the forward pass of the function calls the op."""
    if not one.gradient:
        return
    torch.manual_seed(0)
    function = getattr(functions, one.gradient)
    args = [_leaf(arg) for arg in semantic_examples()[one.name]]
    args = {"Embedding": [*args, -1], "Dropout": args[:4], "DroppedAttention": args[:9], "CTCLoss": [*args, False]}.get(
        one.gradient, args
    )
    with _Calls() as seen:
        function.apply(*args)
    assert op(one.name) in seen.ops
    apply = function.apply
    if one.gradient == "CTCLoss":  # torch's kernel takes for granted that a log-softmax stands before it
        apply = lambda x, *rest: function.apply(x.log_softmax(-1), *rest)  # noqa: E731
    assert torch.autograd.gradcheck(apply, args, fast_mode=True)


def _leaf(arg: Any) -> Any:
    floats = isinstance(arg, torch.Tensor) and arg.is_floating_point()
    return arg.detach().double().requires_grad_() if floats else arg
