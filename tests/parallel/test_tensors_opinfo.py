"""Every op of torch's own database on tensors of every layout: one device's result, or an AutoparError; never wrong.

Each tensor of a sample's arguments is put in some layout, in turn, then all of them at once; the functional, the
in-place and the out= variant and the gradient are compared with the plain ones on the same values. The lists of
`_foreach_*`, which optimizers on a GPU call, are among the ops. A sample of the database runs here, all of it, part by
part, as slow tests: `pytest -m slow -s tests/parallel/test_tensors_opinfo.py` prints which ops are right and which are
refused.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
from autopar.parallel.weights.distribute import Distributor
from autopar.torch_compat import tree_flatten, tree_unflatten

pytestmark = pytest.mark.gloo
LARGEST = 600  # elements of one tensor
PARTS = 8  # of the database, each a test
# Slow, or of tensors that are not dense.
SKIPPED = ("jiterator", "sparse", "_refs", "ops.nvprims", "torch_", "masked.", "linalg.lstsq", "svd_lowrank", "pca")
# Whose values nobody defines.
UNDEFINED = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")
# torch gives its `out` another tensor, where any operand is of a subclass; what is returned is right.
FAULTS_OF_TORCH = ("linalg.matrix_rank out",)
# What an op may do with the tensors of a parallel model, the best first. An op is what its worst call is.
VERDICTS = ("right", "fails as on one device", "refused", "refused by torch", "raw error", "wrong")
Verdict = tuple[str, str]  # and what is said of it


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with ranks_of(4) as ranks:
        yield ranks


def database() -> list[Any]:
    name = "torch.testing._internal.common_methods_invocations"
    found = pytest.importorskip(name, reason="PyTorch's op database needs expecttest", exc_type=ImportError)
    lists = [getattr(found, f"foreach_{kind}_op_db") for kind in ("unary", "binary", "pointwise", "reduce", "other")]
    return [info for info in sum(lists, list(found.op_db)) if not info.name.startswith(SKIPPED)]


def _samples(info: Any, count: int) -> list[Any]:
    dtype = next((d for d in (torch.float64, torch.int64, torch.bool, torch.complex128) if d in info.dtypes), None)
    if dtype is None:
        return []
    torch.manual_seed(0)
    random.seed(0)
    few = {"num_input_tensors": [4]} if info.name.startswith("_foreach") else {}
    try:
        return list(islice(info.sample_inputs_func(info, "cpu", dtype, False, **few), count))
    except Exception:  # the database's own
        return []


def _layouts(shape: torch.Size, where: Distributor, owners: bool) -> list[tuple[Layout, int | None]]:
    """Layouts that a tensor of a shape may have, those without padding and those of ZeRO."""
    found: list[tuple[Layout, int | None]] = []
    factors: list[tuple[Any, ...]] = [("tp", "dp"), ("dp", "tp"), ("tp",), ("dp",), (2, "tp"), (3, "tp", "dp")]
    for dim, size in enumerate(shape):
        for factor in factors:
            if owners and "dp" in factor:
                continue
            layout = Layout(tuple(factor if d == dim else () for d in range(len(shape))))
            uneven = len(factor) == 1 and size >= 2
            if uneven or (size and fits((size,), Layout((factor,)), where.mesh)):
                found.append((layout, 1 if owners else None))
    return [*found, (Layout(((),) * len(shape)), 1 if owners else None)]


def _run(function: Callable[..., Any], args: Any) -> tuple[Any, Exception | None]:
    torch.manual_seed(7)
    random.seed(7)
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


# -- the variants of an op ------------------------------------------------------------------------------------------


def _into(info: Any, x: Any, args: Any, kwargs: Any) -> Any:
    made = info(x, *args, **kwargs)
    if not isinstance(made, Tensor) or not made.numel():
        return made
    out = torch.zeros_like(made)
    info(x, *args, **kwargs, out=out)
    return out


def _gradients(info: Any, x: Any, args: Any, kwargs: Any) -> Any:
    """The gradients of a number that every result is part of, each weighed by its place."""
    wanted = [leaf for leaf in tree_flatten((x, args, kwargs))[0] if _is_real(leaf)]
    with torch.enable_grad():
        for leaf in wanted:
            leaf.requires_grad_()
        made = tree_flatten(info(x, *args, **kwargs))[0]
        outs = [out for out in made if _is_real(out) and out.requires_grad]
        if not outs:
            return None
        total = sum(
            (out * torch.linspace(1.0, 2.0, out.numel()).reshape(out.shape).to(out.dtype)).sum() for out in outs
        )
        return torch.autograd.grad(total, wanted, allow_unused=True)


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _variants(info: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Name and function of (first argument, the others, options)."""
    yield "", lambda x, args, kwargs: info(x, *args, **kwargs)
    if info.inplace_variant is not None:
        yield "_", lambda x, args, kwargs: (info.inplace_variant(x, *args, **kwargs), x)
    if info.supports_out and not info.name.startswith("_foreach"):
        yield "out", lambda x, args, kwargs: _into(info, x, args, kwargs)
    if info.supports_autograd and info.name.split(".")[-1] not in UNDEFINED:
        yield "gradient", lambda x, args, kwargs: _gradients(info, x, args, kwargs)


