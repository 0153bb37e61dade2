"""Results of ops are remembered by the form of their operands, and by nothing less."""

from __future__ import annotations

from typing import Any

import torch

from autopar.capture.trace.results import Results, _memory
from autopar.torch_compat import FakeTensorMode, storage_of

aten = torch.ops.aten


def test_a_call_is_remembered_by_the_form_of_its_operands() -> None:
    """The same op on another shape, dtype, stride or number is another call; a repeated one asks nobody."""
    fake, asked_for = FakeTensorMode(), list[Any]()
    _memory.cache_clear()
    results = Results(fake)

    def call(*args: Any, **kwargs: Any) -> Any:
        asked_for.append(args)
        return aten.cumsum.default(*args, **kwargs)

    with fake:
        x, y = torch.empty(3, 4), torch.empty(3, 4, dtype=torch.int64)
        variants = [(x, 0), (x, 1), (x.t(), 0), (y, 0), (torch.empty(4, 3), 0)]
        first = [results.call(call, aten.cumsum.default, args, {}) for args in variants]
        assert len(asked_for) == len(variants)
        again = [results.call(call, aten.cumsum.default, args, {}) for args in variants]
    assert len(asked_for) == len(variants)
    for one, other in zip(first, again, strict=True):
        assert (one.shape, one.stride(), one.dtype, one.device) == (
            other.shape,
            other.stride(),
            other.dtype,
            other.device,
        )
        assert storage_of(one) != storage_of(other)


def test_a_view_that_is_remembered_shows_its_own_operand() -> None:
    fake = FakeTensorMode()
    results = Results(fake)
    with fake:
        for _ in range(2):
            x = torch.empty(6, 4)
            for func, args in ((aten.slice.Tensor, (0, 1, 5)), (aten.select.int, (1, 2)), (aten.unbind.int, ())):
                made, plain = results.call(func, func, (x, *args), {}), func(x, *args)
                made, plain = (list(each) if isinstance(each, (tuple, list)) else [each] for each in (made, plain))
                assert all(storage_of(each) == storage_of(x) for each in made)
                assert [each.storage_offset() for each in made] == [each.storage_offset() for each in plain]
