"""Assign stages as the user names them: modules, a stage an entry."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar.errors import LayoutError
from autopar.ir.modules import in_module, module_paths, nearest, spelled_out
from autopar.ir.program import Program, is_getitem, record
from autopar.passes.pipeline.cuts.cut import Stages, forward_nodes, is_at_owners
from autopar.passes.pipeline.cuts.when import NodeTimes


def manual(program: Program, times: NodeTimes, stages: Sequence[str]) -> Stages:
    """The stage of every forward node, from `["embed, blocks.0-3", "blocks.4-7, norm, head"]`.

    An entry holds module paths with commas between them; `blocks.0-3` is four of them and `*` stands for anything.
    A module's submodules go with it. What lies in no module of the list follows the values that it needs.

    Raises LayoutError, with all faults at once: a path that matches no module, a module with parameters that no stage
    or more than one names, a value that would flow backwards.
    """
    nodes = forward_nodes(program, times)
    paths = module_paths(program, nodes)
    faults: list[str] = []
    named: dict[str, list[tuple[int, str]]] = {}
    for stage, entry in enumerate(stages):
        for part in (part.strip() for part in entry.split(",")):
            found = [path for pattern in spelled_out(part) for path in paths if in_module(path, pattern)]
            if not found:
                near = nearest(part, paths)
                faults.append(f"stages[{stage}] names '{part}', which is no module of the forward pass. Nearest names: "
                              f"{', '.join(near)}.")  # fmt: skip
            for path in dict.fromkeys(found):
                named.setdefault(path, []).append((stage, part))
    for path, places in named.items():
        others = sorted({stage for stage, _ in places})
        if len(others) > 1:
            faults.append(f"module '{path}' is in stages {others[0]} and {others[1]}: a module has one stage.")
    used = [entry for node, entry in program.entries if node.users]
    owners = {name.rpartition(".")[0] for entry in used if entry.kind == "parameter" for name in entry.names}
    missing = sorted(path for path in paths if path in owners and path not in named)
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        faults.append(f"no stage names {', '.join(repr(path) for path in missing[:3])}{more}.")
    if faults:
        raise LayoutError("stages: " + "\n".join(faults))
    return _assign(nodes, {path: places[0][0] for path, places in named.items()})


def _assign(nodes: list[fx.Node], stage_of: dict[str, int]) -> Stages:
    stages: Stages = {}
    faults: list[str] = []
    for node in nodes:
        source = node.args[0] if is_getitem(node) else None
        before = [(stages[operand], operand) for operand in node.all_input_nodes if operand in stages]
        needs = max((stage for stage, _ in before), default=0)
        if isinstance(source, fx.Node) and source in stages:
            stages[node] = stages[source]
            continue
        wanted = stage_of.get(record(node).module)
        if wanted is not None and wanted < needs:
            operand = next(operand for stage, operand in before if stage == needs)
            mine, its = record(node), record(operand)
            faults.append(f"'{mine.module}' ({mine.source}) is in stage {wanted}, but needs a value of '{its.module}' "
                          f"({its.source}) in stage {needs}: values flow forwards only.")  # fmt: skip
            needs = wanted  # said once, and not again of all that follows
        stages[node] = max(needs, wanted if wanted is not None else 0)
        for stage, operand in before:
            if stage < stages[node] and is_at_owners(operand):
                mine, its = record(node), record(operand)
                faults.append(f"'{mine.module}' ({mine.source}) is in stage {stages[node]}, and rows that lie at their "
                              f"experts in stage {stage} ('{its.module}', {its.source}): the layers of a mixture, from "
                              f"its router to the sum of what its experts give, are one stage's.")  # fmt: skip
    if faults:
        raise LayoutError("stages: " + "\n".join(dict.fromkeys(faults[:5])))
    return stages
