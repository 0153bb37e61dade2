"""Tell what the last training step did: how many rows the experts of each layer took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autopar.errors import BatchError
from autopar.ir.mesh import PIPELINE
from autopar.ir.program import record
from autopar.parallel.programs.running import Running
from autopar.parallel.session.session import Session
from autopar.runtime.collectives.mesh_ops import axis_coord
from autopar.runtime.collectives.rows_to_owners import bound_of, check_bound, rows_of_experts
from autopar.runtime.executor.executor import at_call

_Layer = tuple[int, str, str]  # its place in the program, the module and the axis over which experts are split


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The rows that the experts of a layer took in a step. axis: over which experts are split. by_expert: those of the
    whole batch. by_rank: what each part of the experts was given, by each group of ranks that has all of them."""

    module: str
    axis: str
    by_expert: tuple[int, ...]
    by_rank: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """How many times the mean the busiest rank has: 1.0 where all have as many."""
        mean = sum(self.by_rank) / len(self.by_rank)
        return max(self.by_rank) / mean if mean else 1.0

    def __str__(self) -> str:
        return f"{self.module}  imbalance over {self.axis} {self.imbalance:.2f}  rows " + " ".join(
            map(str, self.by_expert)
        )


@dataclass(frozen=True, slots=True)
class LastStep:
    """The figures of a step. experts: of each layer whose experts an axis splits, in the order of the program."""

    experts: tuple[ExpertRows, ...]

    @property
    def imbalance(self) -> dict[str, float]:
        """The imbalance of each layer, by its module."""
        return {layer.module: layer.imbalance for layer in self.experts}

    def __str__(self) -> str:
        return "\n".join(map(str, self.experts)) or "no axis splits experts"


def last_step(running: Running, session: Session) -> LastStep:
    """Join what the ranks counted. Every rank must call this."""
    everyone: list[dict[_Layer, tuple[int, list[int]]]] = session.agreement.everyone("rows", _own(running, session))
    layers: dict[_Layer, list[tuple[int, list[int]]]] = defaultdict(list)
    for told in everyone:
        for layer, counts in told.items():
            layers[layer].append(counts)
    return LastStep(tuple(_joined(layer, parts) for layer, parts in sorted(layers.items())))


def _own(running: Running, session: Session) -> dict[_Layer, tuple[int, list[int]]]:
    """For each layer this rank's place among the owners of its experts, and how many rows came to each of its experts;
    nothing where another rank tells the same."""
    places = {node.name: place for place, node in enumerate(running.compiled.program.graph.nodes)}
    coord, mesh = session.store.distributor.coord, running.compiled.program.mesh
    found: dict[_Layer, tuple[int, list[int]]] = {}
    for node, counts in running.runner.routed:
        apart, axis = record(node).layout.axes, str(node.args[1])
        if any(place and name != PIPELINE and name not in apart for name, place in coord.items()):
            continue
        rows = rows_of_experts(node, counts)
        came = rows[rows.shape[0] // 2 :].sum(0).tolist()
        layer = places.get(node.name, -1), record(node).module, axis
        before = found.get(layer, (0, [0] * len(came)))[1]  # of earlier micro-batches
        found[layer] = axis_coord(mesh, coord, axis), [a + b for a, b in zip(before, came, strict=True)]
    return found


def _joined(layer: _Layer, parts: list[tuple[int, list[int]]]) -> ExpertRows:
    totals: dict[int, list[int]] = {}
    for place, came in parts:
        totals[place] = [a + b for a, b in zip(totals.get(place, [0] * len(came)), came, strict=True)]
    by_expert = [rows for place in sorted(totals) for rows in totals[place]]
    return ExpertRows(layer[1], layer[2], tuple(by_expert), tuple(sum(came) for _, came in sorted(parts)))


# -- rows that a bound has no room for --------------------------------------------------------------------------------


def check_rows(running: Running, session: Session) -> None:
    """Raise BatchError on every rank if more rows went to a rank's experts than `expert_rows` has room for, or to one
    that does not exist. Every rank must call this; there is one read of the device."""
    coord, fault = session.store.distributor.coord, ""
    routes = [(node, counts) for node, counts in running.runner.routed if bound_of(node)]
    for (route, _), table in zip(routes, _on_host([counts for _, counts in routes]), strict=True):
        try:
            check_bound(route, table, axis_coord(running.compiled.mesh, coord, str(route.args[1])))
        except BatchError as error:
            fault = fault or str(at_call(error, route))
    if session.agreement.any("rows of experts", bool(fault)):
        told: list[str] = session.agreement.everyone("rows of experts", fault)
        first = next(text for text in told if text)
        raise BatchError(f"{first} No gradient was added, and no weight was changed.")


def _on_host(tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors on the host, by one copy."""
    if not tables:
        return []
    flat = torch.cat([table.reshape(-1) for table in tables]).cpu()
    parts = flat.split([table.numel() for table in tables])
    return [part.view(table.shape) for part, table in zip(parts, tables, strict=True)]
