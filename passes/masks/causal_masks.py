"""causal_masks: attention under a mask that hides what lies behind each query is causal, as slices ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.ir.comparisons import All, Comparison, Condition, Some, parse_condition
from autopar.ir.ops.ops import op
from autopar.ir.plan import Plan
from autopar.ir.program import Builder, Program, of_parameters, record
from autopar.passes.collectives.carried import AttentionPlaces, is_causal, places_in
from autopar.passes.masks.mask_conditions import condition_of
from autopar.passes.masks.rowwise import Known

MADE_BY = "causal_masks"
CHECKED = op("checked_causal")


def causal_masks(program: Program, plan: Plan) -> Program:
    """CAPTURED -> CAPTURED. With slices, attention under a causal mask says so; what the batch tells is checked.

        slices: 2
        CAPTURED program
        %q: f32[2,2,6,4] = batch "0"
        %ids: i64[2,1,6,6] = batch "1"
        %lt: b8[2,1,6,6] = aten.lt.Scalar(%ids, 2)
        %mask: b8[2,1,6,6] = aten.tril.default(%lt)
        %a: (f32[2,2,6,4], f32[2,2,6]) = autopar.attention.default(%q, %q, %q, %mask, False, 0.5)
        %out: f32[2,2,6,4] = operator.getitem(%a, 0)
        return value "y" = %out
    becomes
        CAPTURED program
        %q: f32[2,2,6,4] = batch "0"
        %ids: i64[2,1,6,6] = batch "1"
        %lt: b8[2,1,6,6] = aten.lt.Scalar(%ids, 2)
        %mask: b8[2,1,6,6] = aten.tril.default(%lt)
        %checked: b8[2,1,6,6] = autopar.checked_causal.default(%mask, [], [], "")
        %a: (f32[2,2,6,4], f32[2,2,6]) = autopar.attention.default(%q, %q, %q, %checked, True, 0.5)
        %out: f32[2,2,6,4] = operator.getitem(%a, 0)
        return value "y" = %out

    A slice has the keys of those before it alone. A mask that is made without the batch is computed and looked at; one
    that compares positions is known by them (dropout keeps it a tensor all the same). What a parameter has a part in,
    and a mask that no batch makes causal, stays as it is, and is refused where stages are cut.
    """
    if plan.slices == 1:
        return program
    masks = _CausalMasks(Builder(MADE_BY), of_parameters(program))
    return masks.build.rewrite(program, masks.put) if any(map(_masked, program.calls())) else program


def _masked(node: fx.Node) -> AttentionPlaces | None:
    """Where an attention has its arguments, if not it but maybe its mask hides what lies behind each query."""
    places = places_in(node)
    if places is None or is_causal(node, places):
        return None
    q, k = record(node.args[places.k - 1]).type, record(node.args[places.k]).type  # type: ignore[arg-type]
    has_mask = places.vectors is not None or (places.mask is not None and node.args[places.mask] is not None)
    return places if has_mask and q.shape[2] == k.shape[2] > 1 else None


@dataclass(slots=True)
class _CausalMasks:
    """Writes attention under causal masks. weighted: what hangs on a parameter. checked: what a check gives back, by
    what it checks."""

    build: Builder
    weighted: set[fx.Node]
    known: Known = field(default_factory=Known)
    checked: dict[Any, fx.Node] = field(default_factory=dict)

    def put(self, node: fx.Node) -> fx.Node | None:
        places = _masked(node) if node.op == "call_function" else None
        if places is None:
            return None
        args = self._with_mask(node, places) if places.vectors is None else self._with_vectors(node, places.vectors)
        if args is None:
            return None
        args[places.causal] = True
        kwargs: Any = node.kwargs
        return self.build.call(node.target, *args, like=record(node), name=node.name, **kwargs)  # type: ignore[arg-type]

    def _with_mask(self, node: fx.Node, places: AttentionPlaces) -> list[Any] | None:
        """The arguments of an attention whose mask is a tensor; None if it is not causal."""
        args, at = list(self.build.new(node.args)), places.mask
        assert at is not None
        mask: Any = node.args[at]
        if mask in self.weighted or record(mask).type.shape[-2] == 1:
            return None
        if not self._is_known(node, mask, places):
            value = self.known.value(mask)
            if value is not None:
                return args if not _seen_later(value) else None
            args[at] = self._check(mask, (), (), "", node)
        return args

    def _is_known(self, node: fx.Node, mask: fx.Node, places: AttentionPlaces) -> bool:
        """True if a mask is known to be causal by what it compares."""
        b, h, s, _ = record(node.args[places.k - 1]).type.shape  # type: ignore[arg-type]
        found = condition_of(mask, {"b": b, "h": h, "s": s, "t": s}, False, self.known)
        return found is not None and found.causal

    def _with_vectors(self, node: fx.Node, at: tuple[int, int, int]) -> list[Any] | None:
        """The arguments of an attention whose mask is a condition; None if none of its parts may be causal."""
        args = list(self.build.new(node.args))
        given: Any = node.args
        rows, columns, compare = (given[place] for place in at)
        of_batch = {
            f"{side}{i}"
            for side, vectors in (("r", rows), ("c", columns))
            for i, vector in enumerate(vectors)
            if self.known.value(vector) is None
        }
        is_weighted = not self.weighted.isdisjoint([*rows, *columns])
        if is_weighted or not _may_hide_later(parse_condition(compare), of_batch):
            return None
        most = max(rows, key=lambda row: record(row).type.numel)
        checked = self._check(most, rows, columns, compare, node)
        args[at[0]] = [checked if row is most else self.build.value[row] for row in rows]
        return args

    def _check(self, x: fx.Node, rows: Any, columns: Any, compare: Any, user: fx.Node) -> fx.Node:
        """What a check gives back for x; of one mask one."""
        key = x, tuple(rows), tuple(columns), compare
        if key not in self.checked:
            args = self.build.new((x, list(rows), list(columns), compare))
            like = record(user).with_(phase="forward")
            self.checked[key] = self.build.infer(CHECKED, *args, like=like, name="checked")
        return self.checked[key]


def _may_hide_later(condition: Condition, of_batch: set[str]) -> bool:
    """True if what a condition hides may be all that lies behind a query: it asks of each key to be no more than the
    query, in numbers of the batch."""
    match condition:
        case Comparison(column, sign, row):
            return sign in ("<", "<=") and not of_batch.isdisjoint((column, row))
        case All(parts):
            return any(_may_hide_later(part, of_batch) for part in parts)
        case Some(parts):
            return all(_may_hide_later(part, of_batch) for part in parts)
    return False


def _seen_later(mask: torch.Tensor) -> bool:
    """True if a mask lets a query see a key after its own position."""
    seen = mask if mask.dtype == torch.bool else mask > -torch.inf
    return bool(seen.triu(1).any())
