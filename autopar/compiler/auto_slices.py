"""Choose how many slices of a sequence end a step soonest, by the simulation of what each number is compiled to."""

from __future__ import annotations

from collections.abc import Callable

from autopar.compiler.lowered import Lowered
from autopar.errors import BatchError, LayoutError
from autopar.passes.schedules import simulate

COUNTS = (2, 4, 8)


def best_sliced(lower: Callable[[int], Lowered]) -> Lowered:
    """The best of several numbers of slices, with a note that says why. lower: compiles one of them."""
    best = lower(1)
    if best.pipeline is None or best.plan.ranks_of_pipeline == 1:
        return best
    spans, said = {1: span_us(best)}, ""
    for count in COUNTS:
        try:
            found = lower(count)
        except BatchError:
            continue  # it does not divide the positions
        except LayoutError as error:  # nor would another number do
            said = f": {error}"
            break
        spans[count] = span_us(found)
        best = found if spans[count] < span_us(best) else best
    took = ", ".join(f"{count} of them {span:.3g} us" for count, span in spans.items())
    return best.with_note(f"slices='auto' is {best.plan.slices} (simulated: {took}){said}")


def span_us(compiled: Lowered) -> float:
    """The simulated time of a step."""
    pipeline = compiled.pipeline
    assert pipeline is not None
    return simulate(pipeline.lists, pipeline.flow, pipeline.costs).span_us
