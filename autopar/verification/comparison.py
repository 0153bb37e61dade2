"""Comparing what a step gave with what it should give: errors by tensor, a table of them, a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

Values = dict[tuple[str, str], torch.Tensor]  # by (kind, name)
# Of a short float: two roundings, for a tensor in which torch.autocast happens to be exact.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
WORSE = 2.0  # how many times torch.autocast's own error a precision may have
# How many times the noise of one unit in the last place an error may be. Ranks add up in another order, a sum of many
# terms is off by several units, and a kernel of torch's rounds once where a program's ops round each (BatchNorm). The
# gradients of scales before a BatchNorm in timm's mobileone_s0, zero but for rounding, are off by 2 to 11 times it.
NOISE = 32.0
# A tensor that is zero but for rounding (the gradient of a key's bias) is measured against this share of the norm of
# all of its kind; of a node, against that of its largest operand, and in the backward pass of all gradients. AdamW
# enlarges the rounding, so weights get more.
ZERO = {"gradient": 1e-5, "weight": 1e-3, "buffer": 1e-5, "node": 1e-6}
SHORT_ZERO = {torch.bfloat16: 1e-3, torch.float16: 1e-4}  # the same share, of every kind, for a short float


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: `kind` is loss, aux (returned beside the loss), gradient, weight or buffer.

    error: norm of the difference over the norm of the single-device value, the worst of all steps.
    replicas: the largest difference between ranks that should hold the same. allowed: the error of torch.autocast
    under a precision, which is the measure there. noise: the error of the plain module if each of its results is off
    by one unit in the last place, measured where the error is above the tolerance. A row that has one and is ok is as
    exact as the model allows (see `noise.py`).
    """

    kind: str
    name: str
    error: float
    replicas: float
    ok: bool
    allowed: float | None = None
    noise: float | None = None


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first node whose logical value differs from the captured program's."""

    node: str  # "" where none differs, and the captured program itself is another function
    pass_name: str
    module: str
    source: str
    error: float
    text: str

    def __str__(self) -> str:
        if not self.node:
            return self.text
        return (
            f"first difference at %{self.node} (made by pass '{self.pass_name}', {self.module or 'no module'}, "
            f"{self.source}), relative error {self.error:.2e}:\n  {self.text}"
        )


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify` found; prints as a table."""

    mesh: str
    dtype: torch.dtype
    steps: int
    tolerance: float
    rows: tuple[Row, ...]
    mismatch: Mismatch | None = None
    note: str = ""  # what was compared with what, if not equals in one dtype
    sums: tuple[str, ...] = ()  # a line for each sum of gradients in a dtype that was not asked for

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows) and not self.sums

    @property
    def max_error(self) -> float:
        return max((row.error for row in self.rows), default=0.0)

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        lines = [f"{self.mesh}  {self.dtype}  {self.steps} steps  tolerance {self.tolerance:.0e}"]
        lines += [self.note] * bool(self.note)
        for row in self.rows:
            mark = "ok" if row.ok else "WRONG"
            replicas = f"  ranks differ by {row.replicas:.1e}" if row.replicas else ""
            told = f"  autocast {row.allowed:.2e}" if row.allowed is not None else ""
            if row.noise is not None:
                told += f"{': as exact as the model allows,' if row.ok else ''}  rounding alone gives {row.noise:.2e}"
            lines.append(f"{row.kind:9} {row.name:{width}} {row.error:9.2e}  {mark}{told}{replicas}")
        excused = sum(row.ok and row.noise is not None for row in self.rows)
        equal = "all within it" if self.note else "all equal"
        equal += f", {excused} of {len(self.rows)} as exactly as the model allows" if excused else ""
        lines.append(f"{equal if self.ok else 'NOT EQUAL'}: max error {self.max_error:.2e}")
        lines += [f"WRONG: {text}" for text in self.sums]
        if self.mismatch is not None:
            lines.append(str(self.mismatch))
        return "\n".join(lines)


def error_of(given: torch.Tensor, expected: torch.Tensor, floor: float) -> float:
    """Norm of the difference over the norm of the expected value, or over `floor` if that is larger."""
    if expected.is_complex() and given.is_complex():
        return error_of(torch.view_as_real(given.resolve_conj()), torch.view_as_real(expected.resolve_conj()), floor)
    if not expected.is_floating_point():
        return 0.0 if torch.equal(given, expected) else float("inf")
    a, b = given.double(), expected.double()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, a - b).norm().item()
    if difference == 0.0:
        return 0.0
    scale = max(b.nan_to_num(0.0, 0.0, 0.0).norm().item(), floor)
    return difference / scale if scale > 0 else float("inf")


@dataclass(slots=True)
class Table:
    """The worst errors so far, by (kind, name)."""

    tolerance: float
    errors: dict[tuple[str, str], float] = field(default_factory=dict)
    replicas: dict[tuple[str, str], float] = field(default_factory=dict)
    allowed: dict[tuple[str, str], float] = field(default_factory=dict)
    zero: float = 0.0  # at least this share of a kind's norm is what errors are measured against

    @staticmethod
    def of(dtype: torch.dtype, roundings: int = 1) -> Table:
        """An empty table with the tolerance of a dtype, for so many times as many roundings as usual."""
        return Table(roundings * TOLERANCE.get(dtype, 1e-2), zero=SHORT_ZERO.get(dtype, 0.0))

    @property
    def of_nodes(self) -> float:
        """The tolerance of one node: roundings before it add up."""
        return self.tolerance * 16 if self.zero else self.tolerance

    def compare(
        self, expected: Values, given: Values, replicas: Mapping[tuple[str, str], float], other: Values | None = None
    ) -> None:
        """Enter a step. other: what torch.autocast gives; its errors are allowed, `WORSE` times."""
        floors = {
            kind: max(ZERO[kind], self.zero) * norm_of(expected, kind) for kind in ("gradient", "weight", "buffer")
        }
        for key in sorted((other or {}).keys() & expected.keys()):
            error = error_of((other or {})[key], expected[key], floors.get(key[0], 0.0))
            self.allowed[key] = max(error, self.allowed.get(key, 0.0))
        for key in sorted(expected.keys() | given.keys()):
            wrong = key not in expected or key not in given
            error = float("inf") if wrong else error_of(given[key], expected[key], floors.get(key[0], 0.0))
            self.errors[key] = _worse(error, self.errors.get(key, 0.0))
            self.replicas[key] = max(replicas.get(key, 0.0), self.replicas.get(key, 0.0))

    def rows(self) -> tuple[Row, ...]:
        order = ("loss", "aux", "gradient", "weight", "buffer")
        keys = sorted(self.errors, key=lambda key: order.index(key[0]))
        return tuple(
            Row(*key, self.errors[key], self.replicas[key], self._is_right(key), self.allowed.get(key)) for key in keys
        )

    def _is_right(self, key: tuple[str, str]) -> bool:
        limit = max(self.tolerance, WORSE * self.allowed.get(key, 0.0))
        return self.errors[key] <= limit and self.replicas[key] <= self.tolerance


def norm_of(values: Values, kind: str) -> float:
    """The norm of all floating-point tensors of a kind, as of one."""
    found = [
        value
        for (other, _), value in values.items()
        if other == kind and (value.is_floating_point() or value.is_complex())
    ]
    squares = [torch.linalg.vector_norm(value, dtype=_wide(value)).item() ** 2 for value in found]
    return float(sum(squares) ** 0.5)


def _wide(value: torch.Tensor) -> torch.dtype:
    return torch.complex128 if value.is_complex() else torch.float64


def _worse(a: float, b: float) -> float:
    """The larger one; NaN is the worst."""
    return a if a != a or a > b else b
