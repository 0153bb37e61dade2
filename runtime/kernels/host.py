"""Whether a value lies in the memory of this process, where it may be read at any time.

The one place that asks, so that tests can run what a GPU runs on tensors of the CPU (tests/support/off_host.py).
Called as `host.on_host(x)`: what imports the function itself would keep its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def on_host(value: torch.Tensor | torch.device) -> bool:
    """True for the CPU. Elsewhere a read waits for the device, and a launch costs more than what caches save."""
    device = value if isinstance(value, torch.device) else value.device
    return device.type == "cpu"


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
