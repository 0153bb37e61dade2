"""Every row of the rule table by brute force; rows that are wrong on purpose must be refused."""

from __future__ import annotations

import pytest
import torch
from rule_brute_force import Sample, WrongRule, check, make_call, sample
from rule_samples import (
    creation_samples,
    index_samples,
    piece_samples,
    product_samples,
    r,
    reduction_samples,
    view_samples,
)
from rule_samples_nn import (
    attention_samples,
    convolution_samples,
    loss_samples,
    norm_samples,
    pointwise_samples,
    random_samples,
    spatial_samples,
)

from autopar.passes.rules import TABLE, rule_of
from autopar.passes.rules.build import build, named, replicated
from autopar.passes.rules.notation import instantiate, parse
from autopar.passes.rules.pointwise import pointwise
from autopar.passes.rules.rule import Call, Row, Rule, allows

_MAKERS = (
    view_samples,
    piece_samples,
    reduction_samples,
    product_samples,
    index_samples,
    creation_samples,
    attention_samples,
    norm_samples,
    convolution_samples,
    spatial_samples,
    loss_samples,
    random_samples,
)


@pytest.fixture(scope="module")
def samples() -> dict[str, list[Sample]]:
    torch.manual_seed(0)
    found = {name: one for make in _MAKERS for name, one in make().items()}
    found |= {name: pointwise_samples(name) for name, row in TABLE.items() if row.pointwise and name not in found}
    return found


def test_every_row_has_a_sample_and_every_sample_a_row(samples: dict[str, list[Sample]]) -> None:
    assert sorted(name for name in TABLE if not samples.get(name)) == []
    assert sorted(set(samples) - set(TABLE)) == []


@pytest.mark.parametrize("name", sorted(TABLE))
def test_row(name: str, samples: dict[str, list[Sample]]) -> None:
    torch.manual_seed(0)
    for one in samples[name]:
        check(name, one)
