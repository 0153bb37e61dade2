"""The forms that the compiler knows. A new way stands in the table of its form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.spellings.data import ROWS, TIME, WIDTH, WORDS, Words, draw, labels, tokens
from benchmarks.spellings.form import Form
from benchmarks.spellings.layers import LAYER, RMS, ROTARY, Normed, Rotated
from benchmarks.spellings.losses import COUNTS, LOSSES
from benchmarks.spellings.masks import CAUSAL, DOCUMENTS, PADDED, SHOWN, WINDOWED, Attending, by_condition, holes
from benchmarks.spellings.recurrences import RECURRENCES, Recurrent, is_rolled
from benchmarks.spellings.shifts import LABELS, SHIFTS, shifted


def itself(way: Any) -> Any:
    return way


CP: Mapping[str, Any] = {"attention": "gather"}
FORMS: tuple[Form, ...] = (
    Form(
        "without the last position",
        "a slice; nothing of the sequence is gathered",
        "cp=2",
        (tokens(),),
        Words,
        SHIFTS,
        loss=shifted,
        spare=2 * 8 * ROWS * WORDS,
    ),
    Form(
        "labels one position on",
        "nothing of the sequence is gathered",
        "cp=2",
        (tokens(),),
        Words,
        LABELS,
        loss=itself,
        spare=8 * ROWS * TIME,
    ),
    Form(
        "a causal mask",
        "a causal op without a mask",
        "cp=2",
        holes(),
        Attending,
        CAUSAL,
        options=CP,
        is_reached=by_condition,
    ),
    Form(
        "causal, with padding",
        "a condition; no [queries, keys]",
        "cp=2",
        holes(),
        Attending,
        PADDED,
        options=CP,
        is_reached=by_condition,
    ),
    Form(
        "a window",
        "a condition; no [queries, keys]",
        "cp=2",
        holes(),
        Attending,
        WINDOWED,
        options=CP,
        is_reached=by_condition,
    ),
    Form(
        "documents",
        "a condition; no [queries, keys]",
        "cp=2",
        holes(),
        Attending,
        DOCUMENTS,
        options=CP,
        is_reached=by_condition,
    ),
    Form(
        "a mask that is shown otherwise",
        "a condition; no [queries, keys]",
        "cp=2",
        holes(),
        Attending,
        SHOWN,
        options=CP,
        is_reached=by_condition,
    ),
    Form(
        "RMSNorm",
        "moves what F.rms_norm does",
        "dp=2,tp=2",
        (draw(ROWS, TIME, WIDTH),),
        Normed,
        RMS,
        options={"sequence_parallel": True},
        spare=8 * 6 * ROWS * TIME,
    ),
    Form(
        "LayerNorm",
        "moves what F.layer_norm does",
        "dp=2,tp=2",
        (draw(ROWS, TIME, WIDTH),),
        Normed,
        LAYER,
        options={"sequence_parallel": True},
        spare=8 * 6 * ROWS * TIME,
    ),
    Form(
        "rotary positions",
        "each rank rotates its heads and positions",
        "cp=2,tp=2",
        (draw(ROWS, TIME, WIDTH),),
        Rotated,
        ROTARY,
        options=CP,
    ),
    Form(
        "a linear recurrence",
        "one op; the program does not grow with the sequence",
        "cp=2",
        (draw(ROWS, TIME, WIDTH),),
        Recurrent,
        RECURRENCES,
        is_reached=is_rolled,
    ),
    Form(
        "cross entropy",
        "logits stay split over the vocabulary",
        "dp=2,tp=2",
        (tokens(),),
        Words,
        LOSSES,
        loss=itself,
        spare=8 * ROWS * TIME,
    ),
    Form(
        "a mean over the tokens that count",
        "micro-batches, as one batch",
        "dp=2",
        (tokens(), labels()),
        Words,
        COUNTS,
        loss=itself,
        options={"microbatches": 2},
        spare=64,
    ),
)
