"""The parallel module: what the user trains."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopar.runtime.kernels  # noqa: F401  registers the kernels of our ops
from autopar.agreement import Agreement, lost_peers
from autopar.batches import at_global_size, check_data, check_split, describe, of_local_batch, signature_lines
from autopar.capture import Captured, capture
from autopar.capture.capture import LossFn, state_of
from autopar.capture.raising import default_dtype
from autopar.choices import Choices, SequenceParallel
from autopar.compiled import Compiled
from autopar.compiler import lower
from autopar.distribute import Distributor, join
from autopar.errors import AutoparError, BatchError
from autopar.execution import Running, check_compiler, make_runner
from autopar.ir.layout import Layout, local_part, whole
from autopar.ir.plan import CPU, GPU
from autopar.ir.program import Input, record
from autopar.loss_scale import LossScale, give_gradients
from autopar.materialize import assign, materialize
from autopar.meshes import MeshLike
from autopar.precision_check import check_device
from autopar.random_state import RandomState
from autopar.runtime.distributed import make_groups
from autopar.runtime.pipeline import Given
from autopar.runtime.recorder import Recorder
from autopar.staged import given_of
from autopar.state_dicts import describe_state, split_loaded, whole_gradients, whole_state, without_strides
from autopar.torch_compat import TreeSpec, tree_flatten, tree_unflatten

_log = logging.getLogger("autopar")
PROGRAMS = 32  # compiled for as many signatures at a time; the one unused longest goes first


class ParallelModule(nn.Module):
    """A module of which every rank of a mesh holds a part. Made by `autopar.parallelize`.

    Parameters are DTensors under their original names; buffers are whole on every rank. Programs are compiled at the
    first call with a new signature (shapes, dtypes, Python values, training flags); Python attributes of the model
    that change later are not seen by programs that are compiled already.

    Submodules are the user's own. Other attributes of the root (`model.config`) are read from the user's module, but
    not its methods: they would compute with this rank's parts. `original` is the user's module itself.
    """

    def __init__(
        self, model: nn.Module, mesh: MeshLike, *, loss_fn: LossFn | None, choices: Choices, batch: str,
        seed: int, device: str | torch.device | None, compile: str | None = None, lift: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if batch not in ("global", "local"):
            raise BatchError(f'batch={batch!r}: write "global" (each rank takes its part) or "local".')
        self._mesh, device_mesh, self._device = join(mesh, device)
        staging = replace(choices.staging, machine=CPU if self._device.type == "cpu" else GPU)
        self._loss_fn, self._choices, self._local_batch = loss_fn, replace(choices, staging=staging), batch == "local"
        self._random, self._lift, self._compiler = RandomState(seed), lift, compile
        self._scale = LossScale() if choices.memory.precision == "fp16" else None
        self._original = (model,)  # in a tuple, so that it is no submodule and names stay as they are
        self._agreement = Agreement(self._device)
        self._distributor = Distributor(self._mesh, device_mesh)
        self._running: dict[Any, Running] = {}
        self._signatures: dict[Any, list[str]] = {}
        self._layouts: dict[str, Layout] = {}
        self._searched: Mapping[str, Layout] = {}  # the same without what ZeRO splits
        self._homes: dict[str, int | None] = {}  # the stage where a parameter lies; None: on every one
        self._stages: Mapping[str, int] | None = None  # that keep the parameters, once there are some
        self._groups: dict[str, Any] = {}
        self._device_mesh = device_mesh
        self._distribute(model)
        self._adopt(model)
        self.register_load_state_dict_pre_hook(split_loaded)
        self.register_state_dict_post_hook(without_strides)

    # -- what the user calls ------------------------------------------------------------------------------------

    def forward_backward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One forward and backward pass on the global batch; adds to `.grad` and returns the loss.

        The loss is that of the whole batch, the same on every rank. Raises BatchError if the batch does not fit. With
        precision="fp16" an overflow leaves every `.grad` None (see `loss_scale`), so that an optimizer does nothing.
        """
        running, leaves, _ = self._prepare(args, kwargs, train=True)
        outputs = self._run(running, leaves)
        self._random.steps += 1
        gradients: dict[str, torch.Tensor | None] = {}
        for out, value in zip(running.compiled.program.outputs, outputs, strict=True):
            if out.kind == "loss":
                loss = value
            elif out.kind == "gradient":
                gradients[out.name] = self._taken(out.name, value)
            elif out.kind == "buffer":
                self._set_buffer(out.name, value)
        give_gradients(self._named(), gradients, self._scale, self._device)
        return loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output on the global batch, without gradients; whole on every rank."""
        running, leaves, _ = self._prepare(args, kwargs, train=False)
        outputs = self._run(running, leaves)
        results = list(running.captured.result_leaves)
        for out, value in zip(running.compiled.program.outputs, outputs, strict=True):
            if out.kind == "value":
                results[int(out.name)] = value
            elif out.kind == "buffer":
                self._set_buffer(out.name, value)
        assert running.captured.result_spec is not None
        return tree_unflatten(results, running.captured.result_spec)

    def prepare(self, *args: Any, **kwargs: Any) -> Compiled:
        """Compile the training step for a batch (on any device, also meta) without running it.

        Parameters take their final layouts. Every rank must call this with batches of the same shapes.
        """
        return self._prepare(args, kwargs, train=True)[0].compiled

    def record(self, recorder: Recorder | None) -> None:
        """Let a recorder see what this rank does in the steps that are compiled by now; None ends it."""
        for running in self._running.values():
            running.record(recorder)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole CPU tensors under the original names on rank 0; empty on the other ranks. Every rank must call it."""
        return whole_state(self)

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Whole CPU gradients by parameter name on rank 0; empty on the others. Every rank must call it."""
        return whole_gradients(self)

    @property
    def original(self) -> nn.Module:
        """The user's module, whose parameters are now DTensors."""
        return self._original[0]

    @property
    def random_state(self) -> RandomState:
        """The seed and the steps taken: save it with a checkpoint, load it to go on with the masks that follow."""
        return self._random

    @property
    def loss_scale(self) -> LossScale | None:
        """The scale of the loss of precision="fp16", which follows overflows: save it with a checkpoint. Else None."""
        return self._scale

    @property
    def compiled(self) -> Compiled | None:
        """The training program used last."""
        steps = [r for (train, *_), r in self._running.items() if train]
        return steps[-1].compiled if steps else None

    @property
    def programs(self) -> tuple[Running, ...]:
        """What is compiled by now, the last used last."""
        return tuple(self._running.values())

    @property
    def generated_code(self) -> str | None:
        """The Python that runs this rank's part of the training program used last, of our executor or of Inductor."""
        steps = [r for (train, *_), r in self._running.items() if train]
        return steps[-1].runner.source if steps else None

    def train(self, mode: bool = True) -> ParallelModule:
        super().train(mode)
        self.original.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("_original")
            if original is None or name.startswith("__"):
                raise
        value = getattr(original[0], name)
        if callable(value) and not isinstance(value, nn.Module):
            raise AttributeError(
                f"'{name}' is a method of {type(original[0]).__name__}: it would compute with this rank's part of the "
                f"parameters. Call the parallel model itself, or use model.original.{name} if it reads no parameter."
            )
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        original = self.__dict__.get("_original")
        own = name in self.__dict__ or hasattr(type(self), name) or name.startswith("_")
        if original is not None and not own:
            if isinstance(value, (nn.Module, torch.Tensor)):
                raise AutoparError(
                    f"cannot set '{name}' of a parallel model to a {type(value).__name__}: its modules and tensors are "
                    f"distributed already. Change the plain module before autopar.parallelize."
                )
            setattr(original[0], name, value)
        else:
            super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AutoparError(
            "a parallel model cannot be copied or pickled: it holds process groups and this rank's part of the "
            "parameters. Save state_dict() (torch.distributed.checkpoint) or full_state_dict() instead; for a copy, "
            "copy the plain module before autopar.parallelize."
        )

    def _apply(self, fn: Any, recurse: bool = True) -> ParallelModule:
        """What `.to()`, `.double()`, `.cuda()` call: fine if nothing changes."""
        for tensor in (*self.parameters(), *self.buffers()):
            probe = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            made = fn(probe)
            if (made.dtype, made.device) != (probe.dtype, probe.device):
                raise AutoparError(
                    f"cannot turn the tensors of a parallel model from {probe.dtype} on {probe.device} into "
                    f"{made.dtype} on {made.device}. Convert the plain module before autopar.parallelize; "
                    f"device= says where it goes."
                )
        return self

    def extra_repr(self) -> str:
        return f"mesh={self._mesh}, rank={dist.get_rank()}"

    # -- making it ----------------------------------------------------------------------------------------------

    def _distribute(self, model: nn.Module) -> None:
        """Parameters become DTensors with rank 0's values, whole until the first compilation."""
        lines = [
            f"seed={self._random.seed}",
            f'batch="{"local" if self._local_batch else "global"}"',
            str(self._choices),
            f"compile={self._compiler}",
        ]
        self._agreement.check("options", lines)
        self._agreement.together("compiler", lambda: check_compiler(self._compiler, self._device))
        self._agreement.together("precision", lambda: check_device(self._choices.memory, self._device))
        entries = [(entry, t) for entry, t in state_of(model).entries if entry.kind != "constant"]
        self._agreement.check("model", [describe_state(entry, tensor) for entry, tensor in entries])
        self._agreement.together("model", lambda: materialize(model, self._device, self._random.seed))
        entries = [(entry, t) for entry, t in state_of(model).entries if entry.kind != "constant"]
        for entry, tensor in entries:
            value = tensor.detach().to(self._device)
            if dist.get_world_size() > 1:
                value = value.contiguous()
                with lost_peers(f"sending {entry.kind} '{entry.name}' from rank 0"):
                    dist.broadcast(value, src=0)
            made: torch.Tensor = value
            if entry.kind == "parameter":
                made = self._distributor.parameter(value, whole(value.ndim))
                made.requires_grad_(tensor.requires_grad)
                self._layouts[entry.name], self._homes[entry.name] = whole(value.ndim), None
            for name in entry.names:
                assign(model, name, made, entry.kind)

    def _adopt(self, model: nn.Module) -> None:
        """Hold the root's own; not by `register_*`, which refuse names that are found by `__getattr__` already."""
        self._modules.update(model._modules)
        self._parameters.update(model._parameters)
        self._buffers.update(model._buffers)
        self._non_persistent_buffers_set.update(model._non_persistent_buffers_set)
        self.training = model.training

    # -- compiling ----------------------------------------------------------------------------------------------

    def _prepare(self, args: Any, kwargs: Any, train: bool) -> tuple[Running, list[Any], TreeSpec]:
        leaves, spec = tree_flatten((args, kwargs))
        shapes = tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        flags = tuple(module.training for module in self.original.modules())
        wanted = tuple(parameter.requires_grad for parameter in self.original.parameters())
        key = (train, str(spec), repr(shapes), flags, wanted)
        if key not in self._signatures:
            self._signatures[key] = signature_lines(self.original, train, leaves, spec)
        states = [f"random_state {self._random.state_dict()}"] + [str(self._scale)] * (self._scale is not None)
        self._agreement.check("batch and modes", [*self._signatures[key], *states])
        if key not in self._running:
            if self._running and any(train == known[0] for known in self._running):
                _log.warning("new input signature (%s): compiling again", ", ".join(describe(leaves)))
            self._running[key] = self._compile(args, kwargs, leaves, train)
            if len(self._running) > PROGRAMS:
                oldest = next(iter(self._running))
                del self._running[oldest], self._signatures[oldest]
        else:
            self._running[key] = self._running.pop(key)  # the last used stands last
        return self._running[key], leaves, spec

    def _compile(self, args: Any, kwargs: Any, leaves: list[Any], train: bool) -> Running:
        first = not self._running
        check_data(self._agreement, leaves, self._distributor.coord, self._local_batch)

        def make() -> tuple[Captured, Compiled]:
            batch = (args, kwargs)
            global_args, global_kwargs = at_global_size(batch, self._mesh) if self._local_batch else batch
            choices = self._choices
            captured = capture(
                self.original, self._loss_fn, global_args, global_kwargs,
                train=train, lift=self._lift, specialize=choices.specialize, precision=choices.memory.precision,
            )  # fmt: skip
            if not first:
                known = {name: str(layout) for name, layout in self._searched.items()}
                sequence: SequenceParallel = "auto" if choices.sequence_parallel else False
                # What divided the first batch need not divide the last of an epoch, nor every sequence.
                staging = replace(choices.staging, homes=self._stages)
                choices = replace(choices, shard=known, sequence_parallel=sequence, uneven=True, staging=staging)
            compiled = lower(captured, self._mesh, choices)
            if self._local_batch:
                check_split(compiled, leaves)
            return captured, compiled

        captured, compiled = self._agreement.together("program", make)
        self._agreement.check("program", compiled.lines())
        if dist.get_rank() == 0:
            for note in compiled.notes:
                _log.warning("%s", note)
        if first:
            self._searched = compiled.searched
            self._relayout(compiled.layouts, compiled.homes)
            self._stages = compiled.pipeline.homes if compiled.pipeline is not None else None
        missing = [axis for axis in compiled.axes if axis not in self._groups]
        self._groups.update(make_groups(self._mesh, missing, self._device_mesh))
        program = compiled.program
        slots = tuple(
            (entry, record(node).layout) for node, entry in zip(program.placeholders, program.inputs, strict=True)
        )
        constants = {name: tensor.to(self._device) for name, tensor in captured.constants.items()}
        runner = make_runner(compiled, self._groups, self._compiler, self._agreement, self._device)
        return Running(captured, compiled, runner, slots, constants)

    def _relayout(self, layouts: Mapping[str, Layout], homes: Mapping[str, int | None] | None = None) -> None:
        parameters = self._named()
        for name, layout in layouts.items():
            home = (homes or {}).get(name)
            has = self._layouts[name], self._homes[name]
            if (layout, home) != has:
                self._distributor.relayout(parameters[name], has[0], layout, has[1], home)
                self._layouts[name], self._homes[name] = layout, home

    # -- running ------------------------------------------------------------------------------------------------

    def _run(self, running: Running, leaves: list[Any]) -> tuple[torch.Tensor, ...]:
        """The outputs of this rank; the values that the program was specialised to are those of this batch too."""
        with default_dtype(self._lift):
            outputs = running.run(self._inputs(running, leaves))
        for out, value in zip(running.compiled.program.outputs, outputs, strict=True):
            if out.kind == "guard":
                running.captured.reads[int(out.name)].check(value)
        return outputs

    def _inputs(self, running: Running, leaves: list[Any]) -> list[torch.Tensor] | Given:
        parameters, buffers, coord = self._named(), dict(self.original.named_buffers()), self._distributor.coord

        def value_of(entry: Input, layout: Layout) -> torch.Tensor:
            if entry.kind == "parameter":
                return self._distributor.given(parameters[entry.name], layout)  # type: ignore[arg-type]
            if entry.kind == "buffer":
                return buffers[entry.name]
            if entry.kind == "constant":
                return running.constants[entry.name]
            if entry.kind == "scale":
                return torch.tensor(self._scale.scale if self._scale else 1.0, device=self._device)
            if entry.kind == "seed":
                return torch.tensor([self._random.seed, self._random.steps], device=self._device)
            return part_of(entry, layout, coord)

        def part_of(entry: Input, layout: Layout, coord: Mapping[str, int]) -> torch.Tensor:
            leaf = leaves[int(entry.name)].detach()
            layout = of_local_batch(layout) if self._local_batch else layout
            return local_part(leaf, layout, running.compiled.program.mesh, coord).to(self._device)

        if running.compiled.pipeline is not None:
            return given_of(running.compiled, coord, value_of, part_of)
        return [value_of(entry, layout) for entry, layout in running.slots]

    def _taken(self, name: str, value: torch.Tensor | None) -> torch.Tensor | None:
        if value is None:
            return None
        return self._distributor.taken(value, self._layouts[name], self.original.get_parameter(name).shape)

    def _named(self) -> dict[str, nn.Parameter]:
        return dict(self.original.named_parameters())

    def _layout(self, name: str, tensor: torch.Tensor) -> Layout:
        return self._layouts.get(name, whole(tensor.ndim))

    def _set_buffer(self, name: str, value: torch.Tensor) -> None:
        path, _, attribute = name.rpartition(".")
        with torch.no_grad():
            getattr(self.original.get_submodule(path), attribute).copy_(value)
