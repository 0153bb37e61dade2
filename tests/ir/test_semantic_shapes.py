"""What an op of our own gives is known without its values: the shapes and dtypes of its kernel, on every sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rule_brute_force import Sample, op_of, run
from rule_samples_all import every_sample
from torch.utils import _pytree as pytree

from autopar.passes.rules import TABLE

NAMES = [name for name in TABLE if name.startswith("autopar.") and "chain" not in name]


@pytest.fixture(scope="module")
def samples() -> dict[str, list[Sample]]:
    torch.manual_seed(0)
    return every_sample()


@pytest.mark.parametrize("name", NAMES)
def test_types_are_those_of_the_kernel(name: str, samples: dict[str, list[Sample]]) -> None:
    for one in samples[name]:
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), (one.args, dict(one.kwargs)))
        made = op_of(name)(*args, **kwargs)
        assert _types(made) == _types(run(name, one.args, dict(one.kwargs)))


def _types(made: Any) -> list[tuple[torch.Size, torch.dtype]]:
    return [(each.shape, each.dtype) for each in pytree.tree_leaves(made) if isinstance(each, torch.Tensor)]
