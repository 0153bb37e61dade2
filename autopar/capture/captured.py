"""The result of a capture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch

from autopar.capture.data.reads import Read
from autopar.capture.draws.host_draws import HostDraws
from autopar.capture.draws.step_coins import StepCoins
from autopar.capture.inputs.batch_dims import Dims
from autopar.capture.inputs.containers import Form, put_together
from autopar.capture.inputs.partners import Partner
from autopar.capture.python.left_values import LeftValue
from autopar.capture.python.ran import Ran
from autopar.capture.python.stand_in import stands_for_number
from autopar.capture.rows.row_draws import RowDraw
from autopar.capture.rows.row_sides import RowUses
from autopar.capture.trace.shown_memory import Shown
from autopar.ir.program import Program


class ReturnedLeaf(Enum):
    """What stands among what was returned for something that leaves the program."""

    NUMBER = "number"  # as a tensor []


def leaf_of(leaf: Any, shown: Shown | None) -> Any:
    """What stands for a tensor that leaves the program: None, that it is a number, or what memory it shows. Other
    leaves stay as they are."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return ReturnedLeaf.NUMBER if stands_for_number(leaf) else shown


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured step.

    `constants` are the tensors that the model made or keeps outside of parameters and buffers. `result_form` and
    `result_leaves` rebuild what was returned (`leaf_of` stands for what leaves as an output): the model's output
    in a forward-only program, or what the loss function of a training step returned beside the loss. `reads` are the
    values taken from the example batch, in the order of the program's outputs of kind "guard". `frozen` are the
    parameters that are not trained, by first name. `partners` are other models in the loss, whose tensors' names begin
    with theirs. `ran` are the user's functions that ran. `batch_dims`: the dim that counts the samples, by batch tensor
    (None: it has none); None as a whole where nothing was said. `coins`: the random branches of the step.
    `row_uses`: the parameters that it uses, by which masks select rows. `row_draws`: its dropout of such rows.
    `host`: what it draws on the host. `rebound`: the buffers that it binds to other tensors, each with the one whose
    new value that is: itself, or another one. `written`: the leaves of the batch that it writes. `left`: what a run of
    the model leaves in Python, and the program does not.
    """

    program: Program
    constants: Mapping[str, torch.Tensor]
    result_form: Form | None = None
    result_leaves: tuple[Any, ...] = ()
    reads: tuple[Read, ...] = ()
    frozen: frozenset[str] = frozenset()
    partners: tuple[Partner, ...] = ()
    ran: Ran = field(default_factory=Ran)
    batch_dims: Mapping[str, int | None] | None = None
    coins: StepCoins | None = None
    row_uses: RowUses | None = None
    row_draws: Mapping[int, RowDraw] = field(default_factory=dict)
    host: HostDraws | None = None
    rebound: Mapping[str, str] = field(default_factory=dict)
    written: frozenset[int] = frozenset()
    left: tuple[LeftValue, ...] = ()

    @property
    def has_result(self) -> bool:
        """False if a module returned more than its own loss, which does not leave the program."""
        return self.result_form is not None

    @property
    def is_by_chance(self) -> bool:
        """Whether random numbers decide which program a step runs."""
        return self.host is not None or (self.coins is not None and self.coins.is_alone)

    def unused(self, guards: Sequence[torch.Tensor]) -> frozenset[str]:
        """The parameters that a step does not use, by how many rows its masks select. guards: what it puts out."""
        if self.row_uses is None or not guards:
            return frozenset()
        return self.row_uses.unused(guards[-1])

    def with_dims(self, dims: Dims | None) -> Captured:
        """Note the dim of each leaf of the batch that counts the samples; None where nothing was said."""
        return replace(self, batch_dims=None if dims is None else {str(i): dim for i, dim in enumerate(dims)})

    def result(self, outputs: Sequence[Any]) -> Any:
        """The container that was returned, with the tensors among a program's outputs in their places."""
        assert self.result_form is not None
        leaves = list(self.result_leaves)
        for out, value in zip(self.program.outputs, outputs, strict=True) if leaves else ():
            if out.kind in ("value", "aux"):
                is_number = leaves[int(out.name)] is ReturnedLeaf.NUMBER and value is not None
                leaves[int(out.name)] = value.item() if is_number else value
        return put_together(self.result_form, leaves)


def drawing_host(found: Iterable[Captured], seed: Callable[[], torch.Tensor]) -> HostDraws | None:
    """What a step draws on the host, as one of the captures does whose coins are those of the step; the first one that
    draws, if no coins are known. seed: of the step."""
    hosts = [(one, one.host) for one in found if one.host is not None]
    fitting = (host for one, host in hosts if one.coins is None or one.coins.fit(seed()))
    return next(fitting, hosts[0][1] if hosts else None)
