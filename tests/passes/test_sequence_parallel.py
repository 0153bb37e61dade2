"""Sequence parallelism (arXiv 2205.05198): the same bytes in other collectives, less kept, the same numbers."""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig
from models import Llama, token_loss
from models_special import ZOO
from refusals import refused
from torch import Tensor, nn
from verified import verified

from autopar.api import compile
from autopar.capture import Captured, capture
from autopar.compiled import Compiled
from autopar.compiler.compile import lower, make_plan
from autopar.compiler.sequence import through_passes
from autopar.errors import LayoutError
from autopar.ir.mesh import parse_mesh
from autopar.ir.options import StepOptions
from autopar.ir.plan import Fixed
from autopar.ir.program import record
from autopar.machines import named
from autopar.report.inspection import memory_of
from autopar.verification.verify import verify

ROWS, TIME, WIDTH, VOCABULARY = 12, 8, 64, 40


def gpt(layers: int) -> nn.Module:
    return GPT(GPTConfig(VOCABULARY, TIME, layers=layers, heads=4, width=WIDTH))


def llama(layers: int) -> nn.Module:
    return Llama(layers, WIDTH, 4, 4, 128, VOCABULARY, 2 * TIME)


MAKE = {"gpt": gpt, "llama": llama}


@functools.cache
def captured(name: str, layers: int) -> Captured:
    with torch.device("meta"):
        tokens = torch.empty(ROWS, TIME, dtype=torch.int64)
        return capture(MAKE[name](layers), token_loss, (tokens, tokens), {})


def compiled(name: str, layers: int, mesh: str, sequence_parallel: bool = True) -> Compiled:
    return lower(captured(name, layers), parse_mesh(mesh), StepOptions(sequence_parallel=sequence_parallel))


@pytest.mark.parametrize("mesh", ["tp=2", "tp=4", "dp=3,tp=2"])
@pytest.mark.parametrize("name", MAKE)
def test_scatters_and_gathers_in_place_of_sums(name: str, mesh: str) -> None:
    """Per layer 2 all-gathers and 2 reduce-scatters in each pass; what the forward pass gathered is gathered again."""
    layers = 2
    found = compiled(name, layers, mesh)
    whole = ROWS // dict(found.mesh.axes).get("dp", 1) * TIME * WIDTH * 4
    large = Counter((row.phase, row.op) for row in found.collectives if row.axis == "tp" and row.bytes == whole)
    assert large == {
        ("forward", "reduce_scatter"): 2 * layers + 1,  # and the embedding
        ("forward", "all_gather"): 2 * layers + 1,  # and the head
        ("backward", "reduce_scatter"): 2 * layers + 1,
        # of the gradients of the layers' outputs and of the embedding's, and what the forward pass gathered
        ("backward", "all_gather"): 2 * layers + 1 + 2 * layers + 1,
    }, large


@pytest.mark.parametrize("name", MAKE)
def test_the_forward_pass_moves_the_same_bytes(name: str) -> None:
    """A ring's all-reduce is a reduce-scatter and an all-gather."""

    def moved(program: Compiled) -> float:
        weight = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
        rows = [row for row in program.collectives if row.axis == "tp" and row.phase == "forward"]
        return sum(weight[row.op] * row.bytes for row in rows if row.bytes == ROWS * TIME * WIDTH * 4)

    assert moved(compiled(name, 2, "tp=2")) == moved(compiled(name, 2, "tp=2", sequence_parallel=False))


