"""The decisions of the user and the planner, apart from any graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch

from autopar.ir.layout import Layout
from autopar.ir.mesh import DATA_AXES, MICROBATCH, PIPELINE, SHARDED, Mesh

# PyTorch DDP's default: large enough for a link's full speed, small enough to overlap (arXiv 2006.15704, section 3.2).
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True, slots=True)
class Machine:
    """What a device does in a microsecond, about: only ratios count, and they place the cuts of a pipeline.
    latency_us: of a collective or a message. call_us: the least time of a call."""

    flops_per_us: float
    memory_bytes_per_us: float
    link_bytes_per_us: float
    latency_us: float
    call_us: float


GPU = Machine(4e8, 2e6, 1e5, 10.0, 2.0)  # of a server, as in passes/search/costs.py
CPU = Machine(6e4, 5e3, 1e3, 100.0, 5.0)  # a core, and Gloo on one machine


@dataclass(frozen=True, slots=True)
class Staging:
    """How a step becomes a pipeline.

    schedule: a name, a function or a CSV (see `passes/schedules/parse.py`). chunks: stages on a rank, None for the
    schedule's usual number. stages: modules, a stage an entry; None for the automatic cut. stage_memory: bytes that a
    stage may hold. owners: the stages that keep parameters already, by name. machine: what the cut is for.
    """

    schedule: Any = "1f1b"
    chunks: int | None = None
    stages: tuple[str, ...] | None = None
    stage_memory: int | None = None
    owners: Mapping[str, int] | None = None
    machine: Machine = GPU


RECOMPUTE = ("none", "selective", "full")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PRECISIONS = tuple(DTYPES)
Policy = str | int | float
Recompute = Policy | Mapping[str, Policy]


@dataclass(frozen=True, slots=True)
class Memory:
    """What a rank keeps, and in which dtype.

    zero: the states of which a rank keeps only its part (arXiv 1910.02054): 1 the optimizer's, 2 and gradients, 3 and
    parameters; None: 3 if the mesh has the axis `fsdp`, else 0. reshard_after_forward: with 3, what was gathered is
    dropped after its use and gathered again. recompute: of what the forward pass computes, what the backward pass
    computes again: a name of `RECOMPUTE`, the bytes of a rank that may be saved, or their part of what "none" saves;
    or those by pattern of modules. precision: one of `PRECISIONS`, None to compute as the model is. reduce_dtype: of
    the sums of gradients under a precision. bucket_bytes: of gradients or parameters that move together, None for
    what the costs say.
    """

    zero: int | None = None
    reshard_after_forward: bool = True
    recompute: Recompute = "none"
    precision: str | None = None
    reduce_dtype: torch.dtype = torch.float32
    bucket_bytes: int | None = None

    @property
    def low_dtype(self) -> torch.dtype | None:
        """The short float in which products are computed; None if they are as in the model."""
        return DTYPES[self.precision] if self.precision in ("bf16", "fp16") else None

    @property
    def sums_dtype(self) -> torch.dtype | None:
        """The shortest dtype in which gradients may be summed; None if they are as they come."""
        return None if self.low_dtype is None and self.reduce_dtype == torch.float32 else self.reduce_dtype


@dataclass(frozen=True, slots=True)
class Plan:
    """Decisions only: a plan holds no cost and no graph, so it never goes stale.

    layouts: the user's layouts of parameters, by the parameter's first name. patterns: where each was asked for, as
    its error messages spell it; no pass reads them. sequence_parallel: activations lie split over tp where no weight
    needs them whole. batch_replicated: every rank computes the whole batch, which the batch's axes cannot divide.
    microbatches: the parts of a rank's batch that are computed one after another. staging: how the stages are cut and
    in which order they run. memory: what a rank keeps. frozen: parameters that are not trained, by first name. stored:
    how parameters lie between steps, ZeRO's split included, where that is decided already. rules: the rows of the
    user's custom ops, by op, beside those of `passes/rules`.
    """

    mesh: Mesh
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    _: KW_ONLY
    sequence_parallel: bool = False
    batch_replicated: bool = False
    microbatches: int = 1
    staging: Staging = field(default_factory=Staging)
    memory: Memory = field(default_factory=Memory)
    patterns: Mapping[str, str] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    rules: Mapping[str, Any] = field(default_factory=dict, compare=False)
    stored: Mapping[str, Layout] = field(default_factory=dict)

    @property
    def ranks_of_pipeline(self) -> int:
        """The size of the axis pp; 1 without it."""
        return dict(self.mesh.axes).get(PIPELINE, 1)

    @property
    def is_staged(self) -> bool:
        """True if a step is a list of instructions over several graphs, and not one graph."""
        return self.microbatches > 1 or self.ranks_of_pipeline > 1

    @property
    def mesh_of_stage(self) -> Mesh:
        """The devices of one stage: the mesh without pp."""
        return Mesh(tuple((axis, size) for axis, size in self.mesh.axes if axis != PIPELINE))

    @property
    def zero(self) -> int:
        """The stage of ZeRO."""
        return (3 if SHARDED in self.mesh else 0) if self.memory.zero is None else self.memory.zero

    @property
    def zero_axis(self) -> str | None:
        """The axis over which ZeRO splits states: `fsdp` if there is one, else `dp`; None without ZeRO."""
        axis = SHARDED if SHARDED in self.mesh else "dp"
        return axis if self.zero and dict(self.mesh.axes).get(axis, 1) > 1 else None

    @property
    def gathers_again(self) -> bool:
        """True if parameters are gathered for each use."""
        return self.zero == 3 and self.memory.reshard_after_forward

    @property
    def layout_mesh(self) -> Mesh:
        """The axes that layouts name: those of the mesh but pp, which places stages, and the micro-batches.

        Micro-batches are an axis like dp, but in time: what is partial over it is added up, one micro-batch after the
        other. It stands after the data axes, so that a rank's part of the batch is one piece.
        """
        if self.microbatches == 1:
            return self.mesh_of_stage
        inner = self.mesh_of_stage.axes
        place = max((i + 1 for i, (axis, _) in enumerate(inner) if axis in DATA_AXES), default=0)
        return Mesh((*inner[:place], (MICROBATCH, self.microbatches), *inner[place:]))
