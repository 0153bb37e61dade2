"""Masks of whole models over cp: windows, chunks, padding and documents, as transformers and plain users write them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from verified import verified

import autopar
from autopar.compiled import Compiled
from autopar.runtime.attention import compared_blocks

TIME, ROWS, WORDS = 24, 4, 40
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "vocab_size": WORDS, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compared_blocks, "_SIZE_CPU", 4)


def tokens() -> Tensor:
    return torch.randint(1, WORDS, (ROWS, TIME), generator=torch.Generator().manual_seed(1))


def seen() -> Tensor:
    """Padding on the right, on the left, where the first rows see nothing, and none."""
    found = torch.ones(ROWS, TIME, dtype=torch.long)
    found[0, 15:], found[1, :7] = 0, 0
    return found


def conditions(found: Compiled) -> list[tuple[str, bool]]:
    """The condition of each attention, and whether it is causal; that of a plain one is empty."""
    nodes = [node for node in found.program.calls() if str(node.target).endswith("attention.default")]
    return [("" if len(node.args) == 6 else str(node.args[5]), bool(node.args[-2])) for node in nodes]


def loss(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    found: Tensor = model(input_ids=x, attention_mask=mask, labels=x.masked_fill(mask == 0, -100)).loss
    return found


def made(name: str, **sizes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, config = {
        "mistral": ("MistralForCausalLM", "MistralConfig"),
        "qwen2": ("Qwen2ForCausalLM", "Qwen2Config"),
        "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig"),
        "llama": ("LlamaForCausalLM", "LlamaConfig"),
        "llama4": ("Llama4ForCausalLM", "Llama4TextConfig"),
        "gpt_oss": ("GptOssForCausalLM", "GptOssConfig"),
        "bert": ("BertForMaskedLM", "BertConfig"),
    }[name]
    return getattr(transformers, model)(getattr(transformers, config)(**SIZES | sizes))


WINDOW = ("c0>=r0 & c0<=r1 & c1", False)
LAYERS = ["sliding_attention", "full_attention"]
MODELS: dict[str, tuple[dict[str, Any], list[tuple[str, bool]]]] = {
    "llama": ({}, [("c0", True)] * 2),
    "mistral": ({"sliding_window": 5}, [WINDOW] * 2),
    "gemma3": ({"sliding_window": 5, "layer_types": LAYERS}, [WINDOW, ("c0", True)]),
    "llama4": (
        {"attention_chunk_size": 8, "intermediate_size_mlp": 48, "num_local_experts": 2}, [("c0==r0 & c1", True)] * 2
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_windows_chunks_and_padding_of_transformers(name: str) -> None:
    sizes, wanted = MODELS[name]
    batch = tokens(), seen()
    for _, found in verified(made(name, **sizes), ("cp=2", "cp=4", "dp=2,cp=2"), loss, batch, attention="gather"):
        assert conditions(found) == wanted


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_slices_of_transformers(name: str) -> None:
    """Through a pipeline, slice after slice: their masks are tensors, and known to be causal."""
    options = {"microbatches": 2, "slices": [10, 6, 5, 3], "schedule": "seq1f1b"}
    ((_, found),) = verified(made(name, **MODELS[name][0]), ["pp=2"], loss, (tokens(), seen()), **options)
    assert conditions(found) == MODELS[name][1] and not found.notes


# Of a mask that transformers makes without one of its own: of one document nothing is left but that it is causal.
SLICED: dict[str, tuple[str, dict[str, Any], list[tuple[str, bool]]]] = {
    "llama": ("pp=2,tp=2", {}, [("", True)] * 2),
    "mistral": ("dp=2,pp=2", {"sliding_window": 5}, [("c0>=r0 & c0<=r1", False)] * 2),
    "qwen2": (
        "pp=2", {"use_sliding_window": True, "sliding_window": 5, "layer_types": LAYERS[::-1]},
        [("", True), ("c0>=r0 & c0<=r1", False)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SLICED)
def test_slices_without_padding(name: str) -> None:
    """One document in each row, and several, whose positions the batch gives."""
    mesh, sizes, wanted = SLICED[name]
    options = {"microbatches": 2, "slices": [10, 6, 5, 3], "schedule": "seq1f1b", "zero": 3 if "dp" in mesh else 0}
    step = lambda m, x, **more: m(input_ids=x, labels=x, use_cache=False, **more).loss  # noqa: E731
    ((_, found),) = verified(made(name, **sizes), [mesh], step, (tokens(),), **options)
    assert conditions(found) == wanted and not found.notes
    ids = torch.stack([torch.cat([torch.arange(n), torch.arange(TIME - n)]) for n in (7, 24, 12, 19)])
    verified(made(name, **sizes), [mesh], step, {"x": tokens(), "position_ids": ids}, **options)


def test_what_transformers_spells_out_stays_right() -> None:
    """gpt_oss has a sink beside the keys: products and a softmax, with the mask as a tensor."""
    sizes = {"sliding_window": 5, "layer_types": LAYERS, "num_local_experts": 4, "num_experts_per_tok": 2}
    ((_, found),) = verified(made("gpt_oss", **sizes), ("cp=2",), loss, (tokens(), seen()))
    assert conditions(found) == []


def test_packed_documents_of_transformers() -> None:
    """Position ids that begin anew: with one row, elsewhere in each, and without padding."""
    x = tokens()
    ids = torch.stack([torch.cat([torch.arange(n), torch.arange(TIME - n)]) for n in (7, 24, 12, 19)])
    step = lambda m, x, ids: m(input_ids=x, position_ids=ids, labels=x, use_cache=False).loss  # noqa: E731
    for _, found in verified(made("mistral", sliding_window=9), ("cp=2", "cp=4", "cp=2,tp=2"), step, (x, ids)):
        assert len(conditions(found)) == 2 and all("==" in condition for condition, _ in conditions(found))


class Packed(nn.Module):
    """A plain GPT of packed documents: their ends are counted, and no token looks into another document."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window, self.words, self.places = window, nn.Embedding(WORDS, 32), nn.Embedding(TIME, 32)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(32, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        document = (x == 1).cumsum(-1)
        place = torch.arange(x.shape[1], device=x.device)
        hidden = (document[:, :, None] != document[:, None]) | (place[:, None] < place)
        hidden = hidden | (place[:, None] - place >= self.window)
        h = self.words(x) + self.places(place)
        for layer in self.layers:
            h = layer(h, src_mask=hidden.repeat_interleave(4, 0))
        return self.head(h)


