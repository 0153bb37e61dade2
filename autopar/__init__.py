"""autopar: a plain nn.Module, parallel on any device mesh, with the numbers of one device.

Names are loaded at first use (PEP 562): importing a part of the package does not import the rest.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.api import compile as compile
    from autopar.api import parallelize as parallelize
    from autopar.capture.per_microbatch import per_microbatch as per_microbatch
    from autopar.checkpoint.checkpointer import Checkpointer as Checkpointer
    from autopar.checkpoint.load import load as load
    from autopar.checkpoint.save import save as save
    from autopar.compiled import Compiled as Compiled
    from autopar.custom_ops.registry import register_rule as register_rule
    from autopar.ema import EMA as EMA
    from autopar.errors import AutoparError as AutoparError
    from autopar.integrations.prepare import prepare as prepare
    from autopar.ir.layout import Layout as Layout
    from autopar.ir.mesh import Mesh as Mesh
    from autopar.ir.options import StepOptions as StepOptions
    from autopar.job import Job as Job
    from autopar.parallel.module import ParallelModule as ParallelModule
    from autopar.parallel.saving import save_file as save_file
    from autopar.planning.space.decisions import read_plan as read_plan
    from autopar.verification.verify import Report as Report
    from autopar.verification.verify import verify as verify

__version__ = "0.1.0"

_CHECKOUT = os.path.dirname(__path__[0])
# In a checkout that is imported as it lies, `python` in its folder say, passes and runtime stand beside this folder.
if not os.path.isdir(os.path.join(__path__[0], "passes")) and os.path.isdir(os.path.join(_CHECKOUT, "passes")):
    __path__.append(_CHECKOUT)

_HOME = {
    "AutoparError": "autopar.errors",
    "Checkpointer": "autopar.checkpoint.checkpointer",
    "Compiled": "autopar.compiled",
    "EMA": "autopar.ema",
    "Job": "autopar.job",
    "Layout": "autopar.ir.layout",
    "Mesh": "autopar.ir.mesh",
    "ParallelModule": "autopar.parallel.module",
    "StepOptions": "autopar.ir.options",
    "Report": "autopar.verification.verify",
    "compile": "autopar.api",
    "load": "autopar.checkpoint.load",
    "parallelize": "autopar.api",
    "per_microbatch": "autopar.capture.per_microbatch",
    "prepare": "autopar.integrations.prepare",
    "read_plan": "autopar.planning.space.decisions",
    "register_rule": "autopar.custom_ops.registry",
    "save": "autopar.checkpoint.save",
    "save_file": "autopar.parallel.saving",
    "verify": "autopar.verification.verify",
}

__all__ = sorted(_HOME)


if not TYPE_CHECKING:  # a type checker has the names from above, and sees one that is mistyped

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'autopar' has no attribute '{name}'")
        from autopar.compiler.garbage import uncollected

        with uncollected():  # what is imported stays: looking through it for garbage takes as long again
            return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
