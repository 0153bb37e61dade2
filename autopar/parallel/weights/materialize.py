"""Give values to the parameters and buffers of a model that was built on the meta device, to each rank its parts.

From files, or by the modules' own `reset_parameters()`, and the model's `_init_weights(module)` behind it, which then
run on tensors that are split already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn

from autopar.capture.capture import state_of
from autopar.capture.inputs import tables
from autopar.errors import AutoparError, CaptureError
from autopar.ir.layout import Layout
from autopar.ir.program import Input
from autopar.parallel.agree.agreement import Agreement, Phase
from autopar.parallel.tensors.padding import padded_part
from autopar.parallel.tensors.parameter import ParameterTensor, parameter_tensor
from autopar.parallel.tensors.place import Place, World
from autopar.parallel.weights.distribute import Distributor
from autopar.parallel.weights.identity import make_parallel
from autopar.parallel.weights.rebuild import RESET, initialiser, is_filled, mark_of, rebuilt
from autopar.torch_compat import local_of

Made = list[tuple[Input, torch.Tensor]]


def materialize(
    model: nn.Module, where: Distributor, device: torch.device, agreement: Agreement, seed: int,
    weights: str | Path | None = None,
) -> None:  # fmt: skip
    """Give the meta tensors of `model` memory on `device` and values: from files, or by `reset_parameters()`.

    Modules reset bottom-up, so that an outer module may have the last word; one that also holds real tensors resets
    only if it owns a meta tensor itself. Tied tensors stay tied; all ranks draw the numbers of one device. Raises
    CaptureError naming the tensors that nothing fills. Every rank must call it.

    What is on the meta device on rank 0 counts, as its values do: what it has is sent to ranks that have none.
    """
    filled = _Filling(model, where, device, seed, weights)
    filled.take_from_first()
    made = agreement.together("model", filled.run)
    if made and weights is None and device.type != "meta":  # where a dry run has no values to look for
        _check_filled(made, where.world.device)


class _Filling:
    """The way of one model's meta tensors to their values, on this rank."""

    def __init__(
        self, model: nn.Module, where: Distributor, device: torch.device, seed: int, weights: str | Path | None
    ) -> None:
        self.model, self.where, self.device, self.seed, self.weights = model, where, device, seed, weights
        self.world: World = where.world.alike()
        self.entries: Made = list(state_of(model).entries)
        self.missing = {entry.name for entry, tensor in self.entries if tensor.device.type == "meta"}

    def take_from_first(self) -> None:
        """Take from rank 0 which parameters and buffers have no values. (What is neither, each rank keeps alone.)"""
        names = [entry.name for entry, _ in self.entries if entry.kind != "constant"]
        if dist.get_world_size() > 1 and names:
            found = torch.tensor([name in self.missing for name in names], dtype=torch.uint8, device=self.world.device)
            dist.broadcast(found, src=0)
            theirs = {name for name, is_missing in zip(names, found.tolist(), strict=True) if is_missing}
            self.missing = self.missing.difference(names) | theirs

    def run(self, phase: Phase) -> Made:
        """The tensors with values, in the model already. Moves data between ranks only where a module's
        `reset_parameters()` reads whole values."""
        entries = [pair for pair in self.entries if pair[0].name in self.missing]
        phase.texts["source of values"] = ["reset_parameters" if self.weights is None else "weights"]
        if self.weights is not None:
            return self._read(entries, Weights.open(self.weights))
        made = [(entry, self._fill(entry, tensor, self._empty(entry, tensor))) for entry, tensor in entries]
        if made:
            self._reset({name for entry, _ in made for name in entry.names})
        return made

    def _read(self, entries: Made, files: Weights) -> Made:
        unkept = {entry.name: tensor for entry, tensor in entries if self._is_unkept(entry) and not files.has(entry)}
        files.check([(entry.names, tensor) for entry, tensor in entries if entry.name not in unkept])
        values = rebuilt(self.model, unkept, self.seed)

        def part(entry: Input, tensor: torch.Tensor, place: Place) -> torch.Tensor:
            return values[entry.name] if entry.name in values else files.part(entry.names, place, tensor)

        return [
            (entry, self._fill(entry, tensor, self._like(entry, tensor, partial(part, entry, tensor))))
            for entry, tensor in entries
        ]

    def _is_unkept(self, entry: Input) -> bool:
        """Whether checkpoints leave a tensor out: a buffer with persistent=False, a tensor that is an attribute."""
        path, _, attribute = entry.name.rpartition(".")
        owner = tables.submodule(self.model, path)
        return entry.kind == "constant" or attribute in owner._non_persistent_buffers_set

    def _fill(self, entry: Input, tensor: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """Let a tensor on the meta device become one with memory."""
        if entry.kind == "constant":
            return self._put(entry, made)
        make_parallel(entry.name, tensor, made)
        return tensor

    def _empty(self, entry: Input, tensor: torch.Tensor) -> torch.Tensor:
        """Memory for a tensor, full of what no initialisation leaves."""
        mark = mark_of(tensor.dtype)

        def part(place: Any) -> torch.Tensor:
            shape = place.part(torch.empty(tensor.shape, device="meta")).shape
            return torch.full(shape, mark, dtype=tensor.dtype, device=self.device)

        return self._like(entry, tensor, part)

    def _like(self, entry: Input, tensor: torch.Tensor, part: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """A parameter around its part at the place where it waits for the first program; a buffer is whole."""
        if entry.kind != "parameter":
            return part(self.world.everywhere(tensor.ndim)).to(self.device)
        place = self.world.place(self.where.waiting(tensor.shape))
        made = parameter_tensor(part(place).to(self.device), place, tensor.shape)
        return nn.Parameter(made, requires_grad=tensor.requires_grad)

    def _put(self, entry: Input, tensor: torch.Tensor) -> torch.Tensor:
        for name in entry.names:
            assign(self.model, name, tensor, entry.kind)
        return tensor

    # -- reset_parameters ---------------------------------------------------------------------------------------

    def _reset(self, on_meta: set[str]) -> None:
        everything = {name for entry, _ in state_of(self.model).entries for name in entry.names}
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            for path, module in reversed(list(tables.named_modules(self.model))):
                inside = {name for name in everything if name.startswith(f"{path}." if path else "")}
                own = any(name.rpartition(".")[0] == path for name in on_meta)
                reset = next((getattr(module, name) for name in RESET if hasattr(module, name)), None)
                if callable(reset) and (own or (inside and inside <= on_meta)):
                    self._on_parts(reset, inside)
            self._initialise(on_meta)

    def _initialise(self, on_meta: set[str]) -> None:
        """Let a model have the last word on its modules that hold such tensors, as its constructor has: transformers,
        timm and others apply `_init_weights(module)` to each, behind what the module itself does."""
        owners = {name.rpartition(".")[0] for name in on_meta}
        for path, module in reversed(list(tables.named_modules(self.model))):
            method = initialiser(self.model, path) if path in owners else None
            if method is not None:
                inside = {name for name in on_meta if name.rpartition(".")[0] == path}
                with torch.no_grad():
                    self._on_parts(partial(method, module), inside)

    def _on_parts(self, reset: Callable[[], Any], inside: set[str]) -> None:
        """Let a module reset its split parameters; whole ones, if it does what parts refuse, such as `.numpy()`."""
        states = _generators(self.device)
        try:
            reset()
        except AutoparError:
            for put, state in states:
                put(state)
            with self._whole(inside):
                reset()

    @contextmanager
    def _whole(self, inside: set[str]) -> Iterator[None]:
        entries = [
            (entry, tensor) for entry, tensor in state_of(self.model).entries if inside.intersection(entry.names)
        ]
        split = [(entry, tensor) for entry, tensor in entries if isinstance(tensor, ParameterTensor)]
        with torch.no_grad():
            whole = [nn.Parameter(tensor.full_tensor(), tensor.requires_grad) for _, tensor in split]
        for (entry, _), value in zip(split, whole, strict=True):
            self._put(entry, value)
        yield
        for (entry, tensor), value in zip(split, whole, strict=True):
            local_of(tensor).detach().copy_(tensor.place.part(value.detach()))
            self._put(entry, tensor)


def _generators(device: torch.device) -> list[tuple[Callable[[torch.Tensor], Any], torch.Tensor]]:
    """How to set the generators that an initialisation draws from, each with its state."""
    generators: list[tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = [
        (torch.set_rng_state, torch.get_rng_state())
    ]
    if device.type == "cuda":
        generators.append((lambda state: torch.cuda.set_rng_state(state, device), torch.cuda.get_rng_state(device)))
    return generators


def _check_filled(made: Made, device: torch.device) -> None:
    """Raise CaptureError, on every rank, for tensors that nothing filled on some rank."""
    marked = torch.tensor([_is_marked(tensor) for _, tensor in made], dtype=torch.int32, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(marked, op=dist.ReduceOp.MAX)
    empty = [f"'{entry.name}'" for (entry, _), is_empty in zip(made, marked.tolist(), strict=True) if is_empty]
    if empty:
        raise CaptureError(
            f"the model is on the meta device, and no reset_parameters() or _init_weights() gives values to "
            f"{', '.join(empty[:3])}{f' and {len(empty) - 3} more' if empty[3:] else ''}. Define reset_parameters() on "
            f"the module that owns "
            f"{'them' if empty[1:] else 'it'}, build the model on a real device, or say which files have its values: "
            f"parallelize(..., weights=FOLDER)."
        )


def assign(model: nn.Module, name: str, tensor: torch.Tensor, kind: str) -> None:
    """Put `tensor` in the place of the parameter, buffer or plain attribute `name`."""
    path, _, attribute = name.rpartition(".")
    owner = tables.submodule(model, path)
    if kind == "buffer":
        owner.register_buffer(attribute, tensor, persistent=attribute not in owner._non_persistent_buffers_set)
    else:
        setattr(owner, attribute, tensor)


def _is_marked(tensor: torch.Tensor) -> bool:
    """Whether this rank's part was not filled."""
    return not is_filled(local_of(tensor).detach() if isinstance(tensor, ParameterTensor) else tensor)


# -- files of weights -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """The tensors of some files. file_of: by the name of a tensor."""

    path: Path
    file_of: Mapping[str, Any]  # open, mapped into memory: nothing is read yet

    @staticmethod
    def open(path: str | Path) -> Weights:
        """The tensors of a file, or of all safetensors files of a folder."""
        path = Path(path)
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            raise AutoparError(f"weights='{path}': there is no such file, or no .safetensors file in that folder.")
        opened = [_opened(file, safe_open) for file in files]
        return Weights(path, {name: file for file in opened for name in file.keys()})  # noqa: SIM118

    def has(self, entry: Input) -> bool:
        return self._known(entry.names) is not None

    def check(self, wanted: Sequence[tuple[Sequence[str], torch.Tensor]]) -> None:
        """Raise CaptureError for tensors, by their names, that are in no file or have another shape there."""
        faults, missing = [], []
        for names, tensor in wanted:
            name = self._known(names)
            if name is None:
                missing.append(f"'{names[0]}'")
            elif (shape := list(self.file_of[name].get_slice(name).get_shape())) != list(tensor.shape):
                faults.append(f"'{name}' is {shape} there and {list(tensor.shape)} in the model")
        if missing:
            faults.append(
                f"{', '.join(missing[:3])}{f' and {len(missing) - 3} more' if missing[3:] else ''} "
                f"{'are' if missing[1:] else 'is'} on the meta device and in no file (give files that have "
                f"{'them' if missing[1:] else 'it'}, or build {'them' if missing[1:] else 'it'} on a real device)"
            )
        if faults:
            raise CaptureError(f"weights='{self.path}' does not fit the model: {'; '.join(faults)}.")

    def part(self, names: Sequence[str], place: Place, like: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor, in the dtype of `like` and memory of its own: no more is read."""
        name = self._known(names)
        assert name is not None
        file = self.file_of[name]
        with torch.device("cpu"):  # safetensors leaves it to torch's default device
            part = file.get_slice(name)[_rows(place, like.shape)] if like.ndim else file.get_tensor(name)
        return part.to(like.dtype, copy=True, memory_format=torch.contiguous_format)  # else it would keep the file

    def _known(self, names: Sequence[str]) -> str | None:
        return next((name for name in names if name in self.file_of), None)


def _rows(place: Place, shape: torch.Size) -> tuple[slice, ...]:
    """Where a part lies in the whole: one block, of what no integer splits."""
    rows = []
    for dim, size in enumerate(shape):
        mine = padded_part(
            torch.arange(1, size + 1, device="cpu"), Layout((place.layout.dims[dim],)), place.mesh, place.world.coord
        )
        mine = mine[mine > 0]  # the rest is padding
        rows.append(slice(int(mine[0]) - 1, int(mine[-1])) if len(mine) else slice(0, 0))
    return tuple(rows)


def _opened(file: Path, safe_open: Callable[..., Any]) -> Any:
    """A file, mapped into memory. safe_open: of safetensors, whose errors name no file."""
    try:
        return safe_open(file, framework="pt")
    except Exception as error:  # its own kind is that of a package which may be absent
        raise AutoparError(f"weights: '{file}' is no safetensors file, or a damaged one: {error}.") from None
