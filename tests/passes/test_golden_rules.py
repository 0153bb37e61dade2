"""How every op of the table may be split, as text: a line for each sample, below the ops that have it.

Brute force (test_rules.py) says that no rule allows too much; these lines say that none allows less than it did. `make
golden` writes them, and the diff is reviewed like code.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from rule_brute_force import Sample, make_call, op_of, sample, tensors_in
from rule_samples_all import every_sample
from torch import fx
from torch.utils._pytree import tree_map_only

from autopar.ir.layout import OWNED, replicated
from autopar.ir.mesh import Mesh
from autopar.ir.ops.fusible import fusible
from autopar.ir.program import Record, TensorType, set_record
from autopar.passes import rules
from autopar.passes.rules import TABLE
from autopar.passes.rules.rule import Call, Rule
from autopar.passes.rules.states import strategies
from autopar.passes.rules.through import Through, resize, takes_each, through

_PLAIN = (bool, int, float, str, tuple, list)
GOLDEN = Path(__file__).resolve().parent / "golden_rules"
KINDS = {kind.__name__.rpartition(".")[2]: kind.ROWS for kind in rules._KINDS}
KINDS["chains"] = {name: row for name, row in TABLE.items() if all(name not in rows for rows in KINDS.values())}


@pytest.fixture(scope="module")
def samples() -> dict[str, list[Sample]]:
    torch.manual_seed(0)
    return every_sample()


@pytest.mark.parametrize("kind", KINDS)
def test_rules_golden(kind: str, samples: dict[str, list[Sample]]) -> None:
    if not torch.__version__.startswith("2.13"):
        pytest.skip("the ops are those of torch 2.13")
    alike = defaultdict[str, list[str]](list)
    for name in KINDS[kind]:
        alike["".join(dict.fromkeys(_lines(name, samples[name])))].append(name)
    path, text = GOLDEN / f"{kind}.txt", "\n".join(f"{' '.join(names)}\n{lines}" for lines, names in alike.items())
    if os.environ.get("AUTOPAR_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


FLAGS, COUNTS = torch.ones(4, 6, dtype=torch.bool), torch.ones(4, 6, dtype=torch.int64)
FUSED = {  # what decides whether a kernel is generated, and no rule
    "aten.pow.Tensor_Scalar": [*(sample(FLAGS.double(), half / 2) for half in range(-6, 11)), sample(COUNTS, 2)],
    "aten.exp.default": [sample(COUNTS)],
    "aten.bitwise_not.default": [sample(FLAGS), sample(COUNTS)],
    "aten.sum.dim_IntList": [sample(FLAGS.double(), -1), sample(FLAGS.double().sum(), [0])],
    "aten.add.Tensor": [sample(FLAGS.to(torch.complex64), 1)],
}


def test_fusible_golden(samples: dict[str, list[Sample]]) -> None:
    """How a kernel would read what a call reads, or that none does."""
    alike = defaultdict[str, list[str]](list)
    for name in (name for name in TABLE if name in samples):
        calls = [make_call(name, one)[0] for one in [*samples[name], *FUSED.get(name, ())]]
        how = [fusible(_node(name, call), Mesh(())) for call in calls]
        if any(how):
            said = ["none" if one is None else f"{one.kind} {one.columns} {one.width}" for one in how]
            lines = (f"    {_called(call)} | {one}\n" for call, one in zip(calls, said, strict=True))
            alike["".join(dict.fromkeys(lines))].append(name)
    path, text = GOLDEN / "fusible.txt", "\n".join(f"{' '.join(names)}\n{lines}" for lines, names in alike.items())
    if os.environ.get("AUTOPAR_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


def test_through_golden(samples: dict[str, list[Sample]]) -> None:
    """How a call takes the rows of each dim of its first operand, whole and inside of two blocks, and with two more."""
    alike = defaultdict[str, list[str]](list)
    for name in (name for name in TABLE if name in samples):
        call = make_call(name, samples[name][0])[0]
        splits = [
            (dim, outer) for dim, _ in enumerate(call.operands[0].shape if call.operands else ()) for outer in (1, 2)
        ]
        lines = [f"    {at} {_taken(through(call, {0: at}, TABLE, count=2))}\n" for at in splits]
        alike[f"    {_called(call)}\n{''.join(lines)}" if lines else ""].append(name)
    alike.pop("", None)
    path, text = GOLDEN / "through.txt", "\n".join(f"{' '.join(names)}\n{lines}" for lines, names in alike.items())
    if os.environ.get("AUTOPAR_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


# Rules of every kind: of products, sums, views, lookups, halos, running sums, attention, what turns or orders rows.
SPLIT = (
    "autopar.einsum.default", "aten.sum.dim_IntList", "aten.amax.default", "aten.view.default", "aten.flip.default",
    "autopar.embedding.default", "autopar.expert_mm.default", "autopar.attention.default", "aten.cumsum.default",
    "aten.convolution.default", "autopar.chain.default", "aten.native_layer_norm.default",
)  # fmt: skip


def test_strategies_golden(samples: dict[str, list[Sample]]) -> None:
    """How calls may be split over two ranks: alone, and where others have split a name before."""
    lines = []
    for name in SPLIT:
        calls = [make_call(name, one)[0] for one in samples[name]]
        rules_ = sorted(((TABLE[name].rule(call), call) for call in calls), key=_is_plain)
        for rule, call in rules_[:3]:
            lines.append(f"\n{name} {_called(call)}")
            outers = {of: {1, 2, -2, 3} for of in rule.names()}
            if rule.owned:
                outers[rule.owned[0]].add(OWNED)
            for way in strategies(rule, outers, 2, ()):
                lines.append(f"    {way.choice or ''} {way.operands} -> {way.results} {way.work:.4g}")
            for before in ((of, outer) for of in rule.names() for outer in sorted(outers[of] - {3})):
                found = [way.choice for way in strategies(rule, outers, 2, ((before, 2),)) if way.choice]
                lines.append(f"    {before}: {' '.join(f'{of}{outer}' for of, outer in found)}")
    path, text = GOLDEN / "strategies.txt", "\n".join(lines) + "\n"
    if os.environ.get("AUTOPAR_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


def _is_plain(one: tuple[Rule, Call]) -> bool:
    return not (one[0].growing or one[0].neighbours or one[0].reversed or one[0].owned)


def test_the_steps_of_a_chain_take_more_rows(samples: dict[str, list[Sample]]) -> None:
    """Red before: of twice the rows the sizes of a step were divided by zero."""
    calls = [make_call("autopar.chain.default", one)[0] for one in samples["autopar.chain.default"]]
    taken = [takes_each(_node(call.op, call), {0: (0, 1)}, TABLE) for call in calls]
    assert taken == [not isinstance(through(call, {0: (0, 1)}, TABLE), str) for call in calls] and any(taken)


def _taken(found: Through | str) -> str:
    if isinstance(found, str):
        return found
    more = resize(found, 2, 4)
    terms = f" adds up {_sorted(found.terms) if found.terms else 'what is no sum'}" if found.adds_up else ""
    return f"{found.operands} -> {found.results}{terms}; {_types(more.types)}"


def _node(name: str, call: Call) -> fx.Node:
    """A call of a program whose operands are inputs."""
    graph = fx.Graph()

    def given(tensor: torch.Tensor) -> fx.Node:
        node = graph.placeholder("x")
        set_record(node, Record((TensorType(tuple(tensor.shape), tensor.dtype),), layouts=(replicated(tensor.ndim),)))
        return node

    args, kwargs = tree_map_only(torch.Tensor, given, (call.args, dict(call.kwargs)))
    node = graph.create_node("call_function", op_of(name), args, kwargs)
    layouts = tuple(replicated(len(type_.shape)) for type_ in call.results)
    set_record(node, Record(call.results, several=len(call.results) > 1, layouts=layouts))
    return node


def _lines(name: str, samples: list[Sample]) -> Iterator[str]:
    for one in samples:
        call, _, _ = make_call(name, one)
        yield f"    {_called(call)} | {_shown(TABLE[name].rule(call))}\n"


def _called(call: Call) -> str:
    return f"{_types(call.operands)} -> {_types(call.results)} {_rest(call)}".strip()


def _types(types: tuple[TensorType, ...]) -> str:
    return ", ".join(f"{list(type_.shape)}".replace(" ", "") for type_ in types)


def _rest(call: Call) -> str:
    """The arguments that are no tensors, and say which rule it is."""
    others = [f"{arg}" for arg in call.args if isinstance(arg, _PLAIN) and not tensors_in([arg])]
    named = [f"{key}={arg}" for key, arg in call.kwargs.items() if isinstance(arg, _PLAIN)]
    return " ".join([*others, *named])


def _shown(rule: Rule) -> str:
    """Names of dims, sizes, and all else that is not as in most rules."""
    operands, results = (", ".join(map(_dims, side)) for side in (rule.operands, rule.results))
    sizes = " ".join(f"{name}={size}" for name, size in rule.sizes.items())
    rest = [f"{field.name}={_sorted(value)}" for field in fields(Rule)[3:] if (value := getattr(rule, field.name))
            != field.default]  # fmt: skip
    return " ".join([f"{operands} -> {results}; {sizes};", *rest])


def _dims(dims: Any) -> str:
    return "[" + " ".join("(" + " ".join(names) + ")" if len(names) != 1 else names[0] for names in dims) + "]"


def _sorted(value: Any) -> str:
    if isinstance(value, frozenset):
        return "{" + ",".join(sorted(map(str, value))) + "}"
    return "(" + ", ".join(map(_sorted, value)) + ")" if isinstance(value, tuple) else str(value)
