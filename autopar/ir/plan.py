"""What the user and the planner decided, apart from any graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field

from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh

PIPELINE, MICROBATCH = "pp", "mb"  # the axes of stages, and of micro-batches

# PyTorch DDP's default: large enough for a link's full speed, small enough to overlap (arXiv 2006.15704, section 3.2).
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True, slots=True)
class Plan:
    """Decisions only: a plan holds no cost and no graph, so it never goes stale.

    layouts: the user's layouts of parameters, by the parameter's first name. patterns: where each was asked for, as
    its error messages spell it; no pass reads them. sequence_parallel: activations lie split over tp where no weight
    needs them whole. batch_whole: every rank computes the whole batch, which the batch's axes cannot divide.
    microbatches: the parts of a rank's batch that are computed one after another.
    """

    mesh: Mesh
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    _: KW_ONLY
    sequence_parallel: bool = False
    batch_whole: bool = False
    microbatches: int = 1
    bucket_bytes: int = BUCKET_BYTES
    patterns: Mapping[str, str] = field(default_factory=dict)

    @property
    def layout_mesh(self) -> Mesh:
        """The axes that layouts name: those of the mesh but pp, which places stages, and the micro-batches.

        Micro-batches are an axis like dp, but in time: what is partial over it is added up, one micro-batch after the
        other. It stands after dp, so that a rank's part of the batch is one piece.
        """
        inner = [(axis, size) for axis, size in self.mesh.axes if axis != PIPELINE]
        if self.microbatches == 1:
            return Mesh(tuple(inner))
        place = next((i + 1 for i, (axis, _) in enumerate(inner) if axis == "dp"), 0)
        return Mesh((*inner[:place], (MICROBATCH, self.microbatches), *inner[place:]))
