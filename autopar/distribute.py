"""Process groups, and parameters as DTensors: where the compiler's layouts meet torch.distributed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from autopar.agreement import Agreement
from autopar.ir.layout import Layout, combine, local_part, whole
from autopar.ir.mesh import Mesh
from autopar.meshes import MeshLike, mesh_of
from autopar.parameter import parameter_tensor
from autopar.passes.search.states import states_of
from autopar.settings import Settings
from autopar.torch_compat import StridedShard, local_of


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


def is_strided(layout: Layout) -> bool:
    """True for a layout that no public placement expresses."""
    return any(isinstance(factor, int) for factors in layout.dims for factor in factors)


class Distributor:
    """Makes DTensors of whole tensors, and whole tensors of DTensors."""

    def __init__(self, mesh: Mesh, device_mesh: DeviceMesh) -> None:
        self.mesh, self.device_mesh = mesh, device_mesh
        self.coord = mesh.coord(dist.get_rank())

    def split(self, tensor: torch.Tensor, layout: Layout) -> DTensor:
        """A whole tensor, the same on every rank, in a layout."""
        part = local_part(tensor, layout, self.mesh, self.coord)
        part = (
            part.clone(memory_format=torch.contiguous_format) if part.numel() != tensor.numel() else part.contiguous()
        )
        return self.wrap(part, layout, tensor)

    def wrap(self, part: torch.Tensor, layout: Layout, whole_: torch.Tensor) -> DTensor:
        """This rank's part as a DTensor of the shape of `whole_`."""
        shape = torch.Size(whole_.shape)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            part, self.device_mesh, placements(layout, self.mesh), run_check=False, shape=shape, stride=stride
        )

    def parameter(self, tensor: torch.Tensor, layout: Layout) -> nn.Parameter:
        """As `split`, as a parameter that requires a gradient if `tensor` does."""
        return nn.Parameter(parameter_tensor(self.split(tensor.detach(), layout)), requires_grad=tensor.requires_grad)

    def gather(self, part: torch.Tensor, layout: Layout) -> torch.Tensor | None:
        """The whole CPU tensor on rank 0, None elsewhere. Every rank must call this."""
        if layout.is_whole:
            return part.detach().cpu().clone() if dist.get_rank() == 0 else None
        part = part.detach().contiguous()
        first = dist.get_rank() == 0
        parts = [torch.empty_like(part) for _ in range(self.mesh.size)] if first else None
        dist.gather(part, parts, dst=0)
        return combine([p.cpu() for p in parts], layout, self.mesh) if parts is not None else None

    def gather_everywhere(self, part: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The whole tensor on every rank."""
        parts = [torch.empty_like(part) for _ in range(self.mesh.size)]
        dist.all_gather(parts, part.detach().contiguous())
        return combine(parts, layout, self.mesh)

    def relayout(self, parameter: nn.Parameter, has: Layout, wanted: Layout) -> None:
        """Change the layout of a parameter in place: optimizers and users that hold it keep holding it."""
        local = local_of(parameter)  # type: ignore[arg-type]
        value = local if has == whole(len(has.dims)) else self.gather_everywhere(local, has)
        made = self.parameter(value, wanted)
        made.requires_grad_(parameter.requires_grad)
        torch.utils.swap_tensors(parameter, made)
