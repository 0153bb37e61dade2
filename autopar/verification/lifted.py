"""The programs of a short float in float64: what the passes did to the captured program, exactly.

A short float hides what is wrong by less than its resolution: a lost sum of terms that nearly cancel, a factor of 1.01.
So the emitted programs run once more with every float as float64, beside the captured program on one device. Both have
the constants that the model read in the short float (an epsilon, the least value of a mask), so that they are equal but
for rounding of float64, if the passes kept the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from autopar.capture.inputs.containers import map_batch
from autopar.compiler.lowered import Lowered
from autopar.ir.layout import replicated
from autopar.ir.mesh import DATA_AXES, Mesh
from autopar.ir.ops.unfused import unfused
from autopar.ir.pipeline import Pipeline
from autopar.ir.plan import Plan
from autopar.ir.program import Program, Record, TensorType, record, set_record
from autopar.verification.copies import copied
from autopar.verification.dtypes import cast, module_in
from autopar.verification.judge.comparison import Table, Values
from autopar.verification.judge.noise import Limits, Trained
from autopar.verification.places import Batches, Made
from autopar.verification.plain import OptimizerFactory, steps_of
from autopar.verification.versions import Versions
from autopar.verification.virtual_side import Virtual

EXACT = torch.float64


def lifted(made: Made) -> Made:
    """A program that computes in float64 throughout, with its constants."""
    captured, compiled = made
    program = _lifted(compiled.grouped or compiled.history[0][1])
    constants = {name: cast(value, EXACT) for name, value in captured.constants.items()}
    pipeline = compiled.pipeline and _pipeline(compiled.pipeline)
    history = (("capture", compiled.program), ("lifted", _lifted(compiled.program)))
    return replace(captured, program=program, constants=constants), replace(
        compiled, history=history, pipeline=pipeline
    )


def all_lifted(model: nn.Module, programs: Sequence[Made], batches: Batches) -> tuple[nn.Module, list[Made], Batches]:
    """What is trained in float64: a copy of the model, the program of each place (those that places share stay one),
    and the batches."""
    found = {id(compiled): lifted((captured, compiled)) for captured, compiled in programs}
    batches = map_batch(partial(cast, dtype=EXACT), batches)
    return module_in(copied(model), EXACT), [found[id(compiled)] for _, compiled in programs], batches


def _on_one_device(programs: Sequence[Made]) -> list[Made]:
    """The captured programs of places, as programs of a device each."""
    plan = Plan(Mesh(((DATA_AXES[0], len(programs)),)))
    whole = {
        id(captured): (captured, Lowered(plan, (("capture", _replicated(captured.program)),)))
        for captured, _ in programs
    }
    return [whole[id(captured)] for captured, _ in programs]


class Single:
    """The captured programs on one device, in place of the plain module; those of places on a device each. versions:
    of lifted ones."""

    note, short = "", None

    def __init__(self, model: nn.Module, versions: Versions, make: OptimizerFactory) -> None:
        single = versions.mapped(_on_one_device)
        first, *others = single.known[0]
        self.again = partial(Single, versions=versions, make=make)
        self.side = Virtual(copied(model), *first, make, None, others, single)
        self.dtype, self.table, self.limits = EXACT, Table.of(EXACT), Limits.of(EXACT)

    def step(self, batches: Batches, seed: torch.Tensor) -> Values:
        """What the captured programs give."""
        return self.side.step_on(batches, seed)

    def begin(self, values: Values) -> None:
        """Take the weights and buffers that a step gave in place of one's own."""
        self.side.begin(values)

    def compare(self, expected: Values, given: Values, replicas: Mapping[tuple[str, str], float]) -> None:
        """Enter a step in the table."""
        self.table.compare(expected, given, replicas)

    def trained(
        self, model: nn.Module, batches: Batches, seeds: Sequence[torch.Tensor], steps: Sequence[Values],
        is_stepwise: bool = False,
    ) -> Trained:  # fmt: skip
        """Train as `Reference.trained` does."""

        def again(change: Callable[[nn.Module], None], _: bool) -> list[Values]:
            changed = copied(model)
            change(changed)
            return steps_of(self.again(changed), batches, seeds, steps if is_stepwise else ())

        return Trained(self.table, steps, again, self.limits)


def _pipeline(pipeline: Pipeline) -> Pipeline:
    return pipeline.with_(
        graphs={key: _lifted(program) for key, program in pipeline.graphs.items()},
        sized={
            length: {key: _lifted(program) for key, program in graphs.items()}
            for length, graphs in pipeline.sized.items()
        },
    )


def _lifted(program: Program) -> Program:
    """Lift a program to float64 for every float, in groups of calls as well: these run one by one."""
    graph, became = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in unfused(program.graph).graph.nodes:
        made = became[node] = graph.node_copy(node, became.__getitem__)
        made.args, made.kwargs = fx.node.map_aggregate((made.args, made.kwargs), _exact)  # type: ignore[assignment]
        set_record(made, _typed(record(node)))
    return program.with_(graph=graph)


def _typed(known: Record) -> Record:
    return known.with_(types=tuple(one and _type(one) for one in known.types))


def _type(one: TensorType) -> TensorType:
    return replace(one, dtype=_exact(one.dtype))


def _exact(value: Any) -> Any:
    """A dtype that holds what a float or complex number of any length does; anything else as it is."""
    if not isinstance(value, torch.dtype):
        return value
    return EXACT.to_complex() if value.is_complex else EXACT if value.is_floating_point else value


def _replicated(program: Program) -> Program:
    """A captured program whose inputs and outputs are whole on every rank."""
    graph, became = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in program.graph.nodes:
        made = became[node] = graph.node_copy(node, became.__getitem__)
        known = record(node)
        if node.op == "output":
            ndims = [0 if value is None else len(record(value).type.shape) for value in program.results]
            set_record(made, known.with_(operands=tuple(map(replicated, ndims))))
        elif node.op == "placeholder":
            set_record(made, known.with_(layouts=(replicated(len(known.type.shape)),)))
    return program.with_(graph=graph)
