"""The yardstick of our fused groups: what Inductor's Triton code does with the same graphs, found without a GPU."""

from __future__ import annotations

import pytest
import torch
from inductor_count import BLOCKS, MEASURED, Counted, counted, graphs, ours

# Of torch's own code, which changes with torch alone: what it gave is the table.
measures_torch = pytest.mark.slow
needs_triton = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."),
    reason=f"Inductor's code is that of torch 2.13, here is {torch.__version__}",
)
ROWS_BYTES = 2 * 4096 * 4096 * 2  # a value of the block, in bf16


@pytest.fixture(scope="module")
def llama() -> dict[str, Counted]:
    pytest.importorskip("triton")
    return {found.name: found for found in counted("llama")}


@measures_torch
@needs_triton
def test_kernels_and_bytes_are_those_of_the_table(llama: dict[str, Counted]) -> None:
    assert {name: (found.kernels, found.bytes_) for name, found in llama.items()} == {
        name: row for name, row in MEASURED.items() if name.startswith("llama ")
    }


@measures_torch
@needs_triton
def test_products_and_attention_are_calls(llama: dict[str, Counted]) -> None:
    """Seven products forward, and two for each of them backward."""
    calls = {name: found.calls for name, found in llama.items()}
    assert [calls[f"llama {name}"]["extern_kernels.mm"] for name in ("forward", "backward", "step")] == [7, 14, 21]
    both = {"llama step": 2, "llama split": 2, "llama forward": 1, "llama backward": 1}
    assert {name: sum("attention" in call for call in found) for name, found in calls.items()} == both


@measures_torch
@needs_triton
def test_bytes_are_what_the_kernels_read_and_write(llama: dict[str, Counted]) -> None:
    """Of the forward pass at least: a norm reads x and writes h, twice; rotary q and k; silu of two wide values, and
    one residual. Not more than twice as much, for Inductor fuses them all."""
    least = (2 * 2 + 2 * 2 + 3) * ROWS_BYTES + 3 * ROWS_BYTES * 11008 // 4096
    assert least <= llama["llama forward"].bytes_ <= 2 * least


@measures_torch
@needs_triton
def test_the_other_blocks() -> None:
    pytest.importorskip("triton")
    found = {one.name: (one.kernels, one.bytes_) for one in counted("gpt", "t5")}
    assert found == {name: row for name, row in MEASURED.items() if not name.startswith("llama ")}


@pytest.mark.parametrize("block", BLOCKS)
def test_our_groups_move_at_most_as_much_in_at_most_as_many_kernels(block: str) -> None:
    """The step as one graph, whole and as a rank of tp=4 has it, and its forward and backward pass alone, beside what
    was measured of Inductor."""
    found = {name: ours(name, program) for name, program in graphs(block, compile="triton")}
    more = {
        name: (one.kernels, one.bytes_, MEASURED[name])
        for name, one in found.items()
        if one.kernels > MEASURED[name][0] or one.bytes_ > MEASURED[name][1]
    }
    assert len(found) == 4 and more == {}


def test_without_groups_there_would_be_more() -> None:
    for name, program in graphs("llama"):
        one, (kernels, bytes_) = ours(name, program), MEASURED[name]
        # a rank's part moves its collectives in chunks beside products: their copies are kernels of Inductor's too
        more = 1.5 if name == "llama split" else 4
        assert one.kernels > more * kernels and one.bytes_ > 2 * bytes_, one
