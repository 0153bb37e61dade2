"""What a rank does of a journey: it holds both sides between the actions, runs one, and compares all there is."""

from __future__ import annotations

import logging
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError, BatchError, RankError
from autopar.verification.judge.comparison import ComparedRow, Values
from autopar.verification.judge.sum_dtypes import wrong_sums
from benchmarks.journeys import models
from benchmarks.journeys.actions import ACTIONS, Action
from benchmarks.journeys.compare import Judge, floats_of, leaves_of
from benchmarks.journeys.models import dtype_of, is_exact, low_of
from benchmarks.journeys.side import Side, Stopped, parallel
from benchmarks.journeys.table import load_actions

load_actions()


@dataclass(frozen=True)
class Report:
    """What one rank made of an action. facts: what is true of the pair now, on which the next action may depend."""

    verdict: str  # ok, refused, both fail and open (which end the journey), WRONG, BROKEN
    text: str = ""
    facts: frozenset[str] = frozenset()
    is_excused: bool = False  # rounding of a short float excuses what differs, as it would a sum that is left out


@dataclass(frozen=True)
class Taken:
    """An action of the plain side. stop: the mark at which it ended, if it did."""

    name: str
    args: Mapping[str, Any]
    stop: int | None


@dataclass
class Pair:
    """Both sides of a journey, which began with a setup. taken: what the plain one has done."""

    first: Mapping[str, Any]
    ours: Side
    theirs: Side
    taken: list[Taken] = field(default_factory=list)

    def act(self, name: str, args: Mapping[str, Any]) -> Report:
        """One action on both, and the comparison. The parallel model goes first: refused, it did not happen."""
        action, got, refusal, is_due = ACTIONS[name], None, "", False
        try:
            got = _run(action.run, self.ours, args)
        except AutoparError as error:
            report = _refused(error)
            if report.verdict == "BROKEN":
                return report
            refusal, is_due = report.text, bool(action.must_refuse and isinstance(error, action.must_refuse))
            if self._is_said(error) and not is_due:
                return Report("WRONG", f"it is said which dims count samples: {refusal}")
        except BaseException as error:  # some of torch's are no Exception
            return self._failed(action, args, error)
        if action.must_refuse and not refusal:
            return Report("WRONG", "it was not refused")
        if refusal and action.torn:
            return Report("refused", refusal)
        try:
            found, rows = self._compared(name, args, got, refusal)
        except BaseException as error:
            return _broken("comparing: ", error)
        if found:
            return Report("WRONG", (f"after a refusal ({refusal}): " if refusal else "") + "; ".join(found[:4]))
        if any(row.is_open for row in rows):
            names = ", ".join(f"{row.kind} '{row.name}'" for row in rows if row.is_open)
            return Report("open", f"rounding leaves nothing to compare of {names}"[:400])
        is_short = self.judge.short is not None or self.judge.dtype.itemsize < torch.float32.itemsize
        return Report("refused" if refusal and not is_due else "ok", refusal, self.facts(), is_short and bool(rows))

    def _compared(
        self, name: str, args: Mapping[str, Any], got: Any, refusal: str
    ) -> tuple[list[str], list[ComparedRow]]:
        """What differs after the plain module did the same, up to where the parallel one was refused."""
        found, want, stop = [], None, self.ours.marks if refusal else None
        if stop == 0:
            self.theirs.seen.clear()
        else:
            self.taken.append(Taken(name, args, stop))
            want, is_whole = _take(self.theirs, self.taken[-1])
            if stop and is_whole:
                found.append(f"the plain module made fewer than {stop} parts of it")
        ours = leaves_of(self.ours, None if refusal else got, self.theirs)
        more, rows = self.judge.differences(ours, leaves_of(self.theirs, want, self.theirs))
        return [*found, *more, *self._wrong_sums()], rows

    def _wrong_sums(self) -> Iterator[str]:
        """Sums of gradients in another dtype than was asked for, which are within what a short float may be off."""
        if self.judge.short is not None:
            for running in parallel(self.ours).programs:
                yield from wrong_sums(running.compiled)

    def _is_said(self, error: AutoparError) -> bool:
        """True for an error about parts of batches whose dims the user has said, as they are."""
        is_about = isinstance(error, (BatchError, RankError)) or "batch_dims" in str(error)
        return "batch_dims" in self.ours.setup["options"] and is_about

    @property
    def judge(self) -> Judge:
        setup = self.ours.setup
        return Judge(dtype_of(setup), low_of(setup), self._again)

    def _again(self, change: Callable[[nn.Module], None], is_short: bool) -> list[Values]:
        """What the plain side holds if it takes the journey again from changed weights. is_short: by torch.autocast."""
        was, setup = models.temperature, self.first
        models.set_temperature(1.0)
        try:
            with tempfile.TemporaryDirectory(dir=self.ours.folder) as folder:
                low = low_of(setup) if is_short else None
                side, want = Side(setup, False, Path(folder), change, low), None
                side.begin()
                for taken in self.taken:
                    want, _ = _take(side, taken)
                return [floats_of(leaves_of(side, want, side))]
        finally:
            models.set_temperature(was)

    def _failed(self, action: Action, args: Mapping[str, Any], error: BaseException) -> Report:
        """What another error than ours means: broken, unless the plain module has the very same one."""
        try:
            _run(action.run, self.theirs, args)
        except BaseException as other:
            if type(other) is type(error):
                return Report("both fail", f"both fail: {type(error).__name__}: {' '.join(str(error).split())}")
        return _broken("", error)

    def facts(self) -> frozenset[str]:
        """What actions ask for."""
        side, setup = self.theirs, self.theirs.setup
        modules, store = list(side.model.modules()), parallel(self.ours)._store
        ranks = dist.is_initialized() and dist.get_world_size() > 1
        held = side.optimizer.state if side.optimizer is not None else {}
        axes = store.distributor.mesh.names  # of a mesh that is planned, those of the plan
        known = {
            "ready": True,
            "exact": is_exact(setup),
            "foreign": "pp" in axes and _has_foreign_states(self.ours),
            "fp16": setup["options"].get("precision") == "fp16",
            "ranks": ranks,
            "replicated": ranks
            and any(store.layouts[n].is_replicated and store.owners[n] is None for n in store.layouts),
            "pp": "pp" in axes,
            "local": side.has_parts,
            "ddp": side.batch_kind == "ddp",
            "odd": "odd" in setup,
            "stepped": side.steps > 0,
            "gradients": any(True for _ in side.trained()),
            "optimizer": side.optimizer is not None,
            "stateful": any(held.values()),
            "scheduler": side.scheduler is not None,
            "hooks": bool(side.handles),
            "average": side.average is not None,
            "aux": bool(setup.get("aux")),
            "tokens": setup["head"] != "regress",
            "training": side.model.training,
            "critic": side.critic is not None,
            "gpt": setup["head"] == "gpt",
            "llama": setup["head"] == "llama",
            "smooth": setup["head"] not in ("gpt", "llama")
            and not {"batchnorm", "norm", "multihead"} & set(setup["blocks"]),
            "frozen": any(not p.requires_grad for p in side.model.parameters()),
            "chain": isinstance(side.model, models.Chain),
            # Under "ddp" masks are each rank's own, and the plain module has none like them.
            "dropout": any(isinstance(m, nn.Dropout) for m in modules) and setup.get("batch") != "ddp",
            "batchnorm": any(isinstance(m, nn.BatchNorm1d) for m in modules),
            "scale": any(isinstance(m, models.Scale) for m in modules),
        }
        hooks = {f"hook {name}" for name in side.handles}
        return frozenset({name for name, holds in known.items() if holds} | hooks)


