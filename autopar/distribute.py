"""Process groups, and parameters as DTensors: where the compiler's layouts meet torch.distributed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from autopar.agreement import Agreement
from autopar.ir.layout import Layout, combine, local_shape, padded_shape, whole
from autopar.ir.mesh import Mesh
from autopar.ir.plan import PIPELINE
from autopar.meshes import MeshLike, mesh_of
from autopar.padding import beginning, pad_to, padded_part, with_padding, without_padding
from autopar.parameter import parameter_tensor
from autopar.passes.search.states import states_of
from autopar.settings import Settings
from autopar.stage_tensor import Stages, stage_tensor
from autopar.torch_compat import StridedShard, local_of, mesh_elsewhere, spec_of


def join(mesh: MeshLike, device: str | torch.device | None) -> tuple[Mesh, DeviceMesh, torch.device]:
    """This process's mesh and device; joins the process group that the launcher prepared, if none is there.

    A mesh of size 1 needs no launcher: it gets a group of its own. Raises MeshError if the sizes do not fit.
    """
    settings = Settings.read()
    world = dist.get_world_size() if dist.is_initialized() else settings.world_size or 1
    place = _device(device, settings)
    if world == 1:
        mesh_of(mesh, world)  # before a group is made for it
    if not dist.is_initialized():
        if place.type == "cuda":
            torch.cuda.set_device(place)
        backend = "nccl" if place.type == "cuda" else "gloo"
        if settings.world_size is None:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group(backend)
    agreement = Agreement(place)
    parsed = agreement.together("mesh", lambda: mesh_of(mesh, world))
    agreement.check("mesh", [str(parsed)])
    if isinstance(mesh, DeviceMesh):
        return parsed, mesh, place
    return parsed, init_device_mesh(place.type, parsed.shape, mesh_dim_names=parsed.names), place


def _device(device: str | torch.device | None, settings: Settings) -> torch.device:
    if device is not None:
        return torch.device(device)
    backend = dist.get_backend() if dist.is_initialized() else None
    local = settings.local_rank or 0
    if backend != "gloo" and torch.cuda.is_available() and local < torch.cuda.device_count():
        return torch.device("cuda", local)
    return torch.device("cpu")


def placements(layout: Layout, mesh: Mesh) -> list[Placement]:
    """A layout as DTensor placements, one for each mesh axis."""
    states = states_of(layout, mesh)
    found: list[Placement] = []
    for axis in mesh.names:
        state = states.get(axis)
        if not isinstance(state, tuple):
            found.append(Replicate())
        else:
            dim, outer = state
            found.append(Shard(dim) if outer == 1 else StridedShard(dim, split_factor=outer))
    return found


def is_strided(layout: Layout, mesh: Mesh) -> bool:
    """True for a layout that no public placement expresses."""
    return any(isinstance(placed, StridedShard) for placed in placements(layout, mesh))


class Distributor:
    """Makes DTensors of whole tensors, and whole tensors of DTensors.

    Layouts are over `inner`, the mesh without `pp`. `home` is the coordinate on `pp` where a value lies; None: on each.
    """

    def __init__(self, mesh: Mesh, device_mesh: DeviceMesh) -> None:
        self.mesh, self.device_mesh = mesh, device_mesh
        self.inner = Mesh(tuple((name, size) for name, size in mesh.axes if name != PIPELINE))
        self.coord = mesh.coord(dist.get_rank())
        self.stages = Stages(device_mesh, self._meshes_of_stages()) if PIPELINE in mesh else None

    def split(self, tensor: torch.Tensor, layout: Layout, home: int | None = None) -> DTensor:
        """A whole tensor, the same on every rank, in a layout."""
        if not self.is_home(home):
            nothing = tensor.new_empty((0,) * tensor.ndim)  # torch takes an empty shape as none, and that of the part
            return self.wrap(nothing, layout, tensor, home)
        part = padded_part(tensor, layout, self.mesh, self.coord)
        part = without_padding(part, tuple(tensor.shape), layout, self.mesh, self.coord)
        part = (
            part.clone(memory_format=torch.contiguous_format) if part.numel() != tensor.numel() else part.contiguous()
        )
        return self.wrap(part, layout, tensor, home)

    def wrap(self, part: torch.Tensor, layout: Layout, whole_: torch.Tensor, home: int | None = None) -> DTensor:
        """This rank's part as a DTensor of the shape of `whole_`; elsewhere than at home `part` is not looked at."""
        shape = torch.Size(whole_.shape)
        stride = torch.empty(shape, device="meta").stride()
        if home is None or self.stages is None:
            where, placed = self.device_mesh, placements(layout, self.mesh)
        else:
            where, placed = self.stages.meshes[home], placements(layout, self.inner) or [Replicate()]
        made = DTensor.from_local(part, where, placed, run_check=False, shape=shape, stride=stride)
        return made if self.stages is None else stage_tensor(local_of(made), spec_of(made), self.stages)

    def parameter(self, tensor: torch.Tensor, layout: Layout, home: int | None = None) -> nn.Parameter:
        """As `split`, as a parameter that requires a gradient if `tensor` does."""
        made = self.split(tensor.detach(), layout, home)
        return nn.Parameter(made if self.stages else parameter_tensor(made), requires_grad=tensor.requires_grad)

    def given(self, parameter: DTensor, layout: Layout) -> torch.Tensor:
        """What a program takes of a parameter on this rank."""
        return with_padding(local_of(parameter), tuple(parameter.shape), layout, self.inner)

    def taken(self, value: torch.Tensor, layout: Layout, shape: torch.Size) -> torch.Tensor:
        """What a program's gradient is, on this rank, for a parameter of `shape`."""
        return without_padding(value, tuple(shape), layout, self.inner, self.coord)

    def is_home(self, home: int | None) -> bool:
        """True if this rank holds a part of what lies there."""
        return home is None or home == self.coord[PIPELINE]

    def gather(
        self, part: torch.Tensor, layout: Layout, shape: torch.Size, home: int | None = None
    ) -> torch.Tensor | None:
        """The whole CPU tensor, of `shape`, on rank 0; None elsewhere. Every rank must call this."""
        first = dist.get_rank() == 0
        part = part.detach()
        if home is not None:
            value = self.gather_everywhere(part, layout, shape, home)
            return value.cpu() if first else None
        if layout.is_whole:
            return part.cpu().clone() if first else None
        part = with_padding(part, tuple(shape), layout, self.mesh).contiguous()
        parts = [torch.empty_like(part) for _ in range(self.mesh.size)] if first else None
        dist.gather(part, parts, dst=0)
        return beginning(combine([p.cpu() for p in parts], layout, self.mesh), shape) if parts is not None else None

    def gather_everywhere(
        self, part: torch.Tensor, layout: Layout, shape: torch.Size, home: int | None = None
    ) -> torch.Tensor:
        """The whole tensor, of `shape`, on every rank; those that are not at its home hold no part of it."""
        if home is None:
            part = with_padding(part.detach(), tuple(shape), layout, self.mesh).contiguous()
            parts = [torch.empty_like(part) for _ in range(self.mesh.size)]
            dist.all_gather(parts, part)
            return beginning(combine(parts, layout, self.mesh), shape)
        local = local_shape(padded_shape(tuple(shape), layout, self.inner), layout, self.inner)
        parts = []
        for coord in self.inner.coords():
            if any(place and axis not in layout.axes for axis, place in coord.items()):
                parts.append(parts[0])  # a replica, which nobody reads
                continue
            source = self.mesh.rank({**coord, PIPELINE: home})
            mine = source == dist.get_rank()
            sent = pad_to(part.detach(), local).contiguous() if mine else part.new_empty(local)
            dist.broadcast(sent, src=source)
            parts.append(sent)
        return beginning(combine(parts, layout, self.inner), shape).clone()

    def relayout(
        self, parameter: nn.Parameter, has: Layout, wanted: Layout,
        home: int | None = None, new_home: int | None = None,
    ) -> None:  # fmt: skip
        """Change layout and home of a parameter in place: optimizers and users that hold it keep holding it."""
        local = local_of(parameter)  # type: ignore[arg-type]
        value = local
        if home is not None or has != whole(len(has.dims)):
            value = self.gather_everywhere(local, has, parameter.shape, home)
        made = self.parameter(value, wanted, new_home)
        made.requires_grad_(parameter.requires_grad)
        torch.utils.swap_tensors(parameter, made)

    def _meshes_of_stages(self) -> tuple[DeviceMesh, ...]:
        """The device mesh of each stage; its names are `inner`'s, or `pp` alone where there are no others."""
        names, mine = self.inner.names, self.coord[PIPELINE]
        ranks = self.device_mesh.mesh.movedim(self.mesh.names.index(PIPELINE), 0)
        found = []
        for home, inside in enumerate(ranks):
            if home == mine and names:
                found.append(self.device_mesh[names])
            else:
                inside = inside.contiguous() if names else inside.reshape(1)
                found.append(mesh_elsewhere(self.device_mesh.device_type, inside, names or (PIPELINE,)))
        return tuple(found)
