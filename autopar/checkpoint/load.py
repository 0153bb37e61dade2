"""Load a checkpoint onto any mesh, or into plain modules: all of it is checked before any of it is applied."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, overload

import torch

from autopar import compiled
from autopar.capture.inputs import tables
from autopar.checkpoint import folder
from autopar.checkpoint.fitting import fit_model, fit_optimizer, pick
from autopar.checkpoint.generators import check_generators, set_generators
from autopar.checkpoint.manifest import NAME, Manifest, damaged
from autopar.checkpoint.outgoing import targets
from autopar.checkpoint.run import Run, plain, state_of_module
from autopar.checkpoint.tensor_files import Reader, check_files
from autopar.checkpoint.together import AllRanks
from autopar.checkpoint.tree import decode, outline
from autopar.compiled import Compiled
from autopar.errors import AutoparError, CheckpointError
from autopar.parallel.agree.agreement import Phase
from autopar.parallel.module import ParallelModule
from autopar.parallel.session.random_state import RandomState
from autopar.parallel.tensors.parameter import ParameterTensor
from autopar.torch_compat import local_of

_log = logging.getLogger("autopar")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `autopar.load` gives back. step: how many steps of training were done. path: the folder it was read from."""

    step: int
    extra: Any
    path: Path


@overload
def load(directory: str | Path) -> Compiled: ...
@overload
def load(
    directory: str | Path, model: Any, optimizer: Any = None, *, step: int | None = None, scheduler: Any = None,
    loader: Any = None,
) -> Loaded: ...  # fmt: skip


def load(
    directory: str | Path, model: Any = None, optimizer: Any = None, *, step: int | None = None, scheduler: Any = None,
    loader: Any = None,
) -> Any:  # fmt: skip
    """Load the newest checkpoint of a folder into a run, on any mesh or none. Call it on every rank.

    directory: what `autopar.save` was given. With a folder alone: the programs that `Compiled.save` wrote there.
    model, optimizer, scheduler, loader: as of `autopar.save`, made anew; what is left out is not loaded. Modules may be
      parallel or plain, whatever was saved. Random generators go on where they stood.
    step: another step than the newest.

    Gives the step and the extra values. Raises CheckpointError on every rank, before anything is changed, if a file is
    damaged (which is named) or the checkpoint does not fit.
    """
    path = Path(directory)
    if model is None:
        if (path / NAME).is_file() or folder.committed(path):
            raise CheckpointError(
                f"'{path}' holds checkpoints: write autopar.load({str(directory)!r}, model, optimizer), with the "
                f"objects that they are loaded into."
            )
        return compiled.load(directory)
    return load_run(path, Run.of(model, optimizer, scheduler, loader), step)


def load_run(directory: Path, run: Run, step: int | None = None) -> Loaded:
    """Load as `load` does."""
    ranks = AllRanks.of(run.models.values())
    ranks.announce("autopar.load", run.models.values(), [f"directory={directory}", f"step={step}"])
    loading = ranks.together(partial(Loading.checked, directory, run, step, ranks))
    loading.apply()
    return Loaded(loading.reader.manifest.step, loading.extra, loading.reader.folder)


