"""Functions that draw random numbers, by way of the counter-based generator: `autopar::random` and `autopar::dropout`.

They are raised in the plain reference run too, which then draws the same. What is not here (poisson, ...) stays a
random op of torch's, which the capture refuses.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture.ops.validation import check_chance, check_numbers
from autopar.capture.refusals.location import user_line
from autopar.errors import CaptureError
from autopar.ir.ops.ops import op

Tensor = torch.Tensor
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ALPHA = 1.7580993408473766  # of SELU, arXiv 1706.02515


class RandomMode(Protocol):
    """What is needed of the raising mode."""

    @property
    def captures(self) -> bool: ...
    def drawing(self) -> tuple[Tensor, int]: ...
    def drew(self, tensor: Tensor) -> None: ...
    def dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any: ...
    def draw(self, kind: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor: ...


Raised = Callable[..., Any]


def _refuse_generator(name: str, generator: Any) -> None:
    if generator is not None:
        raise CaptureError(
            f"{name} at {user_line(sys._getframe(1)) or 'an unknown line'} draws from a generator of its own, whose "
            f"numbers would be others on every rank. Leave generator= out: the seed= given to autopar decides."
        )


def _size(size: tuple[Any, ...], options: dict[str, Any]) -> tuple[int, ...]:
    """`rand(2, 3)`, `rand((2, 3))` or `rand(size=(2, 3))`."""
    given = options.pop("size", None)
    if given is None:
        given = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    return tuple(int(n) for n in given)


def _draw_floats(mode: RandomMode, kind: str, shape: Sequence[int], dtype: torch.dtype | None, options: Any) -> Any:
    """What a factory function returns; NotImplemented where torch would write elsewhere or draw complex numbers."""
    dtype = dtype or torch.get_default_dtype()
    if options.get("out") is not None or dtype not in _FLOATS:
        return NotImplemented
    value = mode.draw(kind, shape, dtype)
    if kind == "uniform":
        mode.drew(value)
    return value.requires_grad_() if options.get("requires_grad") else value


def _factory(kind: str, name: str) -> Raised:
    def raised(mode: RandomMode, *size: Any, generator: Any = None, dtype: Any = None, **options: Any) -> Any:
        _refuse_generator(name, generator)
        return _draw_floats(mode, kind, _size(size, options), dtype, options)

    return raised


def _like(kind: str, name: str) -> Raised:
    def raised(mode: RandomMode, input: Tensor, *, generator: Any = None, dtype: Any = None, **options: Any) -> Any:
        _refuse_generator(name, generator)
        return _draw_floats(mode, kind, input.shape, dtype or input.dtype, options)

    return raised


def _checked(x: Tensor, least: float, most: float, reader: str) -> Tensor:
    """Values that each step checks to be in least..most, as torch does before it draws by them."""
    checked: Tensor = op("checked_values")(x.detach(), least, most, reader)
    return checked


def _coins(mode: RandomMode, shape: Sequence[int], p: Any, dtype: torch.dtype) -> Tensor:
    """Bools that are True with probability p, a number or a tensor; drawn with 24 bits at least."""
    if isinstance(p, Tensor):
        p = _checked(p, 0.0, 1.0, "bernoulli() wants probabilities between 0 and 1")
    else:
        check_numbers("bernoulli_", (p,), torch.float32)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return mode.draw("uniform", shape, wide) < p


def _bernoulli(mode: RandomMode, input: Tensor, p: Any = None, *, generator: Any = None, out: Any = None) -> Any:
    """Given p, the values of `input` are not looked at."""
    _refuse_generator("bernoulli", generator)
    if out is not None:
        return NotImplemented
    return _coins(mode, input.shape, input if p is None else p, input.dtype).to(input.dtype)


def _bernoulli_(mode: RandomMode, input: Tensor, p: Any = 0.5, *, generator: Any = None) -> Tensor:
    _refuse_generator("bernoulli_", generator)
    return input.copy_(_coins(mode, input.shape, p, input.dtype))


def _filled(kind: str, name: str, names: tuple[str, ...], defaults: tuple[float, ...], scale: Raised) -> Raised:
    """An in-place op: the draw, scaled by its numbers, which may be tensors of one element. (`from` is no name for a
    parameter of a Python function.)"""

    def raised(mode: RandomMode, input: Tensor, *numbers: Any, generator: Any = None, **named: Any) -> Any:
        _refuse_generator(name, generator)
        if input.dtype not in _FLOATS:
            return NotImplemented
        given = [named.get(n, d) for n, d in zip(names, defaults, strict=True)]
        given[: len(numbers)] = numbers
        check_numbers(name, given, input.dtype)
        result = input.copy_(scale(mode.draw(kind, input.shape, input.dtype), *given))
        if kind == "uniform" and not any(isinstance(number, Tensor) for number in given) and given == [0.0, 1.0]:
            mode.drew(result)
        return result

    return raised


def _normal(
    mode: RandomMode, mean: Any, std: Any = 1.0, size: Any = None, *, generator: Any = None, out: Any = None,
    dtype: Any = None, **_options: Any,
) -> Any:  # fmt: skip
    """torch's has no gradient to the mean or the deviation either."""
    _refuse_generator("normal", generator)
    if out is not None:
        return NotImplemented
    tensors = [x.detach() for x in (mean, std) if isinstance(x, Tensor)]
    mean, std = (x.detach() if isinstance(x, Tensor) else x for x in (mean, std))
    shape = torch.broadcast_shapes(*(x.shape for x in tensors)) if tensors else tuple(size)
    dtype = tensors[0].dtype if tensors else dtype or torch.get_default_dtype()
    if dtype not in _FLOATS:
        return NotImplemented
    if isinstance(std, Tensor):
        std = _checked(std, 0.0, torch.finfo(dtype).max, "normal() wants deviations that are finite and not negative")
    else:
        check_numbers("normal_", (0.0, std), torch.float32)
    return mode.draw("normal", shape, dtype) * std + mean