def _has_foreign_states(side: Side) -> bool:
    """True if an optimizer holds DTensors of torch's own: loaded by `torch.load` into one that took no step yet, which
    nobody knows to be of this model. With stages such a state has a value on the ranks of its stage alone, until the
    first step (docs/memory.md)."""
    held = side.optimizer.state.values() if side.optimizer is not None else ()
    return any(type(value) is DTensor for state in held for value in state.values())


_held: dict[str, Pair] = {}  # the journey that this process is on: it stays here between two actions


def begin(rank: int, setup: Mapping[str, Any], folder: str) -> Report:
    """Make both sides of a journey."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    models.set_temperature(1.0)
    _held.clear()
    if dist.is_initialized() and dist.get_world_size() == 1:
        dist.destroy_process_group()  # one process needs no launcher
    try:
        ours = Side(setup, True, Path(folder))
        ours.begin()
    except AutoparError as error:
        return _refused(error)
    except Exception as error:
        return _broken("", error)
    _held["pair"] = pair = Pair(setup, ours, Side(setup, False, Path(folder)))
    pair.theirs.begin()
    return pair.act("forward_backward", {"seed": 9}) if setup["warm"] else Report("ok", "", pair.facts())


def act(rank: int, name: str, args: Mapping[str, Any]) -> Report:
    """Take one action."""
    return _held["pair"].act(name, args)


def _run(run: Any, side: Side, args: Mapping[str, Any], stop: int | None = None) -> Any:
    side.marks, side.stop = 0, stop
    side.seen.clear()
    torch.manual_seed(len(args) + side.steps)
    return run(side, **args)


def _take(side: Side, taken: Taken) -> tuple[Any, bool]:
    """What an action of a plain side gives, and whether it came to its end."""
    try:
        found = _run(ACTIONS[taken.name].run, side, taken.args, taken.stop)
    except Stopped:
        return None, False
    return (found if taken.stop is None else None), True


def _refused(error: AutoparError) -> Report:
    """A refusal in our words; that peers are gone is no refusal, but what comes of a hang."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return Report("BROKEN" if "lost its peers" in text else "refused", text)


def _broken(where: str, error: BaseException) -> Report:
    frames = [f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
    place = " < ".join(reversed(frames[-3:]))
    return Report("BROKEN", f"{where}{type(error).__name__}: {' '.join(str(error).split())[:400]} ({place})")
