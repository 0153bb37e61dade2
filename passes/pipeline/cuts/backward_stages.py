"""Find the stage of every backward node, and whether it makes gradients of inputs or of weights, by data flow."""

from __future__ import annotations

from torch import fx

from autopar.ir.mesh import Mesh
from autopar.ir.ops.ops import is_collective
from autopar.ir.program import Program, is_getitem, record
from autopar.passes.costs.node_costs import local_bytes
from autopar.passes.pipeline.cuts.cut import Stages
from autopar.passes.pipeline.cuts.rematerialized import originals
from autopar.passes.pipeline.cuts.when import CARRIES, EARLIER, NodeTimes, When

Everywhere = None  # the stages of a value that any stage can compute


def backward_nodes(program: Program, times: NodeTimes) -> list[fx.Node]:
    """The nodes of a micro-batch that need parameters and run with its backward pass, in the order of the program."""
    return [node for node in program.calls() if times.of[node] is When.BODY and not times.is_forward(node)]


def place_backward(program: Program, times: NodeTimes, stages: Stages, count: int) -> Stages:
    """The stage of every backward node: the last one, not behind the gradients that it needs, which has the forward
    values and the parameters that it needs. So a call's gradient is computed where the call is. What needs neither
    goes where less is sent.

    Gradients flow towards the first stage only. Any stage that keeps to that is right; this one moves least. What is
    computed again is where its original is, and counts as that for all that reads it; what has an original that no
    micro-batch waits for (of weights that each one gathers anew) is where it is read.
    """
    original = originals(program)
    present = _present(program, times, stages)
    present |= {again: present[node] for again, node in original.items() if node in present}
    owners = _owners(program, stages, present, original) | _carriers(program, stages)
    found: Stages = {}
    for node in backward_nodes(program, times):
        if original.get(node) in stages:
            continue
        source = node.args[0] if is_getitem(node) else None
        if isinstance(source, fx.Node) and source in found:
            found[node] = found[source]
            continue
        operands = node.all_input_nodes
        if node in times.renewed:  # every stage that uses it gathers it
            parts = [present[operand] for operand in operands if operand in present]
            present[node] = frozenset.intersection(*parts) if parts else frozenset(range(count))
            found[node] = max(present[node], default=count - 1)
            continue
        gradients = [found[operand] for operand in operands if operand in found and operand not in times.renewed]
        limit = min(gradients, default=count - 1)
        needs = [where for operand in operands if (where := present.get(operand, Everywhere)) is not Everywhere]
        if node in owners:
            needs.append(frozenset({owners[node]}))
        fits = [stage for stage in range(limit + 1) if all(stage in where for where in needs)]
        made = [original.get(operand, operand) for operand in operands]
        best = max((stages[operand] for operand in made if operand in stages), default=limit)
        found[node] = max(fits, default=min(limit, best))
    for node in reversed(found):
        if node not in times.renewed:
            _lower(node, found, present, owners, program.mesh)
    return found | {again: stages[node] for again, node in original.items() if node in stages}


def with_attention(stages: Stages) -> Stages:
    """The same stages, with what slices of a sequence keep on the stage of the attention that reads it, and what is
    gathered for that."""
    found = dict(stages)
    for node in reversed(stages):
        (user, *_) = node.users or (node,)
        if node.target is EARLIER or (user.target is EARLIER and is_collective(node.target)):
            found[node] = found[user]
    return found


def _carriers(program: Program, stages: Stages) -> Stages:
    """The stages of what takes over from slices of a sequence in the backward pass, and of what its attention gives:
    where the forward pass kept it. The keys of all begin with the attention's name."""
    kept = {_attention_of(node): stage for node, stage in stages.items() if node.target is EARLIER}
    carriers: Stages = {}
    for node in program.calls():
        if node.target not in CARRIES or not record(node).is_backward or _attention_of(node) not in kept:
            continue
        behind = node.users if node.target is EARLIER else (node.args[0], node.args[0].args[0])  # type: ignore[union-attr]
        carriers.update(dict.fromkeys((node, *behind), kept[_attention_of(node)]))  # type: ignore[arg-type]
    return carriers


