"""Every private torch name that autopar uses, each with its reason. torch 2.11 to 2.13.

- `torch._subclasses.FakeTensorMode`: shapes without memory during the capture. The public way to get one
  (`make_fx(tracing_mode="fake")`) needs real tensors as its inputs, which a 70B model has not.
- `torch.utils._pytree`: flattening of nested batches and outputs; transformers registers its outputs here, and
  the public successor does not know them.
- `torch.distributed.tensor.placement_types._StridedShard`: the placement of a fused weight whose every block is
  split (`[3:tp,-]`); DTensor has no public one.
- `torch.ops.aten._scaled_dot_product_flash_attention_for_cpu`: attention that returns its logsumexp, which the
  public function hides (in `runtime/kernels.py`).
"""

from __future__ import annotations

from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_flatten_with_path, tree_map, tree_unflatten

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TreeSpec",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_map",
    "tree_unflatten",
]
