"""Turn parameters into DTensors with the compiler's layouts, and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.ir.layout import Layout, combine, replicated
from autopar.ir.mesh import PIPELINE, Mesh
from autopar.parallel.tensors.padding import beginning, with_padding, without_padding
from autopar.parallel.tensors.parameter import ParameterTensor, parameter_tensor
from autopar.parallel.tensors.place import World
from autopar.parallel.weights.identity import lay_out
from autopar.passes.collectives.zero import stored_layout
from autopar.runtime.ranks.process_groups import default_group
from autopar.runtime.ranks.wire import on_wire
from autopar.runtime.tiers.disk_tier import in_file
from autopar.runtime.tiers.host_tier import in_host
from autopar.torch_compat import local_of

SMALL = 1 << 16  # elements: a parameter with fewer waits whole, for a collective would cost more than its memory


class Distributor:
    """Makes DTensors of whole tensors, and whole tensors of DTensors.

    Layouts are over `inner`, the mesh without `pp`. `owner`: the stage where a value lies (its place on `pp`); None: on
    each. on_host: parts lie in the host's memory. folder: in whose files they lie there.
    """

    def __init__(
        self, mesh: Mesh, device_mesh: DeviceMesh, announce: Callable[[str], None], on_host: bool = False,
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        self.on_host, self.folder = on_host, folder
        self.mesh, self.device_mesh, self.world = mesh, device_mesh, World.of(mesh, device_mesh, announce)
        self.inner, self.coord = self.world.inner, self.world.coord

    def split(self, tensor: torch.Tensor, layout: Layout, owner: int | None = None) -> ParameterTensor:
        """A whole tensor, the same on every rank, in a layout."""
        place = self.world.place(layout, owner)
        part = tensor.detach().contiguous() if place.is_replicated else place.part(tensor.detach())
        return parameter_tensor(self.at_home(part), place, tensor.shape)

    def at_home(self, part: torch.Tensor) -> torch.Tensor:
        """A part of a parameter where it lies between steps: for a GPU in memory that copies need no help to read."""
        if self.folder is not None:
            return in_file(part, self.folder)
        return in_host(part, self.world.device) if self.on_host else part

    def waiting(self, shape: torch.Size, least: int = SMALL) -> Layout:
        """How a parameter of `shape` lies until the first program decides its layout: split over all axes.

        Rows in the order of the ranks, if they can be: what is gathered is then the whole value, without a copy.
        """
        mesh, axes = self.mesh, tuple(axis for axis, size in self.mesh.axes if size > 1)
        waiting = replicated(len(shape))
        if shape.numel() < max(least, mesh.size) or not axes:
            return waiting
        dim = next((dim for dim, size in enumerate(shape) if size % mesh.size == 0), None)
        if dim is None and len(axes) == 1:
            dim = max(range(len(shape)), key=lambda dim: (shape[dim] >= mesh.size, -dim))
        if dim is not None:
            return Layout((*waiting.dims[:dim], axes, *waiting.dims[dim + 1 :]))
        for axis in sorted(axes, key=lambda axis: -mesh[axis]):
            waiting = stored_layout(tuple(shape), waiting, mesh, axis) or waiting
        return waiting

    def made_alike(self, part: torch.Tensor, layout: Layout, shape: torch.Size) -> ParameterTensor:
        """Make a parameter of a part that every rank made itself from one seed. Ranks that hold the same part take
        it from one of them: machines may differ in the last digit. Every rank must call this."""
        part = part.to(self.world.device) if self.on_host else part
        for axis, size in self.mesh.axes:
            if size > 1 and axis not in layout.axes:
                source = self.mesh.rank({**self.coord, axis: 0})
                dist.broadcast(on_wire(part), src=source, group=self.device_mesh.get_group(axis))
        return parameter_tensor(self.at_home(part), self.world.place(layout), shape)

    def parameter(self, tensor: torch.Tensor, layout: Layout, owner: int | None = None) -> nn.Parameter:
        """Split a tensor into a parameter that requires a gradient if `tensor` does."""
        return nn.Parameter(self.split(tensor, layout, owner), requires_grad=tensor.requires_grad)

    def given(self, parameter: DTensor, layout: Layout) -> torch.Tensor:
        """What a program takes of a parameter on this rank."""
        return with_padding(local_of(parameter), tuple(parameter.shape), layout, self.inner)

    def taken(self, value: torch.Tensor, layout: Layout, shape: torch.Size) -> torch.Tensor:
        """What a program's gradient is, on this rank, for a parameter of `shape`."""
        return without_padding(value, tuple(shape), layout, self.inner, self.coord)

    def is_owner(self, owner: int | None) -> bool:
        """True if this rank holds a part of what lies there."""
        return owner is None or owner == self.coord[PIPELINE]

    def gather(
        self, part: torch.Tensor, layout: Layout, shape: torch.Size, owner: int | None = None
    ) -> torch.Tensor | None:
        """The whole CPU tensor, of `shape`, on rank 0; None elsewhere. Every rank must call this, in a call that
        announced itself."""
        first = default_group().rank() == 0
        part = part.detach()
        if owner is not None:
            value = self.gather_everywhere(part, layout, shape, owner)
            return value.cpu() if first else None
        if layout.is_replicated:
            return part.cpu().clone() if first else None
        part = with_padding(part.to(self.world.device), tuple(shape), layout, self.mesh).contiguous()
        splitting = Mesh(tuple(axis for axis in self.mesh.axes if axis[0] in layout.axes))
        parts = self._gather_along(part, splitting)
        return None if parts is None else beginning(combine(parts, layout, splitting), shape)

    def _gather_along(self, part: torch.Tensor, splitting: Mesh) -> list[torch.Tensor] | None:
        """The parts of all ranks along some axes, on the host of rank 0; None elsewhere. One axis after another, the
        last first, and of ranks that hold the same one alone: rank 0 receives no part twice."""
        others = [axis for axis in self.mesh.names if axis not in splitting]
        if any(self.coord[axis] for axis in others):
            return None
        parts = part[None]
        for axis, size in reversed(splitting.axes):
            group = self.device_mesh.get_group(axis)
            if self.coord[axis]:
                dist.gather(on_wire(parts), None, group=group, group_dst=0)
                return None
            every = parts.new_empty(size, *parts.shape)
            dist.gather(on_wire(parts), [on_wire(each) for each in every], group=group, group_dst=0)
            parts = every.flatten(0, 1)
        return list(parts.cpu())

    def gather_everywhere(
        self, part: torch.Tensor, layout: Layout, shape: torch.Size, owner: int | None = None
    ) -> torch.Tensor:
        """The whole tensor, of `shape`, on every rank; those that are not at its owner hold no part of it. In a call
        that announced itself."""
        return self.world.place(layout, owner).gather(part.detach(), torch.Size(shape), None)

    def relayout(
        self, name: str, parameter: nn.Parameter, has: Layout, wanted: Layout,
        owner: int | None = None, new_owner: int | None = None,
    ) -> None:  # fmt: skip
        """Change layout and owner of a parameter in place: optimizers and users that hold it keep holding it.

        A collective: every rank must call it, in a call that announced itself. Raises RankError if a rank is lost.
        """
        local = local_of(parameter)  # type: ignore[arg-type]
        value = local
        if owner is not None or has != replicated(len(has.dims)):
            value = self.gather_everywhere(local, has, parameter.shape, owner)
        lay_out(name, parameter, self.parameter(value, wanted, new_owner))
