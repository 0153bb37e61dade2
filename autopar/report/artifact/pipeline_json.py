"""A pipeline as JSON that a person can read: how its graphs belong together, and what every rank does in order.

    "stages": [0, 1]                             the rank of each stage
    "flow": {"0F": {"writes": ["add_4"], ...}}   what an action reads, writes and adds to
    "instructions": {"0": ["0F0", "SEND 0F0 to rank 1: %add_4; free %add_4", ...]}

The graphs are files of their own. Reading it back proves again that the lists run to their end (`check_schedule`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.errors import ArtifactError, AutoparError
from autopar.ir.check.check_levels import verify_pipeline
from autopar.ir.mesh import Mesh
from autopar.ir.ops.names import DTYPES, dtype_name
from autopar.ir.pipeline import Join, Pipeline, Reduction, graph_name
from autopar.ir.program import Program, TensorType
from autopar.ir.schedule import BESIDE, IN, KINDS, ONCE, ONCE_KINDS, OUT, Action, Costs, Flow, Instruction, Work
from autopar.passes.schedules import check_schedule

_FIELDS = ("reads", "writes", "sums", "step_reads", "step_writes", "carries")
_ACTION = re.compile(rf"(\d+)([{''.join(KINDS)}])(\d*)\Z", re.ASCII)
_MESSAGE = re.compile(r"(SEND|RECV|OUT|IN) (\S+?)(?: (?:to|from) rank (\d+))?: ([^;]*)\Z", re.ASCII)
_TYPE = re.compile(r"(\w+)\[([\d,]*)\]\Z", re.ASCII)
_NAME = re.compile(r"%[^\s,;%]+\Z")

Key = tuple[int, str]
Graphs = Sequence[Mapping[str, Program]]  # of each rank of the pipeline, by name


def pipeline_json(pipeline: Pipeline) -> dict[str, Any]:
    """All of a pipeline but its graphs and its mesh."""
    flow, costs = pipeline.flow, pipeline.costs
    return {
        "schedule": pipeline.schedule,
        "microbatches": flow.microbatches,
        "slices": flow.slices,
        "lengths": list(flow.lengths),
        "sized": {str(length): _types_json(types) for length, types in flow.sized.items()},
        "stages": list(flow.ranks),
        "parameters": dict(pipeline.owners),
        "flow": {
            f"{place}{kind}": {field: list(names) for field in _FIELDS if (names := getattr(work, field))}
            for (place, kind), work in flow.works.items()
        },
        "types": _types_json(flow.types),
        "owners": {name: list(ranks) for name, ranks in flow.owners.items()},
        "stores": {f"{place}{kind}": dict(copies) for (place, kind), copies in flow.stores.items()},
        "loads": {f"{place}{kind}": dict(copies) for (place, kind), copies in flow.loads.items()},
        "reductions": {
            name: [[one.kind, one.axis, one.dim, one.outer] for one in how.joins]
            for name, how in pipeline.reductions.items()
        },
        "costs": {
            "times_us": {f"{place}{kind}": time for (place, kind), time in costs.times_us.items()},
            "growing_us": {f"{place}{kind}": time for (place, kind), time in costs.growing_us.items()},
            "pairs_us": {
                BESIDE.join(f"{place}{kind}" for place, kind in keys): time for keys, time in costs.pairs_us.items()
            },
            "latency_us": costs.latency_us,
            "bytes_per_us": None if math.isinf(costs.bytes_per_us) else costs.bytes_per_us,
            "host_bytes_per_us": None if math.isinf(costs.host_bytes_per_us) else costs.host_bytes_per_us,
        },
        "graphs": [f"{place}{kind}" for place, kind in pipeline.graphs],
        "instructions": {str(rank): [print_instruction(line) for line in lines]
                         for rank, lines in enumerate(pipeline.lists)},
    }  # fmt: skip


def _types_json(types: Mapping[str, TensorType]) -> dict[str, str]:
    return {name: f"{dtype_name(one.dtype)}[{','.join(map(str, one.shape))}]" for name, one in types.items()}


def print_instruction(line: Instruction) -> str:
    """`SEND 0F3 to rank 1: %x; free %x`: an instruction with the values that it ends. Of a pair `0F3; free %x beside
    1B1`."""
    return BESIDE.join(f"{one}{_freeing(one)}" for one in line.runs or (line,))


def _freeing(line: Instruction) -> str:
    return f"; free {', '.join(f'%{name}' for name in line.frees)}" if line.frees else ""


def parse_instruction(text: str, flow: Flow) -> Instruction:
    """The inverse of `print_instruction`; raises ValueError for what is no instruction."""
    body, _, frees = text.partition("; free ")
    if not (match := _MESSAGE.match(body)):
        return parse_run(text)
    gone = _names(frees) if frees else ()
    values, action = _names(match[4]), parse_action(match[2])
    unknown = [name for name in values if name not in flow.types]
    if unknown:
        raise ValueError(f"'{text}': '%{unknown[0]}' has no type")
    if (match[3] is None) != (match[1] in (OUT, IN)):
        raise ValueError(f"'{text}' is no message")
    peer = -1 if match[3] is None else int(match[3])
    return Instruction(match[1], action, peer, values, flow.types_of(action, values), gone)


def parse_run(text: str) -> Instruction:
    """`0F3; free %x`, or two of them with " beside " between; raises ValueError for what does not read."""
    runs = []
    for one in text.split(BESIDE):
        body, _, frees = one.partition("; free ")
        runs.append(Instruction("RUN", parse_action(body), frees=_names(frees) if frees else ()))
    if len(runs) > 2:
        raise ValueError(f"'{text}': a pair is of two actions")
    return replace(runs[0], beside=runs[1]) if len(runs) == 2 else runs[0]


def parse_pipeline(content: Any, mesh: Mesh, graphs: Graphs, program: Program) -> Pipeline:
    """The inverse of `pipeline_json`, of the graphs that each rank of the pipeline runs.

    Raises ArtifactError for what does not read, and for graphs or instructions that do not fit each other.
    """
    try:
        pipeline = _parse(content, mesh, graphs)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ArtifactError(f"it has a wrong entry: {type(error).__name__} {error}.") from None
    try:
        for sized in ({}, *pipeline.sized.values()):
            verify_pipeline(pipeline.with_(graphs={**pipeline.graphs, **sized}), program)
        check_schedule(pipeline.lists, pipeline.flow)
    except AutoparError as error:
        raise ArtifactError(str(error)) from None
    return pipeline


def _parse(content: Any, mesh: Mesh, graphs: Graphs) -> Pipeline:
    types = _types(content["types"])
    works = {_key(text): Work(**{field: tuple(names) for field, names in work.items()})
             for text, work in content["flow"].items()}  # fmt: skip
    owners = {str(name): tuple(map(int, ranks)) for name, ranks in content["owners"].items()}
    stages = tuple(map(int, content["stages"]))
    lengths = tuple(map(int, content["lengths"]))
    sized = {int(length): _types(named) for length, named in content["sized"].items()}
    stores, loads = (
        {_key(text): {str(made): str(of) for made, of in copies.items()} for text, copies in content[name].items()}
        for name in ("stores", "loads")
    )
    flow = Flow(stages, int(content["microbatches"]), works, types, owners, int(content["slices"]), lengths, sized,
                stores, loads)  # fmt: skip
    found, others = _graphs(content["graphs"], flow, graphs)
    if lost := sorted(set(works) - set(found)):
        raise ValueError(f"there is no graph of {lost[0][0]}{lost[0][1]}")
    lost_lengths = sorted({*lengths} - {*lengths[:1], *others})
    if len(lengths) not in (0, flow.slices) or {*sized} != {*lengths} or lost_lengths:
        raise ValueError(f"there are {flow.slices} slices of lengths {list(lengths)}, with types of {sorted(sized)}")
    times, bytes_per_us = content["costs"]["times_us"], content["costs"]["bytes_per_us"]
    host_bytes_per_us = content["costs"]["host_bytes_per_us"]
    costs = Costs(
        {_key(text): float(time) for text, time in times.items()},
        float(content["costs"]["latency_us"]),
        math.inf if bytes_per_us is None else float(bytes_per_us),
        {_key(text): float(time) for text, time in content["costs"]["growing_us"].items()},
        flow.slices,
        lengths,
        {_keys(text): float(time) for text, time in content["costs"]["pairs_us"].items()},
        math.inf if host_bytes_per_us is None else float(host_bytes_per_us),
    )
    lists = tuple(
        tuple(parse_instruction(line, flow) for line in content["instructions"][str(rank)])
        for rank in range(len(content["instructions"]))
    )
    if len(lists) != len(graphs) or flow.size > len(graphs):
        raise ValueError(f"there are lists for {len(lists)} ranks and graphs for {len(graphs)}")
    read = content["reductions"].items()
    reductions = {
        str(name): Reduction(
            tuple(Join(str(kind), str(axis), int(dim), int(outer)) for kind, axis, dim, outer in joins)
        )
        for name, joins in read
    }
    parameters = {str(name): int(stage) for name, stage in content["parameters"].items()}
    if wrong := [name for name, stage in parameters.items() if not 0 <= stage < len(stages)]:
        raise ValueError(f"'{wrong[0]}' is kept by stage {parameters[wrong[0]]}, which does not exist")
    return Pipeline(mesh, flow, found, reductions, parameters, costs, str(content["schedule"]), lists, others)


def _graphs(
    names: Sequence[str], flow: Flow, graphs: Graphs
) -> tuple[dict[Key, Program], dict[int, dict[Key, Program]]]:
    """The graphs by what they are, and those of slices of other lengths than the first."""
    programs: dict[Key, Program] = {}
    others: dict[int, dict[Key, Program]] = {length: {} for length in flow.lengths if length != flow.lengths[0]}
    for text in names:
        key = _key(text)
        named = graphs[flow.rank_of(Action(*key))]
        programs[key] = named[graph_name(*key)]
        for length, of_length in others.items():
            if key[1] not in ONCE_KINDS:
                of_length[key] = named[graph_name(*key, length)]
        for one in (programs, *others.values()):
            if key in flow.works and key in one:
                _check_work(text, flow.works[key], one[key])
    every = [graph for one in (programs, *others.values()) for graph in one.values()]
    if missing := [f"'{name}' of rank {rank}" for rank, named in enumerate(graphs) for name, graph in named.items()
                   if not any(graph is known for known in every)]:  # fmt: skip
        raise ValueError(f"no action runs the graph {missing[0]}")
    return programs, others


def _check_work(text: str, work: Work, graph: Program) -> None:
    """A graph takes and gives what the flow says."""
    for kind, names, has in (
        ("saved", work.reads, graph.inputs),
        ("saved", work.writes, graph.outputs),
        ("part", work.sums, graph.outputs),
        ("step", work.step_writes, graph.outputs),
    ):
        actual = sorted(entry.name for entry in has if entry.kind == kind)
        if sorted(names) != actual:
            raise ValueError(f"the flow of {text} has {sorted(names)}, but its graph {actual}")


def _keys(text: str) -> tuple[Key, Key]:
    first, second = map(_key, text.split(BESIDE))
    return first, second


def _key(text: str) -> Key:
    action = parse_action(text)
    return action.stage, action.kind


def parse_action(text: str) -> Action:
    """`0F3`, `1E`: the inverse of `str`; raises ValueError."""
    if not (match := _ACTION.match(text)):
        raise ValueError(f"'{text}' is not an action such as 0F3")
    return Action(int(match[1]), match[2], int(match[3]) if match[3] else ONCE)


def _names(text: str) -> tuple[str, ...]:
    names = text.split(", ") if text else []
    for name in names:
        if not _NAME.match(name):
            raise ValueError(f"'{name}' is not a value such as %x")
    return tuple(name[1:] for name in names)


def _types(named: Mapping[str, str]) -> dict[str, TensorType]:
    return {str(name): _type(text) for name, text in named.items()}


def _type(text: str) -> TensorType:
    match = _TYPE.match(text)
    if not match or match[1] not in DTYPES:
        raise ValueError(f"'{text}' is not a type such as f32[2,3]")
    return TensorType(tuple(map(int, match[2].split(","))) if match[2] else (), DTYPES[match[1]])
