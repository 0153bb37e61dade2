"""The sequences that a program cuts out of its batch before any weight sees them: `x[:, :-1]` of tokens `x`.

No split of the batch gets through such a cut, so that the search takes the dims of what is cut for dims of the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from autopar.passes.rules.splits import Split
from autopar.passes.search.items import Classes


def cut_from_batch(classes: Classes) -> Iterator[tuple[int, int]]:
    """The results that are computed of the batch and of no parameter, as (class, result)."""
    trained = [i for i, item in enumerate(classes.items) if item.role and item.role.entry.kind == "parameter"]
    fed = set(trained)
    while trained:
        users = {user for user, _ in classes.users(trained.pop())} - fed
        fed |= users
        trained += users
    for i in sorted(classes.of_batch - fed):
        if classes.items[i].rule is not None:
            yield from ((i, result) for result in range(len(classes.items[i].types)))


def cut_dims(
    classes: Classes, value: tuple[int, int], reached: Collection[Split], outers: tuple[int, ...]
) -> list[Split]:
    """Splits of the dims of a result, but the first, which its call cannot split and no split reached."""
    rule = classes.items[value[0]].rule
    assert rule is not None
    known = {dim for dim, _ in reached}
    dims = enumerate(rule.results[value[1]])
    cut = [dim for dim, names in dims if dim and dim not in known and rule.replicated & {*names}]
    return [(dim, outer) for dim in cut for outer in outers]
