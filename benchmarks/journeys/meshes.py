"""The meshes of journeys, and which options go with them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MESHES = (
    "dp=1", "dp=2", "tp=2", "fsdp=2", "pp=2", "dp=2,tp=2", "dp=2,fsdp=2", "fsdp=2,tp=2", "dp=2,pp=2", "pp=2,tp=2",
    "dp=4", "tp=4", "cp=2", "dp=2,cp=2", "cp=2,tp=2",
)  # fmt: skip
OF_EXPERTS = ("ep=2", "ep=4", "dp=2,ep=2", "fsdp=2,ep=2", "ep=2,tp=2", "pp=2,ep=2")
PLANNED = ("auto=2", "auto=4")  # mesh="auto" on so many ranks
RARE = ("dp=2,tp=3", "dp=3,tp=2", "fsdp=3,tp=2")
NOT_PLANNED = ("precision", "chunked_loss", "compile")  # options that may stand beside mesh="auto"
WHOLE_BATCH = frozenset({"batchnorm", "average"})  # blocks that micro-batches cannot have

# The axes of meshes that journeys take, by whose the batch of a rank is.
AXES = {
    "global": frozenset(["dp", "fsdp", "ep", "tp", "pp", "cp", "auto"]),
    "local": frozenset(["dp", "fsdp", "ep"]),
    "ddp": frozenset(["dp"]),
}


def world(mesh: str) -> int:
    """The number of ranks of a mesh."""
    return math.prod(int(axis.partition("=")[2]) for axis in mesh.split(","))


def axes_of(mesh: str) -> set[str]:
    """The names of its axes."""
    return {axis.partition("=")[0] for axis in mesh.split(",")}


def meshes_for(setup: Mapping[str, Any]) -> list[str]:
    """All with as many ranks as that of a setup, and for its model."""
    staged = not WHOLE_BATCH & set(setup["blocks"])
    allowed = AXES[setup.get("batch", "global")]
    return [
        mesh
        for mesh in (*MESHES, *PLANNED, *RARE, *(OF_EXPERTS if has_experts(setup) else ()))
        if world(mesh) == world(setup["mesh"]) and (staged or "pp" not in mesh) and axes_of(mesh) <= allowed
    ]


def has_experts(setup: Mapping[str, Any]) -> bool:
    """Whether a model has what the axis ep divides."""
    return any(name.startswith("experts") for name in setup["blocks"])


def options_on(mesh: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without those that a mesh has no axis for, and with those that it needs."""
    if mesh in PLANNED:
        return {name: value for name, value in options.items() if name in NOT_PLANNED}
    kept = dict(options)
    if not {"dp", "fsdp", "cp", "ep"} & axes_of(mesh) or mesh == "dp=1":
        kept.pop("zero", None)
    if "pp" not in mesh:
        kept.pop("schedule", None)
        kept.pop("slices", None)
    else:
        kept.setdefault("microbatches", 2)
    if "tp" not in mesh:
        kept.pop("sequence_parallel", None)
    elif kept.get("attention") == "ulysses":  # two heads, for four ranks
        kept.pop("attention")
    if "cp" not in axes_of(mesh):
        kept.pop("attention", None)
    if not {f"{kept.get('experts')}={size}" for size in (2, 4)} & {*mesh.split(",")}:  # of four experts
        kept.pop("experts", None)
    return kept
