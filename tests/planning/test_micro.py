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
from autopar.ir.program import Program, record
from autopar.machines import named
from autopar.planning.price.cost import PEAKS
from autopar.planning.price.layers import Layers
from autopar.planning.shallow.between import between
from autopar.planning.shallow.captures import KEPT, LEAST_ROWS, Captures
from autopar.planning.shallow.depth import Rest, Shallow, shallow
from autopar.planning.shallow.sheets import Sheets
from autopar.planning.shallow.stage_graphs import Uncut
from autopar.planning.space.micro import HIGH, LOW, Micros
from autopar.planning.space.split import Split

MACHINE = named("h100-80g")
SEQUENCE, OPTIONS = 256, StepOptions(precision="bf16")
ROWS, SPLITS = 4, (Split(), Split(2), Split(2, True))


@cache
def capture(name: str) -> Callable[[int], Captured]:
    """What captures a step of so many rows, each once."""
    with torch.device("meta"):
        llama = name == "llama"
        model = Llama(6, 1024, 8, 8, 2816, 8000, SEQUENCE) if llama else GPT(GPTConfig(8000, SEQUENCE, 6, 8, 1024))

    @cache
    def of(rows: int) -> Captured:
        ids = torch.empty(rows, SEQUENCE, dtype=torch.int64, device="meta")
        return capture_step(model, token_loss, (ids, ids), {}, OPTIONS)

    return of


class Shallower(Captures):
    """Keeps one equal layer less."""

    def shallow(self, rows: int = LEAST_ROWS) -> Shallow:
        found = shallow(self.captured(rows).program, KEPT - 1)
        assert found is not None
        return found


@cache
def layers(name: str) -> Layers:
    return Layers(Captures(capture(name)), OPTIONS, MACHINE)


@cache
def shallower(name: str) -> Micros:
    return Micros(Shallower(capture(name)), OPTIONS, MACHINE)


def lines(program: Program) -> Iterator[tuple[object, ...]]:
    for node in program.graph.nodes:
        known = record(node)
        args = [arg for arg in node.args if not isinstance(arg, float)]  # a mean's 1 / rows
        yield str(node.target), str(args), known.types, known.layouts, known.operands, known.flops


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("split", SPLITS)
def test_other_rows(split: Split, recompute: str) -> None:
    micros = layers("llama").micros
    made = micros.micro(split, ROWS, recompute)
    assert (split, ROWS) not in micros._local, "it was compiled, and not made of others"
    local = micros.lowered(split, ROWS, like=micros.local(split, HIGH))
    compiled = Uncut.of(local, recompute, micros.captures.shallow().border).cut(halves=False)
    assert made.graphs.keys() == compiled.graphs.keys() and made.message == compiled.message and made.message.bytes_ > 0
    for kind, graph in compiled.graphs.items():
        assert list(lines(made.graphs[kind])) == list(lines(graph)), kind
        assert list(lines(made.finished(made.graphs[kind]))) == list(lines(compiled.finished(graph))), kind


@pytest.mark.parametrize("split", SPLITS)
def test_layouts_of_their_own_cost_the_same(split: Split) -> None:
    found = layers("llama")
    border = found.micros.captures.shallow().border
    micro = Uncut.of(found.micros.lowered(split, ROWS), "none", border).cut(halves=False)
    made, own = found.cost(split, ROWS, "none"), found._cost(Sheets.of(micro, found._rest, {}), MACHINE)
    for name in ("forward", "backward", "saved"):
        assert getattr(made, name)(found.equal) == pytest.approx(getattr(own, name)(found.equal), rel=0.02), name


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("name", "split"), [*(("llama", split) for split in SPLITS), ("gpt", Split(2, True))])
def test_less_a_layer(name: str, split: Split, recompute: str) -> None:
    found, less = layers(name), shallower(name).micro(split, LOW, recompute)
    row = Sheets.of(less, Rest.of(shallower(name).captures.shallow()), {}).costs(MACHINE, has_less=False)[0]
    cost = found.cost(split, LOW, recompute)
    few_calls = 2 * (MACHINE.device.least_us + MACHINE.launch_us) + MACHINE.inside.start_us
    for what, value in row.items():  # outside of the layers layouts may differ with their number
        error = 1e-9 if what in ("parameters", "gradients", "states") else 0.01
        error = 0.1 if what in PEAKS else error  # the worst moment lies in other layers
        assert getattr(cost, what)(KEPT - 1) == pytest.approx(value, rel=error, abs=few_calls), what


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("split", SPLITS)
def test_numbers_of_other_rows(split: Split, recompute: str) -> None:
    """They lie on a line between those of the nearest rows, where the passes after the cut did the same."""
    found = Layers(capture("llama"), OPTIONS, MACHINE)
    found.micros = layers("llama").micros
    for rows in (16, 8):
        made = found.sheets(split, rows, recompute)
        own = Sheets.of(found.micros.micro(split, rows, recompute), found._rest, {})
        for mine, its in zip(made.costs(MACHINE, True), own.costs(MACHINE, True), strict=True):
            assert mine == pytest.approx(its, rel=1e-9)
        assert made.message == own.message
    if split == Split():  # beside collectives products are cut into more chunks, the more rows there are
        assert found._sheets[found.place(split), recompute, False].keys() == {LOW, HIGH}, "they were read off programs"


def test_programs_that_are_not_alike_have_none_between() -> None:
    one, two = (layers("llama").micros.micro(split, LOW, "none").graphs["F"] for split in SPLITS[:2])
    assert between(one, one, Fraction(1, 2)) is not None
    assert between(one, two, Fraction(1, 2)) is None
