"""Find which part of a batch a call was given on this rank: what the user said of it, or what cannot be mistaken."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from autopar.capture.inputs.batch_dims import Dims, dims_by_key, dims_of, keys_of, parameter_names, shown, spelled
from autopar.capture.inputs.containers import Parts, put_together
from autopar.capture.python.spots import Numbers
from autopar.capture.step_kind import StepKind
from autopar.compiler.batch_rows import BatchRows, follow_rows
from autopar.compiler.lowered import Lowered
from autopar.errors import BatchError, CaptureError, RuleError
from autopar.parallel.batches.batch_checks import ALL
from autopar.parallel.batches.local_batch import Portion, found_dims, same_again
from autopar.parallel.session.session import Session
from autopar.passes.rules import table_of

_FOLLOWED = "precision"  # the last pass before layouts


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
        """The arguments of the whole batch, without data where ranks have parts: what a program is made for."""
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
        """Take the sizes that all ranks agreed on."""
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
        leaves = list(self.whole.leaves)
        for (i, _, *name), number in numbers.items():
            if not name:
                leaves[i] = number
        return put_together(self.parts.form, leaves)

    @contextmanager
    def carrying(self, numbers: Numbers) -> Iterator[None]:
        """Have the tensors carry the attributes that stand among `numbers`, in place of some of their own."""
        leaves, kept = self.parts.leaves, list[tuple[dict[str, Any], str, Any]]()
        for (i, _, *names), value in numbers.items():
            for name in names:
                held = vars(leaves[i])
                kept.append((held, name, held[name]))
                held[name] = value
        try:
            yield
        finally:
            for held, name, value in kept:
                held[name] = value


class Portions:
    """Finds the portions of the calls of one parallel module."""

    def __init__(self, session: Session) -> None:
        settings = session.settings
        self.world = session.world
        self._batch = settings.batch if self.world.places > 1 else "global"
        self._said = settings.options.batch_dims
        forward = parameter_names(session.store.model.forward, behind=0)
        trained = forward if settings.loss_fn is None else parameter_names(settings.loss_fn, behind=1)
        self._names = {True: trained, False: forward}
        self._known: dict[Hashable, Dims] = {}  # of calls whose dims were found, once their program was made

    def of(self, parts: Parts, kind: StepKind) -> Given:
        """The arguments of a call. Raises BatchError where it cannot be told which dim of what counts the samples."""
        said, is_certain = self._dims_said(parts, kind)
        if self._batch == "global":
            return Given(parts, said)
        if self._batch == "ddp":
            return Given(parts, said, Portion.own(parts, self.world))
        # What was said is of training: of the module's own arguments more is said by their names.
        names = self._names[False] if self._said is not None and not kind.gives_loss else ()
        if said is not None:
            return Given(parts, said, Portion.of(parts, said, self.world, is_certain), names)
        known = self._known.get(structure_of(parts, kind))
        if known is not None:
            same_again(known, parts)
            return Given(parts, known, Portion.of(parts, known, self.world, False), names)
        dims = found_dims(parts)
        return Given(parts, dims, Portion.of(parts, dims, self.world, False), names)

    def learn(self, given: Given, kind: StepKind) -> None:
        """Remember what was found: a later batch of the same structure may have other sizes alike by chance."""
        if given.portion is not None and not given.portion.is_said:
            self._known[structure_of(given.parts, kind)] = given.portion.dims

    def _dims_said(self, parts: Parts, kind: StepKind) -> tuple[Dims | None, bool]:
        """What the user said of the call, and whether it is certain: it was said of the arguments of a training step,
        and for others goes by their names; where a name is unknown by their place, which is a guess."""
        said = self._said
        if said is None:
            return None, False
        named = kind.gives_loss
        if named or not isinstance(said, (Mapping, tuple, list)):
            return dims_of(said, parts, self._names[named], self._names[not named]), True
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


def structure_of(parts: Parts, kind: StepKind) -> Hashable:
    """What calls have alike that differ in sizes alone."""
    return kind.gives_loss, parts.form, tuple(leaf.ndim for _, leaf in parts.tensors())


# -- whether parts may be put together: what the captured program does with them --------------------------------------


class FollowedSamples:
    """Where rows go in the programs of one parallel module. A batch of one sample has no rows to follow: its program
    has those of an earlier one of the same structure."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: dict[Hashable, BatchRows] = {}

    def rows(self, compiled: Lowered, given: Given, kind: StepKind) -> BatchRows | None:
        """Where the rows of a batch, of which ranks have parts, go in a program. Raises what `checked` does."""
        portion = given.portion
        if portion is None or portion.is_own:
            return None
        structure = structure_of(given.parts, kind)
        if any(sum(portion.counts(leaf)) < 2 for leaf in portion.leaves):
            return self._known.get(structure)
        dims = {str(i): dim for i, dim in enumerate(portion.dims)}
        rows = follow_rows(dict(compiled.history)[_FOLLOWED], dims, table_of(compiled.plan), self._model)
        self._known[structure] = checked(rows, portion, given.parts, given.names)
        return rows


def checked(rows: BatchRows, portion: Portion, parts: Parts, names: Sequence[str]) -> BatchRows:
    """The rows of a program. Raises BatchError where rows are looked up by numbers that a rank knows of its own part
    alone, and where rows meet though nobody said which dim counts them. names: as of `Given`."""
    numbered = rows.numbered
    how = shown(parts, portion.dims)
    if numbered is not None:
        raise BatchError(
            f'batch="local" puts the parts of all ranks together ({how}), and {numbered}: a number that means a row of '
            f"one rank's part means another one in the whole. Pass the whole batch on every rank, with numbers for all "
            f'of it (batch="global"), or look rows up within each sample.'
        )
    why = str(rows.meetings[0]) if rows.meetings else _apart(rows, portion, parts)
    if why and not portion.is_said:
        raise BatchError(
            f'batch="local" puts the parts of all ranks together on the dim that counts samples: by their shapes '
            f"{how}. But {why}: another dim may be meant, such as the one behind a sequence. Write "
            f"{spelled(parts, portion.dims, names)} if it is this one, and the step is to be that of the whole batch; "
            f"else the other dim, and None for what all ranks share."
        )
    return rows


def _apart(rows: BatchRows, portion: Portion, parts: Parts) -> str:
    """Which tensors' samples never stand side by side: what makes them one batch is not seen."""
    used = [leaf for leaf in portion.leaves if leaf in rows.used]
    apart = [leaf for leaf in used if not rows.are_joined(used[0], leaf)]
    names = [f"{parts.paths[leaf]} {list(parts.leaves[leaf].shape)}" for leaf in apart]
    return f"no row of {' and '.join(names)} stands beside one of {parts.paths[used[0]]}" if names else ""


@contextmanager
def naming_parts(given: Given) -> Iterator[None]:
    """Say of an error in the model how parts were put together, of which it may come."""
    try:
        yield
    except (CaptureError, RuleError) as error:
        portion, parts = given.portion, given.parts
        if portion is None or portion.is_own:
            raise
        more = (
            f'\nWith batch="local" the parts of {len(portion.sizes)} ranks were put together by '
            f"{'batch_dims' if portion.is_said else 'their shapes'}: {shown(parts, portion.dims)}. If another dim "
            f"counts samples, or none does, say so in place of {spelled(parts, portion.dims, given.names)}."
        )
        error.args = (f"{error}{more}",)
        raise
