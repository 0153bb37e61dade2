"""One side of a journey: a model with its loss, its optimizer and what a loop holds. Both sides run one code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.capture.raising import Raise
from autopar.ir.mesh import AUTO
from autopar.parallel.module import ParallelModule
from benchmarks.journeys.meshes import PLANNED, meshes_for, options_on
from benchmarks.journeys.models import Built, batch_of, build, output_of
from benchmarks.journeys.parts import RANKS, ROWS, cut, part_of

# eps: a gradient that is zero on paper, as of a bias before BatchNorm, is rounding, of which 1e-8 makes steps of 1e-9.
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"lr": 0.01, "amsgrad": True, "eps": 1e-6},
    "AdamW": {"lr": 0.01, "eps": 1e-6},
    "Adagrad": {"lr": 0.02, "initial_accumulator_value": 0.1},
    "RMSprop": {"lr": 0.005, "momentum": 0.5, "centered": True, "eps": 1e-4},
    "NAdam": {"lr": 0.01, "eps": 1e-6},
    "RAdam": {"lr": 0.01, "eps": 1e-6},
    "Adadelta": {"lr": 0.5},
    "Adamax": {"lr": 0.01, "eps": 1e-6},
    "ASGD": {"lr": 0.02},
    "Rprop": {"lr": 0.005},
    "LBFGS": {"lr": 0.1, "max_iter": 2},
}
SCALE = 256.0  # of losses in fp16: with these models little overflows (one chunked loss did: seed 46, row 126)
T = TypeVar("T")


class Stopped(Exception):
    """The plain side has come as far as the parallel one, which was refused there."""


@dataclass
class Side:
    """`is_parallel`: the model is autopar's. `folder` is one for all ranks, in which each file has one writer.

    change: of the plain model before anything else. low: the float of torch.autocast, under which its steps run.
    """

    setup: Mapping[str, Any]
    is_parallel: bool
    folder: Path
    change: Callable[[nn.Module], None] | None = None
    low: torch.dtype | None = None
    built: Built = field(init=False)
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer | None = None
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    average: dict[str, Tensor] | None = None
    held: list[nn.Parameter] | None = None  # from before the model was made parallel
    handles: dict[str, Any] = field(default_factory=dict)
    seen: list[float] = field(default_factory=list)  # of gradients, by hooks in the last action
    steps: int = 0
    forwards: int = 0  # calls of the model itself
    aux: Any = None
    make: Callable[[nn.Module], torch.optim.Optimizer] | None = None  # how the optimizer was made
    critic: Any = None  # the other model of a GAN, with its optimizer
    critic_optimizer: Any = None
    paths: int = 0
    marks: int = 0
    stop: int | None = None  # the mark at which this side is to stop

    def __post_init__(self) -> None:
        built = build(self.setup)
        if self.change is not None:
            self.change(built.model)
        if self.setup.get("before"):
            self._hold(built.model)
        self.renew(self.setup["mesh"], built)

    def begin(self) -> None:
        """Make the optimizer, if there is none from before."""
        if self.setup.get("optimizer") and self.optimizer is None:
            self.start(self.setup["optimizer"])

    def _hold(self, model: nn.Module) -> None:
        """What a script has by the time it makes its model parallel: parameters in lists, gradients, an optimizer."""
        self.model, self.held = model, list(model.parameters())
        for p in self.held:
            p.grad = p.detach() * 0.1
        if self.setup.get("optimizer"):
            self.start(self.setup["optimizer"]).step()  # which has states then
        if self.setup["before"] != "gradients":
            model.zero_grad()

    def renew(self, mesh: str, made: Built | None = None) -> None:
        """A model as it was at the start, on a mesh. Refused, nothing of this side has changed. made: what is there."""
        setup = {**self.setup, "mesh": mesh, "options": options_on(mesh, self.setup["options"])}
        built = made or build(setup)
        model = self._made(setup, built.model, built.loss_fn)
        critic = self._made(setup, built.critics[0], built.critic_loss) if built.critics else None
        if critic is not None:  # each one's loss calls the other
            built.critics[0], built.generators[0] = critic, model
            self.critic_optimizer = torch.optim.Adam(critic.parameters(), lr=0.01)
        if made is None:
            self.held = None
        self.setup, self.built, self.model, self.critic = setup, built, model, critic
        self.handles.clear()
        self.average = self.scheduler = None

    def _made(self, setup: Mapping[str, Any], model: nn.Module, loss_fn: Callable[..., Any]) -> nn.Module:
        """The model of this side."""
        if not self.is_parallel:
            return model
        mesh = AUTO if setup["mesh"] in PLANNED else setup["mesh"]
        made = autopar.parallelize(model, mesh, loss_fn=loss_fn, batch=setup.get("batch", "global"), **setup["options"])
        if made.loss_scale is not None:
            made.loss_scale.scale = SCALE
        if self.batch_kind == "ddp":  # whose first batch must have the same shapes on all ranks
            made.prepare(*(leaf.to("meta") for leaf in part_of({**setup, "share": 0.5}, batch_of(setup, ROWS, 0), 0)))
        return made

    # -- how far an action came ---------------------------------------------------------------------------------

    def mark(self) -> None:
        """What came before is done, whatever becomes of the rest of the action."""
        self.marks += 1
        if self.marks == self.stop:
            raise Stopped

    def each(self, items: Iterable[T]) -> Iterator[T]:
        """The items, with a mark before each."""
        for item in items:
            self.mark()
            yield item

    def other_mesh(self, number: int) -> str:
        """One of the meshes with as many ranks on which this model can be."""
        return meshes_for(self.setup)[number % len(meshes_for(self.setup))]

    # -- steps --------------------------------------------------------------------------------------------------

    @property
    def batch_kind(self) -> str:
        """Whose the batch of a rank is: "global", "local" or "ddp"."""
        return self.setup.get("batch", "global")

    def batch(self, rows: int, seed: int) -> tuple[Tensor, ...]:
        """x, y and what else the loss takes; of a local batch this rank's part."""
        batch = batch_of(self.setup, rows, seed)
        return part_of(self.setup, batch, dist.get_rank()) if self.is_parallel and self.has_parts else batch

    @property
    def has_parts(self) -> bool:
        return self.batch_kind != "global"

    def rows_of_rank(self, value: Tensor) -> Tensor:
        """Of what has a row for each sample those of this rank, if ranks have parts of a batch."""
        return cut(self.setup, value, 0, dist.get_rank()) if self.batch_kind == "local" else value

    def forward_backward(self, *batch: Any, by_hand: bool = False) -> Tensor:
        """The loss; gradients are added up, by_hand by its `backward()`. The plain module draws its masks as autopar
        does."""
        self.mark()
        if self.is_parallel:
            loss = self.model.training_loss(*batch) if by_hand else self.model.forward_backward(*batch)
            if by_hand:
                loss.backward()
            self.aux = self.model.last_aux if self.setup.get("aux") else None
        else:
            with self.drawing():
                with self.casting():
                    loss = self._loss(batch)
                self._backward(loss)
        self.steps += 1
        return loss.detach()

    def loss(self, *batch: Any) -> Tensor:
        """The loss of a step, whose gradients a loop asks for itself."""
        self.mark()
        with contextlib.nullcontext() if self.is_parallel else self.drawing():
            loss: Tensor = self.model.training_loss(*batch) if self.is_parallel else self._loss(batch)
        if self.is_parallel:
            self.aux = self.model.last_aux if self.setup.get("aux") else None
        self.steps += 1
        return loss

    def forward(self, x: Tensor) -> Tensor:
        """This rank's output of the model, which draws its masks as autopar does."""
        if self.is_parallel:
            out = output_of(self.model, x)
        else:
            with self.drawing(-1 - self.forwards), self.casting():
                out = self.rows_of_rank(self._of_parts(lambda x: output_of(self.model, x), (x,))[1])
        self.forwards += 1
        return out

    def validation(self, *batch: Any) -> Tensor:
        """The loss of a batch that is not trained on. Its masks are those of a forward pass."""
        with torch.no_grad():
            if self.is_parallel:
                loss: Tensor = self.model.training_loss(*batch)
                self.aux = self.model.last_aux if self.setup.get("aux") else None
            else:
                with self.drawing(-1 - self.forwards), self.casting():
                    loss = self._loss(batch)
        self.forwards += 1
        return loss

    def _loss(self, batch: tuple[Any, ...]) -> Tensor:
        """The loss of the plain module: as under DDP the mean of those of all ranks."""
        found, own = self._of_parts(lambda *part: self.built.loss_fn(self.model, *part), batch)
        if self.setup.get("aux"):
            self.aux, found = own[1], [loss for loss, _ in found]
        return found[0] if len(found) == 1 else torch.stack(found).mean()

    def _of_parts(self, function: Callable[..., T], batch: tuple[Any, ...]) -> tuple[list[T], T]:
        """What a function gives of the part of each rank, and of this one's. Buffers are the first rank's, as those
        that DDP sends."""
        if self.batch_kind != "ddp":
            found = function(*batch)
            return [found], found
        buffers = [(module._buffers, dict(module._buffers)) for module in self.model.modules()]
        copies = [{name: None if b is None else b.clone() for name, b in kept.items()} for _, kept in buffers]
        each = []
        for rank in range(RANKS):
            each.append(function(*part_of(self.setup, batch, rank)))
            for (held, _), copied in zip(buffers, copies, strict=True):
                held.update({name: None if b is None else b.clone() for name, b in copied.items()})
        for held, kept in buffers:
            held.update(kept)
        return each, each[dist.get_rank()]

    def _backward(self, loss: Tensor) -> None:
        """The backward pass of the plain module, of a scaled loss in fp16."""
        if self.low is not torch.float16:
            loss.backward()
            return
        seen = len(self.seen)
        self._scale_gradients(SCALE)
        (loss * SCALE).backward()
        self._scale_gradients(1 / SCALE)
        self.seen[seen:] = [value / SCALE for value in self.seen[seen:]]

    def _scale_gradients(self, factor: float) -> None:
        for _, p in self.trained():
            p.grad.mul_(factor)

    def casting(self) -> contextlib.AbstractContextManager[Any]:
        """What the plain module runs under beside a precision."""
        return torch.autocast("cpu", self.low) if self.low is not None else contextlib.nullcontext()

    @contextlib.contextmanager
    def in_mode(self, training: bool) -> Iterator[None]:
        """Train or evaluate for a while. Each module is in its own mode again behind it: `train(was)` would change
        those that differ from the root, of a call that was refused and so did not happen."""
        modules = list(self.model.modules())
        modes = [module.training for module in modules]
        self.model.train(training)
        try:
            yield
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode

    def drawing(self, number: int | None = None) -> contextlib.AbstractContextManager[Any]:
        """The numbers of this step, or of a call of the model itself, for a model that draws some."""
        if not any(isinstance(module, nn.Dropout) and module.training for module in self.model.modules()):
            return contextlib.nullcontext()
        return Raise(None, torch.tensor([0, self.steps if number is None else number]), None)

    def start(self, name: str, **options: Any) -> torch.optim.Optimizer:
        """An optimizer of all parameters."""
        kind, options = getattr(torch.optim, name), {**OPTIMIZERS[name], **options}
        return self.use(lambda _: kind(self.parameters(), **options))

    def use(self, make: Callable[[nn.Module], torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """Make an optimizer, as it can be made again of a model that replaces this one."""
        self.make, self.scheduler, self.optimizer = make, None, make(self.model)
        self.handles.pop("step", None)
        return self.optimizer

    # -- what it holds ------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.mark()
        assert self.optimizer is not None
        self.optimizer.step()

    def parameters(self) -> list[nn.Parameter]:
        """As a script has them: in the list that it made first, if it made one."""
        return list(self.model.parameters()) if self.held is None else self.held

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters that have a gradient."""
        return ((name, p) for name, p in self.model.named_parameters() if p.grad is not None)

    def whole(self, tensor: Tensor) -> Tensor:
        """The whole value of what a user holds, by the public way."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def path(self, name: str) -> Path:
        """Where a file of all ranks goes; the plain module has one on each rank."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        return self.folder / (f"parallel-{name}" if self.is_parallel else f"plain-{rank}-{name}")

    def path_of_rank(self, name: str) -> Path:
        """Where a file of this rank alone goes."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        return self.folder / f"{'parallel' if self.is_parallel else 'plain'}-{rank}-{name}"

    def new_path(self, name: str) -> Path:
        """As `path`, one that was not used before; `last_path` is that again."""
        self.paths += 1
        self.last_path = self.path(f"{self.paths}-{name}")
        return self.last_path

    @property
    def is_writer(self) -> bool:
        return not self.is_parallel or dist.get_rank() == 0


def parallel(side: Side) -> ParallelModule:
    assert isinstance(side.model, ParallelModule)
    return side.model
