"""The collectives are the textbook's, to the byte (Megatron-LM, arXiv 1909.08053 and 2104.04473 section 3.2).

Of a transformer of L layers on a batch of b sequences of s tokens, width h, each dp rank holds b/dp sequences:

    over tp, forward    2 L all-reduces of b/dp*s*h elements, and one for the embedding
             backward   2 L all-reduces of b/dp*s*h elements, and one for the head
             loss       of b/dp*s elements: a logsumexp (a max and a sum, in float64), and the label's logit
    over dp             every element of every gradient that a rank holds, once; and scalars

Nothing is gathered, scattered or sent.
"""

from __future__ import annotations

import functools
import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig
from models import Llama, NanoGPT, token_loss
from models_special import ZOO
from shares import share
from torch import Tensor, nn

from autopar.api import compile
from autopar.capture import Captured, capture
from autopar.compiled import Compiled
from autopar.compiler.compile import batch_arguments, lower
from autopar.compiler.lowered import Collective
from autopar.ir.layout import local_shape
from autopar.ir.mesh import parse_mesh
from autopar.ir.program import record
from autopar.verification.verify import verify

FLOAT = 4
ROWS, TIME, WIDTH, VOCABULARY, HIDDEN = 12, 8, 32, 40, 128


def gpt(layers: int = 2, width: int = WIDTH, hidden: int = HIDDEN, vocabulary: int = VOCABULARY) -> nn.Module:
    model = GPT(GPTConfig(vocabulary, TIME, layers=layers, heads=4, width=width))
    for block in model.blocks:
        block.mlp.up, block.mlp.down = nn.Linear(width, hidden), nn.Linear(hidden, width)  # type: ignore[union-attr]
    return model


def llama(
    layers: int = 2, width: int = WIDTH, hidden: int = HIDDEN, vocabulary: int = VOCABULARY, kv_heads: int = 4
) -> nn.Module:
    return Llama(layers, width, 4, kv_heads, hidden, vocabulary, 2 * TIME)


MAKE = {"gpt": gpt, "llama": llama}


@functools.cache
def captured(name: str, rows: int, time: int, *sizes: int) -> Captured:
    """Without memory: only shapes matter here. (Made on the meta device: `.to("meta")` would untie weights.)"""
    with torch.device("meta"):
        tokens = torch.empty(rows, time, dtype=torch.int64)
        return capture(MAKE[name](*sizes), token_loss, (tokens, tokens), {})


def compiled(name: str, mesh: str, *sizes: int, rows: int = ROWS, time: int = TIME) -> Compiled:
    return lower(captured(name, rows, time, *sizes), parse_mesh(mesh))


@functools.cache
def captured_case(name: str) -> tuple[nn.Module, Captured]:
    model, loss_fn, batch = ZOO[name]()
    return model, capture(model, loss_fn, *batch_arguments(batch))


@functools.cache
def captured_nanogpt() -> Captured:
    with torch.device("meta"):
        tokens = torch.empty(ROWS, TIME, dtype=torch.int64)
        return capture(NanoGPT(), lambda model, x, y: model(x, y)[1], (tokens, tokens), {})


def assert_tensor_parallel(found: Compiled, layers: int, width: int, rows: int = ROWS, time: int = TIME) -> None:
    dp = dict(found.mesh.axes).get("dp", 1)
    tokens = rows // dp * time
    over_tp = [row for row in found.collectives if row.axis == "tp"]
    assert {row.op for row in over_tp} == {"all_reduce"}, show(over_tp)
    sizes = Counter((row.phase, row.bytes) for row in over_tp)
    assert sizes == {
        ("forward", tokens * width * FLOAT): 2 * layers + 1,
        ("backward", tokens * width * FLOAT): 2 * layers + 1,
        ("forward", tokens * FLOAT): 1,
        ("forward", tokens * 2 * FLOAT): 1,
    }, show(over_tp)
    reduced = names(found, "tp")
    kinds = Counter(str(node.args[2]) for node in found.program.calls() if node.name in reduced)
    assert kinds == {"sum": len(over_tp) - 1, "logsumexp": 1}
    # two in each layer, forward and backward, and no layer does the work of another
    places = Counter((row.phase, layer_of(row)) for row in over_tp if row.bytes > tokens * FLOAT)
    assert all(places[phase, i] >= 2 for phase in ("forward", "backward") for i in range(1, layers)), show(over_tp)


