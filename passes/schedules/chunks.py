"""How many stages a schedule lays on each rank."""

from __future__ import annotations

from autopar.errors import ScheduleError


def chunks_of(name: str, stages: int, ranks: int, wanted: int | None = None) -> int:
    """The stages of each rank; `wanted` where the schedule knows no other number."""
    if stages % ranks or not stages:
        raise ScheduleError(
            f"schedule '{name}': {stages} stages cannot be spread evenly over {ranks} ranks. "
            f"Take a multiple of {ranks}, e.g. {ranks * (wanted or 2)}."
        )
    chunks = stages // ranks
    if wanted not in (None, chunks):
        each = "one stage" if wanted == 1 else f"{wanted} stages"
        raise ScheduleError(
            f"schedule '{name}' has {each} on each rank; {stages} stages on {ranks} ranks are {chunks}."
        )
    return chunks
