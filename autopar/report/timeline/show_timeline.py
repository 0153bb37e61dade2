"""The timeline of a compiled pipeline, where a command wants it: in the terminal or in a file."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from autopar.compiler.lowered import Lowered
from autopar.errors import TargetError
from autopar.passes.schedules import simulate
from autopar.report.timeline.measured import measured_picture
from autopar.report.timeline.picture import Picture, picture
from autopar.report.timeline.svg import timeline_svg
from autopar.report.timeline.terminal import timeline_text
from autopar.report.timeline.timeline_page import timeline_page
from autopar.report.timeline.trace import measured_costs, read_trace


def picture_of(compiled: Lowered, over: Path | None = None) -> Picture:
    """The simulated step of a pipeline. over: the folder of a trace; then the simulation takes the times of actions
    from there, and what was measured is drawn below it: what differs is waiting. Of one graph what was measured is all
    that is drawn."""
    pipeline = compiled.pipeline
    if pipeline is None and over is not None:
        return measured_picture(compiled, over)
    if pipeline is None:
        raise TargetError(
            f"the step on mesh {compiled.mesh} is one graph, and only the times of a pipeline are simulated: draw what "
            f"`autopar run --trace DIR` saw with --over DIR, or give the mesh an axis pp."
        )
    if over is None:
        return picture(pipeline, simulate(pipeline.lists, pipeline.flow, pipeline.costs))
    measured = read_trace(over, compiled)
    costs = measured_costs(pipeline, measured)
    return picture(pipeline, simulate(pipeline.lists, pipeline.flow, costs), measured)


def show_timeline(out: Console, shown: Picture) -> None:
    """Print the timeline as wide as the terminal."""
    out.print(timeline_text(shown, out.width, out.color_system is not None), soft_wrap=True)


def write_timeline(shown: Picture, path: Path, title: str) -> int:
    """An SVG or an HTML file by its name; its size in bytes."""
    makers = {".svg": lambda: timeline_svg(shown), ".html": lambda: timeline_page(shown, title)}
    if path.suffix not in makers:
        raise TargetError(f"--timeline-file {path}: write a name that ends in .svg or .html.")
    content = makers[path.suffix]().encode()
    try:
        path.write_bytes(content)
    except OSError as error:
        raise TargetError(f"--timeline-file {path}: cannot write it: {error.strerror}.") from None
    return len(content)
