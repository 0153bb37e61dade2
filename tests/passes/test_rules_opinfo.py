"""Rules and aliasing against the inputs of PyTorch's own op database, which nobody here wrote.

Every op of the database runs forward and backward; each aten call that it makes and that has a row is brute-forced. Of
every call, with a row or without, it is seen whether its results lie in its operands. What has no rule is the table of
docs/rules.md, neither more nor less.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
from conftest import ROOT
from rule_brute_force import Sample, check, tensors_in, with_tensors
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.ops.canonical import view_of_copy
from autopar.capture.ops.decompositions import decompositions
from autopar.ir.ops.op_facts import is_fresh
from autopar.passes.rules import TABLE

SAMPLES_PER_OP = 6  # inputs taken of each op of the database
CALLS_PER_ROW = 14  # different calls checked of each row
LARGEST = 4096  # elements of one tensor
SAMPLES_OF_SLOW = 2
SLOW = ("linalg", "jiterator", "ops.nvprims", "svd", "torch_", "_refs", "sparse", "cdist", "ldl", "lu_", "masked.")
# Their results are not determined: what memory held.
UNDETERMINED = ("aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default")
Calls = dict[str, dict[str, Sample]]


class _Log(TorchDispatchMode):
    """Remembers the calls of ops that have a row, each kind once, as they were before anything changed in place."""

    def __init__(self, found: Database) -> None:
        super().__init__()
        self.calls, self.skipped, self.fresh, self.others = found.calls, found.skipped, found.fresh, found.others

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        if name in TABLE:
            known = self.calls.setdefault(name, {})
            tensors = tensors_in([args, kwargs])
            if any(t.numel() > LARGEST or t.layout != torch.strided or t.is_quantized for t in tensors):
                self.skipped["large, sparse or quantised"] += 1
            elif any(t.dtype in (torch.bfloat16, torch.float16) for t in tensors):
                self.skipped["short floats, whose pieces add up to others"] += 1
            elif len(known) >= CALLS_PER_ROW:
                self.skipped["more of the same op"] += 1
            else:
                key = repr(with_tensors([args, kwargs], [_Shape(t) for t in tensors]))
                if key not in known:
                    copies = with_tensors([args, kwargs], [t.detach().clone() for t in tensors])
                    known[key] = Sample(*copies, compare=name not in UNDETERMINED)
        else:
            self.skipped["no row"] += 1
            self.others[name] = func
        result = func(*args, **kwargs)
        if is_fresh(func):
            self.fresh[name] = self.fresh.get(name, True) and not _memory([args, kwargs]) & _memory([result])
        return result


def _memory(value: Any) -> set[int]:
    """Where the tensors in a value lie, those without elements left out."""
    strided = (t for t in tensors_in([value]) if t.layout == torch.strided)
    return {t.untyped_storage().data_ptr() for t in strided} - {0}


class _Shape:
    """Stands for a tensor in the key of a call."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.text = f"{tensor.dtype}{list(tensor.shape)}"

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Database:
    """The calls of ops with a row, what was left out, of each op that `is_fresh` whether it was, and the ops that have
    no row."""

    calls: Calls
    skipped: Counter[str]
    fresh: dict[str, bool]
    others: dict[str, Any]


