"""Draw training loops of several steps, models and optimizers, and compare each with the same loop of plain PyTorch.

    timeout 700 .venv/bin/python -m benchmarks.drawn_loops [--seconds 600] [--seed 0] [--scripts]

A loop is a script of lines: what two models compute, their losses (which call each other), optimizers, and then what
users do between steps. Behind every line all that a user can take out is compared. A loop that differs is made short
and printed; a line that plain PyTorch refuses, or autopar with an error of its own, is left out. Output and options are
those of `benchmarks.in_place`. With --scripts the lines are those of everyday training scripts, on every kind of mesh
and batch: parts of each rank's own, pipelines, ZeRO, offload (`benchmarks.script_lines`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import linecache
import logging
import math
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from tempfile import gettempdir
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import AutoparError, first_sentence
from benchmarks.in_place import search
from benchmarks.loop_lines import IMPORTS, PLACES, Line, Place, drawn, head
from benchmarks.script_lines import HELPERS, SCRIPT_PLACES, scripted
from tests.support.processes import Ranks

Where = tuple[str, dict[str, Any]]
Verdict = tuple[str, int, str]  # plain, refused, WRONG, BROKEN or ok; at which line (-1: none); what was said

# -- a loop that runs ------------------------------------------------------------------------------------------------


def whole(tensor: Tensor) -> Tensor:
    """The whole value of what a user holds."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


