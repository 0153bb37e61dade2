"""An Accelerator of Hugging Face's Accelerate whose models are parallel by autopar, and whose batches are whole ones.

To Accelerate's own code one process trains: nothing is wrapped, split or gathered. Ranks stay ranks for what is printed
and written, and each pass of a loader begins with rank 0's random numbers on all of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType, recursively_apply
from safetensors.torch import load_file
from torch import nn

from autopar.capture.capture import LossFn
from autopar.capture.inputs import tables
from autopar.compiler.meshes import MeshLike
from autopar.errors import AutoparError
from autopar.integrations.step_asked import StepAsked, on_first, rest_of, take_up
from autopar.parallel.module import ParallelModule
from autopar.parallel.saving import whole_values
from autopar.torch_compat import tree_flatten

PRECISIONS = {None: None, "no": None, "bf16": "bf16", "fp16": "fp16"}
_STATE = "autopar_state.pt"  # where a folder of Accelerate or Trainer has what they do not know of a model
_THEIRS = {
    "deepspeed_plugin": "zero=1..3", "deepspeed_plugins": "zero=1..3", "fsdp_plugin": 'zero=3, or an axis "fsdp"',
    "megatron_lm_plugin": 'the axes "tp" and "pp"', "parallelism_config": "the mesh",
    "dynamo_backend": 'compile="inductor"', "dynamo_plugin": 'compile="inductor"',
}  # fmt: skip
_PLAIN = {"NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU"}


class AsOneProcess:
    """What a loss function may ask of an Accelerator while it is captured: all of it is that of one process."""

    num_processes, process_index, is_main_process, parallelism_config = 1, 0, True, None
    distributed_type, device = DistributedType.NO, torch.device("cpu")

    def unwrap_model(self, model: Any, *_: Any, **__: Any) -> Any:
        return model

    def gather_for_metrics(self, value: Any, *_: Any, **__: Any) -> Any:
        return value

    gather = reduce = pad_across_processes = gather_for_metrics


class Accelerator(accelerate.Accelerator):
    """Accelerate's Accelerator, for a loop that stays what it is but for the lines that make it and the loss:

        from autopar.integrations.accelerate import Accelerator     # was: from accelerate import Accelerator

        accelerator = Accelerator(mesh="dp=2,tp=2", loss_fn=loss_fn, gradient_accumulation_steps=2)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = model.training_loss(x, y)                    # was: loss = loss_fn(model(x), y)
                accelerator.backward(loss)

    mesh, loss_fn, options: as of `autopar.parallelize`; loss_fn is None for a model that returns its loss. The batches
    of a loader are the whole ones, on every rank, and `gather_for_metrics` gives what it is given. mixed_precision is
    that of the step. `save_state` and `load_state` are of the whole run, on any mesh.
    """

    def __init__(
        self, *, mesh: MeshLike, loss_fn: LossFn | None = None, options: dict[str, Any] | None = None,
        mixed_precision: str | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        for name, here in _THEIRS.items():
            if kwargs.get(name) is not None:
                raise AutoparError(
                    f"Accelerator({name}=...) is another way to be parallel: leave it out, and say {here} to autopar."
                )
        # On a machine without GPUs Accelerate takes ranks for one process, unless it is told that they are on the CPU.
        kwargs.setdefault("cpu", not torch.cuda.is_available())
        super().__init__(mixed_precision="no", **kwargs)
        self.settle(StepAsked(mesh, loss_fn, with_precision(options or {}, mixed_precision)))

    def settle(self, asked: StepAsked) -> None:
        """Make models parallel as asked from now on."""
        kind = self.state.distributed_type.value
        if kind not in _PLAIN:
            raise AutoparError(
                f"Accelerate was started for {kind}, another way to be parallel: start the script with torchrun, or "
                f"with `accelerate launch` without FSDP, DeepSpeed and Megatron-LM."
            )
        size = dist.get_world_size() if dist.is_initialized() else 1
        if size != self.state.num_processes:
            on_cpu = "" if torch.cuda.is_available() else (
                " On a machine without GPUs Accelerate takes them for one process unless it is told so: "
                "TrainingArguments(use_cpu=True) of a Trainer, Accelerator(cpu=True)."
            )  # fmt: skip
            raise AutoparError(
                f"Accelerate knows of {self.state.num_processes} processes, and torch.distributed of {size}: start "
                f"the script with torchrun or `accelerate launch`, whose variables (WORLD_SIZE, RANK, LOCAL_RANK) both "
                f"read.{on_cpu}"
            )
        self.asked, self.scaler, self.native_amp = asked, None, False
        self.rng_types = ["torch"]  # rank 0's, at each pass of a loader: samplers draw from it
        self.register_load_state_pre_hook(_load_models)

    @property
    def _parallel(self) -> list[ParallelModule]:
        return [model for model in self._models if isinstance(model, ParallelModule)]

    # -- what makes Accelerate leave things as they are ------------------------------------------------------------

    @property
    def distributed_type(self) -> DistributedType:
        return DistributedType.NO

    @property
    def num_processes(self) -> int:
        return 1

    @property
    def use_distributed(self) -> bool:
        return False

    @property
    def dispatch_batches(self) -> bool:
        return False

    def gather(self, tensor: Any) -> Any:
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """What is given; behind the last batch no more rows than it has, as of one process."""
        rows = self.gradient_state.remainder if self.gradient_state.end_of_dataloader else 0
        return _first_rows(input_data, rows) if rows > 0 else input_data

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        return tensor

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        return tensor

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        yield inputs

    # -- what is prepared ------------------------------------------------------------------------------------------

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        if not isinstance(model, ParallelModule) and not evaluation_mode:
            if self._parallel:
                raise AutoparError(
                    f"Accelerator.prepare() was given a second model to train ({type(model).__name__}): make each "
                    f"parallel with its own loss (autopar.parallelize), and prepare the optimizers and loaders alone."
                )
            model = self.asked.made(model, self.device)
        if isinstance(model, ParallelModule):
            self._models += [] if any(each is model for each in self._models) else [model]
            return model
        return super().prepare_model(model, device_placement, evaluation_mode)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        if isinstance(optimizer, WholeOptimizer):
            return optimizer
        prepared = WholeOptimizer(optimizer, device_placement=False)  # states move as their parameters do
        self._optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        prepared = super().prepare_scheduler(scheduler)
        if isinstance(prepared, AcceleratedScheduler):
            prepared.split_batches = True  # one step for each of the optimizer's: the batch is that of all ranks
        return prepared

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """The norm over all parameters, on whichever stages they are: those of Accelerate are one for each mesh."""
        return torch.nn.utils.clip_grad_norm_(list(parameters), max_norm, norm_type=norm_type)

    # -- what is taken out -----------------------------------------------------------------------------------------

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """The whole weights on rank 0; empty on the others, which write nothing. Every rank must call it."""
        if not isinstance(model, ParallelModule):
            return super().get_state_dict(model, unwrap)
        return OrderedDict(model.full_state_dict())  # by this type Accelerate knows one where names may be tied

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        for optimizer in self._optimizers:
            optimizer.is_whole = True
        try:
            location = super().save_state(output_dir, safe_serialization, **kwargs)
        finally:
            for optimizer in self._optimizers:
                optimizer.is_whole = False
        save_rest(self._parallel, location)
        return location

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        super().load_state(input_dir, load_kwargs, **kwargs)
        if input_dir is not None:
            load_rest(self._parallel, input_dir)


class WholeOptimizer(AcceleratedOptimizer):
    """An optimizer whose state is saved as whole tensors, by rank 0."""

    is_whole = False

    def state_dict(self) -> Any:
        state = super().state_dict()
        return whole_values(state) if self.is_whole else state


def _load_models(models: list[nn.Module], folder: str) -> None:
    """Load the weights of parallel models, which Accelerate then leaves alone: its own way asks for their memory."""
    for at in reversed(range(len(models))):
        model = models[at]
        if isinstance(model, ParallelModule):
            number = f"_{at}" if at else ""
            file = Path(folder) / f"model{number}.safetensors"
            old = Path(folder) / f"pytorch_model{number}.bin"
            weights = load_file(file) if file.exists() else torch.load(old, map_location="cpu", weights_only=True)
            model.load_state_dict(with_tied_names(model, weights))
            del models[at]


def with_tied_names(model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights with those of other names for the same parameter or buffer, which safetensors leaves out."""
    names: dict[int, list[str]] = {}
    for walk in (tables.named_parameters, tables.named_buffers):
        for name, tensor in walk(model, remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
    tied = {name: weights[one] for each in names.values() for one in each if one in weights for name in each}
    return {**tied, **weights}


def _first_rows(value: Any, rows: int) -> Any:
    """At most some rows of each tensor of a container; of another sequence its first entries."""
    if _is_of_tensors(value):
        return recursively_apply(lambda tensor: tensor[:rows] if tensor.ndim else tensor, value)
    return value[:rows] if isinstance(value, Sequence) else value


def _is_of_tensors(value: Any) -> bool:
    """Whether all leaves are tensors."""
    return all(isinstance(leaf, torch.Tensor) for leaf in tree_flatten(value)[0])


def with_precision(options: dict[str, Any], mixed_precision: str | None) -> dict[str, Any]:
    """Options of a step with the precision that Accelerate's words ask for."""
    if mixed_precision not in PRECISIONS:
        raise AutoparError(f"mixed_precision={mixed_precision!r}: autopar has 'no', 'bf16' and 'fp16'.")
    precision = PRECISIONS[mixed_precision]
    if precision is None or options.get("precision") == precision:
        return options
    if "precision" in options:
        raise AutoparError(
            f"mixed_precision={mixed_precision!r}, but options say precision={options['precision']!r}: say one."
        )
    return {**options, "precision": precision}


def save_rest(models: list[ParallelModule], folder: Any) -> None:
    """Write what a checkpoint of a library has no place for: where random numbers and loss scales stand. Every rank
    must call it; the folder is whole when it returns."""
    states = [rest_of(model) for model in models]
    on_first(models, lambda: torch.save(states, Path(folder) / _STATE), folder)


def load_rest(models: list[ParallelModule], folder: Any) -> None:
    """Take up what `save_rest` wrote; nothing where a plain run wrote the folder."""
    file = Path(folder) / _STATE
    if not file.exists():
        return
    for model, rest in zip(models, torch.load(file, weights_only=True), strict=True):
        take_up(model, rest)
