"""The ops of our own that stand in graphs: semantic ops raised by the capture, and collectives.

Semantic ops keep what aten loses (batch dims of a matmul, attention as one thing), so that device, mask and
parallel choices are made later. Their kernels are in `runtime/`. Collectives have no kernel: they
name mesh axes, never ranks, and the executor hands them to its communication driver.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from autopar.ir.ops import chain_step, window_ops
from autopar.ir.ops.collective_ops import COLLECTIVES, CollectiveOp
from autopar.ir.ops.compared import checked_causal, compared_attention, compared_attention_backward
from autopar.ir.ops.semantic import NAMESPACE, SemanticOp, name_of, semantic
from autopar.torch_compat import schema_of

NO_EXPERT = 1 << 62  # the index of a row that no expert takes: it goes nowhere, and comes back as zeros


@semantic("einsum(Tensor a, Tensor b, str equation) -> Tensor", precision="low", gradient="Einsum")
def einsum(a: torch.Tensor, b: torch.Tensor, equation: str) -> torch.Tensor:
    """einsum of two operands, e.g. equation "abc,dc->abd"."""
    return a.new_empty(equation_shape(equation, tuple(a.shape), tuple(b.shape)))


@semantic(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale, *, SymInt[] starts=[]) -> "
    "(Tensor, Tensor)",
    precision="low",
    gradient="Attention",
)
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float, *,
    starts: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """softmax(q k^T * scale + mask) v and the logsumexp; q [b,h,s,d], k [b,hk,t,d], v [b,hk,t,e], h divided by hk.

    starts: where the queries are a piece of the whole, the first position of each of its runs of equal length."""
    b, h, s, _d = q.shape
    # dense in (b, s, h, e): what the flash kernels return, so that the following transpose and view are free
    out = q.new_empty((b, s, h, v.shape[-1])).transpose(1, 2)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return out, q.new_empty((b, h, s), dtype=dtype)


@semantic(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor lse, "
    "bool causal, float scale, *, SymInt[] starts=[]) -> (Tensor, Tensor, Tensor)",
    precision="low",
    statistic=6,
)
def attention_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    out: torch.Tensor, lse: torch.Tensor, causal: bool, scale: float, *, starts: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


_DRAWN = (
    "Tensor seed, bool causal, float scale, int key, float p, int[] whole, int[] local, SymInt[] offsets, *, "
    "SymInt[] starts=[]"
)
# Attention with `dropout` of its probabilities [b,h,s,t]; `whole`, `local` and `offsets` say where these lie, but for
# the queries, whose piece `starts` tells.
dropped_attention = SemanticOp(
    f"dropped_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, {_DRAWN}) -> (Tensor, Tensor)",
    lambda q, k, v, mask, seed, causal, scale, *_, **__: attention.meta(q, k, v, mask, causal, scale),
    precision="low", random=True, gradient="DroppedAttention",
)  # fmt: skip
dropped_attention_backward = SemanticOp(
    f"dropped_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor lse, "
    f"{_DRAWN}) -> (Tensor, Tensor, Tensor)",
    lambda grad, q, k, v, *_, **__: tuple(map(torch.empty_like, (q, k, v))),
    precision="low", statistic=6, random=True,
)  # fmt: skip


@semantic("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)", precision="high", gradient="RMSNorm")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x / sqrt(mean(x^2) + eps) * weight over the dims of weight, and the factor of each row."""
    rows = x.shape[: x.ndim - weight.ndim]
    dtype = torch.float32 if x.dtype.itemsize == 2 else x.dtype
    return x.new_empty(x.shape), x.new_empty((*rows, *(1 for _ in weight.shape)), dtype=dtype)


