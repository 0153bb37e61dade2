"""Whether a value lies in the memory of this process, where it may be read at any time.

The one place that asks, so that tests can run what a GPU runs on tensors of the CPU (tests/support/off_host.py).
Called as `host.on_host(x)`: what imports the function itself would keep its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch


def on_host(value: torch.Tensor | torch.device) -> bool:
    """True for the CPU. Elsewhere a read waits for the device, and a launch costs more than what caches save."""
    device = value if isinstance(value, torch.device) else value.device
    return device.type == "cpu"


def exp_(x: torch.Tensor) -> torch.Tensor:
    """e to the power of each element, in place. On a CPU by powers of two, for which torch has vector code of its own:
    its exp is MKL's there, and twice as slow on CPUs of other makers. Of x below -15 the last 4 bits are rounded."""
    return x.mul_(math.log2(math.e)).exp2_() if on_host(x) else x.exp_()


def sent(numbers: torch.Tensor) -> Callable[[], list[int]]:
    """Begin to copy numbers to the host. What is returned gives them, and waits for nothing that the device is given
    from now on."""
    copy = numbers.to("cpu", non_blocking=True)  # from a device, into memory that it can write while the host goes on
    done = torch.get_device_module(numbers.device).Event()
    done.record()

    def read() -> list[int]:
        done.synchronize()
        found: list[int] = copy.tolist()
        return found

    return read