def _attention_of(node: fx.Node) -> str:
    return str(node.args[-1]).rpartition(".")[0]


def _lower(
    node: fx.Node, stages: Stages, present: dict[fx.Node, frozenset[int]], owners: dict[fx.Node, int], mesh: Mesh
) -> None:
    """Put a node on the stage of its users if less is sent so: a mask on a gradient that is sent anyway, not a sum."""
    users = [stages[user] for user in node.users if user in stages]
    stage = max(users, default=stages[node])
    if stage == stages[node] or node in owners or is_getitem(node) or record(node).several:
        return
    if any(stage not in present.get(operand, {stage}) for operand in node.all_input_nodes):
        return
    gradients = [operand for operand in node.all_input_nodes if operand in stages and operand not in present]
    more = [one for one in gradients if all(stages.get(user) != stage for user in one.users)]
    if sum(local_bytes(one, mesh) for one in more) < local_bytes(node, mesh):
        stages[node] = stage


def _present(program: Program, times: NodeTimes, stages: Stages) -> dict[fx.Node, frozenset[int]]:
    """The stages that have a value after the forward pass: where it is made and where it is used."""
    present: dict[fx.Node, frozenset[int]] = {}
    for node in reversed(program.nodes):
        if node.op == "output" or record(node).is_backward or node in times.second:
            continue
        where = frozenset(stages[user] for user in node.users if user in stages and user not in times.renewed)
        if node in stages and node not in times.renewed:
            present[node] = where | {stages[node]}
        elif _goes_along(node, times):  # parameters, and what is computed of them, go with their users
            where = where.union(*(present[user] for user in node.users if user in present and _goes_along(user, times)))
            if where:
                present[node] = where
    return present


def _goes_along(node: fx.Node, times: NodeTimes) -> bool:
    """True for what is made of parameters alone, or of nothing: any stage that has them can make it."""
    return node in times.renewed or times.of[node] is When.INVARIANT


def _owners(
    program: Program, stages: Stages, present: dict[fx.Node, frozenset[int]], original: dict[fx.Node, fx.Node]
) -> dict[fx.Node, int]:
    """The stage of what leads, one gradient at a time, to one parameter and to nothing else. Of a bias no forward value
    is needed, so only this tells where it belongs."""
    by_name = {entry.name: node for node, entry in program.entries}
    owners: dict[fx.Node, int] = {}
    for result, out in program.leaving:
        where = present.get(by_name[out.name], frozenset()) if out.kind == "gradient" else frozenset()
        if result is None or len(where) != 1:
            continue
        node: fx.Node | None = result
        while node is not None:
            owners[node] = next(iter(where))
            gradients = [arg for arg in node.all_input_nodes if _is_backward(arg) and arg not in original]
            alone = len(gradients) == 1 and set(gradients[0].users) == {node}
            node = gradients[0] if alone else None
    return owners


def _is_backward(node: fx.Node) -> bool:
    return node.op == "call_function" and record(node).is_backward


def weight_nodes(program: Program, placed: Stages) -> frozenset[fx.Node]:
    """The backward nodes that compute gradients of weights and nothing else: what a schedule may put off.

    A node is one if it leads to what is added up over the micro-batches, by way of at most one product, and to no other
    stage (zero bubble, arXiv 2401.10241, section 2: x^T grad, and what follows it).
    """
    products: dict[fx.Node, int] = {}
    for node in reversed(program.nodes):
        if node not in placed:
            continue
        users = [user for user in node.users if user in placed]
        # a user that is not placed adds up micro-batches
        if any(user not in products or placed[user] != placed[node] for user in users):
            continue
        count = max((products[user] for user in users), default=0) + bool(record(node).flops)
        if count <= 1:
            products[node] = count
    # several results stay with the call that makes them
    return frozenset(node for node in products if not (is_getitem(node) and node.args[0] not in products))
