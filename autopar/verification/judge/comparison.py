"""Comparing what a step gave with what it should give: errors by tensor, a table of them, a report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from autopar.ir.program import INPUT_GRADIENT, PARTNER

Values = dict[tuple[str, str], torch.Tensor]  # by (kind, name)
Key = tuple[str, str]
KINDS = ("loss", "aux", "gradient", INPUT_GRADIENT, "weight", "buffer")  # of a step, in the order of a report
# Of a short float: two roundings, for a tensor in which torch.autocast happens to be exact.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
WORSE = 2.0  # how many times torch.autocast's own error a precision may have
# A tensor that is zero but for rounding (the gradient of a key's bias, the loss of a policy that has not moved) is
# measured against this share of the size of all of its kind (`sizes_of`); of a node, against that of its largest
# operand, and in the backward pass of all gradients. AdamW enlarges the rounding, so weights get more. What a loss
# returns beside it may be small by itself, and so may what else a caller compares, under kinds of its own.
ZERO = {
    "gradient": 1e-5, INPUT_GRADIENT: 1e-5, "weight": 1e-3, "buffer": 1e-5, "loss": 1e-5, "aux": 1e-10, "node": 1e-6,
}  # fmt: skip
# The least share, of every kind but aux, in shorter floats: in float32 it and the tolerance make some five roundings.
SHORT_ZERO = {torch.float32: 5e-3, torch.bfloat16: 1e-3, torch.float16: 1e-4}


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """One comparison: `kind` is loss, aux (returned beside the loss), gradient, input_gradient, weight or buffer.

    error: norm of the difference over the norm of the single-device value, the worst of all steps.
    replicas: the largest difference between ranks that should hold the same. allowed: the error of torch.autocast
    under a precision, which is the measure there. noise: the error of the plain module if each of its results is off
    by one unit in the last place, measured where the error is above the tolerance. A row that has one and is ok is as
    exact as the model allows (see `noise.py`). is_open: noise leaves nothing of it to compare: a longer float has
    to tell whether it is right.
    """

    kind: str
    name: str
    error: float
    replicas: float
    ok: bool
    allowed: float | None = None
    noise: float | None = None
    is_open: bool = False


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
class Exact:
    """What the programs give in float64. failed: why they did not run there."""

    rows: tuple[ComparedRow, ...] = ()
    failed: str = ""
    mismatch: Mismatch | None = None

    @property
    def is_wrong(self) -> bool:
        return not all(row.ok for row in self.rows)

    def lines(self, width: int) -> list[str]:
        """What a report says of it."""
        if self.failed:
            return [f"not compared in float64, where the programs do not run: {self.failed}"]
        wrong = [
            f"{row.kind:9} {row.name:{width}} {row.error:9.2e}  WRONG in float64" for row in self.rows if not row.ok
        ]
        most = max((row.error for row in self.rows), default=0.0)
        return [*wrong, f"the same in float64: {'NOT EQUAL' if wrong else 'all equal'}, max error {most:.2e}"]


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify` found; prints as a verdict and a table."""

    mesh: str
    dtype: torch.dtype
    steps: int
    tolerance: float
    rows: tuple[ComparedRow, ...]
    mismatch: Mismatch | None = None
    note: str = ""  # what was compared with what, if not equals in one dtype
    sums: tuple[str, ...] = ()  # a line for each sum of gradients in a dtype that was not asked for
    exact: Exact | None = None  # of the same programs in float64, where the dtype is shorter
    is_stepwise: bool = False  # each step began with what the plain module gave in the one before

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows) and not self._is_wrong and not self.sums

    @property
    def _is_wrong(self) -> bool:
        return self.exact is not None and self.exact.is_wrong

    @property
    def is_longest(self) -> bool:
        """Whether the programs compute in float64. Any other hides what is wrong by less than its resolution."""
        return self.dtype == torch.float64 and not self.note

    @property
    def asks_longer_float(self) -> bool:
        """True where a longer float has to tell: of all that is wrong noise leaves nothing to compare, or it excused
        something in a short float whose programs do not run in float64."""
        is_left = self.exact is not None and bool(self.exact.failed) and any(row.noise is not None for row in self.rows)
        asks = is_left or not all(row.ok for row in self.rows)
        return asks and all(row.ok or row.is_open for row in self.rows) and not self._is_wrong and not self.sums

    @property
    def is_undecided(self) -> bool:
        """True where nothing says that the programs are wrong, and no longer float can tell that they are right."""
        return self.is_longest and self.asks_longer_float

    def settled(self) -> Report:
        """Decide what noise left open by the programs in float64."""
        if not self.asks_longer_float or self.exact is None or self.exact.failed:
            return self
        return replace(self, rows=tuple(replace(row, ok=True) for row in self.rows), mismatch=None)

    @property
    def undecided(self) -> str:
        """What noise leaves open, and what would leave something to compare; "" where all is decided."""
        if not self.is_undecided:
            return ""
        moved = max((row for row in self.rows if row.is_open), key=lambda row: row.noise or 0.0)
        count = sum(row.is_open for row in self.rows)
        return (
            f"rounding alone, of one unit in the last place of each result, moves {moved.kind} {moved.name} of the "
            f"plain module by {moved.noise:.0e} of its size: {count} of {len(self.rows)} tensors leave nothing to "
            "compare. Verify the model with a larger batch, larger inputs (a normalisation over two or three values "
            "enlarges rounding most) or other weights"
        )

    @property
    def max_error(self) -> float:
        return max((row.error for row in self.rows), default=0.0)

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        lines = [f"{self.mesh}  {self.dtype}  {self.steps} steps  tolerance {self.tolerance:.0e}"]
        lines += [self.note] * bool(self.note)
        lines += [_STEPWISE] * self.is_stepwise
        excused = sum(row.ok and row.noise is not None for row in self.rows)
        equal = "all within it" if self.note else "all equal"
        equal += f", {excused} of {len(self.rows)} as exactly as the model allows" if excused else ""
        verdict = equal if self.ok else "UNDECIDED" if self.is_undecided else "NOT EQUAL"
        lines.append(f"{verdict}: max error {self.max_error:.2e}")
        lines += [self.undecided] * self.is_undecided
        lines += [f"WRONG: {text}" for text in self.sums]
        lines += [] if self.mismatch is None else [str(self.mismatch)]
        for row in self.rows:
            mark = "ok" if row.ok else "OPEN" if self.is_undecided else "WRONG"
            replicas = f"  ranks differ by {row.replicas:.1e}" if row.replicas else ""
            told = f"  autocast {row.allowed:.2e}" if row.allowed is not None else ""
            if row.ok and math.isnan(row.error):
                told += ": the plain module is not finite here, and float64 is right"
            elif row.noise is not None:
                told += f"{': as exact as the model allows,' if row.ok else ''}  rounding alone gives {row.noise:.2e}"
            lines.append(f"{row.kind:9} {row.name:{width}} {row.error:9.2e}  {mark}{told}{replicas}")
        lines += [] if self.exact is None else self.exact.lines(width)
        return "\n".join(lines)