class Layer(nn.Module):
    """A layer as in the paper's figure 2: attention with its softmax written out, and dropout at its three places."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, dim=-1)
        return self.o((F.dropout(scores, 0.1) @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.first(x)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.second(x)))), 0.1)


@functools.cache
def captured_layers(layers: int, b: int, s: int, h: int, a: int) -> Captured:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().sum()

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(h, h), *(Layer(h, a) for _ in range(layers))).bfloat16()
        return capture(model, loss, (torch.empty(b, s, h, dtype=torch.bfloat16),), {})


def activations(layers: int, mesh: str, sequence_parallel: bool, sizes: tuple[int, int, int, int]) -> int:
    choices = StepOptions(sequence_parallel=sequence_parallel)
    return memory_of(lower(captured_layers(layers, *sizes), parse_mesh(mesh), choices).program).activations


@pytest.mark.parametrize(("t", "b", "s", "h", "a"), [(2, 2, 16, 64, 4), (4, 4, 32, 128, 8)])
def test_kept_activations_are_those_of_the_paper(t: int, b: int, s: int, h: int, a: int) -> None:
    """Table 2: s b h (10 + 24/t + 5 a s/(h t)) with tensor, s b h/t (34 + 5 a s/h) with sequence parallelism.

    Ours keep less: no dropout mask (s b h each, a s^2 b of the softmax's), since a mask is drawn again; and more: a
    norm's mean and inverse deviation, 2 of them in a layer, one number of each a token.
    """
    found = {}
    for sequence_parallel in (False, True):
        one, two = (activations(n, f"tp={t}", sequence_parallel, (b, s, h, a)) for n in (1, 2))
        found[sequence_parallel] = two - one
    token, score, statistics = s * b * h, a * s * s * b, 4 * s * b * 2
    assert found[True] * t == 34 * token + 5 * score - (2 * token + score) + statistics
    assert found[False] == 10 * token + (24 * token + 5 * score) // t - (2 * token + score // t) + statistics


PARITY = ["gpt", "llama", "nanogpt", "transformer_encoder", "hf_llama"]


@pytest.mark.parametrize("name", PARITY)
def test_every_gradient_equals_one_device(name: str) -> None:
    model, loss_fn, batch = ZOO[name]()
    verified(model, ["tp=2", "dp=3,tp=2", "tp=4"], loss_fn, batch, sequence_parallel=True)


def test_dropout_draws_the_masks_of_one_device() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(VOCABULARY, TIME, layers=2, heads=4, width=32, dropout=0.1)).train()
    tokens = torch.randint(VOCABULARY, (ROWS, TIME))
    report = verify(model, "dp=3,tp=2", loss_fn=token_loss, batch=(tokens, tokens), sequence_parallel=True)
    assert report.ok, str(report)


def test_a_sequence_that_does_not_divide_is_refused_or_left() -> None:
    model = gpt(1)
    tokens = torch.randint(VOCABULARY, (4, 7))

    def made(wish: bool | str) -> Compiled:
        batch = tokens, tokens.clone()
        return compile(model, "tp=2", loss_fn=token_loss, batch=batch, sequence_parallel=wish)  # type: ignore[arg-type]

    refused(
        LayoutError,
        "sequence_parallel=True: no activation can be split over 'tp' (size 2) on its sequence. The batch is batch "
        "tensor 0 [4, 7]; batch tensor 1 [4, 7]: a dim after the first must be a multiple of 2. "
        'sequence_parallel="auto" goes on without.',
        lambda: made(True),
    )
    assert {row.op for row in made("auto").collectives} == {"all_reduce"}


def test_it_needs_a_tensor_parallel_axis() -> None:
    tokens = torch.randint(VOCABULARY, (4, 8))
    message = "sequence_parallel=True: mesh 'dp=2' has no axis 'tp' of more than one rank."
    batch = (tokens, tokens)
    refused(
        LayoutError, message, lambda: compile(gpt(1), "dp=2", loss_fn=token_loss, batch=batch, sequence_parallel=True)
    )


def auto(time: int, width: int, tp: int) -> Compiled:
    """A layer of a GPT with `sequence_parallel="auto"`."""
    with torch.device("meta"):
        model = GPT(GPTConfig(VOCABULARY, time, layers=1, heads=8, width=width))
        tokens = torch.empty(2, time, dtype=torch.int64)
        return compile(model, f"tp={tp}", loss_fn=token_loss, batch=(tokens, tokens), sequence_parallel="auto")


@pytest.mark.parametrize(("time", "width", "wish"), [(4096, 4096, True), (8, 64, False)])
def test_auto_goes_by_cost_and_says_so(time: int, width: int, wish: bool) -> None:
    """On where the norms of a long sequence cost more than starting more collectives, off for a toy."""
    found = auto(time, width, 8)
    assert ("reduce_scatter" in {row.op for row in found.collectives}) == wish
    (note,) = [note for note in found.notes if "sequence_parallel" in note]
    assert note.startswith(f"sequence_parallel='auto' is {'on' if wish else 'off'}: a step takes ")
    assert note.endswith(" without on h100-80g")
    split, whole = (float(word) for word in re.findall(r"([\d.e+-]+) ms", note))
    assert (split <= whole) == wish


def test_auto_goes_by_the_machine() -> None:
    """On one whose collectives take long to start it is off, and on a host what it is on a cluster."""
    with torch.device("meta"):
        model = GPT(GPTConfig(VOCABULARY, 4096, layers=1, heads=8, width=4096))
        tokens = torch.empty(2, 4096, dtype=torch.int64)
        found = capture(model, token_loss, (tokens, tokens), {})
    h100 = named("h100-80g")
    slow = replace(h100, inside=replace(h100.inside, hop_us=1e3))  # gathers and scatters of a ring, no all-reduce
    for machine, wish in ((h100, True), (slow, False), (named("cpu"), True)):
        plan = make_plan(found, parse_mesh("tp=8"), StepOptions(sequence_parallel="auto"), Fixed(machine=machine))
        assert through_passes(found.program, plan).plan.sequence_parallel == wish, machine.name


def test_the_pieces_of_a_layer_lie_on_the_sequence() -> None:
    found = compiled("gpt", 2, "dp=3,tp=2")
    norms = [node for node in found.program.calls() if "native_layer_norm.default" in str(node.target)]
    layouts = {str(layout) for node in norms for layout in record(node).layouts[:1]}
    assert layouts == {"[dp,tp,-]"}
