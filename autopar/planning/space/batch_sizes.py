"""The batches that a plan may be for, as a person asks for them: `512`, `256,512`, `256-1024`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.errors import PlanError, divisors

MOST = 8  # batches of a range that are planned for, if it has not more with a factor of one binary digit
OF_A_BATCH = ("rows", "microbatches")  # what makes one, with a number of ranks


def read_batches(text: str, gpus: int) -> Sequence[int]:
    """The rows of a step, the fewest first. Of a range those that many plans divide (`batches_between`). Raises
    PlanError for what is no number of rows, and for a range that ends before it begins."""
    low, dash, high = text.partition("-")
    words = [low, high] if dash else text.split(",")
    rows = [int(word) if word.strip().isdecimal() else 0 for word in words]
    if not all(rows):
        raise PlanError(f"--batch {text}: write rows of a step, 1 or more: 512, several 256,512 or a range 256-1024.")
    if dash and rows[0] > rows[1]:
        raise PlanError(f"--batch {text}: the range ends with {rows[1]} rows, before it begins. Write {high}-{low}.")
    return batches_between(rows[0], rows[1], gpus) if dash else sorted(set(rows))


def batches_between(low: int, high: int, gpus: int) -> Sequence[int]:
    """Batches of a range that many plans divide: the devices' number of rows times whole numbers, and its divisors.
    Of more than MOST those with factors of few binary digits, which lie ever further apart: 1, 2, 4, 8, ... times the
    devices have one digit, 1, 2, 3, 4, 6, 8, 12, ... two. Where the range has none of them, multiples of the largest
    divisor of the devices that has one there."""
    sizes = divisors(gpus, gpus)
    unit = next(size for size in reversed(sizes) if high // size * size >= low)
    parts = [part for part in sizes if low <= gpus // part <= high]

    def batches(digits: int) -> set[int]:
        whole = {unit * times for times in _short(-(-low // unit), high // unit, digits)}
        return whole | {gpus // part for part in parts if part in _short(part, part, digits)}

    batches_between = batches(1)
    for digits in range(2, high.bit_length() + 1):
        more = batches(digits)
        if len(more) > MOST:
            break
        batches_between = more
    return sorted(batches_between)


def _short(low: int, high: int, digits: int) -> set[int]:
    """The numbers of a range, 1 and more, that have at most so many binary digits without the zeros at their end."""
    return {
        times << zeros
        for zeros in range(high.bit_length())
        for times in range(max(1, -(-low >> zeros)), min(high >> zeros, 2**digits - 1) + 1)
    }


def batches_of(fixed: Mapping[str, Any], gpus: int) -> Sequence[int]:
    """The batches that a fixed number of micro-batches of fixed rows make, with as many data ranks as divide the
    devices; none where one of the two is open."""
    if not all(name in fixed for name in OF_A_BATCH):
        return ()
    return [ranks * fixed["rows"] * fixed["microbatches"] for ranks in divisors(gpus, gpus)]