def names(found: Compiled, axis: str) -> list[str]:
    """The nodes of the all-reduces over an axis."""
    return [
        node.name for node in found.program.calls()
        if "all_reduce" in str(node.target) and node.args[1] == axis
    ]  # fmt: skip


def layer_of(row: Collective) -> int | None:
    """The first number in the module path: `blocks.1.attn.o` is in layer 1."""
    return next((int(part) for part in row.module.split(".") if part.isdigit()), None)


def gradient_bytes(found: Compiled) -> int:
    """What one rank holds of all gradients."""
    total = 0
    wanted = record(found.program.graph.output_node()).operands
    results = found.program.leaving
    tensors = [(node, out) for node, out in results if node is not None]
    for (node, out), layout in zip(tensors, wanted, strict=True):
        if out.kind == "gradient":
            type_ = record(node).type
            total += math.prod(local_shape(type_.shape, layout, found.mesh)) * type_.dtype.itemsize
    return total


def assert_data_parallel(found: Compiled) -> None:
    over_dp = [row for row in found.collectives if row.axis == "dp"]
    large = [row for row in over_dp if row.shape != ()]
    assert {row.op for row in over_dp} == {"all_reduce"}, show(over_dp)
    assert {row.phase for row in large} == {"backward"}, show(over_dp)
    assert sum(row.bytes for row in large) == gradient_bytes(found), show(over_dp)
    assert len(over_dp) - len(large) == 2, show(over_dp)  # the loss and the number of tokens it counts


def show(rows: list[Collective]) -> str:
    return "\n" + "\n".join(f"{r.op} {r.axis} {r.bytes} {r.shape} {r.phase} {r.value} {r.reason}" for r in rows)


MESHES = ["tp=2", "tp=4", "dp=2,tp=2", "dp=3,tp=2", "dp=2,tp=4", "tp=2,dp=3"]
LAYERS = [*((2, mesh) for mesh in MESHES), *((n, mesh) for n in (1, 3) for mesh in ("tp=2", "dp=3,tp=4"))]


@pytest.mark.parametrize(("layers", "mesh"), LAYERS)
@pytest.mark.parametrize("name", MAKE)
def test_layers_and_meshes(name: str, layers: int, mesh: str) -> None:
    found = compiled(name, mesh, layers)
    assert_tensor_parallel(found, layers, WIDTH)
    if "dp" in mesh:
        assert_data_parallel(found)
    assert found.notes == ()


SIZES = [
    # width, ffn, vocabulary
    (32, 8, 40),  # ffn narrower than the model
    (32, 2048, 40),
    (16, 64, 4),  # hardly any vocabulary: a table smaller than the activations
    (16, 64, 16),
    (16, 64, 1000),
    (16, 64, 50304),  # GPT-2's: a table larger than all else
    (256, 16, 4),
    (8, 16, 40),  # two elements a head
    (512, 2048, 50304),
    (1024, 4096, 256),
]


@pytest.mark.parametrize(("name", "size"), list(share(2, MAKE, SIZES)), ids=str)
def test_sizes(name: str, size: tuple[int, int, int]) -> None:
    found = compiled(name, "dp=3,tp=4", 2, *size)
    assert_tensor_parallel(found, 2, size[0])
    assert_data_parallel(found)


@pytest.mark.parametrize("tokens", [(2, 1), (2, 8), (4, 2), (256, 8)], ids=str)
@pytest.mark.parametrize("name", MAKE)
def test_few_and_many_tokens(name: str, tokens: tuple[int, int]) -> None:
    """The plan is the technique's, whatever is cheaper for a batch of this size."""
    rows, time = tokens
    found = compiled(name, "dp=2,tp=2", rows=rows, time=time)
    assert_tensor_parallel(found, 2, WIDTH, rows, time)
    assert_data_parallel(found)


