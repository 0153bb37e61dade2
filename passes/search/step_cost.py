"""Estimate the cost of a step beside its matrix products: the bytes that a rank moves and computes."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.measure import goes_to_one, human, local_bytes, moved_type
from autopar.ir.mesh import is_in_time
from autopar.ir.ops import collective_of, is_collective, op
from autopar.ir.program import Program, is_getitem, is_view, operand_nodes, record
from autopar.ir.ring_ops import is_ring
from autopar.passes.search.costs import move_cost
from autopar.passes.search.intents import BYTES_PER_REPLICA

# The start of a collective, in bytes that the link of `passes/search/costs.py` would move in that time: 10 us.
BYTES_PER_START = 1e6


@dataclass(frozen=True, slots=True)
class StepCost:
    """Of one rank and step. moved: bytes on the link (ring algorithms). collectives: their number. computed: bytes of
    the results of all ops but views and collectives."""

    moved: float
    collectives: int
    computed: int

    @property
    def total(self) -> float:
        """In bytes of the link."""
        return self.moved + BYTES_PER_START * self.collectives + BYTES_PER_REPLICA * self.computed

    def __str__(self) -> str:
        return f"{self.collectives} collectives, {human(self.moved)} moved and {human(self.computed)} computed"


def step_cost(program: Program) -> StepCost:
    """The cost of a LOCAL program.

    What the backward pass gathers again of the forward pass waits for no gradient: it is moved under the products and
    counts with its start alone (arXiv 2205.05198, section 4.2.2).
    """
    moved, collectives, computed = 0.0, 0, 0
    for node in program.calls():
        if is_ring(node.target):  # moved under its products; only the start of the first message shows
            computed += local_bytes(node, program.mesh)
            collectives += 1
        elif not is_collective(node.target):
            computed += 0 if is_getitem(node) or is_view(node) else local_bytes(node, program.mesh)
        elif node.target != op("wait") and not is_in_time(str(node.args[1])):  # what adds up on one rank does not move
            kind, operand = collective_of(node.target), operand_nodes(node)[0]
            collectives += 1
            again = kind.name == "all_gather" and record(node).is_backward and record(operand).phase == "forward"
            whole, size = moved_type(node, program.mesh).bytes_, program.mesh[str(node.args[1])]
            cost = whole if goes_to_one(node, program.mesh) else move_cost(kind.has, kind.gives, whole, size)
            moved += 0.0 if again else cost
    return StepCost(moved, collectives, computed)
