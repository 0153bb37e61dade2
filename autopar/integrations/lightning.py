"""Lightning's Trainer on a mesh: a strategy whose training step is one compiled program, `self.log` included.

To Lightning's own code one device trains: a batch is the whole one on every rank, and nothing is reduced. What
`training_step` logs, and what it gives metrics of torchmetrics, leaves the program beside the loss, and is logged and
counted behind it.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torchmetrics import Metric, MetricCollection

from autopar.capture.inputs import tables
from autopar.compiler.meshes import MeshLike
from autopar.errors import AutoparError
from autopar.integrations.fabric import REST, OnePlace, own_device, refuse_precision
from autopar.integrations.step_asked import StepAsked, rest_of, take_up
from autopar.parallel.module import ParallelModule
from autopar.parallel.saving import whole_values


class AutoparStrategy(OnePlace, SingleDeviceStrategy):
    """A strategy of Lightning's Trainer, on every rank of torchrun:

        trainer = L.Trainer(strategy=AutoparStrategy(mesh="dp=2,tp=2"), devices=1, max_epochs=3)
        trainer.fit(module, loader)

    mesh, options: as of `autopar.parallelize`. The LightningModule stays as it is: its `training_step` gives the loss,
    alone or in a dict, and logs tensors; `validation_step` and the like run with the compiled forward pass. Loaders
    give the whole batch on every rank, shuffled alike. Checkpoints are Lightning's, of whole tensors, written by rank
    0.
    """

    strategy_name = "autopar"

    def __init__(self, mesh: MeshLike, options: dict[str, Any] | None = None, device: Any = None) -> None:
        super().__init__(device or own_device())
        self.take_ranks()
        self._step = _Step()
        self._made: ParallelModule | None = None
        self._asked = StepAsked(mesh, self._step.loss, dict(options or {}))

    # -- the model and its optimizers ------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def setup(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        assert module is not None and self.accelerator is not None
        self._check(module)
        self.accelerator.setup(trainer)
        for each in tables.modules(module):
            if isinstance(each, Metric):  # which counts the whole batch on every rank
                each.distributed_available_fn = _has_ranks
        if self._made is None or vars(self._made.original) is not vars(module):  # fit() and then test() is one model
            self._made = self._asked.made(_logging_aside(module, self._step), self.root_device)
        self.model = self._made
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)

    def _check(self, module: pl.LightningModule) -> None:
        if not module.automatic_optimization:
            raise AutoparError(
                f"{type(module).__name__} optimises by hand (automatic_optimization = False), where a step has several "
                f"losses. Make its networks parallel themselves (autopar.parallelize, with the loss of each) and call "
                f"training_loss, without this strategy."
            )
        if type(self.precision_plugin) is not Precision:
            refuse_precision("Trainer", self.precision_plugin.precision, "AutoparStrategy")

    def teardown(self) -> None:
        assert self.accelerator is not None
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- steps -----------------------------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int = 0, *args: Any) -> Any:
        model, module = self.model, self.lightning_module
        assert isinstance(model, ParallelModule) and module is not None
        loss = model.training_loss(batch, batch_idx if self._step.asks_number else 0, *args)
        logged, more, updates = model.last_aux
        returned = {}
        for key, (given, named) in updates.items():
            number, method, *path = key.split("\n")
            returned[int(number)] = getattr(_inside(getattr(module, path[0]), path[1:]), method)(*given, **named)
        heard = {
            name: _inside(getattr(module, of) if isinstance(of, str) else returned[of], keys)
            for name, (of, *keys) in self._step.metrics.items()
        }
        for name, value in {**logged, **heard}.items():
            module.log(name, value, **self._step.options[name])
        return {"loss": loss, **more} if self._step.gives_dict else loss

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.validation_step(*args, **kwargs)  # type: ignore[union-attr, operator]

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.test_step(*args, **kwargs)  # type: ignore[union-attr, operator]

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.predict_step(*args, **kwargs)  # type: ignore[union-attr, operator]

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert isinstance(self.model, ParallelModule)
        return self.model.full_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        state: dict[str, Any] = whole_values(super().optimizer_state(optimizer))
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        assert isinstance(self.model, ParallelModule)
        checkpoint[REST] = rest_of(self.model)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert isinstance(self.model, ParallelModule)
        self.model.load_state_dict(checkpoint["state_dict"], strict=strict)
        if REST in checkpoint:
            take_up(self.model, checkpoint[REST])

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)


class _Step:
    """The loss function that is captured, and what was found out of `training_step` meanwhile.

    options: how each name is logged. metrics: what of torchmetrics is logged under a name: a metric, by the attribute
    and the keys under which it lies, or what the n-th call gave, by n and its key. asks_number: whether the code reads
    the number of the batch, which changes at each step. gives_dict: whether the loss comes in a dict."""

    def __init__(self) -> None:
        self.options: dict[str, dict[str, Any]] = {}
        self.asks_number, self.gives_dict = False, False
        self.metrics: dict[str, tuple[str | int, ...]] = {}  # no metrics: their counters would be the step's to watch
        self.logged: dict[str, Any] | None = None  # while a step is captured
        self.updates: dict[str, Any] = {}  # with what a metric is called then: by order, method and name

    def loss(self, module: Any, batch: Any, number: int, *args: Any) -> Any:
        """The loss, what was logged and returned beside it, and what metrics were given."""
        self.logged = {}
        try:
            given = module.training_step(batch, number, *args) if _takes_number(module) else module.training_step(batch)
            logged, updates = dict(self.logged), dict(self.updates)
        finally:
            self.logged, self.updates = None, {}
        self.gives_dict = isinstance(given, Mapping)
        if not self.gives_dict:
            return given, (logged, {}, updates)
        more = {name: value for name, value in given.items() if name != "loss"}
        return given["loss"], (logged, more, updates)


def _inside(found: Any, keys: Sequence[Any]) -> Any:
    """What lies under keys in a collection of metrics or in what it gave."""
    for key in keys:
        found = found[int(key) if isinstance(found, nn.ModuleList) else key]
    return found


class _HeardMetric:
    """A metric of torchmetrics, or a collection of them, while a step is captured: what it is called with leaves the
    step beside the loss."""

    def __init__(self, step: _Step, metric: Any, *path: str) -> None:
        self.step, self.metric, self.path = step, metric, path

    def __call__(self, *args: Any, **kwargs: Any) -> _HeardValue:
        return _HeardValue(self.metric, self._hear("__call__", args, kwargs))

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._hear("update", args, kwargs)

    def __getitem__(self, key: Any) -> _HeardMetric:
        # A collection of metrics notes in itself that one of them was looked at.
        inner = None if isinstance(self.metric, MetricCollection) else self.metric[key]
        return _HeardMetric(self.step, inner, *self.path, str(key))

    def items(self) -> list[tuple[str, _HeardMetric]]:
        return [(key, self[key]) for key in self.metric.keys()]  # noqa: SIM118 - a list of modules has none

    def _hear(self, method: str, args: Any, kwargs: Any) -> int:
        number = len(self.step.updates)
        self.step.updates["\n".join((str(number), method, *self.path))] = (args, kwargs)
        return number


class _HeardValue:
    """What a metric gives for a batch, which is known behind the step only: it can be logged, and nothing else."""

    def __init__(self, metric: Any, *path: int | str) -> None:
        self.metric, self.path = metric, path

    def __getitem__(self, key: str) -> _HeardValue:
        return _HeardValue(None, *self.path, key)

    def items(self) -> list[tuple[str, _HeardValue]]:
        return [(key, self[key]) for key in self.metric.keys()]  # noqa: SIM118 - a list of modules has none


def _is_metric(value: Any) -> bool:
    """True for a metric, a collection of metrics, and a dict or list of modules that are all such."""
    if isinstance(value, (nn.ModuleDict, nn.ModuleList)) and not isinstance(value, MetricCollection):
        inner = list(value.values() if isinstance(value, nn.ModuleDict) else value)
        return bool(inner) and all(map(_is_metric, inner))
    return isinstance(value, (Metric, MetricCollection))


def _has_ranks() -> bool:
    return False


def _takes_number(module: Any) -> bool:
    return len(inspect.signature(module.training_step).parameters) > 1


def _asks_number(kind: type) -> bool:
    """Whether the code of `training_step` reads its second argument."""
    function: Any = kind.training_step  # type: ignore[attr-defined]
    names = list(inspect.signature(function).parameters)[2:3]
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or not names:
        return bool(names)
    return any(each.argval == names[0] and each.opname.startswith("LOAD") for each in dis.get_instructions(code))


def _logging_aside(module: pl.LightningModule, step: _Step) -> Any:
    """The module, of a class that keeps what is logged and what metrics are given while a step is captured. All else is
    shared."""
    kind = type(module)
    step.asks_number = _asks_number(kind)

    # Methods of a class that is made here, since a LightningModule finds its own `log` and metrics through its class.
    def log(self: Any, name: str, value: Any, **options: Any) -> None:
        if step.logged is None:
            kind.log(self, name, value, **options)
        elif isinstance(value, (_HeardMetric, _HeardValue)):
            step.metrics[name], step.options[name] = value.path, options
        elif value is None:
            raise AutoparError(
                f"self.log('{name}', ...) in training_step is given None. A metric of torchmetrics has no value in a "
                f"captured step: log the metric itself, self.log('{name}', self.metric), which is updated behind it."
            )
        else:
            step.logged[name], step.options[name] = value, options

    def log_dict(self: Any, dictionary: Mapping[str, Any], **options: Any) -> None:
        for name, value in dictionary.items():
            self.log(name, value, **options)

    def __getattr__(self: Any, name: str) -> Any:
        value = kind.__getattr__(self, name)
        is_heard = step.logged is not None and _is_metric(value)
        return _HeardMetric(step, value, name) if is_heard else value

    names = {
        "log": log,
        "log_dict": log_dict,
        "__getattr__": __getattr__,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    made: Any = object.__new__(type(kind.__name__, (kind,), names))
    object.__setattr__(made, "__dict__", vars(module))
    return made
