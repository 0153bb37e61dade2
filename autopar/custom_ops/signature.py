"""Find a custom op by its name, and read its schema."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import RuleError
from autopar.torch_compat import OpOverload, op_names

_OURS = {
    "aten": "is an op of PyTorch; autopar has the rules of these (passes/rules), and checks them in its own tests",
    "autopar": "is an op of autopar, which has the rules of these",
    "prims": "is an op of PyTorch",
    "prim": "is an op of PyTorch",
}
_TENSOR, _OPTIONAL = "Tensor", "Optional[Tensor]"


@dataclass(frozen=True, slots=True)
class Signature:
    """The schema of an op, as rules need it.

    name: e.g. "mylib::norm". op: as graphs name it, e.g. "mylib.norm.default". tensors: the tensor arguments in the
    order of the schema; optional: those of them that may be None. others: the arguments that are no tensors.
    defaults: of those that have one. results: how many tensors it returns. several: they come as a tuple.
    """

    name: str
    op: str
    positional: tuple[str, ...]
    tensors: tuple[str, ...]
    optional: frozenset[str]
    others: tuple[str, ...]
    defaults: Mapping[str, Any]
    results: int

    def bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, in the order of the call."""
        return {**dict(zip(self.positional, args, strict=False)), **kwargs}


def find_op(name: object) -> tuple[Any, Signature]:
    """The overload of the op `name` and its signature; raises RuleError for what is no op of the user's."""
    if not isinstance(name, str):
        raise RuleError(f'the op is given by its name, e.g. "mylib::norm", not by a {type(name).__name__}.')
    namespace, colons, rest = name.partition("::")
    if not colons or not namespace or not rest:
        raise RuleError(f"'{name}' is not the name of an op: write namespace and name, e.g. \"mylib::norm\".")
    if namespace in _OURS:
        raise RuleError(f"'{name}' {_OURS[namespace]}. Rules can be registered for ops of your own namespaces.")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None) if base.isidentifier() else None
    found = getattr(packet, overload or "default", None) if packet is not None else None
    if packet is None or not isinstance(found, OpOverload):
        raise RuleError(_unknown(name, namespace, packet))
    return found, _signature(name, found)


def _unknown(name: str, namespace: str, packet: Any) -> str:
    if packet is not None:
        base = name.split(".")[0]
        overloads = [base if one == "default" else f"{base}.{one}" for one in packet.overloads()]
        return f"'{name}' is no overload of '{base}'; these are {listed(overloads)}."
    known = [one for one in op_names() if one.partition("::")[0] not in _OURS]
    near = difflib.get_close_matches(name, known, 3)
    mine = sorted(one for one in known if one.startswith(f"{namespace}::"))
    if near:
        hint = f"Is it {' or '.join(map(repr, near))}?"
    elif mine:
        hint = f"Namespace '{namespace}' has {', '.join(map(repr, mine[:8]))}."
    else:
        hint = f"Namespace '{namespace}' has no op."
    return f"there is no op '{name}'. {hint} Import the module that defines it (torch.library) before its rule."


def _signature(name: str, found: Any) -> Signature:
    schema = found._schema
    if schema.is_mutable or any(result.alias_info for result in schema.returns):
        raise RuleError(
            f"'{name}' writes to its arguments or returns views of them ({schema}), but a rule is about values. "
            f"Register the rule for an op that returns new tensors, and write from that."
        )
    if torch.Tag.nondeterministic_seeded in found.tags:
        raise RuleError(f"'{name}' draws random numbers, which pieces on other ranks would draw otherwise.")
    types = {argument.name: str(argument.type) for argument in schema.arguments}
    lists = [argument for argument, type_ in types.items() if "Tensor" in type_ and type_ not in (_TENSOR, _OPTIONAL)]
    strange = [str(result.type) for result in schema.returns if str(result.type) != _TENSOR]
    if lists:
        raise RuleError(
            f"'{name}' takes a list of tensors in '{lists[0]}', which no pattern can name: pass them one by one."
        )
    if not any(type_ in (_TENSOR, _OPTIONAL) for type_ in types.values()):
        raise RuleError(f"'{name}' takes no tensor, so there is nothing to split: every rank makes its results whole.")
    if strange or not schema.returns:
        raise RuleError(f"'{name}' returns {', '.join(strange) or 'nothing'}; a rule is about ops that return tensors.")
    return Signature(
        name=name,
        op=str(found),
        positional=tuple(argument.name for argument in schema.arguments if not argument.kwarg_only),
        tensors=tuple(argument for argument, type_ in types.items() if type_ in (_TENSOR, _OPTIONAL)),
        optional=frozenset(argument for argument, type_ in types.items() if type_ == _OPTIONAL),
        others=tuple(argument for argument, type_ in types.items() if type_ not in (_TENSOR, _OPTIONAL)),
        defaults={a.name: a.default_value for a in schema.arguments if a.has_default_value()},
        results=len(schema.returns),
    )


def listed(items: Sequence[object]) -> str:
    """`'x', 'weight'`: names as a sentence lists them."""
    return ", ".join(f"'{item}'" if isinstance(item, str) else str(item) for item in items) or "no tensors"
