"""The command line's TARGET: `file.py:function` or `package.module:function`, giving an `autopar.Job`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from autopar.errors import AutoparError, TargetError

if TYPE_CHECKING:
    from autopar.job import Job


def check_target(target: str) -> tuple[str, str]:
    """The file or module, and the function, that TARGET names. Raises TargetError for another text, or no file."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise TargetError(f"TARGET '{target}': write file.py:function or package.module:function.")
    if place.endswith(".py") and not Path(place).is_file():
        raise TargetError(f"TARGET '{target}': there is no file '{Path(place).resolve()}'.")
    return place, name


def load_job(target: str, seed: int = 0) -> Job:
    """Call the function that TARGET names, with the random state of `seed` (so that every rank builds one model).

    The folder of a file is put on `sys.path`, as `python file.py` does. Raises TargetError.
    """
    import torch

    from autopar.job import Job

    place, name = check_target(target)
    module = _module(place, target)
    function = getattr(module, name, None)
    if not callable(function):
        near = difflib.get_close_matches(name, [n for n in vars(module) if callable(getattr(module, n))], n=3)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise TargetError(f"TARGET '{target}': '{place}' has no function '{name}'.{hint}")
    torch.manual_seed(seed)
    try:
        job = function()
    except AutoparError:
        raise
    except Exception as error:
        raise TargetError(f"TARGET '{target}' failed {_where(error)}: {type(error).__name__}: {error}") from error
    if not isinstance(job, Job):
        raise TargetError(f"TARGET '{target}' returned {type(job).__name__}, but must return an autopar.Job.")
    return job


def _module(place: str, target: str) -> ModuleType:
    try:
        if not place.endswith(".py"):
            if "" not in sys.path:
                sys.path.insert(0, "")
            return importlib.import_module(place)
        path = Path(place).resolve()
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    except AutoparError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise TargetError(f"TARGET '{target}' cannot be imported {_where(error)}: {what}") from error


def _where(error: Exception) -> str:
    from autopar.capture.refusals.location import is_user_file

    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_file(frame.filename)]
    own = [frame for frame in frames if "importlib" not in frame.filename]
    return f"at {own[-1].filename}:{own[-1].lineno}" if own else ""
