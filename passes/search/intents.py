"""What an axis is for, by its name: which inputs it splits, and what it never moves.

    dp   the batch is split, parameters are whole; activations are not gathered
    tp   weights are split and never gathered, nor are their gradients reduced; activations are summed
         (arXiv 1909.08053). With sequence parallelism they are scattered and gathered instead, and lie split on the
         sequence where no weight needs them whole (arXiv 2205.05198)
    fsdp as dp; ZeRO splits states over it
    ep   as dp, and the experts are split: rows go to the rank that holds theirs, and come back (arXiv 2006.16668)
    cp   the sequence is split: the batch is whole and sliced where it is used, parameters are whole; what attention
         reads is gathered, its gradients scattered (all-gather of keys and values, arXiv 2407.21783, section 3.3.2;
         the pass `ring` may let them go round instead), or its heads are split instead (all-to-all, arXiv 2309.14509)
    ulysses  as cp, of which attention splits heads only
    mb   as dp, but one rank computes the parts, one after another
    sl   as cp, but one rank computes the slices, one after another: causal attention reads those before its own
         (arXiv 2102.07988)

Within its intent the search is free. What an intent forbids is forbidden strictly; only if no plan exists at all
is it allowed at its cost.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.ir.layout import OWNED
from autopar.ir.mesh import CONTEXT, DATA_AXES, MICROBATCH, SLICE, ULYSSES, Mesh
from autopar.ir.program import Input, TensorType
from autopar.passes.rules.splits import Split
from autopar.passes.rules.states import State

# Over dp only gradients and scalars move: a sum of anything else must pay for itself a thousandfold (batch statistics
# do, since nothing else gives them).
ACTIVATIONS_OVER_DP = 1000.0
# Without sequence parallelism activations over tp are summed: never scattered, and gathered only where that moves
# less than a quarter of the bytes. The plan is the one of the paper for narrow and wide layers alike.
GATHER_OVER_TP = 4.0
# Of a sum of gradients that is taken before they leave.
BEFORE_IT_LEAVES = 1.01
# For each byte of a result that every rank computes: with sequence parallelism it lies split where that moves no more.
BYTES_PER_REPLICA = 1 / 16


@dataclass(frozen=True, slots=True)
class Role:
    """What a placeholder is, as far as intents care.

    `multiplied`: operand of a matrix product or convolution; `table`: looked up by indices; `vocabulary`: by indices
    that come from the batch; `experts`: by the index that says of each row to which expert it goes. `splits`: the
    states in which every user can take it.
    """

    entry: Input
    type: TensorType
    splits: tuple[State, ...]
    multiplied: bool = False
    table: bool = False
    vocabulary: bool = False
    experts: bool = False
    batch_dim: int | None = None  # the dim that counts the samples, of a tensor of the batch


@dataclass(frozen=True, slots=True)
class Intent:
    """The meaning of one axis. sequence_split: values may lie split along the batch's other dims. context: they do,
    and only what attention reads or gives moves."""

    batch_split: bool
    weights_split: bool
    sequence_split: bool = False
    context: bool = False
    mirrored: int = 0  # a sequence may lie in pieces that are mirrored in every second of so many blocks
    pieces: int = 0  # in which the axes cut a sequence that does
    heads: int = 0  # attention may split its heads, after so many pieces that later axes make of them; 0: it may not
    only_heads: bool = False  # and nothing else
    no_heads: bool = False  # attention splits none, even where other ops would
    only_positions: bool = False  # of the batch's dims the second alone is a sequence
    in_time: bool = False  # one rank computes all parts: what is added up early is not computed again for each
    scatters: bool = False  # and gradients are scattered for each of these parts: what is added up early is whole
    experts: bool = False  # experts are split, and rows go to theirs
    joined: bool = False  # by an earlier axis, too
    cuts_samples: bool = True  # samples that are cut out of the batch before the model are split, too
    padded: bool = False  # with others beside them, which are of no expert: they may not be added up there

    def states(self, role: Role) -> list[tuple[State, float]]:
        """The states that a placeholder may have, with their costs in bytes."""
        if self.batch_split and role.batch_dim is not None:
            return [((role.batch_dim, 1), 0.0)]
        if self.experts and role.experts and (0, 1) in role.splits:
            return [((0, 1), 0.0)]
        if role.entry.kind != "parameter" or not self.weights_split:
            return [(None, 0.0)]
        if role.vocabulary or (role.table and role.multiplied):
            # By rows: the lookup is partial, like a row-parallel product (arXiv 1909.08053, section 3).
            rows = [state for state in role.splits if state == (0, 1)]
            return [(state, 0.0) for state in rows or role.splits or (None,)]
        if role.table or role.multiplied:
            return [(state, 0.0) for state in role.splits or (None,)]
        return [(None, 0.0), *((state, 0.0) for state in role.splits)]

    def seeds(self, role: Role) -> list[Split]:
        """The splits of a placeholder that this axis is about: candidates spread from here."""
        if self.batch_split and role.batch_dim is not None:
            return [(role.batch_dim, 1)]
        if self.experts and role.experts:
            return [(0, 1)]
        if role.entry.kind == "parameter" and self.weights_split and (role.multiplied or role.table):
            return [(dim, 1) for dim in range(len(role.type.shape))]
        return self.sequence_seeds(role)

    @property
    def owns_rows(self) -> bool:
        """True if rows go to the rank of their expert. Of a batch that the axis cannot divide each rank has all rows,
        and computes those of its experts."""
        return self.experts and self.divides_products

    @property
    def divides_products(self) -> bool:
        """True if no rank should do the work of another, whatever that moves."""
        return self.batch_split or self.context

    def sequence_seeds(self, role: Role) -> list[Split]:
        """The dims of the batch that sequence and context parallelism may split: all but that of the samples."""
        samples = role.batch_dim or 0
        dims = [dim for dim in range(len(role.type.shape)) if role.entry.kind == "batch" and dim != samples]
        if self.only_positions:
            dims = dims[:1] if role.batch_dim is not None else []
        return [(dim, outer) for dim in dims for outer in self.sequence_outers]

    @property
    def sequence_outers(self) -> tuple[int, ...]:
        """The outers of the splits of a sequence; none if there are none."""
        return ((1, -self.mirrored) if self.mirrored else (1,)) if self.sequence_split else ()

    def factor(
        self, source: State, target: State, *, of_parameters: bool, to_gradient: bool, along_sequence: bool,
        at_attention: bool,
    ) -> float | None:  # fmt: skip
        """By how much a move costs more than its bytes; None forbids it.

        of_parameters: the value is computed from parameters alone. to_gradient: it leaves as a gradient.
        along_sequence: it is, or will be, split on a sequence. at_attention: attention gives it or reads it.
        """
        source, target = homes(source, target)
        gathers = isinstance(source, tuple) and source != target
        scatters = isinstance(source, str) and isinstance(target, tuple)
        if of_parameters and gathers:  # matrices that lie apart, each split, may be put together by expert
            return 1.0 if self.experts and isinstance(target, tuple) else None
        if self.divides_products:
            moves = source is not None and source != target
            is_free = to_gradient or (self.context and along_sequence and at_attention)
            return ACTIVATIONS_OVER_DP if moves and not is_free else 1.0
        if self.sequence_split and to_gradient:  # of norms and biases: little, whatever the batch
            return 0.0
        if along_sequence:
            return 1.0
        if scatters:
            return None
        return GATHER_OVER_TP if gathers else 1.0

    def is_last_resort(self, source: State, target: State) -> bool:
        """True for a move that must not pay for itself by whatever else it saves: over dp the gather of a split value.
        A whole batch on every rank would save all gradients' reductions, and be data parallel no more."""
        if not (self.batch_split and isinstance(source, tuple)):
            return False
        source, target = homes(source, target)
        return source != target

    def gradient_factor(self, source: State, target: State, to_gradient: bool, is_once: bool) -> float | None:
        """Price a move of what is, or adds up to, the gradient of a weight (see `factor`): over tp it is made where the
        weight lies. Else a sum over activations could be put off to the gradient of a small table. Over data axes it is
        summed where it leaves, in a bucket, or scattered to who keeps it, if no view before that is smaller, and with
        ZeRO-2 so it is over micro-batches, which would add up whole gradients before. is_once: it meets what is the
        same for all parts, and need not be computed for each."""
        moves = source is not None and source != target
        if self.weights_split and moves:
            return None
        is_early = self.in_time and (is_once or not self.scatters)
        return 1.0 if to_gradient or is_early else BEFORE_IT_LEAVES