@pytest.fixture(scope="module")
def database() -> Database:
    torch.manual_seed(0)
    found = Database({}, Counter(), {}, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _run_database(found)
    return found


def _run_database(found: Database) -> None:
    skipped = found.skipped
    for info in _infos():
        count = SAMPLES_OF_SLOW if info.name.startswith(SLOW) else SAMPLES_PER_OP
        for one in islice(_samples(info, skipped), count):
            with _Log(found):
                try:
                    out = info(one.input, *one.args, **one.kwargs)
                    losses = [t.sum() for t in tensors_in([out]) if t.requires_grad and not t.is_complex()]
                    if losses:
                        torch.stack(losses).sum().backward()
                except Exception as error:  # what fails without us is counted, not judged
                    skipped[f"the op itself fails: {type(error).__name__}"] += 1


def _samples(info: Any, skipped: Counter[str]) -> Iterator[Any]:
    dtype = next((d for d in (torch.float64, torch.int64) if d in info.dtypes), None)
    if dtype is None:
        skipped["neither float64 nor int64"] += 1
        return
    grad = dtype is torch.float64 and info.supports_autograd
    try:
        yield from info.sample_inputs_func(info, "cpu", dtype, grad)  # `sample_inputs` reads the whole stack each time
    except (RuntimeError, TypeError, ValueError, ImportError) as error:
        skipped[f"no samples: {type(error).__name__}"] += 1


def test_what_is_fresh_shares_no_memory_in_the_op_database(database: Database) -> None:
    print(f"\n{len(database.fresh)} ops, {len(set(database.fresh) - set(TABLE))} of them without a row")
    assert [name for name, was in sorted(database.fresh.items()) if not was] == []
    assert len(database.fresh) > 400


APART = """
    addbmm addmm addr block_diag count_nonzero diag_embed dist linalg.cross linalg.det linalg.slogdet linalg.solve
    linalg.solve_ex linalg.tensorsolve linalg.vector_norm logdet mean nansum narrow_copy norm rot90 trace _chunk_cat
    nn.functional.channel_shuffle nn.functional.pixel_shuffle nn.functional.pixel_unshuffle
"""


@pytest.mark.parametrize("name", APART.split())
def test_what_is_taken_apart_computes_the_same(name: str) -> None:
    """Values and gradients, of matrices that lie in memory either way; what torch saves for a gradient included."""
    torch.manual_seed(0)
    samples = (one for info in _infos() if info.name == name for one in islice(_samples(info, Counter()), 8))
    count = 0
    for one in samples:
        for turned in (False, True):
            count += _compare_apart(one, lambda x, turned=turned: _turned(x) if turned else x, name)
    assert count


def _turned(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT if x.ndim > 1 else x


def _compare_apart(one: Any, lie: Any, name: str) -> int:
    info = next(info for info in _infos() if info.name == name)
    given = [lie(t.detach().clone()) for t in tensors_in([one.input, one.args, one.kwargs])]

    def run(*values: torch.Tensor) -> list[torch.Tensor]:
        leaves = [v.detach().requires_grad_(v.is_floating_point() and info.supports_autograd) for v in values]
        input_, args, kwargs = with_tensors([one.input, list(one.args), dict(one.kwargs)], leaves)
        out = [t for t in tensors_in([info(input_, *args, **kwargs)]) if t.is_floating_point() or not t.requires_grad]
        loss = [(t * t).sum() for t in out if t.requires_grad]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = torch.autograd.grad(sum(loss), wanted, allow_unused=True) if loss and wanted else ()
        return [*(t.detach() for t in out), *(t for t in found if t is not None)]

    want = run(*given)
    made = make_fx(run, decomposition_table=dict(decompositions()), tracing_mode="real")(*given)
    for got, expected in zip(made(*given), want, strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True, rtol=1e-9, atol=1e-9)
    return 1


@cache
def _infos() -> tuple[Any, ...]:
    module = pytest.importorskip(
        "torch.testing._internal.common_methods_invocations",
        reason="PyTorch's op database needs the package expecttest",
        exc_type=ImportError,
    )
    return tuple(module.op_db)


def _functional(name: str) -> list[str]:
    """The op that a capture writes for one that writes in place, or into a tensor that it is given."""
    namespace, base, overload = name.split(".")
    if base.endswith("_") and not base.endswith("__"):
        return [f"{namespace}.{base[:-1]}.{overload}", f"{namespace}.{base[:-1]}s_like.default"]
    of_base = [known for known in TABLE if known.startswith(f"{namespace}.{base}.")]
    return of_base if overload == "out" else []


def _ruleless(database: Database) -> set[str]:
    """The ops of the database of which the programs would compute the whole."""
    apart = {str(op) for op in decompositions()}
    known = {*TABLE, *apart}
    return {
        name
        for name, op in database.others.items()
        if not known & {name, str(view_of_copy(op)), *_functional(name)}
    }  # fmt: skip


def _full(name: str) -> str:
    return name if name.count(".") == 2 else f"aten.{name}"


def test_what_has_no_rule_is_in_the_docs_with_the_reason(database: Database) -> None:
    text = (ROOT / "docs" / "rules.md").read_text()
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", text, re.MULTILINE)[1:]
    told = {_full(name): why for names, why in rows for name in re.findall(r"`([\w.]+)`", names)}
    found = _ruleless(database)
    assert found - set(told) == set()
    if torch.__version__.startswith("2.13"):  # another version calls others
        newer = {name for name, why in told.items() if why.startswith("from torch 2.15 on")}
        assert set(told) - found - newer == set()
    assert all(len(why) > 20 for why in told.values())


def test_rows_hold_on_the_op_database(database: Database) -> None:
    calls, skipped = database.calls, database.skipped
    total: Counter[str] = Counter()
    wrong = []
    for name, samples in sorted(calls.items()):
        for key, one in samples.items():
            try:
                found = check(name, one, counts=(2, 3, 5), outers=(1,), pairs=False)
            except Exception as error:  # a wrong rule, or one that does not fit the call: all of them are wanted
                wrong.append(f"{name} {key}: {type(error).__name__}: {error}"[:400])
                continue
            total.update(calls=1, splits=found.splits, linear=found.linear)
            total["calls in which something was split"] += found.splits > 0
    print(f"\n{len(calls)} of {len(TABLE)} rows; {dict(total)}; skipped: {dict(skipped)}")
    assert not wrong, f"{len(wrong)} calls:\n" + "\n".join(wrong)
    assert len(calls) > 250 and total["splits"] > 3000
