"""Stop or skip a step whose loss or gradients are not finite, on all ranks alike, before anything is changed."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from autopar.compiler.check_options import OnNonFinite
from autopar.errors import NonFiniteError, name_ranks
from autopar.ir.program import has_record, record
from autopar.parallel.agree.agreement import Agreement
from autopar.runtime.executor.inputs import StepInputs
from autopar.runtime.ranks.runner import ExecutorRunner, Runner

_log = logging.getLogger("autopar")
SHOWN = 5  # gradients in a message


@dataclass(frozen=True, slots=True)
class _Told:
    """What a rank says of its part: the loss, its gradients that are not finite, and the first such value."""

    loss: float
    gradients: tuple[str, ...]
    first: tuple[int, str] | None  # when it came, and what it is


class NonFinite:
    """Looks at the loss and the gradients of each step."""

    def __init__(self, agreement: Agreement, wanted: OnNonFinite | None) -> None:
        self._agreement, self.wanted = agreement, wanted

    def passes(
        self, loss: torch.Tensor, gradients: Mapping[str, torch.Tensor | None], runner: Runner,
        inputs: Callable[[], StepInputs], steps: int,
    ) -> bool:  # fmt: skip
        """Whether a step may change parameters; raises NonFiniteError on every rank where it may not and is to stop.

        gradients: this rank's parts, by the name of the parameter; none where a loss scale looks at them. runner,
        inputs: of the step, which is run once more to find where it began. steps: that came before. Every rank must
        call this.
        """
        here = {name: one for name, one in gradients.items() if one is not None and one.numel()}
        if not self._agreement.any("loss and gradients", not (_finite([loss.detach()]) and _finite([*here.values()]))):
            return True
        if self.wanted == "skip":
            if dist.get_rank() == 0:
                _log.warning("step %d: loss or gradients are not finite, no parameter is changed by it", steps)
            return False
        first = _First()
        can_look = isinstance(runner, ExecutorRunner)
        if isinstance(runner, ExecutorRunner):
            runner.driver.run(runner.executable, inputs().values(), first.see)
        bad = tuple(name for name, one in here.items() if not _finite([one]))
        told = _Told(float(loss.detach()), bad, first.found)
        raise NonFiniteError(self._fault(self._agreement.everyone("loss and gradients", told), steps, can_look))

    def _fault(self, everyone: list[_Told], steps: int, can_look: bool) -> str:
        """What is not finite, and where."""
        ranks: dict[str, list[int]] = {}
        for rank, told in enumerate(everyone):
            for name in told.gradients:
                ranks.setdefault(name, []).append(rank)
        lines = [f"step {steps}: the loss is {everyone[0].loss:g}, and {len(ranks) or 'no'} gradients are not finite."]
        lines += [f"  gradient of '{name}' on {name_ranks(at)}" for name, at in list(ranks.items())[:SHOWN]]
        if len(ranks) > SHOWN:
            lines.append(f"  and {len(ranks) - SHOWN} more")
        began = [(*told.first, rank) for rank, told in enumerate(everyone) if told.first is not None]
        if began:
            place, what, _ = min(began)
            at = [rank for number, text, rank in began if number == place and text == what]
            lines.append(f"The first value that is not finite is {what}, on {name_ranks(at)}.")
        elif not can_look:
            lines.append("Which value came first is looked for where a step is one graph on autopar's own executor.")
        lines.append('No parameter, buffer or gradient was changed. on_nonfinite="skip" leaves such steps out.')
        return "\n".join(lines)


@dataclass
class _First:
    """Finds where the first NaN of a step comes from, else the first infinite value: a value made of finite ones. What
    a model fills with -inf, as it does a mask, is no such origin."""

    origin: dict[fx.Node, fx.Node] = field(default_factory=dict)  # of each value that is not finite
    said: dict[fx.Node, tuple[int, str]] = field(default_factory=dict)
    count: int = 0
    infinite: fx.Node | None = None
    nan: fx.Node | None = None

    @property
    def found(self) -> tuple[int, str] | None:
        """When it came, and what it is."""
        last = self.nan or self.infinite
        return None if last is None else self.said[self.origin[last]]

    def see(self, node: fx.Node, value: Any) -> None:
        """One value, in the order of the program."""
        self.count += 1
        tensors = [one for one in (value if isinstance(value, (tuple, list)) else (value,)) if _is_float(one)]
        if self.nan is not None or all(_finite([one]) for one in tensors):
            return
        has_nan = any(bool(torch.isnan(one).any()) for one in tensors)
        before = [self.origin[one] for one in node.all_input_nodes if one in self.origin]
        self.origin[node] = next((one for one in before if not _fills(one)), node)
        self.said[node] = self.count, self._said(node, has_nan)
        if has_nan:
            self.nan = node
        elif self.infinite is None and not _fills(self.origin[node]):
            self.infinite = node

    def _said(self, node: fx.Node, has_nan: bool) -> str:
        kind = "NaN" if has_nan else "infinite"
        if node.op == "placeholder" or not has_record(node):
            return f"input %{node.name} ({kind})"
        known = record(node)
        module = f" in module '{known.module}'" if known.module else ""
        source = f" at {known.source}" if known.source else ""
        bad = [f"%{one.name}" for one in node.all_input_nodes if one in self.origin]
        given = f"of {', '.join(bad)}, not finite before" if bad else "of finite values"
        return f"%{node.name} ({kind}), which op '{node.target}' of the {known.phase} pass{module}{source} made {given}"


def _fills(node: fx.Node) -> bool:
    """True for what puts a number in that is not finite: a mask."""
    if node.op == "placeholder":
        return False
    return not node.all_input_nodes or _says_inf(node)


def _says_inf(node: fx.Node) -> bool:
    return any(isinstance(arg, float) and not math.isfinite(arg) for arg in (*node.args, *node.kwargs.values()))


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 0


def _finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all elements are; the largest of each tells, which cannot overflow."""
    if not tensors:
        return True
    largest = nn.utils.get_total_norm(list(tensors), norm_type=math.inf)
    return bool(torch.isfinite(largest))
