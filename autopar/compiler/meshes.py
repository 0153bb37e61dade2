"""Read the mesh as users give it: a string, a dict, a named DeviceMesh or a `Mesh`."""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import MeshError
from autopar.ir.mesh import AUTO, CONTEXT_AXES, EXPERT, PIPELINE, TIME_AXES, Mesh, parse_mesh
from autopar.passes.search.intents import INTENTS

AXES = tuple(sorted({*INTENTS, PIPELINE} - {*TIME_AXES}))

MeshLike = str | Mapping[str, int] | Mesh | DeviceMesh


def mesh_of(mesh: MeshLike, world: int | None = None) -> Mesh:
    """The mesh, checked against the number of ranks if that is known.

    Raises MeshError for what does not parse or fit, and for an axis of no known meaning.
    """
    if isinstance(mesh, str) and mesh == AUTO:
        raise MeshError(
            f"mesh '{AUTO}' is planned where ranks run: parallelize and `autopar run` take it. Here write axis=size "
            f"pairs, or --plan FILE.toml of `autopar plan TARGET --gpus N --out FILE.toml`."
        )
    found = _from_device_mesh(mesh, world) if isinstance(mesh, DeviceMesh) else parse_mesh(mesh, world)
    for axis in found.names:
        if axis not in AXES:
            raise MeshError(f"mesh '{found}': axis '{axis}' has no meaning; known axes are {', '.join(AXES)}.")
    inner = [axis for axis in found.names if axis in INTENTS and not INTENTS[axis].batch_split]
    ordered = sorted(inner, key=(*CONTEXT_AXES, *inner).index)
    if inner != ordered:
        raise MeshError(
            f"mesh '{found}': {' and '.join(ordered)} split pieces of each other, in this order: write "
            f"'{_reordered(found, ordered)}'."
        )
    if EXPERT in found and (before := [axis for axis in inner if found.names.index(axis) < found.names.index(EXPERT)]):
        raise MeshError(
            f"mesh '{found}': {EXPERT} splits the batch, and {' and '.join(before)} what it leaves of a sample: write "
            f"'{_reordered(found, [EXPERT, *inner])}'."
        )
    return found


def _reordered(mesh: Mesh, axes: list[str]) -> Mesh:
    """The mesh with these axes in this order, in the places that they have together."""
    names = iter(axes)
    wanted = [next(names) if name in axes else name for name in mesh.names]
    return Mesh(tuple((name, mesh[name]) for name in wanted))


def _from_device_mesh(mesh: DeviceMesh, world: int | None) -> Mesh:
    if not mesh.mesh_dim_names:
        raise MeshError("the DeviceMesh has no axis names: make it with mesh_dim_names=('dp', 'tp').")
    ranks = mesh.mesh.flatten().tolist()
    if ranks != list(range(world or len(ranks))):
        raise MeshError(
            f"the DeviceMesh holds ranks {mesh.mesh.tolist()}, but autopar needs all {world or len(ranks)} ranks, "
            f"in order."
        )
    return Mesh(tuple(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True)))
