"""Check the options of a step where they come in: by keyword, from a `Job` or from the command line."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, Literal, Unpack, get_args

import torch

from autopar.errors import AutoparError, CompileError, PlanError
from autopar.ir.options import StepKeywords, StepOptions, read_bytes
from autopar.passes.schedules import check_schedule_name

Graphs = bool | Literal["dry-run"]
OnNonFinite = Literal["stop", "skip"]
# What Accelerate, DeepSpeed, FSDP, Lightning and Megatron-LM call what is an option here.
ELSEWHERE = {
    "criterion": "loss_fn", "loss": "loss_fn", "dtype": "precision", "mixed_precision": "precision",
    "gradient_accumulation_steps": "microbatches", "accumulate_grad_batches": "microbatches",
    "gradient_checkpointing": "recompute", "activation_checkpointing": "recompute", "cpu_offload": "offload",
    "sharding_strategy": "zero", "virtual_stages": "chunks",
}  # fmt: skip
CHECK_EVERY = 100  # training steps from one comparison of replicas to the next


def with_known_names(given: StepKeywords, function: Callable[..., Any] | None = None) -> StepKeywords:
    """Give options back; raise TypeError for one which neither the step nor the function that took it by `**` has, with
    the names that are near."""
    parameters = () if function is None else inspect.signature(function).parameters.values()
    own = [each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD]
    names = [*own, *(each.name for each in fields(StepOptions))]
    unknown = sorted(set(given) - set(names))
    if unknown:
        known = [name for name in names if name == ELSEWHERE.get(unknown[0])]
        near = known or difflib.get_close_matches(unknown[0], names, n=2, cutoff=0.55)
        meant = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
        raise TypeError(f"there is no option '{unknown[0]}'{meant}; there is {', '.join(names)}.")
    return given


def options_of(**keywords: Unpack[StepKeywords]) -> StepOptions:
    """The options, checked as far as they can be without a mesh. What the caller changes later changes none of them.

    Raises LayoutError, ScheduleError, BatchError, CompileError or PlanError, and TypeError for an option that does not
    exist.
    """
    options = StepOptions(**with_known_names(keywords))
    check_schedule_name(options.schedule)
    check_offload(options)
    stages = None if options.stages is None else tuple(options.stages)
    slices = options.slices if isinstance(options.slices, (int, str)) else tuple(options.slices)
    offload = options.offload
    if offload is not None and not isinstance(offload, str):
        offload = dict(offload) if isinstance(offload, Mapping) else tuple(offload)
    reshard, memory = options.reshard_after_forward, options.memory
    reshard = dict(reshard) if isinstance(reshard, Mapping) else reshard
    memory = read_bytes(memory) if isinstance(memory, str) else memory
    options = replace(options, reshard_after_forward=reshard, memory=memory)
    return replace(options, shard=dict(options.shard or {}), stages=stages, slices=slices, offload=offload)


def check_offload(options: StepOptions, graphs: Graphs = False) -> None:
    """Raise PlanError for what goes with nothing that waits in the host's memory."""
    check_limits(options, graphs)
    offloaded = options.offloaded
    if not offloaded.get("activations") and not offloaded.get("parameters"):
        if options.horizon != "auto":
            raise PlanError(
                f'horizon={options.horizon!r} is of offload="activations" or "parameters", neither of which is asked '
                f"for: write both, or none."
            )
        return
    asked = f"offload={options.offload!r}"
    if offloaded.get("parameters") and offloaded.get("optimizer"):
        raise PlanError(
            f"{asked}: an optimizer makes its states where the parameters lie, which is the host's memory. Write "
            f'"parameters" without "optimizer".'
        )
    if options.compile == "inductor":
        raise PlanError(
            f'{asked} with compile="inductor": its code holds no copies that go on beside it. Write compile="executor" '
            f'or "triton", or leave offload out.'
        )
    if graphs:
        raise PlanError(
            f"{asked} with cuda_graphs={graphs!r}: a recording would copy to the buffers of its first step. Leave one "
            f"of them out."
        )


def check_limits(options: StepOptions, graphs: Graphs) -> None:
    """Raise PlanError for a folder of states where none wait, and for a limit of memory beside recordings."""
    offloaded = options.offloaded
    if options.offload_dir is not None and not (offloaded.get("optimizer") or offloaded.get("parameters")):
        raise PlanError(
            f"offload_dir={str(options.offload_dir)!r} is of states that wait, and none do: write "
            f'offload="optimizer" or "parameters" beside it, or leave it out.'
        )
    if options.offload_dir is None and options.files is not None:
        raise PlanError(f"offload={options.offload!r}: say in which folder files may lie, by offload_dir=.")
    if graphs and options.memory is not None:
        raise PlanError(
            f"memory={options.memory!r} with cuda_graphs={graphs!r}: values that it moves would be copied to the "
            f"buffers of the recorded step. Write recompute= in place of memory=, or leave cuda_graphs out."
        )


def check_graphs(wanted: Graphs, device: torch.device) -> None:
    """Raise CompileError for CUDA graphs on a device that has none."""
    if not isinstance(wanted, bool) and wanted != "dry-run":
        raise CompileError(f'cuda_graphs={wanted!r}: write True, False or "dry-run".')
    if wanted is True and device.type != "cuda":
        raise CompileError(
            f"cuda_graphs=True records what a GPU does, and this rank computes on '{device}'. Leave it out here, or "
            f'write "dry-run" to check that the step could be recorded.'
        )
    if wanted is True and importlib.util.find_spec("triton") is None:
        raise CompileError("cuda_graphs=True needs Triton, for random ops that stay on the GPU: pip install triton.")


def check_nonfinite(wanted: object) -> None:
    """Raise AutoparError for what the option `on_nonfinite` cannot be."""
    if wanted is not None and wanted not in get_args(OnNonFinite):
        raise AutoparError(f'on_nonfinite={wanted!r}: write "stop", "skip", or None to go on as plain PyTorch does.')