def _integers(mode: RandomMode, low: int, high: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    if not 0 < high - low <= 2**32:
        where = user_line(sys._getframe(1)) or "an unknown line"
        raise CaptureError(f"randint at {where} draws from {low} up to {high}: that must be 1 to 2^32 numbers.")
    return (mode.draw("uniform", shape, torch.float64) * (high - low)).floor_().add_(low).to(dtype)


def _randint(mode: RandomMode, *args: Any, generator: Any = None, dtype: Any = None, **options: Any) -> Any:
    """`randint(high, size)` or `randint(low, high, size)`."""
    _refuse_generator("randint", generator)
    if options.get("out") is not None:
        return NotImplemented
    rest = list(args)
    size = options["size"] if "size" in options else rest.pop()
    high = options["high"] if "high" in options else rest.pop()
    low = options.get("low", rest.pop() if rest else 0)
    return _integers(mode, low, high, tuple(size), dtype or torch.int64)


def _randint_like(mode: RandomMode, input: Tensor, *args: int, dtype: Any = None, **options: Any) -> Any:
    _refuse_generator("randint_like", options.get("generator"))
    rest = list(args)
    high = options["high"] if "high" in options else rest.pop()
    low = options.get("low", rest.pop() if rest else 0)
    return _integers(mode, low, high, input.shape, dtype or input.dtype)


def _randperm(mode: RandomMode, n: int, *, generator: Any = None, dtype: Any = None, **options: Any) -> Any:
    """The order of n draws, which is why it is made whole on every rank."""
    _refuse_generator("randperm", generator)
    if options.get("out") is not None:
        return NotImplemented
    return mode.draw("uniform", (n,), torch.float64).sort(stable=True)[1].to(dtype or torch.int64)


def _multinomial(
    mode: RandomMode,
    input: Tensor,
    num_samples: int,
    replacement: bool = False,
    *,
    generator: Any = None,
    out: Any = None,
) -> Any:
    """A race of exponential clocks, as torch draws where there is no replacement: index i is first with probability
    p_i / sum(p), and so on among the others. With replacement each sample is a race of its own."""
    _refuse_generator("multinomial", generator)
    if out is not None or input.dtype not in _FLOATS:
        return NotImplemented
    limits = torch.finfo(input.dtype)
    p = _checked(input, 0.0, limits.max, "multinomial() wants weights that are finite and not negative")
    p = p / _checked(
        p.amax(-1, keepdim=True), limits.tiny, limits.max, "multinomial() wants a weight above 0 in each row"
    )
    if replacement and num_samples > 1:
        shape = (*p.shape[:-1], num_samples, p.shape[-1])
        multinomial: Tensor = (p.unsqueeze(-2) / mode.draw("exponential", shape, p.dtype)).max(-1)[1]
        return multinomial
    speed = p / mode.draw("exponential", p.shape, p.dtype)
    return speed.max(-1, keepdim=True)[1] if num_samples == 1 else speed.topk(num_samples)[1]


def _gumbel_softmax(
    mode: RandomMode, logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Tensor:
    """arXiv 1611.01144."""
    noise = -mode.draw("exponential", logits.shape, logits.dtype).log()
    soft = ((logits + noise) / tau).softmax(dim)
    if not hard:
        return soft
    index = soft.max(dim, keepdim=True)[1]
    return torch.zeros_like(logits).scatter(dim, index, 1.0) - soft.detach() + soft


def _rrelu(
    mode: RandomMode,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Tensor:
    if lower > upper:
        raise RuntimeError(f"the lower bound of rrelu, {lower}, is above the upper one, {upper}")
    slope: Any = (lower + upper) / 2
    if training:
        slope = mode.draw("uniform", input.shape, input.dtype) * (upper - lower) + lower
    result = torch.where(input <= 0, input * slope, input)
    return input.copy_(result) if inplace else result


def _alpha_dropout_of(features: bool) -> Raised:
    """Dropout to SELU's lowest value, scaled so that mean and variance stay; or of whole channels."""

    def raised(
        mode: RandomMode, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
    ) -> Tensor:
        check_chance(p)
        if not training or p == 0.0:
            return input
        shape = (*input.shape[:2], *(1 for _ in input.shape[2:])) if features else input.shape
        if p == 1.0:
            result = input * 0.0
        else:
            kept = _coins(mode, shape, 1.0 - p, input.dtype).to(input.dtype)
            a = 1.0 / math.sqrt((_ALPHA * _ALPHA * p + 1.0) * (1.0 - p))
            result = input * (kept * a) + (kept - 1.0 + p) * (_ALPHA * a)
        return input.copy_(result) if inplace else result

    return raised


def _dropout(mode: RandomMode, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    check_chance(p)
    return mode.dropout(input, p, training, inplace)


def _torch_dropout(mode: RandomMode, input: Tensor, p: float, train: bool) -> Any:
    check_chance(p)
    return mode.dropout(input, p, train)


def _feature_dropout(
    mode: RandomMode, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    """Dropout of whole channels: dims 0 and 1 draw, the rest share."""
    check_chance(p)
    if not training or p == 0.0 or input.ndim < 3:
        return NotImplemented if training and p else input
    keep = mode.dropout(torch.ones_like(input[(slice(None), slice(None)) + (slice(0, 1),) * (input.ndim - 2)]), p)
    return input.mul_(keep) if inplace else input * keep


_uniform_ = _filled("uniform", "uniform_", ("from", "to"), (0.0, 1.0), lambda u, a, b: u * (b - a) + a)
_normal_ = _filled("normal", "normal_", ("mean", "std"), (0.0, 1.0), lambda z, mean, std: z * std + mean)


def _init_uniform(mode: RandomMode, tensor: Tensor, a: Any = 0.0, b: Any = 1.0, generator: Any = None) -> Any:
    with torch.no_grad():
        return _uniform_(mode, tensor, a, b, generator=generator)


def _init_normal(mode: RandomMode, tensor: Tensor, mean: Any = 0.0, std: Any = 1.0, generator: Any = None) -> Any:
    with torch.no_grad():
        return _normal_(mode, tensor, mean, std, generator=generator)


def _init_kaiming_uniform(
    _mode: RandomMode, tensor: Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: Any = "leaky_relu",
    generator: Any = None,
) -> Any:  # fmt: skip
    fans = dict(zip(("fan_in", "fan_out"), nn.init._calculate_fan_in_and_fan_out(tensor), strict=True))
    bound = nn.init.calculate_gain(nonlinearity, a) * math.sqrt(3 / fans[mode])
    return _init_uniform(_mode, tensor, -bound, bound, generator)


RANDOM: dict[Any, Raised] = {
    F.dropout: _dropout,
    torch.dropout: _torch_dropout,
    **dict.fromkeys((F.dropout1d, F.dropout2d, F.dropout3d), _feature_dropout),
    F.alpha_dropout: _alpha_dropout_of(features=False),
    F.feature_alpha_dropout: _alpha_dropout_of(features=True),
    F.gumbel_softmax: _gumbel_softmax,
    F.rrelu: _rrelu,
    torch.rand: _factory("uniform", "rand"),
    torch.randn: _factory("normal", "randn"),
    torch.rand_like: _like("uniform", "rand_like"),
    torch.randn_like: _like("normal", "randn_like"),
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _bernoulli_,
    Tensor.uniform_: _uniform_,
    Tensor.normal_: _normal_,
    Tensor.exponential_: _filled("exponential", "exponential_", ("lambd",), (1.0,), lambda e, rate: e / rate),
    nn.init.uniform_: _init_uniform,  # of torch's initialisers those that no mode sees the inside of
    nn.init.normal_: _init_normal,
    nn.init.kaiming_uniform_: _init_kaiming_uniform,
    torch.normal: _normal,
    torch.randint: _randint,
    torch.randint_like: _randint_like,
    torch.randperm: _randperm,
    **dict.fromkeys((torch.multinomial, Tensor.multinomial), _multinomial),
}
