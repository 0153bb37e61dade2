"""Matrix products, raised to contractions that keep their batch dims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.capture.ops.functions import Einsum

Tensor = torch.Tensor
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What autocast does to the operands of a matmul."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)


def _contract(a: Tensor, b: Tensor, equation: str) -> Any:
    if not (a.is_floating_point() and b.is_floating_point()):
        return NotImplemented
    a, b = autocast(a, b)
    if a.dtype != b.dtype:  # which torch sees where there is data, and not before
        raise TypeError(f"a product of {a.dtype} and {b.dtype}: write `.to({b.dtype})` behind one of them.")
    return Einsum.apply(a, b, equation)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Raise F.linear to an einsum and an add. NotImplemented for a weight that is no matrix, and for integers."""
    if weight.ndim != 2 or input.ndim < 1:
        return NotImplemented
    batch = _LETTERS[2 : input.ndim + 1]
    result = _contract(input, weight, f"{batch}a,ba->{batch}b")
    if result is NotImplemented or bias is None:
        return result
    return result + bias.to(result.dtype)


def matmul(input: Tensor, other: Tensor) -> Any:
    """Raise torch.matmul, bmm, mm and @ to an einsum with both batch dims. NotImplemented for vectors and integers."""
    a, b = input, other
    if a.ndim < 2 or b.ndim < 2:
        return NotImplemented
    if a.ndim > 2 and b.ndim > 2:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        a, b = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
    names = _LETTERS[3 : max(a.ndim, b.ndim) + 1]
    left, right = (names if x.ndim > 2 else "" for x in (a, b))
    return _contract(a, b, f"{left}ab,{right}bc->{names}ac")


def rmatmul(input: Tensor, other: Tensor) -> Any:
    """Raise Tensor.__rmatmul__: `other @ input`."""
    return matmul(other, input)


def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    """Raise addmm, beta * input + alpha * (mat1 @ mat2), to an einsum and an add. NotImplemented as for matmul."""
    product = matmul(mat1, mat2)
    if product is NotImplemented:
        return product
    product = product if alpha == 1 else product * alpha
    if beta == 0:
        return product
    return product + (input if beta == 1 else input * beta).to(product.dtype)


def einsum(equation: str, *operands: Any) -> Any:
    """Raise torch.einsum of two operands. NotImplemented for more or fewer, for "...", for an equation without arrow,
    for a name twice in one term or in one term alone, and for sizes that broadcast: torch takes these apart itself."""
    operands = tuple(operands[0]) if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    if not isinstance(equation, str) or len(operands) != 2:
        return NotImplemented
    equation = equation.replace(" ", "")
    left, arrow, result = equation.partition("->")
    if not arrow or "." in equation or left.count(",") != 1:
        return NotImplemented
    a, b = left.split(",")
    if any(len(set(names)) != len(names) for names in (a, b, result)):
        return NotImplemented
    if any((name in a) + (name in b) + (name in result) < 2 for name in set(a + b + result)):
        return NotImplemented
    sizes: dict[str, int] = {}
    for names, operand in zip((a, b), operands, strict=True):
        for name, size in zip(names, operand.shape, strict=True):
            if sizes.setdefault(name, size) != size:
                return NotImplemented
    return _contract(*operands, equation)


def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """The weight [o,i,j] between both: two products, where torch multiplies everything out."""
    if weight.ndim != 3 or input1.ndim < 1 or input1.shape[:-1] != input2.shape[:-1]:
        return NotImplemented
    batch = _LETTERS[3 : input1.ndim + 2]
    half = _contract(input1, weight, f"{batch}a,cab->{batch}cb")
    result = half if half is NotImplemented else _contract(half, input2, f"{batch}cb,{batch}b->{batch}c")
    return result if result is NotImplemented or bias is None else result + bias.to(result.dtype)


def cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Any:  # fmt: skip
    """The covariances of rows, over columns. NotImplemented with weights, of which torch reads whether they are
    valid."""
    if input.ndim > 2 or fweights is not None or aweights is not None or not input.dtype.is_floating_point:
        return NotImplemented
    x = input if input.ndim == 2 else input.reshape(1, -1)
    count = x.shape[1] - correction
    if count <= 0 or not x.numel():
        return NotImplemented
    x = x - x.mean(1, keepdim=True)
    product = _contract(x, x, "ac,bc->ab")
    return product if product is NotImplemented else (product / count).squeeze()


def corrcoef(input: Tensor) -> Any:
    """The covariances over both standard deviations, in -1..1."""
    found = cov(input)
    if found is NotImplemented:
        return found
    if found.ndim == 0:
        return found / found
    deviation = found.diagonal().sqrt()
    return (found / deviation.unsqueeze(1) / deviation.unsqueeze(0)).clamp(-1, 1)


def with_bias_apart(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """A convolution whose bias is added behind it, as it must be where the sum over input channels is still partial."""

    def raised(input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if bias is None:
            return NotImplemented
        if bias.dtype != input.dtype and not torch.is_autocast_enabled(input.device.type):
            raise RuntimeError(f"Input type ({input.dtype}) and bias type ({bias.dtype}) should be the same")
        y = function(input, weight, None, *args, **kwargs)
        return y + bias.to(y.dtype).reshape(-1, *(1 for _ in weight.shape[2:]))

    return raised
