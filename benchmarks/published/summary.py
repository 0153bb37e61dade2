"""What a table of predictions says as a whole: errors, rank correlation, and the regret of choosing by it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from scipy.stats import spearmanr

from benchmarks.published.case import STEP
from benchmarks.published.predict import Predicted
from benchmarks.records import Figure


def summary(found: Sequence[Predicted]) -> Iterator[str]:
    """A line for each measured quantity of a file, without outliers a further one, and one of regret."""
    for what in found[0].case.measured:
        yield f"{what}: {_errors(found, what)}"
        proper = [row for row in found if not row.case.is_outlier]
        if len(proper) < len(found):
            yield f"{what} without {len(found) - len(proper)} outliers: {_errors(proper, what)}"
    groups = _groups([row for row in found if STEP in row.case.measured])
    regrets = {group: regret(rows) for group, rows in groups.items() if len(rows) > 1}
    if regrets:
        mean, worst = sum(regrets.values()) / len(regrets), max(regrets, key=lambda group: regrets[group])
        yield f"regret of choosing in {len(regrets)} groups: mean {mean:.1%}, worst {regrets[worst]:.1%} ({worst})"


def figures(name: str, found: Sequence[Predicted]) -> Iterator[Figure]:
    """Errors of a file as they are recorded."""
    for what in found[0].case.measured:
        errors = [100 * abs(row.error(what)) for row in found]
        yield Figure(f"{name}, {what}", f"mean error of {len(errors)} rows", "%", sum(errors) / len(errors))
        yield Figure(f"{name}, {what}", f"largest error of {len(errors)} rows", "%", max(errors))


def _errors(found: Sequence[Predicted], what: str) -> str:
    errors = [abs(row.error(what)) for row in found]
    text = f"{len(found)} rows, mean error {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}"
    if len(found) > 2:
        rank = spearmanr([row.case.measured[what] for row in found], [row.values[what] for row in found]).statistic
        text += f", Spearman {rank:.2f}"
    return text


def regret(rows: Sequence[Predicted]) -> float:
    """How much longer the plan takes that is predicted fastest than the fastest measured one, as a part of that."""
    choice = min(rows, key=lambda row: row.values[STEP])
    return choice.case.measured[STEP] / min(row.case.measured[STEP] for row in rows) - 1


def _groups(found: Sequence[Predicted]) -> Mapping[str, list[Predicted]]:
    groups: dict[str, list[Predicted]] = defaultdict(list)
    for row in found:
        groups[row.case.group].append(row)
    return groups