def homes(source: State, target: State) -> tuple[State, State]:
    """The states of a move without owners: rows go to these as they lie, and come back so."""
    if not (_is_owned(source) or _is_owned(target)):
        return source, target
    return _at_home(source, target), _at_home(target, source)


def _is_owned(state: State) -> bool:
    return isinstance(state, tuple) and state[1] == OWNED


def _at_home(state: State, other: State) -> State:
    if not isinstance(state, tuple) or state[1] != OWNED:
        return state
    is_as_it_lies = isinstance(other, tuple) and other[0] == state[0] and other[1] != OWNED
    return other if is_as_it_lies else (state[0], 1)


_DATA = Intent(batch_split=True, weights_split=False)
_SEQUENCE = Intent(batch_split=False, weights_split=False, sequence_split=True, context=True)
_CONTEXT = replace(_SEQUENCE, mirrored=2)
_SLICES = replace(_SEQUENCE, only_positions=True, in_time=True)
INTENTS = {
    **dict.fromkeys(DATA_AXES, _DATA),
    MICROBATCH: replace(_DATA, in_time=True),
    SLICE: _SLICES,
    CONTEXT: _CONTEXT,
    ULYSSES: replace(_CONTEXT, only_heads=True),
    "tp": Intent(batch_split=False, weights_split=True),
}


