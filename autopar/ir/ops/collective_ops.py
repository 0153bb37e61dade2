"""The table of collectives: all about one but its place (passes/collectives/reshard.py) and its algorithm
(runtime/collectives/collectives.py)."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.ops.semantic import name_of

ALL_TO_ALL = "all_to_all"
SPLIT = "split"
Spread = str | None
"""A value over one axis: SPLIT, partial (the kind), or whole (None)."""


@dataclass(frozen=True, slots=True)
class CollectiveOp:
    """An op that moves data between the ranks of an axis.

    has, gives: what it makes of a value; `dim` and `outer` of where it was split, and of where it will be, are among
    the arguments, in this order. halves: whether it also stands as two ops, `<name>_start` and `wait`, for overlap.
    to_one: all of the operand goes to one rank, and the layout stays. edges: what moves are the rows by which its
    result is longer or shorter than its operand. owned: rows go to their owners (True), or come back from there
    (False), along dim 0; ranks have different numbers of them. like: the collective that takes as long.
    """

    schema: str
    has: Spread
    gives: Spread
    halves: bool = True
    to_one: bool = False
    edges: bool = False
    owned: bool | None = None
    like: str = ""

    @property
    def name(self) -> str:
        return name_of(self.schema)

    @property
    def timed_as(self) -> str:
        """The name by which a machine knows how long it takes."""
        return self.like or self.name

    @property
    def counts_result(self) -> bool:
        """True if the value that is moved is the result (a gather's), not the operand."""
        return self.has == SPLIT and self.gives is None


COLLECTIVES = (
    CollectiveOp("all_reduce(Tensor x, str axis, str kind) -> Tensor", "sum", None),
    # dim is (outer, rest) on each rank and (outer, axis, rest) in the result
    CollectiveOp("all_gather(Tensor x, str axis, int dim, int outer) -> Tensor", SPLIT, None),
    CollectiveOp("reduce_scatter(Tensor x, str axis, int dim, int outer, str kind) -> Tensor", "sum", SPLIT),
    # the split moves from dim `gather` to dim `scatter`
    CollectiveOp(
        "all_to_all(Tensor x, str axis, int gather, int gather_outer, int scatter, int scatter_outer) -> Tensor",
        SPLIT, SPLIT, halves=False,
    ),
    # what the rank `by` places before has, around the axis
    CollectiveOp("shift(Tensor x, str axis, int by) -> Tensor", SPLIT, SPLIT, to_one=True),
    # each run of consecutive rows with those of the runs beside it, zeros at the ends of the whole (or the rows of its
    # other end if `wrap`); and its transpose
    CollectiveOp("halo(Tensor x, str axis, int dim, int outer, int before, int after, bool wrap=False) -> Tensor",
                 SPLIT, None, halves=False, edges=True),
    CollectiveOp("halo_sum(Tensor x, str axis, int dim, int outer, int before, int after) -> Tensor", "sum", SPLIT,
                 halves=False, edges=True),
    # How many rows go from each rank to each expert of another: x is the expert of each row, of `groups` in all. The
    # result lies on the host: [to which rank, which of its experts] of this rank's rows, and [from which rank, which of
    # this rank's experts] of those that come. Then rows go there, and back. order: where rows stand, by owner.
    # bound: rows that go from a rank to another one at most; messages are padded to it, and nothing lies on the host.
    # chosen: rows of a token, which follow each other. If there are several the route counts tokens as well, behind
    # the rows, and what goes may be tokens, each once to a rank. `token_places`: of each row that came, which of the
    # tokens that came is its. With these x is tokens where it leaves (order: of `tokens_by_owner`), rows at the owner.
    CollectiveOp("route(Tensor x, str axis, int groups, int bound=0, int chosen=1) -> Tensor", SPLIT, None,
                 like=ALL_TO_ALL),
    CollectiveOp("token_places(Tensor x, str axis, Tensor order, Tensor route, int groups, int chosen) -> Tensor",
                 SPLIT, SPLIT, owned=True, like=ALL_TO_ALL),
    CollectiveOp("dispatch(Tensor x, str axis, Tensor order, Tensor route, int bound=0, Tensor? places=None) -> Tensor",
                 SPLIT, SPLIT, owned=True, like=ALL_TO_ALL),
    CollectiveOp("combine(Tensor x, str axis, Tensor order, Tensor route, int bound=0, Tensor? places=None) -> Tensor",
                 SPLIT, SPLIT, owned=False, like=ALL_TO_ALL),
    # An all-gather and a reduce-scatter over the slices of a sequence, of what causal attention reads and gives: since
    # slices are computed in order, and back in reverse, only those up to this one are there, or those from this one on.
    # key: the value, the same for a forward pass and what the backward pass reads again of it.
    CollectiveOp("earlier(Tensor x, str axis, int dim, int outer, str key) -> Tensor", SPLIT, None, halves=False),
    CollectiveOp("later(Tensor x, str axis, int dim, int outer, str key) -> Tensor", "sum", SPLIT, halves=False),
)  # fmt: skip
