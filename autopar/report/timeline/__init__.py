"""When does each rank of a pipeline do what: simulated, measured, drawn?"""

from autopar.report.timeline.picture import Lane, Picture, TimeBlock, picture
from autopar.report.timeline.svg import timeline_svg
from autopar.report.timeline.terminal import timeline_text
from autopar.report.timeline.timeline_page import timeline_page

__all__ = ["Lane", "Picture", "TimeBlock", "picture", "timeline_page", "timeline_svg", "timeline_text"]
