"""Find in the code that ran what it asks where a capture cannot tell what a plain step would be told."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Mapping, Set
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from autopar.capture.python.ran import Ran, with_nested
from autopar.capture.refusals.constructs import Construct
from autopar.capture.refusals.explain_failure import refusal

_CLASSES = (torch.Tensor, nn.Parameter)
_NAMES = ("Tensor", "Parameter")
_SEEDS = (torch.initial_seed, torch.default_generator.initial_seed)
_FUNCTIONS = (FunctionType, BuiltinFunctionType)
# What is looked for, by the names that it has in torch, and by identity where it was imported under another one.
_WORDS = frozenset((*_NAMES, "initial_seed", "is_anomaly_check_nan_enabled", "is_inference_mode_enabled"))
_WANTED = frozenset(
    map(id, (*_CLASSES, torch.initial_seed, torch.is_anomaly_check_nan_enabled, torch.is_inference_mode_enabled))
)
_COMPARED = Construct(
    "a comparison of a class with torch.Tensor or nn.Parameter (type(x) is torch.Tensor)",
    "While a model is captured, tensors are of a class of their own, and it would come out otherwise than in a plain "
    "step. Ask isinstance(x, torch.Tensor), and of a parameter isinstance(x, nn.Parameter).",
)
_SEED = Construct(
    "the seed of torch's generator (torch.initial_seed())",
    "A step draws by a generator of its own, from the seed= given to autopar. Read the seed before, and keep it in an "
    "attribute of the model or pass it in as a Python number.",
)
_ANOMALY = Construct(
    "torch.is_anomaly_check_nan_enabled(), asked while anomaly detection is on",
    "A capture has no data to look for nan in, and turns that off. Read it before, and pass it in as a Python bool.",
)
_MARK = Construct(
    "an attribute that is left on a tensor of the batch ('{}')",
    "A program leaves none there, which a later step with the same tensor would find. Keep it in a local variable, in "
    "a container of the batch, or return it.",
)
_INFERENCE = Construct(
    "torch.is_inference_mode_enabled(), asked in inference mode",
    "A program is made outside of it. Call the model under torch.no_grad(), or ask torch.is_grad_enabled().",
)


def check_code(ran: Ran) -> None:
    """Raise CaptureError for code that compares the class of a tensor, that reads the seed of torch, or that leaves an
    attribute on a tensor of the batch."""
    looks_for_nan = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    for code, line, name, value in _all_objects(ran):
        if isinstance(value, _FUNCTIONS) and value in _SEEDS:
            raise refusal(_SEED, (code.co_filename, line))
        if looks_for_nan and value is torch.is_anomaly_check_nan_enabled:
            raise refusal(_ANOMALY, (code.co_filename, line))
        if name in ("IS_OP", "COMPARE_OP", "CONTAINS_OP") and _asks_for_class(code, value):
            raise refusal(_COMPARED, (code.co_filename, line))
    for code, _ in ran.codes if ran.marked else ():
        _check_marks(code, ran.marked)


def check_inference(ran: Ran) -> None:
    """Raise CaptureError for code, run in inference mode, that asks whether it is."""
    for code, line, _, value in _all_objects(ran):
        if value is torch.is_inference_mode_enabled:
            raise refusal(_INFERENCE, (code.co_filename, line))


def _check_marks(code: CodeType, marked: Set[str]) -> None:
    for inner in with_nested(code):
        is_set = "setattr" in inner.co_names
        for each in dis.get_instructions(inner):
            is_named = each.opname == "STORE_ATTR" or (is_set and each.opname == "LOAD_CONST")
            if is_named and isinstance(each.argval, str) and each.argval in marked:
                line = each.positions.lineno if each.positions is not None else None
                raise refusal(
                    Construct(_MARK.name.format(each.argval), _MARK.instead),
                    (inner.co_filename, line or inner.co_firstlineno),
                )


def _all_objects(ran: Ran) -> Iterator[tuple[CodeType, int, str, Any]]:
    for code, values in ran.codes:
        for inner in with_nested(code):
            if _may_ask(inner, values):  # else its instructions, which take longer, are not looked at
                yield from ((inner, *found) for found in _objects(inner, values))


def _may_ask(code: CodeType, values: Mapping[str, Any]) -> bool:
    names = [*code.co_names, *(each for each in code.co_consts if isinstance(each, str))]
    return any(name in _WORDS or id(values.get(name)) in _WANTED for name in names)


def _asks_for_class(code: CodeType, value: Any) -> bool:
    names = code.co_names
    if isinstance(value, str):
        return value in _NAMES and "__name__" in names and ("type" in names or "__class__" in names)
    each = value if isinstance(value, tuple) else (value,)
    return any(one is kind for one in each for kind in _CLASSES) and ("type" in names or "__class__" in names)


def _objects(code: CodeType, values: Mapping[str, Any]) -> Iterator[tuple[int, str, Any]]:
    """What code reads by names that stand in it, from a global or a module on: the line, the instruction that comes
    behind, and the object. Those in a tuple, a list or a set are told together, as a tuple."""
    line, found, members = code.co_firstlineno, None, list[Any]()
    for each in dis.get_instructions(code):
        name = each.opname
        if found is not None and name not in ("LOAD_ATTR", "LOAD_METHOD"):
            yield line, name, found
            members.append(found)
        line = each.positions.lineno if each.positions is not None and each.positions.lineno else line
        if name in ("LOAD_ATTR", "LOAD_METHOD"):
            found = _inner(found, each.argval)
        elif name in ("LOAD_GLOBAL", "LOAD_NAME"):
            found = values.get(each.argval)
        elif name == "LOAD_FAST":  # of a function that imports torch itself
            found = sys.modules.get("torch") if each.argval == "torch" else None
        elif name == "LOAD_CONST":
            found = each.argval if each.argval in _NAMES else None
        elif name.startswith("BUILD_"):
            found = tuple(members[-each.arg :]) if each.arg else None
        else:
            found = None
            members.clear()


def _inner(holder: Any, name: str) -> Any:
    """An attribute of a module, or of torch's generator: what has no code of the user's."""
    is_plain = isinstance(holder, (ModuleType, torch.Generator))
    return getattr(holder, name, None) if is_plain else None
