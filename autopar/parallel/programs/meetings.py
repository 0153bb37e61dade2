"""Check that the parts of all ranks may be put together as they were: by what the captured program does with them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from autopar.capture.inputs.batch_dims import shown, spelled
from autopar.capture.inputs.containers import Parts
from autopar.compiler.batch_rows import BatchRows, follow_rows
from autopar.compiler.lowered import Lowered
from autopar.errors import BatchError, CaptureError, RuleError
from autopar.parallel.batches.local_batch import Portion
from autopar.parallel.programs.portions import Given, structure_of
from autopar.passes.rules import table_of

__all__ = ["BatchRows", "FollowedSamples", "naming_parts"]


class FollowedSamples:
    """Where rows go in the programs of one parallel module. A batch of one sample has no rows to follow: its program
    has those of an earlier one of the same structure."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: dict[Hashable, BatchRows] = {}

    def rows(self, compiled: Lowered, given: Given, train: bool) -> BatchRows | None:
        """Where the rows of a batch, of which ranks have parts, go in a program. Raises what `checked` does."""
        portion = given.portion
        if portion is None or portion.is_own:
            return None
        structure = structure_of(given.parts, train)
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


_FOLLOWED = "precision"  # the last pass before layouts


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
