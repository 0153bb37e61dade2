"""Plans of models with several lists of equal layers: three layers of each say what all of them cost."""

from __future__ import annotations

from dataclasses import fields
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.compiler.check_options import options_of
from autopar.compiler.meshes import mesh_of
from autopar.machines import named
from autopar.planning import step_time
from autopar.planning.jobs import layers_of
from autopar.planning.price.cost import Cost, Linear
from autopar.planning.price.layers import Layers
from autopar.planning.price.predict import predict
from autopar.planning.shallow import captures, fewer
from autopar.planning.shallow.depth import Shallow, shallow
from autopar.planning.shallow.further_layers import FurtherLayers
from autopar.planning.space.candidates import Candidate
from autopar.planning.space.split import Split
from autopar.report.memory.estimate import memory_report
from autopar.report.memory.within_memory import compile_step

MACHINE = named("h100-80g")
ENCODERS, DECODERS = 7, 9
WIDTH = 256


class Block(nn.Module):
    """Attention with a bias that the first block makes for all, in a decoder also to what an encoder made."""

    def __init__(self, width: int, is_first: bool, is_cross: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)
        self.far = nn.Parameter(torch.randn(64) / 8) if is_first else None
        self.query, self.keys = (nn.Linear(width, width), nn.Linear(width, 2 * width)) if is_cross else (None, None)

    def forward(self, x: Tensor, bias: Tensor | None, seen: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.far is not None:
            at = torch.arange(x.shape[1], device=x.device)
            bias = self.far[(at[:, None] - at).abs()]
        assert bias is not None
        x = x + self.out(attend(*self.qkv(self.norm(x)).chunk(3, -1), bias))
        if self.query is not None and self.keys is not None:
            x = x + attend(self.query(x), *self.keys(seen).chunk(2, -1), bias)
        return x + self.down(torch.relu(self.up(x))), bias


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(query @ key.mT / WIDTH**0.5 + bias, -1) @ value


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block(WIDTH, i == 0, False) for i in range(ENCODERS))
        self.decoder = nn.ModuleList(Block(WIDTH, i == 0, True) for i in range(DECODERS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        bias = None
        for block in self.encoder:
            x, bias = block(x, bias, None)
        for block in self.decoder:
            y, bias = block(y, bias if block.far is None else None, x)
        return y.square().mean()


def job() -> autopar.Job:
    with torch.device("meta"):
        return autopar.Job(Translator(), batch=(torch.empty(64, 64, WIDTH), torch.empty(64, 64, WIDTH)))


@cache
def both() -> Layers:
    return layers_of(job(), MACHINE)


@cache
def one() -> Layers:
    """As if the decoder had the only list."""

    def first(program: object, kept: int, lists: object = ()) -> Shallow | None:
        return shallow(program, kept, ("decoder",))  # type: ignore[arg-type]

    made = layers_of(job(), MACHINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captures, "shallow", first)
        patch.setattr(fewer, "shallow", first)
        for rows in (2, 4, 8, 16, 128, 256):
            made.micros.captures.shallow(rows)
    return made


def test_layers_that_read_a_value_of_the_first_are_equal() -> None:
    found = both().micros.captures.shallow()
    assert [(stack.border[0], stack.layers) for stack in found.stacks] == [("decoder.1", 7), ("encoder.1", 5)]
    assert len(found.program.graph.nodes) < 0.65 * len(both().whole.graph.nodes)
    assert [stack.layers for stack in one().micros.captures.shallow().stacks] == [7]


@pytest.mark.parametrize("split", [Split(), Split(tp=2)], ids=["one rank", "tp=2"])
@pytest.mark.parametrize(("recompute", "halves"), [("none", False), ("full", False), ("none", True)])
def test_costs_are_those_of_all_layers(split: Split, recompute: str, halves: bool) -> None:
    made, known = (layers.cost(split, 4, recompute, halves) for layers in (both(), one()))
    for field in fields(Cost):
        mine, its = getattr(made, field.name), getattr(known, field.name)
        if isinstance(its, Linear):  # of tp several layouts of the head are as good
            assert tuple(mine) == pytest.approx(tuple(its), rel=1e-3 if split.tp == 1 else 8e-3, abs=1e-3), field.name


PLANS = [
    Candidate(8, 1, 1, 0, "none", 4, 1), Candidate(8, 1, 1, 3, "full", 4, 2), Candidate(4, 2, 1, 1, "selective", 4, 1),
    Candidate(4, 1, 2, 0, "none", 4, 4, "1f1b"), Candidate(2, 1, 4, 2, "full", 4, 8, "1f1b"),
    Candidate(4, 1, 2, 3, "none", 4, 4, "zb-h1"),
]  # fmt: skip


@pytest.mark.parametrize("candidate", PLANS, ids=str)
def test_plans_are_those_of_all_layers(candidate: Candidate) -> None:
    """Also where stages are cut in the list that is no pipeline's own, and what moves of each of its layers."""
    made, known = (predict(candidate, layers, MACHINE) for layers in (both(), one()))
    assert made.total == pytest.approx(known.total, rel=2e-3)
    assert made.memory == pytest.approx(known.memory, rel=6e-3)
    assert both().products() == pytest.approx(one().products())


@pytest.mark.parametrize(("mesh", "candidate"), [("dp=2", Candidate(2, 1, 1, 3, "none", 32, 1))], ids=str)
def test_the_program_takes_what_was_predicted(mesh: str, candidate: Candidate) -> None:
    given = job()
    _, lowered = compile_step(given.model, None, given.batch, {}, mesh_of(mesh), options_of(zero=3))
    made = predict(candidate, both(), MACHINE)
    assert made.memory == pytest.approx(memory_report(lowered, 0).peak, rel=0.03)
    assert made.total == pytest.approx(step_time(lowered, MACHINE).total, rel=0.03)


def test_names_of_more_layers() -> None:
    others = FurtherLayers(("encoder.layers.2", "encoder.layers.3", "encoder.layers.4"), 5)
    assert others.names("encoder.layers.2.weight") == ["encoder.layers.2.weight"]
    assert others.names("encoder.layers.3.weight") == [f"encoder.layers.{i}.weight" for i in range(3, 9)]
    assert others.names("encoder.layers.4.weight") == ["encoder.layers.9.weight"]
    for outside in ("decoder.layers.3.weight", "encoder.layers", "encoder.layers.bias", "head"):
        assert others.names(outside) == [outside] and others.moved(outside, 2) == outside
    assert others.moved("encoder.layers.3", 2) == "encoder.layers.5", "of a unit too"
    assert FurtherLayers(("0", "1", "2"), 1).names("1.weight") == ["1.weight", "2.weight"], "the model is the list"