class Padded(nn.Module):
    """torch's own layers with both of their masks."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True)
        self.words, self.head = nn.Embedding(WORDS, 32), nn.Linear(32, WORDS)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, pads: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=self.head.weight.dtype)
        return self.head(self.encoder(self.words(x), mask=mask, src_key_padding_mask=pads))


def test_torch_layers_with_a_triangle_and_padding() -> None:
    torch.manual_seed(0)
    pads = seen() == 0
    pads[1, :7] = False  # a row that sees nothing is NaN in nn.MultiheadAttention
    step = lambda m, x, pads: F.cross_entropy(m(x, pads).flatten(0, 1), x.masked_fill(pads, -100).flatten())  # noqa: E731
    for _, found in verified(Padded(), ("cp=2", "cp=2,tp=2"), step, (tokens(), pads)):
        assert conditions(found) == [("~c0", True)] * 2


def test_a_plain_gpt_of_documents() -> None:
    torch.manual_seed(0)
    step = lambda m, x: F.cross_entropy(m(x).flatten(0, 1), x.roll(-1, 1).flatten())  # noqa: E731
    x = tokens()
    x[0, 3] = x[0, 11] = x[1, 17] = x[3, 1] = 1
    for _, found in verified(Packed(9), ("cp=2", "cp=4", "cp=2,tp=2"), step, (x,)):
        assert len(conditions(found)) == 2 and all("==" in condition for condition, _ in conditions(found))
    verified(Packed(9), ("cp=2,pp=2",), step, (x,), microbatches=2)


@pytest.mark.slow
def test_inductor_calls_it() -> None:
    """In code that Inductor writes the op stands as it is, with what it compiles around it."""
    torch.manual_seed(0)
    plain, x = Packed(9), tokens()
    x[0, 3] = x[0, 11] = x[1, 17] = 1
    step = lambda m, x: F.cross_entropy(m(x).flatten(0, 1), x.roll(-1, 1).flatten())  # noqa: E731
    want = step(plain, x)
    want.backward()
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=step, compile="inductor")
    torch.testing.assert_close(model.forward_backward(x), want.detach())
    assert "compared_attention_backward" in str(model.generated_code)
    for name, gradient in model.full_gradients().items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