@dataclass
class World:
    """The names of a loop, on one side. place: a mesh and options, which the plain side has for its batches alone."""

    lines: list[Line]
    place: Where
    rank: int
    is_plain: bool
    names: dict[str, Any] = field(default_factory=dict)
    notes: list[Any] = field(default_factory=list)
    batches: int = 0
    losses: dict[int, Any] = field(default_factory=dict)
    saved: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        self.names |= {"__name__": "drawn", "torch": torch, "nn": nn, "F": nn.functional, "copy": copy}
        own: list[Any] = [self.value, self.back, self.batch, self.whole_batch, self.labels, self.mine, self.together]
        own += [self.gathered, self.save, self.load, whole, ema_of]
        self.names |= {function.__name__: function for function in own} | {"EMA": autopar.EMA}
        self.names["note"] = lambda value: self.notes.append(leaves("", value))  # as it is now
        shutil.rmtree(self.folder, ignore_errors=True)
        torch.manual_seed(0)
        self.execute(IMPORTS + head(self.lines), "models")
        self.execute(HELPERS, "helpers")
        made = {m: self.names[f"Net_{m}"](self.names[f"norm_{m}"]).to(self.names["D"]) for m in "ab"}
        self.names |= made | {"t": copy.deepcopy(made["a"]).requires_grad_(False)}
        with torch.no_grad():
            for p in self.names["t"].parameters():
                p.mul_(0.5)
        for where, text in self.lines:
            if where == "make":
                self.execute(text, "ties")
        for m in "ab":
            loss = self.names[f"loss_{m}"]
            if not self.is_plain:
                self.names[m] = autopar.parallelize(self.names[m], self.place[0], loss_fn=loss, **self.place[1])
            self.losses[id(self.names[m])] = loss

    def execute(self, text: str, name: str) -> None:
        name = f"<loop {name}>"
        linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name  # where errors look for lines
        exec(compile(text, name, "exec"), self.names)

    # -- what its lines call --

    def whole_batch(self, rows: int = 8) -> tuple[Tensor, Tensor]:
        self.batches += 1
        dice = torch.Generator().manual_seed(self.batches)
        x, y = (torch.randn(rows, 6, generator=dice).to(self.names["D"]) for _ in range(2))
        return x, y

    def batch(self, rows: int = 8) -> tuple[Tensor, Tensor]:
        """The part of this rank, if ranks have parts."""
        x, y = self.whole_batch(rows)
        return (x, y) if self.is_plain else (self.part(x), self.part(y))

    def labels(self, odd: int) -> Tensor:
        """Classes, of which each rank has an odd one: a wrong one or one to ignore. (What one rank alone refuses in the
        middle of a step ends the others; the first stages of a pipeline see no labels.)"""
        y = torch.arange(8) % 6
        y[[0, -1]] = odd if odd < 6 or "pp" not in self.place[0] else -100
        return y if self.is_plain else self.part(y)

    def cut(self, rows: int) -> int:
        """How many of the rows are those of rank 0."""
        return math.ceil(rows * self.names.get("share", 1.0))

    def part(self, rows: Tensor) -> Tensor:
        if "batch" not in self.place[1]:
            return rows
        cut = self.cut(len(rows))
        return rows[cut:] if self.rank else rows[:cut]

    def mine(self, rows: Tensor, count: int = 8) -> Tensor:
        """What this rank gets of an output."""
        return self.part(rows) if self.is_plain and len(rows) == count else rows

    def together(self, rows: Tensor) -> Tensor:
        """The rows of all ranks."""
        if self.is_plain or "batch" not in self.place[1]:
            return rows
        parts: list[Any] = [None, None]
        torch.distributed.all_gather_object(parts, rows.detach())
        return torch.cat(parts)

    @contextlib.contextmanager
    def gathered(self, model: Any, write: bool = False) -> Iterator[Any]:
        """The plain module for a while, of which nothing stays that is not to be written."""
        if not self.is_plain:
            with model.gathered(write=write) as plain:
                yield plain
            return
        was = [(each, each.clone()) for each in model.buffers()]
        yield model
        for each, value in () if write else was:
            each.copy_(value)

    @property
    def folder(self) -> str:
        """Where a parallel model is saved. The ranks have one parent."""
        return f"{gettempdir()}/autopar_loops_{os.getppid()}"

    def save(self, model: Any, optimizer: Any, step: int) -> None:
        if self.is_plain:
            self.saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        else:
            autopar.save(self.folder, model, optimizer, step=step)

    def load(self, model: Any, optimizer: Any) -> None:
        if not self.is_plain:
            autopar.load(self.folder, model, optimizer)
        else:
            for each, state in zip((model, optimizer), copy.deepcopy(self.saved), strict=True):
                each.load_state_dict(state)

    def value(self, model: Any, *batch: Tensor) -> Tensor:
        if not self.is_plain:
            return model.training_loss(*batch)
        loss = self.losses[id(model)]
        if self.place[1].get("batch") != "ddp":
            result = loss(model, *batch)
            return result[0] if isinstance(result, tuple) else result
        cut = self.cut(len(batch[0]))
        found = [loss(model, *(each[part] for each in batch)) for part in (slice(None, cut), slice(cut, None))]
        return sum(each[0] if isinstance(each, tuple) else each for each in found) / 2

    def back(self, model: Any, *batch: Tensor) -> Tensor:
        if not self.is_plain:
            return model.forward_backward(*batch)
        loss = self.value(model, *batch)
        loss.backward()
        return loss.detach()

    # -- what can be taken out of it --

    def held(self) -> dict[str, Any]:
        """By name."""
        found: dict[str, Any] = {}
        for m in "abt":
            model = self.names[m]
            for name, p in model.named_parameters():
                key = f"{m}.{name}"
                found |= {key: whole(p).clone(), f"{key} trained": p.requires_grad}
                found[f"{key}.grad"] = None if p.grad is None else whole(p.grad).clone()
            found |= {f"{m}.{name}": whole(value).clone() for name, value in model.named_buffers()}
            found |= {f"{m}.{name} training": each.training for name, each in model.named_modules()}
            for name in ("scale", "warm", "frozen", "weights", "depth", "options", "table", "memory", "extra"):
                found |= leaves(f"{m}.{name}", getattr(model, name))
        for o in ("oa", "ob", "oj"):
            for i, group in enumerate(self.names[o].param_groups if o in self.names else ()):
                found |= leaves(f"{o} group {i}", {k: v for k, v in group.items() if k != "params"})
                for j, p in enumerate(group["params"]):
                    found |= leaves(f"{o} state {i} {j}", dict(self.names[o].state.get(p, {})))
        found |= leaves("box", {k: v for k, v in vars(self.names["box"]).items() if k in BOX})
        return found | leaves("note", self.notes)


