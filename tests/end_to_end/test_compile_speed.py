"""Compiling stays cheap: the search does not grow with the depth of a model, nor anything with the number of ranks."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path

import torch
from models import Llama, token_loss

from autopar.capture import Captured, capture
from autopar.compiled import Compiled
from autopar.compiler.compile import lower
from autopar.ir.mesh import parse_mesh
from autopar.ir.options import StepOptions
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes.search.axes import axis_searches, classes_of, known_choice
from autopar.passes.search.items import Classes

MESH = parse_mesh("dp=2,tp=2")
ROWS, TIME, VOCABULARY = 512, 8, 64  # rows for the widest mesh


@functools.cache
def captured(layers: int) -> Captured:
    """A Llama on the meta device, without rotary embeddings: a third fewer nodes make the test that much faster."""
    with torch.device("meta"):
        model = Llama(layers, 64, 8, 8, 64, VOCABULARY, TIME)
        for block in model.blocks:
            block.rotate = lambda x, cos, sin: x  # type: ignore[assignment]
        x, y = (torch.empty(ROWS, TIME, dtype=torch.long) for _ in range(2))
    return capture(model, token_loss, (x, y), {})


def assert_alike(few: Callable[[], float], many: Callable[[], float], factor: float, said: str) -> None:
    """The CPU seconds of `many` are below those of `few` times a factor: the least of three tries, or of fewer."""
    short = long = float("inf")
    for _ in range(3):
        short, long = min(short, few()), min(long, many())
        if long < factor * short:
            return
    raise AssertionError(said.format(short, long))


def searched(program: Program) -> tuple[Classes, float]:
    """The classes of a program, and the CPU seconds of the search over them."""
    plan = Plan(MESH)
    classes = classes_of(program, plan)
    known_choice.cache_clear()
    start = time.process_time()
    for search in axis_searches(classes, plan):
        search.take(search.solve())
    return classes, time.process_time() - start


def test_the_search_does_not_grow_with_depth():
    shallow, deep = captured(6).program, captured(34).program
    assert len(deep.nodes) > 5 * len(shallow.nodes)
    plans = [[item.states for item in searched(program)[0].items] for program in (shallow, deep)]
    assert plans[0] == plans[1], "the same classes, decided alike"
    said = "the search takes {:.3f} s for 6 layers, {:.3f} s for 34"
    assert_alike(lambda: searched(shallow)[1], lambda: searched(deep)[1], 2, said)


def test_compiling_does_not_grow_with_the_number_of_ranks(tmp_path: Path):
    program = captured(2)

    def seconds(mesh: str) -> float:
        start = time.process_time()
        compiled = Compiled.of(lower(program, parse_mesh(mesh)))
        compiled.save(tmp_path / mesh)
        assert compiled.ranks[-1].programs["step"] is compiled.program
        return time.process_time() - start

    said = "16 ranks take {:.2f} s, 4096 ranks {:.2f} s"
    assert_alike(lambda: seconds("dp=2,tp=8"), lambda: seconds("dp=512,tp=8"), 1.5, said)


def test_a_pipeline_does_not_grow_with_the_other_axes():
    """Ranks that differ on them share what they run."""
    program = captured(4)

    def seconds(mesh: str) -> float:
        start = time.process_time()
        ranks = lower(program, parse_mesh(mesh), StepOptions(microbatches=2)).ranks
        assert len({id(rank.programs) for rank in ranks}) == len({id(rank.instructions) for rank in ranks}) == 4
        return time.process_time() - start

    said = "16 ranks take {:.2f} s, 8192 ranks {:.2f} s"
    assert_alike(lambda: seconds("pp=4,dp=2,tp=2"), lambda: seconds("pp=4,dp=256,tp=8"), 1.5, said)


def test_lists_do_not_make_a_pipeline_expensive():
    """64 micro-batches take little more than 4: the graphs are the same."""
    program = captured(4)

    def seconds(microbatches: int) -> float:
        start = time.process_time()
        compiled = lower(program, parse_mesh("pp=4,dp=2"), StepOptions(microbatches=microbatches))
        assert compiled.pipeline is not None and sum(map(len, compiled.pipeline.lists)) > 20 * microbatches
        return time.process_time() - start

    said = "4 micro-batches take {:.2f} s, 64 take {:.2f} s"
    assert_alike(lambda: seconds(4), lambda: seconds(64), 1.5, said)
