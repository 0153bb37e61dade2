"""own_views: what the backward pass reads of a parameter by a view, it reads by a view of its own."""

from __future__ import annotations

from torch import fx

from autopar.ir.ops.storage import root_of
from autopar.ir.plan import Plan
from autopar.ir.program import Builder, Program, is_given, record

MADE_BY = "own_views"


def own_views(program: Program, plan: Plan) -> Program:
    """SHARDED -> SHARDED. Views of parameters are made again for the backward pass, where parameters are gathered, or
    come from the host's memory, for each pass: a view of the forward pass would keep the whole parameter until then.

        zero: 3
        SHARDED program on dp=2
        %w: f32[4,2] [-,-] = parameter "w"
        %x: f32[8,2] [dp,-] = batch "0"
        %g: f32[8,4] [dp,-] = batch "1"
        %t: f32[2,4] [-,-] = aten.t.default(%w)
        %einsum: f32[8,4] [dp,-] = autopar.einsum.default(%x, %t, "ab,bc->ac")
        %einsum_1: f32[8,2] [dp,-] = autopar.einsum.default(%g, %t, "ac,bc->ab")   # backward
        return value "y" = %einsum as [-,-]
        return value "z" = %einsum_1 as [-,-]
    becomes
        SHARDED program on dp=2
        %w: f32[4,2] [-,-] = parameter "w"
        %x: f32[8,2] [dp,-] = batch "0"
        %g: f32[8,4] [dp,-] = batch "1"
        %t: f32[2,4] [-,-] = aten.t.default(%w)
        %einsum: f32[8,4] [dp,-] = autopar.einsum.default(%x, %t, "ab,bc->ac")
        %t_again: f32[2,4] [-,-] = aten.t.default(%w)
        %einsum_1: f32[8,2] [dp,-] = autopar.einsum.default(%g, %t_again, "ac,bc->ab")
        return value "y" = %einsum as [-,-]
        return value "z" = %einsum_1 as [-,-]
    """
    if not (plan.gathers_again or plan.offloads("parameters")):
        return program
    views = _views(program)
    if not any(record(user).is_backward for view in views for user in view.users):
        return program
    build, again = Builder(MADE_BY), dict[fx.Node, fx.Node]()

    def own(node: fx.Node) -> fx.Node:
        """What the backward pass reads in place of a node."""
        if node not in views:
            return build.value[node]
        if node not in again:
            assert callable(node.target), "a view is a call"
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), own)
            like = record(node).with_(phase="backward")
            again[node] = build.call(node.target, *args, like=like, name=f"{node.name}_again", **kwargs)
        return again[node]

    def put(node: fx.Node) -> fx.Node | None:
        return build.copy(node, own) if node.op == "call_function" and record(node).is_backward else None

    return build.rewrite(program, put)


def _views(program: Program) -> set[fx.Node]:
    """The views of parameters, or of their casts, that the forward pass makes."""
    forward = (node for node in program.calls() if not record(node).is_backward and not is_given(node))
    parameters = {node for node, _ in program.parameters()}

    def is_of_parameter(root: fx.Node) -> bool:
        return is_given(root) and (root in parameters or parameters.issuperset(root.all_input_nodes))

    return {node for node in forward if (root := root_of(node)) is not node and is_of_parameter(root)}