BOX = ("beta", "smooth", "kind", "anchors", "factor", "replay", "at", "past", "w", "bias")


def leaves(name: str, value: Any) -> dict[str, Any]:
    """The tensors and numbers in a nesting, by where they are."""
    if isinstance(value, Tensor):
        return {name: whole(value).clone()}
    if not isinstance(value, (dict, list, tuple)):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {f"{name} len": len(value)} | {k: v for key, each in items for k, v in leaves(f"{name}.{key}", each).items()}


def ema_of(ema: autopar.EMA) -> dict[str, Tensor]:
    """The averages, whole."""
    return {name: whole(average) for name, average in ema.state_dict()["averages"].items()}


def differences(got: dict[str, Any], want: dict[str, Any], tolerance: float) -> list[str]:
    """What is not as in plain PyTorch."""
    found = [f"{key}: {'missing' if key in want else 'too much'}" for key in got.keys() ^ want.keys()]
    for key in got.keys() & want.keys():
        a, b = got[key], want[key]
        if isinstance(a, (Tensor, float)) and isinstance(b, (Tensor, float)):
            a, b = torch.as_tensor(a), torch.as_tensor(b)
            if a.shape != b.shape or a.dtype != b.dtype:
                found.append(f"{key}: {list(a.shape)} {a.dtype}, plain {list(b.shape)} {b.dtype}")
            elif not torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance / 10, equal_nan=True):
                found.append(f"{key}: off by {float((a - b).abs().max()):.2e} of {float(b.abs().max()):.2e}")
        elif type(a) is not type(b) or a != b:
            found.append(f"{key}: {a!r}, plain {b!r}")
    return sorted(found)


def play(rank: int, lines: list[Line], place: Where, often: bool) -> Verdict:
    """Run a loop on both sides. often: compare behind each line, and not at its end alone."""
    torch.set_default_dtype(torch.float32)
    torch.autograd.set_detect_anomaly(False)
    logging.disable()
    warnings.simplefilter("ignore")
    sides: list[World] = []
    try:
        for is_plain in (True, False):
            sides.append(World(lines, place, rank, is_plain))
    except AutoparError as refusal:
        return "refused", -1, f"{type(refusal).__name__}: {refusal}"
    except Exception as broken:
        return ("plain" if not sides else "BROKEN"), -1, f"{type(broken).__name__}: {broken}"
    plain, parallel = sides
    refusals: list[str] = []
    ends = [i for i, (where, _) in enumerate(lines) if where == "loop"]
    for i in ends:
        counts = plain.batches, len(plain.notes)
        for side in (parallel, plain):
            torch.manual_seed(i)  # for layers that are made
            try:
                side.execute(lines[i][1], f"line {i}")
            except AutoparError as refusal:
                refusals.append(f"{type(refusal).__name__}: {refusal}")
                parallel.batches = counts[0]
                del parallel.notes[counts[1] :]
                if differences(parallel.held(), plain.held(), tolerance_of(lines)):  # its first half was done
                    return "refused", i, refusals[-1]
                break
            except Exception as broken:
                kind = "plain" if side.is_plain else "BROKEN"
                return kind, i, f"{type(broken).__name__}: {broken}"
        if often or i == ends[-1]:
            want, got = plain.held(), parallel.held()
            if found := differences(got, want, tolerance_of(lines)):
                return "WRONG", i, "; ".join(found[:6]) + f" ({len(found)} in all)"
            if not all(map(is_small, want.values())):  # from here on rounding grows
                break
    return "ok", -1, "\n".join(refusals)


def sound(lines: list[Line], place: Place) -> list[Line]:
    """The lines that plain PyTorch takes."""
    torch.set_default_dtype(torch.float32)
    world = World([line for line in lines if line[0] != "loop"], place[1:], 0, True)
    found = list(world.lines)
    for i, line in enumerate(lines):
        if line[0] == "loop":
            torch.manual_seed(i)
            try:
                world.execute(line[1], f"line {i}")
            except Exception:
                continue
            found.append(line)
    return found


def tolerance_of(lines: list[Line]) -> float:
    """What the sides may differ by, of a value."""
    text = str(lines)
    return 1e-7 if "D = torch.float64" in text else 0.1 if "torch.bfloat16" in text else 1e-3


