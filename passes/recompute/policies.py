"""Read the recomputation policy of each module, and group modules that are recomputed together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.errors import PlanError
from autopar.ir.modules import in_module, layer_of, module_paths, spelled_out, unit_of, unknown_pattern
from autopar.ir.options import Policy, Recompute
from autopar.ir.program import Program, record

ALL = "*"


@dataclass(frozen=True, slots=True)
class PolicyRule:
    """A policy, and the modules for which it is: those of one of the patterns. text: as an error message spells it."""

    patterns: tuple[str, ...]
    policy: Policy
    text: str

    def depth(self, path: str) -> int | None:
        """How many words of a module's path the pattern takes; None if it is for another module."""
        found = [pattern.count(".") + 1 for pattern in self.patterns if in_module(path, pattern)]
        return min(found, default=None)


@dataclass(slots=True)
class Policies:
    """The rules of all modules: the first one that fits is a module's own. layers: the members of lists of modules that
    are more than one call after another: an activation in a list would keep what enters it beside what it gives."""

    rules: Sequence[PolicyRule]
    layers: frozenset[str]
    _rules: dict[str, PolicyRule | None] = field(default_factory=dict)
    _groups: dict[str, str] = field(default_factory=dict)

    def rule(self, path: str) -> PolicyRule | None:
        if path not in self._rules:
            fits = (rule for rule in self.rules if rule.depth(path) is not None)
            self._rules[path] = next(fits, None)
        return self._rules[path]

    def policy(self, path: str) -> Policy:
        rule = self.rule(path)
        return "none" if rule is None else rule.policy

    def whole(self, path: str) -> str:
        """The module that "full" computes again as a whole, and in which a module lies: its layer, or the module that a
        pattern names if that is no layer; "" if there is none."""
        rule = self.rule(path)
        if rule is None or rule.policy != "full":
            return ""
        layer = layer_of(path)
        if rule.patterns == (ALL,):
            return layer if layer in self.layers else ""
        named = ".".join(path.split(".")[: rule.depth(path)])
        return layer if len(layer) >= len(named) else named

    def group(self, path: str) -> str:
        """What is computed again at one time: the module of `whole`, a layer, or what is outermost on the path."""
        if path not in self._groups:
            self._groups[path] = self.whole(path) or unit_of(path)
        return self._groups[path]


def policies_of(program: Program, recompute: Recompute) -> Policies:
    """The rules that `recompute=` asks for.

    Raises PlanError, with all faults at once, for a pattern that no module has.
    """
    nodes = [record(node) for node in program.calls()]
    layers = frozenset(
        layer_of(known.module) for known in nodes if known.flops or layer_of(known.module) != known.module
    )
    if not isinstance(recompute, Mapping):
        return Policies((PolicyRule((ALL,), recompute, f"recompute={recompute!r}"),), layers)
    paths = module_paths(program, program.calls())
    faults, rules = [], []
    for pattern, policy in recompute.items():
        text = f"recompute={{{pattern!r}: {policy!r}}}"
        if fault := unknown_pattern(pattern, paths):
            faults.append(f"{text}: {fault}")
        rules.append(PolicyRule(tuple(spelled_out(pattern)), policy, text))
    if faults:
        raise PlanError("\n".join(faults))
    return Policies(rules, layers)