@semantic(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor factor) -> (Tensor, Tensor)", precision="high"
)
def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, factor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x and weight."""
    return x.new_empty(x.shape), torch.empty_like(weight)


@semantic("logsumexp(Tensor x) -> Tensor", precision="inside", gradient="LogSoftmax")
def logsumexp(x: torch.Tensor) -> torch.Tensor:
    """Over the last dim, in the next wider dtype: float32 of short floats, float64 of float32.

    What is left of a loss is the difference of two large numbers (logsumexp - the logit of the label): kept in the
    dtype of x, its rounding would be that of the logits, not of the loss. torch's log_softmax subtracts the largest
    logit first, to the same end."""
    return x.new_empty(x.shape[:-1], dtype=torch.float32 if x.dtype.itemsize == 2 else torch.float64)


@semantic("checked_index(Tensor index, int size, int? ignored, int least=0) -> Tensor", returns_operand=True)
def checked_index(index: torch.Tensor, size: int, ignored: int | None, least: int = 0) -> torch.Tensor:
    """The index itself, its values known to be in least..size-1 or `ignored`; see runtime/kernels/indices.py."""
    return torch.empty_like(index)


@semantic("checked_values(Tensor x, float least, float most, str reader) -> Tensor", returns_operand=True)
def checked_values(x: torch.Tensor, least: float, most: float, reader: str) -> torch.Tensor:
    """The tensor itself, its values known to be in least..most, as `reader` has it; see runtime/kernels/indices.py."""
    return torch.empty_like(x)


@semantic("pick(Tensor x, Tensor index, *, SymInt offset=0) -> Tensor", precision="inside", gradient="Pick")
def pick(x: torch.Tensor, index: torch.Tensor, *, offset: int = 0) -> torch.Tensor:
    """x[..., index - offset], 0 where that is outside of x."""
    return x.new_empty(index.shape)


@semantic("pick_backward(Tensor grad, Tensor index, SymInt size, *, SymInt offset=0) -> Tensor", precision="high")
def pick_backward(grad: torch.Tensor, index: torch.Tensor, size: int, *, offset: int = 0) -> torch.Tensor:
    """The gradient of pick for an x of `size` over the last dim."""
    return grad.new_empty((*index.shape, size))


@semantic(
    "cross_entropy_backward(Tensor grad, Tensor x, Tensor lse, Tensor index, Tensor? picked=None, *, "
    "SymInt offset=0) -> Tensor",
    precision="inside",
)
def cross_entropy_backward(
    grad: torch.Tensor, x: torch.Tensor, lse: torch.Tensor, index: torch.Tensor, picked: torch.Tensor | None = None,
    *, offset: int = 0,
) -> torch.Tensor:  # fmt: skip
    """grad * exp(x - lse) - picked * onehot(index - offset): the gradient of lse - pick. picked: grad if not given."""
    return x.new_empty(x.shape)


@semantic("embedding(Tensor weight, Tensor index, *, SymInt offset=0) -> Tensor", gradient="Embedding")
def embedding(weight: torch.Tensor, index: torch.Tensor, *, offset: int = 0) -> torch.Tensor:
    """weight[index - offset], 0 where that is outside of weight."""
    return weight.new_empty((*index.shape, weight.shape[1]))


@semantic(
    "embedding_backward(Tensor grad, Tensor index, SymInt rows, int padding, *, SymInt offset=0) -> Tensor",
    precision="high",
    moves="added",
)
def embedding_backward(
    grad: torch.Tensor, index: torch.Tensor, rows: int, padding: int, *, offset: int = 0
) -> torch.Tensor:
    """The gradient of table[index] for a table of `rows` of any dims; indices equal to padding (if >= 0) give none."""
    return grad.new_empty((rows, *grad.shape[index.ndim :]))


@semantic(
    "expert_mm(Tensor x, Tensor w, Tensor index, *, SymInt offset=0) -> Tensor", precision="low", gradient="ExpertMM"
)
def expert_mm(x: torch.Tensor, w: torch.Tensor, index: torch.Tensor, *, offset: int = 0) -> torch.Tensor:
    """Row i of x [s,k] times matrix index[i] - offset of w [g,k,n], zeros where w has no such matrix: [s,n]."""
    return x.new_empty((x.shape[0], w.shape[2]))


@semantic(
    "expert_mm_backward(Tensor x, Tensor grad, Tensor index, SymInt groups, *, SymInt offset=0) -> Tensor",
    precision="low",
)
def expert_mm_backward(
    x: torch.Tensor, grad: torch.Tensor, index: torch.Tensor, groups: int, *, offset: int = 0
) -> torch.Tensor:
    """The gradient of expert_mm's w, of `groups` matrices: [g,k,n] of x [s,k] and grad [s,n]."""
    return x.new_empty((groups, x.shape[1], grad.shape[1]))


