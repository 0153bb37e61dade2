"""What a GPU runs, run on the CPU: the kernels' other branches, a step of all of them, and nobody else who asks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from off_host import off_host
from semantic_examples import semantic_examples
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import autopar
from autopar.ir.ops.ops import op
from autopar.runtime.attention.checked_causal import checked_causal
from autopar.runtime.executor.kernel_table import KERNELS
from autopar.runtime.kernels.counter import Counters, PieceRuns, keys_of
from autopar.runtime.kernels.indices import checked_index
from autopar.runtime.kernels.loss_kernels import cross_entropy_backward

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", sorted(semantic_examples()))
def test_a_kernel_gives_the_same_on_both_sides(name: str) -> None:
    args = semantic_examples()[name]
    run = KERNELS[op(name)].run
    expected = run(*args)
    with off_host():
        found = run(*args)
    for ours, its in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(ours, its)


def test_random_bits_are_the_same_to_the_bit() -> None:
    runs = PieceRuns.of((40, 30), (20, 10), (20, 10))
    seed, made = torch.tensor([3, 4]), []
    for side in (off_host, torch.no_grad):
        with side():
            keys, counters = keys_of(seed, 5), Counters.of(runs, seed.device)
            made.append(torch.cat([counters.bits(keys, *block) for block in counters.blocks()]))
    assert torch.equal(*made)


@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2"])
def test_a_step_gives_what_the_plain_module_gives(mesh: str) -> None:
    model, loss_fn, batch = models.gpt()
    with off_host():
        report = autopar.verify(model, mesh, loss_fn=loss_fn, batch=batch, steps=1, zero=3)
    assert report.ok, report


# -- token ids ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-1, 8, -100])
def test_the_device_asserts_that_an_index_is_inside(value: int) -> None:
    index = torch.tensor([[1, 2], [3, value]])
    with off_host():
        assert checked_index(index, 8, value) is index
        with pytest.raises(RuntimeError, match="an index is out of range: the table has 8 entries"):
            checked_index(index, 8, None)
        checked_index(torch.arange(8), 8, None)


def test_the_device_asserts_that_a_mask_is_causal() -> None:
    """A mask of elements, and one of vectors, of which no block is decided."""
    mask, places = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril(), torch.arange(6).view(1, 1, 6)
    with off_host():
        assert torch.equal(checked_causal(mask, [], [], ""), mask)
        assert torch.equal(
            checked_causal(places[..., 3:], [places[..., 3:]], [places], "c0<=r0", starts=[3]), places[..., 3:]
        )
        for given in ((mask.mT, [], [], ""), (places, [places + 1], [places], "c0<=r0")):
            with pytest.raises(RuntimeError, match="a mask lets a query see a later key, but slices compute"):
                checked_causal(*given)


@pytest.mark.parametrize("which", [0, 1])
def test_a_step_with_a_wrong_token_id_fails_off_the_host(which: int) -> None:
    """On a GPU too: a lookup in a split table takes what it does not hold for another rank's."""
    model, loss_fn, batch = models.gpt()
    parallel = autopar.parallelize(model, "dp=1", loss_fn=loss_fn)
    with off_host():
        parallel.forward_backward(*batch)
        batch[which][3, 4] = models.VOCABULARY
        with pytest.raises(RuntimeError, match=f"the table has {models.VOCABULARY} entries"):
            parallel.forward_backward(*batch)


# -- deterministic algorithms -----------------------------------------------------------------------------------------


class Atomics(TorchDispatchMode):
    """Notes the ops that add in any order on a GPU, which torch refuses under `use_deterministic_algorithms`."""

    refused = ("scatter_add", "scatter_reduce", "histc", "bincount", "kthvalue", "median")

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__.removesuffix("_") in self.refused:
            self.found.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", sorted(semantic_examples()))
def test_kernels_add_in_one_order(name: str) -> None:
    args = semantic_examples()[name]
    with off_host(), Atomics() as atomics:
        KERNELS[op(name)].run(*args)
    assert not atomics.found


def test_a_label_at_the_edge_of_a_piece_is_subtracted_once() -> None:
    """In place of an addition by place: the columns of a row differ, so each is read, changed and written."""
    x, index = torch.randn(4, 6, dtype=torch.float64), torch.tensor([0, 5, 6, -1])
    lse = x.logsumexp(-1)
    expected = (x - lse[:, None]).exp()
    expected[0, 0] -= 1
    expected[1, 5] -= 1
    torch.testing.assert_close(cross_entropy_backward(torch.ones(4, dtype=x.dtype), x, lse, index), expected)


# -- nobody else asks -------------------------------------------------------------------------------------------------

# Files that may name a kind of device, with the reason.
KINDS: dict[str, str] = {
    "runtime/kernels/host.py": "it is the one that asks",
    "runtime/attention/attention_kernels.py": "flash kernels are for CUDA alone",
    "runtime/kernels/experts.py": "whose grouped product reads nothing",
    "runtime/kernels/norm_kernels.py": "whose fused kernel is for CUDA alone",
    "runtime/kernels/gpu_kernels.py": "Triton is for CUDA alone",
    "runtime/compilers/inductor.py": "which compiler must be installed",
    "runtime/executor/run_fused.py": "groups have kernels on CUDA, elsewhere in an interpreter",
    "runtime/triton/toolchain.py": "which Triton and which GPU there must be",
    "runtime/triton/configuration.py": "how many programs run at once",
    "autopar/parallel/weights/materialize.py": "whose generator is kept",
    "autopar/parallel/tensors/draws.py": "whose generator draws",
    "autopar/parallel/programs/cache_entry.py": "tensors of a file are on the CPU",
    "runtime/tiers/host_tier.py": "which memory is another one than the device's",
    "autopar/parallel/session/devices.py": "which GPU is a rank's",
    "autopar/parallel/session/session.py": "which back end connects the ranks, which machine the search weighs by",
    "autopar/parallel/tensors/place.py": "a mesh says the kind alone, without an index",
    "autopar/parallel/out_of_memory.py": "which memory was full, and what its allocator counts",
}
_ASKS = re.compile(r'(==|!=) "(cpu|cuda)"|\bis_cuda\b|\bis_cpu\b')


def test_no_other_file_asks_for_the_device() -> None:
    """A branch that asks otherwise runs on no machine of ours."""
    files = [*(ROOT / "runtime").rglob("*.py"), *(ROOT / "autopar" / "parallel").rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in files if _ASKS.search(path.read_text())}
    assert found == KINDS.keys()
