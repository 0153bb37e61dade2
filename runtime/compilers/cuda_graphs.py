"""Runs a program once so that it is recorded, then replays the recording: CUDA graphs, a `Runner` around another one.

A recording reads and writes the memory that it had when it was made. So what comes anew at each step (batch, seed,
scale) is copied into memory that stays; parameters and buffers lie where they lie, and what the recording leaves is
copied before it is handed out. The first run of a program is not recorded: it connects communicators and compiles
kernels, and a batch that comes once pays for no recording.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from autopar.errors import AutoparError, CompileError
from autopar.ir.program import Input
from autopar.runtime.executor.executor import Outputs
from autopar.runtime.executor.inputs import Key, StepInputs
from autopar.runtime.ranks.distributed import Routed
from autopar.runtime.ranks.recorder import Recorder
from autopar.runtime.ranks.runner import Runner
from autopar.torch_shortcuts import copy_all

_log = logging.getLogger("autopar")
_NEW = frozenset({"batch", "seed", "scale"})  # inputs that lie elsewhere at each step


class RecordedGraph(Protocol):
    """A recording. Its inputs and outputs stay where they lie."""

    def capture(self, run: Callable[[], Outputs], inputs: Sequence[torch.Tensor]) -> Outputs:
        """Record what `run` does; its outputs, whose values only `replay` gives."""
        ...

    def replay(self) -> None:
        """Do it again, on what now lies in the inputs, into the outputs."""
        ...


class CudaGraph:
    """A CUDA graph. pool: the memory that the recordings of a model share, for one runs at a time."""

    def __init__(self, pool: Any, device: torch.device) -> None:
        self._graph, self._pool, self._device = torch.cuda.CUDAGraph(), pool, device

    def capture(self, run: Callable[[], Outputs], inputs: Sequence[torch.Tensor]) -> Outputs:
        # Other threads may ask the device meanwhile: NCCL's does, for what ran before.
        recording = torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local")
        with torch.cuda.device(self._device), recording:
            return run()

    def replay(self) -> None:
        self._graph.replay()


class DryGraph:
    """What a CUDA graph needs, checked without one: runs again on the very tensors of the recording, whatever came
    since, and writes over what it gave before."""

    def capture(self, run: Callable[[], Outputs], inputs: Sequence[torch.Tensor]) -> Outputs:
        self._run, self._inputs = run, tuple(inputs)
        self._at = [_place(tensor) for tensor in inputs]
        self._outputs = run()
        return self._outputs

    def replay(self) -> None:
        for i, (tensor, place) in enumerate(zip(self._inputs, self._at, strict=True)):
            if _place(tensor) != place:
                raise AutoparError(
                    f"cuda_graphs: input {i} of a recorded step lies at {_place(tensor)}, and was recorded at {place}: "
                    f"a CUDA graph would read the old memory. Write into a tensor (copy_), do not put another there."
                )
        for held, value in zip(self._outputs, self._run(), strict=True):
            if held is not None:
                held.copy_(value)


@dataclass(slots=True)
class _Recorded:
    graph: RecordedGraph
    inputs: Mapping[Key, torch.Tensor]
    outputs: Outputs


@dataclass(slots=True)
class GraphRunner:
    """Runs `runner` as a recording. make: an empty one. entries: the inputs of the program. copied: those that lie
    elsewhere at each step, beside batch, seed and scale. name: of the program, in messages."""

    runner: Runner
    make: Callable[[], RecordedGraph]
    entries: Mapping[Key, Input]
    copied: set[Key]
    name: str
    recorded: _Recorded | None = None
    count: int = 0  # recordings so far
    _is_warm: bool = field(default=False)

    def __post_init__(self) -> None:
        self.copied |= {key for key, entry in self.entries.items() if entry.kind in _NEW}

    @property
    def source(self) -> str:
        return self.runner.source

    def run(self, inputs: StepInputs) -> Outputs:
        if not self._is_warm:
            self._is_warm = True
            return self.runner.run(inputs)
        recorded = self._find(inputs)
        with torch.no_grad():
            for key in self.copied:
                recorded.inputs[key].copy_(inputs[key])
        recorded.graph.replay()
        return _copies(recorded.outputs)

    @property
    def routed(self) -> Sequence[Routed]:
        return self.runner.routed

    def record(self, recorder: Recorder | str | None) -> None:
        """Raise CompileError for a recorder: nothing can watch a replay."""
        if recorder is not None:
            raise CompileError(
                "a trace watches a step op by op, and with cuda_graphs it is one launch: leave cuda_graphs out to "
                "trace it."
            )

    def _find(self, inputs: StepInputs) -> _Recorded:
        """The recording, made anew if what should stay lies elsewhere now; that is copied from then on."""
        recorded = self.recorded
        if recorded is not None:
            stay = recorded.inputs.keys() - self.copied
            moved = {key for key in stay if _place(inputs[key]) != _place(recorded.inputs[key])}
            if not moved:
                return recorded
            self._say(moved)
            self.copied |= moved
        recorded = self.recorded = None  # its memory is free for the next
        recorded = self.recorded = self._record(inputs)
        return recorded

    def _record(self, inputs: StepInputs) -> _Recorded:
        graph = self.make()
        # What is made here is written to later, also outside of the user's inference mode.
        with torch.inference_mode(False), torch.no_grad():
            # Tensors of our own: `.data = ` moves the user's, and what is held cannot become another's memory.
            held = {key: value.clone() if key in self.copied else value.detach() for key, value in inputs.items()}
            try:
                outputs = graph.capture(lambda: _dense(self.runner.run(held)), tuple(held.values()))
            except RuntimeError as error:
                raise self._refused(error) from error
        self.count += 1
        return _Recorded(graph, held, outputs)

    def _refused(self, error: RuntimeError) -> CompileError:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return CompileError(
            f"cuda_graphs=True cannot record {self.name}: {first}\n"
            f"  Something in it asks the GPU for a value while it runs, or allocates by itself (a custom op?). The "
            f"traceback above has the place; leave cuda_graphs out to run the program op by op."
        )

    def _say(self, moved: set[Key]) -> None:
        names = sorted(self.entries[key].name for key in moved)
        if not dist.is_initialized() or dist.get_rank() == 0:
            _log.warning(
                "cuda_graphs: %s no longer where %s was recorded (first '%s'): recorded again, and copied from now on. "
                "Write into a tensor (copy_) instead of putting another in its place.",
                f"{len(names)} tensors are" if names[1:] else "a tensor is", self.name, names[0],
            )  # fmt: skip


def _place(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _dense(outputs: Outputs) -> Outputs:
    return tuple(value if value is None else value.contiguous() for value in outputs)


def _copies(outputs: Outputs) -> Outputs:
    """The outputs in memory of their own: a user keeps gradients and losses, and the next replay writes over these."""
    made = tuple(None if value is None else torch.empty_like(value) for value in outputs)
    with torch.no_grad():
        copy_all([x for x in made if x is not None], [x for x in outputs if x is not None])
    return made