@dataclass(slots=True)
class Loading:
    """A checkpoint that was checked, and what it is loaded into. saved: by the name of each object, its entry."""

    run: Run
    reader: Reader
    models: Mapping[str, Any]
    optimizers: Mapping[str, Any]
    schedulers: Mapping[str, Any]
    loaders: Mapping[str, Any]
    generators: Mapping[str, Any]
    extra: Any

    @staticmethod
    def checked(directory: Path, run: Run, step: int | None, ranks: AllRanks, phase: Phase) -> Loading:
        """Find and check a checkpoint, of which each rank reads its share; nothing is changed."""
        path = folder.newest(directory, step)
        manifest = Manifest.read(path)
        if folder.is_step(path.name) and not path.name.endswith(folder.folder_of(manifest.step)):
            raise CheckpointError(damaged(path / NAME, f"it is that of step {manifest.step}"))
        phase.texts["checkpoint"] = [str(path.name), f"{manifest.step}", f"{len(manifest.text)}"]
        check_files(path, manifest)
        reader = Reader(path, manifest)
        reader.check(ranks.rank, ranks.size)
        models, optimizers, schedulers = (
            pick(what, manifest.state, getattr(run, what), path) for what in ("models", "optimizers", "schedulers")
        )
        fault = [*fit_all(run, reader, models, optimizers)]
        if fault:
            raise CheckpointError("\n".join(fault))
        own, theirs = _own_of(manifest, ranks, run)
        loaders = pick("loaders", own, run.loaders, path)
        generators = {name: decode(each, outline) for name, each in theirs.items()}
        _check_draws(generators, models.values(), path)
        give = reader.whole
        return Loading(
            run, reader, models, optimizers,
            {label: decode(each, give) for label, each in schedulers.items()},
            {label: decode(each, outline) for label, each in loaders.items()},
            generators,
            decode(manifest.state["extra"]["extra"], give),
        )  # fmt: skip

    def apply(self) -> None:
        """Write everything where it belongs."""
        with torch.no_grad():
            for label, entry in self.models.items():
                self._into_model(self.run.models[label], entry)
            for label, entry in self.optimizers.items():
                self._into_optimizer(label, entry)
        for label, state in self.schedulers.items():
            self.run.schedulers[label].load_state_dict(state)
        for label, state in self.loaders.items():
            self.run.loaders[label].load_state_dict(state)
        set_generators(self.generators)

    def _into_model(self, model: Any, entry: Mapping[str, Any]) -> None:
        done: set[int] = set()
        for name, value in state_of_module(model).items():
            saved = entry["state"][name]
            if not isinstance(value, torch.Tensor):  # an extra state
                path, _, _ = name.rpartition(".")
                tables.submodule(plain(model), path).set_extra_state(decode(saved, self.reader.whole))
            elif id(value) not in done:
                done.add(id(value))
                for offset, part in targets(value):
                    self.reader.fill(saved["of"], offset, part)
        if isinstance(model, ParallelModule):
            if "random" in entry:
                model.random_state.load_state_dict(entry["random"])
            if model.loss_scale is not None and "scale" in entry:
                model.loss_scale.load_state_dict(decode(entry["scale"], self.reader.whole))

    def _into_optimizer(self, label: str, entry: Mapping[str, Any]) -> None:
        """By torch's own load_state_dict, which runs the hooks of users; it would round states that are longer than
        their parameter, which are put back."""
        optimizer = self.run.optimizers[label]
        numbered = optimizer.state_dict()["param_groups"]
        names = self.run.names_of_parameters(label)
        held = {
            name: (number, parameter)
            for its, group, live in zip(names, numbered, optimizer.param_groups, strict=True)
            for name, number, parameter in zip(its, group["params"], live["params"], strict=True)
        }
        states = {
            name: decode(entry["state"][name], partial(self._state, parameter))
            for name, (_, parameter) in held.items()
            if name in entry["state"]
        }
        saved_groups = {frozenset(group["params"]): group for group in entry["groups"]}
        groups = [
            {**decode(saved_groups[frozenset(its)], self.reader.whole), "params": group["params"]}
            for its, group in zip(names, numbered, strict=True)
        ]
        others = decode(entry["others"], self.reader.whole)
        whole = {"state": {**others, **{held[name][0]: dict(state) for name, state in states.items()}}}
        optimizer.load_state_dict({**decode(entry["more"], self.reader.whole), **whole, "param_groups": groups})
        for name, state in states.items():
            live = optimizer.state[held[name][1]]
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and key in live and live[key].dtype != value.dtype:
                    live[key] = value.to(live[key].device)

    def _state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """A state of a parameter, which lies as that does if it has its shape."""
        saved = self.reader.manifest.tensors[name]
        if not isinstance(parameter, ParameterTensor):
            return self.reader.whole(name)
        if saved.shape == tuple(parameter.shape) and parameter.ndim:
            part = local_of(parameter)
            empty = torch.empty(part.shape, dtype=self.reader.dtype(name), device=part.device)
            made: torch.Tensor = parameter.around(empty, parameter.place, parameter.shape)
            for offset, piece in targets(made):
                self.reader.fill(name, offset, piece)
            return made
        whole = self.reader.whole(name)
        if not saved.placed:
            return whole
        everywhere = parameter.place.world.everywhere(whole.ndim)
        return parameter.around(whole.to(parameter.device), everywhere, whole.shape)


def fit_all(
    run: Run, reader: Reader, models: Mapping[str, Any], optimizers: Mapping[str, Any]
) -> Iterator[str]:  # fmt: skip
    """Say what does not fit between a checkpoint and what it is loaded into."""
    for label, entry in models.items():
        yield from fit_model(label, run.models[label], entry, reader.manifest)
    for label, entry in optimizers.items():
        yield from fit_optimizer(label, run, entry)


def _check_draws(generators: Mapping[str, Any], models: Iterable[Any], path: Path) -> None:
    """Try on objects of our own what is said of random numbers. Raises CheckpointError."""
    try:
        check_generators(generators)
        for entry in models:
            if "random" in entry:
                drawn = RandomState(0)
                drawn.load_state_dict(entry["random"])
                drawn.tensor(torch.device("cpu"), True)
    except (AutoparError, LookupError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(damaged(path / NAME, f"no random generator can go on from it: {error}")) from None


def _own_of(manifest: Manifest, ranks: AllRanks, run: Run) -> tuple[Any, dict[str, Any]]:
    """What was saved for this rank alone: its entry, and the states of its generators. Raises CheckpointError for
    loaders that stood at different places on another number of ranks."""
    if len(manifest.own) == 1 or manifest.ranks == ranks.size:
        own = manifest.own[ranks.rank if manifest.own[1:] else 0]
        return own, own["generators"]
    first, *others = manifest.own
    if run.loaders and any(own["loaders"] != first["loaders"] for own in others):
        raise CheckpointError(
            f"each of the {manifest.ranks} ranks that saved has a loader at another place; there "
            f"{'are' if ranks.size > 1 else 'is'} {ranks.size} now: leave out loader= and set its place yourself, or "
            f"load on {manifest.ranks} ranks."
        )
    states = first["generators"]
    unlike = {name for name in states if any(own["generators"].get(name) != states[name] for own in others)}
    if unlike and ranks.rank == 0:
        _log.warning(
            "the random numbers of %s had gone different ways on the %d ranks that saved, and now there %s %d: the "
            "state that your script seeded is kept. What the step draws (dropout) goes on as it was; what is drawn "
            "outside of it (the order of samples, augmentation) is drawn anew.",
            " and ".join(sorted(unlike)), manifest.ranks, "are" if ranks.size > 1 else "is", ranks.size,
        )  # fmt: skip
    return first, {name: state for name, state in states.items() if name not in unlike}
