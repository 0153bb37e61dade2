"""Models with two layers of experts, by the way in which the mixture is written: those that an axis `ep` divides."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from autopar.machines import Machine
from benchmarks.spellings import expert_spellings as ways
from benchmarks.spellings import expert_variants as variants
from benchmarks.spellings.expert_spellings import layers, tokens

# Messages and calls take no time to start: tokens go to experts however narrow they are.
AT_ONCE = Machine.flat(1e6, 1e6, 1e3, 0.0, 0.0)
LOOPS = (
    ways.where_, ways.stacked_where, ways.transposed_where, ways.mixtral, ways.nonzero, ways.any_place, ways.many_hot,
    ways.masked, ways.dropped, ways.dropped_hit, ways.dropped_mask, ways.counted, ways.counted_hot, ways.counted_items,
    ways.counted_table, ways.counted_masks, ways.flat, ways.columns, variants.unique, variants.unique_list,
    variants.pairs, variants.unbound, variants.turned_pairs, variants.as_tuple, variants.argwhere,
    variants.split_pairs, variants.token_numbers, variants.listed, variants.makemoe, variants.hashed,
    variants.left_out, ways.capacity, ways.switch,
)  # fmt: skip
SORTED = (
    ways.sorted_, ways.gshard, ways.titan, ways.megatron, ways.moe_infer, ways.slices, ways.written,
    variants.tensor_split, variants.tensor_split_list, variants.last_pieces,
)  # fmt: skip
ROOMS = (variants.tec, variants.bmm, variants.expert_choice, variants.expert_choice_hot, variants.soft,
         variants.switch_room)  # fmt: skip
ONE_EXPERT = (variants.hashed, ways.nonzero, ways.capacity, ways.switch)  # of each row
COUPLED = (*ROOMS, ways.capacity, ways.switch)  # rows of the whole batch meet: there are no micro-batches


def is_stacked(way: Callable[..., Tensor]) -> bool:
    """True for a way whose experts' matrices are two parameters."""
    source = inspect.getsource(way)
    return "m.up" in source or "_experts(" in source


def model_of(way: Callable[..., Tensor]) -> nn.Module:
    """Two layers with mixtures of a way."""
    return layers(way, is_stacked(way), 1 if way in ONE_EXPERT else 2)


def _case(way: Callable[..., Tensor]) -> tuple[nn.Module, Any, Any]:
    return model_of(way), None, tokens()


# The model, its loss function and a batch, by the name of the way; none whose experts choose rows, for which of rows
# that are alike they choose hangs on how these were rounded.
MODELS: dict[str, Callable[[], tuple[nn.Module, Any, Any]]] = {
    way.__name__: partial(_case, way)
    for way in (*LOOPS, *SORTED, *ROOMS)
    if way not in (variants.expert_choice, variants.expert_choice_hot)
}
