"""What moving a value between two states of an axis costs, in bytes per rank (ring algorithms).

all-reduce 2 (n-1)/n B, all-gather and reduce-scatter (n-1)/n B, all-to-all (n-1)/n B/n, for a value of B bytes on
n ranks (arXiv 2104.04473, section 3.2). Compute counts too, at the ratio of a link's to a device's speed
(`Machine.bytes_per_flop`), so that work is not repeated to save a few bytes. The other figures below only break ties:
which technique is used is a matter of bytes, at any model size and on any machine.
"""

from __future__ import annotations

from autopar.passes.rules.states import State

# A collective's fixed cost.
BYTES_PER_COLLECTIVE = 16.0

# For each byte of a result that an op makes of partial sums: nothing moves, but the parts are kept beside the sum. So a
# sum is taken where its parts are made (a residual stream is kept whole).
BYTES_PER_SUM = 1e-4


def move_cost(source: State, target: State, bytes_: float, size: int) -> float:
    """The bytes per rank that turn `source` into `target`, for a value of `bytes_` when replicated on this axis, with
    terms below a byte that break ties."""
    if source == target:
        return 0.0
    share = (size - 1) / size
    if source is None:
        # A slice, or zeros but on the first rank: nothing moves. The tiny cost prefers not to.
        return BYTES_PER_COLLECTIVE / 16
    if isinstance(source, str):
        reduced = 2 * share * bytes_ * (2 if source == "logsumexp" else 1) + BYTES_PER_COLLECTIVE
        if isinstance(target, tuple) and source == "sum":
            return share * bytes_ + BYTES_PER_COLLECTIVE
        return reduced + (move_cost(None, target, bytes_, size) if target is not None else 0.0)
    if target is None:
        return share * bytes_ + BYTES_PER_COLLECTIVE
    if isinstance(target, tuple):
        return share * bytes_ / size + BYTES_PER_COLLECTIVE
    return share * bytes_ + BYTES_PER_COLLECTIVE + move_cost(None, target, bytes_, size)
