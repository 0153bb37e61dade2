"""Name what a graph runs, as torch.profiler shows it: a range for each module and phase, in it one for each collective
and one for what a pass made."""

from __future__ import annotations

from torch import fx
from torch.autograd.profiler import record_function

from autopar.ir.ops.ops import is_mesh_op, op
from autopar.ir.ops.ring_ops import is_ring
from autopar.ir.program import Record, has_record, record

_WAIT = op("wait")


def range_names(node: fx.Node) -> tuple[str, ...]:
    """The names of the ranges of a call, from the outermost: `blocks.0.attn backward`, and in it `all_reduce over tp
    %all_reduce_3 by reshard`, or `by precision` of calls that a pass made."""
    if not has_record(node):
        return ()
    known = record(node)
    outer = f"{known.module or 'model'}{' backward' if known.is_backward else ''}"
    made_by = "" if known.made_by == "capture" else f"by {known.made_by}"
    inner = " ".join(filter(None, (_moved(node, known), made_by)))
    return (outer, inner) if inner else (outer,)


def _moved(node: fx.Node, known: Record) -> str:
    """What a call moves between ranks; "" for one that moves nothing."""
    if node.target == _WAIT:
        return f"wait %{node.name}"
    if not (is_mesh_op(node.target) or is_ring(node.target)):
        return ""
    axis = next((arg for arg in node.args if isinstance(arg, str)), node.kwargs.get("axis"))
    return f"{str(getattr(node.target, '__name__', node.target)).split('.')[0]} over {axis} %{node.name}"


class Ranges:
    """The ranges of torch.profiler that are open, in each other."""

    def __init__(self) -> None:
        self._open: list[tuple[str, record_function]] = []

    def enter(self, *names: str) -> None:
        """Have these open, from the outermost: those that are stay."""
        same = 0
        while same < min(len(self._open), len(names)) and self._open[same][0] == names[same]:
            same += 1
        self.leave(same)
        for name in names[same:]:
            made = record_function(name)
            made.__enter__()
            self._open.append((name, made))

    def leave(self, kept: int = 0) -> None:
        """Close all but the outermost."""
        while len(self._open) > kept:
            self._open.pop()[1].__exit__(None, None, None)
