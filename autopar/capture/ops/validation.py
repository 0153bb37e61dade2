"""Tell where torch.distributions checks its arguments: a branch on data that only ever raises.

A check of what hangs on no input runs at the capture, as all that is read of such values. Any other is left out of the
step and said so: to make it an output would cost each step a collective and a wait for the device, and the plain
model, which `verify` runs beside the programs, checks still.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch

_FOLDER = os.path.dirname(os.path.abspath(torch.distributions.__file__)) + os.sep
# The functions whose every bool() of a tensor asks whether all is valid.
_CHECKS = frozenset(
    (("distribution.py", "__init__"), ("distribution.py", "_validate_sample"), ("geometric.py", "__init__"),
     ("continuous_bernoulli.py", "__init__"), ("constraints.py", "check"),
     ("distribution.py", "_all_true_or_runtime_assert"))  # both of the first two, since torch 2.15
)  # fmt: skip
_NAMED = 3


def is_validation(function: Any, frame: FrameType) -> bool:
    """True for the bool() of a tensor by which torch.distributions would raise; `frame` is that of the caller."""
    if function is not torch.Tensor.__bool__:
        return False
    folder, name = os.path.split(frame.f_code.co_filename)
    return folder + os.sep == _FOLDER and (name, frame.f_code.co_name) in _CHECKS


def note_of(lines: Iterable[str]) -> str:
    """What is said of the checks that are left out, by the lines of the user's that make them."""
    found = [line or "an unknown line" for line in lines]
    more = f" and {len(found) - _NAMED} more lines" if len(found) > _NAMED else ""
    return (
        f"torch.distributions checks its arguments at {', '.join(found[:_NAMED])}{more}: a compiled step leaves out "
        f"the checks of what depends on the batch, a parameter or a buffer; validate_args=False does so in the plain "
        f"model"
    )
