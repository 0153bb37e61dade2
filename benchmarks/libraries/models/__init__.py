"""The table: by package, the models that are tried. A file a field; packages are imported when a row is measured."""

from benchmarks.libraries.case import Table
from benchmarks.libraries.models import (
    adapters,
    attention,
    generative,
    graphs,
    medicine,
    science,
    series,
    single_file,
    sound,
    text,
    vision,
    vision_more,
)

TABLE: Table = {
    **vision.TABLE,
    **vision_more.TABLE,
    **medicine.TABLE,
    **text.TABLE,
    **attention.TABLE,
    **adapters.TABLE,
    **generative.TABLE,
    **sound.TABLE,
    **series.TABLE,
    **graphs.TABLE,
    **science.TABLE,
    **single_file.TABLE,
}
