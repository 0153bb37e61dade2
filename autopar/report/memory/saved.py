"""List the activations that a rank keeps for the backward pass, and those that it recomputes, with the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from autopar.ir.modules import any_layer
from autopar.ir.ops.measure import human, local_bytes
from autopar.ir.ops.ops import is_collective, op_name
from autopar.ir.ops.storage import is_view, kept_values
from autopar.ir.program import Program, is_getitem, record
from autopar.ir.text.text_tables import table_text


@dataclass(frozen=True, slots=True)
class Saved:
    """A value of the forward pass that the backward pass reads. bytes: of a rank's part, of one micro-batch. value: its
    node. why: what reads it, and if it is what no budget computes again."""

    value: str
    op: str
    bytes: int
    module: str
    source: str
    why: str


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A call of the forward pass that the backward pass makes once more. bytes: of its results, which are not kept.
    flops: of the whole call, if it is a product. why: the policy."""

    value: str
    op: str
    bytes: int
    flops: int
    module: str
    source: str
    why: str


def saved_values(program: Program) -> tuple[Saved, ...]:
    """What is kept under a LOCAL program, in the order of its first use. Views are no values of their own."""
    return tuple(
        Saved(
            node.name,
            _op(node),
            local_bytes(node, program.mesh),
            record(node).module,
            record(node).source,
            _why(node, users),
        )
        for node, users in kept_values(program).items()
    )


def recomputed_values(program: Program) -> tuple[Recomputed, ...]:
    """What the backward pass of a LOCAL program computes again, in its order. Views take no time and are left out."""
    return tuple(
        Recomputed(
            node.name, _op(node), local_bytes(node, program.mesh), record(node).flops, record(node).module,
            record(node).source, record(node).reason,
        )
        for node in program.calls()
        if record(node).made_by == "recompute" and not is_view(node) and not is_getitem(node)
    )  # fmt: skip


def saved_text(program: Program) -> str:
    """Both as tables, the largest first; equal layers share a line."""
    saved, again = saved_values(program), recomputed_values(program)
    parts = [f"{human(sum(row.bytes for row in saved))} saved for the backward pass"]
    if saved:
        parts.append(_table(saved))
    if again:
        flops = sum(row.flops for row in again)
        parts.append(f"\n{human(sum(row.bytes for row in again))} computed again, {flops:.3g} FLOPs in products")
        parts.append(_table(again))
    return "\n".join(parts)


def _table(rows: Sequence[Saved | Recomputed]) -> str:
    alike: dict[tuple[object, ...], list[Saved | Recomputed]] = {}
    for row in rows:
        key = (row.op, row.bytes, any_layer(row.module), row.source, any_layer(row.why))
        alike.setdefault(key, []).append(row)
    lines = []
    for same in sorted(alike.values(), key=lambda found: -len(found) * found[0].bytes):
        first, times = same[0], len(same)
        size = human(times * first.bytes)
        lines.append((size, f"{times}x", f"%{first.value}", first.op, first.module, first.source, first.why))
    return table_text(("bytes", "times", "value", "op", "module", "source", "why"), lines)


def _op(node: fx.Node) -> str:
    if is_getitem(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return f"{_op(source)}[{node.args[1]}]"
    return op_name(node.target)


def _why(node: fx.Node, users: Sequence[fx.Node]) -> str:
    source = node.args[0] if is_getitem(node) else node
    assert isinstance(source, fx.Node)
    kind = "a product, " if record(source).flops else "a collective, " if is_collective(source.target) else ""
    readers = dict.fromkeys(
        f"{_op(user)} again" if record(user).made_by == "recompute" else _op(user) for user in users
    )
    return f"{kind}read by {', '.join(readers)}"