_STEPWISE = (
    "each step begins with the plain module's weights: over all steps rounding grows until nothing is left to compare"
)


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
    scale = max(_finite(b).norm().item(), floor)
    return difference / scale if scale > 0 else float("inf")


def is_whole(value: torch.Tensor) -> bool:
    """True for a tensor of whole numbers or bools."""
    return not value.is_floating_point() and not value.is_complex()


def share_that_differs(given: torch.Tensor, expected: torch.Tensor) -> float:
    """The share of the elements of two tensors that differ; infinite for tensors of two shapes."""
    if given.shape != expected.shape:
        return float("inf")
    return (given != expected).double().mean().item() if expected.numel() else 0.0


@dataclass(slots=True)
class Table:
    """The worst errors so far, by (kind, name). shares: how large a tensor, or what its error is measured against, is
    beside all of its kind. whole: the tensors of whole numbers and bools, whose error is the share of elements that
    differ: right are they if none does."""

    tolerance: float
    errors: dict[Key, float] = field(default_factory=dict)
    replicas: dict[Key, float] = field(default_factory=dict)
    allowed: dict[Key, float] = field(default_factory=dict)
    shares: dict[Key, float] = field(default_factory=dict)
    whole: set[Key] = field(default_factory=set)
    zero: float = 0.0  # at least this share of a kind's norm is what errors are measured against

    @staticmethod
    def of(dtype: torch.dtype, roundings: int = 1) -> Table:
        """An empty table with the tolerance of a dtype, for so many times as many roundings as usual."""
        return Table(roundings * TOLERANCE.get(dtype, 1e-2), zero=SHORT_ZERO.get(dtype, 0.0))

    def is_small(self, key: Key) -> bool:
        """True for a tensor that is so small that its errors are measured against others of its kind."""
        return self.shares.get(key, 1.0) <= 1.001 * self.zero_share(key[0])

    def zero_share(self, kind: str) -> float:
        """The least share of its kind that the error of a tensor is measured against."""
        return max(ZERO[kind], self.zero) if kind in ZERO and kind != "aux" else ZERO["aux"]

    @property
    def of_nodes(self) -> float:
        """The tolerance of one node: roundings before it add up."""
        return self.tolerance * 16 if self.zero else self.tolerance

    def compare(
        self, expected: Values, given: Values, replicas: Mapping[Key, float], other: Values | None = None
    ) -> None:
        """Enter a step. other: what torch.autocast gives; its errors are allowed, `WORSE` times."""
        sizes = sizes_of(expected)
        floors = {kind: self.zero_share(kind) * size for kind, size in sizes.items()}
        for key in sorted((other or {}).keys() & expected.keys()):
            error = error_of((other or {})[key], expected[key], floors[key[0]])
            self.allowed[key] = max(self.allowed.get(key, 0.0), error)  # one that overflows allows nothing
        for key in sorted(expected.keys() | given.keys()):
            wrong = key not in expected or key not in given
            error = float("inf") if wrong else error_of(given[key], expected[key], floors[key[0]])
            if not wrong and is_whole(expected[key]):
                self.whole.add(key)
                error = share_that_differs(given[key], expected[key])
            self.errors[key] = _worse(error, self.errors.get(key, 0.0))
            self.replicas[key] = max(replicas.get(key, 0.0), self.replicas.get(key, 0.0))
            if not wrong and sizes[key[0]] > 0:
                share = max(norm_of({key: expected[key]}, key[0]), floors[key[0]]) / sizes[key[0]]
                self.shares[key] = max(share, self.shares.get(key, 0.0))

    def rows(self) -> tuple[ComparedRow, ...]:
        order = [*dict.fromkeys([*KINDS, *(kind for kind, _ in self.errors)])]
        keys = sorted(self.errors, key=lambda key: order.index(key[0]))
        return tuple(
            ComparedRow(*key, self.errors[key], self.replicas[key], self._is_right(key), self.allowed.get(key))
            for key in keys
        )

    def _is_right(self, key: Key) -> bool:
        limit = 0.0 if key in self.whole else max(self.tolerance, WORSE * self.allowed.get(key, 0.0))
        return self.errors[key] <= limit and self.replicas[key] <= self.tolerance


