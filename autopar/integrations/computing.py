"""The loss of a Trainer as a step captures it: what `compute_loss` gives, of the attributes that it can read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from types import MethodType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture.python.library_state import names_reached
from autopar.errors import AutoparError, CaptureError
from autopar.integrations.accelerate import AsOneProcess
from autopar.parallel.module import ParallelModule

_TRIED = ("SFTTrainer", "DPOTrainer")
_LOGS = ("_metrics", "_total_train_tokens")  # where TRL's trainers keep the numbers of their logs


def computing_of(kind: Any) -> Computing:
    """How the loss of a class of Trainer is computed. Raises AutoparError for one of TRL that was never compared."""
    names = [each.__name__ for each in kind.__mro__ if each.__module__.partition(".")[0] == "trl"]
    if not names:
        return Computing(kind)
    if not {*names} & {*_TRIED}:
        raise AutoparError(
            f"{names[0]} of TRL was not compared with one device: {' and '.join(_TRIED)} were. Write its loss as a "
            f"loss_fn and train with model.training_loss (benchmarks/ports/diffs/dpo.diff), or as compute_loss of "
            f"transformers' Trainer, which gives the loss alone."
        )
    return LoggedComputing(kind)


class Computing:
    """What a Trainer is while its loss is captured: the attributes that `compute_loss` can read, and no more.

    A program is compared with all that it may have read at each step, and a Trainer counts, logs and collects.
    """

    def __init__(self, kind: Any) -> None:
        self.names = names_reached(kind, ["compute_loss"]) - {"accelerator", "model", "compute_loss"}
        self.trainer: Any = object.__new__(kind)
        self.trainer.accelerator = AsOneProcess()

    def follow(self, trainer: Any) -> None:
        """Take over what the trainer has now."""
        self.trainer.__dict__.update({name: value for name, value in vars(trainer).items() if name in self.names})
        self.trainer.accelerator.device = trainer.accelerator.device

    def loss(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        """The loss function of the step, which is captured."""
        self.trainer.model = model
        return compute_loss(self.trainer)(model, dict(inputs), num_items_in_batch=num_items_in_batch)

    def step(self, trainer: Any, model: ParallelModule, inputs: Any, num_items_in_batch: Any) -> Tensor:
        """The loss of a step for training, whose `backward()` the trainer calls."""
        self.follow(trainer)
        return model.training_loss(dict(inputs), num_items_in_batch)


class LoggedComputing(Computing):
    """What a Trainer of TRL is while its loss is captured, which takes numbers for logs out of tensors.

    In a captured step these are NaN, and go nowhere; what the models gave leaves the step beside its loss. Of that the
    trainer's own code computes loss and logs once more, behind the step: the two losses must agree.
    """

    def __init__(self, kind: Any) -> None:
        super().__init__(kind)
        self.names -= {*_LOGS}
        self.trainer.accelerator = _NothingLogged()
        self.calls: list[Any] | None = None  # what models gave, while a step is captured
        self.given: Iterator[Any] | None = None  # what they give, behind a step

    def take_heads(self, trainer: Any) -> None:
        """Put plain ops into the place of TRL's fused head, which on a GPU computes with as many rows as labels count:
        a number that a program does not know."""
        try:
            from trl.trainer.utils import FusedCausalLMOutput  # noqa: F401
        except ImportError:
            from trl import __version__

            raise AutoparError(
                f"TRL {__version__} computes other things in a loss than TRL 1.16, which was compared with one device."
            ) from None
        for name, entropies in (("model", True), ("ref_model", False)):
            model = getattr(trainer, name, None)
            if isinstance(model, nn.Module):
                base: Any = getattr(model, "get_base_model", lambda model=model: model)()
                base.forward = MethodType(_Head(self, MethodType(type(base).forward, base), entropies), base)

    def loss(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        trainer = object.__new__(type(self.trainer))  # what it keeps is forgotten with it
        trainer.__dict__.update(vars(self.trainer), model=model, **_no_logs())
        self.calls = []
        try:
            loss = compute_loss(trainer)(model, dict(inputs), num_items_in_batch=num_items_in_batch)
            return loss, self.calls
        finally:
            self.calls = None

    def step(self, trainer: Any, model: ParallelModule, inputs: Any, num_items_in_batch: Any) -> Tensor:
        loss = super().step(trainer, model, inputs, num_items_in_batch)
        logging = object.__new__(type(trainer))
        logging.__dict__.update(vars(trainer), model=model.original)
        self.given = iter(model.last_aux)
        try:
            with torch.no_grad():
                again = compute_loss(logging)(model.original, dict(inputs), num_items_in_batch=num_items_in_batch)
        finally:
            self.given = None
        trainer.__dict__.update({name: vars(logging)[name] for name in _LOGS})
        if not torch.allclose(loss.detach(), again.to(loss), rtol=1e-2, atol=1e-4, equal_nan=True):
            raise CaptureError(
                f"{type(trainer).__name__}.compute_loss gives {float(again)}, and the step that was captured of it "
                f"{float(loss)}: a number that it takes out of a tensor (.item(), gather_for_metrics) decides its "
                f"loss. Compute with the tensor."
            )
        return loss


class _NothingLogged(AsOneProcess):
    """What is gathered is for logs, which a captured step has not: NaN would show in whatever else it met."""

    def gather_for_metrics(self, value: Any, *_: Any, **__: Any) -> Any:
        return np.float64("nan")

    gather = gather_for_metrics


class _Head:
    """The forward method of a causal language model, with what TRL's trainers ask of it: `fused_lm_head`."""

    def __init__(self, computing: LoggedComputing, forward: Any, entropies: bool) -> None:
        self.computing, self.forward, self.entropies = computing, forward, entropies

    def __call__(
        self, _model: Any, *args: Any, fused_lm_head: bool = False, labels: Tensor | None = None, **kwargs: Any
    ) -> Any:
        from trl.trainer.utils import FusedCausalLMOutput

        if self.computing.given is not None:
            return FusedCausalLMOutput(**next(self.computing.given))
        if not fused_lm_head:
            return self.forward(*args, **kwargs) if labels is None else self.forward(*args, labels=labels, **kwargs)
        assert labels is not None
        output = self.forward(*args, **kwargs)
        fields = _scores(output.logits[:, :-1], labels[:, 1:], self.entropies)
        if getattr(output, "aux_loss", None) is not None:
            fields["aux_loss"] = output.aux_loss
        if self.computing.calls is not None:
            self.computing.calls.append(fields)
        return FusedCausalLMOutput(**fields)


def _scores(logits: Tensor, labels: Tensor, entropies: bool) -> dict[str, Tensor]:
    """What TRL's head gives of logits [batch, seq, vocab]: values of each token [batch, seq], 0 where none counts."""
    mask = labels != -100
    log_p = F.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    found = {"log_probs": log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)}
    if entropies:
        found["entropy"] = -(log_p.exp() * log_p).sum(-1)
        with torch.no_grad():
            found["mean_logits"] = logits.mean(-1)
            found["log_sum_sq_probs"] = (2 * log_p).logsumexp(-1)
            found["is_top1"] = logits.argmax(-1) == labels
    return {**{name: value.masked_fill(~mask, 0) for name, value in found.items()}, "label_mask": mask}


def _no_logs() -> dict[str, Any]:
    return {"_metrics": {"train": defaultdict(list), "eval": defaultdict(list)}, "_total_train_tokens": 0}


def compute_loss(trainer: Any) -> Any:
    """The method of the trainer's class."""
    return type(trainer).compute_loss.__get__(trainer)
