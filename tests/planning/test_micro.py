"""Programs that nobody compiled, of other rows and less a layer, are those that compiling them gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache

import pytest
import torch
from gpt import GPT, GPTConfig
from models import Llama, token_loss

from autopar.capture import Captured
from autopar.compiler.compile import capture_step
from autopar.ir.options import StepOptions
from autopar.ir.plan import Fixed
from autopar.ir.program import Program, record
from autopar.machines import named
from autopar.planning.between import between
from autopar.planning.depth import ALL, Shallow, shallow
from autopar.planning.layers import Layers
from autopar.planning.micro import KEPT, LOW, Micros, cut_at

MACHINE = named("h100-80g")
SEQUENCE, OPTIONS = 256, StepOptions(precision="bf16")
ROWS = 4


def capture(name: str) -> Callable[[int], Captured]:
    with torch.device("meta"):
        llama = name == "llama"
        model = Llama(6, 1024, 8, 8, 2816, 8000, SEQUENCE) if llama else GPT(GPTConfig(8000, SEQUENCE, 6, 8, 1024))

    def of(rows: int) -> Captured:
        ids = torch.empty(rows, SEQUENCE, dtype=torch.int64, device="meta")
        return capture_step(model, token_loss, (ids, ids), {}, OPTIONS)

    return of


class Shallower(Micros):
    """Keeps one equal layer less."""

    def shallow(self, rows: int) -> Shallow:
        found = shallow(self.captured(rows).program, KEPT - 1)
        assert found is not None
        return found


@cache
def layers(name: str) -> Layers:
    return Layers(capture(name), OPTIONS, MACHINE)


@cache
def shallower(name: str) -> Shallower:
    return Shallower(capture(name), OPTIONS, MACHINE)


def lines(program: Program) -> Iterator[tuple[object, ...]]:
    for node in program.graph.nodes:
        known = record(node)
        args = [arg for arg in node.args if not isinstance(arg, float)]  # a mean's 1 / rows
        yield str(node.target), str(args), known.types, known.layouts, known.operands, known.flops


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("tp", [1, 2])
def test_other_rows(tp: int, recompute: str) -> None:
    micros = layers("llama").micros
    made = micros.micro(tp, ROWS, recompute)
    low = micros.local(tp, LOW)
    assert (tp, ROWS) not in micros._local, "it was compiled, and not made of others"
    fixed = Fixed(machine=MACHINE, sequence=low.sequence, decided=dict([low.decided]))
    local = micros._through_passes(tp, ROWS, fixed)
    compiled = cut_at(local, recompute, micros.shallow(ROWS).border)
    assert made.graphs.keys() == compiled.graphs.keys() and made.message == compiled.message > 0
    for kind, graph in compiled.graphs.items():
        assert list(lines(made.graphs[kind])) == list(lines(graph)), kind
        assert list(lines(made.finished(made.graphs[kind]))) == list(lines(compiled.finished(graph))), kind


@pytest.mark.parametrize("tp", [1, 2])
def test_layouts_of_their_own_cost_the_same(tp: int) -> None:
    found = layers("llama")
    own = found._cost(cut_at(found.micros._lowered(tp, ROWS), "none", found.micros.shallow(ROWS).border))
    made = found.cost(tp, ROWS, "none")
    for name in ("forward", "backward", "saved"):
        assert getattr(made, name)(found.equal) == pytest.approx(getattr(own, name)(found.equal), rel=0.02), name


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("name", "tp"), [("llama", 1), ("llama", 2), ("gpt", 2)])
def test_less_a_layer(name: str, tp: int, recompute: str) -> None:
    found, less = layers(name), shallower(name).micro(tp, LOW, recompute)
    row = found._row(less, {kind: less.finished(graph) for kind, graph in less.graphs.items()}, ALL)
    cost = found.cost(tp, LOW, recompute)
    one_call = MACHINE.device.least_us + MACHINE.launch_us  # of scalars in the loss, which may be computed elsewhere
    for what, value in row.items():
        assert getattr(cost, what)(KEPT - 1) == pytest.approx(value, rel=1e-6, abs=one_call), what


def test_programs_that_are_not_alike_have_none_between() -> None:
    one, two = (layers("llama").micros.micro(tp, LOW, "none").graphs["F"] for tp in (1, 2))
    assert between(one, one, Fraction(1, 2)) is not None
    assert between(one, two, Fraction(1, 2)) is None
