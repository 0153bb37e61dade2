"""ARCHITECTURE.md's way from `parallelize` to the first program is the one that a call takes."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn.functional as F
from conftest import ROOT
from torch import nn

import autopar
from autopar.parallel.module import ParallelModule

MOST_FILES, MOST_STOPS = 12, 18
# What a reader does not follow: the program itself, the insides of capture and passes, and the user's tensors.
APART = ("ir/", "capture/", "custom_ops/", "machines/", "parallel/tensors/", "errors", "settings", "torch_")
Stop = tuple[str, str]  # file, function


class Way:
    """Follows who calls whom among the files of autopar. Reading a property is no call."""

    def __init__(self) -> None:
        self.calls: dict[Stop, dict[Stop, None]] = {}
        modules = [module for name, module in sys.modules.items() if name.startswith("autopar")]
        classes = [value for module in modules for value in vars(module).values() if inspect.isclass(value)]
        values = [value for each in classes for value in vars(each).values()]
        self.properties = {value.fget.__code__ for value in values if inspect.isfunction(getattr(value, "fget", None))}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        stop, caller = self.stop(frame.f_code), frame.f_back
        if event != "call" or stop is None:
            return
        while caller is not None and self.stop(caller.f_code) is None:
            caller = caller.f_back
        if caller is not None:
            self.calls.setdefault(self.stop(caller.f_code) or stop, {})[stop] = None

    def stop(self, code: CodeType) -> Stop | None:
        """A function of autopar's own, to which comprehensions and properties in it belong."""
        path = Path(code.co_filename)
        if code in self.properties or code.co_name.startswith("<") or not path.is_relative_to(ROOT / "autopar"):
            return None
        return str(path.relative_to(ROOT / "autopar")), code.co_qualname

    def leads(self, stop: Stop, seen: frozenset[Stop] = frozenset()) -> bool:
        """Whether a function reaches another file through those of its own."""
        called = [each for each in self.calls.get(stop, ()) if not each[0].startswith(APART) and each not in seen]
        return any(each[0] != stop[0] or self.leads(each, seen | {stop}) for each in called)

    def stops(self) -> set[Stop]:
        """The functions that are entered from another file, and lead on."""
        pairs = [(a, b) for a, called in self.calls.items() for b in called if a[0] != b[0]]
        return {b for a, b in pairs if not a[0].startswith(APART) and not b[0].startswith(APART) and self.leads(b)}


def test_a_reader_meets_few_files() -> None:
    model, batch = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), (torch.randn(12, 8), torch.randn(12, 16))
    before, way = sys.getprofile(), Way()
    sys.setprofile(way)
    try:
        made: ParallelModule = autopar.parallelize(model, "dp=1", loss_fn=lambda m, x, y: F.mse_loss(m(x), y))
        made.prepare(*batch)
    finally:
        sys.setprofile(before)
    files = {file for file, _ in way.stops()}
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert files == set(re.findall(r"^\d+\. `([a-z_/]+\.py)`", text, re.M))
    assert len(files) <= MOST_FILES and len(way.stops()) <= MOST_STOPS
