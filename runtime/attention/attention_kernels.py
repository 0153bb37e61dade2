"""Which kernel computes an attention: the first row of `TABLE` that takes the call. docs/attention.md shows it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from autopar.ir.ops.ops import op
from autopar.runtime.attention import attention_fused as fused
from autopar.runtime.attention.attention_plain import plain, plain_backward
from autopar.runtime.attention.blocks import AttentionCall, Mask, Tensor, Tensors
from autopar.runtime.kernels import host

_SHORT = (torch.bfloat16, torch.float16)


class KernelDevice(NamedTuple):
    """What is there to compute with.

    capability: of an NVIDIA GPU, (8, 0) is Ampere. off: the kernels that the user switched off by
    `torch.backends.cuda.enable_cudnn_sdp(False)`, `enable_flash_sdp(False)`, `enable_mem_efficient_sdp(False)`, or by
    `torch.use_deterministic_algorithms(True)`. is_host: the CPU's kernels.
    """

    type: str
    capability: tuple[int, int] = (0, 0)
    is_hip: bool = False
    off: frozenset[str] = frozenset()
    is_host: bool = False


class AttentionShape(NamedTuple):
    """What of a call decides. q [b,h,s,d], k [b,hk,t,d], v [b,hk,t,e]; mask: its shape."""

    device: KernelDevice
    dtype: torch.dtype
    b: int
    h: int
    hk: int
    s: int
    t: int
    d: int
    e: int
    causal: bool = False
    mask: tuple[int, ...] | None = None

    @property
    def empty(self) -> bool:
        return 0 in self[2:9]


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """A way to compute attention and its gradients.

    takes: whether it can compute a call. forward, backward: given the operands, and the call. width: how wide
    heads are made for it, given the widest; None if it takes them as they are. grain: elements to whose multiples
    strides and the first element are aligned.
    """

    name: str
    takes: Callable[[AttentionShape], bool]
    forward: Callable[..., Tensors]
    backward: Callable[..., Tensors]
    width: Callable[[int], int] | None = None
    grain: int = 1

    def attention(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensors:
        """(out, logsumexp)"""
        out, lse = self.forward(*self._operands(q, k, v), call)
        return _narrow(out, v.shape[3]), lse

    def attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall
    ) -> Tensors:
        """(dq, dk, dv)"""
        grad, q_, k_, v_, out = self._operands(grad, q, k, v, out)
        grads = self.backward(grad, q_, k_, v_, out, lse, call)
        return tuple(_narrow(each, x.shape[3]) for each, x in zip(grads, (q, k, v), strict=True))

    def _operands(self, *tensors: Tensor) -> Tensors:
        """Operands as the kernel reads them: a column of zeros in queries and keys changes no score."""
        if self.width is None:
            return tensors
        widths = [x.shape[3] for x in tensors]
        width = self.width(max(widths))
        return tuple(
            torch.constant_pad_nd(x, [0, width - has]) if has != width
            else x if _is_aligned(x, self.grain)
            else x.contiguous()
            for x, has in zip(tensors, widths, strict=True)
        )  # fmt: skip


def _narrow(x: Tensor, width: int) -> Tensor:
    """Without the columns that were added, and dense in (b, s, h, width) as the kernels leave theirs."""
    return x if x.shape[3] == width else x[..., :width].transpose(1, 2).contiguous().transpose(1, 2)


def _is_aligned(x: Tensor, grain: int) -> bool:
    """Rows without gaps, at addresses that a vector load takes: a kernel reads anything else as if it were so."""
    if x.stride(-1) != 1 or grain == 1:
        return x.stride(-1) == 1
    strides = (stride for size, stride in zip(x.shape[:-1], x.stride(), strict=False) if size > 1)
    return x.storage_offset() % grain == 0 and all(stride % grain == 0 for stride in strides)


def _cpu_flash_takes(call: AttentionShape) -> bool:
    # An empty dim is a division by zero (SIGFPE) in this kernel of torch 2.13.
    return call.device.is_host and call.dtype.is_floating_point and not call.empty


def _cudnn_takes(call: AttentionShape) -> bool:
    # It is slower to plan a call than to compute a short one.
    return (
        call.device.capability >= (9, 0) and "cudnn" not in call.device.off and call.dtype in _SHORT
        and min(call.s, call.t) >= 32 and max(call.d, call.e) <= 128 and _takes_bias(call)
    )  # fmt: skip


def _cuda_flash_takes(call: AttentionShape) -> bool:
    # Its causal mask ends at the last key (bottom right), ours begins at the first: the same only for a square.
    return (
        call.device.type == "cuda" and call.device.capability >= (8, 0) and "flash" not in call.device.off
        and call.dtype in _SHORT and call.mask is None and (not call.causal or call.s == call.t)
        and max(call.d, call.e) <= 256 and max(call.b, call.h) < 1 << 16 and not call.empty
    )  # fmt: skip


def _efficient_takes(call: AttentionShape) -> bool:
    is_new = call.device.capability >= (8, 0) or call.dtype != torch.bfloat16
    return (
        "efficient" not in call.device.off and is_new and call.dtype in (*_SHORT, torch.float32) and _takes_bias(call)
    )


def _takes_bias(call: AttentionShape) -> bool:
    # ROCm's efficient kernel has another logsumexp, and takes no mask that is causal as well.
    columns = call.mask[-1] if call.mask else call.t
    return (
        call.device.type == "cuda" and not call.device.is_hip and columns == call.t and call.mask != ()
        and call.h < 1 << 16 and not call.empty
    )  # fmt: skip


def _width_of_flash(widest: int) -> int:
    """Some GPUs (sm86, sm89) cannot train with heads between 192 and 224."""
    return 256 if widest > 192 else _of_eight(widest)


def _of_eight(widest: int) -> int:
    return widest + -widest % 8


def _op(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensors:
    tensors: Tensors = op("attention")(*_dense(q, k, v, call.mask), call.causal, call.scale)
    return tensors


def _op_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall
) -> Tensors:
    operands = _dense(grad, q, k, v, call.mask, out, lse)
    tensors: Tensors = op("attention_backward")(*operands, call.causal, call.scale)
    return tensors


def _dense(*tensors: Mask) -> Iterator[Mask]:
    return (x if x is None else x.contiguous() for x in tensors)


PLAIN = AttentionKernel("plain", lambda call: True, plain, plain_backward)
# Plain products are opaque to a compiler, which would make the scores of the whole.
OPAQUE = AttentionKernel("op", lambda call: True, _op, _op_backward)
TABLE = (
    AttentionKernel("flash (CPU)", _cpu_flash_takes, fused.cpu_flash, fused.cpu_flash_backward, lambda widest: widest),
    AttentionKernel("cudnn", _cudnn_takes, fused.cudnn, fused.cudnn_backward, _of_eight, 8),
    AttentionKernel("flash", _cuda_flash_takes, fused.cuda_flash, fused.cuda_flash_backward, _width_of_flash, 8),
    AttentionKernel("efficient", _efficient_takes, fused.efficient, fused.efficient_backward, _of_eight, 8),
    PLAIN,
)


def chosen(shape: AttentionShape) -> AttentionKernel:
    """The first kernel of the table that takes a call; the last takes all."""
    return next(kernel for kernel in TABLE if kernel.takes(shape))


def kernel_for(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, products: AttentionKernel = PLAIN
) -> AttentionKernel:
    """The kernel of a call; products: that of one which no fused kernel takes."""
    mask = None if call.mask is None else tuple(call.mask.shape)
    (b, h, s, d), (_, hk, t, e) = q.shape, (*k.shape[:3], v.shape[3])
    kernel = chosen(AttentionShape(_device(q.device), q.dtype, b, h, hk, s, t, d, e, call.causal, mask))
    return products if kernel is PLAIN else kernel


def _device(device: torch.device) -> KernelDevice:
    if host.on_host(device) or device.type not in ("cuda", "meta"):
        return KernelDevice(device.type, is_host=host.on_host(device))
    kernels = torch.backends.cuda
    # The gradients of cuDNN's kernel are sums in no fixed order.
    is_free = kernels.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()
    switches = {
        "cudnn": is_free,
        "flash": kernels.flash_sdp_enabled(),
        "efficient": kernels.mem_efficient_sdp_enabled(),
    }
    off = frozenset(name for name, is_on in switches.items() if not is_on)
    return KernelDevice("cuda", _capability(device), torch.version.hip is not None, off)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    """A tensor without data stands for one on a new GPU."""
    if device.type == "meta" or not torch.cuda.is_available():
        return 9, 0
    return torch.cuda.get_device_capability(device)
