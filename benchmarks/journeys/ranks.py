"""What a rank does of a journey: it holds both sides between the actions, runs one, and compares all there is."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.errors import AutoparError
from benchmarks.journeys import models
from benchmarks.journeys.actions import ACTIONS, Action
from benchmarks.journeys.compare import EXACT, LOOSE, ROUNDED, ZERO, differences, unequal
from benchmarks.journeys.side import Side, parallel
from benchmarks.journeys.table import load_actions

load_actions()


@dataclass(frozen=True)
class Report:
    """What one rank made of an action. facts: what is true of the pair now, on which the next action may depend."""

    verdict: str  # ok, refused, WRONG, BROKEN
    text: str = ""
    facts: frozenset[str] = frozenset()


@dataclass
class Pair:
    """Both sides of a journey."""

    ours: Side
    theirs: Side

    def act(self, name: str, args: Mapping[str, Any]) -> Report:
        """One action on both, and the comparison. The parallel model goes first: refused, it did not happen."""
        action, refusal = ACTIONS[name], ""
        try:
            got = _run(action.run, self.ours, args)
        except AutoparError as error:
            report = _refused(error)
            if report.verdict == "BROKEN":
                return report
            refusal = report.text
        except BaseException as error:  # some of torch's are no Exception
            return self._failed(action, args, error)
        found: list[str] = []
        if action.must_refuse:
            found += [] if refusal else ["it was not refused"]
        elif not refusal:
            try:
                want = _run(action.run, self.theirs, args)
            except BaseException as error:
                return _broken("the plain module: ", error)
            found += unequal("result", self.ours, got, want, self.tolerance, ZERO)
        if action.must_refuse and action.partial and refusal:
            return Report("ok")  # as it should be, and nothing to go on with
        found += differences(self.ours, self.theirs, self.tolerance)
        if refusal and action.partial and found:
            return Report("refused", refusal)  # in its middle: nothing to go on with
        if found:
            return Report("WRONG", ("after a refusal: " if refusal else "") + "; ".join(found[:4]))
        if action.must_refuse:
            refusal = ""  # as it should be
        return Report("refused" if refusal else "ok", refusal, self.facts())

    def _failed(self, action: Action, args: Mapping[str, Any], error: BaseException) -> Report:
        """What another error than ours means: broken, unless the plain module has the very same one."""
        try:
            _run(action.run, self.theirs, args)
        except BaseException as other:
            if type(other) is type(error):
                return Report("ok", f"both: {type(error).__name__}: {error}")  # and nothing to go on with
        return _broken("", error)

    @property
    def tolerance(self) -> float:
        setup = self.ours.setup
        return LOOSE if setup["options"].get("precision") else ROUNDED if setup["head"] == "llama" else EXACT

    def facts(self) -> frozenset[str]:
        """What actions ask for."""
        side, setup = self.theirs, self.theirs.setup
        modules, store = list(side.model.modules()), parallel(self.ours)._store
        ranks = dist.is_initialized() and dist.get_world_size() > 1
        held = side.optimizer.state if side.optimizer is not None else {}
        known = {
            "ready": True,
            "exact": not setup["options"].get("precision"),
            "ranks": ranks,
            "replicated": ranks and any(store.layouts[n].is_whole and store.homes[n] is None for n in store.layouts),
            "pp": "pp" in side.setup["mesh"],
            "local": setup.get("batch") == "local",
            "stepped": side.steps > 0,
            "gradients": any(True for _ in side.trained()),
            "optimizer": side.optimizer is not None,
            "stateful": any(held.values()),
            "scheduler": side.scheduler is not None,
            "average": side.average is not None,
            "aux": bool(setup.get("aux")),
            "tokens": setup["head"] != "regress",
            "training": side.model.training,
            "critic": side.critic is not None,
            "gpt": setup["head"] == "gpt",
            "smooth": setup["head"] not in ("gpt", "llama") and not {"batchnorm", "norm"} & set(setup["blocks"]),
            "frozen": any(not p.requires_grad for p in side.model.parameters()),
            "chain": isinstance(side.model, models.Chain),
            "dropout": any(isinstance(m, nn.Dropout) for m in modules),
            "batchnorm": any(isinstance(m, nn.BatchNorm1d) for m in modules),
            "scale": any(isinstance(m, models.Scale) for m in modules),
        }
        hooks = {f"hook {name}" for name in side.handles}
        return frozenset({name for name, holds in known.items() if holds} | hooks)


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
    except AutoparError as error:
        return _refused(error)
    except Exception as error:
        return _broken("", error)
    _held["pair"] = pair = Pair(ours, Side(setup, False, Path(folder)))
    try:
        for side in (ours, pair.theirs):
            if setup.get("optimizer"):
                side.start(setup["optimizer"])
    except AutoparError as error:
        return _refused(error)
    return pair.act("forward_backward", {"seed": 9}) if setup["warm"] else Report("ok", "", pair.facts())


def act(rank: int, name: str, args: Mapping[str, Any]) -> Report:
    """Take one action."""
    return _held["pair"].act(name, args)


def _run(run: Any, side: Side, args: Mapping[str, Any]) -> Any:
    torch.manual_seed(len(args) + side.steps)
    return run(side, **args)


def _refused(error: AutoparError) -> Report:
    """A refusal in our words; that peers are gone is no refusal, but what comes of a hang."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return Report("BROKEN" if "lost its peers" in text else "refused", text)


def _broken(where: str, error: BaseException) -> Report:
    frames = [f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
    place = " < ".join(reversed(frames[-3:]))
    return Report("BROKEN", f"{where}{type(error).__name__}: {' '.join(str(error).split())[:400]} ({place})")
