"""The samples of every row of the rule table in one mapping."""

from __future__ import annotations

import torch
from rule_samples import (
    Samples,
    creation_samples,
    index_samples,
    piece_samples,
    product_samples,
    reduction_samples,
    view_samples,
)
from rule_samples_linalg import (
    ctc_samples,
    distance_samples,
    linalg_samples,
    lookup_samples,
    margin_samples,
    place_samples,
)
from rule_samples_nn import (
    attention_samples,
    convolution_samples,
    loss_samples,
    norm_samples,
    pointwise_samples,
    random_samples,
    spatial_samples,
    window_samples,
)

from autopar.ir.ops.names import find_target
from autopar.ir.ops.op_facts import facts_of
from autopar.passes.rules import TABLE

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
    window_samples,
    spatial_samples,
    loss_samples,
    random_samples,
    linalg_samples,
    distance_samples,
    place_samples,
    lookup_samples,
    margin_samples,
    ctc_samples,
)


def every_sample() -> Samples:
    """Draw the samples of every op that has any."""
    torch.manual_seed(0)
    found = {name: one for make in _MAKERS for name, one in make().items()}
    pointwise = (name for name in TABLE if facts_of(find_target(name)).pointwise)
    found |= {name: pointwise_samples(name) for name in pointwise if name not in found}
    return found
