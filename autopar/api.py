"""`autopar.parallelize`, a function on a module or a decorator on what makes one, and `autopar.compile`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Unpack, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture.capture import LossFn
from autopar.compiled import Compiled
from autopar.compiler.check_options import CHECK_EVERY, Graphs, OnNonFinite, options_of, with_known_names
from autopar.compiler.compile import batch_arguments
from autopar.compiler.meshes import MeshLike, mesh_of
from autopar.compiler.models import check_plain_model
from autopar.errors import MeshError
from autopar.ir.mesh import Mesh
from autopar.ir.options import StepKeywords
from autopar.ir.plan import Fixed
from autopar.machines import DEVICES, MachineLike, machine_like
from autopar.parallel.module import ParallelModule
from autopar.parallel.session.session import Requested
from autopar.report.memory.within_memory import compile_step
from autopar.settings import Settings

Factory = Callable[..., nn.Module]


class Options(StepKeywords, total=False):
    """What `parallelize` takes by keyword."""

    loss_fn: LossFn | None
    batch: str
    seed: int
    device: str | torch.device | None
    cuda_graphs: Graphs
    check_replicas: int | None
    on_nonfinite: OnNonFinite | None
    weights: str | Path | None
    machine: MachineLike | None
    timeout: float | None
    cache: str | Path | None


@overload
def parallelize(model: nn.Module, mesh: MeshLike, **options: Unpack[Options]) -> ParallelModule: ...
@overload
def parallelize(model: MeshLike, **options: Unpack[Options]) -> Callable[[Factory], Callable[..., ParallelModule]]: ...


def parallelize(
    model: Any,
    mesh: MeshLike | None = None,
    *,
    loss_fn: LossFn | None = None,
    batch: str = "global",
    seed: int = 0,
    device: str | torch.device | None = None,
    cuda_graphs: Graphs = False,
    check_replicas: int | None = CHECK_EVERY,
    on_nonfinite: OnNonFinite | None = None,
    weights: str | Path | None = None,
    machine: MachineLike | None = None,
    timeout: float | None = None,
    cache: str | Path | None = None,
    **step: Unpack[StepKeywords],
) -> Any:
    """Make a module train on every rank of a mesh, with the numbers of one device. Call it on every rank.

    model: the module; its parameters become DTensors (rank 0's values count). As a decorator,
      `@parallelize("dp=2,tp=2", loss_fn=...)` on a module class or on a function that builds one.
    mesh: `"dp=2,tp=2"`, `{"dp": 2, "tp": 2}`, a named DeviceMesh or an `autopar.Mesh`; -1 takes what is left of the
      world. A mesh of size 1 needs no launcher. "auto" plans the fastest mesh and options of a step that fit, at the
      first training batch (docs/planning.md).
    loss_fn: `loss_fn(model, *batch)` gives the scalar loss; None if the module returns it (a scalar, a tuple that
      begins with it, an object or dict with `.loss`).
    batch: "global" if every rank passes the whole batch, "local" if each passes its own part, of any size: then the
      step is that of all parts together, and outputs are a rank's own rows. "ddp": what
      DistributedDataParallel does, to the letter: the mean of the ranks' own steps (docs/local_batches.md).
    seed: of the random ops, and of the initial weights of a decorated factory.
    device: where this rank computes; by default its GPU if there is one, else the CPU.
    cuda_graphs: True records the second run of each program on a GPU and replays it from then on (docs/cuda_graphs.md);
      "dry-run" checks anywhere that this is possible.
    check_replicas: steps from one comparison of what ranks should hold alike to the next; RankError if it differs.
    on_nonfinite: of a step whose loss or gradients are infinite or NaN on any rank: "stop" raises NonFiniteError on
      all of them before anything is changed, "skip" leaves the step out; None does not look (docs/ranks.md).
    weights: a safetensors file, or a folder of them as `save_pretrained` writes it, with the values of what is on the
      meta device: each rank reads its parts. None for the modules' own `reset_parameters()`.
    machine: that programs are made for: a name of `autopar machine show`, a file, a `Machine`. None: by the device.
    timeout: seconds that a rank waits for others before it raises RankError (docs/ranks.md); None: the backend's own.
    cache: a folder of compiled programs, for the next start (docs/cache.md); None: that of AUTOPAR_CACHE, or none.
    And of the step: every field of `autopar.StepOptions` by its name, e.g. `zero=3, recompute="selective"`.
    Raises MeshError, PlanError, ScheduleError, RankError (ranks given different models), CompileError (no such compiler
    here) and, at the first step, LayoutError, BatchError, ScheduleError, PlanError, CaptureError or CompileError.
    """
    asked = functools.partial(
        Requested, step=with_known_names(step, parallelize), loss_fn=loss_fn, batch=batch, seed=seed, device=device,
        cuda_graphs=cuda_graphs, check_replicas=check_replicas, on_nonfinite=on_nonfinite, weights=weights,
        machine=machine, timeout=timeout, cache=Settings.read().cache if cache is None else Path(cache),
    )  # fmt: skip
    if isinstance(model, nn.Module):
        if mesh is None:
            raise MeshError('parallelize(model, mesh) needs a mesh, e.g. "dp=2,tp=2".')
        return ParallelModule(asked(model, mesh))
    if mesh is None and isinstance(model, (str, Mapping, Mesh, DeviceMesh)):
        options_of(**step)  # where the decorator stands, and not first where a model is made
        return _decorator(lambda made: asked(made, model), seed)
    raise TypeError(
        f"parallelize takes an nn.Module and a mesh, or a mesh alone as a decorator, not {type(model).__name__}."
    )


def _decorator(
    asked: Callable[[nn.Module], Requested], seed: int
) -> Callable[[Factory], Callable[..., ParallelModule]]:
    def decorate(factory: Factory) -> Callable[..., ParallelModule]:
        @functools.wraps(factory, updated=())
        def build(*args: Any, **kwargs: Any) -> ParallelModule:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                model = factory(*args, **kwargs)
            return ParallelModule(asked(model))

        return build

    return decorate


def compile(
    model: nn.Module, mesh: MeshLike, *, loss_fn: LossFn | None = None, batch: Any, machine: MachineLike = DEVICES,
    **options: Unpack[StepKeywords],
) -> Compiled:  # fmt: skip
    """Compile one training step for every rank of a mesh, without processes, ranks or device memory.

    model, batch: may be on the meta device; only shapes, dtypes and Python values are read.
    batch: the global batch: a tuple of the positional arguments after the model, a dict of keyword arguments, or one
      tensor. loss_fn: called as `loss_fn(model, *batch)`; None if the module itself returns the loss.
    machine: what the programs are made for, as of `parallelize`.
    options: those of a step, see `autopar.StepOptions`. `specialize=True` needs a batch with data.

    Raises MeshError, LayoutError, BatchError, ScheduleError, PlanError or CaptureError for what cannot be compiled;
    MachineError for a machine that is not known; RuleError for a custom op that is called as none of its registered
    patterns says.
    """
    check_plain_model(model, loss_fn)
    # What is cheap to find is found before the capture.
    parsed, chosen = mesh_of(mesh), options_of(**with_known_names(options, compile))
    fixed = Fixed(machine=machine_like(machine))
    return Compiled.of(compile_step(model, loss_fn, *batch_arguments(batch), parsed, chosen, fixed=fixed)[1])
