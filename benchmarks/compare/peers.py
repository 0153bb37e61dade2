"""The sides: each makes a function that trains one step and returns the loss. All but ours are as people write them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel import loss_parallel as sharded_loss

from benchmarks.compare.context import ulysses, zigzag_ring
from benchmarks.compare.experts import spread
from benchmarks.compare.models import Step, batch_of, loss_fn, model_of, optimizer_of, plain
from benchmarks.compare.pipelines import pipelined
from benchmarks.compare.sharded import checkpointed, fully_sharded, saved_on_host, zero_redundancy


def ours(name: str, mesh: str, device: str, options: dict[str, Any]) -> Step:
    import autopar

    model = autopar.parallelize(model_of(name), mesh, loss_fn=loss_fn, device=device, **options)
    x, y = batch_of(name, device)
    optimizer = optimizer_of(model)

    def step() -> Tensor:
        loss: Tensor = model.forward_backward(x, y)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def eager(name: str, device: str, compiled: bool = False) -> Step:
    """One device, without or with torch.compile."""
    model = model_of(name).to(device)
    return plain(torch.compile(model) if compiled else model, *batch_of(name, device))  # type: ignore[arg-type]


def data_parallel(name: str, device: str, compiled: bool = False) -> Step:
    """DistributedDataParallel, each rank on its half of the batch; gradients are views of the buckets."""
    from torch.nn.parallel import DistributedDataParallel

    x, y = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch_of(name, device))
    model: Any = DistributedDataParallel(model_of(name).to(device), gradient_as_bucket_view=True)
    return plain(torch.compile(model) if compiled else model, x, y)


def tensor_parallel(name: str, device: str, loss_parallel: bool = False, sequence: bool = False) -> Step:
    """Megatron's layout by hand: columns, then rows; embedding and head by vocabulary.

    sequence: the plan of PyTorch's tutorial on tensor parallelism, for the Llama (the GPT adds positions of the whole
    sequence), with its loss_parallel.
    """
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model: Any = model_of(name).to(device)
    loss_parallel |= sequence
    logits: Any = Shard(-1) if loss_parallel else Replicate()
    # In place of None torch takes its own default.
    between: dict[str, Any] = {"output_layouts": Shard(1)} if sequence else {}
    styles: dict[str, Any] = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), **between),
        "blocks.*.attn.[qkv]": ColwiseParallel(),
        "blocks.*.attn.o": RowwiseParallel(**between),
        "blocks.*.mlp.gate": ColwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(**between),
        "head": ColwiseParallel(
            input_layouts=Shard(1) if sequence else Replicate(),
            output_layouts=logits,
            use_local_output=not loss_parallel,
        ),
    }
    if sequence:
        for part in ("blocks.*.attn_norm", "blocks.*.mlp_norm", "norm"):
            styles[part] = SequenceParallel()
        for part in ("blocks.*.attn", "blocks.*.mlp"):
            styles[part] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    if name == "gpt":
        del styles["blocks.*.mlp.gate"]
    parallelize_module(model, mesh, styles)
    if name == "gpt":
        model.head.weight = model.tokens.weight
        for block in model.blocks:
            block.attn.heads //= mesh.size()
    return plain(model, *batch_of(name, device), sharded_loss if loss_parallel else contextlib.nullcontext)


def sequence_parallel(name: str, device: str) -> Step:
    """Ours on tp with sequence parallelism, the other way to split a sequence."""
    return ours(name, f"tp={dist.get_world_size()}", device, {"sequence_parallel": True})


PEERS: dict[str, Callable[[str, str], Step]] = {
    "eager": eager,
    "torch.compile": lambda name, device: eager(name, device, compiled=True),
    "DDP": data_parallel,
    "DDP torch.compile": lambda name, device: data_parallel(name, device, compiled=True),
    "DTensor": tensor_parallel,
    "DTensor loss_parallel": lambda name, device: tensor_parallel(name, device, loss_parallel=True),
    "DTensor SequenceParallel": lambda name, device: tensor_parallel(name, device, sequence=True),
    "zigzag ring": zigzag_ring,
    "Ulysses": ulysses,
    "our tp and sp": lambda name, device: ours(
        name, f"tp={dist.get_world_size()}", device, {"sequence_parallel": True}
    ),
    "all-to-all": spread,
    "our dp": lambda name, device: ours(name, f"dp={dist.get_world_size()}", device, {}),
    "our tp": lambda name, device: ours(name, f"tp={dist.get_world_size()}", device, {}),
    "FSDP2 CPUOffloadPolicy": partial(fully_sharded, on_host=True),
    "save_on_cpu": saved_on_host,
    "FSDP2": fully_sharded,
    "DDP ZeroRedundancyOptimizer": zero_redundancy,
    "DDP checkpoint": checkpointed,
    "pipelining 2+2": lambda name, device: pipelined(name, device, 2),
    "pipelining 3+1": lambda name, device: pipelined(name, device, 3),
}
