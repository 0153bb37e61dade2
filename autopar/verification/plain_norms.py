"""The norms of the plain module where they take the statistics of groups of samples: torch's own norm of each group."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture.ops.raised_norms import Norm
from autopar.compiler.lowered import Lowered
from autopar.passes.groups import SampleGroups, groups_of

Tensor = torch.Tensor
Running = tuple[Tensor | None, Tensor | None]


@dataclass(slots=True)
class _Written:
    """A running statistic of a module, with the values and the momentum of each call in a forward pass."""

    module: nn.Module | None
    running: Tensor
    calls: list[tuple[Tensor, float]] = field(default_factory=list)


class PlainNorms:
    """Norms with the statistics of groups of samples.

    A step is one of plain PyTorch on each data rank, micro-batches one after another, but for its loss, which stays
    that of the whole batch. Running statistics are written when all is computed: a rank's after all of its
    micro-batches in their order, of which ranks take the mean. groups: how the rows of each call are dealt, in the
    order of the calls. updates: of a statistic in a step, for each call.
    """

    def __init__(self, statistics: str, groups: Sequence[SampleGroups], updates: int) -> None:
        self.statistics, self.groups, self.updates = statistics, groups, updates
        self._written: dict[int, _Written] = {}
        self._counts: dict[nn.Module, int] = {}  # as they were before the step
        self._calls = 0

    @staticmethod
    def of(compiled: Lowered) -> PlainNorms | None:
        """The norms of a compiled step; None if they take the whole batch."""
        plan, program = compiled.plan, compiled.history[0][1]
        statistics = plan.options.batch_statistics
        groups = [] if statistics == "batch" else [*groups_of(program, plan).values()]
        return (
            PlainNorms(statistics, groups, plan.microbatches if statistics == "microbatch" else 1) if groups else None
        )

    def begin(self) -> None:
        """Begin a step."""
        self._written, self._counts, self._calls = {}, {}, 0

    def call(self, func: Any, module: nn.Module | None, args: Any, kwargs: Any) -> Any:
        """The result of a norm. NotImplemented for one that takes no statistics of samples."""
        names = _NAMES[func]
        given: Any = {**names, **dict(zip(names, args, strict=False)), **kwargs}
        takes = given["training"] if "training" in given else given["use_input_stats"]
        running = given["running_mean"], given["running_var"]
        if not takes or not Norm(self.statistics, module).has_groups:
            return NotImplemented
        kept = {name: given[name] for name in ("weight", "bias", "eps")}
        if func is not F.instance_norm:
            norm: partial[Tensor] = partial(F.batch_norm, training=True, **kept)
        elif None in running:
            return NotImplemented  # each sample by itself
        else:
            self._calls += 1  # a program has a call for each of the two statistics
            norm = partial(F.instance_norm, use_input_stats=True, **kept)
        return self._each(norm, module, given["input"], running, given["momentum"])

    def _each(
        self, norm: partial[Tensor], module: nn.Module | None, input: Tensor, running: Running, momentum: float
    ) -> Tensor:
        dealt = self.groups[self._calls % len(self.groups)]
        self._calls += 1
        before, count = dealt.sizes
        rows = input.reshape(before, count, -1, *input.shape[1:]).transpose(0, 1)
        kept = [[None if one is None else torch.zeros_like(one) for one in running] for _ in range(count)]
        write = partial(self._write, module, running, kept, dealt, momentum)
        try:
            results = [  # of a momentum of 1, so that what is kept is the statistic itself
                norm(group, *values, momentum=1.0) for group, values in zip(rows.flatten(1, 2), kept, strict=True)
            ]
        except Exception:  # a checkpoint that computes this again ends in the last group, where batch norm has written
            if norm.func is not F.instance_norm:
                write()
            raise
        write()
        return torch.stack(results).reshape(rows.shape).transpose(0, 1).reshape(input.shape)

    def _write(
        self, module: nn.Module | None, running: Running, kept: Sequence[Sequence[Tensor | None]], dealt: SampleGroups,
        momentum: float,
    ) -> None:  # fmt: skip
        """Note the statistics of a call, in the order of the groups."""
        for i, one in enumerate(running):
            if one is not None:
                found = torch.stack([values[i] for values in kept])  # type: ignore[misc]
                written = self._written.setdefault(id(one), _Written(module, one))
                written.calls.append((found.reshape(dealt.ranks, dealt.parts, -1), momentum))
        if module is not None and running[0] is not None and module.num_batches_tracked is not None:
            self._counts.setdefault(module, int(module.num_batches_tracked) - 1)  # type: ignore[arg-type]

    def finish(self) -> None:
        """Write the running statistics of a step, and how many updates they had."""
        with torch.no_grad():
            for one in self._written.values():
                ranks = range(max(len(values) for values, _ in one.calls))
                one.running.copy_(torch.stack([self._after(one, rank) for rank in ranks]).mean(0))
            for module, before in self._counts.items():
                count: Tensor = module.num_batches_tracked  # type: ignore[assignment]
                count.fill_(before + (int(count) - before) * self.updates)
        self._written, self._counts = {}, {}

    def _after(self, one: _Written, rank: int) -> Tensor:
        """A statistic of a rank after its micro-batches, each of which makes all calls."""
        running, module = one.running, one.module
        count = self._counts.get(module, 0) if module is not None else 0
        for part in range(self.updates):
            for values, momentum in one.calls:
                count += 1
                weight = 1.0 / count if module is not None and module.momentum is None else momentum
                running = running * (1 - weight) + values[rank % len(values), part % values.shape[1]] * weight
        return running


_OF_TORCH = "input weight bias running_mean running_var training momentum eps cudnn_enabled"
# The arguments of a norm in their order, with their defaults.
_NAMES: dict[Any, dict[str, Any]] = {
    **{func: {name: one.default for name, one in inspect.signature(func).parameters.items()}
       for func in (F.batch_norm, F.instance_norm)},
    torch.batch_norm: dict.fromkeys(_OF_TORCH.split()),
}  # fmt: skip
