"""What the pass `ring` leaves gathered, and what it says of it."""

from __future__ import annotations

import pytest

from autopar.ir.check.check_levels import verify
from autopar.ir.ops.ring_ops import is_ring
from autopar.ir.options import StepOptions
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.text.text import parse_program
from autopar.passes.collectives.ring import ring

PIECE, WHOLE = "f32[1,1,4,2] of [1,1,8,2] [-,-,{outer}cp,-]", "f32[1,1,8,2] [-,-,-,-]"
SUM = "f32[1,1,8,2] [-,-,-,-] partial(cp)"
CUT = PIECE.format(outer="")
FORWARD = f"%a: ({CUT}, f32[1,1,4] of [1,1,8] [-,-,cp]) = autopar.attention.default(%q, %gk, %gv, None, False, 1.0)"
BACKWARD = f"%a: ({CUT}, {SUM}, {SUM}) = autopar.attention_backward.default(%q, %q, %gk, %gv, None, %q, %l, False, 1.0)"
GRADIENT = f"%dk: {SUM} = operator.getitem(%a, 1)"
SCATTERED = f'%s: {CUT} = autopar.reduce_scatter.default(%dk, "cp", 2, 1, "sum")'


TENSOR = FORWARD.replace("None", "%m")
ROW, GATHERED = "b8[1,1,1,4] of [1,1,1,8] [-,-,-,cp]", "b8[1,1,1,8] [-,-,-,-]"
READ = f"""%gm: {GATHERED} = autopar.all_gather.default(%m, "cp", 3, 1)
%seen: {GATHERED} = aten.logical_not.default(%gm)
{FORWARD.replace("None", "%gm")}"""


def program_of(
    attention: str, *more: str, values: tuple[str, int] = ("", 1), gathered: bool = True, mask: str = ""
) -> Program:
    """An attention and what follows of it. values: how they lie in pieces. gathered: not whole from the start."""
    shape, outer = values
    lines = [
        "LOCAL program on cp=2",
        f'%q: {CUT} = batch "0"',
        f'%k: {CUT} = batch "1"',
        f'%v: {PIECE.format(outer=shape)} = batch "2"' if gathered else f'%gv: {WHOLE} = batch "2"',
        '%l: f32[1,1,4] of [1,1,8] [-,-,cp] = batch "3"',
        *([f'%m: {mask} = batch "4"'] if mask else []),
        f'%gk: {WHOLE} = autopar.all_gather.default(%k, "cp", 2, 1)',
        *([f'%gv: {WHOLE} = autopar.all_gather.default(%v, "cp", 2, {outer})'] if gathered else []),
        attention, *more,
        f"%o: {CUT} = operator.getitem(%a, 0)",
        f'%out: {WHOLE} = autopar.all_gather.default(%o, "cp", 2, 1)',
        'return value "out" = %out\n',
    ]  # fmt: skip
    program = parse_program("\n".join(lines))
    verify(program, program.level)
    return program


def made(program: Program, attention: str) -> Program:
    found = ring(program, Plan(program.mesh, options=StepOptions(attention=attention)))
    verify(found, found.level)
    return found


TAKEN = {
    "forward": program_of(FORWARD),
    "backward": program_of(BACKWARD),
    "backward, with a gradient that leaves": program_of(BACKWARD, GRADIENT, SCATTERED),
    "a mask that is a vector": program_of(TENSOR, mask="b8[1,1,1,8] [-,-,-,-]"),
    "such a mask that is gathered, and read by another op": program_of(READ, mask=ROW),
    "such a mask of two dims": program_of(TENSOR, mask="b8[1,8] [-,-]"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name: str) -> None:
    found = made(TAKEN[name], "ring")
    assert any(is_ring(node.target) for node in found.calls()) and not found.notes
    assert made(TAKEN[name], "gather") is TAKEN[name]


PIECES, SCATTERS = "they do not lie in the same pieces", "their gradients are not scattered to the same pieces"
MASK = "its mask is a tensor, with a column for each key of the whole"
REFUSED = {
    "a mask of pairs": (program_of(TENSOR, mask="b8[1,1,4,8] of [1,1,8,8] [-,-,cp,-]"), MASK),
    "a vector of numbers": (program_of(TENSOR, mask="f32[1,1,1,8] [-,-,-,-]"), MASK),
    "a gather that another op reads": (
        program_of(FORWARD, f"%n: {WHOLE} = aten.neg.default(%gk)"),
        "another op reads the keys or values that are gathered for it",
    ),
    "values in other pieces": (program_of(FORWARD, values=("2~", -2)), PIECES),
    "values that are whole": (program_of(FORWARD, gathered=False), PIECES),
    "a gradient that stays a sum": (program_of(BACKWARD, GRADIENT), SCATTERS),
    "a gradient in other pieces": (
        program_of(BACKWARD, GRADIENT, SCATTERED.replace("[-,-,cp,-]", "[-,-,2~cp,-]").replace("2, 1", "2, -2")),
        SCATTERS,
    ),
    "a gradient that is also read whole": (
        program_of(BACKWARD, GRADIENT, SCATTERED, f"%n: {SUM} = aten.neg.default(%dk)"), SCATTERS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    program, why = REFUSED[name]
    found = made(program, "ring")
    assert not any(is_ring(node.target) for node in found.calls())
    assert found.notes == (f"attention='ring': keys and values of %a are gathered: {why}",)
    assert made(program, "auto").notes == (), "nobody asked"
