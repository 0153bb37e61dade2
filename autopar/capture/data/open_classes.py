"""`F.one_hot` by a number of classes that is a tensor: taken where it is cut at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from autopar.capture.data.known_values import leaves
from autopar.capture.refusals.constructs import CLASSES
from autopar.capture.refusals.explain_failure import size_refusal
from autopar.capture.refusals.location import Line
from autopar.errors import CaptureError

Tensor = torch.Tensor


class OpenClasses:
    """What `F.one_hot` gives for a number of classes that is a tensor: known once it is cut to some of them,
    `[..., :size]`. Each step checks that there are so many."""

    def __init__(self, index: Tensor, count: Tensor, line: Line | None) -> None:
        self._index, self._count, self._line = index, count, line

    def __getitem__(self, items: Any) -> Tensor:
        *before, last = items if isinstance(items, tuple) else (items,)
        is_cut = isinstance(last, slice) and last.start in (None, 0) and last.step in (None, 1)
        size = last.stop if is_cut else None
        if not isinstance(size, int) or size < 0 or not self._is_whole(before):
            raise self._refused()
        if not torch.ge(self._count, size).all():
            raise self._refused()
        classes = torch.arange(size, device=self._index.device)
        return (self._index.unsqueeze(-1) == classes).to(torch.int64)

    def _is_whole(self, items: list[Any]) -> bool:
        """True for what leaves all of the index as it is."""
        if items.count(Ellipsis) == 1 and len(items) <= self._index.ndim + 1:
            items = [item for item in items if item is not Ellipsis]
        elif len(items) != self._index.ndim:
            return False
        return all(isinstance(item, slice) and item == slice(None) for item in items)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("__") else self._refused()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = next(leaf for leaf in leaves((args, kwargs or {})) if isinstance(leaf, cls))
        raise found._refused()

    def _refused(self) -> CaptureError:
        return size_refusal(CLASSES, self._line, may_specialize=False)


def cut_later(function: Any, args: Any, kwargs: Any, line: Line | None) -> Callable[[], Any] | None:
    """A call of `F.one_hot` whose number of classes is a tensor; None for another one."""
    if function is not F.one_hot:
        return None

    def given(input: Tensor, num_classes: Any = -1) -> tuple[Tensor, Any]:
        return input, num_classes

    index, count = given(*args, **kwargs)
    return partial(OpenClasses, index, count, line) if isinstance(count, Tensor) and count.numel() == 1 else None