def is_small(value: Any) -> bool:
    """Whether rounding has little to grow from."""
    is_number = isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0
    return not is_number or bool(value.isfinite().all() and value.abs().max() < 1e3)


# -- many of them ----------------------------------------------------------------------------------------------------


@functools.cache
def pools() -> dict[int, Ranks]:
    """Ranks for all loops, by how many they are."""
    return {}


def close() -> None:
    """End all ranks: those of the next loop are new ones."""
    for ranks in pools().values():
        ranks.close()
    pools().clear()


def played(lines: list[Line], place: Place, often: bool) -> Verdict:
    """What became of a loop on all ranks."""
    size, *where = place
    if size not in pools():
        pools()[size] = Ranks(size)
    try:
        outcomes = pools()[size].attempt(play, lines, tuple(where), often, timeout=90 + len(lines))
    except AssertionError as hang:
        close()
        return "BROKEN", -1, f"hang: {hang}"[:400]
    found = [each.value or ("BROKEN", -1, str(each.error or "died")) for each in outcomes]
    if any(kind == "BROKEN" for kind, _, _ in found):
        close()  # they may be out of step
    return found[0] if len({each[:2] for each in found}) == 1 else ("BROKEN", -1, f"ranks differ: {found}")


def shape(refusal: str) -> str:
    """A refusal without its names and numbers, so that alike ones are counted together."""
    text = refusal.rpartition("This line has ")[2] or refusal
    text = text if "RankError" in text else first_sentence(text)  # which has a list
    return re.sub(r"\d+", "N", re.sub(r"'[^']*'", "'...'", " ".join(text.split())))[:200]


def shortened(lines: list[Line], place: Place, was: Verdict, seconds: float = 200) -> tuple[list[Line], Verdict]:
    """A loop without the lines that the same verdict does not need."""
    end = time.monotonic() + seconds
    lines = lines[: was[1] + 1] if was[1] >= 0 else lines
    size = max(1, sum(where != "head" for where, _ in lines) // 2)
    while True:
        for i in reversed(range(0, len(lines), size)):
            part = lines[i : i + size]
            less = lines[:i] + [line for line in part if line[0] == "head"] + lines[i + size :]
            if len(less) == len(lines) or time.monotonic() > end:
                continue
            verdict = played(less, place, True)
            if verdict[0] == was[0] and ("hang" in verdict[2]) == ("hang" in was[2]):
                lines, was = less, verdict
        if size == 1:
            return lines, was
        size = (size + 1) // 2


def verdict(number: int) -> tuple[str, str]:
    """What became of a loop: as `benchmarks.in_place.verdict` says, "refused" where all but some lines is right."""
    return judged(PLACES[number % len(PLACES)], drawn(number))


def verdict_of_script(number: int, lengths: tuple[int, int] = (6, 16)) -> tuple[str, str]:
    """What became of a script, likewise."""
    return judged(SCRIPT_PLACES[number % len(SCRIPT_PLACES)], scripted(number, lengths))


def judged(place: Place, lines: list[Line]) -> tuple[str, str]:
    """What became of these lines."""
    refused: list[str] = []
    lines = sound(lines, place)
    found = played(lines, place, True)
    while found[0] in ("refused", "plain") and found[1] >= 0:  # such a line is left out
        refused += [found[2]] if found[0] == "refused" else []
        lines = lines[: found[1]] + lines[found[1] + 1 :]
        found = played(lines, place, True)
    found = played(lines, place, False) if found[0] == "ok" and not found[2] else found
    if found[0] not in ("WRONG", "BROKEN"):
        refused += [found[2]] if found[2] else []
        return ("refused", " | ".join(map(shape, refused))) if refused else (found[0], "")
    lines, (kind, at, text) = shortened(lines, place, found)
    return kind, f"at {at}: {text[:1500]}\n{place}\n" + "".join(f"  {line!r},\n" for line in lines)


if __name__ == "__main__":
    try:
        search(verdict, __doc__, scripts=verdict_of_script)
    finally:
        close()
