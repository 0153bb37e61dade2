"""Lightning's Fabric on a mesh, with whole batches; and what its strategy has in common with that of the Trainer.

To Lightning's own code one device trains: a batch is the whole one on every rank, and nothing is reduced.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import lightning.fabric as lf
import torch
import torch.distributed as dist
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies import SingleDeviceStrategy
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from autopar.capture.capture import LossFn
from autopar.compiler.meshes import MeshLike
from autopar.errors import AutoparError
from autopar.integrations.prepare import SameBatches
from autopar.integrations.step_asked import StepAsked, on_first, rest_of, take_up
from autopar.parallel.module import ParallelModule
from autopar.parallel.saving import whole_values

REST = "autopar"  # a checkpoint's entry that Lightning does not know: what `rest_of` gives


class OnePlace:
    """What strategies of Fabric and of the Trainer say of ranks: many processes, one place for data."""

    global_rank: int
    local_rank: int

    def take_ranks(self) -> None:
        """The numbers of torchrun, in place of those of one device; the world stays one of one."""
        self.global_rank, self.local_rank = int(os.environ.get("RANK", 0)), _local_rank()

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized():
            return obj
        said = [obj]
        dist.broadcast_object_list(said, src)
        return said[0]

    def process_dataloader(self, dataloader: Any) -> Any:
        if not isinstance(dataloader, DataLoader):
            return dataloader
        seeds = dataloader.worker_init_fn
        if isinstance(seeds, partial) and seeds.func is pl_worker_init_function:  # seed_everything(workers=True)
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=0)  # its own are others on each rank
        return SameBatches(dataloader)


class FabricStrategy(OnePlace, SingleDeviceStrategy):
    """A strategy of Fabric for models that `autopar.parallelize` made, each with a loss of its own:

        fabric = lightning.fabric.Fabric(strategy=FabricStrategy(), devices=1)
        model, optimizer = fabric.setup(autopar.parallelize(model, "dp=2", loss_fn=loss_fn), optimizer)

    Batches are whole ones, alike on every rank. Checkpoints are Fabric's, of whole tensors, written by rank 0.
    """

    def __init__(self, device: Any = None) -> None:
        super().__init__(device or own_device())
        self.take_ranks()

    def setup_module(self, module: nn.Module) -> nn.Module:
        if type(self.precision) is not Precision:
            refuse_precision("Fabric", self.precision.precision, "Fabric")
        if not isinstance(module, ParallelModule):
            raise AutoparError(
                f"fabric.setup() was given a plain {type(module).__name__} with FabricStrategy: make it parallel first "
                f"(autopar.parallelize), or take the Fabric of autopar.integrations.fabric, which does."
            )
        return module

    def module_to_device(self, module: nn.Module) -> None:
        if not isinstance(module, ParallelModule):  # which is where it belongs
            super().module_to_device(module)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return module.full_state_dict() if isinstance(module, ParallelModule) else super().get_module_state_dict(module)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state: dict[str, Any] = whole_values(super().get_optimizer_state(optimizer))
        return state

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:  # fmt: skip
        models = _models(state)
        rest = {name: rest_of(model) for name, model in models.items()}
        values = {**self._convert_stateful_objects_in_state(state, filter or {}), REST: rest}
        write = partial(self.checkpoint_io.save_checkpoint, values, path, storage_options)
        on_first(list(models.values()), write, path)

    def load_checkpoint(self, path: Any, state: Any = None, **kwargs: Any) -> dict[str, Any]:
        remainder = super().load_checkpoint(path, state, **kwargs)
        if state is not None:
            rest = remainder.pop(REST, {})
            for name, model in _models(state).items():
                if name in rest:
                    take_up(model, rest[name])
        return remainder


class Fabric(lf.Fabric):
    """Lightning's Fabric, for a loop that stays what it is but for the lines that make it and the loss:

        from autopar.integrations.fabric import Fabric              # was: from lightning.fabric import Fabric

        fabric = Fabric(mesh="dp=2,tp=2", loss_fn=loss_fn)          # on every rank of torchrun
        model, optimizer = fabric.setup(model, optimizer)
        loader = fabric.setup_dataloaders(loader)
        for x, y in loader:
            loss = model.training_loss(x, y)                        # was: loss = loss_fn(model(x), y)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)

    mesh, loss_fn, options: as of `autopar.parallelize`; a model that is parallel already keeps its own. The batches of
    a loader are the whole ones, on every rank; `fabric.all_gather` and `all_reduce` give what they are given.
    `fabric.save` and `fabric.load` are of whole tensors, which any mesh and a Fabric on one device go on from.
    """

    def __init__(
        self, *, mesh: MeshLike, loss_fn: LossFn | None = None, options: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if taken := sorted(kwargs.keys() & {"strategy", "devices", "num_nodes"}):
            raise AutoparError(
                f"Fabric({taken[0]}=...) is another way to say which ranks there are: leave it out. They are those of "
                f'torchrun, and mesh="{mesh}" says what they do.'
            )
        self._asked = StepAsked(mesh, loss_fn, dict(options or {}))
        super().__init__(strategy=FabricStrategy(), devices=1, **kwargs)

    def setup(self, module: nn.Module, *optimizers: Optimizer, **kwargs: Any) -> Any:
        return super().setup(self._parallel(module), *optimizers, **kwargs)

    def setup_module(self, module: nn.Module, **kwargs: Any) -> Any:
        return super().setup_module(self._parallel(module), **kwargs)

    def _parallel(self, module: nn.Module) -> nn.Module:
        return module if isinstance(module, ParallelModule) else self._asked.made(module, self.device)


def own_device() -> torch.device:
    """The GPU of this rank, or the CPU."""
    return torch.device("cuda", _local_rank()) if torch.cuda.is_available() else torch.device("cpu")


def refuse_precision(caller: str, precision: str, here: str) -> NoReturn:
    """Say where the precision of a step is said."""
    raise AutoparError(
        f'{caller}(precision="{precision}") is said to autopar: leave it out, and give {here}(..., '
        f'options={{"precision": "bf16"}}), or "fp16".'
    )


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


def _models(state: Any) -> dict[str, ParallelModule]:
    """The parallel models of what Fabric saves or loads, by name."""
    entries = state.items() if isinstance(state, dict) else ()
    return {name: value for name, value in entries if isinstance(value, ParallelModule)}
