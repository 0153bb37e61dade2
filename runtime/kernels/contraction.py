"""`autopar::einsum`: an einsum of two operands as one matrix product, with views instead of copies where possible.

Every name of the equation is one of four: batch (in both operands and the result), row (in `a` and the result),
column (in `b` and the result) or contracted (in both operands only). Each operand then reads as a matrix of
groups of names, and BLAS takes either orientation of a matrix without a copy, so that
`abc,dc->abd`, its input gradient `abd,dc->abc` and its weight gradient `abd,abc->dc` are one `mm` of views.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn.functional import linear

from autopar.runtime.kernels.generated import written_function
from autopar.runtime.kernels.kernel import Kernel

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Matrices = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class OperandPlan:
    """How an operand becomes a matrix: sum over dims, permute, reshape, swap the last two dims. None: as it is."""

    sum_dims: tuple[int, ...]
    permute: tuple[int, ...] | None
    shape: tuple[int, ...] | None
    transpose: bool

    @property
    def is_view(self) -> bool:
        """True if a contiguous operand needs no copy."""
        return not self.sum_dims and self.permute is None

    def text(self, x: str) -> str:
        """The expression for an operand of that name."""
        summed = f".sum({self.sum_dims})" if self.sum_dims else ""
        permuted = f".permute({self.permute})" if self.permute is not None else ""
        moved = f"{x}{summed}{permuted}"
        shaped = moved if self.shape is None else f"{moved}.reshape({self.shape})"
        if self.shape is not None and moved == x:  # a view takes half as long to make
            shaped = f"({x}.view({self.shape}) if {x}.is_contiguous() else {shaped})"
        return f"{shaped}{'.mT' if self.transpose else ''}"


@dataclass(frozen=True, slots=True)
class ContractionPlan:
    """`left @ right` of the two operands as matrices, then a reshape and perhaps a permute (a view) of the result.

    `matrices` and `product` are functions made for the plan: of small tensors, what Python decides takes longer than
    the product.
    """

    swap: bool  # True: b is the left matrix
    batched: bool  # True: bmm, else mm
    a: OperandPlan
    b: OperandPlan
    shape: tuple[int, ...] | None
    permute: tuple[int, ...] | None
    matrices: Matrices = field(init=False, repr=False, compare=False)
    product: Product = field(init=False, repr=False, compare=False)

    @property
    def is_linear(self) -> bool:
        """True for rows of many dims times a matrix."""
        plain = self.a.is_view and self.b.is_view and self.b.shape is None and self.permute is None
        return plain and not (self.batched or self.swap or self.a.transpose)

    def __post_init__(self) -> None:
        left, right = self.a.text("a"), self.b.text("b")
        both = f"{right}, {left}" if self.swap else f"{left}, {right}"
        shaped = f".view({self.shape})" if self.shape is not None else ""
        permuted = f".permute({self.permute})" if self.permute is not None else ""
        product = f"product({both}){shaped}{permuted}"
        if self.is_linear:  # torch makes the same views, in C++
            whole = "linear(a, b)" if self.b.transpose else "matmul(a, b)"
            product = f"{whole} if a.is_contiguous() else {product}"
        names = {"product": torch.bmm if self.batched else torch.mm, "linear": linear, "matmul": torch.matmul}
        for name, result in (("matrices", f"({both})"), ("product", product)):
            function = written_function(f"def {name}_of(a, b): return {result}", f"{name}_of", names, "contraction")
            object.__setattr__(self, name, function)


@functools.lru_cache(maxsize=4096)
def contraction_plan(equation: str, a: tuple[int, ...], b: tuple[int, ...]) -> ContractionPlan | None:
    """The plan for operands of shapes `a` and `b`; None if the equation is no matrix product (use einsum)."""
    left, result = equation.replace(" ", "").split("->")
    names_a, names_b = left.split(",")
    if any(len(set(names)) != len(names) for names in (names_a, names_b, result)) or "." in equation:
        return None
    sizes = dict(zip(names_a, a, strict=True)) | dict(zip(names_b, b, strict=True))
    kept_a = "".join(n for n in names_a if n in names_b or n in result)
    kept_b = "".join(n for n in names_b if n in names_a or n in result)
    batch = "".join(n for n in result if n in kept_a and n in kept_b)
    rows = "".join(n for n in result if n in kept_a and n not in kept_b)
    columns = "".join(n for n in result if n in kept_b and n not in kept_a)
    contracted = "".join(n for n in kept_a if n in kept_b and n not in result)
    if not contracted or len(batch + rows + columns) != len(result):
        return None  # an outer product (a broadcast multiplication does it), or a name of the result from nowhere
    # The contracted names may be flattened in either operand's order: take the one that permutes less.
    other = "".join(n for n in kept_b if n in contracted)
    plans = [
        (
            _operand(names_a, kept_a, batch, rows, order, sizes, columns_first=False),
            _operand(names_b, kept_b, batch, columns, order, sizes, columns_first=True),
        )
        for order in dict.fromkeys((contracted, other))
    ]
    plan_a, plan_b = min(plans, key=lambda pair: (pair[0].permute is not None) + (pair[1].permute is not None))
    swap = result == batch + columns + rows and bool(rows) and bool(columns)
    order = batch + columns + rows if swap else batch + rows + columns
    if swap:
        plan_a, plan_b = _flip(plan_a), _flip(plan_b)
    permute = tuple(order.index(n) for n in result)
    is_matrix = len(rows) == len(columns) == 1 and len(batch) <= 1
    shape = None if is_matrix else tuple(sizes[n] for n in order)
    return ContractionPlan(swap, bool(batch), plan_a, plan_b, shape, _unless_identity(permute))


def _operand(
    names: str, kept: str, batch: str, free: str, contracted: str, sizes: dict[str, int], columns_first: bool
) -> OperandPlan:
    """The operand as a [batch, free, contracted] matrix, or [batch, contracted, free] if `columns_first`."""
    sum_dims = tuple(i for i, n in enumerate(names) if n not in kept)
    free_first, free_last = batch + free + contracted, batch + contracted + free
    natural = not columns_first
    stored_free_first = kept == free_first or (kept != free_last and natural)
    order = free_first if stored_free_first else free_last
    permute = tuple(kept.index(n) for n in order)
    free_size, contracted_size = _size(free, sizes), _size(contracted, sizes)
    matrix = (free_size, contracted_size) if stored_free_first else (contracted_size, free_size)
    is_matrix = len(free) == len(contracted) == 1 and len(batch) <= 1
    shape = None if is_matrix else (_size(batch, sizes), *matrix) if batch else matrix
    return OperandPlan(sum_dims, _unless_identity(permute), shape, stored_free_first != natural)


def _flip(plan: OperandPlan) -> OperandPlan:
    return OperandPlan(plan.sum_dims, plan.permute, plan.shape, not plan.transpose)


def _size(names: str, sizes: dict[str, int]) -> int:
    return math.prod(sizes[n] for n in names)


def _unless_identity(permute: tuple[int, ...]) -> tuple[int, ...] | None:
    return None if permute == tuple(range(len(permute))) else permute


def einsum(a: torch.Tensor, b: torch.Tensor, equation: str) -> torch.Tensor:
    """`torch.einsum(equation, a, b)`. The result may be a permuted view of a contiguous matrix."""
    plan = contraction_plan(equation, a.shape, b.shape)
    return torch.einsum(equation, a, b) if plan is None else plan.product(a, b)


def add_contraction(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, equation: str) -> torch.Tensor:
    """`total += einsum(a, b, equation)`, in the product itself; `total` came from `einsum`."""
    plan = contraction_plan(equation, a.shape, b.shape)
    if plan is None:
        return total.add_(torch.einsum(equation, a, b))
    left, right = plan.matrices(a, b)
    into = total
    if plan.permute is not None:
        into = into.permute([plan.permute.index(dim) for dim in range(len(plan.permute))])
    into = into.view(*left.shape[:-1], right.shape[-1])
    if plan.batched:
        into.baddbmm_(left, right)
    else:
        into.addmm_(left, right)
    return total


KERNELS = {"einsum": Kernel(einsum, traced=einsum, adding=add_contraction)}
