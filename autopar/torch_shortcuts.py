"""Private torch names that do what public ones do, in less time, each with its reason.

- `Tensor._make_subclass`, `torch._C._set_throw_on_mutable_data_ptr`, `torch._C._DisableTorchDispatch`: what the
  constructor of FakeTensor does, which costs as much as all else together that a capture does for an op.
- `Graph._graph_namespace`, `_insert`, `_find_nodes_lookup_table`, `_len`, `_target_to_str`: what `Graph.node_copy` does
  for a node under a name that is free, in a third of its time: it takes names and arguments apart again, which it has
  made itself.
  And what `Graph.create_node` does, which looks into all arguments for symbols from torch 2.13 on.
- `torch._C._increment_version`: what `torch.autograd.graph.increment_version` calls, behind checks that take longer.
- `torch._foreach_copy_`: many small tensors copied in one launch, as optimizers do; there is no public way.
- `TorchDispatchMode._should_skip_dynamo`: whether `torch.compile` must be kept out of a dispatch mode, at each op.
- `Module._modules`: a model with fewer layers is captured in less time; `named_children` leaves out children that are
  None or there twice, and no public function makes a copy that shares the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from autopar.torch_compat import FakeTensor, FakeTensorMode, TorchDispatchMode

add_to_versions: Callable[[Sequence[torch.Tensor]], None] = torch._C._increment_version


def copy_node(graph: fx.Graph, node: fx.Node, operand: Callable[[fx.Node], Any]) -> fx.Node:
    """Copy a node as `graph.node_copy(node, operand)` does, of a graph without a module."""
    names, name = graph._graph_namespace, node.name
    if name in names._used_names or graph.owning_module is not None:
        return graph.node_copy(node, operand)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), operand)
    made = fx.Node(graph, name, node.op, node.target, args, kwargs, node.type)
    base, number = _parts_of_name(name)
    names._used_names.add(name)
    names._base_count[base] = names._base_count.get(base, 0) if number is None else number
    names._obj_to_name[made] = name
    graph._insert(made)
    graph._find_nodes_lookup_table.insert(made)
    graph._len += 1
    made.meta.update(node.meta)  # (to set an attribute of a node takes it out of the graph's tables and puts it back)
    return made


def add_call(
    graph: fx.Graph, name: str | None, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> fx.Node:
    """Add a call as `graph.create_node("call_function", target, args, kwargs, name)` does, to a graph without a module,
    of arguments among which no size is a symbol: it would look for these."""
    names = graph._graph_namespace
    chosen = names.create_name(name or graph._target_to_str(target), None)
    made = fx.Node(graph, chosen, "call_function", target, args, kwargs)
    names.associate_name_with_obj(chosen, made)
    graph._insert(made)
    graph._find_nodes_lookup_table.insert(made)
    graph._len += 1
    return made


@lru_cache(1 << 14)
def _parts_of_name(name: str) -> tuple[str, int | None]:
    """The name of a node without the number at its end, and that number."""
    base, _, number = name.rpartition("_")
    return (base, int(number)) if base and number.isdecimal() else (name, None)


class DispatchMode(TorchDispatchMode):
    """A dispatch mode of ours: nothing that runs in it is compiled."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def fake_maker(mode: FakeTensorMode) -> Callable[..., FakeTensor]:
    """A function of (shape, stride, offset, dtype, device, shown) that makes tensors of a fake mode. `shown`: the
    tensor in whose memory it lies; None for memory of its own."""
    attributes: dict[torch.device, dict[str, Any]] = {}

    def make(
        shape: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: torch.dtype, device: torch.device,
        shown: FakeTensor | None,
    ) -> FakeTensor:  # fmt: skip
        with torch._C._DisableTorchDispatch():
            inner = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            if shown is not None:
                inner.set_(shown.untyped_storage(), offset, shape, stride)
            if device not in attributes:
                attributes[device] = dict(vars(FakeTensor(mode, inner, device)))
            made: FakeTensor = torch.Tensor._make_subclass(
                FakeTensor, inner, False, dispatch_device=True, device_for_backend_keys=device
            )
            torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(attributes[device])
        return made

    return make


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, of the same dtype: those of one dtype in one launch."""
    for dtype in {source.dtype for source in sources}:
        pairs = [(to, of) for to, of in zip(targets, sources, strict=True) if of.dtype == dtype]
        torch._foreach_copy_([to for to, _ in pairs], [of for _, of in pairs])


def children_of(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """All children of a module by name: those that are None, or there twice, too (`Module._modules`)."""
    return dict(module._modules)


def with_children(module: torch.nn.Module, children: Mapping[str, torch.nn.Module | None]) -> torch.nn.Module:
    """A copy of a module with other children, which shares all else with it."""
    copy: torch.nn.Module = object.__new__(type(module))
    vars(copy).update(vars(module), _modules=dict(children))
    return copy
