"""What a GPU runs, on tensors of the CPU: every branch for values that are not in this process's memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from autopar.runtime.kernels import host


@contextmanager
def off_host() -> Iterator[None]:
    """Take every tensor for one of another device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "on_host", lambda value: False)
        yield
