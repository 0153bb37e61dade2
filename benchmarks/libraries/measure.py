"""One model of the table: verified in float64 on two meshes, then with micro-batches."""

from __future__ import annotations

import logging
import time
import traceback
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch

from autopar import AutoparError, verify
from autopar.compiler.compile import batch_arguments
from benchmarks.libraries.case import Build, Case, Table
from benchmarks.libraries.models import TABLE

MESHES = {"dp=2,tp=2": {"mesh": "dp=2,tp=2"}, "dp=3": {"mesh": "dp=3"}}
# With micro-batches, where both meshes are verified.
FURTHER = {
    "zero=3": {"mesh": "dp=2", "zero": 3, "recompute": "full", "microbatches": 2},
    "pp=2,dp=2": {"mesh": "pp=2,dp=2", "microbatches": 2},
}
CONFIGURATIONS = {**MESHES, **FURTHER}
FIRST_CALL = "run the plain module once on a batch before it is compiled"  # what it offers for a module set up by that
STATISTICS = "batch_statistics='microbatch'"  # what the message offers for BatchNorm in training
VERIFIED, REFUSED, WRONG, BROKEN, UNDECIDED = "verified", "refused", "wrong", "broken", "undecided"


@dataclass
class Row:
    """results: by configuration, one of the five words. reasons: where it is not verified. specialize: it needed
    `specialize=True`, as the message of the refusal said; statistics: so it did `batch_statistics="microbatch"`;
    run_once: so it did a call of the plain module before."""

    package: str
    model: str
    version: str = ""
    results: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    specialize: bool = False
    statistics: bool = False
    run_once: bool = False
    seconds: float = 0.0

    @property
    def first(self) -> str:
        """The worst of the two meshes."""
        return self._worst(MESHES)

    @property
    def second(self) -> str:
        """The worst of the two with micro-batches."""
        return self._worst(FURTHER)

    def _worst(self, names: Iterable[str]) -> str:
        found = [self.results.get(name, BROKEN) for name in names]
        return next((word for word in (WRONG, BROKEN, UNDECIDED, REFUSED) if word in found), VERIFIED)


def declare_torchvision_ops() -> torch.library.Library:
    """Declare the ops without which torchvision cannot be imported where its C++ part, built for another torch, is not
    loaded (a machine with torch's CPU build). No model of the table calls them. They live as long as the result."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def measure(package: str, model: str, table: Table = TABLE, only: Iterable[str] = tuple(CONFIGURATIONS)) -> Row:
    """The row of one model with some of the configurations; what goes wrong stands in `reasons`."""
    ops = declare_torchvision_ops()

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    row, start = Row(package, model, version(package)), time.process_time()
    build = table[package][model]
    try:
        _plain(_seeded(build))  # a case of its own: some models keep what they computed
        case = _seeded(build)
    except Exception as error:
        return _all(row, f"the plain model itself: {_said(error)}")
    for name, options in ((name, CONFIGURATIONS[name]) for name in only):
        if name in FURTHER and any(row.results.get(mesh, VERIFIED) != VERIFIED for mesh in MESHES):
            continue
        row.results[name], row.reasons[name] = _verdict(case, row, options)
        if FIRST_CALL in row.reasons[name] and not row.run_once:
            row.run_once, case = True, _seeded(build)
            _plain(case)
            case.model.train()  # some forget then what they kept of the call
            row.results[name], row.reasons[name] = _verdict(case, row, options)
    row.seconds = time.process_time() - start
    del ops
    return row


def _all(row: Row, why: str) -> Row:
    row.results, row.reasons = dict.fromkeys(MESHES, BROKEN), dict.fromkeys(MESHES, why)
    return row


def _seeded(build: Build) -> Case:
    torch.manual_seed(0)
    case = build()
    case.model.train()
    return case


def _plain(case: Case) -> None:
    args, kwargs = batch_arguments(case.batch)
    case.loss(case.model, *args, **kwargs).backward()
    case.model.zero_grad(set_to_none=True)


def _verdict(case: Case, row: Row, options: dict[str, Any]) -> tuple[str, str]:
    if row.statistics and "microbatches" in options:  # it is asked for again
        options = {"batch_statistics": "microbatch", **options}
    try:
        report = _verify(case, {**options, "specialize": row.specialize})
    except AutoparError as error:
        if not row.specialize and "specialize=True" in str(error):
            row.specialize = True
            return _verdict(case, row, options)
        if "microbatches" in options and "batch_statistics" not in options and STATISTICS in str(error):
            found = _verdict(case, row, {**options, "batch_statistics": "microbatch"})
            row.statistics = row.statistics or found[0] == VERIFIED
            return found
        return REFUSED, f"{type(error).__name__}: {' '.join(str(error).split())}"
    except Exception as error:
        return BROKEN, _said(error)
    if report.undecided:
        return UNDECIDED, report.undecided
    return (VERIFIED, "") if report.ok else (WRONG, " ".join(str(report.mismatch or report.max_error).split()))


def _verify(case: Case, options: dict[str, Any]) -> Any:
    return verify(case.model, batch=case.batch, loss_fn=case.loss, **options)


def _said(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]} ({frame.filename.rsplit('/', 1)[-1]}:{frame.lineno})"
