"""Check the arguments of a call as torch does, where another form runs in its place; and tell where torch.distributions
checks its own: a branch on data that only ever raises.

A check of what hangs on no input runs at the capture, as all that is read of such values. Any other is left out of the
step and said so: to make it an output would cost each step a collective and a wait for the device, and the plain
model, which `verify` runs beside the programs, checks still.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
from torch.nn import functional as F

from autopar.capture.refusals.explain_failure import wants_data
from autopar.capture.refusals.location import is_user_file
from autopar.torch_compat import no_function_modes, on_data, tree_map

_FOLDER = os.path.dirname(os.path.abspath(torch.distributions.__file__)) + os.sep
# The functions whose every bool() of a tensor asks whether all is valid.
_CHECKS = frozenset(
    (("distribution.py", "__init__"), ("distribution.py", "_validate_sample"), ("geometric.py", "__init__"),
     ("continuous_bernoulli.py", "__init__"), ("constraints.py", "check"),
     ("distribution.py", "_all_true_or_runtime_assert"))  # both of the first two, since torch 2.15
)  # fmt: skip
_NAMED = 3
_NO_DATA = "meta tensors"  # torch cannot say it of shapes alone
FAULTS = (TypeError, ValueError, AttributeError, IndexError, KeyError, AssertionError, RuntimeError)
_CHECKED = frozenset((F.cross_entropy, F.nll_loss))  # whose raised forms take more than torch does


def is_validation(function: Any, frame: FrameType) -> bool:
    """True for the bool() of a tensor by which torch.distributions would raise; `frame` is that of the caller."""
    if function is not torch.Tensor.__bool__:
        return False
    folder, name = os.path.split(frame.f_code.co_filename)
    return folder + os.sep == _FOLDER and (name, frame.f_code.co_name) in _CHECKS


def check_by_torch(function: Any, args: Any, kwargs: Any) -> None:
    """Raise what torch says of arguments that the raised form would take. Of dtypes autocast decides."""
    if function in _CHECKED:
        _run_on_shapes(function, args, kwargs, torch.float32)


def check_chance(p: float) -> None:
    """Raise what torch says of the chance of a dropout."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")


def check_numbers(name: str, numbers: Sequence[Any], dtype: torch.dtype) -> None:
    """Raise what torch says of the numbers by which an in-place method draws, `normal_(mean, std)`; not of tensors."""
    if not any(isinstance(number, torch.Tensor) for number in numbers):
        with no_function_modes(), on_data():
            getattr(torch.empty(1, dtype=dtype, device="cpu"), name)(*numbers)


def as_torch_says(error: Exception, function: Any, args: Any, kwargs: Any) -> Exception:
    """Find what torch says of the shapes, where a raised form failed with what is no message of its own."""
    if wants_data(error):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    is_said = (frames[-1].line or "").startswith("raise") or any(is_user_file(frame.filename) for frame in frames)
    if not is_said:
        try:
            _run_on_shapes(function, args, kwargs)
        except Exception as told:
            return error if _NO_DATA in str(told) else told
    return error


def _run_on_shapes(function: Any, args: Any, kwargs: Any, floats: torch.dtype | None = None) -> None:
    """Call torch's own on the meta device. floats: the dtype of all that are not complex, in place of their own."""

    def shape_of(given: Any) -> Any:
        if not isinstance(given, torch.Tensor):
            return given
        dtype = (floats or given.dtype) if given.dtype.is_floating_point else given.dtype
        return torch.empty(given.shape, dtype=dtype, device="meta")

    with no_function_modes(), on_data(), suppress(NotImplementedError):  # torch has no such op on the meta device
        function(*tree_map(shape_of, args), **tree_map(shape_of, kwargs))


def note_of(lines: Iterable[str]) -> str:
    """What is said of the checks that are left out, by the lines of the user's that make them."""
    found = [line or "an unknown line" for line in lines]
    more = f" and {len(found) - _NAMED} more lines" if len(found) > _NAMED else ""
    return (
        f"torch.distributions checks its arguments at {', '.join(found[:_NAMED])}{more}: a compiled step leaves out "
        f"the checks of what depends on the batch, a parameter or a buffer; validate_args=False does so in the plain "
        f"model"
    )
