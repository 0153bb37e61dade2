"""Draw training loops of several steps, models and optimizers, and compare each with the same loop of plain PyTorch.

    timeout 700 .venv/bin/python -m benchmarks.drawn_loops [--seconds 600] [--seed 0]

A loop is a script of lines: what two models compute, their losses (which call each other), optimizers, and then what
users do between steps. Behind every line all that a user can take out is compared. A loop that differs is made short
and printed; a line that plain PyTorch refuses, or autopar with an error of its own, is left out. Output and options are
those of `benchmarks.in_place`.
"""

from __future__ import annotations

import copy
import functools
import linecache
import logging
import re
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import AutoparError, first_sentence
from benchmarks.in_place import search
from benchmarks.loop_lines import IMPORTS, PLACES, Line, Place, drawn, head
from tests.support.processes import Ranks

Where = tuple[str, dict[str, Any]]
Verdict = tuple[str, int, str]  # plain, refused, WRONG, BROKEN or ok; at which line (-1: none); what was said

# -- a loop that runs ------------------------------------------------------------------------------------------------


def whole(tensor: Tensor) -> Tensor:
    """The whole value of what a user holds."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


@dataclass
class World:
    """The names of a loop, on one side. place: a mesh and options, or None for plain PyTorch."""

    lines: list[Line]
    place: Where | None
    names: dict[str, Any] = field(default_factory=dict)
    notes: list[Any] = field(default_factory=list)
    batches: int = 0
    losses: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names |= {"__name__": "drawn", "torch": torch, "nn": nn, "F": nn.functional, "copy": copy}
        own = (self.value, self.back, self.batch, whole)
        self.names |= {"note": self.notes.append} | {function.__name__: function for function in own}
        torch.manual_seed(0)
        self.execute(IMPORTS + head(self.lines), "models")
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
            if self.place is not None:
                self.names[m] = autopar.parallelize(self.names[m], self.place[0], loss_fn=loss, **self.place[1])
            self.losses[id(self.names[m])] = loss

    def execute(self, text: str, name: str) -> None:
        name = f"<loop {name}>"
        linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name  # where errors look for lines
        exec(compile(text, name, "exec"), self.names)

    # -- what its lines call --

    def batch(self, rows: int = 8) -> tuple[Tensor, Tensor]:
        self.batches += 1
        dice = torch.Generator().manual_seed(self.batches)
        x, y = (torch.randn(rows, 6, generator=dice).to(self.names["D"]) for _ in range(2))
        return x, y

    def value(self, model: Any, *batch: Tensor) -> Tensor:
        if self.place is not None:
            return model.training_loss(*batch)
        result = self.losses[id(model)](model, *batch)
        return result[0] if isinstance(result, tuple) else result

    def back(self, model: Any, *batch: Tensor) -> Tensor:
        if self.place is not None:
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
        for each in (None, place):
            sides.append(World(lines, each))
    except AutoparError as refusal:
        return "refused", -1, f"{type(refusal).__name__}: {refusal}"
    except Exception as broken:
        return ("plain" if not sides else "BROKEN"), -1, f"{type(broken).__name__}: {broken}"
    ends = [i for i, (where, _) in enumerate(lines) if where == "loop"]
    for i in ends:
        for side in sides:
            torch.manual_seed(i)  # for layers that are made
            try:
                side.execute(lines[i][1], f"line {i}")
            except AutoparError as refusal:
                return "refused", i, f"{type(refusal).__name__}: {refusal}"
            except Exception as broken:
                kind = "plain" if side.place is None else "BROKEN"
                return kind, i, f"{type(broken).__name__}: {broken}"
        if often or i == ends[-1]:
            want, got = (side.held() for side in sides)
            if found := differences(got, want, tolerance_of(lines)):
                return "WRONG", i, "; ".join(found[:6]) + f" ({len(found)} in all)"
            if not all(map(is_small, want.values())):  # from here on rounding grows
                break
    return "ok", -1, ""


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
        outcomes = pools()[size].attempt(play, lines, tuple(where), often, timeout=90)
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
    return re.sub(r"\d+", "N", re.sub(r"'[^']*'", "'...'", " ".join(first_sentence(text).split())))[:200]


def shortened(lines: list[Line], place: Place, was: Verdict) -> tuple[list[Line], Verdict]:
    """A loop without the lines that the same verdict does not need."""
    for i in reversed(range(len(lines))):
        less = lines[:i] + lines[i + 1 :]
        for often in (True, False) if lines[i][0] != "head" else ():
            verdict = played(less, place, often)
            if verdict[0] == was[0] and ("hang" in verdict[2]) == ("hang" in was[2]):
                lines, was = less, verdict
                break
    return lines, was


def verdict(number: int) -> tuple[str, str]:
    """What became of a loop: as `benchmarks.in_place.verdict` says, "refused" where all but some lines is right."""
    place, lines, refused = PLACES[number % len(PLACES)], drawn(number), ""
    found = played(lines, place, True)
    while found[0] in ("refused", "plain") and found[1] >= 0:  # such a line is left out
        if found[0] == "refused":
            refused = refused or shape(found[2])
        lines = lines[: found[1]] + lines[found[1] + 1 :]
        found = played(lines, place, True)
    found = played(lines, place, False) if found[0] == "ok" else found
    if found[0] not in ("WRONG", "BROKEN"):
        return ("refused", refused or shape(found[2])) if refused or found[0] == "refused" else (found[0], "")
    lines, (kind, at, text) = shortened(lines, place, found)
    return kind, f"at {at}: {text[:1500]}\n{place}\n" + "".join(f"  {line!r},\n" for line in lines)


if __name__ == "__main__":
    try:
        search(verdict, __doc__)
    finally:
        close()