@semantic(
    "ctc_loss(Tensor x, Tensor targets, Tensor lengths, Tensor target_lengths, int blank) -> Tensor",
    precision="high",
    gradient="CTCLoss",
)
def ctc_loss(
    x: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor, target_lengths: torch.Tensor, blank: int
) -> torch.Tensor:
    """-log p of each target [n,s] under log-probabilities x [t,n,c], of which the first `lengths` count."""
    return x.new_empty(x.shape[1])


@semantic(
    "ctc_loss_backward(Tensor grad, Tensor x, Tensor targets, Tensor lengths, Tensor target_lengths, int blank, "
    "bool zero_infinity) -> Tensor",
    precision="high",
)
def ctc_loss_backward(
    grad: torch.Tensor, x: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor, target_lengths: torch.Tensor,
    blank: int, zero_infinity: bool,
) -> torch.Tensor:  # fmt: skip
    """The gradient of x; as torch's it takes x for the result of a log-softmax."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


Indices = Sequence[torch.Tensor | None]


@semantic("index_of_rows(Tensor x, Tensor?[] indices, int[] rows) -> Tensor")
def index_of_rows(x: torch.Tensor, indices: Indices, rows: list[int]) -> torch.Tensor:
    """x[indices], in which each row has an index of its own: where rows[dim] is -k, the index of `dim` counts 0, 1, ...
    along the k-th last dim of the indices, and is not given."""
    index: torch.Tensor = torch.ops.aten.index.Tensor(x, row_indices(x, indices, rows))
    return index


@semantic(
    "index_put_of_rows(Tensor x, Tensor?[] indices, int[] rows, Tensor values, bool accumulate) -> Tensor",
    precision="high",
)
def index_put_of_rows(
    x: torch.Tensor, indices: Indices, rows: list[int], values: torch.Tensor, accumulate: bool
) -> torch.Tensor:
    """x with values at these places, or added there."""
    return torch.empty_like(x)


def row_indices(x: torch.Tensor, indices: Indices, rows: Sequence[int]) -> list[torch.Tensor | None]:
    """What `index_of_rows` looks up, with the numbers of the rows."""

    def numbers(dim: int) -> torch.Tensor:
        return torch.arange(x.shape[dim], device=x.device).reshape(-1, *[1] * (-rows[dim] - 1))

    return [numbers(dim) if rows[dim] else index for dim, index in enumerate(indices)]


@semantic(
    "dropout(Tensor x, Tensor seed, int key, float p, int[] whole, int[] local, SymInt[] offsets) -> Tensor",
    random=True,
    pointwise=True,
    gradient="Dropout",
)
def dropout(
    x: torch.Tensor, seed: torch.Tensor, key: int, p: float, whole: list[int], local: list[int], offsets: list[int]
) -> torch.Tensor:
    """x * keep / (1 - p); keep is drawn from (seed, key, index of the element in the whole tensor). The whole tensor,
    read as dims of sizes `whole`, has its piece of sizes `local` at `offsets`."""
    return torch.empty_like(x)


@semantic(
    "dropout_of_rows(Tensor x, Tensor seed, int key, int step, float p, Tensor place, Tensor which, int[] whole, "
    "int[] local, SymInt[] offsets) -> Tensor",
    random=True,
    placed=True,
)
def dropout_of_rows(
    x: torch.Tensor, seed: torch.Tensor, key: int, step: int, p: float, place: torch.Tensor, which: torch.Tensor,
    whole: list[int], local: list[int], offsets: list[int],
) -> torch.Tensor:  # fmt: skip
    """Dropout of rows wherever they lie: row i draws as `place[i]` of the whole tensor with key + step * which[i].
    local, offsets: as of `dropout`, without the dim of the rows."""
    return torch.empty_like(x)


@semantic(
    "random(Tensor seed, int key, str kind, int[] shape, ScalarType dtype, int[] whole, int[] local, "
    "SymInt[] offsets) -> Tensor",
    random=True,
)
def random(
    seed: torch.Tensor, key: int, kind: str, shape: list[int], dtype: torch.dtype, whole: list[int], local: list[int],
    offsets: list[int],
) -> torch.Tensor:  # fmt: skip
    """Random numbers of a `shape` and dtype, drawn likewise; kind is uniform, normal or exponential."""
    return seed.new_empty(shape, dtype=dtype)


@semantic("in_groups(Tensor x, bool synced, Tensor? like=None) -> Tensor", moves="flat", returns_operand=True)
def in_groups(x: torch.Tensor, synced: bool, like: torch.Tensor | None = None) -> torch.Tensor:
    """x, whose dim 0 holds samples, with three dims in its place: [before, groups, samples of each]. A captured step,
    which knows no mesh, has one group; the pass `group` makes more. synced: a group has the samples of all ranks. like:
    what has the groups already."""
    return x.view((1, 1, *x.shape) if like is None else like.shape)


@semantic("in_microbatches(Tensor x, int count) -> Tensor", moves="flat", returns_operand=True)
def in_microbatches(x: torch.Tensor, count: int) -> torch.Tensor:
    """x, whose dim 0 holds samples, as [micro-batches of all data ranks, samples of each, ...]; the pass `group` checks
    that they are."""
    return x.view(count, x.shape[0] // count, *x.shape[1:])


@semantic("running_average(Tensor running, Tensor values, Tensor? count, float momentum) -> Tensor", precision="high")
def running_average(
    running: torch.Tensor, values: torch.Tensor, count: torch.Tensor | None, momentum: float
) -> torch.Tensor:
    """A running statistic [c] after the values of a group, [1, 1, 1, c, ...]; the pass `group` writes what it is after
    those of all. count: the updates until then, of which it is the mean; without it each weighs `momentum`."""
    return torch.empty_like(running)


SEMANTIC = (
    einsum, attention, attention_backward, dropped_attention, dropped_attention_backward, logsumexp, checked_index,
    checked_values, pick, pick_backward, cross_entropy_backward, embedding, embedding_backward, expert_mm,
    expert_mm_backward, ctc_loss, ctc_loss_backward, index_of_rows, index_put_of_rows, dropout, dropout_of_rows, random,
    rms_norm, rms_norm_backward, *window_ops.SEMANTIC, *chain_step.SEMANTIC, compared_attention,
    compared_attention_backward, checked_causal, in_groups, in_microbatches, running_average,
)  # fmt: skip

WAIT = "wait(Tensor x) -> Tensor"  # what a start gave, once it is done

LOCAL = (
    # this rank's piece of a whole dim; nothing moves
    "shard(Tensor x, str axis, int dim, int outer) -> Tensor",
    # the value on coordinate 0, zeros elsewhere: whole -> partial(sum)
    "keep_first(Tensor x, str axis) -> Tensor",
    # the order of this rank's rows by the expert of each; and the experts of the rows that came to it, by `route`
    "order_by_owner(Tensor x, str axis, int groups=0, int bound=0) -> Tensor",
    "owned_index(Tensor x, str axis, Tensor route, int bound=0) -> Tensor",
    # the tokens that go, by rank and then in order, of rows of which `chosen` that follow each other are a token's
    "tokens_by_owner(Tensor x, str axis, int groups, int chosen) -> Tensor",
    # this rank's coordinate on an axis
    "coord(str axis) -> SymInt",
    # a copy into the host's memory, and one back from there: each is done at its `wait`, until which it holds x. What
    # stays there behind the step is the user's. before: what was there, to which x is added on its way
    "to_host_start(Tensor x, bool stays=False, Tensor? before=None) -> Tensor",
    "to_device_start(Tensor x) -> Tensor",
)


_STARTS = tuple(one.schema.replace("(", "_start(", 1) for one in COLLECTIVES if one.halves)

_library = torch.library.Library(NAMESPACE, "DEF")
for _schema in (*(one.schema for one in (*SEMANTIC, *COLLECTIVES)), *_STARTS, WAIT, *LOCAL):
    _library.define(_schema)
for _one in SEMANTIC:
    _library.impl(_one.name, _one.meta, "Meta")


def op(name: str) -> Any:
    """The overload of an op of our own, e.g. `op("einsum")`."""
    return getattr(torch.ops.autopar, name).default


def semantic_of(target: object) -> SemanticOp | None:
    """The declaration of a semantic op; None for any other."""
    return _SEMANTIC_TARGETS.get(target)


def is_collective(target: object) -> bool:
    """True for an op that moves data between ranks, for its halves too."""
    return target in _COLLECTIVE_TARGETS


def collective_of(target: Any) -> CollectiveOp:
    """The collective that an op is, or that it starts."""
    return _BY_TARGET[whole_of(target)]


def whole_of(target: Any) -> Any:
    """The collective that a half starts; any other op itself."""
    return _WHOLE_OF.get(target, target)


def mesh_op_name(target: Any) -> str:
    """The name of a mesh op; of the half of a collective that of the whole."""
    return str(whole_of(target)).removeprefix(f"{NAMESPACE}.").removesuffix(".default")


def is_mesh_op(target: object) -> bool:
    """True for an op whose result depends on the rank: the executor runs it, not a kernel."""
    return target in _MESH_TARGETS


@cache
def key_place(target: Any) -> int:
    """Where, among the arguments of an op of ours, the number stands that tells its random draws from those of others;
    -1 if it draws none."""
    names = [argument.name for argument in schema_of(target).arguments] if str(target).startswith("autopar.") else []
    return names.index("key") if "key" in names else -1


def op_name(target: object) -> str:
    """The name of an op without its namespace and overload: `all_gather` of `autopar.all_gather.default`."""
    return str(getattr(target, "_opname", getattr(target, "__name__", target)))


_SEMANTIC_TARGETS: dict[object, SemanticOp] = {op(one.name): one for one in SEMANTIC}
_BY_TARGET = {op(one.name): one for one in COLLECTIVES}
_WHOLE_OF = {op(f"{one.name}_start"): op(one.name) for one in COLLECTIVES if one.halves}
_COLLECTIVE_TARGETS = frozenset((*_BY_TARGET, *_WHOLE_OF, op("wait")))
# Copies between the device's memory and the host's, and what waits for one, as for a collective.
TO_HOST, TO_DEVICE, AWAITED = op("to_host_start"), op("to_device_start"), op("wait")
COPIES = frozenset((TO_HOST, TO_DEVICE))
_MESH_TARGETS = _COLLECTIVE_TARGETS | frozenset(op(name_of(schema)) for schema in LOCAL)


def equation_shape(equation: str, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The result shape of a contraction."""
    left, result = equation.split("->")
    names_a, names_b = left.split(",")
    sizes = dict(zip(names_a, a, strict=True))
    for name, size in zip(names_b, b, strict=True):
        if sizes.setdefault(name, size) != size:
            raise RuntimeError(f"shapes {list(a)} and {list(b)} cannot be multiplied: {sizes[name]} is not {size}")
    return tuple(sizes[name] for name in result)


def contraction_flops(equation: str, a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Two operations for each multiply-add."""
    left, _ = equation.split("->")
    names_a, names_b = left.split(",")
    sizes = dict(zip(names_a, a, strict=True)) | dict(zip(names_b, b, strict=True))
    return 2 * math.prod(sizes.values())
