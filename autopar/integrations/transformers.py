"""Hugging Face's Trainer, and any class that is made of it, on a mesh: its loop, callbacks, logs and folders stay.

The loss that a Trainer computes (its own, a user's `compute_loss` or `compute_loss_func`, label smoothing) is captured
as it stands, and is the step's; a batch is the whole one on every rank. So nothing is divided by numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers.trainer import OPTIMIZER_NAME

from autopar.compiler.meshes import MeshLike
from autopar.errors import AutoparError
from autopar.integrations.accelerate import (
    Accelerator,
    load_rest,
    save_rest,
    with_precision,
)
from autopar.integrations.computing import LoggedComputing, compute_loss, computing_of
from autopar.integrations.step_asked import StepAsked, on_first
from autopar.parallel.module import ParallelModule
from autopar.parallel.saving import save_file

_INSTEAD = {  # arguments that say how to be parallel, or what of a step to keep, and what says it here
    "fsdp": "zero=3, or an axis 'fsdp' of the mesh", "deepspeed": "zero=1, 2 or 3", "parallelism_config": "the mesh",
    "torch_compile": "compile='inductor'", "gradient_checkpointing": "recompute='full' or 'selective'",
    "activation_checkpointing": "recompute='full' or 'selective'",
    "save_on_each_node": "nothing: rank 0 writes", "neftune_noise_alpha": "nothing: it draws noise in a hook",
    "use_liger_kernel": "compile='triton' on a GPU",
}  # fmt: skip


class ParallelTrainer:
    """Makes a class of Trainer parallel, which stands behind it:

        class MyTrainer(ParallelTrainer, transformers.Seq2SeqTrainer): ...

        trainer = MyTrainer(model, arguments, train_dataset=rows, mesh="dp=2,tp=2", options={"zero": 1})

    mesh, options: as of `autopar.parallelize`. `per_device_train_batch_size` is the size of the batch of all ranks
    together, as if they were one device, and so are losses, `eval_loss`, metrics, counts of steps and checkpoints,
    which a Trainer on one device goes on from, and the other way round. bf16 and fp16 are the precision of the step.
    `trainer.model` is a `ParallelModule`. The trainers of TRL that learn from a data set (SFT, DPO) are such classes,
    too. Raises AutoparError for arguments that ask for another parallelism.
    """

    args: Any
    model: Any
    accelerator: Any
    optimizer: Any

    def __init__(self, *args: Any, mesh: MeshLike, options: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self._computing = computing_of(type(self))
        self._asked = StepAsked(mesh, self._computing.loss, dict(options or {}))
        if taken := sorted(self._asked.options.keys() & {"loss_fn", "batch", "device"}):
            raise AutoparError(
                f"options={{{', '.join(map(repr, taken))}: ...}}: a Trainer says these itself. Its loss is "
                f"compute_loss, its batch the whole one on every rank, its device that of TrainingArguments."
            )
        super().__init__(*args, **kwargs)
        self._set_signature_columns_if_needed()  # type: ignore[attr-defined]
        if isinstance(self._computing, LoggedComputing):
            self._computing.take_heads(self)
        self._computing.follow(self)
        self.compute_loss = self._loss  # around what all subclasses make of it
        self.model = self.model_wrapped = self.accelerator.prepare_model(self.model)
        self.callback_handler.model = self.model  # type: ignore[attr-defined]

    def create_accelerator_and_postprocess(self) -> None:
        for name, here in _INSTEAD.items():
            if getattr(self.args, name, None):
                raise AutoparError(
                    f"TrainingArguments({name}={getattr(self.args, name)!r}) is left out with autopar; in its place "
                    f"of options: {here}."
                )
        words = "bf16" if self.args.bf16 else "fp16" if self.args.fp16 else None
        self._asked = StepAsked(self._asked.mesh, self._computing.loss, with_precision(self._asked.options, words))
        self.args = _one_place(self.args)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.__class__ = Accelerator  # Trainer names Accelerate's own class
        self.accelerator.settle(self._asked)
        self.gather_function = self.accelerator.gather_for_metrics

    def _loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """The loss of a step for training, whose `backward()` Trainer calls; else what the Trainer computes."""
        if not isinstance(model, ParallelModule) or not model.training or return_outputs:
            return compute_loss(self)(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        return self._computing.step(self, model, inputs, num_items_in_batch)

    def _has_mixed_mesh_grads(self, model: Any) -> bool:
        return False  # the norm of `clip_grad_norm_` is over all stages as it is

    # -- folders: rank 0 writes what one device would ----------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        weights, save = self.model.full_state_dict() if state_dict is None else state_dict, super()._save  # type: ignore[misc]

        def write() -> None:
            with _unchanged(getattr(self.model, "config", None)):  # else rank 0 alone would have its new entries
                save(output_dir, weights)

        on_first([self.model], write, output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_file(self.optimizer.state_dict(), Path(output_dir) / OPTIMIZER_NAME)
        scheduler = self.lr_scheduler  # type: ignore[attr-defined]
        on_first(
            [self.model], lambda: torch.save(scheduler.state_dict(), Path(output_dir) / "scheduler.pt"), output_dir
        )

    def _save_rng_state(self, output_dir: str) -> None:
        save = super()._save_rng_state  # type: ignore[misc]
        on_first([self.model], lambda: save(output_dir), output_dir)
        save_rest([self.model], output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)  # type: ignore[misc]
        if checkpoint is not None:
            load_rest([self.model], checkpoint)


class Trainer(ParallelTrainer, transformers.Trainer):
    """transformers' Trainer on a mesh, see `ParallelTrainer`:

    trainer = Trainer(model, arguments, train_dataset=rows, mesh="dp=2")    # was: Trainer(model, arguments, ...)
    """


@contextmanager
def _unchanged(config: Any) -> Iterator[None]:
    """Take back what saving notes in a configuration: a step may have read it, and goes on alike on all ranks."""
    before = dict(getattr(config, "__dict__", {}))
    try:
        yield
    finally:
        if before:
            vars(config).clear()
            vars(config).update(before)


def _one_place(arguments: Any) -> Any:
    """A copy of TrainingArguments that knows of one place for data, whatever the number of ranks; saved as it was."""
    kind: Any = type(arguments)

    def plainly(self: Any, protocol: Any) -> Any:
        made = object.__new__(kind)
        made.__dict__.update(vars(self))
        return made.__reduce_ex__(1)  # the form that does not ask for the class of the object that is saved

    def rank(self: Any) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    made: Any = object.__new__(
        type(kind.__name__, (kind,), {
            "world_size": property(lambda self: 1), "process_index": property(rank), "__reduce_ex__": plainly,
            "__module__": kind.__module__, "__qualname__": kind.__qualname__,
        })
    )  # fmt: skip
    made.__dict__.update(vars(arguments))
    return made