# -- the calls ------------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """What each op did, by verdict; and what is said of the calls that are wrong."""

    ops: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    faults: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)  # of refusals, by op

    def add(self, op: str, call: str, verdict: Verdict) -> None:
        self.ops[op][verdict[0]] += 1
        if verdict[0] in ("wrong", "raw error"):
            self.faults.append(f"{call}: {verdict[0]}: {verdict[1]}")
        elif verdict[1]:
            self.reasons[op] = verdict[1]

    def calls(self, verdict: str) -> int:
        return sum(counts[verdict] for counts in self.ops.values())

    def __str__(self) -> str:
        worst: dict[str, list[str]] = defaultdict(list)
        for op, counts in self.ops.items():
            worst[max(counts, key=VERDICTS.index)].append(op)
        lines = [f"{len(self.ops)} ops, {sum(map(self.calls, VERDICTS))} calls"]
        for verdict in VERDICTS:
            named = f": {', '.join(sorted(worst[verdict]))}" if verdict != "right" and worst[verdict] else ""
            lines.append(f"  {verdict}: {self.calls(verdict)} calls; {len(worst[verdict])} ops{named}")
        return "\n".join([*lines, *(f"    {op}: {reason}" for op, reason in self.reasons.items())])


def _verdict(got: Any, error: Exception | None, wanted: Any, failed: Exception | None, defined: bool) -> Verdict:
    if error is not None and "data is not allocated" in str(error):
        return "refused by torch", str(error).splitlines()[0]  # it reads numbers in C++
    if isinstance(error, AutoparError):
        return "refused", f"{error!s:.120}"
    if error is not None:
        return ("fails as on one device", "") if failed else ("raw error", f"{error!r:.300}")
    if failed is not None and _fails(got):
        return "fails as on one device", ""
    if failed is not None:
        return "wrong", f"no error, but on one device {failed!r:.200}"
    try:
        said = _differs(got, wanted, defined)
    except AutoparError as refused:
        return "refused", f"{refused!s:.120}"
    return ("wrong", said) if said else ("right", "")


def _fails(value: Any) -> bool:
    """Whether a view, which is read when it is used, cannot be."""
    try:
        _whole(value)
    except RuntimeError:
        return True
    return False


def _placings(
    leaves: Sequence[Any], where: Distributor, owners: bool, count: int, choose: random.Random
) -> Iterator[dict[int, tuple[Layout, int | None]]]:
    """Where to put which of the leaves: one of them, in some layouts; then all of them."""
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    known = {i: _layouts(leaves[i].shape, where, owners) for i in at}
    for i in at[:2]:
        for chosen in choose.sample(known[i], min(count, len(known[i]))):
            yield {i: chosen}
    if len(at) > 1:
        yield {i: choose.choice(known[i]) for i in at}


def _copies(leaves: Sequence[Any]) -> list[Any]:
    contiguous = torch.contiguous_format
    return [leaf.detach().clone(memory_format=contiguous) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _check_sample(
    info: Any, number: int, sample: Any, where: Distributor, owners: bool, count: int, report: Report
) -> None:
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors or any(leaf.numel() > LARGEST or leaf.layout is not torch.strided for leaf in tensors):
        return
    choose = random.Random(f"{info.full_name} {number}")
    defined = info.name.split(".")[-1] not in UNDEFINED
    for kind, function in _variants(info):
        if f"{info.name} {kind}" in FAULTS_OF_TORCH:
            continue
        plain = _copies(leaves)
        wanted, failed = _run(function, tree_unflatten(plain, spec))
        for placing in _placings(leaves, where, owners, count if not kind else 1, choose):
            mine = _copies(leaves)
            for i, (layout, owner) in placing.items():
                mine[i] = where.split(mine[i], layout, owner)
            got, error = _run(function, tree_unflatten(mine, spec))
            shown = ", ".join(f"{i} {layout}" + f" owner {h}" * (h is not None) for i, (layout, h) in placing.items())
            call = f"{info.full_name}{' ' * (kind != '_')}{kind} #{number} with {shown}"
            report.add(
                f"{info.name}{' ' * (kind != '_')}{kind}".strip(), call, _verdict(got, error, wanted, failed, defined)
            )


def check(rank: int, mesh: str, names: Sequence[str], samples: int, layouts: int) -> Report:
    """What the calls of some ops of the database did."""
    where, report = distributor(mesh), Report()
    warnings.simplefilter("ignore")
    for info in database():
        if info.full_name in names:
            for number, sample in enumerate(_samples(info, samples)):
                _check_sample(info, number, sample, where, "pp" in mesh, layouts, report)
    report.ops = dict(report.ops)
    return report


def _looked_at(four: Ranks, mesh: str, names: Sequence[str], samples: int, layouts: int, timeout: float) -> Report:
    report: Report = four.run(check, mesh, names, samples, layouts, timeout=timeout)[0]
    print(f"\n{report}")
    assert not report.faults, f"{len(report.faults)} calls:\n" + "\n".join(report.faults)
    return report


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "pp=2,tp=2"])
def test_a_sample_of_the_op_database(four: Ranks, mesh: str) -> None:
    every, first = (16, 3) if "pp" in mesh else (28, 7)
    names = [info.full_name for at, info in enumerate(database()) if at % every == first]
    report = _looked_at(four, mesh, names, 1, 2, timeout=120)
    assert report.calls("right") > 90


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "pp=2,tp=2"])
def test_the_op_database(four: Ranks, mesh: str, part: int) -> None:
    names = [info.full_name for info in database()][part::PARTS]
    report = _looked_at(four, mesh, names, 4, 2, timeout=900)
    assert report.calls("right") > 700
