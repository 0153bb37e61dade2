"""What ranks compare is the same in any two processes: no address is in it, and nothing that hashes of text order."""

from __future__ import annotations

import enum
import functools
import json
import os
import re
import subprocess
import sys
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from uuid import UUID

import numpy as np
import torch
import torch.nn.functional as F
from models import mlp
from torch import nn

import autopar
from autopar.capture.inputs.containers import take_call_apart
from autopar.capture.python.guards import Change
from autopar.capture.python.spots import Spot
from autopar.parallel.batches.batch_checks import signature_lines

FOLDER = Path(__file__).resolve().parent


class Thing:
    """As any object it prints with its address."""

    def method(self) -> None: ...


class Mode(enum.Enum):
    PLAIN = 1
    OBJECT = object()  # prints with its address too


class Flag(enum.Flag):
    ONE = 1
    TWO = 2


class Number(int):
    def __repr__(self) -> str:
        return f"Number at {id(self):#x}"


class Text(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return f"Text at {id(self):#x}"


Pair = namedtuple("Pair", "a b")
# Of the package whose objects ride on a batch and are withheld from programs (BatchEncoding's).
Encoding: Any = type("Encoding", (), {"__module__": "tokenizers"})


@dataclass
class Batch:
    words: set[str]
    function: Any


def function() -> None: ...


def values() -> dict[str, Any]:
    """One of each kind that may be an argument of a call, or stand in one."""
    words = {f"word {i}" for i in range(20)}
    layer = nn.Linear(2, 2)
    return {
        "withheld": Encoding(),
        "withheld inside": [Encoding(), {"a": Encoding()}],
        "object": object(),
        "function": function,
        "lambda": lambda: None,
        "builtin": torch.relu,
        "functional": F.gelu,
        "op": torch.ops.aten.add,
        "overload": torch.ops.aten.add.Tensor,
        "method of a module": layer.forward,
        "class": Thing,
        "module": json,
        "layer": layer,
        "layers": nn.ModuleList([layer]),
        "generator": torch.Generator(),
        "enum": Mode.OBJECT,
        "enums": [Mode.PLAIN, Flag.ONE | Flag.TWO],
        "words": words,
        "frozen": frozenset(words),
        "sets": {frozenset(words), 1},
        "functions": {function, Thing, (function, 1)},
        "number": Number(3),
        "text": Text("a"),
        "path": Path("a/b"),
        "decimal": Decimal("1.5"),
        "fraction": Fraction(1, 3),
        "date": date(2026, 1, 2),
        "time": timedelta(3),
        "uuid": UUID(int=7),
        "pattern": re.compile("a+", re.IGNORECASE),
        "scalar": np.float32(2),
        "flag": np.bool_(True),
        "bytes": b"ab",
        "bytearray": bytearray(b"ab"),
        "range": range(3),
        "dtype": torch.float16,
        "ellipsis": ...,
        "none": None,
        "slice": slice(1, function),
        "partial": functools.partial(function, Thing),
        "size": torch.Size([1, 2]),
        "view": MappingProxyType({"a": function}),
        "pair": Pair(function, words),
        "batch": Batch(words, function),
        "namespace": SimpleNamespace(a=function, words=words),
        "keys": {(function, 1): 2, Mode.OBJECT: 3, Thing: 4},
        "ordered": OrderedDict(a=function),
        "default": defaultdict(list, a=object()),
        "tensors": {"x": torch.ones(2)},
        "array": np.ones(3),
        "frozen key": {frozenset(words): function},
    }


def guarded() -> dict[str, Any]:
    """What a step may read in Python beside its arguments, and a change of it be told of."""
    thing = Thing()
    circle: list[Any] = [thing]
    circle.append(circle)
    others = {
        "things": [thing, {thing: thing}],
        "bound": thing.method,
        "thing": thing,
        "circle": circle,
        "one": (thing,),
    }
    return {**values(), **others}


def texts() -> dict[str, list[str]]:
    """All that ranks would compare."""
    model = nn.Linear(2, 2)
    found = {name: signature_lines(model, take_call_apart((value,), {"b": value})) for name, value in values().items()}
    for name, value in guarded().items():
        spot = Spot(name, "here", {}, name, value)
        found[f"guarded {name}"] = [Change(None, spot, (name, "here", 0)).line]
    model, loss_fn, batch = mlp()
    found["program"] = autopar.compile(model, "pp=2,tp=2", loss_fn=loss_fn, batch=batch, microbatches=2).lines()
    return found


def main() -> None:
    print(json.dumps(texts()))


def test_the_same_in_another_process() -> None:
    code = f"import sys; sys.path[:0] = {[str(FOLDER), *sys.path]!r}; import {__name__} as t; t.main()"
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    here, there = texts(), json.loads(done.stdout.splitlines()[-1])
    assert here.keys() == there.keys()
    for name, lines in here.items():
        assert lines == there[name], name
        assert not re.search(r"\b0x[0-9a-f]{6}", "\n".join(lines)), (name, lines)