def intent_of(axis: str, mesh: Mesh, sequence_parallel: bool, attention: str, lengths: Collection[int] = ()) -> Intent:
    """The meaning of an axis in a plan. Sequence parallelism splits the pieces that context parallelism leaves; where
    it could split those of a sequence of one of `lengths` in order but not mirrored, they lie in order."""
    changed = INTENTS[axis]
    split, sizes = [size for _, size in context_axes(mesh)], dict(mesh.axes)
    if split and sequence_parallel:
        split += [size for name, size in mesh.axes if name in INTENTS and INTENTS[name].weights_split]
    pieces = 2 * math.prod(split)
    in_order = any(length % (pieces // 2) == 0 for length in lengths) and all(length % pieces for length in lengths)
    blocks = 0 if sequence_parallel and in_order else 2 * sizes.get(SLICE, 1)  # two in each slice
    if changed.weights_split:
        mirrored = blocks if sizes.get(CONTEXT, 1) > 1 else 0
        return replace(changed, sequence_split=sequence_parallel, mirrored=mirrored, pieces=pieces)
    if changed.mirrored:
        changed = replace(changed, mirrored=blocks, pieces=pieces)
    if not changed.context or axis == SLICE:
        return changed
    if axis == CONTEXT and attention in ("gather", "ring"):
        return replace(changed, no_heads=True)
    if attention == "gather" or (axis == CONTEXT and ULYSSES in mesh):
        return changed
    later = mesh.names[mesh.names.index(axis) + 1 :]
    heads = math.prod(mesh[name] for name in later if INTENTS[name].weights_split)
    return replace(changed, heads=heads, only_heads=changed.only_heads or attention == "ulysses")


BatchDims = Mapping[str, int | None]  # the dim that counts the samples, by the name of a batch tensor


def batch_dims_of(entries: Sequence[tuple[Input, TensorType]], said: BatchDims | None) -> Mapping[str, int]:
    """The dim that counts the samples of each batch tensor that has one: what was said, or dim 0 of those that have as
    many there as most of them (a condition of one row is no batch), and of as many the first."""
    given = {entry.name: type_.shape for entry, type_ in entries if entry.kind == "batch"}
    if said is not None:
        return {name: dim for name, dim in said.items() if dim is not None and name in given}
    sizes = Counter(shape[0] for shape in given.values() if shape)
    size = max(sizes, key=lambda size: (size > 1, sizes[size]), default=None)
    return {name: 0 for name, shape in given.items() if shape and shape[0] == size}


def batch_size(entries: Sequence[tuple[Input, TensorType]], said: BatchDims | None) -> int | None:
    """How many samples the batch has, None without any; of tensors with unlike numbers what divides them all."""
    dims = batch_dims_of(entries, said)
    sizes = [type_.shape[dims[entry.name]] for entry, type_ in entries if entry.kind == "batch" and entry.name in dims]
    return math.gcd(*sizes) if sizes else None


def context_axes(mesh: Mesh) -> list[tuple[str, int]]:
    """The axes of a mesh that split the sequence, with their sizes."""
    return [(axis, size) for axis, size in mesh.axes if axis in INTENTS and INTENTS[axis].context and size > 1]
