"""Every op of torch's own database on tensors of every layout: one device's result, or an AutoparError; never wrong.

Each tensor of a sample's arguments is put in some layout, in turn; the functional, the in-place and the out= variant
are compared with the plain ones on the same values. A sample of the database runs here, all of it as a slow test.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from processes import Ranks, ranks_of
from test_tensors import distributor
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.ir.layout import Layout, fits
from autopar.parallel.distribute import Distributor
from autopar.torch_compat import tree_flatten, tree_unflatten

pytestmark = pytest.mark.gloo
LARGEST = 600  # elements of one tensor
# Slow, or of tensors that are not dense.
SKIPPED = ("jiterator", "sparse", "_refs", "ops.nvprims", "torch_", "masked.", "linalg.lstsq", "svd_lowrank", "pca")
# Whose values nobody defines.
UNDEFINED = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with ranks_of(4) as ranks:
        yield ranks


def database() -> list[Any]:
    name = "torch.testing._internal.common_methods_invocations"
    found = pytest.importorskip(name, reason="PyTorch's op database needs expecttest", exc_type=ImportError)
    return [info for info in found.op_db if not info.name.startswith(SKIPPED)]


def _samples(info: Any, count: int) -> list[Any]:
    dtype = next((d for d in (torch.float64, torch.int64, torch.bool, torch.complex128) if d in info.dtypes), None)
    if dtype is None:
        return []
    torch.manual_seed(0)
    try:
        return list(islice(info.sample_inputs_func(info, "cpu", dtype, False), count))
    except Exception:  # the database's own
        return []


def _layouts(shape: torch.Size, where: Distributor, homes: bool) -> list[tuple[Layout, int | None]]:
    """Layouts that a tensor of a shape may have, those without padding and those of ZeRO."""
    found: list[tuple[Layout, int | None]] = []
    factors: list[tuple[Any, ...]] = [("tp", "dp"), ("dp", "tp"), ("tp",), ("dp",), (2, "tp"), (3, "tp", "dp")]
    for dim, size in enumerate(shape):
        for factor in factors:
            if homes and "dp" in factor:
                continue
            layout = Layout(tuple(factor if d == dim else () for d in range(len(shape))))
            uneven = len(factor) == 1 and size >= 2
            if uneven or (size and fits((size,), Layout((factor,)), where.mesh)):
                found.append((layout, 1 if homes else None))
    return [*found, (Layout(((),) * len(shape)), 1 if homes else None)]


def _run(function: Any, args: Any) -> tuple[Any, Exception | None]:
    torch.manual_seed(7)
    try:
        with torch.no_grad():
            return function(*args), None
    except Exception as error:
        return None, error


def _whole(value: Any) -> list[Any]:
    leaves, _ = tree_flatten(value)
    return [leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for leaf in leaves]


def _differs(got: Any, wanted: Any, defined: bool) -> str | None:
    ours, theirs = _whole(got), _whole(wanted)
    if len(ours) != len(theirs):
        return f"{len(ours)} results for {len(theirs)}"
    for a, b in zip(ours, theirs, strict=True):
        if not isinstance(b, Tensor):
            if a != b and not (a != a and b != b):
                return f"{a} for {b}"
        elif a.shape != b.shape or a.dtype != b.dtype:
            return f"{a.dtype}{list(a.shape)} for {b.dtype}{list(b.shape)}"
        elif defined:
            try:
                torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9, equal_nan=True, check_stride=False)
            except AssertionError as error:
                return str(error).splitlines()[0]
    return None


def _variants(info: Any, sample: Any) -> Iterator[tuple[str, Any]]:
    yield "", lambda x, *args: info(x, *args, **sample.kwargs)
    if info.inplace_variant is not None:
        yield "_", lambda x, *args: (info.inplace_variant(x, *args, **sample.kwargs), x)
    if info.supports_out:

        def into(x: Any, *args: Any) -> Any:
            made = info(x, *args, **sample.kwargs)
            if not isinstance(made, Tensor) or not made.numel():
                return made
            out = torch.zeros_like(made)
            info(x, *args, **sample.kwargs, out=out)
            return out

        yield "out", into


def check(
    rank: int, mesh: str, names: list[str] | None, samples: int, layouts: int
) -> tuple[dict[str, int], list[str]]:
    """How many calls were right and refused, and those that were wrong."""
    where, counts, wrong = distributor(mesh), Counter[str](), []
    warnings.simplefilter("ignore")
    for info in database():
        if names is not None and info.full_name not in names:
            continue
        for number, sample in enumerate(_samples(info, samples)):
            leaves, spec = tree_flatten((sample.input, *sample.args))
            at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]
            if not at or any(leaves[i].numel() > LARGEST for i in at):
                counts["skipped"] += 1
                continue
            choose = random.Random(f"{info.full_name} {number}")
            for kind, function in _variants(info, sample):
                plain = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                wanted, failed = _run(function, tree_unflatten(plain, spec))
                for position in at[:2] if not kind else at[:1]:
                    known = _layouts(leaves[position].shape, where, "pp" in mesh)
                    for layout, home in choose.sample(known, min(layouts, len(known))):
                        mine = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                        mine[position] = where.split(mine[position].contiguous(), layout, home)
                        got, error = _run(function, tree_unflatten(mine, spec))
                        what = f"{info.full_name}{kind} #{number} argument {position} {layout} home {home}"
                        if error is not None and "data is not allocated" in str(error):
                            counts[f"refused by torch {info.full_name}{kind}"] += 1  # it reads numbers in C++
                        elif isinstance(error, AutoparError):
                            counts["refused"] += 1
                            counts[f"refused {info.full_name}{kind}"] += 1
                        elif (error is None) != (failed is None):
                            wrong.append(f"{what}: {error!r:.200} for {failed!r:.100}")
                        elif error is None:
                            with contextlib.suppress(AutoparError):
                                said = _differs(got, wanted, info.name.split(".")[-1] not in UNDEFINED)
                                wrong += [f"{what}: {said}"] if said else []
                                counts["right"] += not said
                        else:
                            counts["both fail"] += 1
    return dict(counts), wrong


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "pp=2,tp=2"])
def test_a_sample_of_the_op_database(four: Ranks, mesh: str) -> None:
    names = [info.full_name for at, info in enumerate(database()) if at % 12 == (3 if "pp" in mesh else 7)]
    counts, wrong = four.run(check, mesh, names, 2, 2, timeout=120)[0]
    print({key: value for key, value in counts.items() if " " not in key})
    assert not wrong, f"{len(wrong)} calls:\n" + "\n".join(wrong)
    assert counts["right"] > 150


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "pp=2,tp=2"])
def test_the_op_database(four: Ranks, mesh: str) -> None:
    counts, wrong = four.run(check, mesh, None, 4, 3, timeout=1800)[0]
    print(counts)
    assert not wrong, f"{len(wrong)} calls:\n" + "\n".join(wrong)
    assert counts["right"] > 5000
