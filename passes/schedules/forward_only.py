"""forward_only: a schedule without its backwards."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.schedule import Action


def forward_only(orders: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    """The forwards of any schedule, in its order: for `model(x)`.

    No forward waits for a backward, so what is left of an order without circular waits has none.
    """
    return tuple(tuple(action for action in order if action.kind == "F") for order in orders)
