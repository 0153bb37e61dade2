"""The decisions of the user and the planner, apart from any graph."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from autopar.ir.layout import Layout
from autopar.ir.mesh import (
    CONTEXT_AXES,
    DATA_AXES,
    EXPERT,
    MICROBATCH,
    PIPELINE,
    SHARDED,
    SLICE,
    Mesh,
    axes_of_group,
)  # fmt: skip
from autopar.ir.modules import is_named
from autopar.ir.options import StepOptions
from autopar.machines import DEVICES, Machine, named

# PyTorch DDP's default: large enough for a link's full speed, small enough to overlap (arXiv 2006.15704, section 3.2).
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True, slots=True)
class Decided:
    """The layouts of every value of a program, and those in which its nodes want their operands, in the order of its
    nodes: for programs of the same structure and other sizes."""

    layouts: tuple[tuple[Layout | None, ...], ...]
    operands: tuple[tuple[Layout, ...], ...]


@dataclass(frozen=True, slots=True)
class Fixed:
    """What is decided before a plan is made, by the device and by the programs before this one.

    machine: what the program is made for. owners: the stages that keep parameters already, by name. stored: how
    parameters lie between steps, ZeRO's split included. uneven: a batch that its axes cannot divide, or positions that
    cp cannot, are computed whole by every rank, and not refused. decided: the layouts of earlier programs, by their
    structure. is_own: each rank of the data axes computes a batch of its own, of which the others know nothing.
    sequence: what `sequence_parallel="auto"` means, as an earlier program decided; None where none did.
    """

    machine: Machine = field(default_factory=lambda: named(DEVICES))
    owners: Mapping[str, int] | None = None
    stored: Mapping[str, Layout] = field(default_factory=dict)
    uneven: bool = False
    is_own: bool = False
    sequence: bool | None = None
    decided: Mapping[Hashable, Decided] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Plan:
    """Decisions only: a plan holds no cost and no graph, so it never goes stale.

    layouts: the user's layouts of parameters, by the parameter's first name. patterns: where each was asked for, as
    its error messages spell it; no pass reads them. options: of the step, with what the model and the batch decide in
    place of None and "auto". batch_replicated: every rank computes the whole batch, as its axes cannot divide it.
    batch_dims: the dim that counts the samples, by batch tensor (None: it has none); None as a whole where nothing was
    said.
    context_replicated: every rank of cp computes all positions, as it cannot divide them.
    whole: values that are not split over micro-batches, by name: all micro-batches have come forward before them.
    cuts_samples: False if micro-batches do not divide samples that are cut out of the batch before the model.
    slice_lengths: the positions of each slice, where they differ. frozen: parameters that are not trained, by first
    name. rules: the rows of the user's custom ops, by op, beside
    those of `passes/rules`.
    """

    mesh: Mesh
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    _: KW_ONLY
    options: StepOptions = field(default_factory=StepOptions)
    fixed: Fixed = field(default_factory=Fixed)
    batch_replicated: bool = False
    batch_dims: Mapping[str, int | None] | None = None
    context_replicated: bool = False
    whole: frozenset[str] = frozenset()
    cuts_samples: bool = True
    slice_lengths: tuple[int, ...] = ()
    patterns: Mapping[str, str] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    rules: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def weighed_on(self) -> Machine:
        """The machine whose speeds decide what lies and moves where. On a host it is the one that programs are made for
        where nobody names one, so that a laptop has the layouts of the cluster."""
        machine = self.fixed.machine
        return named(DEVICES) if machine.is_host else machine

    @property
    def microbatches(self) -> int:
        """The parts of a rank's batch that are computed one after another."""
        return self.options.microbatches or 1

    @property
    def slices(self) -> int:
        """The pieces of a sequence that are computed one after another."""
        wanted = self.options.slices
        assert wanted != "auto", "a plan has a number of slices"
        return wanted if isinstance(wanted, int) else len(wanted)

    @property
    def parts(self) -> int:
        """How often a stage runs in a step: once for each slice of each micro-batch."""
        return self.microbatches * self.slices

    @property
    def sequence_parallel(self) -> bool:
        """True if activations lie split over tp where no weight needs them whole."""
        return bool(self.options.sequence_parallel)

    @property
    def ranks_of_pipeline(self) -> int:
        """The size of the axis pp; 1 without it."""
        return dict(self.mesh.axes).get(PIPELINE, 1)

    @property
    def is_staged(self) -> bool:
        """True if a step is a list of instructions over several graphs, and not one graph."""
        return self.parts > 1 or self.ranks_of_pipeline > 1

    @property
    def mesh_of_stage(self) -> Mesh:
        """The devices of one stage: the mesh without pp."""
        return Mesh(tuple((axis, size) for axis, size in self.mesh.axes if axis != PIPELINE))

    @property
    def zero(self) -> int:
        """The stage of ZeRO."""
        return (3 if SHARDED in self.mesh else 0) if self.options.zero is None else self.options.zero

    def offloads(self, what: str) -> bool:
        """True if something of these waits in the host's memory."""
        return bool(self.options.offloaded.get(what))

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes over which experts are split."""
        chosen = (EXPERT, *(axes_of_group(self.options.experts) if self.options.experts else ()))
        return tuple(axis for axis, size in self.mesh.axes if axis in chosen and size > 1)

    @property
    def zero_axes(self) -> tuple[str, ...]:
        """The axes over which ZeRO splits states, in the order of the mesh: `fsdp` if there is one, else `dp`, that of
        experts, and those of the sequence; none without ZeRO."""
        chosen = (SHARDED if SHARDED in self.mesh else "dp", EXPERT, *CONTEXT_AXES) if self.zero else ()
        return tuple(axis for axis, size in self.mesh.axes if axis in chosen and size > 1)

    @property
    def gathers_again(self) -> bool:
        """True if parameters are gathered for each use, or some of them: with any ZeRO where they wait in the host's
        memory, since what is gathered once would be on the device for the whole step."""
        is_asked = self.zero == 3 or (self.zero > 0 and self.offloads("parameters"))
        return is_asked and bool(self.options.reshard_after_forward)

    def is_gathered_again(self, parameter: str) -> bool:
        """True if a parameter is gathered for each use, by its first name."""
        wanted = self.options.reshard_after_forward
        if not self.gathers_again or isinstance(wanted, bool):
            return self.gathers_again
        return next((again for pattern, again in wanted.items() if is_named(parameter, pattern)), True)

    @property
    def layout_mesh(self) -> Mesh:
        """The axes that layouts name: those of the mesh but pp, which places stages, and those in time.

        Micro-batches are an axis like dp, but in time: what is partial over it is added up, one micro-batch after the
        other. It stands after the data axes, so that a rank's part of the batch is one piece. So are slices, an axis
        like cp: it stands before all that splits a sequence, so that a slice is one piece of it.
        """
        inner = list(self.mesh_of_stage.axes)
        if self.microbatches > 1:
            place = max((i + 1 for i, (axis, _) in enumerate(inner) if axis in DATA_AXES), default=0)
            inner.insert(place, (MICROBATCH, self.microbatches))
        if self.slices > 1:
            data = (*DATA_AXES, MICROBATCH)
            place = next((i for i, (axis, _) in enumerate(inner) if axis not in data), len(inner))
            inner.insert(place, (SLICE, self.slices))
        return Mesh(tuple(inner), self.slice_lengths if self.slices > 1 else ())