def sizes_of(values: Values) -> dict[str, float]:
    """The size of all tensors of each kind: their norm. That of the loss is by how much it changes with the weights,
    since one that is zero on paper has none of its own; and what is returned beside it is of the same size."""
    sizes = {kind: norm_of(values, kind) for kind in {*KINDS, *(kind for kind, _ in values)}}
    sizes["loss"] = sizes["gradient"] * sizes["weight"]
    sizes["aux"] = max(sizes["loss"], norm_of(values, "loss"))
    return sizes


def norm_of(values: Values, kind: str) -> float:
    """The norm of all floating-point tensors of a kind, as of one."""
    found = [
        value
        for (other, _), value in values.items()
        if other == kind and (value.is_floating_point() or value.is_complex())
    ]
    squares = [torch.linalg.vector_norm(_finite(value), dtype=_wide(value)).item() ** 2 for value in found]
    return float(sum(squares) ** 0.5)


def _finite(value: torch.Tensor) -> torch.Tensor:
    """Put zeros in place of what is not finite."""
    return torch.where(value.isfinite(), value, torch.zeros_like(value))


def _wide(value: torch.Tensor) -> torch.dtype:
    return torch.complex128 if value.is_complex() else torch.float64


def _worse(a: float, b: float) -> float:
    """The larger one; NaN is the worst."""
    return a if a != a or a > b else b


def of_both(expected: Values, given: Values) -> tuple[Values, Values]:
    """What both sides have: the state under the names of weights and buffers. A buffer that is not persistent is in no
    state dict, and plain modules in the loss are compared on the virtual mesh."""
    found = {key: value for key, value in given.items() if key[0] != "state"}
    found.update({
        (kind, name): given["state", name]
        for kind, name in expected
        if kind in ("weight", "buffer") and ("state", name) in given
    })  # fmt: skip
    kept = {key for key in expected if key[0] != "buffer" or key in found}
    return {key: expected[key] for key in expected if key in kept and not key[1].startswith(PARTNER)}, found
