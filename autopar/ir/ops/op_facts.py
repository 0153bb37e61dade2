"""What is true of an op wherever it runs: what it computes of which elements, whose memory its results lie in, in
which dtype it computes.

torch's tags and schemas say most of it. `_ROWS` says what they leave out, or say otherwise; an op of our own says it in
its declaration (`semantic.py`). How an op may be split is in passes/rules/, how it is computed in runtime/.
tests/ir/test_op_facts.py and test_aliasing.py compare every fact with torch's tags, and with what the op does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.fused import Fused
from autopar.ir.ops.ops import is_collective, is_mesh_op, op, op_name, semantic_of
from autopar.ir.ops.semantic import Moves, Precision
from autopar.torch_compat import OpOverload, is_composite, schema_of


@dataclass(frozen=True, slots=True)
class OpFacts:
    """pointwise: each element of a result is computed of the elements at its place in the operands, which are
    broadcast. random: a result is drawn. moves, precision: see `semantic.py`."""

    pointwise: bool = False
    random: bool = False
    moves: Moves = ""
    precision: Precision = "widest"


# The sign that a comparison has in Python.
SIGNS: Mapping[str, str] = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}

# Names without overload, or with one (`where:Scalar`) for what is true of that alone. What several rows say adds up.
_ROWS: tuple[tuple[dict[str, Any], str], ...] = (
    # Precision, as in the lists of torch.autocast, for ops of forward and backward. First the products, which are the
    # time and the memory of a step. Their kernels add in float32.
    ({"precision": "low"}, "mm bmm mv addmm baddbmm addmv _grouped_mm convolution convolution_backward"),
    # Norms, softmax, losses, functions that enlarge a rounding error or leave the range of a short float, and what adds
    # many numbers up, one after the other.
    ({"precision": "high"}, """
        native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward native_group_norm
        native_group_norm_backward _native_batch_norm_legit_functional native_batch_norm
        _native_batch_norm_legit_no_training native_batch_norm_backward _weight_norm_interface
        _weight_norm_interface_backward _softmax _safe_softmax _log_softmax _softmax_backward_data
        _log_softmax_backward_data logsumexp mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy
        binary_cross_entropy_with_logits mse_loss_backward smooth_l1_loss_backward huber_loss_backward
        soft_margin_loss_backward binary_cross_entropy_backward nll_loss_forward nll_loss2d_forward nll_loss_backward
        nll_loss2d_backward log_sigmoid_forward log_sigmoid_backward softplus softplus_backward xlogy logit
        logit_backward acos acosh asin atanh cosh sinh tan erfinv exp exp2 expm1 log log10 log1p log2 logaddexp
        logaddexp2 pow square reciprocal rsqrt digamma lgamma polygamma mvlgamma igamma igammac _cdist_forward
        _cdist_backward _euclidean_dist renorm std_mean cholesky_inverse cholesky_solve geqrf ormqr
        triangular_solve lu_unpack grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward
        affine_grid_generator _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa
        _upsample_bicubic2d_aa_backward multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_forward
        multilabel_margin_loss_backward mean prod cumsum cumprod logcumsumexp var var_mean std histc polar complex
        view_as_complex _fft_r2c _fft_c2r _fft_c2c avg_pool3d avg_pool3d_backward searchsorted bucketize
        embedding_dense_backward index_add index_put _unsafe_index_put scatter_add scatter_reduce
    """),
    ({"precision": "sum"}, "sum"),
    ({"precision": "promoting"}, "add sub rsub mul div where maximum minimum eq ne lt le gt ge"),
    # Element by element, though no tag of torch's says so.
    ({"pointwise": True}, """
        eq ne lt le gt ge floor_divide hardswish polar complex isin:Tensor_Scalar log_sigmoid_forward _prelu_kernel
        _prelu_kernel_backward softplus_backward elu_backward hardtanh_backward hardsigmoid_backward hardswish_backward
        leaky_relu_backward log_sigmoid_backward mish_backward hardshrink_backward softshrink_backward
        rrelu_with_noise_backward rsub where:Scalar where:ScalarOther where:ScalarSelf where:self masked_fill fill copy
        zero zeros_like ones_like full_like empty_like _conj resolve_conj resolve_neg _neg_view real imag
        leaky_relu _conj_physical
    """),
    ({"pointwise": False}, "bucketize equal searchsorted"),  # tagged, though they read more than the element
    # Where the elements of an operand are in a result.
    ({"moves": "same", "pointwise": True},
     "alias clone contiguous detach lift lift_fresh lift_fresh_copy _to_copy to type_as"),
    ({"moves": "flat"}, "view:default view_copy:default _unsafe_view reshape flatten unsqueeze squeeze"),
    ({"moves": "turned"}, "permute transpose t"),
    ({"moves": "repeated"}, "expand"),
    ({"moves": "joined"}, "cat stack"),
    ({"moves": "taken"}, "index index_select gather"),
    ({"moves": "put"}, "index_put index_copy scatter:src scatter:value"),
    ({"moves": "added"}, "index_add scatter_add"),
    ({"moves": "sorted"}, "sort argsort topk"),
)  # fmt: skip
# Whole families of the same precision.
_HIGH = ("special_", "linalg_", "_linalg_")

_KNOWN: dict[str, dict[str, Any]] = {}
for _facts, _names in _ROWS:
    for _name in _names.split():
        _KNOWN.setdefault(_name, {}).update(_facts)


@cache
def facts_of(target: Any) -> OpFacts:
    """The facts of an op; of an op in place those of the op that makes a new tensor."""
    semantic = semantic_of(target)
    if semantic is not None:
        return OpFacts(semantic.pointwise, semantic.random, semantic.moves, semantic.precision)
    if not _is_of_torch(target):
        return OpFacts()
    name, schema = op_name(target), schema_of(target)
    if schema.is_mutable and not name.endswith("__"):
        name = name.removesuffix("_")
    told = {
        "pointwise": torch.Tag.pointwise in target.tags,
        "random": torch.Tag.nondeterministic_seeded in target.tags
        or any(argument.name == "generator" for argument in schema.arguments),
        "precision": "high" if name.startswith(_HIGH) else "widest",
    }
    return OpFacts(**told | _KNOWN.get(name, {}) | _KNOWN.get(f"{name}:{target._overloadname}", {}))


@cache
def made_of(target: Any) -> str:
    """What an op fills a new tensor with: "zeros", "ones", "full" (a number that it is given) or "empty"; "" for any
    other op."""
    name = op_name(target).removeprefix("new_").removesuffix("_like") if _is_of_torch(target) else ""
    return {"scalar_tensor": "full"}.get(name, name if name in ("zeros", "ones", "full", "empty") else "")


@cache
def creates(target: Any) -> bool:
    """True for an op of torch that makes a tensor of numbers alone: programs name no device, so it has to be told."""
    arguments = schema_of(target).arguments if _is_of_torch(target) else []
    takes_device = any(argument.name == "device" for argument in arguments)
    return takes_device and not any(isinstance(argument.type, torch.TensorType) for argument in arguments)


def fill_of(node: fx.Node) -> Any:
    """The number, or the node, that is everywhere in the tensor that a call makes; None for another call."""
    match made_of(node.target):
        case "zeros":
            return 0
        case "ones":
            return 1
        case "full":
            return argument_of(node, "s" if op_name(node.target) == "scalar_tensor" else "fill_value")
    return None


def is_zeros(node: fx.Node) -> bool:
    """True for a call that makes zeros."""
    fill = fill_of(node)
    return not isinstance(fill, fx.Node) and bool(fill == 0)


def argument_of(node: fx.Node, name: str) -> Any:
    """The argument of a call of a name; what the schema says if it is not given, and None if there is none such."""
    place, default = argument_place(node.target, name) or (len(node.args), None)
    return node.args[place] if place < len(node.args) else node.kwargs.get(name, default)


@cache
def argument_place(target: Any, *names: str) -> tuple[int, Any] | None:
    """Where an op takes the first argument with one of these names, and its default; None if it has none."""
    arguments = schema_of(target).arguments if isinstance(target, OpOverload) else []
    found = ((at, argument.default_value) for at, argument in enumerate(arguments) if argument.name in names)
    return next(found, None)


@cache
def is_fill(target: Any) -> bool:
    """True for an op in place that writes its first operand without reading it: with what it is given, or draws."""
    name, takes = op_name(target), {argument.name for argument in schema_of(target).arguments}
    draws = name.endswith("_") and "generator" in takes and "training" not in takes  # rrelu_ has that, and reads
    return draws or name in ("copy_", "fill_", "zero_")


# -- functions of torch, by the names that a model calls them by ----------------------------------------------------


# Other names of a function: torch's own, and those of Python's operators.
_SPELLINGS: Mapping[str, str] = {
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "multiply": "mul", "subtract": "sub",
    "divide": "div", "true_divide": "div", "truediv": "div", "idiv": "div", "floordiv": "floor_divide",
    "mod": "remainder",
}  # fmt: skip
# What says what a tensor is, not what it holds.
QUERIES: frozenset[Any] = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in (
        "shape", "dtype", "device", "layout", "requires_grad", "ndim", "is_leaf", "grad_fn", "is_cuda", "is_cpu",
        "is_meta", "is_sparse", "is_quantized", "is_nested")]
    + [getattr(torch.Tensor, name) for name in (
        "size", "dim", "stride", "numel", "storage_offset", "is_contiguous", "is_floating_point", "is_complex",
        "untyped_storage", "is_conj", "is_neg", "is_inference", "element_size", "__len__")]
    + [torch.numel]
)  # fmt: skip
# What asks a tensor how it lies in memory, and which part it has in autograd, by what decides the answer: its strides,
# where it begins, the memory that views share, the bits by which it is shown negated or conjugated, the very tensor, or
# an address.
FORM_QUERIES: Mapping[str, tuple[str, ...]] = {
    "strides": ("is_contiguous", "stride", "dim_order"),
    "offset": ("storage_offset",),
    "memory": ("is_shared", "is_pinned"),
    "bits": ("is_neg", "is_conj"),
    "itself": ("is_inference", "is_leaf", "retains_grad", "output_nr"),
    "address": ("data_ptr", "storage", "untyped_storage", "_typed_storage", "is_set_to", "_cdata"),
}
# Functions that say whether tensors are alike: the one that says so of each element, and what is asked of all of them.
ALIKE: Mapping[Any, tuple[Any, Any]] = {
    **dict.fromkeys((torch.equal, torch.Tensor.equal), (torch.eq, torch.all)),
    **dict.fromkeys((torch.allclose, torch.Tensor.allclose), (torch.isclose, torch.all)),
    torch.Tensor.__contains__: (torch.eq, torch.any),
}
# What changes nothing among the elements that a function takes together.
NEUTRAL: Mapping[str, float] = {
    **dict.fromkeys(("mean", "sum", "nansum", "any", "count_nonzero", "norm", "vector_norm"), 0),  # mean: of its sum
    **dict.fromkeys(("prod", "all"), 1),
    **dict.fromkeys(("max", "amax", "logsumexp"), -math.inf),
    **dict.fromkeys(("min", "amin"), math.inf),
}
# What draws in steps of its own, or where it is told to, and what gives memory as it was found.
_UNDECIDED = frozenset(
    ("gumbel_softmax", "dropout1d", "dropout2d", "dropout3d", "fractional_max_pool2d", "fractional_max_pool3d",
     "multi_head_attention_forward")
)  # fmt: skip
_UNWRITTEN = frozenset(("new", "resize_", "resize_as_", "set_"))
_RECURRENT = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))  # tagged as random, for their dropout


@cache
def spellings_of(name: str) -> tuple[str, ...]:
    """The names of a function."""
    return (name, *(other for other, one in _SPELLINGS.items() if one == name))


@cache
def overloads_of(name: str) -> tuple[OpOverload, ...]:
    """The ops that a function or method of torch calls by its name; `__radd__` those of `add`."""
    if name.endswith("__"):
        inner = name[2:-2]
        is_of_two = inner[:1] in ("i", "r") and hasattr(torch.Tensor, f"__{inner[1:]}__")
        name = inner[1:] if is_of_two else inner
    for one in (_SPELLINGS.get(name.removesuffix("_"), name), f"__{name}__"):
        packet = getattr(torch.ops.aten, one, None)
        if hasattr(packet, "overloads"):
            return tuple(getattr(packet, overload) for overload in packet.overloads())  # type: ignore[union-attr]
    return ()


@cache
def moves_of(name: str) -> Moves:
    """Where a function of torch moves elements."""
    return next((moves for one in overloads_of(name) if (moves := facts_of(one).moves)), "")


@cache
def is_undecided(name: str) -> bool:
    """True for a function whose result its arguments do not decide: it draws, or gives memory as it was found."""
    draws = any(facts_of(one).random for one in overloads_of(name)) and name not in _RECURRENT
    return draws or name in _UNDECIDED or is_unwritten(name)


@cache
def is_unwritten(name: str) -> bool:
    """True for a function that gives memory as it was found."""
    return name in _UNWRITTEN or name.removeprefix("new_").startswith("empty")


@cache
def form_argument(name: str) -> int | None:
    """The place of the argument of which a function looks at the shape and the dtype, and at nothing that it holds."""
    if name in ("expand_as", "view_as", "reshape_as", "type_as", "to"):
        return 1
    return 0 if name.startswith("new_") or name.endswith("_like") else None


# Calls that give places along a dim, with the argument that is the dim.
_PLACES = {"topk": 2, "sort": 1, "max": 1, "min": 1, "argmax": 1, "argmin": 1, "argsort": 1}


def dim_of_places(node: fx.Node) -> int | None:
    """The dim along which a call gives places, alone or as the second result: `topk`, `argmax`; None for others."""
    name = op_name(node.target) if node.op == "call_function" else ""
    if name not in _PLACES:
        return None
    given = node.args[_PLACES[name]] if len(node.args) > _PLACES[name] else node.kwargs.get("dim")
    last = -1 if given is None and name in ("topk", "sort", "argsort") else given
    return last if isinstance(last, int) else None


@cache
def writes_first(name: str) -> bool:
    """True for a function that by its name writes into its first argument."""
    if name.endswith("__"):
        is_operator = name.startswith("__i") and hasattr(torch.Tensor, f"__{name[3:]}")
        return is_operator or name in ("__setitem__", "__set__")
    return name.endswith("_")


@cache
def numbers_of(name: str) -> int:
    """How many of the first arguments of a function that works element by element may be numbers in place of tensors,
    or tensors; 0 where none may be a number."""
    kinds: list[set[str]] = []
    for one in overloads_of(name):
        given = [str(argument.type) for argument in schema_of(one).arguments if not argument.kwarg_only]
        if facts_of(one).pointwise and "Tensor" in " ".join(given):
            kinds += [set() for _ in given[len(kinds) :]]
            for place, kind in enumerate(given):
                kinds[place].add("Tensor" if "Tensor" in kind else kind)
    count = next((i for i, one in enumerate(kinds) if "Tensor" not in one), len(kinds))
    return count if any(kind.startswith(("number", "Optional[number")) for one in kinds[:count] for kind in one) else 0


# -- whose memory results lie in ------------------------------------------------------------------------------------

# Views by what they do, though their schemas say "Tensor": base names of aten ops.
_UNMARKED_VIEWS: Mapping[str, str] = MappingProxyType(
    {
        "_unsafe_view": "a view that autograd may take for a copy, since nobody writes to its operand",
        "unsafe_split": "as _unsafe_view",
        "unsafe_split_with_sizes": "as _unsafe_view",
    }
)

# Ops that may return an operand as it is, though their schemas say "Tensor".
_UNCHECKED = (
    "torch leaves it out when it compares ops with their schemas, as one that may return an operand "
    "(DONT_ENFORCE_STORAGE_IMPL_USE_COUNT in its tools/autograd/gen_variable_type.py)"
)
_MAY_RETURN_OPERAND: Mapping[str, str] = MappingProxyType(
    {
        "lift": "returns its operand outside of functorch",
        **dict.fromkeys(
            ("channel_shuffle", "lu_unpack", "_embedding_bag", "_embedding_bag_forward_only", "_slow_conv2d_forward",
             "slow_conv3d_forward", "_cudnn_rnn", "_cudnn_rnn_backward"),
            _UNCHECKED,
        ),
    }
)  # fmt: skip

_WAIT = op("wait")
_CHECKS = frozenset((op("checked_index"), op("checked_values")))


def is_check(target: Any) -> bool:
    """True for an op that gives its operand as it is, or an error."""
    return target in _CHECKS


@cache
def is_view(target: Any) -> bool:
    """True if what an op makes lies in the memory of its first operand (a reshape copies where strides ask for it)."""
    if target is _WAIT:  # gives what its start made
        return True
    if not isinstance(target, OpOverload):
        return False
    return _shows_operand(target) or (target.namespace == "aten" and op_name(target) in _UNMARKED_VIEWS)


@cache
def is_whole_view(target: Any) -> bool:
    """True for a view that shows every element of its operand exactly once.

    What it shows may be written over as the operand may: `expand` and `unfold` show an element several times, and a
    slice written over would keep all of its operand alive."""
    return target is _WAIT or (is_view(target) and facts_of(target).moves in ("same", "flat", "turned"))


def keeps_zeros(target: Any, before: torch.dtype, after: torch.dtype, number: object, is_positive: bool) -> bool:
    """True for an op of one operand behind which the same elements are zero, or False. before, after: dtypes. number:
    what the op compares with, if it does. is_positive: no element of the operand is below zero."""
    name = op_name(target)
    if name in ("ne", "gt"):
        return number == 0 and (name == "ne" or is_positive)
    is_exact = torch.bool in (before, after) or before == after
    return name in ("clone", "detach", "alias") or (name == "_to_copy" and is_exact)


@cache
def may_return_operand(target: Any) -> bool:
    """True for an op that is no view and may all the same give back its operand as it is."""
    semantic = semantic_of(target)
    if semantic is not None:
        return semantic.returns_operand
    return _is_of_torch(target) and op_name(target) in _MAY_RETURN_OPERAND


@cache
def is_fresh(target: Any) -> bool:
    """True if the results of an op are known to share no memory with its operands."""
    if isinstance(target, Fused):
        return True  # see there; over which operands it may be written, the executor says
    if not isinstance(target, OpOverload) or is_view(target) or may_return_operand(target):
        return False
    if target.namespace == "autopar":
        # A driver answers a collective in new memory, or in that of an operand which nothing else sees (`Request`).
        # This rank's part of a value (shard, keep_first) is a view of it. A copy to the host, or
        # back, holds what it reads until it is done.
        return is_collective(target) or not is_mesh_op(target)
    # Nobody checks the schema of a user's op, nor that of one which torch puts together from others: `type_as` and
    # `einsum` say "Tensor" and may return a view. Captured graphs hold what the latter are put together from.
    return _is_of_torch(target) and not schema_of(target).is_mutable and not is_composite(target)


def _is_of_torch(target: Any) -> bool:
    return isinstance(target, OpOverload) and target.namespace in ("aten", "prims")


def _shows_operand(target: OpOverload) -> bool:
    schema = schema_of(target)
    return not schema.is_mutable and any(result.alias_info is not None for result in schema.returns)