@pytest.mark.parametrize("mesh", ["tp=2", "tp=4", "dp=2,tp=2", "dp=3,tp=4"])
def test_fused_projections(mesh: str) -> None:
    """nanoGPT's qkv in one matrix, chunked: its columns are split in each third."""
    found = lower(captured_nanogpt(), parse_mesh(mesh))
    assert_tensor_parallel(found, 2, 32)
    assert str(found.layouts["h.0.c_attn.weight"]) == "[3:tp,-]"
    if "dp" in mesh:
        assert_data_parallel(found)


@pytest.mark.parametrize("mesh", ["tp=2", "tp=4", "dp=2,tp=2"])
def test_hugging_face_gpt2(mesh: str) -> None:
    """Conv1D matrices, a fused qkv, a padding mask: still 2 and 2 a layer, and no weight is gathered."""
    found = lower(captured_case("hf_gpt2")[1], parse_mesh(mesh))
    assert_tensor_parallel(found, 2, 32)
    assert str(found.layouts["transformer.h.1.attn.c_attn.weight"]) == "[-,3:tp]"


@pytest.mark.parametrize("name", ["llama", "few_kv_heads", "hf_llama"])
def test_grouped_queries(name: str) -> None:
    found = lower(captured_case(name)[1], parse_mesh("dp=2,tp=2"))
    assert_tensor_parallel(found, 2, 64)


@pytest.mark.parametrize("name", ["mlp", "gpt", "llama", "nanogpt", "vit", "frozen", "unused", "hf_llama"])
@pytest.mark.parametrize("mesh", ["dp=2", "dp=3,tp=2"])
def test_no_weight_moves_and_each_gradient_byte_moves_once(name: str, mesh: str) -> None:
    model, case = captured_case(name)
    found = lower(case, parse_mesh(mesh))
    weights = {n.name for n, entry in found.program.entries
               if entry.kind == "parameter"}  # fmt: skip
    assert not weights & {row.value for row in found.collectives}
    moved = [row for row in found.collectives if row.axis == "dp" and math.prod(row.shape) > 1]
    moved = [row for row in moved if row.phase == "backward"]
    scalars = [p for p in model.parameters() if p.requires_grad and p.numel() == 1]
    assert sum(row.bytes for row in moved) + FLOAT * len(scalars) in (gradient_bytes(found), gradient_bytes(found) + 4)


def test_no_collective_on_one_rank() -> None:
    assert compiled("gpt", "dp=1,tp=1").collectives == ()


def test_data_parallel_alone_moves_gradients_and_two_scalars() -> None:
    model, case = captured_case("gpt")
    found = lower(case, parse_mesh("dp=2"))
    assert_data_parallel(found)
    assert gradient_bytes(found) == FLOAT * sum(p.numel() for p in model.parameters())


def test_rows_say_what_moves_and_why() -> None:
    row = compiled("gpt", "dp=2,tp=2").collectives[1]
    assert (row.op, row.axis, row.phase, row.dtype) == ("all_reduce", "tp", "forward", torch.float32)
    assert row.shape == (ROWS // 2, TIME, WIDTH) and row.bytes == FLOAT * math.prod(row.shape)
    assert row.module == "blocks.0.attn.o" and row.source.startswith("gpt.py:")
    assert "partial(tp)" in row.reason and "wants" in row.reason


class Standardised(nn.Module):
    """Convolutions whose weights are standardised (arXiv 1903.10520), as in BiT: computed, and yet split."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 12, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for conv in (self.first, self.second):
            flat = conv.weight.flatten(1)
            flat = (flat - flat.mean(1, keepdim=True)) / (flat.var(1, keepdim=True) + 1e-5).sqrt()
            x = F.relu(F.conv2d(x, flat.view_as(conv.weight)))
        return x.square().mean()


def test_a_weight_that_is_computed_from_parameters_is_split() -> None:
    torch.manual_seed(0)
    batch = (torch.randn(6, 3, 9, 9),)
    found = compile(Standardised(), "dp=3,tp=2", batch=batch)
    assert str(found.layouts["first.weight"]) == "[tp,-,-,-]"
    assert str(found.layouts["second.weight"]) in ("[tp,-,-,-]", "[-,tp,-,-]")
    assert verify(Standardised(), "dp=3,tp=2", batch=batch).ok
