"""Slices of sequences under masks that are tensors: what is causal in them is found, and the rest is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import line_of
from test_compare_masks import MASKS, ROWS, TIME, WIDTH, Attending, causal, sdpa
from test_slices import HINT, sliced
from torch import Tensor, nn
from verified import verified

import autopar
from autopar.errors import LayoutError
from autopar.passes.collectives.carried import sees_before
from autopar.runtime.attention import compared_blocks

# That hide from each query what lies behind it; of the others some may be causal, but nobody knows.
CAUSAL = ["window", "chunks", "padding", "padding of both", "documents", "documents, window and padding", "triangle",
          "added", "added triangle", "turned"]  # fmt: skip
OTHERS = ["window both ways", "prefix", "prefix of each", "documents by cumsum", "triangle above"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compared_blocks, "_SIZE_CPU", 4)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Values, where padding is not, and documents."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, TIME, WIDTH, generator=draw)
    documents = torch.randint(0, 3, (ROWS, TIME), generator=draw).sort(1).values
    return x, torch.rand(ROWS, TIME, generator=draw) > 0.3, documents


class Masked(nn.Module):
    """A stage before the attention."""

    def __init__(self, mask: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.attend = nn.Linear(WIDTH, WIDTH), Attending(mask)

    def forward(self, x: Tensor, seen: Tensor, document: Tensor) -> Tensor:
        found: Tensor = self.attend(self.before(x), seen, document)
        return found


@pytest.mark.parametrize("slices", [4, [10, 6, 5, 3]])
@pytest.mark.parametrize("name", CAUSAL)
def test_what_is_causal_is_that_of_one_device(name: str, slices: Any) -> None:
    verified(Masked(MASKS[name][0]), ["pp=2"], None, inputs(), **sliced(slices))


@pytest.mark.parametrize("mesh", ["pp=2,cp=2", "tp=2,pp=2"])
def test_with_other_axes(mesh: str) -> None:
    name = "documents, window and padding"
    verified(Masked(MASKS[name][0]), [mesh], None, inputs(), attention="gather", **sliced([16, 8], recompute="full"))


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_causal_is_refused(name: str) -> None:
    with pytest.raises(LayoutError) as found:
        autopar.compile(Masked(MASKS[name][0]), "pp=2", batch=inputs(), **sliced(2))
    text = str(found.value)
    assert "op 'autopar.compared_attention.default'" in text and text.endswith(HINT), text
    assert f"test_compare_masks.py:{line_of(Attending.forward, 'sdpa(')}" in text, text


class Gated(nn.Module):
    """A mask of which the keys' part is computed by a stage: slices keep it beside the keys."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.project = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        q, k, v = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
        own = torch.arange(TIME)[:, None] == torch.arange(TIME)
        mask = causal() & ((x[..., 0] > 0)[:, None, None] | own)
        return sdpa(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2).square().mean()


@pytest.mark.parametrize("mesh", ["pp=2", "pp=2,cp=2"])
def test_what_is_known_of_keys_is_kept_with_them(mesh: str) -> None:
    ((_, found),) = verified(Gated(), [mesh], None, inputs()[:1], attention="gather", **sliced([16, 8]))
    kept = {str(node.args[-1]) for node in found.program.calls() if "earlier" in str(node.target)}
    assert kept == {"attention.k", "attention.v", "attention.c1"}


def test_the_work_of_a_window_does_not_grow() -> None:
    for name, grows in (("window", False), ("documents", True)):
        found = autopar.compile(Masked(MASKS[name][0]), "pp=2", batch=inputs(), **sliced(2))
        attends = [node for node in found.program.calls() if "compared_attention" in str(node.target)]
        assert attends and {sees_before(node) for node in attends} == {grows}
