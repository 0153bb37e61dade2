"""Find which part of a batch a call was given on this rank: what the user said of it, or what cannot be mistaken."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.capture.inputs.batch_dims import Dims, dims_by_key, dims_of, keys_of, parameter_names
from autopar.capture.inputs.containers import Parts, put_together
from autopar.capture.python.spots import Numbers
from autopar.errors import BatchError
from autopar.parallel.batches.batch_checks import ALL, with_numbers
from autopar.parallel.batches.local_batch import Portion, found_dims, same_again
from autopar.parallel.session.session import Session


@dataclass(frozen=True, slots=True)
class Given:
    """The arguments of a call on this rank. dims: of each leaf the one that counts samples, if that was said or found.
    portion: of a batch of which each rank has a part."""

    parts: Parts
    dims: Dims | None = None
    portion: Portion | None = None
    names: tuple[str, ...] = ()  # of arguments, by which messages say what to write

    @property
    def whole(self) -> Parts:
        """The same for the whole batch, without data where ranks have parts: what a program is made for."""
        return self.parts if self.portion is None else self.portion.whole(self.parts)

    @property
    def unlike(self) -> Dims | None:
        """The dims in which ranks may have other sizes."""
        if self.portion is None:
            return None
        return (ALL,) * len(self.parts.leaves) if self.portion.is_own else self.dims

    @property
    def shared(self) -> frozenset[int]:
        """The leaves that ranks with parts of their own have alike."""
        return frozenset() if self.portion is None else self.portion.shared(self.parts)

    def agreed(self, portion: Portion | None = None) -> Given:
        """The same, with the sizes that all ranks agreed on."""
        found = portion or self.portion
        return replace(self, portion=found and replace(found, is_agreed=True))

    @property
    def is_unlike(self) -> bool:
        """Whether ranks compute batches of their own, of other shapes, and so run other programs."""
        return self.portion is not None and self.portion.is_own and not self.portion.is_even

    def check_first(self) -> None:
        """Raise BatchError for what cannot be the first batch of a model."""
        if self.is_unlike:
            raise BatchError(
                'batch="ddp": the first batch decides how parameters lie, and has other shapes on other ranks. Begin '
                "with one of the same shapes on every rank: model.prepare(*batch) takes one on the meta device."
            )

    def arguments(self, numbers: Numbers) -> Any:
        """The positional and keyword arguments of the whole batch, with these numbers among them."""
        whole = with_numbers(self.whole, numbers)
        return put_together(whole.form, whole.leaves)


class Portions:
    """Of the calls of one parallel module."""

    def __init__(self, session: Session) -> None:
        settings = session.settings
        self.world = session.world
        self._batch = settings.batch if self.world.places > 1 else "global"
        self._said = settings.options.batch_dims
        forward = parameter_names(session.store.model.forward, behind=0)
        trained = forward if settings.loss_fn is None else parameter_names(settings.loss_fn, behind=1)
        self._names = {True: trained, False: forward}
        self._known: dict[Hashable, Dims] = {}  # of calls whose dims were found, once their program was made

    def of(self, parts: Parts, train: bool) -> Given:
        """The arguments of a call. Raises BatchError where it cannot be told which dim of what counts the samples."""
        said, is_certain = self._dims_said(parts, train)
        if self._batch == "global":
            return Given(parts, said)
        if self._batch == "ddp":
            return Given(parts, said, Portion.own(parts, self.world))
        # What was said is of training: of the module's own arguments more is said by their names.
        names = self._names[False] if self._said is not None and not train else ()
        if said is not None:
            return Given(parts, said, Portion.of(parts, said, self.world, is_certain), names)
        known = self._known.get(structure_of(parts, train))
        if known is not None:
            same_again(known, parts)
            return Given(parts, known, Portion.of(parts, known, self.world, False), names)
        dims = found_dims(parts)
        return Given(parts, dims, Portion.of(parts, dims, self.world, False), names)

    def learn(self, given: Given, train: bool) -> None:
        """Remember what was found: a later batch of the same structure may have other sizes alike by chance."""
        if given.portion is not None and not given.portion.is_said:
            self._known[structure_of(given.parts, train)] = given.portion.dims

    def _dims_said(self, parts: Parts, train: bool) -> tuple[Dims | None, bool]:
        """What the user said of the call, and whether it is certain: it was said of the arguments of a training step,
        and for others goes by their names; where a name is unknown by their place, which is a guess."""
        said = self._said
        if said is None:
            return None, False
        if train or not isinstance(said, (Mapping, tuple, list)):
            return dims_of(said, parts, self._names[train], self._names[not train]), True
        chosen: dict[int | str, Any] = {}
        is_certain = True
        for key in keys_of(parts):
            found = self._of_argument(key, said)
            if found is None:
                return None, False
            chosen[key], certain = found
            is_certain &= certain
        return dims_by_key(chosen, parts), is_certain

    def _of_argument(self, key: int | str, said: Any) -> tuple[Any, bool] | None:
        """What was said of an argument of the module, and whether that is certain."""
        forward, trained = self._names[False], self._names[True]
        name = key if isinstance(key, str) else forward[key] if key < len(forward) else None
        if isinstance(said, Mapping):
            return (said[name], True) if name in said else None
        if name in trained and trained.index(name) < len(said):
            return said[trained.index(name)], True
        is_place = isinstance(key, int) and key < len(said)
        return (said[key], trained == forward) if is_place else None  # type: ignore[index]


def structure_of(parts: Parts, train: bool) -> Hashable:
    """What calls have alike that differ in sizes alone."""
    return train, parts.form, tuple(leaf.ndim for _, leaf in parts.tensors())
