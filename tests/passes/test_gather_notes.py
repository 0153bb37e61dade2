"""What the notes say of values that are gathered whole: which call of the user's takes pieces together."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from autopar.ir.mesh import CONTEXT_AXES, DATA_AXES
from autopar.ir.text.text import parse_program
from autopar.passes.collectives.gather_notes import with_gather_notes

SAMPLES = (
    "axis 'dp': op 'aten.{0}' at model.py:5 takes the samples together, so that %exp {1} is gathered on every rank. "
    "What is written for all samples at once is split (docs/spellings.md)"
)
SEQUENCE = (
    "axis 'cp': op 'aten.{0}' at model.py:5 in net takes the sequence together, so that %exp {1} is gathered on every "
    "rank. Slices, shifts, attention and loops over positions are split (docs/spellings.md)"
)


@dataclass(frozen=True)
class Gathered:
    """`exp` of the batch, split over an axis in one dim, which is gathered for what stands in `then`."""

    then: str
    axis: str = "dp"
    shape: tuple[int, ...] = (8, 6)
    dim: int = 0
    dtype: str = "f32"
    given: str = 'batch "0"'
    value: str = "%exp"
    phase: str = ""

    def notes(self, *before: str) -> tuple[str, ...]:
        whole = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        split = f"{whole} [{','.join(self.axis if dim == self.dim else '-' for dim in range(len(self.shape)))}]"
        lines = [
            f"EXPLICIT program on {','.join(f'{axis}=2' for axis in self.axis.split(':'))}",
            *(f"note: {note}" for note in before),
            f"%x: {split} = {self.given}",
            f"%exp: {split} = aten.exp.default(%x)",
            f"%whole: {whole} [{','.join('-' for _ in self.shape)}] = autopar.all_gather.default({self.value}, "
            f'"{self.axis}", {self.dim}, 1){self.phase}',
            *self.then.replace("[]", whole + " [" + ",".join("-" for _ in self.shape) + "]").splitlines(),
            "return value \"0\" = %out\n",
        ]  # fmt: skip
        return with_gather_notes(parse_program("\n".join(lines))).notes


ROWS = "%out: f32[6] [-] = aten.select.int(%whole, 0, 3)   # model.py:5"
SUMS = "%out: [] = aten.cumsum.default(%whole, 1)   # net  model.py:5"
SEQ = {"axis": "cp", "shape": (4, 8, 3), "dim": 1}
NOTED = {
    "one sample": (Gathered(ROWS), SAMPLES.format("select.int", [8, 6])),
    "one sample behind a view": (
        Gathered(f"%v: [] = aten.neg.default(%whole)   # model.py:4\n{ROWS.replace('%whole', '%v')}"),
        SAMPLES.format("select.int", [8, 6]),
    ),
    "one sample of all replicas": (
        Gathered(ROWS, axis=":".join(DATA_AXES)),
        SAMPLES.replace("'dp'", f"'{':'.join(DATA_AXES)}'").format("select.int", [8, 6]),
    ),
    "sums along all pieces of the sequence": (
        Gathered(SUMS, ":".join(CONTEXT_AXES), (4, 8, 3), 1),
        SEQUENCE.replace("'cp'", f"'{':'.join(CONTEXT_AXES)}'").format("cumsum.default", [4, 8, 3]),
    ),
    "sums along the sequence": (Gathered(SUMS, **SEQ), SEQUENCE.format("cumsum.default", [4, 8, 3])),
    "what only shows it": (
        Gathered("%out: [] = aten.neg.default(%whole)   # net  model.py:5", **SEQ),
        SEQUENCE.format("neg.default", [4, 8, 3]),
    ),
    "what an op of ours reads behind it": (
        Gathered(
            "%v: [] = aten.neg.default(%whole)   # net  model.py:5\n"
            '%out: [] = autopar.keep_first.default(%v, "cp")   # net  model.py:6', **SEQ,
        ),
        SEQUENCE.format("neg.default", [4, 8, 3]),
    ),
}  # fmt: skip
SILENT = {
    "samples that an op takes at once": Gathered(SUMS),
    "a sample's own number": Gathered("%out: f32[8] [-] = aten.select.int(%whole, 1, 3)   # model.py:5"),
    "integers": Gathered(ROWS.replace("f32", "i64"), dtype="i64", value="%x"),
    "the batch itself": Gathered(ROWS, value="%x"),
    "a parameter": Gathered(ROWS, given='parameter "w"'),
    "one number a row": Gathered(SUMS, axis="cp", shape=(4, 8, 1), dim=1),
    "one number a row, gathered along the rows": Gathered(SUMS, axis="cp", dim=1),
    "over tp": Gathered(ROWS, axis="tp"),
    "the backward pass": Gathered(ROWS, phase="   # backward"),
    "a product": Gathered(
        '%out: [] = autopar.einsum.default(%whole, %whole, "abc,abc->abc")   # net  model.py:5', **SEQ
    ),
    "an op of ours": Gathered('%out: [] = autopar.keep_first.default(%whole, "cp")   # net  model.py:5', **SEQ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTED)
def test_who_takes_pieces_together_is_noted(name: str) -> None:
    gathered, note = NOTED[name]
    assert gathered.notes() == (note,)


def test_a_line_that_has_a_note_gets_no_other() -> None:
    assert NOTED["one sample"][0].notes("model.py:5 is slow") == ("model.py:5 is slow",)


@pytest.mark.parametrize("name", SILENT)
def test_nothing_is_said_of(name: str) -> None:
    assert SILENT[name].notes() == ()
